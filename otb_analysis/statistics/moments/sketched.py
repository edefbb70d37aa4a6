"""What sketching gradients adds to the error of a variance.

With one sketch [dim] per prompt and estimator, from weights that hold 1/N_p, the products
G[m, m', p, p'] = ⟨sketch_{p,m}, sketch_{p',m'}⟩ are unbiased for ⟨ḡ_{m,p}, ḡ_{m',p'}⟩ over seeds, the diagonal
included, and so are power, batch variance and every U-statistic. `gradient_statistics` takes them as they are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.types import Float


@dataclass(frozen=True)
class SketchNoise:
    """Standard errors that sketching adds, given the gradients, without the sampling error of prompts and rollouts."""

    variance: Float  # Of the batch variance of each of M estimators [M], in its unit
    log_ratio: Float  # Of log(V_m/V_m') [M, M], zero on the diagonal; NaN where a variance is not positive


def sketch_noise(gram: ArrayLike, dim: int) -> SketchNoise:
    """How far batch variances from sketches lie from those of the gradients themselves; NaN below two prompts.

    V_m = tr K_mm with K_mm' = H G_mm' H/(P(P−1)), H the centring matrix. A count sketch estimates any trace
    ⟨A, G⟩ = tr Q with variance at most 2‖Q‖²/dim, hence SE(V_m)² ≤ 2 tr(K_mm²)/dim and, to first order,
    SE(log V_m/V_m')² ≤ (2/dim)[tr(K_mm²)/V_m² + tr(K_m'm'²)/V_m'² − 2 tr(K_mm' K_m'm)/(V_m V_m')]. It falls with the
    number of independent directions: with one prompt pair SE(V) = V √(2/dim), with P orthogonal gradients of one norm
    √(P−1) times less. Estimators that share their rollouts share the sketch's noise, and a ratio keeps what they do not
    share. With a matrix that is itself from sketches, traces of squares come out larger by about (tr K)²/dim.

    Source: the variance of feature hashing (Weinberger et al., 2009) applied to a quadratic form; checked over seeds.
    """
    inner = np.asarray(gram, dtype=float)
    prompts = inner.shape[-1]
    if prompts < 2:
        missing = np.full(len(inner), np.nan)
        return SketchNoise(missing, np.full(inner.shape[:2], np.nan))
    # H G H from both sides: the variance is around the mean of the prompts.
    centred = inner - inner.mean(-1, keepdims=True)
    centred = (centred - centred.mean(-2, keepdims=True)) / (prompts * (prompts - 1))
    squares = np.einsum("mnpq,mnpq->mn", centred, centred)  # tr(K_mn K_nm), since K_nm = K_mnᵀ
    self_products, variance = np.diag(squares), np.einsum("mmpp->m", centred)
    # A sketched variance can come out negative, and has no logarithm then.
    v = np.where(variance > 0, variance, np.nan)
    spread = self_products / v**2
    shared = squares / np.multiply.outer(v, v)
    log_ratio = np.sqrt(np.maximum(spread[:, None] + spread - 2 * shared, 0.0) * 2 / dim)
    return SketchNoise(np.sqrt(2 * self_products / dim), log_ratio)
