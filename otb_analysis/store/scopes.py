"""Whose parameters' gradients runs measured: those of unlike scopes do not compare."""

from collections.abc import Sequence
from typing import Any

from otb_analysis.store.reader import RunStore

WHOLE = "all"  # The scope of a run that measured the gradient of all parameters


def scope_of(store: RunStore) -> str:
    """Return whose parameters' gradient a run measured, as its configuration says; all where it does not say."""
    config: Any = store.info.get("config") or {}
    measure = config.get("measure")
    return str(measure.get("scope", WHOLE)) if isinstance(measure, dict) else WHOLE


def unlike_scopes(stores: Sequence[RunStore]) -> str:
    """Return which two runs measured gradients of other parameters, for a remedy to follow; empty where none did."""
    for other in stores[1:]:
        first, second = scope_of(stores[0]), scope_of(other)
        if second != first:
            names = (stores[0].path.name, other.path.name)
            return (
                f"{names[0]} measured gradients of scope {first!r} but {names[1]} of {second!r}, which do not compare"
            )
    return ""
