"""What a token does to success: rollouts continued after it, and after another token drawn in its place."""

import numpy as np
import torch

from otb_analysis.devices import random_forked
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.generation import Generation, TransformersGenerator
from otb_analysis.rollouts.sampling import Draft, Rollouts, collate
from otb_analysis.tasks import Turn
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Bool, Float, Int
from studies.lib.policies import Policy


def token_effects(
    policy: Policy, rollouts: Rollouts, chosen: Bool, right: float, draws: int, limit: int, seed: int, bar: Bar
) -> tuple[Float, Float]:
    """Return P(right | h, y) and P(right | h, not y) of the chosen tokens [N, T], each from so many continuations.

    Not y is a token drawn from π(·|h) without y. NaN where a token was not chosen; single turns, sampled at
    temperature 1, of at most `limit` tokens. The global random state is kept.
    """
    kept, other = np.full(chosen.shape, np.nan), np.full(chosen.shape, np.nan)
    generator = TransformersGenerator(policy.model, policy.tokenizer)
    with random_forked(policy.model.device):
        torch.manual_seed(seed)
        for t in range(chosen.shape[1]):
            rows = np.flatnonzero(chosen[:, t])
            if len(rows):
                at = rollouts.prompt_length[rows] + t
                begun = [rollouts.input_ids[n, :end].tolist() for n, end in zip(rows, at, strict=True)]
                token = rollouts.input_ids[rows, at]
                same, another = np.repeat(token[:, None], draws, axis=1), others(policy, begun, token, draws)
                for out, follow in ((kept, same), (other, another)):
                    out[rows, t] = successes(policy, generator, rollouts, rows, begun, follow, right, limit - t - 1)
            bar(t + 1, chosen.shape[1], f"{int(chosen.sum())} tokens replaced, position {t}")
    return kept, other


@torch.no_grad()
def others(policy: Policy, begun: list[list[int]], token: Int, draws: int) -> Int:
    """Draw tokens [n, draws] from π(·|h) without the token that was written."""
    drawn = []
    for ids, y in zip(begun, token.tolist(), strict=True):
        logits = policy.model(torch.tensor([ids], device=policy.model.device)).logits[0, -1].double()
        logits[y] = -torch.inf
        drawn.append(torch.multinomial(torch.softmax(logits, -1), draws, replacement=True))
    return torch.stack(drawn).cpu().numpy()


def successes(
    policy: Policy,
    generator: TransformersGenerator,
    rollouts: Rollouts,
    rows: Int,
    begun: list[list[int]],
    follow: Int,
    right: float,
    left: int,
) -> Float:
    """Return the share of right answers [n] among continuations of each beginning by each of its next tokens [n, K]."""
    n, draws = follow.shape
    texts = [[*begun[i], int(follow[i, k])] for i in range(n) for k in range(draws)]
    ended = np.isin(follow.reshape(-1), generator.ends) | (left < 1)
    going = np.flatnonzero(~ended)
    written = [Generation([], [], True)] * len(texts)
    if len(going):
        for i, found in zip(going, generator.generate([texts[i] for i in going], left, 1.0), strict=True):
            written[i] = found
    drafts = []
    for i, (text, more) in enumerate(zip(texts, written, strict=True)):
        start = int(rollouts.prompt_length[rows[i // draws]])
        draft, ids = Draft(text[:start]), [*text[start:], *more.token_ids]
        finished = ids[-1] in generator.ends
        draft.extend(ids, 0, [0.0] * len(ids))
        draft.turns.append(Turn(str(policy.tokenizer.decode(ids[:-1] if finished else ids)), finished))
        draft.finish_reason = "stop" if finished else "length"
        drafts.append(draft)
    group = np.repeat(rollouts.group[rows], draws)
    paid = compute_rewards(policy.task, collate(drafts, rollouts.prompts, group, 0))
    return (paid.reward.sum(axis=1) >= right).reshape(n, draws).mean(axis=1)
