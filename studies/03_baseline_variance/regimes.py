"""On which prompts a baseline is calmer than leave-one-out means: by success rate, corr(W_T, R) and length spread."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.statistics import Interval, log_ratio_t
from otb_analysis.study import Rows, column_words, distinct, interval_columns, markdown_table, select
from otb_analysis.study.agreement import correlation
from otb_analysis.study.words import span_words

KINDS = {"success": "success rate", "corr": "corr(W_T, R)", "spread": "length spread"}


def regimes_table(tables: Mapping[str, Rows]) -> str:
    """Return, policy by policy, the variance ratio in the lowest and highest third of prompts, and rank correlations.

    Prompts of one policy are distinct, so each is a cluster; policies share some of theirs and are not pooled.
    """
    table, out = _usable(tables), []
    policies = distinct(table, "policy")
    for name in distinct(table, "estimator"):
        for kind, words in KINDS.items():
            cells = [_cell(select(table, estimator=name, policy=policy), kind) for policy in policies]
            out.append([f"`{name}` by {words}", *cells])
    heads = [f"`{policy}`: {_thirds_words(select(table, policy=policy))}" for policy in policies]
    return markdown_table(["estimator", *heads], out)


def _usable(tables: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Per prompt and estimator: variance, that of `rloo`, and what kind of prompt it is; those that have all of it."""
    kinds = {(row["policy"], row["prompt"]): row for row in tables["prompts"]}
    rows = []
    for row in tables["variances"]:
        kind = kinds[row["policy"], row["prompt"]]
        usable = row["variance"] is not None and row["rloo"] is not None and min(row["variance"], row["rloo"]) > 0
        if usable and all(kind[name] is not None for name in KINDS):
            rows.append(dict(row) | {name: kind[name] for name in KINDS})
    return rows


def _thirds_words(rows: Rows) -> str:
    return f"{len(distinct(rows, 'prompt'))} prompts"


def _cell(rows: Rows, kind: str) -> str:
    """Geometric mean ratio in the lowest and the highest third of the prompts, and the rank correlation."""
    value = np.array([row[kind] for row in rows])
    order = np.argsort(value, kind="stable")
    own, reference = (np.array([row[name] for row in rows]) for name in ("variance", "rloo"))
    low, _, high = np.array_split(order, 3)
    ends = [
        f"{_words(log_ratio_t(own[part], reference[part], 'variance'))} at {span_words(value[part].tolist())}"
        for part in (low, high)
    ]
    ranks = [stats.rankdata(x) for x in (value, own / reference)]
    return f"{ends[0]}; {ends[1]}; ρ {_words(correlation(ranks[0], ranks[1], np.arange(len(rows))), '+.2f')}"


def _words(found: Interval | None, form: str = ".2f") -> str:
    return column_words(interval_columns("x", found), "x", form)
