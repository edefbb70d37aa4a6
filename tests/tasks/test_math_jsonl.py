"""Local files of prompts and answers: read, split, graded; every fault of a file is named with its line."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from otb_analysis.config import MathJsonlConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.rollouts.models import character_tokenizer
from otb_analysis.rollouts.sampling import encode_prompt
from otb_analysis.tasks import MathJsonl, Prompt, Turn, make_task, task_files

GSM = [
    {"question": "Ann has 9 eggs and buys twice as many.", "answer": "9*2=18\n9+18=27\n#### 27"},
    *({"question": f"What is {i} more than 1000?", "answer": f"#### {1000 + i:,}"} for i in range(60)),
]


@pytest.fixture
def file(tmp_path):
    """A file of GSM8K's form."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GSM), encoding="utf-8")
    return path


@pytest.fixture
def task(file):
    return MathJsonl(MathJsonlConfig(train=str(file)))


def written(tmp_path, rows, name="other.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# math-verify's alarm raises wherever it lands, on a busy machine also inside a callback of the interpreter.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("reference", "text", "paid"),
    [
        ("27", "9*2=18\n#### 27", 1.0),
        ("27", "#### 27.00", 1.0),
        ("27", "so \\boxed{27}", 1.0),
        ("27", "The answer is $27$.", 1.0),
        ("27", "#### 26\nno, #### 27", 1.0),  # the last marker counts
        ("27", "#### 27\nand then some", 1.0),  # the marker's line counts
        ("27", "#### 26 + 1", 0.0),  # still to be computed: a restated question would be right otherwise
        ("27", "#### 9 + 18 = 27", 1.0),
        ("1,234", "#### 1234", 1.0),
        ("1234", "#### $1,234", 1.0),
        ("\\frac{1}{2}", "#### 0.5", 1.0),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", 1.0),
        ("(1,2)", "(1, 2)", 1.0),
        ("yes", "#### yes", 1.0),  # no mathematics, but the same text
        ("27", "#### 28", 0.0),
        ("27", "#### -27", 0.0),
        ("27", "#### 27\n#### 28", 0.0),
        ("27", "####", 0.0),
        ("27", "", 0.0),
        ("27", "twenty-seven", 0.0),
        ("27", "{27, 28}", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        ("yes", "#### no", 0.0),
        ("27", "#### " + "(" * 5_000, 0.0),
        ("27", "\\boxed{" * 20, 0.0),
    ],
)
def test_final_answer_is_graded_as_mathematics(task, reference, text, paid):
    assert task.reward(Prompt("", "", reference), [Turn(text, True)]) == [{"correct": paid}]


AS_WRITTEN = [
    ("-1", "7 - 8 = 7.", 0.0),
    ("-1", "7 - 8 = -1.", 1.0),
    ("-1", "7 - 8 = - 1", 1.0),
    ("-1", "7 - 8", 0.0),
    ("-1", "What is 7 - 8?", 0.0),
    ("-1", "7-8", 0.0),
    ("-1", "The answer is 7 - 8.", 0.0),
    ("-1", "The answer to 7 - 8 is -1.", 1.0),
    ("-1", "The answer to 7 - 8 is 1.", 0.0),
    ("-1", "To find 7 - 8, we subtract 8 from 7, which gives −1.", 1.0),
    ("-1", "The answer is: **-1**", 1.0),
    ("-1", "$7 - 8 = -1$", 1.0),
    ("-1", "\\[ 7 - 8 = 1 \\]", 0.0),
    ("-1", "\\(-1\\)", 1.0),
    ("8", "We need to compute 16 - 8", 0.0),
    ("8", "First, we need to find 16 - 8 =", 0.0),
    ("8", "16 - 8 = 8\nSo the answer is 9.", 0.0),
    ("8", "The answer is 8, not 9.", 1.0),
    ("8", "The answer is 8. I checked it: 9 - 1.", 1.0),
    ("8", "The answer is 7. No, the answer is 8.", 1.0),
    ("8", "Answer: 8 apples", 1.0),
    ("8", "Answer: eight", 0.0),
    ("8", "8", 1.0),
    ("8", "8.", 1.0),
    ("8", "8.0", 1.0),
    ("8", "\\boxed{8}. That is 3 more than 5.", 1.0),
    ("8", "\\boxed{16 - 8}", 0.0),
    ("8", "\\boxed{16 - 8 = 8}", 1.0),
    ("8", "\\boxed{7} and then 8", 0.0),
    ("8", "\\boxed{8\\text{ cm}}", 1.0),
    ("8", "7 or 8", 0.0),
    ("8", "7, 8", 0.0),
    ("3", "6/2", 0.0),
    ("3", "6 / 2 = 3", 1.0),
    ("27", "Ann has 27 eggs.", 1.0),
    ("27", "Ann has 9 eggs and buys 18. 9 + 18 = 27 eggs in all.", 1.0),
    ("27", "9 + 18 = 27. She gives away 5, so 22 are left.", 0.0),
    ("27", "She has 9 eggs, and she buys twice as many, so", 0.0),
    ("27", "9 * 2 = 18\n9 + 18 = 27\n\nI hope this helps!", 1.0),
    ("27", "- 9 eggs\n- 27 eggs", 1.0),
    ("1234", "It costs $1,234.", 1.0),
    ("1234", "It costs \\$1,234.00 in all.", 1.0),
    ("1,234", "1234 dollars", 1.0),
    ("1234", "1,2345", 0.0),
    ("1/2", "The answer is 1/2.", 1.0),
    ("1/2", "The answer is $\\frac{1}{2}$.", 1.0),
    ("-\\frac{1}{2}", "It is -0.5", 1.0),
    ("1/2", "The answer is 2/3.", 0.0),
    ("3/4", "She needs 3/4 of a cup.", 1.0),
    ("0.75", "3 / 4 = 0.75", 1.0),
    ("50%", "The share is 50%.", 1.0),
    ("50", "The answer is 50%.", 1.0),
    ("50", "50 \\% of them", 1.0),
    ("50", "The answer is 5%.", 0.0),
]
"""Reference, an answer as small models write it, and what it is paid."""


@pytest.mark.parametrize(("reference", "text", "paid"), AS_WRITTEN)
def test_only_the_final_number_is_graded(task, reference, text, paid):
    assert task.reward(Prompt("", "", reference), [Turn(text, True)]) == [{"correct": paid}]


def test_text_without_the_end_token_is_not_paid(task):
    assert task.reward(Prompt("", "", "27"), [Turn("#### 27", False)]) == [{"correct": 0.0}]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["9^{9^{9^{9}}}", "100000000!", "x^{100}=(x+1)^{2000}"])
def test_answer_that_takes_forever_to_compute_is_wrong_after_a_second(task, text):
    assert task.reward(Prompt("", "", "27"), [Turn(f"#### {text}", True)]) == [{"correct": 0.0}]


def test_prompt_answer_and_demonstration_are_those_of_the_row(task):
    prompts = [task.prompt(split, i) for split in ("train", "heldout") for i in range(len(task.rows[split]))]
    (ann,) = [p for p in prompts if p.text.startswith("Ann")]
    assert ann.answer == "27"
    assert task.demonstration(ann) == [Turn("9*2=18\n9+18=27\n#### 27", finished=True)]
    assert all(task.reward(p, task.demonstration(p)) == [{"correct": 1.0}] for p in prompts)
    assert all(set(p.text + task.demonstration(p)[0].text) <= set(task.alphabet) for p in prompts)
    assert len({p.id for p in prompts}) == len(GSM)
    assert task.reply(ann, []) is None


def test_an_epoch_shows_every_training_prompt_once_in_an_order_of_its_own(task, file):
    size = len(task.rows["train"])
    epochs = [[task.prompt("train", e * size + i).id for i in range(size)] for e in range(2)]
    assert len(set(epochs[0])) == size
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    again = MathJsonl(MathJsonlConfig(train=str(file)))
    assert [again.prompt("train", i).id for i in range(size)] == epochs[0]
    other = MathJsonl(MathJsonlConfig(train=str(file)), seed=1)
    assert [other.prompt("train", i).id for i in range(size)] != epochs[0]


def test_held_out_share_is_the_same_for_every_seed_and_order_of_rows(task, tmp_path):
    other = MathJsonl(MathJsonlConfig(train=written(tmp_path, GSM[::-1])), seed=9)
    ids = [{t.prompt("heldout", i).id for i in range(len(t.rows["heldout"]))} for t in (task, other)]
    assert ids[0] == ids[1]
    assert 1 <= len(ids[0]) <= 16  # a tenth of 61, within four standard deviations of 2.3
    assert not ids[0] & {task.prompt("train", i).id for i in range(len(task.rows["train"]))}


def test_prompt_of_both_files_is_held_out(tmp_path, file):
    heldout = written(tmp_path, [GSM[0], GSM[0], {"question": "another", "answer": "#### 1"}])
    task = MathJsonl(MathJsonlConfig(train=str(file), heldout=heldout))
    assert [row[0] for row in task.rows["heldout"]] == [GSM[0]["question"], GSM[0]["question"], "another"]
    assert len(task.rows["train"]) == 60
    assert task.prompt("heldout", 3).text == GSM[0]["question"]  # from the start again


def test_parquet_and_other_columns_are_read_alike(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"problem": ["1+1", "2+2", "3+3"], "solution": [2, 4, 6], "level": [1, 1, 2]}), path)
    config = MathJsonlConfig(
        train=str(path), heldout=str(path), prompt_column="problem", answer_column="solution", template="{prompt} = ?"
    )
    with pytest.raises(InputError, match="no train prompts"):
        MathJsonl(config)  # every prompt is held out
    more = written(tmp_path, [{"problem": "4+4", "solution": "8"}])
    task = MathJsonl(MathJsonlConfig(**{**vars(config), "train": more}))
    assert [(task.prompt("heldout", i).text, task.prompt("heldout", i).answer) for i in range(3)] == [
        ("1+1 = ?", "2"),
        ("2+2 = ?", "4"),
        ("3+3 = ?", "6"),
    ]


def test_chat_template_wraps_the_prompt_where_the_tokenizer_has_one(task):
    tokenizer = character_tokenizer(task.alphabet + "<user>|:")
    prompt = task.prompt("train", 0)
    plain = encode_prompt(tokenizer, prompt)
    assert tokenizer.decode(plain) == prompt.text
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"
    )
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == f"<user>{prompt.text}|"
    bare = Prompt(prompt.id, prompt.text, prompt.answer)
    assert encode_prompt(tokenizer, bare) == plain


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "has no rows"),
        ('{"question": "a", "answer": "b"}\n{"question"', "line 2 is no JSON"),
        ('{"question": "a", "answer": "b"}\n[1]', "line 2 is a list"),
        ('\n{"question": "a"}', "row 2 has no column 'answer'; it has question"),
        ('{"question": "a", "answer": null}', "row 1: answer is None; it must be a text or a number"),
        ('{"question": "a", "answer": true}', "row 1: answer is True"),
        ('{"question": "a", "answer": {"x": 1}}', "row 1: answer is {'x': 1}"),
    ],
)
def test_fault_in_a_file_is_one_sentence_with_its_line(tmp_path, content, named):
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        MathJsonl(MathJsonlConfig(train=str(path)))
    assert named in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_text_and_column_that_no_parquet_has_are_named(tmp_path):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "fake.parquet").write_text("no parquet")
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "half.parquet")
    for name, named in (
        ("binary.jsonl", "cannot be read"),
        ("fake.parquet", "cannot be read"),
        ("half.parquet", "has no column 'answer'; it has question"),
        ("none.jsonl", "does not exist"),
        ("", "math_jsonl.train is empty"),
    ):
        with pytest.raises(InputError, match=named):
            MathJsonl(MathJsonlConfig(train=str(tmp_path / name) if name else ""))
    (tmp_path / "rows.csv").write_text("question,answer\n")
    with pytest.raises(InputError, match=r"ends in '\.csv'"):
        MathJsonl(MathJsonlConfig(train=str(tmp_path / "rows.csv")))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"template": "Solve:"}, "template is 'Solve:'"),
        ({"heldout_share": 0.0}, "heldout_share is 0"),
        ({"heldout_share": 1.0}, "heldout_share is 1"),
        ({"heldout_share": 1e-9}, "no heldout prompts"),
        ({"prompt_column": "problem"}, "no column 'problem'"),
    ],
)
def test_impossible_settings_are_refused_by_name(file, settings, named):
    with pytest.raises(InputError, match=named):
        MathJsonl(MathJsonlConfig(train=str(file), **settings))


def test_missing_grader_is_one_sentence_with_the_command_that_installs_it(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match=r"^math-verify is needed .*'\.\[train\]'"):
        MathJsonl(MathJsonlConfig(train=str(file)))


def test_the_files_are_what_caches_are_keyed_by(file):
    config = TrainConfig(task="math_jsonl", math_jsonl=MathJsonlConfig(train=str(file)))
    assert make_task(config).name == "math_jsonl"
    assert task_files(config) == [file]
    assert task_files(TrainConfig()) == []
