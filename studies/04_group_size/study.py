"""Small groups with the optimal token baseline against large groups with the mean, at the same number of rollouts.

First on the same pools of rollouts: raw variance, SF and efficiency of an update. Then in training: every arm stops
after the same number of rollouts, at the learning rate that was best for it on seeds that the comparison does not use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.config import (
    ChainSumConfig,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    OptimizeConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.config.measuring import MeasureConfig, Schedule
from otb_analysis.estimators import estimate
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, pooled_statistics, seed_mean
from otb_analysis.store import RunStore
from otb_analysis.study import (
    Cell,
    Findings,
    Rows,
    Study,
    Tables,
    distinct,
    grid,
    interval_columns,
    interval_words,
    known,
    markdown_table,
    select,
    share,
)
from otb_analysis.study.gradients import Weighed, drawn, prompt_gram, regrouped, scored
from otb_analysis.training.loop import train
from otb_analysis.training.progress import Bar
from otb_analysis.training.resume import plain_config
from otb_analysis.training.setup import Trainer
from otb_analysis.training.warm_start import warm_started
from otb_analysis.types import Gram


@dataclass(frozen=True)
class Arm:
    """One way of spending rollouts.

    Attributes:
        words: What it is, for tables and legends.
        estimator: Name in ESTIMATORS.
        prompts: Groups per update.
        group: Rollouts per group.
        color: Hex colour.
        follows: Takes c times the learning rate of this arm instead of one of its own, c the projection of `otb`.
    """

    words: str
    estimator: str
    prompts: int
    group: int
    color: str
    follows: str = ""

    @property
    def rollouts(self) -> int:
        """Rollouts per update."""
        return self.prompts * self.group


ARMS = {
    "otb4": Arm("otb, 16 × 4", "otb", 16, 4, ORANGE),
    "rloo4": Arm("rloo, 16 × 4", "rloo", 16, 4, SKY),
    "scaled4": Arm("c·rloo, 16 × 4", "rloo", 16, 4, GREY, follows="otb4"),
    "mean32": Arm("group mean, 16 × 32", "group_mean", 16, 32, BLUE),
    "rloo4-wide": Arm("rloo, 128 × 4", "rloo", 128, 4, GREEN),
    "otb4-wide": Arm("otb, 128 × 4", "otb", 128, 4, AMBER),
}
"""Prompts × rollouts of an update. The last three spend 512 rollouts on an update, the first three 64."""
AGAINST = "mean32"
RATES = (3e-4, 1e-3, 2e-3, 4e-3)
"""Learning rates of the sweep."""
LABELS = (("otb", "proxy"), ("group_mean", "none"), ("rloo", "none"))
REFERENCE = ("rloo", "none")
SMALL_GROUP, LARGE_GROUP = 4, 32
PROMPTS_FROM, POOL = 1_000_000, 1
"""Index of the first prompt that is measured, beyond those trained on; seed of the sampling."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    sweep_seeds: tuple[int, ...] = (100, 101)
    rates: tuple[float, ...] = RATES
    arms: tuple[str, ...] = tuple(ARMS)
    rollouts: int = 12_800
    evaluations: int = 5
    heldout: int = 128
    pool_prompts: int = 48
    pool: int = 64
    pool_seeds: tuple[int, ...] = (0, 1, 2)


FULL = Size()
SMALL = Size(
    seeds=(0, 1), sweep_seeds=(100,), rates=(1e-3, 4e-3), arms=("otb4", "scaled4", "mean32"), rollouts=1_024,
    evaluations=2, heldout=24, pool_prompts=18, pool=64, pool_seeds=(0,),
)  # fmt: skip
CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=2, width=64, feed_forward=160),
    critic=CriticConfig(enabled=False),
    measure=MeasureConfig(exact=Schedule()),
)
QUICK_TASK = ChainSumConfig(terms_min=2, terms_max=2, largest=10)
QUICK_START = WarmStartConfig(success_low=0.05, success_high=0.95, check_prompts=64)


def base_config(seed: int, quick: bool) -> TrainConfig:
    """Return what all arms of a seed share: task, model and supervised start."""
    config = replace(CONFIG, seed=seed)
    return replace(config, chain_sum=QUICK_TASK, warm_start=QUICK_START) if quick else config


def arm_config(arm: Arm, rate: float, size: Size, config: TrainConfig) -> TrainConfig:
    """Return a run's configuration: as many updates as the rollouts allow, evaluations at equal rollouts."""
    steps = size.rollouts // arm.rollouts
    return replace(
        config,
        sample=SampleConfig(prompts=arm.prompts, group_size=arm.group),
        estimator=EstimatorConfig(name=arm.estimator),
        optimize=OptimizeConfig(steps=steps, learning_rate=rate),
        evaluate=EvaluateConfig(every=max(1, steps // size.evaluations), prompts=size.heldout, samples=2),
        checkpoint=replace(config.checkpoint, every=0),
    )


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return the pools, the sweep of each arm that has one, and the comparison, which comes after both."""
    common = {"quick": quick, "size": asdict(size), "config": plain_config(base_config(0, quick))}
    arms = {name: asdict(ARMS[name]) for name in size.arms}
    pool = Cell("pool", common | {"labels": [list(label) for label in LABELS]})
    sweeps = {
        name: Cell(f"sweep-{name}", common | {"arm": name, "facts": facts})
        for name, facts in arms.items()
        if not ARMS[name].follows
    }
    runs = [
        Cell(
            f"run-{name}-s{seed}",
            common | {"arm": name, "facts": facts, "seed": seed},
            after=(sweeps[ARMS[name].follows], pool) if ARMS[name].follows else (sweeps[name],),
        )
        for seed in size.seeds
        for name, facts in arms.items()
    ]
    return [pool, *sweeps.values(), *runs]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Measure pools, sweep an arm's learning rate, or train an arm at the chosen one."""
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    quick = bool(cell.settings["quick"])
    size = SMALL if quick else FULL
    if cell.name == "pool":
        return pool_tables(size, quick, work, bar)
    name = str(cell.settings["arm"])
    if cell.name.startswith("sweep"):
        plan = [(rate, seed) for rate in size.rates for seed in size.sweep_seeds]
        return {"sweep": [swept(name, rate, seed, size, (quick, work, bar)) for rate, seed in plan]}
    rate = chosen_rate(cell.given["sweep"]) * (projection_of(cell.given["pool"]) if ARMS[name].follows else 1.0)
    return {"curves": trained(name, rate, int(str(cell.settings["seed"])), size, (quick, work, bar))}


def chosen_rate(sweep: Rows) -> float:
    """Return the learning rate with the best mean held-out success over the sweep's seeds."""
    means = {rate: float(np.mean([r["mean"] for r in select(sweep, rate=rate)])) for rate in distinct(sweep, "rate")}
    return max(means, key=lambda rate: means[rate])


def projection_of(pool: Rows) -> float:
    """Return the projection c of `otb` in small groups, held in [.1, 1] where the pools are too small to tell."""
    found = pick(pool, "otb", SMALL_GROUP, 64)["projection"]
    return 1.0 if found is None else float(np.clip(found, 0.1, 1.0))


def started(seed: int, quick: bool, work: Path, bar: Bar) -> TrainConfig:
    """Return a seed's configuration with its supervised start, which all cells of the study share."""
    config = base_config(seed, quick)
    return replace(config, model=str(warm_started(config, bar, work.parent / "warm")))


def swept(name: str, rate: float, seed: int, size: Size, how: tuple[bool, Path, Bar]) -> dict[str, Any]:
    """Return an arm's mean held-out success at one learning rate."""
    curve = trained(name, rate, seed, size, how)
    after = [row["success"] for row in curve if row["step"] > 0]
    return {"arm": name, "rate": rate, "seed": seed, "mean": float(np.mean(after)), "final": after[-1]}


def trained(name: str, rate: float, seed: int, size: Size, how: tuple[bool, Path, Bar]) -> list[dict[str, Any]]:
    """Train an arm from the seed's start; return held-out success by rollouts and tokens sampled so far."""
    quick, work, bar = how
    config = arm_config(ARMS[name], rate, size, started(seed, quick, work, bar))
    path = train(replace(config, root=work, run=f"{name}-{rate:g}-{seed}"), bar)
    query = "SELECT step, heldout_success AS success, n_tokens, n_rollouts, grad_norm, clipped FROM steps ORDER BY step"
    steps = RunStore(path).sql(query)
    sampled = {name: np.cumsum(steps[name].to_numpy(np.int64)) for name in ("n_tokens", "n_rollouts")}
    facts = {name: float(np.mean(steps[name].to_numpy(np.float64))) for name in ("clipped", "grad_norm")}
    found = steps["success"].to_numpy(np.float64)
    return [
        {"arm": name, "seed": seed, "rate": rate, "step": int(step), "success": float(found[step])}
        | {key: int(total[step - 1]) if step else 0 for key, total in sampled.items()}  # before the step's own update
        | facts
        for step in np.flatnonzero(np.isfinite(found))
    ]


def pool_tables(size: Size, quick: bool, work: Path, bar: Bar) -> Tables:
    """Return the statistics of small and large groups on the same rollouts, at updates of 64 and of 512 rollouts."""
    grams: dict[int, list[Gram]] = {SMALL_GROUP: [], LARGE_GROUP: []}
    for number, seed in enumerate(size.pool_seeds):
        trainer = Trainer.from_config(started(seed, quick, work, bar))
        rollouts = drawn(trainer, PROMPTS_FROM, size.pool_prompts, size.pool, POOL)
        table = scored(trainer, rollouts)
        for n, found in grams.items():
            cut = regrouped(rollouts, n)
            inputs = replace(table.inputs(table.stats.energy), group=cut.group)
            advantage = {label: estimate(label[0], inputs).advantage for label in LABELS}
            found.append(prompt_gram(trainer.model, [Weighed(cut, advantage)]))
            bar(number + 1, len(size.pool_seeds), f"pool: seed {seed}, groups of {n}")
    return {"pool": [row for n in grams for row in pool_rows(grams[n], n)]}


def pool_rows(grams: Sequence[Gram], n: int) -> list[dict[str, Any]]:
    """Return a row per estimator and update size for groups of n."""
    rows = []
    for rollouts in (64, 512):
        for found in pooled_statistics(grams, REFERENCE, rollouts // n):
            rows.append(
                {"estimator": found.estimator, "size": n, "update": rollouts, "clusters": found.n_clusters}
                | interval_columns("variance", found.variance_interval)
                | interval_columns("projection", found.projection_interval)
                | interval_columns("sf", found.sf_interval)
                | interval_columns("efficiency", found.efficiency_interval)
            )
    return rows


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say what an update of each arm is worth, and what training makes of the same number of rollouts."""
    pool, sweep, curves = tables["pool"], tables["sweep"], tables["curves"]
    parts = ["## The same rollouts", POOLS.format(**pool[0]), pool_table(pool)]
    parts += ["## Learning rates", SWEEP.format(seeds=len(distinct(sweep, "seed"))), sweep_table(sweep)]
    parts += ["## Training", TRAINING.format(seeds=len(distinct(curves, "seed")), rollouts=most_rollouts(curves))]
    parts += [training_table(curves), "### Learning curves", curves_table(curves)]
    return Findings(verdict(pool, curves), "\n\n".join(parts), {"learning.svg": figure(curves)})


POOLS = """\
An update of 64 or of 512 rollouts, cut from the same pools into groups of 4 or of 32: more prompts, or more rollouts of
each. Efficiency is the share of the update that points along ∇J. Raw variance rewards an estimator for taking smaller
steps (c is their length along ∇J); SF and efficiency do not. Intervals are over {clusters} prompts."""
SWEEP = """\
Mean held-out success over the run, on other seeds than the comparison's ({seeds}); each arm takes its best learning
rate. `c·rloo` takes that of `otb` in groups of 4, times the projection c of `otb` measured above: under AdamW a factor
on the gradient would be lost, so that steps along ∇J are matched by the learning rate."""
TRAINING = """\
{seeds} seeds, other than the sweep's; arms of a seed share start and held-out prompts, and are evaluated at the same
numbers of rollouts; the last evaluation stands before the last update, after {rollouts:,} at most. The mean is over the
evaluations after the first; intervals are Student's over seeds, those of differences over the same seeds."""


def most_rollouts(curves: Rows) -> int:
    """Return the rollouts before the last evaluation of the arm with the smallest updates."""
    return max(row["n_rollouts"] for row in curves)


def words_of(name: str) -> str:
    """Return an arm in words."""
    return ARMS[name].words


def verdict(pool: Rows, curves: Rows) -> str:
    """Return the answer in one line: small `otb` groups against large mean groups, per update and in training."""
    small = pick(pool, "otb", SMALL_GROUP, 64)
    large = pick(pool, "group_mean", LARGE_GROUP, 512)
    ratios = ", ".join(
        f"{word} {small[name] / large[name]:.2f}" if small[name] and large[name] else f"{word} –"
        for name, word in (("variance", "raw variance"), ("sf", "SF"), ("efficiency", "efficiency"))
    )
    gaps = ", ".join(
        f"{words_of(name)} {gap_words(difference(curves, name, AGAINST))}"
        for name in distinct(curves, "arm")
        if name != AGAINST
    )
    return (
        f"an update of 16 prompts with `otb` at N = 4 over one with the mean at N = 32 and eight times the rollouts: "
        f"{ratios}; trained on equally many rollouts, held-out success minus that of {words_of(AGAINST)}, in points: "
        f"{gaps}."
    )


def pick(pool: Rows, estimator: str, size: int, update: int) -> Mapping[str, Any]:
    """Return the row of an estimator at a group size and update size."""
    (row,) = select(pool, estimator=estimator, size=size, update=update)
    return row


def pool_table(pool: Rows) -> str:
    """Return variance, projection, SF and efficiency of every estimator, group size and update size."""
    lines = []
    for row in pool:
        head = [f"`{row['estimator']}`", str(row["size"]), str(row["update"])]
        digits = {"variance": 3, "projection": 2, "sf": 3, "efficiency": 2}
        lines.append([*head, *(interval_words(row, name, d) for name, d in digits.items())])
    return markdown_table(["estimator", "N", "rollouts", "raw variance", "c", "SF", "efficiency"], lines)


def sweep_table(sweep: Rows) -> str:
    """Return mean held-out success by arm and learning rate, and which one each arm took."""
    rates = sorted(distinct(sweep, "rate"))
    lines = []
    for name in distinct(sweep, "arm"):
        own = select(sweep, arm=name)
        means = [float(np.mean([row["mean"] for row in select(own, rate=rate)])) for rate in rates]
        lines.append([words_of(name), *(share(mean) for mean in means), f"{chosen_rate(own):g}"])
    return markdown_table(["arm", *(f"{rate:g}" for rate in rates), "taken"], lines)


def per_seed(curves: Rows, name: str) -> dict[int, float]:
    """Return each seed's mean held-out success after the first evaluation."""
    own = [row for row in select(curves, arm=name) if row["step"] > 0]
    return {seed: float(np.mean([row["success"] for row in select(own, seed=seed)])) for seed in distinct(own, "seed")}


def difference(curves: Rows, name: str, against: str) -> Interval | None:
    """Return the paired difference of two arms' mean held-out success."""
    own, base = per_seed(curves, name), per_seed(curves, against)
    return seed_mean([own[seed] - base[seed] for seed in own], f"held-out success minus that of {against}")


def gap_words(found: Interval | None) -> str:
    """Return a difference of shares in points."""
    if found is None:
        return "–"
    ends = "" if found.low is None or found.high is None else f" ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    return f"{100 * found.estimate:+.1f}{ends}"


def training_table(curves: Rows) -> str:
    """Return each arm's success, its difference from the large mean groups, updates, norms and clipping."""
    lines = []
    for name in distinct(curves, "arm"):
        own = select(curves, arm=name)
        last = max(row["step"] for row in own)
        mean = seed_mean(list(per_seed(curves, name).values()), "mean held-out success", "logit")
        final = seed_mean([row["success"] for row in own if row["step"] == last], "final held-out success", "logit")
        gap = "" if name == AGAINST else gap_words(difference(curves, name, AGAINST))
        facts = {key: float(np.mean([row[key] for row in own])) for key in ("rate", "grad_norm", "clipped")}
        lines.append([
            words_of(name), *(interval_words(interval_columns("x", found), "x") for found in (mean, final)), gap,
            f"{facts['rate']:.2g}", str(last + 1), f"{facts['grad_norm']:.1f}", share(facts["clipped"]),
        ])  # fmt: skip
    headers = ["arm", "mean success", "at the end", f"mean minus {words_of(AGAINST)}, points", "learning rate",
               "updates", "gradient norm", "clipped"]  # fmt: skip
    return markdown_table(headers, lines)


def curves_table(curves: Rows) -> str:
    """Return mean held-out success over seeds by rollouts sampled so far."""
    rows = []
    for name in distinct(curves, "arm"):
        own = select(curves, arm=name)
        for number, step in enumerate(sorted(distinct(own, "step"))):
            at = select(own, step=step)
            mean = float(np.mean([row["success"] for row in at]))
            tokens = float(np.mean([row["n_tokens"] for row in at]))
            rows.append({"arm": words_of(name), "evaluation": number, "words": f"{share(mean)} ({tokens:,.0f})"})
    return "Held-out success (tokens sampled so far)\n\n" + grid(rows, "arm", "evaluation", lambda row: row["words"])


def figure(curves: Rows) -> str:
    """Draw mean learning curves over thousands of sampled tokens, with intervals over seeds."""
    return svg([
        Panel("Held-out success", "mean over seeds, 95 % interval", "thousand tokens sampled",
              [mean_curve(select(curves, arm=name)) for name in distinct(curves, "arm")], percent=True)
    ])  # fmt: skip


def mean_curve(rows: Rows) -> Curve:
    """Return an arm's mean learning curve with Student's band over seeds."""
    arm, steps = ARMS[rows[0]["arm"]], sorted(distinct(rows, "step"))
    at = [select(rows, step=step) for step in steps]
    found = [seed_mean([row["success"] for row in point], "held-out success", "logit") for point in at]
    ends = [interval_columns("x", one) for one in found]
    y, low, high = ([known(end[f"x{side}"]) for end in ends] for side in ("", "_low", "_high"))
    tokens = [float(np.mean([row["n_tokens"] for row in point])) / 1000 for point in at]
    return Curve(tokens, y, arm.words, low, high, arm.color, dashed=arm.group == LARGE_GROUP)


STUDY = Study(
    title="Group size",
    question="At the same number of rollouts, is `otb` in groups of 4 as good as the group mean in groups of 32, and "
    "better than leave-one-out means in groups of 4 with eight times the prompts?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
    report=report,
)
