"""Every baseline on the same pools of rollouts: raw variance, SF, efficiency, by group size, task and kind of prompt.

A pool's tokens are measured once (exact norms, and count sketches of the scores), so that any estimator on any cut
into groups is a sum of vectors.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    ChainSumConfig,
    CriticConfig,
    GraphPathConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.statistics import (
    PoolGram,
    paired_ratios,
    partitions,
    pool_statistics,
    sketch_noise,
    weight_statistics,
)
from otb_analysis.study import Cell, Study, Tables, rounded
from otb_analysis.study.critics import critic_batches, fitted_critic, with_values
from otb_analysis.study.formats import by_label, ratio_columns, statistics_columns
from otb_analysis.study.policies import fresh_policy, write
from otb_analysis.study.pools import REFERENCE, Pool, measure_pool, pool_grams, promising_prompts
from otb_analysis.training.critic.targets import explained_variance
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.training.warm_start import fit
from otb_analysis.types import Float, Label

SETTINGS = {
    "chain_sum": ("chain_sum", WarmStartConfig(success_low=0.35, success_high=0.60)),
    "chain_sum_high": ("chain_sum", WarmStartConfig(success_low=0.65, success_high=0.85)),
    "graph_path": ("graph_path", WarmStartConfig(success_low=0.35, success_high=0.60)),
}
"""Task and how far its policy was taught."""
MODEL = SmallModelConfig(layers=2, width=64, feed_forward=160)
LENGTHS = {"chain_sum": 32, "graph_path": 16}
"""Tokens an answer may have."""
PROMPTS, POOL, PILOT = 192, 128, 16
CRITIC = CriticConfig(kind="model", learning_rate=1e-3)
LESSONS, LESSON = 24, SampleConfig(prompts=64, group_size=8)
"""Batches that the critic of `value` and `tvm` is fitted to, and rollouts of each."""
SIZES = (2, 4, 8, 16, 32)
SHUFFLES = 2
BUCKETS = 1024
UPDATES = (8, 32, 128, 1024)
"""Prompts of the update that efficiency is stated for; the second heads the page."""
HEAD = 32
ANCHORS: tuple[Label, ...] = (REFERENCE, ("none", "none"))
"""What every estimator is compared with: `rloo`, and no baseline at all."""
FAMILY = ("none", "value", "otb", "otb_loo", "sequence_optimal_loo")
"""One of each kind, which the verdict speaks of: no baseline, a critic, weights with and without the own rollout."""
REGIME_SIZE = 4
REGIMES = ("none", "value", "opo_loo", "sequence_optimal_loo", "otb_loo", "token_optimal_loo")
"""Unbiased prompt by prompt, so that their raw variance may be compared with that of `rloo` there."""
FIRST_PROMPT, FIRST_LESSON = 40_000_000, 60_000_000
QUICK = {"prompts": 16, "pool": 8, "sizes": [2, 4], "shuffles": 1, "buckets": 256, "lessons": 2}
QUICK_MODEL = SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=64)
QUICK_START = WarmStartConfig(success_low=0.2, success_high=1.0, check_prompts=64)


def config_of(name: str, quick: bool) -> TrainConfig:
    """Return the configuration of a policy."""
    task, start = SETTINGS[name]
    if quick:
        return TrainConfig(
            task=task, small_model=QUICK_MODEL, warm_start=QUICK_START,
            chain_sum=ChainSumConfig(terms_max=2, largest=10),
            graph_path=GraphPathConfig(nodes=4, edges=4, distance_min=1),
        )  # fmt: skip
    return TrainConfig(task=task, small_model=MODEL, warm_start=start)


def cells(quick: bool) -> list[Cell]:
    """Return one cell per policy."""
    full = {
        "prompts": PROMPTS, "pool": POOL, "sizes": list(SIZES), "shuffles": SHUFFLES, "buckets": BUCKETS,
        "lessons": LESSONS,
    }  # fmt: skip
    critic = {"critic": asdict(CRITIC), "lesson": asdict(LESSON)}
    fixed = {"pilot": PILOT, "updates": list(UPDATES), "anchors": [list(label) for label in ANCHORS]}
    constants = {"quick": quick, **fixed, **critic, **(QUICK if quick else full)}
    return [Cell(name, constants | _learner(config_of(name, quick))) for name in SETTINGS]


def _learner(config: TrainConfig) -> dict[str, Any]:
    """Everything about the policy that its pools depend on."""
    task = {"task": config.task, "task_settings": asdict(getattr(config, config.task)), "length": LENGTHS[config.task]}
    return {**task, "model": asdict(config.small_model), "start": asdict(config.warm_start)}


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Teach a policy, let it fill the pools, measure them, and compare every estimator at every group size."""
    settings = cell.settings
    config = config_of(cell.name, settings["quick"])
    policy = fresh_policy(config)
    fit(policy.model, policy.tokenizer, policy.task, config)
    length = LENGTHS[config.task]
    pilot = SampleConfig(group_size=settings["pilot"], max_new_tokens=length)
    prompts = promising_prompts(policy, FIRST_PROMPT, settings["prompts"], pilot, seed=1)
    sample = SampleConfig(prompts=len(prompts), group_size=settings["pool"], max_new_tokens=length)
    lesson = replace(LESSON, max_new_tokens=length)
    critic = fitted_critic(
        policy, CRITIC, critic_batches(policy, FIRST_LESSON, settings["lessons"], lesson, 1000, bar), bar
    )
    written = with_values(policy, critic, write(policy, prompts, sample, seed=2))
    pool = measure_pool(policy, written, settings["buckets"], bar=bar)
    facts = prompt_facts(pool)
    estimators, by_prompt = [], []
    for done, size in enumerate(settings["sizes"]):
        cuts = partitions(pool.inputs.group, size, settings["shuffles"], seed=size)
        for block, gram in enumerate(pool_grams(pool, cuts, ANCHORS)):
            known = ANCHORS if block else ()
            estimators += estimator_rows(gram, settings["buckets"], known)
            if size == REGIME_SIZE:
                by_prompt += variance_rows(gram, known)
        bar(done + 1, len(settings["sizes"]), f"{cell.name}: groups of {size}")
    key = {"policy": cell.name}
    whole = {
        "parameters": policy.model.num_parameters(),
        "tokens": int(pool.inputs.mask.sum()),
        "distinct_tokens": len(pool.sketch),
        "success": float(np.mean([row["success"] for row in facts])),
        "explained": rounded(explained_variance(pool.written.table)),
        "corr": weight_statistics(
            _energy(pool), pool.inputs.mask, pool.written.table.total_reward, pool.inputs.group
        ).pooled_total_reward_corr,
        **{name: settings[name] for name in ("prompts", "pool", "shuffles", "buckets", "pilot", "lessons")},
    }
    return {
        "policies": [key | whole],
        "prompts": [key | row for row in facts],
        "estimators": [key | row for row in estimators],
        "variances": [key | row for row in by_prompt],
    }


def _energy(pool: Pool) -> Float:
    return np.zeros(pool.inputs.mask.shape) if pool.inputs.energy is None else pool.inputs.energy


def prompt_facts(pool: Pool) -> list[dict[str, Any]]:
    """Return success, corr(W_T, R) and length spread of every prompt."""
    inputs, paid = pool.inputs, pool.written.table.total_reward
    found = weight_statistics(_energy(pool), inputs.mask, paid, inputs.group)
    length = inputs.mask.sum(axis=1)
    rows = []
    for p, prompt in enumerate(pool.written.rollouts.prompts):
        own = inputs.group == p
        rows.append({
            "prompt": p,
            "text": prompt.text,
            "success": float(paid[own].mean()),
            "corr": rounded(found.total_reward_corr[p]),
            "length": float(length[own].mean()),
            "spread": rounded(length[own].std() / length[own].mean()),
        })  # fmt: skip
    return rows


def estimator_rows(gram: PoolGram, buckets: int, without: Sequence[Label]) -> list[dict[str, Any]]:
    """Return every measure of every estimator of a block but those that an earlier block had."""
    bare = by_label(paired_ratios([gram.gram()], ANCHORS[1], n_prompts=HEAD))
    ratios = {p: by_label(paired_ratios([gram.gram()], n_prompts=p)) for p in UPDATES}
    statistics = {p: pool_statistics(gram, n_prompts=p) for p in UPDATES}
    noise = sketch_noise(gram.gram().inner, buckets).log_ratio[:, 0]
    rows = []
    for m, label in enumerate(gram.labels):
        if label in without:
            continue
        one, pair = statistics[HEAD][m], ratios[HEAD].get(label)
        row = {"size": gram.size, "estimator": label[0], "source": label[1]}
        row |= statistics_columns(one, "projection") | {"bias": rounded(one.relative_bias)}
        row |= {"n_variance": rounded(one.n_variance), "within": rounded(one.within), "between": rounded(one.between)}
        row |= ratio_columns(pair, {"variance": "variance", "sf": "sf"})
        row |= ratio_columns(bare.get(label), {"sf_bare": "sf", "gain_bare": "efficiency"})
        for p in UPDATES:
            own = statistics[p][m]
            row |= {f"efficiency{p}": rounded(own.efficiency)}
            row |= ratio_columns(ratios[p].get(label), {f"gain{p}": "efficiency"})
            if p == HEAD and own.rollout_equivalents is not None:
                row["equivalents"] = rounded(100 * own.rollout_equivalents / own.n_rollouts)
                row |= statistics_columns(own, "efficiency")
        p_value = None if pair is None or pair.efficiency is None else rounded(pair.efficiency.p_value)
        rows.append(row | {"p_value": p_value, "sketch_noise": rounded(noise[m])})
    return rows


def variance_rows(gram: PoolGram, without: Sequence[Label]) -> list[dict[str, Any]]:
    """Return the group variance of the estimators that are unbiased prompt by prompt, for every prompt."""
    kept = [label for label in gram.labels if label[0] in REGIMES and label[1] != "proxy" and label not in without]
    reference = gram.group_variance(REFERENCE)
    return [
        {"prompt": p, "estimator": name, "source": source, "variance": rounded(own[p]), "rloo": rounded(reference[p])}
        for name, source in kept
        for own in [gram.group_variance((name, source))]
        for p in range(len(own))
    ]


STUDY = Study(
    title="Baselines and variance",
    question="Which baseline makes the policy gradient calmer at equal progress, in which groups, on which prompts?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
