"""Attention that carries a derivative along with its output, in blocks of queries, for one pass in forward mode.

PyTorch's fused kernels have no forward-mode derivative, and the plain one holds several arrays [rollouts, heads,
positions, positions] for keys that a causal mask hides. Here a block of queries meets only the keys it may see.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor

from otb_analysis.gradients.exact.attention import AttentionCall, ReplacedAttention

QUERIES = 64
"""Queries of one block: later keys are skipped, and the block's scores stay in cache."""


@torch.no_grad()  # around forward mode this only drops the reverse graph
def derivative(
    function: Callable[[Sequence[Tensor]], Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    """Derivative of a function of several tensors along one direction, by forward mode.

    d/dε f(x + εẋ) at ε = 0, exact up to rounding; one pass, no graph.

    Args:
        function: From tensors shaped like `primals` to one tensor.
        primals: x.
        tangents: ẋ, one per primal.

    Returns:
        The derivative, of the shape of the function's value; zeros where nothing moves it.
    """
    with fwd.dual_level(), DualAttention(), warnings.catch_warnings():
        # PyTorch scripts formulas of its own when forward mode first runs, and warns of that.
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
        duals = [fwd.make_dual(x.detach(), t.to(x)) for x, t in zip(primals, tangents, strict=True)]
        value, moved = fwd.unpack_dual(function(duals))
        return torch.zeros_like(value) if moved is None else moved.clone()


class DualAttention(ReplacedAttention):
    """Inside this context `scaled_dot_product_attention` has a forward-mode derivative.

    Calls that it does not follow (active dropout, a mask that itself moves) run in PyTorch's plain form, which has one.
    """

    def __init__(self) -> None:
        super().__init__(_attend)


def _attend(call: AttentionCall) -> Tensor | None:
    query, mask, causal = call.query, call.attn_mask, call.is_causal
    moving_mask = mask is not None and fwd.unpack_dual(mask).tangent is not None
    if call.dropout_p or moving_mask or query.ndim != 4:
        return None
    repeats = query.shape[1] // call.key.shape[1] if call.enable_gqa else 1
    operands = [_parts(x, n) for x, n in ((query, 1), (call.key, repeats), (call.value, repeats))]
    length, keys = query.shape[2], call.key.shape[2]
    blocks = []
    for start in range(0, length, QUERIES):
        rows = slice(start, min(start + QUERIES, length))
        seen = slice(0, rows.stop if causal else keys)
        hidden = _hidden(mask, causal, rows, seen, query)
        blocks.append(_block(operands, rows, seen, hidden, call.factor))
    primal, tangent = (torch.cat(part, dim=2) for part in zip(*blocks, strict=True))
    return fwd.make_dual(primal, tangent)


def _parts(x: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    """Value and derivative [n, h, T, d] of an operand; keys and values are repeated for the heads that share them."""
    primal, tangent = fwd.unpack_dual(x)
    moved = torch.zeros_like(primal) if tangent is None else tangent
    if repeats == 1:
        return primal, moved
    return primal.repeat_interleave(repeats, 1), moved.repeat_interleave(repeats, 1)


def _hidden(mask: Tensor | None, causal: bool, rows: slice, seen: slice, like: Tensor) -> Tensor | None:
    """What is added to a block's scores, broadcastable to [n, h, rows, keys]."""
    if mask is None and not causal:
        return None
    added = torch.zeros(rows.stop - rows.start, seen.stop, dtype=like.dtype, device=like.device)
    if causal:
        ahead = torch.ones(added.shape, dtype=torch.bool, device=like.device).triu(rows.start + 1)
        added = added.masked_fill_(ahead, -torch.inf)
    if mask is None:
        return added
    part = fwd.unpack_dual(mask).primal[..., rows if mask.shape[-2] > 1 else slice(None), seen]
    if part.dtype == torch.bool:
        return torch.zeros(part.shape, dtype=like.dtype, device=like.device).masked_fill_(~part, -torch.inf) + added
    return part + added


def _block(
    operands: Sequence[tuple[Tensor, Tensor]], rows: slice, seen: slice, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o = Pv and ȯ = (P∘Ṡ)v − rowsum(P∘Ṡ)∘o + Pv̇ of some queries, Ṡ = scale·(q̇kᵀ + qk̇ᵀ)."""
    (q, q_dot), (k, k_dot), (v, v_dot) = operands
    q, q_dot, k, k_dot, v, v_dot = q[:, :, rows], q_dot[:, :, rows], *(x[:, :, seen] for x in (k, k_dot, v, v_dot))
    scores = (q @ k.mT).mul_(scale)
    if hidden is not None:
        scores = scores.add_(hidden) if hidden.dtype == scores.dtype else scores + hidden
    p = scores.softmax(-1)
    turned = (torch.cat([q_dot, q], -1) @ torch.cat([k, k_dot], -1).mT).mul_(p).mul_(scale)
    out = p @ v
    moved = torch.cat([turned, p], -1) @ torch.cat([v, v_dot], -2)
    return out, moved.addcmul_(turned.sum(-1, keepdim=True), out, value=-1)
