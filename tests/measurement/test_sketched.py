"""The level `sketch` in a run: estimates beside exact norms, never taken for them, and watching changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.answers.proxy import fidelity_of
from otb_analysis.config import (
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    SampledSchedule,
    Schedule,
    SketchSchedule,
)
from otb_analysis.errors import InputError
from otb_analysis.figures.fidelity import fidelity_info
from otb_analysis.gradients import token_score_norms
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.rollouts.models import load_policy
from otb_analysis.store import RunStore
from otb_analysis.training.check import check
from otb_analysis.training.loop import train_step

OFF = Schedule(0, 0)
SKETCH = SketchSchedule(every=1, directions=64, method="hybrid")


def same_weights(a, b):
    first, second = (load_policy(path / "model")[0].state_dict() for path in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", ["hybrid", "rank_one", "gaussian"])
def test_sketching_changes_nothing_about_the_training(trained, method):
    sketch = SketchSchedule(every=1, directions=3, method=method)
    watched = trained(f"sketched_{method}", measure=MeasureConfig(exact=OFF, sketch=sketch))
    quiet = trained("quiet", measure=MeasureConfig(exact=OFF), evaluate=EvaluateConfig(every=0))
    assert same_weights(watched, quiet)
    columns = ["step", "rollout", "t", "token_id", "logprob", "reward", "advantage"]
    first, second = (RunStore(p).tokens_df(columns=columns) for p in (watched, quiet))
    assert first.equals(second)


def test_estimates_are_the_exact_norms_within_their_standard_errors(trained, otb_run):
    path = trained("estimated", measure=MeasureConfig(exact=OFF, sketch=replace(SKETCH, method="rank_one")))
    found, whole = (RunStore(p).tokens_df() for p in (path, otb_run))
    assert (found["measured_by"] == "sketch").all() and (found["inclusion_prob"] == 1).all()
    z = (found["grad_norm_sq"] - whole["grad_norm_sq"]) / found["grad_norm_sq_stderr"]
    assert (found["grad_norm_sq_stderr"] > 0).all()
    # Squares of 64 directions are a little skewed, and the tokens of a step share theirs.
    assert z.abs().max() < 5 and (z.abs() < 2).mean() > 0.85
    steps = RunStore(path).steps_df()
    assert (steps["n_sketched_prompts"] == steps["n_prompts"]).all() and (steps["n_measured_prompts"] == 0).all()
    assert steps["exact_tail_k"].isna().all() and (steps["measurement_gaps"] == 0).all()


def test_auto_takes_exact_norms_where_these_cost_no_more(trained, otb_run):
    path = trained("short", measure=MeasureConfig(exact=OFF, sketch=SketchSchedule(1, directions=64)))
    found, whole = (RunStore(p).tokens_df() for p in (path, otb_run))
    assert (found["measured_by"] == "exact").all() and (found["inclusion_prob"] == 1).all()
    np.testing.assert_allclose(found["grad_norm_sq"], whole["grad_norm_sq"], rtol=1e-4)
    assert found["grad_norm_sq_stderr"].isna().all()
    assert (RunStore(path).steps_df()["n_sketched_prompts"] == 0).all()


def test_exact_norms_in_place_of_a_sketch_are_those_of_the_configured_engine(trainer, monkeypatch):
    asked, measure = [], token_score_norms

    def listening(*args, **settings):
        asked.append(settings["engine"])
        return measure(*args, **settings)

    monkeypatch.setattr("otb_analysis.measurement.level.token_score_norms", listening)
    for engine in ("auto", "generic"):
        config = MeasureConfig(exact=OFF, sketch=SketchSchedule(1, prompts=1, directions=64), engine=engine)
        trainer.measurer = GradientMeasurer(trainer.model, config, 1.0)
        assert train_step(trainer, 0).steps["measurement_gaps"] == 0
    assert asked == ["auto", "generic"]


@pytest.fixture
def mixed_run(trained):
    """Two groups measured whole, one sketched, the others left alone."""
    return trained("mixed", measure=MeasureConfig(exact=Schedule(1, 2), sketch=replace(SKETCH, prompts=1)))


def test_groups_that_are_measured_exactly_are_not_sketched(mixed_run, otb_run):
    store, whole = RunStore(mixed_run), RunStore(otb_run).tokens_df()
    tokens, groups = store.tokens_df(), store.steps_df()["n_prompts"].iloc[0]
    exact, sketched = tokens["group"] < 2, tokens["group"] == 2
    assert groups > 3
    expected = np.select([exact, sketched], ["exact", "sketch"], "none")
    assert (tokens["measured_by"] == expected).all()
    np.testing.assert_allclose(tokens["grad_norm_sq"][exact], whole["grad_norm_sq"][exact], rtol=1e-3, atol=1e-5)
    assert tokens["grad_norm_sq_stderr"].notna().equals(sketched)
    # Each level says which share of the groups it took.
    np.testing.assert_allclose(tokens["inclusion_prob"][exact], 2 / groups, rtol=1e-6)
    np.testing.assert_allclose(tokens["inclusion_prob"][sketched], 1 / groups, rtol=1e-6)
    assert tokens["grad_norm_sq"].isna().equals(~(exact | sketched))
    steps = store.steps_df()
    assert (steps["n_measured_prompts"] == 2).all() and (steps["n_sketched_prompts"] == 1).all()


def test_no_reader_takes_an_estimate_for_an_exact_norm(mixed_run):
    store = RunStore(mixed_run)
    tokens = store.tokens_df()
    only = tokens[tokens["measured_by"] == "exact"]
    for kind in ("token", "realized"):
        assert fidelity_info(tokens, kind).overall == fidelity_info(only, kind).overall
    assert [found.pooled.n for _, found in fidelity_of(store)] == [len(only)] * 2
    arrays = store.token_arrays(0)
    assert set(arrays.measured_groups().group) == {0, 1}
    with pytest.raises(InputError, match="no exact energy"):
        arrays.select(arrays.group == 2).estimator_inputs("exact")


def test_groups_from_which_tokens_were_drawn_are_left_to_the_level_that_drew(trained):
    measure = MeasureConfig(exact=OFF, sampled=SampledSchedule(1, 2, 0.5, "proxy"), sketch=SKETCH)
    tokens = RunStore(trained("drawn_and_sketched", measure=measure)).tokens_df()
    drawn, share = tokens["group"] < 2, 1 - 2 / tokens["group"].nunique()
    assert set(tokens["measured_by"][drawn]) == {"exact", "none"}
    assert (tokens["measured_by"][~drawn] == "sketch").all()
    assert tokens["grad_norm_sq"][drawn].notna().equals(tokens["measured_by"][drawn] == "exact")
    np.testing.assert_allclose(tokens["inclusion_prob"][~drawn], share, rtol=1e-6)
    assert tokens["energy_calibrated"].notna().all()


def test_an_estimator_that_needed_every_exact_norm_leaves_nothing_to_sketch(trainer, monkeypatch):
    trainer.measurer.config = MeasureConfig(exact=OFF, sketch=SKETCH)
    trainer.trains_on_exact = True
    tables = train_step(trainer, 0)
    assert tables.steps["n_sketched_prompts"] == 0 and tables.steps["measurement_gaps"] == 0
    assert set(tables.tokens["measured_by"]) == {"exact"}


def test_failing_sketch_is_a_warning_and_a_counted_gap(trainer, monkeypatch):
    def fail(*args, **named):
        raise RuntimeError("the lens fell off")

    trainer.measurer.config = MeasureConfig(exact=Schedule(1, 1), sketch=SKETCH)
    monkeypatch.setattr("otb_analysis.measurement.level.sketch_score_norms", fail)
    with pytest.warns(RuntimeWarning, match="sketched norms at step 0 failed .*the lens"):
        tables = train_step(trainer, 0)
    assert (tables.steps["measurement_gaps"], tables.steps["n_sketched_prompts"]) == (1, 0)
    assert tables.grams is not None and "grad_norm_sq_stderr" not in tables.tokens
    assert set(tables.tokens["measured_by"]) == {"exact", "none"}


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (MeasureConfig(sketch=SketchSchedule(1, directions=1)), r"measure\.sketch\.directions is 1; choose at least 2"),
        (MeasureConfig(sketch=SketchSchedule(-1)), r"measure\.sketch\.every is -1"),
        (MeasureConfig(sketch=SketchSchedule(1, -2)), r"measure\.sketch\.prompts is -2"),
        (MeasureConfig(exact=Schedule(2, 0), sketch=SketchSchedule(4)), r"measure\.exact already measures every group"),
        (
            MeasureConfig(sampled=SampledSchedule(3), sketch=SketchSchedule(3)),
            r"measure\.sampled already measures every group",
        ),
    ],
)
def test_schedules_that_cannot_work_are_refused_before_anything_runs(tiny_config, tmp_path, measure, message):
    with pytest.raises(InputError, match=message):
        check(replace(tiny_config, root=tmp_path, measure=measure))


def test_schedules_that_leave_something_to_sketch_are_accepted(tiny_config, tmp_path):
    for exact in (Schedule(4, 0), Schedule(1, 1), OFF):
        check(replace(tiny_config, root=tmp_path, measure=MeasureConfig(exact=exact, sketch=SketchSchedule(2))))


def test_training_on_exact_energies_leaves_nothing_to_sketch_and_is_refused(tiny_config, tmp_path):
    trained_on = EstimatorConfig(name="otb", energy="exact")
    config = replace(tiny_config, root=tmp_path, estimator=trained_on, measure=MeasureConfig(sketch=SKETCH))
    with pytest.raises(InputError, match=r"estimator\.name is 'otb', .*every group exactly"):
        check(config)
