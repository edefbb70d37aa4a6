"""`otb diagnose` and `otb attribution`: whether runs are in trouble, and who holds a step's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from otb_analysis.commands.inspect import RunsConfig, complete_runs, print_json, run_path
from otb_analysis.commands.options import parsed
from otb_analysis.commands.screen import print_all, shown
from otb_analysis.errors import InputError
from otb_analysis.phases import counted, phase


@dataclass(frozen=True)
class DiagnoseConfig(RunsConfig):
    """Say whether runs are in trouble: each detector's level, reason and first alarm, change points, next baseline.

    A folder (otb diagnose runs) gives one line for each of its runs, the worst first, as on the page Triage.
    """

    json: bool = False
    """Print JSON, for scripts: a list with one object per run; for a folder, one object with all runs."""
    step: int | None = None
    """With --json: add the prompts, rollouts and tokens that make up the gradient of this step."""
    top: int = 50
    """How many prompts, rollouts and tokens of --step."""
    curves: bool = False
    """With --json: add the curves of every panel."""


@dataclass(frozen=True)
class AttributionConfig:
    """Print which prompts, rollouts and tokens make up a step's ‖ḡ‖², each share split into signal and noise.

    Of a step without the level attribution: which of its tokens are large, which is no share of the update.
    """

    run: Annotated[str, tyro.conf.Positional] = ""
    """Name or path of a run."""
    step: int | None = None
    """A step; by default the last attributed one before the reward fell or an alarm fired, or of all."""
    top: int = 12
    """Rows per table."""
    json: bool = False
    """Print JSON, for scripts: attribution, and where it was not measured sizes."""
    root: Path = Path("runs")
    """Directory that holds the runs."""


def diagnose_command(words: Sequence[str]) -> None:
    """Diagnose runs."""
    config = parsed(DiagnoseConfig, "diagnose", words, DiagnoseConfig())
    if config.top < 1:
        raise InputError(f"--top is {config.top}; pass at least 1.")
    if not config.json and (config.step is not None or config.curves):
        raise InputError("--step and --curves go with --json; in the terminal otb attribution RUN shows a step.")
    with shown(), phase("diagnosing"):
        from otb_analysis.answers import opened, triaged
        from otb_analysis.report.diagnosis import diagnosis_parts, triage_parts
        from otb_analysis.report.document import printed
        from otb_analysis.report.records import diagnosis_record, following, triage_record
        from otb_analysis.store.layout import is_run

        record: object = None
        diagnoses: list[list[Table | str]] = []
        # A folder of runs may stand instead of runs.
        folder = Path(config.runs[0]) if len(config.runs) == 1 else None
        if folder and not is_run(run_path(config.root, config.runs[0])) and folder.is_dir() and not is_run(folder):
            rows = triaged(folder)
            diagnoses, record = [printed(triage_parts(rows))], following("diagnose", triage_record(rows))
        else:
            paths = [run_path(config.root, name) for name in config.runs or complete_runs(config.root)]
            runs = counted(list(opened(paths).values()), "run")
            if config.json:
                of_runs = [diagnosis_record(run, config.step, config.top, config.curves) for run in runs]
                record = following("diagnose", of_runs)
            else:
                diagnoses = [printed(diagnosis_parts(run)) for run in runs]
    if config.json:
        print_json(record)
        return
    for parts in diagnoses:
        print_all(parts)


def attribution_command(words: Sequence[str]) -> None:
    """Attribute a step."""
    config = parsed(AttributionConfig, "attribution", words, AttributionConfig())
    if not config.run:
        raise InputError("otb attribution needs a run; pass its name, as in otb attribution demo-otb-s0.")
    if config.top < 1:
        raise InputError(f"--top is {config.top}; pass at least 1.")
    with shown(), phase("reading the attribution"):
        from otb_analysis.answers import RunAnswers
        from otb_analysis.report.diagnosis import attribution_parts
        from otb_analysis.report.document import printed
        from otb_analysis.store import RunStore

        run, record, parts = RunAnswers(RunStore(run_path(config.root, config.run))), None, list[Table | str]()
        if config.json:
            step = run.look if config.step is None else config.step
            record = {"run": run.name} | run.held_record(step, config.top)
        else:
            parts = printed(attribution_parts(run, config.step, config.top))
    if config.json:
        print_json(record)
    print_all(parts)
