"""Checked inputs of the estimators: float64, zero outside the mask, column = policy position.

A `Batch` holds some rollouts (whole groups) of an `EstimatorInputs`; the formulas see nothing else. Tool tokens are
squeezed out here, so every formula may take column t for the t-th policy token.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from otb_analysis.arrays import Groups, has_gaps, masked, prefix_length, squeeze, squeezed_mask
from otb_analysis.errors import InputError
from otb_analysis.objectives.registry import boolean_mask, group_vector
from otb_analysis.types import Bool, EstimatorInputs, Float, Int, NormalEquations

REMEDY = {
    "reward": "pass one reward per token, shape [N, T]",
    "energy": "an energy is a squared norm, finite and never negative inside the mask",
    "rollout_norm_sq": "a squared norm is finite and never negative",
    "ratio": "an importance ratio is finite and never negative inside the mask",
    "value": "pass the critic's finite value at every policy token",
    "position_baseline": "pass a finite baseline at every policy token",
    "turn": "pass the index of its turn at every policy token",
    "token_id": "pass a token id at every policy token",
    "entropy": "pass the finite entropy of the distribution each policy token was drawn from",
}
NON_NEGATIVE = frozenset({"energy", "rollout_norm_sq", "ratio"})
PER_ROLLOUT = frozenset({"rollout_norm_sq"})

NOWHERE = np.zeros((1, 1), bool)  # The fallback of a formula that is always defined


@dataclass(frozen=True)
class Batch:
    """Rollouts of whole groups, ready for the formulas."""

    returns: Float  # G_{i,t} = Σ_{k≥t} r_{i,k} [N, T], zero outside the mask
    total: Float  # R_i, the total return [N]; zero for a rollout without policy tokens
    mask: Bool  # True at the first L_i columns of row i [N, T]
    alive: Float  # The mask as 0 and 1 [N, T]
    groups: Groups  # Which rollouts belong together
    energy: Float | None = None  # Token energy w [N, T], where the estimator needs it
    ratio: Float | None = None  # Importance ratio ρ [N, T], where given and used
    rollout_norm_sq: Float | None = None  # ‖Σ_t s_t‖² [N], where needed
    position_baseline: Float | None = None  # B_t [N, T], where needed
    value: Float | None = None  # V(h_t) [N, T], where needed
    turn: Float | None = None  # Index of the token's turn [N, T], where needed
    token_id: Float | None = None  # Token ids [N, T], where needed
    entropy: Float | None = None  # Entropy H_t in nats [N, T], where needed
    state: NormalEquations | None = None  # What the step before left, where there is any

    @cached_property
    def length(self) -> Int:
        """L_i, policy tokens of each rollout [N]."""
        return prefix_length(self.mask)

    @cached_property
    def present(self) -> Float:
        """1 for rollouts with policy tokens, 0 for those without: they have no return and count nowhere [N]."""
        return (self.length > 0).astype(np.float64)

    @cached_property
    def is_singleton(self) -> Bool:
        """True for rollouts that are the only one with tokens in their group [N]."""
        return self.groups.spread(self.groups.sum(self.present)) <= 1

    @cached_property
    def weight(self) -> Float:
        """ρ_t² w_t, or w_t without ratios [N, T]."""
        energy = provided(self.energy)
        return energy if self.ratio is None else energy * self.ratio**2

    @cached_property
    def realized(self) -> Float:
        """W_t = Σ_{j≤t} ρ_j² w_j [N, T], constant after the last token."""
        return np.cumsum(self.weight, axis=1)

    @cached_property
    def final(self) -> Float:
        """W_{i,T}, the realized energy of the whole rollout [N]."""
        return self.weight.sum(axis=1)


@dataclass(frozen=True)
class BaselineResult:
    """What a formula answers: the baseline of each token, in any shape that broadcasts to [N, T]."""

    baseline: Float  # B; values outside the mask are dropped
    fallback: Bool  # Where the formula is undefined
    scale: Float | None = None  # What multiplies G − B, where the estimator rescales
    state: NormalEquations | None = None  # What the next step is given, where the estimator remembers


def provided(x: Float | None) -> Float:
    """Return an input that `EstimatorSpec.needs` guarantees.

    Raises:
        LookupError: The estimator reads an input that it does not declare.
    """
    if x is None:
        raise LookupError("an estimator reads an input that its EstimatorSpec does not list under needs")
    return x


@dataclass
class _BadValue(Exception):
    """An impossible value at a row and position of the block; `prepare` finds its place in the caller's arrays."""

    name: str
    value: float
    at: tuple[int, ...]


def check_shapes(inputs: EstimatorInputs, names: tuple[str, ...]) -> None:
    """Raise unless every named input fits the mask and the group vector.

    Raises:
        InputError: A shape does not fit, or the mask is not boolean.
    """
    mask = boolean_mask(inputs.mask)
    group_vector(inputs.group, len(mask))
    for name in ("reward", *names):
        shape = np.shape(getattr(inputs, name))
        expected = mask.shape[:1] if name in PER_ROLLOUT else mask.shape
        if shape != expected:
            axes = "one value per rollout, shape [N]" if name in PER_ROLLOUT else f"shape [N, T] = {expected}"
            remedy = REMEDY["reward"] if name == "reward" else f"pass {axes}"
            raise InputError(f"{name} has shape {shape} but mask has {mask.shape[0]} rollouts; {remedy}.")


def prepare(inputs: EstimatorInputs, rows: Int, groups: Groups, names: tuple[str, ...]) -> tuple[Batch, Bool | None]:
    """Select rollouts, check what the estimator reads of them, and squeeze out what is not a policy token.

    Returns:
        The batch, and the selected rows of the caller's mask [n, T] when tokens had to move (None when they did not).

    Raises:
        InputError: A value inside the mask is NaN, infinite, or negative where it cannot be.
    """
    take = selector(rows)
    mask = np.asarray(inputs.mask)[take]
    gaps = has_gaps(mask)
    inside = squeezed_mask(mask) if gaps else mask[:, : prefix_length(mask).max(initial=0)]
    alive, present = inside.astype(np.float64), (prefix_length(inside) > 0).astype(np.float64)

    def read(name: str) -> np.ndarray:
        x = np.asarray(getattr(inputs, name))[take]
        return squeeze(x, mask) if gaps else x

    fields = {}
    try:
        returns, total = _returns(read("reward"), inside, alive)
        for name in names:
            if name in PER_ROLLOUT:
                fields[name] = _cleared(name, np.asarray(getattr(inputs, name))[take], present)
            else:
                fields[name] = _cleared(name, read(name)[:, : inside.shape[1]], alive)
    except _BadValue as bad:
        where = [f"rollout {rows[bad.at[0]]}", *(f"token {np.flatnonzero(mask[bad.at[0]])[t]}" for t in bad.at[1:])]
        raise InputError(f"{bad.name} is {bad.value} at {', '.join(where)}; {REMEDY[bad.name]}.") from None
    return Batch(returns, total, inside, alive, groups, state=inputs.state, **fields), mask if gaps else None


def selector(rows: Int) -> Int | slice:
    """Return what selects these rows without a copy, if anything does."""
    together = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows


def _returns(reward: np.ndarray, inside: Bool, alive: Float) -> tuple[Float, Float]:
    """G and R. With one terminal reward per rollout G_t = R, and one look at the rewards is enough."""
    if not inside.size:
        return np.zeros(inside.shape), np.zeros(len(inside))
    length = prefix_length(inside)
    last = np.where(length > 0, reward[np.arange(len(reward)), length - 1], 0.0).astype(np.float64)
    if _count_nonzero(reward) == np.count_nonzero(last) and np.isfinite(last).all():
        return last[:, None] * alive, last
    paid = _cleared("reward", reward[:, : inside.shape[1]], alive)
    return np.cumsum(paid[:, ::-1], axis=1)[:, ::-1], paid.sum(axis=1)


def _count_nonzero(x: np.ndarray) -> int:
    """Count as integers, which is four times as fast; a −0.0 counts, and the caller then looks entry by entry."""
    return int(np.count_nonzero(x.view(f"i{x.itemsize}") if x.dtype.kind == "f" and x.itemsize <= 8 else x))


def _cleared(name: str, x: np.ndarray, alive: Float) -> Float:
    """Checked values in float64, zero outside the mask."""
    with np.errstate(invalid="ignore", over="ignore"):
        quick = x * alive  # a NaN or infinity outside the mask makes NaN; only then look entry by entry
        if np.isfinite(quick.sum()) and (name not in NON_NEGATIVE or quick.min(initial=0.0) >= 0):
            return quick
    exact = masked(x, alive > 0)
    wrong = ~np.isfinite(exact) | ((exact < 0) & (name in NON_NEGATIVE))
    if wrong.any():
        at = tuple(int(k) for k in np.argwhere(wrong)[0])
        raise _BadValue(name, float(exact[at]), at)
    return exact
