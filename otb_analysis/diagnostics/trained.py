"""What a run trains with, as its measurements name it: the estimator, and the rollouts of an update."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.types import Gram, Label


def trained_labels(config: Mapping[str, Any], grams: Iterable[Gram]) -> tuple[Label, ...]:
    """Return the estimator that a run trains with; empty where its configuration names none that was measured."""
    measured = [label for gram in grams for label in gram.labels]
    try:
        label = trained_label(config, measured)
    except InputError:  # a run of somebody else's tool need not name one of ours
        return ()
    return (label,) if label in measured else ()


def trained_label(config: Mapping[str, Any], measured: Collection[Label] = ()) -> Label:
    """Return (estimator, energy source) of the estimator that a run trains with, as its Gram matrices name it.

    `measured` are the labels of its Gram matrices. They name custom estimators, which are not in `ESTIMATORS`.

    Raises:
        InputError: The configuration names no known estimator, and none that was measured.
    """
    chosen = config.get("estimator")
    name = str(chosen.get("name", "") if isinstance(chosen, Mapping) else chosen or "")
    energy = str(chosen.get("energy", "proxy") if isinstance(chosen, Mapping) else "proxy")
    if name not in ESTIMATORS:
        sources = [source for estimator, source in measured if estimator == name]
        if not sources:
            known = dict.fromkeys([*ESTIMATORS, *(estimator for estimator, _ in measured)])
            raise InputError(f"the run's configuration has the estimator {name!r}; {nearest(name, known)}")
        return name, energy if energy in sources else sources[0]
    needs = ESTIMATORS[name].needs
    if "energy" in needs:
        return name, energy
    return name, "exact" if {"rollout_norm_sq", "position_baseline"} & set(needs) else "none"
