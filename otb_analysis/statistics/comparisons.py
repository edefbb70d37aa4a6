"""Estimators compared on the same prompts: paired ratios, which are the same, and which are better by one rule.

Pairing removes what two estimators share, so intervals of ratios are much shorter than two separate ones suggest. The
estimand is the ratio of the two expectations. Prompts are the clusters.

`decide` judges all baselines together. Two whose projections are proved are compared by variance/c², once, whatever
the size of an update: both have the same ‖∇J‖², so that the paired difference of ‖g‖²/c² alone decides. A pair with a
biased member is compared by efficiency, at the number of prompts that the run updates with; it stays open where ∇J is
not told from noise. Looking at m baselines finds a lucky one among them, so a claim takes an interval at the level
1 − .05/m (Bonferroni): all m of them hold together with 95 %, and so does the one of whichever is chosen. Those whose
interval noise hides count among the m: had chance made one of theirs short, it would have been judged, too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from otb_analysis.errors import InputError
from otb_analysis.statistics.gradients import MEANING, four_measures, has_signal, noise_scale
from otb_analysis.statistics.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    Interval,
    jackknife_interval,
    ratio_of_differences,
    unless_hidden,
)
from otb_analysis.statistics.moments import (
    NOTHING,
    REFERENCE,
    Moments,
    Truth,
    against_reference,
    clusters,
    deleted_moments,
    quotient,
    truth_of,
    typical,
    with_projection,
)
from otb_analysis.types import Float, Gram, Label, Proved


@dataclass(frozen=True)
class PairedRatios:
    """One estimator over another on the same rollouts, with intervals over the same prompts."""

    estimator: str
    energy_source: str
    against: Label  # The denominator's (estimator, energy source)
    variance: Interval | None
    sf: Interval | None
    efficiency: Interval | None  # Ratio of efficiencies; above 1 is better
    c_known: bool = False  # True where both projections are proved, so that the SF ratio is the ratio of variance/c²


@dataclass(frozen=True)
class Update:
    """One way of making an update; made by whoever compares group sizes, read by `update_ratios`."""

    grams: Sequence[Gram]  # Gram matrices of group gradients, groups of one size, all with the label and the reference
    label: Label
    n_prompts: int  # Groups P that are averaged in one update, each of another prompt


def paired_ratios(
    grams: Sequence[Gram],
    against: Label = REFERENCE,
    reference: Label = REFERENCE,
    n_prompts: int | None = None,
    known: Proved = NOTHING,
    only: Collection[Label] | None = None,
) -> list[PairedRatios]:
    """Every estimator over one of them on the same rollouts, with jackknife intervals on the log-ratio.

    Args:
        grams: One Gram matrix per step; those with both labels are used.
        n_prompts: Prompts P of the update that efficiency is stated for; by default a typical step's. Ratios of
            variance and SF do not depend on it.
        known: What is proved of the estimators: where c is, the SF needs no ∇J.
        only: The estimators that are compared; by default all that were measured.
    """
    # The same ∇J for every pair, so that ratios against one reference can be compared with each other.
    truth = truth_of(grams, reference, known)
    both = against_reference(grams, against, truth)
    ratios = []
    for label in dict.fromkeys(label for gram in both for label in gram.labels if label != against):
        if only is not None and label not in only:
            continue
        steps = [gram for gram in both if label in gram.labels]
        batch = typical([g.n_prompts for g in steps]) if n_prompts is None else n_prompts
        ratios.append(update_ratios(Update(steps, label, batch), Update(steps, against, batch), truth, known))
    return ratios


def update_ratios(
    above: Update, below: Update, reference: Truth = REFERENCE, known: Proved = NOTHING, level: float = LEVEL
) -> PairedRatios:
    """One update over another whose groups were cut from rollouts of the same prompts, of whichever size.

    ∇J is the reference's in either's own groups; leaving out a prompt leaves it out of both.

    Raises:
        InputError: The two are not of the same prompts.
    """
    # Replicate k must leave out the same prompt in both, or nothing cancels.
    if clusters(above.grams)[1] != clusters(below.grams)[1]:
        raise InputError(
            f"{above.label[0]} and {below.label[0]} were measured on other prompts; pass Gram matrices whose prompts "
            "have the same names, in the same order."
        )
    top, bottom = (
        (deleted_moments(one.grams, one.label, reference), one.n_prompts, known.projection.get(one.label))
        for one in (above, below)
    )
    other = below.label[0] if above.n_prompts == below.n_prompts else f"{below.label[0]} with {below.n_prompts}"
    words = {name: f"ratio of the {meaning(above.n_prompts)} to that of {other}" for name, meaning in MEANING.items()}
    proved = None not in (top[2], bottom[2])
    return PairedRatios(*above.label, below.label, **moment_ratios(top, bottom, words, level), c_known=proved)


def moment_ratios(
    above: tuple[Moments, int, float | None],
    below: tuple[Moments, int, float | None],
    words: Mapping[str, str] | None = None,
    level: float = LEVEL,
) -> dict[str, Interval | None]:
    """Return the ratios of variance, sf and efficiency by name, from moments on the same prompts.

    Where both projections are proved and the noise scale may be without end, the ratio of efficiencies is widened by
    the one without any signal: e₁/e₂ = (1 + SF₂/‖∇J‖²)/(1 + SF₁/‖∇J‖²) falls from SF₂/SF₁ to 1 as the signal grows. An
    estimate exists only where the signal came out large enough, so its own interval leaves out what less would give.

    Args:
        above: Moments [1 + K], prompts P of the update, and the projection where it is proved.
        below: The same of the denominator, without the same prompts in turn.
        words: The estimand of each name; by default "ratio of" it.
    """
    intervals: dict[str, Interval | None] = {
        # The ratio is taken for every left-out prompt, so what the two updates share cancels in the interval.
        name: jackknife_interval(ratio[0], ratio[1:], words[name] if words else f"ratio of {name}", "log", level)
        for name, ratio in ratio_replicates(above, below).items()
    }
    one, sf = intervals["efficiency"], intervals["sf"]
    if None in (above[2], below[2]) or one is None or one.low is None or one.high is None:
        return intervals
    scale = noise_scale(with_projection(below[0], below[2]))
    if scale is not None and scale.high == np.inf and sf is not None and sf.low and sf.high is not None:
        low, high = min(one.low, 1 / sf.high), max(one.high, 1 / sf.low)
        p_value = max(one.p_value or 0.0, sf.p_value or 0.0)
        intervals["efficiency"] = replace(one, low=low, high=high, p_value=p_value)
    return intervals


def ratio_replicates(
    above: tuple[Moments, int, float | None], below: tuple[Moments, int, float | None]
) -> dict[str, Float]:
    """Return the ratios of variance, sf and efficiency by name [1 + K], from all prompts and without each of them.

    Where both projections are proved, both variances are E‖g_p‖² − c²‖∇J‖² with the ‖∇J‖² of all proved estimators:
    the paired difference of ‖g‖²/c² alone says which SF is smaller. Else each has its own ‖m‖².

    Args:
        above: As `moment_ratios`; `below` likewise.
    """
    if None not in (above[2], below[2]):
        above, below = ((with_projection(one, c), p, c) for one, p, c in (above, below))
    values, base = four_measures(*above), four_measures(*below)
    return {name: quotient(values[name], base[name]) for name in ("variance", "sf", "efficiency")}


def gain_lost(
    grams: Sequence[Gram], proxy: Label, exact: Label, n_prompts: int | None = None, known: Proved = NOTHING
) -> Interval | None:
    """Share of an estimator's efficiency gain that is lost by using a proxy for its energies.

    (e_exact − e_proxy)/(e_exact − e_rloo) on the same rollouts: 0 when the proxy costs nothing, 1 when the gain
    over `rloo` is gone, negative when the proxy does better. This, not a correlation, is what a proxy is judged
    by. Its interval is that of a ratio of two differences, `ratio_of_differences`: none where the gain itself may be 0.

    Args:
        n_prompts: Prompts P of the update that efficiency is stated for; by default a typical step's. The gain is
            largest, and the share best determined, where P is of the order of the noise scale.

    Returns:
        None where an efficiency is undefined, ∇J is not told from noise, or the exact form gains nothing over `rloo`.
    """
    labels = (exact, proxy, REFERENCE)
    having = [gram for gram in grams if all(label in gram.labels for label in labels)]
    if not having:
        return None
    batch = n_prompts or max(typical([gram.n_prompts for gram in having]), 1)
    truth = truth_of(having, REFERENCE, known)
    base = deleted_moments(having, REFERENCE, truth)
    if base.power.size > MIN_CLUSTERS and not has_signal(base):
        return None
    with_exact, with_proxy, plain = (
        four_measures(deleted_moments(having, label, truth), batch, known.projection.get(label))["efficiency"]
        for label in labels
    )
    estimand = f"share of the efficiency gain lost by {proxy} instead of {exact} in an update of {batch} prompts"
    return ratio_of_differences(with_exact - with_proxy, with_exact - plain, estimand)


ROUNDING = 1e-8
"""Largest share of ‖g‖² off the other's direction that counts as rounding: gradients are float32."""


@dataclass(frozen=True)
class Alike:
    """One estimator as a multiple of another: g = factor·g_of on every prompt of every step."""

    of: Label  # The other one; itself where no earlier one is alike
    factor: float  # 1 where the two are identical, as `otb` and `otb_turn` in one turn

    @property
    def identical(self) -> bool:
        """True where the two gradients are the same."""
        return abs(self.factor - 1) < 1e-6


def alike(grams: Sequence[Gram], first: Sequence[Label] = (), others: bool = True) -> dict[Label, Alike]:
    """Return for every estimator which one it is a multiple of, by Cauchy and Schwarz over all measured prompts.

    With ⟨a, b⟩ summed over prompts and steps, b = f·a exactly where ⟨a, b⟩² = ‖a‖²‖b‖², and then f = ⟨a, b⟩/‖a‖².
    Only those of the same steps are compared, and a zero gradient is like no other. Others are named after those of
    `first`, in its order, and left out without `others`.
    """
    # First come, first named: a later label is named after an earlier one.
    kinds = dict[tuple[Label, ...], list[int]]()
    for k, gram in enumerate(grams):
        kinds.setdefault(gram.labels, []).append(k)
    present = dict.fromkeys(label for kind in kinds for label in kind)
    labels = [label for label in dict.fromkeys((*first, *(present if others else ()))) if label in present]
    place = {label: k for k, label in enumerate(labels)}
    steps = {label: [k for kind, some in kinds.items() if label in kind for k in some] for label in labels}
    products = np.zeros((len(labels), len(labels)))
    for kind, some in kinds.items():
        here = [k for k, label in enumerate(kind) if label in place]
        rows = [place[kind[k]] for k in here]
        products[np.ix_(rows, rows)] += sum(grams[k].products[np.ix_(here, here)] for k in some)
    lengths = np.multiply.outer(products.diagonal(), products.diagonal())
    # Equality in Cauchy and Schwarz, up to what float32 gradients lose; a negative product is an opposite direction.
    parallel = (products > 0) & (lengths - products**2 <= ROUNDING * lengths)
    same_as: dict[Label, Alike] = {}
    for j, label in enumerate(labels):
        same_as[label] = Alike(label, 1.0)
        for i, other in enumerate(labels[:j]):
            # Sums over other steps hold other prompts. Only the first of a family gives its name: no chains of names.
            if same_as[other].of == other and steps[other] == steps[label] and parallel[i, j]:
                same_as[label] = Alike(other, float(products[i, j] / products[i, i]))
                break
    return same_as


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
    together: Interval | None  # 95 % for all that were looked at; None without ends

    @property
    def better(self) -> bool:
        """True where the interval that holds together with all others is on the better side of 1."""
        low, high = (self.together.low, self.together.high) if self.together else (None, None)
        return (low or 0) > 1 if self.by == "efficiency" else high is not None and high < 1

    @property
    def worse(self) -> bool:
        """True where it is on the worse side."""
        low, high = (self.together.low, self.together.high) if self.together else (None, None)
        return (low or 0) > 1 if self.by == "variance" else high is not None and high < 1

    @property
    def ahead(self) -> float:
        """How many times better it came out, in its measure: 1/ratio of variances, or the ratio of efficiencies."""
        if self.one_look is None:
            return 0.0
        return self.one_look.estimate if self.by == "efficiency" else 1 / self.one_look.estimate


@dataclass(frozen=True)
class Decision:
    """All estimators over one of them on the same rollouts."""

    against: Label
    n_prompts: int  # Independent prompts measured
    update: int  # Prompts of an update, which efficiency depends on
    comparisons: tuple[Comparison, ...]  # As measured; each of a family of multiples once
    alike: Mapping[Label, Alike]
    looked_at: int  # All of them, the m that share the risk of an error: also those whose interval noise hides
    cause: Cause
    signal: bool  # True where ∇J is told from noise: the 95 % interval of ‖∇J‖² leaves out 0
    n_needed: int | None  # About how many prompts would show a difference of 10 %; None where that is not known

    @property
    def tested(self) -> tuple[Comparison, ...]:
        """Those with an interval that holds together with all others.

        Proved ones come before others, of each dear ones (exact norms) last, then the best first.
        """
        shown = (one for one in self.comparisons if one.together is not None)
        # A ratio of variances and one of efficiencies have no common order.
        return tuple(sorted(shown, key=lambda one: (one.by == "efficiency", one.label[1] == "exact", -one.ahead)))

    @property
    def better(self) -> tuple[Comparison, ...]:
        """Those shown to be better, in the same order."""
        return tuple(one for one in self.tested if one.better)

    @property
    def worse(self) -> tuple[Comparison, ...]:
        """Those shown to be worse, the worst first."""
        return tuple(sorted((one for one in self.comparisons if one.worse), key=lambda one: one.ahead))

    @property
    def nearest(self) -> Comparison | None:
        """Of those that are tested and not shown to be worse the first; None where all are."""
        return next((one for one in self.tested if not one.worse), None)

    @property
    def hidden(self) -> tuple[Comparison, ...]:
        """Those that cannot be judged, since noise hides their interval or they were measured on too few prompts."""
        return tuple(one for one in self.comparisons if one.one_look is None or one.one_look.low is None)

    @property
    def best(self) -> Comparison | None:
        """The one to train with; None where none was shown to be better, and for calibrated energies, which no run has.

        It is the best by its own measure among those that need no exact norms, where there are any.
        """
        usable = [one for one in self.better if one.label[1] != "calibrated"]
        return min(usable, key=lambda one: one.label[1] == "exact", default=None)

    def comparison_of(self, label: Label) -> Comparison | None:
        """Return the comparison of a label, or of what it is the same update as; None where there is none."""
        named = self.alike[label].of if label in self.alike else label
        return next((one for one in self.comparisons if one.label == named), None)


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
    same = alike(grams, (against, *first, *(only or ())), only is None)
    truth = truth_of(grams, REFERENCE, known)
    both = [gram for gram in against_reference(grams, against, truth) if against in gram.labels]
    base = deleted_moments(both, against, truth) if both else None
    signal = base is not None and sampled and has_signal(base)
    replicates: dict[Label, tuple[By, Float]] = {}
    for label in dict.fromkeys(label for gram in both for label in gram.labels):
        if label == against or (only is not None and label not in only) or same[label].of != label:
            continue
        steps = [gram for gram in both if label in gram.labels]
        below = base if len(steps) == len(both) else deleted_moments(steps, against, truth)
        assert below is not None
        update, c = typical([gram.n_prompts for gram in steps]), known.projection
        pair = (deleted_moments(steps, label, truth), update, c.get(label)), (below, update, c.get(against))
        by: By = "variance" if sampled and label in c and against in c else "efficiency"
        replicates[label] = by, ratio_replicates(*pair)["sf" if by == "variance" else by]
    comparisons = _compared(replicates, against, signal, sampled)
    cause: Cause = "few prompts" if len(clusters(both)[1]) < MIN_CLUSTERS else "noise"
    if not sampled:
        cause = "another sampler"
    elif any(one.together for one in comparisons):
        cause = ""
    elif not any(gram.measured(truth) for gram in both):
        cause = "no reference"
    elif not comparisons:
        cause = "alone"
    # Equal rewards leave no advantage under a group baseline, so the gradient is exactly 0.
    elif not any(np.trace(gram.blocks([against], against)[0, 0]) > 0 for gram in both):
        cause = "equal rewards"
    count, update = 0 if base is None else base.power.size - 1, typical([gram.n_prompts for gram in both])
    decision = Decision(against, count, update, comparisons, same, len(comparisons), cause, signal, None)
    lead = decision.nearest or next(iter(decision.tested), None)
    return replace(decision, n_needed=_needed(base, lead.together if lead else None, len(comparisons)))


def _compared(
    replicates: Mapping[Label, tuple[By, Float]], against: Label, signal: bool, sampled: bool
) -> tuple[Comparison, ...]:
    """Return every comparison, with its interval by itself and the one that holds together with all others."""
    comparisons = []
    for label, (by, values) in replicates.items():
        alone, together = None, None
        # Noise hides an efficiency where ∇J is not told from it, though the prompts suffice for an interval.
        if by == "variance" or signal or (sampled and values.size <= MIN_CLUSTERS):
            words, levels = f"{by} of {label[0]} over that of {against[0]}", (LEVEL, 1 - (1 - LEVEL) / len(replicates))
            alone, together = (
                unless_hidden(jackknife_interval(values[0], values[1:], words, "log", level)) for level in levels
            )
        comparisons.append(Comparison(label, by, alone, together if together and together.low is not None else None))
    return tuple(comparisons)


def _needed(base: Moments | None, lead: Interval | None, looked_at: int) -> int | None:
    """Return at how many prompts a true difference of 10 % is shown four times in five, with the leader's spread.

    An interval's length falls as 1/√prompts. Where nothing is tested, ∇J must be told from noise first.
    """
    if base is None or base.power.size <= MIN_CLUSTERS:
        return MIN_CLUSTERS
    count = base.power.size - 1
    if lead is not None:
        assert lead.low and lead.high
        # Half the corrected interval is z standard errors; it takes z_.8 more to be beyond 1 with a chance of 80 %.
        z = float(special.ndtri(1 - (1 - LEVEL) / (2 * looked_at)))
        reach = float(np.log(lead.high / lead.low)) / 2 * (1 + float(special.ndtri(POWER)) / z)
        return max(round(count * (reach / -float(np.log(1 - DIFFERENCE))) ** 2), MIN_CLUSTERS)
    truth_sq = jackknife_interval(base.truth_sq[0], base.truth_sq[1:], "‖∇J‖²", "linear")
    if truth_sq is None or truth_sq.low is None or truth_sq.high is None or truth_sq.high <= 0:
        return None
    stderr = (truth_sq.high - truth_sq.low) / (2 * float(special.ndtri((1 + LEVEL) / 2)))
    length = truth_sq.estimate if truth_sq.estimate > 0 else truth_sq.high
    # Between pairs of prompts that are mostly noise the error falls as 1/K; 1/√K is the slower law, so the safe one.
    return max(round(float(count * (3 * stderr / length) ** 2)), count + 1)
