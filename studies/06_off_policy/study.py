"""What importance ratios and their clips make of the gradient as the sampler falls behind the policy.

Exactly, on enumerated policies whose sampler is a chosen divergence away; and on a small trained model, whose sampler
is some steps behind (`stale`) or which has been updated on these very rollouts already (`reused`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.config import EstimatorConfig, ObjectiveConfig, OptimizeConfig, SampleConfig, TrainConfig
from otb_analysis.enumeration.drift import effective_share, farthest, sampled_at
from otb_analysis.enumeration.off_policy import CASES, case_moments, mean_shift, touched
from otb_analysis.enumeration.trees import Tree, TreeSpec, random_tree
from otb_analysis.estimators import estimate
from otb_analysis.measurement.table import TokenTable, token_ratio
from otb_analysis.objectives.importance import RatioInputs, effective_sample_size
from otb_analysis.objectives.ratios import Ratio, importance_ratio
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import cluster_jackknife, paired_ratios, pooled_statistics
from otb_analysis.study import Cell, Study, Tables, interval_columns, rounded
from otb_analysis.study.formats import by_label, statistics_columns
from otb_analysis.study.gradients import Weighed, drawn, prompt_gram, scored
from otb_analysis.study.seeds import BASE, QUICK_START, QUICK_TASK, started
from otb_analysis.training.loop import train_step
from otb_analysis.training.resume import plain_config
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.training.setup import Trainer
from otb_analysis.types import Float, Gram

SPEC = TreeSpec(vocabulary=3, horizon=4, shared=8, end_token=True)
DRIFTS = ("behind", "random")
"""The sampler lies behind along ∇J, as with staleness, or off in a random direction."""
DIVERGENCES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""KL(μ‖π) of a whole completion in nats."""
LEAST_ESS = 0.01
"""Policies whose sampler at the largest distance has a smaller ESS are left out: some completions are next to never
sampled there, and the means would be theirs alone."""
BUDGETS = (32, 1024)
"""Rollouts of an update for which efficiency is stated on enumerated policies."""
KINDS = {
    "stale": "Rollouts from the policy of some updates ago",
    "reused": "Rollouts that the policy has been updated on already",
}
BASELINES = ("rloo", "otb")
TRUTH = ("on-policy", "rloo")
FRESH, OLD = 1, 2
"""Seeds of fresh and of old rollouts."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    instances: int = 120
    seeds: tuple[int, ...] = (0, 1)
    prompts: int = 64
    group: int = 8
    truth_group: int = 32
    lags: tuple[int, ...] = (1, 4, 16)
    epochs: tuple[int, ...] = (1, 4, 16)


FULL = Size()
SMALL = Size(instances=24, seeds=(0,), prompts=16, group=4, truth_group=4, lags=(1, 3), epochs=(1, 3))
CONFIG = replace(
    BASE,
    sample=SampleConfig(prompts=16, group_size=8),
    estimator=EstimatorConfig(name="rloo"),
    optimize=OptimizeConfig(steps=1000, learning_rate=1e-3),
)


def config_of(kind: str, seed: int, quick: bool) -> TrainConfig:
    """Return the configuration of a seed's model; rollouts are reused under PPO's clip, as is usual."""
    ratio = "ppo" if kind == "reused" else "none"
    config = replace(CONFIG, seed=seed, objective=ObjectiveConfig(ratio=ratio))
    return replace(config, chain_sum=QUICK_TASK, warm_start=QUICK_START) if quick else config


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return one cell per kind of drift."""
    enumerated = {"spec": asdict(SPEC), "divergences": list(DIVERGENCES), "least_ess": LEAST_ESS, "ratios": list(CASES)}
    enumerated |= {"budgets": list(BUDGETS)}
    exact = [Cell(f"exact-{drift}", {"drift": drift, "instances": size.instances} | enumerated) for drift in DRIFTS]
    common = {"quick": quick, "size": asdict(size), "ratios": list(CASES), "baselines": list(BASELINES)}
    sampled = [Cell(kind, common | {"config": plain_config(config_of(kind, 0, quick))}) for kind in KINDS]
    return exact + sampled


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Enumerate policies, or train a model and look back."""
    if "drift" in cell.settings:
        return exact_tables(cell.settings["drift"], cell.settings["instances"], bar)
    quick = cell.settings["quick"]
    return sampled_tables(cell.name, SMALL if quick else FULL, quick, work, bar)


def exact_tables(drift: str, instances: int, bar: Bar) -> Tables:
    """Return what each ratio does at each divergence: means over random policies, and every policy's efficiencies.

    Ratios are compared on the same policies, so their efficiencies are kept policy by policy.
    """
    found: dict[tuple[float, str], list[dict[str, float]]] = {}
    policies = []
    for seed in range(instances):
        tree, direction = policy_and_direction(drift, seed)
        if not usable(tree, direction):
            continue
        for distance in DIVERGENCES:
            figures = one_policy(tree, sampled_at(tree, direction, distance))
            for name, facts in figures.items():
                found.setdefault((distance, name), []).append(facts)
            policies.append({"drift": drift, "divergence": distance, "policy": seed} | efficiencies(figures))
        bar(seed + 1, instances, f"exact-{drift}: policies enumerated")
    means = [
        {"drift": drift, "divergence": distance, "ratio": name, "policies": len(rows), "drawn": instances}
        | {
            key: value
            for column in rows[0]
            for key, value in mean_columns(column, [row[column] for row in rows]).items()
        }
        for (distance, name), rows in found.items()
    ]
    return {"exact": means, "policies": policies}


def efficiencies(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """Return one policy's efficiency under every ratio at every budget, a column each."""
    return {
        f"efficiency_{budget} {name}": rounded(facts[f"efficiency_{budget}"])
        for budget in BUDGETS
        for name, facts in figures.items()
    }


def policy_and_direction(drift: str, seed: int) -> tuple[Tree, Float]:
    """Return a random policy and the unit direction in which its sampler lies."""
    rng = np.random.default_rng(seed)
    tree = random_tree(SPEC, rng)
    direction = -tree.gradient if drift == "behind" else rng.normal(size=tree.gradient.shape)
    return tree, direction / np.linalg.norm(direction)


def usable(tree: Tree, direction: Float) -> bool:
    """Return True where there is a sampler at every distance, with something left of the sample at the largest."""
    most = max(DIVERGENCES)
    return farthest(tree, direction) >= most and effective_share(sampled_at(tree, direction, most)) >= LEAST_ESS


def one_policy(tree: Tree, off: Tree) -> dict[str, dict[str, float]]:
    """Return the exact figures of every ratio on a policy with its sampler.

    Where a clip stops every token there is no update, and its efficiency is 0.
    """
    fresh, figures = case_moments(tree, CASES["`none`"]), {}
    for name, case in CASES.items():
        moments = case_moments(off, case)
        figures[name] = {
            "ess": effective_share(off),
            "touched": touched(off, case),
            "baseline_shift": mean_shift(off, case),
            "bias": moments.relative_bias,
            "projection": moments.projection,
            "variance": moments.variance / fresh.variance,
        } | {f"efficiency_{n}": moments.efficiency(n) if moments.mean.any() else 0.0 for n in BUDGETS}
    return figures


def mean_columns(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return a mean over policies and its interval; policies are the clusters."""
    found = cluster_jackknife(np.array(values)[:, None], lambda rows: rows[..., 0], f"mean {name}", "linear")
    return interval_columns(name, found)


def sampled_tables(kind: str, size: Size, quick: bool, work: Path, bar: Bar) -> Tables:
    """Train a model per seed, measure old rollouts at every lag, and pool the seeds' prompts."""
    grams: dict[int, list[Gram]] = {}
    facts: dict[int, list[dict[str, float]]] = {}
    for seed in size.seeds:
        # both kinds begin at the same supervised start
        trainer = Trainer.from_config(started(config_of(kind, seed, quick), work))
        source = reused if kind == "reused" else stale
        for lag, rollouts in source(trainer, size):
            fresh = drawn(trainer, size.prompts, size.truth_group, FRESH)
            table = scored(trainer, rollouts)
            grams.setdefault(lag, []).append(gram_of(trainer, rollouts, table, fresh))
            facts.setdefault(lag, []).append(distance_facts(table))
            bar(len(facts), len(size.lags), f"{kind}: seed {seed}, {lag} updates apart")
    levels = [
        {"kind": kind, "lag": lag, "seeds": len(rows)}
        | {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        for lag, rows in facts.items()
    ]
    return {"levels": levels, "sampled": [row for lag in grams for row in statistics_rows(kind, lag, grams[lag])]}


def stale(trainer: Trainer, size: Size) -> Iterator[tuple[int, Rollouts]]:
    """Train, and then sample from the weights of some updates ago."""
    past = []
    for step in range(max(size.lags)):
        past.append([p.detach().clone() for p in trainer.policy.parameters])
        train_step(trainer, step)
    present = [p.data for p in trainer.policy.parameters]
    for lag in size.lags:
        put(trainer, past[-lag])
        rollouts = drawn(trainer, size.prompts, size.group, OLD)
        put(trainer, present)
        yield lag, rollouts


def put(trainer: Trainer, weights: Sequence[torch.Tensor]) -> None:
    """Let the policy hold these weights."""
    for parameter, data in zip(trainer.policy.parameters, weights, strict=True):
        parameter.data = data


def reused(trainer: Trainer, size: Size) -> Iterator[tuple[int, Rollouts]]:
    """Sample once, and update on the whole batch again and again."""
    rollouts = drawn(trainer, size.prompts, size.group, OLD)
    table = scored(trainer, rollouts)
    batch = trainer.objective.batch(rollouts, table, estimate("rloo", table.inputs(None)).advantage, None)
    for epoch in range(1, max(size.epochs) + 1):
        trainer.update(batch, trainer.policy.forward(rollouts, keep_graph=False))
        if epoch in size.epochs:
            yield epoch, rollouts


def gram_of(trainer: Trainer, rollouts: Rollouts, table: TokenTable, fresh: Rollouts) -> Gram:
    """Return the Gram matrix of every ratio with every baseline, beside the gradient of fresh rollouts."""
    coefficient: dict[tuple[str, str], Float] = {}
    for name, ratio in every_ratio(table).items():
        seen = table if name == "`none`" else replace(table, ratio=token_ratio(table))
        for baseline in BASELINES:
            advantage = estimate(baseline, seen.inputs(table.stats.energy)).advantage
            coefficient[name, baseline] = ratio.coefficient(advantage)
    truth = estimate("rloo", scored(trainer, fresh).inputs(None)).advantage
    return prompt_gram(trainer.model, [Weighed(rollouts, coefficient), Weighed(fresh, {TRUTH: truth})])


def every_ratio(table: TokenTable) -> dict[str, Ratio]:
    """Return the importance ratios of all tokens under every case."""
    behavior = np.where(table.mask, table.behavior_logprob, 0.0)
    inputs = RatioInputs(table.stats.logprob, behavior, table.mask)
    return {name: importance_ratio(case.name, inputs, case.options) for name, case in CASES.items()}


def distance_facts(table: TokenTable) -> dict[str, float]:
    """Return how far policy and sampler are apart on their rollouts, and what each clip touches.

    KL(μ‖π) is the mean of ρ − 1 − log ρ over the sampler's tokens: unbiased, and each term is at least 0.
    """
    log_ratio = np.where(table.mask, table.stats.logprob - table.behavior_logprob, 0.0)
    apart = np.expm1(log_ratio) - log_ratio
    advantage = estimate("rloo", table.inputs(None)).advantage
    stopped = {
        f"touched {name}": float((ratio.limited | ratio.clipped(advantage))[table.mask].mean())
        for name, ratio in every_ratio(table).items()
    }
    return {
        "kl_token": float(apart[table.mask].mean()),
        "kl_rollout": float(apart.sum(axis=1).mean()),
        "ess": effective_sample_size(np.exp(log_ratio.sum(axis=1))) / len(log_ratio),
        "success": float(table.total_reward.mean()),
    } | stopped


def statistics_rows(kind: str, lag: int, grams: Sequence[Gram]) -> list[dict[str, Any]]:
    """Return a row per ratio and baseline: its statistics over all seeds' prompts, and its efficiency over `none`'s."""
    pairs = by_label(paired_ratios(grams, ("`none`", "rloo"), TRUTH))
    rows = []
    for (name, baseline), row in by_label(pooled_statistics(grams, TRUTH)).items():
        if (name, baseline) != TRUTH:
            pair = pairs.get((name, baseline))
            ratio = None if pair is None else pair.efficiency
            rows.append(
                {"kind": kind, "lag": lag, "ratio": name, "baseline": baseline, "prompts": row.n_prompts}
                | {"clusters": row.n_clusters, "bias": row.relative_bias, "variance": row.variance, "sf": row.sf}
                | statistics_columns(row, "projection", "efficiency")
                | interval_columns("against_none", ratio)
                | {"against_none_p": None if ratio is None else rounded(ratio.p_value)}
            )
    return rows


STUDY = Study(
    title="Off-policy",
    question="What do importance ratios and their clips make of mean and variance of the update as the sampler falls "
    "behind the policy?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
