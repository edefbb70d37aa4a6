"""A rollout that somebody else sampled, cut into the policy's turns and what was written between them."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from otb_analysis.rollouts.sampling import Draft
from otb_analysis.tasks import Turn


def draft_of(
    prompt: Sequence[int],
    completion: Sequence[tuple[int, bool]],
    logprobs: Sequence[float] | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
) -> Draft:
    """Return a rollout from its prompt's token ids and its completion's, each with whether the policy sampled it.

    Sampled tokens in a row are one turn; those of `ends` end it and are no part of its text. What follows is the reply
    to it. `logprobs` are the sampler's, one per completion token, in nats; None where they were not recorded.
    """
    draft, at = Draft(list(prompt)), 0
    for sampled, run in groupby(completion, key=lambda token: token[1]):
        ids = [token for token, _ in run]
        span = slice(at, at := at + len(ids))
        if sampled:
            ended = ids[-1] in ends
            draft.turns.append(Turn(str(tokenizer.decode(ids[:-1] if ended else ids)), ended))
        elif draft.turns:
            draft.turns[-1] = replace(draft.turns[-1], reply=str(tokenizer.decode(ids)))
        known = [float("nan")] * len(ids) if logprobs is None else list(logprobs[span])
        draft.extend(ids, max(len(draft.turns) - 1, 0), known if sampled else None)
    return draft
