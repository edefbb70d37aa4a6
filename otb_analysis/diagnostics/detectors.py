"""All detectors by name; those of shares of groups, tokens and steps, of tails, and the sampling certificate."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy import special

from otb_analysis.diagnostics.changes import (
    ALWAYS,
    FORWARD,
    entropy_collapse,
    entropy_rise,
    gradient_surge,
    length_drift,
    not_finite,
    reward_fall,
    vanished_gradient,
)
from otb_analysis.diagnostics.findings import (
    SEVERITY,
    Evidence,
    Finding,
    StepSeries,
    deciding,
    finding_of,
    trailing,
    unmeasured,
)

NO_SIGNAL = (0.5, 0.8)
"""Groups of equal reward have no gradient under any group baseline: half of the batch wasted, then four fifths."""

NEVER = (np.inf, np.inf)
"""Thresholds of statistics that are shown but never raise a level."""

RISE = (0.65, 0.85)
"""Rise of the share of clipped steps over all steps before: from almost never to almost always."""

MOSTLY_CLIPPED = 0.8
"""From this share of clipped steps on a reason says what it means; healthy runs with a small maximal norm clip 85 to
97 % by design, so no share is by itself a finding."""

RATIO = (np.log(10.0), np.log(100.0))
"""Largest |log π/μ| of a step: one token that counts ten times, or a hundred times, as much as it was sampled for."""

RATIO_CLIPPED = (0.2, 0.4)
"""Share of tokens whose gradient a clip, truncation or mask changed. At drift .2 clips and truncations moved the mean
gradient by 5 to 53 % (docs/catalogue.md); published settings clip a few per cent."""

HEAVY = (1.0, 2.0)
"""Pareto-k of exact energies ‖s_t‖², twice that of the norms: from 1 on the variance of the gradient is infinite, from
2 on its mean does not exist either. Healthy runs of the demo have .75 on average, below both, and single records on
either side of 1: an index of m tail values has a standard error of about (1 + k)/√m."""

UNRELIABLE = 0.5
"""From this Pareto-k on the standard error of a variance estimate is unreliable: the reason says so, without alarm."""

WINDOW, RATIO_WINDOW, TAIL_WINDOW = 20, 10, 10
TAIL_LEAST = 5
"""Records of the tail index that a bound of their mean needs; they come at few steps."""

CONFIDENCE = 0.999
"""Confidence of one-sided bounds: high, since a series is tested at every step and calm runs come close to levels."""


def zero_variance_groups(series: StepSeries) -> Finding:
    """Does too much of the batch give no gradient, because all rewards within a group are equal?

    score = lower 99.9 % Clopper–Pearson bound of the share of such groups over the last 20 steps.
    Reads `n_zero_variance_groups` and `n_prompts`; `reward_mean` says on which side they are.
    """
    step, (equal, groups) = series.recorded("n_zero_variance_groups", "n_prompts")
    k, n = trailing(equal, WINDOW, np.sum), trailing(groups, WINDOW, np.sum)
    # Clopper–Pearson's lower bound. For k = 0 it is 0 and has no beta law; half a group gives a bound near 0.
    score = special.betaincinv(np.maximum(k, 0.5), n - k + 1, 1 - CONFIDENCE)
    value = np.divide(equal, groups, out=np.full(equal.shape, np.nan), where=groups > 0)
    one = Evidence("n_zero_variance_groups", "lower bound of the share of groups", step, value, score, *NO_SIGNAL)
    if not one.ready:
        names = ["n_zero_variance_groups"]
        return unmeasured("zero_variance_groups", series, WINDOW, names, ALWAYS)
    at = one.shown()
    known, (reward,) = series.until(int(step[at])).recorded("reward_mean")
    beside = f", mean reward {reward[-WINDOW:].mean():.2g}" if known.size else ""
    reason = (
        f"{k[at]:.0f} of {n[at]:.0f} groups ({k[at] / n[at]:.0%}) had equal rewards in the {WINDOW} steps up to step "
        f"{step[at]}{beside}."
    )
    return finding_of("zero_variance_groups", [one], reason)


def clip_fraction(series: StepSeries) -> Finding:
    """Has gradient clipping set in?

    score = share of clipped steps among the last 20 − the share of all steps before them. A share that was high from
    the start is a choice of the maximal norm and no finding: it is shown, and the reason says what it means. So a run
    that clipped more than .35 of its steps before has no rise to be found.
    Reads `clipped` (0 or 1 a step).
    """
    step, (clipped,) = series.recorded("clipped")
    if clipped.size < 2 * WINDOW:
        return unmeasured("clip_fraction", series, 2 * WINDOW, ["clipped"], ALWAYS)
    share = trailing(clipped, WINDOW, np.mean)
    before = np.full(clipped.size, np.nan)
    past = np.cumsum(clipped) / np.arange(1, clipped.size + 1)
    # Steps of the window itself are not "before", and a window's worth of earlier steps is the least to compare with.
    before[2 * WINDOW - 1 :] = past[WINDOW - 1 : -WINDOW]
    rise = Evidence("clipped", "rise of that share over all steps before", step, clipped, share - before, *RISE)
    level = Evidence("clipped", "share of clipped steps", step, clipped, share, *NEVER)
    at = rise.shown()
    reason = f"{share[at]:.0%} of the {WINDOW} steps up to step {step[at]} were clipped, {before[at]:.0%} of all before"
    if share[at] >= MOSTLY_CLIPPED:
        reason += "; the maximal norm, not the gradient, sets the length of most of these updates"
    return _with_evidence(finding_of("clip_fraction", [rise], f"{reason}."), level)


def _with_evidence(finding: Finding, *shown: Evidence) -> Finding:
    """Add statistics to a finding that others decided."""
    return replace(finding, evidence=(*finding.evidence, *(one for one in shown if one.ready)))


def ratio_tails(series: StepSeries) -> Finding:
    """Do a few importance ratios, or the clips that tame them, decide the update?

    Two scores: the median over 5 steps of the largest |log π − log μ| of a step, and the mean over 10 steps of the
    share of tokens whose gradient a clip, truncation or mask changed.
    Reads `mismatch_max` in nats or `ratio_clip_share`.
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
        reason = (
            f"trainer and sampler disagreed on a token's probability by a factor of up to "
            f"{np.exp(min(one.score[at], 50.0)):.3g} ({one.score[at]:.2g} nats, median of the largest of 5 steps up to "
            f"step {one.step[at]})."
        )
    else:
        reason = (
            f"{one.score[at]:.0%} of tokens were clipped in the {RATIO_WINDOW} steps up to step {one.step[at]}: their "
            "probabilities had left those of the sampler."
        )
    return finding_of("ratio_tails", evidence, reason)


def tail_index(series: StepSeries) -> Finding:
    """Are a few tokens so energetic that averages over tokens do not settle?

    score = lower 99.9 % bound (Student's t) of the mean Pareto-k over the last 10 records of exact norms. The proxy
    ‖e_y − π‖² is at most 2, so its variance is finite whatever is fitted to it: its index is shown where it is known,
    and raises nothing.
    Reads `exact_tail_k`; one with `energy_tail_k` alone is not measured.
    """
    step, (k,) = series.recorded("exact_tail_k")
    score = np.full(k.size, np.nan)
    for t in range(TAIL_LEAST - 1, k.size):
        recent = k[max(0, t - TAIL_WINDOW + 1) : t + 1]
        error = recent.std(ddof=1) / np.sqrt(recent.size)
        score[t] = recent.mean() - special.stdtrit(recent.size - 1, CONFIDENCE) * error
    exact = Evidence("exact_tail_k", "lower bound of the mean Pareto-k", step, k, score, *HEAVY)
    proxy_step, (proxy,) = series.recorded("energy_tail_k")
    mean = trailing(proxy, TAIL_WINDOW, np.mean)
    shown = Evidence("energy_tail_k", "mean Pareto-k of the proxy", proxy_step, proxy, mean, *NEVER)
    if not exact.ready:
        remedy = "the level exact measures it (--measure.exact.every 10), on 250 tokens a step or more"
        if shown.ready:
            remedy += f"; that of the proxy, {mean[-1]:.2f}, says nothing of the gradient, since the proxy is bounded"
        return _with_evidence(unmeasured("tail_index", series, TAIL_LEAST, ["exact_tail_k"], remedy), shown)
    at = exact.shown()
    recent = k[max(0, at - TAIL_WINDOW + 1) : at + 1]
    low = exact.score[at]
    says = "averages over tokens seem to settle"
    if exact.level != "ok":
        says = "a few tokens have gradients so large that averages over tokens do not settle"
    elif low >= UNRELIABLE:
        says += f", but from {UNRELIABLE:g} on intervals of variances are unreliable"
    reason = (
        f"{says}: the tail index (Pareto-k) was {recent.mean():.2f} on average over {recent.size} measured steps up to "
        f"step {step[at]}, at least {low:.2f} ({CONFIDENCE:.1%} sure); {HEAVY[0]:g} is the limit."
    )
    return _with_evidence(finding_of("tail_index", [exact], reason), shown)


CERTIFICATE = ("certificate_prob_z", "certificate_logprob_z")
RISK = (0.01, 1e-6)
"""Chance that an exact sampler ever reaches watch, and alarm, in a run of any length, both columns together."""

PRIOR = 4.0
"""ρ of the mixture: the evidence grows fastest where a step's mean z is about ½; a wrong temperature shows at once."""

RESTART = 10
"""Steps after which another sum starts."""


def sampling_certificate(series: StepSeries) -> Finding:
    """Do the steps' z-scores add up to more than chance allows?

    Each z is a martingale sum over its standard deviation, so under exact sampling the sum S of n of them from some
    step on is close to a Gaussian random walk and E = √(ρ/(n + ρ)) · exp(S²/(2(n + ρ))), ρ = 4, a martingale of mean 1
    (Robbins' normal mixture). Started anew every ten steps and averaged, E_t = Σ_k E_{10k..t}/((k+1)(k+2)), it sees a
    sampler that goes wrong late, and P(some t: E_t ≥ 1/α) ≤ α holds at *all* t together, by Ville's inequality.
    score = log₁₀ E_t. The certificate is proved; that a step's z is nearly normal holds from hundreds of tokens on.
    Reads `certificate_prob_z` or `certificate_logprob_z`.
    """
    watch, alarm = (float(np.log10(len(CERTIFICATE) / risk)) for risk in RISK)
    evidence = []
    for name in CERTIFICATE:
        step, (z,) = series.recorded(name)
        # A sum that has not started counts as 1, so the weights always add up to 1.
        total = np.log(1 / (np.arange(z.size) // RESTART + 2.0))
        for k, start in enumerate(range(0, z.size, RESTART)):
            n = np.arange(1, z.size - start + 1)
            # log of Robbins' mixture of the sum that starts here, with prior precision ρ.
            mixture = 0.5 * np.cumsum(z[start:]) ** 2 / (n + PRIOR) - 0.5 * np.log((n + PRIOR) / PRIOR)
            total[start:] = np.logaddexp(total[start:], mixture - np.log((k + 1) * (k + 2)))
        words = "log₁₀ of the evidence against exact sampling"
        evidence.append(Evidence(name, words, step, z, total / np.log(10), watch, alarm))
    if not any(one.ready for one in evidence):
        return unmeasured("sampling_certificate", series, 1, CERTIFICATE, FORWARD)
    one = deciding(evidence)
    at = one.shown()
    recent = one.value[max(0, at - 19) : at + 1]
    score = one.score[at]
    runs = f"10^{score:.0f}" if score > 3 else f"{10**score:.2g}"
    way = "more" if recent.mean() > 0 else "less"
    reason = (
        f"probable than the policy's own would be, by {abs(recent.mean()):.2f} standard deviations on average over the "
        f"{recent.size} steps up to step {one.step[at]} (last {one.value[at]:+.1f})."
    )
    if score > 0.5:
        rare = f"If the policy had drawn these tokens itself, at most one of {runs} runs would look like this."
        reason = f"the sampled tokens were {way} {reason} {rare}"
    else:
        reason = f"the sampled tokens were hardly {way} {reason}"
    return finding_of("sampling_certificate", evidence, reason)


DETECTORS: dict[str, Callable[[StepSeries], Finding]] = {
    "reward_fall": reward_fall,
    "vanished_gradient": vanished_gradient,
    "not_finite": not_finite,
    "gradient_surge": gradient_surge,
    "entropy_collapse": entropy_collapse,
    "entropy_rise": entropy_rise,
    "length_drift": length_drift,
    "zero_variance_groups": zero_variance_groups,
    "ratio_tails": ratio_tails,
    "tail_index": tail_index,
    "clip_fraction": clip_fraction,
    "sampling_certificate": sampling_certificate,
}
"""Each is a pure function of a run's scalars; its rate of false alarms is in docs/results/alarms.md."""


OFF_POLICY = ("ratio_tails", "sampling_certificate")
"""Detectors that call rollouts of an older policy, whatever becomes of the run."""


def diagnose(series: StepSeries, staleness: int = 0) -> list[Finding]:
    """Return what every detector says, the worst first, in the order of `DETECTORS` among equals.

    With `staleness`, the batches by which rollouts are older than the policy, that they are is a fact and no warning.
    """
    findings = [detect(series) for detect in DETECTORS.values()]
    for n, one in enumerate(findings):
        if staleness and one.fired and one.detector in OFF_POLICY:
            reason = f"As configured: rollouts are {staleness} batches old (objective.staleness). {one.reason}"
            findings[n] = replace(one, level="ok", reason=reason, watch_step=None, alarm_step=None)
    return sorted(findings, key=lambda finding: SEVERITY[finding.level])
