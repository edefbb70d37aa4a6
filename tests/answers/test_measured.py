"""What measured steps are compared with, what an alarm takes away, and which runs are pooled."""

import pytest

from otb_analysis.answers import designs
from otb_analysis.statistics import REFERENCE
from otb_analysis.types import Gram

ALARM = "Tokens were not drawn by the stated sampler: z = 41."


@pytest.mark.parametrize(
    ("trained", "against"),
    [("otb_loo", ("otb_loo", "exact")), ("mine", REFERENCE), ("rloo", REFERENCE)],
)
def test_all_are_compared_with_the_one_that_trained_else_with_rloo(gram, run_of, trained, against):
    run = run_of([gram([1, 0.7, 0.9, 1.2, 1])], estimator={"name": trained, "energy": "exact"})
    assert run.measured.decision.against == against
    beside = run.measured.against_rloo
    assert (beside is None) == (against == REFERENCE)
    assert run.measured.over_rloo.against == REFERENCE


def test_rloo_stands_beside_only_where_it_is_another_update(gram, run_of):
    one = gram([1, 0.7])
    scale = [1, 0.75]
    inner = one.inner[:1, :1] * [[[[a * b]] for b in scale] for a in scale]
    multiple = Gram(inner, (REFERENCE, ("group_mean", "none")), 256, one.prompt)
    measured = run_of([multiple], estimator={"name": "group_mean"}).measured
    assert measured.decision.against == ("group_mean", "none") and measured.against_rloo is None


def test_an_alarm_takes_proofs_away_and_stands_first(gram, run_of):
    steps = [gram([1, 0.7, 1, 0.8, 1])]
    clean, alarmed = run_of(steps), run_of(steps, alarm=ALARM)
    assert {one.by for one in clean.measured.decision.comparisons} == {"variance", "efficiency"}
    assert {one.by for one in alarmed.measured.decision.comparisons} == {"efficiency"}
    assert alarmed.measured.lines[0].startswith(ALARM) and "nothing is proved" in alarmed.measured.lines[1]
    assert alarmed.lines[0] == alarmed.measured.lines[0] and ALARM not in " ".join(clean.lines)
    assert not alarmed.proxy_line
    bare = run_of(alarm=ALARM)
    assert bare.lines[0].startswith(ALARM) and "Nothing is known" in bare.lines[1]


def test_why_nothing_is_proved_is_said_once(gram, run_of):
    half = run_of([gram([1, 0.7])], optimize={"precision": "bfloat16", "steps": 61})
    assert half.measured.known.projection == {} and "half precision" in half.measured.lines[-1]
    assert half.measured.reservations and not run_of([gram([1, 0.7])]).measured.reservations


def test_runs_of_one_task_and_group_size_are_pooled_with_what_is_proved_in_both(gram, run_of):
    first, second = run_of([gram([1, 0.7, 1])], "a"), run_of([gram([1, 0.7, 1], seed=1)], "b")
    (pooled,) = designs({"a": first, "b": second}).values()
    assert len(pooled.grams) == 2 and pooled.decision.n_prompts == 128
    assert pooled.known.projection == first.proved.projection and pooled.decision.against == REFERENCE
    half = run_of([gram([1, 0.7, 1], seed=1)], "b", optimize={"precision": "bfloat16"})
    (less,) = designs({"a": first, "b": half}).values()
    assert less.known.projection == {} and any(line.startswith("b: Step lengths") for line in less.lines)
    alarmed = run_of([gram([1, 0.7, 1], seed=1)], "b", ALARM)
    (least,) = designs({"a": first, "b": alarmed}).values()
    assert least.lines[0].startswith(f"b: {ALARM}") and least.known.projection == {}


def test_runs_of_another_task_or_group_size_are_not_pooled_and_two_that_trained_are_compared_with_rloo(gram, run_of):
    steps = [gram([1, 0.7, 1])]
    runs = {"a": run_of(steps), "b": run_of(steps, task="products"), "c": run_of([gram([1, 0.7, 1], group=8)])}
    assert [name.split(",")[0] for name in designs(runs)] == ["sums", "products", "sums"]
    other = run_of(steps, estimator={"name": "sequence_optimal_loo"})
    (both,) = designs({"a": other, "b": run_of(steps)}).values()
    assert set(both.trained) == {REFERENCE, ("sequence_optimal_loo", "proxy")} and both.decision.against == REFERENCE


def test_a_table_over_rloo_says_who_is_told_who_is_the_same_and_the_noise_scale(gram, run_of):
    notes = run_of([gram([1, 0.7, 1, 1.5])]).measured.notes
    (told,) = (line for line in notes if line.startswith("* all 3 together"))
    assert "better than rloo: sequence_optimal_loo" in told and "worse than rloo: no baseline" in told
    assert notes[-1].startswith("Noise scale") and "rloo " in notes[-1]
