"""Conclusions from paired comparisons with one estimator: which differ from it, which are as good, what is missing.

There is one family of tests. Every estimator is tested for its variance at equal progress (SF), and those whose
projection is not proved for their efficiency too. The false-discovery rate is controlled over all tests
(Benjamini–Yekutieli, any dependence). Multiples of the reference are not tested.

The best of those that differ has an interval at the level 1 − R·q/(m·Σ1/i), where R of m tests are discoveries
(Benjamini and Yekutieli 2005). It excludes 1, and at most 5 % of all such intervals miss. For the best one alone the
promise is weaker, since selection makes it look better than it is: with 21 equally good ones its interval covers some
87 %.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from otb_analysis.statistics.comparisons.alike import alike
from otb_analysis.statistics.comparisons.verdicts import MARGIN, Cause, Conclusion, Signal, Verdict
from otb_analysis.statistics.inference.intervals import MIN_CLUSTERS, jackknife_interval
from otb_analysis.statistics.moments.gram import REFERENCE, Truth, against_reference, deleted_moments, truth_of
from otb_analysis.statistics.moments.paired import NOTHING, PairedRatios, Update, paired_ratios, update_ratios
from otb_analysis.types import Gram, Label, Proved

RATE = 0.05
"""False-discovery rate."""


def conclude(grams: Sequence[Gram], known: Proved = NOTHING, first: Sequence[Label] = ()) -> Conclusion:
    """Compare every estimator with `REFERENCE`, with control of false discoveries.

    Identical estimators are named after those of `first`, such as the ones that trained.
    """
    # A multiple of another estimator would be a second test of the same thing, and make every threshold stricter.
    same = alike(grams, (REFERENCE, *first))
    pairs = {
        (p.estimator, p.energy_source): p
        for p in paired_ratios(grams, known=known)
        if same[p.estimator, p.energy_source].of == (p.estimator, p.energy_source)
    }
    verdicts, level = _with_discoveries([_verdict(label, pair, known) for label, pair in pairs.items()])
    truth = truth_of(grams, REFERENCE, known)
    both = [gram for gram in against_reference(grams, REFERENCE, truth) if REFERENCE in gram.labels]
    # The first entry is from all prompts, each other one leaves one of them out.
    count = deleted_moments(both, REFERENCE, truth).power.size - 1 if both else 0
    tested = [v for v in verdicts if v.tested]
    cause = "" if tested else _cause(both, count, bool(verdicts))
    better, worse = [v for v in verdicts if v.better], [v for v in verdicts if v.worse]
    # The extreme one of many looks more extreme than it is, so its interval is made wider for the selection.
    chosen = [
        None if pick is None else _again(pick, both, truth, known, level)
        for pick in (_best(better), max(worse, key=_distance, default=None))
    ]
    undecided = [v for v in tested if not v.differs_in and not v.within]
    needed = _needed(min(undecided, key=_sf, default=None), len(tested), count)
    return Conclusion(
        REFERENCE, count, tuple(verdicts), same, _signal(both, truth), cause, chosen[0], chosen[1], needed
    )


def _verdict(label: Label, pair: PairedRatios, known: Proved) -> Verdict:
    # Two unbiased updates rank alike by SF and by efficiency: a second test would only cost power.
    proved = label in known.projection and pair.against in known.projection
    return Verdict(label, pair.sf, None if proved else pair.efficiency, label in known.projection)


def _with_discoveries(verdicts: list[Verdict]) -> tuple[list[Verdict], float]:
    """Mark the discoveries, and return the level at which intervals hold for those selected among them."""
    family = [
        (v.label, name, ratio.p_value)
        for v in verdicts
        for name in ("sf", "efficiency")
        if (ratio := getattr(v, name)) is not None and ratio.p_value is not None
    ]
    if not family:
        return verdicts, 1 - RATE
    # All estimators are measured on the same rollouts, so their p-values are dependent.
    q_values = stats.false_discovery_control([p for *_, p in family], method="by")
    discoveries = [(label, name) for (label, name, _), q in zip(family, q_values, strict=True) if q <= RATE]
    marked = [replace(v, differs_in=tuple(name for label, name in discoveries if label == v.label)) for v in verdicts]
    # Under any dependence, intervals at this level for the R selected of m keep the rate of those that miss.
    harmonic = float((1 / np.arange(1, len(family) + 1)).sum())
    return marked, 1 - RATE * max(len(discoveries), 1) / (len(family) * harmonic)


def _again(pick: Verdict, grams: Sequence[Gram], truth: Truth, known: Proved, level: float) -> Verdict:
    """Return a verdict with intervals at another level."""
    steps = against_reference(grams, pick.label, truth)
    batch = round(float(np.mean([gram.n_prompts for gram in steps])))
    pair = update_ratios(Update(steps, pick.label, batch), Update(steps, REFERENCE, batch), truth, known, level)
    return replace(pick, sf=pair.sf, efficiency=pair.efficiency)


def _best(better: Sequence[Verdict]) -> Verdict | None:
    """Return the one that is farthest ahead, preferring those that need no exact norms at every step.

    Calibrated energies exist only where they are measured, so no run can train with them.
    """
    for sources in (("none", "proxy"), ("exact",)):
        if candidates := [v for v in better if v.label[1] in sources]:
            return max(candidates, key=_distance)
    return None


def _distance(verdict: Verdict) -> float:
    # By logarithms, half and twice are equally far from 1.
    return max(abs(float(np.log(getattr(verdict, name).estimate))) for name in verdict.differs_in)


def _sf(verdict: Verdict) -> float:
    return verdict.sf.estimate if verdict.sf else np.inf


def _cause(both: Sequence[Gram], count: int, others: bool) -> Cause:
    if not both:
        return "no reference"
    if not others:
        return "alone"
    # Equal rewards leave no advantage under a group baseline, so the gradient is exactly 0.
    if not any(np.trace(gram.blocks(REFERENCE, REFERENCE)[0]) > 0 for gram in both):
        return "equal rewards"
    return "few prompts" if count < MIN_CLUSTERS else "noise"


def _signal(both: Sequence[Gram], truth: Truth) -> Signal:
    if not both:
        return Signal(False, None)
    values = deleted_moments(both, REFERENCE, truth).truth_sq
    interval = jackknife_interval(values[0], values[1:], "‖∇J‖²", "linear")
    if interval is None or interval.low is None or interval.high is None:
        return Signal(bool((values > 0).all()), None)
    stderr = (interval.high - interval.low) / 4  # a 95 % interval is about four standard errors wide
    length = interval.estimate if interval.estimate > 0 else interval.high
    # Between pairs of prompts that are mostly noise the error falls as 1/K; 1/√K is the slower law, so the safe one.
    needed = None if length <= 0 else max(round(interval.n_clusters * (3 * stderr / length) ** 2), interval.n_clusters)
    return Signal(bool((values > 0).all()), needed)


def _needed(lead: Verdict | None, n_tests: int, n_prompts: int) -> int | None:
    """Estimate how many prompts make the leader a discovery among n tests, or put its interval within ±15 %."""
    ratio = lead.sf if lead else None
    if ratio is None or ratio.low is None or ratio.high is None or not 0 < ratio.low < ratio.high:
        return None
    # The interval was made on the log scale, so its length is about the same everywhere there.
    off = abs(float(np.log(ratio.estimate)))
    half = max(float(np.log(ratio.high / ratio.estimate)), float(np.log(ratio.estimate / ratio.low)))
    # Benjamini–Yekutieli's threshold for the smallest of n p-values; an interval shrinks as 1/√prompts.
    strict = RATE / (n_tests * (1 / np.arange(1, n_tests + 1)).sum())
    stretch = stats.norm.isf(strict / 2) / stats.norm.isf(RATE / 2)
    room = float(-np.log(1 - MARGIN) - off)
    ways = [(half * stretch / off) ** 2 if off > 0 else np.inf, (half / room) ** 2 if room > 0 else np.inf]
    return max(round(n_prompts * min(ways)), n_prompts + 1) if np.isfinite(min(ways)) else None
