"""What stands in for exact score norms, at which price: correlations where they matter, and efficiency as weights.

Each cell is one model at random init, after its supervised start, and after a few dozen steps of RL.
Energies are scaled within (prompt, position) by every baseline, so correlations are given there as well as pooled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    CheckpointConfig,
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
    plain_config,
)
from otb_analysis.estimators import estimate
from otb_analysis.gradients import sketch_score_norms, token_score_norms
from otb_analysis.statistics import (
    deleted_moments,
    gain_lost,
    jackknife_interval,
    paired_ratios,
    pooled_statistics,
    weight_statistics,
)
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.runtime import Bar
from otb_analysis.training.warm_start import fit
from otb_analysis.types import Float, Gram, Label
from studies.lib import Cell, Study, Tables, interval_columns, rounded
from studies.lib.formats import by_label, ratio_columns
from studies.lib.policies import Policy, ScoredRollouts, fresh_policy, pretrained, train_from, write
from studies.lib.pools import agreement_rows, energies_beside, promising_prompts, prompt_gram, proved_of_pool
from studies.lib.record import Gathered

MODELS = {
    "qwen3-s": ("qwen3", SmallModelConfig(layers=2, width=48, feed_forward=120)),
    "qwen3-m": ("qwen3", SmallModelConfig(layers=2, width=80, feed_forward=200)),
    "qwen3-l": ("qwen3", SmallModelConfig(layers=3, width=96, feed_forward=240)),
    "gpt2-m": ("gpt2", SmallModelConfig(layers=2, width=80, feed_forward=320)),
}
STARTS = {"gpt2-m": WarmStartConfig(success_low=0.2)}
"""Bands of success at which supervision stops, where not the usual one: with learned positions sums come slowly."""
TEMPERATURES = (0.7, 1.0, 1.3)
PROMPTS, GROUP_SIZE, PILOT = 96, 8, 16
"""Prompts, rollouts of each, and separate rollouts of which some must be right and some wrong for a prompt to be
measured; at random init nothing is right, so there every prompt is taken."""
RL_STEPS, RL_RATE = 24, 5e-4
DIRECTIONS = 32
CALIBRATION_SHARE = 0.1
"""Tokens on which the calibrated proxy is fitted, drawn in proportion to the proxy."""
SOURCES = ("proxy", "calibrated", "sketch", "lm_head")
ESTIMATORS = ("otb", "otb_loo")
UPDATES = (8, 32, 256)
"""Prompts of the update that efficiency is stated for; the middle one heads the page."""
MARGIN = 0.05
"""A source whose baselines differ from those of exact norms by less than this share of the variance is as good."""
OVER_RLOO = {"to_rloo": "efficiency", "sf_to_rloo": "sf", "variance_to_rloo": "variance"}
"""Columns of the ratios to `rloo`."""
STAGES = ("init", "warm", "rl")
FIRST_PROMPT = 30_000_000
"""Far from the prompts of training and of the supervised start."""
QUICK_MODELS = {
    "qwen3-s": ("qwen3", SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=64)),
    "gpt2-s": ("gpt2", SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=64)),
}
QUICK_PROMPTS = 8
QUICK_START = WarmStartConfig(success_low=0.02, success_high=1.0, check_prompts=64)


def config_of(name: str, quick: bool) -> TrainConfig:
    """Return the configuration of a model: sizes, supervised start, and the few dozen steps of RL."""
    return TrainConfig(
        small_model=(QUICK_MODELS if quick else MODELS)[name][1],
        warm_start=QUICK_START if quick else STARTS.get(name, WarmStartConfig()),
        sample=SampleConfig(prompts=8 if quick else 16, group_size=GROUP_SIZE), estimator=EstimatorConfig(name="rloo"),
        optimize=OptimizeConfig(steps=2 if quick else RL_STEPS, learning_rate=RL_RATE),
        measure=MeasureConfig(exact=Schedule(every=0)), evaluate=EvaluateConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip


def cells(quick: bool) -> list[Cell]:
    """Return one cell per model."""
    shared = {
        "quick": quick, "temperatures": [1.0] if quick else list(TEMPERATURES), "directions": DIRECTIONS,
        "prompts": QUICK_PROMPTS if quick else PROMPTS, "group_size": GROUP_SIZE, "share": CALIBRATION_SHARE,
        "pilot": 0 if quick else PILOT, "rl_steps": 2 if quick else RL_STEPS, "rl_rate": RL_RATE,
        "updates": list(UPDATES),
    }  # fmt: skip
    return [
        Cell(name, {"architecture": kind, "config": plain_config(config_of(name, quick)), **shared})
        for name, (kind, _) in (QUICK_MODELS if quick else MODELS).items()
    ]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Make the three stages of a model and measure each of them."""
    config = config_of(cell.name, cell.settings["quick"])
    policy = fresh_policy(config, cell.settings["architecture"])
    tables = Gathered()
    _measure_stage(cell, "init", policy, tables, bar)
    fit(policy.model, policy.tokenizer, policy.task, config)
    _measure_stage(cell, "warm", policy, tables, bar)
    run = train_from(policy, replace(config, run="rl"), work, bar)
    policy = replace(policy, model=pretrained(replace(config, model=str(run / "model"))).model)
    _measure_stage(cell, "rl", policy, tables, bar)
    return tables


def _measure_stage(cell: Cell, stage: str, policy: Policy, tables: Gathered, bar: Bar) -> None:
    settings = cell.settings
    temperatures, prompts = [1.0] if stage == "init" else settings["temperatures"], settings["prompts"]
    grams: list[Gram] = []
    apart: list[dict[Label, Float]] = []
    for k, temperature in enumerate(temperatures):
        key = {"model": cell.name, "stage": stage, "temperature": temperature}
        bar(k, len(temperatures), f"{cell.name}: {stage} at temperature {temperature}")
        sample = SampleConfig(prompts=prompts, group_size=GROUP_SIZE, temperature=temperature)
        first = FIRST_PROMPT + 10_000 * (STAGES.index(stage) * 10 + k)
        pilot, chosen = 0 if stage == "init" else settings["pilot"], draw_prompts(policy.task, "train", first, prompts)
        if pilot:
            chosen = promising_prompts(policy, first, prompts, replace(sample, group_size=pilot), seed=1)
        written = write(policy, chosen, sample, seed=k)
        energies, table = energies_of(policy, written, k), written.table
        weights = weight_statistics(energies["exact"], table.mask, table.total_reward, table.group)
        facts = {
            "parameters": policy.model.num_parameters(), "success": float(table.total_reward.mean()),
            "tokens": int(table.mask.sum()), "prompts": prompts, "group_size": len(table.group) // prompts,
            "corr": weights.pooled_total_reward_corr, "rl_steps": settings["rl_steps"], "pilot": pilot,
        }  # fmt: skip
        tables.add(key, policies=[facts], agreement=agreement_rows(table, energies, SOURCES))
        if np.ptp(table.total_reward) > 0:
            grams.append(gram_of(policy, written, energies))
            apart.append(disagreement(written, energies))
            told = disagreement_rows(grams[-1:], apart[-1:])
            tables.add(key, efficiency=efficiency_rows(grams[-1:]), disagreement=told)
    if len(grams) > 1:
        pooled = {"model": cell.name, "stage": stage, "temperature": None}
        tables.add(pooled, efficiency=efficiency_rows(grams), disagreement=disagreement_rows(grams, apart))


def energies_of(policy: Policy, written: ScoredRollouts, seed: int) -> dict[str, Float]:
    """Return every source's token energies [N, T], the exact ones first."""
    (first, back), temperature = written.distinct(), written.temperature
    args = (policy.model, *(x[first] for x in written.batch))
    norms = token_score_norms(*args, temperature=temperature)
    sketched = sketch_score_norms(*args, temperature=temperature, directions=DIRECTIONS, seed=seed)
    exact, sketch = (written.by_token(measured.norm_sq[back]) for measured in (norms, sketched))
    energies = energies_beside(written, exact, CALIBRATION_SHARE, seed) | {"sketch": np.maximum(sketch, 0.0)}
    return {name: energies[name] for name in ("exact", *SOURCES)}


def gram_of(policy: Policy, written: ScoredRollouts, energies: Mapping[str, Float]) -> Gram:
    """Return inner products of the prompts' mean gradients under `rloo` and both forms of `otb` with every source."""
    advantages: dict[Label, Float] = {("rloo", "none"): estimate("rloo", written.table.inputs(None)).advantage}
    for name in ESTIMATORS:
        for source, energy in energies.items():
            advantages[name, source] = estimate(name, written.table.inputs(energy)).advantage
    gram = prompt_gram(policy.model, written.rollouts, advantages, written.temperature)
    return replace(gram, prompt=tuple(f"{written.temperature}: {prompt.id}" for prompt in written.rollouts.prompts))


def efficiency_rows(grams: Sequence[Gram]) -> list[dict[str, Any]]:
    """Return efficiency of every source at each size of update, over exact norms and `rloo`, and the gain lost."""
    rows, known = [], proved_of_pool(grams[0].labels, grams[0].n_prompts, GROUP_SIZE)
    for prompts in UPDATES:
        at: dict[str, Any] = {"n_prompts": prompts, "known": known}
        against = {name: by_label(paired_ratios(grams, (name, "exact"), **at)) for name in ESTIMATORS}
        plain = by_label(paired_ratios(grams, **at))
        for label, row in by_label(pooled_statistics(grams, **at)).items():
            exact = against.get(row.estimator, {}).get(label)
            lost = gain_lost(grams, label, (row.estimator, "exact"), prompts, known) if exact else None
            named = {"update": prompts, "estimator": row.estimator, "source": row.energy_source}
            named |= {"prompts": row.n_clusters, "efficiency": row.efficiency, "rollouts": row.n_rollouts}
            named |= {"equivalents": rounded(row.rollout_equivalents), "projection": row.projection}
            named |= ratio_columns(exact, {"to_exact": "efficiency"}) | interval_columns("lost", lost)
            rows.append(named | ratio_columns(plain.get(label), OVER_RLOO))
    return rows


def disagreement(written: ScoredRollouts, energies: Mapping[str, Float]) -> dict[Label, Float]:
    """Return (1/N²) Σ_i Σ_t w_{i,t} (B_{i,t} − B_{i,t} with exact norms)² of every prompt [P], w the exact norms.

    It is the power of the difference of the two group gradients where scores at different tokens are orthogonal.
    """
    table, out = written.table, dict[Label, Float]()
    count = np.bincount(table.group)
    for name in ESTIMATORS:
        baseline = {source: estimate(name, table.inputs(energy)).baseline for source, energy in energies.items()}
        for source in SOURCES:
            square = np.where(table.mask, energies["exact"] * (baseline[source] - baseline["exact"]) ** 2, 0.0)
            out[name, source] = np.bincount(table.group, weights=square.sum(axis=1)) / count**2
    return out


def disagreement_rows(grams: Sequence[Gram], apart: Sequence[Mapping[Label, Float]]) -> list[dict[str, Any]]:
    """Return how far the baselines of each source are from those of exact norms, over the variance: no ∇J is needed.

    `disagreement` is Σ w (ΔB)² over the variance of a prompt's group gradient, `difference` the power of the two group
    gradients' difference over it, `variance` the ratio of the two variances. Intervals are over prompts.
    """
    rows, names = [], [prompt for gram in grams for prompt in gram.prompt or ()]
    place = {name: k for k, name in enumerate(dict.fromkeys(names))}  # as `deleted_moments` orders them
    code = np.array([place[name] for name in names])
    for name in ESTIMATORS:
        exact = deleted_moments(grams, (name, "exact"), (name, "exact"))
        variance = exact.power - exact.mean_sq
        pairs = by_label(paired_ratios(grams, (name, "exact")))
        for source in SOURCES:
            label = (name, source)
            square = list[Float]()  # ‖ḡ − ḡ with exact norms‖² of every prompt
            for blocks in (gram.blocks([label], (name, "exact"))[0] for gram in grams):
                power, cross = np.einsum("jpp->jp", blocks)[[0, 2]].sum(axis=0), np.einsum("pp->p", blocks[1])
                square.append(np.maximum(power - 2 * cross, 0.0))
            values = {"disagreement": [one[label] for one in apart], "difference": square}
            row = {"estimator": name, "source": source, "prompts": len(place)}
            for key, value in ((key, np.concatenate(parts)) for key, parts in values.items()):
                # The mean of all values, and without each prompt's
                sums, counts = np.bincount(code, weights=value), np.bincount(code)
                without = (value.sum() - sums) / (len(value) - counts)
                share = np.concatenate([[value.mean()], without]) / np.where(variance > 0, variance, np.nan)
                row |= interval_columns(key, jackknife_interval(share[0], share[1:], f"{key} over the variance"))
            rows.append(row | ratio_columns(pairs.get(label), {"variance": "variance"}))
    return rows


STUDY = Study(
    title="Proxy fidelity",
    question="How well do the proxy, the calibrated proxy, the hybrid sketch and the last layer's norm stand in for "
    "exact score norms, and what does each cost `otb`?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
