"""The training table: rates by phase, ratios to a rival, and what every level adds."""

from pathlib import Path

import pytest

from benchmarks import train
from benchmarks.config import TrainBenchConfig
from benchmarks.publish import run_bench
from benchmarks.train import PHASES, Turn, levels
from otb_analysis.config import MeasureConfig
from otb_analysis.errors import InputError


def test_rate_of_a_phase_is_tokens_over_its_own_time():
    # 120 tokens in 2 s of sampling, 4 s of update, .5 s of it logits and .5 s statistics, and 2 s of all the rest.
    turn = Turn(2.0, 4.0, 8.0, 120, statistics=0.5, head=0.5)
    assert [turn.rate(phase) for phase in PHASES] == [60, 30, 20, 60, 40, 15]


def test_ratios_compare_best_with_best_and_median_with_median():
    turns = {
        train.OURS: [
            Turn(1.0, 1.0, 9.0, 100),
            Turn(1.0, 1.0, 9.0, 50),
            Turn(2.0, 1.0, 9.0, 60),
        ],  # sampling: 100, 50, 30
        train.TRL: [Turn(2.0, 1.0, 9.0, 80), Turn(2.0, 1.0, 9.0, 50), Turn(4.0, 1.0, 9.0, 40)],  # 40, 25, 10
    }
    rows = {row["what"]: row for row in train._phase_rows(turns, {train.OURS: 10, train.TRL: 20})}
    ours = rows[f"sampling, {train.OURS}"]
    assert (ours["rate"], ours["rate_median"], ours["to_trl"], ours["to_trl_median"]) == (100, 50, 2.5, 2.0)
    assert rows[f"sampling, {train.TRL}"]["to_trl"] == 1
    assert ours["memory"] is None
    assert rows[f"{train.BOTH}, {train.TRL}"]["memory"] == 20


@pytest.fixture
def quick(monkeypatch):
    """A report without the levels' own time: every engine takes seconds to look at a model."""
    monkeypatch.setattr(train, "_level_cost", lambda config, level, clock: (0.5, 30))
    return run_bench(TrainBenchConfig(quick=True, repeats=2))


def test_every_phase_level_and_the_absent_rival_have_a_row(quick):
    rows = {row["what"]: row for row in quick.rows}
    phases = [f"{phase}, {name}" for phase in PHASES for name in (train.OURS, train.TRL)]
    rest = ["level forward", "store", "level forward and store", *(f"level {name}" for name in levels())]
    assert list(rows) == phases + rest
    assert all(rows[f"{phase}, {train.OURS}"]["rate"] > 0 for phase in PHASES)
    assert all(rows[f"{phase}, {train.TRL}"]["rate"] is None for phase in PHASES)
    assert rows[f"{PHASES[4]}, {train.OURS}"]["rate"] < rows[f"{PHASES[3]}, {train.OURS}"]["rate"]
    both = rows["level forward"]["seconds"] + rows["store"]["seconds"]
    assert rows["level forward and store"]["seconds"] == pytest.approx(both)
    step = rows["store"]["seconds"] / rows["store"]["share"]
    assert rows["level exact"]["share"] == pytest.approx(0.5 / step)
    assert rows["level exact"]["rate"] == 60  # 30 tokens in half a second
    assert any("--trl-python" in note for note in quick.notes)


def test_every_schedule_of_the_configuration_is_a_level():
    assert {"exact", "sampled", "attribution"} <= set(levels())
    assert all(level.due(1) for level in levels().values())
    assert not hasattr(MeasureConfig().engine, "every")


def test_no_repetition_is_refused():
    with pytest.raises(InputError, match="--repeats is 0"):
        run_bench(TrainBenchConfig(repeats=0))


def test_an_interpreter_without_trl_is_named(tmp_path):
    with pytest.raises(InputError, match="no/python cannot be run"):
        run_bench(TrainBenchConfig(quick=True, repeats=1, trl_python=Path("no/python")))


@pytest.mark.slow
def test_a_level_is_timed_at_a_step_where_it_is_due(tmp_path):
    seconds, tokens = train._level_cost(train.bench_config("small", tmp_path, quick=True), "exact")
    assert seconds > 0
    assert 8 <= tokens <= 64  # two groups of four rollouts of 1 to 8 tokens
