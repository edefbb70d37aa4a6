"""An audit of a run in the store: everything that its tables say, and which command adds the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from otb_analysis.audit.bookkeeping import check_bookkeeping
from otb_analysis.audit.results import AuditReport, EstimatorRow, Proxy, Sketches, is_told
from otb_analysis.audit.sampling_report import SamplingReport, sampling_report
from otb_analysis.audit.shares import attributed_tokens
from otb_analysis.audit.trainer_loss import trainer_loss
from otb_analysis.audit.verdict import verdict
from otb_analysis.diagnostics import advise
from otb_analysis.diagnostics.advice import Advice
from otb_analysis.diagnostics.dead_groups import reward_groups
from otb_analysis.diagnostics.planner import Planner, plan
from otb_analysis.errors import InputError
from otb_analysis.estimators import proved, registered
from otb_analysis.figures.conclusion import trained_labels
from otb_analysis.figures.fidelity import comparable, energies, fidelity_columns
from otb_analysis.phases import plural
from otb_analysis.statistics import (
    REFERENCE,
    conclude,
    deleted_moments,
    gain_lost,
    paired_ratios,
    pooled_statistics,
    sketch_noise,
)
from otb_analysis.statistics.energies.correlation import log_correlation
from otb_analysis.store import RunStore
from otb_analysis.types import Gram, Label, Proved

NONE: Label = ("none", "none")
PROXY, EXACT = ("otb", "proxy"), ("otb", "exact")
SCORE = "otb audit --model DIR --rollouts FILE --go"


def audit_run(store: RunStore, aggregation: str = "", accumulate: int = 0) -> AuditReport:
    """Return what a run's tables say.

    Args:
        aggregation: How the trainer's loss weighs tokens; by default as the run's configuration says.
        accumulate: Rollouts of the trainer's micro-batches, 0 where not known.

    Raises:
        InputError: The run has no complete step.
        StoreError: It cannot be read.
    """
    stored: Any = store.info.get("config")
    config: dict[str, Any] = stored or {}
    steps = store.complete_steps()
    if not steps:
        raise InputError(f"run {store.path.name} has no complete step; wait for one, or make it again.")
    grams = store.grams()
    sampling = _sampling(store)
    alarm = sampling is not None and sampling.alarm  # what the user stated of the sampling is then not so
    known = Proved() if alarm else proved({label for gram in grams.values() for label in gram.labels}, config)
    trained = next(iter(trained_labels(config, grams.values())), None)
    status, reason = store.standing
    missing = [] if status == "complete" else [f"Run: {status} after {plural(len(steps), 'complete step')}: {reason}"]
    subgroups = store.subgroup_grams() if grams else {}
    whole = _judged(grams, trained, missing, known)
    rows = _rows(list(grams.values()), _between(grams, subgroups), whole, known)
    conclusion = conclude(list(grams.values()), known) if grams else None
    tokens = attributed_tokens(store)
    if tokens is None:
        missing.append(f"Tokens: no step was attributed; {SCORE} does it.")
    proxy = _proxy(store, list(grams.values()), known)
    if proxy is None:
        missing.append(f"Proxy: no token has an exact norm; {SCORE} measures them.")
    rewards = store.rollouts_df(columns=["step", "group", "reward", "prompt_id"])
    groups = reward_groups(rewards)
    planner = plan(grams, subgroups, trained if whole else None, groups, len(steps), known)
    source = config.get("source")
    if sampling is None:
        own = "otb diagnose has that of a run of otb train, as sampling_certificate."
        missing.append(f"Sampling check: no token was scored again; {f'{SCORE} does it.' if source else own}")
    name = trained[0] if trained else ""
    return AuditReport(
        run=store.path.name,
        rollouts=str(source.get("path")) if isinstance(source, Mapping) else "this run's own",
        model=str(config.get("model") or ""),
        trained=trained[0] if trained else "",
        n_steps=len(steps),
        n_prompts=len(set(rewards["prompt_id"].dropna())) or len(groups),
        n_rollouts=len(rewards),
        verdict=verdict(whole, planner, proxy, sampling, conclusion),
        estimators=rows,
        planner=planner,
        tokens=tokens,
        proxy=proxy,
        missing=tuple(missing),
        sketches=_sketches(list(grams.values())),
        sampling=sampling,
        bookkeeping=check_bookkeeping(store, name, trainer_loss(config, aggregation, accumulate)),
    )


def _sampling(store: RunStore) -> SamplingReport | None:
    rows = store.frame("sampling")
    return None if rows.empty else sampling_report(rows)


def _judged(grams: Mapping[int, Gram], trained: Label | None, missing: list[str], known: Proved) -> Advice | None:
    """Return estimators judged at the recorded group size; say what hinders it."""
    if not grams:
        missing.append(f"Estimators: no step has every estimator's gradient; {SCORE} measures them.")
        return None
    if trained is None:
        missing.append("Estimators: the trainer's estimator was not measured; pass its name as --estimator.name.")
        return None
    try:
        return advise(grams, {}, trained, known=known)
    except InputError as error:
        missing.append(f"Estimators: {error}")
        return None


def plan_from_rewards(store: RunStore) -> Planner:
    """Return what the rewards of a run alone say about group sizes.

    Raises:
        StoreError: It cannot be read.
    """
    rewards = store.rollouts_df(columns=["step", "group", "reward", "prompt_id"])
    return plan({}, {}, None, reward_groups(rewards), len(store.complete_steps()))


def _rows(
    grams: Sequence[Gram], between: float | None, advice: Advice | None, known: Proved
) -> tuple[EstimatorRow, ...]:
    """Return one row per estimator, the most efficient first."""
    ratios = (
        {(one.choice.estimator, one.choice.energy_source): one.ratio for one in advice.candidates} if advice else {}
    )
    rows = []
    for row in pooled_statistics(grams, known=known):
        entry = registered(row.estimator)
        apart = between if row.variance is not None and entry is not None and entry.unbiased else None
        progress = row.c_known or row.intervals["projection"] is not None  # else c is nothing but noise
        whole = None if row.variance is None else row.variance * row.n_prompts
        one = EstimatorRow(
            row.estimator, row.energy_source, row.intervals["efficiency"], row.intervals["noise_scale"],
            ratios.get((row.estimator, row.energy_source)), row.intervals["rollout_equivalents"],
            row.intervals["relative_bias"], row.c_known, row.projection if progress else None,
            row.sf if progress else None, row.variance,
            None if whole is None or apart is None else whole - apart,
            apart,
            row.sketch_dim is not None,
        )  # fmt: skip
        rank = -np.inf if row.efficiency is None else row.efficiency
        rows.append(((one.efficiency is not None or is_told(one.ratio), rank), one))
    return tuple(one for _, one in sorted(rows, key=lambda ranked: ranked[0], reverse=True))


def _sketches(grams: Sequence[Gram]) -> Sketches | None:
    """Return how far sketching moves ratios of variances, None where no step was sketched."""
    sketched = [(gram, gram.sketch_dim) for gram in grams if gram.sketch_dim is not None]
    if not sketched:
        return None
    errors = [
        sketch_noise(gram.inner, dim).log_ratio[:, gram.labels.index(REFERENCE)]
        for gram, dim in sketched
        if REFERENCE in gram.labels
    ]
    every = np.concatenate([np.zeros(0), *errors])
    error = float(np.nanmax(every)) if np.isfinite(every).any() else None
    return Sketches(len(sketched), min(dim for _, dim in sketched), error)


def _between(grams: Mapping[int, Gram], subgroups: Mapping[int, Mapping[int, Gram]]) -> float | None:
    """Return the variance between prompts of an unbiased group gradient's mean, None without halves of groups.

    Without a baseline rollouts do not touch each other, so one prompt's group has the variance b + w/N, its halves
    b + 2w/N, and b = 2·V(N) − V(N/2) without bias; by chance it can be negative. Every estimator that is unbiased given
    the prompt has the same b.
    """
    if not subgroups:
        return None
    size, halves = max(subgroups.items())
    steps = [step for step, gram in grams.items() if NONE in gram.labels and step in halves]
    steps = [step for step in steps if NONE in halves[step].labels]
    if not steps or round(grams[steps[0]].n_rollouts / grams[steps[0]].n_prompts) != 2 * size:
        return None
    whole, half = (deleted_moments([table[step] for step in steps], NONE) for table in (grams, halves))
    value = float(2 * (whole.power - whole.mean_sq)[0] - (half.power - half.mean_sq)[0])
    return value if np.isfinite(value) else None


def _proxy(store: RunStore, grams: Sequence[Gram], known: Proved) -> Proxy | None:
    tokens, _ = comparable(store.tokens_df(columns=fidelity_columns(), where="grad_norm_sq IS NOT NULL"))
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
    pairs = {(p.estimator, p.energy_source): p.efficiency for p in paired_ratios(grams, EXACT, known=known)}
    return Proxy(
        n_tokens=len(table),
        pooled=log_correlation(proxy, exact, prompt),
        within=log_correlation(proxy, exact, prompt, cell),
        kept=pairs.get(PROXY),
        gain_lost=gain_lost(grams, PROXY, EXACT, known=known),
    )
