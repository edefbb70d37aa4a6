"""Soft tokens in the trainer: what a run stores of them, that it follows their exact gradient, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.config import (
    CriticConfig,
    EstimatorConfig,
    LoraConfig,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    SketchSchedule,
)
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore
from otb_analysis.training.check import check

SAMPLE = SampleConfig(prompts=4, group_size=3, max_new_tokens=6, soft=2)
RLOO = EstimatorConfig(name="rloo")


@pytest.fixture(scope="module")
def store(trained):
    return RunStore(trained("soft", sample=SAMPLE, estimator=RLOO))


def test_soft_tokens_have_scores_and_no_proxy(store):
    tokens = store.tokens_df()
    soft = tokens["t"] < 2
    assert soft.sum() == 3 * 12 * 2 and tokens.loc[soft, "token"].str.startswith("~").all()
    assert tokens.loc[soft, ["energy_proxy", "entropy", "sum_pi_sq"]].isna().all(axis=None)
    assert tokens.loc[~soft, ["energy_proxy", "entropy", "sum_pi_sq"]].notna().all(axis=None)
    assert (tokens["grad_norm_sq"] > 0).all() and (tokens["measured_by"] == "exact").all()
    assert tokens["logprob"].notna().all()
    mismatch = store.steps_df()["mismatch_max"]
    assert (mismatch < 1e-3).all()  # sampled and scored densities agree
    assert (store.steps_df()["measurement_gaps"] == 0).all()


def test_update_follows_the_gradient_that_the_gram_matrix_measures(store):
    rows = store.sql("select * from gradients where estimator = 'rloo'").sort_values("step")
    norms = store.steps_df()["grad_norm"].to_numpy(float)
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"].to_numpy(float)), norms, rtol=1e-4)


def test_baselines_that_weigh_by_energies_use_exact_ones_only(store):
    rows = store.sql("select distinct estimator, energy_source from gradients")
    sources = rows.groupby("estimator")["energy_source"].agg(set).to_dict()
    assert sources["otb"] == sources["sequence_optimal"] == {"exact"} and sources["rloo"] == {"none"}
    assert "energy_regression" not in sources  # it reads entropies
    with pytest.raises(InputError, match="no proxy energy"):
        store.token_arrays(0).estimator_inputs("proxy")
    assert store.token_arrays(0).estimator_inputs("exact").entropy is None


def test_otb_trains_on_exact_energies_of_soft_tokens(trained):
    run = RunStore(trained("soft-otb", sample=SAMPLE, estimator=EstimatorConfig(name="otb", energy="exact")))
    tokens = run.tokens_df()
    assert tokens["baseline"].notna().all() and tokens["grad_norm_sq"].notna().all()


def test_what_knows_nothing_of_distributions_works_as_always(trained):
    settings = {"sample": replace(SAMPLE, filter="dynamic", filter_rounds=60), "estimator": RLOO}
    objective = ObjectiveConfig(ratio="ppo", epochs=2, kl_coefficient=0.01)
    run = RunStore(trained("soft-ppo", objective=objective, critic=CriticConfig(enabled=True, width=8), **settings))
    steps = run.steps_df()
    assert np.isfinite(steps["kl_reference"].to_numpy(float)).all() and (steps["mismatch_max"] < 1e-3).all()


def test_adapters_train_on_soft_tokens(trained):
    pytest.importorskip("peft")
    run = RunStore(trained("soft-lora", sample=SAMPLE, estimator=RLOO, lora=LoraConfig(rank=2)))
    rows = run.sql("select * from gradients where estimator = 'rloo'").sort_values("step")
    norms = run.steps_df()["grad_norm"].to_numpy(float)
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"].to_numpy(float)), norms, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "processes", "words"),
    [
        ({"estimator": EstimatorConfig(name="otb")}, 1, "no categorical proxy.*estimator.energy to 'exact'"),
        ({"estimator": EstimatorConfig(name="0.5*otb+0.5*rloo")}, 1, "no categorical proxy"),
        ({"estimator": EstimatorConfig(name="energy_regression", energy="exact")}, 1, "no entropy"),
        ({"objective": ObjectiveConfig(token_weight="stapo")}, 1, "objective.token_weight reads"),
        ({"objective": ObjectiveConfig(entropy_bonus=0.1)}, 1, "objective.entropy_bonus reads"),
        ({"critic": CriticConfig(enabled=True, kind="model")}, 1, "critic.kind to 'head'"),
        ({"sample": replace(SAMPLE, engine="vllm")}, 1, "samples tokens only"),
        ({"sample": replace(SAMPLE, soft=6)}, 1, "discrete answer"),
        ({}, 2, "one process"),
        ({"optimize": OptimizeConfig(precision="bfloat16")}, 1, "float32"),
        ({"measure": MeasureConfig(engine="fast")}, 1, "no rule"),
        ({"measure": MeasureConfig(gram="sketch")}, 1, "always exact"),
        ({"measure": MeasureConfig(sketch=SketchSchedule(every=1), exact=Schedule())}, 1, "measure.sketch.every to 0"),
        ({"measure": MeasureConfig(budget=0.2)}, 1, "measure.budget to 0"),
    ],
)
def test_what_needs_a_drawn_token_is_refused_before_anything_is_made(tiny_config, changes, processes, words):
    settings = {"run": "soft", "sample": SAMPLE, "estimator": RLOO} | changes
    with pytest.raises(InputError, match=words):
        check(replace(tiny_config, **settings), processes)


def test_regression_without_entropies_is_allowed(tiny_config):
    features = {"features": "1,m,f,m*f", "ridge": "1"}
    estimator = EstimatorConfig(name="energy_regression", energy="exact", options=features)
    check(replace(tiny_config, sample=SAMPLE, estimator=estimator))
