"""Toy worlds: rewards, energies and entropies drawn without a model, whose difficulty and link to energy are set."""

import numpy as np

from otb_analysis.types import Float

WORLD_TOKENS = 8
"""Tokens of every answer."""


def toy_world(
    mean: float, spread: float, link: float, shape: tuple[int, int], random: np.random.Generator
) -> tuple[Float, Float, Float]:
    """Return rewards 0 or 1 of N rollouts of P prompts [P, N], their energies and entropies [P, N, T].

    A prompt's success is σ(mean + spread·z) with z normal, energies are log-normal, and e^−link times as large in right
    answers. Scores are independent in direction, so ∇J is 0: Σ w A² is the variance of Σ A s.
    """
    success = 1 / (1 + np.exp(-mean - spread * random.standard_normal((shape[0], 1))))
    total = (random.random(shape) < success).astype(float)
    energy = random.lognormal(size=(*shape, WORLD_TOKENS)) * np.exp(-link * total)[..., None]
    return total, energy, random.random(energy.shape)
