"""The loops that every exact engine runs: measure one rollout, write its numbers to their places."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.phases import counted
from otb_analysis.types import Float, ScoreNorms

TokenMeasure = Callable[[Rollout], tuple[Tensor, Tensor, Tensor]]
"""A rollout → log-probabilities, squared score norms and squared path norms of its sampled tokens, each [K]."""
RowMeasure = Callable[[Rollout, Tensor], Tensor]
"""A rollout and R rows of weights [R, K], float64 → squared norms of the weighted sums of its scores [R]."""


def norms_of_tokens(batch: ScoreBatch, engine: str, path: bool, measure: TokenMeasure) -> ScoreNorms:
    """Measure every rollout; path norms are left out unless `path`."""
    logprob, norm_sq, path_norm_sq = results = [np.zeros(batch.shape) for _ in range(3)]
    for rollout in counted(batch.rollouts, "rollout"):
        for result, values in zip(results, measure(rollout), strict=True):
            result[rollout.row, rollout.columns] = values.detach().double().cpu().numpy()
    return ScoreNorms(norm_sq, logprob, engine, path_norm_sq if path else None)


def norms_of_rows(batch: ScoreBatch, weights: Float, measure: RowMeasure) -> Float:
    """Measure every rollout's rows of weights [N, M, L] that are not all zero; the norms of the others are zero."""
    result = np.zeros(weights.shape[:2])
    for rollout in counted(batch.rollouts, "rollout"):
        rows = weights[rollout.row][:, rollout.columns]
        active = np.flatnonzero(rows.any(-1))
        if len(active):
            result[rollout.row, active] = measure(rollout, torch.from_numpy(rows[active])).cpu().numpy()
    return result
