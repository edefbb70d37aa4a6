"""Numbers for JSON: records, arrays and tables as what any strict parser reads."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd

WORDS = {math.inf: "infinite", -math.inf: "minus infinite"}


def written(value: Any) -> Any:
    """Return a value as JSON can write it: null for every number that is unknown, NaN or infinite.

    Dataclasses become objects, arrays lists, tables lists of one object per row; what JSON has no word for becomes
    text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: written(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): written(part) for name, part in value.items()}
    if isinstance(value, pd.DataFrame):
        return [written(row) for row in value.astype(object).to_dict("records")]
    if isinstance(value, np.ndarray | np.generic):
        return written(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [written(part) for part in value]
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) else str(value)


def infinite_cells(table: pd.DataFrame) -> list[dict[str, object]]:
    """Return which cells of a table `written` makes null although they hold a number: those that are infinite."""
    return [
        {"row": int(row), "column": str(name), "is": WORDS[float(values[row])]}
        for name, values in ((name, table[name].to_numpy()) for name in table.select_dtypes("floating"))
        for row in np.flatnonzero(np.isinf(values.astype(np.float64, copy=False)))
    ]
