"""The runs of a report: what is read of each, and whether they can stand in one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from otb_analysis.diagnostics import StepSeries
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore, step_series
from otb_analysis.store.reader import unlike_scopes


@dataclass(frozen=True)
class ReportedRun:
    """One run, opened; `series` holds the same numbers as the table `steps`."""

    name: str
    store: RunStore
    steps: pd.DataFrame
    series: StepSeries
    config: dict[str, Any]
    status: str

    @property
    def estimator(self) -> str:
        """Name of the training estimator; empty where the configuration has none."""
        return estimator_of(self.config)


def by_name(stores: Sequence[RunStore]) -> dict[str, RunStore]:
    """Return runs by what tells them apart: their names, after as many folders as repeated ones need; each run once."""
    folders, names = dict[Path, RunStore](), dict[str, RunStore]()
    for store in stores:
        folders.setdefault(store.path.resolve(), store)
    for folder, store in folders.items():
        others = [other.parts for other in folders if other != folder and other.name == folder.name]
        count = 1
        while any(other[-count:] == folder.parts[-count:] for other in others):
            count += 1
        names["/".join(folder.parts[-count:]) if count > 1 else store.path.name] = store
    return names


def config_of(store: RunStore) -> dict[str, Any]:
    """Return a run's configuration, nested; empty where it stored none."""
    config = store.info.get("config")
    return config if isinstance(config, dict) else {}


def estimator_of(config: Mapping[str, Any]) -> str:
    """Return the name of the training estimator; empty where the configuration has none."""
    estimator = config.get("estimator") or {}
    return str(estimator.get("name", "") if isinstance(estimator, dict) else estimator)


def open_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Open runs that can stand in one report.

    Raises:
        InputError: There is none, one has no step, or they disagree in scope or schema.
        StoreError: One cannot be read.
    """
    if not paths:
        raise InputError("there is no run to report on; pass names of runs, as in otb report demo-otb-s0.")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        raise InputError(f"runs are {', '.join(names)}; pass each name once.")
    runs = [_open(path) for path in paths]
    if apart := unlike_scopes({run.name: run.store for run in runs}):
        raise InputError(f"{apart}; report them apart, or train one again with the other's --measure.scope.")
    first = runs[0]
    for run in runs[1:]:
        versions = [one.store.info.get("schema_version") for one in (first, run)]
        if versions[0] != versions[1]:
            raise InputError(
                f"{first.name} was stored with schema {versions[0]} but {run.name} with {versions[1]}, so their "
                "columns may differ in meaning; report them apart, or train the older one again with otb train."
            )
    return runs


def _open(path: Path) -> ReportedRun:
    store = RunStore(path)
    steps = store.steps_df()
    if steps.empty:
        raise InputError(f"run {path.name} has no complete step yet; wait for one, or train it again.")
    status, reason = store.standing
    described = f"{status}: {reason}" if reason else status
    return ReportedRun(path.name, store, steps, step_series(steps), config_of(store), described)
