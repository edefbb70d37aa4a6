"""Pools measured token by token: every shortcut against the plain way."""

import numpy as np
import pytest

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.gradients import gradient_sketch, group_gradient_gram, token_score_norms
from otb_analysis.statistics import Partition, mean_over_subgroups, partitions
from otb_analysis.tasks.task_calls import draw_prompts
from studies.lib.policies import fresh_policy, write
from studies.lib.pools import (
    Pool,
    distinct_tokens,
    every_estimate,
    gram_of_prompts,
    measured_tokens,
    promising_prompts,
    proved_of_pool,
    update_batches,
)

CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=32),
    chain_sum=ChainSumConfig(terms_max=2, largest=10),
)
SAMPLE = SampleConfig(prompts=2, group_size=4, max_new_tokens=4)
DIM = 4096


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def policy(request):
    return fresh_policy(CONFIG, request.param)


@pytest.fixture(scope="module")
def pool(policy):
    found = write(policy, draw_prompts(policy.task, "train", 0, 2), SAMPLE, seed=1)
    found.table.reward[:] = 0.0  # nothing is right by chance: pay every other rollout
    ends = found.table.mask.cumsum(axis=1).argmax(axis=1)
    found.table.reward[np.arange(0, 8, 2), ends[::2]] = 1.0
    return Pool.from_norms(found, **measured_tokens(policy, found, np.arange(2), DIM))


def test_tokens_with_one_prefix_share_a_number():
    ids = np.array([[5, 1, 2, 3], [5, 1, 2, 4], [5, 2, 2, 3]])
    mask = np.array([[False, True, True, True]] * 3)
    node, first = distinct_tokens(ids, mask)
    assert node.tolist() == [[0, 0, 1, 2], [0, 0, 1, 3], [0, 4, 5, 6]]
    assert first.sum() == 7 and not first[:, 0].any() and first[1].tolist() == [False, False, False, True]


def test_features_are_the_sketches_of_the_tokens_own_scores(policy, pool):
    ids, mask, attention = pool.written.batch
    rows = np.arange(8)
    features, columns = pool.features(rows), pool.written.rollouts.completion_columns()
    for n in (0, 3, 7):
        tokens = np.flatnonzero(pool.inputs.mask[n])
        one = np.zeros((1, len(tokens), ids.shape[1]))
        one[0, np.arange(len(tokens)), columns[n, tokens]] = 1.0
        part = slice(n, n + 1)
        plain = gradient_sketch(policy.model, ids[part], mask[part], one, np.zeros(1, int), attention[part], dim=DIM)
        np.testing.assert_allclose(features[n, tokens], plain[0], rtol=1e-4, atol=1e-6)
    assert (features[~pool.inputs.mask[:, : features.shape[1]]] == 0).all()


def test_energies_are_the_exact_norms_and_the_proxy_is_another(policy, pool):
    ids, mask, attention = pool.written.batch
    plain = pool.written.by_token(token_score_norms(policy.model, ids, mask, attention).norm_sq)
    np.testing.assert_allclose(pool.inputs.energy, plain, rtol=1e-5)
    assert (pool.proxy[pool.inputs.mask] < pool.inputs.energy[pool.inputs.mask]).any()


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("size", [4, 2])
def test_gram_of_prompts_is_that_of_a_training_step_up_to_the_sketch(policy, pool, size):
    found = gram_of_prompts(pool, size, shuffles=2, seed=5)
    whole = Partition(pool.inputs.group, np.arange(2))
    cuts = [whole] if size == 4 else partitions(pool.inputs.group, 2, 2, seed=5)
    ids, mask, attention = pool.written.batch
    for m, label in enumerate(found.labels):
        exact = []
        for cut in cuts:
            weights = pool.written.rollouts.by_column(every_estimate(pool, cut)[label][None] / size)
            inner = group_gradient_gram(policy.model, ids, mask, weights, cut.group, attention)
            exact.append(mean_over_subgroups(inner, cut.prompt.size // 2))
        expected = np.mean(exact, axis=0)[0, 0]
        np.testing.assert_allclose(found.inner[m, m], expected, rtol=0.2, atol=0.1 * np.abs(expected).max())
    assert found.n_rollouts == 8 and len(found.prompt) == 2


def test_rollouts_sampled_a_few_prompts_at_a_time_are_one_batch(policy):
    prompts = draw_prompts(policy.task, "train", 0, 3)
    found = write(policy, prompts, SAMPLE, seed=1, at_once=2)
    assert found.rollouts.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert [prompt.id for prompt in found.rollouts.prompts] == [prompt.id for prompt in prompts]
    first = write(policy, prompts[:2], SAMPLE, seed=1)
    width = first.table.mask.shape[1]
    np.testing.assert_array_equal(
        found.table.token_id[:8, :width][first.table.mask], first.table.token_id[first.table.mask]
    )


def test_estimators_that_couple_prompts_see_one_group_of_each(pool):
    cut = partitions(pool.inputs.group, 2, 1, seed=3)[0]
    found = every_estimate(pool, cut)["batch_mean", "none"]
    total = pool.inputs.reward.sum(axis=1)
    for k in (0, 1):  # the k-th group of either prompt: four rollouts in all
        batch = np.isin(cut.group, [k, 2 + k])
        inside = pool.inputs.mask[batch]
        expected = (total[batch] - total[batch].mean())[:, None] * inside
        np.testing.assert_allclose(np.where(inside, found[batch], 0), expected)


def test_energy_sources_are_named(pool):
    cut = partitions(pool.inputs.group, 2, 1)[0]
    found = every_estimate(pool, cut)
    assert {("otb", "exact"), ("otb", "proxy"), ("james_stein", "none")} <= found.keys()
    np.testing.assert_array_equal(found["otb", "exact"], found["otb_turn", "exact"])


def test_too_few_promising_prompts_are_one_sentence(policy):
    with pytest.raises(InputError, match="but 2 are wanted"):
        promising_prompts(policy, 0, 2, SampleConfig(group_size=2, max_new_tokens=2), seed=0)


def test_unknown_architecture_is_one_sentence():
    with pytest.raises(InputError, match="architecture is 'rwkv'"):
        fresh_policy(CONFIG, "rwkv")


def test_pools_prove_what_plain_sampling_does_and_pool_the_gradient_over_the_anchors():
    rloo, none, loo, across = ("rloo", "none"), ("none", "none"), ("otb_loo", "exact"), ("energy_across_loo", "proxy")
    labels = [rloo, none, loo, across, ("group_mean", "none"), ("batch_mean", "none"), ("otb", "proxy")]
    known = proved_of_pool(labels, prompts=6, size=4)
    assert dict(known.projection) == {
        rloo: 1, none: 1, loo: 1, across: 1, ("group_mean", "none"): 3 / 4, ("batch_mean", "none"): 23 / 24,
    }  # fmt: skip
    assert known.truth == {rloo, none, loo}


def test_batches_hold_one_group_of_so_many_prompts():
    cut = Partition(np.arange(14), np.repeat(np.arange(7), 2))  # seven prompts with two groups each
    assert update_batches(cut).tolist() == [0, 1] * 7
    three = update_batches(cut, 3)  # two batches a turn, of four and three prompts
    assert three.tolist() == [0, 2] * 4 + [1, 3] * 3
    assert np.bincount(three).tolist() == [4, 3, 4, 3]
    assert update_batches(cut, 100).tolist() == update_batches(cut, 7).tolist() == update_batches(cut).tolist()


def test_an_estimator_that_couples_prompts_sees_the_batch_it_is_asked_for(pool):
    cut = Partition(np.repeat(np.arange(4), 2), np.array([0, 0, 1, 1]))  # two prompts, two groups of two
    label, inputs = ("batch_mean", "none"), pool.inputs
    alone, together = (every_estimate(pool, cut, batch)[label] for batch in (1, 2))
    assert (every_estimate(pool, cut)[label] == together).all()
    reward = inputs.reward.sum(axis=1)
    for rows, found in (([0, 1], alone), ([0, 1, 4, 5], together)):
        np.testing.assert_allclose(
            found[rows], np.where(inputs.mask[rows], (reward[rows] - reward[rows].mean())[:, None], 0.0)
        )
