"""Everything scheduled at a step: exact norms, every estimator's Gram matrix, drawn tokens, sketches, attribution."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from otb_analysis.config import MeasureConfig
from otb_analysis.estimators import proved
from otb_analysis.gradients import (
    group_gradient_gram,
    sketched_group_gram,
    token_score_norms,
    weighted_score_norms,
)
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
from otb_analysis.types import Bool, Float, Gram, Int, Label, NormalEquations

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
        by_column = token_score_norms(self.model, ids, mask, attention, **settings).norm_sq
        whole = weighted_score_norms(self.model, ids, mask, mask[:, None].float(), attention, **settings)[:, 0]
        total = np.full(len(rows), np.nan)
        total[rows] = whole
        return TokenMeasurements.exact(by_policy_token(rollouts, by_column, rows), total, rollouts.group)

    def gram(
        self, rollouts: Rollouts, table: TokenTable, measured: TokenMeasurements, groups: Int, seed: int = 0
    ) -> Gram:
        """Return ⟨ḡ_{m,p}, ḡ_{m',p'}⟩ of the groups' mean gradients under every estimator whose inputs exist.

        `seed` is that of the hash where `gram_method` chooses sketches.
        """
        rows = np.isin(rollouts.group, groups)
        calibrated = measured.drawn.calibrated if measured.drawn else None
        advantages = every_advantage(table, measured, rows, self.options, calibrated, self.states)
        dim = self._buckets(rollouts, rows)
        inner = self._inner(rollouts, rows, rollouts.group, advantages, dim, seed)
        prompts = tuple(rollouts.prompts[g].id for g in groups)
        return Gram(inner, tuple(advantages), int(rows.sum()), prompts, groups, dim)

    def subgroups(
        self, rollouts: Rollouts, table: TokenTable, measured: TokenMeasurements, groups: Int, seed: int = 0
    ) -> dict[int, Gram]:
        """Return the products of smaller groups cut from the measured ones, by size, under a few estimators.

        Those are the configured ones, the one that trains and the unbiased reference; each is computed anew from the
        rollouts of a smaller group, without what it remembers of earlier steps, which had whole ones. Empty where the
        groups cannot be cut evenly.
        """
        rows = np.isin(rollouts.group, groups)
        dim = self._buckets(rollouts, rows)
        names = {REFERENCE[0], *(self.options or ()), *self.config.subgroups}
        grams = {}
        for size in smaller_sizes(rollouts.group[rows]):
            cut = cut_groups(rollouts.group, size)
            every = every_advantage(replace(table, group=cut), measured, rows, self.options)
            chosen = {label: advantage for label, advantage in every.items() if label[0] in names}
            inner = self._inner(rollouts, rows, cut, chosen, dim, seed)
            whole = mean_over_subgroups(inner, inner.shape[-1] // len(groups))
            prompts = tuple(rollouts.prompts[g].id for g in groups)
            grams[size] = Gram(whole, tuple(chosen), int(rows.sum()), prompts, groups, dim)
        return grams

    def _buckets(self, rollouts: Rollouts, rows: Bool) -> int | None:
        """Buckets of the sketches that a Gram matrix is estimated from, None where it is exact, as with soft tokens."""
        if rollouts.soft is not None:
            return None
        return gram_method(self.model, rollouts, rows, self.config.gram, self.config.scope).dim

    def _inner(
        self, rollouts: Rollouts, rows: Bool, group: Int, advantages: Mapping[Label, Float], dim: int | None, seed: int
    ) -> Float:
        """Return inner products of mean gradients of some rows' groups; equal advantages are measured once.

        They are from sketches in `dim` buckets, or exact where that is None.
        """
        sizes = np.bincount(group)[group[rows]]
        stacked = np.stack([a / sizes[:, None] for a in advantages.values()])
        different, back = np.unique(stacked.reshape(len(stacked), -1), axis=0, return_inverse=True)
        weights = rollouts.by_column(different.reshape(-1, *stacked.shape[1:]), rows)
        ids, mask, attention = rollouts.tensors(self.model.device, rows)
        batch = (self.model, ids, mask, weights, group[rows], attention)
        if dim is None:
            inner = group_gradient_gram(*batch, **self.settings, soft=rollouts.soft)
        else:
            inner = sketched_group_gram(*batch, dim=dim, seed=seed, **self.policy.settings)
        back = back.reshape(-1)
        return inner[np.ix_(back, back)]

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
        tokens = TokenMeasurements.nothing(table.mask.shape) if known is None else known
        if len(normed) and known is None:
            tokens = attempt("exact norms", lambda: self.norms(rollouts, normed), tokens)
        seen = MeasuredStep(self.policy, step, rollouts, table, weights)
        for name, plan in self.config.levels.items():
            if plan.due(step):
                level = level_of(name)
                tokens = attempt(level.phase, partial(level.measure, seen, plan, tokens), tokens)
        if not len(groups):
            return Measurement(tokens, gaps=attempt.failed)
        gram = attempt("Gram matrix", lambda: self.gram(rollouts, table, tokens, groups, step), None)
        if gram is None:
            return Measurement(tokens, gaps=attempt.failed)
        cut: dict[int, Gram] = {}
        if self.config.subgroups:
            cut = attempt("smaller groups", lambda: self.subgroups(rollouts, table, tokens, groups, step), cut)
        rows = attempt("gradient statistics", lambda: self._statistics(gram), ())
        return Measurement(tokens, gram, cut, rows, attempt.failed)

    def _statistics(self, gram: Gram) -> tuple[GradientStatistics, ...]:
        known = proved(gram.labels, self.run)
        return tuple(gradient_statistics(gram.inner, gram.labels, gram.n_rollouts, known=known))
