"""03_baseline_variance: advantages of its entries, and gradients of groups without a Gram matrix."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.estimators import estimate, options_from_dict
from otb_analysis.objectives.shaping import add_last
from otb_analysis.statistics import Partition, partitions
from otb_analysis.tasks.task_calls import draw_prompts
from studies.lib.policies import fresh_policy, write
from studies.lib.pools import Pool, cuts_of, every_estimate, measured_tokens
from studies.lib.record import load_study

FOLDER = Path(__file__).parent.parent.parent / "studies" / "03_baseline_variance"
CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=32),
    chain_sum=ChainSumConfig(terms_max=2, largest=10),
)


@pytest.fixture(scope="module")
def entries():
    """The file that computes advantages and gradients."""
    load_study(FOLDER)
    return importlib.import_module(f"study_{FOLDER.name}.entries")


@pytest.fixture(scope="module")
def compare(entries):
    """The file that makes tables of them."""
    return importlib.import_module(f"study_{FOLDER.name}.study")


@pytest.fixture(scope="module")
def pool():
    policy = fresh_policy(CONFIG)
    written = write(policy, draw_prompts(policy.task, "train", 0, 5), SampleConfig(group_size=8, max_new_tokens=5), 1)
    ends = written.table.mask.cumsum(axis=1).argmax(axis=1)
    written.table.reward[:] = 0.0
    paid = np.random.default_rng(0).random(40) < 0.4
    written.table.reward[np.flatnonzero(paid), ends[paid]] = 1.0
    written = replace(written, table=replace(written.table, value=np.zeros(written.table.mask.shape)))
    return Pool.from_norms(written, **measured_tokens(policy, written, np.unique(written.table.group), 64))


def test_power_and_products_are_those_of_the_groups_own_gradients(entries, pool):
    cut = cuts_of(pool.inputs.group, 2, 1, 2000)[0]
    advantage = every_estimate(pool, cut)["otb", "exact"]
    mean, power, apart, _ = entries.group_sums(pool, cut, {entries.Way("otb", "exact"): advantage}, {})
    features = pool.features(np.arange(40))
    per_rollout = np.einsum("nt,ntk->nk", advantage[:, : features.shape[1]], features)
    g = np.stack([per_rollout[cut.group == a].mean(axis=0) for a in range(20)])
    for p in range(5):
        inner = g[cut.prompt == p] @ g[cut.prompt == p].T
        assert power[0, p] == pytest.approx(np.diag(inner).mean(), rel=1e-4)
        assert apart[0, p] == pytest.approx((inner.sum() - np.trace(inner)) / 12, rel=1e-3, abs=1e-4 * power.max())
    means = np.stack([g[cut.prompt == p].mean(axis=0) for p in range(5)])
    np.testing.assert_allclose(mean[0], means, rtol=1e-4, atol=1e-6)


def test_products_within_an_update_are_those_of_its_pairs(entries, pool):
    # five prompts, four groups of each: two updates of two prompts in every turn, and one prompt left over
    cut = partitions(pool.inputs.group, 2, 1, seed=3)[0]
    place = [np.array([4, 0, 2, 1, 3])] * 4
    update = entries.whole_updates(place, 2, 5)
    assert update.reshape(5, 4)[:, 0].tolist() == [0, 1, 1, -1, 0] and update.max() == 7
    way = entries.Way("rloo", "none", prompts=2)
    advantage = every_estimate(pool, cut)["rloo", "none"]
    together = entries.group_sums(pool, cut, {way: advantage}, {(2, False): update})[3]
    features = pool.features(np.arange(40))
    per_rollout = np.einsum("nt,ntk->nk", advantage[:, : features.shape[1]], features)
    g = np.stack([per_rollout[cut.group == a].mean(axis=0) for a in range(20)])
    pairs = [g[np.flatnonzero(update == u)] for u in range(8)]
    assert together[0] == pytest.approx(np.mean([a @ b for a, b in pairs]), rel=1e-4)


def test_an_update_has_as_many_prompts_as_stated_and_no_two_groups_of_one(entries, pool):
    cut = partitions(pool.inputs.group, 4, 1, seed=3)[0]
    inputs = replace(pool.inputs, group=cut.group)
    place = [np.array([4, 0, 2, 1, 3]), np.array([0, 1, 2, 3, 4])]
    found = entries.in_updates("batch_mean", inputs, cut, place, 2, pool)
    total, inside = pool.inputs.reward.sum(axis=1), pool.inputs.mask
    for turn, pairs in ((0, ((4, 0), (2, 1), (3, 4))), (1, ((0, 1), (2, 3), (4, 0)))):
        for own, *others in (*pairs, *[(b, a) for a, b in pairs[:2]]):  # the last one joins the first prompt once more
            rows = np.isin(cut.group, [p * 2 + turn for p in (own, *others)])
            mine = cut.group == own * 2 + turn
            np.testing.assert_allclose(found[mine], (total[mine] - total[rows].mean())[:, None] * inside[mine])


def test_fewer_prompts_than_an_update_are_all_in_it(entries, pool):
    cut = Partition(pool.inputs.group, np.arange(5))
    inputs = replace(pool.inputs, group=cut.group, energy=pool.proxy)
    some = np.array([1, 3, 4])
    found = entries.in_updates("energy_regression", inputs, cut, [some], 8, pool)
    rows = np.isin(cut.group, some)
    part = type(inputs)(
        inputs.reward[rows], inputs.mask[rows], inputs.group[rows], pool.proxy[rows], entropy=inputs.entropy[rows]
    )
    options = options_from_dict("energy_regression", {"T_max": str(pool.written.table.limit)})
    np.testing.assert_allclose(found[rows], estimate("energy_regression", part, options).advantage, atol=1e-9)
    assert not found[~rows].any()


def test_rewards_less_half_change_only_the_entries_that_are_measured_twice(entries, pool):
    cut = partitions(pool.inputs.group, 4, 1, seed=3)[0]
    inputs = replace(pool.inputs, group=cut.group, energy=pool.proxy)
    shifted = replace(inputs, reward=add_last(inputs.reward, inputs.mask, np.full(len(inputs.mask), -0.5)))
    np.testing.assert_allclose(shifted.reward.sum(axis=1), inputs.reward.sum(axis=1) - 0.5)
    for name in (*entries.ALONE, *entries.ACROSS[:-1]):
        options = options_from_dict(name, {"T_max": "5"}) if name == "energy_regression" else None
        before, after = (estimate(name, x, options).advantage for x in (inputs, shifted))
        same = np.allclose(before, after, atol=1e-6)
        if name != "value":  # a critic of those rewards is ½ lower, too
            assert same or name in entries.OFFSET, name


def test_tables_have_a_row_for_every_entry_and_proved_ones_have_c_1(entries, compare, pool):
    mixed = np.array([True, True, False, True, True])
    found = entries.gradients(pool, 4, 1, mixed)
    moments, floor = compare.moments_of(found, 4, None)
    tables = compare.tables_of(moments, 4, floor)
    rows = {(row["estimator"], row["source"], row["rewards"]): row for row in tables["estimators"]}
    assert len(rows) == len(tables["estimators"]) == len(entries.ALONE) + 6 + 8 + 6
    assert rows["energy_regression", "proxy", "0/1"]["projection"] == 1.0
    assert rows["group_mean", "none", "0/1"]["projection"] == 0.75
    assert not rows["otb", "proxy", "0/1"]["c_known"]
    chosen, _ = compare.moments_of(found, 4, mixed)
    assert {m.power.size for m in chosen.values()} == {5} and {m.power.size for m in moments.values()} == {6}
    assert {way.mixed for way in chosen if way.prompts} == {True}
