"""Count sketches of gradients: short vectors whose inner products estimate those of the gradients, at any size."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
)
from otb_analysis.gradients.batch.memory import refuse_more_than_fit
from otb_analysis.gradients.batch.soft import SoftTokens
from otb_analysis.gradients.batch.widening import widened
from otb_analysis.gradients.exact.verdicts import first_told
from otb_analysis.gradients.sketched.hashing import Buckets, check_dim
from otb_analysis.gradients.sketched.shards import Shards, is_sharded

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
    shards = Shards(inner, scope) if is_sharded(inner) else None
    with nullcontext() if shards else widened_if_it_fits(inner):
        arguments = Batch(input_ids, mask, attention_mask)
        batch = prepare(inner, arguments, scope, temperature, sharded=shards is not None, soft=soft)
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
            result[c] = (sums if shards is None else shards.total(sums)).cpu().numpy()
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
    whole = [(start, p.numel()) for start, p in zip(_starts(batch), batch.scope.parameters, strict=True)]
    spans = whole if shards is None else shards.spans(batch.scope.parameters, _starts(batch))
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


def _starts(batch: ScoreBatch) -> list[int]:
    """Index of each scope tensor's first entry among all of the model's parameters, frozen ones included."""
    start, starts = 0, {}
    for parameter in batch.model.parameters():
        starts[id(parameter)] = start
        start += parameter.numel()
    return [starts[id(p)] for p in batch.scope.tensors]
