"""What every registry of formulas shares: the row of metadata, looking a name up, options, and checked arrays.

Ratios, aggregations and reward shapings are dict literals of `Formula`; estimators have a row of their own
(`estimators.spec`) and the same options.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.arrays import masked
from otb_analysis.errors import InputError, nearest
from otb_analysis.types import Bool, Float

Row = TypeVar("Row")
Provenance = Literal["code", "proved", "abstract", "guess"]
"""How well a source is known: read in public code, derived and enumerated, from an abstract, or a labelled reading."""


@dataclass(frozen=True)
class NoOptions:
    """A formula without options."""


class LimitedOptions:
    """Options some values of which make no sense: each class may have a test of its own beside those it inherits."""

    # A test of the options, and the sentence where it fails; NaN must fail
    valid: ClassVar[tuple[Callable[[Any], bool], str]]

    def __post_init__(self) -> None:
        for holds, sentence in [vars(kind)["valid"] for kind in type(self).__mro__[::-1] if "valid" in vars(kind)]:
            if not holds(self):
                raise InputError(sentence.format(self=self))


class CheckedInputs:
    """Inputs of formulas, with a mask [N, T] and maybe a group [N]; `columns` are kept zero outside the mask."""

    columns: ClassVar[tuple[str, ...]]  # Names of the float64 arrays [N, T]
    mask: Bool

    def __post_init__(self) -> None:
        """Check shapes and values; a column whose default is None may be left out."""
        given = vars(self)
        mask = boolean_mask(self.mask, given.get("group"))
        for name in self.columns:
            if given[name] is not None or not hasattr(type(self), name):
                object.__setattr__(self, name, policy_values(name, given[name], mask))

    @property
    def length(self) -> Float:
        """L_i, policy tokens of each rollout [N]."""
        return np.count_nonzero(self.mask, axis=1).astype(np.float64)


@dataclass(frozen=True)
class Formula:
    """One row of a registry."""

    # (inputs, options) → the answer, a pure function; its docstring's first line is the summary
    function: Callable[[Any, Any], Any]
    formula: str  # What it computes, in Unicode
    source: str  # Where it comes from
    provenance: Provenance  # code, proved, abstract or guess: how well that source is known
    needs: tuple[str, ...] = ()  # Inputs it reads beyond the mask
    options: type = NoOptions  # Its frozen options dataclass; unknown fields raise

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.function.__doc__ or "").splitlines()[0]


def lookup(kind: str, name: str, registry: Mapping[str, Row]) -> Row:
    """Return a row of a registry.

    Raises:
        InputError: The name does not exist.
    """
    if name not in registry:
        raise InputError(f"{kind} {name!r} does not exist; {nearest(name, registry)}")
    return registry[name]


def checked_options(name: str, kind: type, options: Any) -> Any:
    """Return the options, or the defaults for None.

    Raises:
        InputError: The options are of another type.
    """
    if options is None:
        return kind()
    if type(options) is not kind:
        raise InputError(
            f"options of {name} are {type(options).__name__} but must be {kind.__name__}; "
            "build them with options_from_dict."
        )
    return options


def answer(kind: str, name: str, registry: Mapping[str, Formula], inputs: Any, options: Any) -> Any:
    """Return what a formula of a registry makes of inputs, by default with its own options.

    Raises:
        InputError: The name does not exist, or the options are of another type.
    """
    entry = lookup(kind, name, registry)
    return entry.function(inputs, checked_options(name, entry.options, options))


def options_from_table(name: str, kind: type, values: Mapping[str, Any]) -> Any:
    """Return options from a configuration's table; values may be text, and what is left out keeps its default.

    Raises:
        InputError: An option does not exist, or a value does not fit.
    """
    defaults = {field.name: getattr(kind(), field.name) for field in fields(kind)}
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key not in defaults:
            hint = nearest(key, defaults) if defaults else "it has no options."
            raise InputError(f"option {key!r} does not exist for {name}; {hint}")
        default, text = defaults[key], isinstance(value, str)
        if isinstance(default, tuple):
            read[key] = tuple(value.split(",") if text else value)  # TOML and JSON know lists only
        elif not text or isinstance(default, str):
            read[key] = value
        else:  # configurations and command lines give every option as text
            try:
                read[key] = type(default)(value)
            except ValueError as error:
                wanted = f"pass a {type(default).__name__}, such as {default!r}"
                raise InputError(f"option {key!r} of {name} is {value!r}; {wanted}.") from error
    return kind(**read)


def boolean_mask(mask: ArrayLike, group: ArrayLike | None = None) -> Bool:
    """Return the mask once it and the group of each rollout [N], where there is one, are what they must be.

    Raises:
        InputError: The mask is not boolean or not [N, T], or the group is not of integers [N].
    """
    mask = np.asarray(mask)
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise InputError(f"mask has shape {mask.shape} and dtype {mask.dtype}; pass booleans of shape [N, T].")
    numbers = np.zeros(len(mask), int) if group is None else np.asarray(group)
    if numbers.shape != (len(mask),) or not np.issubdtype(numbers.dtype, np.integer):
        raise InputError(
            f"group has shape {numbers.shape} and dtype {numbers.dtype} but mask has {len(mask)} rollouts; "
            "pass one integer per rollout, shape [N]."
        )
    return mask


def policy_values(name: str, x: ArrayLike | None, mask: Bool) -> Float:
    """Return a column in float64, zero outside the mask, where values are never read.

    Raises:
        InputError: It is None, of another shape, or NaN or infinite inside the mask.
    """
    if x is None or np.shape(x) != mask.shape:
        shape = "is None" if x is None else f"has shape {np.shape(x)}"
        raise InputError(f"{name} {shape} but mask has {len(mask)} rollouts; pass shape [N, T] = {mask.shape}.")
    values = masked(x, mask)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        n, t = map(int, wrong[0])
        raise InputError(f"{name} is {values[n, t]} at rollout {n}, token {t}; pass a finite value per policy token.")
    return values
