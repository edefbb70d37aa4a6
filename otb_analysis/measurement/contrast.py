"""Critical tokens by contrast (cDPO, arXiv 2411.19943): which tokens do right rollouts write?

Two copies of the policy are fitted, one on right and one on wrong rollouts of the same prompts. With their logits z₊
and z₋, contrast = softmax(2z₊ − z₋)[y]; a token with a low one is critical. No copy scores a rollout that it was fitted
on: every group's right and wrong rollouts are dealt into two halves, and each half is scored by the copies of the
other. The halves, whole copies in place of adapters, and how they are fitted are our choices.
"""

from copy import deepcopy

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from otb_analysis.config import ContrastSchedule
from otb_analysis.errors import InputError
from otb_analysis.measurement.level import Level, MeasuredStep, by_policy_token
from otb_analysis.measurement.tokens import TokenMeasurements
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool, Float, Int

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


def contrasts(model: PreTrainedModel, rollouts: Rollouts, right: Bool, plan: ContrastSchedule, seed: int) -> Float:
    """Return the contrast of every policy token [N, T], NaN elsewhere; the model and the random state stay as they are.

    `right` [N] tells the right rollouts from the wrong ones.

    Raises:
        InputError: A half has too few right or wrong rollouts to fit a copy.
    """
    half = halves(rollouts.group, right, seed)
    # Both halves are refused or accepted before the first copy is fitted.
    rows = {number: fitted_rows(rollouts.group, right, half, number) for number in (0, 1)}
    out = np.full(rollouts.input_ids.shape, np.nan)
    for number, (good, bad) in rows.items():
        random = np.random.default_rng([seed, number])
        copies = [fitted(model, rollouts, some, plan, random) for some in (good, bad)]
        others = np.flatnonzero(half != number)
        for start in range(0, len(others), AT_ONCE):
            some = others[start : start + AT_ONCE]
            found = _scored(copies, rollouts, some)
            out[some, 1 : 1 + found.shape[1]] = found
    return by_policy_token(rollouts, out)


def fitted(
    model: PreTrainedModel, rollouts: Rollouts, rows: Int, plan: ContrastSchedule, random: np.random.Generator
) -> PreTrainedModel:
    """Return a copy of the model after some steps of AdamW on the policy tokens of some rollouts, mean −log p a token.

    Every step takes `plan.batch` of them, drawn anew when all were seen.
    """
    copy = deepcopy(model).eval().requires_grad_(True)
    optimizer = torch.optim.AdamW(copy.parameters(), lr=plan.learning_rate, weight_decay=0.0)
    order: list[int] = []
    for _ in range(plan.steps):
        if len(order) < min(plan.batch, len(rows)):
            order = random.permutation(rows).tolist()
        batch, order = np.array(order[: plan.batch]), order[plan.batch :]
        with torch.enable_grad():
            ids, mask, attention = rollouts.tensors(copy.device, batch)
            logits = copy(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            labels = torch.where(mask[:, 1:], ids[:, 1:], _IGNORED)
            loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
    return copy.requires_grad_(False)


@torch.no_grad()
def _scored(copies: list[PreTrainedModel], rollouts: Rollouts, rows: Int) -> Float:
    """Return the contrast of each column's token after the first [n, L − 1]."""
    ids, _, attention = rollouts.tensors(copies[0].device, rows)
    right, wrong = (c(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1] for c in copies)
    return token_contrast(right, wrong, ids[:, 1:]).cpu().numpy()


class Contrast(Level):
    """The contrast of every policy token, column `contrast` of `tokens`."""

    phase = "contrast of right and wrong"

    def measure(self, step: MeasuredStep, plan: ContrastSchedule, known: TokenMeasurements) -> TokenMeasurements:
        """Fit the copies and score all tokens, unless the update needed that before.

        Raises:
            InputError: There are too few right or wrong rollouts.
        """
        found = step.table.contrast
        if found is None:
            right = right_of(step.table.total_reward, plan)
            found = contrasts(step.policy.model, step.rollouts, right, plan, step.step)
        return known.with_columns({"contrast": found})

    def passes(self, plan: ContrastSchedule, rollouts: Rollouts, rows: Bool) -> float:
        """Return the cost of fitting four copies and of scoring by two of them."""
        return 4 * plan.steps * plan.batch / max(int(rows.sum()), 1) + 2 * _PASS


def right_of(reward: Float, plan: ContrastSchedule) -> Bool:
    """Return which rollouts are right, by their total rewards [N]."""
    return reward >= plan.threshold
