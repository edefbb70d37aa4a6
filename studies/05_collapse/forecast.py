"""Which detectors tell runs that are about to collapse from calm ones, and how the signals they read go."""

from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.diagnostics import DETECTORS
from studies.lib import Rows, column, distinct, mean, select

from .study import ARMS

CONDITIONS = ("sampling_certificate", "ratio_tails")
"""Call old rollouts themselves, which every staged run has and no calm one: no forecast."""
MISSING = "not measured"
"""Level of a detector whose quantity the run did not record: neither blind nor tested."""
LEVEL = 0.05
ALL_SIGNS = 100_000
"""More than the 2^16 of sixteen seeds, so that every combination is tried."""
SIGNALS = ("entropy", "grad_norm", "length")
WHEN = ("first", "before", "last")


def numbers(runs: Rows, detectors: Rows, signals: Rows) -> dict[str, Any]:
    """Return what each detector called, which forecast is shown, and how the signals went."""
    broken, quiet = collapsed(runs), still_calm(runs)
    pending = [row for row in runs if not ARMS[row["arm"]].calm and row["collapse"] is None]
    arms = distinct(signals, "arm")
    # no test of the detectors that call the staged conditions themselves
    names = [name for name in measured_detectors(detectors) if name not in CONDITIONS]
    p_values = dict(zip(names, holm([p_value(seed_differences(runs, detectors, n)) for n in names]), strict=True))
    told = {
        name: {
            "leads": sorted(leads_of(runs, detectors, name)),
            "broken": number_called(broken, detectors, name),
            "pending": number_called(pending, detectors, name),
            "quiet": number_called(quiet, detectors, name),
            "p": p_values.get(name),
        }
        for name in measured_detectors(detectors)
    }
    ends = [row for row in signals if any((r["arm"], r["seed"]) == (row["arm"], row["seed"]) for r in broken)]
    return {
        "told": told,
        "all_detectors": list(DETECTORS),
        "p_values": p_values,
        "forecast_shown": [name for name, p in p_values.items() if p <= LEVEL],
        "blind": [name for name in p_values if not told[name]["broken"]],
        "broken": broken,
        "pending": pending,
        "quiet": quiet,
        "calm_runs": [row for row in runs if ARMS[row["arm"]].calm],
        "signal_path": {name: {a: signal_path(select(signals, arm=a), name) for a in arms} for name in SIGNALS},
        "signal_change": {name: signal_change(ends, name) for name in SIGNALS} if ends else {},
    }  # fmt: skip


def collapsed(runs: Rows) -> Rows:
    """Return the staged runs that collapsed."""
    return [row for row in runs if not ARMS[row["arm"]].calm and row["collapse"] is not None]


def still_calm(runs: Rows) -> Rows:
    """Return the calm arm's runs that did not collapse by the same rule."""
    return [row for row in runs if ARMS[row["arm"]].calm and row["collapse"] is None]


def first_calls(runs: Rows, detectors: Rows, name: str) -> dict[tuple[str, int], int | None]:
    """Return the step at which a detector first called each of some runs, None where it never did."""
    watch = {(row["arm"], row["seed"]): row["watch"] for row in select(detectors, detector=name)}
    return {(row["arm"], row["seed"]): watch[row["arm"], row["seed"]] for row in runs}


def leads_of(runs: Rows, detectors: Rows, name: str) -> list[int]:
    """Return a detector's lead in every run that collapsed and that it called at or before the collapse."""
    broken = collapsed(runs)
    first = first_calls(broken, detectors, name)
    leads = [(row["collapse"], first[row["arm"], row["seed"]]) for row in broken]
    return [end - at for end, at in leads if at is not None and at <= end]


def number_called(runs: Rows, detectors: Rows, name: str) -> int:
    """Return how many of some runs a detector called at any time."""
    return sum(at is not None for at in first_calls(runs, detectors, name).values())


def seed_differences(runs: Rows, detectors: Rows, name: str) -> list[float]:
    """Return, seed by seed, the share of its collapsed runs called in time minus the share of its calm runs called."""
    differences = []
    for seed in distinct(runs, "seed"):
        same = select(runs, seed=seed)
        broken, quiet = collapsed(same), still_calm(same)
        if broken and quiet:
            in_time = len(leads_of(same, detectors, name)) / len(broken)
            differences.append(in_time - number_called(quiet, detectors, name) / len(quiet))
    return differences


def p_value(differences: list[float]) -> float:
    """Return the one-sided p-value of a mean above 0: every sign of every seed's difference is equally likely."""
    if len(differences) < 2 or not np.any(differences):
        return 1.0
    found: Any = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", alternative="greater", n_resamples=ALL_SIGNS
    )
    return float(found.pvalue)


def holm(p_values: list[float]) -> list[float]:
    """Return p-values adjusted by Holm: the k-th smallest of m times m − k + 1, and none below a smaller one's."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    raised = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty(p.size)
    adjusted[order] = np.minimum(raised, 1.0)
    return adjusted.tolist()


def measured_detectors(detectors: Rows) -> list[str]:
    """Return the detectors that had what they read in some run."""
    return [name for name in DETECTORS if any(row["level"] != MISSING for row in select(detectors, detector=name))]


def signal_path(rows: Rows, name: str) -> list[float | None]:
    """Return a signal's means at the start, before the collapse, over the runs that had one, and at the end."""
    return [mean(column(rows, f"{name}_{when}")) for when in WHEN]


def signal_change(rows: Rows, name: str) -> dict[str, Any]:
    """Return a signal's medians at the start, before the collapse and at the end, and in how many runs it rose."""
    medians = [float(np.median(column(rows, f"{name}_{when}"))) for when in WHEN]
    rose = [sum(row[f"{name}_{when}"] > row[f"{name}_first"] for row in rows) for when in WHEN[1:]]
    return {"medians": medians, "rose": rose}
