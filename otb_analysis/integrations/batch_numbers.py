"""The few numbers of a generated batch that decide, from its token table and the advantages that trained on it."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from otb_analysis.arrays import zero_variance_groups
from otb_analysis.estimators import available, counting_tokens, estimate
from otb_analysis.integrations.trl_batch import GatheredBatch
from otb_analysis.measurement.table import TokenTable
from otb_analysis.measurement.worst import proxy_power
from otb_analysis.objectives.ratios import mismatch_scalars
from otb_analysis.statistics import top_share, weight_statistics
from otb_analysis.types import Float

COMPARED = ("none", "otb_loo", "sequence_optimal_loo")
"""Unbiased baselines whose power is told over that of `rloo`: their gradients have the same mean."""


def log_ratio_scalars(parts: Sequence[Mapping[str, Float]]) -> dict[str, float | None]:
    """Return rms, k3 and further numbers of raw log ratios, by what is compared; `parts` are the processes'."""
    scalars = {}
    for name in dict.fromkeys(chain.from_iterable(parts)):
        numbers = mismatch_scalars(np.concatenate([part[name] for part in parts]))
        scalars |= {f"{name}_{kind.removeprefix('mismatch_')}": value for kind, value in numbers.items()}
    return scalars


def advantages_of(whole: GatheredBatch, rows: Sequence[Float]) -> Float:
    """Return the trainer's advantages of the kept rollouts [n, T], of those of all rollouts by token, [T_i] each."""
    mask = whole.table.mask
    out = np.zeros(mask.shape)
    for i, n in enumerate(np.flatnonzero(whole.kept).tolist()):
        out[i, : len(rows[n])] = rows[n]
    return np.where(mask, out, 0.0)


def batch_scalars(whole: GatheredBatch, advantage: Float) -> dict[str, float | None]:
    """Return the numbers of rewards, lengths, proxy gradients and baselines; None where a batch does not define one.

    A token's proxy power is A²w, w = 1 − 2π_y + Σπ² its proxy energy; a rollout's or batch's is the sum over its
    tokens, without the products of different tokens. `rho` is the correlation of W_T = Σ_t w_t and reward within
    prompts: below 0 the optimal baseline lies below the mean reward, above 0 above it.
    """
    table, power = whole.table, proxy_power(whole.table, advantage)
    length, energy, total = table.mask.sum(axis=1), table.stats.energy, power.sum()
    batch = table.mask, table.total_reward, table.group
    scalars: dict[str, float | None] = {
        "dead_groups": float(zero_variance_groups(table.total_reward, table.group).mean()),
        "reward_length_corr": weight_statistics(table.mask.astype(float), *batch).pooled_total_reward_corr,
        "truncated": float(np.mean([reason == "length" for reason in whole.rollouts.finish_reason])),
        "length": float(length.mean()),
        "rho": weight_statistics(energy, *batch).pooled_total_reward_corr,
        "token_top_share": top_share(power[table.mask]),
    }
    if total > 0:
        share = np.sort(power.sum(axis=1) / total)[::-1]
        scalars["rollout_share"] = float(share[0])
        scalars["rollouts_with_half"] = float(np.searchsorted(np.cumsum(share), 0.5) + 1) / len(share)
    return scalars | power_ratios(table)


def power_ratios(table: TokenTable) -> dict[str, float | None]:
    """Return the proxy power of each baseline of `COMPARED` over that of `rloo`, None where `rloo` has none.

    They are unbiased, so a power below another means a smaller variance, as far as the proxy and its diagonal go.
    Chats of several turns count tokens, as `otb_turn_loo` does.
    """
    inputs = table.inputs(table.stats.energy)
    usable = available(inputs)
    names = {name: name if name in usable else counting_tokens(name) for name in COMPARED}
    base = float(proxy_power(table, estimate("rloo", inputs).advantage).sum())
    return {
        f"power_{name}": float(proxy_power(table, estimate(form, inputs).advantage).sum()) / base if base > 0 else None
        for name, form in names.items()
        if form in usable
    }
