"""The Gram matrix of group gradients as a long table, each unordered pair once, and back."""

import numpy as np
import pandas as pd

from otb_analysis.types import Gram


def gram_rows(step: int, gram: Gram) -> dict[str, np.ndarray]:
    """Return the columns of the `grams` table for one step.

    The M·P group gradients are put in one row, index m·P + p; the table holds the upper triangle of their
    inner products, diagonal included: MP(MP + 1)/2 rows.

    Args:
        step: The step.
        gram: Inner products; its symmetry is trusted, the upper triangle is what is stored.
    """
    n_rows, n_groups = len(gram.labels), gram.n_prompts
    upper, other = np.triu_indices(n_rows * n_groups)
    names = np.array([name for name, _ in gram.labels], dtype=object)
    sources = np.array([source for _, source in gram.labels], dtype=object)
    m, p, m_other, p_other = upper // n_groups, upper % n_groups, other // n_groups, other % n_groups
    return {
        "step": np.full(len(upper), step, dtype=np.int64),
        "estimator": names[m],
        "energy_source": sources[m],
        "group": gram.group_index[p],
        "other_estimator": names[m_other],
        "other_energy_source": sources[m_other],
        "other_group": gram.group_index[p_other],
        "inner_product": np.asarray(gram.inner, dtype=np.float64)[m, m_other, p, p_other],
        "n_rollouts": np.full(len(upper), gram.n_rollouts, dtype=np.int64),
    }


def rebuild_gram(rows: pd.DataFrame) -> Gram | None:
    """Return the Gram matrix of one step's rows of `grams`, or None when there are none.

    Rows and groups come in the order in which `gram_rows` wrote them. A pair that is not in the table (two groups
    measured by different processes) is NaN.

    Args:
        rows: Rows of one step, all columns.
    """
    if rows.empty:
        return None
    labels = _both(rows, ["other_estimator", "other_energy_source"], ["estimator", "energy_source"])
    groups = _both(rows, ["other_group"], ["group"])
    (label_code, label_names), (group_code, group_names) = labels.factorize(), groups.factorize()
    m_other, m = np.split(label_code, 2)
    p_other, p = np.split(group_code, 2)
    gram = np.full((len(label_names),) * 2 + (len(group_names),) * 2, np.nan)
    gram[m, m_other, p, p_other] = gram[m_other, m, p_other, p] = rows["inner_product"].to_numpy(np.float64)
    return Gram(
        inner=gram,
        labels=tuple((str(name), str(source)) for name, source in label_names),
        n_rollouts=int(rows["n_rollouts"].iloc[0]),
        groups=np.array([group for (group,) in group_names], dtype=np.int64),
    )


def _both(rows: pd.DataFrame, first: list[str], second: list[str]) -> pd.MultiIndex:
    """Return the keys of the pairs' second members, then of their first: the order of `gram_rows` appears that way."""
    pairs = [zip(*(rows[name] for name in names), strict=True) for names in (first, second)]
    return pd.MultiIndex.from_tuples([key for pair in pairs for key in pair], names=first)
