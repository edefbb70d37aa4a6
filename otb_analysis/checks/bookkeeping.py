"""Does the trainer's bookkeeping agree with ours: advantages, sums of loss weights, gradient norms; in sentences."""

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, available, estimate
from otb_analysis.objectives.aggregation import AggregationInputs, ConstantOptions, aggregation_weights
from otb_analysis.store import RunStore
from otb_analysis.store.token_arrays import TokenArrays
from otb_analysis.types import EstimatorInputs, Float, Int

RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""A recorded advantage agrees within so much: float32, bfloat16's reciprocal, or four decimals."""
SCALED = 1e-4
"""Advantages agree up to a common factor where the factor leaves less than this share of their Σ of squares."""
CONVENTIONS = {
    "grpo with ε = 1e-4": (1, 1e-4, False),
    "grpo with ddof 0": (0, 1e-6, False),
    "grpo with ddof 0, ε = 1e-4": (0, 1e-4, False),
    "group mean over the step's standard deviation": (1, 1e-4, True),
}
"""Scalings of other trainers that are no estimators of ours: ddof and ε of the standard deviation, and whether it is
that of the whole step instead of the group's."""
UNIFORM = ("sequence_sum", "token_mean", "constant")
"""Aggregations that weigh every token alike: their gradient is that of `sequence_sum` times a number."""
WHOLE = sys.maxsize
"""Rollouts of a micro-batch where the whole batch is aggregated at once."""
TRL = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "constant"}
"""TRL's loss types. `dapo` divides by the tokens of the whole batch, the others aggregate each micro-batch alone."""


@dataclass(frozen=True)
class AdvantageMatch:
    """Recorded advantages against those of one convention, over all steps."""

    convention: str  # A name in ESTIMATORS, or one in CONVENTIONS
    n_differ: int  # Rollouts with a token that differs by more than the tolerance
    largest: float  # Largest difference
    first: str  # First record that differs, as `file, record n`; empty where none does
    factor: float  # Least squares: recorded ≈ factor × ours
    left: float  # Share of Σ recorded² that the factor leaves


@dataclass(frozen=True)
class AdvantageCheck:
    """Every convention, the best first."""

    n_rollouts: int  # With recorded advantages
    matches: tuple[AdvantageMatch, ...]

    @property
    def exact(self) -> tuple[str, ...]:
        """Conventions that reproduce every rollout."""
        return tuple(match.convention for match in self.matches if not match.n_differ)

    @property
    def scaled(self) -> tuple[AdvantageMatch, ...]:
        """Conventions that reproduce them up to a common factor other than 1."""
        return tuple(match for match in self.matches if match.n_differ and match.left < SCALED and match.factor > 0)


def check_advantages(store: RunStore) -> AdvantageCheck | None:
    """Compare a run's recorded advantages with those of every estimator whose inputs it has; None where none are.

    One step is in memory at a time. An estimator counts only if every step has its inputs.
    """
    config: Any = store.info.get("config") or {}
    imported = (config.get("source") or {}).get("made_by") == "otb import"
    column = "advantage" if imported else "recorded_advantage"
    sums = defaultdict[str, list[tuple[int, float, tuple[int, int] | None, float, float, float]]](list)
    n = steps = 0
    for step in store.complete_steps():
        tokens = store.tokens_df([step])
        if column not in tokens or tokens[column].isna().to_numpy().all():
            continue
        arrays = store.token_arrays(step)
        recorded = np.full(arrays.mask.shape, np.nan)
        rows = np.searchsorted(arrays.rollout, tokens["rollout"].to_numpy(np.int64))
        recorded[rows, tokens["t"].to_numpy(np.int64)] = tokens[column].to_numpy(np.float64, na_value=np.nan)
        recorded[~arrays.mask] = np.nan
        present = ~np.isnan(recorded)
        b = np.where(present, recorded, 0.0)
        for name, ours in _step_advantages(arrays).items():
            a = np.where(present, ours, 0.0)
            apart = np.abs(a - b)
            wrong = (apart > ABSOLUTE + RELATIVE * np.abs(b)).any(axis=1)
            first = (step, int(arrays.rollout[wrong.argmax()])) if wrong.any() else None
            products = float((a * a).sum()), float((a * b).sum()), float((b * b).sum())
            sums[name].append((int(wrong.sum()), float(apart.max(initial=0.0)), first, *products))
        n, steps = n + int(present.any(axis=1).sum()), steps + 1
    matches = []
    for name, parts in sums.items():
        if len(parts) < steps:
            continue
        differ, largest, first, ours_sq, both, recorded_sq = zip(*parts, strict=True)
        factor = sum(both) / sum(ours_sq) if sum(ours_sq) else 0.0
        left = 1 - factor * sum(both) / sum(recorded_sq) if sum(recorded_sq) else 1.0
        place = next((_place(store, *where) for where in first if where), "")
        matches.append(AdvantageMatch(name, sum(differ), max(largest), place, factor, max(left, 0.0)))
    matches.sort(key=lambda match: (match.n_differ, match.left))
    return AdvantageCheck(n, tuple(matches)) if matches else None


def _step_advantages(arrays: TokenArrays) -> dict[str, Float]:
    """Return the advantages [N, T] of every estimator and convention that a step's columns allow."""
    mask = arrays.mask
    measured = {"energy": arrays.energy_proxy, "entropy": arrays.entropy}
    whole = {name: None if np.isnan(values[mask]).any() else values for name, values in measured.items()}
    inputs = EstimatorInputs(
        reward=np.nan_to_num(arrays.reward),
        mask=mask,
        group=arrays.group,
        energy=whole["energy"],
        turn=arrays.turn,
        token_id=None if (arrays.token_id[mask] < 0).any() else arrays.token_id,
        entropy=whole["entropy"],
    )
    gaps = bool((mask[:, 1:] & ~mask[:, :-1]).any())
    names = [name for name in available(inputs) if ESTIMATORS[name].takes_gaps or not gaps]
    advantages = {name: estimate(name, inputs).advantage for name in names}
    total, groups = np.where(mask, inputs.reward, 0.0).sum(axis=1), Groups.of(arrays.group)
    n = groups.sum(np.ones(len(total)))
    centred = total - groups.spread(groups.sum(total) / n)
    for name, (ddof, epsilon, of_step) in CONVENTIONS.items():
        if of_step:
            std = total.std(ddof=min(ddof, len(total) - 1))
        else:
            std = groups.spread(np.sqrt(groups.sum(centred**2) / np.maximum(n - ddof, 1)))
        advantages[name] = np.where(mask, (centred / (std + epsilon))[:, None], 0.0)
    return advantages


def _place(store: RunStore, step: int, rollout: int) -> str:
    """Return where a rollout stands in its file, or its number where it came from none."""
    rows = store.rollouts_df([step])
    if "source_file" in rows:
        for n, file, record in zip(rows["rollout"], rows["source_file"], rows["source_record"], strict=True):
            if n == rollout:
                return f"{file}, record {record}"
    return f"step {step}, rollout {rollout}"


@dataclass(frozen=True)
class TrainerLoss:
    """What is known of a trainer's loss."""

    aggregation: str = ""  # A key of AGGREGATIONS, empty where not known
    micro_batch: int | None = None  # Rollouts that it aggregates at once; None where not known
    constant: int = 1024  # C of `constant`


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
        recorded = TrainerLoss(str(objective.get("aggregation") or ""), WHOLE, length)
    elif trl := config.get("trl"):
        kind, rows = str(trl.get("loss_type")), trl.get("per_device_train_batch_size")
        limit = int((config.get("sample") or {}).get("max_new_tokens") or 1024)
        recorded = TrainerLoss(TRL.get(kind, ""), WHOLE if kind == "dapo" else rows, limit)
    return TrainerLoss(aggregation or recorded.aggregation, micro_batch or recorded.micro_batch, recorded.constant)


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

    def weights(rows: slice) -> Float:
        return aggregation_weights(aggregation, AggregationInputs(mask[rows], group[rows]), options)

    parts = [slice(start, start + micro_batch) for start in range(0, len(length), micro_batch)]
    divide = len(parts) if accumulation == "mean" else 1
    nominal = weights(slice(None))
    effective = np.concatenate([weights(rows) for rows in parts]) / divide
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
    store: RunStore, estimator: str, aggregation: str = "sequence_sum", constant: int = 1024, energy: str = "proxy"
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
    here = gradients[(gradients["estimator"] == estimator) & gradients["energy_source"].isin(["none", energy])]
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


def check_bookkeeping(store: RunStore, estimator: str, loss: TrainerLoss) -> Bookkeeping:
    """Return every check that a run and what is known of its trainer allow."""
    advantages, missing = check_advantages(store), list[str]()
    if advantages is None:
        config: Any = store.info.get("config") or {}
        own = "this run's own estimator made them, so there is nothing to check them against."
        missing.append(
            f"Advantages: {'none were recorded, so none can be recomputed.' if config.get('source') else own}"
        )
    weights, norms = None, tuple[NormCheck, ...]()
    first = store.rollouts_df(store.complete_steps()[:1])
    if "source_record" in first:  # the order in which the trainer saw them: its groups need not be in one piece
        first = first.sort_values("source_record")
    logged = store.steps_df(columns=["grad_norm"])["grad_norm"].notna().to_numpy().any()
    if not loss.aggregation:
        missing.append("Loss weights and gradient norm: pass --aggregation, how the trainer's loss weighs tokens.")
        return Bookkeeping(advantages, loss, None, (), tuple(missing))
    if first["length"].isna().to_numpy().any():
        missing.append("Loss weights: the run has no token counts; record token ids, or audit with --model.")
    else:
        length, group = (first[name].to_numpy(np.int64) for name in ("length", "group"))
        try:
            weights = check_weights(length, group, loss.aggregation, loss.micro_batch or 1)
        except InputError as error:
            missing.append(f"Loss weights: {error}")
    if not logged:
        missing.append("Gradient norm: the trainer's was not recorded (grad_norm of plain records).")
        return Bookkeeping(advantages, loss, weights, (), tuple(missing))
    try:
        norms = tuple(check_norms(store, estimator, loss.aggregation, loss.constant))
        if not norms:
            missing.append(
                "Gradient norm: no step with a logged one has a single update, groups of equal size and the gradients "
                "of all of them."
            )
    except InputError as error:
        missing.append(f"Gradient norm: {error}")
    return Bookkeeping(advantages, loss, weights, norms, tuple(missing))


def bookkeeping_lines(checked: Bookkeeping) -> list[str]:
    """Return the checks of a run in sentences."""
    lines, advantages, norms = list[str](), checked.advantages, checked.norms
    if advantages is None:
        pass
    elif names := advantages.exact:
        lines.append(
            f"The recorded advantages of {advantages.n_rollouts:,} rollouts are those of {' or '.join(names)}."
        )
    elif scaled := advantages.scaled:
        named = " or ".join(f"{match.factor:.4g} × {match.convention}" for match in scaled)
        lines.append(f"The recorded advantages of {advantages.n_rollouts:,} rollouts are {named}.")
    else:
        best = advantages.matches[0]
        lines.append(
            f"No convention reproduces the recorded advantages. The nearest is {best.convention}: "
            f"{best.n_differ:,} of {advantages.n_rollouts:,} rollouts differ, by up to {best.largest:.3g}; the first "
            f"is {best.first}."
        )
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
        parts = "the whole batch at once" if size == WHOLE else f"micro-batches of {size}"
        if size is None:  # what they could make of the weights
            lines.append(f"Loss weights ({name}) in micro-batches of one rollout would {what} (--accumulate: yours).")
        else:
            lines.append(f"Loss weights ({name}, {parts}) {what}.")
    return [*lines, *checked.missing]
