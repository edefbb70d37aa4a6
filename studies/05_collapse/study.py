"""Training made to collapse, to tell what lets a baseline last: less variance, or the level of B.

Rollouts are those of an old policy, and the learning rate rises linearly from 0, so that every run begins calmly and
the step at which it breaks says how long a step it bears. All arms of a seed share the supervised start, the prompts
and these conditions. Without a correction for the sampler a constant in B is a force on the policy; `otb` has a lower
mean B than `rloo` where long answers fail more often. Level and shape of B are therefore varied apart: `lowered` is
`rloo` moved to the mean of `otb`, `raised` is `otb` moved to the mean of `rloo` (lib/collapse.py). With the importance
ratio of the token a constant exerts no force. `calm` shares the starts, but neither old rollouts nor long steps: what a
detector calls there is a false alarm.

`regression` and `across` are the baselines that study 04 advises, `energy_regression` and `energy_across_loo`. They
were added after the others had run. The question was settled before they ran, if in the same commit as their numbers:
does either last longer than `rloo`, and does it last as long as `none`, whose B is 0? If only as long as `none`, what
helps is again a lower B.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.config import (
    EstimatorConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    TrainConfig,
    WarmStartConfig,
    plain_config,
)
from otb_analysis.config.measuring import AttributionSchedule
from otb_analysis.diagnostics import diagnose
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK
from otb_analysis.statistics import top_share
from otb_analysis.store import RunStore, attributed_steps, step_attribution, step_series
from otb_analysis.training.loop import train
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables, or_nan
from studies.lib.collapse import DROP, LASTING, WINDOW, collapse_step, trailing_mean
from studies.lib.record import Gathered
from studies.lib.seeds import BASE, FORWARD_ONLY, QUICK_MODEL, QUICK_START, QUICK_TASK, started

ATTRIBUTED = 6
"""The fatal step is the one with the largest gradient among the last so many attributed ones up to the collapse."""
SPAN = 10
"""Steps over which a signal is averaged."""
EARLY = 25
"""First steps over which the level of B is averaged: before any run has collapsed."""
RULE = {"window": WINDOW, "drop": DROP, "lasting": LASTING, "attributed": ATTRIBUTED, "span": SPAN, "early": EARLY}
MEAN_BASELINE = "SELECT avg(baseline) AS baseline FROM tokens WHERE mask AND step < ?"
SIGNALS = {"entropy": "entropy_mean", "grad_norm": "grad_norm", "length": "length_mean"}


def run_tables(key: dict[str, Any], rate: float, store: RunStore) -> Tables:
    """Return a run's collapse, its curve, its signals, its detectors' first calls, and its fatal and control steps."""
    steps = store.steps_df().sort_values("step")
    reward = steps["reward_mean"].to_numpy(np.float64)
    end, mean = collapse_step(reward), trailing_mean(reward)
    lived = len(reward) if end is None else end + 1
    clipped, level = steps["clipped"].to_numpy(np.float64)[:lived], store.sql(MEAN_BASELINE, [EARLY])["baseline"]
    facts = {"rate": rate, "steps": len(reward), "collapse": end, "best": float(mean.max()), "last": float(mean[-1])}
    facts |= {"clip_fraction": float(np.mean(clipped)), "baseline": float(level.to_numpy(np.float64)[0])}
    facts |= {"reward": float(reward[:EARLY].mean())}
    columns = {"detector": "detector", "level": "level", "watch": "watch_step", "alarm": "alarm_step"}
    fired = [{name: getattr(one, of) for name, of in columns.items()} for one in diagnose(step_series(steps))]
    curve = [{"step": int(step), "reward": float(value)} for step, value in zip(steps["step"], mean, strict=True)]
    tables, shown = Gathered(), curve[:: max(1, len(curve) // 25)]
    tables.add(key, runs=[facts], signals=[signal_means(steps, end)], detectors=fired, curves=shown)
    if end is not None:
        tables.add(key, attribution=attribution_rows(store, steps, end))
    return tables


def signal_means(steps: pd.DataFrame, end: int | None) -> dict[str, float | None]:
    """Return entropy, ‖ḡ‖ and length over the first steps, those up to the collapse, and the last ones."""
    ends = {"first": SPAN, "before": None if end is None else end + 1, "last": len(steps)}
    means = dict[str, float | None]()
    for (name, column), (when, stop) in product(SIGNALS.items(), ends.items()):
        part = steps[column].to_numpy(np.float64)[max(0, (stop or 0) - SPAN) : stop]
        means[f"{name}_{when}"] = None if stop is None else float(part.mean())
    return means


def windows(attributed: Sequence[int], end: int) -> dict[str, list[int]]:
    """Return the last attributed steps up to a collapse, and as many up to half of the way where they do not meet."""
    fatal = [step for step in attributed if step <= end][-ATTRIBUTED:]
    control = [step for step in attributed if step <= end // 2][-ATTRIBUTED:]
    apart = bool(fatal) and len(control) == ATTRIBUTED and control[-1] < fatal[0]
    return {"fatal": fatal} | ({"control": control} if apart else {})


def attribution_rows(store: RunStore, steps: pd.DataFrame, end: int) -> list[dict[str, Any]]:
    """Return who held the largest attributed gradient before the collapse, and who the largest of a usual stretch."""
    norm, rows = steps["grad_norm"].to_numpy(np.float64), []
    by_window = {name: tried for name, tried in windows(attributed_steps(store), end).items() if tried}
    first = by_window["fatal"][0] if by_window else 0
    usual = float(np.median(norm[:first])) if first else None
    for name, tried in by_window.items():
        one = max((step_attribution(store, step) for step in tried), key=lambda step: step.norm_sq)
        tokens, prompts = np.abs(one.tokens.share), np.abs(one.prompts.share)
        paid = store.sql("SELECT rollout FROM rollouts WHERE step = ? AND reward >= 0.5", [one.step])["rollout"]
        failed = ~np.isin(one.tokens.rollout, paid.to_numpy(np.int64))
        row = {"window": name, "collapse": end, "usual_norm": usual, "step": one.step, "grad_norm": one.norm_sq**0.5}
        row |= {"top_tokens": top_share(tokens), "top_prompt": float(prompts.max() / prompts.sum())}
        row |= {"failed": float(tokens[failed].sum() / tokens.sum()), "failed_tokens": float(failed.mean())}
        rows.append(row | {"noise": or_nan(one.noise_total) / one.norm_sq})
    return rows


@dataclass(frozen=True)
class Arm:
    """A way to train, with its colour in the figure."""

    estimator: str
    color: str
    staleness: int
    ratio: str = "none"
    attributed: bool = False

    @property
    def calm(self) -> bool:
        """Whether it trains on rollouts of its own policy, at a low rate."""
        return self.staleness == 0


STALENESSES = (4, 8)
"""Batches between the policy that samples and the one that learns."""
RATIO = "token"
"""ρ_t: with it a constant in B drops out of the mean, whoever sampled."""
LEVELS = "studies.lib.collapse"
BASELINES = {
    "rloo": ("rloo", BLUE), "lowered": (f"{LEVELS}:lowered", GREEN), "otb": ("otb", ORANGE),
    "raised": (f"{LEVELS}:raised", AMBER), "none": ("none", GREY),
    "regression": ("energy_regression", PINK), "across": ("energy_across_loo", PINK),
}  # fmt: skip
CORRECTED = ("rloo", "lowered", "otb", "none", "regression", "across")
"""Baselines that are trained with importance ratios, too."""
ARMS = {
    f"{name}-{staleness}": Arm(*BASELINES[name], staleness, attributed=staleness == 4 and name in ("rloo", "otb"))
    for staleness in STALENESSES
    for name in BASELINES
}
ARMS |= {
    f"{name}-{staleness}-ratio": Arm(*BASELINES[name], staleness, RATIO)
    for staleness in STALENESSES
    for name in CORRECTED
}
ARMS["calm"] = Arm("rloo", PINK, 0)
CALM_RATE = 3e-4
"""Constant, of the arm without old rollouts."""

LEVEL = (("lowered", "rloo"), ("otb", "raised"))
SHAPE = (("otb", "lowered"), ("raised", "rloo"))
"""What is asked: the effect of the level is the mean of the first two differences of steps survived, that of the shape,
variance included, the mean of the second two; both over the stalenesses, without ratios, seed by seed.

The level is the cause where its effect is above 0 and above that of the shape, the shape where it is the other way
round; both where both are above 0 and neither is above the other; otherwise it is open. Above means that Student's 95 %
interval over seeds is. A force of the level shows in a second way: with ratios `lowered` − `rloo` is smaller.
"""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    arms: tuple[str, ...] = tuple(ARMS)
    steps: int = 80
    attribute_every: int = 2


FULL = Size()
SMALL = Size(
    seeds=(0, 1), arms=("rloo-4", "lowered-4", "otb-4", "raised-4", "rloo-4-ratio", "lowered-4-ratio", "calm"),
    steps=12, attribute_every=4,
)  # fmt: skip
CONFIG = replace(
    BASE,
    sample=SampleConfig(prompts=8, group_size=8),
    warm_start=WarmStartConfig(success_low=0.6, success_high=0.85),
    optimize=OptimizeConfig(learning_rate=4.8e-3),
)
QUICK_RATE = 5e-2
QUICK_SAMPLE = SampleConfig(prompts=4, group_size=4)


def config_of(seed: int, size: Size, quick: bool, arm: Arm) -> TrainConfig:
    """Return the settings of an arm from the seed's start."""
    measured = replace(FORWARD_ONLY, attribution=AttributionSchedule(every=size.attribute_every * arm.attributed))
    rising = replace(CONFIG.optimize, steps=size.steps, warmup_steps=size.steps)
    config = replace(
        CONFIG, seed=seed, measure=measured, optimize=rising, estimator=EstimatorConfig(name=arm.estimator),
        objective=ObjectiveConfig(staleness=arm.staleness, ratio=arm.ratio),
        checkpoint=replace(CONFIG.checkpoint, every=0),
    )  # fmt: skip
    if quick:
        fast = replace(rising, learning_rate=QUICK_RATE)
        config = replace(config, small_model=QUICK_MODEL, chain_sum=QUICK_TASK, warm_start=QUICK_START)
        config = replace(config, optimize=fast, sample=QUICK_SAMPLE)
    if not arm.calm:
        return config
    return replace(config, optimize=replace(config.optimize, learning_rate=CALM_RATE, warmup_steps=0))


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return one cell per arm and seed, seed by seed."""
    common: dict[str, object] = {"quick": quick, "size": asdict(size), "rule": RULE, "effects": [LEVEL, SHAPE]}
    made = list[Cell]()
    for seed, name in product(size.seeds, size.arms):
        config = plain_config(config_of(seed, size, quick, ARMS[name]))
        made.append(Cell(f"{name}-s{seed}", {**common, "arm": name, "seed": seed, "config": config}))
    return made


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Let one arm of a seed run into its end."""
    quick, name, seed = (cell.settings[key] for key in ("quick", "arm", "seed"))
    config = started(config_of(seed, SMALL if quick else FULL, quick, ARMS[name]), work)
    store = RunStore(train(replace(config, root=work, run=name), bar))
    return run_tables({"arm": name, "seed": seed}, config.optimize.learning_rate, store)


STUDY = Study(
    title="Collapse",
    question="When old rollouts and long steps drive training into collapse, does `otb` last longer than `rloo` "
    "because of less variance or because its mean B is lower, and who sees the collapse coming?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
