"""What an audit will cost: rollouts counted, one micro-batch timed, memory from the model's size."""

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from otb_analysis.config import AuditConfig, MeasureConfig, SampleConfig, SampledSchedule, Schedule, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.measurement.level import drawn_share, first_groups, positions
from otb_analysis.measurement.measurer import GramMethod, gram_method
from otb_analysis.phases import phase, plural
from otb_analysis.recorded.runs import Layout, source_of, steps_of, stored_config
from otb_analysis.recorded.score import Policy, Scorer, check, check_groups
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.training.budget import levels, rough_duration, seconds_per_position
from otb_analysis.types import Float

DEARER = 2.0
"""Norms of all tokens may cost so many times every estimator's gradient."""
FORWARD = 0.5
"""Cost of scoring all rollouts, in forward and backward passes."""
LONG = 300.0
"""Seconds from which on a cheaper command is named; one that measures fewer steps takes about so long."""


@dataclass(frozen=True)
class AuditCost:
    """What an audit takes, forecast from its first step."""

    n_steps: int
    n_rollouts: int
    n_tokens: int  # Completion tokens, if later rollouts are as long as those of the first step
    levels: tuple[str, ...]
    seconds: float
    weights_bytes: int
    gram: GramMethod | None  # None where no step has a Gram matrix
    measure: MeasureConfig  # What the audit measures of answers so long
    cheaper: str  # Options that measure less; empty where the audit is short, or there are none
    cheaper_seconds: float  # What they take

    @property
    def sentence(self) -> str:
        """The cost in words."""
        memory = (2 * self.weights_bytes + (self.gram.memory if self.gram else 0)) / 1e9
        method = "; the Gram matrix is exact" if self.gram else ""
        if self.gram and self.gram.dim is not None:
            method = f"; the Gram matrix is sketched ({self.gram.dim:,} buckets), because {self.gram.reason}"
        if self.measure.sampled.every:
            share = f"{100 * self.measure.sampled.share:.3g}%"
            method += f"; the norms of {share} of the tokens, drawn (--norms whole: of all)"
        return (
            f"{self.n_rollouts:,} rollouts with about {self.n_tokens:,} tokens in {plural(self.n_steps, 'step')}. "
            f"Measured: {', '.join(self.levels)}{method}. It takes about {rough_duration(self.seconds)}, and at most "
            f"about {memory:.1f} GB for weights, one gradient and the Gram matrix, beside one micro-batch."
        )


def audit_cost(config: AuditConfig, policy: Policy) -> AuditCost:
    """Read all records once, time a pass over rollouts of the first step, and write nothing.

    Raises:
        InputError: Rollouts or a setting cannot work, or a record is refused.
    """
    check(config)
    source = source_of(config.rollouts, config)
    layout = Layout(source.format.runs_of_prompts, config.group_size, config.prompts)
    steps = islice(steps_of(source.records(), layout), config.first or None)
    first = next(steps, None)
    if first is None:
        raise InputError(f"{config.rollouts} holds no rollout; pass a file with at least one.")
    check_groups(config.estimator.name, first)  # before a price of what cannot be measured
    model, stored = policy[0], stored_config(config, source, "otb audit", {})
    rollouts = Scorer(config, *policy, source.tally, stored).encoder.rollouts(first)
    measure = with_norms(config, rollouts)
    trained = TrainConfig(measure=measure, sample=SampleConfig(temperature=config.temperature))
    with phase("timing one forward and backward pass"):
        each = seconds_per_position(model, rollouts, config.temperature)
    whole = len(first.records)
    gram, every = None, np.ones(whole, bool)
    if measure.exact.every or measure.gradients.every:
        plan = measure.exact if measure.exact.every else measure.gradients
        measured = first_groups(rollouts.group, every, plan.prompts)
        gram = gram_method(model, rollouts, measured, config.measure.gram, config.measure.scope)
    sizes = {first.step: whole} | {step.step: len(step.records) for step in steps}

    def seconds(measured: MeasureConfig) -> Float:
        """Return what the steps take, one after the other and added up [S]."""
        planned, forward = levels(replace(trained, measure=measured), rollouts, gram=gram), positions(rollouts, every)
        cost = [(level, level.multiple * positions(rollouts, level.rows)) for level in planned]
        due = [FORWARD * forward + sum(passes for level, passes in cost if level.due(step)) for step in sizes]
        return each * np.cumsum(np.array(due) * np.array([*sizes.values()]) / whole)

    taken, cheaper, cheaper_seconds = seconds(measure), "", 0.0
    if taken[-1] > LONG and len(sizes) > 1:
        n = max(int(np.searchsorted(taken, LONG, side="right")), 1)
        cheaper, cheaper_seconds = f"--first {n}", float(taken[n - 1])
    elif taken[-1] > LONG and (least := seconds(with_norms(replace(config, norms="none"), rollouts))[-1]) < taken[-1]:
        cheaper, cheaper_seconds = "--norms none", float(least)
    n_rollouts, n_bytes = sum(sizes.values()), sum(p.numel() * p.element_size() for p in model.parameters())
    n_tokens = round(float(rollouts.mask.sum()) * n_rollouts / whole)
    names = ("forward", *dict.fromkeys(level.name for level in levels(trained, rollouts, gram=gram)))
    return AuditCost(
        n_steps=len(sizes), n_rollouts=n_rollouts, n_tokens=n_tokens, levels=names, seconds=float(taken[-1]),
        weights_bytes=n_bytes, gram=gram, measure=measure, cheaper=cheaper, cheaper_seconds=cheaper_seconds,
    )  # fmt: skip


def with_norms(config: AuditConfig, rollouts: Rollouts) -> MeasureConfig:
    """Return what is measured of rollouts such as these: norms of all tokens, of drawn ones or of none.

    Norms of all grow with the square of the length, gradients with the length.
    """
    measure, usual = config.measure, AuditConfig().measure
    if any(getattr(measure, level) != getattr(usual, level) for level in ("exact", "gradients", "sampled")):
        return measure
    passes = {level.name: level.multiple for level in levels(TrainConfig(measure=measure), rollouts)}
    cheap = passes["exact norms"] <= DEARER * passes["Gram matrix"]
    if config.norms == "whole" or (config.norms == "auto" and cheap):
        return measure
    drawn = SampledSchedule(every=int(config.norms != "none"), share=drawn_share(rollouts), by="proxy")
    return replace(measure, exact=Schedule(), gradients=measure.exact, sampled=drawn)
