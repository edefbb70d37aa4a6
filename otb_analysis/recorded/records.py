"""Rows of files, one after the other, and one recorded rollout, whoever wrote it: what must hold of it.

Files are JSON lines, JSON arrays, tables of trackers, Parquet, Arrow, and PyTorch files without code in them.
"""

import hashlib
import importlib
import importlib.util
import io
import json
import pickle
import re
import sqlite3
import sys
import zipfile
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.types import Bool, FinishReason, Float

Row = Mapping[str, Any]
_JSON = (".jsonl", ".ndjson", ".json")
SUFFIXES = (
    *_JSON,
    *(f"{one}.{packed}" for one in _JSON for packed in ("zst", "gz")),
    ".parquet",
    ".arrow",
    ".pt",
    ".eval",
    ".db",
)
COMPRESSED = {".zst": "zstd", ".gz": "gzip"}
BATCH = 64
"""Rows of a Parquet file that are in memory at once."""
READ = 1 << 20
"""Bytes of a text file that are read at once: records of long rollouts are long lines."""
NAMED = 3
"""Places that are told with each sentence."""
CUT = "record at the end of a file was cut off and left out; all before it were kept"
UNREAD = "placeholder outside the mask was not read"
# What rebuilds NumPy's numbers and arrays, also as another version of NumPy calls it; it runs no code.
_REBUILD: Any = [np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
_DTYPES = {type(np.dtype(name)) for name in ("bool", *np.typecodes["AllInteger"], *np.typecodes["Float"])}
NUMPY_PARTS = [
    *_REBUILD,
    np.ndarray,
    np.dtype,
    *_DTYPES,
    *((o, f"numpy.core.multiarray.{o.__name__}") for o in _REBUILD),
]
"""All that is unpickled beside PyTorch's own."""
LOGPROBS = ("behavior_logprob", "logprob")
REASONING = "reasoning_content"
"""Field of a message with what the policy wrote before its content."""
COLUMNS = (*LOGPROBS, "entropy", "advantage")
"""Per-token columns: the sampler's and the trainer's log-probabilities in nats, entropy in nats, advantages."""
ABOVE_ZERO = 1e-3
"""A log-probability may exceed 0 by this much: rounding."""


class Tally(Counter[str]):
    """What was seen on the way and is no error, by sentence; counted, and told at the end with the first places."""

    strict = False
    """True where a fault ends the reading."""

    def __init__(self, seen: Mapping[str, int] | None = None) -> None:
        super().__init__(seen or {})
        self.places: dict[str, list[str]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what is beside the counts, too."""
        return type(self), (dict(self),), self.__dict__

    def note(self, sentence: str, where: object) -> None:
        """Count what one record shows."""
        self[sentence] += 1
        first = self.places.setdefault(sentence, [])
        if len(first) < NAMED:
            first.append(where.short if isinstance(where, Place) else str(where))

    def fault(self, sentence: str, where: object) -> None:
        """Count what is wrong with one record, the rest of which can be used.

        Raises:
            InputError: Reading is strict.
        """
        if self.strict:
            raise InputError(f"{where}: {sentence}; mend it, or read without --strict.")
        self.note(sentence, where)

    def lines(self) -> list[str]:
        """Return what was seen in sentences."""
        lines = []
        for sentence, times in (+self).items():
            places = "; ".join([*self.places.get(sentence, ()), *(["…"] if times > NAMED else [])])
            lines.append(f"{times:,} × {sentence}{f' ({places})' if sentence in self.places else ''}.")
        return lines


@dataclass(frozen=True)
class Place:
    """Where a record stands."""

    file: Path
    number: int  # From 1: the line of a text file, the row of another

    def __str__(self) -> str:
        """Return it as errors say it."""
        return f"{self.file}, record {self.number}"

    @property
    def short(self) -> str:
        """The place without the folder."""
        return f"{self.file.name}, record {self.number}"


def suffix_of(path: Path) -> str:
    """Return the ending that says how a file is read, empty where it cannot be read."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), "")


def number_in(path: Path) -> int | None:
    """Return the last whole number of a file's name, which is its step; None where it has none."""
    numbers = re.findall(r"\d+", path.name[: len(path.name) - len(suffix_of(path))])
    return int(numbers[-1]) if numbers else None


def step_in(path: Path) -> int | None:
    """Return the step that a file's or its folder's name says, as `step_7` or `7.jsonl`; None where neither does."""
    stem = path.name[: len(path.name) - len(suffix_of(path))]
    match = re.search(r"^(\d+)$|step[-_ ]?(\d+)", stem, re.I) or re.search(r"step[-_ ]?(\d+)", path.parent.name, re.I)
    return int(match[match.lastindex or 0]) if match else None


def rows_of(path: Path, tally: Tally) -> Iterator[tuple[Place, Row]]:
    """Yield the rows of a file with their places; a text file that ends within a record yields all before it.

    Raises:
        InputError: The file cannot be read, or a row is no object.
    """
    suffix = suffix_of(path)
    if not path.is_file() or not suffix:
        raise InputError(
            f"{path} is no file that can be read; convert it to JSON lines or Parquet, or pass one that ends in "
            f"{', '.join(SUFFIXES)}."
        )
    try:
        with ExitStack() as opened:
            if suffix == ".pt":
                rows: Iterable[Row] = _pickled(path)
            elif suffix == ".eval":
                rows = [_inspected(path)]
            elif suffix == ".db":
                rows = map(_object, _logged(path, tally), map(partial(Place, path), count(1)))
            elif suffix in (".parquet", ".arrow"):
                if suffix == ".parquet":
                    batches = opened.enter_context(pq.ParquetFile(path)).iter_batches(batch_size=BATCH)
                else:
                    mapped = opened.enter_context(pa.memory_map(str(path)))
                    try:
                        batches = iter(pa.ipc.open_stream(mapped))  # as Hugging Face's datasets write it
                    except pa.ArrowInvalid:
                        file = pa.ipc.open_file(mapped)
                        batches = map(file.get_batch, range(file.num_record_batches))
                rows = (row for batch in batches for row in batch.to_pylist())
            else:
                yield from _json_rows(path, tally)
                return
            yield from ((Place(path, number), row) for number, row in enumerate(rows, start=1))
    except (OSError, pa.ArrowException, sqlite3.Error) as error:
        whole = "a Parquet file is read from its end, so one that was cut off is lost; " if suffix == ".parquet" else ""
        raise InputError(f"{path} cannot be read ({first_line(error)}); {whole}write it again.") from error
    except InputError:
        raise
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        raise InputError(
            f"{path} holds no rows that can be read ({first_line(error)}); export it again, or write JSON lines."
        ) from error


def _inspected(path: Path) -> Row:
    """Return an Inspect log, which its own library alone reads."""
    if importlib.util.find_spec("inspect_ai") is None:
        raise InputError(
            f"{path} is a log of Inspect, which inspect_ai reads and is not installed here; convert it where it is by "
            f"inspect log convert --to json --output-dir DIR {path.name}, and pass DIR."
        )
    log = importlib.import_module("inspect_ai.log")
    return log.read_eval_log(str(path), resolve_attachments=True).model_dump(mode="json")


def _logged(path: Path, tally: Tally) -> list[Row]:
    """Return the rows of the tables that a run sent to trackio, the newest run where a project has several."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        query = "SELECT run_name, metrics FROM metrics WHERE metrics LIKE '%trackio.table%' ORDER BY id"
        logged = [(run, json.loads(metrics)) for run, metrics in database.execute(query)]
    for run in dict.fromkeys(run for run, _ in logged if run != logged[-1][0]):
        tally[f"run of trackio was left out: {run}; the newest, {logged[-1][0]}, is read"] += 1
    tables = [value for run, metrics in logged if run == logged[-1][0] for value in metrics.values()]
    return [row for table in tables if isinstance(table, dict) for row in table.get("_value", ())]


def _json_rows(path: Path, tally: Tally) -> Iterator[tuple[Place, Row]]:
    """Yield the rows of JSON lines, of one array of objects, or of one table as W&B and trackio write it."""
    if compression := COMPRESSED.get(path.suffix.lower()):
        opened = io.BufferedReader(cast(io.RawIOBase, pa.input_stream(str(path), compression=compression)))
    else:
        opened = io.BufferedReader(path.open("rb", buffering=0), READ)
    with opened as file:
        if file.peek(3).startswith(BOM_UTF8):
            file.read(3)
        first = file.peek(1)[:1]
        while first.isspace():
            file.read(1)
            first = file.peek(1)[:1]
        if first == b"[":
            rows = _objects(file.read(), Place(path, 1), array=True)
            yield from ((Place(path, number), row) for number, row in enumerate(rows, start=1))
            return
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
            if number == 1 and line.strip() == b"{":  # one object over many lines
                line += file.read()
            try:
                row = next(_objects(line, place))
            except InputError:
                if line.endswith(b"\n"):
                    raise
                tally[CUT] += 1
                return
            if row.get("_type") == "trackio.table":
                for n, one in enumerate(row["_value"], start=1):
                    yield Place(path, n), _object(one, Place(path, n))
                return
            if isinstance(names := row.get("columns"), list) and isinstance(row.get("data"), list) and number == 1:
                for n, values in enumerate(row["data"], start=1):
                    yield Place(path, n), dict(zip(names, values, strict=True))
                return
            yield place, row


def _objects(text: bytes, place: Place, array: bool = False) -> Iterator[Row]:
    """Yield the objects of a JSON text, one or an array of them, as the standard library reads them.

    orjson refuses NaN and half a surrogate pair, and rounds integers beyond 64 bits: at least 19 digits behind another
    sign than a point.
    """
    signs = np.frombuffer(text, np.uint8)
    digits = run = signs - ord("0") < 10
    for further in (1, 2, 4, 8, 3):
        run = run[:-further] & run[further:]
    before = np.flatnonzero(run) - 1
    try:
        if (~digits[before] & (signs[before] != ord("."))).any():
            parsed = json.loads(text)
        else:
            try:
                parsed = orjson.loads(text)
            except orjson.JSONDecodeError:
                parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        expected = "an array of objects" if array else "one object per line"
        raise InputError(f"{place} is no JSON ({first_line(error)}); write {expected}.") from error
    for number, row in enumerate(parsed if array else [parsed], start=place.number):
        yield _object(row, Place(place.file, number))


def _object(row: object, place: Place) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{place} is a {type(row).__name__}; write one JSON object per record.")
    return row


def _pickled(path: Path) -> list[Row]:
    """Return the samples of a PyTorch file: its list of them, or its columns cut into rows; no code in it is run.

    Raw rewards are those of the whole batch, of which a process may have a part: then places in it are stored, too.
    """
    require("torch", f"reading {path.name}")
    import torch

    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                if changed := packed.testzip():
                    raise InputError(
                        f"{path}: {changed} has another checksum than its own; copy or save the file again."
                    )
        with torch.serialization.safe_globals(NUMPY_PARTS):
            pack = torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
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
        kinds = list | tuple | torch.Tensor | np.ndarray
        listed = {k: v for k, v in columns.items() if isinstance(v, kinds) and len(v) == length and k != "raw_reward"}
        rows = [{name: values[i] for name, values in listed.items()} for i in range(length)]
        places = list(columns.get("partition") or [None] * length)
    else:
        raise InputError(f"{path} holds neither samples nor rollout_data with tokens; pass what slime or miles wrote.")
    if rewards is not None and not any(place is None for place in places):
        rows = [{**row, "raw_reward": rewards[place]} for row, place in zip(rows, places, strict=True)]
    # A sample's own rollout_id is another thing than the file's.
    whole = {name: pack.get(name) for name in ("cp_rank", "cp_size", "qkv_format") if name in pack}
    return [{**row, **whole, "file_step": pack.get("rollout_id"), "batch_raw_reward": rewards} for row in rows]


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type where it says nothing."""
    text = str(error).splitlines()
    return text[0].rstrip(".") if text else type(error).__name__


@dataclass(frozen=True)
class Message:
    """One message of a recorded chat."""

    role: str
    content: str
    sampled: bool  # True where the policy wrote it
    lacks: str = ""  # What of it is not in the text, so that its tokens are not known: images
    calls: tuple[Row, ...] = field(default=(), hash=False)  # Its tool calls as chat templates take them


def messages_of(values: object, name: str, place: Place, sampled: bool = False) -> list[Message]:
    """Return the messages of a field, a text or a list of them; those of the assistant count as sampled, if any do.

    A null content is an empty text; reasoning that the policy wrote beside its content stands before it. Reasoning,
    parts of a content that are no texts, and tool calls of a form that no template takes are named in `lacks`.

    Raises:
        InputError: It is neither, or a message is no object, or its content neither text nor list.
    """
    if isinstance(values, str):
        return [Message("assistant" if sampled else "user", values, sampled)]
    messages = list[Message]()
    for row in values if isinstance(values, list) else [values]:
        content = row.get("content") if isinstance(row, dict) and ("role" in row or "content" in row) else 0
        parts = [content or ""] if content is None or isinstance(content, str) else content
        if not isinstance(row, dict) or not isinstance(parts, list):
            raise InputError(f"{place}: {name} must be a text, or a list of messages with role and content.")
        texts, calls = list[str](), calls_of(row.get("tool_calls"))
        lacks = "tool calls" if row.get("tool_calls") and not calls else ""
        if sampled and isinstance(thought := row.get(REASONING), str) and thought:  # templates have forms of their own
            texts, lacks = [f"{thought}\n"], "reasoning"
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                kind = str(part.get("type", "part")) if isinstance(part, dict) else "part"
                # Prompts that differ in an image alone are two prompts.
                text, lacks = f"<{kind} {hashlib.blake2b(repr(part).encode(), digest_size=4).hexdigest()}>", kind
            texts.append(text)
        role = str(row.get("role", "user"))
        messages.append(Message(role, "".join(texts), sampled and role == "assistant", lacks, calls))
    return messages


def calls_of(value: Any) -> tuple[Row, ...]:
    """Return tool calls with their arguments as objects, which chat templates expect; none where one has another form.

    All of them may be one text of JSON, and so may the arguments of each.
    """
    calls = list[Row]()
    try:
        for call in json.loads(value) if isinstance(value, str) else value or []:
            function = call.get("function", call)
            name, given = function["name"], function["arguments"]
            given = json.loads(given) if isinstance(given, str) else given
            calls.append({"type": "function", "function": {"name": name, "arguments": given}})
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError):
        return ()
    return tuple(calls)


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout as somebody recorded it; made by a format, read by `encoding` and `importing`."""

    place: Place
    reward: float
    prompt: str | None = None
    completion: str | None = None
    answer: str | None = None  # Reference answer of the prompt
    messages: tuple[Message, ...] = ()  # A chat, which stands for prompt and completion
    special: Literal["unknown", "removed", "kept"] = "unknown"  # Whether the texts have their special tokens
    n_tokens: int | None = None  # Completion tokens as the trainer counted them, where only texts were recorded
    tools: tuple[Row, ...] = ()  # What a chat template is told of tools
    group: Hashable = None  # Names its group within the step; None where the prompt does
    step: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    opening: tuple[int, ...] | None = None  # Prompt of its group, where its own tokens begin with another one
    ids: tuple[int, ...] | None = None  # Completion tokens, those of tools included
    mask: Bool | None = None  # True where the policy sampled the token [T]; None means everywhere
    finish_reason: FinishReason = "unknown"
    columns: Mapping[str, Float] = field(default_factory=dict)  # Of COLUMNS, one number per completion token [T]
    advantage: float | None = None  # The trainer's for the whole rollout, where it has one for all tokens
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
            return tuple((one.role, one.content, *map(repr, one.calls)) for one in self.prompt_messages)
        return self.opening or (self.prompt if self.prompt_ids is None else self.prompt_ids)

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


def checked(record: RecordedRollout, tally: Tally, names: Mapping[str, str]) -> RecordedRollout:
    """Return a record that is whole; placeholders outside its mask are counted, and not looked at.

    Numbers that are not finite count as not recorded (NaN). `names` are the file's own names of `COLUMNS`.

    Raises:
        InputError: A list has the wrong length, or holds numbers that cannot be; the sentence names the record.
    """
    place, mask = record.place, record.mask
    if record.ids is None and mask is not None:
        raise InputError(f"{place} has a mask but no ids, so nothing says which tokens it is of; add ids.")
    lists = {} if record.ids is None else {**({} if mask is None else {"mask": mask}), **record.columns}
    tokens = len(record.ids or ())
    for name, values in lists.items():
        if len(values) != tokens:
            shift = " (a list that is off by one belongs to other tokens)" if abs(len(values) - tokens) == 1 else ""
            raise InputError(
                f"{place}: {names.get(name, name)} has {len(values)} entries but there are {tokens} completion "
                f"tokens{shift}; write one per token."
            )

    def token(first: np.intp) -> int:
        """Return the completion token at an index among those of the policy."""
        return int(first if mask is None else np.flatnonzero(mask)[first])

    for name, values in record.columns.items():
        theirs, inside = names.get(name, name), values if mask is None else values[mask]
        if not (finite := np.isfinite(inside)).all():
            where = f"{place.short}, token {token(finite.argmin())}"
            tally.fault(f"{theirs} not a finite number, and so not recorded", where)
            record = replace(record, columns={**record.columns, name: np.where(np.isfinite(values), values, np.nan)})
            inside = np.where(finite, inside, np.nan)
        if name in LOGPROBS and (above := inside > ABOVE_ZERO).any():
            t = token(above.argmax())
            raise InputError(
                f"{place}: {theirs} of completion token {t} is {values[t]:.4g}, and no log-probability is above 0; "
                "write natural logarithms of probabilities."
            )
        if name in LOGPROBS and (n := len(inside)) > 1 and not inside.any():
            raise InputError(
                f"{place}: {theirs} is 0 at all {n} policy tokens, which is a placeholder; leave the list out."
            )
    if record.advantage is not None and not np.isfinite(record.advantage):
        tally.fault(f"{names.get('advantage', 'advantage')} not a finite number, and so not recorded", place)
        record = replace(record, advantage=np.nan)
    if record.columns and mask is not None and not mask.all():
        tally[UNREAD] += int((~mask).sum())
    return record


@dataclass(frozen=True)
class Fields:
    """A row's fields by name; what is missing or of another type is refused with the record's number."""

    place: Place
    row: Row
    names: Mapping[str, str] = field(default_factory=dict)  # Ours → the file's own, where it has others

    def named(self, name: str) -> str:
        """Return what the file calls a field."""
        return self.names.get(name, name)

    def __contains__(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return self.row.get(name) is not None

    def text(self, name: str) -> str:
        """Return a text."""
        return self._value(name, (str,), "a text")

    def number(self, name: str) -> float:
        """Return a finite number, or a tensor or list that holds one."""
        value = self._value(name)
        while isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        value = float(value) if isinstance(value, Decimal) else value  # as databases write Parquet
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unfit(name, value, "a number")
        if abs(value) > sys.float_info.max:
            value = np.inf
        if not np.isfinite(value):
            raise InputError(
                f"{self.place}: {self.named(name)} is {value}; write a finite number, or leave the rollout out."
            )
        return float(value)

    def parts(self, name: str) -> dict[str, float]:
        """Return a number, those of an object by their names, or those of a list by their places: they are a sum."""
        value = self._value(name)
        if isinstance(value, bool):
            return {name: float(value)}
        if isinstance(value, list):
            value = {str(n): x for n, x in enumerate(value)}
        if not isinstance(value, dict):
            return {name: self.number(name)}
        if not value:
            raise self._unfit(name, value, "a number, an object of numbers or a list of them")
        inner = Fields(self.place, {f"{self.named(name)}[{part}]": x for part, x in value.items()})
        whole = [float(x) if isinstance(x, bool) else inner.number(full) for full, x in inner.row.items()]
        return dict(zip(map(str, value), whole, strict=True))

    def real(self, name: str) -> float:
        """Return a number, which may be infinite or NaN; NaN also where it is null or missing."""
        value: Any = self.row.get(name)
        return self.number(name) if value is not None and np.all(np.isfinite(value)) else float("nan")

    def whole_number(self, name: str) -> int:
        """Return a whole number from 0 that a table can hold, also where it was written as a text."""
        value = self._value(name)
        try:
            whole = int(value) if isinstance(value, float) and value.is_integer() else int(str(value))
        except ValueError:
            raise self._unfit(name, value, "a whole number") from None
        if not 0 <= whole < 2**63:
            raise self._unfit(name, value, "a whole number from 0 to 2⁶³ − 1")
        return whole

    def ids(self, name: str) -> tuple[int, ...]:
        """Return token ids."""
        values = np.asarray(self._value(name, (list, tuple), "a list"))
        if values.ndim != 1 or (values.size and (values.dtype.kind not in "iu" or values.min() < 0)):
            raise self._unfit(name, values.tolist(), "a list of token ids")
        return tuple(values.tolist())

    def key(self, name: str) -> Hashable:
        """Return a name or a number that tells things apart, None where there is none."""
        value = self.row.get(name)
        if not (value is None or isinstance(value, str | int | float)) or value != value:  # NaN is no name
            raise self._unfit(name, value, "a text or a number")
        return value

    def numbers(self, name: str) -> Float:
        """Return a list of numbers; None in it becomes NaN."""
        try:
            values = np.array(self._value(name, (list, tuple), "a list"), np.float64)
        except (TypeError, ValueError):
            raise self._unfit(name, self.row[name], "a list of numbers") from None
        if values.ndim != 1:
            raise self._unfit(name, self.row[name], "a list of numbers, not of lists")
        return values

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
            has = ", ".join(map(self.named, self.row))
            raise InputError(f"{self.place}: {self.named(name)} {what}; write it into every record (it has {has}).")
        value = self.row[name]
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, kinds):
            raise self._unfit(name, value, expected)
        return value

    def _unfit(self, name: str, value: object, expected: str) -> InputError:
        shown = " ".join(repr(value).split())[:60]
        return InputError(f"{self.place}: {self.named(name)} is {shown}; it must be {expected}.")
