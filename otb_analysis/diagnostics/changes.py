"""Detectors of change: gradient norm, entropy and length against what was usual in the same run.

All four look at logarithms, so a threshold is a factor, and subtract what the run's own noise explains, so that a
noisy run needs a larger change. A single spike moves no median of five: a spike is for the attribution to explain.
"""

import numpy as np

from otb_analysis.diagnostics.findings import Evidence, Finding, StepSeries, finding_of, unmeasured
from otb_analysis.diagnostics.windows import MIN_SPREAD, NORMAL, median_of_last, robust, trailing, usual
from otb_analysis.types import Float

SURGE = (1.5, 3.0)
"""Factors beyond noise. Clipped or not, a gradient that is lastingly three times its usual length is another regime."""

FALL = (2.0, 4.0)
"""Healthy training halves the entropy too, but slowly. Runs that died had a quarter of it left."""

RISE = (1.5, 3.0)
"""Training lowers the entropy. Runs that broke on old rollouts came to several times its least level."""

DRIFT = (1.5, 2.5)
"""Completions 1.5 and 2.5 times as long, or as short. Learning one task changed calm runs by far less."""

RECENT = 5
"""Steps whose median is the present gradient norm: short, since a surge is fatal within tens of steps."""

SLOW = 10
"""The same for entropy and length, which move slowly."""

REFERENCE = (20, 100)
"""Steps that say what is usual: at least, at most."""

SURGE_NOISE, SLOW_NOISE = 2.0, 1.5
"""Spreads subtracted from a change. A median of five steps with autocorrelation .6 has a standard error of about one
spread; the rates in docs/results/alarms.md are what counts."""

NO_ENTROPY = 1e-4
"""Least entropy in nats: lower values count as this one, since both are a collapse."""

LITTLE_ENTROPY = 0.01
"""Entropy in nats below which a rise is none: a nearly certain policy that is a little less certain explores."""

ALWAYS = "otb train records it at every step"
FORWARD = "otb train records it at every step, otb score adds it to recorded rollouts"


def gradient_surge(series: StepSeries) -> Finding:
    """Has the gradient norm lastingly left what was usual?

    score = exp(median of the last 5 log ‖ḡ‖ − median of the 20 to 100 before − 2 · their spread): the factor beyond
    noise. Steps with a gradient of exactly 0 are no evidence either way and are left out.
    Reads `grad_norm`.
    """
    step, (norm,) = series.recorded("grad_norm")
    step, norm = step[norm > 0], norm[norm > 0]
    log = np.log(norm)
    recent = trailing(log, RECENT, np.median)
    centre, spread = usual(log, RECENT, *REFERENCE)
    score = np.exp(recent - centre - SURGE_NOISE * spread)
    one = Evidence("grad_norm", "factor beyond noise", step, norm, score, *SURGE)
    if not one.ready:
        return unmeasured("gradient_surge", series, RECENT + REFERENCE[0], ["grad_norm"], ALWAYS)
    at = one.shown()
    reason = (
        f"‖ḡ‖ was {np.exp(recent[at]):.3g} (median of {RECENT} steps up to step {step[at]}), "
        f"{np.exp(recent[at] - centre[at]):.2g} times the usual {np.exp(centre[at]):.3g} of the steps before "
        f"(spread {np.expm1(spread[at]):.0%})."
    )
    return finding_of("gradient_surge", [one], reason)


def entropy_collapse(series: StepSeries) -> Finding:
    """How far has the entropy fallen from its highest lasting level?

    score = exp(highest running median so far − median of the last 10 − 1.5 · spread), all of log entropy, the spread
    that of single steps around the running median: the factor by which it fell, beyond noise.
    Reads `entropy_mean`, in nats.
    """
    step, (entropy,) = series.recorded("entropy_mean")
    log = np.log(np.maximum(entropy, NO_ENTROPY))
    recent = trailing(log, SLOW, np.median)
    lasting = trailing(log, REFERENCE[0], np.median)
    # fmax ignores the NaN of the first steps, where there is no running median yet.
    top = np.fmax.accumulate(lasting) if log.size else lasting
    score = np.exp(top - recent - SLOW_NOISE * _noise(log, recent))
    one = Evidence("entropy_mean", "factor of the fall beyond noise", step, entropy, score, *FALL)
    if not one.ready:
        return unmeasured("entropy_collapse", series, REFERENCE[0], ["entropy_mean"], FORWARD)
    at = one.shown()
    reason = (
        f"entropy was {np.exp(recent[at]):.3g} nats (median of {SLOW} steps up to step {step[at]}), "
        f"{np.exp(recent[at] - top[at]):.0%} of its highest lasting level of {np.exp(top[at]):.3g}."
    )
    return finding_of("entropy_collapse", [one], reason)


def entropy_rise(series: StepSeries) -> Finding:
    """How far has the entropy risen above its lowest lasting level?

    score = exp(median of the last 10 − lowest running median so far − 1.5 · spread), all of log entropy, as in
    `entropy_collapse`: the factor by which it rose, beyond noise. Training makes a policy more certain; one that grows
    uncertain forgets. A bonus for entropy raises it on purpose.
    Reads `entropy_mean`, in nats.
    """
    step, (entropy,) = series.recorded("entropy_mean")
    log = np.log(np.maximum(entropy, LITTLE_ENTROPY))
    recent = trailing(log, SLOW, np.median)
    lasting = trailing(log, REFERENCE[0], np.median)
    # fmin ignores the NaN of the first steps, where there is no running median yet.
    least = np.fmin.accumulate(lasting) if log.size else lasting
    score = np.exp(recent - least - SLOW_NOISE * _noise(log, recent))
    one = Evidence("entropy_mean", "factor of the rise beyond noise", step, entropy, score, *RISE)
    if not one.ready:
        return unmeasured("entropy_rise", series, REFERENCE[0], ["entropy_mean"], FORWARD)
    at = one.shown()
    reason = (
        f"entropy was {np.exp(recent[at]):.3g} nats (median of {SLOW} steps up to step {step[at]}), "
        f"{np.exp(recent[at] - least[at]):.2g} times its lowest lasting level of {np.exp(least[at]):.3g}."
    )
    return finding_of("entropy_rise", [one], reason)


def length_drift(series: StepSeries) -> Finding:
    """Have completions become much longer or shorter than at the start?

    score = exp(|median of the last 10 − median of the first 20| − 1.5 · spread) of log length: the factor beyond noise,
    in whichever direction.
    Reads `length_mean`, in tokens, or `characters_mean` where no step counted tokens.
    """
    column, unit = "length_mean", "tokens"
    if not len(series.recorded(column)[0]) and len(series.recorded("characters_mean")[0]):
        column, unit = "characters_mean", "characters"  # an imported run without token ids
    step, (length,) = series.recorded(column)
    step, length = step[length > 0], length[length > 0]
    log = np.log(length)
    recent = trailing(log, SLOW, np.median)
    n = REFERENCE[0]
    start, spread = robust(log[:n]) if log.size >= n + SLOW else (np.asarray(np.nan), np.asarray(np.nan))
    score = np.exp(np.abs(recent - start) - SLOW_NOISE * np.maximum(spread, 0))
    score[: n + SLOW - 1] = np.nan  # the first steps would be compared with themselves
    one = Evidence(column, "factor of the change beyond noise", step, length, score, *DRIFT)
    if not one.ready:
        return unmeasured("length_drift", series, n + SLOW, [column], FORWARD)
    at = one.shown()
    reason = (
        f"completions were {np.exp(recent[at]):.3g} {unit} long (median of {SLOW} steps up to step {step[at]}), "
        f"{np.exp(recent[at] - start):.2g} times the {np.exp(start):.3g} of the first {n} steps."
    )
    return finding_of("length_drift", [one], reason)


def _noise(log: Float, recent: Float) -> Float:
    """Spread of single steps around the running median, over the last 100 steps there are [K]."""
    least, most = REFERENCE
    off = np.abs(log - recent)[SLOW - 1 :]
    median = np.concatenate([np.full(min(SLOW - 1, log.size), np.nan), median_of_last(off, least - SLOW + 1, most)])
    return np.maximum(NORMAL * median, MIN_SPREAD)
