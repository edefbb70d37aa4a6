"""The run that recorded rollouts become: begun or gone on with, step by step, and its ending recorded."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from otb_analysis.audit.formats import Source, find_source
from otb_analysis.audit.rows import suffix_of
from otb_analysis.audit.steps import Layout, RecordedStep, steps_of
from otb_analysis.config.audit import RecordedConfig
from otb_analysis.errors import STOPS, InputError, Interrupted, StoreError
from otb_analysis.phases import advance, count_to, note, phase, plural
from otb_analysis.store import RunStore, RunWriter, StepTables
from otb_analysis.store.layout import check_run_name

PLACE = ("run", "root", "if_exists", "source")
"""Parts of a stored configuration that may differ when a run goes on: they change where it is, not what it holds."""
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
        return find_source(path, config.format)


def run_path(path: Path, config: RecordedConfig, ending: str) -> Path:
    """Return the directory of the run: as named, or by the rollouts' file and what is done with them."""
    resolved = path.resolve()
    stem = resolved.name.removesuffix(suffix_of(resolved)) or "rollouts"
    plain = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "._-") else "-" for sign in stem)
    return config.root / check_run_name(config.run or f"{plain.lstrip('._-') or 'rollouts'}-{ending}")


def stored_config(config: RecordedConfig, source: Source, made_by: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what run.json keeps: the settings, and that the rollouts came from a file and not from training here."""
    origin = {"made_by": made_by, "path": str(source.path), "format": source.name, "about": source.format.about}
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return plain | {"task": source.path.name, "source": origin} | dict(more)


def record_run(path: Path, config: RecordedConfig, stored: Mapping[str, Any], source: Source, make: Maker) -> Path:
    """Write every step of a source that the run does not have yet, and return the run's directory.

    A step that is stored with as many rollouts as the source has is not made again; one with fewer is, since its file
    has grown. Stopped, the run keeps its complete steps.

    Raises:
        InputError: The run exists and must not be touched, was made otherwise, or a record is refused; the steps before
            it stay.
        StoreError: The store cannot be read or written.
    """
    writer, done = _opened(path, config, stored)
    layout = Layout(source.format.runs_of_prompts, config.group_size, config.prompts)
    try:
        with phase(f"reading {source.path.name}") as reading:
            reading.count_to(0, "step")
            _write_all(writer, steps_of(source.records(config.reward_weights), layout), done, make)
    except BaseException as error:
        reason = str(error) if isinstance(error, STOPS) else f"{type(error).__name__}: {error}".rstrip(": ")
        stopped = isinstance(error, KeyboardInterrupt)
        kept = plural(len(RunStore(path).complete_steps()), "step")
        with suppress(StoreError):  # a disk that refuses this too must not hide why the run ended
            writer.finish("failed", "interrupted; its complete steps can be read." if stopped else reason)
        if stopped:
            raise Interrupted(f"stopped; {kept} can be read in {path}, and --if-exists resume goes on.") from None
        if isinstance(error, InputError):
            raise InputError(f"{error} {kept[:1].upper()}{kept[1:]} before it can be read in {path}.") from error
        raise
    for sentence, count in source.tally.items():
        note(f"{count:,} × {sentence}.")
    writer.finish("complete")
    return path


def _write_all(writer: RunWriter, steps: Iterable[RecordedStep], done: Mapping[int, int], make: Maker) -> None:
    count_to(0, "step")
    for step in steps:
        stored = done.get(step.step)
        if stored is None or stored < len(step.records):
            writer.write_step(step.step, make(step))
        elif stored > len(step.records):
            raise InputError(
                f"step {step.step} has {len(step.records)} rollouts in {step.records[0].place.file} but {stored} in "
                "the run; the file has changed, so begin anew with --if-exists replace."
            )
        advance()


def _opened(path: Path, config: RecordedConfig, stored: Mapping[str, Any]) -> tuple[RunWriter, dict[int, int]]:
    """Make or reopen the run; return its writer, and the rollouts of each step that it has."""
    if config.if_exists != "resume" or not path.exists():
        policy = "replace" if config.if_exists == "replace" else "error"
        return RunWriter.create(path.parent, path.name, stored, if_exists=policy), {}
    store = RunStore(path)
    _refuse_other_settings(path, store.info.get("config"), stored)
    steps = store.steps_df(columns=["step", "n_rollouts"])
    done = {int(step): int(count) for step, count in zip(steps["step"], steps["n_rollouts"], strict=True)}
    return RunWriter.resume(path, max(done, default=-1) + 1), done


def _refuse_other_settings(path: Path, old: object, new: Mapping[str, Any]) -> None:
    before = old if isinstance(old, Mapping) else {}
    for name in new:
        if name not in PLACE and before.get(name) != new[name]:
            raise InputError(
                f"{name} is {new[name]!r} but run {path.name!r} was made with {before.get(name)!r}; pass the run's own "
                "settings to go on, or another --run."
            )
