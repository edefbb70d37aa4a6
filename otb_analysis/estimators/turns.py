"""Baselines of turns: what the other rollouts of the prompt still earned from the same turn on."""

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.estimators.batch import BaselineResult, Batch, provided
from otb_analysis.estimators.spec import NoOptions
from otb_analysis.types import Bool, Float, Int


def trloo(batch: Batch, options: NoOptions) -> BaselineResult:
    """Centre by the mean return of the same turn in the other rollouts of the prompt.

    B_{i,k} = mean_{j≠i} G_{j,k} over rollouts with a turn k, G_{j,k} the return-to-go at the turn's first policy token;
    A = G − B at every token of the turn. A turn that no other rollout has keeps A = G (`fallback`). One turn and one
    terminal reward give `rloo`. Unbiased: whether a rollout has turn k is known before the turn. Public code.
    """
    row, _ = np.nonzero(batch.mask)
    _, turn = np.unique(provided(batch.turn)[batch.mask], return_inverse=True)
    n_turns = turn.max(initial=0) + 1
    # rollout_turn numbers every (rollout, turn) pair that has a token; `back` leads from tokens to these pairs
    rollout_turn, first, back = np.unique(row * n_turns + turn, return_index=True, return_inverse=True)
    at_start = batch.returns[batch.mask][first]
    peers = Groups.of(batch.groups.index[rollout_turn // n_turns] * n_turns + rollout_turn % n_turns)
    count = peers.spread(peers.count)
    mean = (peers.spread(peers.sum(at_start)) - at_start) / np.maximum(count - 1, 1)
    alone = count < 2
    return BaselineResult(_placed(batch.mask, np.where(alone, 0.0, mean)[back]), _placed(batch.mask, alone[back]) > 0)


def _placed(mask: Bool, values: Float | Bool | Int) -> Float:
    """Put one value per policy token where it belongs [N, T]."""
    out = np.zeros(mask.shape)
    out[mask] = values
    return out
