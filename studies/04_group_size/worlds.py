"""In which toy world which advice wins: difficulty spread × link of energy and reward × success × prompts an update."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.types import Float
from studies.lib import Row, rounded

LATER = ("james_stein", "james_stein_corrected")
"""Advice that was added after the grid had been seen, so it stands behind all that was there but the regression."""
ADVICE: tuple[str, ...] = ("none", "rloo", "energy_across_loo", "otb_loo", *LATER, "energy_regression")
"""The simplest first. All are unbiased: variance is that at equal progress. `otb` is not, so `otb_loo` stands in."""
TIE = 0.05
"""Variance within this share of the least counts as no difference; then the simplest is the advice."""
GROUP = 4
WORLD_TOKENS = 8
"""Tokens of every answer."""


@dataclass(frozen=True)
class Worlds:
    """The grid."""

    means: tuple[float, ...] = (-2.0, 0.0, 2.0)  # Logit of the middle prompt's success
    spreads: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    links: tuple[float, ...] = (-1.5, -0.75, 0.0, 0.75, 1.5)  # Above 0 right answers have less energy
    prompts: tuple[int, ...] = (8, 16, 64)  # Of an update
    drawn: int = 2048  # Prompts of a world, cut into updates
    blocks: int = 16  # For the error


def world_rows(worlds: Worlds) -> list[Row]:
    """Return of every world and update size each advice's variance over `rloo`'s, and which advice wins."""
    rows = list[Row]()
    for number, (mean, spread, link) in enumerate(product(worlds.means, worlds.spreads, worlds.links)):
        reward, energy, entropy = toy_world(mean, spread, link, (worlds.drawn, GROUP), np.random.default_rng(number))
        terminal = np.zeros(energy.shape)
        terminal[..., -1] = reward
        for prompts in worlds.prompts:
            group, variances = np.repeat(np.arange(prompts), GROUP), []
            for at in np.split(np.arange(worlds.drawn), worlds.drawn // prompts):
                r, w, h = (x[at].reshape(len(group), -1) for x in (terminal, energy, entropy))
                inputs = EstimatorInputs(r, np.ones(r.shape, bool), group, energy=w, entropy=h)
                variances.append([(w * estimate(name, inputs).advantage ** 2).sum() for name in ADVICE])
            blocks = np.array(variances).reshape(worlds.blocks, -1, len(ADVICE)).sum(axis=1)
            without = blocks.sum(axis=0) - blocks  # the jackknife's error of each ratio
            error = np.sqrt((worlds.blocks - 1) * (without / without[:, 1:2]).var(axis=0)).max()
            ratios = dict(zip(ADVICE, (blocks.sum(axis=0) / blocks.sum(axis=0)[1]).tolist(), strict=True))
            row = {"mean": mean, "spread": spread, "link": link, "prompts": prompts}
            row |= {"success": rounded(reward.mean(), 3)} | {name: rounded(ratios[name], 3) for name in ADVICE}
            rows.append(row | {"error": rounded(error, 3), "advice": advice_of(ratios)})
    return rows


def advice_of(variance: Mapping[str, float]) -> str:
    """Return the simplest advice whose variance is within `TIE` of the least; `any` where all are."""
    near = [name for name, one in variance.items() if one <= (1 + TIE) * min(variance.values())]
    return "any" if len(near) == len(variance) else near[0]


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
