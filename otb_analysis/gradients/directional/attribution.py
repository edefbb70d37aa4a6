"""Which tokens make a gradient: exact signed shares of ‖ḡ‖², and their split into signal and noise.

All of it is s_{n,t}·d for some direction d of the parameters, for every token at once.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients.batch.functional import Direction, Functional, check_direction
from otb_analysis.gradients.batch.inputs import Batch, Rollout, Weights, check_group, check_weight_row
from otb_analysis.gradients.batch.widening import measured
from otb_analysis.gradients.directional.directional import METHODS, Method, Slopes, jvp
from otb_analysis.gradients.exact import reference
from otb_analysis.gradients.exact.gram import norm_sq_of
from otb_analysis.phases import counted
from otb_analysis.types import Attribution, Float, SignalNoise

SUM_ERROR = 1e-3
"""How far the sum of differences' shares may be from ‖ḡ‖²: they are good to 3e-4."""
ROUNDED = 0.02
"""The same by forward mode, which is exact but for what a model rounds to half precision."""
_log = logging.getLogger(__name__)


@torch.inference_mode(False)
@torch.enable_grad()
def gradient_attribution(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    attention_mask: Tensor | None = None,
    *,
    direction: Direction | None = None,
    method: str = "jvp",
    engine: str = "auto",
    scope: str = "all",
    temperature: float = 1.0,
) -> Attribution:
    """Exact signed share of every token in the squared norm of the batch gradient.

    ‖ḡ‖² = Σ_{n,t} weights[n,t] · s_{n,t}·ḡ,  ḡ = Σ_{n,t} weights[n,t] s_{n,t}, s_{n,t} = ∇_θ log π(y_{n,t} | y_{n,<t}).

    Scores are gradients of the log-probability over the parameters in `scope`: no sign change, no 1/N and no advantage
    factor beyond `weights`. Costs one ordinary backward pass for ḡ (none with a direction) and one forward-mode pass,
    or two forward passes by differences, beside a trial of a few tokens. Σ share meets ‖ḡ‖² to 1e-6 by forward mode in
    float32, to about 1e-4 by differences: `sum_error` says how far it is. Beyond 1e-3 (DoRA holds a norm constant whose
    change differences see) forward mode takes the place of differences. The model is evaluated at other weights but
    never written to; half-precision models on float32 copies of their weights.

    `share` and `alignment` = s·direction are [N, L], float64, zero outside the mask; `norm_sq` is ‖direction‖². With an
    optimizer's step Δθ as direction, `alignment` is the first-order change of every token's log-probability, in nats.
    Arguments that are not listed are those of `token_score_norms`.

    Args:
        weights: Weight of each token's score [N, L], usually advantage / N; never read outside the mask.
        direction: Tensors by parameter name, any of a tied parameter's names; a held-out gradient from
            `batch_gradient`, say. What is left out is zero; None means ḡ.
        method: "jvp" (forward mode, exact) or "difference" (two points, correct to about 3e-4, which takes forward
            passes only and checks its step).
        engine: "auto" runs `method`; "reference" is its slow twin, one backward pass per token.

    Raises:
        InputError: An argument does not fit, or the log-probabilities are too rough for differences.
        NonFiniteError: A logit, a weight or the direction is NaN or infinite.
    """
    run = _method(method, engine)
    with measured(model, Batch(input_ids, mask, attention_mask), scope, temperature) as batch:
        row, function = check_weight_row(weights, batch.mask), Functional(batch)
        along = function.gradient(row, batch.rollouts) if direction is None else check_direction(direction, function)
        slopes, norm_sq = run(function, batch.rollouts, along), norm_sq_of(along)
        off = abs((row * slopes.value).sum() - norm_sq)
        if method == "difference" and direction is None and off > SUM_ERROR * norm_sq:
            _log.warning(
                "Differences miss the gradient's squared norm by more than %.1g: forward mode is used.", SUM_ERROR
            )
            method, slopes = "jvp", jvp(function, batch.rollouts, along)
    ran = engine if engine == "reference" else method
    share = row * slopes.value
    if direction is None:
        _refuse_sum(share, norm_sq, ROUNDED)
    sum_error = float(share.sum() / norm_sq - 1) if direction is None and norm_sq > 0 else None
    return Attribution(share, slopes.value, norm_sq, ran, slopes.step, slopes.step_error, sum_error)


@torch.inference_mode(False)
@torch.enable_grad()
def signal_noise(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    group: Tensor | np.ndarray,
    attention_mask: Tensor | None = None,
    *,
    method: str = "jvp",
    engine: str = "auto",
    scope: str = "all",
    temperature: float = 1.0,
) -> SignalNoise:
    """Split every token's share of ‖ḡ‖² into what points along other prompts' gradients and along its own prompt's.

    signal = w · s·(ḡ − ḡ_p),  noise = w · s·ḡ_p,  ḡ = Σ_p ḡ_p,  ḡ_p = Σ_{n in p} Σ_t weights[n,t] s_{n,t}.

    Scores are gradients of the log-probability over the parameters in `scope`: no 1/N and no advantage factor beyond
    `weights`. With a single prompt all is noise. A token whose weight reinforces what other prompts reinforce too has
    positive signal; noise includes the token's own norm². Costs one backward pass and two forward-mode passes over the
    batch whatever the number of prompts, since ḡ_p is differentiated along on its own rollouts only.

    `signal` and `noise` are [N, L], float64, zero outside the mask; `group_norm_sq` is ‖ḡ_p‖² [P]. `group` holds the
    prompt of each rollout [N], any integers; the other arguments are those of `gradient_attribution`.

    Raises:
        InputError: An argument does not fit, or the log-probabilities are too rough for differences.
        NonFiniteError: A logit or a weight is NaN or infinite.
    """
    run = _method(method, engine)
    with measured(model, Batch(input_ids, mask, attention_mask), scope, temperature) as batch:
        row, prompt = check_weight_row(weights, batch.mask), check_group(group, batch.shape[0])
        function = Functional(batch)
        total = [torch.zeros_like(p) for p in function.parameters]
        weighted = [r for r in batch.rollouts if row[r.row].any()]  # the others have neither share nor gradient
        noise, power = np.zeros(batch.shape), []
        for p in counted(np.unique(prompt).tolist(), "prompt"):
            members = tuple(r for r in weighted if prompt[r.row] == p)
            gradient = function.gradient(row, members)
            # Only a prompt's own rollouts: elsewhere this direction's slopes are not needed.
            noise += row * run(function, members, gradient).value
            power.append(norm_sq_of(gradient))
            for into, part in zip(total, gradient, strict=True):
                into.add_(part)
        gradient = part = None  # as large as the weights, and no part of the pass below
        share, norm_sq = row * run(function, tuple(weighted), total).value, norm_sq_of(total)
    _refuse_sum(share, norm_sq, SUM_ERROR if method == "difference" else ROUNDED)
    return SignalNoise(share - noise, noise, norm_sq, np.array(power))


@torch.inference_mode(False)
@torch.enable_grad()
def batch_gradient(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    attention_mask: Tensor | None = None,
    *,
    scope: str = "all",
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Gradient of a weighted sum of log-probabilities, as a direction for `gradient_attribution`.

    ḡ = Σ_{n,t} weights[n,t] s_{n,t}, over the parameters in `scope`: no sign change, no 1/N, no advantage factor beyond
    `weights` [N, L]. On held-out rollouts with their advantages it is the direction in which held-out reward grows.
    One tensor per parameter name, a tied parameter once; float32 for half-precision models. The other arguments are
    those of `token_score_norms`.

    Raises:
        InputError: An argument does not fit; the sentence says what and what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
    """
    with measured(model, Batch(input_ids, mask, attention_mask), scope, temperature) as batch:
        gradient = Functional(batch).gradient(check_weight_row(weights, batch.mask), batch.rollouts)
    return dict(zip(batch.scope.names, gradient, strict=True))


def _refuse_sum(share: Float, norm_sq: float, limit: float) -> None:
    """Raise where shares that sum to ‖ḡ‖² by definition do not: the model's gradient is no derivative of its output."""
    # Shares that nearly cancel leave their rounding, so it is their own size that a sum is held against.
    if abs(share.sum() - norm_sq) > limit * max(norm_sq, float(np.abs(share).sum())):
        raise InputError(
            f"shares sum to {share.sum():.6g} where the squared norm of the gradient is {norm_sq:.6g}, so some "
            'operation has a gradient that is not its derivative; pass method="jvp", or engine="reference".'
        )


def _method(method: str, engine: str) -> Method:
    if method not in METHODS:
        raise InputError(f"method is {method!r}; {nearest(method, METHODS)}")
    if engine not in ("auto", "reference"):
        raise InputError(f"engine {engine!r} does not attribute gradients; pass one of: reference, auto.")
    return _slow_twin if engine == "reference" else METHODS[method]


def _slow_twin(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Slopes:
    return Slopes(reference.token_alignments(replace(function.batch, rollouts=rollouts), direction))
