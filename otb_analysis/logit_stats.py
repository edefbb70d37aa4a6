"""Statistics of the distribution each token was drawn from, by tiles of rows × vocabulary; [N, T, V] is never held.

With y the drawn token and m the largest *other* logit, five sums over v ≠ y of e_v = exp(z_v − m) and d_v = z_v − m ≤ 0
are enough: Σe, Σe², Σe³, Σe·d, Σe·d². Every term has one sign, so nothing cancels, however peaked π is:

    ℓ = lse(z) − m = log(Σe + exp(z_y − m)) ≥ 0      r = exp(−ℓ)
    1 − π_y = r·Σe                                    Σ_{v≠y} π_v² = r²·Σe²
    H = −π_y log π_y + r·(ℓ·Σe − Σe·d)                Σ_v π_v log² π_v = π_y log² π_y + r·(Σe·d² − 2ℓ·Σe·d + ℓ²·Σe)
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otb_analysis.devices import widenable, working_set
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.types import LogitStats

ROWS = {"logits": 32, "hidden": 256}
"""Rows per tile, at most: enough for a matrix product to run at full speed; of given logits few, read in long runs."""
ENTRIES = 1 << 17
"""Entries per tile on a CPU: three buffers of them, 1.5 MB in float32, stay in a core's cache."""
PROMOTED = 1 << 19
"""Entries of the output matrix that are promoted to float32 at once where it is held in fewer bits."""
MERGED = 1 << 11
"""Slices times rows that are merged at once, in float64."""


def _merged(sums: Tensor) -> Tensor:
    """Bring the sums of every slice to the largest top and add them up [6, R], float64."""
    tops, e, e2, e3, ed, ed2 = widenable(sums).double()
    top = tops.amax(0)
    c = tops - top
    f = c.exp()
    e, ed, ed2 = f * e, f * (ed + c * e), f * (ed2 + 2 * c * ed + c * c * e)
    e2, e3 = f**2 * e2, f**3 * e3
    return torch.stack([top, *(x.sum(0) for x in (e, e2, e3, ed, ed2))])


def _sum_over_tiles(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: float, y: Tensor, chunk: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Sum over all other logits of every row.

    Vocabulary outside, rows inside: each slice of the output matrix is read and promoted once.

    Args:
        values: Logits [R, V] where there is no output layer, else hidden states [R, d].

    Returns:
        float64: m, the largest z_v of v ≠ y, then Σe, Σe², Σe³, Σe·d and Σe·d² [6, R]; and z_y [R].
    """
    dtype = torch.promote_types(values.dtype, torch.float32)  # of the arithmetic: bfloat16 and float16 are promoted
    vocabulary = values.shape[-1] if weight is None else len(weight)
    across, down = list(_spans(vocabulary, chunk[1])), list(_spans(len(y), chunk[0]))
    entries = max(b - a for a, b in across) * max(b - a for a, b in down)
    z, e, product = values.new_empty(3, entries, dtype=dtype)
    sums = values.new_empty(6, len(across), len(y), dtype=dtype)
    drawn = values.new_empty(len(y), dtype=dtype)
    halves = weight is not None and {values.dtype, weight.dtype} == {torch.bfloat16}
    # Of hidden states all at once: d numbers a row, where the logits would be V.
    values = values if weight is None else values.to(dtype)
    with _bfloat16_products() if halves and values.device.type == "cpu" else nullcontext():
        for s, (low, high) in enumerate(across):
            part = values[:, low:high] if weight is None else weight[low:high].to(dtype)
            shift = None if bias is None or weight is None else bias[low:high].to(dtype)
            for first, last in down:
                shape = last - first, high - low
                tile = [x[: shape[0] * shape[1]].view(shape) for x in (z, e, product)]
                if weight is None:
                    tile[0].copy_(part[first:last])
                else:
                    torch.mm(values[first:last], part.T, out=tile[0])
                if shift is not None:
                    tile[0].add_(shift)
                if temperature != 1:
                    tile[0].div_(temperature)
                _sum_tile(tile, y[first:last] - low, sums[:, s, first:last], drawn[first:last])
    rows = max(1, MERGED // len(across))
    merged = torch.cat([_merged(slices) for slices in sums.split(rows, dim=-1)], dim=-1)
    return merged, widenable(drawn).double()


def _sum_tile(tile: list[Tensor], y: Tensor, sums: Tensor, drawn: Tensor) -> None:
    """Sum over one tile, which is overwritten; `y` is the drawn token's column in it, or any other number."""
    z, e, product = tile
    inside = ((y >= 0) & (y < z.shape[1])).nonzero()[:, 0]
    at, flat = inside * z.shape[1] + y[inside], z.view(-1)
    drawn[inside] = flat[at]
    flat.index_fill_(0, at, -torch.inf)
    top = torch.amax(z, -1, out=sums[0])
    torch.exp(z.sub_(top[:, None]), out=e)
    flat.index_fill_(0, at, 0.0)
    torch.sum(e, -1, out=sums[1])
    torch.sum(torch.mul(e, z, out=product), -1, out=sums[4])
    torch.sum(product.mul_(z), -1, out=sums[5])
    # Below the cube root of the smallest normal number, 2e-13 in float32, e³ is subnormal, which is 30 times slower.
    torch.threshold_(e, torch.finfo(e.dtype).tiny ** (1 / 3), 0.0)
    torch.sum(torch.mul(e, e, out=product), -1, out=sums[2])
    torch.sum(product.mul_(e), -1, out=sums[3])


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Form matrix products of bfloat16 numbers by bfloat16 instructions, where a processor has them.

    The product of two bfloat16 numbers is exact in float32, and the sums stay in float32, so nothing is rounded that
    the promoted product would not round. It is a setting of the process, so it is put back at once.
    """
    settings: Any = torch.backends.mkldnn
    before = settings.matmul.fp32_precision
    settings.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.matmul.fp32_precision = before


def _spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut 0..total into near-equal parts of at least `size` where possible, so that no part has a single entry."""
    parts = max(1, total // max(size, 2))
    return pairwise(total * k // parts for k in range(parts + 1))


__all__ = ["logit_stats"]


@torch.no_grad()
def logit_stats(
    logits: Tensor | None = None,
    *,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    token_ids: Tensor,
    temperature: float = 1.0,
    chunk: tuple[int, int] | None = None,
) -> LogitStats:
    """Log-probability, entropy, Σπ², logit-space energy and certificate variances of drawn tokens.

    π = softmax(logits / τ), w = ‖∇_z log π_y‖² = ‖e_y − π‖² = (1 − π_y)² + Σ_{v≠y} π_v² ∈ [0, 2].

    The energy is the gradient of the log-probability with respect to the logits *after* temperature: no 1/N, no
    advantage factor. ‖∇ of an untied output matrix‖² = w·‖h‖²/τ² exactly; other parameters' norms only correlate with
    it. The textbook form 1 − 2π_y + Σπ² cancels on peaked tokens; this one does not. Uniform π gives w = 1 − 1/V.

    Pass either `logits` [..., V], or the final `hidden` states [..., d] that predict the tokens and the output `weight`
    [V, d] and `bias` [V]. The arrays are float64, of the shape of `token_ids`; logprob and entropy in nats,
    logprob_variance in nats²; `hidden_norm_sq` only if `hidden` was passed. `chunk` is the rows and vocabulary entries
    per tile; None chooses tiles that stay in a core's cache.

    Raises:
        InputError: Shapes disagree, a token id is outside the vocabulary, or the temperature is not positive.
        NonFiniteError: A logit is NaN or infinite; the sentence names row and position.
    """
    shape = tuple(token_ids.shape)
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature is {temperature}; pass a positive number, 1.0 for the model's own distribution.")
    if (logits is None) == (hidden is None) or (hidden is None) != (weight is None):
        raise InputError("logit_stats takes either logits, or hidden and weight together; pass exactly one of the two.")
    values, name = (logits, "logits") if hidden is None else (hidden, "hidden")
    assert values is not None
    if values.shape[:-1] != shape:
        raise InputError(
            f"{name} has shape {tuple(values.shape)} but token_ids has shape {shape}; "
            f"pass one row per token, shape {[*shape, values.shape[-1]]}."
        )
    if weight is not None and (weight.ndim != 2 or weight.shape[1] != values.shape[-1]):
        raise InputError(
            f"weight has shape {tuple(weight.shape)} but hidden has {values.shape[-1]} features; "
            "pass the output matrix, shape [V, d]."
        )
    values = values.reshape(-1, values.shape[-1])
    y, vocabulary = token_ids.reshape(-1).long(), values.shape[-1] if weight is None else len(weight)
    if vocabulary < 2:
        raise InputError("logits has a vocabulary of one entry; pass at least two.")
    outside = (y < 0) | (y >= vocabulary)
    if outside.any():
        index = int(outside.nonzero()[0])
        raise InputError(
            f"token_ids is {int(y[index])} at {_row_and_position(index, shape)} but the vocabulary has {vocabulary} "
            "entries; pass ids of drawn tokens, without padding."
        )
    # Few rows get long tiles, so that every tile is worth its calls.
    rows = max(1, min(ROWS["logits" if weight is None else "hidden"], len(values)))
    columns = working_set(values.device, ENTRIES) // rows
    if weight is not None and weight.dtype != torch.promote_types(values.dtype, torch.float32):
        columns = min(columns, max(PROMOTED // weight.shape[1], 128))
    if columns > vocabulary:  # a small vocabulary gets more rows, for the same reason
        rows = max(rows, min(rows * columns // vocabulary, len(values)))
    tile = chunk or (rows, columns)
    sums, drawn = _sum_over_tiles(values, weight, bias, temperature, y.to(values.device), tile)
    # Any NaN or infinity among the other logits has turned Σe·d into NaN; the drawn one is looked at itself.
    bad = ~(sums[4].isfinite() & drawn.isfinite())
    if bad.any():
        raise NonFiniteError(
            f"logits are not finite at {_row_and_position(int(bad.nonzero()[0]), shape)}; "
            "check the model's weights for NaN or infinity, or load it in float32."
        )
    stats = {name: value.reshape(shape).cpu().numpy() for name, value in _finish(sums, drawn).items()}
    norm_sq = None if hidden is None else widenable(hidden).double().square().sum(-1).reshape(shape).cpu().numpy()
    return LogitStats(hidden_norm_sq=norm_sq, **stats)


def _finish(sums: Tensor, drawn: Tensor) -> dict[str, Tensor]:
    """The formulas of the module's docstring."""
    top, e, e2, e3, ed, ed2 = sums
    size = torch.logaddexp(e.log(), drawn - top)
    r = (-size).exp()
    against = e.log() + top - drawn
    logprob = -torch.logaddexp(against, torch.zeros_like(against))
    pi, rest = logprob.exp(), r * e
    sum_pi_sq = pi**2 + r**2 * e2
    entropy = -pi * logprob + r * (size * e - ed)
    second = pi * logprob**2 + r * (ed2 - 2 * size * ed + size**2 * e)
    return {
        "logprob": logprob,
        "entropy": entropy,
        "sum_pi_sq": sum_pi_sq,
        "energy": (rest**2 + r**2 * e2).clamp(max=2.0),
        "pi_variance": (pi**3 + r**3 * e3 - sum_pi_sq**2).clamp(min=0.0),
        "logprob_variance": (second - entropy**2).clamp(min=0.0),
    }


def _row_and_position(index: int, shape: tuple[int, ...]) -> str:
    *row, position = (int(i) for i in np.unravel_index(index, shape)) if shape else (0,)
    return f"row {', '.join(map(str, row))}, position {position}" if row else f"position {position}"
