"""The run that recorded rollouts become: begun or gone on with, step by step, and its ending recorded."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from otb_analysis.config import RecordedConfig, plain_config
from otb_analysis.errors import STOPS, InputError, Interrupted, StoreError
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.phases import advance, count_to, note, phase, plural
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.recorded.formats import Source, find_source
from otb_analysis.recorded.rows import Tally, suffix_of
from otb_analysis.recorded.steps import Layout, RecordedStep, steps_of
from otb_analysis.store import RunStore, RunWriter, StepTables
from otb_analysis.store.layout import check_run_name

PLACE = ("run", "root", "if_exists", "source", "device")
"""Parts of a stored configuration that may differ when a run goes on: they change where it is, not what it holds."""
GIVEN = {"energy", "turn", "token_id", "entropy"}
"""What an estimator may need here; a critic's values, ratios and exact norms at every step are not there."""
REPEATED = "step has the rollouts of the step before it (TRL writes a batch again at every pass over it)"
Maker = Callable[[RecordedStep], StepTables]
"""Makes what is stored of a step."""


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
    with phase(f"recognising {path}"):
        source = find_source(path, config.format)
    if config.reward_weights and source.name != "trl":
        raise InputError(f"--reward-weights are for TRL's tables, but {path} is {source.name}; leave them out.")
    return source


def run_path(path: Path, config: RecordedConfig, ending: str) -> Path:
    """Return the directory of the run: as named, or by the rollouts' file and what is done with them."""
    resolved = path.resolve()
    stem = resolved.name.removesuffix(suffix_of(resolved)) or "rollouts"
    plain = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "._-") else "-" for sign in stem)
    return config.root / check_run_name(config.run or f"{plain.lstrip('._-') or 'rollouts'}-{ending}")


def stored_config(config: RecordedConfig, source: Source, made_by: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what run.json keeps: the settings, and that the rollouts came from a file and not from training here."""
    origin = {"made_by": made_by, "path": str(source.path), "format": source.name, "about": source.format.about}
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


def record_run(
    path: Path,
    config: RecordedConfig,
    stored: Mapping[str, Any],
    source: Source,
    make: Maker,
    processes: Processes = SINGLE_PROCESS,
    machine: Mapping[str, object] | None = None,
) -> Path:
    """Write every step of a source that the run does not have yet, and return the run's directory.

    Each process reads all records and makes every `processes.size`-th of those steps, whole: the parts are those of a
    single process. The first one alone writes run.json. A step that is stored with as many rollouts as the source has
    is not made again; one with fewer is, since its file has grown. Stopped, the run keeps its complete steps. Nothing
    is written before the first step is made. `machine`: where its model runs, for run.json.

    Raises:
        InputError: The run exists and must not be touched, was made otherwise, or a record is refused; the steps before
            it stay.
        StoreError: The store cannot be read or written.
    """
    run = _Run(path, config, stored, processes, machine)
    layout = Layout(source.format.runs_of_prompts, config.group_size, config.prompts)
    try:
        with phase(f"reading {source.path.name}"):
            steps = steps_of(source.records(config.reward_weights), layout)
            run.write(_repeats_marked(steps, source), make)
    except BaseException as error:
        kept = run.failed(error)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"stopped; {kept or 'nothing was written'}.") from None
        if isinstance(error, InputError) and kept:
            raise InputError(f"{error} {kept[0].upper()}{kept[1:]}.") from error
        raise
    note_tally(source.tally)
    writer = run.writer()
    processes.barrier()
    if processes.first:
        writer.finish("complete")
    return path


def note_tally(tally: Tally) -> None:
    """Note what was seen on the way, with how often."""
    for sentence, count in (+tally).items():
        note(f"{count:,} × {sentence}.")


class _Run:
    """A run that is made, or gone on with, once there is something to write."""

    def __init__(
        self,
        path: Path,
        config: RecordedConfig,
        stored: Mapping[str, Any],
        processes: Processes,
        machine: Mapping[str, object] | None,
    ):
        self.path, self.config, self.stored, self.processes, self.machine = path, config, stored, processes, machine
        self._writer: RunWriter | None = None
        # Steps that were stored before → their rollouts, looked up once, before any process writes
        self.done: dict[int, int] = processes.broadcast_from_main(self._stored_steps)

    def _stored_steps(self) -> dict[int, int]:
        refuse_existing(self.path, self.config)
        if self.config.if_exists != "resume" or not self.path.exists():
            return {}
        store = RunStore(self.path)
        _refuse_other_settings(self.path, store.info.get("config"), self.stored)
        steps = store.steps_df(columns=["step", "n_rollouts"])
        return {int(step): int(n) for step, n in zip(steps["step"], steps["n_rollouts"], strict=True)}

    def writer(self) -> RunWriter:
        """Return the run's writer; the first call, which waits for all processes, makes or reopens the directory."""
        if self._writer is None:
            writer = self._writer = self.processes.broadcast_from_main(self._create_or_reopen)
            if self.processes.first:
                self.processes.record = lambda reason: writer.finish("failed", reason)
        return self._writer

    def _create_or_reopen(self) -> RunWriter:
        if self.config.if_exists == "resume" and self.path.exists():
            return RunWriter.resume(self.path, max(self.done, default=-1) + 1, self.machine)
        policy = "replace" if self.config.if_exists == "replace" else "error"
        return RunWriter.create(self.path.parent, self.path.name, self.stored, if_exists=policy, machine=self.machine)

    def write(self, steps: Iterable[RecordedStep], make: Maker) -> None:
        """Make and write this process's share of the steps that the run does not have."""
        count_to(0, "step")
        due = 0
        for step in steps:
            stored = self.done.get(step.step)
            if stored is None or stored < len(step.records):
                if due % self.processes.size == self.processes.rank:
                    tables = make(step)
                    self.writer().write_step(step.step, tables)
                due += 1
            elif stored > len(step.records):
                raise InputError(
                    f"step {step.step} has {len(step.records)} rollouts in {step.records[0].place.file} but {stored} "
                    "in the run; the file has changed, so begin anew with --if-exists replace."
                )
            advance()

    def failed(self, error: BaseException) -> str:
        """Record why the run ended early; return what of it is kept, in words, empty where nothing was written."""
        if self._writer is None:
            return ""
        reason = str(error) if isinstance(error, STOPS) else f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, KeyboardInterrupt):
            reason = "interrupted; its complete steps can be read."
        with suppress(StoreError):  # a disk that refuses this too must not hide why the run ended
            if self.processes.first:
                self._writer.finish("failed", reason)
        steps = plural(len(RunStore(self.path).complete_steps()), "step")
        return f"{steps} before it can be read in {self.path}, and --if-exists resume goes on"


def _repeats_marked(steps: Iterable[RecordedStep], source: Source) -> Iterator[RecordedStep]:
    """Yield all steps; mark and count those whose rollouts are those of the step before."""
    before = 0
    for step in steps:
        here = hash(tuple((r.prompt_key, r.ids or r.completion or r.messages, r.reward) for r in step.records))
        source.tally[REPEATED] += here == before
        yield replace(step, repeated=here == before)
        before = here


def _refuse_other_settings(path: Path, old: object, new: Mapping[str, Any]) -> None:
    before = old if isinstance(old, Mapping) else {}
    for name in new:
        if name not in PLACE and before.get(name) != new[name]:
            raise InputError(
                f"{name} is {new[name]!r} but run {path.name!r} was made with {before.get(name)!r}; pass the run's own "
                "settings to go on, or another --run."
            )
