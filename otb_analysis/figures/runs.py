"""The run list in numbers: each run's headline, and what two runs' configurations do not share."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from otb_analysis.config import TrainConfig
from otb_analysis.phases import plural

WINDOW = 20
"""Last recorded steps that a headline takes gradient norm and clipping from."""

NOT_RECORDED = "–"
"""Shown where a run's configuration does not have a setting."""

FIRST = (
    "estimator.name", "estimator", "optimize.learning_rate", "objective.staleness", "objective", "optimize",
    "sample.group_size", "sample.prompts", "sample", "task", "model", "lora", "critic",
)  # fmt: skip
"""Settings that explain how training went, what matters most first; others follow, then the seed."""

LAST = (
    "seed", "warm_start", "evaluate", "measure", "precision", "device", "checkpoint", "processes", "trackers",
    "if_exists", "root", "run",
)  # fmt: skip
"""Settings that do not: how a run was watched, and where it is kept."""

KEPT = ("trackers", "if_exists", "root", "run")
"""Of them those that say only where a run is kept."""


@dataclass(frozen=True)
class Headline:
    """One run in a few numbers; None where nothing was recorded."""

    run: str
    estimator: str
    steps: int
    reward: float | None  # Mean reward over the last tenth of the steps (rounded down, at least one)
    reward_gain: float | None
    heldout: float | None
    heldout_gain: float | None
    grad_norm: float | None  # Median ‖ḡ‖ over the last `WINDOW` steps
    clipped: float | None


def headline_info(run: str, estimator: str, steps: pd.DataFrame) -> Headline:
    """Sum up one run."""
    names = ["reward_mean", "heldout_reward", "clipped", "grad_norm"]
    table: Any = steps.sort_values("step").reindex(columns=names)
    reward, heldout, clipped, norm = (table[name].dropna().astype(float) for name in names)
    tenth = max(1, len(reward) // 10)
    first, last = float(reward.head(tenth).mean()), float(reward.tail(tenth).mean())  # Python's ∞ − ∞ is a silent NaN
    return Headline(
        run=run,
        estimator=estimator,
        steps=len(table),
        reward=_value(last),
        reward_gain=_value(last - first) if len(reward) > 1 else None,
        heldout=_value(heldout.iloc[-1]) if len(heldout) else None,
        heldout_gain=_value(heldout.iloc[-1] - heldout.iloc[0]) if len(heldout) > 1 else None,
        grad_norm=_value(norm.tail(WINDOW).median()),
        clipped=_value(clipped.tail(WINDOW).mean()),
    )


def _value(number: float | None) -> float | None:
    return None if number is None or number != number else float(number)


def flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a nested configuration with dotted names: {"task": {"terms": 3}} → {"task.terms": 3}."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def importance(name: str) -> tuple[int, str]:
    """Return a key that sorts settings, those that explain most first."""
    names = (*FIRST, None, *LAST)
    sections = (i for i, one in enumerate(names) if one is not None and (name == one or name.startswith(f"{one}.")))
    return next(sections, names.index(None)), name


def housekeeping(name: str) -> bool:
    """Tell whether a setting says only where a run is kept."""
    return name.split(".")[0] in KEPT


@dataclass(frozen=True)
class Differences:
    """In which settings some runs differ."""

    # One row per setting, what matters first, one column per run, all as text; a dash where a run did not record it.
    table: pd.DataFrame
    left_out: int  # Number of settings that some runs did not record and the others have at their defaults

    @property
    def note(self) -> str:
        """What the table is silent about, in one sentence; empty where there is nothing."""
        if not self.left_out:
            return ""
        subject, objects = ("1 setting is", "it, and in the others it has its")
        if self.left_out > 1:
            subject, objects = f"{self.left_out} settings are", "them, and in the others they have their"
        return f"{subject} left out: some of these runs did not record {objects} default."


def config_differences(configs: Mapping[str, Mapping[str, object]]) -> Differences:
    """Return the settings in which some runs differ, without those that only newer versions know and leave alone.

    The setting `run` is the name of the run and never listed. One that some runs did not record is listed where another
    run has changed it, or where no default of it is known.
    """
    flat = {run: flatten(config) for run, config in configs.items()}
    names = sorted({name for config in flat.values() for name in config if name != "run"}, key=importance)
    rows = {name: {run: str(config.get(name, NOT_RECORDED)) for run, config in flat.items()} for name in names}
    differing = {name: row for name, row in rows.items() if len(set(row.values())) > 1}
    known = {name: str(value) for name, value in flatten(_defaults()).items()}
    shown = {name: row for name, row in differing.items() if set(row.values()) != {NOT_RECORDED, known.get(name)}}
    table = pd.DataFrame.from_dict(shown, orient="index", columns=list(flat)).rename_axis("setting").reset_index()
    return Differences(table, len(differing) - len(shown))


def grouped(differences: Differences, setting: str) -> dict[str, list[str]]:
    """Return the runs of each value of a setting, by a name that says how many they are."""
    values = differences.table.set_index("setting").loc[setting]
    groups: dict[str, list[str]] = {}
    for run, value in values.items():
        groups.setdefault(str(value), []).append(str(run))
    return {f"{setting} = {value} ({plural(len(runs), 'run')})": runs for value, runs in groups.items()}


def _defaults() -> dict[str, object]:
    """The default configuration as a run stores it: JSON has no tuples and no paths."""
    return json.loads(json.dumps(asdict(TrainConfig()), default=str))
