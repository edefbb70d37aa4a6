"""Which estimator is better than another one: every pair judged by one rule, all baselines looked at together.

Two estimators whose projections are proved are compared by variance/c², once, whatever the size of an update: both have
the same ‖∇J‖², so that the paired difference of ‖g‖²/c² alone decides. A pair with a biased member is compared by
efficiency, at the number of prompts that the run updates with; it stays open where ∇J is not told from noise.

Looking at m baselines finds a lucky one among them, so a claim takes an interval at the level 1 − .05/m (Bonferroni):
all m of them hold together with 95 %, and so does the one of whichever is chosen.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from otb_analysis.statistics.comparisons.alike import Alike, alike
from otb_analysis.statistics.inference.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    Interval,
    is_informative,
    jackknife_interval,
)
from otb_analysis.statistics.moments.absolute import has_signal
from otb_analysis.statistics.moments.gram import REFERENCE, against_reference, deleted_moments, truth_of, typical
from otb_analysis.statistics.moments.measures import Moments
from otb_analysis.statistics.moments.paired import NOTHING, ratio_replicates
from otb_analysis.types import Float, Gram, Label, Proved

DIFFERENCE, POWER = 0.1, 0.8
"""A difference that matters, and the chance with which it is shown by as many prompts as are asked for."""

Cause = Literal["", "another sampler", "no reference", "alone", "few prompts", "equal rewards", "noise"]
"""Why nothing could be tested; empty where something could."""
By = Literal["variance", "efficiency"]


@dataclass(frozen=True)
class Comparison:
    """One estimator over the one that it is compared with."""

    label: Label
    by: By  # variance: both projections are proved, below 1 is better; efficiency: above 1 is better
    one_look: Interval | None  # 95 % by itself; None where noise hides it
    together: Interval | None  # 95 % for all that were looked at

    @property
    def better(self) -> bool:
        """True where the interval that holds together with all others is on the better side of 1."""
        return self._beyond(self.by == "efficiency")

    @property
    def worse(self) -> bool:
        """True where it is on the worse side."""
        return self._beyond(self.by == "variance")

    @property
    def ahead(self) -> float:
        """How many times better it came out, in its measure: 1/ratio of variances, or the ratio of efficiencies."""
        if self.one_look is None:
            return 0.0
        return self.one_look.estimate if self.by == "efficiency" else 1 / self.one_look.estimate

    def _beyond(self, above: bool) -> bool:
        one = self.together
        if one is None or one.low is None or one.high is None:
            return False
        return one.low > 1 if above else one.high < 1


@dataclass(frozen=True)
class Decision:
    """All estimators over one of them on the same rollouts."""

    against: Label
    n_prompts: int  # Independent prompts measured
    update: int  # Prompts of an update, which efficiency depends on
    comparisons: tuple[Comparison, ...]  # As measured; each of a family of multiples once
    alike: Mapping[Label, Alike]
    looked_at: int  # Those with an interval by themselves: the m that share the risk of an error
    cause: Cause
    signal: bool  # True where ∇J is told from noise: the 95 % interval of ‖∇J‖² leaves out 0
    n_needed: int | None  # About how many prompts would show a difference of 10 %; None where that is not known

    @property
    def tested(self) -> tuple[Comparison, ...]:
        """Those with an interval that holds together with all others."""
        return tuple(one for one in self.comparisons if one.together is not None)

    @property
    def better(self) -> tuple[Comparison, ...]:
        """Those shown to be better, the best first: proved ones before others, of each dear ones (exact norms) last."""
        return tuple(sorted((one for one in self.comparisons if one.better), key=_order))

    @property
    def worse(self) -> tuple[Comparison, ...]:
        """Those shown to be worse, the worst first."""
        return tuple(sorted((one for one in self.comparisons if one.worse), key=lambda one: one.ahead))

    @property
    def nearest(self) -> Comparison | None:
        """Of those that are tested and not shown to be worse the first, in the same order; None where all are."""
        return min((one for one in self.tested if not one.worse), key=_order, default=None)

    @property
    def best(self) -> Comparison | None:
        """The one to train with; None where none was shown to be better, and for calibrated energies, which no run has.

        It is the best by its own measure among those that need no exact norms, where there are any.
        """
        usable = [one for one in self.better if one.label[1] != "calibrated"]
        return next(iter(sorted(usable, key=lambda one: one.label[1] == "exact")), None)

    def comparison_of(self, label: Label) -> Comparison | None:
        """Return the comparison of a label, or of what it is the same update as; None where there is none."""
        named = self.alike[label].of if label in self.alike else label
        return next((one for one in self.comparisons if one.label == named), None)


def _order(one: Comparison) -> tuple[bool, bool, float]:
    # A ratio of variances and one of efficiencies have no common order.
    return one.by == "efficiency", one.label[1] == "exact", -one.ahead


def decide(
    grams: Sequence[Gram],
    against: Label = REFERENCE,
    known: Proved = NOTHING,
    first: Sequence[Label] = (),
    only: Collection[Label] | None = None,
    sampled: bool = True,
) -> Decision:
    """Compare every estimator with one of them.

    Args:
        grams: One Gram matrix per measured step; those that have both estimators are used.
        against: What they are compared with.
        known: What is proved of the estimators.
        first: Identical estimators are named after these, such as the ones that trained.
        only: The estimators that are looked at; by default all.
        sampled: False where another sampler drew the tokens: nothing stands for ∇J then, and nothing is claimed.
    """
    # A multiple is the same update with another step length: a second test of it would only cost power.
    same = alike(grams, (against, *first, *(only or ())))
    truth = truth_of(grams, REFERENCE, known)
    both = [gram for gram in against_reference(grams, against, truth) if against in gram.labels]
    base = deleted_moments(both, against, truth) if both else None
    signal = base is not None and sampled and has_signal(base)
    replicates: dict[Label, tuple[By, Float]] = {}
    for label in dict.fromkeys(label for gram in both for label in gram.labels):
        if label == against or same[label].of != label or (only is not None and label not in only):
            continue
        steps = against_reference(both, label, truth)
        below = base if len(steps) == len(both) else deleted_moments(steps, against, truth)
        assert below is not None
        update, c = typical([gram.n_prompts for gram in steps]), known.projection
        pair = (deleted_moments(steps, label, truth), update, c.get(label)), (below, update, c.get(against))
        by: By = "variance" if sampled and label in c and against in c else "efficiency"
        replicates[label] = by, ratio_replicates(*pair)["sf" if by == "variance" else by]
    looks = {label: _look(of, label, against, (signal, sampled), LEVEL) for label, of in replicates.items()}
    m = sum(look is not None and look.low is not None for look in looks.values())
    level = 1 - (1 - LEVEL) / max(m, 1)
    comparisons = tuple(
        Comparison(label, by, looks[label], _with_ends(_look((by, of), label, against, (signal, sampled), level)))
        for label, (by, of) in replicates.items()
    )
    count = 0 if base is None else base.power.size - 1
    known_truth = any(gram.has(truth) for gram in both)
    cause = "no reference" if both and not known_truth else _cause(both, against, count, bool(comparisons))
    cause = "" if any(one.together for one in comparisons) else cause
    cause = cause if sampled else "another sampler"
    update = typical([gram.n_prompts for gram in both])
    decision = Decision(against, count, update, comparisons, same, m, cause, signal, None)
    return replace(decision, n_needed=_needed(base, decision))


def _look(
    of: tuple[By, Float], label: Label, against: Label, known: tuple[bool, bool], level: float
) -> Interval | None:
    """Return a ratio's interval; None where noise hides it, though the prompts suffice for one."""
    (by, values), (signal, sampled) = of, known
    if by == "efficiency" and not signal and (values.size > MIN_CLUSTERS or not sampled):
        return None
    found = jackknife_interval(values[0], values[1:], f"{by} of {label[0]} over that of {against[0]}", "log", level)
    return found if is_informative(found) or (found is not None and found.n_clusters < MIN_CLUSTERS) else None


def _with_ends(interval: Interval | None) -> Interval | None:
    return interval if interval is not None and interval.low is not None else None


def _cause(both: Sequence[Gram], against: Label, count: int, others: bool) -> Cause:
    if not both:
        return "no reference"
    if not others:
        return "alone"
    # Equal rewards leave no advantage under a group baseline, so the gradient is exactly 0.
    if not any(np.trace(gram.blocks(against, against)[0]) > 0 for gram in both):
        return "equal rewards"
    return "few prompts" if count < MIN_CLUSTERS else "noise"


def _needed(base: Moments | None, decision: Decision) -> int | None:
    """Return at how many prompts a true difference of 10 % is shown four times in five, with the leader's spread.

    An interval's length falls as 1/√prompts. Where nothing is tested, ∇J must be told from noise first.
    """
    count = decision.n_prompts
    if base is None or count < MIN_CLUSTERS:
        return MIN_CLUSTERS
    if decision.tested:
        lead = (decision.nearest or min(decision.tested, key=_order)).together
        assert lead is not None and lead.low and lead.high
        # Half the corrected interval is z standard errors; it takes z_.8 more to be beyond 1 with a chance of 80 %.
        z = float(special.ndtri(1 - (1 - LEVEL) / (2 * decision.looked_at)))
        reach = float(np.log(lead.high / lead.low)) / 2 * (1 + float(special.ndtri(POWER)) / z)
        return max(round(count * (reach / -float(np.log(1 - DIFFERENCE))) ** 2), MIN_CLUSTERS)
    found = jackknife_interval(base.truth_sq[0], base.truth_sq[1:], "‖∇J‖²", "linear")
    if found is None or found.low is None or found.high is None or found.high <= 0:
        return None
    stderr = (found.high - found.low) / (2 * float(special.ndtri((1 + LEVEL) / 2)))
    length = found.estimate if found.estimate > 0 else found.high
    # Between pairs of prompts that are mostly noise the error falls as 1/K; 1/√K is the slower law, so the safe one.
    return max(round(float(count * (3 * stderr / length) ** 2)), count + 1)
