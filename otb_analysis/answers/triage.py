"""The run list as one looks at it when something went wrong: the worst run first, each with one sentence."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import DETECTORS, Finding, fall, single_step_outliers
from otb_analysis.errors import STOPS
from otb_analysis.figures.alarms import COLLAPSED, RATES, SIGNS, TITLES, fired_first
from otb_analysis.figures.curves import NAMES
from otb_analysis.figures.styles import number
from otb_analysis.store import step_series
from otb_analysis.types import Float32

STATES = ("collapsed", "failed", "alarm", "watch", "calm", "too short", "not judged", "broken")
"""Worst first; a failed run ended with an error, a broken one cannot be read, so it says nothing about training.

Too short is a run that more steps would let a detector judge; in one not judged nothing was recorded that any needs."""

IN_TROUBLE = STATES[:4]

UNFIRED = {"too short": "too few steps to judge", "not judged": "no detector could judge this run"}
"""What is said of a run in which nothing fired, by its state; of a calm one that nothing did."""

ANOTHER_SAMPLER = "another sampler drew the tokens"
"""What is said first of a run whose sampling check sounds an alarm."""

WINDOW = 20
"""Last recorded steps that a run's gradient norm and clipping are taken from."""

POINTS = 40
"""Most points of a sparkline."""

NOW = {"reward_fall", "vanished_gradient", "not_finite"}
"""Detectors whose alarm at the last step means that the run is over."""

AT_ONCE = {"sampling_certificate", "tail_index", "not_finite"}
"""Detectors that need one step: what they say is right does not make a run of two steps a calm one."""


Judged = tuple[pd.DataFrame, Sequence[Finding], str]
"""Steps of a run, what every detector says of them, and the alarm of its sampling check, empty where there is none."""


@dataclass(frozen=True)
class Triage:
    """One run in a row."""

    run: str
    estimator: str
    status: str  # As in `runs_df`: running, complete, stopped, failed, broken
    state: str  # One of `STATES`
    sentence: str  # What happened, in its order
    first_warning: int | None  # Step at which a detector first spoke; what it tells began earlier
    reward_fell: int | None  # First step at which it was halfway down, seen afterwards; None where no fall is known
    steps: int
    reward: Float32  # [≤ `POINTS`] `reward_mean`, thinned by means of neighbouring steps
    reward_first: float | None  # Mean over the first tenth of the steps
    reward_last: float | None
    heldout: float | None  # The last evaluation
    age: float | None = None  # Seconds since the last step was written


def triage(run: str, estimator: str, status: str, judged: Judged, reason: str = "") -> Triage:
    """Sum up one run; `reason` says why it failed or is broken."""
    steps, findings, alarm = judged
    told = headline(steps)
    table: Any = steps.reindex(columns=["step", "reward_mean"]).sort_values("step")
    reward = thinned(table["reward_mean"].dropna().to_numpy(np.float64), POINTS)
    state = "broken" if status == "broken" else state_of(findings, status)
    happened = reason if state == "broken" else sentence(findings, state, reason if status == "failed" else "")
    if alarm:
        state, happened = min(state, "alarm", key=STATES.index), f"{ANOTHER_SAMPLER}; {happened}"
    if len(steps) and (single := single_step_outliers(step_series(steps))):
        one, more = single[0], f" ({len(single)} such steps)" if len(single) > 1 else ""
        happened += f"; {NAMES[one.column]} {number(one.multiple)} × the usual at step {one.step} alone{more}"
    first = min((f.watch_step for f in findings if f.watch_step is not None), default=None)
    fell = next((fall(f)[0] for f in findings if f.detector == "reward_fall" and f.fired), None)
    return Triage(
        run, estimator, status, state, happened, first, fell, len(table), reward, told.reward_first, told.reward,
        told.heldout,
    )  # fmt: skip


@dataclass(frozen=True)
class Headline:
    """One run in a few numbers; None where nothing was recorded."""

    reward_first: float | None  # Mean reward over the first tenth of the steps (rounded down, at least one)
    reward: float | None  # Mean reward over the last tenth of the steps
    reward_gain: float | None
    heldout: float | None  # The last evaluation
    heldout_gain: float | None
    grad_norm: float | None  # Median ‖ḡ‖ over the last `WINDOW` steps
    clipped: float | None


def silence() -> str:
    """Return how far it can be trusted that nothing fired: what the best detector called of the runs of study 05."""
    known = (one for one in RATES.values() if not one.stale)
    best = max(known, key=lambda one: one.at_all or 0)
    late = (best.at_all or 0) - (best.in_time or 0)
    return (
        f"Of {COLLAPSED} runs of study 05 that collapsed, the best detector called {best.in_time} in time, {late} late."
    )


def headline(steps: pd.DataFrame) -> Headline:
    """Sum up a run's steps table."""
    names = ["reward_mean", "heldout_reward", "clipped", "grad_norm"]
    table: Any = steps.reindex(columns=["step", *names]).sort_values("step")
    reward, heldout, clipped, norm = (table[name].dropna().astype(float) for name in names)
    tenth = max(1, len(reward) // 10)
    # As Python's numbers: ∞ − ∞ is then a silent NaN.
    first, last = float(reward.head(tenth).mean()), float(reward.tail(tenth).mean())
    start, end = float(heldout.head(1).mean()), float(heldout.tail(1).mean())
    numbers = {
        "reward_first": first, "reward": last, "reward_gain": last - first if len(reward) > 1 else math.nan,
        "heldout": end, "heldout_gain": end - start if len(heldout) > 1 else math.nan,
        "grad_norm": float(norm.tail(WINDOW).median()), "clipped": float(clipped.tail(WINDOW).mean()),
    }  # fmt: skip
    return Headline(**{name: None if math.isnan(x) else x for name, x in numbers.items()})


def triage_row(row: Any, estimator: str, judge: Callable[[], Judged] | None) -> Triage:
    """Sum up one row of `runs_df`.

    `judge` reads the run; it is None where that cannot be done, and one of `errors.STOPS` that it raises makes the run
    a broken one.
    """
    age = (pd.Timestamp.now("UTC") - row["updated"]).total_seconds() if pd.notna(row["updated"]) else None
    status, reason = str(row["status"]), str(row["reason"] or "")
    try:
        told = judge() if judge is not None else (pd.DataFrame(), [], "")
    except STOPS as error:
        told, status, reason = (pd.DataFrame(), [], ""), "broken", str(error)
    return replace(triage(str(row["run"]), estimator, status, told, reason), age=age)


def state_of(findings: Sequence[Finding], status: str = "") -> str:
    """Return which of `STATES` a run is in, from what the detectors say, and from its status where that is known."""
    levels = {finding.level for finding in findings}
    if any(_still_alarmed(finding) for finding in findings):
        return "collapsed"
    if status == "failed":
        return "failed"
    for level in ("alarm", "watch"):
        if level in levels:
            return level
    if any(finding.level == "ok" and finding.detector not in AT_ONCE for finding in findings):
        return "calm"
    return "too short" if "too short" in levels or not findings else "not judged"


def _still_alarmed(finding: Finding) -> bool:
    """True where a detector of `NOW` still raises an alarm at the last step."""
    if finding.detector not in NOW or not finding.evidence:
        return False
    one = finding.evidence[0]
    return bool(one.score.size and one.score[-1] >= one.alarm)


def sentence(findings: Sequence[Finding], state: str, error: str = "") -> str:
    """Say in one line what happened to a run, the error it ended with, and when trouble was first seen."""
    named = {finding.detector: finding for finding in findings}
    parts = [error.rstrip(".")] if error else []
    dropped, gone = named.get("reward_fall"), named.get("vanished_gradient")
    if dropped is not None and dropped.fired:
        step, before, after = fall(dropped)
        parts.append(f"reward {number(before)} → {number(after)}, halfway down at step {step}")
    if gone is not None and _still_alarmed(gone):
        norm = gone.evidence[0].value
        live = np.flatnonzero(norm > 0)
        since = gone.evidence[0].step[live[-1] + 1 if live.size else 0]
        parts.append(f"no gradient since step {since}")
    lost = named.get("not_finite")
    if lost is not None and lost.fired:
        parts.append(lost.reason.partition(".")[0])
    for first in fired_first(findings)[0][:1]:
        parts.append(f"a detector first spoke at step {first.watch_step} ({TITLES[first.detector].lower()})")
        if dropped is not None and dropped.level == "ok":
            parts.append("no fall of the reward is shown")
    if parts:
        return "; ".join(parts)
    if state == "failed":
        return "it ended with an error that it did not name"
    return UNFIRED.get(state, "nothing fired")


def worst_first(rows: Sequence[Triage]) -> list[Triage]:
    """Return the rows with the worst state first; running runs before others, the youngest first among equals."""
    by_age = sorted(rows, key=lambda row: np.inf if row.age is None else row.age)
    return sorted(by_age, key=lambda row: (STATES.index(row.state), row.status != "running"))


def verdict(rows: Sequence[Triage]) -> str:
    """Return what stands above the list: the worst run, or that nothing is wrong, and what could not be judged."""
    if not rows:
        return "There are no runs."
    worst = worst_first(rows)[0]
    counts = Counter(row.state for row in rows)
    short, unjudged = counts["too short"], counts["not judged"]
    broken = f" {counts['broken']} of {len(rows)} runs cannot be read." if counts["broken"] else ""
    if worst.state in IN_TROUBLE:
        others = ", ".join(f"{counts[state]} {state}" for state in IN_TROUBLE if counts[state])
        tail = f" ({others} of {len(rows)} runs)" if len(rows) > 1 else ""
        return f"{worst.run}: {worst.sentence}{tail}.{broken}"
    if worst.state == "broken":
        return "No run can be read."
    if worst.state != "calm":
        few = "No run has enough steps to judge; the first alarms need 5, others up to 40."
        return ("No detector could judge a run." if unjudged else few) + broken
    parts = ["No alarm."]
    if short:
        parts.append(f"{short} of {len(rows)} runs {'is' if short == 1 else 'are'} too short to judge.")
    if unjudged:
        parts.append(f"No detector could judge {unjudged} of {len(rows)} runs.")
    return " ".join(parts) + broken


def thinned(values: np.ndarray, most: int) -> Float32:
    """Return at most so many means of neighbouring values, in order; few values as they are."""
    parts = np.array_split(np.asarray(values, np.float32), min(most, max(1, len(values))))
    return np.array([part.mean() for part in parts if part.size], np.float32)


def triage_table(rows: Sequence[Triage]) -> pd.DataFrame:
    """Return the rows as a table, the worst first."""
    return pd.DataFrame(
        [
            {
                "run": row.run, "state": row.state, "status": row.status, "estimator": row.estimator,
                "what happened": row.sentence, "reward fell": row.reward_fell,
                "detector spoke": row.first_warning, "steps": row.steps,
                "reward": row.reward.tolist(), "first": row.reward_first, "last": row.reward_last,
                "held-out": row.heldout, "age": duration_words(row.age),
            }
            for row in worst_first(rows)
        ]
    )  # fmt: skip


def duration_words(seconds: float | None) -> str:
    """Return a time as one reads it in a list: 12 s, 5 min, 3 h, 2 days; a dash for none."""
    if seconds is None or not np.isfinite(seconds):
        return "–"
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size or (unit != "days" and seconds >= size):
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def finding_record(finding: Finding) -> dict[str, object]:
    """Return a finding as JSON has it."""
    return {
        "detector": finding.detector,
        "level": finding.level,
        "first_watch": finding.watch_step,
        "first_alarm": finding.alarm_step,
        "why": finding.reason,
    }


def alarms_line(findings: Mapping[str, Sequence[Finding]]) -> str:
    """Return how many detectors of each level there are, in words."""
    levels = [finding.level for several in findings.values() for finding in several]
    counts = [f"{levels.count(level)} {level}" for level in SIGNS if level in levels or level != "too short"]
    return f"{len(DETECTORS)} detectors on {len(findings)} run{'s' * (len(findings) != 1)}: {', '.join(counts)}."
