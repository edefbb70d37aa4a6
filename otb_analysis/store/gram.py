"""The Gram matrix of group gradients as a long table, each unordered pair once, and back; and what is kept of it.

Comparing estimators needs some blocks of a Gram matrix and not its half a million rows, so these are a row of the
catalogue (`products`), made when the step is written. They hold nothing of their own.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api.types import union_categoricals

from otb_analysis.estimators import standing_for_truth
from otb_analysis.statistics import REFERENCE
from otb_analysis.types import Float, Gram, Reduced

GRAM_TEXTS = ("estimator", "energy_source", "other_estimator", "other_energy_source")
"""The columns of text of `grams` and `subgroups`."""


def gram_rows(step: int, gram: Gram) -> dict[str, np.ndarray]:
    """Return the columns of the `grams` table for one step.

    The M·P group gradients are put in one row, index m·P + p; the table holds the upper triangle of their
    inner products, diagonal included: MP(MP + 1)/2 rows.
    """
    n_rows, n_groups = len(gram.labels), gram.n_prompts
    upper, other = np.triu_indices(n_rows * n_groups)
    names, sources = np.array(gram.labels, dtype=object).reshape(-1, 2).T
    m, p, m_other, p_other = upper // n_groups, upper % n_groups, other // n_groups, other % n_groups
    return {
        "step": np.full(len(upper), step, dtype=np.int64),
        "estimator": names[m], "energy_source": sources[m], "group": gram.group_index[p],
        "other_estimator": names[m_other], "other_energy_source": sources[m_other],
        "other_group": gram.group_index[p_other],
        "inner_product": np.asarray(gram.inner, dtype=np.float64)[m, m_other, p, p_other],
        "n_rollouts": np.full(len(upper), gram.n_rollouts, dtype=np.int64),
        "sketch_dim": np.ma.masked_array(np.full(len(upper), gram.sketch_dim or 0), mask=gram.sketch_dim is None),
    }  # fmt: skip


def subgroup_rows(step: int, grams: Mapping[int, Gram]) -> dict[str, np.ndarray]:
    """Return the columns of the `subgroups` table for one step: those of `gram_rows`, and the size, for each size."""
    parts = [gram_rows(step, gram) for gram in grams.values()]
    sizes = [np.full(len(part["step"]), size) for size, part in zip(grams, parts, strict=True)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return joined | {"size": np.concatenate(sizes).astype(np.int64)}


def derived(config: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> Iterator[tuple[int, bytes]]:
    """Yield what comparisons read of a step's Gram matrices: of whole groups (size 0) reduced, of smaller ones whole.

    Args:
        config: The run's configuration, which says what is proved to stand for ∇J.
        tables: The step's rows of `grams`, `subgroups` and `rollouts`, where it has them.
    """
    for table in ("grams", "subgroups"):
        for size, gram in rebuild_grams([tables[table]] if table in tables else [], tables.get("rollouts")):
            heading: dict[str, object] = {
                "labels": gram.labels, "n_rollouts": gram.n_rollouts, "prompt": gram.prompt,
                "sketch_dim": gram.sketch_dim, "groups": gram.group_index.tolist(),
            }  # fmt: skip
            arrays = [gram.inner]
            if not size:
                kept = gram.reduced((REFERENCE, standing_for_truth(gram.labels, config))).kept
                assert kept is not None
                arrays = [kept.own, kept.products, *(array for pair in kept.means.values() for array in pair)]
                heading["means"] = [sorted(members) for members in kept.means]
            text = json.dumps(heading | {"shapes": [array.shape for array in arrays]}).encode()
            text += b" " * (-(len(text) + 1) % 8)  # the numbers begin where a reader can use them in place
            yield size, text + b"\n" + b"".join(np.ascontiguousarray(a, "<f8").tobytes() for a in arrays)


def unpacked(packed: bytes) -> Gram:
    """Return the matrix that `derived` packed, reduced or whole."""
    at, arrays = packed.index(b"\n") + 1, list[Float]()
    heading = json.loads(packed[:at])
    for shape in heading["shapes"]:
        size = math.prod(shape)
        arrays.append(np.require(np.frombuffer(packed, "<f8", size, at), requirements="A").reshape(shape))
        at += 8 * size
    labels, prompt = tuple((name, source) for name, source in heading["labels"]), heading["prompt"]
    fields: dict[str, Any] = {
        "labels": labels, "n_rollouts": heading["n_rollouts"], "prompt": None if prompt is None else tuple(prompt),
        "groups": np.array(heading["groups"], dtype=np.int64), "sketch_dim": heading["sketch_dim"],
    }  # fmt: skip
    if "means" not in heading:
        return Gram(arrays[0], **fields)
    diagonal, products, *pairs = arrays
    members = [frozenset((name, source) for name, source in some) for some in heading["means"]]
    means = dict(zip(members, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    return Gram(np.empty((len(labels),) * 2 + (0, 0)), **fields, kept=Reduced(diagonal, products, means))


def rebuild_grams(parts: Sequence[pa.Table], rollouts: pa.Table | None) -> Iterator[tuple[int, Gram]]:
    """Yield size (0: whole groups) and matrix of what one step's rows of `grams` or `subgroups` hold.

    Rows and groups come in the order in which `gram_rows` wrote them. Unless the step's `rollouts` name the prompts of
    all groups, prompts stay unnamed.
    """
    if not any(map(len, parts)):
        return
    prompt_of = dict[int, object]()
    if rollouts is not None and "prompt_id" in rollouts.column_names:
        named = zip(rollouts["group"].to_pylist(), rollouts["prompt_id"].to_pylist(), strict=True)
        prompt_of = {group: name for group, name in named if name is not None}
    rows = pa.concat_tables(parts, promote_options="default")
    for at, field in enumerate(rows.schema):  # as categories: pandas takes a second for each million texts
        if field.name in GRAM_TEXTS and not pa.types.is_dictionary(field.type):
            rows = rows.set_column(at, field.name, rows[at].dictionary_encode())
    frame: Any = rows.unify_dictionaries().to_pandas()
    for size, some in frame.groupby("size") if "size" in frame else [(0, frame)]:
        # The first of each pair changes slowest, so the order of `gram_rows` is that in which the others appear.
        (name, names), (source, sources) = (
            pd.factorize(union_categoricals([pd.Categorical(some[f"other_{text}"]), pd.Categorical(some[text])]))
            for text in ("estimator", "energy_source")
        )
        label, codes = pd.factorize(name * len(sources) + source)
        group, groups = pd.factorize(np.concatenate([some["other_group"].to_numpy(), some["group"].to_numpy()]))
        (m_other, m), (p_other, p) = np.split(label, 2), np.split(group, 2)
        # A pair that is not in the table (two groups measured by different processes) is NaN.
        inner = np.full((len(codes),) * 2 + (len(groups),) * 2, np.nan)
        inner[m, m_other, p, p_other] = inner[m_other, m, p_other, p] = some["inner_product"].to_numpy(np.float64)
        labels = tuple((str(names[code // len(sources)]), str(sources[code % len(sources)])) for code in codes)
        groups = np.asarray(groups, dtype=np.int64)
        dim: Any = some["sketch_dim"].iloc[0] if "sketch_dim" in some else None  # a run from before sketches has none
        prompts = [prompt_of[g] for g in groups.tolist() if g in prompt_of]
        prompt = tuple(prompts) if len(prompts) == len(groups) else None
        n_rollouts, sketch_dim = int(some["n_rollouts"].iloc[0]), None if pd.isna(dim) else int(dim)
        yield int(size), Gram(inner, labels, n_rollouts, prompt, groups, sketch_dim)
