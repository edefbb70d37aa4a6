"""The task `running_total`: its literals, plain, branching and in turns; its reward; slips are never healed."""

from dataclasses import replace

import pytest

from otb_analysis.config import RunningTotalConfig, SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks import Prompt, RunningTotal, Turn, make_task
from otb_analysis.tasks.base import split_of

PLAIN = Prompt(id="003:95+7=", text="003:95+7=", answer="17")
# 95 + 7 = 102, less 99 is 3; then 10 and 17.
WRITTEN = "002:03;001:10;000:17;"
BRANCHING = Prompt(id="002:12+6,9=", text="002:12+6,9=", answer="24")
# 12 is even and takes 6; 18 is even and takes 6.
BRANCHED = "001:18;000:24;"
TURNS = Prompt(id="001:95+7=|002+8=", text="001:95+7=", answer="19")


def paid(prompt, *turns):
    return RunningTotal(RunningTotalConfig()).reward(prompt, turns)[-1].get("correct")


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        (PLAIN, [Turn(WRITTEN, True)]),
        (BRANCHING, [Turn(BRANCHED, True)]),
        # 15 is odd and takes 9, 24 is even and takes 6
        (Prompt("002:15+6,9=", "002:15+6,9=", "30"), [Turn("001:24;000:30;", True)]),
        (TURNS, [Turn("000:03;", True, "002+8="), Turn("001:11;000:19;", True)]),
    ],
)
def test_demonstration_is_worked_by_hand_and_paid(prompt, turns):
    task = RunningTotal(RunningTotalConfig())
    assert task.demonstration(prompt) == turns
    assert paid(prompt, *turns) == 1.0
    assert [task.reply(prompt, turns[: k + 1]) for k in range(len(turns))] == [*(t.reply for t in turns[:-1]), None]


@pytest.mark.parametrize("text", [WRITTEN, "000:17;", "002:04;001:10;000:17;"])
def test_only_the_last_line_is_judged(text):
    assert paid(PLAIN, Turn(text, True)) == 1.0


@pytest.mark.parametrize("text", ["002:03;001:10;000:18;", "002:03;001:10;", "001:17;", "000:17", "000:17;;", ""])
def test_wrong_short_and_broken_answers_are_not_paid(text):
    assert paid(PLAIN, Turn(text, True)) == 0.0


def test_answer_that_is_cut_or_lacks_turns_is_not_paid():
    assert paid(PLAIN, Turn(WRITTEN, False)) == 0.0
    # the first turn's total is 19, too: paid only after the second turn
    early = replace(TURNS, id="001:11+8=|002+8=")
    assert paid(early, Turn("000:19;", True)) == 0.0


def test_turn_without_its_last_line_gets_no_reply():
    task = RunningTotal(RunningTotalConfig(tool_calls=1))
    assert task.reply(TURNS, [Turn("001:03;", True)]) is None
    assert task.reply(TURNS, [Turn("000:88;", True)]) == "002+8="  # a wrong total is continued


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 10])
def test_every_demonstration_is_paid_in_the_alphabet_and_as_long_as_configured(branching, calls):
    task = RunningTotal(RunningTotalConfig(20, 24, 12, branching, calls), seed=3)
    for index in range(100):
        prompt = task.prompt("heldout" if index % 2 else "train", index)
        turns = task.demonstration(prompt)
        assert len(turns) == calls + 1 and paid(prompt, *turns) == 1.0
        assert 20 * 7 <= sum(len(turn.text) for turn in turns) <= 24 * 7
        assert set(prompt.id.replace("|", "") + "".join(t.text for t in turns)) <= set(task.alphabet)
        assert split_of(prompt.id) == ("heldout" if index % 2 else "train")


def test_right_totals_of_branching_are_multiples_of_three_and_a_slip_from_them_is_never_healed():
    task = RunningTotal(RunningTotalConfig(30, 30, 15, branching=True))
    for index in range(50):
        prompt = task.prompt("train", index)
        (turn,) = task.demonstration(prompt)
        assert all(int(line[4:]) % 3 == 0 for line in turn.text.split(";")[:-1])
        slipped = replace(prompt, id=prompt.id[:4] + f"{int(prompt.id[4:6]) + 1:02d}" + prompt.id[6:])
        (wrong,) = task.demonstration(slipped)  # right steps from a wrong total
        assert all(int(line[4:]) % 3 == 1 for line in wrong.text.split(";")[:-1])
        assert paid(prompt, wrong) == 0.0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lines_min": 0}, "lines_min is 0"),
        ({"lines_min": 9}, "lines_max is 6"),
        ({"lines_max": 1001}, "lines_max is 1001"),
        ({"tool_calls": 4}, "tool_calls=4"),
        ({"tool_calls": -1}, "tool_calls=-1"),
        ({"largest": 0}, "largest is 0"),
        ({"largest": 5, "branching": True}, "largest is 5"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, named):
    with pytest.raises(InputError, match=named):
        RunningTotal(RunningTotalConfig(**settings))


def test_turn_limit_below_the_turns_is_refused():
    config = TrainConfig(task="running_total", running_total=RunningTotalConfig(12, 12, tool_calls=10))
    assert make_task(replace(config, sample=SampleConfig(max_turns=11))).name == "running_total"
    with pytest.raises(InputError, match=r"max_turns is 8 .* 11 turns"):
        make_task(config)
