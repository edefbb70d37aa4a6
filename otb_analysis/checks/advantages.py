"""Whose advantages are these: a run's recorded ones against every estimator and the conventions of other trainers."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.config import section
from otb_analysis.custom import import_attribute, plugins
from otb_analysis.estimators import ESTIMATORS, available, estimate
from otb_analysis.store import RunStore
from otb_analysis.store.token_arrays import TOKEN_COLUMNS, rebuild_token_arrays
from otb_analysis.types import Bool, EstimatorInputs, Float, Int

RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""A recorded advantage agrees within so much: float32, bfloat16's reciprocal, or four decimals."""
SCALED = 1e-4
"""Advantages agree up to a common factor where the factor leaves less than this share of their Σ of squares."""
LISTED = 4
"""Conventions that are named where several fit."""
HELD = 1_000_000
"""Tokens up to which a run's steps stay in memory, some 100 bytes each, while they are gone through several times."""
FEW = 0.2
"""Up to this share of rollouts that differ is an exception to a convention; more is another one."""


@dataclass(frozen=True)
class StepRewards:
    """A step's total rewards, of which a convention makes one advantage per rollout."""

    total: Float  # Reward of each rollout [N]
    groups: Groups  # Its prompt's group

    @property
    def size(self) -> Float:
        """Rollouts in each rollout's group [N]."""
        return self.groups.spread(self.groups.count.astype(np.float64))

    @property
    def centred(self) -> Float:
        """Reward minus the mean of its group [N]."""
        return self.total - self.groups.spread(self.groups.sum(self.total)) / self.size

    def std(self, ddof: int) -> Float:
        """Standard deviation of each rollout's group [N]; 0 in a group of one."""
        return np.sqrt(self.groups.spread(self.groups.sum(self.centred**2)) / np.maximum(self.size - ddof, 1))

    def others(self) -> tuple[Float, Float]:
        """Mean of the others of each rollout's group, and their standard deviation with ddof 1 [N]; NaN without any."""
        n = np.where(self.size > 1, self.size - 1, np.nan)
        away = self.centred * self.size / n  # reward minus the mean of the others
        # Their squares about their own mean: Σ_j c_j² − c_i²·n/(n − 1), n the size of the group.
        squares = self.groups.spread(self.groups.sum(self.centred**2)) - self.centred**2 * self.size / n
        return self.total - away, np.sqrt(np.maximum(squares, 0.0) / np.maximum(n - 1, 1))


Convention = Callable[[StepRewards], Float]
"""Makes advantages [N] of a step's rewards; packages register their own as entry points `otb_analysis.conventions`."""


def _leave_one_out(step: StepRewards) -> Float:
    mean, std = step.others()
    # NeMo-RL divides where there is something to divide by.
    return np.nan_to_num((step.total - mean) / np.where(std > 0, std + 1e-6, 1.0))


RAW = "rloo with the raw reward in groups of one"
CONVENTIONS: dict[str, Convention] = {
    "grpo with ε = 1e-4": lambda step: step.centred / (step.std(1) + 1e-4),
    "grpo with ddof 0": lambda step: step.centred / (step.std(0) + 1e-6),
    "grpo with ddof 0, ε = 1e-4": lambda step: step.centred / (step.std(0) + 1e-4),
    "group mean over the step's standard deviation": lambda step: (
        step.centred / (step.total.std(ddof=min(1, len(step.total) - 1)) + 1e-4)
    ),
    "leave-one-out mean over leave-one-out standard deviation": _leave_one_out,
    RAW: lambda step: np.where(step.size > 1, step.centred * step.size / np.maximum(step.size - 1, 1), step.total),
}
"""Scalings of other trainers that are no estimators of ours; the fifth is NeMo-RL's, the last verl's `rloo`."""
PLAIN = ("none", "group_mean", "rloo", "grpo", "batch_mean")
"""Estimators that are looked for changed, too."""
GLOSS = {"none": "the raw rewards, as from groups of one"}
"""What a name means, where a reader of his trainer's numbers may not know it."""


@dataclass(frozen=True)
class AdvantageMatch:
    """Recorded advantages against those of one convention, over all steps."""

    convention: str  # A name in ESTIMATORS or CONVENTIONS, with what was done to it: clipped, over the length
    n_differ: int  # Rollouts with a token that differs by more than the tolerance
    largest: float  # Largest difference
    first: str  # First record that differs, as `file, record n`; of the nearest one only
    factor: float  # Least squares: recorded ≈ factor × ours
    left: float  # Share of Σ recorded² that the factor leaves


@dataclass(frozen=True)
class AdvantageCheck:
    """Every convention, the best first."""

    n_rollouts: int  # With recorded advantages
    matches: tuple[AdvantageMatch, ...]
    n_groups: int = 0  # Their groups
    odd: str = ""  # The largest difference from the best convention, with its record; empty where none differs
    trait: str = ""  # What the groups that differ from the best convention have in common; empty where nothing

    @property
    def exact(self) -> tuple[str, ...]:
        """Conventions that reproduce every rollout."""
        return tuple(match.convention for match in self.matches if not match.n_differ)

    @property
    def scaled(self) -> tuple[AdvantageMatch, ...]:
        """Conventions that reproduce them up to a common factor other than 1."""
        return tuple(match for match in self.matches if match.n_differ and match.left < SCALED and match.factor > 0)


@dataclass(frozen=True)
class _Recorded:
    """A step's rollouts with what its trainer gave them; made by `_steps`."""

    step: int
    rollout: Int  # [N]
    inputs: EstimatorInputs
    mask: Bool  # [N, T]
    advantage: Float  # Recorded [N, T], NaN where there is none
    rewards: StepRewards

    def advantages(self, ends: tuple[float, float] | None = None) -> Iterator[tuple[str, Float]]:
        """Yield names and advantages [N, T] of what a step's columns allow.

        With the `ends` of all recorded advantages, the changed ones: clipped to them, over the length, shifted.
        """
        rewards, mask = self.rewards, self.mask
        conventions = CONVENTIONS | {name: import_attribute("convention", name) for name in plugins("convention")}
        ours = {name: np.where(mask, make(rewards)[:, None], 0.0) for name, make in conventions.items()}
        gaps = bool((mask[:, 1:] & ~mask[:, :-1]).any())
        names = [name for name in available(self.inputs) if ESTIMATORS[name].takes_gaps or not gaps]
        if ends is None:
            yield from ((name, estimate(name, self.inputs).advantage) for name in names)
            yield from ours.items()
            return
        ours |= {name: estimate(name, self.inputs).advantage for name in PLAIN if name in names}
        (low, high), length = ends, np.maximum(mask.sum(axis=1), 1)[:, None]
        order, count = rewards.groups.order, rewards.groups.count
        for name, values in ours.items():
            yield f"{name}, over the rollout's length", values / length
            yield f"{name}, clipped below at {low:.4g}", np.maximum(values, low)
            yield f"{name}, clipped above at {high:.4g}", np.minimum(values, high)
            yield f"{name}, clipped to {low:.4g} … {high:.4g}", np.clip(values, low, high)
            # Each rollout's number from the group before, the first's from the last; of groups of unlike sizes none.
            moved = np.full(len(mask), np.nan)
            if (count == count[0]).all():
                moved[order] = np.roll(values[order, 0], count[0])
            yield f"{name}, shifted by one group", np.broadcast_to(moved[:, None], mask.shape)


def _steps(store: RunStore) -> Iterator[_Recorded]:
    """Yield the steps with recorded advantages: of tokens, or one for each rollout; a step's tokens are read once."""
    config: Any = store.info.get("config") or {}
    made_by = section(config, "source").get("made_by")
    column = "recorded_advantage" if made_by in ("otb score", "otb audit") else "advantage"
    table: Any = store.rollouts_df()
    whole = table.reindex(columns=["step", "rollout", "group", "reward", "recorded_advantage"])
    of_tokens, with_ids = set(store.steps_with("tokens", column)), set(store.steps_with("tokens", "mask"))
    for step, rows in whole.sort_values(["step", "rollout"]).groupby("step"):
        scalar = rows["recorded_advantage"].to_numpy(np.float64, na_value=np.nan)
        if step not in of_tokens and np.isnan(scalar).all():
            continue
        if step not in with_ids:
            # Without tokens a rollout is one token: conventions that look at positions need more.
            mask, rollout = np.ones((len(rows), 1), bool), rows["rollout"].to_numpy(np.int64)
            inputs = EstimatorInputs(rows["reward"].to_numpy(np.float64)[:, None], mask, rows["group"].to_numpy())
            advantage = scalar[:, None]
        else:
            names = [*TOKEN_COLUMNS, *([column] if step in of_tokens else [])]
            tokens = store.tokens_df([step], names)
            arrays = rebuild_token_arrays(f"step {step}", tokens, rows.assign(score_norm_sq=np.nan))
            drawn, rollout = arrays.mask, arrays.rollout
            advantage = np.where(drawn, scalar[:, None], np.nan)
            if step in of_tokens:
                row = np.searchsorted(rollout, tokens["rollout"].to_numpy(np.int64))
                advantage[row, tokens["t"].to_numpy(np.int64)] = tokens[column].to_numpy(np.float64, na_value=np.nan)
                advantage[~drawn] = np.nan
            # Trainers count a rollout without policy tokens in its group's mean: here it has one, without energy.
            idle, mask, reward = ~drawn.any(axis=1), drawn.copy(), np.nan_to_num(arrays.reward)
            mask[idle, 0] = True
            reward[idle, 0] = rows["reward"].to_numpy(np.float64)[idle]
            numbers = {"energy": arrays.energy_proxy, "entropy": arrays.entropy}
            known: Any = {name: np.where(drawn, x, 0.0) for name, x in numbers.items() if not np.isnan(x[drawn]).any()}
            if (arrays.token_id[drawn] >= 0).all():
                known["token_id"] = arrays.token_id
            inputs = EstimatorInputs(reward, mask, arrays.group, turn=arrays.turn, **known)
        if not np.isnan(advantage).all():
            total = np.where(mask, inputs.reward, 0.0).sum(axis=1)
            rewards = StepRewards(total, Groups.from_labels(np.asarray(inputs.group)))
            yield _Recorded(int(step), rollout, inputs, mask, advantage, rewards)


def check_advantages(store: RunStore) -> AdvantageCheck | None:
    """Compare a run's recorded advantages with those of every estimator whose inputs it has; None where none are.

    Of a large run one step is in memory at a time. An estimator counts only if every step has its inputs. Advantages
    clipped, over the length or of another group are looked for where nothing else agrees. Of the best convention, what
    differs is looked at more closely.
    """
    lengths: Any = store.rollouts_df(columns=["length"])["length"]
    few = list(_steps(store)) if lengths.sum() <= HELD else []  # else they are read again each time
    matches, n, n_groups = _compared(store, few or _steps(store))
    if not matches:
        return None
    check = AdvantageCheck(n, tuple(matches), n_groups)
    if check.exact or check.scaled:
        return check
    ranges = [(np.nanmin(one.advantage), np.nanmax(one.advantage)) for one in few or _steps(store)]
    ends = float(min(low for low, _ in ranges)), float(max(high for _, high in ranges))
    if ends[0] == ends[1]:  # to which any convention can be clipped
        return replace(check, trait=f"all of them are {ends[0]:.4g}, whatever the reward")
    changed = {
        match.convention.partition(",")[0]: match for match in _compared(store, few or _steps(store), ends)[0][::-1]
    }
    if clipped := [match for match in changed.values() if not match.n_differ]:
        return replace(check, matches=(*clipped, *matches))
    rewards = set(np.round(np.concatenate([one.rewards.total for one in few or _steps(store)]), 4).tolist())
    odd, trait = _exceptions(store, few or _steps(store), matches[0].convention, rewards)
    return replace(check, odd=odd, trait=trait)


def _compared(
    store: RunStore, recorded: Iterable[_Recorded], ends: tuple[float, float] | None = None
) -> tuple[list[AdvantageMatch], int, int]:
    """Return the conventions that every step allows, the best first, and how many rollouts and groups were compared."""
    sums = defaultdict[str, list[tuple[int, float, tuple[int, int] | None, float, float, float]]](list)
    n = n_groups = steps = 0
    for one in recorded:
        present = ~np.isnan(one.advantage)
        b = np.where(present, one.advantage, 0.0)
        for name, ours in one.advantages(ends):
            a = np.where(present, ours, 0.0)
            apart = np.abs(a - b)
            wrong = ~(apart <= ABSOLUTE + RELATIVE * np.abs(b)).all(axis=1)
            first = (one.step, int(one.rollout[wrong.argmax()])) if wrong.any() else None
            products = float((a * a).sum()), float((a * b).sum()), float((b * b).sum())
            sums[name].append((int(wrong.sum()), float(apart.max(initial=0.0)), first, *products))
        has = present.any(axis=1)
        n, steps = n + int(has.sum()), steps + 1
        n_groups += len(np.unique(np.asarray(one.inputs.group)[has]))
    matches, places = [], dict[str, tuple[int, int] | None]()
    for name, parts in sums.items():
        if len(parts) < steps:
            continue
        differ, largest, first, ours_sq, both, recorded_sq = zip(*parts, strict=True)
        factor = sum(both) / sum(ours_sq) if sum(ours_sq) else 0.0
        left = 1 - factor * sum(both) / sum(recorded_sq) if sum(recorded_sq) else 1.0
        places |= dict.fromkeys([name], next((where for where in first if where), None))
        matches.append(AdvantageMatch(name, sum(differ), max(largest), "", factor, max(left, 0.0)))
    matches.sort(key=lambda match: (match.n_differ, match.left))
    left = {match.convention: match.left for match in matches}
    if "rloo" in left and RAW in left and np.isclose(left[RAW], left["rloo"], atol=1e-9):
        matches = [match for match in matches if match.convention != RAW]
    if matches and (where := places.get(matches[0].convention)):
        matches[0] = replace(matches[0], first=_source_record(store, *where))
    return matches, n, n_groups


def _exceptions(
    store: RunStore, recorded: Iterable[_Recorded], convention: str, known: Collection[float]
) -> tuple[str, str]:
    """Return the largest difference from a convention with its record, and what the groups that differ share.

    `known` are the total rewards of the file, to four decimals.
    """
    worst, where, largest = 0.0, "", ""
    steps, offsets, residues, sizes, rewards = set[int](), list[float](), list[bool](), set[int](), list[float]()
    for one in recorded:
        ours, present, step = dict(one.advantages())[convention], ~np.isnan(one.advantage), one.rewards
        apart = np.where(present, one.advantage - ours, 0.0)
        near = np.abs(apart) <= ABSOLUTE + RELATIVE * np.abs(np.where(present, one.advantage, 0.0))
        wrong = ~near.all(axis=1)
        row = int(np.abs(apart).max(axis=1, initial=0.0).argmax())
        if (size := float(np.abs(apart[row]).max(initial=0.0))) > worst:
            t = int(np.abs(apart[row]).argmax())
            where, worst = _source_record(store, one.step, int(one.rollout[row])), size
            largest = f"{one.advantage[row, t]:.6g} recorded against {ours[row, t]:.6g} at {where}"
        first = np.where(present.any(axis=1), apart[np.arange(len(apart)), present.argmax(axis=1)], np.nan)
        for g in np.unique(step.groups.index[wrong]):
            rows = step.groups.index == g
            steps.add(one.step)
            sizes.add(int(rows.sum()))
            off = first[rows & ~np.isnan(first)]
            offsets.append(float(off.mean()) if np.ptp(off) <= ABSOLUTE else np.nan)
            residues.append(bool((step.others()[1][wrong & rows] == 0).all()))
            # One more reward x moves the mean by −offset: x = mean − offset·(n + 1).
            rewards.append(float(step.total[rows].mean() - offsets[-1] * (rows.sum() + 1)))
    n = f"{len(offsets):,} group{'s' if len(offsets) > 1 else ''} that differ{'' if len(offsets) > 1 else 's'}"
    if sizes == {1}:
        return largest, f"the {n} have one rollout, where trainers take the raw reward or 0"
    if all(residues):
        return largest, f"in the {n} the other rewards are equal: a standard deviation of 0 was divided by"
    if not np.isnan(offsets).any():
        missing = all(round(one, 4) in known for one in rewards)
        why = "as if a rollout that is not in the file were in the mean" if missing else "a constant was added"
        return largest, f"in the {n} every rollout is off by one number ({offsets[0]:.4g} in the first): {why}"
    if len(steps) == 1:
        return largest, f"the {n} are all of step {steps.pop()}"
    return largest, ""


def advantage_lines(check: AdvantageCheck) -> list[str]:
    """Return what a run's recorded advantages are, in sentences."""
    count = f"The recorded advantages of {check.n_rollouts:,} rollouts in {check.n_groups:,} groups"
    if names := check.exact:
        named = [f"{x} ({GLOSS[x]})" if x in GLOSS else x for x in names[:LISTED]]
        more = f" or {len(names) - LISTED} more" if len(names) > LISTED else ""
        return [f"{count} are those of {' or '.join(named)}{more}."]
    if scaled := check.scaled:
        return [f"{count} are {' or '.join(f'{match.factor:.4g} × {match.convention}' for match in scaled)}."]
    best = check.matches[0]
    if best.n_differ <= FEW * check.n_rollouts:
        lines = [f"{count} are those of {best.convention}, but for {best.n_differ:,}; the first is {best.first}."]
    else:
        lines = [
            f"No convention reproduces the recorded advantages. The nearest is {best.convention}: {best.n_differ:,} of "
            f"{check.n_rollouts:,} rollouts differ, by up to {best.largest:.3g}; the first is {best.first}."
        ]
    lines += [f"Largest difference: {check.odd}."] if check.odd else []
    return [*lines, *([f"{check.trait[0].upper()}{check.trait[1:]}."] if check.trait else [])]


def _source_record(store: RunStore, step: int, rollout: int) -> str:
    """Return where a rollout stands in its file, or its number where it came from none."""
    for row in store.rollouts_df([step], where="rollout = ?", params=[rollout]).to_dict("records"):
        if "source_file" in row:
            return f"{row['source_file']}, record {row['source_record']}"
    return f"step {step}, rollout {rollout}"
