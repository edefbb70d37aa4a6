"""Detectors of levels: shares of groups, tokens and steps, and tails, against bounds from theory or practice."""

import numpy as np
from scipy import special

from otb_analysis.diagnostics.changes import ALWAYS
from otb_analysis.diagnostics.findings import Evidence, Finding, StepSeries, deciding, judged, unmeasured
from otb_analysis.diagnostics.windows import trailing
from otb_analysis.types import Float

NO_SIGNAL = (0.5, 0.8)
"""Groups of equal reward have no gradient under any group baseline: half of the batch wasted, then four fifths."""

CLIPPED = (0.95, np.inf)
"""From 19 steps in 20 on, clipping sets the length of every update and the learning rate loses its meaning: worth a
look, and common; by itself no collapse."""

RISE = (0.65, 0.85)
"""Rise of the share of clipped steps over all steps before: from almost never to almost always."""

RATIO = (np.log(10.0), np.log(100.0))
"""Largest |log π/μ| of a step: one token that counts ten times, or a hundred times, as much as it was sampled for."""

RATIO_CLIPPED = (0.2, 0.4)
"""Share of tokens whose gradient a clip, truncation or mask changed. At drift .2 clipping moved the mean gradient by
4 to 23 % (docs/enumeration.md); published settings clip a few per cent."""

HEAVY = (0.5, 1.0)
"""Pareto-k of energies: from ½ on the standard error of a variance estimate is unreliable, from 1 on the variance of
the gradient is infinite."""

WINDOW, RATIO_WINDOW, TAIL_WINDOW = 20, 10, 10
TAIL_LEAST = 5
"""Recorded tail indices that a running mean needs; exact ones are measured at few steps."""

CONFIDENCE = 0.99
"""Of one-sided bounds, at every look; a series is looked at hundreds of times, and a bound at a level that calm runs
stay well below needs no more."""


def zero_variance_groups(series: StepSeries) -> Finding:
    """How much of the batch teaches nothing, because all rewards within a group are equal?

    score = lower 99 % Clopper–Pearson bound of the share of such groups over the last 20 steps.

    Args:
        series: A run with `n_zero_variance_groups` and `n_prompts`; `reward_mean` says on which side they are.
    """
    step, (equal, groups) = series.recorded("n_zero_variance_groups", "n_prompts")
    k, n = trailing(equal, WINDOW, np.sum), trailing(groups, WINDOW, np.sum)
    score = special.betaincinv(np.maximum(k, 0.5), n - k + 1, 1 - CONFIDENCE)
    value = np.divide(equal, groups, out=np.full(equal.shape, np.nan), where=groups > 0)
    one = Evidence("n_zero_variance_groups", "lower bound of the share of groups", step, value, score, *NO_SIGNAL)
    if not one.ready:
        names = ["n_zero_variance_groups"]
        return unmeasured("zero_variance_groups", series, WINDOW, names, ALWAYS)
    at = one.shown()
    said = (
        f"{k[at]:.0f} of {n[at]:.0f} groups ({k[at] / n[at]:.0%}) had equal rewards in the {WINDOW} steps up to step "
        f"{step[at]}{_reward_there(series, int(step[at]))}."
    )
    return judged("zero_variance_groups", [one], said)


def _reward_there(series: StepSeries, step: int) -> str:
    known, (reward,) = series.until(step).recorded("reward_mean")
    return f", mean reward {reward[-WINDOW:].mean():.2g}" if known.size else ""


def clip_fraction(series: StepSeries) -> Finding:
    """Does gradient clipping set the length of the updates?

    Two scores over the last 20 steps: the share of clipped steps, and its rise over the share of all steps before.

    Args:
        series: A run with `clipped` (0 or 1 a step).
    """
    step, (clipped,) = series.recorded("clipped")
    share = trailing(clipped, WINDOW, np.mean)
    before = np.full(clipped.size, np.nan)
    past = np.cumsum(clipped) / np.arange(1, clipped.size + 1)
    if clipped.size >= 2 * WINDOW:
        before[2 * WINDOW - 1 :] = past[WINDOW - 1 : -WINDOW]
    evidence = [
        Evidence("clipped", "share of clipped steps", step, clipped, share, *CLIPPED),
        Evidence("clipped", "rise of that share over all steps before", step, clipped, share - before, *RISE),
    ]
    if not evidence[0].ready:
        return unmeasured("clip_fraction", series, WINDOW, ["clipped"], ALWAYS)
    one = deciding(evidence)
    at = one.shown()
    rest = f", {before[at]:.0%} of all steps before" if np.isfinite(before[at]) else ""
    said = f"{share[at]:.0%} of the {WINDOW} steps up to step {step[at]} were clipped{rest}."
    return judged("clip_fraction", evidence, said)


def ratio_tails(series: StepSeries) -> Finding:
    """Do a few importance ratios, or the clips that tame them, decide the update?

    Two scores: the median over 5 steps of the largest |log π − log μ| of a step, and the mean over 10 steps of the
    share of tokens whose gradient a clip, truncation or mask changed.

    Args:
        series: A run with `mismatch_max` in nats or `ratio_clip_share`.
    """
    worst_step, (worst,) = series.recorded("mismatch_max")
    clip_step, (clip,) = series.recorded("ratio_clip_share")
    evidence = [
        Evidence(
            "mismatch_max", "largest |log ratio|", worst_step, worst, trailing(worst, 5, np.median), *RATIO
        ),
        Evidence(
            "ratio_clip_share", "share of clipped tokens", clip_step, clip,
            trailing(clip, RATIO_WINDOW, np.mean), *RATIO_CLIPPED,
        ),
    ]  # fmt: skip
    if not any(one.ready for one in evidence):
        remedy = f"{ALWAYS}, the second where an objective weighs by ratios (--objective.ratio)"
        return unmeasured("ratio_tails", series, 5, ["mismatch_max", "ratio_clip_share"], remedy)
    one = deciding(evidence)
    at = one.shown()
    if one.column == "mismatch_max":
        said = (
            f"the largest |log π/μ| of a step was {one.score[at]:.2g} nats (median of 5 steps up to step "
            f"{one.step[at]}): a ratio of up to {np.exp(min(one.score[at], 50.0)):.3g}."
        )
    else:
        said = f"{one.score[at]:.0%} of tokens were clipped in the {RATIO_WINDOW} steps up to step {one.step[at]}."
    return judged("ratio_tails", evidence, said)


def tail_index(series: StepSeries) -> Finding:
    """Are a few tokens so energetic that averages over tokens say little?

    score = lower 99 % bound (Student's t) of the mean Pareto-k over the last 10 records of exact norms where they
    are measured, and of the proxy.

    Args:
        series: A run with `exact_tail_k` or `energy_tail_k`.
    """
    evidence = []
    for name in ("exact_tail_k", "energy_tail_k"):
        step, (k,) = series.recorded(name)
        evidence.append(Evidence(name, "lower bound of the mean Pareto-k", step, k, _mean_low(k), *HEAVY))
    if not any(one.ready for one in evidence):
        remedy = (
            "the proxy's tail takes 250 tokens a step and comes with every step, that of exact norms with the level "
            "exact (--measure.exact.every 10)"
        )
        return unmeasured("tail_index", series, TAIL_LEAST, ["energy_tail_k", "exact_tail_k"], remedy)
    one = deciding(evidence)
    at = one.shown()
    recent = one.value[max(0, at - TAIL_WINDOW + 1) : at + 1]
    of = "exact norms" if one.column == "exact_tail_k" else "the proxy"
    said = (
        f"Pareto-k of {of} was {recent.mean():.2f} on average over {recent.size} records up to step {one.step[at]}, "
        f"at least {one.score[at]:.2f} with {CONFIDENCE:.0%} confidence."
    )
    return judged("tail_index", evidence, said)


def _mean_low(x: Float) -> Float:
    """Lower bound of the mean of the last values, at every index from `TAIL_LEAST` on."""
    found = np.full(x.size, np.nan)
    for t in range(TAIL_LEAST - 1, x.size):
        recent = x[max(0, t - TAIL_WINDOW + 1) : t + 1]
        error = recent.std(ddof=1) / np.sqrt(recent.size)
        found[t] = recent.mean() - special.stdtrit(recent.size - 1, CONFIDENCE) * error
    return found
