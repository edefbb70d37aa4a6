"""Token weights: which tokens STAPO silences, what of the gradient they carry, and what such weights do to an update.

On millions of tokens of small policies, with exact norms of the silenced ones and of as many drawn by lot; and expected
shares on a pretrained model.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    WarmStartConfig,
)
from otb_analysis.objectives.token_weights import DelightOptions, StapoOptions
from otb_analysis.statistics import (
    Interval,
    PoolGram,
    cluster_jackknife,
    jackknife_interval,
    paired_ratios,
    pool_statistics,
)
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Float, Gram
from studies.lib import Cell, Study, Tables, interval_columns, rounded
from studies.lib.formats import by_label, ratio_columns, ratio_interval, statistics_columns
from studies.lib.policies import different_prompts, taught
from studies.lib.results import Gathered
from studies.lib.seeds import taught_config

from . import real
from .pools import ARMS, SUMS, Found, Setting, collect, gram_of

POLICIES = {
    "chain_sum": ("chain_sum", 32, WarmStartConfig(success_low=0.35, success_high=0.60)),
    "chain_sum_high": ("chain_sum", 32, WarmStartConfig(success_low=0.65, success_high=0.85)),
    "graph_path": ("graph_path", 16, WarmStartConfig(success_low=0.35, success_high=0.60)),
}
"""Task, tokens an answer may have, and how far the policy was taught."""
PAIRS = tuple((p, h) for p in (0.001, 0.01, 0.05) for h in (0.1, 0.5, 1.0))
"""Thresholds (τ_p, τ_h) at which shares are counted; the default is one of them."""
FULL = Setting(512, 128, 0, group=8, gram=256, buckets=2048, block=32, pairs=PAIRS)
SMALL = Setting(24, 16, 0, group=8, gram=24, buckets=256, block=24, pairs=PAIRS)
UPDATE = 32
"""Prompts of the update whose efficiency and shares of ‖ḡ‖² are stated."""
FIRST_PROMPT = 90_000_000


def cells(quick: bool) -> list[Cell]:
    """Return one cell per small policy, and one of the pretrained model."""
    size = asdict(SMALL if quick else FULL) | {"pairs": [list(pair) for pair in PAIRS]}
    options = {"stapo": asdict(StapoOptions()), "delightful": asdict(DelightOptions())}
    made = []
    for name, (task, length, start) in POLICIES.items():
        config = taught_config(task, start, quick)
        learner = {"model": asdict(config.small_model), "start": asdict(config.warm_start)}
        learner |= {"task": task, "task_settings": asdict(getattr(config, task)), "update": UPDATE}
        made.append(Cell(name, size | learner | options | {"length": length, "quick": quick, "arms": list(ARMS)}))
    return made[:1] if quick else [*made, real.cell(PAIRS)]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Measure a small policy's tokens, or a pretrained one's contexts."""
    if cell.name.startswith("smollm2"):
        return real.measure(cell, bar)
    s = cell.settings
    setting = Setting(**{name: s[name] for name in asdict(FULL) if name != "pairs"}, pairs=PAIRS)
    policy = taught(taught_config(s["task"], POLICIES[cell.name][2], s["quick"]))
    prompts = different_prompts(policy, FIRST_PROMPT, setting.prompts)
    found = collect(policy, prompts, setting, bar)
    gram = gram_of(found, setting)
    key = {"policy": cell.name}
    sums = np.concatenate(found.sums)
    whole = {"parameters": policy.model.num_parameters(), "prompts": len(prompts), "rollouts": setting.rollouts}
    whole |= {name: int(total) for name, total in zip(SUMS, sums.sum(axis=0), strict=True) if "_" not in name}
    tables, compared = Gathered(), arm_rows(gram)
    for row in compared:
        row |= interval_columns("square_share", square_share(gram.gram(), row["arm"]))
    tables.add(
        key,
        policies=[whole | silenced_part(sums)],
        thresholds=share_rows(found, sums),
        kinds=silenced_tokens(found),
        arms=compared,
    )
    return tables


def silenced_part(sums: Float) -> dict[str, float | None]:
    """Return how long silenced scores are, over those drawn by lot, and their share of ΣA²‖s‖² over all tokens."""
    k = {name: at for at, name in enumerate(SUMS)}
    ratio = cluster_jackknife(
        sums,
        lambda m: m[..., k["norm_silenced"]] / m[..., k["silenced"]] / (m[..., k["norm_drawn"]] / m[..., k["drawn"]]),
        "mean ‖s‖² of silenced over drawn tokens",
    )
    share = ratio_interval(sums[:, k["power_silenced"]], sums[:, k["power_all"]], "share of ΣA²‖s‖²")
    return interval_columns("norm_ratio", ratio) | interval_columns("power_share", share)


def share_rows(found: Found, sums: Float) -> list[dict[str, float | None]]:
    """Return the share of tokens that STAPO silences at each pair of thresholds."""
    grid, tokens = np.concatenate(found.grid), sums[:, SUMS.index("tokens")]
    rows = []
    for k, (probability, entropy) in enumerate(PAIRS):
        share = ratio_interval(grid[:, k], tokens, "share of tokens", "linear")
        rows.append({"probability": probability, "entropy": entropy} | interval_columns("share", share))
    return rows


def silenced_tokens(found: Found) -> list[dict[str, float | str]]:
    """Return the tokens that are silenced most often, with their share among all tokens."""
    silenced, every = sum(found.silenced.values()), sum(found.every.values())
    return [
        {"token": repr(text), "silenced": count / silenced, "all": found.every[text] / every}
        for text, count in found.silenced.most_common(6)
    ]


def arm_rows(gram: PoolGram) -> list[dict[str, Any]]:
    """Return bias, projection, variance, SF and efficiency of every arm, over those of `rloo`."""
    pairs = by_label(paired_ratios([gram.gram()], n_prompts=UPDATE))
    rows = []
    for one in pool_statistics(gram, n_prompts=UPDATE):
        pair = pairs.get((one.estimator, one.energy_source))
        row = {"arm": one.estimator, "bias": rounded(one.relative_bias)} | statistics_columns(one, "projection")
        rows.append(row | ratio_columns(pair, {name: name for name in ("variance", "sf", "efficiency")}))
    return rows


def square_share(gram: Gram, arm: str) -> Interval | None:
    """Return what share of E‖ḡ‖² of `rloo` in an update the tokens carry that an arm takes away: 1 − ⟨ḡ_arm, ḡ⟩/‖ḡ‖².

    E⟨a, b⟩ of means over U prompts is (mean of a_p·b_p)/U + (1 − 1/U)·(mean of a_p·b_q, p ≠ q).
    """
    labels = [label[0] for label in gram.labels]
    r, m, count = labels.index("rloo"), labels.index(arm), gram.n_prompts

    def every(x: Float) -> Float:
        own = np.diag(x)
        pairs = x.sum(axis=0) + x.sum(axis=1) - 2 * own  # products in which a prompt takes part
        total = x.sum() - own.sum()
        diagonal = np.concatenate([[own.mean()], (own.sum() - own) / (count - 1)])
        rest = (count - 1) * (count - 2)
        across = np.concatenate([[total / (count * (count - 1))], (total - pairs) / rest])
        return diagonal / UPDATE + (1 - 1 / UPDATE) * across

    share = 1 - every(gram.inner[m, r]) / every(gram.inner[r, r])
    return jackknife_interval(float(share[0]), share[1:], "share of ‖ḡ‖²", "linear")


STUDY = Study(
    title="Token weights",
    question="Which tokens does STAPO silence, what share of the gradient do they carry, and what do STAPO and "
    "Delightful Policy Gradient make of an update?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
