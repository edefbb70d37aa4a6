"""Portfolios: estimators combined by fixed weights. The name of one is its formula, `0.5*otb+0.5*energy_regression`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators.batch import BaselineResult, Batch
from otb_analysis.estimators.spec import EstimatorSpec, NoOptions, RegressionOptions
from otb_analysis.objectives.registry import Provenance
from otb_analysis.types import Bool, Float

EXAMPLE = "0.5*otb+0.5*energy_regression"
SURE_FIRST: tuple[Provenance, ...] = ("code", "proved", "abstract", "guess")
TOLERANCE = 1e-9  # how far from 1 the sum of the weights may be


def is_portfolio(name: str) -> bool:
    """Return whether a name is that of a portfolio; no other estimator's has a star."""
    return "*" in name or name == "portfolio"


def portfolio(name: str, known: Mapping[str, EstimatorSpec]) -> EstimatorSpec:
    """Return the EstimatorSpec of a portfolio of known estimators, written `weight*name+weight*name`.

    Weights are finite, sum to 1 and may be negative: `1.5*rloo+-0.5*none`.

    Raises:
        InputError: A term is not of that form, names no estimator or one twice, or the weights do not sum to 1.
    """
    weights: dict[str, float] = {}
    for term in name.split("+"):
        weight, _, member = (part.strip() for part in term.partition("*"))
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or not member:
            raise InputError(f"portfolio {name!r} has the term {term!r}; write it as {EXAMPLE}.")
        if member not in known:
            raise InputError(f"portfolio {name!r} has the estimator {member!r}; {nearest(member, known)}")
        if member in weights:
            raise InputError(f"portfolio {name!r} has {member} twice; add its weights.")
        weights[member] = number
    if abs(sum(weights.values()) - 1) > TOLERANCE:
        raise InputError(f"portfolio {name!r} has weights that sum to {sum(weights.values()):g}; divide them by that.")
    return combined(weights, known)


def combined(weights: Mapping[str, float], known: Mapping[str, EstimatorSpec]) -> EstimatorSpec:
    """Return the EstimatorSpec of A = Σ_k a_k A_k, from those of its members.

    It is unbiased where every member is, needs what any needs, and takes what all take. Members run with their
    defaults; the portfolio's own options are those of `energy_regression`, where it is one.
    """
    members = {name: known[name] for name in weights}
    entries = members.values()
    biased = [f"{name} ({entry.conditions})" for name, entry in members.items() if not entry.unbiased]
    targets = {entry.target for entry in entries}
    needs = tuple(dict.fromkeys(need for entry in entries for need in entry.needs))
    return EstimatorSpec(
        _weigh([(weights[name], entry) for name, entry in members.items()]),
        " + ".join(f"{weight:g}·B({name})" for name, weight in weights.items()),
        not biased,
        "as its members: " + "; ".join(biased or dict.fromkeys(entry.conditions for entry in entries)),
        f"portfolio of {' and '.join(members)}",
        SURE_FIRST[max(SURE_FIRST.index(entry.provenance) for entry in entries)],
        target=targets.pop() if len(targets) == 1 else "∇J",
        needs=needs,
        uses=tuple(dict.fromkeys(use for entry in entries for use in entry.uses if use not in needs)),
        options=RegressionOptions if any(e.options is RegressionOptions for e in entries) else NoOptions,
        batch_coupled=any(entry.batch_coupled for entry in entries),
        takes_gaps=all(entry.takes_gaps for entry in entries),
        takes_single=all(entry.takes_single for entry in entries),
    )


def _weigh(members: list[tuple[float, EstimatorSpec]]) -> Any:
    def weighted_sum(batch: Batch, options: Any) -> BaselineResult:
        """Combine estimators by fixed weights that sum to 1.

        A = Σ_k a_k A_k, and so B = G − A = Σ_k a_k B_k where no member rescales.
        """
        baseline: Float = np.zeros((1, 1))
        fallback: Bool = np.zeros((1, 1), bool)
        state = None
        for weight, entry in members:
            own = options if type(options) is entry.options else entry.options()
            result = entry.function(batch, own)
            b = result.baseline
            if result.scale is not None:
                b = batch.returns - (batch.returns - b) * result.scale
            baseline, fallback = baseline + weight * b, fallback | result.fallback
            state = result.state or state
        return BaselineResult(baseline, fallback, state=state)

    return weighted_sum
