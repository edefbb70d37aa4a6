"""Prompts and answers from local files: JSON lines or Parquet, two columns of each row."""

import json
from pathlib import Path

from otb_analysis.errors import InputError


def read_rows(file: str | Path, columns: tuple[str, str]) -> list[tuple[str, str]]:
    """Return two columns of every row, as texts; numbers are written out.

    Raises:
        InputError: The file cannot be read, is empty, or a row lacks a column.
    """
    path = Path(file)
    if not path.is_file():
        raise InputError(f"{path} does not exist; pass a .jsonl or .parquet file.")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise InputError(f"{path} ends in {path.suffix!r}; pass a .jsonl or .parquet file.")
    rows = _parquet(path, columns) if path.suffix == ".parquet" else _json_lines(path)
    if not rows:
        raise InputError(f"{path} has no rows; pass a file with prompts and answers.")
    return [(_text(row, columns[0], path, n), _text(row, columns[1], path, n)) for n, row in rows]


def _json_lines(path: Path) -> list[tuple[int, dict]]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); pass a file of JSON lines in UTF-8.") from error
    for n, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {n} is no JSON ({error.msg}); write one object per line.") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {n} is a {type(row).__name__}; write one JSON object per line.")
        rows.append((n, row))
    return rows


def _parquet(path: Path, columns: tuple[str, str]) -> list[tuple[int, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
        if missing := [name for name in columns if name not in names]:
            raise InputError(f"{path} has no column {missing[0]!r}; it has {', '.join(names)}.")
        table = pq.read_table(path, columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read ({error}); pass a Parquet file.") from error
    return list(enumerate(table.to_pylist(), start=1))


def _text(row: dict, column: str, path: Path, n: int) -> str:
    if column not in row:
        raise InputError(f"{path}, row {n} has no column {column!r}; it has {', '.join(map(str, row))}.")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{path}, row {n}: {column} is {value!r:.60}; it must be a text or a number.")
    return str(value)
