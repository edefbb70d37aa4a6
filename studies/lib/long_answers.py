"""What is measured on rollouts of any length: gradients of all their groups under every estimator, and token norms.

One backward pass a token cannot be paid for at a thousand tokens. But every estimator weighs a rollout's scores by a
row, most rows are smooth, and few directions span them: the sum of all scores, exactly, and others, until no row has
more than a share `TOLERANCE` of its length left, tokens counted by the root of their proxy energy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from otb_analysis.arrays import policy_position
from otb_analysis.config import SampleConfig, TrainConfig
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, available, with_limit
from otb_analysis.gradients import gradient_sketch
from otb_analysis.statistics import (
    Partition,
    fidelity,
    gradient_noise_scale,
    group_gradients,
    inclusion_probabilities,
    paired_ratios,
    partitions,
    pool_gram,
    pool_statistics,
    position_cells,
    systematic_sample,
)
from otb_analysis.statistics.energies import correlation, log_correlation
from otb_analysis.training.runtime import Bar
from otb_analysis.training.warm_start import fit
from otb_analysis.types import Bool, Float, Int
from studies.lib.formats import by_label, interval_columns, ratio_columns, rounded, statistics_columns
from studies.lib.policies import Policy, ScoredRollouts, different_prompts, exact_norms, write
from studies.lib.pools import in_batches, proved_of_pool, update_batches
from studies.lib.record import Cell, Gathered, Tables, keep_pickle, kept_pickle

COMPARED = (
    "none", "group_mean", "grpo", "rloo", "opo", "opo_loo", "trloo", "classic_optimal", "classic_optimal_loo",
    "sequence_optimal", "sequence_optimal_loo", "otb_turn", "otb_turn_loo", "otb_carry", "otb_carry_loo",
    "token_optimal", "token_optimal_loo", "batch_mean", "batch_mean_loo", "james_stein_corrected",
    "energy_across_loo", "energy_regression", "blend_otb_regression",
)  # fmt: skip
"""Every baseline that needs no critic and no token norms. In one turn `otb_turn` is `otb`, and `trloo` is `rloo`."""
TOLERANCE = 0.05
"""Largest share of a row's length that its directions may leave out: 0.25 % of its square."""
FLOOR = 1e-6
"""Smallest proxy energy of a token beside the rollout's largest: a sure token's is known no better."""
FIFTHS = 5
"""Parts of an answer in which its energy is counted."""
RATIOS = {"variance_ratio": "variance", "sf_ratio": "sf", "efficiency_ratio": "efficiency"}
"""Columns of the ratios to `rloo`."""
PARTS = {"bias": "relative_bias", "within": "within", "between": "between"}
"""Columns without intervals."""


PROMPTS_FROM, NORMS_FROM = 40_000_000, 50_000_000
"""Indices of the first training prompts whose gradients, and whose tokens' norms, are measured."""


@dataclass(frozen=True)
class Amount:
    """How much is measured of a policy; made by a study."""

    blocks: int = 8  # Of prompts
    rollouts: int = 16
    sizes: tuple[int, ...] = (4, 8)  # Rollouts of a group
    buckets: int = 1024  # Of a count sketch
    norm_prompts: int = 24
    positions: int = 6
    update: int = 32  # Prompts of a block: a batch-coupled estimator sees them, and efficiency is stated for them


def planned(
    label: str, known: Mapping[str, Any], how: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> list[Cell]:
    """Return what teaches a policy, what measures its tokens' norms and its groups' gradients, and what compares.

    The policy depends on `known`, what is measured of it on `how`, too; each of `parts` says which blocks a cell takes.
    """
    measured = {**known, **how, "tolerance": TOLERANCE, "compared": list(COMPARED)}
    teach = Cell(f"teach-{label}", known)
    pools = [Cell(f"pool-{label}-{k}", measured | dict(part), after=(teach,)) for k, part in enumerate(parts)]
    norms, compare = (Cell(f"{k}-{label}", measured, (teach, *of)) for k, of in (("norms", ()), ("compare", pools)))
    return [teach, norms, *pools, compare]


def teach(key: dict[str, Any], policy: Policy, config: TrainConfig, work: Path, optimizers: Any = None) -> Tables:
    """Teach a policy until its success lies in the band of its supervised start, and keep its weights."""
    began = process_time()
    steps, success = fit(policy.model, policy.tokenizer, policy.task, config, optimizers)
    keep_pickle(work, dict(policy.model.state_dict()))
    row = {"parameters": policy.model.num_parameters(), "steps": steps, "checked": success}
    return {"policies": [key | row | {"teach_seconds": rounded(process_time() - began)}]}


def proxy_of(written: ScoredRollouts) -> Float:
    """Return the forward-only energies [N, T], zero outside the mask."""
    return np.where(written.table.mask, written.table.stats.energy, 0.0)


def advantages(inputs: EstimatorInputs, cut: Partition, update: int, limit: int) -> dict[str, Float]:
    """Return advantages [N, T] on the groups of a cut; estimators that look at their batch see `update` prompts."""
    inputs, batches = replace(inputs, group=cut.group), update_batches(cut, update)[cut.group]
    names = [name for name in available(inputs) if name in COMPARED]
    return {name: in_batches(name, inputs, batches, with_limit(name, None, limit)) for name in names}


def directions_of(rows: Float, energy: Float) -> tuple[Float, Float]:
    """Return directions [r, T] that span rows of weights [M, T] well enough, and the tokens' scales [T].

    Scaled by √energy the directions are orthonormal, so a row's coefficients are (row·scale) @ (directions·scale)ᵀ.
    The first is the same at every token: rows that are, are spanned exactly.
    """
    scale = np.sqrt(np.maximum(energy, FLOOR * energy.max()))
    constant, scaled = scale / np.linalg.norm(scale), rows * scale
    length = np.linalg.norm(scaled, axis=1)
    used = length > 0
    rest = (scaled - np.outer(scaled @ constant, constant))[used] / length[used, None]
    left, values, right = np.linalg.svd(rest, full_matrices=False)
    missing = np.sqrt(np.cumsum(((left * values) ** 2)[:, ::-1], axis=1)[:, ::-1])  # without its first r directions
    rank = int((missing.max(axis=0, initial=0.0) > TOLERANCE).sum())
    return np.concatenate([constant[None], right[:rank]]) / scale, scale


def block_gradients(
    policy: Policy, written: ScoredRollouts, sizes: Sequence[int], update: int, buckets: int
) -> tuple[dict[str, Any], tuple[str, ...], float]:
    """Return sketched mean gradients [M, G, K] of all groups of N as `gN`, the M names, and a rollout's mean rank.

    Beside them as `promptN` is the prompt of each group [G].
    """
    table, proxy = written.table, proxy_of(written)
    cuts = {n: partitions(table.group, n, 1, seed=n)[0] for n in sizes}
    plain = (advantages(table.inputs(proxy), cut, update, table.limit) for cut in cuts.values())
    rows = np.concatenate([list(one.values()) for one in plain])
    at = [np.flatnonzero(mask) for mask in table.mask]
    spans = [directions_of(rows[:, n, t], proxy[n, t]) for n, t in enumerate(at)]
    ranks = [len(span) for span, _ in spans]
    weights = np.zeros((max(ranks), *table.mask.shape))
    for n, (t, (span, _)) in enumerate(zip(at, spans, strict=True)):
        weights[: len(span), n, t] = span
    ids, mask, attention = written.batch
    sketch = gradient_sketch(
        policy.model, ids, mask, written.rollouts.by_column(weights), np.arange(len(ids)), attention, dim=buckets,
        temperature=written.temperature,
    )  # fmt: skip
    # The first direction is the whole score over the length of the scales; two estimators weigh by that score's norm.
    whole = [((one[0] * np.linalg.norm(scale)) ** 2).sum() for one, (_, scale) in zip(sketch, spans, strict=True)]
    out, names = dict[str, Any](), tuple[str, ...]()
    for n, cut in cuts.items():
        every = advantages(table.inputs(proxy, np.array(whole)), cut, update, table.limit)
        names, stacked = tuple(every), np.stack(list(every.values()))
        mix = np.zeros((len(names), len(ranks), max(ranks)))
        for i, (t, (span, scale)) in enumerate(zip(at, spans, strict=True)):
            mix[:, i, : len(span)] = (stacked[:, i, t] * scale) @ (span * scale).T
        out[f"g{n}"] = group_gradients(sketch, mix, cut).astype(np.float32)
        out[f"prompt{n}"] = cut.prompt
    return out, names, float(np.mean(ranks))


def energy_facts(written: ScoredRollouts) -> dict[str, Float]:
    """Return W_T by proxy, reward and length of every rollout [N], and its energy by fifth of its tokens [N, 5]."""
    proxy, fifth, table = proxy_of(written), fifths_of(written), written.table
    parts = np.stack([np.where(fifth == k, proxy, 0.0).sum(axis=1) for k in range(FIFTHS)], axis=1)
    facts = {"energy": proxy.sum(axis=1), "reward": table.total_reward, "length": table.mask.sum(axis=1)}
    return facts | {"prompt": table.group, "fifths": parts}


def fifths_of(written: ScoredRollouts) -> Int:
    """Return the fifth of its rollout's policy tokens that each one lies in [N, T], from 0; any number elsewhere."""
    mask = written.table.mask
    return np.minimum(policy_position(mask) * FIFTHS // np.maximum(mask.sum(axis=1), 1)[:, None], FIFTHS - 1)


def drawn_cells(written: ScoredRollouts, positions: int, seed: int) -> tuple[Bool, Float]:
    """Draw positions of every prompt in proportion to its rollouts' mean proxy there; return tokens and 1/π [N, T].

    All rollouts that reach a drawn position are taken, so that they can be compared within (prompt, position).
    """
    table, proxy = written.table, proxy_of(written)
    chosen, inverse = np.zeros(table.mask.shape, bool), np.zeros(table.mask.shape)
    for group in np.unique(table.group):
        rows = table.group == group
        prob = inclusion_probabilities(proxy[rows].sum(axis=0), positions)
        drawn = systematic_sample(prob, seed + int(group))
        chosen[rows] = table.mask[rows] & drawn
        inverse[rows] = np.where(drawn, 1 / np.where(drawn, prob, 1.0), 0.0)
    return chosen, inverse


def norm_rows(policy: Policy, written: ScoredRollouts, positions: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return how well the proxy follows exact norms within (prompt, position) of drawn tokens, and energy by fifth.

    Totals of fifths are Horvitz–Thompson's from the drawn tokens; intervals are over prompts.
    """
    (chosen, inverse), table, began = drawn_cells(written, positions, seed=1), written.table, process_time()
    exact, proxy = exact_norms(policy, written, chosen), proxy_of(written)
    seconds = process_time() - began
    cells = position_cells(table.group, table.mask.shape[1])[:, :1] + policy_position(table.mask)
    pair = proxy[chosen], exact[chosen], np.broadcast_to(table.group[:, None], chosen.shape)[chosen], cells[chosen]
    agreement = fidelity(proxy, exact, chosen, cells)
    row = {"tokens": int(chosen.sum()), "norm_seconds": rounded(seconds)}
    row |= interval_columns("within", correlation(*pair)) | interval_columns("log_within", log_correlation(*pair))
    row |= {"spearman_within": agreement.within.spearman if agreement.within else None}
    fifth = fifths_of(written)
    drawn, whole = (
        np.array([float((w * inverse)[chosen & (fifth == k)].sum()) for k in range(FIFTHS)]) for w in (proxy, exact)
    )
    pairs = zip(drawn / sum(drawn), whole / sum(whole), strict=True)
    return row, [{"fifth": k, "drawn_proxy": rounded(a), "exact": rounded(b)} for k, (a, b) in enumerate(pairs, 1)]


def norms(key: dict[str, Any], policy: Policy, sample: SampleConfig, size: Amount) -> Tables:
    """Return what `norm_rows` says of rollouts that are drawn for it."""
    prompts = different_prompts(policy, NORMS_FROM, size.norm_prompts)
    row, shares = norm_rows(policy, write(policy, prompts, sample, seed=1), size.positions)
    return {"norms": [key | row], "fifths": [key | one for one in shares]}


def pooled(
    key: dict[str, Any],
    policy: Policy,
    blocks: Sequence[int],
    sample: SampleConfig,
    size: Amount,
    work: Path,
    bar: Bar,
) -> Tables:
    """Sample blocks of prompts and keep the gradients of their groups; return a row of a table for each."""
    kept, rows, update = list[Any](), list[dict[str, Any]](), size.update
    prompts = different_prompts(policy, PROMPTS_FROM, size.blocks * update)
    for done, block in enumerate(blocks, start=1):
        began = process_time()
        written = write(policy, prompts[block * update : (block + 1) * update], sample, seed=100 + block)
        sampled = process_time()
        gradients, names, rank = block_gradients(policy, written, size.sizes, update, size.buckets)
        kept.append((gradients, names, energy_facts(written)))
        seconds = {"sample_seconds": sampled - began, "gradient_seconds": process_time() - sampled}
        rows.append({**key, "block": block, "rank": rounded(rank)} | {k: rounded(v) for k, v in seconds.items()})
        bar(done, len(blocks), "gradients of groups")
    keep_pickle(work, kept)
    return {"blocks": rows}


def compared(key: dict[str, Any], parts: Sequence[Cell], size: Amount, work: Path) -> Tables:
    """Return variance, SF and efficiency of every estimator at every group size, and what the rollouts are."""
    blocks, update = [block for part in parts for block in kept_pickle(part, work)], size.update
    labels = [(name, "proxy" if ESTIMATORS[name].reads_energy else "none") for name in blocks[0][1]]
    tables = Gathered().add(key, rollouts=[rollout_facts([facts for _, _, facts in blocks], update)])
    for n in size.sizes:
        known = proved_of_pool(labels, update, n)
        measured = np.concatenate([block[f"g{n}"] for block, _, _ in blocks], axis=1)
        prompt = np.concatenate([block[f"prompt{n}"] + update * k for k, (block, _, _) in enumerate(blocks)])
        pool = pool_gram([measured], [Partition(np.repeat(np.arange(len(prompt)), n), prompt)], labels)
        gram = pool.gram()
        pairs = by_label(paired_ratios([gram], n_prompts=update, known=known))
        rows = []
        for one in pool_statistics(pool, n_prompts=update, known=known):
            pair = pairs.get((one.estimator, one.energy_source))
            row = {"estimator": one.estimator, "clusters": one.n_clusters, "c_known": one.c_known}
            row |= {name: rounded(getattr(one, of)) for name, of in PARTS.items()}
            rows.append(row | statistics_columns(one) | ratio_columns(pair, RATIOS))
        scale = gradient_noise_scale([gram], ("rloo", "none"), known)
        signal = {"prompts": gram.n_prompts} | interval_columns("noise_scale", scale)
        tables.add(key | {"size": n}, estimators=rows, signal=[signal])
    return tables


def rollout_facts(blocks: Sequence[dict[str, Any]], update: int) -> dict[str, Any]:
    """Return success, length, corr(W_T, R) within prompts, and the shares of energy by fifth of the answer."""
    joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    prompt = np.concatenate([block["prompt"] + update * k for k, block in enumerate(blocks)])
    reward, energy, fifths = joined["reward"], joined["energy"], joined["fifths"]
    mixed = [0 < reward[prompt == p].mean() < 1 for p in np.unique(prompt)]
    row = {"prompts": len(mixed), "rollouts": len(reward), "success": rounded(reward.mean())}
    lengths = joined["length"]
    row |= {"mixed": float(np.mean(mixed)), "tokens": rounded(lengths.mean()), "spread": rounded(lengths.std())}
    row |= {"energy": rounded(energy.mean())} | interval_columns("corr", correlation(energy, reward, prompt, prompt))
    for name, some in (("all", reward >= 0), ("wrong", reward < 1)):
        shares = fifths[some].sum(axis=0) / max(energy[some].sum(), 1e-300)
        row |= {f"{name}{k + 1}": rounded(share) for k, share in enumerate(shares)}
    return row
