"""One update over another on the same prompts: ratios of variance, SF and efficiency, with intervals over prompts.

Pairing removes what two estimators share, so these intervals are much shorter than the two separate ones suggest. The
estimand is the ratio of the two expectations. Prompts are the clusters.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.statistics.inference.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    Interval,
    jackknife_interval,
    ratio_of_differences,
)
from otb_analysis.statistics.moments import measures
from otb_analysis.statistics.moments.absolute import has_signal, noise_scale
from otb_analysis.statistics.moments.gram import (
    REFERENCE,
    Truth,
    against_reference,
    deleted_moments,
    prompts_of,
    truth_of,
    typical,
)
from otb_analysis.statistics.moments.measures import Moments
from otb_analysis.types import Float, Gram, Label, Proved

NOTHING = Proved()
"""Every projection is estimated."""


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
    ratios, bases = [], dict[tuple[int, ...], Moments]()  # Moments of `against` on the same steps
    for label in dict.fromkeys(label for gram in both for label in gram.labels if label != against):
        if only is not None and label not in only:
            continue
        steps = against_reference(both, label, truth)
        batch = typical([g.n_prompts for g in steps]) if n_prompts is None else n_prompts
        above, below = Update(steps, label, batch), Update(steps, against, batch)
        same = tuple(map(id, steps))
        if same not in bases:
            bases[same] = deleted_moments(steps, against, truth)
        ratios.append(_ratios(above, below, (deleted_moments(steps, label, truth), bases[same]), known))
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
    if prompts_of(above.grams) != prompts_of(below.grams):
        raise InputError(
            f"{above.label[0]} and {below.label[0]} were measured on other prompts; pass Gram matrices whose prompts "
            "have the same names, in the same order."
        )
    moments = tuple(deleted_moments(one.grams, one.label, reference) for one in (above, below))
    return _ratios(above, below, moments, known, level)


def _ratios(
    above: Update, below: Update, moments: tuple[Moments, ...], known: Proved, level: float = LEVEL
) -> PairedRatios:
    """Return the ratios of two updates from the moments of both, by prompt left out."""
    top, bottom = (
        (own, one.n_prompts, known.projection.get(one.label)) for one, own in zip((above, below), moments, strict=True)
    )
    intervals = moment_ratios(top, bottom, lambda name: _ratio_words(name, above, below), level)
    proved = None not in (top[2], bottom[2])
    return PairedRatios(*above.label, below.label, **intervals, c_known=proved)


def moment_ratios(
    above: tuple[Moments, int, float | None],
    below: tuple[Moments, int, float | None],
    words: Callable[[str], str] = "ratio of {}".format,
    level: float = LEVEL,
) -> dict[str, Interval | None]:
    """Return the ratios of variance, sf and efficiency by name, from moments on the same prompts.

    Args:
        above: Moments [1 + K], prompts P of the update, and the projection where it is proved.
        below: The same of the denominator, without the same prompts in turn.
        words: The estimand of each name.
    """
    intervals: dict[str, Interval | None] = {
        # The ratio is taken for every left-out prompt, so what the two updates share cancels in the interval.
        name: jackknife_interval(ratio[0], ratio[1:], words(name), "log", level)
        for name, ratio in ratio_replicates(above, below).items()
    }
    proved = None not in (above[2], below[2])
    if proved and (scale := noise_scale(measures.with_projection(below[0], below[2]))) and scale.high == np.inf:
        intervals["efficiency"] = _with_less_signal(intervals["efficiency"], intervals["sf"])
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
        above, below = ((measures.with_projection(one, c), p, c) for one, p, c in (above, below))
    values, base = four_measures(*above), four_measures(*below)
    return {name: measures.quotient(values[name], base[name]) for name in ("variance", "sf", "efficiency")}


def _with_less_signal(efficiency: Interval | None, sf: Interval | None) -> Interval | None:
    """Widen a ratio of efficiencies, of two updates with proved projections, by the one without any signal.

    e₁/e₂ = (1 + SF₂/‖∇J‖²)/(1 + SF₁/‖∇J‖²) falls from SF₂/SF₁ to 1 as the signal grows. An estimate exists only where
    the signal came out large enough, so its own interval leaves out what less signal would give.
    """
    if efficiency is None or efficiency.low is None or efficiency.high is None:
        return efficiency
    if sf is None or not sf.low or sf.high is None:
        return efficiency
    p_value = max(efficiency.p_value or 0.0, sf.p_value or 0.0)
    low, high = min(efficiency.low, 1 / sf.high), max(efficiency.high, 1 / sf.low)
    return replace(efficiency, low=low, high=high, p_value=p_value)


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


def four_measures(moments: Moments, batch: int, c: float | None = None) -> dict[str, Float]:
    """Return the four measures with intervals by name, each [1 + K].

    Args:
        c: The proved projection: it and the SF are then defined wherever the variance is, whatever ‖∇J‖² seems to be.
    """
    # Without a measured step the typical batch is 0, and V/P would divide by it.
    p = max(batch, 1)
    variance = measures.batch_variance(moments, p)
    return {
        "variance": variance,
        "projection": measures.projection(moments) if c is None else np.full_like(variance, c),
        "sf": measures.sf(moments, p) if c is None else variance / c**2,
        "efficiency": measures.efficiency(measures.with_projection(moments, c), p),
    }


def measure_interval(values: Float, name: str, batch: int) -> Interval | None:
    """Return the jackknife interval of the variance, the projection or the SF."""
    return jackknife_interval(values[0], values[1:], MEANING[name](batch), _SCALE[name])


# Positive quantities by their logarithm; c can come out negative and stays as it is.
_SCALE = {"variance": "log", "projection": "linear", "sf": "log"}
MEANING: dict[str, Callable[[int], str]] = {
    "variance": lambda p: f"batch variance of an update of {p} prompts",
    "projection": lambda p: "projection c = ⟨m, ∇J⟩/‖∇J‖²",
    "sf": lambda p: f"SF of an update of {p} prompts",
    "efficiency": lambda p: f"efficiency of an update of {p} prompts",
}


def _ratio_words(name: str, above: Update, below: Update) -> str:
    other = below.label[0] if above.n_prompts == below.n_prompts else f"{below.label[0]} with {below.n_prompts}"
    return f"ratio of the {MEANING[name](above.n_prompts)} to that of {other}"
