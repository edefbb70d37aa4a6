"""Who holds the gradient of a step: shares by prompt, rollout and token, or why that is not known."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from otb_analysis.diagnostics import LEVELS, StepAttribution
from otb_analysis.errors import InputError
from otb_analysis.figures.attribution import attribution_table
from otb_analysis.figures.numbers import number
from otb_analysis.store import RunStore, attributed_steps, step_attribution

RECORDED = ("model", "rollouts", "format", "prompts", "group_size", "text", "ended", "temperature")
"""Settings of `otb score` that say which rollouts are measured, and how they were sampled."""


@dataclass(frozen=True)
class Attributed:
    """The attribution of one step, with what its holders are."""

    shares: StepAttribution
    tokens: pd.DataFrame  # rollout, t and text of the step's tokens
    rollouts: pd.DataFrame  # group, rollout, prompt and reward

    @property
    def says(self) -> str:
        """The attribution in two sentences."""
        return attribution_line(self.shares)

    def holders(self, level: str, top: int | None = None) -> pd.DataFrame:
        """Return the holders of a level with the largest shares, shares of ‖ḡ‖² as fractions; `top` None keeps all."""
        of = self.shares.at(level)
        return attribution_table(self.shares, of if top is None else of.head(top), self.tokens, self.rollouts)

    def record(self, top: int) -> dict[str, object]:
        """Return the numbers of all levels for JSON."""
        counts = {level: len(self.shares.at(level)) for level in LEVELS}
        about: dict[str, object] = {
            "step": self.shares.step,
            "grad_norm_sq": self.shares.norm_sq,
            "says": self.says,
            "holders": counts,
        }
        return about | {f"{level}s": self.holders(level, top) for level in LEVELS}


@dataclass(frozen=True)
class NotAttributed:
    """Why a step has no attribution."""

    step: int
    missing: str  # In a sentence or two, with what measures it
    command: str  # Empty where it is not known
    nearest: int | None  # The nearest step that has one


def attribution_of(store: RunStore, config: Mapping[str, Any], step: int) -> Attributed | NotAttributed:
    """Return who holds ‖ḡ‖² at a step of a run, or why that is not known.

    Raises:
        InputError: The run has no such step.
        StoreError: It cannot be read.
    """
    steps, attributed = store.complete_steps(), attributed_steps(store)
    if step not in steps:
        raise InputError(f"--step is {step}, but {store.path.name} has steps {steps[0]} to {steps[-1]}; pass one.")
    if step not in attributed:
        missing, near = _nearest(step, attributed)
        how, command = attribution_command(str(store.path), config, step)
        return NotAttributed(step, f"{missing} {how}", command, near)
    tokens = store.tokens_df([step], ["rollout", "t", "token"])
    rollouts = store.rollouts_df([step], ["group", "rollout", "prompt", "reward"])
    return Attributed(step_attribution(store, step), tokens, rollouts)


def _nearest(step: int, attributed: Sequence[int]) -> tuple[str, int | None]:
    """Return that a step has no attribution, and the nearest step that has, None where none has."""
    if not attributed:
        return "No step of this run says which tokens held its gradient.", None
    near = min(attributed, key=lambda other: abs(other - step))
    return f"Step {step} has no attribution; the nearest step that has is {near}.", near


def attribution_command(run: str, config: Mapping[str, Any], step: int) -> tuple[str, str]:
    """Return how a step's attribution is measured for a run that lacks it: a sentence, and the command if it is known.

    A past step's weights are gone, so a trained run is trained again from its configuration and seed.
    """
    path = Path(run)
    if "optimize" in config:
        command = ["train", "--config", str(path / "run.json"), "--run", f"{path.name}-attributed"]
        command += ["--measure.attribution.first", str(step), "--measure.attribution.every", "1"]
        return f"This trains the run again, from the same seed, and measures it from step {step} on:", _otb(command)
    if config.get("model") and config.get("rollouts"):
        same = [w for name in RECORDED if name in config for w in (f"--{name.replace('_', '-')}", str(config[name]))]
        command = ["score", *same, "--root", str(path.parent), "--run", f"{path.name}-attributed"]
        return "This scores the same rollouts again and measures it:", _otb(
            [*command, "--measure.attribution.every", "1"]
        )
    return "`otb train --measure.attribution.every 1` measures every step, `otb audit` those of recorded rollouts.", ""


def _otb(words: Sequence[str]) -> str:
    return shlex.join(["otb", *words])


def attribution_line(attribution: StepAttribution) -> str:
    """Return in two sentences how few tokens decide a step's update, and how much of it is signal."""
    few, total = attribution.tokens.holding(), len(attribution.tokens)
    text = (
        f"At step {attribution.step} {few:,} of {total:,} tokens ({few / total:.1%}) hold half of the gradient, by "
        f"the size of their shares. Its squared length ‖ḡ‖² is {number(attribution.norm_sq)}"
    )
    if attribution.signal_total is None or attribution.noise_total is None:
        return f"{text}; signal and noise were not measured (--measure.attribution.split)."
    return (
        f"{text}: {number(attribution.signal_total)} is signal, which prompts have in common, and "
        f"{number(attribution.noise_total)} is noise, each prompt's own."
    )
