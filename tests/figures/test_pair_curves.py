import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers.pairs import drift_note
from otb_analysis.figures.pairs import (
    BLOCKS,
    average_difference,
    compare_curves,
    pair_table,
    plot_pair,
)
from otb_analysis.figures.runs import Pairing, pair_runs
from otb_analysis.statistics import MIN_CLUSTERS

SEEDS = Pairing("A", "B", tuple((f"a{seed}", f"b{seed}") for seed in range(5)))


def table(reward: np.ndarray, **columns: object) -> pd.DataFrame:
    return pd.DataFrame({"step": np.arange(len(reward)), "reward_mean": reward, **columns})


def noisy(seed: int, gain: float = 0.0, steps: int = 80) -> pd.DataFrame:
    return table(0.5 + gain + 0.05 * np.random.default_rng(seed).normal(size=steps))


def test_a_planted_difference_is_found_and_no_difference_is_not():
    steps = {"a": noisy(1), "b": noisy(2, 0.1), "c": noisy(3)}
    (found,) = compare_curves(steps, pair_runs("a", "b"))
    assert found.differs and found.whole.low < 0.1 < found.whole.high
    (same,) = compare_curves(steps, pair_runs("a", "c"))
    assert not same.differs and same.whole.low < 0 < same.whole.high


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.94), (0.5, 0.92)])
def test_intervals_over_blocks_of_steps_cover_no_difference(correlation, least):
    random = np.random.default_rng(0)
    parts = np.array_split(np.arange(200), BLOCKS)
    held = 0
    for _ in range(300):
        noise = random.normal(size=(1, 200))
        for t in range(1, 200):
            noise[:, t] += correlation * noise[:, t - 1]
        one = average_difference(noise, parts, "step blocks", "")
        held += one.low <= 0 <= one.high
    assert held / 300 >= least


def test_few_of_the_differences_that_do_not_drift_are_said_to():
    random = np.random.default_rng(0)
    steps = {"a": table(np.zeros(48))}
    said = 0
    for _ in range(100):
        (panel,) = compare_curves(steps | {"b": table(random.normal(size=48))}, pair_runs("a", "b"))
        said += panel.drifts
    assert said <= 5


def test_a_difference_that_drifts_is_named_since_its_interval_is_too_short():
    rising = noisy(2)["reward_mean"] + np.linspace(0, 1, 80)
    steps = {"a": noisy(1), "b": table(rising.to_numpy()), "c": noisy(3)}
    assert "drifts over training in reward" in drift_note(compare_curves(steps, pair_runs("a", "b")))
    assert drift_note(compare_curves(steps, pair_runs("a", "c"))) == ""


def test_seeds_are_paired_so_what_they_share_cancels():
    shared = [0.2 * np.random.default_rng(seed).normal() for seed in range(5)]
    steps = {f"a{s}": table(0.5 + shared[s] + 0.01 * np.random.default_rng(s + 9).normal(size=30)) for s in range(5)}
    steps |= {f"b{s}": table(0.53 + shared[s] + 0.01 * np.random.default_rng(s + 99).normal(size=30)) for s in range(5)}
    (found,) = compare_curves(steps, SEEDS)
    assert found.a.shape == (5, 30) and found.whole.n_clusters == 5
    assert found.differs and found.whole.estimate == pytest.approx(0.03, abs=0.005)
    d = (found.b - found.a).mean(axis=1)
    half = 2.776 * d.std(ddof=1) / np.sqrt(5)  # Student's t with 4 degrees of freedom
    assert found.whole.high - found.whole.estimate == pytest.approx(half, rel=1e-3)
    assert all(block.low is not None for block in found.blocks)


def test_only_shared_steps_count_and_unrecorded_quantities_are_left_out():
    a = table(np.arange(30.0), grad_norm=1.0)
    b = table(np.arange(30.0) + 1).iloc[10:]
    (found,) = compare_curves({"a": a, "b": b}, pair_runs("a", "b"))
    assert found.step.tolist() == list(range(10, 30)) and found.whole.estimate == 1
    assert sum(len(block) for block in np.array_split(found.step, BLOCKS)) == 20
    row = pair_table([found]).iloc[0]
    assert (row["quantity"], row["steps"], row["A"], row["B"]) == ("reward_mean", 20, 19.5, 20.5)


def test_few_steps_give_a_point_without_an_interval():
    few = MIN_CLUSTERS - 1
    (found,) = compare_curves({"a": noisy(1, steps=few), "b": noisy(2, 1.0, few)}, pair_runs("a", "b"))
    assert found.whole.low is None and not found.differs


def test_runs_without_a_common_step_have_no_panel():
    late = noisy(2).assign(step=np.arange(80) + 80)
    assert compare_curves({"a": noisy(1), "b": late}, pair_runs("a", "b")) == ()


def test_the_figure_has_both_curves_and_the_band_of_the_difference():
    steps = {"a": noisy(1).assign(grad_norm=1.0), "b": noisy(2, 0.1).assign(grad_norm=2.0)}
    info = compare_curves(steps, pair_runs("a", "b"))
    figure = plot_pair(info, "A: <b>a</b>", "B: b")
    assert [trace.name for trace in figure.data if trace.showlegend is not False][:2] == ["A: &lt;b>a&lt;/b>", "B: b"]
    bands = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert [(b.y0, b.y1) for b in bands] == [(p.whole.low, p.whole.high) for p in info]


def test_a_line_over_seeds_says_the_mean_that_it_draws():
    steps = {f"{side}{seed}": table(np.full(30, float(seed))) for side in "ab" for seed in range(5)}
    lines = [trace for trace in plot_pair(compare_curves(steps, SEEDS), "A", "B").data if trace.name in ("A", "B")]
    assert [(set(line.y), set(line.text)) for line in lines] == [({2.0}, {"2.00"})] * 2


def test_steps_with_an_infinite_number_are_not_compared():
    norm = np.full(80, 2.0)
    steps = {
        "a": table(norm / 4, grad_norm=norm),
        "b": table(norm / 4, grad_norm=np.where(np.arange(80) < 79, 3, np.inf)),
    }
    found = {panel.quantity.column: panel for panel in compare_curves(steps, pair_runs("a", "b"))}
    assert len(found["reward_mean"].step) == 80 and len(found["grad_norm"].step) == 79
    assert found["grad_norm"].whole.estimate == pytest.approx(1.0) and found["grad_norm"].differs
    never = compare_curves(steps | {"b": steps["b"].assign(grad_norm=np.inf)}, pair_runs("a", "b"))
    assert [panel.quantity.column for panel in never] == ["reward_mean"]
