"""What tokens can be coloured by: the stored columns, and differences that are worth a look."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.energies import calibrate
from otb_analysis.errors import InputError
from otb_analysis.figures.fidelity import exact_norms
from otb_analysis.schema import TOKENS, column

NUMERIC = tuple(c.name for c in TOKENS if c.dtype in ("FLOAT", "DOUBLE"))
"""Stored columns with a measure of each token."""

SAMPLER, ADVANTAGES, RATIO = "policy_minus_sampler", "advantage_difference", "exact_over_proxy"
COLOURS = (*NUMERIC, SAMPLER, ADVANTAGES, RATIO)
"""All that tokens can be coloured by."""
SIGNED = ("attribution", "signal", "noise", "advantage", SAMPLER, ADVANTAGES)
"""Columns in which a token can push for or against; 0 always has the middle colour."""
LOW = ("contrast",)
"""Columns in which the low values stand out."""
RATIOS = (RATIO,)
"""Columns in which 1 has the middle colour."""


@dataclass(frozen=True)
class Described:
    """How a page calls a column."""

    title: str
    unit: str
    meaning: str


def with_differences(tokens: pd.DataFrame, other: pd.Series | None = None) -> pd.DataFrame:
    """Add the differences whose parts were measured, empty columns for the others.

    log π − log μ; the advantage minus `other`, another estimator's advantage of the same tokens; and the exact squared
    norm over the calibrated proxy. A run without a calibrated proxy gets one fitted to these tokens: c·proxy^b, as
    `energies.calibrate` does.
    """
    table: Any = tokens.copy()
    table[SAMPLER] = _floats(table, "logprob") - _floats(table, "behavior_logprob")
    table[ADVANTAGES] = np.nan if other is None else _floats(table, "advantage") - other.to_numpy(np.float64)
    exact, proxy = _exact(table), calibrated_proxy(table)
    table[RATIO] = np.divide(exact, proxy, out=np.full(len(table), np.nan), where=proxy > 0)
    return table


def calibrated_proxy(tokens: pd.DataFrame) -> Any:
    """Return the stored calibrated energies [tokens], or the proxy fitted to these tokens' exact norms; NaN without."""
    stored = _floats(tokens, "energy_calibrated")
    if not np.isnan(stored).all():
        return stored
    proxy = _floats(tokens, "energy_proxy")
    exact, known = _exact(tokens), np.isfinite(proxy)
    try:
        fit = calibrate(np.where(np.isfinite(exact), exact, np.nan)[known], proxy[known])
    except InputError:  # too few tokens have both
        return np.full(len(tokens), np.nan)
    return np.where(known, fit.predict(np.where(known, proxy, 0.0)), np.nan)


def measured(tokens: pd.DataFrame) -> list[str]:
    """Return the columns that colour some token: stored ones, differences, and what somebody else recorded."""
    schema = {c.name for c in TOKENS}
    further = [str(c) for c in tokens if c not in (*schema, *COLOURS) and pd.api.types.is_float_dtype(tokens[c])]
    return [name for name in (*COLOURS, *further) if name in tokens and bool(tokens[name].notna().any())]


def described(tokens: pd.DataFrame, name: str, estimator: str = "", against: str = "") -> Described:
    """Return how a column of these tokens is called, its unit and what it means.

    Args:
        estimator: Whose baseline and advantage the table has.
        against: Whose advantage was taken off.
    """
    if name == SAMPLER:
        return Described("policy − sampler (log π)", "nats", "log π under the policy minus the sampler's own.")
    if name == ADVANTAGES:
        return Described("advantage − another's", "", f"Advantage under {estimator} minus that under {against}.")
    if name == RATIO:
        stored = "energy_calibrated" in tokens and bool(tokens["energy_calibrated"].notna().any())
        how = "as stored" if stored else "c·proxy^b, fitted to this prompt's exact norms"
        return Described("exact ÷ calibrated proxy", "", f"Exact ‖∇log π‖² over the calibrated proxy ({how}).")
    if name not in {c.name for c in TOKENS}:
        return Described(name, "", "Stored beside the columns of otb-analysis, such as another trainer's numbers.")
    stored = column("tokens", name)
    if name == "grad_norm_sq":
        sketched = "measured_by" in tokens and bool((tokens["measured_by"] == "sketch").any())
        if sketched:
            meaning = f"{stored.meaning} Estimated by sketching: a click shows the standard error; some are below 0."
            return Described("Estimated ‖∇log π‖²", stored.unit, meaning)
        return Described("Exact ‖∇log π‖²", stored.unit, stored.meaning)
    if name in ("baseline", "advantage") and estimator:
        letter = {"baseline": "B_t", "advantage": "A_t"}[name]
        return Described(f"{name} of {estimator}", stored.unit, f"{letter} of {estimator}.")
    return Described(name, stored.unit, stored.meaning)


def _exact(tokens: pd.DataFrame) -> Any:
    if "grad_norm_sq" not in tokens:
        return np.full(len(tokens), np.nan)
    return exact_norms(tokens).to_numpy(np.float64, na_value=np.nan)


def _floats(tokens: pd.DataFrame, name: str) -> Any:
    if name not in tokens:
        return np.full(len(tokens), np.nan)
    return tokens[name].to_numpy(np.float64, na_value=np.nan)
