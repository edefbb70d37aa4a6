"""Count sketches of gradients: short vectors whose inner products estimate those of the gradients, at any size."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from otb_analysis.errors import InputError
from otb_analysis.gradients.forward import sampled_logprobs
from otb_analysis.gradients.inputs import (
    Batch,
    Problem,
    Rollout,
    Weights,
    check_group,
    check_weights,
    microbatches,
    pose,
)

CHUNK = 1 << 15
"""Entries hashed at a time: a few int64 arrays of this size, all the memory that hashing takes, stay in cache."""


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
) -> NDArray[np.float32]:
    """Count sketch of the gradient of every cluster of rollouts, for many rows of weights at once.

    Sketch of g_{c,m} = Σ_{n in c} Σ_t weights[n,m,t] s_{n,t}, s the score over the parameters in `scope`:
    bucket b holds Σ_{j: h(j)=b} σ(j) g_j with a hashed bucket h and sign σ of the entry's index j among *all* the
    model's parameters. Gradients are of the log-probability, summed: no 1/N, no advantage factor beyond `weights`.

    ⟨sketch(a), sketch(b)⟩ estimates ⟨a, b⟩ without bias over seeds, with standard deviation at most
    √((‖a‖²‖b‖² + ⟨a,b⟩²)/dim): .4 % of ‖a‖‖b‖ for orthogonal, .55 % for equal vectors at 65,536. One seed serves all
    clusters and steps, so compare only sketches of the same seed, dim and model; sketches over disjoint scopes or
    shards add up. Costs one forward pass per cluster (per `microbatches` of it) and one ordinary backward pass per
    (cluster, row) that is not all zero: no hooks, any attention kernel, frozen parameters and adapters as they are.

    Source: Charikar, Chen and Farach-Colton (2002); used as feature hashing by Weinberger et al. (2009), whose
    variance is the one stated.

    Args:
        model: A causal language model with the Hugging Face call convention.
        input_ids: Token ids [N, L].
        mask: True at the tokens the policy sampled [N, L].
        weights: M rows of weights per rollout [N, M, L]; never read outside the mask.
        cluster: Rollout index or prompt of each rollout [N], any integers; axis c is ordered by the distinct values.
        attention_mask: True at real tokens [N, L]; None means that nothing is padding.
        dim: Buckets.
        seed: Seed of the hash.
        scope: As in `token_score_norms`.
        temperature: τ of the policy softmax(logits / τ).

    Returns:
        Sketches [C, M, dim], float32, accumulated in float64.

    Raises:
        InputError: Something passed does not fit; the sentence says what and what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
    """
    _check_dim(dim)
    problem = pose(model, Batch(input_ids, mask, attention_mask), scope, temperature)
    rows = check_weights(weights, problem.mask)
    member = check_group(cluster, problem.shape[0], "cluster")
    clusters = np.unique(member)
    result = np.zeros((len(clusters), rows.shape[1], dim), dtype=np.float32)
    starts = _starts(problem)
    for c, name in enumerate(clusters):
        sums = np.zeros((rows.shape[1], dim))
        for batch in microbatches([r for r in problem.rollouts if member[r.row] == name]):
            stacked = np.concatenate([rows[r.row][:, r.columns] for r in batch], axis=1)
            _add_sketches(sums, problem, batch, stacked, starts, seed)
        result[c] = sums
    return result


def count_sketch(values: Tensor, start: int, dim: int, seed: int = 0) -> Tensor:
    """Count sketch of a piece of a long vector, such as one shard of a gradient; the pieces' sketches add up.

    Bucket b holds Σ_{j: h(j)=b} σ(j) values[j − start] for the indices j = start, start + 1, … of the whole vector.
    The hash is a fixed integer function of (seed, j), so it is the same in every process and on every device.

    Args:
        values: The piece, flattened in its order.
        start: Index of its first entry in the whole vector.
        dim: Buckets.
        seed: Seed of the hash.

    Returns:
        The sketch [dim], float64, on the device of `values`.

    Raises:
        InputError: `dim` is not positive.
    """
    _check_dim(dim)
    flat = values.detach().flatten()
    signed = torch.zeros(2 * dim, dtype=torch.float64, device=flat.device)  # σ = +1 in the first half, −1 in the second
    for first in range(0, len(flat), CHUNK):
        piece = flat[first : first + CHUNK].double()
        mixed = _mix(torch.arange(start + first, start + first + len(piece), device=flat.device), seed)
        signed.index_add_(0, _shift(mixed, 1).remainder_(2 * dim), piece)
    return signed[:dim] - signed[dim:]


def _add_sketches(
    sums: NDArray[np.float64],
    problem: Problem,
    batch: tuple[Rollout, ...],
    weights: NDArray[np.float64],
    starts: Sequence[int],
    seed: int,
) -> None:
    """Add to sums [M, dim] the sketches of Σ_k weights[m, k] s_k, one backward pass per row that is not all zero."""
    active = np.flatnonzero(weights.any(-1))
    if len(active) == 0:
        return
    values = sampled_logprobs(problem, batch)
    for m in active:
        row = torch.from_numpy(weights[m]).to(values)
        last = bool(m == active[-1])
        grads = torch.autograd.grad(values, problem.scope.parameters, row, retain_graph=not last, allow_unused=True)
        for start, grad in zip(starts, grads, strict=True):
            if grad is not None:
                sums[m] += count_sketch(grad, start, sums.shape[1], seed).cpu().numpy()


def _starts(problem: Problem) -> list[int]:
    """Index of each scope tensor's first entry among all of the model's parameters, frozen ones included."""
    start, found = 0, {}
    for parameter in problem.model.parameters():
        found[id(parameter)] = start
        start += parameter.numel()
    head = problem.scope.head
    tensors = (
        problem.scope.parameters if head is None else [head.weight, *([head.bias] if head.bias is not None else [])]
    )
    return [found[id(p)] for p in tensors[: len(problem.scope.parameters)]]


_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mix(index: Tensor, seed: int) -> Tensor:
    """SplitMix64 of (seed, index), written into `index`, in int64 arithmetic that wraps."""
    stride, first, second = (_signed(c) for c in _MIX)
    x = index.mul_(stride).add_(_signed(_mix_int(seed)))
    x.bitwise_xor_(_shift(x, 30)).mul_(first)
    x.bitwise_xor_(_shift(x, 27)).mul_(second)
    return x.bitwise_xor_(_shift(x, 31))


def _mix_int(seed: int) -> int:
    """SplitMix64 of a seed, so that neighbouring seeds are unrelated."""
    word = (1 << 64) - 1
    x = (seed + 1) * _MIX[0] & word
    x = (x ^ (x >> 30)) * _MIX[1] & word
    x = (x ^ (x >> 27)) * _MIX[2] & word
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _check_dim(dim: int) -> None:
    if dim < 1:
        raise InputError(f"dim is {dim}; pass a positive number of buckets, 65536 by default.")
