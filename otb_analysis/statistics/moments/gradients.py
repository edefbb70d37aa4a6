"""One row of gradient statistics per estimator, and its noise scale, from Gram matrices of group gradients.

Prompts are the clusters of every interval. ‖∇J‖² is estimated from pairs of different prompts and can come out
non-positive when few prompts are measured: bias, projection, SF and efficiency are then None, not a number. Where the
projection c is proved (`Proved`) it is not estimated: bias, c and SF need no ∇J, and only the efficiency does.

A Gram matrix holds advantages as they were. For a batch-coupled entry (`batch_mean`) deleting a prompt should also
change the baseline of all others, which takes the rollouts: `estimate` without the prompt, then a new matrix. Leaving
that out is an error of order 1/P, since the baseline's error multiplies a mean score that is 0 in expectation; on 24
enumerated prompts the standard error of its log-ratio to `rloo` is within 7 % of recomputing's
(`test_batch_coupling_costs_the_jackknife_little_from_24_prompts_up`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis import schema
from otb_analysis.statistics.inference.intervals import MIN_CLUSTERS, Interval, is_informative, jackknife_interval
from otb_analysis.statistics.moments import absolute, measures
from otb_analysis.statistics.moments.gram import (
    REFERENCE,
    Truth,
    against_reference,
    deleted_moments,
    pair_noise,
    truth_of,
    typical,
)
from otb_analysis.statistics.moments.measures import Moments, known_number
from otb_analysis.statistics.moments.paired import MEANING, NOTHING, four_measures, measure_interval
from otb_analysis.types import Float, Gram, Label, Proved

OF_TRUTH = ("relative_bias", "projection", "sf", "rollout_equivalents")
"""What is measured along ∇J where the projection is not proved; the efficiency has a rule of its own (`absolute`)."""
POSITIVE = ("variance", "sf", "rollout_equivalents", "efficiency", "projection", "noise_scale")


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
    # prompts; its ends may be ∞) and efficiency, which is None where it must not be shown by itself (see `absolute`)
    intervals: Mapping[str, Interval | None]

    @property
    def n_variance(self) -> float | None:
        """Batch variance times rollouts: comparable between group sizes and numbers of prompts."""
        return None if self.variance is None else self.variance * self.n_rollouts

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
        _one(against_reference(grams, label, truth), label, (reference, truth), known.projection.get(label), n_prompts)
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
        As `absolute.noise_scale`: the upper end is ∞ where the noise may be without end, and so is the estimate where
        the signal did not come out positive. None where no step has two prompts.
    """
    truth = truth_of(grams, REFERENCE, known)
    row = _one(against_reference(grams, label, truth), label, (REFERENCE, truth), known.projection.get(label), None)
    return row.intervals["noise_scale"]


def _one(
    grams: list[Gram], label: Label, against: tuple[Label, Truth], c: float | None, n_prompts: int | None
) -> GradientStatistics:
    reference, truth = against
    # Every array of moments is [1 + K]: entry 0 from all prompts, the others for the jackknife.
    moments = _against(deleted_moments(grams, label, truth), grams, reference, truth)
    groups = typical([g.n_prompts for g in grams])
    batch = groups if n_prompts is None else n_prompts
    # An update of other prompts than were measured has rollouts in proportion: the group size stays.
    rollouts = round(typical([g.n_rollouts for g in grams]) * (batch / groups if groups else 1))
    values = four_measures(moments, batch, c)
    intervals = {name: measure_interval(values[name], name, batch) for name in ("variance", "projection", "sf")}
    # Without an unbiased estimator there is no ∇J to be c times as long as: the mean's own length is known.
    m = measures.with_projection(moments, c if np.isfinite(moments.truth_sq[0]) else None)
    floor = measures.quotient(np.array([pair_noise(grams, label, truth)]), moments.truth_sq[:1])
    words = MEANING["efficiency"](batch)
    intervals["efficiency"] = absolute.shown_efficiency(values["efficiency"], max(batch, 1), float(floor[0]), words)
    intervals["noise_scale"] = absolute.noise_scale(m)
    intervals["relative_bias"] = _bias_interval(moments, c)
    equivalents = _equivalents(moments, max(batch, 1), rollouts, c)
    words = f"rollouts that {reference[0]} needs instead of {rollouts}"
    intervals["rollout_equivalents"] = jackknife_interval(equivalents[0], equivalents[1:], words)
    ends, bias = intervals["variance"], intervals["relative_bias"]
    return GradientStatistics(
        estimator=label[0],
        energy_source=label[1],
        n_prompts=batch,
        n_rollouts=rollouts,
        total_power=known_number(moments.power[0]),
        mean_norm_sq=_mean_norm_sq(grams, label),
        variance=known_number(values["variance"][0]),
        variance_low=ends.low if ends else None,
        variance_high=ends.high if ends else None,
        within=None,  # the two parts of the variance take pools of rollouts
        between=None,
        relative_bias=bias.estimate if bias else None,
        projection=known_number(values["projection"][0]),
        sf=known_number(values["sf"][0]),
        efficiency=known_number(values["efficiency"][0]),
        reference=_reference_name(grams, reference, truth),
        c_known=c is not None,
        signal=_has_signal(moments, values),
        rollout_equivalents=None if np.isnan(equivalents[0]) else float(equivalents[0]),
        n_clusters=moments.power.size - 1,
        sketch_dim=min((gram.sketch_dim for gram in grams if gram.sketch_dim), default=None),
        intervals=intervals,
    )


def _has_signal(moments: Moments, values: Mapping[str, Float]) -> bool:
    if moments.power.size > MIN_CLUSTERS:
        return absolute.has_signal(moments)
    # An efficiency is a share: above 1 it is lost in the noise.
    return bool(np.isfinite(values["projection"][0]) and 0 <= values["efficiency"][0] <= 1)


def _against(moments: Moments, grams: list[Gram], reference: Label, truth: Truth) -> Moments:
    """Give the reference's power, which rollouts are compared with, also where several estimators stand for ∇J."""
    if truth == reference:
        return moments
    if not all(reference in gram.labels for gram in grams):
        return replace(moments, reference_power=np.full_like(moments.power, np.nan))
    of_reference = deleted_moments(grams, reference, truth)
    if isinstance(truth, frozenset) and reference in truth:  # its mean is ∇J, as in its ratios to others
        return replace(moments, reference_power=of_reference.power)
    return replace(moments, reference_power=of_reference.power - of_reference.mean_sq + moments.truth_sq)


def _equivalents(moments: Moments, batch: int, rollouts: int, c: float | None) -> Float:
    if c is None:
        return measures.rollout_equivalents(moments, batch, rollouts)
    # Both are unbiased up to length, so equal efficiency is equal variance/c², and no ∇J is needed.
    spread = np.maximum(moments.reference_power - moments.truth_sq, 0)
    variance = measures.batch_variance(measures.with_projection(moments, c), 1) / c**2
    return measures.quotient(rollouts * spread, variance)


def _bias_interval(moments: Moments, c: float | None) -> Interval | None:
    """Return the relative bias; its interval is that of its square, which noise takes below 0, on the linear scale."""
    words = "relative bias ‖m − ∇J‖/‖∇J‖"
    if c is not None:
        return Interval(abs(1 - c), None, None, moments.power.size - 1, f"{words}, proved")
    square = measures.bias_sq(moments)
    found = jackknife_interval(square[0], square[1:], words, "linear")
    if found is None:
        return None
    estimate = float(np.sqrt(max(found.estimate, 0)))
    if found.low is None or found.high is None or found.high <= 0:
        return Interval(estimate, None, None, found.n_clusters, words)
    return Interval(estimate, float(np.sqrt(max(found.low, 0))), float(np.sqrt(found.high)), found.n_clusters, words)


def _reference_name(grams: list[Gram], reference: Label, truth: Truth) -> str | None:
    if all(reference in gram.labels for gram in grams):
        return reference[0]
    standing_in = sorted(truth) if isinstance(truth, frozenset) and all(gram.has(truth) for gram in grams) else []
    return standing_in[0][0] if standing_in else None


def _mean_norm_sq(grams: list[Gram], label: Label) -> float | None:
    norms_sq = [g.blocks(label, label)[0].mean() for g in grams if g.n_prompts]
    return known_number(float(np.mean(norms_sq))) if norms_sq else None
