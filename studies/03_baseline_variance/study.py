"""Every baseline on the same rollouts: variance and efficiency, by group size, size of the update, task and prompts.

A policy's rollouts are drawn, measured token by token (exact norms, and a count sketch of every score) and then
compared: any estimator on any cut into groups is a sum of vectors.

Two pools: `wide`, many prompts with few rollouts each, which sharpens ‖∇J‖², and `deep`, few prompts with many, for
large groups and for the variance of single prompts. No pilot chooses the prompts of the wide one: it only marks those
that it answers both ways. The deep one has marked prompts only.

Measured on 192 prompts × 16 before: exact norms and sketches take 74 s of processor time on `chain_sum` and 42 s on
`graph_path`. So 1,536 prompts take about 10 minutes and all 630 of `graph_path` about 3: three policies, both pools
and the comparison stay inside 90 minutes, and no prompts had to be given up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.config import CriticConfig, SampleConfig, TrainConfig, WarmStartConfig
from otb_analysis.errors import InputError
from otb_analysis.statistics import Moments, jackknife_interval, log_ratio_t, weight_statistics
from otb_analysis.statistics import moments as measures
from otb_analysis.statistics.comparisons import moment_ratios
from otb_analysis.statistics.energies import correlation
from otb_analysis.statistics.gradients import (
    four_measures,
    may_be_shown,
    noise_scale,
    shown_efficiency,
)
from otb_analysis.statistics.moments import vector_moments
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Bool
from studies.lib import Cell, Study, Tables, interval_columns, or_nan, rounded, select
from studies.lib.policies import (
    critic_batches,
    different_prompts,
    fitted_critic,
    fresh_policy,
    taught,
    with_values,
    write,
)
from studies.lib.pools import Pool, load_pool, measured_tokens, proved_of_pool
from studies.lib.record import Gathered, keep_arrays, keep_pickle, kept_pickle
from studies.lib.seeds import taught_config

from .entries import ACROSS, ALONE, ASKED_SIZES, EXACT, HALF, OFFSET, UPDATES, Gradients, Way, gradients

POOLS = ("wide", "deep")
LENGTHS = {"chain_sum": 32, "graph_path": 16}
"""Tokens an answer may have."""
CRITIC = CriticConfig(kind="model", learning_rate=1e-3)
LESSON = SampleConfig(prompts=64, group_size=8)
"""Rollouts of a batch that the critic of `value` is fitted to."""
FIRST_PROMPT, FIRST_LESSON = 40_000_000, 60_000_000


@dataclass(frozen=True)
class Size:
    """How much is drawn and measured."""

    prompts: int = 1536  # Different prompts of the wide pool; graph_path has 630, and all of them are taken
    rollouts: int = 16
    deep_prompts: int = 192
    deep_rollouts: int = 128
    pilot: int = 16
    lessons: int = 24
    buckets: int = 2048


FULL = Size()
SMALL = Size(prompts=24, rollouts=8, deep_prompts=16, deep_rollouts=8, pilot=8, lessons=2, buckets=256)
DRAWN_WITH: dict[str, Any] = {"critic": asdict(CRITIC), "lesson": asdict(LESSON), "lengths": LENGTHS}


def drawn(cell: Cell, size: Size, config: TrainConfig, work: Path, bar: Bar) -> Tables:
    """Teach a policy and let it write: for its critic, the pilot, and both pools."""
    policy, length = taught(config), LENGTHS[config.task]
    prompts = different_prompts(policy, FIRST_PROMPT, size.prompts)
    sample = SampleConfig(prompts=len(prompts), group_size=size.pilot, max_new_tokens=length)
    pilot = write(policy, prompts, sample, seed=1, at_once=192).table.total_reward.reshape(len(prompts), -1)
    mixed = np.ptp(pilot, axis=1) > 0
    few = [prompt for prompt, both in zip(prompts, mixed, strict=True) if both][: size.deep_prompts]
    if len(few) < size.deep_prompts:
        raise InputError(f"{len(few)} prompts are answered both ways but {size.deep_prompts} are wanted.")
    lesson = replace(LESSON, max_new_tokens=length)
    critic = fitted_critic(policy, CRITIC, critic_batches(policy, FIRST_LESSON, size.lessons, lesson, 1000, bar), bar)
    pools = {
        "wide": write(policy, prompts, replace(sample, group_size=size.rollouts), seed=2, at_once=192),
        "deep": write(policy, few, replace(sample, group_size=size.deep_rollouts), seed=3, at_once=32),
    }
    pools = {name: with_values(policy, critic, written) for name, written in pools.items()}
    keep_pickle(work, (dict(policy.model.state_dict()), pools, mixed))
    return {"drawn": [{"policy": cell.settings["policy"], "prompts": len(prompts), "mixed": float(mixed.mean())}]}


def measured(cell: Cell, size: Size, config: TrainConfig, work: Path, bar: Bar) -> Tables:
    """Measure every token of one pool: exact norms of tokens and rollouts, and a sketch of its score."""
    (weights, pools, mixed), kind = kept_pickle(cell.after[0], work), cell.name.partition("-")[0]
    policy = fresh_policy(config)
    policy.model.load_state_dict(weights)
    arrays = measured_tokens(policy, pools[kind], np.unique(pools[kind].table.group), size.buckets, bar=bar)
    keep_arrays(work, **arrays)
    pool = Pool.from_norms(pools[kind], **arrays)
    key = {"policy": cell.settings["policy"]}
    inputs, paid = pool.inputs, pool.written.table.total_reward
    assert inputs.energy is not None
    corr = weight_statistics(inputs.energy, inputs.mask, paid, inputs.group).total_reward_corr
    length, rows = inputs.mask.sum(axis=1), []
    for p, both in enumerate(mixed if kind == "wide" else np.ones(size.deep_prompts, bool)):
        mine, long = paid[inputs.group == p], length[inputs.group == p]
        row = {"prompt": p, "mixed": bool(both), "success": float(mine.mean()), "corr": rounded(corr[p], 3)}
        row |= {"length": rounded(long.mean(), 3), "spread": rounded(long.std() / long.mean(), 3)}
        rows.append(key | row | {"pool": kind})
    facts = key | {"pool": kind, "parameters": policy.model.num_parameters()} | pool.facts()
    return {"policies": [facts], "prompts": rows}


HEAD = 32
BEST = "energy_regression"
AGAINST = ("otb", "rloo", "sequence_optimal", "none", "value")
"""The question of the study: is `BEST` ahead of each of these, with the proxy and rewards of 0 and 1?"""
AHEAD = (BEST, "energy_across_loo", HALF)
"""Entries that know other prompts, compared with each of `AGAINST`."""
COUPLED_UPDATES = (8, 32)
"""Updates small enough for the covariance of their prompts to be told from 0."""
MARGIN = 0.05
"""A ratio of efficiencies whose 95 % interval lies within 1 ± this is called equal; one that leaves out 1, told."""
REGIMES = ("none", "value", "sequence_optimal_loo", "otb_loo", "token_optimal_loo")
"""Unbiased prompt by prompt, so that their raw variance may be compared with that of `rloo` there."""
REGIME_SIZE = 4
KINDS = {"success": "success rate", "corr": "corr(W_T, R)", "spread": "length spread"}
"""What tells prompts apart: where baselines are looked at in the lowest and in the highest third."""


TABLES = ("estimators", "pairs", "signal", "coupling", "regimes")
Values = Mapping[tuple[Way, int], tuple[Moments, int, float | None]]
"""Moments of every entry at every update, the update's prompts, and the projection where it is proved."""


@dataclass(frozen=True)
class Compared:
    """How much is compared."""

    wide: tuple[int, ...] = (2, 4, 8, 16)  # Rollouts of a group
    deep: tuple[int, ...] = (4, 32)
    shuffles: int = 2  # Cuts into groups


FULL_COMPARED = Compared()
SMALL_COMPARED = Compared((2, 4), (4,), shuffles=1)
COMPARED_WITH: dict[str, Any] = {
    "alone": list(ALONE), "across": list(ACROSS), "exact": list(EXACT), "offset": list(OFFSET),
    "updates": list(UPDATES), "asked_sizes": list(ASKED_SIZES),
}  # fmt: skip


def comparison(cell: Cell, size: Compared, work: Path, bar: Bar) -> Tables:
    """Compare every entry on the pools of a policy."""
    draw, wide, deep = cell.after
    _, pools, mixed = kept_pickle(draw, work)
    plan = [("wide", wide, n) for n in size.wide] + [("deep", deep, n) for n in size.deep]
    tables, policy = Gathered({name: [] for name in TABLES}), {"policy": cell.settings["policy"]}
    for done, (kind, measured, n) in enumerate(plan):
        pool = load_pool(pools[kind], [measured], work)[0]
        both = mixed if kind == "wide" and n in ASKED_SIZES else None
        by_way = gradients(pool, n, size.shuffles, both)
        for only in (False,) if both is None else (False, True):
            moments, floor = moments_of(by_way, n, both if only else None)
            key = policy | {"pool": kind, "mixed": only or kind == "deep", "size": n}
            rows = tables_of(moments, n, floor)
            if only and kind == "wide":
                del rows["estimators"]
            tables.add(key, **rows, coupling=coupling_rows(by_way, moments))
        if kind == "deep" and n == REGIME_SIZE:
            tables.add(policy, regimes=regime_rows(cell, pool, by_way))
        bar(done + 1, len(plan), f"{cell.name}: {kind}, groups of {n}")
    return tables


def moments_of(found: Gradients, size: int, mixed: Bool | None) -> tuple[dict[Way, Moments], float]:
    """Return the moments of every way, over all prompts or over those of the pilot's choice, and the noise of ‖∇J‖².

    The noise is the standard error that ‖∇J‖² would have without any signal, as in `pair_noise`.

    What stands for ∇J is the mean gradient of all ways that are proved unbiased and look at their own prompt only.
    """
    kept_prompts = np.arange(found.mean.shape[1]) if mixed is None else np.flatnonzero(mixed)
    plain = {way: m for m, way in enumerate(found.ways) if not way.prompts and way.rewards == "0/1"}
    known = proved_of_pool([way[:2] for way in plain], len(kept_prompts), size)
    true = [m for way, m in plain.items() if way[:2] in known.truth]
    truth = np.mean([found.mean[m, kept_prompts] for m in true], axis=0, dtype=float)
    no_power = np.zeros(len(kept_prompts))
    ways = {way: m for m, way in enumerate(found.ways) if not way.prompts or way.mixed == (mixed is not None)}
    parts = {way: (found.mean[m, kept_prompts], found.power[m, kept_prompts]) for way, m in ways.items()}
    every = {way: vector_moments(mean, power, truth, no_power) for way, (mean, power) in parts.items()}
    spread = every[Way("rloo", "none")]
    reference = np.maximum(spread.power - spread.mean_sq, 0) + spread.truth_sq
    products = (truth - truth.mean(axis=0)) @ (truth - truth.mean(axis=0)).T
    square = 2 * ((products**2).sum() - (np.diag(products) ** 2).sum()) / (len(truth) - 1) ** 2
    floor = float(np.sqrt(square) / len(truth))
    return {way: replace(moments, reference_power=reference) for way, moments in every.items()}, floor


def tables_of(moments: Mapping[Way, Moments], size: int, floor: float) -> dict[str, list[dict[str, Any]]]:
    """Return a row for every entry, the pairs that the question asks for, and ‖∇J‖² with the noise scale."""
    heads, reference = [way for way in moments if way.prompts in (0, HEAD)], Way("rloo", "none")
    values = dict[tuple[Way, int], tuple[Moments, int, float | None]]()
    for way, update in product(heads, UPDATES):
        # An entry that looks at its batch sees this update's, or all prompts where there are fewer.
        of_update = moments[way._replace(prompts=update if way.prompts else 0)]
        prompts = of_update.power.size - 1
        batch = min(update if way.prompts else prompts, prompts)
        values[way, update] = of_update, update, proved_of_pool([way[:2]], batch, size).projection.get(way[:2])
    truth = moments[reference].truth_sq
    signal = {"prompts": truth.size - 1}
    signal |= interval_columns("signal", jackknife_interval(truth[0], truth[1:], "‖∇J‖²", "linear"))
    signal |= interval_columns("noise_scale", noise_scale(measures.with_projection(moments[reference], 1.0)))
    rows = [entry_row(way, values, reference, floor) for way in heads]
    return {"estimators": rows, "pairs": pair_rows(values, heads) if size in ASKED_SIZES else [], "signal": [signal]}


def pair_rows(values: Values, heads: Sequence[Way]) -> list[dict[str, Any]]:
    """Return the efficiencies of entries that know other prompts over those of the entries that are asked about."""
    pairs = []
    by_name = {(way.estimator, way.source, way.rewards): way for way in heads}
    for name in AHEAD:
        for rewards in ("0/1", "±1"):
            above = by_name.get((name, "proxy", rewards)) or by_name[name, "proxy", "0/1"]
            for against in AGAINST:
                if rewards == "±1" and not {name, against} & set(OFFSET):
                    continue
                source = next(s for n, s, _ in by_name if n == against and s != "exact")
                below = by_name.get((against, source, rewards)) or by_name[against, source, "0/1"]
                row = {"estimator": name, "against": against, "rewards": rewards}
                for p in UPDATES:
                    ratios = moment_ratios(values[above, p], values[below, p])
                    row |= interval_columns(f"gain{p}", ratios["efficiency"], 4)
                    row |= interval_columns("variance", ratios["variance"], 4) if p == HEAD else {}
                pairs.append(row)
    return pairs


def entry_row(way: Way, values: Values, reference: Way, floor: float) -> dict[str, Any]:
    """Return every measure of one entry."""
    raw, _, c = values[way, HEAD]
    moments, four, prompts = measures.with_projection(raw, c), four_measures(raw, HEAD, c), raw.power.size - 1
    row: dict[str, Any] = {"estimator": way.estimator, "source": way.source, "rewards": way.rewards}
    row |= {"c_known": c is not None}
    c_interval = jackknife_interval(four["projection"][0], four["projection"][1:], "c", "linear")
    row |= interval_columns("projection", c_interval, 4)
    row |= {"bias": rounded(measures.relative_bias(moments)[0], 3)}
    for p in UPDATES:
        e = float(four_measures(values[way, p][0], p, values[way, p][2])["efficiency"][0])
        row[f"efficiency{p}"] = rounded(e, 4) if may_be_shown(e, p, prompts) else None
    noise = measures.quotient(np.array([floor]), raw.truth_sq[:1])
    row |= interval_columns("efficiency", shown_efficiency(four["efficiency"], HEAD, float(noise[0]), "efficiency"), 4)
    equivalents = measures.rollout_equivalents(moments, HEAD, 100)
    of_100 = jackknife_interval(equivalents[0], equivalents[1:], "rollout-equivalents of 100")
    row |= interval_columns("equivalents", of_100, 4)
    if way == reference:
        return row
    for p in UPDATES:
        ratios = moment_ratios(values[way, p], values[reference, p])
        row |= interval_columns(f"gain{p}", gain := ratios["efficiency"], 4)
        if p == HEAD:
            row |= interval_columns("variance", ratios["variance"], 4) | interval_columns("sf", ratios["sf"], 4)
            row["p_value"] = gain and rounded(gain.p_value, 3)
    return row


def coupling_rows(found: Gradients, moments: Mapping[Way, Moments]) -> list[dict[str, Any]]:
    """Return of entries that look at their batch how much its prompts' gradients vary together.

    The variance of an update of P prompts is V/P·(1 + (P − 1)·C/V), C the covariance of two prompts of one update: what
    each knows of the other. Everything else on the page has V/P.
    """
    rows, asked = [], [way for way in moments if way.prompts in COUPLED_UPDATES and way.rewards == "0/1"]
    for m, way in ((m, way) for m, way in enumerate(found.ways) if way in asked):
        variance = measures.batch_variance(moments[way], 1)[0]
        covariance = found.together[m] - moments[way].mean_sq[0]
        factor = 1 + (way.prompts - 1) * covariance / variance if variance > 0 else np.nan
        rows.append({"estimator": way.estimator, "update": way.prompts, "factor": rounded(factor, 4)})
    return rows


def regime_rows(cell: Cell, pool: Pool, found: Gradients) -> list[dict[str, Any]]:
    """Return variance over that of `rloo` in the lowest and the highest third of prompts, and rank correlations.

    Prompts of one policy are distinct, so each is a cluster; policies share some of theirs and are not pooled.
    """
    variance = {way: found.power[m] - found.apart[m] for m, way in enumerate(found.ways) if way.rewards == "0/1"}
    rloo, facts, rows = variance[Way("rloo", "none")], select(cell.given["prompts"], pool="deep"), []
    for name, kind in product(REGIMES, KINDS):
        of_name = next(x for way, x in variance.items() if way.estimator == name and way.source != "exact")
        value = np.array([or_nan(row[kind]) for row in facts])
        usable = np.isfinite(value) & (of_name > 0) & (rloo > 0)
        of_name, base, of = of_name[usable], rloo[usable], value[usable]
        low, _, high = np.array_split(np.argsort(of, kind="stable"), 3)
        rank = correlation(stats.rankdata(of), stats.rankdata(of_name / base), np.arange(len(of)))
        row = {"estimator": name, "kind": kind, "prompts": len(of)} | interval_columns("rank", rank, 4)
        for third, part in (("low", low), ("high", high)):
            row |= interval_columns(third, log_ratio_t(of_name[part], base[part], "variance"), 4)
            row |= {f"{third}_from": rounded(of[part].min(), 3), f"{third}_to": rounded(of[part].max(), 3)}
        rows.append(row)
    return rows


SETTINGS = {
    "chain_sum": ("chain_sum", WarmStartConfig(success_low=0.35, success_high=0.60)),
    "chain_sum_high": ("chain_sum", WarmStartConfig(success_low=0.65, success_high=0.85)),
    "graph_path": ("graph_path", WarmStartConfig(success_low=0.35, success_high=0.60)),
}
"""Task and how far its policy was taught."""


def cells(size: Size, compared: Compared, quick: bool) -> list[Cell]:
    """Return what each policy draws, its two pools, and what is compared on them."""
    made = list[Cell]()
    for name in SETTINGS:
        config = taught_config(*SETTINGS[name], quick)
        policy = {"task": config.task, "task_settings": asdict(getattr(config, config.task)), "policy": name}
        learner = {"model": asdict(config.small_model), "start": asdict(config.warm_start), "quick": quick}
        drawn = {**policy, **learner, **asdict(replace(size, buckets=0)), **DRAWN_WITH}
        draw = Cell(f"draw-{name}", drawn)
        kinds = [Cell(f"{k}-{name}", {**drawn, "buckets": size.buckets}, after=(draw,)) for k in POOLS]
        against = {**drawn, **asdict(compared), **COMPARED_WITH}
        made += [draw, *kinds, Cell(f"compare-{name}", against, after=(draw, *kinds))]
    return made


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Draw, measure or compare the rollouts of a policy."""
    quick, kind = cell.settings["quick"], cell.name.partition("-")[0]
    if kind == "compare":
        return comparison(cell, SMALL_COMPARED if quick else FULL_COMPARED, work, bar)
    size, config = SMALL if quick else FULL, taught_config(*SETTINGS[cell.settings["policy"]], quick)
    return (drawn if kind == "draw" else measured)(cell, size, config, work, bar)


STUDY = Study(
    title="Baselines and variance",
    question="Which baseline makes the policy gradient calmer at equal progress, in which groups, on which prompts?",
    cells=cells(FULL, FULL_COMPARED, quick=False),
    quick=cells(SMALL, SMALL_COMPARED, quick=True),
    measure=measure,
)
