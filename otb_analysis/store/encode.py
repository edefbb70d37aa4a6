"""Columns in, Arrow tables out: the schema's dtypes, null where nothing was measured, NaN where NaN was measured."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow.compute import call_function

from otb_analysis.errors import InputError
from otb_analysis.schema import TABLES, Column

ARROW = {
    "BIGINT": pa.int64(),
    "INTEGER": pa.int32(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
}
"""DuckDB's type names, as the schema writes them, in Arrow."""

FLOATS = (pa.float32(), pa.float64())

Columns = Mapping[str, object] | pd.DataFrame
"""Column name → values: a list, an array, a masked array or a Series, one value per row."""


def encode(table: str, step: int, columns: Columns) -> pa.Table:
    """Return the rows of one step as an Arrow table in the schema's order and dtypes.

    None and masked entries become null and mean *not measured*; NaN stays NaN. A column of the schema that is not
    passed is null throughout; `step` may be left out; columns beyond the schema are kept as they are.

    Raises:
        InputError: A key column is missing or holds a null, lengths differ, or values do not fit the dtype.
    """
    schema = {c.name: c for c in TABLES[table]}
    arrays = {str(name): _array(table, str(name), columns[name], schema.get(str(name))) for name in columns}
    n_rows = _common_length(table, arrays)
    arrays.setdefault("step", pa.array(np.full(n_rows, step, dtype=np.int64)))
    _check_keys(table, step, arrays)
    filled = {name: arrays.get(name, pa.nulls(n_rows, ARROW[c.dtype])) for name, c in schema.items()}
    return pa.table(filled | {name: array for name, array in arrays.items() if name not in schema})


def with_not_finite(rows: pa.Table) -> pa.Table:
    """Return rows of `steps` with the column that names their numbers that are NaN or infinite; named ones stay.

    Parquet tells NaN from null, which frames do not.
    """
    numbers = {name: rows[name] for name in rows.column_names if rows[name].type in FLOATS}
    values = [chunk.cast(pa.float64()) for column in numbers.values() for chunk in column.chunks]
    finite = call_function("is_finite", [pa.chunked_array(values, pa.float64())])
    if call_function("all", [finite]).as_py():
        return rows
    # null where not recorded
    bad = [(name, call_function("is_finite", [column]).to_pylist()) for name, column in numbers.items()]
    names = [", ".join(name for name, known in bad if known[row] is False) or None for row in range(len(rows))]
    found = pa.array(names, pa.string())
    if "not_finite" not in rows.column_names:
        return rows.append_column("not_finite", found)
    at = rows.schema.get_field_index("not_finite")
    return rows.set_column(at, rows.schema.field(at), call_function("coalesce", [rows["not_finite"], found]))


def _array(table: str, name: str, values: object, column: Column | None) -> pa.Array:
    try:
        # from_pandas=False: otherwise Arrow reads every measured NaN as "not measured".
        array = pa.array(values, from_pandas=False)
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        return array if column is None or array.type == ARROW[column.dtype] else array.cast(ARROW[column.dtype])
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        dtype = column.dtype if column else "an Arrow column"
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(
            f"column {name!r} of {table} cannot be stored as {dtype} ({reason}); "
            "pass one value of that type per row, None where it was not measured."
        ) from error


def _common_length(table: str, arrays: Mapping[str, pa.Array]) -> int:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        first = next(iter(lengths))
        other = next(name for name in lengths if lengths[name] != lengths[first])
        raise InputError(
            f"column {first!r} of {table} has {lengths[first]} rows but {other!r} has {lengths[other]}; "
            "pass columns of one length."
        )
    return next(iter(lengths.values()), 0)


def _check_keys(table: str, step: int, arrays: Mapping[str, pa.Array]) -> None:
    for column in TABLES[table]:
        if column.key and column.name not in arrays:
            raise InputError(f"{table} of step {step} has no key column {column.name!r}; pass it, one value per row.")
        if column.key and arrays[column.name].null_count:
            raise InputError(
                f"key column {column.name!r} of {table} has nulls in step {step}; pass a value in every row."
            )
    steps = arrays["step"].to_numpy()
    if (steps != step).any():
        wrong = steps[steps != step][0]
        raise InputError(f"column 'step' of {table} holds {wrong} but step {step} is being written; leave it out.")
