"""What one estimator is: its function, its options and everything the catalogue says about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from otb_analysis.errors import InputError, nearest
from otb_analysis.objectives.registry import NoOptions, Provenance

Tail = Literal["own_return", "group", "zero"]


@dataclass(frozen=True)
class TailOptions:
    """What to do where no other rollout of the group is alive at this position.

    Attributes:
        tail: `own_return`: B = 0, so A = G (as published). `group`: B = mean of the other, finished rollouts' total
            returns, weighted by their final realized energy. `zero`: A = 0, which is biased.
    """

    tail: Tail = "own_return"

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise InputError(f"tail is {self.tail!r}; {nearest(str(self.tail), get_args(Tail))}")


@dataclass(frozen=True)
class DecayOptions(TailOptions):
    """Options of the forgetting energy.

    Attributes:
        decay: λ in W_t = λ W_{t−1} + w_t; 0 is `token_optimal`, 1 is `otb`.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"decay is {self.decay} but must lie in [0, 1]; 0 is token_optimal, 1 is otb.")


@dataclass(frozen=True)
class ValueOptions:
    """Options of generalized advantage estimation.

    Attributes:
        discount: γ, the price of one token's delay; 1 is the task's own return.
        decay: λ, how far rewards are believed before the critic: 1 is G − V(h_t), 0 the one-step surprise.
    """

    discount: float = 1.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        for name in ("discount", "decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} is {getattr(self, name)} but must lie in [0, 1]; 1 is unbiased.")


@dataclass(frozen=True)
class EstimatorSpec:
    """One row of the catalogue.

    Attributes:
        function: (Batch, options) → BaselineResult, pure; `evaluate` makes it an Estimate. Of an estimator of
            one's own, (EstimatorInputs, options) → advantages [N, T].
        formula: B_{i,t} in Unicode.
        unbiased: True when E ĝ is the gradient of the target under `conditions`.
        conditions: Under which conditions, or why not.
        source: Where the formula comes from.
        standing: code, proved, abstract or guess: how well that source is known.
        target: Whose gradient it estimates.
        needs: Inputs beyond reward, mask and group that must be there.
        uses: Inputs that change the answer when they are there.
        options: Its frozen options dataclass.
        batch_coupled: True when another prompt's rollouts change the answer; recompute it inside every resample, or see
            `statistics.gradients` for what deleting prompts from a finished Gram matrix costs.
        takes_gaps: False when positions are columns, so that tool tokens in between cannot be had.
        shrinks_by: Set where E ĝ = (1 − 1/N)·∇J: N counts the rollouts of the `group` or of the whole `batch`.
        takes_single: True when a prompt's only rollout is centred as any other: by other prompts, a critic, or nothing.
    """

    function: Callable[[Any, Any], Any]
    formula: str
    unbiased: bool
    conditions: str
    source: str
    standing: Provenance
    target: str = "∇J"
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    options: type = NoOptions
    batch_coupled: bool = False
    takes_gaps: bool = True
    shrinks_by: Literal["", "group", "batch"] = ""
    takes_single: bool = False

    @property
    def reads_energy(self) -> bool:
        """True when the answer depends on token energies, and so on where they were measured."""
        return "energy" in self.needs

    @property
    def shown_by(self) -> str:
        """The test that shows whether it is biased."""
        claim = "unbiased_have_no_bias" if self.unbiased else "biased_have_a_bias"
        return f"tests/enumeration/test_bias.py::test_entries_called_{claim}"
