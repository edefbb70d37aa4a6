"""Calm runs, and runs in which one thing changes at a known step: what the alarms are calibrated and tested on.

A calm run is not a boring one. Its gradient norms are log-normal with heavy-tailed innovations, autocorrelated, with
isolated spikes and a slow trend; entropy decays gently to a plateau; length and success drift as a policy learns;
groups of equal reward are over-dispersed; it may clip no step or nearly all; tails are heavy, and heavier as it learns.
Nothing in it wanders without bound. Ranges are made to hold what was seen in healthy runs, which the comments quote;
they are synthetic all the same, and rates on them are no promise about other runs.
"""

from dataclasses import replace

import numpy as np
from scipy.signal import lfilter

from otb_analysis.diagnostics import StepSeries
from otb_analysis.types import Float

EXACT_EVERY = (1, 10)
"""Steps from one record of the exact tail to the next."""

CLIP_SHARES = (0.0, 0.98)
EXACT_TAILS = (0.0, 0.9)
"""Pareto-k around which the records of a calm run end: below 1, where variances are finite; demo: .7 to .8."""


def calm_series(random: np.random.Generator, n: int) -> StepSeries:
    """Return the scalars of a run of n steps in which nothing goes wrong."""
    level = random.normal(0.5, 1.0) + _trend(random, n, 1.5)
    # Demo: spread .2, lag-one correlation .1 to .2.
    noise = heavy_noise(random, n, random.uniform(0.1, 0.5))
    noise[random.random(n) < 0.005] += np.log(random.uniform(3, 10))  # a spike is no surge
    groups = int(random.choice([8, 16, 32, 64]))
    equal = random.uniform(0.02, 0.45) * np.exp(_trend(random, n, 1.25))
    shared = random.normal(size=n)
    columns = {
        "grad_norm": np.exp(level + noise),
        # Demo: 85 and 97 % of steps at a maximal norm of 1, for which it was chosen; other settings clip hardly ever.
        # Not from the level: a trend that crosses the threshold is a finding, not a false alarm.
        "clipped": (noise > np.quantile(noise, 1 - random.uniform(*CLIP_SHARES))).astype(float),
        # Demo: .10 nats falling to .08 over 61 steps, noise .08, lag-one correlation of the residuals −.05.
        "entropy_mean": np.exp(random.uniform(-3, 0.5) + _decay(random, n, 0.5) + _noise(random, n, 0.03, 0.12)),
        # Demo: 15 to 22 tokens, noise .08.
        "length_mean": np.exp(random.uniform(2, 7) + _trend(random, n, 1.35) + _noise(random, n, 0.02, 0.12)),
        "n_prompts": np.full(n, float(groups)),
        "n_zero_variance_groups": _overdispersed(random, groups, equal),
        "reward_mean": np.clip(0.3 + 0.3 * np.arange(n) / n + random.normal(0, 0.06, n), 0, 1),
        "mismatch_max": 10 ** random.uniform(-6, -0.3) * np.exp(random.normal(0, 0.5, n)),
        "ratio_clip_share": random.beta(2, 60 / random.uniform(0.5, 3), n),
        "energy_tail_k": _proxy_tail(random, n),
        "exact_tail_k": _exact_tail(random, n),
        "certificate_prob_z": _z(random, shared),
        "certificate_logprob_z": _z(random, shared),
    }
    return StepSeries(np.arange(n), columns)


def heavy_noise(random: np.random.Generator, n: int, spread: float) -> Float:
    """Autocorrelated noise with Student-t innovations: x_t = φ·x_{t−1} + ε_t, φ up to .6, 4 to 12 degrees of freedom.

    `spread` is the standard deviation of x.
    """
    phi, df = random.uniform(0, 0.6), random.uniform(4, 12)
    shocks = random.standard_t(df, n + 50) * np.sqrt((df - 2) / df) * np.sqrt(1 - phi**2)
    shocks[0] = 0.0
    return spread * _autoregression(shocks, phi)[50:]


def replaced(series: StepSeries, at: int, **values: Float) -> StepSeries:
    """Return a series in which some columns have other values [S] from a step index on; NaN stays NaN."""
    columns = dict(series.columns)
    late = np.arange(len(series.step)) >= at
    for name, value in values.items():
        columns[name] = np.where(late & np.isfinite(columns[name]), value, columns[name])
    return replace(series, columns=columns)


def _proxy_tail(random: np.random.Generator, n: int) -> Float:
    # Demo: from −.1 to .6 in 61 steps, spread .33 around that, records −.36 to 1.29; another healthy run: 1.7 to 1.9.
    end, rise = random.uniform(-0.5, 1.9), random.uniform(-0.2, 0.7)
    return end - rise * _approach(random, n) + random.uniform(0.05, 0.4) * _standard_ar(random, n, 0.2)


def _exact_tail(random: np.random.Generator, n: int) -> Float:
    # Demo: .5 to 1.2 in five records, mean .75, spread .26. An index of m tail values has a standard error of about
    # (1 + k)/√m: at k = .7, .15 to .34 with 130 to 25 of them. Neighbouring records are made of like policies.
    every = int(random.integers(EXACT_EVERY[0], EXACT_EVERY[1] + 1))
    end, rise = random.uniform(*EXACT_TAILS), random.uniform(-0.2, 0.7)
    noise = random.uniform(0.15, 0.45) * _standard_ar(random, n, random.uniform(0, 0.4))
    k = end - max(rise, end - EXACT_TAILS[1]) * _approach(random, n) + noise
    k[np.arange(n) % every > 0] = np.nan
    return k


def _approach(random: np.random.Generator, n: int) -> Float:
    """A factor that falls from 1 at the first step to 0 at the last, in a straight line or settling."""
    tau, x = random.uniform(0.2, 3), np.arange(n) / max(n - 1, 1)
    return 1 - np.expm1(-x / tau) / np.expm1(-1 / tau)


def _trend(random: np.random.Generator, n: int, most: float) -> Float:
    """A slow, bounded trend of a logarithm: up to a factor `most` either way over the run, straight or settling."""
    end, tau = random.uniform(-1, 1) * np.log(most), random.uniform(0.2, 3)
    x = np.arange(n) / n
    return end * -np.expm1(-x / tau) / -np.expm1(-1 / tau)


def _decay(random: np.random.Generator, n: int, least: float) -> Float:
    """The logarithm of a decay to between `least` and all of the start."""
    floor, tau = random.uniform(least, 1), random.uniform(10, 2 * n)
    return np.log(floor + (1 - floor) * np.exp(-np.arange(n) / tau))


def _noise(random: np.random.Generator, n: int, low: float, high: float) -> Float:
    return random.uniform(low, high) * _standard_ar(random, n, random.uniform(0, 0.5))


def _standard_ar(random: np.random.Generator, n: int, phi: float) -> Float:
    shocks = random.normal(size=n) * np.sqrt(1 - phi**2)
    shocks[0] = random.normal()
    return _autoregression(shocks, phi)


def _autoregression(shocks: Float, phi: float) -> Float:
    """x_t = φ·x_{t−1} + ε_t, from x_0 = ε_0."""
    return np.asarray(lfilter([1.0], [1.0, -phi], shocks))


def _overdispersed(random: np.random.Generator, groups: int, share: Float) -> Float:
    """Beta-binomial counts: prompts of a step are more alike than chance."""
    share, strength = np.clip(share, 0.005, 0.5), random.uniform(10, 100)
    return random.binomial(groups, random.beta(share * strength, (1 - share) * strength)).astype(float)


def _z(random: np.random.Generator, shared: Float) -> Float:
    """Standardised, slightly skewed sums, two of which have correlation .8."""
    z = 0.8**0.5 * shared + 0.2**0.5 * random.normal(size=shared.size)
    return (z + 0.08 * (z**2 - 1)) / np.sqrt(1 + 2 * 0.08**2)
