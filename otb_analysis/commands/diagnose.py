"""`otb diagnose`, `otb attribution` and `otb watch`: whether runs are in trouble, and who holds a step's gradient.

`otb watch` follows one run until an alarm fires or it ends; a status and a webhook tell scripts and people.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import tyro
from rich.table import Table

from otb_analysis.commands.inspect import RunsConfig, complete_runs, print_json, run_path
from otb_analysis.commands.options import parsed
from otb_analysis.commands.screen import print_all, shown
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import counted, phase

if TYPE_CHECKING:
    from otb_analysis.diagnostics import Finding
    from otb_analysis.store import RunStore


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
    """Print which prompts, rollouts and tokens make up a step's ‖ḡ‖², each share split into signal and noise."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """Name or path of a run that measured the level attribution."""
    step: int | None = None
    """A step; by default the last attributed one before the reward fell or an alarm fired, or of all."""
    top: int = 12
    """Rows per table."""
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
        from otb_analysis.report.document import printed_parts
        from otb_analysis.report.records import diagnosis_record, following, triage_record
        from otb_analysis.store.layout import is_run

        record: object = None
        diagnoses: list[list[Table | str]] = []
        # A folder of runs may stand instead of runs.
        folder = Path(config.runs[0]) if len(config.runs) == 1 else None
        if folder and not is_run(run_path(config.root, config.runs[0])) and folder.is_dir() and not is_run(folder):
            rows = triaged(folder)
            diagnoses, record = [printed_parts(triage_parts(rows))], following("diagnose", triage_record(rows))
        else:
            paths = [run_path(config.root, name) for name in config.runs or complete_runs(config.root)]
            runs = counted(list(opened(paths).values()), "run")
            if config.json:
                of_runs = [diagnosis_record(run, config.step, config.top, config.curves) for run in runs]
                record = following("diagnose", of_runs)
            else:
                diagnoses = [printed_parts(diagnosis_parts(run)) for run in runs]
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
        from otb_analysis.report.document import printed_parts
        from otb_analysis.store import RunStore

        run = RunAnswers(RunStore(run_path(config.root, config.run)))
        parts = printed_parts(attribution_parts(run, config.step, config.top))
    print_all(parts)


ALARM, DEAD = 3, 4
"""Exit statuses: a detector fired; the run failed, was killed, fell silent or can no longer be read.

A complete run without alarm is 0, what cannot be watched at all 2."""

WEBHOOK_SECONDS = 10
"""How long a webhook may take to answer."""


@dataclass(frozen=True)
class WatchConfig:
    """Follow a run to its end or first alarm. Status 0: complete. 3: an alarm. 4: failed, killed or silent."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """Name or path of a run."""
    level: Literal["alarm", "watch"] = "alarm"
    """End at the first alarm, or already at the first watch."""
    every: float = 10.0
    """Seconds between two looks, at least 1."""
    silent: float = 60.0
    """Minutes without a new step after which the run counts as dead."""
    webhook: str = ""
    """An http or https address. It gets a POST of JSON, with a sentence in `text`, before status 3 or 4."""
    root: Path = Path("runs")
    """Directory that holds the runs."""


@dataclass(frozen=True)
class Ending:
    """Why a watch ended."""

    status: int  # Of the command
    event: str  # `complete`, `alarm`, `watch`, `failed`, `stopped`, `silent` or `broken`
    text: str
    step: int | None = None  # Where a detector fired, else the last complete step
    detectors: tuple[dict[str, object], ...] = ()  # Those that fired at that level


def watch_command(words: Sequence[str]) -> int:
    """Watch a run."""
    config = parsed(WatchConfig, "watch", words, WatchConfig())
    if not config.run:
        raise InputError("otb watch needs a run; pass its name, as in otb watch demo-otb-s0.")
    if not (config.every >= 1 and config.silent > 0):
        raise InputError(
            f"--every is {config.every:g} s and --silent {config.silent:g} min; look at most once a second, and wait "
            "longer than 0 minutes for a step."
        )
    if config.webhook:
        try:
            parts = urlsplit(config.webhook)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            good = False
        if not good:
            raise InputError("--webhook is no address of a web server; pass one that begins with http:// or https://.")
    from otb_analysis.store import RunStore

    store = RunStore(run_path(config.root, config.run))
    try:
        ending = watch(store, config)
    except StoreError as error:  # deleted or damaged while it was watched: whoever waits must hear of it
        ending = Ending(DEAD, "broken", f"{store.path.name} can no longer be read: {error}")
    print(ending.text, flush=True)
    if config.webhook and ending.status:
        body = {"text": ending.text, "run": store.path.name, "event": ending.event, "step": ending.step}
        if problem := sent(config.webhook, body | {"detectors": ending.detectors}):
            sys.stderr.write(f"otb: {problem}\n")
    return ending.status


def watch(store: "RunStore", config: WatchConfig) -> Ending:
    """Look at a run every so often until it ends or a detector fires, and return why.

    A run that grows is read again; what a detector said of earlier steps does not change, so nothing is told twice.
    """
    from otb_analysis.answers import RunAnswers
    from otb_analysis.answers.triage import finding_record

    name, told, seen, heard = store.path.name, set[str](), None, monotonic()
    while True:
        # The status first: steps that are written after it was read are found at the next look.
        status, reason = store.standing
        if (steps := store.complete_steps()) != seen:
            if seen is None:
                print(f"{name} is {status}, {f'step {steps[-1]}' if steps else 'no step yet'}.", flush=True)
            seen, heard = steps, monotonic()
            findings = [finding for finding in RunAnswers(store).findings if finding.fired] if steps else []
            steps_of = {f.detector: f.alarm_step if config.level == "alarm" else f.watch_step for f in findings}
            fired = [f for f in findings if steps_of[f.detector] is not None]
            if fired := sorted(fired, key=lambda f: int(steps_of[f.detector] or 0)):
                at, records = steps_of[fired[0].detector], tuple(finding_record(f) for f in fired)
                text = f"{name}: {config.level} at step {at}. {_in_words(fired[0])}"
                return Ending(ALARM, config.level, text, at, records)
            for finding in findings:
                if finding.detector not in told:
                    print(f"{name}: {_in_words(finding)}", flush=True)
                    told.add(finding.detector)
        last = steps[-1] if steps else None
        until = "no step" if last is None else f"step {last}"
        after = "before its first step" if last is None else f"after step {last}"
        if status == "complete":
            return Ending(0, status, f"{name} is complete, {until}; no {config.level} fired.", last)
        if status != "running":
            return Ending(DEAD, status, f"{name} {status} {after}{f': {reason}' if reason else '.'}", last)
        if monotonic() - heard > 60 * config.silent:
            which = "it has none yet" if last is None else f"step {last} is the last"
            text = f"{name} has written no step for {config.silent:g} minutes, {which}; look at it."
            return Ending(DEAD, "silent", text, last)
        sleep(config.every)


def _in_words(finding: "Finding") -> str:
    from otb_analysis.figures.alarms import TITLES

    return f"{TITLES[finding.detector]} ({finding.level}), first at step {finding.watch_step}: {finding.reason}"


def sent(address: str, body: Mapping[str, object]) -> str | None:
    """POST some JSON; return None, or why it was not taken. It names the host only, as addresses are secret."""
    request = urllib.request.Request(
        address, json.dumps(body, ensure_ascii=False).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        why = f"it answered {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        why = str(getattr(error, "reason", None) or error or type(error).__name__)
    host = urlsplit(address).hostname
    return f"the webhook at {host} did not take the message ({why}); check the address. The exit status says the same."
