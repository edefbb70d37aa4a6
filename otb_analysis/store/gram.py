"""The Gram matrix of group gradients as a long table, each unordered pair once, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from pandas.api.types import union_categoricals

from otb_analysis.schema import TABLES
from otb_analysis.store.merged import Part
from otb_analysis.store.views import Opened, opened, read_opened, read_part, written_columns
from otb_analysis.types import Float, Gram, Int, Label, ReducedGram

PRODUCT_TEXTS = ("estimator", "energy_source", "other_estimator", "other_energy_source")
"""The columns of text of `grams` and `subgroups`."""


_VALUE = "inner_product"
_KEYS = tuple(c.name for c in TABLES["grams"] if c.name not in ("step", _VALUE))
_ORDERS: dict[bytes, "_Order"] = {}
"""What Gram matrices in the order of `gram_rows` hold, by all columns but their products as bytes on disk."""


@dataclass(frozen=True)
class _Order:
    """What each product of a Gram matrix is of."""

    labels: tuple[Label, ...]
    groups: Int
    n_rollouts: int
    sketch_dim: int | None


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


def read_gram(
    parts: Sequence[Part], prompt_of: Mapping[int, object], references: Sequence[Label | frozenset[Label]] | None = None
) -> Gram | None:
    """Return the Gram matrix of one step's parts of `grams`; None where they have no rows.

    Most steps of a run pair the same estimators and groups in the same order. Their other columns are the same bytes on
    disk, so that only the products are read.

    Args:
        references: Return only what comparing estimators with these needs, as `Gram.reduced` does.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    one = opened(parts[0], PRODUCT_TEXTS) if len(parts) == 1 else None
    keys = None if one is None else written_columns(one, _KEYS)
    if one is None or keys is None or (order := _order_of(one, keys)) is None:
        rows = product_rows("grams", parts) if one is None else read_opened("grams", one).to_pandas()
        if rows.empty:
            return None
        gram = rebuild_gram(rows, prompt_of)
        return gram if references is None else gram.reduced(references)
    products = read_opened("grams", one, only=(_VALUE,))[_VALUE].to_numpy()
    place = _places(len(order.labels), len(order.groups))
    if references is None:
        return _gram(products[place].astype(np.float64), order, prompt_of)
    of_same = products[np.einsum("mnpp->mnp", place)].astype(np.float64)
    blocks = (lambda m, other: products[place[m, other]].astype(np.float64, copy=False), np.einsum("mnp->mn", of_same))
    return ReducedGram.of(*_heading(order, prompt_of), references, *blocks)


def _order_of(one: Opened, keys: bytes) -> _Order | None:
    """Return what the rows of a part pair, in the order of `gram_rows`; None for any other order.

    Read one column after the other: all of a step's rows at once are a hundred MB.
    """
    order = _ORDERS.get(keys)  # once: another thread may clear them
    if order is None:
        order = _as_written(lambda name: read_opened("grams", one, only=(name,))[name].to_pandas())
        if len(_ORDERS) > 64:
            _ORDERS.clear()
        if order is not None:
            _ORDERS[keys] = order
    return order


def rebuild_gram(rows: pd.DataFrame, prompt_of: Mapping[int, object]) -> Gram:
    """Return the Gram matrix of one step's rows of `grams`.

    Rows and groups come in the order in which `gram_rows` wrote them. A pair that is not in the table (two groups
    measured by different processes) is NaN. Unless `prompt_of` knows all groups, prompts stay unnamed.
    """
    order = _as_written(rows.__getitem__)
    if order is None:
        return _gram(*_by_keys(rows), prompt_of)
    place = _places(len(order.labels), len(order.groups))
    return _gram(rows[_VALUE].to_numpy(np.float64)[place], order, prompt_of)


def _gram(inner: Float, order: _Order, prompt_of: Mapping[int, object]) -> Gram:
    return Gram(inner, *_heading(order, prompt_of))


def _heading(
    order: _Order, prompt_of: Mapping[int, object]
) -> tuple[tuple[Label, ...], int, tuple[object, ...] | None, Int, int | None]:
    groups = order.groups.tolist()
    names = tuple(prompt_of[g] for g in groups) if all(g in prompt_of for g in groups) else None
    return order.labels, order.n_rollouts, names, order.groups, order.sketch_dim


def _order(labels: tuple[Label, ...], groups: Int, column: Callable[[str], Any]) -> _Order:
    dim, n_rollouts = (column(name).iloc[0] for name in ("sketch_dim", "n_rollouts"))
    groups = np.asarray(groups, dtype=np.int64)
    return _Order(labels, groups, int(n_rollouts), None if pd.isna(dim) else int(dim))


def _by_keys(rows: pd.DataFrame) -> tuple[Float, _Order]:
    """Return products [M, M, P, P] of rows in any order, and what they are of, from the keys of each row."""
    # The first of each pair changes slowest, so the order of `gram_rows` is that in which the others appear.
    name, names = _factorize(rows, "other_estimator", "estimator")
    source, sources = _factorize(rows, "other_energy_source", "energy_source")
    label, labels = pd.factorize(name * len(sources) + source)
    group, groups = pd.factorize(np.concatenate([rows["other_group"].to_numpy(), rows["group"].to_numpy()]))
    (m_other, m), (p_other, p) = np.split(label, 2), np.split(group, 2)
    inner = np.full((len(labels),) * 2 + (len(groups),) * 2, np.nan)
    inner[m, m_other, p, p_other] = inner[m_other, m, p_other, p] = rows["inner_product"].to_numpy(np.float64)
    named = tuple((names[code // len(sources)], sources[code % len(sources)]) for code in labels)
    return inner, _order(named, np.asarray(groups), rows.__getitem__)


def _as_written(column: Callable[[str], Any]) -> _Order | None:
    """Return what rows in the order of `gram_rows` are of, from their columns; None for any other order."""
    count = len(column("group"))
    size = (math.isqrt(8 * count + 1) - 1) // 2
    if not count or size * (size + 1) // 2 != count:
        return None
    keys = []  # of each group gradient, read from the products of the first one with all
    for name in ("estimator", "energy_source", "group"):
        first, second = column(name), column(f"other_{name}")
        keys.append(second.iloc[:size].astype(first.dtype))
        for values in (first, second):
            of_one = second.iloc[:size].astype(values.dtype)
            codes, one = ((v.cat.codes if name != "group" else v).to_numpy() for v in (values, of_one))
            pairs = [one[k:] if values is second else np.full(size - k, one[k]) for k in range(size)]
            if (codes != np.concatenate(pairs)).any():
                return None
    written = list(zip(*(key.tolist() for key in keys), strict=True))
    labels = tuple(dict.fromkeys((name, source) for name, source, _ in written))
    groups = list(dict.fromkeys(group for *_, group in written))
    if written != [(*label, group) for label in labels for group in groups]:
        return None
    return _order(labels, np.array(groups), column)


@lru_cache(maxsize=4)
def _places(labels: int, groups: int) -> NDArray[np.int32]:
    """Return which row of `gram_rows` holds each product [M, M, P, P]."""
    size = labels * groups
    every = np.arange(size, dtype=np.int32)
    one, start = (of.reshape(labels, 1, groups, 1) for of in (every, every * (2 * size - every - 1) // 2))
    # Row start[i] + j is that of i ≤ j; exchanged it comes later.
    place = start + one.reshape(1, labels, 1, groups)
    return np.minimum(place, start.reshape(1, labels, 1, groups) + one, out=place)


def _factorize(rows: pd.DataFrame, first: str, second: str) -> tuple[Int, list[str]]:
    """Return codes of one column's texts followed by another's, and the texts in order of appearance."""
    both = [pd.Categorical(rows[name]) for name in (first, second)]
    codes, texts = pd.factorize(union_categoricals(both))
    return codes, list(texts)
