"""Statistics of the distribution each token was drawn from, by tiles of rows × vocabulary; [N, T, V] is never held.

With y the drawn token and m the largest *other* logit, five sums over v ≠ y of e_v = exp(z_v − m) and d_v = z_v − m ≤ 0
are enough: Σe, Σe², Σe³, Σe·d, Σe·d². Every term has one sign, so nothing cancels, however peaked π is:

    ℓ = lse(z) − m = log(Σe + exp(z_y − m)) ≥ 0      r = exp(−ℓ)
    1 − π_y = r·Σe                                    Σ_{v≠y} π_v² = r²·Σe²
    H = −π_y log π_y + r·(ℓ·Σe − Σe·d)                Σ_v π_v log² π_v = π_y log² π_y + r·(Σe·d² − 2ℓ·Σe·d + ℓ²·Σe)
"""

import numpy as np
import torch
from torch import Tensor

from otb_analysis.devices import widenable
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.logit_stats.tiles import Others, Source, sum_over_tiles
from otb_analysis.types import LogitStats

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
    source = _source(logits, hidden, weight, bias, shape, temperature)
    y = _tokens(token_ids, source.vocabulary, shape)
    others = sum_over_tiles(source, y.to(source.values.device), chunk or source.chunk())
    _refuse_non_finite(others, shape)
    values = {name: value.reshape(shape).cpu().numpy() for name, value in _finish(others).items()}
    norm_sq = None if hidden is None else widenable(hidden).double().square().sum(-1).reshape(shape).cpu().numpy()
    return LogitStats(hidden_norm_sq=norm_sq, **values)


def _finish(s: Others) -> dict[str, Tensor]:
    """The formulas of the module's docstring."""
    size = torch.logaddexp(s.e.log(), s.drawn - s.top)
    r = (-size).exp()
    against = s.e.log() + s.top - s.drawn
    logprob = -torch.logaddexp(against, torch.zeros_like(against))
    pi, rest = logprob.exp(), r * s.e
    sum_pi_sq = pi**2 + r**2 * s.e2
    entropy = -pi * logprob + r * (size * s.e - s.ed)
    second = pi * logprob**2 + r * (s.ed2 - 2 * size * s.ed + size**2 * s.e)
    return {
        "logprob": logprob,
        "entropy": entropy,
        "sum_pi_sq": sum_pi_sq,
        "energy": (rest**2 + r**2 * s.e2).clamp(max=2.0),
        "pi_variance": (pi**3 + r**3 * s.e3 - sum_pi_sq**2).clamp(min=0.0),
        "logprob_variance": (second - entropy**2).clamp(min=0.0),
    }


def _source(
    logits: Tensor | None,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    temperature: float,
) -> Source:
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
    source = Source(values.reshape(-1, values.shape[-1]), weight, bias, temperature)
    if source.vocabulary < 2:
        raise InputError("logits has a vocabulary of one entry; pass at least two.")
    return source


def _tokens(token_ids: Tensor, vocabulary: int, shape: tuple[int, ...]) -> Tensor:
    y = token_ids.reshape(-1).long()
    outside = (y < 0) | (y >= vocabulary)
    if outside.any():
        index = int(outside.nonzero()[0])
        raise InputError(
            f"token_ids is {int(y[index])} at {_place(index, shape)} but the vocabulary has {vocabulary} entries; "
            "pass ids of drawn tokens, without padding."
        )
    return y


def _refuse_non_finite(others: Others, shape: tuple[int, ...]) -> None:
    """Any NaN or infinity among the other logits has turned Σe·d into NaN; the drawn one is looked at itself."""
    bad = ~(others.ed.isfinite() & others.drawn.isfinite())
    if bad.any():
        raise NonFiniteError(
            f"logits are not finite at {_place(int(bad.nonzero()[0]), shape)}; "
            "check the model's weights for NaN or infinity, or load it in float32."
        )


def _place(index: int, shape: tuple[int, ...]) -> str:
    *row, position = (int(i) for i in np.unravel_index(index, shape)) if shape else (0,)
    return f"row {', '.join(map(str, row))}, position {position}" if row else f"position {position}"
