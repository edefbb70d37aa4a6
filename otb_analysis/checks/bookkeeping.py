"""Does the trainer's bookkeeping agree with ours: advantages, sums of loss weights, gradient norms; in sentences."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from otb_analysis.checks.advantages import AdvantageCheck, advantage_lines, check_advantages
from otb_analysis.config import section
from otb_analysis.errors import InputError
from otb_analysis.objectives.aggregation import AggregationInputs, ConstantOptions, aggregation_weights
from otb_analysis.store import RunStore
from otb_analysis.types import Int

UNIFORM = ("sequence_sum", "token_mean", "constant")
"""Aggregations that weigh every token alike: their gradient is that of `sequence_sum` times a number."""
TRL = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}
"""TRL's loss types. `dapo` divides by the tokens of the whole batch, the others aggregate each micro-batch alone."""


@dataclass(frozen=True)
class TrainerLoss:
    """What is known of a trainer's loss."""

    aggregation: str = ""  # A key of AGGREGATIONS, empty where not known
    # Rollouts that it aggregates at once; None where not known, and where it makes no micro-batches
    micro_batch: int | None = None
    constant: int = 1024  # C of `constant`
    whole: bool = False  # True where it aggregates the whole batch at once


def trainer_loss(config: Mapping[str, Any], aggregation: str = "", micro_batch: int = 0) -> TrainerLoss:
    """Return what was told of the trainer's loss, and for the rest what the run's configuration says.

    Args:
        config: A run of `otb train` names the aggregation and aggregates an update at once; one of `OTBGRPOTrainer` has
            TRL's settings; one of `otb audit` what it was told.
        aggregation: As told, empty where nothing was.
        micro_batch: Likewise, 0 where nothing was.
    """
    recorded = TrainerLoss(str(config.get("aggregation") or ""), int(config.get("accumulate") or 0) or None)
    if objective := config.get("objective"):
        length = int((objective.get("aggregation_options") or {}).get("length", 1024))
        recorded = TrainerLoss(str(objective.get("aggregation") or ""), None, length, whole=True)
    elif trl := config.get("trl"):
        kind, rows = str(trl.get("loss_type")), trl.get("per_device_train_batch_size")
        limit = int(section(config, "sample").get("max_new_tokens") or 1024)
        whole = kind == "dapo"
        recorded = TrainerLoss(TRL.get(kind, ""), None if whole else rows, limit, whole)
    if micro_batch:
        recorded = replace(recorded, micro_batch=micro_batch, whole=False)
    return replace(recorded, aggregation=aggregation or recorded.aggregation)


@dataclass(frozen=True)
class WeightCheck:
    """The sum of loss weights Σ_{i,t} a_{i,t} of one update, as it is and as it should be."""

    nominal: float  # Of the aggregation over the whole batch
    effective: float  # With gradient accumulation
    lowest: float  # Least ratio of a token's weight to its nominal one
    highest: float  # Largest

    @property
    def factor(self) -> float:
        """What accumulation multiplies the gradient by, lengths aside: effective over nominal."""
        return self.effective / self.nominal


def check_weights(
    length: Int,
    group: Int,
    aggregation: str,
    micro_batch: int,
    accumulation: Literal["mean", "sum"] = "mean",
    constant: int = 1024,
) -> WeightCheck:
    """Return what accumulating over micro-batches of so many rollouts makes of an aggregation's weights.

    The trainer aggregates every micro-batch alone and takes the mean of their losses, or their sum where it forgets to
    divide. `length` and `group` are policy tokens and prompt of every rollout in the order of training [N].

    Raises:
        InputError: The aggregation is unknown or reads advantages, or no rollout has a token.
    """
    if aggregation == "balanced" or not length.any() or micro_batch < 1:
        raise InputError(
            f"the weights of {aggregation!r} over {len(length)} rollouts in micro-batches of {micro_batch} cannot be "
            "summed; pass an aggregation without advantages, rollouts with tokens, and at least 1."
        )
    options = ConstantOptions(constant) if aggregation == "constant" else None
    mask = np.arange(int(length.max())) < length[:, None]
    parts = [slice(None), *(slice(start, start + micro_batch) for start in range(0, len(length), micro_batch))]
    nominal, *pieces = (aggregation_weights(aggregation, AggregationInputs(mask[p], group[p]), options) for p in parts)
    effective = np.concatenate(pieces) / (len(pieces) if accumulation == "mean" else 1)
    ratio = effective[mask] / nominal[mask]
    return WeightCheck(float(nominal.sum()), float(effective.sum()), float(ratio.min()), float(ratio.max()))


@dataclass(frozen=True)
class NormCheck:
    """The gradient norm of one step as logged and as rebuilt."""

    step: int
    logged: float
    rebuilt: float  # ‖Σ_{i,t} a A s‖ from ‖ḡ‖² of the stored gradients

    @property
    def factor(self) -> float:
        """Logged over rebuilt; 1 where the trainer did what it says."""
        return self.logged / self.rebuilt


def check_norms(
    store: RunStore, estimator: str, aggregation: str = "sequence_sum", constant: int = 1024
) -> list[NormCheck]:
    """Rebuild the logged gradient norm of every step of one update that was measured whole; empty where there is none.

    ‖ḡ‖ of `gradients` belongs to weights 1/N. Aggregations with one weight a for all tokens have a·N times it: N/ΣL for
    `token_mean`, 1/C for `constant`. Groups must have equal sizes, since ḡ is the mean over prompts.

    Raises:
        InputError: The aggregation weighs rollouts unlike, which the Gram matrix of groups cannot tell.
    """
    if aggregation not in UNIFORM:
        raise InputError(
            f"aggregation is {aggregation!r}, which weighs rollouts by their lengths, so group gradients do not give "
            f"its norm; pass one of {', '.join(UNIFORM)}."
        )
    gradients, checks = store.gradients_df(), list[NormCheck]()
    here = gradients[(gradients["estimator"] == estimator) & gradients["energy_source"].isin(["none", "proxy"])]
    power = dict(zip(here["step"].tolist(), zip(here["mean_norm_sq"], here["n_prompts"], strict=True), strict=True))
    for row in store.steps_df().to_dict("records"):
        step, logged = int(row["step"]), row.get("grad_norm")
        if step not in power or logged is None or np.isnan(float(logged)):
            continue
        # Of several updates, the logged norm may be that of a part of the rollouts; and rollouts without a reward were
        # counted by the trainer and are not in the store.
        if float(row.get("n_updates") or 1) > 1 or float(row.get("n_left_out") or 0) > 0:
            continue
        mean_norm_sq, measured = power[step]
        sizes = np.unique(store.rollouts_df([step], ["group"])["group"].to_numpy(), return_counts=True)[1]
        # Groups of equal rewards have no gradient to compare.
        if measured != len(sizes) or len(set(sizes.tolist())) > 1 or not mean_norm_sq > 0:
            continue
        per_token = float(sizes.sum()) / float(row["n_tokens"])
        scale = {"sequence_sum": 1.0, "token_mean": per_token, "constant": 1.0 / constant}[aggregation]
        checks.append(NormCheck(step, float(logged), float(mean_norm_sq) ** 0.5 * scale))
    return checks


@dataclass(frozen=True)
class Bookkeeping:
    """What a run's bookkeeping says; made by `check_bookkeeping`."""

    advantages: AdvantageCheck | None  # None where none were recorded
    loss: TrainerLoss  # What is known of the trainer's loss
    weights: WeightCheck | None  # Of the first step, in micro-batches of one rollout where their size is not known
    norms: tuple[NormCheck, ...]
    missing: tuple[str, ...]  # Checks that were left out, why, and what adds them
    reward: str = ""  # How rewards were made of their columns, where a record has several


def check_bookkeeping(store: RunStore, estimator: str, loss: TrainerLoss) -> Bookkeeping:
    """Return every check that a run and what is known of its trainer allow."""
    advantages, missing = check_advantages(store), list[str]()
    config: Any = store.info.get("config") or {}
    reward = str(section(config, "source").get("reward") or "")
    if advantages is None:
        missing.append("Advantages: none were recorded, so none can be recomputed.")
    elif not config.get("source") and not advantages.exact:  # not a trainer that somebody else wrote
        advantages = None
        missing.append(
            "Advantages: those of this run's own estimator, whose state or settings are not recomputed here."
        )
    weights, norms = None, tuple[NormCheck, ...]()
    first = store.rollouts_df(store.complete_steps()[:1])
    if "source_record" in first:  # the order in which the trainer saw them: its groups need not be in one piece
        first = first.sort_values("source_record")
    if not loss.aggregation:
        missing.append("Loss weights and gradient norm: pass --aggregation, how the trainer's loss weighs tokens.")
        return Bookkeeping(advantages, loss, None, (), tuple(missing), reward)
    if first["length"].isna().to_numpy().any():
        missing.append("Loss weights: the run has no token counts; record token ids, or audit with --model.")
    else:
        length, group = (first[name].to_numpy(np.int64) for name in ("length", "group"))
        try:
            size = len(length) if loss.whole else loss.micro_batch or 1
            weights = check_weights(length, group, loss.aggregation, size, constant=loss.constant)
        except InputError as error:
            missing.append(f"Loss weights: {error}")
    if not store.steps_df(columns=["grad_norm"])["grad_norm"].notna().to_numpy().any():
        missing.append("Gradient norm: the trainer's was not recorded (grad_norm of plain records).")
        return Bookkeeping(advantages, loss, weights, (), tuple(missing), reward)
    try:
        norms = tuple(check_norms(store, estimator, loss.aggregation, loss.constant))
        if not norms:
            missing.append(
                "Gradient norm: no step with a logged one has a single update, groups of equal size and the gradients "
                "of all of them."
            )
    except InputError as error:
        missing.append(f"Gradient norm: {error}")
    return Bookkeeping(advantages, loss, weights, norms, tuple(missing), reward)


def bookkeeping_lines(checked: Bookkeeping) -> list[str]:
    """Return the checks of a run in sentences."""
    lines, norms = [f"{checked.reward[0].upper()}{checked.reward[1:]}."] if checked.reward else [], checked.norms
    lines += [] if checked.advantages is None else advantage_lines(checked.advantages)
    if norms:
        factor = np.array([check.factor for check in norms])
        lines.append(
            f"Logged over rebuilt gradient norm: median {np.median(factor):.4g}, from {factor.min():.4g} to "
            f"{factor.max():.4g} over {len(norms):,} steps; 1 where the trainer does what it says."
        )
    if (weights := checked.weights) is not None:
        alike = np.allclose([weights.factor, weights.lowest, weights.highest], 1.0, rtol=1e-9)
        what = "add up to the nominal sum, and so does every token's"
        if not alike:
            what = (
                f"add up to {weights.factor:.4g} times the nominal sum; single tokens weigh {weights.lowest:.3g} to "
                f"{weights.highest:.3g} times what they should"
            )
        name, size = checked.loss.aggregation, checked.loss.micro_batch
        parts = "the whole batch at once" if checked.loss.whole else f"micro-batches of {size}"
        if size is None and not checked.loss.whole:  # what they could make of the weights
            lines.append(f"Loss weights ({name}) in micro-batches of one rollout would {what} (--accumulate: yours).")
        else:
            lines.append(f"Loss weights ({name}, {parts}) {what}.")
    return [*lines, *checked.missing]
