"""The sentence on group sizes: only sizes that were measured for the estimator that trained."""

import pytest

from otb_analysis.answers.measured import size_line
from otb_analysis.diagnostics.planner import Cell, Planner, dead_groups, plan
from otb_analysis.statistics import Interval

OTB, RLOO = ("otb", "proxy"), ("rloo", "none")


def cost(low, high):
    return Interval((low * high) ** 0.5, low, high, 64, "")


def planner(**costs):
    """A planner of groups of 8: costs of otb by size, and of rloo."""
    cells = [Cell(*OTB, 8, 0.5, False, None), Cell(*RLOO, 8, 0.5, False, None)]
    for name, of in costs.items():
        label = OTB if name == "otb" else RLOO
        cells += [Cell(*label, size, 0.5, False, one) for size, one in of.items()]
    return Planner(128, 8, tuple(cells), (), "")


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"otb": {4: cost(0.7, 0.9), 2: cost(0.5, 0.6)}}, ("Try groups of 2, not 8", "with otb", "(0.50–0.60)")),
        (
            {"otb": {4: cost(1.1, 1.4), 2: cost(1.5, 2.0)}},
            ("Keep groups of 8", "in groups of 4 with otb", "(1.10–1.40)"),
        ),
        # One size is open: nothing is shown of otb, nor of rloo.
        ({"otb": {4: cost(1.1, 1.4), 2: cost(0.8, 2.0)}}, ("no difference shown for otb in groups of 2, 4.",)),
        (
            {"otb": {4: cost(0.8, 1.2)}, "rloo": {4: cost(0.7, 0.9)}},
            ("Group size, now 8: no difference shown for otb; with rloo",),
        ),
        # Noise hides it: no ends within a factor of 100.
        ({"otb": {4: cost(0.001, 0.9)}}, ("no difference shown for otb",)),
        ({"otb": {4: Interval(0.5, None, None, 8, "")}}, ("no difference shown for otb in groups of 4.",)),
    ],
)
def test_a_size_is_named_that_was_measured_for_what_trained_or_for_rloo_beside_it(costs, words):
    line = size_line(planner(**costs), (OTB,))
    assert all(word in line for word in words), line
    assert len(line.split()) <= 40


def test_an_estimator_that_was_not_measured_in_other_sizes_gets_no_size():
    line = size_line(planner(otb={4: cost(0.8, 1.2)}), (("mine", "none"),))
    assert "groups of" not in line


def test_without_gradients_success_rates_say_how_many_groups_are_dead_and_dead_ones_get_no_advice():
    groups = [(str(p), [1.0, 0.0, 0.0, float(p % 2)]) for p in range(20)]
    alone = plan({}, {}, groups, 1)
    assert size_line(alone, ()).startswith("In groups of 4, 0 of 20 groups (0%, 0%–")
    assert "teach nothing" in size_line(alone, ())
    dead = plan({}, {}, [(str(p), [1.0] * 4) for p in range(20)], 1)
    assert "nothing is said about group sizes" in size_line(dead, (OTB,))
    assert size_line(Planner(8, 4, (), dead_groups([]), ""), ()) == ""


def test_one_larger_group_without_signal_does_not_speak_for_all():
    groups = [(str(p), [1.0, 0.0, 0.0, float(p % 2)]) for p in range(20)] + [("larger", [1.0] * 8)]
    planned = plan({}, {}, groups, 1)
    assert "From success rates alone" in planned.note and "Every group" not in planned.note
    assert "Every group" not in size_line(planned, ())
    unlike = plan({}, {}, [(str(p), [1.0] * (4 + p % 3)) for p in range(20)], 1)
    assert "Every group" in unlike.note and size_line(unlike, ()) == unlike.note
