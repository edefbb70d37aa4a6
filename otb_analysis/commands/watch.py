"""`otb watch`: follow a run to its first alarm, or a run or a folder to the end, and tell scripts and people."""

import hashlib
import json
import logging
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from time import sleep, time
from typing import Annotated, Literal
from urllib.parse import urlsplit

import tyro

from otb_analysis.atomic import atomic_file
from otb_analysis.commands.inspect import run_path
from otb_analysis.commands.options import parsed
from otb_analysis.errors import InputError, StoreError
from otb_analysis.extras import require
from otb_analysis.phases import plural

ALARM, DEAD = 3, 4
"""Exit statuses: a detector fired; the run failed, was killed, fell silent or can no longer be read.

A complete run without alarm is 0, what cannot be watched at all 2."""

WEBHOOK_SECONDS = 10
"""How long a webhook may take to answer."""

TOLD = "told.json"
"""File in a run's directory with what was sent of it, so that a later watch does not send it again."""

TRIES = 3
"""How often a watch looks again before it ends, while a message was not taken."""

RECENT = 86_400
"""Seconds within which a run of a folder was written to, or nobody waits for what it says."""


@dataclass(frozen=True)
class WatchConfig:
    """Follow a run to its first alarm. Status 0: complete. 3: an alarm. 4: failed, killed or silent.

    With --url or --once, or for a folder, an alarm does not end it: each alarm is told once, and the end.
    """

    run: Annotated[str, tyro.conf.Positional] = ""
    """Name or path of a run, or a folder of runs, of which those count that were written to within a day."""
    level: Literal["alarm", "watch"] = "alarm"
    """What is told: alarms, or already a watch."""
    every: float = 10.0
    """Seconds between two looks, at least 1."""
    once: bool = False
    """Look once, as cron does; what an earlier look sent is not sent again."""
    silent: float = 60.0
    """Minutes without a new step after which the run counts as dead."""
    url: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Where a message goes, as apprise writes it: slack://…, discord://…, mailto://…, json://…; may be repeated."""
    webhook: str = ""
    """An http or https address. It gets a POST of JSON, with a sentence in `text`, of what has status 3 or 4."""
    root: Path = Path("runs")
    """Directory that holds the runs."""


@dataclass(frozen=True)
class Event:
    """What there is to tell of a run, once."""

    key: str  # No other event of the run has it
    text: str
    event: str = ""  # `alarm`, `watch`, `complete`, `failed`, `stopped`, `silent` or `broken`; empty: only printed
    status: int = 0  # Of the command
    step: int | None = None  # Where a detector fired, else the last complete step
    detectors: tuple[dict[str, object], ...] = ()  # All that fired so far at that level


def watch_command(words: Sequence[str]) -> int:
    """Watch a run or a folder."""
    config = parsed(WatchConfig, "watch", words, WatchConfig())
    if not config.run:
        raise InputError("otb watch needs a run; pass its name, as in otb watch demo-otb-s0.")
    if not (config.every >= 1 and config.silent > 0):
        raise InputError(
            f"--every is {config.every:g} s and --silent {config.silent:g} min; look at most once a second, and wait "
            "longer than 0 minutes for a step."
        )
    recipients = [*map(Recipient, config.url), *([Recipient(config.webhook, True)] if config.webhook else [])]
    from otb_analysis.store.layout import is_run, list_runs

    path = run_path(config.root, config.run)
    folder = Path(config.run) if not is_run(path) and Path(config.run).is_dir() else None
    goes_on, watched, tries = bool(config.url or config.once or folder), dict[Path, Watched](), TRIES
    if folder is not None and not config.once:
        count = plural(len(list(_recent(folder, watched))), "run")
        print(f"{folder} is followed: {count} now, and those that begin.", flush=True)
    elif folder is not None and not list_runs(folder):
        raise InputError(f"{folder} holds no run to look at; pass a folder of runs, as in otb watch runs --once.")
    while True:
        for place in [path] if folder is None else _recent(folder, watched):
            if place not in watched:
                watched[place] = Watched(place, config, recipients)
            for event in watched[place].look():
                if event.status and not goes_on:
                    return event.status
        one = watched.get(path)
        if config.once or (one is not None and one.ended and not (one.owed and tries)):
            if one is not None and one.owed and not config.once:
                print("otb: the watch ends; start otb watch again to send what was not taken.", file=sys.stderr)
            return max((run.status for run in watched.values()), default=0)
        tries -= one is not None and one.ended
        sleep(config.every)


def _recent(folder: Path, watched: Mapping[Path, object]) -> Iterator[Path]:
    """Yield the runs of a folder that are watched already, or were before, or were written to lately."""
    from otb_analysis.store import RunStore
    from otb_analysis.store.layout import list_runs

    yield from watched
    for path in list_runs(folder):
        try:
            heard = RunStore(path).last_heard.timestamp()
        except StoreError:  # of a run that was never seen whole nobody waits for news
            continue
        if path not in watched and (time() - heard < RECENT or (path / TOLD).exists()):
            yield path


class Recipient:
    """Who hears of events: a webhook, or a service that apprise knows. Its address is secret."""

    def __init__(self, address: str, webhook: bool = False) -> None:
        self.address, self.webhook = address, webhook
        scheme, _, rest = address.partition(":")
        self.name = f"{scheme}:…" if scheme.isalnum() and rest.startswith("//") else "the address"
        self.digest = hashlib.sha256(address.encode()).hexdigest()[:12]
        if webhook:
            try:
                parts = urlsplit(address)
                good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:
                good = False
            if not good:
                raise InputError(
                    "--webhook is no address of a web server; pass one that begins with http:// or https://."
                )
            return
        require("apprise", "--url")
        self.apprise = import_module("apprise")
        self.service = self.apprise.Apprise()
        with self.apprise.LogCapture():  # its words would hold the address
            if not self.service.add(address):
                raise InputError(
                    f"--url: apprise cannot use {self.name}; pass one such as slack://…, discord://…, mailto://… "
                    "or json://…."
                )

    def send(self, event: Event, run: str) -> str | None:
        """Send an event; return None, or in a sentence why it was not taken."""
        if self.webhook:
            body = {"text": event.text, "run": run, "event": event.event, "step": event.step}
            return sent(self.address, body | {"detectors": event.detectors})
        kind = {0: "success", ALARM: "warning", DEAD: "failure"}[event.status]
        with self.apprise.LogCapture(level=logging.WARNING, fmt="%(message)s") as lines:
            if self.service.notify(title=f"{run}: {event.event}", body=event.text, notify_type=kind):
                return None
            why = " ".join(lines.getvalue().split("\n")[0].split()).rstrip(".") or "no reason given"
        return f"{self.name} did not take the message ({why}); a later look sends it again."


class Watched:
    """A run with what was said of it: each event is printed once here, and sent to each recipient once ever."""

    def __init__(self, path: Path, config: WatchConfig, recipients: Sequence[Recipient]) -> None:
        from otb_analysis.store import RunStore

        self.store, self.config, self.recipients = RunStore(path), config, recipients
        self.status, self.ended, self.owed, self.steps, self.findings = 0, False, False, None, []
        self.printed = set[str]()
        try:
            self.told = set(map(str, json.loads((path / TOLD).read_bytes())))
        except (OSError, ValueError, TypeError):
            self.told = set[str]()

    def look(self) -> Iterator[Event]:
        """Yield all there is to tell of the run now, each event once it was printed and sent."""
        try:
            events = self._events()
        except StoreError as error:  # deleted or damaged while it was watched: whoever waits must hear of it
            name = self.store.path.name
            events = [Event("broken", f"{name} can no longer be read: {error}", "broken", DEAD)]
        self.owed = False
        self.ended = any(one.event not in ("", "watch", "alarm") for one in events)
        for event in events:
            self.status = max(self.status, event.status)
            self.say(event.key, event.text)
            for one in self.recipients:
                mark = f"{event.key} to {one.digest}"
                if mark in self.told or not (event.status if one.webhook else event.event):
                    continue
                if problem := one.send(event, self.store.path.name):
                    self.owed = True
                    self.say(mark, f"otb: {problem}", error=True)
                else:
                    self.told.add(mark)
                    self._keep_told()
            yield event

    def say(self, key: str, text: str, error: bool = False) -> None:
        """Print a text, the first time that it comes with this key."""
        if key not in self.printed:
            self.printed.add(key)
            print(text, file=sys.stderr if error else sys.stdout, flush=True)

    def _keep_told(self) -> None:
        path = self.store.path / TOLD
        try:
            if path.parent.is_dir():  # else the run was deleted
                with atomic_file(path) as file:
                    file.write(json.dumps(sorted(self.told), indent=1).encode())
        except OSError as error:
            why = f"otb: {path} cannot be written ({error.strerror}); a later watch sends the same messages again."
            self.say(TOLD, why, error=True)

    def _events(self) -> list[Event]:
        """Return findings, by the steps at which they fired, and how the run ended if it did.

        Raises:
            StoreError: The run cannot be read.
        """
        from otb_analysis.answers import RunAnswers
        from otb_analysis.answers.triage import finding_record
        from otb_analysis.figures.alarms import TITLES

        store, level, name, events = self.store, self.config.level, self.store.path.name, list[Event]()
        # The status first: steps that are written after it was read are found at the next look.
        (status, reason), heard, steps = store.live_status, store.last_heard.timestamp(), store.complete_steps()
        last = steps[-1] if steps else None
        if self.steps is None:
            events.append(Event("begun", f"{name} is {status}, {'no step yet' if last is None else f'step {last}'}."))
        if steps != self.steps:  # what a detector said of earlier steps does not change
            self.findings = [one for one in RunAnswers(store).findings if one.fired] if steps else []
            self.steps = steps
        # What fires at once as an alarm is no watch before it; without an alarm its step is None.
        fired = [
            (step, kind, one)
            for one in self.findings
            for step, kind in {one.watch_step: "watch", one.alarm_step: "alarm"}.items()
            if kind == level or (kind == "alarm" and step is not None)
        ]
        fired.sort(key=lambda row: (row[0] is None, row[0] or 0))
        at_level = [one for one in self.findings if level == "watch" or one.alarm_step is not None]
        records = tuple(map(finding_record, at_level))
        for step, kind, one in fired:
            text = f"{TITLES[one.detector]} ({one.level}), first at step {one.watch_step}: {one.reason}"
            if step is None:
                events.append(Event(f"finding {one.detector}", f"{name}: {text}"))
                continue
            text = f"{name}: {kind} at step {step}. {text}"
            events.append(Event(f"{kind} {one.detector} {step}", text, kind, ALARM, step, records))
        until = "no step" if last is None else f"step {last}"
        after = "before its first step" if last is None else f"after step {last}"
        ended = f"{status} {last} {store.info.get('updated')}"  # a run that was resumed may end there again
        if status == "complete":
            outcome = f"{plural(len(records), 'detector')} fired" if records else f"no {level} fired"
            events.append(Event(ended, f"{name} is complete, {until}; {outcome}.", status, 0, last))
        elif status != "running":
            text = f"{name} {status} {after}{f': {reason}' if reason else '.'}"
            events.append(Event(ended, text, status, DEAD, last))
        elif time() - heard > 60 * self.config.silent:
            which = "it has none yet" if last is None else f"step {last} is the last"
            text = f"{name} has written no step for {self.config.silent:g} minutes, {which}; look at it."
            events.append(Event(f"silent {last}", text, "silent", DEAD, last))
        return events


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
