"""Pools of rollouts measured once, token by token, so that every estimator and group size costs NumPy only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from otb_analysis.arrays import policy_position
from otb_analysis.config import MeasureConfig, SampleConfig, TrainConfig, plain_config
from otb_analysis.devices import random_forked
from otb_analysis.energies import calibrate, lm_head_energy, realized_energy
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, available, entry_of, estimate, proved, with_limit
from otb_analysis.gradients import gradient_sketch, group_gradient_gram
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import TokenTable, compute_rewards
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.statistics import (
    Partition,
    fidelity,
    group_gradients,
    inclusion_probabilities,
    mean_over_subgroups,
    partitions,
    position_cells,
    realized_fidelity,
    systematic_sample,
    weight_statistics,
)
from otb_analysis.statistics.energies import correlation, log_correlation
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.critic import explained_variance
from otb_analysis.training.runtime import Bar, silent
from otb_analysis.training.setup import Trainer, seed_of
from otb_analysis.types import Bool, Float, Gram, Int, Label, Proved
from studies.lib.formats import interval_columns, rounded
from studies.lib.policies import Policy, ScoredRollouts, different_prompts, write
from studies.lib.record import Cell, kept_file

REFERENCE: Label = ("rloo", "none")


@dataclass(frozen=True)
class Pool:
    """Rollouts of several prompts with the score of every token as a count sketch; measured by `measured_tokens`."""

    written: ScoredRollouts
    inputs: EstimatorInputs  # With exact energies and rollout norms; group = prompt
    proxy: Float  # Logit-space energies [N, T]
    sketch: NDArray[np.float32]  # Sketches of the distinct scores [U, K]
    node: Int  # Row of `sketch` of each token [N, T], 0 outside the mask

    @classmethod
    def from_norms(
        cls, written: ScoredRollouts, exact: Float, whole: Float, sketch: NDArray[np.float32], node: Int
    ) -> "Pool":
        """Return the pool of rollouts with exact norms of tokens [N, T] and rollouts [N], and sketches of scores."""
        proxy = np.where(written.table.mask, written.table.stats.energy, 0.0)
        return cls(written, written.table.inputs(np.nan_to_num(exact), whole), proxy, sketch, node)

    def facts(self) -> dict[str, Any]:
        """Return what the rollouts are: success, tokens, corr(W_T, R) within prompts, and what a critic explains."""
        table = self.written.table
        assert self.inputs.energy is not None
        weights = weight_statistics(self.inputs.energy, table.mask, table.total_reward, table.group)
        prompts = len(self.written.rollouts.prompts)
        return {
            "prompts": prompts, "rollouts": len(table.group) // prompts, "tokens": int(table.mask.sum()),
            "distinct_tokens": len(self.sketch), "success": float(table.total_reward.mean()),
            "explained": rounded(explained_variance(table)), "corr": rounded(weights.pooled_total_reward_corr),
        }  # fmt: skip

    def features(self, rows: Int) -> NDArray[np.float32]:
        """Return the sketched scores of some rollouts, as wide as the longest [n, t, K], zero outside the mask."""
        inside = self.inputs.mask[rows]
        width = int(inside.sum(axis=1).max(initial=0))
        return self.sketch[self.node[rows, :width]] * inside[:, :width, None].astype(np.float32)


def promising_prompts(policy: Policy, first: int, count: int, config: SampleConfig, seed: int) -> list[Prompt]:
    """Return prompts that a pilot of independent rollouts answers rightly sometimes, and sometimes not.

    Elsewhere every estimator but those without a baseline gives 0. Four times as many candidates as are wanted are
    tried, from index `first` of the training split, each with `config.group_size` pilot rollouts. Those are not used
    again, so that the choice of prompts does not touch what is measured on them.

    Raises:
        InputError: Too few candidates qualify.
    """
    distinct = different_prompts(policy, first, 4 * count, among=4 * count)
    paid = write(policy, distinct, config, seed).table.total_reward.reshape(len(distinct), -1)
    chosen = [prompt for prompt, one in zip(distinct, paid, strict=True) if np.ptp(one) > 0][:count]
    if len(chosen) < count:
        there = f"{len(chosen)} of {len(distinct)} prompts are answered rightly sometimes"
        raise InputError(f"{there} but {count} are wanted; start from another success rate.")
    return chosen


def measured_tokens(
    policy: Policy, written: ScoredRollouts, groups: Int, dim: int, bar: Bar = silent
) -> dict[str, Any]:
    """Return what `Pool.from_norms` takes of some prompts beside the rollouts: exact norms, sketches in `dim` buckets.

    A group is all rollouts of a prompt. With a critic's values in its table `value` and `tvm` are measured too. B* is
    not: from half a pool it is noisier than what it is compared with (studies/LOG.md).
    """
    rows, temperature = np.isin(written.rollouts.group, groups), written.temperature
    norms = GradientMeasurer(policy.model, MeasureConfig(), temperature).norms(written.rollouts, groups)
    sketch, node = token_sketches(policy.model, written.rollouts.take(np.flatnonzero(rows)), temperature, dim, bar)
    wide = np.pad(node, ((0, 0), (0, written.table.mask.shape[1] - node.shape[1])))
    return {"exact": norms.norm_sq[rows], "whole": norms.rollout_norm_sq[rows], "sketch": sketch, "node": wide}


def load_pool(written: ScoredRollouts, cells: Sequence[Cell], work: Path) -> tuple[Pool, dict[str, Any]]:
    """Return the pool of rollouts that cells measured, each a block of prompts, and what else they kept [N, …].

    A block kept exact norms, sketches and the numbers of its own tokens; `work` is the directory of the cell that asks.

    Raises:
        StoreError: A block is missing.
    """
    parts = [dict(np.load(kept_file(cell, work))) for cell in cells]
    first = np.cumsum([0, *(len(part["sketch"]) for part in parts)])
    for part, start in zip(parts, first[:-1], strict=True):
        part["node"] = part["node"] + start
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    exact, whole, sketch, node = (joined.pop(name) for name in ("exact", "whole", "sketch", "node"))
    return Pool.from_norms(written, exact, whole, sketch, np.where(written.table.mask, node, 0)), joined


def token_sketches(
    model: PreTrainedModel, rollouts: Rollouts, temperature: float, dim: int, bar: Bar = silent
) -> tuple[NDArray[np.float32], Int]:
    """Return count sketches of all distinct scores [U, K] and the one of each token [N, T], 0 outside the mask.

    Tokens with the same prefix have the same score, so each is sketched once: one backward pass per distinct token.
    """
    node, first = distinct_tokens(rollouts.input_ids, rollouts.mask)
    sketch = np.zeros((int(node.max(initial=0)) + 1, dim), np.float32)
    for group in np.unique(rollouts.group):
        chosen = first.any(axis=1) & (rollouts.group == group)
        rows = np.flatnonzero(chosen)
        at = [np.flatnonzero(first[n]) for n in rows]
        weights = np.zeros((len(rows), max(map(len, at), default=0), first.shape[1]))
        for weight, columns in zip(weights, at, strict=True):
            weight[np.arange(len(columns)), columns] = 1.0
        ids, mask, attention = rollouts.tensors(model.device, chosen)
        sketches = gradient_sketch(
            model, ids, mask, weights, np.arange(len(rows)), attention, dim=dim, temperature=temperature
        )  # a cluster for each rollout, and a row for each of its tokens
        for n, columns, rollout in zip(rows, at, sketches, strict=True):
            sketch[node[n, columns]] = rollout[: len(columns)]
        bar(int(group) + 1, len(rollouts.prompts), "sketching scores")
    return sketch, np.where(rollouts.policy_tokens(), rollouts.by_token(node), 0)


def distinct_tokens(ids: Int, mask: Bool) -> tuple[Int, Bool]:
    """Number tokens so that those with the same prefix and value share a number, and tell where each is met first.

    Token ids [N, L] are padded on the right; the mask [N, L] is true at policy tokens.

    Returns:
        Number of each policy token from 0, 0 elsewhere [N, L], and True where a number is new [N, L].
    """
    node, first, seen = np.zeros(ids.shape, np.int64), np.zeros(ids.shape, bool), {}
    for n, row in enumerate(ids.tolist()):
        for k in np.flatnonzero(mask[n]).tolist():
            prefix = tuple(row[: k + 1])
            first[n, k] = prefix not in seen
            node[n, k] = seen.setdefault(prefix, len(seen))
    return node, first


def every_estimate(pool: Pool, cut: Partition, batch: int | None = None) -> dict[Label, Float]:
    """Return advantages [N, T] of every estimator whose inputs exist, on the groups of one cut.

    Estimators that weigh by energies run with exact norms and with the proxy. Those that couple prompts see batches of
    one group per prompt, as a training step would hold them: `batch` prompts each, by default all. What such an
    estimator is worth depends on it, so give the prompts of the update that it is quoted for.
    """
    exact, batches = replace(pool.inputs, group=cut.group), update_batches(cut, batch)[cut.group]
    sources, advantages = {"exact": exact, "proxy": replace(exact, energy=pool.proxy)}, dict[Label, Float]()
    for name in available(exact):
        options = with_limit(name, None, pool.written.table.limit)
        chosen = sources if ESTIMATORS[name].reads_energy else {"none": exact}
        for source, inputs in chosen.items():
            advantages[name, source] = in_batches(name, inputs, batches, options)
    return advantages


def turns(cut: Partition) -> Int:
    """Return of each group whether it is the first, second … of its prompt [G]: groups of one turn make a batch."""
    return np.arange(cut.prompt.size) - np.searchsorted(cut.prompt, np.arange(cut.prompt.max() + 1))[cut.prompt]


def update_batches(cut: Partition, prompts: int | None = None) -> Int:
    """Return the batch of each group [G]: one group of each of at least so many prompts, by default of all.

    The groups of one turn are divided evenly into as many batches as they fill, always with the same prompts together:
    those come in random order.
    """
    n_prompts = int(cut.prompt.max()) + 1
    n_batches = max(n_prompts // (prompts or n_prompts), 1)
    return turns(cut) * n_batches + cut.prompt * n_batches // n_prompts


def in_batches(name: str, inputs: EstimatorInputs, batch: Int, options: Any) -> Float:
    """Return advantages [N, T] of an estimator; one that couples prompts sees one batch [N] at a time."""
    if not entry_of(name).batch_coupled:
        return estimate(name, inputs, options).advantage
    needs = ("reward", "mask", "group", *entry_of(name).needed(options))
    out = np.zeros(inputs.mask.shape)
    for k in np.unique(batch):
        rows = np.flatnonzero(batch == k)
        part = EstimatorInputs(**{need: getattr(inputs, need)[rows] for need in needs})
        out[rows] = estimate(name, part, options).advantage
    return out


def cuts_of(group: Int, size: int, shuffles: int, seed: int) -> list[Partition]:
    """Return cuts of every prompt's rollouts into groups of one size; where that is the whole pool, the only one."""
    if (np.bincount(group) == size).all():
        return [Partition(group, np.arange(group.max() + 1))]
    return partitions(group, size, shuffles, seed=seed)


def gram_of_prompts(
    pool: Pool,
    size: int,
    shuffles: int = 1,
    seed: int = 0,
    estimates: Callable[[Pool, Partition], dict[Label, Float]] = every_estimate,
) -> Gram:
    """Return the Gram matrix of all estimators in groups of one size, a row per prompt, as a training step has it.

    It takes no two groups of a prompt, which `pool_grams` does: the group may be the whole pool. Smaller groups are cut
    from it, and products are averaged over cuts; `statistics.mean_over_subgroups` says what is on the diagonal.
    """
    total, labels, prompts = np.zeros(()), list[Label](), int(pool.inputs.group.max()) + 1
    cuts = cuts_of(pool.inputs.group, size, shuffles, seed)
    for cut in cuts:
        advantages = estimates(pool, cut)
        labels = list(advantages)
        # Mean gradient of every group [M, G, K], prompt by prompt; float32, as the sketches are
        gradients = np.zeros((len(labels), cut.prompt.size, pool.sketch.shape[1]), np.float32)
        for prompt in range(prompts):
            groups = np.flatnonzero(cut.prompt == prompt)
            rows = np.flatnonzero(np.isin(cut.group, groups))
            part = Partition(cut.group[rows] - groups[0], np.zeros(groups.size, np.int64))
            features = pool.features(rows)
            weights = np.stack([advantages[label][rows, : features.shape[1]] for label in labels])
            gradients[:, groups] = group_gradients(features, weights, part)
        shape, flat = gradients.shape[:2], gradients.reshape(len(labels) * cut.prompt.size, -1)
        inner = np.asarray(flat @ flat.T, dtype=float).reshape(*shape, *shape).transpose(0, 2, 1, 3)
        total = total + mean_over_subgroups(inner, cut.prompt.size // prompts) / len(cuts)
    names = tuple(prompt.id for prompt in pool.written.rollouts.prompts)
    return Gram(total, tuple(labels), len(pool.inputs.group), names)


def proved_of_pool(labels: Iterable[Label], prompts: int, size: int) -> Proved:
    """Return what is proved of estimators on a pool; those that couple prompts saw batches of `prompts` groups.

    A pool is drawn as training draws by default: plain sampling from the scored policy, nothing left out by its
    outcome. So the conditions of the registry are met (`estimators.unproved_because`), and c = 1 for unbiased entries.
    """
    return proved(labels, plain_config(TrainConfig(sample=SampleConfig(prompts=prompts, group_size=size))))


PROMPTS_FROM = 1_000_000
"""Index of the first training prompt that is measured: far beyond those trained on."""


def prompt_gram(
    model: PreTrainedModel, rollouts: Rollouts, coefficient: Mapping[Label, Float], temperature: float = 1.0
) -> Gram:
    """Return ⟨ḡ_{m,p}, ḡ_{m',q}⟩ of mean group gradients of the log-probability, m over the labels.

    ḡ_{m,p} = (1/N_p) Σ_{n in p} Σ_t c_{m,n,t} ∇θ log π(y_{n,t}), θ all parameters that require grad; no other factor.
    Groups of one prompt are one cluster.

    Args:
        coefficient: Label → c [N, T].
    """
    weights = np.stack(list(coefficient.values())) / np.bincount(rollouts.group)[rollouts.group][:, None]
    ids, mask, attention = rollouts.tensors(model.device)
    inner = group_gradient_gram(
        model, ids, mask, rollouts.by_column(weights), rollouts.group, attention, temperature=temperature
    )
    return Gram(inner, tuple(coefficient), len(rollouts.group), prompt=tuple(p.id for p in rollouts.prompts))


def drawn_groups(
    trainer: Trainer, n_prompts: int, group_size: int, seed: int = 1, start: int = PROMPTS_FROM
) -> Rollouts:
    """Sample groups of rollouts of training prompts `start` … from the trainer's policy as it is now.

    The trainer's random state is left alone.
    """
    prompts = draw_prompts(trainer.task, "train", start, n_prompts)
    settings = replace(trainer.config.sample, prompts=n_prompts, group_size=group_size)
    with random_forked(trainer.model.device):
        torch.manual_seed(seed_of(trainer.config.seed, seed))
        return sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, settings)


def pooled_grams(
    trainer: Trainer, prompts: int, rollouts: int, sizes: Sequence[int], labels: Sequence[Label]
) -> tuple[Rollouts, TokenTable, dict[int, Gram]]:
    """Return groups drawn from the trainer's policy, their token table, and the Gram matrix in groups of each size.

    Estimators that read energies have the proxy.
    """
    drawn = drawn_groups(trainer, prompts, rollouts)
    forward = trainer.policy.forward(drawn, keep_graph=False)
    table = trainer.table(compute_rewards(trainer.task, drawn), forward, None)
    whole, grams = table.inputs(table.stats.energy), dict[int, Gram]()
    for size in sizes:
        cut = regrouped(drawn, size)
        inputs = replace(whole, group=cut.group)
        advantages = {k: estimate(k[0], inputs, with_limit(k[0], None, table.limit)).advantage for k in labels}
        grams[size] = prompt_gram(trainer.model, cut, advantages)
    return drawn, table, grams


def regrouped(rollouts: Rollouts, size: int) -> Rollouts:
    """Return the same rollouts in smaller groups: each prompt's are cut into disjoint ones of equal size.

    The rollouts come group by group, as `sample` returns them.

    Raises:
        InputError: The present groups do not divide.
    """
    count = np.bincount(rollouts.group)
    if (count % size).any() or (np.diff(rollouts.group) < 0).any():
        raise InputError(f"groups have {np.unique(count)} rollouts; cut them into parts of a divisor, not of {size}.")
    prompts: list[Prompt] = [p for p, n in zip(rollouts.prompts, count, strict=True) for _ in range(n // size)]
    return replace(rollouts, prompts=tuple(prompts), group=np.arange(len(rollouts.group)) // size)


def energies_beside(written: ScoredRollouts, exact: Float, share: float, seed: int) -> dict[str, Float]:
    """Return exact energies [N, T] with those that stand in for them and need no further backward pass, by name.

    `calibrated` is the proxy calibrated on a share of the tokens, drawn by the proxy as the level `sampled` does it.
    """
    mask, stats = written.table.mask, written.table.stats
    known = stats.energy, 0.0 if stats.hidden_norm_sq is None else stats.hidden_norm_sq
    proxy, hidden = (np.where(mask, x, 0.0) for x in known)
    prob, drawn = np.full(mask.shape, np.nan), np.zeros(mask.shape, bool)
    prob[mask] = inclusion_probabilities(proxy[mask], round(share * int(mask.sum())))
    drawn[mask] = systematic_sample(prob[mask], seed)
    calibrated = calibrate(np.where(drawn, exact, np.nan), proxy, prob).predict(proxy)
    last = lm_head_energy(proxy, hidden, written.temperature)
    return {"exact": exact, "proxy": proxy, "calibrated": calibrated, "lm_head": last}


def agreement_rows(table: TokenTable, energies: Mapping[str, Float], sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return correlations of each source with `exact`, of w_t and of W_t, pooled and within (prompt, position)."""
    rows, mask = [], table.mask
    cells = position_cells(table.group, mask.shape[1])[:, :1] + policy_position(mask)
    prompt = np.broadcast_to(table.group[:, None], mask.shape)[mask]
    for source, of in product(sources, ("w", "W")):
        pair = energies[source], energies["exact"]
        x, y = (one[mask] if of == "w" else realized_energy(one, mask)[mask] for one in pair)
        agree = fidelity(*pair, mask, cells) if of == "w" else realized_fidelity(*pair, mask, table.group)
        row: dict[str, Any] = {"source": source, "of": of}
        for prefix, corr in (("", correlation), ("log_", log_correlation)):
            row |= interval_columns(f"{prefix}pooled", corr(x, y, prompt))
            row |= interval_columns(f"{prefix}within", corr(x, y, prompt, cells[mask]))
        row |= {"positive": float(np.mean((x > 0) & (y > 0))), "spearman": agree.pooled.spearman}
        rows.append(row | {"spearman_within": agree.within.spearman if agree.within else None})
    return rows
