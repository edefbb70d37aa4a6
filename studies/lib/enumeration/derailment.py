"""The derailment process: one mistake leads into a noisy state that pays nothing.

Two states, T tokens, V = 4, tabular parameters indexed by (t, state), so scores at different positions are orthogonal
and the logit-space proxy is the exact energy. *On* (start): token 0 with probability 1 − m stays on, each other one
with m/3 switches *off*. *Off*: tokens 0, 1, 2 with (.4, .3, .3)(1 − r) stay off, token 3 with r switches back on.
R = 1 with probability q if on at the end, else 0. Everything below is exact by dynamic programming but `sample`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from otb_analysis.estimators import estimate
from otb_analysis.types import EstimatorInputs, Float
from studies.lib.enumeration.trees import sampled_moments

ON, OFF = 0, 1
SAMPLED = (
    "none", "group_mean", "rloo", "sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "token_optimal",
    "token_optimal_loo",
)  # fmt: skip
"""Estimators whose groups are sampled, in the order of the table's rows."""


@dataclass(frozen=True)
class Derailment:
    """The process with m = `mistake` (.7/64 gives J ≈ .50), r = `recovery` and q = `pay`; all but samples is exact."""

    horizon: int = 64
    mistake: float = 0.7 / 64
    recovery: float = 0.005
    pay: float = 0.9

    @cached_property
    def policy(self) -> Float:
        """π(y | state) [2, 4]."""
        m, r = self.mistake, self.recovery
        return np.array([[1 - m, m / 3, m / 3, m / 3], [0.4 * (1 - r), 0.3 * (1 - r), 0.3 * (1 - r), r]])

    @property
    def follows(self) -> np.ndarray:
        """State after each token [2, 4]."""
        return np.array([[ON, OFF, OFF, OFF], [OFF, OFF, OFF, ON]])

    @cached_property
    def score(self) -> Float:
        """e_y − π in the slot of (t, state): [2, 4, 4], last axis the logits."""
        return np.eye(4)[None] - self.policy[:, None, :]

    @cached_property
    def energy(self) -> Float:
        """w(y | state) = ‖e_y − π‖² [2, 4]."""
        return (self.score**2).sum(axis=2)

    @cached_property
    def step(self) -> Float:
        """P(next state | state) [2, 2]."""
        return np.stack([(self.policy * (self.follows == s)).sum(axis=1) for s in (ON, OFF)], axis=1)

    @cached_property
    def occupancy(self) -> Float:
        """P(state before token t) [T, 2]."""
        out = np.zeros((self.horizon, 2))
        out[0, ON] = 1.0
        for t in range(1, self.horizon):
            out[t] = out[t - 1] @ self.step
        return out

    @cached_property
    def value(self) -> Float:
        """E[R | state before token t] [T + 1, 2]; row T is the end."""
        out = np.zeros((self.horizon + 1, 2))
        out[-1, ON] = self.pay
        for t in range(self.horizon - 1, -1, -1):
            out[t] = self.step @ out[t + 1]
        return out

    @property
    def success(self) -> float:
        """J = E R."""
        return float(self.value[0, ON])

    @cached_property
    def reward_after(self) -> Float:
        """E[R | state before t, token] [T, 2, 4]."""
        return self.value[1:][:, self.follows]

    @cached_property
    def gradient(self) -> Float:
        """∇J [T·2·4], the slot of (t, state, logit)."""
        weight = self.occupancy[:, :, None] * self.policy * self.reward_after
        return np.einsum("tsy,syv->tsv", weight, self.score).reshape(-1)

    @cached_property
    def realized(self) -> Float:
        """E[W_t; state after token t] [T, 2]."""
        out = np.zeros((self.horizon, 2))
        carried = np.zeros(2)
        for t in range(self.horizon):
            # Energy adds up along the way and moves on with the state.
            gained = self.occupancy[t][:, None] * self.policy * self.energy
            carried = carried @ self.step + np.array([gained[self.follows == s].sum() for s in (ON, OFF)])
            out[t] = carried
        return out

    def baseline(self, name: str) -> Float:
        """Return a population baseline B [T, 2] as a function of position and state.

        Names: none, group_mean, value, sequence_optimal, otb, token_optimal and prefix, the best function of the
        prefix, E[w_t R | state]/E[w_t | state].
        """
        weighted = self.policy * self.energy
        alone = (weighted * self.reward_after).sum(axis=2)  # E[w_t R | state before t]
        mean_energy = weighted.sum(axis=1)
        final = (self.realized[-1] @ self.value[-1]) / self.realized[-1].sum()
        baselines = {
            "none": np.zeros((1, 1)), "group_mean": np.full((1, 1), self.success),
            "sequence_optimal": np.full((1, 1), final),
            "otb": ((self.realized * self.value[1:]).sum(axis=1) / self.realized.sum(axis=1))[:, None],
            "token_optimal": ((self.occupancy * alone).sum(axis=1) / (self.occupancy @ mean_energy))[:, None],
            "value": self.value[:-1], "prefix": alone / mean_energy,
        }  # fmt: skip
        return np.broadcast_to(baselines[name], (self.horizon, 2))

    def variance(self, baseline: Float) -> float:
        """Return the exact variance of one rollout's gradient.

        Σ_t E[w_t (R − B_t)²] − ‖∇J‖², positions being orthogonal; R² = R.
        """
        b = baseline[:, :, None]
        # E[(R − B)² | state, token] with R² = R, rewards being 0 or 1.
        squared = self.reward_after * (1 - 2 * b) + b**2
        weight = self.occupancy[:, :, None] * self.policy * self.energy
        return float((weight * squared).sum() - self.gradient @ self.gradient)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Float]:
        """Draw n rollouts: state before each token [n, T], tokens [n, T], rewards [n]."""
        cumulative, now = np.cumsum(self.policy, axis=1), np.zeros(n, np.int64)
        state, token = np.zeros((2, n, self.horizon), np.int64)
        for t in range(self.horizon):
            state[:, t] = now
            token[:, t] = np.minimum((rng.random(n)[:, None] > cumulative[now]).sum(axis=1), 3)
            now = self.follows[now, token[:, t]]
        return state, token, ((now == ON) & (rng.random(n) < self.pay)).astype(np.float64)

    def inputs(self, state: np.ndarray, token: np.ndarray, reward: Float, n: int) -> EstimatorInputs:
        """Return estimator inputs for sampled rollouts in groups of n."""
        paid = np.zeros(state.shape)
        paid[:, -1] = reward
        group = np.arange(len(reward)) // n
        return EstimatorInputs(paid, np.ones(state.shape, bool), group, energy=self.energy[state, token])

    def group_gradients(self, state: np.ndarray, token: np.ndarray, advantage: Float, n: int) -> Float:
        """Return ḡ of each group of n consecutive rollouts, [N/n, T·2·4]."""
        groups = len(state) // n
        scaled = advantage[:, :, None] * self.score[state, token] / n
        out = np.zeros((groups, self.horizon, 2, 4))
        for s in (ON, OFF):
            # Each state has parameters of its own, so a score goes into the slot of its state only.
            part = np.where((state == s)[:, :, None], scaled, 0.0)
            out[:, :, s] = part.reshape(groups, n, self.horizon, 4).sum(axis=1)
        return out.reshape(groups, -1)


def derailment_samples(process: Derailment, sizes: Sequence[tuple[int, int, int]]) -> dict[tuple[str, int], Float]:
    """Return N·V and N·SF of group gradients on the derailment process, relative to the variance of B*.

    Sampled: every estimator on the same rollouts, in chunks of independent groups, so that differences between
    estimators have standard errors over chunks. SF = V/c² is a ratio of means, so its column holds jackknife
    pseudo-values, K·θ − (K−1)·θ_(k): their mean is the estimate, their standard error includes that of c.

    A size is a group size, the number of chunks, and groups per chunk.

    Returns:
        (estimator, N) → [chunks, 2], the columns N·V and N·SF.
    """
    rng = np.random.default_rng(1)
    best = process.variance(process.baseline("token_optimal"))
    out = {}
    for n, chunks, groups in sizes:
        moments = {name: [] for name in SAMPLED}
        for _ in range(chunks):
            state, token, reward = process.sample(n * groups, rng)
            inputs = process.inputs(state, token, reward, n)
            for name in SAMPLED:
                gradients = process.group_gradients(state, token, estimate(name, inputs).advantage, n)
                moments[name].append(sampled_moments(gradients, process.gradient, n))
        for name, parts in moments.items():
            variance = np.array([m.n_variance for m in parts]) / best
            c = np.array([m.projection for m in parts])
            # The ratio of means without each chunk; a mean of ratios would be biased.
            without = [(x.sum() - x) / (chunks - 1) for x in (variance, c)]
            pseudo = chunks * variance.mean() / c.mean() ** 2 - (chunks - 1) * without[0] / without[1] ** 2
            out[name, n] = np.stack([variance, pseudo], axis=1)
    return out
