"""What was found, by policy and setting: columns of the tables as arrays."""

from collections.abc import Mapping, Sequence

import numpy as np

from otb_analysis.statistics import seed_mean
from otb_analysis.study import Rows, distinct, select
from otb_analysis.types import Float


def column(rows: Rows, name: str) -> Float:
    """Return a column as an array."""
    return np.array([row[name] for row in rows], dtype=float)


def with_corr(rows: Rows) -> Rows:
    """Return the policies whose energies and rewards both vary."""
    return [row for row in rows if row["corr"] is not None]


def mistake_rates(tables: Mapping[str, Rows]) -> list[float]:
    """Return the rates of mistakes of the derailment process."""
    return distinct(tables["derailment"], "mistakes")


def exact(tables: Mapping[str, Rows], mistakes: float, baseline: str) -> float:
    """Return the exact variance of a baseline on the derailment process."""
    return select(tables["derailment"], mistakes=mistakes, baseline=baseline)[0]["variance"]


def fact(tables: Mapping[str, Rows], mistakes: float, name: str) -> float:
    """Return a fact of the derailment process."""
    return select(tables["derailment"], mistakes=mistakes)[0][name]


def chunks(tables: Mapping[str, Rows], mistakes: float, n: int, estimator: str, measure: str) -> Float:
    """Return a measure of an estimator on each chunk of sampled groups."""
    return column(select(tables["derailment_groups"], mistakes=mistakes, n=n, estimator=estimator), measure)


def interval(tables: Mapping[str, Rows], mistakes: float, n: int, name: str) -> tuple[float, float, float]:
    """Return N·SF of an estimator with Student's interval over chunks."""
    found = seed_mean(chunks(tables, mistakes, n, name, "nsf"), f"N·SF of {name}")
    ends = (np.nan, np.nan, np.nan) if found is None else (found.estimate, found.low, found.high)
    return tuple(np.nan if x is None else x for x in ends)  # type: ignore[return-value]


def mean_words(tables: Mapping[str, Rows], mistakes: float, n: int, name: str, measure: str) -> str:
    """Return the mean of a measure over chunks with its interval, in words."""
    found = seed_mean(chunks(tables, mistakes, n, name, measure), measure)
    if found is None or found.low is None or found.high is None:
        return "–"
    return f"{found.estimate:.2f} ± {(found.high - found.low) / 2:.2f}"


def listed(tables: Mapping[str, Rows], found: Sequence[tuple[float, float | None, float | None]]) -> str:
    """Return numbers at each rate of mistakes, in words."""
    parts = []
    for mistakes, (value, low, high) in zip(mistake_rates(tables), found, strict=True):
        ends = "" if low is None or high is None else f" ({low:.2f}–{high:.2f})"
        parts.append(f"{value:.2f}{ends} at J = {fact(tables, mistakes, 'success'):.2f}")
    return ", ".join(parts)
