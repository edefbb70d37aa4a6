"""Detectors of a run that stops learning: a reward that falls, a gradient that is exactly 0, or not finite."""

import numpy as np

from otb_analysis.diagnostics.changes import ALWAYS
from otb_analysis.diagnostics.findings import Evidence, Finding, StepSeries, finding_of, unmeasured
from otb_analysis.diagnostics.windows import trailing
from otb_analysis.types import Float

LOST = (0.3, 0.6)
"""Share of the highest lasting reward that is lost, beyond noise. Harder prompts cost some; a collapse costs most."""

LASTING, RECENT = 5, 3
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
    recent = trailing(reward, RECENT, np.median)
    lost = highest - recent
    scale = np.maximum(np.abs(highest), lost)
    score = np.divide(lost - NOISE * _noise(reward), scale, out=np.full(reward.size, np.nan), where=scale > 0)
    score[: LASTING + RECENT - 1] = np.nan  # the first steps would be compared with themselves
    score[LASTING + RECENT - 1 :][scale[LASTING + RECENT - 1 :] == 0] = 0.0  # it was never above 0
    one = Evidence("reward_mean", "share of the highest reward lost, beyond noise", step, reward, score, *LOST)
    if not one.ready:
        return unmeasured("reward_fall", series, LASTING + RECENT, ["reward_mean"], ALWAYS)
    at = one.shown()
    reason = (
        f"reward was {recent[at]:.2g} (median of {RECENT} steps up to step {step[at]}), after a highest lasting level "
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
    after = float(np.median(one.value[at - RECENT + 1 : at + 1]))
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
    last = np.flatnonzero(norm > 0)
    since = f", at every step since step {step[last[-1] + 1 if last.size else 0]}" if zero[-1] else ""
    reason = (
        f"‖ḡ‖ was exactly 0 at {int(zero[max(0, at - LASTING + 1) : at + 1].sum())} of the {LASTING} steps up to step "
        f"{step[at]}, and at {int(zero.sum())} of {len(step)} steps of the run{since}."
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
        return finding_of("not_finite", [one], f"every scalar of {len(step)} steps is finite.")
    more = f" {len(at)} of {len(step)} steps have such numbers." if len(at) > 1 else ""
    reason = f"NaN or infinite at step {step[at[0]]}: {', '.join(names)}.{more}"
    return finding_of("not_finite", [one], reason)


def _noise(x: Float) -> Float:
    """Spread of single steps up to every index [K], √π/2 · mean |x_k − x_{k−1}|; 0 at the first.

    A mean, since sparse rewards repeat themselves at most steps; of absolute values, since a collapse is one jump.
    """
    jumps = np.abs(np.diff(x))
    return np.sqrt(np.pi) / 2 * np.concatenate([[0.0], np.cumsum(jumps) / np.arange(1, len(x))])[: len(x)]
