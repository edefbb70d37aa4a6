"""19_long_answers: two tasks whose answers are written out, by hand and against what they count."""

import importlib
from pathlib import Path

import pytest

from otb_analysis.tasks.base import Turn
from studies.lib.record import load_study

FOLDER = Path(__file__).parent.parent.parent / "studies" / "19_long_answers"


@pytest.fixture(scope="module")
def tasks():
    load_study(FOLDER)
    return importlib.import_module(f"study_{FOLDER.name}.tasks")


def test_answers_are_written_out_line_by_line(tasks):
    assert tasks.worked("What is 7+5+9?") == "7+5=12\n12+9=21\n#21"
    assert tasks.worked("How many e are in tree beet?") == "t 0\nr 0\ne 1\ne 2\nb 2\ne 3\ne 4\nt 4\n#4"


@pytest.mark.parametrize(("name", "ends"), [("letters", (5, 5)), ("sums", (15, 16))])
def test_a_demonstration_is_paid_and_a_slip_is_not(tasks, name, ends):
    task = tasks.WrittenOut(name, *ends)
    for index in range(20):
        prompt = task.prompt("train", index)
        (turn,) = task.demonstration(prompt)
        (asked,) = [part for part in prompt.text.rstrip("?").split() if "+" in part] or [prompt.text.split(" in ")[1]]
        count = sum(map(int, asked.split("+"))) if name == "sums" else asked.count(prompt.text.split()[2])
        assert turn.text.endswith(f"#{count}") and set(prompt.text + turn.text) <= set(task.alphabet)
        slip = turn.text.rpartition("#")[0] + f"#{count + 1}"
        cut = Turn(turn.text, finished=False)
        paid = [task.reward(prompt, [one])[0]["correct"] for one in (turn, Turn(slip, finished=True), cut)]
        assert paid == [1, 0, 0]
