"""reasoning-gym as a task: prompts, splits, examples, rewards, and one sentence for every fault."""

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.config import ReasoningGymConfig, SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.models import character_tokenizer
from otb_analysis.rollouts.sampling import encode_prompt, sample
from otb_analysis.tasks import Prompt, ReasoningGym, Turn, base, make_task
from otb_analysis.tasks.reasoning_gym import EVALUATED, FORMATS, HASHED, PARSED, GymSource, bare_forms, harmless
from otb_analysis.training.check import none_answers

LETTERS = ReasoningGymConfig(name=("letter_counting",), config=('{"min_words": 1, "max_words": 2}',))
TINY = ReasoningGymConfig(name=("count_bits",), config=('{"min_n": 1, "max_n": 30}',))
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.fixture(scope="module")
def task():
    return ReasoningGym(LETTERS)


def paid(task, prompt, text, finished=True):
    (parts,) = task.reward(prompt, [Turn(text, finished)])
    return parts


def test_a_prompt_is_the_question_after_two_right_answers_to_others(task):
    prompt = task.prompt("train", 0)
    assert prompt.text.startswith("How many times does the letter")
    assert len(prompt.examples) == 2
    assert all(answer.startswith("Answer: ") and question != prompt.text for question, answer in prompt.examples)
    assert prompt.shown.count("Answer: ") == 2 and prompt.shown.endswith(f"\n\n{prompt.text}\n")


def test_examples_are_of_the_training_split_and_never_the_prompts_own_question():
    task = ReasoningGym(TINY)
    asked = {split: {task.prompt(split, i).text for i in range(300)} for split in ("train", "heldout")}
    shown = {split: [task.prompt(split, i) for i in range(300)] for split in ("train", "heldout")}
    for prompt in shown["train"] + shown["heldout"]:
        questions = [question for question, _ in prompt.examples]
        assert len(questions) == 2
        assert prompt.text not in questions
        assert set(questions) <= asked["train"]
    assert asked["train"] and asked["heldout"] and not asked["train"] & asked["heldout"]
    assert len(asked["train"] | asked["heldout"]) == 30


def test_no_question_is_in_both_splits_for_any_seed():
    tasks = [ReasoningGym(LETTERS, seed) for seed in range(3)]
    texts = {s: {t.prompt(s, i).text for t in tasks for i in range(100)} for s in ("train", "heldout")}
    assert not texts["train"] & texts["heldout"]


def test_a_problem_is_always_the_same_and_draws_nothing_from_the_global_generators(task):
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    again = ReasoningGym(LETTERS)
    assert [again.prompt("train", i) for i in (5, 3)] == [task.prompt("train", i) for i in (5, 3)]
    assert ReasoningGym(LETTERS, seed=1).prompt("train", 5) != task.prompt("train", 5)
    assert (np.random.get_state()[1] == before).all()


def test_the_right_answer_in_the_asked_form_is_paid_and_nothing_else(task):
    prompt = task.prompt("train", 0)
    right, wrong = prompt.answer, str(int(prompt.answer) + 1)
    assert task.reward(prompt, task.demonstration(prompt)) == [{"correct": 1.0, "score": 1.0}]
    assert paid(task, prompt, f"Let me see.\n**Answer:** {right}.")["correct"] == 1
    assert paid(task, prompt, f"Answer: {wrong}\nAnswer: {right}")["correct"] == 1
    assert paid(task, prompt, f"Answer: {right}\nAnswer: {wrong}")["correct"] == 0
    assert paid(task, prompt, right) == {"correct": 0.0, "score": 0.0}
    assert paid(task, prompt, f"Answer: {right}", finished=False) == {"correct": 0.0, "score": 0.0}


def test_partial_credit_is_recorded_and_not_paid(scripted):
    task = ReasoningGym(LETTERS)
    prompt = task.prompt("train", 0)
    text = f"Answer: {prompt.answer} letters"
    parts = paid(task, prompt, text)
    assert parts == {"correct": 0.0, "score": len(prompt.answer) / len(f"{prompt.answer} letters")}
    letters = character_tokenizer(task.alphabet)
    rollouts = sample(scripted([f"{text}$"], tokenizer=letters), letters, task, [prompt], SampleConfig(group_size=1))
    rollouts = compute_rewards(task, rollouts)
    assert not rollouts.reward.any()
    assert rollouts.reward_parts["score"].tolist() == [parts["score"]]


@pytest.mark.parametrize(
    ("form", "text", "lines", "answer"),
    [
        ("line", "so\nAnswer: 3", 1, "3"),
        ("line", "The final answer: 3\nBecause.", 1, "3"),
        ("line", "Answer:\n3", 1, "3"),
        ("line", "Answer:", 1, None),
        ("line", "3", 1, None),
        ("line", "Answer:\n1 2\n3 4\n\nDone.", 2, "1 2\n3 4"),
        ("tags", "<answer>3</answer> or <answer> 4\n</answer>", 1, "4"),
        ("tags", "<answer>3", 1, None),
        ("whole", " 3\n", 1, "3"),
        ("whole", "  ", 1, None),
    ],
)
def test_answers_are_read_in_each_form(form, text, lines, answer):
    assert FORMATS[form].read(text, lines) == answer


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("answer", ["-14282", "1 2\n3 4", "1\n \n2"])
def test_an_answer_that_is_written_in_a_form_is_read_back(form, answer):
    assert FORMATS[form].read(FORMATS[form].write(answer), answer.count("\n") + 1) == answer


def test_a_full_stop_stars_and_quotes_around_an_answer_do_not_matter():
    assert bare_forms("3") == ("3",)
    assert bare_forms('**"3"**.') == ('**"3"**.', "3")
    assert bare_forms(".") == (".",)


def test_without_examples_the_prompt_asks_for_the_form():
    task = ReasoningGym(replace(LETTERS, shots=0, answer_format="tags"))
    assert task.prompt("train", 0).text.endswith("?\nWrite the answer between <answer> and </answer>.")
    assert task.prompt("train", 0).examples == ()


def test_examples_are_messages_of_a_chat_where_there_is_a_template_and_text_where_there_is_none(task):
    tokenizer = character_tokenizer(task.alphabet)
    prompt = Prompt("", "2+2", "4", chat=True, examples=(("1+1", "Answer: 2"),))
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == "1+1\nAnswer: 2\n\n2+2\n"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == "<user>1+1<assistant>Answer: 2<user>2+2"


def test_a_mixture_draws_its_tasks_by_weight():
    mix = ReasoningGymConfig(name=("letter_counting", "gcd"), weight=(3.0, 1.0), config=(*LETTERS.config, "{}"))
    task = ReasoningGym(mix)
    prompts = [task.prompt("train", i) for i in range(300)]
    letters = [prompt for prompt in prompts if "letter" in prompt.text]
    assert 0.65 < len(letters) / 300 < 0.85  # 3 of 4, within four standard errors
    assert all("letter" in question for question, _ in letters[0].examples)
    assert all(task.reward(p, task.demonstration(p))[0]["correct"] == 1 for p in prompts[:40])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": ()}, "reasoning_gym.name is empty"),
        ({"name": ("leter_counting",), "config": ()}, "did you mean 'letter_counting'"),
        ({"name": ("zzzz",), "config": ()}, "docs/tasks.md names them"),
        ({"name": ("composite",), "config": ()}, "which mixes tasks itself"),
        ({"config": ('{"min_words": 1',)}, "is not JSON"),
        ({"config": ("[1]",)}, "write a JSON object"),
        ({"config": ('{"min_word": 1}',)}, "has no field 'min_word'; did you mean 'min_words'"),
        ({"config": ('{"min_words": 0}',)}, "refuses .*min_words must be positive"),
        ({"config": ('{"min_words": "a"}',)}, "refuses .*TypeError"),
        ({"config": ('{"seed": 1}',)}, "which the run sets"),
        ({"config": ("{}", "{}")}, "has 2 entries for 1 names"),
        ({"weight": (1.0, 2.0)}, "weight has 2 entries for 1 names"),
        ({"weight": (0.0,)}, "weights above 0"),
        ({"shots": -1}, "shots is -1"),
        ({"template": "Solve:"}, "must contain {question}"),
        ({"answer_format": "xml"}, "answer_format is 'xml'"),
        ({"name": ("rush_hour",), "config": ()}, "set --reasoning-gym.shots 0"),
    ],
)
def test_impossible_settings_are_one_sentence(settings, named):
    with pytest.raises(InputError, match=named) as caught:
        ReasoningGym(replace(LETTERS, **settings))
    assert "\n" not in str(caught.value)


def test_a_task_whose_split_is_empty_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(base, "MOST_DRAWS", 200)
    with pytest.raises(InputError, match="count_bits found no problem"):
        ReasoningGym(replace(TINY, config=('{"min_n": 1, "max_n": 2}',)))


@pytest.mark.parametrize("name", HASHED)
def test_a_task_that_depends_on_the_hash_seed_asks_for_one(name, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(InputError, match="PYTHONHASHSEED=0"):
        GymSource(name, {})
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert GymSource(name, {}).problem(0) is not None


def test_missing_package_is_one_sentence_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"^reasoning-gym is needed .*'\.\[tasks\]'"):
        make_task(TrainConfig(task="reasoning_gym", reasoning_gym=LETTERS))


def test_no_text_of_the_policy_runs_as_code(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    trap = tmp_path / "trap"
    code = f"__import__('pathlib').Path({str(trap)!r}).touch()"
    for name in (*EVALUATED, *PARSED):
        source = GymSource(name, {})
        problem = source.problem(0)
        assert source.score(problem, code) == 0.0
        assert source.score(problem, f"[{code}]") == 0.0
        assert source.score(problem, problem.answer) == 1.0
    assert not trap.exists()
    assert harmless("countdown", "(3 + 4) * 2") and not harmless("countdown", "exec(3)")


def test_an_answer_that_takes_forever_scores_nothing():
    source = GymSource("countdown", {})
    assert source.score(source.problem(0), "9**9**9**9") == 0.0


def test_scoring_works_outside_the_main_thread():
    source, scores = GymSource("gcd", {}), []
    problem = source.problem(0)
    thread = threading.Thread(target=lambda: scores.append(source.score(problem, problem.answer)))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_a_step_without_any_answer_in_the_asked_form_is_said_with_an_example(task, scripted):
    letters = character_tokenizer(task.alphabet)
    prompt, one = task.prompt("train", 0), SampleConfig(group_size=2)
    rollouts = sample(scripted(["I do not know$", "3$"], tokenizer=letters), letters, task, [prompt], one)
    said = none_answers(task, 0, rollouts)
    assert said.startswith("none of the 2 answers of step 0") and "'I do not know'" in said
    assert none_answers(task, 1, rollouts) == ""
    rollouts = sample(scripted(["I do not know$", "Answer: 3$"], tokenizer=letters), letters, task, [prompt], one)
    assert none_answers(task, 0, rollouts) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of files and coroutines that some tasks leave open
def test_every_task_makes_problems_whose_own_answer_is_right(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    from reasoning_gym.factory import DATASETS

    unanswered = set()
    for name in sorted(set(DATASETS) - {"composite"}):
        source = GymSource(name, {})
        problem = source.problem(7)
        if problem.answer is None:
            unanswered.add(name)
        else:
            assert source.score(problem, problem.answer) >= 1 - 1e-6, name
            for form in FORMATS.values():
                read = form.read(form.write(problem.answer), problem.answer.count("\n") + 1)
                assert max(source.score(problem, bare) for bare in bare_forms(read)) >= 1 - 1e-6, (name, form)
    assert unanswered == UNANSWERED
