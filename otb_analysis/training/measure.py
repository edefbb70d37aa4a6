"""Everything scheduled at a step: exact norms, every estimator's Gram matrix, drawn tokens, sketches, attribution."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from otb_analysis.config import MeasureConfig
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, available, estimate
from otb_analysis.gradients import group_gradient_gram, token_score_norms, weighted_score_norms
from otb_analysis.sampling import Rollouts
from otb_analysis.statistics import GradientStatistics, gradient_statistics
from otb_analysis.training.levels import (
    Measured,
    SampledEnergies,
    TokenShares,
    attribute,
    batch_of,
    by_column,
    draw_energies,
)
from otb_analysis.training.sketched import SketchedNorms, groups_to_sketch, sketch_groups
from otb_analysis.training.table import TokenTable
from otb_analysis.types import Bool, Float, Gram, Int, Label

T = TypeVar("T")


@dataclass(frozen=True)
class ExactNorms:
    """Exact squared norms of scores; NaN outside the measured groups.

    Attributes:
        grad_norm_sq: ‖s_{n,t}‖² [N, T].
        rollout_norm_sq: ‖Σ_t s_{n,t}‖² [N].
    """

    grad_norm_sq: Float
    rollout_norm_sq: Float


@dataclass(frozen=True)
class Measurement:
    """Everything scheduled that was measured at a step; empty where nothing was due.

    Attributes:
        norms: Exact norms of the measured groups.
        gram: Inner products of group mean gradients under every estimator.
        statistics: A row per estimator.
        sampled: Exact norms of drawn tokens and what follows from them.
        sketch: Estimated norms of groups of which nothing was measured exactly.
        shares: Attribution of ‖ḡ‖² to tokens.
        gaps: Instruments that failed.
    """

    norms: ExactNorms | None = None
    gram: Gram | None = None
    statistics: tuple[GradientStatistics, ...] = ()
    sampled: SampledEnergies | None = None
    sketch: SketchedNorms | None = None
    shares: TokenShares | None = None
    gaps: int = 0


class Instrument:
    """Measures rollouts under one model and configuration; leaves parameters, gradients and random state alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: MeasureConfig,
        temperature: float,
        options: Mapping[str, Any] | None = None,
    ):
        self.options = options
        self.model = model
        self.config = config
        self.settings = {"engine": config.engine, "scope": config.scope, "temperature": temperature}
        self.policy = Measured(model, config.scope, temperature)
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
        sizes = np.bincount(rollouts.group)[rollouts.group[rows]]
        stacked = np.stack([a / sizes[:, None] for a in advantages.values()])
        different, back = np.unique(stacked.reshape(len(stacked), -1), axis=0, return_inverse=True)
        weights = by_column(different.reshape(-1, *stacked.shape[1:]), rollouts, rows)
        ids, mask, attention = batch_of(rollouts, rows, self.model.device)
        inner = group_gradient_gram(self.model, ids, mask, weights, rollouts.group[rows], attention, **self.settings)
        back = back.reshape(-1)
        return Gram(
            inner=inner[np.ix_(back, back)],
            labels=tuple(advantages),
            n_rollouts=int(rows.sum()),
            prompt=tuple(rollouts.prompts[g].id for g in groups),
            groups=groups,
        )

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
        rows = _attempt(
            f"gradient statistics at step {step}",
            lambda: tuple(gradient_statistics(gram.inner, gram.labels, gram.n_rollouts)),
        )
        return replace(found, gram=gram, statistics=rows or (), gaps=found.gaps + (rows is None))

    def draw(self, step: int, rollouts: Rollouts, table: TokenTable, norms: ExactNorms | None) -> SampledEnergies:
        """Return exact norms of drawn tokens of the groups that are not measured whole; the step seeds the draw."""
        exact = None if norms is None else norms.grad_norm_sq
        return draw_energies(self.policy, self.config.sampled, step, rollouts, table, exact)

    def sketch(self, step: int, rollouts: Rollouts, groups: Int) -> SketchedNorms:
        """Return estimated norms of every token of some groups; the step seeds the directions."""
        return sketch_groups(self.policy, self.config.sketch, step, rollouts, groups)

    def attribute(self, step: int, rollouts: Rollouts, weights: Float, found: Measurement) -> Measurement:
        """Return a measurement with every token's share of ‖ḡ‖², ḡ = Σ weights·s, where that is due.

        Args:
            step: The step.
            rollouts: Its rollouts.
            weights: What multiplies each score in the first update [N, T], zero outside the mask; A/N by default.
            found: What else was measured.
        """
        if not self.config.attribution.due(step):
            return found
        shares = _attempt(f"attribution at step {step}", lambda: self.shares(rollouts, weights))
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


def every_advantage(
    table: TokenTable,
    norms: ExactNorms,
    rows: Bool,
    options: Mapping[str, Any] | None = None,
    calibrated: Float | None = None,
) -> dict[Label, Float]:
    """Return the advantages [n, T] of every estimator whose inputs exist, by (estimator, energy source), on some rows.

    Estimators that read the proxy, calibrated or not, or no energy see the whole batch, as they would in training, so
    that entries which couple prompts are what they are; those that read exact norms see the measured rows. `options`
    holds the options of estimators that do not run with their defaults: those of the one that trains.
    """
    options = options or {}
    proxy = table.inputs(table.stats.energy)
    part = _rows_of(table.inputs(norms.grad_norm_sq, norms.rollout_norm_sq), rows)
    exact_only = {name for name in available(part) if name not in available(proxy)}
    found: dict[Label, Float] = {}
    for name in available(part):
        reads_energy = "energy" in ESTIMATORS[name].needs
        if name not in exact_only:
            found[name, "proxy" if reads_energy else "none"] = estimate(name, proxy, options.get(name)).advantage[rows]
        if reads_energy and calibrated is not None:
            found[name, "calibrated"] = estimate(name, table.inputs(calibrated), options.get(name)).advantage[rows]
        if reads_energy or name in exact_only:
            found[name, "exact"] = estimate(name, part, options.get(name)).advantage
    return found


def _rows_of(inputs: EstimatorInputs, rows: Bool) -> EstimatorInputs:
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: x[rows] for name, x in given.items() if x is not None})


def _attempt(what: str, run: Callable[[], T]) -> T | None:
    """Run an instrument; this is the edge at which its failure, whatever it is, must not reach the training."""
    try:
        return run()
    except Exception as error:
        warnings.warn(f"{what} failed and is missing from the run: {error}", RuntimeWarning, stacklevel=2)
        return None
