"""Updates against gradients worked out the slow way: objectives, mini-batches, micro-batches, older samplers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.config import LoraConfig, ObjectiveConfig, OptimizeConfig
from otb_analysis.errors import InputError
from otb_analysis.objectives.aggregation import AGGREGATIONS
from otb_analysis.objectives.ratios import RATIOS
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.sampling import sample
from otb_analysis.store import RunStore
from otb_analysis.training.loop import train_step
from otb_analysis.training.update import PolicyOptimizer, minibatches


def drawn(trainer, seed=3):
    """Rollouts, their forward pass and a token table with random advantages."""
    torch.manual_seed(seed)
    config = trainer.config
    prompts = [trainer.task.prompt("train", i) for i in range(config.sample.prompts)]
    rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, config.sample)
    from otb_analysis.measurement.table import compute_rewards

    forward = trainer.policy.forward(rollouts, keep_graph=False)
    table = trainer.table(compute_rewards(trainer.task, rollouts), forward, None)
    advantage = np.where(table.mask, np.random.default_rng(seed).normal(size=table.mask.shape), 0.0)
    return rollouts, forward, trainer.objective.batch(rollouts, table, advantage, None)


def gathered(trainer, batch, forward):
    """The gradient that one update would step along, as one vector, without stepping."""
    found = []
    step = trainer.optimizer.step

    def watching(factor=1.0):
        found.append(torch.cat([-p.grad.flatten().double() for p in trainer.policy.parameters]))
        return step(factor)

    trainer.optimizer.step = watching
    trainer.update(batch, forward)
    return found


def surrogate_gradient(trainer, batch, surrogate):
    """∇ of a surrogate of log π [N, T] by autograd over the whole batch at once."""
    scored = trainer.policy.score(batch.rollouts, np.arange(len(batch.mask)))
    mask = torch.as_tensor(batch.mask)
    logprob = torch.where(mask, scored.logprob, 0.0)
    grads = torch.autograd.grad(surrogate(logprob, mask), trainer.policy.parameters)
    return torch.cat([g.flatten().double() for g in grads])


@pytest.mark.parametrize("micro_batch", [0, 1, 5])
def test_default_update_follows_the_mean_over_rollouts_of_advantage_times_score(made, micro_batch):
    trainer = made(optimize=OptimizeConfig(micro_batch=micro_batch))
    _, forward, batch = drawn(trainer)
    n, advantage = len(batch.mask), torch.as_tensor(batch.advantage, dtype=torch.float32)
    expected = surrogate_gradient(trainer, batch, lambda logprob, mask: (advantage * logprob).sum() / n)
    (found,) = gathered(trainer, batch, forward)
    assert torch.allclose(found, expected, atol=1e-6 * float(expected.norm()))


def test_clipped_objective_has_the_gradient_that_autograd_finds(made):
    """PPO's surrogate mean over tokens of min(ρA, clip(ρ, .8, 1.2)A), written with the ratio in the graph."""
    trainer = made(objective=ObjectiveConfig(ratio="ppo", aggregation="token_mean"))
    _, forward, batch = drawn(trainer)
    drift = np.random.default_rng(0).normal(scale=0.3, size=batch.mask.shape)
    batch = replace(batch, behavior=np.where(batch.mask, forward.stats.logprob + drift, np.nan))
    behavior = torch.as_tensor(np.nan_to_num(batch.behavior), dtype=torch.float32)
    advantage = torch.as_tensor(batch.advantage, dtype=torch.float32)

    def surrogate(logprob, mask):
        ratio = torch.exp(logprob - behavior)
        terms = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return torch.where(mask, terms, 0.0).sum() / mask.sum()

    expected = surrogate_gradient(trainer, batch, surrogate)
    (found,) = gathered(trainer, batch, forward)
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.norm()))
    assert float(expected.norm()) > 0


def test_gspo_has_the_gradient_that_autograd_finds(made):
    trainer = made(objective=ObjectiveConfig(ratio="gspo", ratio_options={"low": "0.1", "high": "0.1"}))
    _, forward, batch = drawn(trainer)
    drift = np.random.default_rng(0).normal(scale=0.2, size=batch.mask.shape)
    batch = replace(
        batch,
        behavior=np.where(batch.mask, forward.stats.logprob + drift, np.nan),
        advantage=np.where(batch.mask, batch.advantage[:, :1], 0.0),
    )
    behavior = torch.as_tensor(np.nan_to_num(batch.behavior), dtype=torch.float32)
    advantage = torch.as_tensor(batch.advantage, dtype=torch.float32)

    def surrogate(logprob, mask):
        length = mask.sum(dim=1, keepdim=True)
        ratio = torch.exp(torch.where(mask, logprob - behavior, 0.0).sum(dim=1, keepdim=True) / length)
        terms = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        return torch.where(mask, terms, 0.0).sum() / len(mask)

    expected = surrogate_gradient(trainer, batch, surrogate)
    (found,) = gathered(trainer, batch, forward)
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.norm()))


def test_divergence_and_entropy_have_the_gradients_that_autograd_finds(made):
    own = ObjectiveConfig(kl_coefficient=0.3, kl_estimator="k3", entropy_bonus=0.2)
    trainer = made(objective=own)
    _, forward, batch = drawn(trainer)
    other = np.where(batch.mask, forward.stats.logprob + 0.4 * np.cos(np.arange(batch.mask.shape[1])), 0.0)
    batch = replace(batch, reference=other)
    reference, n = torch.as_tensor(other, dtype=torch.float32), len(batch.mask)
    advantage = torch.as_tensor(batch.advantage, dtype=torch.float32)

    def surrogate(logprob, mask):
        entropy = trainer.policy.score(batch.rollouts, np.arange(n), entropy=True).entropy
        k3 = torch.exp(reference - logprob) - 1 - (reference - logprob)
        terms = advantage * logprob - 0.3 * k3
        return torch.where(mask, terms, 0.0).sum() / n + 0.2 * torch.where(mask, entropy, 0.0).sum() / mask.sum()

    expected = surrogate_gradient(trainer, batch, surrogate)
    (found,) = gathered(trainer, batch, forward)
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.norm()))


def test_first_gradients_of_equal_mini_batches_average_to_that_of_the_batch(made):
    whole, halves = made(), made(objective=ObjectiveConfig(minibatches=2), optimize=OptimizeConfig(learning_rate=1e-12))
    _, forward, batch = drawn(whole)
    _, forward_again, same = drawn(halves)
    np.testing.assert_array_equal(batch.advantage, same.advantage)
    (full,) = gathered(whole, batch, forward)
    parts = gathered(halves, same, forward_again)
    assert len(parts) == 2
    assert torch.allclose(sum(parts) / 2, full, atol=1e-5 * float(full.norm()))


def test_every_epoch_visits_every_rollout_once_in_whole_groups(made):
    trainer = made()
    rollouts, _, _ = drawn(trainer)
    own = ObjectiveConfig(epochs=3, minibatches=2)
    parts = list(minibatches(rollouts, own, seed=5))
    assert len(parts) == 6
    for epoch in range(3):
        together = np.concatenate(parts[2 * epoch : 2 * epoch + 2])
        assert sorted(together) == list(range(len(rollouts.group)))
        first, second = (set(rollouts.group[p]) for p in parts[2 * epoch : 2 * epoch + 2])
        assert not first & second
    assert [p.tolist() for p in parts] == [p.tolist() for p in minibatches(rollouts, own, seed=5)]


@pytest.mark.parametrize("micro_batch", [0, 5])
def test_penalised_drift_is_the_slope_of_its_surrogate(made, micro_batch):
    own = ObjectiveConfig(
        ratio="token", token_weight="kl_cov", token_weight_options={"share": "0.3", "coefficient": "2"}
    )
    trainer = made(objective=own, optimize=OptimizeConfig(micro_batch=micro_batch))
    rollouts, forward, _ = drawn(trainer)
    table = trainer.table(rollouts, forward, None)
    sampler = table.behavior_logprob + np.where(np.arange(table.mask.shape[1]) % 2, 0.3, -0.2)
    advantage = np.where(table.mask, np.random.default_rng(3).normal(size=table.mask.shape), 0.0)
    batch = trainer.objective.batch(rollouts, replace(table, behavior_logprob=sampler), advantage, None)
    covariance = (advantage - advantage[table.mask].mean()) * (
        forward.stats.logprob - forward.stats.logprob[table.mask].mean()
    )
    order = np.argsort(-covariance[table.mask])
    chosen = np.zeros(order.shape)
    chosen[order[: int(0.3 * len(order))]] = 2.0
    np.testing.assert_array_equal(batch.penalty[table.mask], chosen)

    def surrogate(logprob, mask):
        drift = logprob - torch.nan_to_num(torch.as_tensor(batch.behavior))
        terms = torch.as_tensor(advantage) * drift.exp() - torch.as_tensor(batch.penalty) * drift.abs()
        return torch.where(mask, terms, 0.0).sum() / len(mask)

    expected = surrogate_gradient(trainer, batch, surrogate)
    (found,) = gathered(trainer, batch, forward)
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.norm()))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_weights_by_covariance_train_over_several_updates(trained, name):
    own = ObjectiveConfig(ratio="ppo", token_weight=name, minibatches=2, epochs=2)
    assert np.isfinite(RunStore(trained(f"w-{name}", objective=own)).steps_df()["grad_norm"]).all()


@pytest.mark.parametrize("ratio", [name for name in RATIOS if name != "none"])
def test_every_ratio_trains_off_policy_and_says_how_far_it_drifted(trained, ratio):
    own = ObjectiveConfig(ratio=ratio, minibatches=2, epochs=2)
    steps = RunStore(trained(f"ratio-{ratio}", objective=own)).steps_df()
    assert (steps["n_updates"] == 4).all()
    assert steps["ratio_mean"].between(0.2, 5).all()
    assert steps["ratio_clip_share"].between(0, 1).all()
    assert np.isfinite(steps["grad_norm"]).all()


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_every_aggregation_trains(trained, aggregation):
    own = ObjectiveConfig(aggregation=aggregation)
    assert np.isfinite(RunStore(trained(f"a-{aggregation}", objective=own)).steps_df()["loss"]).all()


def test_penalty_in_the_reward_is_what_the_estimator_sees_and_the_reward_stays_the_tasks(trained):
    own = ObjectiveConfig(kl_coefficient=0.5, kl_estimator="k1", kl_in="reward")
    store = RunStore(trained("penalty", objective=own, optimize=OptimizeConfig(steps=3, learning_rate=0.05)))
    tokens = store.tokens_df().query("mask and step == 2")
    seen = tokens.groupby("rollout")["reward"].sum()
    paid = store.rollouts_df().query("step == 2").set_index("rollout")["reward"]
    steps = store.steps_df().set_index("step")
    assert steps.loc[0, "kl_reference"] == pytest.approx(0.0, abs=1e-6)
    penalty = 0.5 * steps.loc[2, "kl_reference"] * len(tokens)
    assert float((paid - seen).sum()) == pytest.approx(penalty, rel=1e-3)
    assert abs(penalty) > 1e-3


def test_dropped_groups_take_no_part_in_the_update(made):
    trainer = made(objective=ObjectiveConfig(shaping="drop_equal"))
    rollouts, forward, _ = drawn(trainer)
    from otb_analysis.measurement.table import compute_rewards

    first = rollouts.group == 0
    equal = np.where(first[:, None], 0.0, compute_rewards(trainer.task, rollouts).reward)
    table = trainer.table(replace(rollouts, reward=equal), forward, None)
    assert not table.keep[first].any()
    batch = trainer.objective.with_weights(trainer.objective.batch(rollouts, table, np.ones(table.mask.shape), None))
    kept = batch.mask.any(axis=1).sum()
    assert (batch.weight[first] == 0).all()
    assert batch.weight.max() == pytest.approx(1 / kept)


def test_stale_rollouts_come_from_the_policy_of_as_many_batches_ago(made):
    trainer = made(
        objective=ObjectiveConfig(staleness=2, ratio="token"), optimize=OptimizeConfig(steps=5, learning_rate=0.05)
    )
    kept = []
    for step in range(4):
        kept.append([p.detach().clone() for p in trainer.policy.parameters])
        train_step(trainer, step)
    now = [p.detach().clone() for p in trainer.policy.parameters]
    with trainer.policy.sampling():
        assert all(torch.equal(a, b) for a, b in zip(trainer.policy.parameters, kept[2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trainer.policy.parameters, now, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(now, kept[2], strict=True))


def test_staleness_shows_as_mismatch_and_without_it_there_is_none(trained):
    fast = OptimizeConfig(steps=3, learning_rate=0.02)
    fresh = RunStore(trained("fresh", optimize=fast)).steps_df()["mismatch_max"]
    stale = RunStore(trained("stale", optimize=fast, objective=ObjectiveConfig(staleness=1))).steps_df()["mismatch_max"]
    assert fresh.max() < 1e-4
    assert stale.iloc[0] < 1e-4
    assert stale.iloc[1:].min() > 1e-3


def test_adapters_alone_are_trained_and_the_saved_model_has_them_merged(trained, checkpoint):
    path = trained("lora", lora=LoraConfig(rank=2), optimize=OptimizeConfig(steps=3, learning_rate=0.05))
    before, _ = load_policy(checkpoint)
    after, _ = load_policy(path / "model")
    moved = {n for n, p in after.named_parameters() if not torch.equal(p, dict(before.named_parameters())[n])}
    assert moved and all("proj" in name for name in moved)
    assert (path / "model" / "adapter" / "adapter_model.safetensors").is_file()
    assert np.isfinite(RunStore(path).tokens_df()["grad_norm_sq"].dropna()).all()


def test_unknown_adapter_target_is_one_sentence(made):
    with pytest.raises(InputError, match=r"lora.targets is \('nowhere',\)"):
        made(lora=LoraConfig(rank=2, targets=("nowhere",)))


def test_checkpointed_activations_change_nothing_but_memory(made):
    plain, frugal = made(), made(optimize=OptimizeConfig(gradient_checkpointing=True))
    _, forward, batch = drawn(plain)
    _, forward_again, same = drawn(frugal)
    (a,), (b,) = gathered(plain, batch, forward), gathered(frugal, same, forward_again)
    assert torch.allclose(a, b, atol=1e-6 * float(a.norm()))
    assert not frugal.model.training


def test_half_precision_passes_keep_float32_weights(made):
    trainer = made(optimize=OptimizeConfig(precision="bfloat16"))
    tables = train_step(trainer, 0)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert 0 < tables.steps["mismatch_max"] < 0.5  # sampled with a cache, scored without: bfloat16 apart
    assert np.isfinite(tables.steps["grad_norm"])


def test_learning_rate_rises_then_follows_its_schedule():
    weight = [torch.nn.Parameter(torch.zeros(1))]

    def rates(schedule):
        own = OptimizeConfig(steps=10, learning_rate=1.0, schedule=schedule, warmup_steps=2)
        return [PolicyOptimizer(weight, own).learning_rate(b) for b in range(10)]

    # Warm-up 1/3, 2/3; then 1, or falling over 8 steps: 1 − k/8, or (1 + cos(πk/8))/2.
    assert rates("constant") == pytest.approx([1 / 3, 2 / 3] + [1.0] * 8)
    assert rates("linear") == pytest.approx([1 / 3, 2 / 3] + [1 - k / 8 for k in range(8)])
    assert rates("cosine") == pytest.approx([1 / 3, 2 / 3] + [(1 + np.cos(np.pi * k / 8)) / 2 for k in range(8)])


def test_effective_sample_size_scales_the_learning_rate(made):
    trainer = made(
        objective=ObjectiveConfig(ratio="token"), optimize=OptimizeConfig(scale_by_ess=True, learning_rate=0.5)
    )
    _, forward, batch = drawn(trainer)
    n = len(batch.mask)
    shift = np.zeros(batch.mask.shape)
    shift[0, 0] = -np.log(3.0)  # the first rollout's sequence ratio is 3, all others' 1
    batch = replace(batch, behavior=np.where(batch.mask, forward.stats.logprob + shift, np.nan))
    scalars = trainer.update(batch, forward)
    ess = (n + 2) ** 2 / (n + 8)  # (3 + n − 1)²/(9 + n − 1)
    assert scalars["learning_rate"] == pytest.approx(0.5 * np.sqrt(ess / n))


def test_a_step_is_seen_in_the_version_of_every_parameter():
    # Who holds a copy of the weights, as vLLM's engine does, asks the versions whether it is still theirs.
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = PolicyOptimizer([parameter], OptimizeConfig())
    before = parameter._version
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert parameter._version > before
