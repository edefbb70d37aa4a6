"""What a prompt's `rloo` gradient is worth in a group of any size, from rollouts or from all completions at once.

g_n is the U-statistic with the kernel h(i, j) = ½(S_i − S_j)(R_i − R_j), so E‖g_n‖² = q + a/n + b/(n(n − 1)) with the
coefficients of `statistics.moments.group_sizes`: q = ‖E g‖², a = 4ζ₁, b = 2ζ₂ − 4ζ₁.
"""

from dataclasses import dataclass

import numpy as np

from otb_analysis.types import Float
from studies.lib.enumeration.trees import Tree


@dataclass(frozen=True)
class Laws:
    """One batch of prompts; V_p(n) = a/n + b/(n(n − 1)) is the variance of prompt p's gradient given the prompt."""

    gradient: Float  # E g of each prompt [P, K]: exact, or the mean over all pairs of rollouts
    square: Float  # q = ‖E g‖² [P], without bias
    single: Float  # a [P]
    pair: Float  # b [P]

    def variance(self, size: Float) -> Float:
        """V_p(n_p) of each prompt [P]."""
        return self.single / size + self.pair / (size * (size - 1))

    def table(self, most: int) -> Float:
        """V_p(n) for n up to `most` [P, most + 1], as `allocate` takes it."""
        n = np.arange(2, most + 1)
        out = np.full((len(self.single), most + 1), np.inf)
        out[:, 2:] = self.single[:, None] / n + self.pair[:, None] / (n * (n - 1))
        return out


def from_rollouts(score: Float, reward: Float) -> tuple[Float, float, float, float]:
    """Return gradient, q, a and b of one prompt, unbiased: means over pairs, triples and quadruples of rollouts.

    `score` holds S_i of each rollout [N, K], or a sketch that keeps inner products in expectation; `reward` is R [N].
    """
    n = len(reward)
    # Σ_j h(i, j), linear in the scores
    rest = 0.5 * (score * (n * reward - reward.sum())[:, None] - np.outer(reward, score.sum(0)) + reward @ score)
    total, inner = rest.sum(axis=0), score @ score.T
    norm = np.diag(inner)
    same = float((0.25 * (reward[:, None] - reward) ** 2 * (norm[:, None] + norm - 2 * inner)).sum())
    once, every = float((rest**2).sum()), float(total @ total)
    pairs, triples = n * (n - 1), n * (n - 1) * (n - 2)
    square = (every - 4 * once + 2 * same) / (triples * (n - 3))
    one, two = (once - same) / triples - square, same / pairs - square
    return total / pairs, square, 4 * one, 2 * two - 4 * one


def from_tree(tree: Tree) -> tuple[Float, float, float, float]:
    """Return gradient, q, a and b of an enumerated prompt, exactly."""
    score, reward, prob = tree.score.sum(axis=1), tree.total, tree.prob
    mean, moment = prob @ score, prob @ (score * reward[:, None])
    rest = 0.5 * (score * (reward - prob @ reward)[:, None] - np.outer(reward, mean) + moment)  # E[h(i, ·) | i]
    inner = score @ score.T
    norm = np.diag(inner)
    size = 0.25 * (reward[:, None] - reward) ** 2 * (norm[:, None] + norm - 2 * inner)
    gradient = prob @ rest
    square = float(gradient @ gradient)
    one, two = float(prob @ (rest**2).sum(axis=1)) - square, float(prob @ size @ prob) - square
    return gradient, square, 4 * one, 2 * two - 4 * one
