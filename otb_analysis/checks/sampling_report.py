"""The verdict of the sampling check: z of every family, the alarm, and the cause that explains the tokens best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from scipy.special import gammaln, log_ndtr, ndtri_exp, xlogy

from otb_analysis.checks.sampling_sums import SamplingSums, ZScores

ALARM = 0.01
"""Chance that tokens drawn from the model raise an alarm: Bonferroni over the families."""
TIE = 3.0
"""Causes whose log-likelihoods are within so many nats (a factor of 20) of the best cannot be told apart."""
EXPLAINED = 0.25
"""A setting explains recorded log-probabilities where it leaves less than this share of Σδ²."""
BEYOND = 0.2
"""Other weights are named where they explain more beyond temperature and noise than this share of the best cause."""
ALIKE = 0.5
"""Differences that agree by more than this at equal prefixes belong to the weights, not to noise."""
SEEN = 5.0
"""z at which a fault counts as found, for the number of tokens it takes."""
FAMILIES = ("temperature", "probability", "top_p", "top_k", "repetition", "other_weights", "recorded")
"""Tests that can raise the alarm."""
CAUSES = ("temperature", "top_p", "top_k", "repetition", "noise", "other_weights")
"""What the tests can name; `probability` speaks for noise on the logits."""


@dataclass(frozen=True)
class FamilyResult:
    """One family of the check over all steps."""

    family: str
    z: float  # Its p-value as a standard normal deviate, one-sided; large means not the stated sampler
    log_p: float  # Log of the p-value, corrected for the settings tried
    gain: float  # Log-likelihood of the family's best setting over the stated sampler's, in nats
    setting: float | None = None  # That setting: temperature over the stated one, p, k, penalty, σ
    error: float | None = None  # Standard error of a smooth setting, None where it is the last one tried


@dataclass(frozen=True)
class RecordedMismatch:
    """Log-probabilities as the sampler recorded them against those of the model, δ = recorded − scored."""

    n_tokens: int
    mean: float  # Above 0: the tokens fit the sampler's numbers better than the model's. Nats per token
    deviation: float  # √mean δ²
    noise: float  # σ of the logit noise that would give this Σδ²
    over_float32: float  # Share of tokens with |δ| > 0.001
    over_bfloat16: float  # Share of tokens with |δ| > 0.05
    alike: float | None  # Intraclass correlation of δ at equal prefixes; None without repeats
    left: Mapping[str, tuple[float, float]]  # Cause → setting that fits best, share of Σδ² that it leaves
    by_position: tuple[tuple[int, float, float], ...]  # First position of the bin, mean of δ, √mean δ²


@dataclass(frozen=True)
class SamplingReport:
    """The whole check."""

    n_tokens: int
    families: Mapping[str, FamilyResult]
    recorded: RecordedMismatch | None  # None where the sampler recorded no log-probabilities
    alarm: bool
    log_p: float  # Of the alarm, over all families
    causes: tuple[str, ...]  # Of CAUSES, several where they cannot be told apart; empty without an alarm
    from_recorded: bool  # True where recorded log-probabilities named the cause
    by_step: tuple[ZScores, ...]
    by_position: tuple[ZScores, ...]

    @property
    def z(self) -> float:
        """The largest z of all families."""
        return max(one.z for one in self.families.values())

    @property
    def tokens_needed(self) -> int | None:
        """Tokens at which this mismatch has z = 5, from z ∝ √tokens; None without an alarm."""
        return round(self.n_tokens * (SEEN / self.z) ** 2) if self.alarm else None


def sampling_report(rows: Any) -> SamplingReport:
    """Return the verdict on rows of the table `sampling`: a data frame of one step or many, or one step's columns.

    Raises:
        InputError: There are no such rows.
    """
    sums = SamplingSums.from_rows(rows)
    families, recorded = _families(sums), _recorded(sums)
    log_p = min(0.0, min(one.log_p for one in families.values()) + float(np.log(len(families))))
    alarm = bool(log_p < np.log(ALARM))
    causes, from_recorded = _causes(families, recorded) if alarm else ((), False)
    return SamplingReport(
        n_tokens=int(sums.total("probability", "n_tokens")),
        families=families,
        recorded=recorded,
        alarm=alarm,
        log_p=log_p,
        causes=causes,
        from_recorded=from_recorded,
        by_step=sums.z_scores(sums.step),
        by_position=sums.z_scores(sums.position),
    )


def _families(sums: SamplingSums) -> dict[str, FamilyResult]:
    found = {name: _truncation(sums, name) for name in ("top_p", "top_k")}
    found |= {name: _smooth(sums, name) for name in ("temperature", "repetition")}
    found["probability"] = _probability(sums)
    found["other_weights"] = _other_weights(sums)
    if sums.has("recorded"):
        # E_π[Π μ/π] = 1, so by Markov's inequality the gain exceeds x with probability e^−x at most.
        gain = sums.total("recorded", "gain")
        found["recorded"] = FamilyResult("recorded", *_tail(-gain), max(gain, 0.0))
    return {name: found[name] for name in FAMILIES if name in found}


def _tail(log_p: float) -> tuple[float, float]:
    """Return a p-value's one-sided normal deviate, 0 from p = ½ on, and the logarithm of the p-value."""
    log_p = min(log_p, 0.0)
    return max(float(-ndtri_exp(min(log_p, -1e-12))), 0.0), log_p


def _z(sums: SamplingSums, test: str) -> float:
    variance = sums.total(test, "variance")
    return sums.total(test, "score") / variance**0.5 if variance > 0 else 0.0


def _two_sided(z: float) -> float:
    return float(min(0.0, log_ndtr(-abs(z)) + np.log(2)))


def _smooth(sums: SamplingSums, test: str) -> FamilyResult:
    """Return a score test with the setting where the likelihood is largest; the stated sampler has setting 1."""
    grid = sums.grid(test, "gain")
    setting, gain = _peak(grid)
    z = _z(sums, test)
    return FamilyResult(test, abs(z), _two_sided(z), gain, setting, _peak_error(grid, setting))


def _probability(sums: SamplingSums) -> FamilyResult:
    """Return the test of π_y, and the logit noise σ that fits best; noise makes the drawn tokens less likely."""
    z = _z(sums, "probability")
    squares = {sigma**2: gain for sigma, gain in sums.grid("noise", "gain").items()}
    sigma_sq, gain = _cubic_peak([0.0, *squares], [0.0, *squares.values()])
    return FamilyResult("probability", abs(z), _two_sided(z), gain, sigma_sq**0.5)


def _other_weights(sums: SamplingSums) -> FamilyResult:
    """Return the test of the learned direction, one-sided: only agreement with it speaks for other weights.

    Its gain is that beyond temperature and noise, which a learned direction sees too: z²/2 of the part of the score
    that is uncorrelated with theirs.
    """
    z = _z(sums, "other_weights")
    names = ("other_weights", "temperature", "probability")
    covariance = np.diag([sums.total(name, "variance") for name in names])
    for i, one in enumerate(names):
        for k, other in enumerate(names):
            covariance[i, k] += sums.total(f"{one}*{other}", "variance") + sums.total(f"{other}*{one}", "variance")
    known = covariance[1:, 1:] + 1e-9 * np.trace(covariance[1:, 1:]) * np.eye(2)
    slope = np.linalg.solve(known, covariance[0, 1:]) if known.any() else np.zeros(2)
    score = sums.total(names[0], "score") - slope @ [sums.total(name, "score") for name in names[1:]]
    variance = covariance[0, 0] - slope @ covariance[0, 1:]
    beyond = score / variance**0.5 if variance > 0 else 0.0
    return FamilyResult("other_weights", z, float(log_ndtr(-z)), max(float(beyond), 0.0) ** 2 / 2)


def _peak(grid: Mapping[float, float]) -> tuple[float, float]:
    """Return where a function of the setting, 0 at the stated 1, is largest, and its value, by a cubic spline."""
    setting, value = _cubic_peak([0.0, *np.log(list(grid))], [0.0, *grid.values()])
    return float(np.exp(setting)), value


def _peak_error(grid: Mapping[float, float], setting: float) -> float | None:
    """Return the standard error of the most likely setting, from the likelihood's curvature there.

    Information about the logarithm of a setting is −d²/dx² of the log-likelihood at its peak. None where the peak is
    the last setting tried: it may lie anywhere beyond.
    """
    x, y = np.array(sorted([(0.0, 0.0), *((np.log(k), v) for k, v in grid.items())])).T
    at = float(np.log(setting))
    if not x[0] + 1e-9 < at < x[-1] - 1e-9:
        return None
    information = -float(scipy.interpolate.CubicSpline(x, y)(at, 2))
    return setting / information**0.5 if information > 0 else None


def _cubic_peak(settings: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return where the cubic spline through the points around the largest value is largest, and its value there."""
    order = np.argsort(settings)
    x, y = np.array(settings)[order], np.array(values)[order]
    best = int(y.argmax())
    near = slice(max(best - 2, 0), best + 3)
    fine = np.linspace(x[near][0], x[near][-1], 2001)
    curve = scipy.interpolate.CubicSpline(x[near], y[near])(fine)
    top = int(curve.argmax())
    return float(fine[top]), max(float(curve[top]), 0.0)


def _truncation(sums: SamplingSums, test: str) -> FamilyResult:
    """Return the setting whose outside is emptiest: P(X ≤ x) of a Poisson number with its mean, times the settings.

    X is a sum of unlike Bernoulli variables, whose lower tail is lighter than that of a Poisson number of equal mean.
    """
    observed, score, gain = (sums.grid(test, column) for column in ("observed", "score", "gain"))
    if not gain:
        return FamilyResult(test, 0.0, 0.0, 0.0)
    least = min(_log_poisson_tail(observed[p], observed[p] - score[p]) for p in gain)
    best = max(gain, key=lambda p: gain[p])
    return FamilyResult(test, *_tail(least + float(np.log(len(gain)))), max(gain[best], 0.0), best)


def _log_poisson_tail(observed: float, expected: float) -> float:
    """Return a bound of log P(X ≤ observed), X ~ Poisson(expected): its last term times a geometric series."""
    if expected <= 0 or observed >= expected:
        return 0.0
    logpmf = xlogy(round(observed), expected) - gammaln(round(observed) + 1) - expected
    return min(0.0, float(logpmf - np.log1p(-observed / expected)))


def _recorded(sums: SamplingSums) -> RecordedMismatch | None:
    if not sums.has("recorded"):
        return None
    n, square = sums.total("recorded", "n_tokens"), sums.total("recorded", "residual_sq")
    energy, pairs = sums.total("recorded", "variance"), sums.total("repeated", "variance")
    return RecordedMismatch(
        n_tokens=int(n),
        mean=sums.total("recorded", "score") / n,
        deviation=(square / n) ** 0.5,
        noise=(square / energy) ** 0.5 if energy > 0 else 0.0,
        over_float32=sum(sums.grid("beyond_rounding", "observed").values()) / n,
        over_bfloat16=sums.total("recorded", "observed") / n,
        alike=sums.total("repeated", "score") / pairs if pairs > 0 else None,
        left=_unexplained(sums, square),
        by_position=tuple(
            (at, one["score"] / one["n_tokens"], (one["residual_sq"] / one["n_tokens"]) ** 0.5)
            for at, one in sums.by_position("recorded")
        ),
    )


def _unexplained(sums: SamplingSums, square: float) -> dict[str, tuple[float, float]]:
    """Return by cause the setting that leaves least of Σδ², and the share that it leaves."""
    left: dict[str, tuple[float, float]] = {}
    for test in ("temperature", "top_p", "top_k", "repetition"):
        explained = {setting: square - rest for setting, rest in sums.grid(test, "residual_sq").items()}
        if not explained or square <= 0:
            continue
        smooth = test in ("temperature", "repetition")
        setting, most = _peak(explained) if smooth else max(explained.items(), key=lambda item: item[1])
        left[test] = (setting, max(square - most, 0.0) / square)
    return left


def _causes(families: Mapping[str, FamilyResult], recorded: RecordedMismatch | None) -> tuple[tuple[str, ...], bool]:
    """Name the cause, and say whether recorded log-probabilities named it.

    They do where they predict the tokens as well as the best family does; a setting must explain them, too, and what no
    setting explains is noise or other weights. Otherwise the families with the largest likelihood are named.
    """
    gains = {cause: families["probability" if cause == "noise" else cause].gain for cause in CAUSES}
    beyond = gains.pop("other_weights")
    best = max(gains.values())
    gains["other_weights"] = beyond + (best if beyond > BEYOND * best else 0.0)
    best = max(gains.values())
    told = families.get("recorded")
    if told is None or recorded is None or told.gain < max(best - TIE, TIE):
        return tuple(cause for cause in CAUSES if gains[cause] > max(best - TIE, 0.0)), False
    least = min((share for _, share in recorded.left.values()), default=1.0)
    if least < EXPLAINED:
        return tuple(cause for cause, (_, share) in recorded.left.items() if share <= 2 * least + 0.02), True
    if recorded.alike is None:
        return ("noise", "other_weights"), True
    return ("other_weights" if recorded.alike > ALIKE else "noise",), True
