"""The numbers of the page Estimators of one run for JSON: comparison, noise scale, planner, over training, proxy."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators import proved
from otb_analysis.figures.comparison import comparison_info, comparison_table
from otb_analysis.figures.fidelity import (
    KINDS,
    SOURCES,
    FidelityInfo,
    exact_norms,
    fidelity_columns,
    fidelity_info,
    fidelity_table,
    gain_lost_words,
)
from otb_analysis.figures.gradient_table import evenly, labels, statistics_table
from otb_analysis.figures.measured_run import (
    NO_CONCLUSION,
    PLANNED,
    conclusion_of,
    default_window,
    first_of,
    planner_of,
)
from otb_analysis.figures.pair_curves import block_rows, pair_table
from otb_analysis.figures.pair_gradients import compare_estimators, default_estimators, noise_table
from otb_analysis.figures.pair_verdict import estimators_verdict
from otb_analysis.figures.planner import planner_table, planner_words
from otb_analysis.report.runs import config_of, estimator_of
from otb_analysis.statistics import REFERENCE, Interval, gain_lost, gradient_noise_scale
from otb_analysis.store import RunStore
from otb_analysis.store.measured import cheap_energies, exact_groups, measured_grams
from otb_analysis.types import Gram, Label, Proved


def estimators_record(store: RunStore) -> dict[str, object]:
    """Return what the first part of the page says of one run, over all its measured steps and all estimators.

    Raises:
        StoreError: The run cannot be read.
    """
    grams, config = measured_grams(store), config_of(store)
    known = proved({label for gram in grams.values() for label in gram.labels}, config)
    sizes = store.subgroup_grams() if grams else {}
    rollouts = store.rollouts_df(columns=list(PLANNED))
    planner = planner_of(grams, sizes, rollouts, len(store.complete_steps()), known, config)
    return {
        "conclusion": conclusion_of(grams, known, config) or (NO_CONCLUSION,),
        **_comparison(grams, known),
        "planner": {
            "words": planner_words(planner) if planner.cells else None, "rollouts": planner.n_rollouts,
            "recorded_size": planner.recorded_size, "best_size": _interval(planner.best_size),
            "cells": planner_table(planner), "note": planner.note,
        },
        "over_training": _over_training(store, grams, known),
    }  # fmt: skip


def _comparison(grams: Mapping[int, Gram], known: Proved) -> dict[str, object]:
    measured = list(grams.values())
    if not measured:
        return {"against": None, "order": None, "estimand": None, "estimators": [], "noise_scale": None}
    names = list(dict.fromkeys(name for gram in measured for name, _ in gram.labels))
    info = comparison_info(measured, first_of(names), known=known)
    return {
        "against": info.against, "order": info.order, "estimand": info.estimand, "estimators": comparison_table(info),
        "noise_scale": _interval(gradient_noise_scale(measured, REFERENCE, known)),
    }  # fmt: skip


def _over_training(store: RunStore, grams: Mapping[int, Gram], known: Proved) -> dict[str, object]:
    """Return the four measures at up to 40 measured steps; stored ones, without intervals, where no matrix is."""
    if not grams:
        return {"pooled_steps": 1, "rows": store.gradients_df()}
    window = default_window(grams, known)
    return {"pooled_steps": window, "rows": statistics_table(grams, window, known, at=evenly(list(grams)))}


def estimator_pair(store: RunStore, a: str = "", b: str = "") -> dict[str, object] | None:
    """Return how estimator B compares with A on the rollouts of one run, as the page Compare does.

    Args:
        a: In the page's words, as `rloo` or `otb · exact`; empty for what the page begins with. `b` likewise.

    Returns:
        None where fewer than two estimators were measured.

    Raises:
        InputError: An estimator was not measured, or both are the same.
        StoreError: The run cannot be read.
    """
    grams, config = measured_grams(store), config_of(store)
    known = proved({label for gram in grams.values() for label in gram.labels}, config)
    names = {name: label for label, name in labels(known_labels(grams)).items()}
    if len(names) < 2:
        return None
    chosen = [one or first for one, first in zip((a, b), default_estimators(names, estimator_of(config)), strict=True)]
    for name in chosen:
        if name not in names:
            raise InputError(f"estimator {name!r} was not measured in {store.path.name}; {nearest(name, names)}")
    if chosen[0] == chosen[1]:
        raise InputError(f"A and B are both {chosen[0]}; pass another --a or --b.")
    panels, noise = compare_estimators(grams, names[chosen[0]], names[chosen[1]], known)
    return {
        "a": chosen[0], "b": chosen[1], "verdict": estimators_verdict(noise), "quantities": pair_table(panels),
        "blocks": block_rows(panels), "gradient_noise": noise_table(noise), "notes": noise.notes,
    }  # fmt: skip


def known_labels(grams: Mapping[int, Gram]) -> list[Label]:
    """Return every estimator of some Gram matrices, in their order."""
    return list(dict.fromkeys(label for gram in grams.values() for label in gram.labels))


def proxy_infos(store: RunStore) -> list[tuple[FidelityInfo, int, int]]:
    """Return how cheap energies agree with exact norms, with how many exact norms were loaded, and how many there are.

    One for each of the run's cheap energies and of `KINDS`; none where a run has no exact norms.
    """
    found = []
    for source in cheap_energies(store, SOURCES):
        tokens, total = exact_groups(store, fidelity_columns(source))
        for kind in KINDS:
            try:
                found.append((fidelity_info(tokens, kind, source), int(exact_norms(tokens).count()), total))
            except InputError:  # no rollout has both energies from its first token on
                continue
    return found


def proxy_record(store: RunStore) -> list[dict[str, object]]:
    """Return what the second part of the page, Proxy, says of one run.

    Raises:
        StoreError: The run cannot be read.
    """
    grams = list(measured_grams(store).values())
    known = proved({label for gram in grams for label in gram.labels}, config_of(store))
    return [_proxy(grams, known, *found) for found in proxy_infos(store)]


def _proxy(grams: list[Gram], known: Proved, info: FidelityInfo, loaded: int, total: int) -> dict[str, Any]:
    lost = gain_lost(grams, ("otb", info.source), ("otb", "exact"), known=known)
    share, rests_on = gain_lost_words(lost)
    level, slope = info.line or (None, None)
    return {
        "of": KINDS[info.kind], "source": info.source, **asdict(info.overall),
        "gain_lost": _interval(lost), "gain_lost_words": f"{share} ({rests_on})",
        "line": {"log10_level": level, "slope": slope}, "compared": info.n_tokens, "zero": info.n_zero,
        "loaded": loaded, "exact": total, "drawn": info.drawn, "by_step": fidelity_table(info), "furthest": info.far,
    }  # fmt: skip


def _interval(one: Interval | None) -> dict[str, object] | None:
    return None if one is None else asdict(one)
