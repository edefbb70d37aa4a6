"""Recorded rollouts as a run: records cut into steps of whole groups, and the run begun, gone on with and ended."""

import gc
import hashlib
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from otb_analysis.config import RecordedConfig, ScoreConfig, plain_config
from otb_analysis.errors import STOPS, InputError, Interrupted, ProcessError, StoreError, why_ended
from otb_analysis.estimators import ESTIMATORS, entry_of, options_from_dict
from otb_analysis.phases import advance, ahead, count_to, note, phase, plural
from otb_analysis.recorded.formats import Source, find_source
from otb_analysis.recorded.readers import trl, trl_weights
from otb_analysis.recorded.records import RecordedRollout, Row, Tally, rows_of, suffix_of
from otb_analysis.store import RunStore, RunWriter, StepTables
from otb_analysis.store.layout import check_run_name
from otb_analysis.types import Int

PLACE = ("run", "root", "if_exists", "source", "device", "first")
"""Parts of a stored configuration that may differ when a run goes on: they change where it is or how far it goes, not
what a step holds."""
GIVEN = {"energy", "turn", "token_id", "entropy"}
"""What an estimator may need here; a critic's values, ratios and exact norms at every step are not there."""
ALONE = (
    "step whose rollouts are each a group of one, though prompts repeat: here they are groups by prompt, but the "
    "trainer's baseline saw one rollout"
)
REPEATED = "step has the rollouts of the step before it (TRL writes a batch again at every pass over it)"


WEIGHED = 4096
"""About how many rows the weights of reward columns are found of."""
LARGE = 200_000_000
"""Bytes of rollouts from which reading them takes longer than starting a process for it."""


@dataclass(frozen=True)
class Layout:
    """How records stand in their files."""

    runs_of_prompts: bool = False  # True where a group ends where the prompt changes
    group_size: int = 0  # Rows in a row that are one group; 0 where group or prompt tells
    prompts: int = 16  # Groups per step, where the records name no step


@dataclass(frozen=True)
class RecordedStep:
    """The rollouts of one step, groups together; made by `steps_of`."""

    step: int
    records: tuple[RecordedRollout, ...]
    group: Int  # Index of each record's prompt within the step [N]
    repeated: bool = False  # True where its rollouts are those of the step before
    block: int = 0  # Steps that were read before it, an earlier attempt of the same one included

    @property
    def prompt_ids(self) -> list[str]:
        """Name of each group's prompt [P]: a hash, the same in every step and run."""
        first = {int(g): record for g, record in reversed(list(zip(self.group, self.records, strict=True)))}
        return [hashlib.sha256(repr(first[g].prompt_key).encode()).hexdigest()[:16] for g in sorted(first)]

    @property
    def provenance(self) -> dict[str, object]:
        """Columns of `rollouts` that say where each record stood, and the trainer's advantage of the whole rollout."""
        columns: dict[str, object] = {
            "source_file": [record.place.file.name for record in self.records],
            "source_record": [record.place.number for record in self.records],
        }
        given = [record.advantage for record in self.records]
        if any(advantage is not None for advantage in given):
            values = np.array(given, np.float64)
            columns["recorded_advantage"] = np.ma.masked_array(values, mask=np.isnan(values))
        return columns

    @property
    def logged_norm(self) -> dict[str, object]:
        """The column of `steps` with the trainer's gradient norm, empty where it was not recorded.

        Raises:
            InputError: Records of the step have different ones.
        """
        first = self.records[0]
        for record in self.records:
            if record.grad_norm != first.grad_norm:
                raise InputError(
                    f"{record.place} has grad_norm {record.grad_norm} but record {first.place.number} of the same step "
                    f"has {first.grad_norm}; write that of the step's update into all of its records."
                )
        return {} if first.grad_norm is None else {"grad_norm": first.grad_norm}


def steps_of(records: Iterable[RecordedRollout], layout: Layout, tally: Tally | None = None) -> Iterator[RecordedStep]:
    """Yield steps in their order, one in memory; where records name none, so many groups in a row are one, from 0.

    A step that comes again behind later ones is that of a run that was resumed: it and those behind it replace what was
    yielded before. `tally` counts what is odd about groups.

    Raises:
        InputError: Steps jump back and forth, a group is not in one piece or has two prompts.
    """
    tally = Tally() if tally is None else tally
    stream = iter(records)
    first = next(stream, None)
    if first is None:
        return
    if first.step is None:
        yield from _counted_steps(chain([first], stream), layout, tally)
        return
    before, sizes = first.step, dict[int, int]()  # Step → rollouts of the attempt that counts
    for number, attempt in groupby(chain([first], stream), lambda record: record.step):
        part, step = list[RecordedRollout](), int(number or 0)
        for record in attempt:
            if number is None:
                raise InputError(f"{record.place} has no step but those before it have; write it into every record.")
            if step < before and step not in sizes:
                raise InputError(
                    f"{record.place} is of step {step} but comes behind step {before}; sort the records by step, or "
                    "pass each run's files alone."
                )
            part.append(record)
        before, earlier, place = step, sizes.get(step, len(part)), part[0].place
        if earlier != len(part):
            raise InputError(
                f"{place} goes on with step {step}, of which there were {earlier} records before and are {len(part)} "
                "here; sort the records by step, or pass each attempt of a resumed run alone."
            )
        for later in [one for one in sizes if one >= step]:
            tally.note("step was replaced by a later attempt (the run was resumed)", f"step {later}, {place.short}")
            del sizes[later]
        sizes[step] = len(part)
        yield grouped(step, part, layout, tally)


def _counted_steps(records: Iterable[RecordedRollout], layout: Layout, tally: Tally) -> Iterator[RecordedStep]:
    """Yield a step for so many groups in a row; a group that comes back after it ended is refused."""
    part: list[RecordedRollout] = []
    keys: list[Hashable] = []  # Of the groups in `part`
    reason = f"step was made of up to {plural(layout.prompts, 'group')} in a row, as no record names one (--prompts)"
    ended: dict[bytes, int] = {}  # Hash of each group that ended → its first record; a hash, so that millions fit
    step = 0
    for row, record in enumerate(records):
        if layout.group_size:
            key: Hashable = row // layout.group_size
        else:
            key = record.prompt_key if record.group is None else record.group
        if not keys or key != keys[-1]:
            name = hashlib.blake2b(repr(key).encode(), digest_size=12).digest()
            if name in ended:
                what = "prompt" if record.group is None else f"group {record.group!r}"
                raise InputError(
                    f"{record.place} goes on with the {what} of record {ended[name]}, behind other groups; put the "
                    "rollouts of a group together, write step and group into every record, or pass --group-size N if "
                    "every N records in a row are a group."
                )
            ended[name] = record.place.number
            if len(keys) == layout.prompts:
                tally.note(reason, part[0].place)
                yield grouped(step, part, layout, tally)
                step, part, keys = step + 1, [], []
            keys.append(key)
        part.append(record)
    if part:
        tally.note(reason, part[0].place)
        yield grouped(step, part, layout, tally)


def grouped(step: int, records: Iterable[RecordedRollout], layout: Layout, tally: Tally | None = None) -> RecordedStep:
    """Return the records of one step with the index of each one's group, groups in the order of their first record.

    Raises:
        InputError: A group has two prompts.
    """
    part, tally = tuple(records), Tally() if tally is None else tally
    prompts = [record.prompt_key for record in part]
    keys: list[Hashable] = [record.group for record in part]
    if part[0].group is None and layout.group_size:
        keys = [i // layout.group_size for i in range(len(part))]
    elif part[0].group is None:
        keys = _groups_by_prompt(part, layout.runs_of_prompts, tally)
    elif len(set(keys)) == len(keys) and min(Counter(prompts).values()) > 1:
        tally.note(ALONE, part[0].place)
        keys = prompts
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([index[key] for key in keys], np.int64)
    prompt_of: dict[int, RecordedRollout] = {}
    for g, record in zip(group.tolist(), part, strict=True):
        first = prompt_of.setdefault(g, record)
        if first.prompt_key != record.prompt_key:
            raise InputError(
                f"{record.place} is in the group of record {first.place.number} but has another prompt; a group is the "
                "rollouts of one prompt, so mend group, or --group-size."
            )
    order = np.argsort(group, kind="stable")
    return RecordedStep(step, tuple(part[i] for i in order), group[order])


def _groups_by_prompt(part: Sequence[RecordedRollout], runs_of_prompts: bool, tally: Tally) -> list[Hashable]:
    """Return a group of each record where only its prompt tells, which may stand twice in a batch.

    The order tells where all stretches of one prompt have the same length; else the size of more than half of the
    groups does.
    """
    prompts = {key: i for i, key in enumerate(dict.fromkeys(record.prompt_key for record in part))}
    prompt = np.array([prompts[record.prompt_key] for record in part])
    stretch = np.cumsum(np.concatenate([[0], prompt[1:] != prompt[:-1]]))
    length = np.bincount(stretch)
    alike = length[0] > 1 and bool((length == length[0]).all())
    group = stretch if runs_of_prompts or alike else prompt
    count = np.bincount(group)
    sizes, times = np.unique(count, return_counts=True)
    usual = int(sizes[times.argmax()])
    common = usual > 1 and 2 * int(times.max()) > len(count)  # sizes that differ anyway tell nothing
    number = [0] * len(count)
    keys: list[Hashable] = []
    for g in group.tolist():
        parts = usual if common and count[g] % usual == 0 else int(count[g])
        keys.append((g, number[g] // parts))
        number[g] += 1
    if len(set(keys)) > len(prompts):
        tally.note("question stands twice in a step, as several groups (--group-size says otherwise)", part[0].place)
    return keys


def source_of(path: Path, config: RecordedConfig) -> Source:
    """Return the rollouts at a path.

    Raises:
        InputError: No path was given, or nothing there can be read.
    """
    if path == Path():
        raise InputError("there are no rollouts to read; pass a file, or a directory of files, as --rollouts FILE.")
    if config.prompts < 1 or config.group_size < 0:
        raise InputError(
            f"--prompts is {config.prompts} and --group-size {config.group_size}; pass at least 1, and 0 or more."
        )
    if config.first < 0:
        raise InputError(f"--first is {config.first}; pass a number of steps, or 0 for all of them.")
    with phase(f"recognising {path}"):
        source = find_source(path, config.format, config.fields)
    if config.reward_weights and source.name != "trl":
        raise InputError(f"--reward-weights are for TRL's tables, but {path} is {source.name}; leave them out.")
    source.tally.strict = config.strict
    if config.reward_weights or source.format.read is not trl:
        return replace(source, weights=config.reward_weights)
    # TRL's tables do not say how its trainer weighed their columns: the recorded advantages do.
    rows = list[Row]()
    for file in source.files:  # whole ones, so that groups are whole
        rows += [row for _, row in rows_of(file, Tally())] if len(rows) < WEIGHED else []
    weights, reward = trl_weights(rows)
    return replace(source, weights=weights, reward=reward)


def run_path(path: Path, config: RecordedConfig, ending: str) -> Path:
    """Return the directory of the run: as named, or by the rollouts' file and what is done with them."""
    resolved = path.resolve()
    stem = resolved.name.removesuffix(suffix_of(resolved)) or "rollouts"
    plain = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "._-") else "-" for sign in stem)
    return config.root / check_run_name(config.run or f"{plain.lstrip('._-') or 'rollouts'}-{ending}")


def stored_config(config: RecordedConfig, source: Source, made_by: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what run.json keeps: the settings, and that the rollouts came from a file and not from training here."""
    origin = {"made_by": made_by, "path": str(source.path), "format": source.name, "about": source.format.about}
    origin |= {"reward": source.reward} if source.reward else {}
    place = source.path.resolve()
    return plain_config(config) | {"rollouts": str(place), "task": place.name, "source": origin} | dict(more)


def remaining_estimators() -> list[str]:
    """Return the estimators that take one rollout per prompt, and need no more than recorded rollouts have."""
    return [name for name, entry in ESTIMATORS.items() if entry.takes_single and set(entry.needs) <= GIVEN]


def refuse_existing(path: Path, config: RecordedConfig) -> None:
    """Refuse a run that exists, before time is spent, unless it is to be replaced or gone on with.

    Raises:
        InputError: It exists.
    """
    if config.if_exists == "error" and path.exists():
        raise InputError(
            f"run {path.name!r} already exists in {path.parent}; pass another --run, --if-exists resume or --if-exists "
            "replace."
        )


def check_settings(config: ScoreConfig) -> None:
    """Refuse settings of a score that cannot work on any machine.

    Raises:
        InputError: The first of them.
    """
    if not config.model:
        raise InputError(
            "--model is empty; pass the checkpoint that sampled the rollouts, or use otb import without one."
        )
    if not (config.temperature > 0 and np.isfinite(config.temperature)):
        raise InputError(f"--temperature is {config.temperature}; pass the temperature of the sampler, above 0.")
    name = config.estimator.name
    options_from_dict(name, config.estimator.options)
    if lacking := sorted(set(entry_of(name).needs) - GIVEN):
        raise InputError(
            f"estimator.name is {name!r}, which needs {lacking[0]}; recorded rollouts do not have it, choose another."
        )
    if config.estimator.energy != "proxy":
        raise InputError(
            f"estimator.energy is {config.estimator.energy!r}; recorded rollouts are weighed by the proxy."
        )
    if config.measure.budget:
        raise InputError("measure.budget plans a training run; set --measure.exact.every and the like instead.")


def read_steps(source: Source, config: RecordedConfig) -> Iterator[RecordedStep]:
    """Yield a source's steps, and count what is odd about them.

    Raises:
        InputError: A record is refused, or steps and groups of records do not fit together.
    """
    layout = Layout(source.format.runs_of_prompts, config.group_size, config.prompts)
    tally, before, usual = source.tally, 0, 0
    for block, step in enumerate(islice(steps_of(source.records(), layout, tally), config.first or None)):
        here = hash(tuple((r.prompt_key, r.ids or r.completion or r.messages, r.reward) for r in step.records))
        tally[REPEATED] += here == before
        count = np.bincount(step.group)
        # The size of group that most rollouts of the first step are in, the larger one of two
        usual = usual or max(set(count.tolist()), key=lambda size: (size * np.sum(count == size), size))
        for g in np.flatnonzero(count != usual):
            first = step.records[int(np.argmax(step.group == g))].place
            if count[g] < usual:
                tally.note(f"group has fewer rollouts than the usual {usual}", first)
            elif usual > 1:
                tally.note(f"group has more than the usual {usual} rollouts: two attempts of a step, or ranks?", first)
        yield replace(step, repeated=here == before, block=block)
        before = here


def read_aside(
    source: Source, config: RecordedConfig, make: Callable[[RecordedStep], StepTables]
) -> Iterator[tuple[RecordedStep, StepTables]]:
    """Do the same in a Python process of its own, which reads on while a step is written; yield what it makes of each.

    A step comes with its first record alone. `make` is a function that can be pickled.

    Raises:
        InputError: A record is refused, as there, or the process ended early.
    """
    command = [sys.executable, "-c", f"from {__name__} import write_steps; write_steps()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a format of one's own is found there, too
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as reader:
        given, made = cast(BinaryIO, reader.stdin), cast(BinaryIO, reader.stdout)
        try:
            with given:
                pickle.dump((source, config, make, gc.get_threshold()), given)
            while isinstance(item := pickle.load(made), tuple):
                yield item
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise InputError(
                f"the process that read {source.path} ended early, by a signal or for want of memory; read it again, "
                "or a part of it."
            ) from error
        finally:
            reader.kill()
    if isinstance(item, Exception):
        raise item
    source.tally.update(item)
    source.tally.places |= item.places


def write_steps() -> None:
    """Write the steps of the source on standard input to standard output, made: what `read_aside` starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the first process says when to stop
    output, sys.stdout = sys.stdout.buffer, sys.stderr
    source, config, make, threshold = pickle.load(sys.stdin.buffer)
    gc.set_threshold(*threshold)
    with suppress(BrokenPipeError):
        try:
            for step in read_steps(source, config):
                made = replace(step, records=step.records[:1]), make(step)
                pickle.dump(made, output, pickle.HIGHEST_PROTOCOL)  # arrays without a copy
            pickle.dump(source.tally, output)
        except STOPS as error:
            pickle.dump(error, output)
        output.flush()


def record_run(
    path: Path,
    config: RecordedConfig,
    stored: Mapping[str, Any],
    source: Source,
    make: Callable[[RecordedStep], StepTables],
    machine: Callable[[], Mapping[str, object]] | None = None,
    total: int = 0,
    lasting: bool = True,
) -> Path:
    """Write every step of a source that the run does not have yet, and return the run's directory.

    A step that is stored with as many rollouts as the source has is not made again; one with fewer is, since its file
    has grown. Stopped, the run keeps its complete steps. Nothing is written before the first step is made.
    `config.first` steps are read, all where it is 0. `machine` tells, for run.json, where the model ran of the steps
    made so far, and `total` how many there are, 0 where nobody counted. A run that is not `lasting` is removed soon:
    its files stay apart, no error names them.

    Raises:
        InputError: The run exists and must not be touched, was made otherwise, or a record is refused; the steps before
            it stay.
        StoreError: The store cannot be read or written.
    """
    run = _Run(path, config, stored, machine)
    if source.reward and lasting:
        note(f"{source.reward[0].upper()}{source.reward[1:]}.")
    try:
        with phase(f"reading {source.path.name}"):
            count_to(total, "step")
            run.write(source, make)
    except BaseException as error:
        kept = run.failed(error) if lasting else ""
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"stopped; {kept or 'nothing was written'}.") from None
        if isinstance(error, InputError | ProcessError) and kept:
            raise type(error)(f"{error} {kept[0].upper()}{kept[1:]}.") from error
        raise
    note_tally(source.tally)
    run.writer().finish("complete", merged=lasting, machine=machine() if machine and run.new else None)
    return path


def note_tally(tally: Tally) -> None:
    """Note what was seen on the way, with how often."""
    for line in tally.lines():
        note(line)


class _Run:
    """A run that is made, or gone on with, once there is something to write."""

    def __init__(
        self,
        path: Path,
        config: RecordedConfig,
        stored: Mapping[str, Any],
        machine: Callable[[], Mapping[str, object]] | None,
    ):
        self.path, self.config, self.stored, self.machine = path, config, stored, machine
        self._writer: RunWriter | None = None
        self.done = dict[int, int]()  # Steps that were stored before → their rollouts
        self.new = True  # Not gone on with
        refuse_existing(path, config)
        if config.if_exists != "resume" or not path.exists():
            return
        store = RunStore(path)
        before: Any = store.info.get("config") or {}
        for name, value in stored.items():
            if name not in PLACE and before.get(name) != value:
                raise InputError(
                    f"{name} is {value!r} but run {path.name!r} was made with {before.get(name)!r}; pass the run's own "
                    "settings to go on, or another --run."
                )
        steps = store.steps_df(columns=["step", "n_rollouts"])
        self.done = {int(step): int(n) for step, n in zip(steps["step"], steps["n_rollouts"], strict=True)}

    def write(self, source: Source, make: Callable[[RecordedStep], StepTables]) -> None:
        """Write the steps that are not there yet."""
        last = -1
        if self.machine:  # scoring takes far longer than reading, and its records are many: one step is in memory
            steps = ((step, None) for step in read_steps(source, self.config))
        elif sum(file.stat().st_size for file in source.files) > LARGE and not self.done:  # all of its steps are due
            steps = ahead(read_aside(source, self.config, make))
        else:
            steps = ((step, None) for step in ahead(read_steps(source, self.config)))
        for step, tables in steps:
            if step.step <= last:  # another attempt replaces the steps from this one on
                self.writer()
                self.done = {stored: n for stored, n in self.done.items() if stored < step.step}
                self._writer = RunWriter.resume(self.path, step.step, self.machine and self.machine())
            n, n_stored, last = len(step.group), self.done.get(step.step, 0), step.step
            if n_stored > n:
                raise InputError(
                    f"step {step.step} has {n} rollouts in {step.records[0].place.file} but {n_stored} in the run; the "
                    "file has changed, so begin anew with --if-exists replace."
                )
            if n_stored < n:
                tables = tables or make(step)
                self.writer().write_step(step.step, tables)
            advance()

    def writer(self) -> RunWriter:
        """Return the run's writer; the first call makes or reopens the directory."""
        if self._writer is None:
            machine = self.machine and self.machine()
            self.new = not (self.config.if_exists == "resume" and self.path.exists())
            if not self.new:
                self._writer = RunWriter.resume(self.path, max(self.done, default=-1) + 1, machine)
            else:
                policy = "replace" if self.config.if_exists == "replace" else "error"
                root, name = self.path.parent, self.path.name
                self._writer = RunWriter.create(root, name, self.stored, if_exists=policy, machine=machine)
        return self._writer

    def failed(self, error: BaseException) -> str:
        """Record why the run ended early; return what of it is kept, in words, empty where nothing was written."""
        if self._writer is None:
            return ""
        with suppress(StoreError):  # a disk that refuses this too must not hide why the run ended
            self._writer.finish("failed", why_ended(error))
        steps = plural(len(RunStore(self.path).complete_steps()), "step")
        return f"{steps} before it can be read in {self.path}, and --if-exists resume goes on"
