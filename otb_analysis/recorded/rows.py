"""Rows of files, one after the other: JSON lines, Parquet, and PyTorch files without code in them."""

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.errors import InputError
from otb_analysis.extras import require

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json", ".parquet", ".pt")
COMPRESSED = {".zst": "zstd", ".gz": "gzip"}
BATCH = 64
"""Rows of a Parquet file that are in memory at once."""

Tally = Counter[str]
"""What was seen on the way and is no error, by sentence; counted, and told at the end."""
CUT = "record at the end of a file was cut off and left out; all before it were kept"


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    file: Path
    number: int  # From 1: the line of a text file, the row of another

    def __str__(self) -> str:
        """Return it as errors say it."""
        return f"{self.file}, record {self.number}"


def suffix_of(path: Path) -> str:
    """Return the ending that says how a file is read, empty where it cannot be read."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), "")


def number_in(path: Path) -> int | None:
    """Return the last whole number of a file's name, which is its step; None where it has none."""
    numbers = re.findall(r"\d+", path.name.removesuffix(suffix_of(path)))
    return int(numbers[-1]) if numbers else None


def rows_of(path: Path, tally: Tally) -> Iterator[tuple[Place, Row]]:
    """Yield the rows of a file with their places; a text file that ends within a record yields all before it.

    Raises:
        InputError: The file cannot be read, or a row is no object.
    """
    suffix = suffix_of(path)
    if not path.is_file() or not suffix:
        raise InputError(f"{path} is no file that can be read; pass one that ends in {', '.join(SUFFIXES)}.")
    read = _parquet if suffix == ".parquet" else _pickled if suffix == ".pt" else _lines
    try:
        yield from read(path, tally)
    except (OSError, pa.ArrowException) as error:
        whole = "a Parquet file is read from its end, so one that was cut off is lost; " if suffix == ".parquet" else ""
        raise InputError(f"{path} cannot be read ({_first_line(error)}); {whole}write it again.") from error


def _lines(path: Path, tally: Tally) -> Iterator[tuple[Place, Row]]:
    with _open(path) as file:
        number = 0
        while line := _next_line(file, path, tally):
            number += 1
            if not line.strip():
                continue
            place = Place(path, number)
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    tally[CUT] += 1
                    return
                raise InputError(f"{place} is no JSON ({_first_line(error)}); write one object per line.") from error
            if not isinstance(row, dict):
                raise InputError(f"{place} is a {type(row).__name__}; write one JSON object per line.")
            yield place, row


def _open(path: Path) -> BinaryIO:
    if compression := COMPRESSED.get(path.suffix):
        return io.BufferedReader(cast(io.RawIOBase, pa.input_stream(str(path), compression=compression)))
    return path.open("rb")


def _next_line(file: BinaryIO, path: Path, tally: Tally) -> bytes:
    """Return the next line with its end, empty at the end of the file; a compressed file may end in the middle."""
    try:
        return file.readline()
    except OSError:
        if path.suffix not in COMPRESSED:
            raise
        tally[CUT] += 1
        return b""


def _parquet(path: Path, tally: Tally) -> Iterator[tuple[Place, Row]]:
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH):
            for row in batch.to_pylist():
                number += 1
                yield Place(path, number), row


def _pickled(path: Path, tally: Tally) -> Iterator[tuple[Place, Row]]:
    """Yield the samples of a PyTorch file, which is loaded without running any code that is in it."""
    require("torch", f"reading {path.name}")
    import torch

    try:
        pack = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(
            f"{path} holds more than tensors, numbers, texts, lists and dicts, or is broken; loading the rest could "
            "run any code, so it is refused: save those alone."
        ) from error
    if not isinstance(pack, dict):
        pack = {"samples": pack}
    # A sample's own rollout_id is another thing than the file's.
    shared = {"file_step": pack.get("rollout_id")}
    for number, row in enumerate(_samples(pack, path), start=1):
        yield Place(path, number), {**row, **shared}


def _samples(pack: Mapping[str, Any], path: Path) -> list[Row]:
    """Return a file's samples: its list of them, or its columns cut into rows.

    Raw rewards are those of the whole batch, of which a process may have a part: then places in it are stored, too.
    """
    import torch

    samples, columns = pack.get("samples"), pack.get("rollout_data")
    if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples):
        return _with_rewards(samples, pack.get("raw_reward"), [sample.get("rollout_position") for sample in samples])
    if not isinstance(columns, dict) or "tokens" not in columns:
        raise InputError(f"{path} holds neither samples nor rollout_data with tokens; pass what slime or miles wrote.")
    count = len(columns["tokens"])
    listed = {k: v for k, v in columns.items() if isinstance(v, list | tuple | torch.Tensor) and len(v) == count}
    rows = [{name: values[i] for name, values in listed.items()} for i in range(count)]
    return _with_rewards(rows, columns.get("raw_reward"), list(columns.get("partition") or range(count)))


def _with_rewards(
    rows: list[dict[str, Any]], rewards: Sequence[float] | None, places: Sequence[int | None]
) -> list[Row]:
    """Add each row's reward out of those of the whole batch, where its place is known."""
    if rewards is None or any(place is None for place in places):
        return [*rows]
    return [{**row, "raw_reward": rewards[place]} for row, place in zip(rows, places, strict=True) if place is not None]


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
