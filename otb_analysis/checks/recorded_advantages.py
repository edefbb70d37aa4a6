"""Recorded advantages against those that rewards give: which convention reproduces them, and where it first fails."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from otb_analysis.arrays import Groups
from otb_analysis.estimators import ESTIMATORS, available, estimate
from otb_analysis.store import RunStore
from otb_analysis.store.token_arrays import TokenArrays
from otb_analysis.types import EstimatorInputs, Float, Int

RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""A recorded advantage agrees within so much: float32, bfloat16's reciprocal, or four decimals."""
SCALED = 1e-4
"""Advantages agree up to a common factor where the factor leaves less than this share of their Σ of squares."""


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


def scaled_by(ddof: int, epsilon: float, whole: bool = False) -> Callable[[Float, Int], Float]:
    """Return A = (R − mean_j R_j)/(std + ε), the mean of the group, std of the group or of the `whole` step [N]."""

    def advantages(total: Float, group: Int) -> Float:
        groups = Groups.of(group)
        n = groups.sum(np.ones(len(total)))
        centred = total - groups.spread(groups.sum(total) / n)
        if whole:
            return centred / (total.std(ddof=min(ddof, len(total) - 1)) + epsilon)
        std = np.sqrt(groups.sum(centred**2) / np.maximum(n - ddof, 1))
        return centred / (groups.spread(std) + epsilon)

    return advantages


CONVENTIONS: dict[str, Callable[[Float, Int], Float]] = {
    "grpo with ε = 1e-4": scaled_by(1, 1e-4),
    "grpo with ddof 0": scaled_by(0, 1e-6),
    "grpo with ddof 0, ε = 1e-4": scaled_by(0, 1e-4),
    "group mean over the step's standard deviation": scaled_by(1, 1e-4, whole=True),
}
"""Scalings of other trainers that are no estimators of ours; they read total rewards [N] and groups [N]."""


class _Sums:
    """Sums of one convention while steps go by."""

    def __init__(self) -> None:
        self.n_differ, self.largest, self.first = 0, 0.0, ""
        self.ours_sq = self.both = self.recorded_sq = 0.0

    def add(self, ours: Float, recorded: Float, places: list[str]) -> None:
        """Add a step's advantages [N, T]; NaN where none was recorded."""
        known = ~np.isnan(recorded)
        a, b = np.where(known, ours, 0.0), np.where(known, recorded, 0.0)
        apart = np.abs(a - b)
        wrong = (apart > ABSOLUTE + RELATIVE * np.abs(b)).any(axis=1)
        self.n_differ += int(wrong.sum())
        self.largest = max(self.largest, float(apart.max(initial=0.0)))
        if wrong.any() and not self.first:
            self.first = places[int(wrong.argmax())]
        self.ours_sq, self.both = self.ours_sq + float((a * a).sum()), self.both + float((a * b).sum())
        self.recorded_sq += float((b * b).sum())

    def match(self, convention: str) -> AdvantageMatch:
        """Return what they say."""
        factor = self.both / self.ours_sq if self.ours_sq else 0.0
        left = 1 - factor * self.both / self.recorded_sq if self.recorded_sq else 1.0
        return AdvantageMatch(convention, self.n_differ, self.largest, self.first, factor, max(left, 0.0))


def check_advantages(store: RunStore) -> AdvantageCheck | None:
    """Compare a run's recorded advantages with those of every estimator whose inputs it has; None where none are.

    One step is in memory at a time. An estimator counts only if every step has its inputs.
    """
    column = "advantage" if _made_by(store) == "otb import" else "recorded_advantage"
    sums: dict[str, _Sums] = {}
    names: set[str] | None = None
    n = 0
    for step in store.complete_steps():
        tokens = store.tokens_df([step])
        if column not in tokens or tokens[column].isna().to_numpy().all():
            continue
        arrays = store.token_arrays(step)
        recorded = np.full(arrays.mask.shape, np.nan)
        rows = np.searchsorted(arrays.rollout, tokens["rollout"].to_numpy(np.int64))
        recorded[rows, tokens["t"].to_numpy(np.int64)] = tokens[column].to_numpy(np.float64, na_value=np.nan)
        recorded[~arrays.mask] = np.nan
        ours = step_advantages(arrays)
        names = set(ours) if names is None else names & set(ours)
        places = _places(store, step, arrays.rollout)
        for name, advantage in ours.items():
            sums.setdefault(name, _Sums()).add(advantage, recorded, places)
        n += int((~np.isnan(recorded)).any(axis=1).sum())
    if not names:
        return None
    matches = [sums[name].match(name) for name in sums if name in names]
    return AdvantageCheck(n, tuple(sorted(matches, key=lambda match: (match.n_differ, match.left))))


def step_advantages(arrays: TokenArrays) -> dict[str, Float]:
    """Return the advantages [N, T] of every convention that a step's columns allow."""

    def known_everywhere(values: Float) -> Float | None:
        return None if np.isnan(values[arrays.mask]).any() else values

    inputs = EstimatorInputs(
        reward=np.nan_to_num(arrays.reward),
        mask=arrays.mask,
        group=arrays.group,
        energy=known_everywhere(arrays.energy_proxy),
        turn=arrays.turn,
        token_id=None if (arrays.token_id[arrays.mask] < 0).any() else arrays.token_id,
        entropy=known_everywhere(arrays.entropy),
    )
    gaps = bool((arrays.mask[:, 1:] & ~arrays.mask[:, :-1]).any())
    names = [name for name in available(inputs) if ESTIMATORS[name].takes_gaps or not gaps]
    advantages = {name: estimate(name, inputs).advantage for name in names}
    total = np.where(arrays.mask, inputs.reward, 0.0).sum(axis=1)
    for name, convention in CONVENTIONS.items():
        advantages[name] = np.where(arrays.mask, convention(total, arrays.group)[:, None], 0.0)
    return advantages


def _places(store: RunStore, step: int, rollout: Int) -> list[str]:
    rows = store.rollouts_df([step])
    if "source_file" not in rows:
        return [f"step {step}, rollout {n}" for n in rollout.tolist()]
    named = zip(rows["rollout"], rows["source_file"], rows["source_record"], strict=True)
    by_rollout = {int(n): f"{file}, record {record}" for n, file, record in named}
    return [by_rollout.get(n, f"step {step}, rollout {n}") for n in rollout.tolist()]


def _made_by(store: RunStore) -> str:
    config = store.info.get("config")
    source = config.get("source") if isinstance(config, Mapping) else None
    return str(source.get("made_by", "")) if isinstance(source, Mapping) else ""
