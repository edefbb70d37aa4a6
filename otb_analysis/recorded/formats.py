"""Who wrote the records: a table of formats, how one is recognised, and the records of its files."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from otb_analysis.custom import import_attribute, is_custom, plugins
from otb_analysis.errors import InputError, nearest
from otb_analysis.phases import note
from otb_analysis.recorded.readers import (
    NEMO_RL_COLUMNS,
    OPEN_INSTRUCT_COLUMNS,
    PLAIN_COLUMNS,
    PLAIN_FIELDS,
    PRIME_RL_COLUMNS,
    areal,
    art,
    first_filter,
    inspect,
    last_outputs,
    lm_eval,
    nemo_rl,
    open_instruct,
    plain,
    prime_rl,
    results,
    samples_of,
    trl,
    unfolded,
    verl,
)
from otb_analysis.recorded.records import (
    SUFFIXES,
    Fields,
    Place,
    RecordedRollout,
    Row,
    Tally,
    checked,
    rows_of,
    suffix_of,
)
from otb_analysis.recorded.slime import SLIME_COLUMNS, joined, miles_columns, slime
from otb_analysis.recorded.traces import PER_TOKEN, traces_of, verifiers, with_annotations

NOT_AS_WRITTEN = (TypeError, LookupError, AttributeError, ValueError, OverflowError, RecursionError)
"""What reading a row raises that has another form than its format."""
EVALUATIONS = r"(^|/)(eval|validation|val[-_./])"
"""How files or folders begin that hold rollouts that nothing trained on."""
LEFT = "file of evaluations beside those of training was left out; pass it alone"
NO_ROLLOUTS = "file without rollouts beside those with them was left out"
OPTIONAL = ("group", "step", "prompt", "prompt_ids", "ids", "mask", "completion", "grad_norm")
"""Fields that all records of a source have, or none, beside their columns."""
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
    not_named: str = ""  # Files whose names or folders within the directory have this are others', if any have not
    columns: Mapping[str, str] = field(default_factory=dict)  # Our columns → the file's own names, as errors say them
    unfold: Callable[[Row], Iterator[Row]] = lambda row: iter((row,))  # The rows in a row that holds several
    reward: str = ""  # The field with the reward, where a record without a finite one is left out
    instead: Mapping[str, str] = field(default_factory=dict)  # Fields → others that do in their place
    never: str = ""  # A field that tells another format, unless the file is called as this one's are
    folder: str = ""  # What the folder of its files is called; empty where it may have any name
    # What other files know of all rows, added; gets the rows, their files and the tally
    fold: Callable[[Iterable[tuple[Place, Row]], Sequence[Path], Tally], Iterable[tuple[Place, Row]]] = (
        lambda rows, files, tally: rows
    )

    def fits(self, row: Row) -> bool:
        """Return whether a row has every field."""
        return all(name in row or self.instead.get(name) in row for name in self.fields)

    def resembles(self, row: Row) -> bool:
        """Return whether a row has any field but the reward, which metrics have, too."""
        return any(name in row or self.instead.get(name) in row for name in self.fields - {self.reward})


FORMATS: dict[str, Format] = {
    "trl": Format(
        "TRL's completions_*.parquet (log_completions)",
        frozenset({"step", "prompt", "completion", "advantage"}), trl, True, ("completions_*.parquet",),
        never="reward",
    ),
    "verl": Format(
        "verl's {step}.jsonl (trainer.rollout_data_dir)",
        frozenset({"input", "output", "score", "step"}), verl, names=("[0-9]*.jsonl",), fold=last_outputs,
        reward="score", not_named=EVALUATIONS,
    ),
    "art": Format(
        "ART's trajectories/{split}/{step}.parquet",
        frozenset({"group_index", "messages", "reward"}), art, names=("*.parquet",), reward="reward",
    ),
    "areal": Format(
        "AReaL's rollout/{version}/{task_id}.jsonl (dump_to_file)",
        frozenset({"task_id", "sample_idx", "prompt_len", "tail_version", "reward"}), areal,
        names=("rollout/*/*.jsonl", "*/[0-9]*.jsonl"), reward="reward",
    ),
    "prime_rl": Format(
        "prime-rl's token_exports/step_N/rank_R.jsonl (before September 2026)",
        frozenset({"token_ids", "loss_mask", "inference_logprobs", "export_sequence_idx"}), prime_rl,
        names=("rank_*.jsonl",), columns=PRIME_RL_COLUMNS,
    ),
    "prime_rl_traces": Format(
        "prime-rl's monitors/file/traces/stream/*.jsonl[.zst] with its annotations (since September 2026)",
        frozenset({"nodes", "rewards"}), verifiers, unfold=traces_of,
        names=("stream/[0-9]*.jsonl*",), folder="stream", fold=with_annotations, columns=PER_TOKEN,
    ),
    "verifiers": Format(
        "traces.jsonl of verifiers and of prime-rl's rollouts/step_N",
        frozenset({"nodes", "rewards"}), verifiers, unfold=traces_of,
        names=("train/effective/traces.jsonl", "traces.jsonl*"), columns=PER_TOKEN,
    ),
    "nemo_rl": Format(
        "NeMo-RL's train_data_stepN.jsonl",
        frozenset({"token_ids", "token_loss_mask", "rewards"}), nemo_rl, names=("train_data_step*.jsonl",),
        columns=NEMO_RL_COLUMNS,
    ),
    "open_instruct": Format(
        "open-instruct's {run}_rollouts_{n}.jsonl (save_traces)",
        frozenset({"prompt_idx", "prompt_tokens", "response_tokens", "reward", "step"}), open_instruct,
        names=("*_rollouts_*.jsonl",), columns=OPEN_INSTRUCT_COLUMNS, reward="reward",
    ),
    "slime": Format(
        "slime's and miles's rollout_data/{id}.pt, train_data/{id}.pt or {id}_{rank}.pt, or both (dump_details)",
        frozenset({"tokens"}), slime, names=("*.pt",), not_named=EVALUATIONS, columns=SLIME_COLUMNS, fold=joined,
        never="completion",
    ),
    "miles_columns": Format(
        "miles's dashboard_columns/rollout_{id}.parquet",
        frozenset({"sample_index", "response_length", "tokens", "rollout_log_probs"}), miles_columns,
        names=("rollout_*.parquet",),
    ),
    "verifiers_results": Format(
        "verifiers's results.jsonl (evaluations before its traces)",
        frozenset({"example_id", "prompt", "completion", "reward"}), results, names=("results.jsonl*",),
        reward="reward",
    ),
    "lm_eval": Format(
        "lm-evaluation-harness's samples_{task}_{date}.jsonl (log_samples), of tasks that generate",
        frozenset({"doc_id", "arguments", "resps", "filtered_resps"}), lm_eval, names=("samples_*.jsonl",),
        fold=first_filter,
    ),
    "inspect": Format(
        "Inspect's logs: .json, or .eval where inspect_ai is installed; epochs of a sample are a group",
        frozenset({"id", "epoch", "input", "scores"}), inspect, names=("*.eval", "*.json"),
        unfold=samples_of,
    ),
    "plain": Format(
        "JSON lines or Parquet with prompt, completion, reward[, answer, group, step, ids, prompt_ids, mask, logprobs]",
        frozenset({"prompt", "completion", "reward"}), plain, names=("*.arrow", "*"), columns=PLAIN_COLUMNS,
        not_named=EVALUATIONS, reward="reward", unfold=unfolded, instead={"prompt": "prompt_ids", "completion": "ids"},
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
    weights: Mapping[str, float] = field(default_factory=dict)  # Of reward columns, where a row has several
    reward: str = ""  # How a reward was made of its columns, where a row has several
    renamed: Mapping[str, str] = field(default_factory=dict)  # Fields of the format → what the files call them

    @property
    def format(self) -> Format:
        """The format itself."""
        return format_of(self.name)

    def records(self) -> Iterator[RecordedRollout]:
        """Yield every rollout, file after file; none is kept.

        Raises:
            InputError: A file cannot be read, a record is not whole, or records differ in what they have.
        """
        first: RecordedRollout | None = None
        had = set[str]()
        for record in self._read():
            has = {name for name in OPTIONAL if getattr(record, name) is not None} | {*record.columns}
            if first is None:
                first, had = record, has
            if had != has:
                part = sorted(had ^ has)[0]
                one, other = (first, record) if part in had else (record, first)
                raise InputError(
                    f"{one.place} has {part} but {other.place} has not; write the same fields into every record, or "
                    "pass those that differ as separate runs."
                )
            yield checked(record, self.tally, self.format.columns)
        if first is None:
            seen = "; ".join(line.removesuffix(".") for line in self.tally.lines())
            raise InputError(
                f"{self.path} holds no rollouts{f' ({seen})' if seen else ''}; pass a file with at least one record."
            )

    def _read(self) -> Iterator[RecordedRollout]:
        kind = self.format
        place: object = f"the first record of {self.path}"
        rows = chain.from_iterable(rows_of(file, self.tally) for file in self.files)
        names = self.renamed

        def named(row: Row) -> Row:
            """Return a row in which fields have our names; a name that the file has for something else is gone."""
            rest = {name: value for name, value in row.items() if name not in names and name not in names.values()}
            return rest | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}

        try:
            ours = ((place, named(row) if names else row) for place, row in rows)
            unfolded = ((place, one) for place, row in ours for one in kind.unfold(row))
            for place, row in kind.fold(unfolded, self.files, self.tally):
                paid = row.get(kind.reward, 0.0)
                if paid is None or (isinstance(paid, float) and not np.isfinite(paid)):
                    called = self.renamed.get(kind.reward, kind.reward)
                    self.tally.fault(f"record without a finite {called} was left out", place)
                    continue
                record = kind.read(Fields(place, row, self.renamed), self.tally, self.weights)
                if record is not None:
                    yield record
        except InputError:
            raise
        except NOT_AS_WRITTEN as error:  # a field that no version of the trainer writes so
            raise InputError(
                f"{place}, or the one behind it, is not as {self.name} writes it ({type(error).__name__}: {error}); "
                f"mend it, or name another --format: {', '.join(FORMATS)}."
            ) from error


def format_of(name: str) -> Format:
    """Return a format of the catalogue, one that a package registers, or one of your own by module:attribute.

    Raises:
        InputError: There is none of that name, or what it names is no Format.
    """
    kind = import_attribute("format", name) if name not in FORMATS and is_custom("format", name) else FORMATS.get(name)
    if kind is None:
        raise InputError(f"--format is {name!r}; {nearest(name, [*FORMATS, *plugins('format')])}")
    if not isinstance(kind, Format):
        raise InputError(f"--format is {name!r}, which is a {type(kind).__name__}; name a Format.")
    return kind


def find_source(path: Path, name: str = "auto", fields_of_plain: Sequence[str] = ()) -> Source:
    """Return the files at a path, a file or a directory, with their format.

    Args:
        fields_of_plain: Pairs as `prompt=question`: what a file calls fields of `plain`, which alone has them renamed.

    Raises:
        InputError: There is no such path or format, nothing in it can be read as that format, or a pair is none.
    """
    renamed = dict[str, str]()
    for pair in fields_of_plain:
        ours, equals, theirs = pair.partition("=")
        if not equals or not theirs:
            raise InputError(f"--fields has {pair!r}; write pairs, as prompt=question reward=correct.")
        if ours not in PLAIN_FIELDS:
            raise InputError(f"--fields has {pair!r}; {nearest(ours, PLAIN_FIELDS)}")
        renamed[ours] = theirs
    if not path.exists():
        raise InputError(f"{path} does not exist; pass a file of rollouts, or a directory of such files.")
    first = dict[Path, Row]()  # Of each file: every format asks, and a file of one array is parsed whole

    def first_of(file: Path, kind: Format) -> Row:
        if file not in first:
            first[file] = next((row for _, row in rows_of(file, Tally())), {})
        return next(kind.unfold(first[file]), {})

    if renamed:
        if name not in ("auto", "plain"):
            raise InputError(f"--fields renames the fields of plain, but --format is {name!r}; leave one of them out.")
        kind, named = FORMATS["plain"], set(renamed.values())
        files = _files(path, kind, tally := Tally())
        files = _with_rollouts(files, lambda file: not named.isdisjoint(first_of(file, kind)), tally)
        has = next(filter(None, (first_of(file, kind) for file in files)), {})
        if lacking := [one for one in renamed.values() if one not in has]:
            raise InputError(f"--fields names {lacking[0]!r}, but the first record of {path} has {', '.join(has)}.")
        return Source(path, "plain", files, tally, renamed=renamed)

    # A package's formats come before `plain`, which many files fit.
    tried = [name] if name != "auto" else [*list(FORMATS)[:-1], *plugins("format"), "plain"]
    files: tuple[Path, ...] = ()
    fields: Row = {}  # Of the first rollout; none where a file has no rows
    for one in tried:
        try:
            kind = format_of(one)
        except InputError as error:
            if name != "auto":
                raise
            note(str(error))
            continue
        files = _files(path, kind, tally := Tally())
        if "*" in kind.names:
            files = _with_rollouts(files, lambda file, kind=kind: kind.resembles(first_of(file, kind)), tally)
        fields = first_of(files[0], kind) if files and name == "auto" else {}
        fits = kind.fits(fields)
        if kind.never in fields and not any(files[0].match(pattern) for pattern in kind.names):
            continue
        if files and (fits or name != "auto"):
            return Source(path, one, files, tally)
    files = files if name == "auto" else _files(path, FORMATS["plain"], Tally())  # the last that were tried
    if not files:
        raise InputError(
            f"{path} has no file that ends in {', '.join(SUFFIXES)}; pass what another trainer wrote, or convert it to "
            "JSON lines or Parquet."
        )
    if name != "auto":
        called = " or ".join(format_of(name).names)
        raise InputError(f"{path} has no file of the format {name}, which are called {called}.")
    raise InputError(
        f"{path} is in no known format: {files[0].name} has {', '.join(sorted(fields)) or 'nothing'}; write prompt, "
        f"completion, reward (and group) into each record, or name the format by --format: {', '.join(FORMATS)}."
    )


def _with_rollouts(files: tuple[Path, ...], looks: Callable[[Path], bool], tally: Tally) -> tuple[Path, ...]:
    """Leave out what else lies in a folder, as metrics.jsonl does; of files that differ in a number, one is looked at.

    Where none looks like rollouts all stay, and are refused with a reason.
    """
    unnumbered = {file: re.sub(r"\d+", "", file.name) for file in files}
    alike = {name: file for file, name in reversed(unnumbered.items())}
    others = {name for name, file in alike.items() if not looks(file)} if len(alike) > 1 else set()
    if len(others) == len(alike):
        return files
    for file in files:
        if unnumbered[file] in others:
            tally.note(NO_ROLLOUTS, file.name)
    return tuple(file for file in files if unnumbered[file] not in others)


def _files(path: Path, kind: Format, tally: Tally) -> tuple[Path, ...]:
    """Return the files that a format may have at a path, in the order of the numbers in their names."""
    if path.is_file():
        return (path,) if kind.folder in ("", path.resolve().parent.name) else ()
    files: set[Path] = set()
    for pattern in kind.names:
        files = files or {file for file in path.rglob(pattern) if file.is_file() and suffix_of(file) not in ("", ".db")}
    others = {file for file in files if kind.not_named and re.search(kind.not_named, file.relative_to(path).as_posix())}
    if files - others:
        files -= others
        for file in sorted(others):
            tally.note(LEFT, file.relative_to(path))
    kept = [file for file in files if file.suffix != ".zst" or file.with_suffix("") not in files]  # being compressed
    parts = {file: re.findall(r"\d+|\D", file.relative_to(path).as_posix()) for file in kept}
    # step_10 stands behind step_9, and numbers behind letters
    natural = {file: [(int(p), "") if p.isdecimal() else (-1, p) for p in names] for file, names in parts.items()}
    return tuple(sorted(kept, key=natural.__getitem__))
