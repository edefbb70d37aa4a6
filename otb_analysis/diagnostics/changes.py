"""Detectors of change and decline, against what was usual in the same run; and change points of a finished series.

Gradient norm, entropy and length are looked at by their logarithms, so a threshold is a factor, and what the run's own
noise explains is subtracted, so that a noisy run needs a larger change. A single spike moves no median of five: a spike
is for the attribution to explain. A run that stops learning has a reward that falls, or a gradient that is exactly 0 or
not finite.

Unlike a detector's first firing `change_points` looks at all steps, later ones too: it dates what happened, and does
not warn.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from otb_analysis.diagnostics.findings import (
    MIN_SPREAD,
    NORMAL,
    Evidence,
    Finding,
    StepSeries,
    finding_of,
    robust,
    trailing,
    unmeasured,
)
from otb_analysis.phases import plural
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

ALWAYS = "otb train and OTBGRPOTrainer record it at every step, OTBMonitor where TRL logs it (logging_steps=1)"
FORWARD = "otb train and what watches TRL record it at every step, otb score adds it to recorded rollouts"


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
    # What is usual at index t is x[max(0, t−5−99) … t−5]: it grows until it has its full length, then it slides.
    least, most = REFERENCE
    centre, spread = np.full(log.size, np.nan), np.full(log.size, np.nan)
    full = RECENT + most - 1
    for t in range(RECENT + least - 1, min(full, log.size)):
        centre[t], spread[t] = robust(log[: t - RECENT + 1])
    if log.size > full:
        centre[full:], spread[full:] = robust(sliding_window_view(log, most)[: log.size - full])
    score = np.exp(recent - centre - SURGE_NOISE * spread)
    one = Evidence("grad_norm", "factor beyond noise", step, norm, score, *SURGE)
    if not one.ready:
        return unmeasured("gradient_surge", series, RECENT + least, ["grad_norm"], ALWAYS)
    at = one.shown()
    reason = (
        f"the gradient norm was {np.exp(recent[at]):.3g} (median of {RECENT} steps up to step {step[at]}), "
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
    return _entropy_change(series, "entropy_collapse", rises=False)


def entropy_rise(series: StepSeries) -> Finding:
    """How far has the entropy risen above its lowest lasting level?

    score = exp(median of the last 10 − lowest running median so far − 1.5 · spread), all of log entropy, as in
    `entropy_collapse`: the factor by which it rose, beyond noise. Training makes a policy more certain; one that grows
    uncertain forgets. A bonus for entropy raises it on purpose.
    Reads `entropy_mean`, in nats.
    """
    return _entropy_change(series, "entropy_rise", rises=True)


def _entropy_change(series: StepSeries, detector: str, rises: bool) -> Finding:
    step, (entropy,) = series.recorded("entropy_mean")
    log = np.log(np.maximum(entropy, LITTLE_ENTROPY if rises else NO_ENTROPY))
    recent = trailing(log, SLOW, np.median)
    # fmin and fmax ignore the NaN of the first steps, where there is no running median yet.
    extreme = (np.fmin if rises else np.fmax).accumulate(trailing(log, REFERENCE[0], np.median)) if log.size else log
    # Spread of single steps around the running median, over the last 100 steps there are.
    least, most = REFERENCE
    off = np.abs(log - recent)
    spread = trailing(off, most, np.median)
    for t in range(least - 1, min(most + SLOW - 1, log.size)):
        spread[t] = np.median(off[SLOW - 1 : t + 1])
    noise = SLOW_NOISE * np.maximum(NORMAL * spread, MIN_SPREAD)
    score = np.exp((recent - extreme if rises else extreme - recent) - noise)
    words = f"factor of the {'rise' if rises else 'fall'} beyond noise"
    one = Evidence("entropy_mean", words, step, entropy, score, *(RISE if rises else FALL))
    if not one.ready:
        return unmeasured(detector, series, REFERENCE[0], ["entropy_mean"], FORWARD)
    at = one.shown()
    factor, level = np.exp(recent[at] - extreme[at]), f"lasting level of {np.exp(extreme[at]):.3g}"
    reason = f"entropy was {np.exp(recent[at]):.3g} nats (median of {SLOW} steps up to step {step[at]}), "
    reason += f"{factor:.2g} times its lowest {level}." if rises else f"{factor:.0%} of its highest {level}."
    return finding_of(detector, [one], reason)


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


LOST = (0.3, 0.6)
"""Share of the highest lasting reward that is lost, beyond noise. Harder prompts cost some; a collapse costs most."""

LASTING, PRESENT = 5, 3
"""Steps whose median is a lasting reward, and the present one: short, since a collapse takes a few steps."""

NOISE = 3.0
"""Spreads of single steps that are subtracted from a fall."""

GONE = (0.6, 1.0)
"""Share of the last five steps whose gradient is exactly 0: three of them, all of them."""

MUST_BE_FINITE = (
    *("grad_norm", "grad_norm_max", "loss", "reward_mean", "logprob_mean", "entropy_mean", "ratio_mean"),
    *("kl_reference", "mismatch_mean", "critic_loss"),
)
"""Scalars of an update; where one is NaN or infinite, the update was of no use, or the weights are gone."""


def reward_fall(series: StepSeries) -> Finding:
    """How much of its highest lasting level has the reward lost?

    score = (h − r − 3 · spread)/max(|h|, h − r), h the highest median of 5 steps so far, r the median of the last 3 and
    the spread that of single steps, √π/2 · mean |R_k − R_{k−1}| over all steps so far: the share that is lost beyond
    noise.
    Reads `reward_mean`.
    """
    step, (reward,) = series.recorded("reward_mean")
    highest = np.fmax.accumulate(trailing(reward, LASTING, np.median)) if reward.size else reward
    recent = trailing(reward, PRESENT, np.median)
    lost = highest - recent
    # A mean, since sparse rewards repeat themselves at most steps; of absolute values, since a collapse is one jump.
    jumps = np.abs(np.diff(reward))
    mean = np.concatenate([[0.0], np.cumsum(jumps) / np.arange(1, reward.size)])[: reward.size]
    beyond = lost - NOISE * (np.sqrt(np.pi) / 2 * mean)
    scale = np.maximum(np.abs(highest), lost)
    score = np.divide(beyond, scale, out=np.full(reward.size, np.nan), where=scale > 0)
    score[: LASTING + PRESENT - 1] = np.nan  # the first steps would be compared with themselves
    score[LASTING + PRESENT - 1 :][scale[LASTING + PRESENT - 1 :] == 0] = 0.0  # it was never above 0
    one = Evidence("reward_mean", "share of the highest reward lost, beyond noise", step, reward, score, *LOST)
    if not one.ready:
        return unmeasured("reward_fall", series, LASTING + PRESENT, ["reward_mean"], ALWAYS)
    at = one.shown()
    reason = (
        f"reward was {recent[at]:.2g} (median of {PRESENT} steps up to step {step[at]}), after a highest lasting level "
        f"of {highest[at]:.2g} (median of {LASTING} steps)."
    )
    return finding_of("reward_fall", [one], reason)


def fall(finding: Finding) -> tuple[int, float, float]:
    """Return the step at which the reward fell, the lasting level before it and the level after it.

    Hindsight, of a finding of `reward_fall` that fired: the first of the low steps that led to its worst level.
    """
    one = finding.evidence[0]
    threshold = one.watch if finding.alarm_step is None else one.alarm
    at = one.first(threshold) or 0
    before = float(np.nanmax(trailing(one.value[: at + 1], LASTING, np.median)))
    after = float(np.median(one.value[at - PRESENT + 1 : at + 1]))
    low = one.value[: at + 1] < (before + after) / 2
    first = at if low[at] else at - 1  # two of the last three are low
    while first and low[first - 1]:
        first -= 1
    return int(one.step[first]), before, after


def vanished_gradient(series: StepSeries) -> Finding:
    """Is the gradient exactly 0, so that nothing is learned any more?

    score = share of the last 5 steps with ‖ḡ‖ = 0. Where all rewards of a group are equal, no group baseline has a
    gradient. Reads `grad_norm`.
    """
    step, (norm,) = series.recorded("grad_norm")
    zero = (norm == 0).astype(float)
    one = Evidence("grad_norm", "share of steps without gradient", step, norm, trailing(zero, LASTING, np.mean), *GONE)
    if not one.ready:
        return unmeasured("vanished_gradient", series, LASTING, ["grad_norm"], ALWAYS)
    at = one.shown()
    last, recent = np.flatnonzero(norm > 0), int(zero[max(0, at - LASTING + 1) : at + 1].sum())
    since = f", at every step since step {step[last[-1] + 1 if last.size else 0]}" if zero[-1] else ""
    reason = (
        f"the gradient norm was exactly 0 at {int(zero.sum())} of {plural(len(step), 'step')} of the run, "
        f"{recent or 'none'} of them among the {LASTING} up to step {step[at]}{since}."
        if zero.any()
        else f"the gradient norm was above 0 at all {len(step)} steps."
    )
    return finding_of("vanished_gradient", [one], reason)


def not_finite(series: StepSeries) -> Finding:
    """Was a scalar of an update NaN or infinite?

    score = how many of `MUST_BE_FINITE` were, at a step that recorded any of them; one is an alarm.
    """
    values = {name: np.asarray(series.columns[name]) for name in MUST_BE_FINITE if name in series.columns}
    known = (
        np.array([~np.isnan(x) for x in values.values()]).any(axis=0) if values else np.zeros(len(series.step), bool)
    )
    if not known.any():
        return unmeasured("not_finite", series, 1, MUST_BE_FINITE[:1], ALWAYS)
    step = np.asarray(series.step)[known]
    bad = {name: np.isinf(x[known]) for name, x in values.items()}
    score = np.sum([*bad.values()], axis=0, dtype=float)
    at = np.flatnonzero(score)
    names = [name for name, x in bad.items() if at.size and x[at[0]]]
    column = names[0] if names else next(iter(values))
    one = Evidence(column, "scalars that are NaN or infinite", step, values[column][known], score, 1.0, 1.0)
    if not names:
        return finding_of("not_finite", [one], f"every scalar of {plural(len(step), 'step')} is finite.")
    more = f" {len(at)} of {len(step)} steps have such numbers." if len(at) > 1 else ""
    reason = f"NaN or infinite at step {step[at[0]]}: {', '.join(names)}.{more}"
    return finding_of("not_finite", [one], reason)


LOGARITHMIC = ("grad_norm", "entropy_mean", "length_mean")
"""Columns whose changes are factors."""

SEARCHED = (*LOGARITHMIC, "energy_tail_k")
"""Columns that are searched by default. Not the reward: a learning curve is a ramp, which segments only cut up."""

BLOCK = 5
"""Steps averaged into one point: neighbours are alike, and a change within five steps is one change."""

PENALTY = 8.0
"""Price of one more change point in units of σ²·log n. 2 would be the Bayesian information criterion's for
independent noise; autocorrelation and slow trends ask for more."""

LEAST_JUMP, SHORT = 3.5, 5.0
"""A change point counts where the levels on its sides differ by `LEAST_JUMP`·(1 + `SHORT`/n) standard deviations σ of
one of the n points: σ is estimated from n − 1 differences, and of few it comes out small too often."""

LEAST_FACTOR, LEAST_SHIFT = 1.4, 1.0
"""They differ by this factor, too, or for columns that are no logarithms by this much: a slow decay, or the slow rise
of the tail index in a healthy run, would be cut into steps otherwise."""


@dataclass(frozen=True)
class ChangePoint:
    """One lasting change of level."""

    column: str
    step: int  # First step of the new level, to within `BLOCK` steps
    before: float  # Level of the segment before it, in the column's unit
    after: float  # Level of the segment that begins here


def change_points(series: StepSeries, columns: tuple[str, ...] = SEARCHED) -> list[ChangePoint]:
    """Find the lasting changes of some quantities: the best cut of their block medians into segments.

    Minimises Σ over segments of the squared deviations + penalty · number of changes, penalty = 8·σ²·log n, σ from the
    differences of neighbouring points, robustly. Positive quantities are taken by their logarithm.
    """
    changes = []
    for name in columns:
        step, (value,) = series.recorded(name)
        log = name in LOGARITHMIC
        step, value = (step[value > 0], np.log(value[value > 0])) if log else (step, value)
        n = value.size // BLOCK
        if n < 6:
            continue
        # Medians of blocks: a single spike is no change of level.
        points = np.median(value[: n * BLOCK].reshape(n, BLOCK), axis=1)
        # Spread of one point, from neighbouring differences, which a change of level touches once.
        spread = NORMAL * float(np.median(np.abs(np.diff(points)))) / np.sqrt(2)
        sigma = max(spread, MIN_SPREAD if log else 1e-9)
        ends = best_cut(points, PENALTY * sigma**2 * np.log(n))
        # The cost is of means, but the levels reported are medians, which an outlier does not move.
        levels = [float(np.median(points[a:b])) for a, b in pairwise([0, *ends])]
        least = max(LEAST_JUMP * (1 + SHORT / n) * sigma, np.log(LEAST_FACTOR) if log else LEAST_SHIFT)
        for at, (before, after) in zip(ends, pairwise(levels), strict=False):
            if abs(after - before) >= least:
                before, after = (float(np.exp(x)) if log else x for x in (before, after))
                changes.append(ChangePoint(name, int(step[at * BLOCK]), before, after))
    return sorted(changes, key=lambda point: (point.step, point.column))


def best_cut(points: Float, penalty: float) -> list[int]:
    """Return where segments of two points or more end that minimise Σ (x − segment mean)² + penalty · segments.

    Optimal partitioning (Jackson et al. 2005): F(t) = min_s F(s) + cost(s, t) + penalty, in n steps of up to n numbers.
    """
    x = points - points.mean()
    one, two = (np.concatenate([[0.0], np.cumsum(x**k)]) for k in (1, 2))
    least, start = np.full(x.size + 1, np.inf), np.zeros(x.size + 1, int)
    least[0] = 0.0
    for t in range(2, x.size + 1):
        s = np.arange(t - 1)
        total = least[s] + (two[t] - two[s]) - (one[t] - one[s]) ** 2 / (t - s) + penalty
        start[t] = int(total.argmin())
        least[t] = total[start[t]]
    ends = [x.size]
    while start[ends[0]]:
        ends.insert(0, int(start[ends[0]]))
    return ends
