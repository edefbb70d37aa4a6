"""Which detectors tell runs that are about to collapse from calm ones, and how the signals they read go."""

from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.diagnostics import DETECTORS
from otb_analysis.study import Rows, distinct, markdown_table, select

from .survival import calm, listed, staged

CONDITIONS = ("sampling_certificate", "ratio_tails")
"""Call old rollouts themselves, which every staged run has and no calm one: no forecast."""
MISSING = "not measured"
"""Level of a detector whose quantity the run did not record: neither blind nor tested."""
LEVEL = 0.05
ALL_SIGNS = 100_000
"""More than the 2^16 of sixteen seeds, so that every combination is tried."""
FEW = 5
"""Fewer leads than that are given one by one."""
SIGNAL_WORDS = {
    "entropy": ("entropy", "{:.2f}", " nats"),
    "grad_norm": ("‖ḡ‖", "{:.2f}", ""),
    "length": ("length", "{:.1f}", " tokens"),
}

SIGNALS = """\
`entropy_collapse` looks for a fall, `gradient_surge` for a rise. Medians over the runs that collapsed, of the first 10
steps → the 10 up to the collapse → the last 10: {words}. By arm, means:"""


def ends_of(runs: Rows) -> dict[tuple[str, int], int | None]:
    """Return the collapse of every run by arm and seed."""
    return {(row["arm"], row["seed"]): row["collapse"] for row in runs}


def calls(runs: Rows, detectors: Rows, name: str) -> dict[tuple[str, int], int | None]:
    """Return the step at which a detector first called each of some runs, None where it never did."""
    own = {(row["arm"], row["seed"]): row["watch"] for row in select(detectors, detector=name)}
    return {(row["arm"], row["seed"]): own[row["arm"], row["seed"]] for row in runs}


def collapsed(runs: Rows) -> Rows:
    """Return the staged runs that collapsed."""
    return [row for row in staged(runs) if row["collapse"] is not None]


def still_calm(runs: Rows) -> Rows:
    """Return the calm arm's runs that did not collapse by the same rule."""
    return [row for row in calm(runs) if row["collapse"] is None]


def leads_of(runs: Rows, detectors: Rows, name: str) -> list[int]:
    """Return a detector's lead in every run that collapsed and that it called at or before the collapse."""
    ends, found = ends_of(runs), calls(collapsed(runs), detectors, name)
    return [end - at for key, at in found.items() if at is not None and (end := ends[key]) is not None and at <= end]


def called(runs: Rows, detectors: Rows, name: str) -> int:
    """Return how many of some runs a detector called at any time."""
    return sum(at is not None for at in calls(runs, detectors, name).values())


def leads_words(leads: list[int]) -> str:
    """Return leads as median and range, few of them one by one."""
    if len(leads) < FEW:
        return ", ".join(map(str, sorted(leads))) or "–"
    return f"median {np.median(leads):.0f} ({min(leads)}–{max(leads)})"


def seed_differences(runs: Rows, detectors: Rows, name: str) -> list[float]:
    """Return, seed by seed, the share of its collapsed runs called in time minus the share of its calm runs called."""
    differences = []
    for seed in distinct(runs, "seed"):
        own = select(runs, seed=seed)
        broken, quiet = collapsed(own), still_calm(own)
        if broken and quiet:
            in_time = len(leads_of(own, detectors, name)) / len(broken)
            differences.append(in_time - called(quiet, detectors, name) / len(quiet))
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


def measured(detectors: Rows) -> list[str]:
    """Return the detectors that had what they read in some run."""
    return [name for name in DETECTORS if any(row["level"] != MISSING for row in select(detectors, detector=name))]


def tested(detectors: Rows) -> list[str]:
    """Return the detectors that are tested: measured, and no detector of the staged conditions themselves."""
    return [name for name in measured(detectors) if name not in CONDITIONS]


def adjusted_p(runs: Rows, detectors: Rows) -> dict[str, float]:
    """Return the adjusted p-value of each tested detector."""
    names = tested(detectors)
    raw = [p_value(seed_differences(runs, detectors, name)) for name in names]
    return dict(zip(names, holm(raw), strict=True))


def forecast(runs: Rows, detectors: Rows) -> str:
    """Say which detectors tell runs that collapse from calm ones beforehand, and which never call at all."""
    shown = [name for name, p in adjusted_p(runs, detectors).items() if p <= LEVEL]
    said = [f"beforehand {', '.join(hits_words(runs, detectors, name) for name in shown)}"] if shown else []
    said = said or ["no detector is shown to tell runs that collapse from calm ones beforehand"]
    blind = [name for name in tested(detectors) if not called(collapsed(runs), detectors, name)]
    said += [f"{listed(blind)} never call{'s' * (len(blind) == 1)} this collapse, not even afterwards"] if blind else []
    return "; ".join(said)


def hits_words(runs: Rows, detectors: Rows, name: str) -> str:
    """Return a detector's calls in time and in calm runs."""
    leads, quiet = leads_of(runs, detectors, name), still_calm(runs)
    hits = f"`{name}` calls {len(leads)} of {len(collapsed(runs))} (steps ahead: {leads_words(leads)})"
    return f"{hits}, and {called(quiet, detectors, name)} of {len(quiet)} calm runs"


def detectors_table(runs: Rows, detectors: Rows) -> str:
    """Return how often each detector called a collapse in time, at all, and runs that had none."""
    broken, quiet = collapsed(runs), still_calm(runs)
    pending = [row for row in staged(runs) if row["collapse"] is None]
    adjusted, known, lines = adjusted_p(runs, detectors), measured(detectors), []
    for name in DETECTORS:
        if name not in known:
            lines.append([f"`{name}`", MISSING, *["–"] * 5])
            continue
        leads = leads_of(runs, detectors, name)
        counts = [f"{called(rows, detectors, name)} of {len(rows)}" for rows in (broken, pending, quiet)]
        p = f"{adjusted[name]:.3f}" if name in adjusted else "–"
        lines.append([f"`{name}`", f"{len(leads)} of {len(broken)}", leads_words(leads), *counts, p])
    headers = ["detector", "called in time", "lead, steps", "called at all", "not yet collapsed, called",
               "calm, called", "p"]  # fmt: skip
    return markdown_table(headers, lines)


def signals_words(runs: Rows, signals: Rows) -> str:
    """Say how entropy, ‖ḡ‖ and length go in the runs that collapsed."""
    broken = {(row["arm"], row["seed"]) for row in collapsed(runs)}
    own = [row for row in signals if (row["arm"], row["seed"]) in broken]
    return SIGNALS.format(words="; ".join(signal_part(own, name) for name in SIGNAL_WORDS)) if own else ""


def signal_part(own: Rows, name: str) -> str:
    """Return one signal's medians at the start, before the collapse and at the end, and in how many runs it rose."""
    words, form, unit = SIGNAL_WORDS[name]
    first, before, last = (
        form.format(np.median([row[f"{name}_{where}"] for row in own])) for where in ("first", "before", "last")
    )
    rose = [sum(row[f"{name}_{where}"] > row[f"{name}_first"] for row in own) for where in ("before", "last")]
    return f"{words} {first} → {before} → {last}{unit}, above the first in {rose[0]} and {rose[1]} of {len(own)} runs"


def signals_table(runs: Rows, signals: Rows) -> str:
    """Return every arm's signals, means over its runs, those before a collapse over the runs that had one."""
    lines = []
    for arm in distinct(signals, "arm"):
        own = select(signals, arm=arm)
        lines.append([f"`{arm}`", *(signal_means(own, name) for name in SIGNAL_WORDS)])
    return markdown_table(["arm", "entropy", "‖ḡ‖", "length"], lines)


def signal_means(own: Rows, name: str) -> str:
    """Return one arm's means of a signal at the start, before the collapse and at the end."""
    means = []
    for where in ("first", "before", "last"):
        values = [row[f"{name}_{where}"] for row in own if row[f"{name}_{where}"] is not None]
        means.append(SIGNAL_WORDS[name][1].format(np.mean(values)) if values else "–")
    return " → ".join(means)
