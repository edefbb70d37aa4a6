"""Runs side by side in the terminal: what they learned, every estimator on their rollouts, the proxy's fidelity."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from otb_analysis.errors import InputError
from otb_analysis.figures.fidelity import agreement, comparable, energies
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    Fidelity,
    GradientStatistics,
    Interval,
    PairedRatios,
    discoveries,
    paired_ratios,
    pooled_statistics,
)
from otb_analysis.store import EXACT_ROWS, RunStore
from otb_analysis.store.scopes import WHOLE, scope_of, unlike_scopes
from otb_analysis.types import Gram

NOT_MEASURED = "–"
FIDELITY_OF = {"token": "token energy w_t", "realized": "realized energy W_t"}
FIDELITY_COLUMNS = (
    *("step", "group", "rollout", "t", "mask"),
    *("energy_proxy", "grad_norm_sq", "measured_by", "inclusion_prob"),
)
MEASURED_GROUPS = f'(step, "group") IN (SELECT step, "group" FROM tokens WHERE {EXACT_ROWS})'
NO_SIGNAL = (
    "at every step all rewards within a group were equal, so its gradients say nothing; "
    "start from a policy that sometimes succeeds, or choose an easier task."
)

EXPLAINED = """\
efficiency: share of the update along ∇J · equiv.: rollouts rloo would need for it · c: projection on ∇J
bias: ‖m − ∇J‖/‖∇J‖, 0 where the estimate of its square is negative · SF: variance/c²
×rloo: ratio to rloo on the same rollouts [95 % over prompts] · –: undefined on these prompts
Moments are averaged over steps and runs before anything is divided, so policies with larger gradients weigh more.
"""


def comparison(paths: Sequence[Path], top: int | None = None) -> list[Table]:
    """Return the tables that `otb demo` and `otb compare` print.

    Args:
        paths: Directories of runs.
        top: Rows per table of estimators, the most efficient first; None means all.

    Raises:
        InputError: A run does not exist or has no complete step.
        StoreError: A run cannot be read.
    """
    stores = [RunStore(path) for path in paths]
    tables = [learning_table(stores)]
    if apart := unlike_scopes([store for store in stores if not store.gradients_df(columns=["step"]).empty]):
        tables[0].caption = f"{tables[0].caption}\n{apart}: each has a table of estimators of its own."
    tables += [estimator_table(grams, design, top) for design, grams in designs(stores).items()]
    measured = [table for store in stores if (table := fidelity_rows(store))]
    return tables + ([fidelity_table(measured)] if measured else [])


def learning_table(stores: Sequence[RunStore]) -> Table:
    """Return one row per run: what it learned, how large its gradients were, where its time went."""
    table = _table(
        "Runs",
        "reward: mean of the first → last tenth of the steps · ‖ḡ‖: before clipping, median over steps",
        ("run", "estimator"),
        ("steps", "held-out reward", "reward", "‖ḡ‖", "clipped", "tokens", "sample s", "update s", "measure s"),
    )
    for store in stores:
        steps = store.steps_df()
        if steps.empty:
            raise InputError(f"run {store.path.name} has no complete step yet; wait for one, or train it again.")
        heldout = steps["heldout_reward"].dropna()
        edge = max(1, len(steps) // 10)
        table.add_row(
            store.path.name,
            _estimator_name(store),
            str(len(steps)),
            f"{heldout.iloc[0]:.3f} → {heldout.iloc[-1]:.3f}" if len(heldout) else NOT_MEASURED,
            f"{steps['reward_mean'].head(edge).mean():.3f} → {steps['reward_mean'].tail(edge).mean():.3f}",
            f"{steps['grad_norm'].median():.3g}",
            f"{steps['clipped'].mean():.0%}",
            f"{steps['n_tokens'].sum():,}",
            *(f"{steps[f'seconds_{phase}'].sum():.0f}" for phase in ("sample", "update", "measure")),
        )
        status, reason = store.standing
        if status != "complete":
            table.caption = f"{table.caption}\n{store.path.name}: {status}{f': {reason}' if reason else ''}"
        if line := heldout_line(steps):
            table.caption = f"{table.caption}\n{store.path.name}: {line}"
        if without_signal(steps):
            table.caption = f"{table.caption}\n{store.path.name}: {NO_SIGNAL}"
    return table


def heldout_line(steps: pd.DataFrame) -> str:
    """Return the last evaluation with its 95 % intervals over prompts in one line; empty where none has an interval.

    Args:
        steps: Steps table of one run.
    """
    evaluated: Any = steps.dropna(subset=["heldout_reward"])
    if evaluated.empty:
        return ""
    last = evaluated.iloc[-1]
    shown = {"reward": "heldout_reward"}
    if pd.notna(last["heldout_samples"]) and last["heldout_samples"] > 1:  # older runs answered each prompt once
        shown[f"avg@{last['heldout_samples']:.0f}"] = "heldout_success"
        shown[f"pass@{last['heldout_pass_k']:.0f}"] = "heldout_pass_at_k"
    parts = [
        f"{name} {last[column]:.3f} [{last[f'{column}_low']:.3f}, {last[f'{column}_high']:.3f}]"
        for name, column in shown.items()
        if pd.notna(last[f"{column}_low"])
    ]
    return f"held-out prompts at step {last['step']:.0f}: {' · '.join(parts)}" if parts else ""


def without_signal(steps: pd.DataFrame) -> bool:
    """Return True when at every step the rewards within every group were equal, so that no group baseline can learn.

    Args:
        steps: Steps table of one run; a step that did not record it counts as having a signal.
    """
    equal = steps["n_zero_variance_groups"] >= steps["n_prompts"]
    return bool(equal.fillna(False).all())


def _estimator_name(store: RunStore) -> str:
    config: Any = store.info.get("config") or {}
    own = config.get("estimator") or {}
    return str(own.get("name", NOT_MEASURED)) if isinstance(own, dict) else str(own)


def designs(stores: Sequence[RunStore]) -> dict[str, list[Gram]]:
    """Return every measured step under what makes steps comparable: the task, the group size and the scope.

    Bias and variance depend on N, and tasks and scopes do not share a gradient, so steps that differ in any of these
    are never averaged. Steps of different policies on one task are: the figures then describe an average policy of
    these runs.
    """
    found: dict[str, list[Gram]] = {}
    for store in stores:
        config: Any = store.info.get("config") or {}
        scope = scope_of(store)
        of_part = "" if scope == WHOLE else f", scope {scope!r}"
        for gram in store.grams().values():
            size = round(gram.n_rollouts / max(gram.n_prompts, 1))
            task = config.get("task", "task not stored")
            found.setdefault(f"{task}, groups of {size}{of_part}", []).append(gram)
    return found


def estimator_table(grams: Sequence[Gram], design: str, top: int | None = None) -> Table:
    """Return one row per estimator on the same rollouts, all measured steps of a design pooled; raw variance last.

    Args:
        grams: Every measured step of the design.
        design: What makes the steps comparable, for the title.
        top: Rows that are kept, the most efficient ones; None keeps all.
    """
    rows = sorted(pooled_statistics(grams), key=lambda r: -(r.efficiency or 0.0))
    ratios = {(r.estimator, r.energy_source): r for r in paired_ratios(grams)}
    most = max(rows, key=lambda r: r.n_clusters)
    shown = rows[:top]
    if len(shown) < len(rows):
        design = f"{design}; the {len(shown)} most efficient of {len(rows)} rows"
    notes = [verdict(list(ratios.values()), measure) for measure in ("sf", "variance")] + _rarer(grams)
    table = _table(
        f"Every estimator on the same rollouts ({design}): one update of {most.n_prompts} prompts "
        f"({most.n_rollouts} rollouts), measured on {most.n_clusters} prompts over {len(grams)} steps of all runs",
        EXPLAINED + "\n".join(notes),
        ("estimator", "energy"),
        ("efficiency", "equiv.", "c", "bias", "SF ×rloo", "variance ×rloo", "variance"),
    )
    for row in shown:
        table.add_row(*_estimator_cells(row, ratios.get((row.estimator, row.energy_source))))
    return table


def _rarer(grams: Sequence[Gram]) -> list[str]:
    """One line on estimators that were not measured at every step, whose figures are of other policies."""
    steps = Counter(label for gram in grams for label in gram.labels)
    fewer = [f"{'/'.join(label)} ({n} of {len(grams)} steps)" for label, n in steps.items() if n < len(grams)]
    if not fewer:
        return []
    return [f"Not measured at every step, so only their ×rloo compares with the others: {', '.join(fewer)}."]


def verdict(pairs: Sequence[PairedRatios], measure: str) -> str:
    """Return which estimators differ from rloo in a measure at a false-discovery rate of 5 %, in one line."""
    found = discoveries(pairs, measure)
    if not found:
        return f"{measure}: not tested, fewer than {MIN_CLUSTERS} prompts or no estimate of ∇J."
    names = [f"{d.estimator}/{d.energy_source}" for d in found if d.different and d.ratio.estimate < 1.0]
    lower = f"lower than rloo for {', '.join(names)}" if names else "no estimator shown lower than rloo"
    return f"{measure} (false-discovery rate 5 %): {lower}."


def _table(title: str, caption: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _estimator_cells(row: GradientStatistics, ratio: PairedRatios | None) -> list[str]:
    return [
        row.estimator,
        row.energy_source,
        _cell(row.efficiency),
        _cell(row.rollout_equivalents, ".0f"),
        _cell(row.projection),
        _cell(row.relative_bias),
        _interval(ratio.sf if ratio else None),
        _interval(ratio.variance if ratio else None),
        _cell(row.variance, ".3g"),
    ]


def _cell(value: float | None, form: str = ".2f") -> str:
    if value is None:
        return NOT_MEASURED
    return "∞" if np.isinf(value) else format(value, form)


def _interval(value: Interval | None) -> str:
    if value is None or value.estimate is None:
        return NOT_MEASURED
    if value.low is None or value.high is None:
        return f"{value.estimate:.2f}"
    return f"{value.estimate:.2f} [{value.low:.2f}, {value.high:.2f}]"


def fidelity_rows(store: RunStore) -> list[tuple[str, str, Fidelity]]:
    """Return how well the proxy follows exact norms in one run, for single tokens and for what OTB weights by.

    The numbers are those of the dashboard's page: every policy token with both energies, each rollout's running sums up
    to its first token without an exact norm.
    """
    tokens, _ = comparable(store.tokens_df(columns=FIDELITY_COLUMNS, where=MEASURED_GROUPS))
    tables = {title: energies(tokens, kind) for kind, title in FIDELITY_OF.items()}
    return [(store.path.name, title, agreement(table)) for title, table in tables.items() if len(table)]


def fidelity_table(runs: Sequence[Sequence[tuple[str, str, Fidelity]]]) -> Table:
    """Return the proxy's fidelity, pooled and within (prompt, t), where baseline weights are normalised."""
    table = _table(
        "Proxy against exact norms",
        "within: inside one (step, prompt, t) cell, where baseline weights are normalised",
        ("run", "of"),
        ("tokens", "Pearson", "log-Pearson", "Spearman", "Pearson within", "Spearman within"),
    )
    for run, name, found in (row for rows in runs for row in rows):
        pooled, within = found.pooled, found.within
        table.add_row(
            run,
            name,
            f"{pooled.n:,}",
            _cell(pooled.pearson),
            _cell(pooled.log_pearson),
            _cell(pooled.spearman),
            _cell(within.pearson if within else None),
            _cell(within.spearman if within else None),
        )
    return table
