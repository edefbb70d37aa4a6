"""The levels of measuring beyond exact norms: one class that holds all of each, what it measures and its cost.

`sampled` gives exact norms of drawn tokens, `sketch` estimated norms of whole groups, `attribution` every token's share
of ‖ḡ‖², `contrast` which tokens right rollouts write. All numbers are per completion token [N, T]; NaN where nothing is
known.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from otb_analysis.config import AttributionSchedule, ContrastSchedule, SampledSchedule, SketchSchedule
from otb_analysis.custom import import_attribute, is_custom
from otb_analysis.energies import calibrate
from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients import (
    gradient_attribution,
    sampled_score_norms,
    signal_noise,
    sketch_score_norms,
    token_score_norms,
)
from otb_analysis.measurement.table import DrawnTokens, TokenMeasurements, TokenTable
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import evaluating
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float, Int


@dataclass
class MeasuredPolicy:
    """A policy and the settings with which its gradients are measured."""

    model: PreTrainedModel
    scope: str
    temperature: float
    engine: str = "auto"  # The engine of exact norms; what is estimated or drawn has one of its own

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of everything that measures gradients."""
        return {"scope": self.scope, "temperature": self.temperature}


@dataclass(frozen=True)
class MeasuredStep:
    """What a level can read of a step; made by `GradientMeasurer.measure`."""

    policy: MeasuredPolicy
    step: int  # Seeds what is drawn
    rollouts: Rollouts
    table: TokenTable
    # Returns what multiplies each score in the first update [N, T], zero outside the mask; by default that is A/N.
    weights: Callable[[], Float]
    processes: Processes  # Those that call a level together that they can share


class Level(ABC):
    """One way of measuring. Its schedule is the field of `MeasureConfig` of the same name, or stands in `further`."""

    phase: str  # What is measured, in words: its phase on the screen, and its name in a warning
    # How many of `step.processes` can share its work out; each returns the same. Of 1 the first one alone calls it
    sharers: float = 1

    @abstractmethod
    def measure(self, step: MeasuredStep, plan: Any, known: TokenMeasurements) -> TokenMeasurements:
        """Return what is known of a step with what this level adds; `plan` is its schedule."""

    @abstractmethod
    def passes(self, plan: Any, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of measuring some rollouts, in forward and backward passes of them, for the forecast."""

    def describe(self, plan: Any) -> str:
        """Return what is measured, as the forecast says it."""
        return self.phase


def by_policy_token(rollouts: Rollouts, by_column: Float, rows: Bool | Int | slice = slice(None)) -> Float:
    """Return numbers by column [n, L] of some rollouts as [N, T], NaN elsewhere and where the policy did not sample."""
    inside = rollouts.policy_tokens()
    out = np.full(inside.shape, np.nan)
    out[rows] = np.where(inside[rows], rollouts.by_token(by_column, rows), np.nan)
    return out


def over_processes(
    processes: Processes, group: Int, rows: Bool, run: Callable[[Bool], tuple[Float, ...]]
) -> Iterator[Float]:
    """Return what `run` finds of some rollouts, whose groups several processes share out, as arrays [N, …] on each.

    `run` takes the rollouts of some groups [N], and returns arrays that are NaN elsewhere.

    Raises:
        ProcessError: It failed on another process.
    """
    shard = rows & np.isin(group, processes.shard(np.unique(group[rows])))
    parts = processes.gather(processes.agreed(lambda: run(shard) if shard.any() else None))
    return map(np.fmax.reduce, zip(*filter(None, parts), strict=True))  # NaN is not measured there


def first_groups(group: Int, left: Bool, prompts: int) -> Bool:
    """Return True at the rollouts of the first groups that are `left` [N], all of them where `prompts` is 0.

    Prompts come in random order.
    """
    return np.isin(group, np.unique(group[left])[: prompts or None])


def prefix_share(rollouts: Rollouts, rows: Bool) -> float:
    """Return Σ_t (tokens before t)/L over the policy's tokens, the mean over rollouts weighed by their lengths L."""
    mask = rollouts.mask[rows]
    return float(mask @ np.arange(mask.shape[1]) @ np.ones(len(mask)) / max(positions(rollouts, rows), 1))


def positions(rollouts: Rollouts, rows: Bool) -> int:
    """Return the tokens of some rollouts, prompts included."""
    return int(rollouts.attention_mask[rows].sum())


def read_once(rollouts: Rollouts, rows: Bool) -> float:
    """Return the share of some rollouts' positions that is left when each prompt is read once for all its rollouts."""
    index = np.flatnonzero(rows)
    _, first = np.unique(rollouts.group[index], return_index=True)
    again = rollouts.prompt_length[index].sum() - rollouts.prompt_length[index[first]].sum()
    return 1.0 - float(again) / max(positions(rollouts, rows), 1)


FEWEST = 4
"""Right rollouts, and wrong ones, that a copy is fitted on at least."""
AT_ONCE = 4
"""Rollouts whose logits are in memory together, twice."""
_IGNORED = -100
_PASS = 1 / 3
"""A forward pass, in forward and backward passes."""


def token_contrast(right: Tensor, wrong: Tensor, token_id: Tensor) -> Tensor:
    """Return softmax(2z₊ − z₋)[y] of logits z₊, z₋ [..., V] and tokens [...], in float64.

    A constant added to either copy's logits changes nothing, so log-probabilities do as well.
    """
    mixed = torch.log_softmax(2 * right.double() - wrong.double(), dim=-1)
    return mixed.gather(-1, token_id[..., None])[..., 0].exp()


def halves(group: Int, right: Bool, shift: int = 0) -> Int:
    """Deal each group's right rollouts and its wrong ones in turn into halves 0 and 1, and return each one's half [N].

    An odd one out goes to the half that `shift` and its group choose, so that no half gets them all.
    """
    half = np.zeros(len(group), dtype=np.int64)
    for number, g in enumerate(np.unique(group)):
        for kind in (right, ~right):
            rows = np.flatnonzero((group == g) & kind)
            half[rows] = (np.arange(len(rows)) + number + shift) % 2
    return half


def fitted_rows(group: Int, right: Bool, half: Int, number: int) -> tuple[Int, Int]:
    """Return the right and the wrong rollouts of one half, of groups that have both in it.

    Raises:
        InputError: There are fewer than `FEWEST` of either.
    """
    inside = half == number
    both = np.intersect1d(group[inside & right], group[inside & ~right])
    rows = [np.flatnonzero(inside & np.isin(group, both) & kind) for kind in (right, ~right)]
    if min(map(len, rows)) < FEWEST:
        raise InputError(
            f"a half of these rollouts has {len(rows[0])} right and {len(rows[1])} wrong answers to prompts with both, "
            f"and a contrast takes {FEWEST} of each; take more prompts or larger groups, or a threshold between the "
            "rewards."
        )
    return rows[0], rows[1]


def contrasts(
    model: PreTrainedModel,
    rollouts: Rollouts,
    right: Bool,
    plan: ContrastSchedule,
    seed: int,
    processes: Processes = SINGLE_PROCESS,
) -> Float:
    """Return the contrast of every policy token [N, T], NaN elsewhere; the model and the random state stay as they are.

    `right` [N] tells the right rollouts from the wrong ones. Of several `processes` every second one fits the copies of
    one half, and those of a half share its scoring.

    Raises:
        InputError: A half has too few right or wrong rollouts to fit a copy.
        ProcessError: Another process failed.
    """
    half = halves(rollouts.group, right, seed)
    # Both halves are refused or accepted before the first copy is fitted.
    rows = {number: fitted_rows(rollouts.group, right, half, number) for number in (0, 1)}

    def scored() -> Float:
        out = np.full(rollouts.input_ids.shape, np.nan)
        for number, (good, bad) in rows.items():
            at_it = range(number % processes.size, processes.size, len(rows)) if processes.size > 1 else (0,)
            if processes.rank not in at_it:
                continue
            random = np.random.default_rng([seed, number])
            copies = [fitted(model, rollouts, some, plan, random) for some in (good, bad)]
            others = np.array_split(np.flatnonzero(half != number), len(at_it))[at_it.index(processes.rank)]
            for start in range(0, len(others), AT_ONCE):
                some = others[start : start + AT_ONCE]
                ids, _, attention = rollouts.tensors(model.device, some)
                with torch.no_grad():
                    logits = [copy(ids, attention) for copy in copies]
                contrast = token_contrast(logits[0], logits[1], ids[:, 1:]).cpu().numpy()
                del logits  # those of the next rollouts would stand beside them
                out[some, 1 : 1 + contrast.shape[1]] = contrast
        return out

    with evaluating(model):
        return by_policy_token(rollouts, np.fmax.reduce(processes.gather(processes.agreed(scored))))


def fitted(
    model: PreTrainedModel, rollouts: Rollouts, rows: Int, plan: ContrastSchedule, random: np.random.Generator
) -> Callable[[Tensor, Tensor], Tensor]:
    """Fit a copy of the model's weights by AdamW to the policy tokens of some rollouts, mean −log p a token.

    Every step takes `plan.batch` rollouts, drawn anew when all were seen. Returned are the copy's logits [n, L − 1, V]
    as a function of token ids and attention mask [n, L].
    """
    # Copies of the weights alone: a model that FSDP2 shards is not copied, and holds whole ones here.
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=plan.learning_rate, weight_decay=0.0)

    def logits_of(ids: Tensor, attention: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": attention, "use_cache": False}
        return functional_call(model, weights, (), inputs).logits[:, :-1]

    order: list[int] = []
    for _ in range(plan.steps):
        if len(order) < min(plan.batch, len(rows)):
            order = random.permutation(rows).tolist()
        batch, order = np.array(order[: plan.batch]), order[plan.batch :]
        with torch.enable_grad():
            ids, mask, attention = rollouts.tensors(model.device, batch)
            logits = logits_of(ids, attention)
            labels = torch.where(mask[:, 1:], ids[:, 1:], _IGNORED)
            loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
    weights = {name: p.detach() for name, p in weights.items()}  # read by `logits_of`
    return logits_of


class Contrast(Level):
    """The contrast of every policy token, column `contrast` of `tokens`."""

    phase = "contrast of right and wrong"
    sharers = 2  # those that fit the copies of one half; more only help to score

    def measure(self, step: MeasuredStep, plan: ContrastSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Fit the copies and score all tokens, unless the update needed that before.

        Raises:
            InputError: There are too few right or wrong rollouts.
        """
        contrast = step.table.contrast
        if contrast is None:
            right = step.table.total_reward >= plan.threshold
            contrast = contrasts(step.policy.model, step.rollouts, right, plan, step.step, step.processes)
        return known.with_columns({"contrast": contrast})

    def passes(self, plan: ContrastSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of fitting four copies and of scoring by two of them."""
        return 4 * plan.steps * plan.batch / max(int(rows.sum()), 1) + 2 * _PASS


# Measured like the costs in `training/budget.py`, beside a pass of the same rollouts: the small model (0.4 M
# parameters, 26 tokens a rollout), a Llama of 42 M (28 tokens), SmolLM2-135M (78 tokens).
#
#                                    0.4 M     42 M    135 M
#   drawn tokens, a tenth              2–3      3.5        –
#   sketched norms, a direction     0.4–.7     0.25    .15–.3
#   attribution with its split        5–10      2.5    > 2.4
SHARED, FOUND = 0.5, 2.0
"""The pass that the drawn tokens of a rollout share; and the one that draws them by their norm above the cut."""
NORM = {"auto": 0.35, "fast": 0.35, "generic": 0.6, "reference": 1.0}
"""Exact norm of one token, by engine, times the share of its rollout that comes before it. A backward pass without
weight gradients is a third of a forward and backward pass."""
DIRECTION, ATTRIBUTION, SPLIT = 0.32, 2.4, 1.0
"""One direction of sketched norms; attribution; its split into signal and noise.

Exact norms and K directions cost the same where NORM·seen = DIRECTION·K. On SmolLM2-135M, after prompts of 1 and 46
tokens, that was at seen = .85 to 1.03 K for K = 16 and .8 to .92 K for K = 32.
"""


DRAWN_OF_PROMPT = 32
"""Tokens that are drawn from a prompt's long answers."""


def drawn_share(rollouts: Rollouts) -> float:
    """Return the share of the tokens that is drawn: 32 of a prompt's, a tenth at most, but 16 where there are.

    However long the answers are: each drawn token's signal goes back over all tokens before it.
    """
    tokens = max(float(rollouts.mask.sum()) / len(rollouts.prompts), 1.0)
    return min(DRAWN_OF_PROMPT / tokens, max(0.1, 16 / tokens), 1.0)


class Sampled(Level):
    """Exact norms of drawn tokens, and the proxy calibrated on all that was measured at this step."""

    phase = "drawn tokens"
    sharers = math.inf

    def measure(self, step: MeasuredStep, plan: SampledSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Draw tokens of the groups that are not measured whole.

        Raises:
            InputError: The size measure is not available for this model, or too few tokens fix no calibration.
        """
        table = step.table
        norm_sq = np.where(table.mask, known.norm_sq, np.nan)
        whole = np.isin(table.group, table.group[np.isfinite(norm_sq).any(axis=1)])  # `exact` measures whole groups
        rows = first_groups(table.group, ~whole, plan.prompts)
        prob = np.where(table.mask & whole[:, None], 1.0, np.nan)
        if table.mask[rows].any():
            policy, rollouts, processes = step.policy, step.rollouts, step.processes
            ids, mask, attention = processes.agreed(lambda: rollouts.tensors(policy.model.device, rows))
            norms = sampled_score_norms(
                policy.model, ids, mask, attention, tokens=max(1, round(plan.share * int(table.mask[rows].sum()))),
                by=plan.by, proxy=rollouts.by_column(table.stats.energy[None, rows], rows)[:, 0], seed=step.step,
                processes=processes, **policy.settings,
            )  # fmt: skip
            drawn = (by_policy_token(rollouts, x, rows)[rows] for x in (norms.norm_sq, norms.inclusion_prob))
            norm_sq[rows], prob[rows] = drawn
        share = len(np.unique(table.group[rows | whole])) / len(np.unique(table.group))
        proxy = np.where(table.mask, table.stats.energy, 0.0)
        fit = calibrate(norm_sq, proxy, prob)
        return known.with_drawn(norm_sq, DrawnTokens(prob, share, fit, fit.predict(proxy)))

    def passes(self, plan: SampledSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of the draw and of the drawn tokens, whose signals share a rollout's pass."""
        draw = FOUND if plan.by == "above_cut" else 0.0
        return draw + SHARED + NORM["auto"] * plan.share * prefix_share(rollouts, rows)

    def describe(self, plan: SampledSchedule) -> str:
        """Return how many tokens are drawn."""
        return f"{100 * plan.share:.3g}% of the tokens"


class Sketch(Level):
    """Estimated norms, with standard errors, of every token of groups that no other level measured.

    The method `auto` takes exact norms where they cost no more.
    """

    phase = "sketched norms"
    sharers = math.inf

    def measure(self, step: MeasuredStep, plan: SketchSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Project scores on random directions, which the step draws.

        Estimates are unbiased, and by the method `hybrid` now and then below 0.

        Raises:
            InputError: The model cannot be sketched by that method, or so many directions do not fit in memory.
        """
        policy, rollouts, group = step.policy, step.rollouts, step.table.group
        measured = np.isfinite(known.norm_sq) | (False if known.drawn is None else known.drawn.population)
        rows = first_groups(group, ~np.isin(group, group[measured.any(axis=1)]), plan.prompts)
        if not rows.any():
            return known
        count = len(np.unique(group[rows]))
        share, is_exact = count / len(rollouts.prompts), _exact_is_cheaper(plan, rollouts, rows, policy.engine)
        method = "hybrid" if plan.method == "auto" else plan.method

        def norms(shard: Bool) -> tuple[Float, ...]:
            batch = policy.model, *rollouts.tensors(policy.model.device, shard)
            if is_exact:
                scores = token_score_norms(*batch, engine=policy.engine, **policy.settings)
            else:
                drawn = {"directions": plan.directions, "method": method, "seed": step.step}
                scores = sketch_score_norms(*batch, **drawn, **policy.settings)
            columns = scores.norm_sq, scores.norm_sq_stderr
            return tuple(by_policy_token(rollouts, x, shard) for x in columns if x is not None)

        norm_sq, *stderrs = over_processes(step.processes, group, rows, norms)
        if is_exact:
            return known.with_groups(norm_sq, share)
        (stderr,) = stderrs
        return replace(known.with_groups(norm_sq, share, "sketch"), stderr=stderr, n_sketched=count)

    def passes(self, plan: SketchSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of all directions, or of exact norms in their place by the engine that `auto` takes."""
        exact = _exact_is_cheaper(plan, rollouts, rows)
        return NORM["auto"] * prefix_share(rollouts, rows) if exact else DIRECTION * plan.directions


def _exact_is_cheaper(plan: SketchSchedule, rollouts: Rollouts, rows: Bool, engine: str = "auto") -> bool:
    """Exact norms grow with the length of a rollout, a sketch with its directions: they meet at about K tokens."""
    return plan.method == "auto" and NORM[engine] * prefix_share(rollouts, rows) <= DIRECTION * plan.directions


class Attribution(Level):
    """Every token's share of ‖ḡ‖², ḡ = Σ weights·s the gradient that the first update follows."""

    phase = "attribution"
    sharers = math.inf

    def measure(self, step: MeasuredStep, plan: AttributionSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Attribute by forward mode where the model's attention has one, else by differences."""
        return known.with_columns(shares(step.policy, step.rollouts, step.weights(), plan.split, step.processes))

    def passes(self, plan: AttributionSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost with or without the split."""
        return (ATTRIBUTION + SPLIT * plan.split) * read_once(rollouts, rows)


def shares(
    policy: MeasuredPolicy, rollouts: Rollouts, weights: Float, split: bool, processes: Processes = SINGLE_PROCESS
) -> dict[str, Float]:
    """Return every token's signed share of ‖Σ weights·s‖² [N, T], to which the shares sum.

    `weights` [N, T] is zero outside the mask. `split` also tells the part of each share along the other prompts'
    gradients (`signal`) from that along its own prompt's (`noise`), for one more pass.
    """
    ids, mask, attention = processes.agreed(lambda: rollouts.tensors(policy.model.device))
    row = rollouts.by_column(weights[None])[:, 0]
    settings: dict[str, Any] = {"method": "auto", "processes": processes, **policy.settings}
    if split:
        parts = signal_noise(policy.model, ids, mask, row, rollouts.group, attention, **settings)
        columns = {"attribution": parts.signal + parts.noise, "signal": parts.signal, "noise": parts.noise}
    else:
        columns = {"attribution": gradient_attribution(policy.model, ids, mask, row, attention, **settings).share}
    return {name: by_policy_token(rollouts, x) for name, x in columns.items()}


LEVELS: dict[str, Level] = {
    "sampled": Sampled(), "sketch": Sketch(), "attribution": Attribution(), "contrast": Contrast(),
}  # fmt: skip
"""Every level but `forward` and `exact`."""


def level_of(name: str) -> Level:
    """Return a level by its name, or import it as module:attribute.

    Raises:
        InputError: There is none of that name.
    """
    level = LEVELS.get(name) or (import_attribute("level", name) if is_custom("level", name) else None)
    if not isinstance(level, Level):
        raise InputError(f"measure.further has {name!r}, which is no Level; {nearest(name, LEVELS)}")
    return level
