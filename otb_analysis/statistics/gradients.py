"""One estimator by itself: its row of gradient statistics and its noise scale, from Gram matrices of group gradients.

Prompts are the clusters of every interval. ‖∇J‖² is estimated from pairs of different prompts and can come out
non-positive when few prompts are measured: bias, projection, SF and efficiency are then None, not a number. Where the
projection c is proved (`Proved`) it is not estimated: bias, c and SF need no ∇J, and only the efficiency does.

Efficiency and noise scale divide by ‖∇J‖², which noise can hide. A rule that shows an efficiency only where the signal
came out large shows the lucky ones: with a noise scale of 536 prompts and 24 measured the efficiencies shown were five
times too high, and a third of their 95 % intervals missed. So the interval here is that of an efficiency *given that it
is shown*. Ratios of efficiencies do not need this: what two estimators share cancels.

A Gram matrix holds advantages as they were. For a batch-coupled entry (`batch_mean`) deleting a prompt should also
change the baseline of all others, which takes the rollouts: `estimate` without the prompt, then a new matrix. Leaving
that out is an error of order 1/P, since the baseline's error multiplies a mean score that is 0 in expectation; on 24
enumerated prompts the standard error of its log-ratio to `rloo` is within 7 % of recomputing's
(`test_batch_coupling_costs_the_jackknife_little_from_24_prompts_up`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from otb_analysis import schema
from otb_analysis.statistics.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    Interval,
    Studentized,
    is_informative,
    jackknife_interval,
)
from otb_analysis.statistics.moments import (
    NOTHING,
    REFERENCE,
    Moments,
    Truth,
    against_reference,
    batch_variance,
    bias_sq,
    deleted_moments,
    efficiency,
    known_number,
    pair_noise,
    projection,
    quotient,
    rollout_equivalents,
    sf,
    truth_of,
    typical,
    with_projection,
)
from otb_analysis.types import Float, Gram, Label, Proved

LEAST = 1 / 3
"""Fewer measured prompts than this multiple of the noise scale do not show an absolute efficiency."""

MISS = 0.01
"""Chance that the lower end of a shown efficiency is above the truth, if the prompts' law is well behaved."""

NOT_SHOWN = (
    "An efficiency by itself is not shown where fewer prompts were measured than a third of the noise scale, since "
    "there only lucky estimates are large enough to be seen, nor where its interval has ends a factor of 100 apart; "
    "ratios on the same rollouts stay."
)
"""Why an efficiency is missing, in one sentence."""


def has_signal(moments: Moments) -> bool:
    """Tell whether ∇J is told from noise: the 95 % interval of ‖∇J‖², over at least 16 prompts, leaves out 0."""
    truth_sq = jackknife_interval(moments.truth_sq[0], moments.truth_sq[1:], "‖∇J‖²", "linear")
    return truth_sq is not None and truth_sq.low is not None and truth_sq.low > 0


def noise_scale(moments: Moments) -> Interval | None:
    """Return V/‖m‖² in prompts, with the interval of its inverse turned over.

    The signal-to-noise ratio of one prompt, ‖m‖²/V, has a jackknife interval on the linear scale whatever its sign.
    Where that reaches 0 the noise scale has no upper end (∞), and where the estimate itself is not positive it is ∞.
    On either side the wider of this and the interval on the log scale counts, which fits a strong signal.

    Returns:
        A point below 16 prompts; None where neither a point nor an end is known.
    """
    # Estimated, so a spread near 0 can come out below it.
    noise = np.maximum(moments.power - moments.mean_sq, 0)
    words, scale = "gradient noise scale V/‖m‖² in prompts", quotient(noise, moments.mean_sq)[0]
    ratio = quotient(moments.mean_sq, noise)
    inverse = jackknife_interval(ratio[0], ratio[1:], words, "linear")
    if inverse is None or inverse.low is None or inverse.high is None or inverse.high <= 0:
        return Interval(float(scale), None, None, ratio.size - 1, words) if np.isfinite(scale) else None
    low, high = 1 / inverse.high, 1 / inverse.low if inverse.low > 0 else np.inf
    by_logarithm = jackknife_interval(ratio[0], ratio[1:], words)
    if by_logarithm is not None and by_logarithm.low is not None and by_logarithm.high is not None:
        low, high = min(low, 1 / by_logarithm.high), max(high, 1 / by_logarithm.low)
    return Interval(float(scale) if np.isfinite(scale) else np.inf, low, high, inverse.n_clusters, words)


def may_be_shown(efficiency: float, n_prompts: float, n_measured: int) -> bool:
    """Tell whether at least a third of the noise scale was measured: of (1 − e)·P/e prompts, by the efficiency e of P.

    An estimate above 1 is lost in the noise too.
    """
    return 0 < efficiency <= 1 and (1 - efficiency) * n_prompts * LEAST <= efficiency * n_measured


def shown_efficiency(efficiency: Float, n_prompts: float, floor: float, words: str) -> Interval | None:
    """Return an efficiency with its 95 % interval where it may be shown, else None.

    With r = e/((1 − e)·P), for an unbiased estimator the inverse of its noise scale, it is shown from
    r ≥ c = 1/(3·measured prompts) on, and where it has an ordinary interval: a jackknife interval on the logit scale.
    The lower end is the r₀ at which an estimate as large as this one has a chance of 1 % *among those shown*,
    Φ̄((r − r₀)/s)/Φ̄((c − r₀)/s) = .01, or the ordinary one at that level where that is lower. Near c, where an estimate
    says little, it is 0. It is 1 % and not 2.5 %, since in heavy tails a sample without the rare prompts has too large
    an estimate and too small an s. Source: selective inference for a normal mean above a threshold (Zhong and
    Prentice, 2008).

    s² is the jackknife's at r and falls in proportion to r₀ down to that of the noise alone: where there is no signal
    only pairs of noises are left.

    Args:
        efficiency: From all K prompts, and without each of them [1 + K].
        n_prompts: Prompts P of the update that it is stated for.
        floor: Standard error of ‖∇J‖² from pairs of noises alone, relative to ‖∇J‖².
        words: What it is.
    """
    e, k = float(efficiency[0]), efficiency.size - 1
    if not may_be_shown(e, n_prompts, k):
        return None
    ordinary = jackknife_interval(e, efficiency[1:], words, "logit")
    if ordinary is None or k < MIN_CLUSTERS or e == 1:  # without any noise there is nothing to be in doubt of
        return ordinary
    if ordinary.low is None:
        return None
    r = efficiency / ((1 - efficiency) * n_prompts)
    stderr = float(np.sqrt((k - 1) * r[1:].var()))
    # As many standard errors as skewed or heavy-tailed prompts take, in units of a normal law's.
    stretch = Studentized.from_influence(-r[1:]).quantiles(LEVEL)[0] / special.ndtri((1 + LEVEL) / 2)
    # The jackknife counts the variance of pairs of noises twice, and in few directions they are skewed to the right.
    least = min(2 * floor * float(r[0]), stderr)
    lowest = _lower_end(float(r[0]), LEAST / k, stretch * stderr, stretch * least) * n_prompts
    cautious = jackknife_interval(e, efficiency[1:], words, "logit", 1 - 2 * MISS)
    if cautious is None or cautious.low is None:
        return None
    return Interval(e, min(cautious.low, lowest / (1 + lowest)), ordinary.high, k, f"{words}, given that it is shown")


def _lower_end(r: float, threshold: float, stderr: float, least: float) -> float:
    """Return the r₀ in [0, r] at which an estimate above r has the chance `MISS` among those above the threshold."""
    low, high = 0.0, r
    for _ in range(8 if least else 0):  # by 1/128 each time: loading SciPy's root finders takes longer than a page
        at = np.linspace(low, high, 129)
        s = np.sqrt(least**2 + (stderr**2 - least**2) * at / r)
        surplus = special.log_ndtr((at - r) / s) - special.log_ndtr((at - threshold) / s) - np.log(MISS)
        above = int(np.argmax(surplus >= 0))
        low, high = float(at[max(above - 1, 0)]), float(at[above])
    return low


OF_TRUTH = ("relative_bias", "projection", "sf", "rollout_equivalents")
"""What is measured along ∇J where the projection is not proved; `shown_efficiency` has a rule of its own."""
MEANING: dict[str, Callable[[int], str]] = {
    "variance": lambda p: f"batch variance of an update of {p} prompts",
    "projection": lambda p: "projection c = ⟨m, ∇J⟩/‖∇J‖²",
    "sf": lambda p: f"SF of an update of {p} prompts",
    "efficiency": lambda p: f"efficiency of an update of {p} prompts",
}

POSITIVE = ("variance", "sf", "rollout_equivalents", "efficiency", "projection", "noise_scale")


def four_measures(moments: Moments, batch: int, c: float | None = None) -> dict[str, Float]:
    """Return the four measures with intervals by name, each [1 + K].

    Args:
        c: The proved projection: it and the SF are then defined wherever the variance is, whatever ‖∇J‖² seems to be.
    """
    # Without a measured step the typical batch is 0, and V/P would divide by it.
    p = max(batch, 1)
    variance = batch_variance(moments, p)
    return {
        "variance": variance,
        "projection": projection(moments) if c is None else np.full_like(variance, c),
        "sf": sf(moments, p) if c is None else variance / c**2,
        "efficiency": efficiency(with_projection(moments, c), p),
    }


@dataclass(frozen=True)
class GradientStatistics:
    """Everything one Gram matrix says about one estimator; the first fields are a row of `schema.GRADIENTS`."""

    estimator: str
    energy_source: str
    n_prompts: int
    n_rollouts: int
    total_power: float | None  # mean_p‖ḡ_p‖²
    mean_norm_sq: float | None  # ‖ḡ‖², averaged over steps where there are several
    variance: float | None  # Batch variance of an update of P prompts; None below two prompts
    variance_low: float | None  # Lower end of its 95 % interval; None below 16 prompts
    variance_high: float | None
    within: float | None  # Part of P·variance from rollouts given the prompt; None, since it takes pools
    between: float | None  # Part of P·variance from prompts; None, since it takes pools
    relative_bias: float | None
    projection: float | None
    sf: float | None
    efficiency: float | None
    # Estimator that stands for ∇J, with all proved unbiased ones where there are any; None where it is not among the
    # labels.
    reference: str | None
    c_known: bool  # True where c is proved, so that bias, projection and SF are not estimated
    # True where ∇J is told from noise: the 95 % interval of ‖∇J‖² leaves out 0. Below 16 prompts: where it came out
    # large enough for every measure.
    signal: bool
    sketch_dim: int | None  # Fewest buckets of the sketches behind any step's matrix; None where all are exact
    rollout_equivalents: float | None  # Rollouts that the reference needs for the same efficiency; ∞ where none suffice
    n_clusters: int
    # 95 % intervals by name, of variance, projection, sf, relative_bias, rollout_equivalents, noise_scale (V/‖m‖² in
    # prompts; its ends may be ∞) and efficiency, which is None where it must not be shown by itself
    intervals: Mapping[str, Interval | None]

    def shown(self, name: str) -> Interval | None:
        """Return one of `intervals` where it may be shown by itself, None where noise hides it.

        What rests on an estimated c takes a ∇J that is told from noise. From 16 prompts on, the ends of a positive
        quantity's interval must be less than a factor of 100 apart; else a variance keeps its point, and a noise scale
        the end that it is above.
        """
        one = self.intervals[name]
        if one is None or (not self.c_known and not self.signal and name in OF_TRUTH):
            return None
        # What has no noise has no ends, and what is proved has none either.
        sure = self.c_known if name == "projection" else one.low is None and name in ("efficiency", "noise_scale")
        if name not in POSITIVE or sure or self.n_clusters < MIN_CLUSTERS or is_informative(one):
            return one
        if name == "noise_scale":
            return replace(one, estimate=np.inf, high=np.inf)
        return replace(one, low=None, high=None, p_value=None) if name == "variance" else None

    def as_row(self) -> dict[str, object]:
        """Return the columns of `schema.GRADIENTS` besides `step`, by name."""
        return {c.name: getattr(self, c.name) for c in schema.GRADIENTS if c is not schema.STEP}


def gradient_statistics(
    gram: ArrayLike, labels: Sequence[Label], n_rollouts: int, reference: Label = REFERENCE, known: Proved = NOTHING
) -> list[GradientStatistics]:
    """Statistics of every estimator on one step's rollouts, from ⟨g_{m,p}, g_{m',p'}⟩ [M, M, P, P] of group *means*.

    Bias and progress are None where the unbiased `reference` is not among the labels.

    Raises:
        InputError: The matrix does not have the shape [M, M, P, P] for these labels.
    """
    return pooled_statistics([Gram(np.asarray(gram, dtype=float), tuple(labels), n_rollouts)], reference, known=known)


def pooled_statistics(
    grams: Sequence[Gram],
    reference: Label = REFERENCE,
    n_prompts: int | None = None,
    known: Proved = NOTHING,
    only: Collection[Label] | None = None,
) -> list[GradientStatistics]:
    """Statistics of every estimator over several steps: sums over steps first, then ratios.

    Each (step, prompt) is a cluster of its own unless the matrices name their prompts, in which case a prompt that
    comes back is one cluster. With very few prompts per step the intervals are conservative: deleting one prompt then
    deletes most of that step's pairs. A label is judged on the steps that have both it and the reference.

    Args:
        n_prompts: Prompts P of the update that variance, SF and efficiency are stated for; by default a typical
            step's. Other values rescale V/P.
        known: What is proved of the estimators; ‖∇J‖² is then pooled over the unbiased ones.
        only: The estimators that get a row; by default all that were measured.
    """
    seen = dict.fromkeys(label for gram in grams for label in gram.labels)
    truth = truth_of(grams, reference, known)
    return [
        _row(against_reference(grams, label, truth), label, (reference, truth), known.projection.get(label), n_prompts)
        for label in seen
        if only is None or label in only
    ]


def gradient_noise_scale(grams: Sequence[Gram], label: Label, known: Proved = NOTHING) -> Interval | None:
    """Gradient noise scale of one estimator in *prompts*: B = V/‖m‖², V the variance of one prompt's group gradient.

    At B prompts the noise of an update is as large as its signal; the signal-to-noise ratio of P prompts is P/B. An
    unbiased estimator has efficiency P/(P + B). A constant factor on the estimator does not change B. Multiply by the
    group size for rollouts.

    V = E‖g_p‖² − ‖m‖², with ‖m‖² a mean over pairs of different prompts, so the noise biases neither. Where the
    projection c is proved, ‖m‖² = c²·‖∇J‖², with ‖∇J‖² from all proved unbiased estimators, which is less noisy.
    Source: McCandlish et al. (2018), whose two batch sizes are here one prompt and all prompts.

    Returns:
        As `noise_scale`: the upper end is ∞ where the noise may be without end, and so is the estimate where the signal
        did not come out positive. None where no step has two prompts.
    """
    rows = pooled_statistics(grams, known=known, only=[label])
    return rows[0].intervals["noise_scale"] if rows else None


def _row(
    grams: list[Gram], label: Label, against: tuple[Label, Truth], c: float | None, n_prompts: int | None
) -> GradientStatistics:
    reference, truth = against
    # Every array of moments is [1 + K]: entry 0 from all prompts, the others for the jackknife.
    moments = deleted_moments(grams, label, truth)
    if truth != reference:  # rollouts are compared with the reference, whatever stands for ∇J
        power = np.full_like(moments.power, np.nan)
        if all(reference in gram.labels for gram in grams):
            plain = deleted_moments(grams, reference, truth)
            # Where the reference stands for ∇J, too, its mean is ∇J, as in its ratios to others.
            stands = isinstance(truth, frozenset) and reference in truth
            power = plain.power if stands else plain.power - plain.mean_sq + moments.truth_sq
        moments = replace(moments, reference_power=power)
    groups = typical([g.n_prompts for g in grams])
    batch = groups if n_prompts is None else n_prompts
    # An update of other prompts than were measured has rollouts in proportion: the group size stays.
    rollouts = round(typical([g.n_rollouts for g in grams]) * (batch / groups if groups else 1))
    measures = four_measures(moments, batch, c)
    floor = quotient(np.array([pair_noise(grams, label, truth)]), moments.truth_sq[:1])
    intervals = _intervals(moments, measures, batch, c, float(floor[0]))
    if c is None:
        equivalents = rollout_equivalents(moments, max(batch, 1), rollouts)
    else:  # both are unbiased up to length, so equal efficiency is equal variance/c², and no ∇J is needed
        spread = np.maximum(moments.reference_power - moments.truth_sq, 0)
        equivalents = quotient(rollouts * spread, batch_variance(with_projection(moments, c), 1) / c**2)
    words = f"rollouts that {reference[0]} needs instead of {rollouts}"
    intervals["rollout_equivalents"] = jackknife_interval(equivalents[0], equivalents[1:], words)
    ends, bias = intervals["variance"], intervals["relative_bias"]
    norms_sq = [gram.mean_norm_sq[label] for gram in grams if gram.n_prompts]
    standing = [reference] if all(reference in gram.labels for gram in grams) else []
    if not standing and isinstance(truth, frozenset) and all(gram.measured(truth) for gram in grams):
        standing = sorted(truth)
    signal = has_signal(moments)
    if moments.power.size <= MIN_CLUSTERS:  # an efficiency is a share: above 1 it is lost in the noise
        signal = bool(np.isfinite(measures["projection"][0]) and 0 <= measures["efficiency"][0] <= 1)
    first = {name: known_number(values[0]) for name, values in measures.items()}
    return GradientStatistics(
        *label, n_prompts=batch, n_rollouts=rollouts, total_power=known_number(moments.power[0]),
        mean_norm_sq=known_number(float(np.mean(norms_sq))) if norms_sq else None,
        variance_low=ends.low if ends else None, variance_high=ends.high if ends else None,
        within=None, between=None,  # the two parts of the variance take pools of rollouts
        relative_bias=bias.estimate if bias else None, **first,
        reference=standing[0][0] if standing else None, c_known=c is not None, signal=signal,
        rollout_equivalents=None if np.isnan(equivalents[0]) else float(equivalents[0]),
        n_clusters=moments.power.size - 1, intervals=intervals,
        sketch_dim=min((gram.sketch_dim for gram in grams if gram.sketch_dim), default=None),
    )  # fmt: skip


def _intervals(
    moments: Moments, measures: Mapping[str, Float], batch: int, c: float | None, floor: float
) -> dict[str, Interval | None]:
    """Return the 95 % intervals by name, but for that of `rollout_equivalents`."""
    words = "relative bias ‖m − ∇J‖/‖∇J‖"
    if c is not None:
        bias = Interval(abs(1 - c), None, None, moments.power.size - 1, f"{words}, proved")
    else:
        # Noise takes the square below 0, so its interval is on the linear scale.
        square = bias_sq(moments)
        bias = jackknife_interval(square[0], square[1:], words, "linear")
        if bias is not None:
            low = high = None
            if bias.low is not None and bias.high is not None and bias.high > 0:
                low, high = float(np.sqrt(max(bias.low, 0))), float(np.sqrt(bias.high))
            bias = Interval(float(np.sqrt(max(bias.estimate, 0))), low, high, bias.n_clusters, words)
    shown = shown_efficiency(measures["efficiency"], max(batch, 1), floor, MEANING["efficiency"](batch))
    # Without an unbiased estimator there is no ∇J to be c times as long as: the mean's own length is known.
    projected = with_projection(moments, c if np.isfinite(moments.truth_sq[0]) else None)
    single = {  # positive quantities by their logarithm; c can come out negative and stays as it is
        name: jackknife_interval(measures[name][0], measures[name][1:], MEANING[name](batch), scale)
        for name, scale in (("variance", "log"), ("projection", "linear"), ("sf", "log"))
    }
    return {**single, "efficiency": shown, "noise_scale": noise_scale(projected), "relative_bias": bias}
