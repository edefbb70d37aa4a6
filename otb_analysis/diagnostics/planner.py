"""Where to spend a fixed number of rollouts: efficiency against group size, from Gram matrices of several sizes.

Sizes that groups were cut into are measured. Larger ones follow by formula for `none` and `rloo`, whose mean does not
depend on the size: there the least variance is the highest efficiency, and ∇J need not be known to compare sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from otb_analysis.diagnostics.dead_groups import DeadGroups, dead_groups, rates_line
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    NOTHING,
    REFERENCE,
    Interval,
    deleted_moments,
    efficiency,
    is_informative,
    jackknife_interval,
)
from otb_analysis.statistics.moments.absolute import has_signal, shown_efficiency
from otb_analysis.statistics.moments.gram import Truth, pair_noise, truth_of
from otb_analysis.statistics.moments.group_sizes import SizeLaw, pair_law, single_law
from otb_analysis.statistics.moments.measures import batch_variance, quotient, with_projection
from otb_analysis.types import Float, Gram, Label, Proved

NONE: Label = ("none", "none")
RISK = 0.05
"""Chance that any interval misses, all comparisons of sizes together."""
LARGER = (2, 4)
"""Multiples of the recorded size that the formula is asked for."""
BY_FORMULA = (
    "Groups above {} follow by formula (†) for none and rloo. Other estimators take recorded groups of that size."
)
NOT_LARGER = "Groups above {} cannot be known: the formula takes none and rloo in groups cut into halves and quarters."
BY_GRADIENTS = " Measuring it needs the model: otb audit --model DIR --rollouts FILE --go."
ALL_DEAD = "Every group has equal rewards, so nothing is said about group sizes; take prompts of another difficulty."
NOT_HALVED = "Other group sizes cannot be known: recorded groups must be of one size that can be halved into 2 or more."


@dataclass(frozen=True)
class Cell:
    """One estimator in groups of one size, at the same number of rollouts."""

    estimator: str
    energy_source: str
    size: int
    # None where it must not be shown by itself: by the rule of every other table, see `absolute` and `told`
    efficiency: float | None
    best: bool  # Intervals show that both neighbours on its curve are worse
    cut: bool  # Recorded groups were cut to this size; else it follows by formula
    # Against its own recorded size, None there and where noise hides it; all together 95 %. Variance over variance
    # where the projection is proved at every size, else efficiency here over efficiency there: below 1 is better.
    cost: Interval | None


@dataclass(frozen=True)
class Planner:
    """Where to spend a fixed number of rollouts; efficiencies are missing where no gradient was measured."""

    n_rollouts: int
    recorded_size: int | None  # None where groups differ in size
    cells: tuple[Cell, ...]
    dead: tuple[DeadGroups, ...]
    note: str  # What follows by formula, what success rates say, and what cannot be known
    best_size: Interval | None = None  # Size at which rloo has the least variance at the same rollouts, by formula


@dataclass(frozen=True)
class _Curve:
    """One estimator at every size, each value [1 + K]: from all prompts, then without each of them."""

    efficiency: Mapping[int, Float]
    cost: Mapping[int, Float]  # Less is better: variance at the same rollouts, or in proportion to 1/efficiency
    cut: frozenset[int]  # Sizes that were measured
    best_size: Float | None = None  # Of `rloo`, by formula
    shown: dict[int, float | None] = field(default_factory=dict)  # The efficiencies that may be shown by themselves


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
    notes = []
    cells: tuple[Cell, ...] = ()
    best_size = None
    if dead and dead[-1].share.estimate == 1:
        return Planner(rollouts, size, (), dead, ALL_DEAD)
    if size is not None and by_size and common:
        by_size[size] = [grams[step] for step in common]
        rollouts = round(np.mean([gram.n_rollouts for gram in by_size[size]]))
        curves = _curves(by_size, rollouts, known)
        # All comparisons of sizes hold together with 95 %.
        level = 1 - RISK / max(sum(len(curve.cost) - 1 for curve in curves.values()), 1)
        cells = _cells(curves, size, level)
        best_size = _best_size(curves, level)
        by_formula = any(not cell.cut for cell in cells)
        notes.append(BY_FORMULA.format(size) if by_formula else NOT_LARGER.format(size))
        if best_size is not None and best_size.low is not None:
            notes.append(
                f"By formula rloo's variance at the same rollouts is least in groups of {best_size.estimate:.1f} "
                f"({best_size.low:.1f}–{best_size.high:.1f})."
            )
    elif grams:
        notes.append(NOT_HALVED)
    if not cells and dead:
        notes.append(rates_line(dead) + ("" if grams else BY_GRADIENTS))
    return Planner(rollouts, size, cells, dead, " ".join(notes), best_size)


def _curves(by_size: Mapping[int, Sequence[Gram]], rollouts: int, known: Proved) -> dict[Label, _Curve]:
    """Return the estimators that every size has, by label; ∇J is that of the largest groups for all of them."""
    tables = [gram for grams in by_size.values() for gram in grams]
    truth = {size: truth_of(grams, REFERENCE, known) for size, grams in by_size.items()}
    whole = max(by_size)
    truth_sq = deleted_moments(by_size[whole], REFERENCE, truth[whole]).truth_sq
    signal = has_signal(deleted_moments(by_size[whole], REFERENCE, truth[whole]))
    # A projection of 1 is proved at every size; others depend on it.
    proved = {label for label, c in known.projection.items() if c == 1}
    curves = {}
    for label in sorted(set.intersection(*(set(gram.labels) for gram in tables))):
        if law := _law(label, by_size):
            curves[label] = _by_formula(label, law, by_size, rollouts, truth[whole], label in proved)
            continue
        at = {
            size: replace(deleted_moments(by_size[size], label, truth[size]), truth_sq=truth_sq)
            for size in sorted(by_size)
        }
        if label in proved:
            at = {size: with_projection(one, 1.0) for size, one in at.items()}
        curves[label] = _Curve(
            {size: efficiency(one, rollouts / size) for size, one in at.items()},
            {
                s: batch_variance(one, rollouts / s)
                if label in proved  # one rule for all comparisons: proved ones by variance alone
                # ‖∇J‖² is the same at every size and cancels.
                else quotient(one.mean_sq + batch_variance(one, rollouts / s), np.where(signal, one.along**2, np.nan))
                for s, one in at.items()
            },
            frozenset(by_size),
        )
    floor = float(quotient(np.array([pair_noise(by_size[whole], REFERENCE, truth[whole])]), truth_sq[:1])[0])
    for curve in curves.values():
        for size, values in curve.efficiency.items():
            found = shown_efficiency(values, rollouts / size, floor, "efficiency")
            sure = truth_sq.size <= MIN_CLUSTERS or (signal and is_informative(found))
            curve.shown[size] = found.estimate if found and sure else None
    return curves


def _law(label: Label, by_size: Mapping[int, Sequence[Gram]]) -> SizeLaw | None:
    if label not in (NONE, REFERENCE):
        return None

    def powers(one: Label) -> dict[int, Float]:
        return {size: deleted_moments(grams, one).power for size, grams in by_size.items()}

    has_none = all(NONE in gram.labels for grams in by_size.values() for gram in grams)
    single = single_law(powers(NONE)) if has_none else None
    return single if label == NONE else pair_law(powers(label), None if single is None else single.square)


def _by_formula(
    label: Label, law: SizeLaw, by_size: Mapping[int, Sequence[Gram]], rollouts: int, truth: Truth, proved: bool
) -> _Curve:
    """Return a curve on measured sizes and larger ones; all share the mean that the largest groups measured."""
    whole = max(by_size)
    moments = deleted_moments(by_size[whole], label, truth)
    powers = {size: deleted_moments(grams, label).power for size, grams in by_size.items()}
    powers |= {whole * k: law.power(whole * k) for k in LARGER if whole * k <= rollouts}
    # A formula that noise led below no variance at all says nothing about that size.
    at = {s: replace(moments, power=_positive(powers[s], moments.mean_sq, s > whole)) for s in sorted(powers)}
    c = 1.0 if proved else None
    return _Curve(
        {size: efficiency(with_projection(one, c), rollouts / size) for size, one in at.items()},
        {size: batch_variance(one, rollouts / size) for size, one in at.items()},
        frozenset(by_size),
        law.best_size(moments.mean_sq) if label == REFERENCE else None,
    )


def _positive(power: Float, mean_sq: Float, by_formula: bool) -> Float:
    return np.where(power[0] > mean_sq[0], power, np.nan) if by_formula else power


def _cells(curves: Mapping[Label, _Curve], size: int, level: float) -> tuple[Cell, ...]:
    best = {label: _best(curve, level) for label, curve in curves.items()}
    return tuple(
        Cell(
            *label, n, curve.shown[n], n == best[label], n in curve.cut,
            None if n == size else _shown(_ratio(curve.cost[n], curve.cost[size], level, f"{n} over {size}")),
        )
        for label, curve in curves.items()
        for n in sorted(curve.cost)
    )  # fmt: skip


def _best(curve: _Curve, level: float) -> int | None:
    """Return the size with the least cost, None unless intervals show that its neighbours cost more.

    `level` holds for all neighbours of all curves together, so the choice of the least one costs nothing more. Where a
    formula applies the cost is convex in N, and what beats its neighbours beats all sizes.
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


def _best_size(curves: Mapping[Label, _Curve], level: float) -> Interval | None:
    sizes = next((curve.best_size for curve in curves.values() if curve.best_size is not None), None)
    if sizes is None:
        return None
    # A group has at least 2 rollouts; what is above 1 has a logarithm.
    words = "group size with the least variance of rloo"
    above = jackknife_interval(float(sizes[0]) - 1, sizes[1:] - 1, words, "log", level)
    if above is None or above.low is None or above.high is None:
        return None
    low, estimate, high = (max(1 + x, 2.0) for x in (above.low, above.estimate, above.high))
    return replace(above, estimate=estimate, low=low, high=high, p_value=None)


def _shown(cost: Interval | None) -> Interval | None:
    return cost if is_informative(cost) or (cost is not None and cost.n_clusters < MIN_CLUSTERS) else None


def _ratio(above: Float, below: Float, level: float, what: str) -> Interval | None:
    ratio = quotient(above, below)
    words = f"cost of {what} at the same rollouts"
    return jackknife_interval(float(ratio[0]), ratio[1:], words, "log", level)
