"""At which steps which quantity is measured, and with what it is evaluated."""

from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True)
class StepSchedule:
    """When a level of measurement runs."""

    every: int = 0  # Steps between two measurements; 0 turns the level off.
    first: int = field(default=0, kw_only=True)  # The first step that is measured.

    def due(self, step: int) -> bool:
        """Return True when the level runs at this step."""
        return self.every > 0 and step >= self.first and (step - self.first) % self.every == 0


@dataclass(frozen=True)
class Schedule(StepSchedule):
    """When a level of measurement runs, and on how many whole groups."""

    prompts: int = 0  # Groups measured; 0 means all of the step's groups.


@dataclass(frozen=True)
class SampledSchedule(Schedule):
    """When exact norms of randomly drawn tokens are measured, of how many, and how they are drawn."""

    share: float = 0.1  # Share of the policy tokens that is measured.
    by: Literal["above_cut", "proxy", "uniform"] = "above_cut"
    """What makes a token likelier to be drawn: its norm above the last attention layer, its proxy, or nothing."""


@dataclass(frozen=True)
class SketchSchedule(Schedule):
    """When norms of whole groups are estimated from projections on random directions, and how precisely."""

    directions: int = 32  # Directions K; the cost grows with K, the standard error falls as 1/√K.
    method: Literal["auto", "hybrid", "rank_one", "gaussian"] = "auto"
    """auto: hybrid, or exact norms where rollouts are so short that these cost no more. hybrid: exact above the last
    attention layer, estimated below. rank_one, gaussian: all estimated; gaussian works on any model, with one pass per
    direction."""


@dataclass(frozen=True)
class AttributionSchedule(StepSchedule):
    """When every token's share of ‖ḡ‖² is measured."""

    split: bool = True
    """Also split each share into signal (along the other prompts' gradients) and noise (along its own prompt's)."""


@dataclass(frozen=True)
class ContrastSchedule(StepSchedule):
    """When every token's contrast is measured, and how the copies of the policy behind it are fitted."""

    steps: int = 16  # Gradient steps of each of four copies; the cost grows with them.
    batch: int = 16  # Rollouts per gradient step.
    learning_rate: float = 3e-4  # Of AdamW.
    threshold: float = 0.5  # A rollout is right when its total reward is at least this.


@dataclass(frozen=True)
class MeasureConfig:
    """Levels of measurement beyond `forward`, which always runs."""

    budget: float = 0.0
    """At most this share of the run's time, its other time being 1, for measuring: .25 makes it a quarter longer. What
    is measured, of how many prompts and how often, follows from one timed pass; schedules that are set here win. 0 is
    no budget."""
    exact: Schedule = Schedule(every=20, prompts=8)
    """Exact norm of every token's score, whose cost grows with the square of an answer's length, and what `gradients`
    gives on the same groups."""
    gradients: Schedule = Schedule()
    """The gradient of every estimator, as a Gram matrix of inner products: some 10 forward and backward passes at any
    length. Estimators that read exact norms are left out where not all groups have them. Intervals take 16 different
    prompts over all measured steps; a run that will have fewer is told so at its start."""
    sampled: SampledSchedule = SampledSchedule()
    """Exact norms of drawn tokens of the other groups, their totals with standard errors, and a calibrated proxy, which
    estimators weigh by in the Gram matrix of the same step."""
    sketch: SketchSchedule = SketchSchedule()
    """Estimated norms, with standard errors, of every token of groups that no other level measured at that step."""
    attribution: AttributionSchedule = AttributionSchedule()
    """Signed share of every token in ‖ḡ‖² of the estimator that trains."""
    contrast: ContrastSchedule = ContrastSchedule()
    """Critical tokens: what copies of the policy fitted on right and on wrong rollouts make of each token."""
    further: dict[str, int] = field(default_factory=dict)
    """Levels without a section here, as name and steps between two measurements: `my_levels:lengths 10`. Your own are
    module:attribute; docs/measuring.md has an example."""
    subgroups: tuple[str, ...] = ("otb",)
    """Estimators, beside rloo and the one that trains, also measured on halves and quarters of groups at exact steps.
    That tells which group size is best at the same cost; any of `estimator.name`, and no name turns it off."""
    gram: Literal["auto", "exact", "sketch"] = "auto"
    """How the Gram matrix is measured. exact: from whole gradients. sketch: estimated from their count sketches, one
    gradient in memory at a time. auto: exact, unless that takes half of the memory or twice the time."""
    engine: Literal["auto", "reference", "generic", "fast"] = "auto"  # Which gradient engine measures.
    scope: str = "all"
    """Parameters whose gradient is measured: all, lm_head, or a regular expression over parameter names."""

    def prompts_due(self, step: int, prompts: int) -> tuple[int, int]:
        """Return of how many of a step's prompts the tokens' norms are due, and of how many the estimators' gradients.

        They are the first ones, since prompts come in random order; those with norms have the gradients, too.
        """
        norms, gradients = (
            min(plan.prompts or prompts, prompts) if plan.due(step) else 0 for plan in (self.exact, self.gradients)
        )
        return norms, max(norms, gradients)

    @property
    def levels(self) -> dict[str, StepSchedule]:
        """The schedules of what runs between the norms of whole groups and the estimators' gradients, by name."""
        return {name: plan for name, plan in self.schedules.items() if name not in ("exact", "gradients")}

    @property
    def schedules(self) -> dict[str, StepSchedule]:
        """The schedule of every level, by the level's name, in the order in which they measure."""
        sections = {section.name: getattr(self, section.name) for section in fields(self)}
        levels = {name: plan for name, plan in sections.items() if isinstance(plan, StepSchedule)}
        return levels | {name: StepSchedule(every) for name, every in self.further.items()}


@dataclass(frozen=True)
class EvaluateConfig:
    """Success on held-out prompts."""

    every: int = 20  # Steps between evaluations; the last step is always evaluated; 0 turns it off.
    prompts: int = 128
    """Held-out prompts, all different and the same at every evaluation; fewer where the task has fewer."""
    samples: int = 1
    """Answers sampled to each: avg@samples, and pass@k for k = 1, 2, 4, … up to it, with intervals over prompts."""
    threshold: float = 0.5  # An answer is a success when its total reward is at least this.
