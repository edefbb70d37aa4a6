"""The Gram matrix of group gradients at the price of the weights' rank, in one round of passes over the model."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from otb_analysis.errors import ExchangeError
from otb_analysis.gradients.batch.forward import (
    Tree,
    layout_of,
    packing_pays,
    padded,
    sampled_logprobs,
    sampled_nodes,
    tree_of,
)
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch, free_bytes, gibibytes
from otb_analysis.gradients.batch.kernels import plain_kernels
from otb_analysis.gradients.batch.scope import end_of
from otb_analysis.gradients.exact import reference
from otb_analysis.gradients.exact.gram import add_products, flat_norm_sq, refuse_many
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.reference import prompt_weights
from otb_analysis.gradients.exact.verdicts import Verdicts, disagreement, first_told, probe, reference_norms
from otb_analysis.gradients.groups.blocks import BlockStructure, structure_of
from otb_analysis.gradients.groups.layered import Gradients, Layered, hold
from otb_analysis.gradients.groups.vocabulary import Extent
from otb_analysis.phases import count_to, note
from otb_analysis.processes import SINGLE_PROCESS, Processes, exchanging
from otb_analysis.types import Float, Int

TOLERANCE = 1e-8
"""How far a row may be from what its basis gives, as a share of the row's own length."""
FLOOR = 1e-6
"""Smallest scale of a token beside the largest: what a sure token's score is known to."""


@dataclass(frozen=True)
class Basis:
    """weights = mix @ rows, up to TOLERANCE of each row."""

    rows: Float  # Basis rows [r, K], orthogonal in the metric of the tokens' scales
    mix: Float  # Coefficients [M, r]


def basis_of(weights: Float, scale: Float) -> Basis:
    """Factor M rows of weights over K tokens, with the smallest rank that leaves no row more than TOLERANCE away.

    `scale` [K] is what ‖s_k‖ is roughly proportional to, such as 1 − π_k; not negative.
    """
    # A row's gradient is Σ_k weights[m, k] s_k, so an error in a weight counts by ‖s_k‖: distances are taken in the
    # metric of the scales. A scale of 0 would let any weight go lost, hence the floor.
    metric = np.maximum(scale, FLOOR * scale.max(initial=0.0))
    scaled = weights * np.where(metric > 0, metric, 1.0)
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    used = length[:, 0] > 0
    if not used.any():
        return Basis(np.zeros((0, weights.shape[1])), np.zeros((len(weights), 0)))
    # Rows of length 1: the rank must not depend on how large an estimator's weights are.
    left, values, right = np.linalg.svd(scaled[used] / length[used], full_matrices=False)
    mixed = left * values
    missing = np.sqrt(np.cumsum((mixed**2)[:, ::-1], axis=1)[:, ::-1])  # [m, r]: row m without its first r directions
    rank = int((missing.max(axis=0) > TOLERANCE).sum())
    mix = np.zeros((len(weights), rank))
    mix[used] = length[used] * mixed[:, :rank]
    # Back from the metric, which is 1 where no token has a scale.
    return Basis(right[:rank] / np.where(metric > 0, metric, 1.0), mix)


_log = logging.getLogger(__name__)
T = TypeVar("T")
EXCHANGED = 1 << 24
"""Bytes of gradients that processes exchange at a time."""
BLOCK_COPIES = 4
"""What a pass through one block takes, in graphs of the block: the graph, its gradients, signals on their way."""
MASKED = 1 << 13
"""Entries of a mask in the room of one position."""
_CHECKED = Verdicts[None]()


@dataclass
class PromptRows:
    """A prompt's rollouts that hold a sampled token, or some of them, and a basis of their weights once it is found."""

    place: int  # Of the prompt, in the order of the group's sorted distinct values
    rollouts: tuple[Rollout, ...]
    weights: Float  # Side by side [M, Σ K]
    tree: Tree
    basis: Basis

    def rows(self, logprob: Tensor) -> Tensor:
        """Find the basis, unless it is known, and return its rows [r, Σ K]."""
        if len(self.basis.rows):
            return torch.from_numpy(self.basis.rows).to(logprob.device)
        # Tokens sampled after the same text have one score: the first of them carries the sum of their weights.
        _, first, same = np.unique(sampled_nodes(self.rollouts, self.tree), return_index=True, return_inverse=True)
        summed = np.zeros((len(first), len(self.weights)))
        np.add.at(summed, same, self.weights.T)
        # The norm of a token's score goes roughly with 1 − π.
        basis = basis_of(summed.T, -np.expm1(logprob.double().cpu().numpy()[first]))
        rows = np.zeros((len(basis.rows), self.weights.shape[1]))
        rows[:, first] = basis.rows
        self.basis = Basis(rows, basis.mix)
        return torch.from_numpy(rows).to(logprob.device)

    def signals(self, width: int) -> int:
        """Numbers that the signals of all rows take at a block's output and at its input, of so many a position."""
        return 2 * width * int(np.linalg.matrix_rank(self.weights)) * sum(r.length for r in self.rollouts)

    def cut(self) -> "list[PromptRows]":
        """Every rollout by itself, with a basis of its own: a prompt's gradient is the sum of theirs."""
        ends = np.cumsum([len(r.columns) for r in self.rollouts])
        weights = np.split(self.weights, ends[:-1], axis=1)
        return [_unmeasured(self.place, (r,), w) for r, w in zip(self.rollouts, weights, strict=True) if w.any()]

    def passes(self, most: int) -> list[tuple[Rollout, ...]]:
        """Cut the rollouts, in their order, into passes of at most so many positions; a longer one is alone.

        One pass where a packed row of so many holds all of them; its mask takes as much as the layers.
        """
        nodes = len(self.tree.read)
        if packing_pays(self.tree) and nodes <= most and nodes**2 <= MASKED * most:
            return [self.rollouts]
        passes: list[tuple[Rollout, ...]] = [()]
        for rollout in self.rollouts:
            wider = (*passes[-1], rollout)
            if passes[-1] and len(wider) * max(r.length for r in wider) > most:
                passes.append((rollout,))
            else:
                passes[-1] = wider
        return passes


def group_gradient_gram(batch: ScoreBatch, weights: Float, group: Int, processes: Processes = SINGLE_PROCESS) -> Float:
    """Gram matrix [M, M, P, P] from the gradients of each prompt's basis rows; all else is algebra in float64.

    A model of blocks is measured block by block (`layered`). Another one has its basis' gradients formed whole by
    `reference`, in as many rounds as their memory takes.

    Signals that do not fit in memory go back in rounds: parts of the batch, each of whole prompts or of some of a
    prompt's rollouts, run two by two. Which way a model takes is said once.

    Several processes share out the prompts; where the model is not measured block by block, the first does all.
    """
    prompts = prompts_of(batch, weights, group)
    refuse_many(sum(int(p.weights.any(-1).sum()) for p in prompts))
    shape = len(prompts), weights.shape[1]
    try:
        total, mixes, rounds = _by_blocks(batch, [p for p in prompts if p.weights.any()], processes)
        inner = of_all_rows(total, mixes, *shape)
        many = f"{rounds} rounds of passes, because the signals of all rollouts do not fit in memory together"
        way = f"is measured block by block, in {'one round of passes' if rounds == 1 else many}"
    except UnfitError as reason:
        if processes.size > 1 and not isinstance(reason, _UnfitForAllError):  # the others are at another place
            raise
        way = f"is not measured block by block: {reason}"
        inner = None
    if processes.first and first_told(batch.model, way):
        _log.info("%s %s.", type(batch.model).__name__, way)
        note(f"Gram matrix: {type(batch.model).__name__} {way}.")

    def plainly() -> Float:
        gram = reference.group_gradient_gram(batch, basis_weights(batch, prompts, weights.shape), group)
        where = [(m, p) for p, prompt in enumerate(prompts) for m in range(len(prompt.basis.rows))]
        m, p = np.array(where, dtype=np.int64).reshape(-1, 2).T
        products = gram[m[:, None], m[None, :], p[:, None], p[None, :]]
        return of_all_rows(products, [(prompt.place, prompt.basis.mix) for prompt in prompts], *shape)

    return processes.broadcast_from_main(plainly) if inner is None else inner


def of_all_rows(total: Float, mixes: Sequence[tuple[int, Float]], prompts: int, size: int) -> Float:
    """Products of all M rows, mix · total · mixᵀ, prompt by prompt [M, M, P, P], from those of the basis [R, R].

    `mixes` holds the prompt and the coefficients [M, r] of every part that has a basis.
    """
    # Another prompt's basis has no part in a prompt's rows, and the parts of one prompt add up.
    whole, start = np.zeros((prompts, size, len(total))), 0
    for place, mix in mixes:
        whole[place, :, start : (start := start + mix.shape[1])] = mix
    return np.ascontiguousarray(np.tensordot(whole @ total, whole, axes=(2, 2)).transpose(1, 3, 0, 2))


def bins_of(batch: ScoreBatch, prompts: Sequence[PromptRows]) -> tuple[list[PromptRows], list[list[int]]]:
    """Return the parts of some prompts, and which of them go together.

    All prompts do, where half of the free memory holds their signals; else bins of parts that a quarter holds, of which
    two run in a round, so that each part meets each other one. A prompt that is larger is cut into its rollouts.

    Raises:
        UnfitError: The signals of one rollout do not fit.
    """
    kind = batch.scope.parameters[0]
    table = getattr(end_of(batch.model, "input") or end_of(batch.model, "output"), "weight", None)
    width = kind.element_size() * (0 if table is None else table.shape[-1])
    room = free_bytes(kind.device) // 2
    if sum(prompt.signals(width) for prompt in prompts) <= room:
        return list(prompts), [list(range(len(prompts)))]
    parts, bins, left = list[PromptRows](), list[list[int]](), 0
    for part in (x for one in prompts for x in ([one] if one.signals(width) <= room // 2 else one.cut())):
        if (needed := part.signals(width)) > room // 2:
            named = f"rollout {part.rollouts[0].row}"
            raise UnfitError(f"the signals of {named} would take {gibibytes(needed)}, of {gibibytes(2 * room)} free")
        if needed > left:
            bins.append([])
            left = room // 2
        bins[-1].append(len(parts))
        parts.append(part)
        left -= needed
    return parts, bins


def _by_blocks(
    batch: ScoreBatch, prompts: Sequence[PromptRows], processes: Processes
) -> tuple[Float, list[tuple[int, Float]], int]:
    """Products [R, R] of the basis rows' gradients; the prompt and the coefficients of every part; how many rounds.

    Each process measures the parts of its own prompts: in a round those of two of its bins, the same two on all. So any
    two parts meet in some round, whichever processes have them.

    Raises:
        UnfitError: The model is not measured block by block, or the signals of one rollout do not fit; on all.
        ProcessError: Another process failed.
        ExchangeError: This one failed in the middle of an exchange.
    """
    shard = [prompts[i] for i in processes.shard(np.arange(len(prompts)))]
    structure, (parts, bins) = _fitting(processes, lambda: (verified_structure(batch), bins_of(batch, shard)))
    every = processes.gather(bins)
    rounds = [*combinations(range(max(map(len, every))), 2)] or [(0,)]

    def together(of: Sequence[Sequence[int]], numbers: tuple[int, ...]) -> list[int]:
        return [part for number in numbers if number < len(of) for part in of[number]]

    ran = [together(bins, numbers) for numbers in rounds]
    # A part passes forward, and through each block that signals must go through.
    count_to(sum(map(len, ran)) * (1 + len(structure.blocks) - structure.first), "pass")
    by_round = [_block_by_block(batch, structure, [parts[i] for i in some], processes) for some in ran]
    mixes = processes.gather([(part.place, part.basis.mix) for part in parts])
    width = [(rank, i, mix.shape[1]) for rank, each in enumerate(mixes) for i, (_, mix) in enumerate(each)]
    total = np.zeros((sum(rows for *_, rows in width),) * 2)
    for numbers, products in zip(rounds, by_round, strict=True):
        at = np.flatnonzero(np.concatenate([np.full(n, i in together(every[r], numbers)) for r, i, n in width] or [[]]))
        total[np.ix_(at, at)] = products
    return total, [one for each in mixes for one in each], len(rounds)


class _UnfitForAllError(UnfitError):
    """A model is not measured block by block, on some process, and all know it."""


def _fitting(processes: Processes, run: Callable[[], T]) -> T:
    """Run a function on every process; where a model does not fit on one, raise that on all.

    Raises:
        _UnfitForAllError: It does not fit.
        ProcessError: Another process failed.
    """

    def tried() -> tuple[T, str] | tuple[None, str]:
        try:
            return run(), ""
        except UnfitError as reason:
            return None, str(reason)

    value, unfit = processes.agreed(tried)
    if reason := next(filter(None, processes.gather(unfit)), None):
        raise _UnfitForAllError(reason)
    return cast("T", value)


def _block_by_block(
    batch: ScoreBatch, structure: BlockStructure, prompts: Sequence[PromptRows], processes: Processes
) -> Float:
    """Products [R, R] of the basis rows' gradients of every process's prompts or parts, in one round of passes.

    Each process forms the gradients of its own prompts. Of every slice [R, n] of all of them it then gets some columns,
    and their products add up over processes. So passes and products are both shared out.

    Raises:
        UnfitError, ProcessError, ExchangeError: As `_by_blocks`.
    """
    layered = _fitting(processes, lambda: _signals(batch, structure, prompts))
    told = processes.gather((layered.rows, layered.again))
    counts, layered.again = [rows for rows, _ in told], any(again for _, again in told)
    device = batch.scope.parameters[0].device
    total = torch.zeros(sum(counts), sum(counts), dtype=torch.float64, device=device)
    if processes.size == 1:
        for _, gradients in layered.gradients() if layered.rows else ():
            add_products(total, gradients)
        return total.cpu().numpy()

    def slices(gradients: Gradients) -> Iterator[list[Tensor]]:
        while (named := processes.agreed(lambda: next(gradients, None))) is not None:
            # Little at a time: memory that was just used costs less than fresh pages.
            width = max(processes.size, EXCHANGED // (max(*counts, 1) * named[1][0].element_size()))
            for start in range(0, named[1][0].shape[1], width):
                yield [x[:, start : start + width] for x in named[1]]

    def add(gradients: Gradients) -> None:
        for columns in processes.columns(slices(gradients), counts):
            with exchanging():
                add_products(total, [columns])

    hold(structure.blocks, whole=False)
    try:
        add(layered.of_blocks(max(counts), shared=True))
        add(layered.of_ends(Extent.joined(processes.gather(processes.agreed(layered.extent)))))
    except Exception as error:
        if not isinstance(error, ExchangeError):  # else the others are no longer at the same place
            hold(structure.blocks, whole=True)
        raise
    hold(structure.blocks, whole=True)  # as whoever measures next expects it
    return np.sum(processes.gather(total.cpu().numpy()), axis=0)


def _signals(batch: ScoreBatch, structure: BlockStructure, prompts: Sequence[PromptRows]) -> Layered:
    """Run some prompts forward, find their bases, and bring their signals back to the last block's output."""
    layered = Layered(batch, structure, len(prompts))
    each = BLOCK_COPIES * reference.graph_per_position(batch) // len(layered.structure.blocks) if prompts else 1
    most = free_bytes(batch.scope.parameters[0].device) // (2 * max(each, 1))
    with plain_kernels(batch.model):  # once for all passes
        for prompt in prompts:
            passes = prompt.passes(most)
            tree = prompt.tree if len(passes) == 1 else None
            layered.add([(some, layout_of(batch, some, tree)) for some in passes], prompt.rows)
    return layered


def verified_structure(batch: ScoreBatch) -> BlockStructure:
    """How a model is cut into blocks, checked against plain backward passes on a probe at first use.

    Raises:
        UnfitError: It has no blocks, or some parameter's gradient is not the sum of what its blocks give.
    """
    structure = structure_of(batch)

    def check() -> None:
        rollout, parts = probe(batch), dict[str, Tensor]()
        # The reference first, while little is held: each of its gradients is as large as the model.
        expected = reference_norms(batch, rollout)[1]
        layered = Layered(batch, structure)
        layered.add([((rollout,), padded((rollout,)))], lambda logprob: torch.eye(len(logprob), device=logprob.device))
        for name, gradients in layered.gradients():
            parts[name] = parts.get(name, 0.0) + torch.cat([flat_norm_sq(x) for x in gradients])
        if reason := disagreement(parts, expected):
            raise UnfitError(reason)

    if batch.rollouts:
        _CHECKED.get(batch, check)
    return structure


def prompts_of(batch: ScoreBatch, weights: Float, group: Int) -> list[PromptRows]:
    """Return every prompt's rollouts and weights, in the order of the group's sorted distinct values."""
    return [_unmeasured(i, *prompt_weights(batch, weights, group == p)) for i, p in enumerate(np.unique(group))]


def _unmeasured(place: int, rollouts: tuple[Rollout, ...], weights: Float) -> PromptRows:
    empty = Basis(np.zeros((0, weights.shape[1])), np.zeros((len(weights), 0)))
    return PromptRows(place, rollouts, weights, tree_of(rollouts), empty)


def basis_weights(batch: ScoreBatch, prompts: Sequence[PromptRows], shape: tuple[int, ...]) -> Float:
    """Weights [N, r, L] of the gradients that a Gram matrix is made of, r the largest rank of any prompt's rows.

    Finds every prompt's basis, with one rollout in memory at a time. `shape` is that of the weights [N, M, L].
    """
    for prompt in prompts:
        if prompt.weights.any():
            with torch.no_grad():
                prompt.rows(torch.cat([sampled_logprobs(batch, (rollout,)) for rollout in prompt.rollouts]))
    weights = np.zeros((shape[0], max((len(prompt.basis.rows) for prompt in prompts), default=0), shape[2]))
    for prompt in prompts:
        start = 0
        for rollout in prompt.rollouts:
            part = prompt.basis.rows[:, start : (start := start + len(rollout.columns))]
            weights[rollout.row, : len(part), rollout.columns] = part.T
    return weights
