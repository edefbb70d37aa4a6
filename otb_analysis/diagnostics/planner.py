"""Where to spend a fixed number of rollouts: efficiency against group size, from Gram matrices of several sizes.

Recorded groups are cut into halves and quarters; of larger ones success rates alone say something. They say, too, which
share of groups has equal rewards, how many inform, and, where no group is dead, whether dead ones were left out before
the rollouts were recorded.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np

from otb_analysis.phases import plural
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    NOTHING,
    REFERENCE,
    Interval,
    cluster_jackknife,
    deleted_moments,
    efficiency,
    is_informative,
    jackknife_interval,
)
from otb_analysis.statistics.gradients import has_signal, shown_efficiency
from otb_analysis.statistics.intervals import unless_hidden
from otb_analysis.statistics.moments import batch_variance, pair_noise, quotient, truth_of, with_projection
from otb_analysis.types import Float, Gram, Label, Proved


@dataclass(frozen=True)
class DeadGroups:
    """Share of groups of one size whose rewards are all equal, with its interval over prompts."""

    size: int
    share: Interval
    n_groups: int  # Groups of at least this size

    @property
    def informative(self) -> Interval:
        """Groups with unequal rewards among 100 rollouts: 100·(1 − share)/N."""
        low, high = (None if end is None else 100 * (1 - end) / self.size for end in (self.share.high, self.share.low))
        words = "groups with unequal rewards among 100 rollouts"
        return Interval(100 * (1 - self.share.estimate) / self.size, low, high, self.share.n_clusters, words)


def reward_groups(rewards: Any) -> list[tuple[object, list[float]]]:
    """Return prompt and rewards of every group; a group whose prompt has no name is a prompt of its own.

    Args:
        rewards: A table of rollouts with step, group, reward and prompt_id.
    """
    if rewards.empty:
        return []
    rows = rewards.sort_values(["step", "group"], kind="stable")
    step, group, paid = (rows[name].to_numpy() for name in ("step", "group", "reward"))
    starts = np.flatnonzero(np.r_[True, (np.diff(step) != 0) | (np.diff(group) != 0)])
    nameless = np.logical_or.reduceat(rows["prompt_id"].isna().to_numpy(), starts)
    names = rows["prompt_id"].to_numpy(object)
    parts = np.split(paid.astype(float), starts[1:])
    return [
        ((int(step[at]), int(group[at])) if bare else names[at], part.tolist())
        for at, bare, part in zip(starts.tolist(), nameless.tolist(), parts, strict=True)
    ]


def dead_share_of(counts: tuple[int, ...], size: int) -> float:
    """Return the probability that `size` rollouts of one prompt all have the same reward, from G ≥ size recorded ones.

    Σ_v C(k_v, n)/C(G, n) over distinct rewards v, each met k_v times: the hypergeometric estimator, the share of all
    subsets of n recorded rollouts that are dead. Unbiased for Σ_v p_v^n; with rewards of 0 and 1 that is pⁿ + (1−p)ⁿ.
    """
    return sum(comb(k, size) for k in counts) / comb(sum(counts), size)


def dead_groups(groups: Sequence[tuple[object, Sequence[float]]]) -> tuple[DeadGroups, ...]:
    """Return the share of dead groups at 2, 4, 8, … and at the largest recorded size, from (prompt, rewards) of groups.

    A size takes only groups of at least as many rollouts; every group counts alike, and all groups of one prompt are
    one cluster of the interval. Where no group or every group was dead, prompts do not vary and the jackknife sees no
    error: there it is Clopper and Pearson's. A mean of values from 0 to 1 that is μ gives K zeros with probability
    (1 − μ)^K at most: 1 − .025^(1/K) bounds it.
    """
    recorded = np.array([len(rewards) for _, rewards in groups], np.int64)
    largest, numbers, kinds = int(recorded.max(initial=0)), dict[object, int](), dict[tuple[int, ...], int]()
    prompt = np.array([numbers.setdefault(name, len(numbers)) for name, _ in groups], np.int64)
    # How often each distinct reward was met; thousands of groups have few combinations of rewards.
    counts_of = {one: tuple(sorted(Counter(one).values())) for one in {tuple(rewards) for _, rewards in groups}}
    kind = np.array([kinds.setdefault(counts_of[tuple(rewards)], len(kinds)) for _, rewards in groups], np.int64)
    sizes = sorted({2**k for k in range(1, largest.bit_length()) if 2**k <= largest} | ({largest} - {0, 1}))
    rows = []
    for size in sizes:
        chosen = recorded >= size
        share_of = np.array([dead_share_of(counts, size) if sum(counts) >= size else np.nan for counts in kinds])
        total = np.bincount(prompt[chosen], share_of[kind[chosen]], len(numbers))
        table = np.stack([total, np.bincount(prompt[chosen], minlength=len(numbers))], axis=1)
        table = table[table[:, 1] > 0]
        share = cluster_jackknife(table, lambda mean: mean[..., 0] / mean[..., 1], f"dead groups of {size}", "linear")
        assert share is not None
        low, high = share.low, share.high
        if share.estimate in (0.0, 1.0):
            reach = 1 - (RISK / 2) ** (1 / share.n_clusters)
            low, high = share.estimate - reach, share.estimate + reach
        if low is not None and high is not None:
            share = replace(share, low=max(low, 0.0), high=min(high, 1.0))
        rows.append(DeadGroups(size, share, int(table[:, 1].sum())))
    return tuple(rows)


def rates_line(dead: Sequence[DeadGroups]) -> str:
    """Return what success rates say about the best group size of `rloo`; there is at least one size.

    Where noise dominates, so that a rollout's score hardly depends on its reward, and prompts share one gradient, the
    group gradient is the covariance of two independent samples: V(N) = s²·Var(R)/(N−1), s² the score's variance,
    whatever the success rates. At the same rollouts that is N/(N−1) times the variance of very large groups.
    """
    size = dead[-1].size
    half, above = size // 2, size / (size - 1)
    cost = f", and groups of {half} cost {half / (half - 1) / above - 1:.0%}" if size >= 4 else ""
    return (
        "From success rates alone: suppose that a completion's score hardly depends on its reward, and that all "
        "prompts share one gradient. Then the variance of rloo at the same rollouts is proportional to N/(N−1): groups "
        f"above {size} save at most {1 - 1 / above:.0%}{cost}. Prompts with different gradients favour "
        "smaller groups."
    )


IMPROBABLE = 1e-3
"""A file without a dead group is called filtered where its own success rates give that a lower probability."""
RATES = np.linspace(0.005, 0.995, 100)
"""Success rates that a prompt may have."""
ROUNDS = 1_000
"""Steps of the EM algorithm; the likelihood has one maximum, and more rounds change the share by less than a tenth."""


@dataclass(frozen=True)
class Filtered:
    """No group has equal rewards, though the success rates make that improbable."""

    n_groups: int
    expected: float  # Dead groups among as many, by the success rates
    chance: float  # Of none

    @property
    def line(self) -> str:
        """The finding in a sentence."""
        chance = f"{self.chance:.1g}" if self.chance >= 1e-12 else "below 1e-12"
        return (
            f"None of {plural(self.n_groups, 'group')} is dead, though {self.expected:.1f} would be by the success "
            f"rates (chance of none {chance}): the trainer filtered dead groups before it wrote them."
        )

    @property
    def note(self) -> str:
        """What that means for numbers of groups of other sizes."""
        return (
            "Dead groups were filtered, so success rates are those of the prompts that were kept: of all sampled "
            "groups more are dead, at every size."
        )


def filtered_groups(groups: Sequence[Sequence[float]]) -> Filtered | None:
    """Return that dead groups were filtered; None where one is there, rewards have not two values, or it may be chance.

    A group of n has k successes with probability ∫ C(n, k)·pᵏ(1 − p)ⁿ⁻ᵏ dF(p). F, the success rates' distribution over
    prompts, is the one of maximum likelihood on a grid (Laird, 1978; EM from the uniform one), as if nothing had been
    filtered: so it holds as few dead groups as the others allow. The chance of none is Π_g (1 − ∫ pⁿ + (1 − p)ⁿ dF).
    With p = ½ and n = 8, 2 of 256 groups are dead, so 1,000 without one are odd.
    """
    larger = [group for group in groups if len(group) > 1]
    values = sorted({reward for group in larger for reward in group})
    if len(values) != 2 or any(len(set(group)) == 1 for group in larger):
        return None
    cells = Counter((len(group), sum(reward == values[1] for reward in group)) for group in larger)
    (n, k), times = np.array(list(cells)).T[:, :, None], np.array(list(cells.values()), np.float64)
    logs = k * np.log(RATES) + (n - k) * np.log1p(-RATES)
    likelihood = np.exp(logs - logs.max(axis=1, keepdims=True))  # [cells, rates]; a row's scale cancels
    weight = np.full(len(RATES), 1 / len(RATES))
    for _ in range(ROUNDS):
        weight = weight * ((times / (likelihood @ weight)) @ likelihood) / times.sum()
    dead = (RATES**n + (1 - RATES) ** n) @ weight  # of each cell's groups
    chance = float(np.exp(times @ np.log1p(-dead)))
    return Filtered(len(larger), float(times @ dead), chance) if chance < IMPROBABLE else None


SAME_MEAN: tuple[Label, ...] = (("none", "none"), REFERENCE)
"""Estimators whose mean is the same in groups of every size: they average single rollouts, or pairs."""
RISK = 0.05
"""Chance that any interval misses, all comparisons of sizes together."""
NOT_LARGER = "Groups above {} were not sampled, so nothing is said of them."
BY_GRADIENTS = (
    " Measuring it takes gradients: while training by the level gradients, of recorded rollouts by otb audit --model "
    "DIR --rollouts FILE --go."
)
ALL_DEAD = "Every group has equal rewards, so nothing is said about group sizes; take prompts of another difficulty."
NOT_HALVED = "Other group sizes cannot be known: recorded groups must be of one size that can be halved into 2 or more."


@dataclass(frozen=True)
class Cell:
    """One estimator in groups of one size, at the same number of rollouts."""

    estimator: str
    energy_source: str
    size: int
    # None where it must not be shown by itself: by the rule of every other table, `shown_efficiency`
    efficiency: float | None
    best: bool  # Intervals show that both neighbours on its curve are worse
    # Against its own recorded size, None there and where noise hides it; all together 95 %. Variance over variance
    # where the step is as long at every size, else efficiency here over efficiency there: below 1 is better.
    cost: Interval | None


@dataclass(frozen=True)
class Planner:
    """Where to spend a fixed number of rollouts; efficiencies are missing where no gradient was measured."""

    n_rollouts: int
    recorded_size: int | None  # None where groups differ in size
    cells: tuple[Cell, ...]
    dead: tuple[DeadGroups, ...]
    note: str  # What success rates say, and what cannot be known
    filtered: Filtered | None = None  # Where no group is dead, and the success rates make that improbable


@dataclass(frozen=True)
class _Curve:
    """One estimator at every size."""

    # Less is better: variance at the same rollouts, or in proportion to 1/efficiency; [1 + K], from all prompts, then
    # without each of them
    cost: Mapping[int, Float]
    shown: Mapping[int, float | None]  # The efficiencies that may be shown by themselves


def plan(
    grams: Mapping[int, Gram],
    subgroups: Mapping[int, Mapping[int, Gram]],
    groups: Sequence[tuple[object, Sequence[float]]],
    steps: int,
    known: Proved = NOTHING,
) -> Planner:
    """Return the planner of a run.

    Args:
        grams: Gram matrix of each measured step; `subgroups` those of smaller groups, by size and step.
        groups: Prompt and rewards of each recorded group; `steps` complete steps they are from.
        known: What is proved of the estimators in groups of the recorded size.
    """
    lengths = {len(rewards) for _, rewards in groups}
    size = lengths.pop() if len(lengths) == 1 else None
    dead = dead_groups(groups)
    rollouts = round(sum(len(rewards) for _, rewards in groups) / max(steps, 1))
    tables = (grams, *subgroups.values())
    common = [step for step in grams if all(step in part and REFERENCE in part[step].labels for part in tables)]
    by_size = {part: [table[step] for step in common] for part, table in subgroups.items()}
    notes, cells = list[str](), list[Cell]()
    if dead and dead[0].share.estimate == 1:  # the least size takes all groups, the largest perhaps a single one
        return Planner(rollouts, size, (), dead, ALL_DEAD)
    if size is not None and by_size and common:
        by_size[size] = [grams[step] for step in common]
        rollouts = round(np.mean([gram.n_rollouts for gram in by_size[size]]))
        curves = _curves(by_size, rollouts, known)
        # All comparisons of sizes hold together with 95 %.
        level = 1 - RISK / max(sum(len(curve.cost) - 1 for curve in curves.values()), 1)
        for label, curve in curves.items():
            best = _best(curve, level)
            for n in sorted(curve.cost):
                cost = None if n == size else _ratio(curve.cost[n], curve.cost[size], level, f"{n} over {size}")
                cells.append(Cell(*label, n, curve.shown[n], n == best, unless_hidden(cost)))
        notes.append(NOT_LARGER.format(size))
    elif grams:
        notes.append(NOT_HALVED)
    if not cells and dead:
        notes.append(rates_line(dead) + ("" if grams else BY_GRADIENTS))
    filtered = filtered_groups([rewards for _, rewards in groups])
    notes += [] if filtered is None else [filtered.note]
    return Planner(rollouts, size, tuple(cells), dead, " ".join(notes), filtered)


def _curves(by_size: Mapping[int, Sequence[Gram]], rollouts: int, known: Proved) -> dict[Label, _Curve]:
    """Return the estimators that every size has, by label; ∇J is that of the largest groups for all of them."""
    tables = [gram for grams in by_size.values() for gram in grams]
    truth = {size: truth_of(grams, REFERENCE, known) for size, grams in by_size.items()}
    whole = max(by_size)
    base = deleted_moments(by_size[whole], REFERENCE, truth[whole])
    signal, truth_sq = has_signal(base), base.truth_sq
    floor = float(quotient(np.array([pair_noise(by_size[whole], REFERENCE, truth[whole])]), truth_sq[:1])[0])
    curves = {}
    for label in sorted(set.intersection(*(set(gram.labels) for gram in tables))):
        # A projection of 1 is proved at every size; others depend on it.
        proved = known.projection.get(label) == 1
        effective, cost, shown = {}, {}, {}
        for size, grams in sorted(by_size.items()):
            one = replace(deleted_moments(grams, label, truth[size]), truth_sq=truth_sq)
            one, p = with_projection(one, 1.0 if proved else None), rollouts / size
            effective[size], cost[size] = efficiency(one, p), batch_variance(one, p)
            if not proved and label not in SAME_MEAN:  # one rule for all comparisons: as long steps by variance alone
                # ‖∇J‖² is the same at every size and cancels.
                cost[size] = quotient(one.mean_sq + cost[size], np.where(signal, one.along**2, np.nan))
            interval = shown_efficiency(effective[size], p, floor, "efficiency")
            sure = truth_sq.size <= MIN_CLUSTERS or (signal and is_informative(interval))
            shown[size] = interval.estimate if interval and sure else None
        curves[label] = _Curve(cost, shown)
    return curves


def _best(curve: _Curve, level: float) -> int | None:
    """Return the size with the least cost, None unless intervals show that its neighbours cost more.

    `level` holds for all neighbours of all curves together, so the choice of the least one costs nothing more.
    """
    known = {size: float(cost[0]) for size, cost in curve.cost.items() if np.isfinite(cost[0])}
    if len(known) < len(curve.cost):
        return None
    best = min(known, key=lambda size: known[size])
    for pair in pairwise(sorted(known)):
        if best in pair:
            other = pair[0] if pair[1] == best else pair[1]
            more = _ratio(curve.cost[other], curve.cost[best], level, f"{other} over {best}")
            if more is None or more.low is None or more.low <= 1:
                return None
    return best


def _ratio(above: Float, below: Float, level: float, what: str) -> Interval | None:
    ratio = quotient(above, below)
    words = f"cost of {what} at the same rollouts"
    return jackknife_interval(float(ratio[0]), ratio[1:], words, "log", level)
