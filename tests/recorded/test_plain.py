"""Ways into `plain` and what else has no token ids: messages, named rewards, lists of rollouts, other names."""

import gzip
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from otb_analysis.config import ImportConfig
from otb_analysis.errors import InputError
from otb_analysis.phases import NOTES
from otb_analysis.recorded.encoding import chat_text
from otb_analysis.recorded.formats import LEFT, NO_ROLLOUTS, find_source
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.readers import BY_NAME, ERRED, FAILED
from otb_analysis.store import RunStore

HF = {"id": "a", "question": "1+1?", "generations": ["2", "3", "two"], "correctness": [True, False, True], "prompt": 7}
FIELDS = ("prompt=question", "completion=generations", "reward=correctness", "group=id")

# As verifiers's evaluations write it: messages without what is not there, metrics beside their sum again at the top.
RESULT = {
    "example_id": 3, "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    "completion": [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "name": "add", "arguments": "{"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"}, {"role": "assistant", "content": "four"},
    ],
    "answer": "4", "info": {"level": 1}, "reward": 1.25, "metrics": {"right": 1.0, "form": 0.5}, "right": 1.0,
    "form": 0.5, "error": None, "is_truncated": False,
}  # fmt: skip


def read(path, fields=()):
    source = find_source(path, "auto", fields)
    return list(source.records()), source.tally


def test_token_ids_without_texts_are_rollouts(jsonl, tmp_path):
    rows = [{"prompt_ids": [1, 2], "ids": [3, 4 + n], "reward": float(n), "logprobs": [-0.5, -1.0]} for n in range(2)]
    records, _ = read(jsonl(rows))
    assert [(r.prompt, r.completion, r.prompt_key, r.ids) for r in records][1] == (None, None, (1, 2), (3, 5))
    store = RunStore(import_rollouts(jsonl(rows), ImportConfig(root=tmp_path / "runs")))
    assert store.tokens_df()["token_id"].tolist() == [3, 4, 3, 5] and store.steps_df()["n_prompts"].tolist() == [1]
    with pytest.raises(InputError, match="record 1: completion is null"):
        read(jsonl([{"prompt": "p", "prompt_ids": [1], "reward": 1.0, "completion": None, "ids": None}], "none.jsonl"))


def test_what_other_programs_write_for_the_same_numbers_and_texts_is_read(tmp_path):
    rows = [{"prompt": "1+1", "completion": "2", "answer": 2, "step": 3.0, "reward": 0.5}]
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows).encode())  # as Excel and .NET begin a file
    pq.write_table(pa.Table.from_pylist([{**rows[0], "reward": Decimal("0.50")}]), tmp_path / "decimal.parquet")
    for path in tmp_path.iterdir():
        (record,), _ = read(path)
        assert (record.answer, record.step, record.reward) == ("2", 3, 0.5)
    (tmp_path / "half.jsonl").write_text(json.dumps({**rows[0], "step": 3.5}))
    with pytest.raises(InputError, match=r"step is 3\.5"):
        read(tmp_path / "half.jsonl")


def test_what_lies_beside_rollouts_is_left_out_and_named(jsonl, tmp_path):
    folder = tmp_path / "run"
    for step in (1, 2):
        jsonl([{"prompt": "p", "completion": str(n), "reward": n} for n in range(2)], f"run/rollouts_{step}.jsonl")
    jsonl([{"step": 1, "reward": 0.5, "loss": 1.0}], "run/metrics.jsonl")
    (folder / "config.json").write_text(json.dumps({"lr": 1}, indent=1))
    records, tally = read(folder)
    assert len(records) == 4
    assert tally == {NO_ROLLOUTS: 2} and tally.places[NO_ROLLOUTS] == ["config.json", "metrics.jsonl"]
    for step in (1, 2):
        jsonl([{"q": "p", "a": str(n), "r": n} for n in range(2)], f"named/rollouts_{step}.jsonl")
    jsonl([{"step": 1, "loss": 1.0}], "named/metrics.jsonl")
    records, tally = read(tmp_path / "named", ("prompt=q", "completion=a", "reward=r"))
    assert len(records) == 4 and tally == {NO_ROLLOUTS: 1}
    jsonl([{"prompt": "p", "completion": "c"}], "run/more.jsonl")  # what lacks a field alone is refused
    with pytest.raises(InputError, match=r"no known format: more\.jsonl has completion, prompt"):
        read(folder)


def test_named_parts_of_a_reward_are_its_sum_and_kept(jsonl, tmp_path):
    rows = [{"prompt": "p", "completion": str(n), "reward": {"right": float(n), "form": 0.25}} for n in range(2)]
    rollouts = RunStore(import_rollouts(jsonl(rows), ImportConfig(root=tmp_path / "runs"))).rollouts_df()
    assert rollouts["reward"].tolist() == [0.25, 1.25] and rollouts["reward_right"].tolist() == [0.0, 1.0]
    with pytest.raises(InputError, match=r"record 1: reward\[form\] is 'good'"):
        read(jsonl([{**rows[0], "reward": {"form": "good"}}], "odd.jsonl"))


def test_rewards_by_token_and_by_turn_are_summed_wherever_they_were_paid(jsonl, tmp_path):
    row = {"prompt": "p", "completion": "c", "ids": [1, 2, 3, 4], "mask": [1, 0, 1, 0]}
    # 0.5 at a policy token and 1 at a tool's token behind the last one; two turns; one number.
    rows = [{**row, "reward": paid} for paid in ([0.5, 0.0, 0.0, 1.0], [0.25, 0.5], [2.0])]
    tokens = RunStore(import_rollouts(jsonl(rows), ImportConfig(root=tmp_path / "runs"))).tokens_df()
    paid = tokens["reward"].to_numpy(np.float64, na_value=0.0).reshape(3, 4)
    np.testing.assert_array_equal(paid, [[0, 0, 1.5, 0], [0, 0, 0.75, 0], [0, 0, 2.0, 0]])
    with pytest.raises(InputError, match=r"reward has 3 entries, .*4 completion tokens"):
        read(jsonl([{**row, "reward": [1, 2, 3]}], "odd.jsonl"))


def test_rows_with_lists_of_generations_are_groups_by_other_names(jsonl, tmp_path):
    path = tmp_path / "hf.parquet"
    pq.write_table(pa.Table.from_pylist([HF, {**HF, "id": "b", "correctness": [False] * 3}]), path)
    records, _ = read(path, FIELDS)
    assert [(r.group, r.prompt, r.completion, r.reward) for r in records[:3]] == [
        ("a", "1+1?", "2", 1.0), ("a", "1+1?", "3", 0.0), ("a", "1+1?", "two", 1.0)
    ]  # fmt: skip
    steps = RunStore(import_rollouts(path, ImportConfig(root=tmp_path / "runs", fields=FIELDS))).steps_df()
    assert steps["n_prompts"].tolist() == [2] and steps["n_zero_variance_groups"].tolist() == [1]
    with pytest.raises(InputError, match=r"record 1: correctness is 'yes'"):
        read(jsonl([{**HF, "generations": "2", "correctness": "yes"}]), FIELDS)


@pytest.mark.parametrize("chat", [False, True])
def test_plain_records_with_step_and_advantage_are_no_table_of_trl(jsonl, tmp_path, chat):
    asked, said = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    row = {"prompt": asked, "completion": said} if chat else {"prompt": "q", "completion": "a"}
    rows = [
        {
            **row,
            "reward": float(n % 2),
            "step": 0,
            "group": n // 2,
            "advantage": n % 2 - 0.5,
            "ids": [1, 2],
            "tokens": 9,
        }
        for n in range(6)
    ]
    path = jsonl(rows)
    records, _ = read(path)
    assert [(r.reward, r.group, r.ids) for r in records[2:4]] == [(0.0, 1, (1, 2)), (1.0, 1, (1, 2))]
    assert records[3].advantage == 0.5
    # A reward function of TRL may be called reward: its files have names of their own.
    table = [{"step": 1, "prompt": "q", "completion": "a", "reward": 1.0, "form": 0.5, "advantage": 0.0}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "completions_00001.parquet")
    assert find_source(tmp_path / "completions_00001.parquet").name == "trl"


@pytest.mark.parametrize("total", ["score", "total"])
def test_a_part_of_a_reward_that_is_all_of_it_is_not_counted_twice(jsonl, total):
    row = {"prompt": "p", "completion": "c"}
    records, tally = read(jsonl([{**row, "reward": {"right": 1.0, "form": 0.5, total: 1.25}}]))
    assert records[0].reward == 1.25 and records[0].reward_parts["form"] == 0.5
    assert tally == {f"reward is its part {total}, and not the sum of all parts": 1}
    assert read(jsonl([{**row, "reward": {"right": 1.0, "form": 0.5}}]))[1] == {
        "reward is the sum of its parts right + form": 1
    }


@pytest.mark.parametrize(
    ("field", "values", "sentence"),
    [
        ("ids", [[1, 2]], "must be a list of token ids"),
        ("prompt_ids", [[1, 2]], "must be a list of token ids"),
        ("mask", [[1], [1]], "must be a list of numbers, not of lists"),
        ("logprobs", [[-0.5, -1.0], [-0.25, -2.0]], "must be a list of numbers, not of lists"),
    ],
)
def test_lists_within_lists_are_refused_by_their_field(jsonl, field, values, sentence):
    row = {"prompt_ids": [1], "ids": [1, 2], "reward": 0.5}
    with pytest.raises(InputError, match=f"record 1: {field} is .*{sentence}"):
        read(jsonl([{**row, field: values}]))


def test_messages_that_would_be_lost_are_refused_and_reasoning_counts(jsonl, tokenizer):
    asked = [{"role": "user", "content": "q"}]

    def row(**message):
        return {"prompt": asked, "completion": [message], "reward": 0.5}

    with pytest.raises(InputError, match="messages of model and none of the assistant"):
        read(jsonl([row(role="model", content="a")]))
    with pytest.raises(InputError, match="completion must be a text"):
        read(jsonl([{**row(), "completion": [{"from": "gpt", "value": "a"}]}]))
    assert read(jsonl([row(role="tool", content="timeout")]))[0][0].messages[-1].content == ""
    records, tally = read(
        jsonl([row(role="assistant", content="a", reasoning_content="long"), row(role="assistant", tool_calls=[])])
    )
    assert [r.messages[-1].content for r in records] == ["long\na", ""] and tally == {FAILED: 1}
    with pytest.raises(InputError, match="assistant has reasoning"):
        chat_text(tokenizer, records[0].messages, records[0].place, goes_on=False)


@pytest.mark.parametrize("advantage", ["advantage", "advantages"])
def test_a_row_of_several_rollouts_is_a_group_whatever_stands_beside_it(jsonl, tmp_path, advantage):
    row = {"completion": ["a", "b", "c"], "reward": [0, 1, 0], advantage: [-0.25, 0.5, -0.25]}
    path = jsonl([{"prompt": prompt, **row} for prompt in "aaba"])  # one behind itself, and one again later
    rollouts = RunStore(import_rollouts(path, ImportConfig(root=tmp_path / "runs"))).rollouts_df()
    assert rollouts["group"].tolist() == np.repeat(range(4), 3).tolist() and rollouts["prompt_id"].nunique() == 2
    assert rollouts["recorded_advantage"].tolist() == [-0.25, 0.5, -0.25] * 4


@pytest.mark.parametrize("name", ["{}.jsonl", "step_{}.jsonl", "global_step_{}/rank_0.jsonl"])
def test_records_without_a_step_are_of_the_step_in_their_files_name(tmp_path, jsonl, name):
    rows = [{"prompt": "p", "completion": str(n), "reward": float(n)} for n in range(2)]
    for step in (2, 9, 10):
        jsonl(rows, f"rollouts/train/{name.format(step)}")
        jsonl(rows, f"rollouts/eval/{name.format(step)}")
    records, tally = read(tmp_path / "rollouts")
    assert [r.step for r in records] == [2, 2, 9, 9, 10, 10] and tally == {BY_NAME: 6, LEFT: 3}
    assert {r.step for r in read(tmp_path / "rollouts" / "eval")[0]} == {2, 9, 10}


def test_steps_that_nothing_names_are_said(jsonl, tmp_path):
    path = jsonl([{"prompt": str(n), "completion": "c", "reward": 0.0, "global_step": n} for n in range(5)])
    NOTES.clear()
    import_rollouts(path, ImportConfig(root=tmp_path / "runs", prompts=2))
    assert any(note.startswith("3 × step was made of up to 2 groups in a row, as no record") for note in NOTES)


def test_fields_that_are_not_there_are_named(jsonl):
    path = jsonl([HF])
    for pair, sentence in {
        "prompt": "--fields has 'prompt'; write pairs", "promt=question": "--fields has 'promt=question'; did you mean",
        "reward=score": "--fields names 'score', but the first record of",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            read(path, (pair,))


def test_compressed_texts_are_read(tmp_path):
    row = json.dumps({"prompt": "p", "completion": "c", "reward": 1.0}).encode()
    for ending in ("jsonl", "ndjson", "json"):
        (tmp_path / f"{ending}.{ending}.gz").write_bytes(gzip.compress(row))
        with pa.output_stream(str(tmp_path / f"{ending}.{ending}.zst"), compression="zstd") as file:
            file.write(row)
    for path in tmp_path.iterdir():
        assert read(path)[0][0].completion == "c"


def test_results_of_verifiers_are_groups_by_example_with_tools_and_null_contents(jsonl, tmp_path, tokenizer):
    failed = {**RESULT, "completion": [], "reward": 0.0, "error": {"error": "Timeout"}, "metrics": {}}
    other = {**RESULT, "example_id": 4}
    records, tally = read(jsonl([RESULT, other, failed], "results.jsonl"))
    assert [(r.group, r.step, r.reward) for r in records] == [(3, 0, 1.25), (4, 0, 1.25), (3, 0, 0.0)]
    assert records[0].reward_parts == {"right": 1.0, "form": 0.5} and records[0].answer == "4"
    assert [m.sampled for m in records[0].messages] == [False, False, True, False, True]
    assert tally[ERRED] == 1 and tally[FAILED] == 0
    assert [r.step for r in read(jsonl([RESULT, {**RESULT, "step": 3}], "rollouts.jsonl"))[0]] == [0, 3]
    path = jsonl([RESULT, failed, other], "results.jsonl")
    rollouts = RunStore(import_rollouts(path, ImportConfig(root=tmp_path / "runs"))).rollouts_df()
    assert rollouts["group"].tolist() == [0, 0, 1] and rollouts["turns"].tolist() == [2, 1, 2]
    with pytest.raises(InputError, match=r"message 2 .* has tool calls.*otb import"):
        chat_text(tokenizer, records[0].messages, records[0].place, goes_on=False)


def test_tool_calls_are_imported_and_tell_prompts_apart(jsonl, tmp_path):
    def row(number, reward):
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": number})}}
        asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"prompt": asked, "completion": answer, "reward": reward}

    path = jsonl([row(1, 1.0), row(1, 0.0), row(2, 1.0), row(2, 0.0)])
    rollouts = RunStore(import_rollouts(path, ImportConfig(root=tmp_path / "runs"))).rollouts_df()
    assert rollouts["group"].tolist() == [0, 0, 1, 1] and rollouts["turns"].tolist() == [1] * 4


def test_messages_with_images_are_prompts_of_their_own(jsonl):
    def row(url):
        content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
        return {"prompt": [{"role": "user", "content": content}], "completion": "a", "reward": 1.0}

    records, _ = read(jsonl([row("x"), row("x"), row("y")]))
    assert records[0].prompt_key == records[1].prompt_key != records[2].prompt_key
    assert records[0].messages[0].lacks == "image_url" and records[0].messages[0].content.startswith("what?<image_url")
