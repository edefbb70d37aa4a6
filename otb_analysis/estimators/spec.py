"""What one estimator is, in the catalogue, and what its formula is given: checked inputs in float64, column = position.

A `Batch` holds some rollouts (whole groups) of an `EstimatorInputs`; the formulas see nothing else. Tool tokens are
squeezed out here, so every formula may take column t for the t-th policy token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from otb_analysis.arrays import Groups, has_gaps, masked, prefix_length, squeeze, squeezed_mask
from otb_analysis.errors import InputError, nearest
from otb_analysis.objectives.registry import LimitedOptions, NoOptions, Provenance, boolean_mask
from otb_analysis.types import Bool, EstimatorInputs, Float, Int, NormalEquations, Tallies

Tail = Literal["own_return", "group", "zero"]

TRAINABLE_NEEDS = {"energy", "rollout_norm_sq", "value", "turn", "token_id", "ratio", "entropy"}
"""Inputs that a training run can provide at every step."""


@dataclass(frozen=True)
class TailOptions(LimitedOptions):
    """What to do where no other rollout of the group is alive at this position."""

    valid = (lambda o: o.tail in get_args(Tail), "tail is {self.tail!r}; choose own_return, group or zero.")
    # `own_return`: B = 0, so A = G (as published). `group`: B = mean of the other, finished rollouts' total returns,
    # weighted by their final realized energy. `zero`: A = 0, which is biased.
    tail: Tail = "own_return"


@dataclass(frozen=True)
class DecayOptions(TailOptions):
    """Options of the forgetting energy."""

    valid = (
        lambda o: 0 <= o.decay <= 1,
        "decay is {self.decay} but must lie in [0, 1]; 0 is token_optimal, 1 is otb.",
    )
    decay: float = 0.9  # λ in W_t = λ W_{t−1} + w_t


@dataclass(frozen=True)
class ValueOptions(LimitedOptions):
    """Options of generalized advantage estimation."""

    valid = (
        lambda o: 0 <= o.discount <= 1 and 0 <= o.decay <= 1,
        "discount is {self.discount} and decay is {self.decay} but must lie in [0, 1]; 1 is unbiased.",
    )
    discount: float = 1.0  # γ, what a reward loses per token of delay; 1 is the task's own return
    decay: float = 1.0  # λ: 1 uses the rewards alone, G − V(h_t); 0 trusts the critic after one step


@dataclass(frozen=True)
class QuantileOptions(LimitedOptions):
    """Options of the quantile baseline."""

    valid = (
        lambda o: 0 <= o.quantile <= 1,
        "quantile is {self.quantile} but must lie in [0, 1]; 0.5 is the (lower) median.",
    )
    quantile: float = 0.4  # q: the share of the group that does not exceed the baseline


@dataclass(frozen=True)
class LengthOptions(LimitedOptions):
    """Options of the mean weighted by powers of lengths."""

    valid = (
        lambda o: 0 <= o.exponent <= 1,
        "exponent is {self.exponent} but must lie in [0, 1]; 0 is group_mean, 1 is opo.",
    )
    exponent: float = 0.5  # α in L^α


@dataclass(frozen=True)
class DiscountOptions(LimitedOptions):
    """Options of the discounted Beta–Bernoulli baseline."""

    valid = (
        lambda o: 0 <= o.discount <= 1,
        "discount is {self.discount} but must lie in [0, 1]; 0 remembers nothing, 1 forgets nothing.",
    )
    discount: float = 0.75  # λ, what the counts of a prompt are worth when it is sampled again


@dataclass(frozen=True)
class KalmanOptions(LimitedOptions):
    """Options of the Kalman filter."""

    valid = (
        lambda o: o.process >= 0 and o.noise > 0,
        "{self} is no filter; process is 0 or more and noise is above 0.",
    )
    process: float = 1e-5  # Q, by how much the mean's variance grows from rollout to rollout
    noise: float = 1e-2  # R, the variance of a rollout's return around the mean


FEATURES: dict[str, tuple[str, str]] = {
    "1": ("1", "1"),
    "m": ("m", "1"),
    "f": ("1", "f"),
    "m·f": ("m", "f"),
    "h": ("1", "h"),
    "m·h": ("m", "h"),
    "x": ("1", "x"),
    "m·x": ("m", "x"),
}
"""Name of a feature of `energy_regression` → its factors: one number per rollout, 1 or m, and one per token."""


AUTO = "auto"
RIDGES, LEAST_RIDGE = ((16, 10.0), (32, 1.0)), 0.1
"""Prompts below which a ridge is chosen, and the ridge of more: docs/results/regression.md and study 08."""


@dataclass(frozen=True)
class RegressionOptions(LimitedOptions):
    """Options of the regression across prompts."""

    valid = (lambda o: 0 <= o.memory <= 1, "memory is {self.memory} but must lie in [0, 1]; 0 remembers nothing.")
    # φ, any of 1, m, f, m·f, h, m·h, x, m·x (m*f will do): m is the mean return of the other rollouts of the prompt,
    # f = u/(1 + u) with u = W_{t−1}, h = H_t/(1 + H_t), x = t/T_max
    features: tuple[str, ...] = tuple(FEATURES)
    # Each coefficient but that of 1 is penalised by this share of its feature's own Σ w φ²: 0 is plain least squares,
    # which fits few prompts too closely, and more and more leads to `energy_across_loo`. auto: 10 below 16 prompts, 1
    # below 32, then 0.1; with memory λ the prompts of earlier steps count, too
    ridge: float | str = AUTO
    # Most policy tokens that a rollout can have, fixed before sampling. 0: not known, x and m·x are left out
    T_max: int = 0
    # λ, what the sums of one step count a step later, from 0 (no memory) to 1 (nothing is forgotten)
    memory: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(name.strip().replace("*", "·") for name in self.features))
        for name in self.features:
            if name not in FEATURES:
                raise InputError(f"features has {name!r}; {nearest(name, FEATURES)}")
        if len(set(self.features)) < len(self.features) or not self.used:
            raise InputError(f"features is {self.features}; name at least one, each once, and T_max for those of x.")
        if self.ridge != AUTO:
            try:
                object.__setattr__(self, "ridge", float(self.ridge))
            except ValueError:
                raise InputError(f"ridge is {self.ridge!r}; pass a number, or {AUTO}.") from None
            if not 0.0 <= float(self.ridge) < math.inf:
                raise InputError(f"ridge is {self.ridge} but must be a finite number of at least 0, or {AUTO}.")
        if self.T_max < 0:
            raise InputError(f"T_max is {self.T_max}; pass the sampling limit, or 0 where it is not known.")
        super().__post_init__()

    def ridge_for(self, prompts: int, remembers: bool = False) -> float:
        """Return the ridge for a batch of so many prompts; with a memory λ they count as prompts/(1 − λ)."""
        if self.ridge != AUTO:
            return float(self.ridge)
        forgotten = 1 - self.memory if remembers else 1.0
        return next((ridge for most, ridge in RIDGES if prompts < most * forgotten), LEAST_RIDGE)

    @property
    def used(self) -> tuple[str, ...]:
        """The features that can be formed."""
        return tuple(name for name in self.features if self.T_max or FEATURES[name][1] != "x")

    @property
    def unread(self) -> frozenset[str]:
        """Inputs that these features do without."""
        return frozenset() if any(FEATURES[name][1] == "h" for name in self.used) else frozenset({"entropy"})


@dataclass(frozen=True)
class EstimatorSpec:
    """One row of the catalogue."""

    # (Batch, options) → BaselineResult, pure; `evaluate` makes it an Estimate. A custom estimator's function is
    # (EstimatorInputs, options) → advantages [N, T].
    function: Callable[[Any, Any], Any]
    formula: str  # B_{i,t} in Unicode
    unbiased: bool  # True when E ĝ is the gradient of the target under `conditions`
    conditions: str  # Under which conditions, or why not
    source: str  # Where the formula comes from
    provenance: Provenance  # code, proved, abstract or guess: how well that source is known
    target: str = "∇J"  # Whose gradient it estimates
    # Inputs beyond reward, mask and group that must be there, unless its options have them under `unread`
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()  # Inputs that change the answer when they are there
    options: type = NoOptions  # Its frozen options dataclass
    # True when another prompt's rollouts change the answer; recompute it inside every resample, or see
    # `statistics.gradients` for what deleting prompts from a finished Gram matrix costs
    batch_coupled: bool = False
    takes_gaps: bool = True  # False when position t is column t, so that tool tokens in between are refused
    ordered: bool = False  # True when the order of a group's rollouts changes the answer
    # Set where E ĝ = (1 − 1/N)·∇J: N counts the rollouts of the `group` or of the whole `batch`
    shrinks_by: Literal["", "group", "batch"] = ""
    # True when a prompt's only rollout is centred as any other: by other prompts, a critic, or nothing
    takes_single: bool = False

    def needed(self, options: Any = None) -> tuple[str, ...]:
        """Return the inputs it needs under some options, None for the usual ones."""
        unread = getattr(options or self.options(), "unread", frozenset())
        return tuple(need for need in self.needs if need not in unread)

    @property
    def reads_energy(self) -> bool:
        """True when the answer depends on token energies, and so on where they were measured."""
        return "energy" in self.needs

    @property
    def shown_by(self) -> str:
        """The test that shows whether it is biased."""
        if self.unbiased and self.batch_coupled:
            return "tests/studies/enumeration/test_across.py::test_no_bias_in_batches_of_three_prompts"
        claim = "unbiased_have_no_bias" if self.unbiased else "biased_have_a_bias"
        return f"tests/studies/enumeration/test_bias.py::test_entries_called_{claim}"


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
    "prompt": "pass a number of each rollout's prompt",
}
NON_NEGATIVE = frozenset({"energy", "rollout_norm_sq", "ratio"})
PER_ROLLOUT = frozenset({"rollout_norm_sq", "prompt"})

ABSENT: Any = None
NOWHERE = np.zeros((1, 1), bool)  # The fallback of a formula that is always defined


@dataclass(frozen=True)
class Batch:
    """Rollouts of whole groups, ready for the formulas."""

    returns: Float  # G_{i,t} = Σ_{k≥t} r_{i,k} [N, T], zero outside the mask
    total: Float  # R_i, the total return [N]; zero for a rollout without policy tokens
    mask: Bool  # True at the first L_i columns of row i [N, T]
    alive: Float  # The mask as 0 and 1 [N, T]
    groups: Groups  # Which rollouts belong together
    # What the estimator does not list under `needs`, or what was not given of its `uses`, is None.
    energy: Float = ABSENT  # Token energy w [N, T]
    ratio: Float = ABSENT  # Importance ratio ρ [N, T]
    rollout_norm_sq: Float = ABSENT  # ‖Σ_t s_t‖² [N]
    position_baseline: Float = ABSENT  # B_t [N, T]
    value: Float = ABSENT  # V(h_t) [N, T]
    turn: Float = ABSENT  # Index of the token's turn [N, T]
    token_id: Float = ABSENT  # Token ids [N, T]
    entropy: Float = ABSENT  # Entropy H_t in nats [N, T]
    prompt: Float = ABSENT  # Number of the prompt [N]; zero for a rollout without policy tokens
    state: NormalEquations | Tallies | None = None  # What the step before left, where there is any

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
        return self.energy if self.ratio is None else self.energy * self.ratio**2

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
    state: NormalEquations | Tallies | None = None  # What the next step is given, where the estimator remembers


def check_shapes(inputs: EstimatorInputs, names: tuple[str, ...]) -> None:
    """Raise unless every named input fits the mask and the group vector.

    Raises:
        InputError: A shape does not fit, or the mask is not boolean.
    """
    mask = boolean_mask(inputs.mask, inputs.group)
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
    alive, length = inside.astype(np.float64), prefix_length(inside)
    fields = {}
    for name in ("reward", *names):
        x = np.asarray(getattr(inputs, name))[take]
        if name in PER_ROLLOUT:
            fields[name] = _cleared(name, x, (length > 0).astype(np.float64), rows, mask)
            continue
        x = (squeeze(x, mask) if gaps else x)[:, : inside.shape[1]]
        if name != "reward":
            fields[name] = _cleared(name, x, alive, rows, mask)
            continue
        # With one terminal reward per rollout G_t = R, and one look at the rewards is enough: counted as integers, four
        # times as fast; a −0.0 counts, and then every entry is looked at.
        last, some = np.zeros(len(inside)), length > 0
        last[some] = x[some, length[some] - 1]
        bits = x.view(f"i{x.itemsize}") if x.dtype.kind == "f" and x.itemsize <= 8 else x
        if np.count_nonzero(bits) == np.count_nonzero(last) and np.isfinite(last).all():
            fields["returns"], fields["total"] = last[:, None] * alive, last
        else:
            paid = _cleared(name, x, alive, rows, mask)
            fields["returns"], fields["total"] = np.cumsum(paid[:, ::-1], axis=1)[:, ::-1], paid.sum(axis=1)
    return Batch(mask=inside, alive=alive, groups=groups, state=inputs.state, **fields), mask if gaps else None


def selector(rows: Int) -> Int | slice:
    """Return what selects these rows without a copy, if anything does."""
    together = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows


def _cleared(name: str, x: np.ndarray, alive: Float, rows: Int, mask: Bool) -> Float:
    """Checked values in float64, zero outside the mask; `rows` and their `mask` say where a wrong one is."""
    with np.errstate(invalid="ignore", over="ignore"):
        quick = x * alive  # a NaN or infinity outside the mask makes NaN; only then look entry by entry
        if np.isfinite(quick.sum()) and (name not in NON_NEGATIVE or quick.min(initial=0.0) >= 0):
            return quick
    exact = masked(x, alive > 0)
    wrong = np.argwhere(~np.isfinite(exact) | ((exact < 0) & (name in NON_NEGATIVE)))
    if len(wrong):
        n, *token = (int(k) for k in wrong[0])
        where = [f"rollout {rows[n]}", *(f"token {np.flatnonzero(mask[n])[t]}" for t in token)]
        raise InputError(f"{name} is {float(exact[n, *token])} at {', '.join(where)}; {REMEDY[name]}.")
    return exact
