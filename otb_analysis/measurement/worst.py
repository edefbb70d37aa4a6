"""The tokens and rollouts of a batch that hold most of its gradient, as far as the proxy goes: tables for trackers."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from otb_analysis.measurement.table import TokenTable, token_texts
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Float

TOKENS, ROLLOUTS = 10, 3
"""Rows of the two tables."""


def proxy_power(table: TokenTable, advantage: Float) -> Float:
    """Return A²w of every token [N, T], w = 1 − 2π_y + Σπ² its proxy energy; 0 outside the mask."""
    return np.where(table.mask, advantage**2 * table.stats.energy, 0.0)


def worst_tables(
    rollouts: Rollouts, table: TokenTable, advantage: Float, tokenizer: PreTrainedTokenizerBase
) -> dict[str, dict[str, object]]:
    """Return the columns of `tokens` and `rollouts`, those with most of the batch's proxy power; {} where it has none.

    Soft tokens have no text of their own, and give no tables either.
    """
    power = proxy_power(table, advantage)
    if table.soft is not None or not power.sum() > 0:
        return {}
    power = power / power.sum()
    n, t = np.unravel_index(np.argsort(-power, axis=None)[:TOKENS], power.shape)
    tokens = {
        "rollout": n, "position": t, "token": token_texts(tokenizer, table.token_id[n, t].tolist()),
        "probability": np.exp(table.stats.logprob[n, t]), "entropy": table.stats.entropy[n, t],
        "advantage": advantage[n, t], "share": power[n, t],
    }  # fmt: skip
    rows = np.argsort(-power.sum(axis=1))[:ROLLOUTS]
    texts = {
        "rollout": rows, "prompt": [rollouts.prompts[g].text for g in table.group[rows].tolist()],
        "completion": ["\n".join(turn.text for turn in rollouts.turns[i]) for i in rows.tolist()],
        "reward": table.total_reward[rows], "length": table.mask[rows].sum(axis=1),
        "share": power[rows].sum(axis=1),
    }  # fmt: skip
    return {"tokens": tokens, "rollouts": texts}
