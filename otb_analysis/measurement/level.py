"""What every level of measuring is: one class that holds all of it, what it measures and its cost.

All numbers are per completion token [N, T]; NaN where nothing is known.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from otb_analysis.measurement.table import TokenTable
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float, Int


@dataclass
class MeasuredPolicy:
    """A policy and the settings with which its gradients are measured."""

    model: PreTrainedModel
    scope: str
    temperature: float
    engine: str = "auto"  # The engine of exact norms; what is estimated or drawn has one of its own
    slopes: str = "jvp"  # How slopes are taken; "difference" once the attention turned out to have no forward mode

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of everything that measures gradients."""
        return {"scope": self.scope, "temperature": self.temperature}


@dataclass(frozen=True)
class MeasuredStep:
    """What a level can read of a step; made by `GradientMeasurer.measure`."""

    policy: MeasuredPolicy
    step: int  # Seeds what is drawn
    rollouts: Rollouts
    table: TokenTable
    # Returns what multiplies each score in the first update [N, T], zero outside the mask; by default that is A/N.
    weights: Callable[[], Float]


class Level(ABC):
    """One way of measuring. Its schedule is the field of `MeasureConfig` of the same name, or stands in `further`."""

    phase: str  # What is measured, in words: its phase on the screen, and its name in a warning

    @abstractmethod
    def measure(self, step: MeasuredStep, plan: Any, known: TokenMeasurements) -> TokenMeasurements:
        """Return what is known of a step with what this level adds; `plan` is its schedule."""

    @abstractmethod
    def passes(self, plan: Any, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of measuring some rollouts, in forward and backward passes of them, for the forecast."""

    def words(self, plan: Any) -> str:
        """Return what is measured, as the forecast says it."""
        return self.phase


def by_policy_token(rollouts: Rollouts, by_column: Float, rows: Bool | Int | slice = slice(None)) -> Float:
    """Return numbers by column [n, L] of some rollouts as [N, T], NaN elsewhere and where the policy did not sample."""
    inside = rollouts.policy_tokens()
    out = np.full(inside.shape, np.nan)
    out[rows] = np.where(inside[rows], rollouts.by_token(by_column, rows), np.nan)
    return out


def first_groups(group: Int, left: Bool, prompts: int) -> Bool:
    """Return True at the rollouts of the first groups that are `left` [N], all of them where `prompts` is 0.

    Prompts come in random order.
    """
    return np.isin(group, np.unique(group[left])[: prompts or None])


def seen(rollouts: Rollouts, rows: Bool) -> float:
    """Return Σ_t (tokens before t)/L over the policy's tokens, the mean over rollouts weighed by their lengths L."""
    mask = rollouts.mask[rows]
    return float(mask @ np.arange(mask.shape[1]) @ np.ones(len(mask)) / max(positions(rollouts, rows), 1))


def positions(rollouts: Rollouts, rows: Bool) -> int:
    """Return the tokens of some rollouts, prompts included."""
    return int(rollouts.attention_mask[rows].sum())


def read_once(rollouts: Rollouts, rows: Bool) -> float:
    """Return the share of some rollouts' positions that is left when each prompt is read once for all its rollouts."""
    index = np.flatnonzero(rows)
    _, first = np.unique(rollouts.group[index], return_index=True)
    again = rollouts.prompt_length[index].sum() - rollouts.prompt_length[index[first]].sum()
    return 1.0 - float(again) / max(positions(rollouts, rows), 1)
