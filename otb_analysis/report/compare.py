"""Runs side by side in the terminal: the conclusion, every estimator, what runs learned, B against A, the proxy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from otb_analysis.errors import InputError
from otb_analysis.figures.fidelity import KINDS, agreement, comparable, energies, fidelity_columns
from otb_analysis.figures.numbers import MISSING, bracketed, formatted
from otb_analysis.report.designs import designs
from otb_analysis.report.estimator_table import estimator_table
from otb_analysis.report.pair import pair_of, pair_tables
from otb_analysis.report.runs import by_name, config_of, estimator_of
from otb_analysis.report.terminal import terminal_table
from otb_analysis.statistics import Fidelity
from otb_analysis.store import EXACT_ROWS, RunStore
from otb_analysis.store.reader import unlike_scopes

MEASURED_GROUPS = f'(step, "group") IN (SELECT step, "group" FROM tokens WHERE {EXACT_ROWS})'
NO_SIGNAL = (
    "at every step all rewards within a group were equal, so its gradients say nothing; "
    "start from a policy that sometimes succeeds, or choose an easier task."
)
CUT = (
    "at every step all answers ended at max_new_tokens = {budget}, and all rewards within a group were equal, so its "
    "gradients say nothing; raise --sample.max-new-tokens."
)


def comparison(paths: Sequence[Path], top: int | None = None, conclude_last: bool = False) -> list[Table | str]:
    """Return what `otb compare` and `otb demo` print: three sentences and a table per design, then the other tables.

    Args:
        top: Rows per table of estimators; 0 means all, None the eight that matter.
        conclude_last: Put the sentences and their tables behind the others, where a long command ends, without B
            against A.

    Raises:
        InputError: A run does not exist or has no complete step.
        StoreError: A run cannot be read.
    """
    named = by_name([RunStore(path) for path in paths])
    stores = list(named.values())
    learned = learning_table(stores)
    if apart := unlike_scopes({run: s for run, s in named.items() if not s.gradients_df(columns=["step"]).empty}):
        learned.caption = f"{learned.caption}\n{apart}: each has a table of estimators of its own."
    of_designs = designs(stores)
    concluded: list[Table | str] = []
    for name, design in of_designs.items():
        concluded.append("\n".join(([f"{name}:"] if len(of_designs) > 1 else []) + list(design.sentences)))
        concluded += estimator_table(design, top)
    pair = None if conclude_last else pair_of(stores)
    measured = [table for run, store in named.items() if (table := fidelity_rows(store, run))]
    others = [learned, *(pair_tables(pair) if pair else []), *([fidelity_table(measured)] if measured else [])]
    return others + concluded if conclude_last else concluded + others


def learning_table(stores: Sequence[RunStore]) -> Table:
    """Return one row per run: what it learned, how large its gradients were, where its time went."""
    table = terminal_table(
        "Runs: what they learned, and where their time went",
        "reward: mean of the first → last tenth of the steps · ‖ḡ‖: before clipping, median over steps",
        ("run", "estimator"),
        ("steps", "held-out reward", "reward", "‖ḡ‖", "clipped", "tokens", "sample s", "update s", "measure s"),
    )
    for run, store in by_name(stores).items():
        steps = store.steps_df()
        if steps.empty:
            raise InputError(f"run {run} has no complete step yet; wait for one, or train it again.")
        heldout = steps["heldout_reward"].dropna()
        edge = max(1, len(steps) // 10)
        table.add_row(
            run,
            estimator_of(config_of(store)) or MISSING,
            str(len(steps)),
            f"{heldout.iloc[0]:.3f} → {heldout.iloc[-1]:.3f}" if len(heldout) else MISSING,
            f"{steps['reward_mean'].head(edge).mean():.3f} → {steps['reward_mean'].tail(edge).mean():.3f}",
            formatted(_recorded(steps["grad_norm"].median()), ".3g"),
            formatted(_recorded(steps["clipped"].mean()), ".0%"),
            formatted(_recorded(steps["n_tokens"].sum(min_count=1)), ",.0f"),
            *(
                formatted(_recorded(steps[f"seconds_{phase}"].sum(min_count=1)), ".0f")
                for phase in ("sample", "update", "measure")
            ),
        )
        no_learning = no_signal(store, steps) if without_signal(steps) else ""
        for line in filter(None, (unfinished(store), heldout_line(steps), no_learning)):
            table.caption = f"{table.caption}\n{run}: {line}"
    return table


def _recorded(value: Any) -> float | None:
    """Return a number over steps, None where no step recorded it."""
    return None if pd.isna(value) else float(value)


def unfinished(store: RunStore) -> str:
    """Return the status of a run that is not complete, with its reason; empty for one that is."""
    status, reason = store.standing
    return "" if status == "complete" else ": ".join(filter(None, (status, reason)))


def heldout_line(steps: pd.DataFrame) -> str:
    """Return the last evaluation with its 95 % intervals over prompts in one line; empty where none has an interval."""
    evaluated: Any = steps.dropna(subset=["heldout_reward"])
    if evaluated.empty:
        return ""
    last = evaluated.iloc[-1]
    shown = {"reward": "heldout_reward"}
    if pd.notna(last["heldout_samples"]) and last["heldout_samples"] > 1:  # older runs answered each prompt once
        shown[f"avg@{last['heldout_samples']:.0f}"] = "heldout_success"
        shown[f"pass@{last['heldout_pass_k']:.0f}"] = "heldout_pass_at_k"
    parts = [
        f"{name} {bracketed(last[column], last[f'{column}_low'], last[f'{column}_high'], '.3f')}"
        for name, column in shown.items()
        if pd.notna(last[f"{column}_low"])
    ]
    return f"held-out prompts at step {last['step']:.0f}: {' · '.join(parts)}" if parts else ""


def without_signal(steps: pd.DataFrame) -> bool:
    """Return True when at every step the rewards within every group were equal, so that no group baseline can learn.

    A step that did not record it counts as having a signal.
    """
    equal = steps["n_zero_variance_groups"] >= steps["n_prompts"]
    return bool(equal.fillna(False).all())


def no_signal(store: RunStore, steps: pd.DataFrame) -> str:
    """Return why a run without any signal had none, and what to do: answers that are all cut off, or rewards."""
    if not bool((steps["n_truncated"] >= steps["n_rollouts"]).fillna(False).all()):
        return NO_SIGNAL
    return CUT.format(budget=(config_of(store).get("sample") or {}).get("max_new_tokens", "its limit"))


def fidelity_rows(store: RunStore, run: str) -> list[tuple[str, str, Fidelity]]:
    """Return how well the proxy follows exact norms in a run, for single tokens and for what OTB weights by.

    The numbers are those of the dashboard's page: every policy token with both energies, each rollout's running sums up
    to its first token without an exact norm. `run` is what the run is called in them.
    """
    tokens, _ = comparable(store.tokens_df(columns=fidelity_columns(), where=MEASURED_GROUPS))
    tables = {title: energies(tokens, kind) for kind, title in KINDS.items()}
    return [(run, title, agreement(table)) for title, table in tables.items() if len(table)]


def fidelity_table(runs: Sequence[Sequence[tuple[str, str, Fidelity]]]) -> Table:
    """Return the proxy's fidelity, pooled and within (prompt, t), where OTB compares rollouts."""
    table = terminal_table(
        "Proxy against exact norms: does the free proxy order tokens as exact norms do?",
        "energy: squared norm of the gradient of log π, of one token w_t, or of all up to it W_t = Σ_{j≤t} w_j\n"
        "within: among rollouts of one prompt at one position, the only comparison OTB makes.",
        ("run", "of"),
        ("tokens", "Pearson", "log-Pearson", "Spearman", "Pearson within", "Spearman within"),
    )
    for run, name, fidelity in (row for rows in runs for row in rows):
        pooled, within = fidelity.pooled, fidelity.within
        correlations = (pooled.pearson, pooled.log_pearson, pooled.spearman)
        correlations += (within.pearson, within.spearman) if within else (None, None)
        table.add_row(run, name, f"{pooled.n:,}", *(formatted(value, ".2f") for value in correlations))
    return table
