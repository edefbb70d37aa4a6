"""The Gram matrix of group gradients as a long table, each unordered pair once, and back."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api.types import union_categoricals

from otb_analysis.schema import TABLES
from otb_analysis.store.parts import Part
from otb_analysis.store.views import read_part, written_columns
from otb_analysis.types import Float, Gram, Int, Label

PRODUCT_TEXTS = ("estimator", "energy_source", "other_estimator", "other_energy_source")
"""The columns of text of `grams` and `subgroups`."""


_KEYS = tuple(c.name for c in TABLES["grams"] if c.key and c.name not in ("step", "n_rollouts"))
_ORDERS: dict[bytes, tuple[tuple[Label, ...], Int]] = {}
"""Labels and groups of Gram matrices in the order of `gram_rows`, by the keys of their rows as bytes on disk."""


def gram_rows(step: int, gram: Gram) -> dict[str, np.ndarray]:
    """Return the columns of the `grams` table for one step.

    The M·P group gradients are put in one row, index m·P + p; the table holds the upper triangle of their
    inner products, diagonal included: MP(MP + 1)/2 rows.
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
        "sketch_dim": np.ma.masked_array(np.full(len(upper), gram.sketch_dim or 0), mask=gram.sketch_dim is None),
    }


def subgroup_rows(step: int, grams: Mapping[int, Gram]) -> dict[str, np.ndarray]:
    """Return the columns of the `subgroups` table for one step: those of `gram_rows`, and the size, for each size."""
    parts = [gram_rows(step, gram) for gram in grams.values()]
    sizes = [np.full(len(part["step"]), size) for size, part in zip(grams, parts, strict=True)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return joined | {"size": np.concatenate(sizes).astype(np.int64)}


def product_rows(table: str, parts: Sequence[Part]) -> pd.DataFrame:
    """Return the rows of one step's parts of `grams` or `subgroups`, their texts as categories.

    A step has half a million rows, and pandas takes a second for each million texts but none for codes.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    rows = [read_part(table, part, categories=PRODUCT_TEXTS) for part in parts]
    return pa.concat_tables(rows).to_pandas()


def read_gram(parts: Sequence[Part], prompt_of: Mapping[int, object]) -> Gram | None:
    """Return the Gram matrix of one step's parts of `grams`; None where they have no rows.

    Most steps of a run pair the same estimators and groups in the same order. Their keys are the same bytes on disk, so
    that only the products are read.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    keys = written_columns(parts[0], _KEYS) if len(parts) == 1 else None
    if keys is not None and keys in _ORDERS:
        rows = read_part("grams", parts[0], only=("inner_product", "n_rollouts", "sketch_dim"))
        labels, groups = _ORDERS[keys]
        inner = _unfolded(rows["inner_product"].to_numpy(), len(labels), len(groups))
        return _gram((inner, labels, groups), rows.slice(0, 1).to_pandas(), prompt_of)
    rows = product_rows("grams", parts)
    if rows.empty:
        return None
    written = _as_written(rows)
    if keys is not None and written is not None:
        if len(_ORDERS) > 64:
            _ORDERS.clear()
        _ORDERS[keys] = written[1:]
    return _gram(written or _by_keys(rows), rows, prompt_of)


def rebuild_gram(rows: pd.DataFrame, prompt_of: Mapping[int, object]) -> Gram:
    """Return the Gram matrix of one step's rows of `grams`.

    Rows and groups come in the order in which `gram_rows` wrote them. A pair that is not in the table (two groups
    measured by different processes) is NaN. Unless `prompt_of` knows all groups, prompts stay unnamed.
    """
    return _gram(_as_written(rows) or _by_keys(rows), rows, prompt_of)


def _gram(parts: "_Parts", rows: pd.DataFrame, prompt_of: Mapping[int, object]) -> Gram:
    inner, labels, groups = parts
    known = all(int(g) in prompt_of for g in groups)
    dim = rows["sketch_dim"].iloc[0]
    return Gram(
        inner=inner,
        labels=labels,
        n_rollouts=int(rows["n_rollouts"].iloc[0]),
        prompt=tuple(prompt_of[int(g)] for g in groups) if known else None,
        groups=np.asarray(groups, dtype=np.int64),
        sketch_dim=None if pd.isna(dim) else int(dim),
    )


_Parts = tuple[Float, tuple[Label, ...], Int]


def _by_keys(rows: pd.DataFrame) -> _Parts:
    """Return products [M, M, P, P], labels [M] and groups [P] of rows in any order, from the keys of each row."""
    # The first of each pair changes slowest, so the order of `gram_rows` is that in which the others appear.
    name, names = _factorize(rows, "other_estimator", "estimator")
    source, sources = _factorize(rows, "other_energy_source", "energy_source")
    label, labels = pd.factorize(name * len(sources) + source)
    group, groups = pd.factorize(np.concatenate([rows["other_group"].to_numpy(), rows["group"].to_numpy()]))
    (m_other, m), (p_other, p) = np.split(label, 2), np.split(group, 2)
    inner = np.full((len(labels),) * 2 + (len(groups),) * 2, np.nan)
    inner[m, m_other, p, p_other] = inner[m_other, m, p_other, p] = rows["inner_product"].to_numpy(np.float64)
    return (
        inner,
        tuple((names[code // len(sources)], sources[code % len(sources)]) for code in labels),
        np.asarray(groups),
    )


def _as_written(rows: pd.DataFrame) -> _Parts | None:
    """Return the same of rows in the order of `gram_rows`, a quarter of the work; None for any other order."""
    size = (math.isqrt(8 * len(rows) + 1) - 1) // 2
    if size * (size + 1) // 2 != len(rows):
        return None
    upper, other = _upper(size)
    keys = []  # of each group gradient, read from the products of the first one with all
    for column in ("estimator", "energy_source", "group"):
        first, second = rows[column], rows[f"other_{column}"]
        keys.append(second.iloc[:size].astype(first.dtype))
        for values, place in ((first, upper), (second, other)):
            of_one = second.iloc[:size].astype(values.dtype)
            codes = [v.cat.codes if column != "group" else v for v in (values, of_one)]
            if (codes[0].to_numpy() != codes[1].to_numpy()[place]).any():
                return None
    written = list(zip(*(key.tolist() for key in keys), strict=True))
    labels = tuple(dict.fromkeys((name, source) for name, source, _ in written))
    groups = list(dict.fromkeys(group for *_, group in written))
    if written != [(*label, group) for label in labels for group in groups]:
        return None
    products = _unfolded(rows["inner_product"].to_numpy(np.float64), len(labels), len(groups))
    return products, labels, np.array(groups, dtype=np.int64)


def _unfolded(products: Float, labels: int, groups: int) -> Float:
    """Return products [M, M, P, P] of the upper triangle of the matrix of all group gradients, row by row."""
    upper, other = _upper(labels * groups)
    inner = np.empty((labels * groups,) * 2)
    inner[upper, other] = inner[other, upper] = products
    return np.ascontiguousarray(inner.reshape(labels, groups, labels, groups).transpose(0, 2, 1, 3))


@lru_cache(maxsize=4)
def _upper(size: int) -> tuple[Int, Int]:
    return np.triu_indices(size)


def _factorize(rows: pd.DataFrame, first: str, second: str) -> tuple[Int, list[str]]:
    """Return codes of one column's texts followed by another's, and the texts in order of appearance."""
    both = [pd.Categorical(rows[name]) for name in (first, second)]
    codes, texts = pd.factorize(union_categoricals(both))
    return codes, list(texts)
