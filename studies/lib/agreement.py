"""How well energies agree with exact norms: the numbers of `statistics.fidelity`, with intervals over prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from otb_analysis.arrays import policy_position
from otb_analysis.energies import calibrate, realized_energy
from otb_analysis.measurement.table import TokenTable
from otb_analysis.statistics import (
    fidelity,
    inclusion_probabilities,
    position_cells,
    realized_fidelity,
    systematic_sample,
)
from otb_analysis.statistics.energies.correlation import correlation, log_correlation
from otb_analysis.types import Bool, Float
from studies.lib.formats import interval_columns


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
