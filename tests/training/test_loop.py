"""The loop: what it writes is what it did, and watching it changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.config import (
    ChainSumConfig,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
)
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, RegressionOptions, estimate, with_limit
from otb_analysis.rollouts.models import load_policy
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore
from otb_analysis.training.check import check
from otb_analysis.training.loop import train_step

LIMIT = 6 * SampleConfig().max_turns  # of the tokens in a rollout of the tiny configuration
UNMEASURED = {"measure": MeasureConfig(exact=Schedule(0, 0)), "evaluate": EvaluateConfig(every=0)}
KINDS = {"BIGINT": "iu", "INTEGER": "iuf", "FLOAT": "f", "DOUBLE": "f", "BOOLEAN": "bO", "VARCHAR": "OTU"}


def weights(path):
    return load_policy(path / "model")[0].state_dict()


def same_weights(a, b):
    first, second = weights(a), weights(b)
    return all(torch.equal(first[name], second[name]) for name in first)


def timeless(frame):
    return frame[[name for name in frame.columns if not name.startswith("seconds_")]]


def test_run_ends_complete_with_all_its_tables_and_a_loadable_model(otb_run):
    store = RunStore(otb_run)
    assert store.info["status"] == "complete"
    assert store.complete_steps() == [0, 1, 2]
    for table in TABLES:
        if table in ("subgroups", "sampling"):  # groups of 3 cannot be halved; `otb score` alone checks the sampling
            continue
        assert store.sql(f"select distinct step from {table} order by step")["step"].tolist() == [0, 1, 2]
    model, tokenizer = load_policy(otb_run / "model")
    assert tokenizer("1+2=")["input_ids"]
    assert all(p.isfinite().all() for p in model.parameters())
    assert not list(otb_run.glob(".*"))


@pytest.mark.parametrize("table", TABLES)
def test_every_column_of_the_schema_is_there_with_its_type(otb_run, table):
    frame = RunStore(otb_run).sql(f"select * from {table}")
    for column in TABLES[table]:
        assert column.name in frame
        kind = frame[column.name].dtype.kind
        assert kind in KINDS[column.dtype] or frame[column.name].isna().all(), (column.name, kind)


OTHER_LEVELS = {
    *("energy_total", "energy_total_stderr", "n_sampled_tokens", "calibration_slope", "calibration_error"),
    *("attribution_top_share", "signal_total", "noise_total"),
}
FILTERED = ("filter_rounds", "filter_kept_share", "filter_reward_mean")
NEVER_HERE = {
    # Too few tokens for a tail; on-policy, and no divergence wanted.
    "steps": {
        "energy_tail_k",
        "exact_tail_k",
        "ratio_mean",
        "ratio_clip_share",
        "kl_reference",
        *FILTERED,
        *OTHER_LEVELS,
    }
    # Fewer than 16 held-out prompts, no trackers, and every number is finite.
    | {f"heldout_{name}_{end}" for name in ("reward", "success", "pass_at_k") for end in ("low", "high")}
    | {"tracker_gaps", "not_finite", *FILTERED},
    "rollouts": {"energy_total", "energy_total_stderr"},  # of the level sampled
    "tokens": {
        "grad_norm_sq_stderr",
        "path_norm_sq",
        "energy_calibrated",
        "attribution",
        "signal",
        "noise",
        "contrast",
    },
    # Below 16 prompts, without pools, and never sketched.
    "gradients": {"variance_low", "variance_high", "within", "between", "sketch_dim"},
    "grams": {"sketch_dim"},
}


@pytest.mark.parametrize("table", ["tokens", "rollouts", "steps", "gradients", "grams"])
def test_no_column_that_this_run_measures_is_left_empty(otb_run, table):
    frame = RunStore(otb_run).sql(f"select * from {table}")
    empty = {name for name in frame.columns if frame[name].isna().all()}
    # Bias, projection, SF and efficiency are null where ‖∇J‖² came out non-positive.
    undefined = {"relative_bias", "projection", "sf", "efficiency"} if table == "gradients" else set()
    assert empty - undefined <= NEVER_HERE.get(table, set()), empty


def test_stored_baseline_and_advantage_are_recomputed_from_disk(otb_run):
    store = RunStore(otb_run)
    for step in store.complete_steps():
        again = estimate("otb", store.token_arrays(step).estimator_inputs("proxy"))
        tokens = store.tokens_df([step])
        place = tokens["rollout"], tokens["t"]
        np.testing.assert_allclose(tokens["baseline"], again.baseline[place], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(tokens["advantage"], again.advantage[place], rtol=1e-5, atol=1e-6)


def test_logged_gradient_norm_is_that_of_the_exact_gradient(otb_run):
    # All groups are measured and of one size, so ḡ = mean_p ḡ_p is the gradient the update followed.
    store = RunStore(otb_run)
    rows = store.gradients_df(where="estimator = 'otb' and energy_source = 'proxy'")
    logged = store.steps_df()["grad_norm"]
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"]), logged, rtol=1e-4)
    assert (logged > 0).any()


def test_loss_is_minus_the_mean_over_rollouts_of_advantage_times_logprob(otb_run):
    store = RunStore(otb_run)
    expected = store.sql("select -sum(advantage * logprob) / count(distinct rollout) as loss from tokens group by step")
    np.testing.assert_allclose(sorted(store.steps_df()["loss"]), sorted(expected["loss"]), rtol=1e-4, atol=1e-5)


def test_every_estimator_whose_inputs_exist_is_measured_with_both_energies(otb_run):
    rows = RunStore(otb_run).sql("select distinct estimator, energy_source from gradients")
    found = set(zip(rows["estimator"], rows["energy_source"], strict=True))
    expected = set()
    for name, entry in ESTIMATORS.items():
        if "ratio" in entry.needs:
            continue  # this run is on-policy and weighs nothing by a ratio
        if "energy" in entry.needs:
            expected |= {(name, "proxy"), (name, "exact")}
        elif "rollout_norm_sq" in entry.needs:
            expected.add((name, "exact"))
        elif "position_baseline" not in entry.needs:
            expected.add((name, "none"))
    assert found == expected


def test_step_scalars_are_those_of_the_stored_tokens_and_rollouts(otb_run):
    store = RunStore(otb_run)
    steps = store.steps_df().set_index("step")
    by_step = store.sql(
        "select step, count(*) as n, avg(entropy) as entropy, avg(logprob) as logprob, "
        "max(abs(logprob - behavior_logprob)) as mismatch from tokens where mask group by step order by step"
    ).set_index("step")
    assert steps["n_tokens"].tolist() == by_step["n"].tolist()
    np.testing.assert_allclose(steps["entropy_mean"], by_step["entropy"], rtol=1e-5)
    np.testing.assert_allclose(steps["logprob_mean"], by_step["logprob"], rtol=1e-5)
    assert steps["mismatch_max"].max() < 1e-5
    assert (steps["n_measured_prompts"] == 4).all()
    assert (steps["measurement_gaps"] == 0).all()
    rewards = store.sql("select step, avg(reward) as r, avg(reward_odd) as part from rollouts group by step order by 1")
    np.testing.assert_allclose(steps["reward_mean"], rewards["r"])
    np.testing.assert_allclose(steps["reward_mean"], rewards["part"])
    assert steps["clipped"].tolist() == (steps["grad_norm"] > 0.5).tolist()
    # Evaluated every second step and at the last one.
    assert steps["heldout_reward"].notna().tolist() == [True, False, True]


def test_exact_norms_are_kept_for_policy_tokens_of_measured_groups_only(trained):
    path = trained("part", measure=MeasureConfig(exact=Schedule(every=2, prompts=2)))
    store = RunStore(path)
    tokens = store.tokens_df()
    measured = tokens["step"].isin([0, 2]) & (tokens["group"] < 2)
    assert (tokens["grad_norm_sq"].notna() == measured).all()
    assert (tokens["measured_by"] == np.where(measured, "exact", "none")).all()
    # Two of four groups in random order: every token of the step had one chance in two.
    assert (tokens["inclusion_prob"].notna() == measured).all()
    assert set(tokens["inclusion_prob"].dropna()) == {0.5}
    assert store.rollouts_df()["score_norm_sq"].notna().sum() == 2 * 2 * 3
    assert store.steps_df()["n_measured_prompts"].tolist() == [2, 0, 2]
    assert 1 not in store.grams()
    # The same two groups measured among all four: the same numbers.
    whole = RunStore(trained("otb")).tokens_df()
    np.testing.assert_array_equal(tokens["grad_norm_sq"][measured], whole["grad_norm_sq"][measured])


def test_same_seed_gives_the_same_run_bit_for_bit(otb_run, trained):
    again = trained("otb_again")
    for table in TABLES:
        first, second = (timeless(RunStore(p).sql(f"select * from {table}")) for p in (otb_run, again))
        keys = [c.name for c in TABLES[table] if c.key]
        first, second = (f.sort_values(keys).reset_index(drop=True) for f in (first, second))
        assert first.equals(second), table
    assert same_weights(otb_run, again)


def test_another_seed_gives_another_run(otb_run, trained):
    assert not same_weights(otb_run, trained("seed_1", seed=1, **UNMEASURED))


def test_measuring_and_evaluating_change_nothing_about_the_training(otb_run, trained):
    quiet = trained("quiet", **UNMEASURED)
    assert same_weights(otb_run, quiet)
    columns = [
        "step",
        "group",
        "rollout",
        "t",
        "token_id",
        "logprob",
        "behavior_logprob",
        "reward",
        "value",
        "advantage",
    ]
    first, second = (RunStore(p).tokens_df(columns=columns) for p in (otb_run, quiet))
    assert first.equals(second)
    assert RunStore(quiet).gradients_df().empty
    assert RunStore(quiet).steps_df()["heldout_reward"].isna().all()


def test_critic_observes_and_changes_nothing_about_the_training(otb_run, trained):
    alone = trained("alone", critic=CriticConfig(enabled=False), **UNMEASURED)
    assert same_weights(otb_run, alone)
    assert RunStore(alone).tokens_df()["value"].isna().all()


@pytest.mark.parametrize("target", ["gae", "tvm"])
def test_critic_with_a_backbone_observes_and_changes_nothing_about_the_training(otb_run, trained, target):
    own = CriticConfig(kind="model", target=target, updates=1, gradient_checkpointing=target == "gae")
    beside = trained(f"beside_{target}", critic=own, **UNMEASURED)
    assert same_weights(otb_run, beside)
    values = RunStore(beside).tokens_df(columns=["step", "value"])
    assert (values["value"][values["step"] == 0] == 0).all()  # it had seen nothing
    assert (values["value"][values["step"] == 2] != 0).all()


def test_two_estimators_meet_the_same_prompts_and_at_first_the_same_rollouts(otb_run, trained):
    mean = trained("group_mean", estimator=EstimatorConfig(name="group_mean"))
    first, second = RunStore(otb_run), RunStore(mean)
    columns = ["step", "group", "rollout", "prompt_id"]
    assert first.rollouts_df(columns=columns).equals(second.rollouts_df(columns=columns))
    drawn = ["step", "rollout", "t", "token_id", "logprob", "reward", "grad_norm_sq"]
    assert first.tokens_df([0], drawn).equals(second.tokens_df([0], drawn))
    # On the same rollouts the same Gram matrix, whoever trains.
    a, b = first.grams()[0], second.grams()[0]
    assert a.labels == b.labels
    np.testing.assert_array_equal(a.inner, b.inner)
    assert not same_weights(otb_run, mean)


@pytest.mark.parametrize("name", ["classic_optimal", "otb_exact", "value", "grpo", "otb_turn"])
def test_estimator_with_other_needs_trains(trained, name):
    energy = "exact" if name == "otb_exact" else "proxy"
    own = EstimatorConfig(name=name.removesuffix("_exact"), energy=energy)
    path = trained(name, estimator=own, measure=MeasureConfig(exact=Schedule(0, 0)), optimize=OptimizeConfig(steps=2))
    store = RunStore(path)
    assert store.info["status"] == "complete"
    measured = name in ("classic_optimal", "otb_exact")
    assert store.tokens_df()["grad_norm_sq"].notna().all() == measured
    # What trained on exact norms is recomputed from those on disk.
    if measured:
        arrays = store.token_arrays(1)
        again = estimate(own.name, arrays.estimator_inputs("exact"))
        tokens = store.tokens_df([1])
        np.testing.assert_allclose(
            tokens["advantage"], again.advantage[tokens["rollout"], tokens["t"]], rtol=1e-4, atol=1e-6
        )
        assert (store.steps_df()["n_measured_prompts"] == 4).all()


def test_options_of_an_estimator_are_read_from_text(trained):
    own = EstimatorConfig(name="energy_ema", options={"decay": "0.5", "tail": "group"})
    path = trained("ema", estimator=own, optimize=OptimizeConfig(steps=1), **UNMEASURED)
    from otb_analysis.estimators import options_from_dict

    again = estimate(
        "energy_ema",
        RunStore(path).token_arrays(0).estimator_inputs("proxy"),
        options_from_dict("energy_ema", {"decay": 0.5, "tail": "group"}),
    )
    tokens = RunStore(path).tokens_df()
    np.testing.assert_allclose(tokens["baseline"], again.baseline[tokens["rollout"], tokens["t"]], rtol=1e-5, atol=1e-6)


LATER = (
    "james_stein_corrected", "maxrl", "mc_grpo", "qae", "gpg", "reinforce_plus_plus_baseline", "blend_otb_regression",
    "0.5*rloo+0.5*energy_across_loo",
)  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_one_step_follows_the_advantages_of_an_estimator(trained, name):
    own = EstimatorConfig(name=name)
    path = trained(f"step-{name.replace('*', '-')}", estimator=own, optimize=OptimizeConfig(steps=1))
    store = RunStore(path)
    again = estimate(name, store.token_arrays(0).estimator_inputs("proxy"), with_limit(name, None, LIMIT))
    tokens = store.tokens_df()
    place = tokens["rollout"], tokens["t"]
    np.testing.assert_allclose(tokens["advantage"], again.advantage[place], rtol=1e-4, atol=1e-5)
    rows = store.gradients_df(where=f"estimator = '{name}' and energy_source in ('proxy', 'none')")
    assert (store.steps_df()["grad_norm"] > 0).all()
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"]), store.steps_df()["grad_norm"], rtol=1e-4)


@pytest.mark.parametrize("memory", ["0", "0.9"])
def test_regression_trains_on_the_sampling_limit_and_what_it_remembers(trained, memory):
    own = EstimatorConfig(name="energy_regression", options={"memory": memory})
    store = RunStore(trained(f"regression-{memory}", estimator=own))
    state = None
    for step in store.complete_steps():
        inputs = replace(store.token_arrays(step).estimator_inputs("proxy"), state=state)
        again = estimate("energy_regression", inputs, RegressionOptions(T_max=LIMIT, memory=float(memory)))
        state, tokens = again.state, store.tokens_df([step])
        place = tokens["rollout"], tokens["t"]
        np.testing.assert_allclose(tokens["baseline"], again.baseline[place], rtol=1e-4, atol=1e-5)
    assert (state is not None) == (memory != "0")
    # all groups are measured, so the Gram matrix's gradient is the one that the update followed: with the same memory
    rows = store.gradients_df(where="estimator = 'energy_regression' and energy_source = 'proxy'")
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"]), store.steps_df()["grad_norm"], rtol=1e-4)


@pytest.mark.parametrize("name", ["ebpo", "ebpo_loo"])
def test_running_means_train_on_what_they_remember(trained, name):
    store = RunStore(trained(f"remembers-{name}", estimator=EstimatorConfig(name=name)))
    state = None
    for step in store.complete_steps():
        again = estimate(name, replace(store.token_arrays(step).estimator_inputs("proxy"), state=state))
        state, tokens = again.state, store.tokens_df([step])
        np.testing.assert_allclose(tokens["advantage"], again.advantage[tokens["rollout"], tokens["t"]], atol=1e-5)
    assert state.sums[:, 0].tolist() == [36, 12]
    # measured with the same memory that the update followed
    rows = store.gradients_df(where=f"estimator = '{name}'")
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"]), store.steps_df()["grad_norm"], rtol=1e-4)


def test_prompts_that_come_again_are_remembered(made):
    trainer = made(
        estimator=EstimatorConfig(name="dbb_loo", options={"discount": "0.5"}),
        chain_sum=ChainSumConfig(terms_min=2, terms_max=2, largest=10),
        optimize=OptimizeConfig(steps=5),
        **UNMEASURED,
    )
    drawn, kept = [trainer.task.prompt("train", i).id for i in range(20)], []
    for step in range(5):
        train_step(trainer, step)
        kept.append(trainer.remembered)
    assert [len(state.key) for state in kept] == [len(set(drawn[:n])) for n in (4, 8, 12, 16, 20)]
    # a prompt drawn once holds ½·2 + 3 counts, at two steps ½·4 + 3, and with two groups at the second ½·4 + 6
    counts = kept[-1].sums.sum(axis=1).tolist()
    assert {n: counts.count(n) for n in set(counts)} == {4.0: 13, 5.0: 2, 8.0: 1}


def test_options_of_regression_leave_the_inputs_of_others_alone(trained):
    own = EstimatorConfig(name="energy_regression", options={"features": "1,m,f,m*f", "T_max": "99"})
    path = trained("features", estimator=own, optimize=OptimizeConfig(steps=1), **UNMEASURED)
    options = RegressionOptions(features=("1", "m", "f", "m·f"), T_max=99)
    again = estimate("energy_regression", RunStore(path).token_arrays(0).estimator_inputs("proxy"), options)
    tokens = RunStore(path).tokens_df()
    np.testing.assert_allclose(tokens["baseline"], again.baseline[tokens["rollout"], tokens["t"]], rtol=1e-4, atol=1e-5)


SINGLE = SampleConfig(prompts=5, group_size=1, max_new_tokens=6)


@pytest.mark.parametrize("name", ["none", "batch_mean", "energy_across_loo", "value"])
def test_groups_of_one_are_counted_and_train_what_needs_no_group(trained, name):
    store = RunStore(trained(f"single-{name}", sample=SINGLE, estimator=EstimatorConfig(name=name)))
    steps = store.steps_df()
    assert (steps["n_singleton_groups"] == 5).all()
    assert (steps["n_zero_variance_groups"] == 0).all()
    assert (steps["fallback_share"] == 0).all()
    assert (store.tokens_df()["baseline"] == 0).all() == (name == "none")
    assert (steps["measurement_gaps"] == 0).all()


@pytest.mark.parametrize("name", ["rloo", "group_mean", "grpo", "otb", "james_stein", "energy_regression", "tempo_loo"])
def test_groups_of_one_are_refused_by_what_compares_rollouts_of_a_prompt(tiny_config, name):
    with pytest.raises(InputError, match=rf"group_size is 1 .*'{name}'") as e:
        check(replace(tiny_config, sample=SINGLE, estimator=EstimatorConfig(name=name)))
    assert str(e.value).endswith(
        "to at least 2, or estimator.name to one of none, batch_mean, batch_mean_loo, energy_across_loo, dbb, dbb_loo, "
        "value, evpo, tvm."
    )


def test_groups_of_one_are_refused_where_shaping_would_drop_them_all(tiny_config):
    own = replace(tiny_config, sample=SINGLE, estimator=EstimatorConfig(name="none"))
    with pytest.raises(InputError, match=r"'drop_equal' drops every rollout"):
        check(replace(own, objective=ObjectiveConfig(shaping="drop_equal")))


def test_equal_rewards_are_counted_and_move_nothing(trained, checkpoint):
    # chain_sum is never solved by this model: all rewards are 0, so every advantage is.
    path = trained("equal", task="chain_sum")
    steps = RunStore(path).steps_df()
    assert (steps["n_zero_variance_groups"] == 4).all()
    assert (steps["grad_norm"] == 0).all()
    assert (steps["measurement_gaps"] == 0).all()
    after, before = weights(path), load_policy(checkpoint)[0].state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_temperature_is_that_of_sampling_scoring_and_measuring(trained):
    path = trained("warm", sample=SampleConfig(prompts=4, group_size=3, max_new_tokens=6, temperature=2.0))
    store = RunStore(path)
    assert store.steps_df()["mismatch_max"].max() < 1e-5
    rows = store.gradients_df(where="estimator = 'otb' and energy_source = 'proxy'")
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"]), store.steps_df()["grad_norm"], rtol=1e-4)


def test_one_update_follows_the_gradient(trainer):
    # One step of AdamW from rest moves every weight against its gradient's sign by the learning rate.
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    tables = train_step(trainer, 0)
    moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in trainer.model.named_parameters()])
    rate = trainer.config.optimize.learning_rate
    assert float(moved.abs().max()) == pytest.approx(rate, rel=1e-2)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert tables.steps["grad_norm"] > 0


@pytest.mark.parametrize("broken", ["norms", "gram", "gradient_statistics", "proved"])
def test_failing_instrument_is_a_warning_and_a_counted_gap(trainer, monkeypatch, broken):
    from otb_analysis.measurement import measurer as measure

    def fail(*args, **named):
        raise RuntimeError("the lens fell off")

    if broken in ("gradient_statistics", "proved"):
        monkeypatch.setattr(measure, broken, fail)
    else:
        monkeypatch.setattr(trainer.measurer, broken, fail)
    with pytest.warns(RuntimeWarning, match=r"step 0 failed .*the lens fell off"):
        tables = train_step(trainer, 0)
    assert tables.steps["measurement_gaps"] == 1
    # Without norms the estimators that read none can still be compared.
    assert (tables.gradients is None) == (broken != "norms")
    assert (tables.grams is None) == (broken == "gram")
    assert tables.steps["n_measured_prompts"] == (0 if broken == "norms" else 4)


def test_run_with_a_failing_instrument_is_the_run_without_it(otb_run, tiny_config, tmp_path, monkeypatch, one_thread):
    from otb_analysis.measurement import measurer as measure
    from otb_analysis.training import loop

    def fail(*args, **named):
        raise MemoryError

    monkeypatch.setattr(measure, "token_score_norms", fail)
    with pytest.warns(RuntimeWarning, match="exact norms"):
        path = loop.train(replace(tiny_config, run="blind", root=tmp_path))
    assert same_weights(otb_run, path)
    assert RunStore(path).steps_df()["measurement_gaps"].tolist() == [1, 1, 1]


def test_row_of_the_training_estimator_uses_its_options(trained):
    path = trained("tail", estimator=EstimatorConfig(name="otb", options={"tail": "zero"}))
    store = RunStore(path)
    rows = store.gradients_df(where="estimator = 'otb' and energy_source = 'proxy'")
    np.testing.assert_allclose(np.sqrt(rows["mean_norm_sq"]), store.steps_df()["grad_norm"], rtol=1e-4)


def test_token_weights_change_the_update_and_not_the_stored_advantages(trained):
    plain, gated = (
        trained(f"weight-{name}", objective=ObjectiveConfig(token_weight=name)) for name in ("none", "delightful")
    )
    first = [RunStore(path).tokens_df(steps=(0, 0))[["token_id", "advantage"]] for path in (plain, gated)]
    assert first[0].equals(first[1]) and (first[0]["advantage"] != 0).any()
    norms = [RunStore(path).steps_df()["grad_norm"].iloc[0] for path in (plain, gated)]
    assert 0 < norms[1] != norms[0]
