"""Which tokens make a gradient: exact signed shares of ‖ḡ‖², and their split into signal and noise.

All of it is s_{n,t}·d = d/dε log π_{θ+εd}(y_t) at ε = 0 for some direction d of the parameters, for every token at
once, by forward mode or by differences of two points.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients.batch.forward import Direction, Functional, check_direction
from otb_analysis.gradients.batch.inputs import (
    Batch,
    Rollout,
    Weights,
    check_group,
    check_weight_row,
    measured,
    shared_out,
)
from otb_analysis.gradients.exact import reference
from otb_analysis.gradients.exact.attention import forward_slopes
from otb_analysis.gradients.exact.gram import norm_sq_of
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.phases import counted
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.types import Attribution, Float, SignalNoise

TRIAL = 1e-4
"""‖ε·d‖/‖θ‖ of the first trial step: large enough for its third differences to stand above rounding."""
SHRINK, ATTEMPTS = 4.0, 6
"""A trial too far from linear is repeated at a step so many times shorter, so many times at most."""
LINEAR = 0.05
"""Truncation, relative to the slopes, up to which a trial is believed: its next term is of the order of the square."""
TOLERANCE = 0.01
"""How far slopes may lie from the trial's, relative to their norm."""
TRIED, TRIED_TOKENS, TRIED_OF = 4, 16, 2000
"""Rollouts in a trial at most, evenly spread, the first so many sampled tokens of each, and tokens of the batch for
every one of them: a trial takes four passes, which on a small batch would cost as much as the differences."""
TRUNCATION = 1e-5
"""Aimed-at truncation of a difference, relative to the slopes."""


@dataclass(frozen=True)
class Slopes:
    """Derivatives along a direction."""

    value: Float  # s·direction [N, L], zero where nothing was asked for
    step: float | None = None  # ε of the differences, or None
    # Relative distance to the slopes at the trial's longer step, corrected by its third differences, over the tokens
    # tried, or None
    step_error: float | None = None


def jvp(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Slopes:
    """Exact slopes by one forward-mode pass, with an attention that has such a derivative."""
    return Slopes(forward_slopes(function, rollouts, direction))


def difference(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Slopes:
    """Slopes by central differences, two forward passes, with any attention kernel; correct to about 3e-4.

    (log π_{θ+εd} − log π_{θ−εd})/(2ε), ε from a trial on the first tokens of a few rollouts, against which the result
    is checked. What limits it in float32 is truncation, c ε², against rounding, δ/ε: with float32 logits the two meet
    at 1e-5 to 1e-4 of ‖ḡ‖² on models of 1 and 29 M parameters. The output layer does most of the rounding, so
    `Functional.evaluate` takes the logits that matter in float64.

    Raises:
        InputError: The log-probabilities are too rough for differences.
    """
    size = norm_sq_of(direction) ** 0.5
    if size == 0 or not rollouts:
        return Slopes(np.zeros(function.batch.shape), 0.0, 0.0)
    # One copy of the scope's tensors, rewritten for every ε.
    moved = [torch.empty_like(p) for p in function.parameters]

    @torch.no_grad()
    def line(epsilon: float, some: tuple[Rollout, ...]) -> Float:  # log π_{θ+εd}
        for into, p, d in zip(moved, function.parameters, direction, strict=True):
            torch.add(p, d, alpha=epsilon, out=into)
        return function.evaluate(moved, some)

    count = max(1, min(TRIED, sum(len(r.columns) for r in rollouts) // TRIED_OF))
    # Evenly spread: neighbours in a batch often share a prompt.
    some = tuple(next(r.blocks(TRIED_TOKENS)) for r in rollouts[:: -(-len(rollouts) // count)])
    # The value in the middle does not depend on the step, so all attempts share it.
    middle = function.evaluate(function.parameters, some)
    step = TRIAL * (norm_sq_of(function.parameters) ** 0.5 or 1.0) / size
    step, expected, truncation = _trial(line, some, middle, step)
    # Truncation is quadratic in the step: take the step at which it is as small as wanted, never a longer one.
    step = step * min(1.0, (TRUNCATION / truncation) ** 0.5) if truncation else step
    slopes = (line(step, rollouts) - line(-step, rollouts)) / (2 * step)
    tried = np.zeros(slopes.shape, dtype=bool)
    for rollout in some:
        tried[rollout.row, rollout.columns] = True
    error = _relative(slopes[tried] - expected[tried], expected[tried])
    if error > TOLERANCE:
        raise _too_rough(error)
    return Slopes(slopes, step, error)


def jvp_or_difference(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Slopes:
    """Exact slopes where all operations of the model have a forward mode, else differences."""
    if function.batch.model not in _WITHOUT_FORWARD_MODE:
        try:
            return jvp(function, rollouts, direction)
        except UnfitError as reason:
            _log.info("Slopes are taken by differences: %s", reason)
            _WITHOUT_FORWARD_MODE.add(function.batch.model)
    return difference(function, rollouts, direction)


_log = logging.getLogger(__name__)
_WITHOUT_FORWARD_MODE = WeakSet[nn.Module]()
Method = Callable[[Functional, tuple[Rollout, ...], Sequence[Tensor]], Slopes]
METHODS: dict[str, Method] = {"auto": jvp_or_difference, "jvp": jvp, "difference": difference}


def _trial(
    line: Callable[[float, tuple[Rollout, ...]], Float], some: tuple[Rollout, ...], middle: Float, step: float
) -> tuple[float, Float, float]:
    """The first step, from `step` down, short enough for a few tokens, their slopes [N, L], and ‖ε² f‴/6‖/‖f′‖."""
    truncations = []
    for _ in range(ATTEMPTS):
        up, down, far = line(step, some), line(-step, some), line(2 * step, some)
        # ε² f‴/6, the truncation of a two-point difference, from the third difference; taken off the slopes.
        bend = (far - 3 * up + 3 * middle - down) / (6 * step)
        slopes = (up - down) / (2 * step) - bend
        truncations.append(_relative(bend, slopes))
        if truncations[-1] <= LINEAR:
            return step, slopes, truncations[-1]
        step /= SHRINK
    raise _too_rough(min(truncations))


def _relative(distance: Float, scale: Float) -> float:
    norm = float(np.linalg.norm(scale))
    return float(np.linalg.norm(distance)) / norm if norm > 0 else float(distance.any())


def _too_rough(error: float) -> InputError:
    return InputError(
        f"differences at two step sizes disagree by {error:.1%} at best, so the log-probabilities are too rough for "
        'them; pass method="jvp".'
    )


SUM_ERROR = 1e-3
"""How far the sum of differences' shares may be from ‖ḡ‖²: they are good to 3e-4."""
ROUNDED = 0.02
"""The same by forward mode, which is exact but for what a model rounds to half precision."""


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
    processes: Processes = SINGLE_PROCESS,
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
            passes only and checks its step) or "auto" (forward mode where all operations of the model have one).
        engine: "auto" runs `method`; "reference" is its slow twin, one backward pass per token.
        processes: Share out the rollouts: each holds the whole model, calls with the same arguments, and gets the whole
            result. They add up ḡ, as large as the weights.

    Raises:
        InputError: An argument does not fit, or the log-probabilities are too rough for differences.
        NonFiniteError: A logit, a weight or the direction is NaN or infinite.
        ProcessError: Another process failed.
    """
    run = _method(method, engine)
    with ExitStack() as copies:
        arguments = model, Batch(input_ids, mask, attention_mask), scope, temperature
        batch = processes.agreed(lambda: copies.enter_context(measured(*arguments)))
        row, function = check_weight_row(weights, batch.mask), Functional(batch)
        rollouts = shared_out(batch, processes).rollouts

        def gradient() -> Sequence[Tensor]:
            tensors = function.gradient(row, rollouts)
            # Each in memory of its own, to be summed there: two parameters may have one gradient.
            return tensors if processes.size == 1 else [x.clone(memory_format=torch.contiguous_format) for x in tensors]

        if direction is None:
            along = processes.agreed(gradient)
            processes.add_up(along)
        else:
            along = check_direction(direction, function)
        slopes, norm_sq = _slopes(processes, run, function, rollouts, along), norm_sq_of(along)
        off = direction is None and abs((row * slopes.value).sum() - norm_sq) > SUM_ERROR * norm_sq
        if slopes.step is not None and any(processes.gather(off)):
            _log.warning(
                "Differences miss the gradient's squared norm by more than %.1g: forward mode is used.", SUM_ERROR
            )
            slopes = _slopes(processes, jvp, function, rollouts, along)
    ran = engine if engine == "reference" else "jvp" if slopes.step is None else "difference"
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
    processes: Processes = SINGLE_PROCESS,
) -> SignalNoise:
    """Split every token's share of ‖ḡ‖² into what points along other prompts' gradients and along its own prompt's.

    signal = w · s·(ḡ − ḡ_p),  noise = w · s·ḡ_p,  ḡ = Σ_p ḡ_p,  ḡ_p = Σ_{n in p} Σ_t weights[n,t] s_{n,t}.

    Scores are gradients of the log-probability over the parameters in `scope`: no 1/N and no advantage factor beyond
    `weights`. With a single prompt all is noise. A token whose weight reinforces what other prompts reinforce too has
    positive signal; noise includes the token's own norm². Costs one backward pass and two forward-mode passes over the
    batch whatever the number of prompts, since ḡ_p is differentiated along on its own rollouts only.

    `signal` and `noise` are [N, L], float64, zero outside the mask; `group_norm_sq` is ‖ḡ_p‖² [P]. `group` holds the
    prompt of each rollout [N], any integers; the other arguments are those of `gradient_attribution`. Several
    `processes` share out the prompts.

    Raises:
        InputError: An argument does not fit, or the log-probabilities are too rough for differences.
        NonFiniteError: A logit or a weight is NaN or infinite.
        ProcessError: Another process failed.
    """
    run = _method(method, engine)
    with ExitStack() as copies:
        arguments = model, Batch(input_ids, mask, attention_mask), scope, temperature
        batch = processes.agreed(lambda: copies.enter_context(measured(*arguments)))
        row, prompt = check_weight_row(weights, batch.mask), check_group(group, batch.shape[0])
        function, prompts = Functional(batch), processes.shard(np.unique(prompt))
        noise = np.zeros(batch.shape)
        total = [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in function.parameters]
        # Rollouts without a weight have neither share nor gradient.
        weighted = tuple(r for r in batch.rollouts if row[r.row].any() and prompt[r.row] in prompts)

        def of_prompts() -> Float:
            power = []
            for p in counted(prompts.tolist(), "prompt"):
                members = tuple(r for r in weighted if prompt[r.row] == p)
                gradient = function.gradient(row, members)
                # Only a prompt's own rollouts: elsewhere this direction's slopes are not needed.
                noise[:] += row * run(function, members, gradient).value
                power.append(norm_sq_of(gradient))
                for into, part in zip(total, gradient, strict=True):
                    into.add_(part)
            return np.array(power)

        power = np.concatenate(processes.gather(processes.agreed(of_prompts)))
        processes.add_up(total)
        slopes, norm_sq = _slopes(processes, run, function, weighted, total), norm_sq_of(total)
    share, noise = row * slopes.value, processes.added(lambda: noise)
    _refuse_sum(share, norm_sq, ROUNDED if slopes.step is None else SUM_ERROR)
    return SignalNoise(share - noise, noise, norm_sq, power)


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


def _slopes(
    processes: Processes, run: Method, function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]
) -> Slopes:
    """Slopes of all processes' rollouts, with the longest step and the largest error of any."""
    parts = processes.gather(processes.agreed(lambda: run(function, rollouts, direction)))
    steps = [part.step for part in parts if part.step is not None]
    errors = [part.step_error for part in parts if part.step_error is not None]
    return Slopes(np.sum([part.value for part in parts], axis=0), max(steps, default=None), max(errors, default=None))


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
