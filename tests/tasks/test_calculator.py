"""The calculator: calls and answers as literals, masked tool tokens, and what a policy sees when it errs."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.config import CalculatorConfig, SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.models import character_tokenizer, special_id
from otb_analysis.rollouts.sampling import sample
from otb_analysis.tasks import Calculator, Prompt, Turn, base, make_task
from otb_analysis.tasks.calculator import REFUSALS, evaluate
from otb_analysis.training.warm_start import IGNORED, _example

LITERAL = Prompt(id="12+7*3=", text="12+7*3=", answer="33")
SOLVED = [Turn("?7*3", True, "=21"), Turn("?12+21", True, "=33"), Turn("#33", True)]


@pytest.fixture
def task():
    return Calculator(CalculatorConfig())


@pytest.fixture
def letters(task):
    return character_tokenizer(task.alphabet)


def replied(task, text):
    return task.reply(LITERAL, [Turn(text, True)])


def test_demonstration_calls_once_per_operator_and_answers(task):
    assert task.demonstration(LITERAL) == SOLVED
    bracketed = Prompt("", "(12+7)*3=", "57")
    assert task.demonstration(bracketed) == [Turn("?12+7", True, "=19"), Turn("?19*3", True, "=57"), Turn("#57", True)]


@pytest.mark.parametrize("operators", ["+-*", "+-*/^", "/"])
def test_every_demonstration_is_answered_as_written_and_earns_the_reward(operators):
    task = Calculator(CalculatorConfig(operations_max=4, operators=operators), seed=3)
    for i in range(100):
        prompt = task.prompt("train", i)
        turns = task.demonstration(prompt)
        for k in range(len(turns)):
            assert (task.reply(prompt, turns[: k + 1]) or "") == turns[k].reply
        assert task.reward(prompt, turns) == [*[{}] * (len(turns) - 1), {"correct": 1.0}]
        assert set(prompt.text + "".join(turn.text + turn.reply for turn in turns)) <= set(task.alphabet)
        assert evaluate(prompt.text.removesuffix("=")) == int(prompt.answer)
        assert all(0 <= int(turn.reply[1:]) <= 999 for turn in turns[:-1])


def test_settings_bound_the_operators_and_numbers_of_prompts():
    task = Calculator(CalculatorConfig(operations_min=1, operations_max=3, operators="+*", largest=7))
    texts = [task.prompt("train", i).text for i in range(300)]
    assert {sum(c in "+*" for c in text) for text in texts} == {1, 2, 3}
    assert {int(c) for text in texts for c in text if c.isdigit()} == set(range(1, 8))
    assert any("(" in text for text in texts)
    assert not any("-" in text for text in texts)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("?7*3", "=21"),
        ("?7/2", "=7/2"),
        ("?3-5", "=-2"),
        ("so far 4, then ?7*3", "=21"),
        ("?1/0", "!division by zero"),
        ("?1+2+3", "!too many operations"),  # one operator a call
        ("?", "!not arithmetic"),
        ("?7x3", "!not arithmetic"),
        ("?9^99", "!exponent too large"),
        ("?__import__('os').system('true')", "!not arithmetic"),
        ("?" + "9" * 5_000, "!too long"),
        ("7*3", None),  # no call
        ("#21", None),
        ("?7*3#21", None),
        ("", None),
    ],
)
def test_reply_is_the_value_or_what_is_wrong(task, text, reply):
    assert replied(task, text) == reply


def test_every_refusal_can_be_written_in_the_alphabet(task):
    assert set("".join(REFUSALS)) <= set(task.alphabet)


def test_more_operators_per_call_can_be_allowed():
    assert replied(Calculator(CalculatorConfig(call_operations=3)), "?12+7*3-1") == "=32"


@pytest.mark.parametrize(
    ("text", "finished", "paid"),
    [
        ("#33", True, 1.0),
        ("12+21 is #33", True, 1.0),
        ("#033", True, 1.0),
        ("#66/2", True, 1.0),
        ("#33", False, 0.0),
        ("#34", True, 0.0),
        ("#-33", True, 0.0),
        ("33", True, 0.0),
        ("#33.", True, 0.0),
        ("#33#", True, 0.0),
        ("#33/0", True, 0.0),
        ("#", True, 0.0),
        ("?12+21", True, 0.0),  # a call at the turn limit is no answer
        ("#" + "3" * 5_000, True, 0.0),
    ],
)
def test_last_turn_alone_is_paid_for_an_ended_right_answer(task, text, finished, paid):
    assert task.reward(LITERAL, [*SOLVED[:2], Turn(text, finished)]) == [{}, {}, {"correct": paid}]


def test_tool_tokens_are_in_the_rollout_but_not_in_the_mask(task, letters, scripted):
    generator = scripted(["?7*3$"], ["#33$"], tokenizer=letters)
    rollouts = sample(generator, letters, task, [LITERAL], SampleConfig(group_size=1))
    end = special_id(letters, "eos")

    def ids(text):
        return letters(text)["input_ids"]

    assert rollouts.input_ids[0].tolist() == [*ids("12+7*3=?7*3"), end, *ids("=21#33"), end]
    # Prompt 7, call 4 and its end, reply 3, answer 3 and its end.
    assert rollouts.mask[0].tolist() == [False] * 7 + [True] * 5 + [False] * 3 + [True] * 4
    assert compute_rewards(task, rollouts).rewards()[0].tolist() == [0.0] * 11 + [1.0]


def test_supervised_loss_leaves_out_prompt_and_tool_tokens(task, letters):
    ids, labels = _example(letters, task, LITERAL)
    end = special_id(letters, "eos")
    assert ids == [
        *letters("12+7*3=?7*3")["input_ids"],
        end,
        *letters("=21?12+21")["input_ids"],
        end,
        *letters("=33#33")["input_ids"],
        end,
    ]
    written = [*[False] * 7, *[True] * 5, *[False] * 3, *[True] * 7, *[False] * 3, *[True] * 4]
    assert [label != IGNORED for label in labels] == written
    assert [label for label in labels if label != IGNORED] == [i for i, w in zip(ids, written, strict=True) if w]


def test_splits_share_no_problem_across_seeds_and_a_problem_is_always_the_same():
    small = CalculatorConfig(operations_min=1, operations_max=1, largest=9)
    split = {
        name: {Calculator(small, seed).prompt(name, i).text for seed in range(3) for i in range(300)}
        for name in ("train", "heldout")
    }
    assert not split["train"] & split["heldout"]
    assert Calculator(small, 5).prompt("train", 13) == Calculator(small, 5).prompt("train", 13)
    assert np.unique([Calculator(small, 5).prompt("train", i).text for i in range(40)]).size > 20


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"operations_min": 0}, "operations_min is 0"),
        ({"operations_min": 4, "operations_max": 3}, "operations_min is 4 and operations_max is 3"),
        ({"operators": ""}, "operators is ''"),
        ({"operators": "+%"}, r"operators is '\+%'"),
        ({"largest": 0}, "largest is 0"),
        ({"largest_result": 0}, "largest_result is 0"),
        ({"call_operations": 0}, "call_operations is 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, named):
    with pytest.raises(InputError, match=named):
        Calculator(CalculatorConfig(**settings))


@pytest.mark.parametrize(("operations", "per_call", "turns"), [(3, 1, 4), (3, 2, 3), (4, 2, 3), (1, 4, 2)])
def test_turn_limit_below_the_calls_and_the_answer_is_refused(operations, per_call, turns):
    own = CalculatorConfig(operations_min=1, operations_max=operations, call_operations=per_call)
    config = TrainConfig(task="calculator", calculator=own, sample=SampleConfig(max_turns=turns))
    assert make_task(config).turns_needed == turns
    with pytest.raises(InputError, match=rf"max_turns is {turns - 1} .* {turns} turns"):
        make_task(replace(config, sample=SampleConfig(max_turns=turns - 1)))


def test_split_that_nothing_falls_into_is_one_sentence(monkeypatch):
    monkeypatch.setattr(base, "MOST_DRAWS", 100)
    # 1+1 is the only problem, and its hash is in the training split.
    task = Calculator(CalculatorConfig(operations_min=1, operations_max=1, operators="+", largest=1))
    assert task.prompt("train", 0).text == "1+1="
    with pytest.raises(InputError, match=r"no problem for the heldout split"):
        task.prompt("heldout", 0)
