"""Count sketches of gradients: short vectors whose inner products estimate those of the gradients, at any size."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from otb_analysis.devices import working_set
from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import (
    Batch,
    Rollout,
    ScoreBatch,
    Weights,
    check_group,
    check_weights,
    microbatches,
    prepare,
    refuse_more_than_fit,
    widened,
)
from otb_analysis.gradients.batch.soft import SoftTokens
from otb_analysis.gradients.exact.gram import add_products
from otb_analysis.gradients.exact.verdicts import first_told
from otb_analysis.gradients.groups.group_gram import Basis, basis_weights, of_all_rows, prompts_of
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.types import Float

CHUNK = 1 << 15
"""Entries hashed or summed at a time: a few int64 arrays of this size stay in cache."""


def count_sketch(values: Tensor, start: int, dim: int, seed: int = 0) -> Tensor:
    """Count sketch of a piece of a long vector, such as one shard of a gradient; the pieces' sketches add up.

    Bucket b holds Σ_{j: h(j)=b} σ(j) values[j − start] for the indices j = start, start + 1, … of the whole vector, of
    which `values` is a piece. The hash is a fixed integer function of (seed, j), so it is the same in every process and
    on every device. The sketch is [dim], float64, on the device of `values`.

    Raises:
        InputError: `dim` is not positive.
    """
    check_dim(dim)
    return Buckets(start, values.numel(), dim, seed, values.device).sketch(values)


class Buckets:
    """The hash of one piece of the vector, kept for many sketches: hashing takes three times as long as summing."""

    def __init__(self, start: int, length: int, dim: int, seed: int, device: torch.device) -> None:
        self.dim = dim
        self.signed = torch.empty(length, dtype=torch.int32, device=device)
        self.chunk = working_set(device, CHUNK)
        # The seed is hashed first, so that neighbouring seeds are unrelated; one of more than 63 bits wraps, too.
        seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        key = int(_mix(torch.tensor([seed], device="cpu"), _STRIDE))
        for first in range(0, length, self.chunk):
            part = self.signed[first : first + self.chunk]
            # h(j) where σ(j) = +1 and dim + h(j) where it is −1: one draw for both.
            mixed = _shift(_mix(torch.arange(start + first, start + first + len(part), device=device), key), 1)
            power = dim & (dim - 1) == 0
            part.copy_(mixed.bitwise_and_(2 * dim - 1) if power else mixed.remainder_(2 * dim))

    def sketch(self, values: Tensor) -> Tensor:
        """Return what `count_sketch` returns for the piece."""
        flat = values.detach().flatten()
        # Float64: millions of entries fall into few buckets and mostly cancel.
        signed = torch.zeros(2 * self.dim, dtype=torch.float64, device=flat.device)
        for piece, into in zip(flat.split(self.chunk), self.signed.split(self.chunk), strict=True):
            signed.scatter_add_(0, into.long(), piece.double())
        return signed[: self.dim] - signed[self.dim :]


def check_dim(dim: int) -> None:
    """Raise where the number of buckets is not positive."""
    if dim < 1:
        raise InputError(f"dim is {dim}; pass a positive number of buckets, 65536 by default.")


_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STRIDE, _FIRST, _SECOND = (word - (1 << 64) for word in _MIX)  # the int64 with the bits of each


def _mix(index: Tensor, key: int) -> Tensor:
    """SplitMix64 of key + stride·index, written into `index`, in int64 arithmetic that wraps."""
    x = index.mul_(_STRIDE).add_(key)
    x.bitwise_xor_(_shift(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shift(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class Shards:
    """What this process holds of the gradients of a model after `fully_shard`; replicated mesh dimensions count once.

    Raises:
        InputError: A parameter is cut otherwise than along its first dimension, meshes differ, or the scope is
            "lm_head", which takes the output layer out of its shards.
    """

    def __init__(self, model: nn.Module, scope: str) -> None:
        if scope == "lm_head":
            raise InputError(
                'scope "lm_head" does not work on sharded parameters; pass a regular expression over parameter names.'
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward one leaves the root's parameters whole
        meshes: dict[DeviceMesh, None] = {}
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor):
                continue
            meshes[p.device_mesh] = None
            for placement in p.placements:
                if not (isinstance(placement, Replicate) or (type(placement) is Shard and placement.dim == 0)):
                    raise InputError(
                        f"parameter {name!r} is placed as {placement}; gradient_sketch adds up shards along the first "
                        "dimension, as fully_shard makes them."
                    )
        if len(meshes) != 1:
            raise InputError(
                f"the model's parameters are spread over {len(meshes)} meshes; gradient_sketch adds up one of them."
            )
        self.mesh = next(iter(meshes))

    def spans(self, parameters: Sequence[Tensor], starts: Sequence[int]) -> list[tuple[int, int]]:
        """First index and length, among all entries, of the part of each parameter that this process counts."""
        here, spans = self.mesh.get_coordinate() or (), list[tuple[int, int]]()
        for parameter, start in zip(parameters, starts, strict=True):
            if not isinstance(parameter, DTensor):
                spans.append((start, 0 if any(here) else parameter.numel()))
                continue
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            placed = zip(mesh.get_coordinate() or (), placements, strict=True)
            copies = any(c for c, p in placed if isinstance(p, Replicate))
            if copies or not shape:
                spans.append((start, 0 if copies else 1))
            else:
                stride = int(np.prod(shape[1:]))
                spans.append((start + offset[0] * stride, shape[0] * stride))
        return spans

    def gradients(
        self, batch: ScoreBatch, rollouts: tuple[Rollout, ...], weights: NDArray[np.float64]
    ) -> Iterator[tuple[int, list[Tensor | None]]]:
        """Local parts of Σ_k weights[m, k] s_k with its m, by one forward and one backward pass per nonzero row.

        The parts come from `.grad`, where the sharding leaves them, averaged over processes that saw the same batch;
        what lay there before is put back.
        """
        every = [p for p in batch.model.parameters() if p.requires_grad]
        before = [p.grad for p in every]
        for m in np.flatnonzero(weights.any(-1)):
            # `.grad` accumulates: what lay there would be taken for part of this row.
            for p in every:
                p.grad = None
            # Anew for every row: the sharding frees its gathered weights after one backward pass.
            values = sampled_logprobs(batch, rollouts)
            try:
                values.backward(torch.from_numpy(weights[m]).to(values))
                local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in batch.scope.parameters]
            finally:
                for p, grad in zip(every, before, strict=True):
                    p.grad = grad
            yield int(m), local

    def check_same(self, batch: ScoreBatch, weights: NDArray[np.float64]) -> None:
        """Raise where batches differ between processes: the sharding averages their gradients."""
        ids = np.concatenate([r.ids.cpu().numpy() for r in batch.rollouts]) if batch.rollouts else np.zeros(0)
        digest = sha256(b"".join(x.tobytes() for x in (ids, batch.mask, weights))).digest()
        # Digests instead of the data: equal minimum and maximum say that all processes have the same.
        low = torch.tensor(list(digest[:16]), dtype=torch.int32, device=batch.scope.parameters[0].device)
        high = low.clone()
        for group in self.mesh.get_all_groups():
            dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        if not torch.equal(low, high):
            raise InputError(
                "input_ids, mask or weights differ between the processes of a sharded model; "
                "pass the same batch on every process."
            )


KEPT = 1 << 28
"""Parameters up to which their buckets are kept during a call, at 4 bytes each; beyond, they are hashed every time."""
_log = logging.getLogger(__name__)


@torch.inference_mode(False)
@torch.enable_grad()
def gradient_sketch(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    cluster: Tensor | np.ndarray,
    attention_mask: Tensor | None = None,
    *,
    dim: int = 65536,
    seed: int = 0,
    scope: str = "all",
    temperature: float = 1.0,
    soft: SoftTokens | None = None,
) -> NDArray[np.float32]:
    """Count sketch of the gradient of every cluster of rollouts, for many rows of weights at once.

    Sketch of g_{c,m} = Σ_{n in c} Σ_t weights[n,m,t] s_{n,t}, s the score over the parameters in `scope`:
    bucket b holds Σ_{j: h(j)=b} σ(j) g_j with a hashed bucket h and sign σ of the entry's index j among *all* the
    model's parameters. Gradients are of the log-probability, summed: no 1/N, no advantage factor beyond `weights`.

    ⟨sketch(a), sketch(b)⟩ estimates ⟨a, b⟩ without bias over seeds, with standard deviation at most
    √((‖a‖²‖b‖² + ⟨a,b⟩²)/dim): .4 % of ‖a‖‖b‖ for orthogonal, .55 % for equal vectors at 65,536. Compare only sketches
    of the same seed, dim and model; those over disjoint scopes or shards add up. Costs one forward pass per cluster and
    one ordinary backward pass per (cluster, row) that is not all zero: no hooks, any attention kernel.

    Weights in half precision are widened to float32, unless they are shards or the copies do not fit in memory. A model
    cut up by `fully_shard` takes the same batch on every process; all return the sketch of the whole gradient.
    Inside `DistributedDataParallel` the wrapped model is measured on this process's batch.

    Sketches are [C, M, dim], float32, accumulated in float64. `weights` is [N, M, L]; `cluster` holds the rollout index
    or prompt of each rollout [N], any integers; axis c is ordered by the distinct values. The other arguments are those
    of `token_score_norms`.

    Source: Charikar, Chen and Farach-Colton (2002); used as feature hashing by Weinberger et al. (2009), whose
    variance is the one stated.

    Raises:
        InputError: An argument does not fit, or so many buckets do not fit in memory; the sentence says what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
    """
    check_dim(dim)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    sharded = any(isinstance(parameter, DTensor) for parameter in inner.parameters())
    shards = Shards(inner, scope) if sharded else None
    with nullcontext() if shards else widened_if_it_fits(inner):
        arguments = Batch(input_ids, mask, attention_mask)
        batch = prepare(inner, arguments, scope, temperature, sharded=sharded, soft=soft)
        rows = check_weights(weights, batch.mask)
        member = check_group(cluster, batch.shape[0], "cluster")
        clusters, device = np.unique(member), batch.scope.parameters[0].device
        # Float64 sums of one cluster, what is added to them with both signs, and the float32 result.
        each = 8 * (rows.shape[1] + 3) + 4 * len(clusters) * rows.shape[1]
        refuse_more_than_fit("dim", dim, each, device)
        if shards is not None:
            shards.check_same(batch, rows)
        sketch = _sketcher(batch, shards, dim, seed)
        gradients = _gradients if shards is None else shards.gradients
        result = np.zeros((len(clusters), rows.shape[1], dim), dtype=np.float32)
        for c, name in enumerate(clusters):
            sums = torch.zeros(rows.shape[1], dim, dtype=torch.float64, device=device)
            for micro in microbatches([r for r in batch.rollouts if member[r.row] == name]):
                stacked = np.concatenate([rows[r.row][:, r.columns] for r in micro], axis=1)
                for m, gradient in gradients(batch, micro, stacked):
                    sketch(sums[m], gradient)
            for group in [] if shards is None else shards.mesh.get_all_groups():
                dist.all_reduce(sums, group=group)
            result[c] = sums.cpu().numpy()
    return result


@contextmanager
def widened_if_it_fits(model: nn.Module) -> Iterator[None]:
    """`widened` weights, or the model's own where copies do not fit: sketches are for models of any size."""
    with ExitStack() as stack:
        try:
            stack.enter_context(widened(model))
        except InputError as reason:
            if first_told(model, sentence := f"Gradients are sketched in half precision, because {reason}"):
                _log.warning(sentence)
        yield


def _gradients(
    batch: ScoreBatch, rollouts: tuple[Rollout, ...], weights: NDArray[np.float64]
) -> Iterator[tuple[int, Sequence[Tensor | None]]]:
    """Σ_k weights[m, k] s_k with its m, by one backward pass per row that is not all zero."""
    active = np.flatnonzero(weights.any(-1)).tolist()
    if not active:
        return
    values = sampled_logprobs(batch, rollouts)
    for m in active:
        row = torch.from_numpy(weights[m]).to(values)
        # The last row frees the graph: what is kept until then is a whole forward pass.
        kept = m != active[-1]
        yield m, torch.autograd.grad(values, batch.scope.parameters, row, retain_graph=kept, allow_unused=True)


def _sketcher(
    batch: ScoreBatch, shards: Shards | None, dim: int, seed: int
) -> Callable[[Tensor, Sequence[Tensor | None]], None]:
    """A function that adds the sketch of a gradient (of what this process holds of it) to a row of sums."""
    # Among all of the model's parameters, frozen ones included.
    every = list(batch.model.parameters())
    ends = np.cumsum([p.numel() for p in every]).tolist()
    first = {id(p): end - p.numel() for p, end in zip(every, ends, strict=True)}
    starts = [first[id(p)] for p in batch.scope.tensors]
    spans = [(start, p.numel()) for start, p in zip(starts, batch.scope.parameters, strict=True)]
    if shards is not None:
        spans = shards.spans(batch.scope.parameters, starts)
    kept: dict[int, Buckets] = {}
    # Hashing takes three times as long as summing, so buckets are kept where there is room.
    keep = sum(length for _, length in spans) <= KEPT

    def add(into: Tensor, gradient: Sequence[Tensor | None]) -> None:
        for i, (grad, (start, length)) in enumerate(zip(gradient, spans, strict=True)):
            if grad is None or length == 0:
                continue
            buckets = kept.get(i) or Buckets(start, length, dim, seed, grad.device)
            if keep:
                kept[i] = buckets
            into += buckets.sketch(grad)

    return add


@torch.inference_mode(False)
@torch.enable_grad()
def sketched_group_gram(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    group: Tensor | np.ndarray,
    attention_mask: Tensor | None = None,
    *,
    dim: int = 65536,
    seed: int = 0,
    scope: str = "all",
    temperature: float = 1.0,
    processes: Processes = SINGLE_PROCESS,
) -> Float:
    """Estimate what `group_gradient_gram` returns [M, M, P, P], from `gradient_sketch` of each prompt's basis rows.

    Every entry is unbiased over seeds, with standard deviation at most √((‖g‖²‖g'‖² + ⟨g,g'⟩²)/dim): .4 % of ‖g‖‖g'‖
    at 65,536 where p ≠ p'. Batch variances and their ratios are far better, since rows share their sketch
    (`statistics.sketch_noise`). Equal rows of weights have equal products.

    Costs a forward pass of every rollout and r + 1 passes of a prompt's rollouts, r ≤ M the rank of its rows. It holds
    one gradient, one micro-batch and 4·r·P·dim bytes, whereas `group_gradient_gram` holds the backward signals of all
    prompts. The arguments are those of `group_gradient_gram` and `gradient_sketch`; `processes` share the prompts.

    Raises:
        InputError: An argument does not fit, or so many buckets do not fit in memory; the sentence says what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
        ProcessError: Another process failed.
    """
    options = {"scope": scope, "temperature": temperature}
    with ExitStack() as copies:
        copies.enter_context(widened_if_it_fits(model))
        batch = processes.agreed(lambda: prepare(model, Batch(input_ids, mask, attention_mask), **options))
        checked, member = check_weights(weights, batch.mask), check_group(group, batch.shape[0])
        prompts, values = prompts_of(batch, checked, member), np.unique(member)
        if len(set(processes.gather(str(batch.scope.parameters[0].dtype)))) > 1:
            raise InputError("float32 copies of the weights fit on some processes only; free memory on the others.")

        def sketched() -> list[tuple[Basis, Float]]:
            places = processes.shard(np.arange(len(prompts)))
            if not len(places):
                return []
            mine, rows = [prompts[i] for i in places], np.isin(member, values[places])
            basis = basis_weights(batch, mine, checked.shape)[rows]
            some = torch.from_numpy(rows)
            real = None if attention_mask is None else attention_mask[some.to(attention_mask.device)]
            ids, sampled = input_ids[some.to(input_ids.device)], mask[some.to(mask.device)]
            sketches = gradient_sketch(model, ids, sampled, basis, member[rows], real, dim=dim, seed=seed, **options)
            return [(p.basis, part[: len(p.basis.rows)]) for p, part in zip(mine, sketches, strict=True)]

        sketches = [one for part in processes.gather(processes.agreed(sketched)) for one in part]
    prompts = [replace(prompt, basis=basis) for prompt, (basis, _) in zip(prompts, sketches, strict=True)]
    rows = [row for _, part in sketches for row in part]
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
    if rows:
        add_products(total, [torch.from_numpy(row)[None] for row in rows])
    mixes = [(prompt.place, prompt.basis.mix) for prompt in prompts]
    return of_all_rows(total.numpy(), mixes, len(prompts), checked.shape[1])
