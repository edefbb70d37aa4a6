"""All completions of a tiny softmax policy: probabilities, rewards, exact scores, and moments of gradient estimates.

Letters: M completions, T horizon, V vocabulary, H prefixes, D parameters. The policy is log-linear in its parameters,
z(h, v) = φ(h, v)·θ: with one parameter per (prefix, token) it is tabular and no two positions share parameters; with
fewer parameters than that, and random features φ, they do.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import log_softmax

from otb_analysis.arrays import masked
from otb_analysis.errors import InputError
from otb_analysis.statistics import moments as measures
from otb_analysis.types import Bool, EstimatorInputs, Float, Int


@dataclass(frozen=True)
class TreeSpec:
    """What to draw a random policy from."""

    vocabulary: int = 3
    horizon: int = 4  # T, the longest completion
    shared: int | None = None  # D random features shared by all prefixes, or None for a tabular policy
    end_token: bool = False  # Whether token V − 1 ends the completion, so that lengths differ
    dense: bool = False  # A normal reward at every token instead of one terminal reward of 0 or 1
    scale: float = 1.0  # Standard deviation of the parameters


@dataclass(frozen=True)
class Tree:
    """Every completion of one prompt, with the probability of being *sampled*; all [M, T] but the score."""

    logprob: Float  # log π(y_t | h_t), zero outside the mask
    mask: Bool  # True at tokens of the completion
    prefix: Int  # Index of h_t, −1 outside the mask
    reward: Float
    score: Float  # s_t = ∇_θ log π(y_t | h_t) [M, T, D], zero outside the mask
    proxy: Float  # ‖e_y − π(·|h_t)‖²
    behavior_logprob: Float  # log-probability under the policy that samples; the policy itself when on-policy
    token: Int  # Vocabulary index of y_t, −1 outside the mask
    entropy: Float | None = None  # H(π(·|h_t)) in nats; None where nobody asks for it

    @cached_property
    def prob(self) -> Float:
        """Probability with which each completion is sampled [M]."""
        return np.exp(self.behavior_logprob.sum(axis=1))

    @cached_property
    def ratio(self) -> Float:
        """ρ_t = π(y_t|h_t) / μ(y_t|h_t) [M, T], 1 on-policy."""
        return np.exp(self.logprob - self.behavior_logprob)

    @cached_property
    def energy(self) -> Float:
        """w_t = ‖s_t‖² [M, T]."""
        return (self.score**2).sum(axis=2)

    @cached_property
    def returns(self) -> Float:
        """G_t [M, T], zero outside the mask."""
        return masked(np.cumsum(self.reward[:, ::-1], axis=1)[:, ::-1], self.mask)

    @property
    def total(self) -> Float:
        """R [M]."""
        return self.reward.sum(axis=1)

    def expect(self, x: Float) -> Float:
        """Return the expectation over completions of x [M, ...]."""
        return np.tensordot(self.prob, x, axes=1)

    @cached_property
    def gradient(self) -> Float:
        """∇J [D], J = E_π R, whichever policy samples."""
        return np.einsum("m,mtd,mt->d", np.exp(self.logprob.sum(axis=1)), self.score, self.returns)

    @cached_property
    def objective(self) -> float:
        """J = E_π R: the success rate when rewards are 0 or 1."""
        return float(np.exp(self.logprob.sum(axis=1)) @ self.total)

    def inputs(self, rows: Int, group: Int, source: str = "exact") -> EstimatorInputs:
        """Return estimator inputs for chosen completions, with every input that can be known exactly but the critic's.

        A turn is two tokens, so that entries which compare turns have some.
        """
        energy = {"exact": self.energy, "proxy": self.proxy}[source]
        return EstimatorInputs(
            self.reward[rows], self.mask[rows], group, energy=energy[rows],
            rollout_norm_sq=(self.score.sum(axis=1) ** 2).sum(axis=1)[rows], ratio=self.ratio[rows],
            turn=np.broadcast_to(np.arange(self.mask.shape[1]) // 2, self.mask[rows].shape), token_id=self.token[rows],
            entropy=None if self.entropy is None else self.entropy[rows],
        )  # fmt: skip

    def sampled_by(self, behavior: "Tree") -> "Tree":
        """Return the same completions sampled by another policy over the same prefixes."""
        return replace(self, behavior_logprob=behavior.logprob)


def random_tree(spec: TreeSpec, rng: np.random.Generator) -> Tree:
    """Draw a policy and rewards, and enumerate its completions.

    Raises:
        InputError: The tree has fewer than two completions or too many to enumerate.
    """
    if spec.vocabulary < 2 or not 1 <= spec.vocabulary**spec.horizon <= 10_000:
        raise InputError(
            f"vocabulary {spec.vocabulary} and horizon {spec.horizon} give {spec.vocabulary**spec.horizon} completions;"
            " choose a vocabulary of at least 2 and at most 10000 completions."
        )
    token, prefix, mask = _completions(spec)
    n_prefixes = int(prefix.max()) + 1
    if spec.shared is None:  # φ [H, V, D]: one-hot in (prefix, token) when tabular, normal when shared
        features = np.eye(n_prefixes * spec.vocabulary).reshape(n_prefixes, spec.vocabulary, -1)
    else:
        features = rng.normal(size=(n_prefixes, spec.vocabulary, spec.shared)) / np.sqrt(spec.shared)
    log_pi = log_softmax(features @ rng.normal(scale=spec.scale, size=features.shape[2]), axis=1)
    pi = np.exp(log_pi)
    # ∇_θ log π(v|h) = φ(h, v) − E_π φ(h, ·), the policy being log-linear.
    score_of = features - np.einsum("hv,hvd->hd", pi, features)[:, None, :]
    # ‖e_y − π‖² = Σ_v π_v² − 2π_y + 1: the norm of the score in logit space.
    proxy_of = (pi**2).sum(axis=1, keepdims=True) - 2 * pi + 1
    at = (prefix, token)
    logprob, n = masked(log_pi[at], mask), len(mask)
    if spec.dense:
        reward = masked(rng.normal(size=(n_prefixes, spec.vocabulary))[at], mask)
    else:
        # Between a quarter and three quarters of the completions succeed, so that no policy is hopeless or perfect.
        success = rng.permutation(np.arange(n) < rng.integers(max(n // 4, 1), max(n - n // 4, 2)))
        reward = np.zeros(mask.shape)
        reward[np.arange(n), mask.sum(axis=1) - 1] = success
    return Tree(
        logprob=logprob, mask=mask, prefix=np.where(mask, prefix, -1), reward=reward,
        score=np.where(mask[:, :, None], score_of[at], 0.0), proxy=masked(proxy_of[at], mask), behavior_logprob=logprob,
        token=token, entropy=masked(-(pi * log_pi).sum(axis=1)[prefix], mask),
    )  # fmt: skip


def _completions(spec: TreeSpec) -> tuple[Int, Int, Bool]:
    """Tokens, prefix numbers and mask of every completion [M, T]; −1 marks what comes after the end."""
    v, t = spec.vocabulary, spec.horizon
    token = np.stack(np.unravel_index(np.arange(v**t), (v,) * t), axis=1)
    if spec.end_token:
        ended = np.cumsum(token == v - 1, axis=1) - (token == v - 1) > 0
        token = np.unique(np.where(ended, -1, token), axis=0)
    mask = token >= 0
    # A prefix is the tuple of tokens before this one; completions that share it share its number.
    history = [tuple(row[:k]) if row[k] >= 0 else None for row in token for k in range(t)]
    number = {h: i for i, h in enumerate(sorted({h for h in history if h is not None}))}
    return token, np.array([-1 if h is None else number[h] for h in history]).reshape(token.shape), mask


@dataclass(frozen=True)
class GroupMoments:
    """First two moments of one prompt's group gradient ḡ = (1/N) Σ_i Σ_t A_{i,t} s_{i,t}."""

    mean: Float  # m = E ḡ [D]
    variance: float  # V = tr Cov(ḡ) = E‖ḡ‖² − ‖m‖²
    gradient: Float  # ∇J [D]
    n: int

    @property
    def relative_bias(self) -> float:
        """‖m − ∇J‖ / ‖∇J‖."""
        return float(np.linalg.norm(self.mean - self.gradient) / np.linalg.norm(self.gradient))

    @property
    def projection(self) -> float:
        """C = ⟨m, ∇J⟩ / ‖∇J‖²: the step taken along the gradient, 1 when unbiased."""
        return float(self.mean @ self.gradient / (self.gradient @ self.gradient))

    @property
    def n_variance(self) -> float:
        """N·V, comparable between group sizes."""
        return self.n * self.variance

    @property
    def sf(self) -> float:
        """SF = V / c²: variance at equal progress."""
        return self.variance / self.projection**2

    def measured(self, reference: "GroupMoments") -> measures.Moments:
        """Return what a Gram matrix of infinitely many prompts would give: the ground truth of `statistics`."""
        mean_sq, truth_sq = self.mean @ self.mean, reference.mean @ reference.mean
        along, reference_power = self.mean @ reference.mean, truth_sq + reference.variance
        values = (mean_sq + self.variance, mean_sq, along, truth_sq, reference_power)
        return measures.Moments(*(np.array(float(x)) for x in values))

    def efficiency(self, prompts: float) -> float:
        """Return the share of an update of P prompts that points along ∇J.

        ⟨m, ∇J⟩² / (‖∇J‖² (‖m‖² + V/P)) ∈ [0, 1].
        """
        along = (self.mean @ self.gradient) ** 2 / (self.gradient @ self.gradient)
        return float(along / (self.mean @ self.mean + self.variance / prompts))


def weighted_moments(gradients: Float, prob: Float, gradient: Float, n: int) -> GroupMoments:
    """Return exact moments from all outcomes and their probabilities."""
    mean = prob @ gradients
    return GroupMoments(mean, float(prob @ ((gradients - mean) ** 2).sum(axis=1)), gradient, n)


def sampled_moments(gradients: Float, gradient: Float, n: int) -> GroupMoments:
    """Return moments estimated from independent groups (ddof 1)."""
    return GroupMoments(gradients.mean(axis=0), float(gradients.var(axis=0, ddof=1).sum()), gradient, n)
