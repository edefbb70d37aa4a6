"""The numbers of `otb compare` and of the pages Estimators and Compare for JSON; null where unknown or infinite."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from otb_analysis.errors import InputError
from otb_analysis.figures.comparison import comparison_info, comparison_table
from otb_analysis.figures.pair_curves import pair_table
from otb_analysis.figures.pair_gradients import noise_table
from otb_analysis.figures.runs import config_differences, headline_info
from otb_analysis.report.designs import designs
from otb_analysis.report.estimators_record import estimators_record, proxy_record
from otb_analysis.report.pair import Pair, pair_of
from otb_analysis.report.record import written
from otb_analysis.report.runs import by_name, config_of, estimator_of
from otb_analysis.statistics import REFERENCE
from otb_analysis.store import RunStore


def comparison_record(paths: Sequence[Path]) -> dict[str, object]:
    """Return what runs learned, every estimator as ratios to `rloo`, the proxy's cost, and settings that differ.

    `estimators` pools runs of one design. `by_run` and `proxy` are what the page Estimators shows of each run alone.
    `pair` is B against A as the page Compare begins: groups whose seeds are paired, else the second of two runs against
    the first; null of other runs.

    Raises:
        InputError: A run does not exist or has no complete step.
        StoreError: A run cannot be read.
    """
    named = by_name([RunStore(path) for path in paths])
    stores = list(named.values())
    pair = pair_of(stores)
    record = {
        "runs": [_learned(run, store) for run, store in named.items()],
        "estimators": [
            {
                "design": name, "steps": len(design.grams), "prompts": design.conclusion.n_prompts,
                "conclusion": list(design.sentences), "against": "rloo",
                "rows": comparison_table(comparison_info(design.grams, known=design.known)),
            }
            for name, design in designs(stores).items()
            if any(REFERENCE in gram.labels for gram in design.grams)
        ],
        "by_run": [{"run": run, **estimators_record(store)} for run, store in named.items()],
        "proxy": [{"run": run, **one} for run, store in named.items() for one in proxy_record(store)],
        "settings": config_differences({run: config_of(store) for run, store in named.items()}).table,
        "pair": None if pair is None else _pair(pair),
    }  # fmt: skip
    return written(record)


def _pair(pair: Pair) -> dict[str, object]:
    pairing = pair.pairing
    return {
        "a": pairing.a, "b": pairing.b, "runs": pairing.pairs, "verdict": pair.verdict, "intervals": pairing.note,
        "quantities": pair_table(pair.panels), "gradient_noise": noise_table(pair.noise),
        "notes": pair.notes,
    }  # fmt: skip


def _learned(run: str, store: RunStore) -> dict[str, object]:
    (status, reason), steps = store.standing, store.steps_df()
    if steps.empty:
        raise InputError(f"run {run} has no complete step yet; wait for one, or train it again.")
    headline = headline_info(run, estimator_of(config_of(store)), steps)
    return {"status": status, "reason": reason, **asdict(headline)}
