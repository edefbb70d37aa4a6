"""The sampling certificate over a run: were the tokens drawn from the distribution that is scored?"""

import numpy as np

from otb_analysis.diagnostics.changes import FORWARD
from otb_analysis.diagnostics.findings import Evidence, Finding, StepSeries, deciding, finding_of, unmeasured
from otb_analysis.types import Float

COLUMNS = ("certificate_prob_z", "certificate_logprob_z")
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
    evidence = [_evidence(series, name) for name in COLUMNS]
    if not any(one.ready for one in evidence):
        remedy = FORWARD
        return unmeasured("sampling_certificate", series, 1, COLUMNS, remedy)
    one = deciding(evidence)
    at = one.shown()
    recent = one.value[max(0, at - 19) : at + 1]
    reason = (
        f"the z-scores of {one.column} averaged {recent.mean():+.2f} over the {recent.size} steps up to step "
        f"{one.step[at]} (last {one.value[at]:+.1f}). If the policy had drawn these tokens itself, at most one of "
        f"{_factor(one.score[at])} runs would look like this."
    )
    return finding_of("sampling_certificate", evidence, reason)


def _factor(log10: float) -> str:
    return f"10^{log10:.0f}" if log10 > 3 else f"{10**log10:.2g}"


def _evidence(series: StepSeries, name: str) -> Evidence:
    step, (z,) = series.recorded(name)
    watch, alarm = (float(np.log10(len(COLUMNS) / risk)) for risk in RISK)
    score = _log_evidence(z) / np.log(10)
    return Evidence(name, "log₁₀ of the evidence against exact sampling", step, z, score, watch, alarm)


def _log_evidence(z: Float) -> Float:
    """Logarithm of E_t [K]. A sum that has not started counts as 1, so the weights always add up to 1."""
    total = np.log(1 / (np.arange(z.size) // RESTART + 2.0))
    for k, start in enumerate(range(0, z.size, RESTART)):
        n = np.arange(1, z.size - start + 1)
        # log of Robbins' mixture of the sum that starts here, with prior precision ρ.
        evidence = 0.5 * np.cumsum(z[start:]) ** 2 / (n + PRIOR) - 0.5 * np.log((n + PRIOR) / PRIOR)
        total[start:] = np.logaddexp(total[start:], evidence - np.log((k + 1) * (k + 2)))
    return total
