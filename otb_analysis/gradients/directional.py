"""Derivatives of every token's log-probability along one direction of the parameters, at the price of a few passes.

s_t·d = d/dε log π_{θ+εd}(y_t) at ε = 0: all tokens at once, by forward mode or by central differences.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from otb_analysis.errors import InputError
from otb_analysis.gradients.functional import Functional, scatter
from otb_analysis.gradients.gram import norm_sq_of
from otb_analysis.gradients.inputs import Rollout, microbatches
from otb_analysis.types import Float

CHANGE = 0.005
"""Aimed-at largest change of a log-probability per step: float32 rounding over it is about 1e-4 of the steepest slope,
and truncation, of the order of its square, is smaller except at tokens curved far beyond their slope."""
TRIAL, LARGEST = 1e-4, 1e-2
"""‖step·d‖/‖θ‖ of the trial step that scales the real one, and at most."""
TOLERANCE = 0.01
"""How far slopes at a step and at half of it may lie apart, relative to their norm."""
CHECKED = 16
"""One rollout in so many, but at least two, is evaluated at half the step too: those with the steepest tokens."""
ATTEMPTS = 3


@dataclass(frozen=True)
class Slopes:
    """Derivatives along a direction.

    Attributes:
        value: s·direction [N, L], zero where nothing was asked for.
        step: ε of the central differences, or None.
        step_error: ‖slopes(ε) − slopes(ε/2)‖/‖slopes(ε/2)‖ over the checked rollouts, or None.
    """

    value: Float
    step: float | None = None
    step_error: float | None = None


@torch.no_grad()  # around forward mode this only drops the reverse graph
def jvp(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Slopes:
    """Exact slopes by one forward-mode pass, on the math attention kernel since the fused ones have no such derivative.

    Args:
        function: The log-probabilities.
        rollouts: Those to differentiate.
        direction: One tensor per tensor in scope.
    """
    value = np.zeros(function.problem.shape)
    primals, tangents = tuple(function.parameters), tuple(direction)
    for batch in microbatches(rollouts):

        def logprobs(*parameters: Tensor, batch: tuple[Rollout, ...] = batch) -> Tensor:
            return function.logprobs(parameters, batch)

        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            # PyTorch scripts formulas of its own when forward mode first runs, and warns of that.
            warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
            scatter(value, batch, torch.func.jvp(logprobs, primals, tangents)[1])
    return Slopes(value)


def difference(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Slopes:
    """Slopes by central differences (two forward passes), with any attention kernel; correct to about 1e-3.

    (log π_{θ+εd} − log π_{θ−εd})/(2ε), ε scaled by a trial on a few rollouts and checked on those with the steepest
    tokens.

    Args:
        function: The log-probabilities.
        rollouts: Those to differentiate.
        direction: One tensor per tensor in scope.

    Raises:
        InputError: Slopes at a step and at half of it disagree at every step tried.
    """
    size = norm_sq_of(direction) ** 0.5
    if size == 0 or not rollouts:
        return Slopes(np.zeros(function.problem.shape), 0.0, 0.0)
    unit = (norm_sq_of(function.parameters) ** 0.5 or 1.0) / size
    some = rollouts[:: 2 * CHECKED]
    step = min(_wanted_step(_central(function, some, direction, TRIAL * unit)), LARGEST * unit)
    errors = []
    for _ in range(ATTEMPTS):
        slopes = _central(function, rollouts, direction, step)
        errors.append(_step_error(function, rollouts, direction, step, slopes))
        if errors[-1] <= TOLERANCE:
            return Slopes(slopes, step, errors[-1])
        step = min(step / 4, _wanted_step(slopes))
    raise InputError(
        f"central differences at a step and at half of it disagree by {min(errors):.1%} at best, more than "
        f'{TOLERANCE:.0%}, so the log-probabilities are too rough for them; pass method="jvp".'
    )


Method = Callable[[Functional, tuple[Rollout, ...], Sequence[Tensor]], Slopes]

METHODS: dict[str, Method] = {
    "jvp": jvp,
    "difference": difference,
}


def _central(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor], step: float) -> Float:
    def at(epsilon: float) -> Float:
        moved = [torch.add(p, d, alpha=epsilon) for p, d in zip(function.parameters, direction, strict=True)]
        return function.evaluate(moved, rollouts)

    return (at(step) - at(-step)) / (2 * step)


def _wanted_step(slopes: Float) -> float:
    steepest = float(np.abs(slopes).max())
    return CHANGE / steepest if steepest > 0 else np.inf


def _step_error(
    function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor], step: float, slopes: Float
) -> float:
    """Relative distance between slopes at a step and at half of it, on the rollouts with the steepest tokens."""
    steepest = sorted(rollouts, key=lambda r: -np.abs(slopes[r.row]).max())
    checked = tuple(steepest[: max(2, len(rollouts) // CHECKED)])
    half = _central(function, checked, direction, step / 2)
    rows = [r.row for r in checked]
    scale = float(np.linalg.norm(half[rows]))
    distance = float(np.linalg.norm(slopes[rows] - half[rows]))
    return distance / scale if scale > 0 else float(distance > 0)
