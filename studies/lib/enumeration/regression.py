"""What a regression across prompts is worth on random policies: its variance is a quadratic form of its coefficients.

With B = φ·β, ḡ = (1/N) Σ_{i,t} (G − φβ) s = a − Σ_k β_k h_k, so E‖ḡ‖² = vᵀQv with v = (1, −β) and Q the second moments
of (a, h), which enumeration gives exactly. Any β that has not seen the prompt leaves the mean at ∇J.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otb_analysis.estimators.across import coefficients
from otb_analysis.estimators.spec import FEATURES
from otb_analysis.types import Float, Int
from studies.lib.enumeration.groups import multisets
from studies.lib.enumeration.trees import Tree

PARTS = ("1", "f", "h", "x")


@dataclass(frozen=True)
class Regressed:
    """One policy's groups of N rollouts, as the regression sees them; features in the order of `FEATURES`."""

    prob: Float  # Of each group [K]
    gram: Float  # Σ w φφᵀ of each group [K, F, F]
    moment: Float  # Σ w φ R of each group [K, F]
    second: Float  # Q [1 + F, 1 + F]
    gradient_sq: float  # ‖∇J‖²

    def variance(self, names: Sequence[str], beta: Float) -> Float:
        """Return tr Cov(ḡ) under coefficients [..., len(names)] of some features."""
        at = [0, *(1 + list(FEATURES).index(name) for name in names)]
        v = np.concatenate([np.ones((*beta.shape[:-1], 1)), -beta], axis=-1)
        return np.einsum("...a,ab,...b->...", v, self.second[np.ix_(at, at)], v) - self.gradient_sq


def regressed(tree: Tree, n: int) -> Regressed:
    """Return the sums of every group of n rollouts of a policy with terminal rewards."""
    members, prob = multisets(tree, n)
    total, width = tree.total, tree.mask.shape[1]
    before = np.cumsum(tree.energy, axis=1) - tree.energy
    entropy = np.asarray(tree.entropy)
    position = np.broadcast_to(np.arange(1, width + 1) / width, tree.mask.shape)
    z = np.stack([np.ones(tree.mask.shape), before / (1 + before), entropy / (1 + entropy), position], axis=-1)
    z = z * tree.mask[:, :, None]
    inner = np.einsum("ct,cta,ctb->cab", tree.energy, z, z)
    summed = np.einsum("cta,ctd->cad", z, tree.score)
    by_token = np.array([PARTS.index(part) for _, part in FEATURES.values()])
    mean = (total[members].sum(axis=1, keepdims=True) - total[members]) / (n - 1)
    factor = np.stack([mean if part == "m" else np.ones_like(mean) for part, _ in FEATURES.values()], axis=-1)
    weighed = inner[:, by_token][:, :, by_token]
    gram = np.einsum("kia,kib,kiab->kab", factor, factor, weighed[members])
    moment = np.einsum("kia,ki,kia->ka", factor, total[members], weighed[:, 0][members])
    parts = np.einsum("kia,kiad->kad", factor, summed[:, by_token][members]) / n
    returns = np.einsum("ki,kid->kd", total[members], summed[:, 0][members]) / n
    x = np.concatenate([returns[:, None], parts], axis=1)
    return Regressed(prob, gram, moment, np.einsum("k,kad,kbd->ab", prob, x, x), float(tree.gradient @ tree.gradient))


def limit_variance(prompts: Sequence[Regressed], names: tuple[str, ...], ridge: float = 0.0) -> Float:
    """Return each prompt's variance where endless groups of all *other* prompts make the fit [P]."""
    at = [list(FEATURES).index(name) for name in names]
    gram = np.stack([np.einsum("k,kab->ab", p.prob, p.gram) for p in prompts])[:, at][:, :, at]
    moment = np.stack([p.prob @ p.moment for p in prompts])[:, at]
    beta = coefficients(gram.sum(axis=0) - gram, moment.sum(axis=0) - moment, names, ridge)
    return np.array([p.variance(names, b) for p, b in zip(prompts, beta, strict=True)])


def batch_variance(
    prompts: Sequence[Regressed], names: tuple[str, ...], ridges: Sequence[float], chosen: Int, rng: np.random.Generator
) -> Float:
    """Return the variance of each chosen prompt of a batch where one group of each of the others makes the fit.

    `chosen` [B, P] are different prompts of each batch; the first one is judged. Shape [len(ridges), B].
    """
    at = [list(FEATURES).index(name) for name in names]
    gram, moment = np.zeros((len(chosen), len(at), len(at))), np.zeros((len(chosen), len(at)))
    for b, others in enumerate(chosen[:, 1:]):
        for q in others:
            k = rng.choice(len(prompts[q].prob), p=prompts[q].prob)
            gram[b] += prompts[q].gram[k][np.ix_(at, at)]
            moment[b] += prompts[q].moment[k][at]
    betas = np.stack([coefficients(gram, moment, names, ridge) for ridge in ridges])
    return np.stack([prompts[p].variance(names, betas[:, b]) for b, p in enumerate(chosen[:, 0])], axis=1)
