"""Drawn tokens and attribution in a run: what is stored is what was measured, and watching changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.config import AttributionSchedule, EvaluateConfig, MeasureConfig, SampledSchedule, Schedule
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.gradients import attribution
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.measurement import level as levels
from otb_analysis.measurement.level import Level
from otb_analysis.rollouts.models import load_policy
from otb_analysis.store import RunStore
from otb_analysis.training.check import check
from otb_analysis.training.loop import train_step

OFF = Schedule(0, 0)
DRAWN = SampledSchedule(every=1, share=0.25)
WATCHED = MeasureConfig(exact=OFF, sampled=DRAWN, attribution=AttributionSchedule(every=1))


@pytest.fixture
def sampled_run(trained):
    return trained("sampled", measure=WATCHED)


def same_weights(a, b):
    first, second = (load_policy(path / "model")[0].state_dict() for path in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_watching_by_either_level_changes_nothing_about_the_training(sampled_run, otb_run, trained):
    quiet = trained("quiet", measure=MeasureConfig(exact=OFF), evaluate=EvaluateConfig(every=0))
    assert same_weights(sampled_run, quiet)
    columns = ["step", "rollout", "t", "token_id", "logprob", "reward", "advantage"]
    first, second = (RunStore(p).tokens_df(columns=columns) for p in (sampled_run, quiet))
    assert first.equals(second)


def test_drawn_tokens_have_the_norms_that_measuring_everything_gives(sampled_run, otb_run):
    drawn, whole = (RunStore(p).tokens_df() for p in (sampled_run, otb_run))
    measured = drawn["grad_norm_sq"].notna()
    assert (drawn["measured_by"] == np.where(measured, "exact", "none")).all()
    np.testing.assert_allclose(drawn["grad_norm_sq"][measured], whole["grad_norm_sq"][measured], rtol=1e-3, atol=1e-5)
    # Every policy token had a chance, drawn or not; the chances add up to what was drawn.
    assert drawn["inclusion_prob"].notna().all()
    by_step = drawn.groupby("step")
    expected = (0.25 * by_step.size()).round()
    assert by_step["grad_norm_sq"].count().tolist() == expected.tolist()
    np.testing.assert_allclose(by_step["inclusion_prob"].sum(), expected, rtol=1e-5)


def test_totals_of_a_step_come_with_a_standard_error_that_holds(sampled_run, otb_run):
    steps = RunStore(sampled_run).steps_df()
    true = RunStore(otb_run).tokens_df().groupby("step")["grad_norm_sq"].sum()
    z = (steps["energy_total"] - true.to_numpy()) / steps["energy_total_stderr"]
    assert (z.abs() < 4).all() and (steps["energy_total_stderr"] > 0).all()
    tokens = RunStore(sampled_run).tokens_df()
    expanded = (tokens["grad_norm_sq"] / tokens["inclusion_prob"]).groupby(tokens["step"]).sum()
    np.testing.assert_allclose(steps["energy_total"], expanded, rtol=1e-5)
    assert (steps["n_sampled_tokens"] == tokens.groupby("step")["grad_norm_sq"].count().to_numpy()).all()
    assert (steps["n_measured_prompts"] == 0).all() and (steps["measurement_gaps"] == 0).all()


def test_calibrated_energies_are_a_power_of_the_proxy_and_add_up_with_the_rollouts_totals(sampled_run):
    store = RunStore(sampled_run)
    for step in store.complete_steps():
        tokens = store.tokens_df([step])
        slope = np.polyfit(np.log(tokens["energy_proxy"]), np.log(tokens["energy_calibrated"]), 1)[0]
        assert slope == pytest.approx(store.steps_df()["calibration_slope"][step], rel=1e-3)
        # Σ ŵ/π over the drawn is Σ w/π, so the differences between the two vanish over all rollouts.
        rollouts = store.rollouts_df([step])
        assert rollouts["energy_total"].sum() == pytest.approx(tokens["energy_calibrated"].sum(), rel=1e-4)
        # Tokens that were certain to be drawn say nothing about the error of the others.
        by_chance = tokens["grad_norm_sq"].notna() & (tokens["inclusion_prob"] < 1)
        heard = by_chance.groupby(tokens["rollout"]).any()
        assert (rollouts.set_index("rollout")["energy_total_stderr"].notna() == heard).all()


def test_groups_that_are_measured_whole_count_as_certain(trained):
    path = trained("both", measure=MeasureConfig(exact=Schedule(every=1, prompts=2), sampled=DRAWN))
    store = RunStore(path)
    tokens, steps = store.tokens_df(), store.steps_df()
    whole = tokens["group"] < 2
    assert (tokens["inclusion_prob"][whole] == 1).all() and tokens["grad_norm_sq"][whole].notna().all()
    assert (tokens["inclusion_prob"][~whole] < 1).any()
    assert 0 < tokens["grad_norm_sq"][~whole].notna().mean() < 1
    assert steps["energy_total"].notna().all() and (steps["n_measured_prompts"] == 2).all()
    rollouts = store.rollouts_df()
    np.testing.assert_allclose(
        rollouts["energy_total"][rollouts["group"] < 2],
        tokens[whole].groupby(["step", "rollout"])["grad_norm_sq"].sum(),
        rtol=1e-4,
    )
    assert (rollouts["energy_total_stderr"][rollouts["group"] < 2] == 0).all()


def test_calibrated_energies_are_a_source_of_the_gram_matrix_and_come_back_from_disk(trained):
    path = trained("both", measure=MeasureConfig(exact=Schedule(every=1, prompts=2), sampled=DRAWN))
    store = RunStore(path)
    gram = store.grams()[0]
    labels = set(gram.labels)
    assert {("otb", "calibrated"), ("otb", "proxy"), ("otb", "exact")} <= labels
    assert ("rloo", "calibrated") not in labels
    inputs = store.token_arrays(0).estimator_inputs("calibrated")
    again = estimate("otb", inputs)
    assert again.advantage.shape == inputs.mask.shape and np.isfinite(again.advantage).all()
    # A power of the proxy is not the proxy: the gradients differ, but point the same way.
    m, p = gram.labels.index(("otb", "calibrated")), gram.labels.index(("otb", "proxy"))
    inner = gram.inner.sum(axis=(2, 3))
    assert inner[m, p] > 0.9 * np.sqrt(inner[m, m] * inner[p, p])


def test_gradients_without_norms_are_those_with_norms_less_the_estimators_that_read_them(trained):
    with_norms = trained("normed", measure=MeasureConfig(exact=Schedule(every=1)))
    without = trained("gradients", measure=MeasureConfig(exact=OFF, gradients=Schedule(every=1)))
    for step, whole in RunStore(with_norms).grams().items():
        gram = RunStore(without).grams()[step]
        assert set(gram.labels) == {label for label in whole.labels if label[1] != "exact"}
        rows = [whole.labels.index(label) for label in gram.labels]
        np.testing.assert_allclose(
            gram.inner, whole.inner[np.ix_(rows, rows)], rtol=1e-4, atol=1e-5 * whole.inner.max()
        )
    tokens, steps = RunStore(without).tokens_df(), RunStore(without).steps_df()
    assert tokens["grad_norm_sq"].isna().all() and RunStore(without).rollouts_df()["score_norm_sq"].isna().all()
    assert (steps["n_measured_prompts"] == 0).all() and (steps["measurement_gaps"] == 0).all()


def test_norms_of_some_groups_leave_estimators_that_read_them_out_of_the_gradients_of_more(trained):
    some = MeasureConfig(exact=Schedule(every=2, prompts=1), gradients=Schedule(every=1, prompts=3))
    store = RunStore(trained("some", measure=some))
    grams, steps = store.grams(), store.steps_df()
    assert {gram.n_prompts for gram in grams.values()} == {3}
    assert not any(label[1] == "exact" for gram in grams.values() for label in gram.labels)
    assert steps["n_measured_prompts"].tolist() == [1 - step % 2 for step in range(len(steps))]


def test_drawn_tokens_calibrate_estimators_where_no_norms_are_whole(trained):
    measure = MeasureConfig(exact=OFF, gradients=Schedule(every=1), sampled=DRAWN)
    labels = RunStore(trained("drawn-calibrates", measure=measure)).grams()[0].labels
    assert {("otb", "calibrated"), ("otb", "proxy")} <= set(labels) and ("otb", "exact") not in labels


def test_some_groups_only_leave_the_total_of_the_step_open(trained):
    path = trained("few", measure=MeasureConfig(exact=OFF, sampled=SampledSchedule(1, 2, 0.5, "proxy")))
    store = RunStore(path)
    tokens = store.tokens_df()
    assert tokens["inclusion_prob"].isna().equals(tokens["group"] >= 2)
    # Half the groups, half their tokens: a quarter of all, on average over tokens.
    drawn = tokens[tokens["group"] < 2].groupby("step")
    np.testing.assert_allclose(drawn["inclusion_prob"].sum(), 0.5 * (0.5 * drawn.size()).round(), rtol=1e-5)
    assert store.steps_df()["energy_total"].isna().all()
    assert tokens["energy_calibrated"].notna().all()


def test_shares_add_up_to_the_gradient_that_the_update_followed(sampled_run):
    store = RunStore(sampled_run)
    tokens, steps = store.tokens_df(), store.steps_df()
    # PyTorch gives the embedding of the padding token no gradient, though moving it moves the log-probabilities: where
    # this untrained policy writes that token and goes on, no slope can agree with the gradient.
    pad = load_policy(sampled_run / "model")[1].pad_token_id
    clean = ~(tokens["token_id"] == pad).groupby(tokens["step"]).any().to_numpy()
    total = tokens.groupby("step")["attribution"].sum()
    assert clean.any()
    np.testing.assert_allclose(total[clean], steps["grad_norm"][clean] ** 2, rtol=1e-5)
    np.testing.assert_allclose(tokens["signal"] + tokens["noise"], tokens["attribution"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(steps["signal_total"] + steps["noise_total"], total, rtol=1e-5)
    assert (steps["noise_total"] > 0).all()
    assert steps["attribution_top_share"].between(0.01, 1).all()


def test_attribution_alone_leaves_signal_and_noise_open(trained):
    path = trained("shares", measure=MeasureConfig(exact=OFF, attribution=AttributionSchedule(every=2, split=False)))
    tokens = RunStore(path).tokens_df()
    assert tokens["attribution"].notna().equals(tokens["step"] != 1)
    assert tokens["signal"].isna().all() and tokens["noise"].isna().all()


def test_attention_without_forward_mode_is_measured_by_differences(trainer, monkeypatch):
    def without_forward_mode(*args):
        raise UnfitError("the model has an operation without a forward-mode derivative")

    monkeypatch.setattr(attribution, "forward_slopes", without_forward_mode)
    trainer.measurer.config = WATCHED
    for step in range(2):
        tables = train_step(trainer, step)
        shares, norm = tables.tokens["attribution"], tables.steps["grad_norm"]
        assert norm > 0 and not np.ma.getmaskarray(shares).any()
        assert shares.sum() == pytest.approx(norm**2, rel=1e-3)


@pytest.mark.parametrize("broken", ["sampled", "attribution"])
def test_failing_level_is_a_warning_and_a_counted_gap(trainer, monkeypatch, broken):
    def fail(*args, **named):
        raise RuntimeError("the lens fell off")

    trainer.measurer.config = replace(WATCHED, exact=Schedule(every=1, prompts=0))
    monkeypatch.setattr(type(levels.LEVELS[broken]), "measure", fail)
    with pytest.warns(RuntimeWarning, match=r"step 0 failed .*the lens fell off"):
        tables = train_step(trainer, 0)
    assert tables.steps["measurement_gaps"] == 1
    assert tables.grams is not None
    assert ("attribution" in tables.tokens) == (broken == "sampled")
    assert ("energy_total" in tables.steps) == (broken == "attribution")


class Lengths(Level):
    """How many of its rollout's tokens come before each token: a level of one's own."""

    phase = "lengths"

    def measure(self, step, plan, known):
        return known.with_columns({"before": np.where(step.table.mask, step.table.mask.cumsum(axis=1) - 1.0, np.nan)})

    def passes(self, plan, rollouts, rows):
        return 0.5


LENGTHS = f"{__name__}:LENGTHS_LEVEL"
LENGTHS_LEVEL = Lengths()


def test_a_level_of_ones_own_is_one_class(trained, tiny_config, tmp_path):
    measure = MeasureConfig(exact=OFF, further={LENGTHS: 2})
    check(replace(tiny_config, root=tmp_path, measure=measure))
    tokens = RunStore(trained("own_level", measure=measure)).tokens_df()
    assert tokens["before"].notna().equals(tokens["step"] != 1)
    measured = tokens[tokens["step"] != 1]
    assert measured["before"].tolist() == measured["t"].tolist()


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"skecth": 2}, "measure.further has 'skecth', which is no Level; did you mean 'sketch'"),
        ({"sketch": 2}, "measure.further has 'sketch', which has a section of its own; set measure.sketch.every"),
        ({f"{__name__}:OFF": 2}, "which is no Level"),
        ({LENGTHS: -1}, "LENGTHS_LEVEL.every is -1; choose a finite number of at least 0"),
    ],
)
def test_what_is_no_level_is_refused_before_anything_runs(tiny_config, tmp_path, further, message):
    with pytest.raises(InputError, match=message):
        check(replace(tiny_config, root=tmp_path, measure=MeasureConfig(further=further)))


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_share_outside_its_range_is_refused_before_anything_runs(tiny_config, tmp_path, share):
    config = replace(tiny_config, root=tmp_path, measure=MeasureConfig(sampled=SampledSchedule(share=share)))
    with pytest.raises(InputError, match=r"measure\.sampled\.share is"):
        check(config)
