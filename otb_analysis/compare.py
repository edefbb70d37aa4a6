"""Runs side by side in the terminal: what they learned, every estimator on their rollouts, the proxy's fidelity."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from otb_analysis.arrays import masked
from otb_analysis.energies import realized_energy
from otb_analysis.errors import InputError
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    Fidelity,
    GradientStatistics,
    Interval,
    PairedRatios,
    discoveries,
    fidelity,
    paired_ratios,
    pooled_statistics,
    position_cells,
)
from otb_analysis.store import RunStore
from otb_analysis.types import Gram

NOT_MEASURED = "–"
NO_SIGNAL = (
    "at every step all rewards within a group were equal, so its gradients say nothing; "
    "start from a policy that sometimes succeeds, or choose an easier task."
)
CELLS_OF_A_STEP = 10**9
"""Above every cell number within one step, so that cells of different steps differ."""


EXPLAINED = """\
efficiency: share of the update along ∇J · equiv.: rollouts rloo would need for it · c: projection on ∇J
bias: ‖m − ∇J‖/‖∇J‖, 0 where the estimate of its square is negative · SF: variance/c²
×rloo: ratio to rloo on the same rollouts [95 % over prompts] · –: undefined on these prompts
"""


def comparison(paths: Sequence[Path]) -> list[Table]:
    """Return the tables that `otb demo` and `otb compare` print.

    Args:
        paths: Directories of runs.

    Raises:
        InputError: A run does not exist or has no complete step.
        StoreError: A run cannot be read.
    """
    stores = [RunStore(path) for path in paths]
    grams = [gram for store in stores for gram in store.grams().values()]
    tables = [learning_table(stores)]
    if grams:
        tables.append(estimator_table(grams))
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
        if without_signal(steps):
            table.caption = f"{table.caption}\n{store.path.name}: {NO_SIGNAL}"
    return table


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


def estimator_table(grams: Sequence[Gram]) -> Table:
    """Return one row per estimator on the same rollouts, all measured steps of all runs pooled; raw variance last."""
    rows = sorted(pooled_statistics(grams), key=lambda r: -(r.efficiency or 0.0))
    ratios = {(r.estimator, r.energy_source): r for r in paired_ratios(grams)}
    first = rows[0]
    table = _table(
        f"Every estimator on the same rollouts: one update of {first.n_prompts} prompts ({first.n_rollouts} rollouts), "
        f"measured on {first.n_clusters} prompts over {len(grams)} steps of all runs",
        EXPLAINED + "\n".join(verdict(list(ratios.values()), measure) for measure in ("sf", "variance")),
        ("estimator", "energy"),
        ("efficiency", "equiv.", "c", "bias", "SF ×rloo", "variance ×rloo", "variance"),
    )
    for row in rows:
        table.add_row(*_estimator_cells(row, ratios.get((row.estimator, row.energy_source))))
    return table


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
    """Return how well the proxy follows exact norms in one run, for single tokens and for what OTB weights by."""
    steps = store.sql("select distinct step from tokens where grad_norm_sq is not null order by step")["step"].tolist()
    if not steps:
        return []
    proxy, exact, cells = [], [], []
    for step in steps:
        arrays = store.token_arrays(step).measured_groups()
        mask = arrays.mask
        proxy.append((masked(arrays.energy_proxy, mask)[mask], realized_energy(arrays.energy_proxy, mask)[mask]))
        exact.append((masked(arrays.grad_norm_sq, mask)[mask], realized_energy(arrays.grad_norm_sq, mask)[mask]))
        cells.append(position_cells(arrays.group, mask.shape[1])[mask] + step * CELLS_OF_A_STEP)
    cell = np.concatenate(cells)
    return [
        (
            store.path.name,
            name,
            fidelity(np.concatenate([p[i] for p in proxy]), np.concatenate([e[i] for e in exact]), cell=cell),
        )
        for i, name in enumerate(("token energy w_t", "realized energy W_t"))
    ]


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
