"""Figures of the enumerated policies: bias and noise of every entry, and what random policies say about each fact."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otb_analysis.enumeration.derailment import Derailment
from otb_analysis.enumeration.groups import group_moments
from otb_analysis.enumeration.moments import GroupMoments, sampled_moments
from otb_analysis.enumeration.off_policy import CASES, drifted, mean_error, mean_shift, touched
from otb_analysis.enumeration.trees import TreeSpec, random_tree
from otb_analysis.estimators import ESTIMATORS, estimate
from otb_analysis.statistics.moments import measures
from otb_analysis.types import Float

GROUP = TreeSpec(horizon=3, shared=5, end_token=True)
GROUP_SIZE = 4
GROUP_POLICIES = 12
PERFORMED = "12 random policies (V = 3, T = 3, end token, 5 shared parameters, rewards 0 or 1), groups of 4"

SETTINGS = {
    "tabular, terminal": TreeSpec(),
    "tabular, dense": TreeSpec(dense=True),
    "shared, terminal": TreeSpec(shared=6),
    "shared, dense": TreeSpec(shared=6, dense=True),
}
CLOSERS = (
    ("classic_optimal", "exact"),
    ("sequence_optimal", "exact"),
    ("otb", "exact"),
    ("otb", "proxy"),
    ("token_optimal", "exact"),
    ("token_optimal", "proxy"),
)
POLICIES = 60

SAMPLED = (
    "none",
    "group_mean",
    "rloo",
    "sequence_optimal",
    "sequence_optimal_loo",
    "otb",
    "otb_loo",
    "token_optimal",
    "token_optimal_loo",
)
SAMPLED_GROUPS = ((4, 12, 400), (32, 6, 100))
"""Group size, chunks, groups per chunk."""


@dataclass(frozen=True)
class Bias:
    """Medians over random policies of one entry's exact group moments.

    Attributes:
        target_bias: The same against the entry's own target.
        variance: V relative to `rloo`.
        sf: V/c² relative to `rloo`.
        efficiency: Efficiency of one prompt and of 1000.
        crossing: Prompts above which `rloo` is more efficient.
    """

    relative_bias: float
    target_bias: float
    projection: float
    variance: float
    sf: float
    efficiency: tuple[float, float]
    crossing: float


def bias_figures() -> dict[str, Bias]:
    """Return the bias of every entry as a number: what the catalogue prints."""
    trees = [random_tree(GROUP, np.random.default_rng(seed)) for seed in range(GROUP_POLICIES)]
    reference = [group_moments("rloo", tree, GROUP_SIZE) for tree in trees]
    out = {}
    for name in ESTIMATORS:
        moments = [group_moments(name, tree, GROUP_SIZE) for tree in trees]
        pairs = list(zip(moments, reference, strict=True))
        # `grpo` divides by the standard deviation of rewards of 0 or 1, so its target is the gradient over that.
        scale = [(tree.objective * (1 - tree.objective)) ** -0.5 if name == "grpo" else 1.0 for tree in trees]
        out[name] = Bias(
            relative_bias=_median([m.relative_bias for m in moments]),
            target_bias=_median([_off_target(m, k) for m, k in zip(moments, scale, strict=True)]),
            projection=_median([m.projection for m in moments]),
            variance=_median([m.variance / r.variance for m, r in pairs]),
            sf=_median([m.sf / r.sf for m, r in pairs]),
            efficiency=(_median([m.efficiency(1) for m in moments]), _median([m.efficiency(1000) for m in moments])),
            crossing=_median([float(measures.crossing(m.measured(r))) for m, r in pairs]),
        )
    return out


@dataclass(frozen=True)
class Shift:
    """What one ratio does to the mean of the gradient, policy by policy.

    Attributes:
        shift: ‖E g(B) − E g(0)‖/‖∇J‖ with B = J: how far a baseline moves the mean.
        error: ‖E g(B) − ∇J‖/‖∇J‖ with B = J: how far the mean is from the gradient.
        touched: Share of tokens that a clip or mask stops or a truncation changes.
    """

    shift: Float
    error: Float
    touched: Float

    @property
    def moved(self) -> int:
        """Policies on which the mean moves."""
        return int((self.shift > 1e-9).sum())


def shift_figures() -> dict[str, dict[str, Shift]]:
    """Return, per kind of policy, how far the group mean as baseline moves E ĝ under each ratio."""
    out = {}
    for setting in ("tabular, terminal", "shared, terminal"):
        trees = [drifted(SETTINGS[setting], seed) for seed in range(POLICIES)]
        out[setting] = {
            label: Shift(*(np.array([f(tree, case) for tree in trees]) for f in (mean_shift, mean_error, touched)))
            for label, case in CASES.items()
        }
    return out


def derailment_samples(
    process: Derailment | None = None, sizes: Sequence[tuple[int, int, int]] = SAMPLED_GROUPS
) -> dict[tuple[str, int], Float]:
    """Return N·V and N·SF of group gradients on the derailment process, relative to the variance of B*.

    Sampled: every estimator on the same rollouts, in chunks of independent groups, so that differences between
    estimators have standard errors over chunks. SF = V/c² is a ratio of means, so its column holds jackknife
    pseudo-values, K·θ − (K−1)·θ_(k): their mean is the estimate, their standard error includes that of c.

    Args:
        process: By default the one with J = .50.
        sizes: Group size, chunks, groups per chunk, of each size.

    Returns:
        (estimator, N) → [chunks, 2], the columns N·V and N·SF.
    """
    process, rng = process or Derailment(), np.random.default_rng(1)
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
            out[name, n] = np.stack([variance, _sf_pseudo_values(variance, [m.projection for m in parts])], axis=1)
    return out


def _sf_pseudo_values(variance: Float, projection: list[float]) -> Float:
    # The ratio of means without each chunk; a mean of ratios would be biased.
    k, c = len(variance), np.array(projection)
    without = [(x.sum() - x) / (k - 1) for x in (variance, c)]
    return k * variance.mean() / c.mean() ** 2 - (k - 1) * without[0] / without[1] ** 2


def _off_target(moments: GroupMoments, scale: float) -> float:
    target = scale * moments.gradient
    return float(np.linalg.norm(moments.mean - target) / np.linalg.norm(target))


def _median(x: list[float]) -> float:
    return float(np.median(x))
