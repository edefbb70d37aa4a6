"""Training made to collapse: rollouts of an old policy, no correction for it, and steps that grow until it breaks.

The learning rate rises linearly from 0, so that every run begins calmly and the step at which it breaks says how long
a step it bears. Every estimator meets the same conditions from the same supervised starts. What is asked: how many
steps each survives, whether shorter steps alone would have done as well, which detector saw it coming, and who held the
fatal gradient.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.config import (
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.config.measuring import AttributionSchedule, MeasureConfig, Schedule
from otb_analysis.diagnostics import diagnose
from otb_analysis.estimators import estimate
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE
from otb_analysis.statistics import pooled_statistics, top_share
from otb_analysis.store import RunStore, attributed_steps, step_attribution, step_series
from otb_analysis.study import (
    Cell,
    Rows,
    Study,
    Tables,
    interval_columns,
    known,
    select,
)
from otb_analysis.study.gradients import Weighed, drawn, prompt_gram, scored
from otb_analysis.study.seeds import QUICK_START, QUICK_TASK, started
from otb_analysis.training.loop import train
from otb_analysis.training.progress import Bar
from otb_analysis.training.resume import plain_config
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Float

ARMS = {
    "rloo": BLUE,
    "scaled": GREY,
    "otb": ORANGE,
    "otb_loo": AMBER,
    "sequence_optimal_loo": GREEN,
}
"""Estimators and their colours; `scaled` is `rloo` with steps c times as long, c the projection of `otb`."""
AGAINST = "rloo"
LABELS = (("otb", "proxy"), ("rloo", "none"))
REFERENCE = ("rloo", "none")
WINDOW, DROP, LASTING = 6, 0.5, 6
"""Collapsed: mean reward over 6 steps at most half of the highest such mean so far, and so for 6 steps on end."""
BEFORE = 12
"""The fatal step is the one with the largest gradient among those attributed in so many steps up to the collapse."""
PROMPTS_FROM, POOL = 1_000_000, 1


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    arms: tuple[str, ...] = tuple(ARMS)
    steps: int = 100
    attribute_every: int = 2
    pool_prompts: int = 64
    pool_seeds: tuple[int, ...] = (0, 1, 2)


FULL = Size()
SMALL = Size(
    seeds=(0, 1), arms=("rloo", "scaled", "otb"), steps=16, attribute_every=3, pool_prompts=8, pool_seeds=(0,)
)  # fmt: skip
CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=2, width=64, feed_forward=160),
    sample=SampleConfig(prompts=8, group_size=8),
    objective=ObjectiveConfig(staleness=4),
    warm_start=WarmStartConfig(success_low=0.6, success_high=0.85),
    optimize=OptimizeConfig(learning_rate=4e-3),
    critic=CriticConfig(enabled=False),
    evaluate=EvaluateConfig(every=0),
)
QUICK_RATE = 5e-2


def config_of(seed: int, size: Size, quick: bool) -> TrainConfig:
    """Return what all arms of a seed share."""
    measured = MeasureConfig(exact=Schedule(), attribution=AttributionSchedule(every=size.attribute_every))
    rising = replace(CONFIG.optimize, steps=size.steps, warmup_steps=size.steps)
    config = replace(CONFIG, seed=seed, measure=measured, optimize=rising)
    config = replace(config, checkpoint=replace(config.checkpoint, every=0))
    if not quick:
        return config
    fast = replace(config.optimize, learning_rate=QUICK_RATE)
    return replace(config, chain_sum=QUICK_TASK, warm_start=QUICK_START, optimize=fast)


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return the pool that gives c, and one cell per arm and seed, seed by seed."""
    rule = {"window": WINDOW, "drop": DROP, "lasting": LASTING, "before": BEFORE}
    common = {"quick": quick, "size": asdict(size), "rule": rule}
    pool = Cell("projection", common | {"config": plain_config(config_of(0, size, quick))})
    runs = [
        Cell(
            f"{name}-s{seed}",
            common | {"arm": name, "seed": seed, "config": plain_config(config_of(seed, size, quick))},
            after=(pool,) if name == "scaled" else (),
        )
        for seed in size.seeds
        for name in size.arms
    ]
    return [pool, *runs]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Measure the projection of `otb` at the starts, or let one arm of a seed run into its end."""
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    quick = bool(cell.settings["quick"])
    size = SMALL if quick else FULL
    if cell.name == "projection":
        return {"projection": projection_rows(size, quick, work, bar)}
    name, seed = str(cell.settings["arm"]), int(str(cell.settings["seed"]))
    config = started(config_of(seed, size, quick), work, bar)
    if name == "scaled":
        shorter = config.optimize.learning_rate * projection_of(cell.given["projection"])
        config = replace(config, optimize=replace(config.optimize, learning_rate=shorter))
    estimator = EstimatorConfig(name=AGAINST if name == "scaled" else name)
    store = RunStore(train(replace(config, root=work, run=name, estimator=estimator), bar))
    return run_tables({"arm": name, "seed": seed}, config.optimize.learning_rate, store)


def projection_rows(size: Size, quick: bool, work: Path, bar: Bar) -> list[dict[str, Any]]:
    """Return the projection of `otb` on groups of 8 of the supervised starts' rollouts, with its interval."""
    grams = []
    for seed in size.pool_seeds:
        trainer = Trainer.from_config(started(config_of(seed, size, quick), work, bar))
        rollouts = drawn(trainer, PROMPTS_FROM, size.pool_prompts, CONFIG.sample.group_size, POOL)
        table = scored(trainer, rollouts)
        inputs = table.inputs(table.stats.energy)
        advantage = {label: estimate(label[0], inputs).advantage for label in LABELS}
        grams.append(prompt_gram(trainer.model, [Weighed(rollouts, advantage)]))
    return [
        {"estimator": found.estimator, "clusters": found.n_clusters, "projection": found.projection}
        | interval_columns("projection", found.projection_interval)
        for found in pooled_statistics(grams, REFERENCE)
    ]


def projection_of(rows: Rows) -> float:
    """Return c of `otb`, held in [.1, 1] where the pools are too small to tell."""
    (row,) = select(rows, estimator="otb")
    return 1.0 if row["projection"] is None else float(np.clip(row["projection"], 0.1, 1.0))


def run_tables(key: dict[str, Any], rate: float, store: RunStore) -> Tables:
    """Return a run's collapse, its curves, its detectors' first firings and its fatal step."""
    steps = store.steps_df().sort_values("step")
    reward = steps["reward_mean"].to_numpy(np.float64)
    end = collapse_step(reward)
    facts = {
        "rate": rate,
        "steps": len(reward),
        "collapse": end,
        "best": float(trailing_mean(reward).max()),
        "last": float(trailing_mean(reward)[-1]),
        "clip_fraction": float(
            np.mean(steps["clipped"].to_numpy(np.float64)[: len(reward) if end is None else end + 1])
        ),
        "grad_norm": float(steps["grad_norm"].to_numpy(np.float64)[:WINDOW].mean()),
    }
    fired = [
        {"detector": found.detector, "level": found.level, "watch": found.watch_step, "alarm": found.alarm_step}
        for found in diagnose(step_series(steps))
    ]
    curve = [
        {"step": int(step), "reward": float(value)}
        for step, value in zip(steps["step"], trailing_mean(reward), strict=True)
    ]
    tables: dict[str, list[dict[str, Any]]] = {
        "runs": [key | facts],
        "detectors": [key | row for row in fired],
        "curves": [key | row for row in curve[:: max(1, len(curve) // 25)]],
    }
    return tables if end is None else tables | {"fatal": [key | fatal_step(store, end)]}


def trailing_mean(reward: Float) -> Float:
    """Return the mean over the last steps, of those there are at the beginning."""
    total = np.concatenate([[0.0], np.cumsum(reward)])
    ends = np.arange(1, len(reward) + 1)
    begins = np.maximum(ends - WINDOW, 0)
    return (total[ends] - total[begins]) / (ends - begins)


def collapse_step(reward: Float) -> int | None:
    """Return the first step of a lasting loss of half of the best trailing reward; None where there is none."""
    mean = trailing_mean(reward)
    low = mean <= DROP * np.maximum.accumulate(mean)
    low[: WINDOW - 1] = False
    run = 0
    for step, is_low in enumerate(low):
        run = run + 1 if is_low else 0
        if run == LASTING:
            return step - LASTING + 1
    return None


def fatal_step(store: RunStore, end: int) -> dict[str, Any]:
    """Return who held the largest attributed gradient before the collapse."""
    tried = [step for step in attributed_steps(store) if end - BEFORE <= step <= end]
    found = {step: step_attribution(store, step) for step in tried}
    at = max(found, key=lambda step: found[step].norm_sq)
    own, norms = found[at], [one.norm_sq for one in found.values()]
    tokens = np.abs(own.tokens.share)
    return {
        "step": at,
        "collapse": end,
        "grad_norm": own.norm_sq**0.5,
        "typical_norm": float(np.median(norms)) ** 0.5,
        "top_tokens": top_share(tokens),
        "top_prompt": float(np.abs(own.prompts.share).max() / np.abs(own.prompts.share).sum()),
        "failed": float(tokens[~np.isin(own.tokens.rollout, succeeded(store, at))].sum() / tokens.sum()),
        "noise": known(own.noise_total) / own.norm_sq,
    }


def succeeded(store: RunStore, step: int) -> list[int]:
    """Return the rollouts of a step that were paid."""
    found = store.sql("SELECT rollout FROM rollouts WHERE step = ? AND reward >= 0.5", [step])
    return [int(rollout) for rollout in found["rollout"]]


STUDY = Study(
    title="Collapse",
    question="When old rollouts and long steps drive training into collapse, does `otb` last longer than leave-one-out "
    "means, longer than shorter steps alone explain, and who sees it coming?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
