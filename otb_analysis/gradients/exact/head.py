"""Scores of the output layer's own use in closed form: outer products of two known vectors, without a backward pass.

For z = W h + b the score is ∇_W log π(y) = δ ⊗ h with δ = (e_y − π)/τ, times the slope of what the model does to z
behind the layer (a soft-cap, a scale); 1 − π_y is formed as the sum of the other π, so that it survives π_y → 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import sampled_logits
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.per_rollout import norms_of_rows, norms_of_tokens
from otb_analysis.gradients.batch.scope import unreached
from otb_analysis.gradients.exact.hooks import own_rows
from otb_analysis.gradients.exact.layers import wide
from otb_analysis.gradients.exact.norm_accumulators import outer_path_norms, outer_row_norms
from otb_analysis.types import Float, ScoreNorms


def token_score_norms(batch: ScoreBatch, path: bool, name: str) -> ScoreNorms:
    """‖s_t‖² = ‖δ_t‖² ‖h_t‖², with a bias ‖δ_t‖² (‖h_t‖² + 1), and of running sums with `path`; engine `name`."""

    def measure(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        scores = _outer(batch, rollout)
        norms = _norm_sq(scores.left) * _norm_sq(scores.right)
        path_norms = outer_path_norms(scores.left, scores.right) if path else torch.zeros_like(norms)
        return scores.logprob, norms, path_norms

    return norms_of_tokens(batch, name, path, measure)


def weighted_score_norms(batch: ScoreBatch, weights: Float) -> Float:
    """‖Σ_t weights[n,m,t] s_{n,t}‖² from the inner products of a rollout's tokens."""

    def measure(rollout: Rollout, rows: Tensor) -> Tensor:
        scores = _outer(batch, rollout)
        return outer_row_norms([(scores.left, scores.right)], rows.to(scores.left.device))

    return norms_of_rows(batch, weights, measure)


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


def _norm_sq(values: Tensor) -> Tensor:
    """‖·‖² of each row, in float64 throughout: squares of the δ of a sure token are too small for float32."""
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64).square()
