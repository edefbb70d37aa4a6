"""Attention that carries a derivative along with its output, in blocks of queries, for one pass in forward mode.

PyTorch's fused kernels have no forward-mode derivative, and the plain one holds several arrays [rollouts, heads,
positions, positions] for keys that a causal mask hides. Here a block of queries meets only the keys it may see.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor

from otb_analysis.gradients.exact.attention import AttentionCall, ReplacedAttention, block_scores, query_blocks
from otb_analysis.gradients.exact.layers import UnfitError


@torch.no_grad()  # around forward mode this only drops the reverse graph
def derivative(
    function: Callable[[Sequence[Tensor]], Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    """Derivative of a function of several tensors along one direction, by forward mode; zeros where nothing moves it.

    d/dε f(x + εẋ) at ε = 0, x = `primals` and ẋ = `tangents`, exact up to rounding; one pass, no graph.

    Raises:
        UnfitError: An operation has no such derivative.
    """
    with fwd.dual_level(), ReplacedAttention(_attend), warnings.catch_warnings():
        # PyTorch scripts formulas of its own when forward mode first runs, and warns of that.
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
        duals = [fwd.make_dual(x.detach(), t.to(x)) for x, t in zip(primals, tangents, strict=True)]
        try:
            value, moved = fwd.unpack_dual(function(duals))
        except torch.OutOfMemoryError:  # a RuntimeError too, but no fault of the model's
            raise
        except RuntimeError as error:
            why = str(error).split(". ")[0].splitlines()[0]
            raise UnfitError(
                f'the model has an operation without a forward-mode derivative ({why}); pass engine="reference", or '
                'for an attribution method="difference".'
            ) from error
        return torch.zeros_like(value) if moved is None else moved.clone()


def _attend(call: AttentionCall) -> Tensor | None:
    """Attention with a forward-mode derivative.

    None for active dropout and for a mask that itself moves: PyTorch's plain form, which runs then, has a derivative.
    """
    mask = None if call.attn_mask is None else fwd.unpack_dual(call.attn_mask)
    if call.dropout_p or call.query.ndim != 4 or (mask is not None and mask.tangent is not None):
        return None
    call = replace(call, attn_mask=None if mask is None else mask.primal)
    repeats = call.query.shape[1] // call.key.shape[1] if call.enable_gqa else 1
    operands = [_parts(x, n) for x, n in ((call.query, 1), (call.key, repeats), (call.value, repeats))]
    blocks = [_block(call, operands, rows) for rows in query_blocks(call.query.shape[2], call.query.device)]
    primal, tangent = (torch.cat(part, dim=2) for part in zip(*blocks, strict=True))
    return fwd.make_dual(primal, tangent)


def _parts(x: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    """Value and derivative [n, h, T, d] of an operand; keys and values are repeated for the heads that share them."""
    primal, tangent = fwd.unpack_dual(x)
    moved = torch.zeros_like(primal) if tangent is None else tangent
    if repeats == 1:
        return primal, moved
    return primal.repeat_interleave(repeats, 1), moved.repeat_interleave(repeats, 1)


def _block(call: AttentionCall, operands: Sequence[tuple[Tensor, Tensor]], rows: slice) -> tuple[Tensor, Tensor]:
    """O = Pv and ȯ = (P∘Ṡ)v − rowsum(P∘Ṡ)∘o + Pv̇ of some queries, Ṡ = scale·(q̇kᵀ + qk̇ᵀ)."""
    (q, q_dot), (k, k_dot), (v, v_dot) = operands
    p = block_scores(call, q, k, rows).softmax(-1)
    q, q_dot = q[:, :, rows], q_dot[:, :, rows]
    k, k_dot, v, v_dot = (x[:, :, : p.shape[-1]] for x in (k, k_dot, v, v_dot))
    # Side by side, the two terms of Ṡ, and those of ȯ, are one product each.
    turned = (torch.cat([q_dot, q], -1) @ torch.cat([k, k_dot], -1).mT).mul_(p).mul_(call.factor)
    out = p @ v
    moved = torch.cat([turned, p], -1) @ torch.cat([v, v_dot], -2)
    return out, moved.addcmul_(turned.sum(-1, keepdim=True), out, value=-1)
