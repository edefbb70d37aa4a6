"""Scores of the output layer's own use in closed form: outer products of two known vectors, without a backward pass.

For z = W h + b the score is ∇_W log π(y) = δ ⊗ h with δ = (e_y − π)/τ, times the slope of what the model does to z
behind the layer (a soft-cap, a scale); 1 − π_y is formed as the sum of the other π, so that it survives π_y → 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import sampled_logits
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.per_rollout import Asked, Norms, norms_of
from otb_analysis.gradients.batch.scope import layer_input, unreached
from otb_analysis.gradients.exact.hooks import own_rows
from otb_analysis.gradients.exact.layers import wide
from otb_analysis.gradients.exact.norm_accumulators import outer_path_norms, outer_row_norms


def norms(batch: ScoreBatch, asked: Asked) -> Norms:
    """‖s_t‖² = ‖δ_t‖² ‖h_t‖², with a bias ‖δ_t‖² (‖h_t‖² + 1); sums of scores from the tokens' inner products."""

    def of_tokens(scores: _Outer, first: int, path: bool) -> tuple[Tensor, Tensor, Tensor]:
        norms = _norm_sq(scores.left) * _norm_sq(scores.right)
        path_norms = outer_path_norms(scores.left, scores.right) if path else torch.zeros_like(norms)
        return scores.logprob[first:], norms[first:], path_norms[first:]

    def of_rows(scores: _Outer, rows: Tensor) -> Tensor:
        return outer_row_norms([(scores.left, scores.right)], rows.to(scores.left.device))

    return norms_of(batch, asked, partial(_outer, batch), of_tokens, of_rows)


class _Outer(NamedTuple):
    """Scores of K tokens as outer products."""

    left: Tensor  # δ [K, V]
    right: Tensor  # h [K, d], with a 1 behind it for a bias
    logprob: Tensor  # log π [K]


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

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        leaf = wide(output.detach()).requires_grad_()
        seen[:] = layer_input(args, kwargs), leaf
        torch.set_grad_enabled(True)  # until the caller's `no_grad` ends
        return leaf

    with head.register_forward_hook(hook, with_kwargs=True):
        yield seen


def _norm_sq(values: Tensor) -> Tensor:
    """‖·‖² of each row, in float64 throughout: squares of the δ of a sure token are too small for float32."""
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64).square()
