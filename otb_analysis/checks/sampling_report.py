"""The verdict of the sampling check: z of every family, the alarm, the cause that explains the tokens best; in words.

It reads rows of the table `sampling`, added up over steps: by test, by setting, by step and by position.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr, ndtri_exp, xlogy

from otb_analysis.errors import InputError
from otb_analysis.types import Bool, Float

SUMS = ("n_tokens", "score", "variance", "observed", "gain", "residual_sq")
"""Columns of the table `sampling` that add up."""
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
FAMILIES = ("temperature", "probability", "top_p", "top_k", "repetition", "other_weights", "recorded")
"""Tests that can raise the alarm; `probability` speaks for noise on the logits."""
CAUSES = {
    "temperature": ("temperature", " {:.3f} times the stated one"),
    "top_p": ("top-p", " of about {:g}"),
    "top_k": ("top-k", " of about {:.0f}"),
    "repetition": ("repetition penalty", " of {:.3f}"),
    "noise": ("engine mismatch (noise on the logits)", ", σ = {:.2f}"),
    "other_weights": ("other weights (stale checkpoint, quantisation)", ""),
}
"""What the tests can name: in words, and its setting."""
MENDED = {
    "temperature": "record them after the logits are divided by the temperature",
    "top_p": "record them before top-p is applied",
    "top_k": "record them before top-k is applied",
    "repetition": "record them with the penalties of the model that is scored",
}
"""What to do where recorded log-probabilities are those of another setting."""
SHARE = 0.01
"""A share of tokens beyond bfloat16's rounding that is told even without an alarm."""
NEAR_ONE = 0.02
"""Logarithm of a temperature within which it is 1: settings between those tried are interpolated."""


@dataclass(frozen=True)
class ZScores:
    """Both z-scores of a part of the tokens; None where nothing was random."""

    at: int  # The step, or the first position of the bin
    n_tokens: int
    temperature: float | None  # z of Σ(log π_y + H)
    probability: float | None  # z of Σ(π_y − Σπ²)


@dataclass(frozen=True)
class SamplingSums:
    """Rows of the table `sampling`, of one step or many."""

    test: NDArray[np.str_]
    parameter: Float  # NaN at score tests
    position: Float  # NaN where the row is of all positions
    step: Float
    sums: Mapping[str, Float]  # By name in SUMS; NaN where the test has no such sum

    @classmethod
    def from_rows(cls, rows: Any) -> "SamplingSums":
        """Return the sums of a data frame, or of a step's columns as `SamplingCheck.rows` makes them.

        Raises:
            InputError: There are none.
        """
        test = np.array([str(name) for name in rows["test"]])
        if not (test == "probability").any():
            raise InputError(
                "there is no sampling check; measure the rollouts with: otb score --model DIR --rollouts FILE."
            )
        numbers = {}
        for name in ("parameter", "position", "step", *SUMS):
            values: Any = rows[name] if name in rows else np.zeros(len(test))
            if hasattr(values, "to_numpy"):  # a data frame's column, where what is missing may be pandas.NA
                values = values.to_numpy(np.float64, na_value=np.nan)
            numbers[name] = np.array(values, np.float64)
        places = {name: numbers.pop(name) for name in ("parameter", "position", "step")}
        return cls(test, **places, sums=numbers)

    def total(self, test: str, column: str, rows: Bool | bool = True) -> float:
        """Return one sum of a score test over all `rows`; 0 where there are none."""
        return float(np.nansum(self.sums[column][(self.test == test) & np.isnan(self.parameter) & rows]))

    def z(self, test: str, rows: Bool | bool = True) -> float | None:
        """Return the z-score of a score test over some rows; None where nothing was random."""
        variance = self.total(test, "variance", rows)
        return self.total(test, "score", rows) / variance**0.5 if variance > 0 else None

    def z_scores(self, by: Float) -> tuple[ZScores, ...]:
        """Return both z-scores by `step` or by `position`."""
        scores = []
        for at in np.unique(by[(self.test == "temperature") & np.isnan(self.parameter)]).tolist():
            n = int(self.total("temperature", "n_tokens", by == at))
            scores.append(ZScores(int(at), n, self.z("temperature", by == at), self.z("probability", by == at)))
        return tuple(scores)

    def grid(self, test: str, column: str) -> dict[float, float]:
        """Return one sum at every setting that was tried; settings without it are left out."""
        here = (self.test == test) & ~np.isnan(self.parameter) & ~np.isnan(self.sums[column])
        settings, index = np.unique(self.parameter[here], return_inverse=True)
        values = np.bincount(index, self.sums[column][here], minlength=len(settings))
        return dict(zip(settings.tolist(), values.tolist(), strict=True))


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

    @property
    def explained_by(self) -> tuple[str, ...]:
        """Causes whose setting leaves least of Σδ², several where they cannot be told apart; empty where none does."""
        least = min((share for _, share in self.left.values()), default=1.0)
        alike = tuple(cause for cause, (_, share) in self.left.items() if share <= 2 * least + 0.02)
        return alike if least < EXPLAINED else ()


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


def sampling_report(rows: Any) -> SamplingReport:
    """Return the verdict on rows of the table `sampling`: a data frame of one step or many, or one step's columns.

    Raises:
        InputError: There are no such rows.
    """
    sums = SamplingSums.from_rows(rows)
    by_family = {name: _smooth(sums, name) for name in ("temperature", "probability", "repetition")}
    by_family |= {name: _truncation(sums, name) for name in ("top_p", "top_k")}
    by_family["other_weights"] = _other_weights(sums)
    recorded = None
    if (sums.test == "recorded").any():
        # E_π[Π μ/π] = 1, so by Markov's inequality the gain exceeds x with probability e^−x at most.
        gain = sums.total("recorded", "gain")
        by_family["recorded"] = FamilyResult("recorded", *_tail(-gain), max(gain, 0.0))
        recorded = _recorded(sums)
    families = {name: by_family[name] for name in FAMILIES if name in by_family}
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


def _tail(log_p: float) -> tuple[float, float]:
    """Return a p-value's one-sided normal deviate, 0 from p = ½ on, and the logarithm of the p-value."""
    log_p = min(log_p, 0.0)
    return max(float(-ndtri_exp(min(log_p, -1e-12))), 0.0), log_p


def _smooth(sums: SamplingSums, test: str) -> FamilyResult:
    """Return a two-sided score test with the setting where the likelihood is largest.

    The stated sampler has setting 1; of `probability`, the test of π_y, it has logit noise σ = 0. Information about
    the logarithm of a setting is −d²/dx² of the log-likelihood at its peak, of which the standard error is made.
    """
    one_sided = _beyond(sums, test)
    z, log_p = _tail(one_sided)[0], min(0.0, one_sided + float(np.log(2)))
    if test == "probability":
        noise = sums.grid("noise", "gain")
        sigma_sq, gain = _cubic_peak([sigma**2 for sigma in noise], noise.values())
        return FamilyResult(test, z, log_p, gain, sigma_sq**0.5)
    grid = sums.grid(test, "gain")
    at, gain = _cubic_peak(np.log(list(grid)), grid.values())
    setting, error = float(np.exp(at)), None
    x, y = np.array(sorted([(0.0, 0.0), *((np.log(k), v) for k, v in grid.items())])).T
    if x[0] + 1e-9 < np.log(setting) < x[-1] - 1e-9:  # the peak at the last setting tried may lie anywhere beyond
        information = -float(scipy.interpolate.CubicSpline(x, y)(np.log(setting), 2))
        error = setting / information**0.5 if information > 0 else None
    return FamilyResult(test, z, log_p, gain, setting, error)


NEARLY_NORMAL = 1e5
"""Events from which on a Poisson number is taken for a normal one."""


def _beyond(sums: SamplingSums, test: str) -> float:
    """Return the logarithm of the chance that a score test's sum is as far from 0 as it is, on the side where it is.

    The sum is nearly normal where it has many terms of a kind. A few tokens can carry its tail, as repeats in a large
    vocabulary or slips of a policy that is sure of itself. So it is taken for a normal number and b(X − λ), X a Poisson
    number of rare events: b = κ₄/κ₃ and λ = κ₃/b³ of the sums κ of third and fourth central moments, and the normal
    number has what is left of the variance. On the other side, where events are missing, the normal tail is longer.
    """
    columns = ("", "score"), ("", "variance"), ("^3", "score"), ("^4", "score")
    score, variance, third, fourth = (sums.total(f"{test}{of}", column) for of, column in columns)
    if variance <= 0:
        return float(np.log(0.5))
    normal = float(log_ndtr(-abs(score) / variance**0.5))
    third *= np.sign(score)
    if third <= 0 or fourth <= 0:
        return normal
    size = fourth / third
    events, size = min(third / size**3, variance / size**2), float(size)
    if events > NEARLY_NORMAL:
        return normal
    over = abs(score) / size
    if over > NEARLY_NORMAL:  # Bennett's inequality: far beyond all doubt
        return float(-variance / size**2 * ((1 + (u := score**2 / variance / over)) * np.log1p(u) - u))
    # All numbers of events that the sum could have come with. Without a normal part one that just reaches it counts.
    most = float(events + over)
    k = np.arange(np.ceil(most + 12 * most**0.5) + 20)
    left, least = variance - events * size**2, 1e-3 * min(size**2, variance)
    reached = size * (k - events) - abs(score) + (0.1 * size if left < least else 0.0)
    rest = max(left, least) ** 0.5
    chances = xlogy(k, events) - events - gammaln(k + 1) + log_ndtr(reached / rest)
    return min(float(np.logaddexp.reduce(chances)), 0.0)


def _cubic_peak(settings: Iterable[float], values: Iterable[float]) -> tuple[float, float]:
    """Return where a function that is 0 at 0 is largest, and its value, by the spline around its largest point."""
    x, y = np.array([0.0, *settings]), np.array([0.0, *values])
    order = np.argsort(x)
    best = int(y[order].argmax())
    near = order[max(best - 2, 0) : best + 3]
    fine = np.linspace(x[near][0], x[near][-1], 2001)
    curve = scipy.interpolate.CubicSpline(x[near], y[near])(fine)
    top = int(curve.argmax())
    return float(fine[top]), max(float(curve[top]), 0.0)


def _truncation(sums: SamplingSums, test: str) -> FamilyResult:
    """Return the setting whose outside is emptiest: P(X ≤ x) of a Poisson number with its mean, times the settings.

    X is a sum of unlike Bernoulli variables, whose lower tail is lighter than that of a Poisson number of equal mean,
    and that is bounded by its last term times a geometric series.
    """
    observed, score, gain = (sums.grid(test, column) for column in ("observed", "score", "gain"))
    if not gain:
        return FamilyResult(test, 0.0, 0.0, 0.0)
    least = 0.0
    for setting in gain:
        outside, expected = observed[setting], observed[setting] - score[setting]
        if outside < expected:
            last = xlogy(round(outside), expected) - gammaln(round(outside) + 1) - expected
            least = min(least, float(last - np.log1p(-outside / expected)))
    best = max(gain, key=lambda p: gain[p])
    return FamilyResult(test, *_tail(least + float(np.log(len(gain)))), max(gain[best], 0.0), best)


def _other_weights(sums: SamplingSums) -> FamilyResult:
    """Return the test of the learned direction, one-sided: only agreement with it speaks for other weights.

    Its gain is that beyond temperature and noise, which a learned direction sees too: z²/2 of the part of the score
    that is uncorrelated with theirs.
    """
    z = sums.z("other_weights") or 0.0
    log_p = _beyond(sums, "other_weights") if z > 0 else float(log_ndtr(-z))
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
    return FamilyResult("other_weights", _tail(log_p)[0] if z > 0 else z, log_p, max(float(beyond), 0.0) ** 2 / 2)


def _recorded(sums: SamplingSums) -> RecordedMismatch:
    """Return what recorded log-probabilities say, with the setting of each cause that leaves least of Σδ²."""
    n, square = sums.total("recorded", "n_tokens"), sums.total("recorded", "residual_sq")
    energy, pairs = sums.total("recorded", "variance"), sums.total("repeated", "variance")
    left: dict[str, tuple[float, float]] = {}
    for test in ("temperature", "top_p", "top_k", "repetition"):
        explained = {setting: square - rest for setting, rest in sums.grid(test, "residual_sq").items()}
        if not explained or square <= 0:
            continue
        if test in ("temperature", "repetition"):
            at, most = _cubic_peak(np.log(list(explained)), explained.values())
            setting = float(np.exp(at))
        else:
            setting, most = max(explained.items(), key=lambda item: item[1])
        left[test] = (setting, max(square - most, 0.0) / square)
    by_position = []
    for at in np.unique(sums.position[(sums.test == "recorded") & ~np.isnan(sums.position)]).tolist():
        count, mean, sq = (sums.total("recorded", x, sums.position == at) for x in ("n_tokens", "score", "residual_sq"))
        by_position.append((int(at), mean / count, (sq / count) ** 0.5))
    return RecordedMismatch(
        n_tokens=int(n),
        mean=sums.total("recorded", "score") / n,
        deviation=(square / n) ** 0.5,
        noise=(square / energy) ** 0.5 if energy > 0 else 0.0,
        over_float32=sum(sums.grid("beyond_rounding", "observed").values()) / n,
        over_bfloat16=sums.total("recorded", "observed") / n,
        alike=sums.total("repeated", "score") / pairs if pairs > 0 else None,
        left=left,
        by_position=tuple(by_position),
    )


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
    if recorded is None or families["recorded"].gain < max(best - TIE, TIE):
        return tuple(cause for cause in CAUSES if gains[cause] > max(best - TIE, 0.0)), False
    if recorded.explained_by:
        return recorded.explained_by, True
    if recorded.alike is None:
        return ("noise", "other_weights"), True
    return ("other_weights" if recorded.alike > ALIKE else "noise",), True


def recorded_line(report: SamplingReport, stated: float | None = None) -> str:
    """Return which setting recorded log-probabilities belong to instead of the stated one; empty where none fits.

    It is said where they differ beyond rounding and the setting leaves less than `EXPLAINED` of Σδ², alarm or not.
    `stated` is the temperature at which the tokens were scored: with it, log-probabilities of temperature 1 are named.
    """
    recorded = report.recorded
    if recorded is None or recorded.over_float32 <= SHARE or not (causes := recorded.explained_by):
        return ""
    named = []
    for cause in causes:
        (words, with_setting), (setting, _) = CAUSES[cause], recorded.left[cause]
        raw = cause == "temperature" and stated is not None and bool(abs(np.log(stated * setting)) < NEAR_ONE)
        named.append(words + with_setting.format(setting) + " (temperature 1)" * raw)
    explained = 1 - min(recorded.left[cause][1] for cause in causes)
    remedy = "" if report.alarm else f"; the tokens fit the stated sampler, so {MENDED[causes[0]]}"
    return (
        f"The recorded log-probabilities are those of {' or '.join(named)}, which explains {explained:.1%} of their "
        f"squared difference from the model's{remedy}."
    )


def sampling_lines(report: SamplingReport, stated: float | None = None) -> list[str]:
    """Return the check in sentences, the verdict first, then `recorded_line`."""
    n, recorded, temperature = f"{report.n_tokens:,} tokens", report.recorded, report.families["temperature"]
    lines = [f"{n} fit the model at the stated temperature (no family has p < 0.01 after correction)."]
    if report.alarm:
        named = []
        for cause in report.causes:
            words, with_setting = CAUSES[cause]
            setting = report.families["probability" if cause == "noise" else cause].setting
            if report.from_recorded and recorded is not None:
                setting = recorded.noise if cause == "noise" else recorded.left.get(cause, (setting, 0.0))[0]
            named.append(words + (with_setting.format(setting) if setting is not None else ""))
        tie = "; cannot be told apart here" if len(report.causes) > 1 else ""
        causes = " or ".join(named)
        lines = [f"{n} were not drawn by the stated sampler (z = {report.z:.1f}). Likely cause: {causes}{tie}."]
    lines += filter(None, [recorded_line(report, stated)])
    if temperature.setting is not None:
        ends = " or less" if temperature.setting < 1 else " or more"  # the last one tried
        ends = ends if temperature.error is None else f" ± {1.96 * temperature.error:.3f}"
        lines.append(
            "Temperature that fits best, if nothing else is wrong: "
            f"{temperature.setting:.3f}{ends} times the stated one."
        )
    if recorded is None:
        return lines
    lines.append(
        f"Recorded log-probabilities differ from the model's by {recorded.deviation:.2g} nats (root mean square); "
        f"{recorded.over_float32:.1%} of tokens by more than 0.001 (float32), {recorded.over_bfloat16:.1%} by more "
        "than 0.05 (bfloat16)."
    )
    if report.alarm or recorded.over_bfloat16 > SHARE:
        better = "the recorded numbers" if recorded.mean > 0 else "the model"
        (first, _, before), (last, _, behind) = recorded.by_position[0], recorded.by_position[-1]
        lines += [
            f"The tokens fit {better} better, by {abs(recorded.mean):.2g} nats per token.",
            f"The difference is {before:.2g} nats at token {first} and {behind:.2g} from token {last} on.",
        ]
    return lines
