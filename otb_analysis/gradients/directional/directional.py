"""Derivatives of every token's log-probability along one direction of the parameters, at the price of a few passes.

s_t·d = d/dε log π_{θ+εd}(y_t) at ε = 0: all tokens at once, by forward mode or by differences of two points.

What limits differences in float32: the error of a sum of shares is truncation, c ε², against rounding, δ/ε. With
float32 logits the two meet at 1e-5 to 1e-4 of ‖ḡ‖² on random and trained models of 1 and 29 M parameters. The output
layer does most of the rounding, so `Functional.evaluate` takes the logits that matter in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.functional import Functional, scatter
from otb_analysis.gradients.batch.inputs import Rollout
from otb_analysis.gradients.directional.forward_mode import derivative
from otb_analysis.gradients.exact.gram import norm_sq_of
from otb_analysis.types import Float

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
    value = np.zeros(function.batch.shape)
    for micro, layout in function.microbatches(rollouts):
        logprobs = partial(function.logprobs, rollouts=micro, layout=layout)
        moved = derivative(logprobs, function.parameters, direction)
        scatter(value, micro, moved)
    return Slopes(value)


def difference(function: Functional, rollouts: tuple[Rollout, ...], direction: Sequence[Tensor]) -> Slopes:
    """Slopes by central differences, two forward passes, with any attention kernel; correct to about 3e-4.

    (log π_{θ+εd} − log π_{θ−εd})/(2ε), ε from a trial on the first tokens of a few rollouts, against which the result
    is checked.

    Raises:
        InputError: The log-probabilities are too rough for differences.
    """
    size = norm_sq_of(direction) ** 0.5
    if size == 0 or not rollouts:
        return Slopes(np.zeros(function.batch.shape), 0.0, 0.0)
    line = _Line(function, direction)
    trial = _trial(line, rollouts, TRIAL * (norm_sq_of(function.parameters) ** 0.5 or 1.0) / size)
    # Truncation is quadratic in the step: take the step at which it is as small as wanted, never a longer one.
    step = trial.step * min(1.0, (TRUNCATION / trial.truncation) ** 0.5) if trial.truncation else trial.step
    slopes = (line(step, rollouts) - line(-step, rollouts)) / (2 * step)
    tried = np.zeros(slopes.shape, dtype=bool)
    for rollout in trial.rollouts:
        tried[rollout.row, rollout.columns] = True
    error = _relative(slopes[tried] - trial.slopes[tried], trial.slopes[tried])
    if error > TOLERANCE:
        raise _too_rough(error)
    return Slopes(slopes, step, error)


Method = Callable[[Functional, tuple[Rollout, ...], Sequence[Tensor]], Slopes]
METHODS: dict[str, Method] = {"jvp": jvp, "difference": difference}


class _Line:
    """f(ε) = log π_{θ+εd}."""

    def __init__(self, function: Functional, direction: Sequence[Tensor]) -> None:
        self.function, self.direction = function, direction
        # One copy of the scope's tensors, rewritten for every ε.
        self.moved = [torch.empty_like(p) for p in function.parameters]

    @torch.no_grad()
    def __call__(self, epsilon: float, rollouts: tuple[Rollout, ...]) -> Float:
        for into, p, d in zip(self.moved, self.function.parameters, self.direction, strict=True):
            torch.add(p, d, alpha=epsilon, out=into)
        return self.function.evaluate(self.moved, rollouts)


@dataclass(frozen=True)
class _Trial:
    """Slopes of a few tokens at a known step."""

    rollouts: tuple[Rollout, ...]  # The tokens tried
    slopes: Float  # Their slopes with the truncation taken off [N, L]
    step: float  # ε of the trial
    truncation: float  # ‖ε² f‴/6‖/‖f′‖


def _trial(line: _Line, rollouts: tuple[Rollout, ...], step: float) -> _Trial:
    """Third differences of a few tokens at the first step, from `step` down, that is short enough for them."""
    tried = max(1, min(TRIED, sum(len(r.columns) for r in rollouts) // TRIED_OF))
    # Evenly spread: neighbours in a batch often share a prompt.
    spread = rollouts[:: -(-len(rollouts) // tried)]
    some = tuple(next(r.blocks(TRIED_TOKENS)) for r in spread)
    # The value in the middle does not depend on the step, so all attempts share it.
    middle = line.function.evaluate(line.function.parameters, some)
    truncations = []
    for _ in range(ATTEMPTS):
        up, down, far = line(step, some), line(-step, some), line(2 * step, some)
        # ε² f‴/6, the truncation of a two-point difference, from the third difference; taken off the slopes.
        bend = (far - 3 * up + 3 * middle - down) / (6 * step)
        slopes = (up - down) / (2 * step) - bend
        truncations.append(_relative(bend, slopes))
        if truncations[-1] <= LINEAR:
            return _Trial(some, slopes, step, truncations[-1])
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
