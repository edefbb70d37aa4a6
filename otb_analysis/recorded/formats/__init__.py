"""Who wrote the records: a table of formats, and how one is recognised."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from otb_analysis.custom import import_attribute, is_custom, plugins
from otb_analysis.errors import InputError, nearest
from otb_analysis.phases import note
from otb_analysis.recorded.formats.annotations import with_annotations
from otb_analysis.recorded.formats.chats import art
from otb_analysis.recorded.formats.sequences import miles_columns, nemo_rl, prime_rl, slime
from otb_analysis.recorded.formats.texts import plain, trl, verl
from otb_analysis.recorded.formats.traces import traces_of, verifiers
from otb_analysis.recorded.records import Fields, RecordedRollout, checked
from otb_analysis.recorded.rows import SUFFIXES, Place, Row, Tally, rows_of, suffix_of

NOT_AS_WRITTEN = (TypeError, KeyError, IndexError, AttributeError, ValueError, OverflowError)
"""What reading a row raises that has another form than its format."""
Reader = Callable[[Fields, Tally, Mapping[str, float]], RecordedRollout | None]
"""Makes a record of a row, or None of a row that is no rollout; gets the reward columns' weights too."""


@dataclass(frozen=True)
class Format:
    """One way of writing rollouts down."""

    about: str  # What it is, for a list
    fields: frozenset[str]  # Every row has these
    read: Reader
    runs_of_prompts: bool = False  # True where rows stand in groups, so that a group ends where the prompt changes
    # What its files are called in a directory; the first pattern that finds any counts.
    names: tuple[str, ...] = ("*",)
    not_named: str = ""  # Files with this in their names are others'
    unfold: Callable[[Row], Iterator[Row]] = lambda row: iter((row,))  # The rows in a row that holds several
    folder: str = ""  # What the folder of its files is called; empty where it may have any name
    # What other files know of all rows, added; gets the rows, their files and the tally
    fold: Callable[[Iterable[tuple[Place, Row]], Sequence[Path], Tally], Iterable[tuple[Place, Row]]] = (
        lambda rows, files, tally: rows
    )


def _fields(*names: str) -> frozenset[str]:
    return frozenset(names)


FORMATS: dict[str, Format] = {
    "trl": Format(
        "TRL's completions_*.parquet (log_completions)",
        _fields("step", "prompt", "completion", "advantage"), trl, True, ("completions_*.parquet",),
    ),
    "verl": Format(
        "verl's {step}.jsonl (trainer.rollout_data_dir)",
        _fields("input", "output", "score", "step"), verl, names=("[0-9]*.jsonl",),
    ),
    "art": Format(
        "ART's trajectories/{split}/{step}.parquet", _fields("group_index", "messages", "reward"), art,
        names=("*.parquet",),
    ),
    "prime_rl": Format(
        "prime-rl's token_exports/step_N/rank_R.jsonl (before September 2026)",
        _fields("token_ids", "loss_mask", "inference_logprobs", "export_sequence_idx"), prime_rl,
        names=("rank_*.jsonl",),
    ),
    "prime_rl_traces": Format(
        "prime-rl's monitors/file/traces/stream/*.jsonl[.zst] with its annotations (since September 2026)",
        _fields("nodes", "rewards"), verifiers, unfold=traces_of,
        names=("stream/[0-9]*.jsonl*",), folder="stream", fold=with_annotations,
    ),
    "verifiers": Format(
        "traces.jsonl of verifiers and of prime-rl's rollouts/step_N",
        _fields("nodes", "rewards"), verifiers, unfold=traces_of,
        names=("train/effective/traces.jsonl", "traces.jsonl*"),
    ),
    "nemo_rl": Format(
        "NeMo-RL's train_data_stepN.jsonl", _fields("token_ids", "token_loss_mask", "rewards"), nemo_rl,
        names=("train_data_step*.jsonl",),
    ),
    "slime": Format(
        "slime's and miles's rollout_data/{id}.pt and train_data/{id}.pt", _fields("tokens"), slime, names=("*.pt",),
        not_named="eval_",
    ),
    "miles_columns": Format(
        "miles's dashboard_columns/rollout_{id}.parquet",
        _fields("sample_index", "response_length", "tokens", "rollout_log_probs"), miles_columns,
        names=("rollout_*.parquet",),
    ),
    "plain": Format(
        "JSON lines or Parquet with prompt, completion, reward[, answer, group, step, ids, prompt_ids, mask, logprobs]",
        _fields("prompt", "completion", "reward"), plain,
    ),
}  # fmt: skip
"""Formats by name, in the order in which they are tried."""


@dataclass(frozen=True)
class Source:
    """Files of one format, found at a path."""

    path: Path
    name: str  # Of the format
    files: tuple[Path, ...]
    tally: Tally  # What was seen while reading

    @property
    def format(self) -> Format:
        """The format itself."""
        return format_of(self.name)

    def records(self, weights: Mapping[str, float] | None = None) -> Iterator[RecordedRollout]:
        """Yield every rollout, file after file; none is kept.

        Raises:
            InputError: A file cannot be read, a record is not whole, or records differ in what they have.
        """
        first: RecordedRollout | None = None
        for record in self._read(weights or {}):
            first = first or record
            _refuse_mixed(first, record)
            yield checked(record, self.tally)
        if first is None:
            raise InputError(f"{self.path} holds no rollouts; pass a file with at least one record.")

    def _read(self, weights: Mapping[str, float]) -> Iterator[RecordedRollout]:
        place: object = f"the first record of {self.path}"
        try:
            for place, row in self.format.fold(self._rows(), self.files, self.tally):
                record = self.format.read(Fields(place, row), self.tally, weights)
                if record is not None:
                    yield record
        except InputError:
            raise
        except NOT_AS_WRITTEN as error:  # a field that no version of the trainer writes so
            raise InputError(
                f"{place}, or the one behind it, is not as {self.name} writes it ({type(error).__name__}: {error}); "
                f"mend it, or name another --format: {', '.join(FORMATS)}."
            ) from error

    def _rows(self) -> Iterator[tuple[Place, Row]]:
        for file in self.files:
            for place, row in rows_of(file, self.tally):
                for one in self.format.unfold(row):
                    yield place, one


def format_of(name: str) -> Format:
    """Return a format of the catalogue, one that a package registers, or one of your own by module:attribute.

    Raises:
        InputError: There is none of that name, or what it names is no Format.
    """
    own = name not in FORMATS and is_custom("format", name)
    kind = import_attribute("format", name) if own else FORMATS.get(name)
    if kind is None:
        raise InputError(f"--format is {name!r}; {nearest(name, [*FORMATS, *plugins('format')])}")
    if not isinstance(kind, Format):
        raise InputError(f"--format is {name!r}, which is a {type(kind).__name__}; name a Format.")
    return kind


def find_source(path: Path, name: str = "auto") -> Source:
    """Return the files at a path, a file or a directory, with their format.

    Raises:
        InputError: There is no such path or format, or nothing in it can be read as that format.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; pass a file of rollouts, or a directory of such files.")
    # A package's formats come before `plain`, which many files fit.
    tried = [name] if name != "auto" else [*list(FORMATS)[:-1], *plugins("format"), "plain"]
    for one in tried:
        try:
            kind = format_of(one)
        except InputError as error:
            if name != "auto":
                raise
            note(str(error))
            continue
        files = _files(path, kind)
        if files and (name != "auto" or kind.fields <= _names(files[0], kind)):
            return Source(path, one, files, Tally())
    raise InputError(f"{path} {_why_not(path, name)}")


def _files(path: Path, kind: Format) -> tuple[Path, ...]:
    """Return the files that a format may have at a path, in the order of the numbers in their names."""
    if path.is_file():
        return (path,) if kind.folder in ("", path.resolve().parent.name) else ()
    every = ({f for f in path.rglob(pattern) if _may_be(f, kind)} for pattern in kind.names)
    found = next(filter(None, every), set())
    found = {file for file in found if file.suffix != ".zst" or file.with_suffix("") not in found}  # being compressed
    return tuple(sorted(found, key=lambda file: _natural(file.relative_to(path))))


def _may_be(file: Path, kind: Format) -> bool:
    return file.is_file() and bool(suffix_of(file)) and not (kind.not_named and kind.not_named in file.name)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts step_10 behind step_9."""
    parts: list[tuple[int, str]] = []
    digits = ""
    for sign in f"{path.as_posix()}\0":
        if sign.isdecimal():
            digits += sign
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, sign))
    return parts


def _names(file: Path, kind: Format) -> frozenset[str]:
    """Return the names of the first row's fields, none where a file has no rows."""
    first = next(iter(rows_of(file, Tally())), (Place(file, 0), {}))[1]
    return frozenset(next(kind.unfold(first), {}))


def _why_not(path: Path, name: str) -> str:
    files = _files(path, FORMATS["plain"])
    if not files:
        return f"has no file that ends in {', '.join(SUFFIXES)}; pass what another trainer wrote."
    if name != "auto":
        return f"has no file of the format {name}, which are called {' or '.join(format_of(name).names)}."
    names = ", ".join(sorted(_names(files[0], FORMATS["plain"]))) or "nothing"
    return (
        f"is in no known format: {files[0].name} has {names}; write prompt, completion, reward (and group) into each "
        f"record, or name the format by --format: {', '.join(FORMATS)}."
    )


def _refuse_mixed(first: RecordedRollout, record: RecordedRollout) -> None:
    """Refuse records that lack what the first one has, or have what it lacks."""
    had, has = _parts(first), _parts(record)
    if had != has:
        part = sorted(had ^ has)[0]
        one, other = (first, record) if part in had else (record, first)
        raise InputError(
            f"{one.place} has {part} but {other.place} has not; write the same fields into every record, or pass those "
            "that differ as separate runs."
        )


def _parts(record: RecordedRollout) -> set[str]:
    optional = ("group", "step", "prompt", "prompt_ids", "ids", "mask", "completion", "grad_norm")
    return {name for name in optional if getattr(record, name) is not None} | set(record.columns)
