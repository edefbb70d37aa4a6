"""Several runs: opened by names that tell them apart, pooled where they can be compared, listed worst first."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from otb_analysis.answers.measured import NOT_MEASURED, MeasuredSteps
from otb_analysis.answers.run import RunAnswers
from otb_analysis.answers.triage import Judged, Triage, triage_row, worst_first
from otb_analysis.errors import InputError
from otb_analysis.estimators import proved_in_all
from otb_analysis.statistics import REFERENCE
from otb_analysis.store import RunStore, runs_df
from otb_analysis.store.runs import can_be_opened, estimator_names
from otb_analysis.types import Gram, Proved


def by_name(stores: Sequence[RunStore]) -> dict[str, RunAnswers]:
    """Return runs by what tells them apart: their names, after as many folders as repeated ones need; each run once."""
    folders, names = dict[Path, RunStore](), dict[str, RunAnswers]()
    for store in stores:
        folders.setdefault(store.path.resolve(), store)
    for folder, store in folders.items():
        others = [other.parts for other in folders if other != folder and other.name == folder.name]
        count = 1
        while any(other[-count:] == folder.parts[-count:] for other in others):
            count += 1
        answers = RunAnswers(store)
        answers.name = "/".join(folder.parts[-count:]) if count > 1 else store.path.name
        names[answers.name] = answers
    return names


def opened(paths: Sequence[Path]) -> dict[str, RunAnswers]:
    """Open runs that are compared, by what tells them apart.

    Raises:
        InputError: A run does not exist or has no complete step.
        StoreError: A run cannot be read.
    """
    runs = by_name([RunStore(path) for path in paths])
    for run in runs.values():
        run.steps  # noqa: B018  # says which run has no step, before anything is computed
    return runs


def reportable(paths: Sequence[Path]) -> dict[str, RunAnswers]:
    """Open runs that can stand in one report.

    Raises:
        InputError: There is none, one has no step, or they disagree in scope.
        StoreError: One cannot be read.
    """
    if not paths:
        raise InputError("there is no run to report on; pass names of runs, as in otb report demo-otb-s0.")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        raise InputError(f"runs are {', '.join(names)}; pass each name once.")
    runs = opened(paths)
    if apart := unlike_scopes(runs):
        raise InputError(f"{apart}; report them apart, or train one again with the other's --measure.scope.")
    return runs


def designs(runs: Mapping[str, RunAnswers]) -> dict[str, MeasuredSteps]:
    """Return the measured steps of some runs, pooled where they can be compared: of one task, group size and scope.

    Bias and variance depend on N, and tasks and scopes do not share a gradient, so steps that differ in any of these
    are never averaged. Steps of different policies on one task are: the figures then describe an average policy of
    these runs. Proved is what is proved in all of them.
    """
    parts: dict[str, list[RunAnswers]] = {}
    for run in runs.values():
        if run.grams:
            parts.setdefault(run.design, []).append(run)
    pooled = dict[str, MeasuredSteps]()
    for name, some in parts.items():
        of_runs = [run.measured for run in some if run.measured]
        pooled[name] = of_runs[0]
        if len(some) > 1:
            known, grams = in_common(some)
            reserved = [
                f"{run.name}: {line}" for run, of in zip(some, of_runs, strict=True) for line in of.reservations
            ]
            pooled[name] = replace(
                of_runs[0], known=known,
                grams=tuple(gram for of_run in grams for gram in of_run.values()),
                trained=tuple(dict.fromkeys(label for run in some for label in run.trained)),
                alarm=" ".join(f"{run.name}: {run.alarm}" for run in some if run.alarm),
                reservations=tuple(reserved), steps=(), sized=str, _decided={},
            )  # fmt: skip
    return pooled


def in_common(runs: Sequence[RunAnswers]) -> tuple[Proved, list[dict[int, Gram]]]:
    """Return what is proved in all of some runs, and each one's matrices for it: reduced anew where its own differ."""
    labels = [{label for gram in run.grams.values() for label in gram.labels} for run in runs]
    known = proved_in_all([(of, run.believed) for of, run in zip(labels, runs, strict=True)])
    grams = list[dict[int, Gram]]()
    for run in runs:
        as_needed = all(gram.stands(known.truth) for gram in run.grams.values())
        grams.append(run.grams if as_needed else run.store.reduced_grams((REFERENCE, known.truth)))
    return known, grams


def unlike_scopes(runs: Mapping[str, RunAnswers]) -> str:
    """Return which two runs measured gradients of other parameters, for a remedy to follow; empty where none did."""
    for name, run in runs.items():
        first, one = next(iter(runs.items()))
        if run.scope != one.scope:
            return (
                f"{first} measured gradients of scope {one.scope!r} but {name} of {run.scope!r}, which do not compare"
            )
    return ""


def compare(*paths: str | Path) -> MeasuredSteps:
    """Return what the measured steps of one run say of its baselines, or of several runs that can be pooled.

    `.lines` are the sentences, `.decision` the claims, `.to_dataframe()` every estimator with its intervals.

    Raises:
        InputError: A run does not exist, none measured its estimators, or the runs cannot be pooled.
        StoreError: A run cannot be read.
    """
    by_design = designs(opened([Path(path) for path in paths]))
    if not by_design:
        raise InputError(NOT_MEASURED)
    if len(by_design) > 1:
        raise InputError(f"these runs cannot be pooled: {'; '.join(by_design)}; compare each design alone.")
    return next(iter(by_design.values()))


def triaged(root: Path) -> list[Triage]:
    """Return every run of a folder as the page Triage lists them, the worst first.

    Raises:
        StoreError: The folder cannot be listed.
    """
    table: Any = runs_df(root)
    names, readable = estimator_names(table), can_be_opened(table)

    def judged(run: str) -> Judged:
        """Return what is read of a run."""
        return RunAnswers(RunStore(root / run)).judged

    return worst_first([
        triage_row(row, names.get(run, "") if can else "", partial(judged, run) if can else None)
        for run, can, (_, row) in zip(map(str, table["run"]), readable, table.iterrows(), strict=True)
    ])  # fmt: skip
