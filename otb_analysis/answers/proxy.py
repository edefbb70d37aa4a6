"""Whether the free proxy can stand for exact norms: correlations where baselines compare, and what it costs `otb`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otb_analysis.answers.measured import interval_words
from otb_analysis.figures.fidelity import KINDS, comparable, energies, fidelity_columns
from otb_analysis.figures.styles import number
from otb_analysis.statistics import (
    DIFFERENCE,
    MIN_CLUSTERS,
    Fidelity,
    Interval,
    decide,
    fidelity,
    gain_lost,
    is_informative,
)
from otb_analysis.statistics.energies import log_correlation
from otb_analysis.store import RunStore
from otb_analysis.store.measured import exact_groups
from otb_analysis.types import Gram, Label, Proved

PROXY: Label = ("otb", "proxy")
EXACT: Label = ("otb", "exact")


@dataclass(frozen=True)
class Proxy:
    """The proxy against exact norms over the measured tokens of a run; of very many, over those of some prompts."""

    n_tokens: int
    pooled: Interval | None  # Correlation of log w, over all tokens
    within: Interval | None  # The same within (prompt, position), where baselines compare
    kept: Interval | None  # Efficiency of otb with the proxy over that with exact norms; None where ∇J is not known
    gain_lost: Interval | None  # Share of otb's gain over rloo that the proxy loses
    drawn: bool = False  # Tokens were drawn with unequal chances; `pooled` is about all that they stand for


def proxy_of(store: RunStore, grams: Sequence[Gram], known: Proved) -> Proxy | None:
    """Return what a run says of the proxy; None where no token has an exact norm.

    Raises:
        StoreError: A part is broken or lacks a key column.
    """
    if not store.steps_with("tokens", "grad_norm_sq"):
        return None
    tokens, drawn = comparable(exact_groups(store, fidelity_columns())[0], MIN_CLUSTERS)
    table = energies(tokens, "token")
    if table.empty:
        return None
    proxy, exact = table["proxy"].to_numpy(float), table["exact"].to_numpy(float)
    cell = table["cell"].to_numpy(np.int64)
    # A prompt that comes back at a later step is one cluster; `energies` keeps the rows' index.
    named = store.rollouts_df(columns=["step", "group", "prompt_id"]).drop_duplicates(["step", "group"])
    keys = tokens.loc[table.index, ["step", "group"]].merge(named, "left", ["step", "group"])
    by = ["prompt_id"] if keys["prompt_id"].notna().all() else ["step", "group"]
    prompt = keys.groupby(by).ngroup().to_numpy(np.int64)
    chance = tokens.loc[table.index, "inclusion_prob"].to_numpy(float) if drawn else None
    both = any(EXACT in gram.labels for gram in grams)
    pair = decide(grams, EXACT, known, only=[PROXY]).comparison_of(PROXY) if both else None
    return Proxy(
        n_tokens=len(table),
        pooled=log_correlation(proxy, exact, prompt, weight=None if chance is None else 1 / chance),
        within=None if drawn else log_correlation(proxy, exact, prompt, cell),
        kept=None if pair is None else pair.one_look,
        gain_lost=gain_lost(grams, PROXY, EXACT, known=known) if both else None,
        drawn=drawn,
    )


def fidelity_of(store: RunStore) -> list[tuple[str, Fidelity]]:
    """Return how well the proxy follows exact norms, for single tokens and for what OTB weights by; empty without any.

    The numbers are those of the dashboard's page: policy tokens with both energies, of very many those of some prompts,
    and each rollout's running sums up to its first token without an exact norm.
    """
    if not store.steps_with("tokens", "grad_norm_sq"):
        return []
    tokens, _ = comparable(exact_groups(store, fidelity_columns())[0])
    tables = {title: energies(tokens, kind) for kind, title in KINDS.items()}
    return [
        (title, fidelity(table["proxy"].to_numpy(), table["exact"].to_numpy(), cell=table["cell"].to_numpy()))
        for title, table in tables.items()
        if len(table)
    ]


def proxy_line(proxy: Proxy) -> str:
    """Return what the proxy costs, in one sentence."""
    kept, within = proxy.kept, proxy.within
    if kept is None or not is_informative(kept):
        if proxy.drawn and proxy.pooled is not None and proxy.pooled.low is not None:
            return (
                f"Proxy: log correlation with exact norms {interval_words(proxy.pooled)} by {proxy.n_tokens:,} drawn "
                "tokens; whole groups' norms would tell what it costs otb."
            )
        if within is None or within.low is None:
            return "Proxy: what it costs otb is not known."
        return f"Proxy: log correlation with exact norms {interval_words(within)}; what it costs otb is not known."
    keeps = f"otb keeps {interval_words(kept)} of its efficiency"
    if kept.low is not None and kept.low > 1 - DIFFERENCE:
        return f"Use the proxy: {keeps}."
    if kept.high is not None and kept.high < 1:
        return f"The proxy costs: {keeps}."
    return f"The proxy is not shown to cost: {keeps}."


def gain_lost_words(lost: Interval | None) -> tuple[str, str]:
    """Return the share of the gain that a proxy loses as it is shown, a dash without an interval, and what it rests on.

    The share is a ratio of two differences, each within noise: a point alone says nothing.
    """
    if lost is None:
        return number(None), "no gain shown"
    if lost.low is not None:
        return number(lost.estimate), f"95 %: {number(lost.low)} to {number(lost.high)}, {lost.n_clusters} prompts"
    few = lost.n_clusters < MIN_CLUSTERS
    needs = f"needs {MIN_CLUSTERS} prompts, has {lost.n_clusters}"
    return number(None), needs if few else f"no interval on these {lost.n_clusters} prompts"
