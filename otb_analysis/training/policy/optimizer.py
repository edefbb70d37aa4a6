"""One optimizer step: gradient clipping, AdamW, the learning-rate schedule."""

import math

import numpy as np
import torch

from otb_analysis.config import OptimizeConfig
from otb_analysis.errors import NonFiniteError
from otb_analysis.processes import SINGLE_PROCESS, Processes, full


class PolicyOptimizer:
    """AdamW over the trained parameters; the schedule reads `batch`, the number of finished batches."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], config: OptimizeConfig, processes: Processes = SINGLE_PROCESS
    ) -> None:
        self.config, self.parameters, self.batch, self.processes = config, parameters, 0, processes
        self.optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def learning_rate(self, batch: int) -> float:
        """Return the scheduled learning rate of a batch, from 0: linear warm-up, then constant, linear or cosine."""
        config = self.config
        if batch < config.warmup_steps:
            return config.learning_rate * (batch + 1) / (config.warmup_steps + 1)
        if config.schedule == "constant":
            return config.learning_rate
        done = (batch - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        fall = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return config.learning_rate * max(0.0, fall)

    def step(self, factor: float = 1.0) -> tuple[float, float]:
        """Sum `.grad` over processes, clip, step and clear; return ‖ĝ‖ before clipping and the learning rate.

        `factor` multiplies the scheduled learning rate of this step.

        Raises:
            NonFiniteError: The gradient is not finite; nothing was changed.
        """
        rate = self.learning_rate(self.batch) * factor
        if not self.processes.sharded:  # sharded gradients were summed on their way back
            self.processes.sum_gradients(self.parameters)
        clipping = self.config.max_grad_norm or float("inf")
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.parameters, clipping)))
        if not np.isfinite(norm):
            raise NonFiniteError(f"grad_norm is {norm}; lower optimize.learning_rate.")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        torch.autograd.graph.increment_version(self.parameters)  # the fused kernel does not mark weights as written
        self.optimizer.zero_grad(set_to_none=True)
        return norm, rate

    def clips(self, norm: float) -> bool:
        """Return True when a gradient of this norm is clipped."""
        return 0 < self.config.max_grad_norm < norm
