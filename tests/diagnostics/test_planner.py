"""The budget planner: its formulas on cases worked by hand, and its curves on simulated prompts."""

from itertools import product
from math import comb

import numpy as np
import pytest

from otb_analysis.diagnostics.planner import BY_GRADIENTS, dead_groups, dead_share_of, plan, rates_line
from otb_analysis.statistics import NOTHING, is_informative, mean_over_subgroups, pooled_statistics
from otb_analysis.types import Gram, Proved

LABELS = (("none", "none"), ("rloo", "none"), ("grpo", "none"))


def test_the_dead_share_counts_subsets():
    # Of the 6 pairs of [1, 0, 0, 1] two are equal.
    assert dead_share_of((2, 2), 2) == pytest.approx(1 / 3)
    # Of the 4 triples of [2, 2, 2, 1] one is equal.
    assert dead_share_of((1, 3), 3) == pytest.approx(1 / 4)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_dead_share_is_unbiased(p, size):
    chance = [comb(6, k) * p**k * (1 - p) ** (6 - k) for k in range(7)]
    mean = sum(c * dead_share_of((k, 6 - k), size) for k, c in enumerate(chance))
    assert mean == pytest.approx(p**size + (1 - p) ** size)


def test_dead_groups_leave_out_groups_that_are_too_small():
    rows = dead_groups([("a", [1.0, 1.0, 0.0, 0.0]), ("b", [1.0, 1.0])])
    assert [(row.size, row.n_groups) for row in rows] == [(2, 2), (4, 1)]
    assert rows[0].share.estimate == pytest.approx((1 / 3 + 1) / 2)
    assert rows[0].share.low is None  # two prompts
    assert dead_groups([("a", [1.0]), ("b", [0.0])]) == ()


def test_groups_of_one_prompt_are_one_cluster():
    groups = [("ab"[g % 2] + str(g // 4), [float(g % 3 > 0), 1.0]) for g in range(64)]
    (row,) = dead_groups(groups)
    assert row.n_groups == 64 and row.share.n_clusters == 32
    assert row.share.low < row.share.estimate < row.share.high
    # Half of 100 rollouts' 50 groups, were half of them dead.
    assert row.informative.estimate == pytest.approx(50 * (1 - row.share.estimate))
    assert row.informative.low == pytest.approx(50 * (1 - row.share.high))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_score_that_knows_no_reward_gives_n_over_n_minus_one(size):
    # Every group of rollouts with a score of ±1 and, independent of it, a reward of 1 with probability 0.3.
    values = [(s, r, 0.5 * (0.3 if r else 0.7)) for s in (-1, 1) for r in (0, 1)]
    variance = 0.0
    for group in product(values, repeat=size):
        s, r, p = (np.array(x, float) for x in zip(*group, strict=True))
        variance += p.prod() * (s @ (r - r.mean()) / (size - 1)) ** 2  # its mean is 0
    assert size * variance == pytest.approx(0.3 * 0.7 * size / (size - 1))


def test_success_rates_say_what_they_cannot():
    line = rates_line(dead_groups([("a", [1.0, 0.0] * 4)]))
    assert "groups above 8 save at most 12%, and groups of 4 cost 17%" in line  # 1 − 7/8, and (4/3)/(8/7)
    assert line.endswith("Prompts with different gradients favour smaller groups.")
    without = plan({}, {}, [("a", [1.0, 0.0] * 4)], 1)
    assert without.note == f"{line}{BY_GRADIENTS}"


def simulated(prompts, size, between, seed=0, shared=0.0):
    """Score and reward of rollouts [P, N, D] and [P, N]; `between` is how much a reward tells of the score.

    `shared` is how much of that is one direction for all prompts.
    """
    random = np.random.default_rng(seed)
    rate = random.uniform(0.2, 0.8, (prompts, 1))
    reward = (random.random((prompts, size)) < rate).astype(float)
    own = random.normal(size=(prompts, 1, 6)) + shared * np.eye(6)[0]
    return random.normal(size=(prompts, size, 6)) + between * (reward - rate)[..., None] * own, reward


def grams(score, reward):
    """Gram matrix of the recorded groups, and those of halves and quarters, as a run stores them."""
    prompts, whole = reward.shape
    by_size = {}
    for size in (whole, whole // 2, whole // 4):
        r = reward.reshape(-1, size)
        s = score.reshape(-1, size, score.shape[-1])
        centred = r - r.mean(axis=1, keepdims=True)
        spread = r.std(axis=1, ddof=1, keepdims=True) + 1e-6
        weights = (r / size, centred / (size - 1), centred / spread / size)
        g = np.stack([np.einsum("pn,pnd->pd", w, s) for w in weights])
        inner = np.einsum("apd,bqd->abpq", g, g, optimize=True)
        by_size[size] = Gram(mean_over_subgroups(inner, whole // size), LABELS, prompts * whole)
    return {0: by_size[whole]}, {size: {0: by_size[size]} for size in (whole // 2, whole // 4)}


def planned(score, reward, known=NOTHING):
    groups = [(p, row.tolist()) for p, row in enumerate(reward)]
    return plan(*grams(score, reward), groups, 1, known)


def test_only_measured_sizes_are_judged():
    report = planned(*simulated(200, 8, 3.0))
    cells = {(c.estimator, c.size): c for c in report.cells}
    assert set(cells) == {(name, size) for name, _ in LABELS for size in (2, 4, 8)}
    assert cells["rloo", 8].cost is None and cells["rloo", 4].cost is not None
    assert "Groups above 8" in report.note


def test_a_mean_that_no_size_changes_is_judged_without_the_true_gradient():
    score, reward = simulated(200, 8, 3.0)  # no direction is preferred: ∇J is 0
    whole, small = grams(score, reward)
    found = {c.size: c for c in planned(score, reward).cells if c.estimator == "rloo"}
    inner = {n: of.blocks([LABELS[1]], LABELS[1])[0, 0] for n, of in ((8, whole[0]), (4, small[4][0]))}
    noise = {n: np.trace(of) / 200 - (of.sum() - np.trace(of)) / (200 * 199) for n, of in inner.items()}
    assert found[4].cost.estimate == pytest.approx(noise[4] / 2 / noise[8])


def test_a_best_size_is_marked_only_where_its_neighbours_are_shown_to_be_worse():
    clear = planned(*simulated(200, 8, 3.0))
    # Without a baseline the smallest size always serves best; the interval shows it here.
    assert [c.size for c in clear.cells if c.best and c.estimator == "none"] == [2]
    # Where the reward tells nothing of the score all sizes serve `none` alike.
    assert not any(c.best for c in planned(*simulated(200, 8, 0.0)).cells if c.estimator == "none")
    # Ten prompts give no intervals, so nothing is marked, whatever is highest.
    assert not any(cell.best for cell in planned(*simulated(10, 8, 3.0)).cells)


def test_what_cannot_be_known_is_said():
    score, reward = simulated(20, 8, 1.0)
    whole, _ = grams(score, reward)
    groups = [(p, row.tolist()) for p, row in enumerate(reward)]
    alone = plan(whole, {}, groups, 1)
    assert alone.cells == () and alone.note.startswith("Other group sizes cannot be known")
    assert "otb audit" not in alone.note  # it was measured already
    assert plan({}, {}, [("a", [1.0])], 1).note == ""
    uneven = plan({}, {}, [("a", [1.0, 0.0]), ("b", [1.0, 0.0, 0.0])], 1)
    assert uneven.recorded_size is None and uneven.n_rollouts == 5


def test_a_proved_estimator_costs_by_variance_and_an_estimated_length_takes_a_signal():
    score, reward = simulated(200, 8, 3.0)  # no direction is preferred: ∇J is 0
    grpo = ("grpo", "none")
    known = Proved({grpo: 1.0}, frozenset((grpo,)))
    found = {c.size: c for c in planned(score, reward, known).cells if c.estimator == "grpo"}
    whole, small = grams(score, reward)
    inner = {8: whole[0].blocks([grpo], grpo)[0, 0], 4: small[4][0].blocks([grpo], grpo)[0, 0]}
    signal = (inner[8].sum() - np.trace(inner[8])) / (200 * 199)
    noise = {size: np.trace(of) / 200 - signal for size, of in inner.items()}
    # Groups of 4 are twice as many of the same rollouts.
    assert found[4].cost.estimate == pytest.approx(noise[4] / 2 / noise[8])
    assert found[4].cost.low < found[4].cost.estimate < found[4].cost.high
    assert all(c.cost is None for c in planned(score, reward).cells if c.estimator == "grpo")


def test_nothing_is_said_of_sizes_where_every_group_is_dead():
    score, reward = simulated(20, 8, 1.0)
    found = planned(score, np.ones_like(reward))
    assert found.cells == () and "Every group has equal rewards" in found.note


def test_an_efficiency_is_shown_by_the_rule_of_every_table():
    hidden = shown = 0
    for seed in range(4):
        score, reward = simulated(150, 8, 2.0, seed, shared=0.3)
        cells = {c.estimator: c for c in planned(score, reward).cells if c.size == 8}
        for row in pooled_statistics([grams(score, reward)[0][0]]):
            alone, efficiency = row.intervals["efficiency"], cells[row.estimator].efficiency
            assert efficiency == (pytest.approx(row.efficiency) if row.signal and is_informative(alone) else None)
            hidden += alone is not None and row.signal and not is_informative(alone)
            shown += efficiency is not None
    assert hidden and shown
