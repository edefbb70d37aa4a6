"""Everything scheduled at a step: exact norms, every estimator's Gram matrix, other levels; and the row of `steps`.

`gram_method` says whether the Gram matrix is exact or estimated from count sketches: whichever memory and time allow.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.arrays import zero_variance_groups
from otb_analysis.config import MeasureConfig
from otb_analysis.errors import ExchangeError, InputError
from otb_analysis.estimators import EstimatorInputs, available, entry_of, estimate, proved, with_limit
from otb_analysis.gradients import group_gradient_gram, sketched_group_gram, token_score_norms
from otb_analysis.gradients.batch.inputs import ScoreBatch, memory_bytes, widened
from otb_analysis.gradients.batch.scope import select_scope
from otb_analysis.gradients.exact.gram import GRADIENT_BYTES
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups.blocks import structure_of
from otb_analysis.gradients.groups.layered import INPUT_BYTES
from otb_analysis.gradients.groups.vocabulary import LOGIT_BYTES, SLICE_BYTES
from otb_analysis.gradients.sketched.sketch import KEPT
from otb_analysis.measurement.level import (
    MeasuredPolicy,
    MeasuredStep,
    by_policy_token,
    level_of,
    over_processes,
    positions,
    read_once,
)
from otb_analysis.measurement.table import TokenMeasurements, TokenTable, rollout_rows, token_rows
from otb_analysis.objectives.ratios import mismatch_scalars
from otb_analysis.phases import phase
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import output_layer
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import (
    REFERENCE,
    GradientStatistics,
    cut_groups,
    gradient_statistics,
    mean_over_subgroups,
    pareto_k,
    smaller_sizes,
    top_share,
)
from otb_analysis.store import gram_rows, subgroup_rows
from otb_analysis.types import Bool, Estimate, Float, Gram, Int, Label, LogitStats, NormalEquations, Tallies

# Beside a forward and backward pass of the same rollouts: the small model (0.4 M parameters, 26 tokens a rollout, 16
# prompts) and SmolLM2-135M (2 prompts; sketches after 41 tokens, half of the positions prompts).
#
#                                    0.4 M    135 M
#   exact                             9–15        9
#   sketched, 65,536 buckets         11–14    10–20
#
# Products grow with the square of the gradients: those of 257 took 11 passes of 4,480 positions of SmolLM2 (372
# processor seconds) in float64, half of that in float32, and some 4 times less beside the slower passes of the small
# model.
EXACT, SKETCHED = 16.0, 24.0
"""The Gram matrix of all estimators; the exact one times the share of positions left when prompts are read once."""
BASE, PRODUCT = 9.0, 0.25
"""The same of an exact one, its products apart; and these, times gradients² over positions."""
SLOWER = 2.0
"""An exact matrix may cost so many times a sketched one."""
PER_ROLLOUT, MOST = 3, 22
"""Gradients that 44 estimators of a prompt take: means of 6, 11, 20 and 22 were seen in groups of 2, 4, 8 and 16."""
DIM = 1 << 16
"""Buckets of a sketch: inner products are off by .4 % of ‖g‖‖g'‖, ratios of variances by less."""


@dataclass(frozen=True)
class GramMethod:
    """How the Gram matrix of some rollouts is measured, and what that takes."""

    dim: int | None  # Buckets of the sketches; None where it is exact
    memory: int  # Bytes beside the weights, one gradient and a micro-batch
    passes: float  # Cost in forward and backward passes of the rollouts
    reason: str = ""  # Why it is not exact


def gram_method(
    model: PreTrainedModel,
    rollouts: Rollouts,
    rows: Bool,
    wanted: Literal["auto", "exact", "sketch"],
    scope: str = "all",
    processes: int = 1,
) -> GramMethod:
    """Return how to measure some rows' groups: as wanted, or by `auto` exactly where memory and time allow it.

    Of several `processes` each holds the signals of its own prompts.

    The decision depends on the model and on the rollouts' lengths alone, so that it can be told before anything runs.
    """
    prompts, read = len(np.unique(rollouts.group[rows])), positions(rollouts, rows)
    each = min(PER_ROLLOUT * round(int(rows.sum()) / max(prompts, 1)), MOST)
    count, chosen = each * prompts, select_scope(model, scope)
    # A sketch holds the bucket of every parameter, float64 sums of one prompt's gradients, and all sketches.
    entries = {name: p.numel() for name, p in zip(chosen.names, chosen.tensors, strict=True)}
    total = sum(entries.values())
    memory = (4 * total if total <= KEPT else 0) + each * DIM * (8 + 4 * prompts)
    sketched = GramMethod(DIM, memory, SKETCHED, "it was asked for")
    if wanted == "sketch":
        return sketched
    # What `group_gradient_gram` holds and takes, in rounds of passes over the model or over each block.
    once = read_once(rollouts, rows)
    size, (vocabulary, width) = chosen.tensors[0].element_size(), next(output_layer(model).parameters()).shape
    try:
        structure = structure_of(ScoreBatch(model, (), (0, 0), np.zeros((0, 0), bool), chosen, 1.0))
    except UnfitError:  # the gradients are formed whole
        needed, signals, inputs = size * count * total, 0, 0
    else:
        share = -(-prompts // processes) / max(prompts, 1)  # the share of the prompts that one process has, at most
        largest = max((sum(entries[name] for name in names) for names in structure.inside), default=0)
        needed = round(size * count * share) * largest
        output = round(size * width * read * once * share)  # of one block, for all of them
        blocks = len(structure.blocks)
        inputs = output * blocks if output * blocks <= INPUT_BYTES else output * blocks // math.isqrt(blocks)
        # Signals of every row at a block's output, at its input and at the embedding's output.
        signals = 3 * each * output
    most = memory_bytes(model.device) // 2
    # Two thirds of the signals, where they are more than `most`, go back two by two of bins that hold half of it.
    rounds = max(1, -(-needed // GRADIENT_BYTES)) * max(1, -(-4 * signals // (3 * most)) - 1)
    rest = min(needed, GRADIENT_BYTES) + inputs + 3 * 8 * count**2 + min(LOGIT_BYTES * vocabulary * read, SLICE_BYTES)
    exact = GramMethod(None, rest + min(signals, most), BASE * once * rounds + PRODUCT * count**2 / max(read, 1))
    fits = rest + min(signals, most // 2) <= most
    if wanted == "exact" or (fits and exact.passes <= SLOWER * SKETCHED):
        return exact
    too_large = f"an exact one would hold {exact.memory / 1e9:.1f} GB, of {2 * most / 1e9:.1f}"
    too_slow = f"an exact one would take {exact.passes / SKETCHED:.0f} times as long"
    return replace(sketched, reason=too_slow if fits else too_large)


CALIBRATED = ("otb", "otb_loo")
"""Estimators that calibrated energies are tried with, beside the one that trains: none is recommended with them, and
those of all would take half as long again."""


def every_advantage(
    table: TokenTable,
    measured: TokenMeasurements,
    rows: Bool,
    options: Mapping[str, Any] | None = None,
    calibrated: Float | None = None,
    states: Mapping[Label, NormalEquations | Tallies] | None = None,
) -> dict[Label, Float]:
    """Return the advantages [n, T] of every estimator whose inputs exist, by (estimator, energy source), on some rows.

    Estimators that read the proxy, calibrated or not, or no energy see the whole batch, as in training, since some
    couple prompts. Those that read exact norms see the measured rows, and are left out unless all of these have them.
    `options` holds the options of estimators that do not run with their defaults, such as the one that trains; `states`
    what estimators remember of earlier steps, which is only known of the one that trains, with its energies.
    """
    options, states = options or {}, states or {}

    def advantage(label: Label, inputs: EstimatorInputs) -> Float:
        chosen = with_limit(label[0], options.get(label[0]), table.limit)
        return estimate(label[0], replace(inputs, state=states.get(label)), chosen).advantage

    proxy = table.inputs(table.proxy)
    whole = bool(measured.fully_measured[rows].all())
    part = proxy
    if whole:
        part = table.inputs(measured.whole_norm_sq, measured.rollout_norm_sq)
        part = replace(part, **{name: x[rows] for name, x in vars(part).items() if x is not None})
    everywhere = set(available(proxy, options))
    advantages: dict[Label, Float] = {}
    for name in available(part, options):
        reads_energy = entry_of(name).reads_energy
        if name in everywhere:
            source = "proxy" if reads_energy else "none"
            advantages[name, source] = advantage((name, source), proxy)[rows]
        if reads_energy and calibrated is not None and (name in CALIBRATED or name in options):
            advantages[name, "calibrated"] = advantage((name, "calibrated"), table.inputs(calibrated))[rows]
        if whole and (reads_energy or name not in everywhere):
            advantages[name, "exact"] = advantage((name, "exact"), part)
    return advantages


T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """Everything scheduled that was measured at a step; empty where nothing was due."""

    tokens: TokenMeasurements  # What is known of the scores
    gram: Gram | None = None  # Inner products of group mean gradients under every estimator
    # Inner products of smaller groups cut from the measured ones, by their size.
    subgroups: Mapping[int, Gram] = field(default_factory=dict)
    statistics: tuple[GradientStatistics, ...] = ()  # A row per estimator
    gaps: int = 0  # Measurements that failed


class GradientMeasurer:
    """Measures rollouts under one model and configuration; leaves parameters, gradients and random state alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: MeasureConfig,
        temperature: float,
        options: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        processes: Processes = SINGLE_PROCESS,
    ):
        self.model, self.config, self.options, self.processes = model, config, options, processes
        self.run = run or {}  # the whole configuration, nested: it says what is proved of the estimators
        self.policy = MeasuredPolicy(model, config.scope, temperature, config.engine)
        # What the estimator that trains remembers of earlier steps, by its label; `training` keeps it up to date
        self.states: dict[Label, NormalEquations | Tallies] = {}
        self.is_short = False  # Whether whole weights, shared out over processes, did not fit when they were wanted
        self.settings = {"engine": self.policy.engine, **self.policy.settings}

    def due(self, step: int, prompts: int) -> bool:
        """Whether anything is measured at a step of so many prompts."""
        return any((*self.config.prompts_due(step, prompts), *(x.due(step) for x in self.config.levels.values())))

    def norms(self, rollouts: Rollouts, groups: Int) -> TokenMeasurements:
        """Return exact norms of every token and of every whole rollout of some groups, shared out over processes."""
        settings = {**self.settings, "soft": rollouts.soft}

        def norms(shard: Bool) -> tuple[Float, Float]:
            ids, mask, attention = rollouts.tensors(self.model.device, shard)
            scores = token_score_norms(self.model, ids, mask, attention, whole=True, **settings)
            total = np.full(len(shard), np.nan)
            total[shard] = scores.rollout_norm_sq
            return by_policy_token(rollouts, scores.norm_sq, shard), total

        rows = np.isin(rollouts.group, groups)
        norm_sq, total = over_processes(self.processes, rollouts.group, rows, norms)
        return TokenMeasurements.exact(norm_sq, total, rollouts.group)

    def gram(
        self,
        rollouts: Rollouts,
        table: TokenTable,
        measured: TokenMeasurements,
        groups: Int,
        seed: int = 0,
        names: Collection[str] | None = None,
    ) -> Gram:
        """Return ⟨ḡ_{m,p}, ḡ_{m',p'}⟩ of the groups' mean gradients under every estimator whose inputs exist.

        Where the table's groups are parts of the rollouts', a prompt has the mean over its parts. Equal advantages are
        measured once.

        Args:
            seed: That of the hash where `gram_method` chooses sketches.
            names: Estimators of smaller groups: computed from these alone, without what is remembered of earlier steps
                and without calibrated energies, which had whole ones. None is all estimators.
        """
        rows, group = np.isin(rollouts.group, groups), table.group
        calibrated = measured.drawn.calibrated if measured.drawn and names is None else None
        states = self.states if names is None else None
        # By the first process: the last bit of a weight may differ between machines, and with it the number of rows.
        main = self.processes.broadcast_from_main
        every = main(lambda: every_advantage(table, measured, rows, self.options, calibrated, states))
        advantages = {label: advantage for label, advantage in every.items() if names is None or label[0] in names}
        sizes = np.bincount(group)[group[rows]]
        stacked = np.stack([a / sizes[:, None] for a in advantages.values()])
        different, back = np.unique(stacked.reshape(len(stacked), -1), axis=0, return_inverse=True)
        weights = rollouts.by_column(different.reshape(-1, *stacked.shape[1:]), rows)
        ids, mask, attention = self.processes.agreed(lambda: rollouts.tensors(self.model.device, rows))
        batch = (self.model, ids, mask, weights, group[rows], attention)
        dim = None  # of sketches; soft tokens have none
        if rollouts.soft is None:
            wanted = self.config.gram, self.config.scope, self.processes.size
            dim = main(lambda: gram_method(self.model, rollouts, rows, *wanted).dim)
        if dim is None:
            inner = group_gradient_gram(*batch, **self.settings, soft=rollouts.soft, processes=self.processes)
        else:
            hashed = {"dim": dim, "seed": seed, "processes": self.processes}
            inner = sketched_group_gram(*batch, **hashed, **self.policy.settings)
        if (parts := inner.shape[-1] // len(groups)) > 1:
            inner = mean_over_subgroups(inner, parts)
        back, prompts = back.reshape(-1), tuple(rollouts.prompts[p].id for p in groups)
        return Gram(inner[np.ix_(back, back)], tuple(advantages), int(rows.sum()), prompts, groups, dim)

    def subgroups(
        self, rollouts: Rollouts, table: TokenTable, measured: TokenMeasurements, groups: Int, seed: int = 0
    ) -> dict[int, Gram]:
        """Return the products of smaller groups cut from the measured ones, by size, under a few estimators.

        Those are the configured ones, the one that trains and the unbiased reference. Empty where the groups cannot be
        cut evenly.
        """
        names = {REFERENCE[0], *(self.options or ()), *self.config.subgroups}
        grams = {}
        for size in smaller_sizes(rollouts.group[np.isin(rollouts.group, groups)]):
            smaller = replace(table, group=cut_groups(rollouts.group, size))
            grams[size] = self.gram(rollouts, smaller, measured, groups, seed, names)
        return grams

    def measure(
        self,
        step: int,
        rollouts: Rollouts,
        table: TokenTable,
        known: TokenMeasurements | None,
        weights: Callable[[], Float],
    ) -> Measurement:
        """Return what is due at a step; a measurement that fails is a warning and a gap, and the run goes on.

        Several processes share out every level but those of one's own, and get the same result; the statistics are the
        first one's work.

        The step seeds what is drawn. `known` holds exact norms of all groups where the training estimator needed them.
        `weights` returns what multiplies each score in the first update [N, T]; it is called only where that is used.
        """
        # A budget's clock runs apart on every machine: the first process says what is due.
        main = self.processes.broadcast_from_main
        self.config = main(lambda: self.config)
        gaps, first = 0, self.processes.first

        def attempt(what: str, run: Callable[[], T], otherwise: T, alone: bool = False) -> T:
            nonlocal gaps
            try:
                with phase(what):
                    return run() if alone else self.processes.agreed(run)
            except ExchangeError:  # processes that are no longer at the same place cannot go on
                raise
            except Exception as error:  # no failure of measuring may stop the training
                message = f"{what} at step {step} failed and is missing from the run: {error}"
                if first:
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
                gaps += 1
                return otherwise

        normed, groups = (np.arange(n) for n in self.config.prompts_due(step, len(rollouts.prompts)))
        due = {name: plan for name, plan in self.config.levels.items() if plan.due(step)}
        tokens = TokenMeasurements.nothing(table.mask.shape) if known is None else known
        gram, cut, statistics = None, dict[int, Gram](), list[GradientStatistics]()
        with ExitStack() as copies:
            if len(normed) or len(groups) or due:
                with suppress(InputError):  # copies that do not fit: each measurement says so itself
                    copies.enter_context(widened(self.model))  # once for all of them
            if len(normed) and known is None:
                tokens = attempt("exact norms", lambda: self.norms(rollouts, normed), tokens)
            seen = MeasuredStep(self.policy, step, rollouts, table, weights, self.processes)
            for name, plan in due.items():
                level = level_of(name)
                run = partial(level.measure, seen, plan, tokens)
                tokens = attempt(level.phase, run if level.sharers > 1 else partial(main, run), tokens)
            if len(groups):
                gram = attempt("Gram matrix", lambda: self.gram(rollouts, table, tokens, groups, step), None)
            if gram is not None and self.config.subgroups:
                cut = attempt("smaller groups", lambda: self.subgroups(rollouts, table, tokens, groups, step), cut)
        if first and (g := gram) is not None:
            statistics = attempt(
                "gradient statistics",
                lambda: gradient_statistics(g.inner, g.labels, g.n_rollouts, known=proved(g.labels, self.run)),
                [],
                alone=True,
            )
        return Measurement(tokens, gram, cut, tuple(statistics), gaps)


def summarize(rollouts: Rollouts, table: TokenTable, estimate: Estimate, measurement: Measurement) -> dict[str, object]:
    """Return the scalars of a step's rollouts; the loop adds those of the update.

    Degenerate but legal input (groups of one, equal rewards, empty or cut completions) is counted here.
    """
    inside, stats, reward = table.mask, table.stats, table.total_reward
    drawn = table.drawn  # soft tokens have densities, and none of the statistics of a drawn one
    length = inside.sum(axis=1)
    energy, exact = stats.energy[drawn], measurement.tokens.whole_norm_sq[inside]
    return {
        "reward_mean": reward.mean(),
        "reward_std": reward.std(),
        "entropy_mean": _mean(stats.entropy[drawn]),
        "logprob_mean": _mean(stats.logprob[drawn]),
        # Rollouts from elsewhere may lack the sampler's log-probabilities.
        **mismatch_scalars((stats.logprob - table.behavior_logprob)[inside]),
        "advantage_max": float(np.abs(estimate.advantage[inside]).max()) if inside.any() else None,
        "length_mean": length.mean(),
        "characters_mean": float(np.mean([sum(len(turn.text) for turn in turns) for turns in rollouts.turns])),
        "length_max": int(length.max()),
        "prompt_length_max": int(rollouts.prompt_length.max()),
        "n_prompts": len(rollouts.prompts),
        "n_rollouts": len(reward),
        "n_tokens": int(inside.sum()),
        "n_zero_variance_groups": int(zero_variance_groups(reward, table.group).sum()),
        "n_singleton_groups": int((np.bincount(table.group) == 1).sum()),
        "n_empty_completions": sum(not any(turn.text for turn in turns) for turns in rollouts.turns),
        "n_truncated": sum(reason == "length" for reason in rollouts.finish_reason),
        "fallback_share": _mean(estimate.fallback[inside].astype(float)),
        "energy_proxy_mean": _mean(energy),
        "energy_tail_k": pareto_k(energy),
        "energy_max_share": top_share(energy),
        "exact_tail_k": pareto_k(exact[np.isfinite(exact)]) if measurement.tokens.fully_measured.any() else None,
        **level_scalars(measurement.tokens),
        **sampling_check(stats, drawn),
        "n_measured_prompts": len(np.unique(table.group[measurement.tokens.fully_measured])),
        "n_sketched_prompts": measurement.tokens.n_sketched,
        "measurement_gaps": measurement.gaps,
    }


def step_columns(
    step: int,
    rollouts: Rollouts,
    table: TokenTable,
    trained: Estimate,
    measurement: Measurement,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the columns of a measured step by the field of `StepTables`; who stores it adds what it knows beside."""
    gradients = [row.as_row() for row in measurement.statistics]
    return {
        "tokens": token_rows(table, trained, measurement.tokens, tokenizer),
        "rollouts": rollout_rows(rollouts, table, measurement.tokens),
        "steps": summarize(rollouts, table, trained, measurement),
        "gradients": {name: [row[name] for row in gradients] for name in gradients[0]} if gradients else None,
        "grams": gram_rows(step, measurement.gram) if measurement.gram else None,
        "subgroups": subgroup_rows(step, measurement.subgroups) if measurement.subgroups else None,
    }


def level_scalars(measured: TokenMeasurements) -> dict[str, object]:
    """Return the step's scalars from the levels `sampled` and `attribution`; empty where neither ran."""
    scalars: dict[str, object] = {}
    if (drawn := measured.drawn) is not None:
        total = measured.energy_total
        scalars |= {
            "energy_total": None if total is None else float(total.estimate[0]),
            "energy_total_stderr": None if total is None or np.isnan(total.stderr[0]) else float(total.stderr[0]),
            "n_sampled_tokens": int((measured.measured_by == "exact").sum()),
            "calibration_slope": drawn.calibration.slope,
            "calibration_error": drawn.calibration.log_error,
        }
    if (share := measured.further.get("attribution")) is not None:
        scalars["attribution_top_share"] = top_share(np.abs(share[np.isfinite(share)]))
    parts = [name for name in ("signal", "noise") if name in measured.further]
    scalars |= {f"{name}_total": float(np.nansum(measured.further[name])) for name in parts}
    return scalars


def sampling_check(stats: LogitStats, mask: Bool) -> dict[str, float | None]:
    """Return the two z-scores of the sampling certificate, as columns of `steps`; None where nothing was random.

    z = Σ(π_y − Σ_v π_v²)/√Σ Var(π_y) and z = Σ(log π_y + H)/√Σ Var(log π_y) over policy tokens. Both numerators are
    martingales with these conditional variances if every token was drawn from the scored distribution, so a wrong
    temperature, a filter or another engine's probabilities show as |z| far above 2. Proved.
    """
    sums = {
        "certificate_prob_z": (np.exp(stats.logprob) - stats.sum_pi_sq, stats.pi_variance),
        "certificate_logprob_z": (stats.logprob + stats.entropy, stats.logprob_variance),
    }
    totals = {name: (x[mask].sum(), variance[mask].sum()) for name, (x, variance) in sums.items()}
    return {name: float(x / np.sqrt(variance)) if variance > 0 else None for name, (x, variance) in totals.items()}


def _mean(values: Float) -> float | None:
    return float(values.mean()) if values.size else None
