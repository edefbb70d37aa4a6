"""Everything scheduled at a step: exact norms, every estimator's Gram matrix, drawn tokens, sketches, attribution."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from otb_analysis.config import MeasureConfig
from otb_analysis.estimators import proved
from otb_analysis.gradients import group_gradient_gram, token_score_norms, weighted_score_norms
from otb_analysis.measurement.advantages import ExactNorms, every_advantage
from otb_analysis.measurement.levels import (
    MeasuredPolicy,
    SampledEnergies,
    TokenShares,
    attribute,
    batch_of,
    by_column,
    draw_energies,
)
from otb_analysis.measurement.sketched import SketchedNorms, groups_to_sketch, sketch_groups
from otb_analysis.measurement.table import TokenTable
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
from otb_analysis.types import Bool, Float, Gram, Int, Label

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """Everything scheduled that was measured at a step; empty where nothing was due.

    Attributes:
        norms: Exact norms of the measured groups.
        gram: Inner products of group mean gradients under every estimator.
        subgroups: Inner products of smaller groups cut from the measured ones, by their size.
        statistics: A row per estimator.
        sampled: Exact norms of drawn tokens and what follows from them.
        sketch: Estimated norms of groups of which nothing was measured exactly.
        shares: Attribution of ‖ḡ‖² to tokens.
        gaps: Instruments that failed.
    """

    norms: ExactNorms | None = None
    gram: Gram | None = None
    subgroups: Mapping[int, Gram] = field(default_factory=dict)
    statistics: tuple[GradientStatistics, ...] = ()
    sampled: SampledEnergies | None = None
    sketch: SketchedNorms | None = None
    shares: TokenShares | None = None
    gaps: int = 0


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
        self.settings = {"engine": config.engine, "scope": config.scope, "temperature": temperature}
        self.policy = MeasuredPolicy(model, config.scope, temperature)
        self.slopes = "jvp"  # until the model's attention turns out to have no forward mode

    def groups_due(self, step: int, n_groups: int) -> Int:
        """Return the indices of the groups to measure at a step: the first ones, since prompts come in random order."""
        if not self.config.exact.due(step):
            return np.arange(0)
        return np.arange(min(self.config.exact.prompts or n_groups, n_groups))

    def norms(self, rollouts: Rollouts, groups: Int) -> ExactNorms:
        """Return exact norms of every token and of every whole rollout of some groups."""
        rows = np.isin(rollouts.group, groups)
        columns = rollouts.completion_columns()
        ids, mask, attention = batch_of(rollouts, rows, self.model.device)
        found = token_score_norms(self.model, ids, mask, attention, **self.settings).norm_sq
        whole = weighted_score_norms(self.model, ids, mask, mask[:, None].float(), attention, **self.settings)[:, 0]
        norm_sq = np.full(columns.shape, np.nan)
        inside = np.take_along_axis(rollouts.mask, columns, axis=1)[rows] & rollouts.present()[rows]
        norm_sq[rows] = np.where(inside, np.take_along_axis(found, columns[rows], axis=1), np.nan)
        total = np.full(len(rows), np.nan)
        total[rows] = whole
        return ExactNorms(norm_sq, total)

    def gram(
        self, rollouts: Rollouts, table: TokenTable, norms: ExactNorms, groups: Int, calibrated: Float | None = None
    ) -> Gram:
        """Return ⟨ḡ_{m,p}, ḡ_{m',p'}⟩ of the groups' mean gradients under every estimator whose inputs exist."""
        rows = np.isin(rollouts.group, groups)
        advantages = every_advantage(table, norms, rows, self.options, calibrated)
        inner = self._inner(rollouts, rows, rollouts.group, advantages)
        return Gram(inner, tuple(advantages), int(rows.sum()), tuple(rollouts.prompts[g].id for g in groups), groups)

    def subgroups(self, rollouts: Rollouts, table: TokenTable, norms: ExactNorms, groups: Int) -> dict[int, Gram]:
        """Return the products of smaller groups cut from the measured ones, by size, under a few estimators.

        Those are the configured ones, the one that trains and the unbiased reference; each is computed anew from the
        rollouts of a smaller group. Empty where the groups cannot be cut evenly.
        """
        rows = np.isin(rollouts.group, groups)
        names = {REFERENCE[0], *(self.options or ()), *self.config.subgroups}
        found = {}
        for size in smaller_sizes(rollouts.group[rows]):
            cut = cut_groups(rollouts.group, size)
            every = every_advantage(replace(table, group=cut), norms, rows, self.options)
            own = {label: advantage for label, advantage in every.items() if label[0] in names}
            inner = self._inner(rollouts, rows, cut, own)
            whole = mean_over_subgroups(inner, inner.shape[-1] // len(groups))
            prompts = tuple(rollouts.prompts[g].id for g in groups)
            found[size] = Gram(whole, tuple(own), int(rows.sum()), prompts, groups)
        return found

    def _inner(self, rollouts: Rollouts, rows: Bool, group: Int, advantages: Mapping[Label, Float]) -> Float:
        """Return inner products of mean gradients of some rows' groups; equal advantages are measured once."""
        sizes = np.bincount(group)[group[rows]]
        stacked = np.stack([a / sizes[:, None] for a in advantages.values()])
        different, back = np.unique(stacked.reshape(len(stacked), -1), axis=0, return_inverse=True)
        weights = by_column(different.reshape(-1, *stacked.shape[1:]), rollouts, rows)
        ids, mask, attention = batch_of(rollouts, rows, self.model.device)
        inner = group_gradient_gram(self.model, ids, mask, weights, group[rows], attention, **self.settings)
        back = back.reshape(-1)
        return inner[np.ix_(back, back)]

    def measure(self, step: int, rollouts: Rollouts, table: TokenTable, norms: ExactNorms | None) -> Measurement:
        """Return what is due at a step; a failing instrument is a warning and a gap, never the end of the run.

        Args:
            step: The step.
            rollouts: Its rollouts.
            table: Its token table.
            norms: Exact norms of all groups when the training estimator needed them already.
        """
        groups = self.groups_due(step, len(rollouts.prompts))
        if len(groups) and norms is None:
            norms = _attempt(f"exact norms at step {step}", lambda: self.norms(rollouts, groups))
        found = Measurement(norms=norms, gaps=int(len(groups) > 0 and norms is None))
        if self.config.sampled.due(step):
            sampled = _attempt(f"drawn tokens at step {step}", lambda: self.draw(step, rollouts, table, norms))
            found = replace(found, sampled=sampled, gaps=found.gaps + (sampled is None))
        if self.config.sketch.due(step):
            found = self._sketched(step, rollouts, table, found)
        return found if norms is None or not len(groups) else self._compared(step, rollouts, table, groups, found)

    def _sketched(self, step: int, rollouts: Rollouts, table: TokenTable, found: Measurement) -> Measurement:
        """Add estimated norms of groups of which nothing was measured exactly, if any are left."""
        exact = None if found.norms is None else found.norms.grad_norm_sq
        groups = groups_to_sketch(self.config.sketch, table, exact, found.sampled)
        if not len(groups):
            return found
        sketch = _attempt(f"sketched norms at step {step}", lambda: self.sketch(step, rollouts, groups))
        return replace(found, sketch=sketch, gaps=found.gaps + (sketch is None))

    def _compared(
        self, step: int, rollouts: Rollouts, table: TokenTable, groups: Int, found: Measurement
    ) -> Measurement:
        """Add the Gram matrix and its statistics to exact norms."""
        norms, calibrated = found.norms, found.sampled.calibrated if found.sampled else None
        if norms is None:
            return found
        gram = _attempt(f"Gram matrix at step {step}", lambda: self.gram(rollouts, table, norms, groups, calibrated))
        if gram is None:
            return replace(found, gaps=found.gaps + 1)
        found = self._cut(step, rollouts, table, groups, found)
        rows = _attempt(
            f"gradient statistics at step {step}",
            lambda: tuple(
                gradient_statistics(gram.inner, gram.labels, gram.n_rollouts, known=proved(gram.labels, self.run))
            ),
        )
        return replace(found, gram=gram, statistics=rows or (), gaps=found.gaps + (rows is None))

    def _cut(self, step: int, rollouts: Rollouts, table: TokenTable, groups: Int, found: Measurement) -> Measurement:
        """Add the products of smaller groups, if any estimator is to be measured there."""
        norms = found.norms
        if norms is None or not self.config.subgroups:
            return found
        cut = _attempt(f"smaller groups at step {step}", lambda: self.subgroups(rollouts, table, norms, groups))
        return replace(found, subgroups=cut or {}, gaps=found.gaps + (cut is None))

    def draw(self, step: int, rollouts: Rollouts, table: TokenTable, norms: ExactNorms | None) -> SampledEnergies:
        """Return exact norms of drawn tokens of the groups that are not measured whole; the step seeds the draw."""
        exact = None if norms is None else norms.grad_norm_sq
        return draw_energies(self.policy, self.config.sampled, step, rollouts, table, exact)

    def sketch(self, step: int, rollouts: Rollouts, groups: Int) -> SketchedNorms:
        """Return estimated norms of every token of some groups; the step seeds the directions."""
        return sketch_groups(self.policy, self.config.sketch, step, rollouts, groups)

    def attribute(self, step: int, rollouts: Rollouts, weights: Callable[[], Float], found: Measurement) -> Measurement:
        """Return a measurement with every token's share of ‖ḡ‖², ḡ = Σ weights·s, where that is due.

        Args:
            step: The step.
            rollouts: Its rollouts.
            weights: Gives what multiplies each score in the first update [N, T], zero outside the mask; A/N by
                default. Asked only where attribution is due.
            found: What else was measured.
        """
        if not self.config.attribution.due(step):
            return found
        shares = _attempt(f"attribution at step {step}", lambda: self.shares(rollouts, weights()))
        return replace(found, shares=shares, gaps=found.gaps + (shares is None))

    def shares(self, rollouts: Rollouts, weights: Float) -> TokenShares:
        """Return every token's share of ‖Σ weights·s‖², by forward mode where the model's attention has one."""
        split = self.config.attribution.split
        try:
            return attribute(self.policy, rollouts, weights, method=self.slopes, split=split)
        except NotImplementedError:  # how torch says that an operation has no forward mode
            if self.slopes == "difference":
                raise
            self.slopes = "difference"
            return attribute(self.policy, rollouts, weights, method=self.slopes, split=split)


def _attempt(what: str, run: Callable[[], T]) -> T | None:
    """Run an instrument; this is the edge at which its failure, whatever it is, must not reach the training."""
    try:
        with phase(what.partition(" at step ")[0]):
            return run()
    except Exception as error:
        warnings.warn(f"{what} failed and is missing from the run: {error}", RuntimeWarning, stacklevel=2)
        return None
