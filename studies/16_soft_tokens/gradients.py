"""Gradients of groups of rollouts: from scores, and through the soft tokens themselves; as sketches of two parts.

The parts are the table of input embeddings and all other parameters. Sketches of both lie side by side.
"""

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients import count_sketch
from otb_analysis.gradients.batch.soft import SoftTokens, embeddings_of, mixtures
from otb_analysis.types import Float, Int
from studies.lib.policies import Policy, ScoredRollouts, group_sketches

TABLE, REST = r"embed_tokens", r"^(?!.*embed_tokens)"


def by_scores(policy: Policy, written: ScoredRollouts, weights: Float, group: Int, buckets: int) -> Float:
    """Return sketches of Σ weights·s of every group [M, G, 2·buckets], weights [M, N, T]."""
    parts = [group_sketches(policy, written, weights, group, buckets, scope) for scope in (TABLE, REST)]
    return np.concatenate(parts, axis=-1).astype(np.float64)


def through_tokens(policy: Policy, written: ScoredRollouts, weights: Float, group: Int, buckets: int) -> Float:
    """Return sketches of each group's gradient that flows through its soft tokens [G, 2·buckets], weights [N, T].

    h̃ = pE + σε with the noise ε held, so that ∇J = E[Σ_t A_t d/dθ log π(y_t | h̃(θ), y_<t)], a sum over discrete tokens
    only: the same mean as from scores. Every rollout must have the same number of soft tokens.
    """
    soft = written.rollouts.soft
    assert soft is not None
    ids, mask, attention = written.rollouts.tensors(policy.model.device)
    by_column = torch.as_tensor(written.rollouts.by_column(weights[None])[:, 0], device=ids.device)
    out = np.zeros((int(group.max()) + 1, 2 * buckets))
    for g in range(len(out)):
        rows = torch.as_tensor(np.flatnonzero(group == g))
        if not by_column[rows].any():
            continue
        length = int(attention[rows].sum(1).max())
        values = answer_logprobs(policy.model, ids[rows, :length], mask[rows, :length], soft, written.temperature)
        total = (by_column[rows, 1:length] * values).sum()
        out[g] = sketched(policy.model, torch.autograd.grad(total, list(policy.model.parameters())), buckets)
    return out


def answer_logprobs(model: nn.Module, ids: Tensor, mask: Tensor, soft: SoftTokens, temperature: float) -> Tensor:
    """Return log π of the discrete sampled tokens [n, L − 1], 0 elsewhere, as a function of θ through soft tokens.

    The rollouts are of one prompt, so their soft tokens stand at the same columns.
    """
    table = embeddings_of(model)
    here = soft.among(ids)
    read = [table(ids[:, k].masked_fill(here[:, k], 0)) for k in range(ids.shape[1])]
    for k in here[0].nonzero()[:, 0].tolist():
        z = model(inputs_embeds=torch.stack(read[:k], dim=1), use_cache=False).logits[:, -1] / temperature
        mean = mixtures(z, table.weight)
        read[k] = soft.at(ids[:, k]) + mean - mean.detach()  # the vector that was drawn, moving as pE moves
    z = model(inputs_embeds=torch.stack(read, dim=1), use_cache=False).logits[:, :-1] / temperature
    found = z.log_softmax(-1).gather(-1, ids[:, 1:, None].masked_fill(here[:, 1:, None], 0))[..., 0]
    return torch.where(mask[:, 1:] & ~here[:, 1:], found, 0.0)


def sketched(model: nn.Module, gradient: tuple[Tensor, ...], buckets: int) -> Float:
    """Return the sketches of a whole gradient's two parts [2·buckets], as `gradient_sketch` hashes them."""
    parts, start = np.zeros((2, buckets)), 0
    for (name, parameter), grad in zip(model.named_parameters(), gradient, strict=True):
        parts[0 if TABLE in name else 1] += count_sketch(grad, start, buckets).cpu().numpy()
        start += parameter.numel()
    return parts.reshape(-1)
