"""The slow, obvious engine: ordinary reverse-mode autograd, one backward pass per row of weights.

Every faster engine is compared with this one. Rollouts run one at a time without padding; a forward graph is kept while
its backward passes run. Gradients are formed in the model's dtype, squared norms are summed in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.exact.gram import (
    Stretch,
    gram_matrix,
    held,
    norm_sq_of,
    refuse_many,
    stretches,
    tell_rounds,
)
from otb_analysis.phases import counted
from otb_analysis.types import Bool, Float, Int, ScoreNorms

NAME = "reference"
BLOCK = 16
"""Tokens that share one forward graph on their common prefix: what comes after a token has no part in its score, and
running it anyway costs more than the extra forward passes (1.5 times as long for 46 tokens of a small model)."""


def token_score_norms(problem: ScoreBatch, path: bool) -> ScoreNorms:
    """Squared norm of every token's score by one `torch.autograd.grad` per token.

    Args:
        problem: The checked batch.
        path: Also keep the running sum Σ_{j≤t} s_j (in float64) and its squared norm.
    """
    norm_sq, path_norm_sq, logprob = (np.zeros(problem.shape) for _ in range(3))
    for rollout in counted(problem.rollouts, "rollout"):
        running = [torch.zeros_like(p, dtype=torch.float64) for p in problem.scope.parameters] if path else []
        for block in rollout.blocks(BLOCK):
            values = sampled_logprobs(problem, (block,))
            logprob[block.row, block.columns] = values.detach().double().cpu().numpy()
            for column, unit in zip(block.columns, torch.eye(len(values)).to(values), strict=True):
                score = _weighted_score(values, unit, problem.scope.parameters)
                norm_sq[block.row, column] = norm_sq_of(score)
                if path:
                    for total, part in zip(running, score, strict=True):
                        total.add_(part)
                    path_norm_sq[block.row, column] = norm_sq_of(running)
    return ScoreNorms(norm_sq, logprob, NAME, path_norm_sq if path else None)


def weighted_score_norms(problem: ScoreBatch, weights: Float) -> Float:
    """‖Σ_t weights[n,m,t] s_{n,t}‖² by one forward per rollout and one backward per row that is not all zero."""
    result = np.zeros(weights.shape[:2])
    for rollout in counted(problem.rollouts, "rollout"):
        rows = weights[rollout.row][:, rollout.columns]
        active = np.flatnonzero(rows.any(-1))
        if len(active) == 0:
            continue
        values = sampled_logprobs(problem, (rollout,))
        for m in active:
            score = _weighted_score(values, torch.from_numpy(rows[m]).to(values), problem.scope.parameters)
            result[rollout.row, m] = norm_sq_of(score)
    return result


def group_gradient_gram(problem: ScoreBatch, weights: Float, group: Int) -> Float:
    """Gram matrix [M, M, P, P] by one forward per prompt and one backward per row that is not all zero there.

    Where the gradients do not fit in `GRADIENT_BYTES` together, the parameters are taken a stretch at a time, with a
    backward pass as far as that stretch for every row; the products of the stretches add up.

    Raises:
        InputError: The matrix itself does not fit in `GRADIENT_BYTES`.
    """
    prompts = [_prompt(problem, weights, group == p) for p in np.unique(group)]
    where = [(m, p) for p, prompt in enumerate(prompts) for m in prompt.active]
    gram = np.zeros((weights.shape[1], weights.shape[1], len(prompts), len(prompts)))
    if where:
        refuse_many(len(where))
        rounds = stretches(problem.scope.parameters, len(where))
        tell_rounds(len(rounds), len(where))
        total = sum(
            gram_matrix([g for prompt in prompts for g in _stretch_gradients(problem, prompt, stretch)])
            for stretch in rounds
        )
        m, p = np.array(where).T
        gram[m[:, None], m[None, :], p[:, None], p[None, :]] = total
    return gram


@dataclass(frozen=True)
class _Prompt:
    """The rollouts of one prompt that hold a sampled token, their weights side by side [M, Σ K], the rows in use."""

    rollouts: tuple[Rollout, ...]
    weights: Float
    active: Int


def _prompt(problem: ScoreBatch, weights: Float, member: Bool) -> _Prompt:
    rollouts = tuple(r for r in problem.rollouts if member[r.row])
    rows = [weights[r.row][:, r.columns] for r in rollouts]
    stacked = np.concatenate([np.zeros((weights.shape[1], 0)), *rows], axis=1)
    return _Prompt(rollouts, stacked, np.flatnonzero(stacked.any(-1)))


def _stretch_gradients(problem: ScoreBatch, prompt: _Prompt, stretch: Stretch) -> Iterator[list[Tensor]]:
    """The gradients of a prompt's rows, on a stretch of the parameters only."""
    if len(prompt.active) == 0:
        return
    values = sampled_logprobs(problem, prompt.rollouts)
    parameters = [problem.scope.parameters[index] for index, _ in stretch]
    for m in prompt.active:
        score = _weighted_score(values, torch.from_numpy(prompt.weights[m]).to(values), parameters)
        yield [held(part, span) for part, (_, span) in zip(score, stretch, strict=True)]


def token_alignments(problem: ScoreBatch, direction: Sequence[Tensor]) -> Float:
    """s_{n,t}·direction [N, L] by one `torch.autograd.grad` per token: the slow twin of `directional`.

    Args:
        problem: The checked batch.
        direction: One tensor per tensor in scope.
    """
    result = np.zeros(problem.shape)
    for rollout in problem.rollouts:
        for block in rollout.blocks(BLOCK):
            values = sampled_logprobs(problem, (block,))
            for column, unit in zip(block.columns, torch.eye(len(values)).to(values), strict=True):
                score = _weighted_score(values, unit, problem.scope.parameters)
                dots = [(s.double() * d.double()).sum() for s, d in zip(score, direction, strict=True)]
                result[block.row, column] = float(torch.stack(dots).sum())
    return result


def _weighted_score(logprob: Tensor, weights: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Σ_t weights[t] ∇ logprob[t], one tensor per parameter; the graph is kept for the next row."""
    grads = torch.autograd.grad(logprob, parameters, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]
