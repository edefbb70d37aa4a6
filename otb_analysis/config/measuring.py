"""What is measured at which steps, and how a policy learns."""

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
    """The gradient of every estimator, as a Gram matrix of inner products: 10 to 20 forward and backward passes at any
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


@dataclass(frozen=True)
class EstimatorConfig:
    """Which estimator forms the advantages."""

    name: str = "otb"
    """One of these; docs/catalogue.md gives their formulas.
    otb train has otb by default, which most come to look at; docs/findings.md says what we would train with.
    No baseline: none.
    Means of the batch: batch_mean, batch_mean_loo.
    Means of the group: group_mean, grpo, rloo, opo, opo_loo.
    Shrunk to other prompts: james_stein, james_stein_corrected.
    Of the group, by others: maxrl, mc_grpo, qae, gpg, reinforce_plus_plus_baseline.
    From the other prompts, by energy: energy_across_loo, energy_regression.
    By turn or prefix: trloo, tempo, tempo_loo.
    By energy up to the token: otb, otb_loo, otb_turn, otb_turn_loo, otb_carry, otb_carry_loo.
    By the token's own, or a decayed sum: token_optimal, token_optimal_loo, energy_ema, energy_ema_loo.
    By energy of the rollout: sequence_optimal, sequence_optimal_loo.
    By its exact norm, measured at every step: classic_optimal, classic_optimal_loo, opob.
    From the critic: value, tvm.
    Half otb, half energy_regression: blend_otb_regression.
    Others by weights that sum to 1: a name such as `0.5*otb+0.5*energy_regression`.
    Your own: module:function; docs/own_estimator.md has an example."""
    energy: Literal["proxy", "exact"] = "proxy"
    """Token energies it weights by: the free proxy, or exact norms of every rollout at every step, which is slow."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of that estimator, as name value pairs: `tail group`.
    tail, own_return, group or zero: of otb, otb_turn, token_optimal, energy_ema and their _loo forms.
    decay: of energy_ema, energy_ema_loo and value. discount: of value. quantile: of qae.
    features, ridge, memory and T_max: of energy_regression, and of what has it as a part, such as blend_otb_regression.
    features is a list such as `1,m,f,m*f,x`; memory, from 0 to 1, is what earlier steps count, for batches of few
    prompts; T_max is the sampling limit unless you set it.
    Of your own: the function's other parameters that have a number or a text as default."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective, by its gradient ĝ = Σ coefficient·∇log π; docs/catalogue.md has the formulas of its parts.

    The defaults are the plain on-policy policy gradient: one update per batch, token sums, mean over rollouts.
    """

    ratio: str = "none"
    """Importance weighting against the policy that sampled; docs/catalogue.md gives the formulas.
    One of none, token, sequence, cumulative, minpro, ppo, gspo, ctpo, cumulative_truncated, tis, sequence_mask, cispo,
    icepop, ipo, dppo_tv, dppo_kl, sapo, gmpo."""
    ratio_options: dict[str, str] = field(default_factory=dict)
    """Options of that ratio, as name value pairs: `low 0.1`.
    low, high: of ppo, gspo, ctpo, cumulative_truncated, sequence_mask, cispo, icepop, dppo_tv, dppo_kl and gmpo.
    dual: of ppo, gspo and ctpo. cap: of tis. veto: of sequence_mask. threshold: of ipo. positive, negative: of sapo."""
    aggregation: str = "sequence_sum"
    """How token losses are averaged: sequence_sum, token_mean, sequence_mean, constant, dapo or balanced."""
    aggregation_options: dict[str, str] = field(default_factory=dict)
    """Options of that aggregation, as name value pairs. length: of constant."""
    token_weight: str = "none"
    """What multiplies each token's advantage: none, stapo, delightful, critical, clip_cov, or kl_cov, which penalises
    drift instead. All but none change the mean of the update. Estimators are compared without it; attribution of a step
    has it. critical takes measure.contrast.every 1"""
    token_weight_options: dict[str, str] = field(default_factory=dict)
    """Options of that weight, as name value pairs. probability, entropy: of stapo. temperature: of delightful.
    strength: of critical. share, low, high: of clip_cov. share, coefficient: of kl_cov."""
    shaping: str = "none"
    """How rewards are reshaped before the estimator sees them: none, grpo_lambda, overlong, drop_equal or
    profiled."""
    shaping_options: dict[str, str] = field(default_factory=dict)
    """Options of that shaping, as name value pairs.
    share, alpha, correct: of grpo_lambda. limit, buffer: of overlong. budget, call, correct, weight: of profiled."""
    epochs: int = 1  # Passes over each batch.
    minibatches: int = 1  # Mini-batches per batch, each made of whole groups. Each takes one optimizer step per epoch.
    staleness: int = 0  # Rollouts are sampled from the policy of this many batches ago.
    kl_coefficient: float = 0.0  # Weight β of the KL divergence from the starting policy. 0 turns it off.
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Per-token estimator of KL(π‖π_ref): log ratio, half its square, or π_ref/π − 1 + log ratio."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence counts: in the loss (k2 or k3; k1 has no gradient there on average), or in the reward."""
    entropy_bonus: float = 0.0  # Weight of the mean token entropy, which is added to the objective.


@dataclass(frozen=True)
class OptimizeConfig:
    """The update: AdamW."""

    steps: int = 60  # Batches of rollouts.
    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step."""
    warmup_steps: int = 0  # Steps over which the learning rate rises linearly from 0.
    betas: tuple[float, float] = (0.9, 0.999)  # Decay of AdamW's two moments.
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # Clipping threshold for ‖ḡ‖; 0 turns clipping off.
    scale_by_ess: bool = False
    """Multiply the learning rate by √(ESS/N), the effective sample size of the sequence ratios (OPOB)."""
    micro_batch: int = 0  # Rollouts per forward pass; 0 takes what fits into 16,384 positions and 1 GiB of logits.
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of sampling and training passes; weights and optimizer stay float32, measurements too."""
    gradient_checkpointing: bool = False  # Recompute activations in the backward pass: slower, and less memory.


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, by PEFT). Only they are trained, and gradient norms are over their weights only."""

    rank: int = 0  # Rank r; 0 trains all weights.
    alpha: float = 16.0  # Scale: the adapter adds (alpha/r)·B·A.
    targets: tuple[str, ...] = ()
    """Layers that get an adapter, by name. By default all linear layers except the output layer."""


@dataclass(frozen=True)
class CriticConfig:
    """The critic, a value network. It shares no gradients with the policy; only `value` and `tvm` depend on it.

    `discount` (γ) and `decay` (λ) here belong to what the critic is fitted to; those of the advantages are in
    `estimator.options`. Where `value` trains, they must agree: γ is 1 for the targets return and tvm, λ is 1 for tvm
    and free for return, and with gae both must be the same here and there.
    """

    enabled: bool = True
    kind: Literal["head", "model"] = "head"
    """A two-layer head on the policy's detached hidden states, or a language model of its own with a scalar output."""
    path: str = ""  # Local checkpoint directory that a model starts from; by default the policy's own starting weights.
    target: Literal["return", "gae", "tvm"] = "return"
    """What it is fitted to: return-to-go, λ-returns of GAE(γ, λ), or the mean reward after the same prefix (TVM)."""
    discount: float = 1.0  # γ of the target gae.
    decay: float = 0.95  # λ of the target gae.
    width: int = 128  # Hidden units of a head.
    learning_rate: float = 0.0
    """Learning rate of the critic, constant. 0 means 0.001 for a head and optimize.learning_rate for a model."""
    updates: int = 4  # Gradient steps per batch; the values are recorded before them.
    gradient_checkpointing: bool = False
    """Recompute a model's activations in the backward pass: slower, and less memory."""
