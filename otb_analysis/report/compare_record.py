"""The numbers of `otb compare` and of the pages Estimators and Compare for JSON; null where unknown or infinite."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.comparison import comparison_info, comparison_table
from otb_analysis.figures.curves import curves_table
from otb_analysis.figures.learning import grouped_info, learning_info
from otb_analysis.figures.pair_curves import block_rows, curves_rows, pair_table
from otb_analysis.figures.pair_gradients import noise_table
from otb_analysis.figures.runs import Differences, config_differences, grouped, headline_info
from otb_analysis.report.designs import designs
from otb_analysis.report.estimators_record import estimator_pair, estimators_record, proxy_record
from otb_analysis.report.pair import Pair, Sides, pair_of
from otb_analysis.report.record import written
from otb_analysis.report.runs import by_name, config_of, estimator_of
from otb_analysis.statistics import REFERENCE
from otb_analysis.store import RunStore


def comparison_record(
    paths: Sequence[Path],
    sides: Sides | None = None,
    curves: bool = False,
    window: int = 10,
    by: str = "",
) -> dict[str, object]:
    """Return what runs learned, every estimator as ratios to `rloo`, the proxy's cost, and settings that differ.

    `estimators` pools runs of one design. `by_run` and `proxy` are what the page Estimators shows of each run alone.
    `pair` is B against A as the page Compare begins: groups whose seeds are paired, else the second of two runs against
    the first; null of other runs. In `by_run` there is a `pair` of two estimators, too.

    Args:
        sides: What `pair` compares instead; of one run, which estimators.
        curves: Add learning curves with running means over `window` steps, and the curves behind `pair`.
        by: A setting in which the runs differ: the curves are means over the runs of each of its values.

    Raises:
        InputError: A run does not exist or has no complete step.
        StoreError: A run cannot be read.
    """
    named = by_name([RunStore(path) for path in paths])
    stores = list(named.values())
    sides = sides or Sides()
    pair = pair_of(stores, sides)
    chosen = ("", "") if sides.setting or len(stores) > 1 else (sides.a, sides.b)
    steps = {run: store.steps_df() for run, store in named.items()}
    differences = config_differences({run: config_of(store) for run, store in named.items()})
    record: dict[str, object] = {
        "runs": [_learned(run, store, steps[run]) for run, store in named.items()],
        "estimators": [
            {
                "design": name, "steps": len(design.grams), "prompts": design.conclusion.n_prompts,
                "conclusion": list(design.sentences), "against": "rloo",
                "rows": comparison_table(comparison_info(design.grams, known=design.known)),
            }
            for name, design in designs(stores).items()
            if any(REFERENCE in gram.labels for gram in design.grams)
        ],
        "by_run": [
            {"run": run, **estimators_record(store), "pair": estimator_pair(store, *chosen)}
            for run, store in named.items()
        ],
        "proxy": [{"run": run, **one} for run, store in named.items() for one in proxy_record(store)],
        "settings": differences.table,
        "pair": None if pair is None else _pair(pair),
    }  # fmt: skip
    if curves:
        names = {run: estimator_of(config_of(store)) for run, store in named.items()}
        info = learning_info(steps, names, window) if not by else grouped_info(steps, _groups(differences, by), window)
        record["learning"] = curves_table(info)
        record["pair_curves"] = None if pair is None else curves_rows(pair.panels)
    return written(record)


def _pair(pair: Pair) -> dict[str, object]:
    pairing = pair.pairing
    return {
        "a": pairing.a, "b": pairing.b, "runs": pairing.pairs, "verdict": pair.verdict, "intervals": pairing.note,
        "quantities": pair_table(pair.panels), "blocks": block_rows(pair.panels),
        "gradient_noise": noise_table(pair.noise),
        "notes": pair.notes,
    }  # fmt: skip


def _groups(differences: Differences, by: str) -> dict[str, list[str]]:
    settings = list(differences.table["setting"])
    if by not in settings:
        raise InputError(f"--by is {by!r}, in which these runs do not differ; {nearest(by, settings)}")
    return grouped(differences, by)


def _learned(run: str, store: RunStore, steps: pd.DataFrame) -> dict[str, object]:
    status, reason = store.standing
    if steps.empty:
        raise InputError(f"run {run} has no complete step yet; wait for one, or train it again.")
    headline = headline_info(run, estimator_of(config_of(store)), steps)
    return {"status": status, "reason": reason, **asdict(headline)}
