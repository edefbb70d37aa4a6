"""Advantages of every estimator on a step's rollouts, from the energies that were measured there."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from otb_analysis.estimators import EstimatorInputs, NormalEquations, available, entry_of, estimate, with_limit
from otb_analysis.measurement.table import TokenTable
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.types import Bool, Float, Label

CALIBRATED = ("otb", "otb_loo")
"""Estimators that calibrated energies are tried with, beside the one that trains: none is recommended with them, and
those of all would take half as long again."""


def every_advantage(
    table: TokenTable,
    measured: TokenMeasurements,
    rows: Bool,
    options: Mapping[str, Any] | None = None,
    calibrated: Float | None = None,
    states: Mapping[Label, NormalEquations] | None = None,
) -> dict[Label, Float]:
    """Return the advantages [n, T] of every estimator whose inputs exist, by (estimator, energy source), on some rows.

    Estimators that read the proxy, calibrated or not, or no energy see the whole batch, as in training, since some
    couple prompts. Those that read exact norms see the measured rows, and are left out unless all of these have them.
    `options` holds the options of estimators that do not run with their defaults, such as the one that trains; `states`
    what estimators remember of earlier steps, which is only known of the one that trains, with its energies.
    """
    options, states = options or {}, states or {}

    def advantage(label: Label, inputs: EstimatorInputs) -> Float:
        chosen = with_limit(label[0], options.get(label[0]), table.limit)
        return estimate(label[0], replace(inputs, state=states.get(label)), chosen).advantage

    proxy = table.inputs(table.proxy)
    whole = bool(measured.whole[rows].all())
    part = _rows_of(table.inputs(measured.whole_norm_sq, measured.rollout_norm_sq), rows) if whole else proxy
    everywhere = set(available(proxy, options))
    advantages: dict[Label, Float] = {}
    for name in available(part, options):
        reads_energy = entry_of(name).reads_energy
        if name in everywhere:
            source = "proxy" if reads_energy else "none"
            advantages[name, source] = advantage((name, source), proxy)[rows]
        if reads_energy and calibrated is not None and (name in CALIBRATED or name in options):
            advantages[name, "calibrated"] = advantage((name, "calibrated"), table.inputs(calibrated))[rows]
        if whole and (reads_energy or name not in everywhere):
            advantages[name, "exact"] = advantage((name, "exact"), part)
    return advantages


def _rows_of(inputs: EstimatorInputs, rows: Bool) -> EstimatorInputs:
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: x[rows] for name, x in columns.items() if x is not None})
