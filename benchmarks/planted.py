"""Rollouts with a planted fault: a sampler that is not the one that the check is told of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from otb_analysis.rollouts.generation import end_tokens
from otb_analysis.rollouts.models import special_id
from otb_analysis.rollouts.sampling import Draft, Rollouts, collate, encode_prompt
from otb_analysis.tasks import Prompt, Turn

Change = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(token ids [N, L], which of them are real [N, L], logits [N, V]) → the sampler's logits [N, V]."""


def temperature(value: float) -> Change:
    """Divide by a temperature."""
    return lambda ids, real, logits: logits / value


def top_p(p: float) -> Change:
    """Keep the likeliest tokens with mass p, by transformers' own filter."""
    keep = TopPLogitsWarper(top_p=p)
    return lambda ids, real, logits: keep(ids.long(), logits)  # pyright: ignore[reportArgumentType]


def top_k(k: int) -> Change:
    """Keep the k likeliest tokens, by transformers' own filter."""
    keep = TopKLogitsWarper(top_k=k)
    return lambda ids, real, logits: keep(ids.long(), logits)  # pyright: ignore[reportArgumentType]


def repetition(penalty: float) -> Change:
    """Penalise tokens of prompt and completion; padding is no token."""

    def change(ids: Tensor, real: Tensor, logits: Tensor) -> Tensor:
        seen = torch.zeros_like(logits).scatter_add_(1, ids, real.float()) > 0
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return change


def noise(sigma: float) -> Change:
    """Add fresh Gaussian noise to every logit."""
    return lambda ids, real, logits: logits + sigma * torch.randn_like(logits)


@dataclass
class _Changed(LogitsProcessor):
    """Applies the change, and keeps the sampler's log-probabilities of every next token."""

    change: Change | None
    pad: Tensor  # Columns of padding on the left of each row [N]
    kept: list[Tensor]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        real = torch.arange(input_ids.shape[1], device=input_ids.device) >= self.pad[:, None]
        scores = scores.float() if self.change is None else self.change(input_ids, real, scores.float())
        self.kept.append(scores.log_softmax(-1))
        return scores


@torch.no_grad()
def planted_rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    group_size: int,
    max_new_tokens: int,
    change: Change | None = None,
) -> Rollouts:
    """Return `group_size` rollouts of every prompt as a changed sampler draws them, with its log-probabilities.

    The prefixes are the changed sampler's own. Nothing is rewarded.
    """
    group = np.repeat(np.arange(len(prompts)), group_size)
    encoded = [encode_prompt(tokenizer, prompts[g]) for g in group.tolist()]
    width = max(map(len, encoded))
    pad, ends = special_id(tokenizer, "pad"), end_tokens(model, tokenizer)
    left = torch.tensor([width - len(ids) for ids in encoded], device=model.device)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=model.device)
    changed = _Changed(change, left, [])
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens, eos_token_id=ends,
        pad_token_id=pad, use_cache=True,
    )  # fmt: skip
    output = model.generate(  # pyright: ignore[reportCallIssue]
        inputs=ids, attention_mask=(torch.arange(width, device=model.device) >= left[:, None]).long(),
        generation_config=settings, logits_processor=LogitsProcessorList([changed]),
    )  # fmt: skip
    tokens = torch.as_tensor(output)[:, width:]
    logprob = torch.stack(changed.kept, 1).gather(2, tokens[..., None])[..., 0].double().tolist()
    drafts = []
    for prompt, row, logprobs in zip(encoded, tokens.tolist(), logprob, strict=True):
        length = next((t + 1 for t, token in enumerate(row) if token in ends), len(row))
        draft = Draft(prompt)
        draft.extend(row[:length], 0, logprobs[:length])
        draft.turns.append(Turn("", row[length - 1] in ends))
        draft.finish_reason = "stop" if row[length - 1] in ends else "length"
        drafts.append(draft)
    return collate(drafts, tuple(prompts), group, pad)
