"""Everything scheduled at a step: exact norms, every estimator's Gram matrix, drawn tokens, sketches, attribution."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from otb_analysis.config import MeasureConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import proved
from otb_analysis.gradients import (
    group_gradient_gram,
    sketched_group_gram,
    token_score_norms,
)
from otb_analysis.gradients.batch.widening import widened
from otb_analysis.measurement.advantages import every_advantage
from otb_analysis.measurement.gram_method import gram_method
from otb_analysis.measurement.level import MeasuredPolicy, MeasuredStep, by_policy_token
from otb_analysis.measurement.levels import level_of
from otb_analysis.measurement.table import TokenTable
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.phases import phase
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import (
    REFERENCE,
    GradientStatistics,
    cut_groups,
    gradient_statistics,
    mean_over_subgroups,
    smaller_sizes,
)
from otb_analysis.types import Float, Gram, Int, Label, NormalEquations

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


@dataclass
class Attempts:
    """Runs the measurements of a step. No failure of measuring may stop the training."""

    step: int
    failed: int = 0

    def __call__(self, what: str, run: Callable[[], T], otherwise: T) -> T:
        """Return a measurement; where it fails, warn, count a gap, and return `otherwise`."""
        try:
            with phase(what):
                return run()
        except Exception as error:
            message = f"{what} at step {self.step} failed and is missing from the run: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self.failed += 1
            return otherwise


class GradientMeasurer:
    """Measures rollouts under one model and configuration; leaves parameters, gradients and random state alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: MeasureConfig,
        temperature: float,
        options: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
    ):
        self.options = options
        self.run = run or {}  # the whole configuration, nested: it says what is proved of the estimators
        self.model = model
        self.config = config
        self.policy = MeasuredPolicy(model, config.scope, temperature, config.engine)
        # What the estimator that trains remembers of earlier steps, by its label; `training` keeps it up to date
        self.states: dict[Label, NormalEquations] = {}
        self.settings = {"engine": self.policy.engine, **self.policy.settings}

    def norms(self, rollouts: Rollouts, groups: Int) -> TokenMeasurements:
        """Return exact norms of every token and of every whole rollout of some groups."""
        rows = np.isin(rollouts.group, groups)
        ids, mask, attention = rollouts.tensors(self.model.device, rows)
        settings = {**self.settings, "soft": rollouts.soft}
        found = token_score_norms(self.model, ids, mask, attention, whole=True, **settings)
        total = np.full(len(rows), np.nan)
        total[rows] = found.rollout_norm_sq
        return TokenMeasurements.exact(by_policy_token(rollouts, found.norm_sq, rows), total, rollouts.group)

    def gram(
        self, rollouts: Rollouts, table: TokenTable, measured: TokenMeasurements, groups: Int, seed: int = 0
    ) -> Gram:
        """Return ⟨ḡ_{m,p}, ḡ_{m',p'}⟩ of the groups' mean gradients under every estimator whose inputs exist.

        `seed` is that of the hash where `gram_method` chooses sketches.
        """
        rows = np.isin(rollouts.group, groups)
        calibrated = measured.drawn.calibrated if measured.drawn else None
        advantages = every_advantage(table, measured, rows, self.options, calibrated, self.states)
        return self._gram(rollouts, rollouts.group, groups, advantages, seed)

    def subgroups(
        self, rollouts: Rollouts, table: TokenTable, measured: TokenMeasurements, groups: Int, seed: int = 0
    ) -> dict[int, Gram]:
        """Return the products of smaller groups cut from the measured ones, by size, under a few estimators.

        Those are the configured ones, the one that trains and the unbiased reference; each is computed anew from the
        rollouts of a smaller group, without what it remembers of earlier steps, which had whole ones. Empty where the
        groups cannot be cut evenly.
        """
        rows = np.isin(rollouts.group, groups)
        names = {REFERENCE[0], *(self.options or ()), *self.config.subgroups}
        grams = {}
        for size in smaller_sizes(rollouts.group[rows]):
            cut = cut_groups(rollouts.group, size)
            every = every_advantage(replace(table, group=cut), measured, rows, self.options)
            chosen = {label: advantage for label, advantage in every.items() if label[0] in names}
            grams[size] = self._gram(rollouts, cut, groups, chosen, seed)
        return grams

    def _gram(self, rollouts: Rollouts, group: Int, prompts: Int, advantages: Mapping[Label, Float], seed: int) -> Gram:
        """Return inner products of the mean gradients of some prompts' groups, exact or from sketches.

        `group` is that of each rollout. Where it is a part of its prompt's, a prompt has the mean over its parts. Equal
        advantages are measured once.
        """
        rows = np.isin(rollouts.group, prompts)
        sizes = np.bincount(group)[group[rows]]
        stacked = np.stack([a / sizes[:, None] for a in advantages.values()])
        different, back = np.unique(stacked.reshape(len(stacked), -1), axis=0, return_inverse=True)
        weights = rollouts.by_column(different.reshape(-1, *stacked.shape[1:]), rows)
        ids, mask, attention = rollouts.tensors(self.model.device, rows)
        batch = (self.model, ids, mask, weights, group[rows], attention)
        dim = None  # of sketches; soft tokens have none
        if rollouts.soft is None:
            dim = gram_method(self.model, rollouts, rows, self.config.gram, self.config.scope).dim
        if dim is None:
            inner = group_gradient_gram(*batch, **self.settings, soft=rollouts.soft)
        else:
            inner = sketched_group_gram(*batch, dim=dim, seed=seed, **self.policy.settings)
        if (parts := inner.shape[-1] // len(prompts)) > 1:
            inner = mean_over_subgroups(inner, parts)
        back, names = back.reshape(-1), tuple(rollouts.prompts[p].id for p in prompts)
        return Gram(inner[np.ix_(back, back)], tuple(advantages), int(rows.sum()), names, prompts, dim)

    def measure(
        self,
        step: int,
        rollouts: Rollouts,
        table: TokenTable,
        known: TokenMeasurements | None,
        weights: Callable[[], Float],
    ) -> Measurement:
        """Return what is due at a step; a measurement that fails is a warning and a gap, and the run goes on.

        The step seeds what is drawn. `known` holds exact norms of all groups where the training estimator needed them.
        `weights` returns what multiplies each score in the first update [N, T]; it is called only where that is used.
        """
        attempt = Attempts(step)
        normed, groups = (np.arange(n) for n in self.config.prompts_due(step, len(rollouts.prompts)))
        due = {name: plan for name, plan in self.config.levels.items() if plan.due(step)}
        tokens = TokenMeasurements.nothing(table.mask.shape) if known is None else known
        gram, cut, statistics = None, dict[int, Gram](), tuple[GradientStatistics, ...]()
        with ExitStack() as copies:
            if len(normed) or len(groups) or due:
                with suppress(InputError):  # copies that do not fit: each measurement says so itself
                    copies.enter_context(widened(self.model))  # once for all of them
            if len(normed) and known is None:
                tokens = attempt("exact norms", lambda: self.norms(rollouts, normed), tokens)
            seen = MeasuredStep(self.policy, step, rollouts, table, weights)
            for name, plan in due.items():
                level = level_of(name)
                tokens = attempt(level.phase, partial(level.measure, seen, plan, tokens), tokens)
            if len(groups):
                gram = attempt("Gram matrix", lambda: self.gram(rollouts, table, tokens, groups, step), None)
            if gram is not None and self.config.subgroups:
                cut = attempt("smaller groups", lambda: self.subgroups(rollouts, table, tokens, groups, step), cut)
        if (found := gram) is not None:

            def read() -> tuple[GradientStatistics, ...]:
                known = proved(found.labels, self.run)
                return tuple(gradient_statistics(found.inner, found.labels, found.n_rollouts, known=known))

            statistics = attempt("gradient statistics", read, ())
        return Measurement(tokens, gram, cut, statistics, attempt.failed)
