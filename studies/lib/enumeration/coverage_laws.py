"""Laws of group gradients with known moments: enumerated policies, and a gradient plus noise of every kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from otb_analysis.statistics.moments.measures import Moments
from otb_analysis.types import Float
from studies.lib.enumeration.groups import group_gradients, multisets
from studies.lib.enumeration.trees import TreeSpec, random_tree


@dataclass(frozen=True)
class Law:
    """The law of one prompt's group gradients under RLOO (row 0), another estimator (row 1) and perhaps more."""

    name: str
    draw: Callable[[np.random.Generator, int], Float]  # (generator, n) → group gradients of n prompts [M, n, D]
    moments: Moments  # Exact, all rows in one array [M]

    @property
    def noise_scale(self) -> float:
        """V/‖∇J‖² of RLOO in prompts."""
        return float((self.moments.reference_power[0] - self.moments.truth_sq[0]) / self.moments.truth_sq[0])


def enumerated(seed: int, n_prompts: int = 4, size: int = 4, names: Sequence[str] = ("rloo", "otb")) -> Law:
    """Build the law of `rloo` and another (exact energies) on random softmax policies, every group enumerated.

    A prompt is one of a few policies with shared parameters and three tokens; every multiset of completions is an
    outcome with its exact probability, so that groups with equal rewards (gradient 0) are as frequent as they really
    are.
    """
    rng = np.random.default_rng(seed)
    gradients, probabilities = [], []
    for _ in range(n_prompts):
        tree = random_tree(TreeSpec(vocabulary=2, horizon=3, shared=6), rng)
        members, prob = multisets(tree, size)
        gradients.append(np.stack([group_gradients(name, tree, members) for name in names]))
        probabilities.append(prob / n_prompts)
    g, p = np.concatenate(gradients, axis=1), np.concatenate(probabilities)
    cumulative = np.cumsum(p / p.sum())
    cumulative[-1] = 1.0  # rounding must not leave a gap at the end
    # Exact over outcomes; sampling a group is then one draw from the cumulative probabilities.
    mean, power = np.einsum("o,mod->md", p, g), np.einsum("o,mod->m", p, g**2)
    law = Law("", lambda rng, n: g[:, np.searchsorted(cumulative, rng.random(n), side="right")], _moments(mean, power))
    return Law(f"enumerated policies, noise scale {law.noise_scale:.0f} prompts", law.draw, law.moments)


@dataclass(frozen=True)
class Noise:
    """Normal noise whose size differs between prompts."""

    name: str
    scale: Callable[[np.random.Generator, int], NDArray[np.floating]]  # (generator, n) → size of each prompt's [n]
    mean_square: float  # Exact mean square of the size
    directions: int = 8

    def law(self, noise_scale: float | None = None) -> Law:
        """Build the law of a fixed gradient plus this noise, of a noise scale in prompts, by default with ‖∇J‖ = 1.5.

        Row 1 shares most of RLOO's noise and shrinks the gradient to .56 of it; row 2 is unbiased and less noisy.
        """
        dim = self.directions
        gradient = np.zeros(dim)
        gradient[0] = 1.5 if noise_scale is None else np.sqrt(dim * self.mean_square / noise_scale)

        def draw(rng: np.random.Generator, n: int) -> Float:
            size = self.scale(rng, n)[:, None]
            shared, separate = size * rng.normal(size=(n, dim)), size * rng.normal(size=(n, dim))
            rloo = gradient + shared
            return np.stack([rloo, 0.56 * rloo + 0.35 * separate, gradient + 0.8 * shared + 0.3 * separate])

        mean = np.stack([gradient, 0.56 * gradient, gradient])
        noise = dim * self.mean_square * np.array([1, 0.56**2 + 0.35**2, 0.8**2 + 0.3**2])
        return Law(self.name, draw, _moments(mean, (mean**2).sum(axis=1) + noise))


def _moments(mean: Float, power: Float) -> Moments:
    along = mean @ mean[0]
    return Moments(power, (mean**2).sum(axis=1), along, np.full(len(mean), along[0]), np.full(len(mean), power[0]))


NOISES = {
    "normal": Noise("normal noise", lambda rng, n: np.ones(n), 1.0),
    "half": Noise("half the prompts without noise", lambda rng, n: rng.integers(0, 2, n) * 1.0, 0.5),
    "lognormal": Noise(
        "log-normal power, variance 6 mean²", lambda rng, n: np.exp(rng.normal(0, 0.7, n)), np.exp(0.98)
    ),
    "student": Noise(
        "power with infinite variance (tail index .5)", lambda rng, n: 2 / np.sqrt(rng.chisquare(4, n)), 2.0
    ),
    "extreme": Noise("log-normal power, variance 54 mean²", lambda rng, n: np.exp(rng.normal(0, 1, n)), np.exp(2.0)),
}
WEAK = NOISES | {"wide": replace(NOISES["normal"], name="normal noise in 100 directions", directions=100)}
"""Noises that are also measured with weaker signals."""

LAWS: dict[str, Callable[[], Law]] = {
    "quiet": lambda: enumerated(8),
    "noisy": lambda: enumerated(2),
    **{name: noise.law for name, noise in NOISES.items()},
}
