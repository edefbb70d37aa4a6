"""The level `exact`: norms of every token's score on whole groups, and the Gram matrix of every estimator there."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.config import MeasureConfig
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, available, estimate
from otb_analysis.gradients import group_gradient_gram, token_score_norms, weighted_score_norms
from otb_analysis.sampling import Rollouts
from otb_analysis.statistics import GradientStatistics, gradient_statistics
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
        gaps: Instruments that failed.
    """

    norms: ExactNorms | None = None
    gram: Gram | None = None
    statistics: tuple[GradientStatistics, ...] = ()
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

    def groups_due(self, step: int, n_groups: int) -> Int:
        """Return the indices of the groups to measure at a step: the first ones, since prompts come in random order."""
        if not self.config.exact.due(step):
            return np.arange(0)
        return np.arange(min(self.config.exact.prompts or n_groups, n_groups))

    def norms(self, rollouts: Rollouts, groups: Int) -> ExactNorms:
        """Return exact norms of every token and of every whole rollout of some groups."""
        rows = np.isin(rollouts.group, groups)
        columns = rollouts.completion_columns()
        batch = _batch(rollouts, rows, self.model.device)
        ids, mask, attention = batch
        found = token_score_norms(self.model, ids, mask, attention, **self.settings).norm_sq
        whole = weighted_score_norms(self.model, ids, mask, mask[:, None].float(), attention, **self.settings)[:, 0]
        norm_sq = np.full(columns.shape, np.nan)
        inside = np.take_along_axis(rollouts.mask, columns, axis=1)[rows] & rollouts.present()[rows]
        norm_sq[rows] = np.where(inside, np.take_along_axis(found, columns[rows], axis=1), np.nan)
        total = np.full(len(rows), np.nan)
        total[rows] = whole
        return ExactNorms(norm_sq, total)

    def gram(self, rollouts: Rollouts, table: TokenTable, norms: ExactNorms, groups: Int) -> Gram:
        """Return ⟨ḡ_{m,p}, ḡ_{m',p'}⟩ of the groups' mean gradients under every estimator whose inputs exist."""
        rows = np.isin(rollouts.group, groups)
        advantages = every_advantage(table, norms, rows, self.options)
        sizes = np.bincount(rollouts.group)[rollouts.group[rows]]
        stacked = np.stack([a / sizes[:, None] for a in advantages.values()])
        different, back = np.unique(stacked.reshape(len(stacked), -1), axis=0, return_inverse=True)
        weights = _by_column(different.reshape(-1, *stacked.shape[1:]), rollouts, rows)
        ids, mask, attention = _batch(rollouts, rows, self.model.device)
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
        if not len(groups):
            return Measurement(norms=norms)
        found = norms or _attempt(f"exact norms at step {step}", lambda: self.norms(rollouts, groups))
        if found is None:
            return Measurement(gaps=1)
        gram = _attempt(f"Gram matrix at step {step}", lambda: self.gram(rollouts, table, found, groups))
        if gram is None:
            return Measurement(norms=found, gaps=1)
        rows = _attempt(
            f"gradient statistics at step {step}",
            lambda: tuple(gradient_statistics(gram.inner, gram.labels, gram.n_rollouts)),
        )
        return Measurement(found, gram, rows or (), gaps=int(rows is None))


def every_advantage(
    table: TokenTable, norms: ExactNorms, rows: Bool, options: Mapping[str, Any] | None = None
) -> dict[Label, Float]:
    """Return the advantages [n, T] of every estimator whose inputs exist, by (estimator, energy source), on some rows.

    Estimators that read the proxy or no energy see the whole batch, as they would in training, so that entries which
    couple prompts are what they are; those that read exact norms see the measured rows. `options` holds the options of
    estimators that do not run with their defaults: those of the one that trains.
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
        if reads_energy or name in exact_only:
            found[name, "exact"] = estimate(name, part, options.get(name)).advantage
    return found


def _rows_of(inputs: EstimatorInputs, rows: Bool) -> EstimatorInputs:
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: x[rows] for name, x in given.items() if x is not None})


def _batch(rollouts: Rollouts, rows: Bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arrays = (rollouts.input_ids[rows], rollouts.mask[rows], rollouts.attention_mask[rows])
    ids, mask, attention = (torch.as_tensor(x, device=device) for x in arrays)
    return ids, mask, attention.long()


def _by_column(weights: Float, rollouts: Rollouts, rows: Bool) -> Float:
    """Turn weights by completion token [M, n, T] into weights by column [n, M, L]."""
    columns, present = rollouts.completion_columns()[rows], rollouts.present()[rows]
    out = np.zeros((weights.shape[1], weights.shape[0], rollouts.input_ids.shape[1]))
    n, t = np.nonzero(present)
    out[n, :, columns[n, t]] = weights[:, n, t].T
    return out


def _attempt(what: str, run: Callable[[], T]) -> T | None:
    """Run an instrument; this is the edge at which its failure, whatever it is, must not reach the training."""
    try:
        return run()
    except Exception as error:
        warnings.warn(f"{what} failed and is missing from the run: {error}", RuntimeWarning, stacklevel=2)
        return None
