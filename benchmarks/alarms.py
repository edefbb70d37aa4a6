"""How often the alarms cry wolf on synthetic calm series, and how soon they see a change at a known step.

A calm run is not a boring one. Its gradient norms are log-normal with heavy-tailed innovations, autocorrelated, with
isolated spikes and a slow trend; entropy decays gently to a plateau; length and success drift as a policy learns;
groups of equal reward are over-dispersed; it may clip no step or nearly all; tails are heavy, and heavier as it learns.
Nothing in it wanders without bound. Ranges are made to hold what was seen in healthy runs, which the comments quote;
they are synthetic all the same, and rates on them are no promise about other runs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats
from scipy.signal import lfilter

from benchmarks.config import AlarmsConfig
from benchmarks.publish import Column, Report, notes_of, report_of
from otb_analysis.diagnostics import DETECTORS, StepSeries, change_points
from otb_analysis.types import Float

EXACT_EVERY = (1, 10)
"""Steps from one record of the exact tail to the next."""

CLIP_SHARES = (0.0, 0.98)
EXACT_TAILS = (0.0, 0.9)
"""Pareto-k around which the records of a calm run end: below 1, where variances are finite; demo: .7 to .8."""


def calm_series(random: np.random.Generator, n: int) -> StepSeries:
    """Return the scalars of a run of n steps in which nothing goes wrong."""
    level = random.normal(0.5, 1.0) + _trend(random, n, 1.5)
    # Demo: spread .2, lag-one correlation .1 to .2. Student-t innovations: x_t = φ·x_{t−1} + ε_t.
    spread, phi, df = random.uniform(0.1, 0.5), random.uniform(0, 0.6), random.uniform(4, 12)
    shocks = random.standard_t(df, n + 50) * np.sqrt((df - 2) / df) * np.sqrt(1 - phi**2)
    shocks[0] = 0.0
    noise = spread * np.asarray(lfilter([1.0], [1.0, -phi], shocks))[50:]
    noise[random.random(n) < 0.005] += np.log(random.uniform(3, 10))  # a spike is no surge
    groups = int(random.choice([8, 16, 32, 64]))
    equal = random.uniform(0.02, 0.45) * np.exp(_trend(random, n, 1.25))
    shared = random.normal(size=n)
    columns = {"grad_norm": np.exp(level + noise)}
    # Demo: 85 and 97 % of steps at a maximal norm of 1, for which it was chosen; other settings clip hardly ever.
    # Not from the level: a trend that crosses the threshold is a finding, not a false alarm.
    columns["clipped"] = (noise > np.quantile(noise, 1 - random.uniform(*CLIP_SHARES))).astype(float)
    # Demo: .10 nats falling to .08 over 61 steps, noise .08, lag-one correlation of the residuals −.05.
    start, floor, tau = random.uniform(-3, 0.5), random.uniform(0.5, 1), random.uniform(10, 2 * n)
    decay = np.log(floor + (1 - floor) * np.exp(-np.arange(n) / tau))
    columns["entropy_mean"] = np.exp(start + decay + _noise(random, n, 0.03, 0.12))
    # Demo: 15 to 22 tokens, noise .08.
    columns["length_mean"] = np.exp(random.uniform(2, 7) + _trend(random, n, 1.35) + _noise(random, n, 0.02, 0.12))
    columns["n_prompts"] = np.full(n, float(groups))
    # Beta-binomial: prompts of a step are more alike than chance.
    share, strength = np.clip(equal, 0.005, 0.5), random.uniform(10, 100)
    alike = random.binomial(groups, random.beta(share * strength, (1 - share) * strength))
    columns["n_zero_variance_groups"] = alike.astype(float)
    columns["reward_mean"] = np.clip(0.3 + 0.3 * np.arange(n) / n + random.normal(0, 0.06, n), 0, 1)
    columns["mismatch_max"] = 10 ** random.uniform(-6, -0.3) * np.exp(random.normal(0, 0.5, n))
    columns["ratio_clip_share"] = random.beta(2, 60 / random.uniform(0.5, 3), n)
    # Demo: from −.1 to .6 in 61 steps, spread .33 around that, records −.36 to 1.29; another healthy run: 1.7 to 1.9.
    end, rise = random.uniform(-0.5, 1.9), random.uniform(-0.2, 0.7)
    tail = end - rise * _approach(random, n)
    columns["energy_tail_k"] = tail + random.uniform(0.05, 0.4) * _standard_ar(random, n, 0.2)
    # Demo: .5 to 1.2 in five records, mean .75, spread .26. An index of m tail values has a standard error of about
    # (1 + k)/√m: at k = .7, .15 to .34 with 130 to 25 of them. Neighbouring records are made of like policies.
    every = int(random.integers(EXACT_EVERY[0], EXACT_EVERY[1] + 1))
    end, rise = random.uniform(*EXACT_TAILS), random.uniform(-0.2, 0.7)
    scatter = random.uniform(0.15, 0.45) * _standard_ar(random, n, random.uniform(0, 0.4))
    exact = end - max(rise, end - EXACT_TAILS[1]) * _approach(random, n) + scatter
    columns["exact_tail_k"] = np.where(np.arange(n) % every > 0, np.nan, exact)
    for name in ("certificate_prob_z", "certificate_logprob_z"):  # slightly skewed sums with a correlation of .8
        z = 0.8**0.5 * shared + 0.2**0.5 * random.normal(size=n)
        columns[name] = (z + 0.08 * (z**2 - 1)) / np.sqrt(1 + 2 * 0.08**2)
    return StepSeries(np.arange(n), columns)


def replaced(series: StepSeries, at: int, **values: Float) -> StepSeries:
    """Return a series in which some columns have other values [S] from a step index on; NaN stays NaN."""
    columns = dict(series.columns)
    late = np.arange(len(series.step)) >= at
    for name, value in values.items():
        columns[name] = np.where(late & np.isfinite(columns[name]), value, columns[name])
    return replace(series, columns=columns)


def _approach(random: np.random.Generator, n: int) -> Float:
    """A factor that falls from 1 at the first step to 0 at the last, in a straight line or settling."""
    tau, x = random.uniform(0.2, 3), np.arange(n) / max(n - 1, 1)
    return 1 - np.expm1(-x / tau) / np.expm1(-1 / tau)


def _trend(random: np.random.Generator, n: int, most: float) -> Float:
    """A slow, bounded trend of a logarithm: up to a factor `most` either way over the run, straight or settling."""
    end, tau = random.uniform(-1, 1) * np.log(most), random.uniform(0.2, 3)
    x = np.arange(n) / n
    return end * -np.expm1(-x / tau) / -np.expm1(-1 / tau)


def _noise(random: np.random.Generator, n: int, low: float, high: float) -> Float:
    return random.uniform(low, high) * _standard_ar(random, n, random.uniform(0, 0.5))


def _standard_ar(random: np.random.Generator, n: int, phi: float) -> Float:
    """x_t = φ·x_{t−1} + ε_t with variance 1."""
    shocks = random.normal(size=n) * np.sqrt(1 - phi**2)
    shocks[0] = random.normal()
    return np.asarray(lfilter([1.0], [1.0, -phi], shocks))


LENGTHS = (50, 100, 200, 500)
LENGTH, AT = 200, 100
"""Steps of a run with a change, and the step of the change."""

CHANGE_POINTS = "change_points"
ANY = "any of them"
"""The family, since a reader of the page looks at all detectors and change points of a run at once."""

NEAR = 10
"""Steps within which a change point must lie of the true one."""


CALM = "{rate:.1%} [{rate_low:.1%}, {rate_high:.1%}]"
COLUMNS: dict[str, Column] = {
    "detector": "{detector}",
    **{f"{at} steps": lambda row, at=str(at): CALM.format_map(row["lengths"][at]) for at in LENGTHS},
    "with an alarm": "{alarm_rate:.1%}",
    "known change": "{change}",
    "found": "{found:.0%}",
    "fired before": "{before:.1%}",
    "median delay": "{delay:.0f}",
}

Columns = Mapping[str, Float]


@dataclass(frozen=True)
class Case:
    """One known change."""

    detector: str
    change: str  # In words
    column: str
    values: Callable[[np.random.Generator, Columns], Float]  # Of the column from step `start` on
    start: int = AT

    def apply(self, random: np.random.Generator, series: StepSeries) -> StepSeries:
        """Return a calm run with the change in it."""
        return replaced(series, self.start, **{self.column: self.values(random, series.columns)})


def _ramp(rate: float) -> Float:
    """A factor (1 + rate) once more at every step from the change on."""
    return (1 + rate) ** np.maximum(np.arange(LENGTH) - AT + 1, 0)


Z = "certificate_prob_z"
CASES = (
    Case("reward_fall", "reward × .1 at once", "reward_mean", lambda r, c: 0.1 * c["reward_mean"]),
    Case("reward_fall", "reward down 5 % a step", "reward_mean", lambda r, c: c["reward_mean"] * _ramp(-0.05)),
    Case("vanished_gradient", "‖ḡ‖ exactly 0", "grad_norm", lambda r, c: 0 * c["grad_norm"]),
    Case("not_finite", "‖ḡ‖ infinite", "grad_norm", lambda r, c: np.inf * c["grad_norm"]),
    Case("gradient_surge", "‖ḡ‖ × 5 at once", "grad_norm", lambda r, c: 5 * c["grad_norm"]),
    Case("gradient_surge", "‖ḡ‖ × 2 at once", "grad_norm", lambda r, c: 2 * c["grad_norm"]),
    Case("gradient_surge", "‖ḡ‖ up 10 % a step", "grad_norm", lambda r, c: c["grad_norm"] * _ramp(0.1)),
    Case("entropy_collapse", "entropy × .2 at once", "entropy_mean", lambda r, c: 0.2 * c["entropy_mean"]),
    Case("entropy_collapse", "entropy down 5 % a step", "entropy_mean", lambda r, c: c["entropy_mean"] * _ramp(-0.05)),
    Case("entropy_rise", "entropy × 5 at once", "entropy_mean", lambda r, c: 5 * c["entropy_mean"]),
    Case("entropy_rise", "entropy up 5 % a step", "entropy_mean", lambda r, c: c["entropy_mean"] * _ramp(0.05)),
    Case("length_drift", "length × 2.5 at once", "length_mean", lambda r, c: 2.5 * c["length_mean"]),
    Case("length_drift", "length down 3 % a step", "length_mean", lambda r, c: c["length_mean"] * _ramp(-0.03)),
    Case("zero_variance_groups", "80 % of groups of equal reward", "n_zero_variance_groups",
         lambda r, c: r.binomial(c["n_prompts"].astype(int), 0.8).astype(float)),
    Case("ratio_tails", "largest log ratio around 3", "mismatch_max", lambda r, c: r.gamma(10, 0.3, LENGTH)),
    Case("ratio_tails", "half of the tokens clipped", "ratio_clip_share", lambda r, c: r.beta(20, 20, LENGTH)),
    Case("tail_index", "Pareto-k of exact norms near 2", "exact_tail_k", lambda r, c: r.normal(2, 0.3, LENGTH)),
    Case("tail_index", "Pareto-k of exact norms near 1.5", "exact_tail_k", lambda r, c: r.normal(1.5, 0.3, LENGTH)),
    Case("clip_fraction", "from 10 % of steps clipped to all", "clipped",
         lambda r, c: np.where(np.arange(LENGTH) < AT, r.random(LENGTH) < 0.1, 1.0), start=0),
    Case("sampling_certificate", "mean z of one column 2 (a wrong temperature)", Z, lambda r, c: c[Z] + 2.0),
    Case("sampling_certificate", "mean z of one column ½ (a slight filter)", Z, lambda r, c: c[Z] + 0.5),
)  # fmt: skip


def run(config: AlarmsConfig) -> Report:
    """Measure every detector on synthetic calm series of several lengths and on runs with a known change."""
    calm = calm_rates(config.series, config.seed)
    rows = [{"detector": c.detector, "change": c.change} | calm[c.detector] | power(c, config) for c in CASES]
    for factor in (3.0, 2.0):
        near = 0  # runs in which a change point of ‖ḡ‖ lies near its lasting rise
        for random in _generators(config):
            run = calm_series(random, LENGTH)
            points = change_points(replaced(run, AT, grad_norm=factor * run.columns["grad_norm"]), ("grad_norm",))
            near += any(abs(point.step - AT) <= NEAR for point in points)
        change = {"detector": CHANGE_POINTS, "change": f"‖ḡ‖ × {factor:g} at once"}
        rows.append(change | calm[CHANGE_POINTS] | {"found": near / config.changed})
    rows.append({"detector": ANY} | calm[ANY])
    title = f"Alarms on {config.series:,} synthetic calm series a length, and on {config.changed} with each change"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, length=LENGTH, at=AT, near=NEAR))


def calm_rates(series: int, seed: int) -> dict[str, dict[str, Any]]:
    """Return how often every detector, and the family, fires in this many calm series of each of `LENGTHS`."""
    counts = {name: np.zeros((len(LENGTHS), 2), int) for name in (*DETECTORS, CHANGE_POINTS, ANY)}
    for at, length in enumerate(LENGTHS):
        for run in range(series):
            one = calm_series(np.random.default_rng([seed, length, run]), length)
            found = {name: detect(one) for name, detect in DETECTORS.items()}
            # Whether each ever fired, and whether with an alarm; change points know no alarm.
            firings = {name: (each.fired, each.alarm_step is not None) for name, each in found.items()}
            firings[CHANGE_POINTS] = (len(change_points(one)) > 0, False)
            firings[ANY] = (any(fired for fired, _ in firings.values()), any(alarm for _, alarm in firings.values()))
            for name, fired in firings.items():
                counts[name][at] += fired
    rates = {}
    for name, by_length in counts.items():
        (fired, alarms), n = by_length.sum(axis=0), series * len(LENGTHS)
        lengths = {str(length): _rate(k, series) for length, k in zip(LENGTHS, by_length[:, 0], strict=True)}
        rates[name] = _rate(fired, n) | {"alarm_rate": float(alarms / n), "lengths": lengths}
    return rates


def _rate(fired: int, n: int) -> dict[str, float]:
    interval = stats.binomtest(int(fired), n).proportion_ci(method="exact")
    low, high = float(interval.low), float(interval.high)
    return {"calm": n, "fired": int(fired), "rate": float(fired / n), "rate_low": low, "rate_high": high}


def power(case: Case, config: AlarmsConfig) -> dict[str, object]:
    """Return how often a detector sees a change, how often it had fired before it, and the median delay in steps."""
    delays, before = [], 0
    for random in _generators(config):
        first = DETECTORS[case.detector](case.apply(random, calm_series(random, LENGTH))).watch_step
        if first is not None:
            before += first < AT
            delays += [first - AT] if first >= AT else []
    left = config.changed - before
    delay = float(np.median(delays)) if delays else None
    return {"found": len(delays) / max(left, 1), "before": before / config.changed, "delay": delay}


def _generators(config: AlarmsConfig) -> Iterator[np.random.Generator]:
    return (np.random.default_rng([config.seed, LENGTH, run, AT]) for run in range(config.changed))
