"""Rows of files, one after the other, and one recorded rollout, whoever wrote it: what must hold of it.

Files are JSON lines, Parquet, and PyTorch files without code in them.
"""

import io
import json
import pickle
import re
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.types import Bool, FinishReason, Float

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json", ".parquet", ".pt")
COMPRESSED = {".zst": "zstd", ".gz": "gzip"}
BATCH = 64
"""Rows of a Parquet file that are in memory at once."""
Tally = Counter[str]
"""What was seen on the way and is no error, by sentence; counted, and told at the end."""
CUT = "record at the end of a file was cut off and left out; all before it were kept"
UNREAD = "placeholder outside the mask was not read"
LOGPROBS = ("behavior_logprob", "logprob")
COLUMNS = (*LOGPROBS, "entropy", "advantage")
"""Per-token columns: the sampler's and the trainer's log-probabilities in nats, entropy in nats, advantages."""
ABOVE_ZERO = 1e-3
"""A log-probability may exceed 0 by this much: rounding."""


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
    try:
        if suffix == ".pt":
            yield from ((Place(path, number), row) for number, row in enumerate(_pickled(path), start=1))
        elif suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                rows = (row for batch in file.iter_batches(batch_size=BATCH) for row in batch.to_pylist())
                yield from ((Place(path, number), row) for number, row in enumerate(rows, start=1))
        else:
            yield from _json_lines(path, tally)
    except (OSError, pa.ArrowException) as error:
        whole = "a Parquet file is read from its end, so one that was cut off is lost; " if suffix == ".parquet" else ""
        raise InputError(f"{path} cannot be read ({_first_line(error)}); {whole}write it again.") from error


def _json_lines(path: Path, tally: Tally) -> Iterator[tuple[Place, Row]]:
    if compression := COMPRESSED.get(path.suffix):
        opened = io.BufferedReader(cast(io.RawIOBase, pa.input_stream(str(path), compression=compression)))
    else:
        opened = path.open("rb")
    with opened as file:
        for number in count(1):
            try:
                line = file.readline()
            except OSError:  # a compressed file may end in the middle
                if not compression:
                    raise
                tally[CUT] += 1
                return
            if not line:
                return
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


def _pickled(path: Path) -> list[Row]:
    """Return the samples of a PyTorch file: its list of them, or its columns cut into rows; no code in it is run.

    Raw rewards are those of the whole batch, of which a process may have a part: then places in it are stored, too.
    """
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
    samples, columns = pack.get("samples"), pack.get("rollout_data")
    if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples):
        rows, rewards = samples, pack.get("raw_reward")
        places = [sample.get("rollout_position") for sample in samples]
    elif isinstance(columns, dict) and "tokens" in columns:
        length, rewards = len(columns["tokens"]), columns.get("raw_reward")
        listed = {k: v for k, v in columns.items() if isinstance(v, list | tuple | torch.Tensor) and len(v) == length}
        rows = [{name: values[i] for name, values in listed.items()} for i in range(length)]
        places = list(columns.get("partition") or range(length))
    else:
        raise InputError(f"{path} holds neither samples nor rollout_data with tokens; pass what slime or miles wrote.")
    if rewards is not None and not any(place is None for place in places):
        rows = [{**row, "raw_reward": rewards[place]} for row, place in zip(rows, places, strict=True)]
    # A sample's own rollout_id is another thing than the file's.
    return [{**row, "file_step": pack.get("rollout_id")} for row in rows]


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else type(error).__name__


@dataclass(frozen=True)
class Message:
    """One message of a recorded chat."""

    role: str
    content: str
    sampled: bool  # True where the policy wrote it


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout as somebody recorded it; made by a format, read by `encoding` and `importing`."""

    place: Place
    reward: float
    prompt: str | None = None
    completion: str | None = None
    answer: str | None = None  # Reference answer of the prompt
    messages: tuple[Message, ...] = ()  # A chat, which stands for prompt and completion
    stripped: bool = False  # True where the texts were decoded without their special tokens
    group: Hashable = None  # Names its group within the step; None where the prompt does
    step: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    ids: tuple[int, ...] | None = None  # Completion tokens, those of tools included
    mask: Bool | None = None  # True where the policy sampled the token [T]; None means everywhere
    finish_reason: FinishReason = "unknown"
    columns: Mapping[str, Float] = field(default_factory=dict)  # Of COLUMNS, one number per completion token [T]
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None  # ‖ḡ‖ of its step's update, before clipping

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages of a chat before the first that the policy wrote."""
        return self.messages[: [message.sampled for message in self.messages].index(True)] if self.messages else ()

    @property
    def prompt_key(self) -> Hashable:
        """What tells this prompt from others: its tokens, or its text where they were not recorded."""
        if self.messages:
            return tuple((message.role, message.content) for message in self.prompt_messages)
        return self.prompt if self.prompt_ids is None else self.prompt_ids

    @property
    def shown_prompt(self) -> str:
        """The prompt as pages show it; empty where only its ids were recorded."""
        return "\n".join(f"{message.role}: {message.content}" for message in self.prompt_messages) or self.prompt or ""

    @property
    def policy_tokens(self) -> Bool | None:
        """True where the policy sampled a completion token [T]; None where no ids were recorded."""
        if self.ids is None:
            return None
        return np.ones(len(self.ids), bool) if self.mask is None else self.mask


def checked(record: RecordedRollout, tally: Tally) -> RecordedRollout:
    """Return a record that is whole; placeholders outside its mask are counted, and not looked at.

    Raises:
        InputError: A list has the wrong length, or holds numbers that cannot be; the sentence names the record.
    """
    place, sampled = record.place, record.policy_tokens
    if sampled is None and record.mask is not None:
        raise InputError(f"{place} has a mask but no ids, so nothing says which tokens it is of; add ids.")
    lists = {} if sampled is None else {"mask": sampled, **record.columns}
    tokens = len(record.ids or ())
    for name, values in lists.items():
        if len(values) != tokens:
            shift = " (a list that is off by one belongs to other tokens)" if abs(len(values) - tokens) == 1 else ""
            raise InputError(
                f"{place}: {name} has {len(values)} entries but there are {tokens} completion tokens{shift}; "
                "write one per token."
            )
    for name, values in record.columns.items():
        inside = np.arange(len(values)) if sampled is None else np.flatnonzero(sampled)
        if len(odd := inside[~np.isfinite(values[inside])]):
            t = odd[0]
            raise InputError(f"{place}: {name} of completion token {t} is {values[t]}; write a finite number.")
        if name in LOGPROBS and len(above := inside[values[inside] > ABOVE_ZERO]):
            t = above[0]
            raise InputError(
                f"{place}: {name} of completion token {t} is {values[t]:.4g}, and no log-probability is above 0; "
                "write natural logarithms of probabilities."
            )
        if name in LOGPROBS and len(inside) > 1 and not values[inside].any():
            raise InputError(
                f"{place}: {name} is 0 at all {len(inside)} policy tokens, which is a placeholder; leave the list out."
            )
    if record.columns and sampled is not None and not sampled.all():
        tally[UNREAD] += int((~sampled).sum())
    return record


@dataclass(frozen=True)
class Fields:
    """A row's fields by name; what is missing or of another type is refused with the record's number."""

    place: Place
    row: Row

    def __contains__(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return self.row.get(name) is not None

    def text(self, name: str) -> str:
        """Return a text."""
        return self._value(name, (str,), "a text")

    def number(self, name: str) -> float:
        """Return a finite number, or a tensor or list that holds one."""
        value = self._value(name)
        if not isinstance(value, str | bytes | int | float) and np.size(value) == 1:
            value = np.asarray(value).reshape(-1)[0].item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unfit(name, value, "a number")
        if abs(value) > sys.float_info.max:
            value = np.inf
        if not np.isfinite(value):
            raise InputError(f"{self.place}: {name} is {value}; write a finite number, or leave the rollout out.")
        return float(value)

    def whole_number(self, name: str) -> int:
        """Return a whole number from 0 that a table can hold, also where it was written as a text."""
        value = self._value(name)
        try:
            whole = int(str(value))
        except ValueError:
            raise self._unfit(name, value, "a whole number") from None
        if not 0 <= whole < 2**63:
            raise self._unfit(name, value, "a whole number from 0 to 2⁶³ − 1")
        return whole

    def ids(self, name: str) -> tuple[int, ...]:
        """Return token ids."""
        values = np.asarray(self._value(name, (list, tuple), "a list"))
        if values.size and (values.dtype.kind not in "iu" or values.min() < 0):
            raise self._unfit(name, values.tolist(), "a list of token ids")
        return tuple(values.tolist())

    def key(self, name: str) -> Hashable:
        """Return a name or a number that tells things apart, None where there is none."""
        value = self.row.get(name)
        if not (value is None or isinstance(value, str | int | float)):
            raise self._unfit(name, value, "a text or a number")
        return value

    def numbers(self, name: str) -> Float:
        """Return a list of numbers; None in it becomes NaN."""
        try:
            return np.array(self._value(name, (list, tuple), "a list"), np.float64)
        except (TypeError, ValueError):
            raise self._unfit(name, self.row[name], "a list of numbers") from None

    def columns(self, names: Mapping[str, str]) -> dict[str, Float]:
        """Return lists of numbers by our names, of those that the row has: ours → its own."""
        return {ours: self.numbers(theirs) for ours, theirs in names.items() if theirs in self}

    def flags(self, name: str) -> Bool:
        """Return a mask: a list of 0 and 1, or of false and true."""
        values = self.numbers(name)
        if not np.isin(values, (0, 1)).all():
            raise self._unfit(name, self.row[name], "a list of 0 and 1")
        return values.astype(bool)

    def _value(self, name: str, kinds: tuple[type, ...] = (object,), expected: str = "") -> Any:
        """Return a value of some kinds; arrays and tensors are lists or numbers."""
        if name not in self:
            what = "is null" if name in self.row else "is missing"
            raise InputError(f"{self.place}: {name} {what}; write it into every record (it has {', '.join(self.row)}).")
        value = self.row[name]
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, kinds):
            raise self._unfit(name, value, expected)
        return value

    def _unfit(self, name: str, value: object, expected: str) -> InputError:
        return InputError(f"{self.place}: {name} is {' '.join(repr(value).split())[:60]}; it must be {expected}.")
