"""What a model holds just before it writes a count, and what its digit rows make of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.diagnostics.readout import count_shift, linear_probe, row_cosines, rows_share
from otb_analysis.gradients import token_score_norms
from otb_analysis.rollouts.models import output_layer
from otb_analysis.types import Bool, Float, Int
from studies.lib import rounded

DIGITS = 10


@dataclass(frozen=True)
class States:
    """A model's states before the count, of N prompts; made by `read`."""

    hidden: Float  # [layers, N, d] behind each block; the last one is behind the final norm, as the output layer has it
    logprob: Float  # log π of the ten digits [N, 10]
    count: Int  # The right answer [N]

    @property
    def right(self) -> Float:
        """π of the right digit [N]: the chance that a sampled answer is right."""
        return np.exp(self.logprob[np.arange(len(self.count)), self.count])

    @property
    def top(self) -> Float:
        """1 where the right digit is the likeliest of the ten [N], else 0."""
        return (self.logprob.argmax(axis=1) == self.count).astype(float)


def digit_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of 0 to 9, each one token in both models."""
    return [tokenizer(str(k), add_special_tokens=False)["input_ids"][0] for k in range(DIGITS)]


def padded(texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask [N, L], padded on the left, so that all texts end in one column."""
    ids = [torch.tensor(text) for text in texts]
    ids, seen = (
        pad_sequence(rows, batch_first=True, padding_side="left") for rows in (ids, [torch.ones_like(x) for x in ids])
    )
    return ids, seen


def last_position(model: PreTrainedModel, texts: Sequence[Sequence[int]], states: bool = False) -> Any:
    """Return the model's output at the last token of each text."""
    ids, seen = (x.to(model.device) for x in padded(texts))
    position = (seen.cumsum(1) - 1).clamp(min=0)
    return model(
        input_ids=ids, attention_mask=seen, position_ids=position, output_hidden_states=states, use_cache=False,
        logits_to_keep=1,
    )  # fmt: skip


@torch.no_grad()
def read(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], count: Int, digits: Sequence[int], at_once: int = 64
) -> States:
    """Read states and digits' log-probabilities behind texts of token ids, `at_once` together.

    The embedding of the last token is left out: it is the same for every prompt.
    """
    hidden, logprob = list[Float](), list[Float]()
    for k in range(0, len(texts), at_once):
        out = last_position(model, texts[k : k + at_once], states=True)
        hidden.append(np.stack([h[:, -1].double().cpu().numpy() for h in out.hidden_states[1:]]))
        logprob.append(out.logits[:, -1].double().log_softmax(-1)[:, digits].cpu().numpy())
    return States(np.concatenate(hidden, axis=1), np.concatenate(logprob), count)


def readings(states: States, rows: Float, fitted: Bool, ridge: float) -> list[dict[str, float]]:
    """Return of each layer what a probe finds in prompts it was not fitted on, and mean |cos| with the digit rows."""
    found = []
    for hidden in states.hidden:
        probe = linear_probe(hidden, states.count, fitted, ridge)
        shift = count_shift(hidden, states.count)
        cosines = {"probe": row_cosines(probe.direction, rows), "shift": row_cosines(shift, rows)}
        found.append(
            {"r_squared": probe.r_squared, "exact": probe.exact}
            | {f"cos_{name}": float(np.nanmean(np.abs(cos))) for name, cos in cosines.items()}
        )
    return found


def shares(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], digits: Sequence[int], seed: int
) -> dict[str, float | None]:
    """Return the digit rows' share of ‖s‖² at a sampled answer, of the output layer's score and of the whole one.

    Shares of sums over the prompts. The rows count in their output use, also where the matrix is tied.
    """
    with torch.no_grad():
        logprob = (
            torch.cat([last_position(model, [text]).logits[:, -1] for text in texts]).cpu().double().log_softmax(-1)
        )
    drawn = torch.Generator().manual_seed(seed)
    token = torch.multinomial(logprob.exp(), 1, generator=drawn)
    ids, seen = padded([[*text, int(y)] for text, y in zip(texts, token, strict=True)])
    mask = torch.zeros_like(seen, dtype=torch.bool)
    mask[:, -1] = True
    layer, whole = (
        token_score_norms(model, ids, mask, seen.bool(), scope=scope).norm_sq[:, -1] for scope in ("lm_head", "all")
    )
    rows = rows_share(logprob.numpy(), token[:, 0].numpy(), digits) * layer
    return {
        "of_layer": rounded(float(np.nansum(rows) / layer.sum())),
        "of_score": rounded(float(np.nansum(rows) / whole.sum())),
        "norm_sq": rounded(float(whole.mean())),
    }


def digit_rows(model: PreTrainedModel, digits: Sequence[int]) -> Float:
    """Return the output layer's rows of the digits [10, d]."""
    weight: Any = output_layer(model).weight
    return weight.detach().double().cpu().numpy()[list(digits)]
