"""What one estimator is: its function, its options and everything the catalogue says about it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from otb_analysis.errors import InputError, nearest
from otb_analysis.objectives.registry import NoOptions, Provenance

Tail = Literal["own_return", "group", "zero"]

TRAINABLE_NEEDS = {"energy", "rollout_norm_sq", "value", "turn", "token_id", "ratio", "entropy"}
"""Inputs that a training run can provide at every step."""


@dataclass(frozen=True)
class TailOptions:
    """What to do where no other rollout of the group is alive at this position."""

    # `own_return`: B = 0, so A = G (as published). `group`: B = mean of the other, finished rollouts' total returns,
    # weighted by their final realized energy. `zero`: A = 0, which is biased.
    tail: Tail = "own_return"

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise InputError(f"tail is {self.tail!r}; {nearest(str(self.tail), get_args(Tail))}")


@dataclass(frozen=True)
class DecayOptions(TailOptions):
    """Options of the forgetting energy."""

    decay: float = 0.9  # λ in W_t = λ W_{t−1} + w_t; 0 is `token_optimal`, 1 is `otb`

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay is {self.decay} but must lie in [0, 1]; 0 is token_optimal, 1 is otb.")


@dataclass(frozen=True)
class ValueOptions:
    """Options of generalized advantage estimation."""

    discount: float = 1.0  # γ, what a reward loses per token of delay; 1 is the task's own return
    decay: float = 1.0  # λ: 1 uses the rewards alone, G − V(h_t); 0 trusts the critic after one step

    def __post_init__(self) -> None:
        for name in ("discount", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} is {getattr(self, name)} but must lie in [0, 1]; 1 is unbiased.")


@dataclass(frozen=True)
class QuantileOptions:
    """Options of the quantile baseline."""

    quantile: float = 0.4  # q: the share of the group that does not exceed the baseline

    def __post_init__(self) -> None:
        if not 0.0 <= self.quantile <= 1.0:
            raise InputError(f"quantile is {self.quantile} but must lie in [0, 1]; 0.5 is the (lower) median.")


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
class RegressionOptions:
    """Options of the regression across prompts."""

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
        if not 0.0 <= self.memory <= 1.0:
            raise InputError(f"memory is {self.memory} but must lie in [0, 1]; 0 remembers nothing.")

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
