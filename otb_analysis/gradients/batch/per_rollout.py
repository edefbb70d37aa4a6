"""The loop that every exact engine runs: take one rollout's scores apart, write their norms to their places."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.phases import counted
from otb_analysis.types import Bool, Float

Apart = TypeVar("Apart")


@dataclass(frozen=True)
class Asked:
    """Which norms of a batch's scores are wanted."""

    tokens: Bool  # Tokens whose ‖s_t‖² are [N, L]
    weights: Float  # Rows of weights whose ‖Σ_t w_t s_t‖² are [N, M, L]
    path: bool = False  # Whether ‖Σ_{j≤t} s_j‖² are too; then `tokens` are all that were sampled

    @classmethod
    def of_tokens(cls, batch: ScoreBatch, path: bool = False) -> "Asked":
        """Ask for every sampled token of a batch, and for no sums."""
        return cls(batch.mask, np.zeros((batch.shape[0], 0, batch.shape[1])), path)


@dataclass(frozen=True)
class Norms:
    """What an engine found, zero where nothing was asked."""

    logprob: Float  # In nats [N, L]
    norm_sq: Float  # [N, L]
    path_norm_sq: Float  # [N, L]
    weighted: Float  # [N, M]


def norms_of(
    batch: ScoreBatch,
    asked: Asked,
    take_apart: Callable[[Rollout], Apart],
    of_tokens: Callable[[Apart, int, bool], tuple[Tensor, Tensor, Tensor]],
    of_rows: Callable[[Apart, Tensor], Tensor],
) -> Norms:
    """Measure every rollout; both questions about it are answered from what `take_apart` makes of it, once.

    Args:
        of_tokens: What of a rollout, the first of its K sampled tokens to be measured, whether path norms are wanted →
            log-probabilities, squared score norms and squared path norms from that token on, each [≤ K].
        of_rows: What of a rollout and R rows of weights [R, K], float64 → squared norms of the weighted sums [R].
    """
    logprob, norm_sq, path_norm_sq = by_token = [np.zeros(batch.shape) for _ in range(3)]
    weighted = np.zeros(asked.weights.shape[:2])
    for rollout in counted(batch.rollouts, "rollout"):
        wanted = np.flatnonzero(asked.tokens[rollout.row, rollout.columns])
        rows = asked.weights[rollout.row][:, rollout.columns]
        active = np.flatnonzero(rows.any(-1))
        if not len(wanted) and not len(active):
            continue
        apart = take_apart(rollout)
        if len(wanted):
            # Tokens that another rollout stands for come first: their texts are the beginning of this one's.
            first = int(wanted[0])
            for result, values in zip(by_token, of_tokens(apart, first, asked.path), strict=True):
                result[rollout.row, rollout.columns[first:]] = values.detach().double().cpu().numpy()
        if len(active):
            weighted[rollout.row, active] = of_rows(apart, torch.from_numpy(rows[active])).cpu().numpy()
    return Norms(logprob, norm_sq, path_norm_sq, weighted)
