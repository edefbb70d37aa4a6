"""Scores of the output layer's own use in closed form: outer products of two known vectors, without a backward pass.

For z = W h + b the score is ∇_W log π(y) = δ ⊗ h with δ = (e_y − π)/τ, times the slope of what the model does to z
behind the layer (a soft-cap, a scale); 1 − π_y is formed as the sum of the other π, so that it survives π_y → 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import sampled_logits
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.per_rollout import norms_of_rows, norms_of_tokens
from otb_analysis.gradients.batch.scope import unreached
from otb_analysis.gradients.exact.gram import refuse_many
from otb_analysis.gradients.exact.hooks import own_rows
from otb_analysis.gradients.exact.layers import wide
from otb_analysis.gradients.exact.norm_accumulators import leading_sums
from otb_analysis.types import Float, Int, ScoreNorms

HELD_BYTES = 1 << 30
"""What the vectors δ of the tokens of one block of a Gram matrix may occupy; other blocks are computed again."""


def token_score_norms(batch: ScoreBatch, path: bool, name: str) -> ScoreNorms:
    """‖s_t‖² = ‖δ_t‖² ‖h_t‖², with a bias ‖δ_t‖² (‖h_t‖² + 1), and of running sums with `path`; engine `name`."""

    def measure(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        scores = _outer(batch, rollout)
        norms = _norm_sq(scores.left) * _norm_sq(scores.right)
        return scores.logprob, norms, leading_sums(_kernel(scores, scores)) if path else torch.zeros_like(norms)

    return norms_of_tokens(batch, name, path, measure)


def weighted_score_norms(batch: ScoreBatch, weights: Float) -> Float:
    """‖Σ_t weights[n,m,t] s_{n,t}‖² from the inner products of a rollout's tokens."""

    def measure(rollout: Rollout, rows: Tensor) -> Tensor:
        scores = _outer(batch, rollout)
        return (rows @ _kernel(scores, scores).cpu() * rows).sum(-1)

    return norms_of_rows(batch, weights, measure)


def group_gradient_gram(batch: ScoreBatch, weights: Float, group: Int) -> Float:
    """Gram matrix [M, M, P, P] from the inner products of all pairs of tokens, block by block."""
    prompts, index = np.unique(group, return_inverse=True)
    count = weights.shape[1] * len(prompts)
    refuse_many(count)
    gram = torch.zeros(count, count, dtype=torch.float64)
    rollouts = [r for r in batch.rollouts if weights[r.row][:, r.columns].any()]
    blocks = list(_blocks(rollouts, batch.scope.parameters[0]))
    for i, block in enumerate(blocks):
        first = _joined(batch, block)
        rows = _spread(block, weights, (index, len(prompts)))
        gram += rows @ _kernel(first, first).cpu() @ rows.T
        # Only pairs above the diagonal; δ of the other block is made again rather than held.
        for other in blocks[i + 1 :]:
            part = rows @ _kernel(first, _joined(batch, other)).cpu()
            part = part @ _spread(other, weights, (index, len(prompts))).T
            gram += part + part.T
    shape = (weights.shape[1], len(prompts)) * 2
    return gram.numpy().reshape(shape).transpose(0, 2, 1, 3)


@dataclass(frozen=True)
class _Outer:
    """Scores of K tokens as outer products: δ [K, V], h [K, d] (with a 1 behind it for a bias), and log π [K]."""

    left: Tensor
    right: Tensor
    logprob: Tensor


def _outer(batch: ScoreBatch, rollout: Rollout) -> _Outer:
    head = batch.scope.head
    assert head is not None
    # The scope's own hook would replace the output; the leaf below does what is needed.
    inner = replace(batch, scope=replace(batch.scope, head=None))
    with torch.no_grad(), _leaf_at_output(head) as seen:
        z, targets = sampled_logits(inner, (rollout,))
        if not seen:
            raise unreached(head)
        hidden, output = seen
        logprob, at = z.detach().log_softmax(-1), targets[:, None]
        # e_y − π with 1 − π_y as the sum of the other π: the difference would cancel for a sure token.
        others = logprob.exp().scatter(-1, at, 0.0)
        (delta,) = torch.autograd.grad(z, output, (-others).scatter(-1, at, others.sum(-1, keepdim=True)))
    right = wide(hidden[0, own_rows(hidden, rollout)])
    if len(batch.scope.parameters) > 1:
        # A bias is a weight on a constant input of 1.
        right = torch.cat([right, torch.ones_like(right[:, :1])], dim=-1)
    return _Outer(wide(delta[0, own_rows(delta, rollout)]), right, logprob.gather(-1, at)[:, 0].double())


@contextmanager
def _leaf_at_output(head: nn.Module) -> Iterator[list[Tensor]]:
    """Start the graph at the output of the layer: what is below it needs none. Yields its input and output."""
    seen: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        leaf = wide(output.detach()).requires_grad_()
        seen[:] = args[0], leaf
        torch.set_grad_enabled(True)  # until the caller's `no_grad` ends
        return leaf

    with head.register_forward_hook(hook):
        yield seen


def _blocks(rollouts: list[Rollout], weight: Tensor) -> Iterator[list[Rollout]]:
    """Rollouts in blocks whose δ fit in `HELD_BYTES`; one at least."""
    block: list[Rollout] = []
    most = HELD_BYTES // (len(weight) * max(4, weight.element_size()))
    for rollout in rollouts:
        if block and sum(len(r.columns) for r in (*block, rollout)) > most:
            yield block
            block = []
        block = [*block, rollout]
    if block:
        yield block


def _joined(batch: ScoreBatch, rollouts: list[Rollout]) -> _Outer:
    parts = [_outer(batch, r) for r in rollouts]
    return _Outer(*(torch.cat([getattr(p, name) for p in parts]) for name in ("left", "right", "logprob")))


def _spread(rollouts: list[Rollout], weights: Float, prompts: tuple[Int, int]) -> Tensor:
    """Weights [M · P, Σ K] of the tokens of some rollouts: zero in the rows of other prompts."""
    index, count = prompts
    parts = []
    for rollout in rollouts:
        rows = np.zeros((weights.shape[1], count, len(rollout.columns)))
        rows[:, index[rollout.row]] = weights[rollout.row][:, rollout.columns]
        parts.append(rows.reshape(-1, rows.shape[2]))
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _kernel(a: _Outer, b: _Outer) -> Tensor:
    """⟨s_i, s_j⟩ of all pairs of tokens, float64."""
    return (a.left @ b.left.T).double() * (a.right @ b.right.T).double()


def _norm_sq(values: Tensor) -> Tensor:
    """‖·‖² of each row, in float64 throughout: squares of the δ of a sure token are too small for float32."""
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64).square()
