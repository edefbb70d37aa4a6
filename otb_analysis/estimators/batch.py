"""Checked inputs of the estimators: float64, zero outside the mask, column = policy position.

A `Batch` holds some rollouts (whole groups) of an `EstimatorInputs`; the formulas see nothing else. Tool tokens are
squeezed out here, so every formula may take column t for the t-th policy token.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from otb_analysis.arrays import Groups, bits_of, has_gaps, keep_bits, masked, squeeze, squeezed_mask
from otb_analysis.errors import InputError
from otb_analysis.types import Bool, EstimatorInputs, Float, Int

REMEDY = {
    "reward": "pass one reward per token, shape [N, T]",
    "energy": "an energy is a squared norm, finite and never negative inside the mask",
    "rollout_norm_sq": "a squared norm is finite and never negative",
    "ratio": "an importance ratio is finite and never negative inside the mask",
    "value": "pass the critic's finite value at every policy token",
    "position_baseline": "pass a finite baseline at every policy token",
}
NON_NEGATIVE = {"energy", "rollout_norm_sq", "ratio"}


@dataclass(frozen=True)
class Batch:
    """Rollouts of whole groups, ready for the formulas.

    Attributes:
        reward: Reward by policy position [N, T].
        mask: True at the first L_i columns of row i [N, T].
        groups: Which rollouts belong together.
        energy: Token energy w [N, T], where the estimator needs it.
        ratio: Importance ratio ρ [N, T], where given and used.
        rollout_norm_sq: ‖Σ_t s_t‖² [N], where needed.
        position_baseline: B_t [N, T], where needed.
        value: V(h_t) [N, T], where needed.
    """

    reward: Float
    mask: Bool
    groups: Groups
    energy: Float | None = None
    ratio: Float | None = None
    rollout_norm_sq: Float | None = None
    position_baseline: Float | None = None
    value: Float | None = None

    @cached_property
    def alive(self) -> Float:
        """1 at policy tokens, 0 elsewhere [N, T]."""
        return self.mask.astype(np.float64)

    @cached_property
    def returns(self) -> Float:
        """G_{i,t} = Σ_{k≥t} r_{i,k} [N, T], zero outside the mask."""
        if not self.reward.size:
            return self.reward
        last = self.reward[np.arange(len(self.mask)), np.maximum(self.length - 1, 0)]
        if np.count_nonzero(self.reward) == np.count_nonzero(last):  # one terminal reward: G_t = R, no sum needed
            return last[:, None] * self.alive
        return np.cumsum(self.reward[:, ::-1], axis=1)[:, ::-1]

    @cached_property
    def total(self) -> Float:
        """R_i, the total return [N]; zero for a rollout without policy tokens."""
        return self.reward.sum(axis=1)

    @cached_property
    def length(self) -> Int:
        """L_i, policy tokens of each rollout [N]."""
        if not self.mask.size:
            return np.zeros(len(self.mask), np.int64)
        return np.where(self.mask[:, -1], self.mask.shape[1], self.mask.argmin(axis=1))  # true comes first in a row

    @cached_property
    def present(self) -> Float:
        """1 for rollouts with policy tokens, 0 for those without: they have no return and count nowhere [N]."""
        return (self.length > 0).astype(np.float64)

    @cached_property
    def alone(self) -> Bool:
        """True for rollouts that are the only one with tokens in their group [N]."""
        return self.groups.spread(self.groups.sum(self.present)) <= 1

    @cached_property
    def weight(self) -> Float:
        """ρ_t² w_t, or w_t without ratios [N, T]."""
        energy = given(self.energy)
        return energy if self.ratio is None else energy * self.ratio**2

    @cached_property
    def realized(self) -> Float:
        """W_t = Σ_{j≤t} ρ_j² w_j [N, T], constant after the last token."""
        return np.cumsum(self.weight, axis=1)

    @cached_property
    def final(self) -> Float:
        """W_{i,T}, the realized energy of the whole rollout [N]."""
        return self.weight.sum(axis=1)


def given(x: Float | None) -> Float:
    """Return an input that `Entry.needs` guarantees.

    Args:
        x: A field of `Batch`.

    Raises:
        LookupError: The entry reads an input that it does not declare.
    """
    if x is None:
        raise LookupError("an estimator reads an input that its entry does not list under needs")
    return x


def check_shapes(inputs: EstimatorInputs, names: tuple[str, ...]) -> None:
    """Raise unless every named input fits the mask and the group vector.

    Args:
        inputs: What the caller passed.
        names: Inputs the estimator reads, beyond mask and group.

    Raises:
        InputError: A shape does not fit, or the mask is not boolean.
    """
    mask = np.asarray(inputs.mask)
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise InputError(f"mask has shape {mask.shape} and dtype {mask.dtype}; pass booleans of shape [N, T].")
    group = np.asarray(inputs.group)
    if group.shape != mask.shape[:1] or not np.issubdtype(group.dtype, np.integer):
        raise InputError(
            f"group has shape {group.shape} and dtype {group.dtype} but mask has {mask.shape[0]} rollouts; "
            "pass one integer per rollout, shape [N]."
        )
    for name in names:
        shape = np.shape(getattr(inputs, name))
        expected = mask.shape[:1] if name == "rollout_norm_sq" else mask.shape
        if shape != expected:
            axes = "one value per rollout, shape [N]" if name == "rollout_norm_sq" else f"shape [N, T] = {expected}"
            remedy = REMEDY["reward"] if name == "reward" else f"pass {axes}"
            raise InputError(f"{name} has shape {shape} but mask has {mask.shape[0]} rollouts; {remedy}.")


def prepare(inputs: EstimatorInputs, rows: Int, groups: Groups, names: tuple[str, ...]) -> tuple[Batch, Bool | None]:
    """Select rollouts, check what the estimator reads of them, and squeeze out what is not a policy token.

    Args:
        inputs: Inputs whose shapes were checked.
        rows: Rollouts to take [n], whole groups.
        groups: Groups of those rollouts.
        names: Inputs the estimator reads, beyond mask and group.

    Returns:
        The batch, and the selected rows of the caller's mask [n, T] when tokens had to move (None when they did not).

    Raises:
        InputError: A value inside the mask is NaN, infinite, or negative where it cannot be.
    """
    take = selector(rows)
    mask = np.asarray(inputs.mask)[take]
    gaps = has_gaps(mask)
    inside = squeezed_mask(mask) if gaps else mask[:, : np.count_nonzero(mask.any(axis=0))]
    bits, fields = bits_of(inside), {}
    for name in names:
        x = np.asarray(getattr(inputs, name))[take]
        if name == "rollout_norm_sq":
            fields[name] = masked(x, np.count_nonzero(mask, axis=1) > 0)
        else:
            fields[name] = squeeze(x, mask) if gaps else keep_bits(x[:, : inside.shape[1]], bits)
        _check_values(name, fields[name], rows, mask)
    return Batch(mask=inside, groups=groups, **fields), mask if gaps else None


def selector(rows: Int) -> Int | slice:
    """Return what selects these rows without a copy, if anything does.

    Args:
        rows: Row numbers [n].
    """
    together = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows


def _check_values(name: str, x: Float, rows: Int, mask: Bool) -> None:
    signed = name not in NON_NEGATIVE
    if np.isfinite(x.sum()) and (signed or x.min(initial=0.0) >= 0):
        return
    wrong = ~np.isfinite(x) | ((x < 0) & (not signed))
    if not wrong.any():  # finite values whose sum overflows
        return
    i, *column = (int(k) for k in np.argwhere(wrong)[0])
    where = f"rollout {rows[i]}"
    if column:
        where += f", token {np.flatnonzero(mask[i])[column[0]]}"
    raise InputError(f"{name} is {x[(i, *column)]} at {where}; {REMEDY[name]}.")
