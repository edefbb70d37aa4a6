"""How well energies agree with exact norms: the numbers of `statistics.fidelity`, with intervals over prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from otb_analysis.arrays import policy_position
from otb_analysis.energies import calibrate, realized_energy
from otb_analysis.measurement.table import TokenTable
from otb_analysis.statistics import (
    Interval,
    cluster_jackknife,
    fidelity,
    inclusion_probabilities,
    position_cells,
    realized_fidelity,
    systematic_sample,
)
from otb_analysis.statistics.energies.cells import deviation
from otb_analysis.study.formats import interval_columns
from otb_analysis.types import Bool, Float, Int


def calibrated(exact: Float, proxy: Float, mask: Bool, share: float, seed: int) -> Float:
    """Return the proxy calibrated on a share of the tokens, drawn by the proxy as the level `sampled` does it."""
    prob = np.full(mask.shape, np.nan)
    prob[mask] = inclusion_probabilities(proxy[mask], round(share * int(mask.sum())))
    drawn = np.zeros(mask.shape, bool)
    drawn[mask] = systematic_sample(prob[mask], seed)
    return calibrate(np.where(drawn, exact, np.nan), proxy, prob).predict(proxy)


def agreement_rows(table: TokenTable, energies: Mapping[str, Float], sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return correlations of each source with `exact`, of w_t and of W_t, pooled and within (prompt, position)."""
    rows = []
    cells = position_cells(table.group, table.mask.shape[1])[:, :1] + policy_position(table.mask)
    prompt = np.broadcast_to(table.group[:, None], table.mask.shape)[table.mask]
    for source in sources:
        for of in ("w", "W"):
            x, y = (
                (energies[name] if of == "w" else realized_energy(energies[name], table.mask))[table.mask]
                for name in (source, "exact")
            )
            pair = energies[source], energies["exact"], table.mask
            agree = fidelity(*pair, cells) if of == "w" else realized_fidelity(*pair, table.group)
            rows.append({
                "source": source,
                "of": of,
                **interval_columns("pooled", correlation(x, y, prompt)),
                **interval_columns("within", correlation(x, y, prompt, cells[table.mask])),
                **interval_columns("log_pooled", log_correlation(x, y, prompt)),
                **interval_columns("log_within", log_correlation(x, y, prompt, cells[table.mask])),
                "positive": float(np.mean((x > 0) & (y > 0))),
                "spearman": agree.pooled.spearman,
                "spearman_within": agree.within.spearman if agree.within else None,
            })  # fmt: skip
    return rows


def log_correlation(x: Float, y: Float, prompt: Int, cell: Int | None = None) -> Interval | None:
    """Return the correlation of log x and log y, over tokens at which both are positive."""
    both = (x > 0) & (y > 0)
    return correlation(np.log(x[both]), np.log(y[both]), prompt[both], None if cell is None else cell[both])


def correlation(x: Float, y: Float, prompt: Int, cell: Int | None = None) -> Interval | None:
    """Return the Pearson correlation of two variables [n] with a jackknife interval over prompts.

    corr(x − x̄_c, y − ȳ_c) with (prompt, position) cells, corr(x, y) without; no cell spans two prompts. The interval is
    formed on Fisher's scale, atanh r, which is half the logit of (1 + r)/2.

    Returns:
        None where either variable is constant; a point below 16 prompts.
    """
    if cell is not None:
        cell = np.unique(cell, return_inverse=True)[1]
        x, y = deviation(x, cell), deviation(y, cell)
    code = np.unique(prompt, return_inverse=True)[1]
    scale = [np.abs(v).max(initial=0.0) or 1.0 for v in (x, y)]
    x, y = x / scale[0], y / scale[1]
    sums = np.stack([np.bincount(code, v) for v in (np.ones_like(x), x, y, x * x, x * y, y * y)], axis=1)
    found = cluster_jackknife(sums, _halfway, "Pearson correlation", scale="logit")
    if found is None:
        return None
    ends = {name: None if (end := getattr(found, name)) is None else 2 * end - 1 for name in ("low", "high")}
    return replace(found, estimate=2 * found.estimate - 1, **ends)


def _halfway(mean: Float) -> Float:
    """Return (1 + r)/2 from means of 1, x, y, x², xy, y²."""
    n, x, y, xx, xy, yy = np.moveaxis(mean, -1, 0)
    spread = (xx * n - x * x) * (yy * n - y * y)
    r = np.divide(xy * n - x * y, np.sqrt(np.maximum(spread, 0)), out=np.full_like(spread, np.nan), where=spread > 0)
    return (1 + r) / 2
