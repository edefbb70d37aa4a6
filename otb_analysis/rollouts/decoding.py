"""Sampling token by token: the same draws as `generate`, cheaper where many short texts are drawn at once.

Equal contexts are run once, and so is a long beginning that all share (examples, a system prompt). Keys and values grow
in place instead of being copied for every token, and rows that have ended leave the batch. A seed draws the tokens that
`model.generate` would draw, up to rounding: like `multinomial`, y = argmax_v π_v / e_v with e ~ Exp(1), and e is drawn
for every row whether it has ended or not.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.soft import SoftTokens, embeddings_of, log_density, mixtures, soft_inputs
from otb_analysis.phases import advance, count_to
from otb_analysis.rollouts.models import is_shared_out

ROOM, SHARE = 32, 4  # A full cache grows by ROOM columns or by one SHARE-th of its length, whichever is more
LOOK = 16  # Tokens between two looks at who has ended, where a look would wait for an accelerator
HEAD = 256  # A beginning that all share is read alone where that spares as many tokens; it costs one more pass
SPARSE = 0.8  # Rows that have ended leave the batch once no more than this share of it goes on
READ = ("input_ids", "attention_mask", "position_ids", "past_key_values")
PREPARED = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""What a model must take as input, and the methods by which `generate` would change that."""


class NonFiniteLogits(NonFiniteError):
    """The policy's logits are NaN or infinite; raised by a generator, which knows contexts and not rollouts."""

    def __init__(self, row: int, token: int):
        super().__init__(f"logits of context {row} are not finite at generated token {token}.")
        self.row, self.token = row, token


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn."""

    max_new_tokens: int  # Budget of each row
    temperature: float  # τ of softmax(logits / τ)
    ends: Sequence[int]  # Tokens that end a row
    pad: int  # Fills shorter contexts, unseen
    soft: int = 0  # How many of the first tokens are soft
    noise: float = 0.0  # Their σ, in root-mean-square entries of the table of embeddings


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return why `decode` cannot run a model, or None where it can.

    It needs layers that all keep every key and value, and inputs that transformers prepares by its own methods.
    """
    kinds = sorted({type(layer).__name__ for layer in DynamicCache(config=model.config).layers})
    if kinds != [DynamicLayer.__name__]:
        return f"its cache is of {' and '.join(kinds) or 'no layers'}, not of {DynamicLayer.__name__} alone"
    known = inspect.signature(model.forward).parameters
    missing = [name for name in READ if name not in known]
    if missing:
        return f"its forward pass takes no {missing[0]}"
    overridden = [name for name in PREPARED if getattr(type(model), name) is not getattr(GenerationMixin, name)]
    return f"it has a {overridden[0]} of its own" if overridden else None


def keeps_beginnings(model: PreTrainedModel) -> bool:
    """Whether a beginning has the same keys and values alone as before any rest, with padding between them.

    Not where the length of the whole text turns its positions, or where a window counts columns of the cache.
    """
    settings = model.config.to_dict()
    turns = str([settings.get("rope_parameters"), settings.get("rope_scaling")])
    return settings.get("model_type") != "gpt_neo" and "dynamic" not in turns and "longrope" not in turns


def decode(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], draw: Draw
) -> tuple[Tensor, Tensor, SoftTokens | None]:
    """Continue contexts until each has ended or used up its budget; return tokens and log-probabilities [N, T] in nats.

    y_t = argmax_v π_v / e_v with e ~ Exp(1), which is a draw from π = softmax(logits / τ). `unsupported_reason` of the
    model is None. Entries after a row's first end token are arbitrary. With `draw.soft` the first tokens are soft,
    h̃ = πE + σ·N(0, I), and come with their vectors: none of them ends a row, and their log-probability is a density.

    Raises:
        NonFiniteLogits: Logits of a row that goes on are NaN or infinite.
    """
    # inference mode spares every small operation its bookkeeping; buffers of gathered shards are written in both modes
    with torch.no_grad() if is_shared_out(model) else torch.inference_mode():
        thinking = _Thinking(model, len(contexts), draw) if draw.soft else None
        with soft_inputs(model, thinking and thinking.soft):
            tokens, logprobs = _draw(model, contexts, draw, thinking)
    soft = thinking and replace(thinking.soft, vectors=thinking.soft.vectors.clone())
    return tokens.clone(), logprobs.clone(), soft  # tensors that may be used with gradients again


def _draw(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], draw: Draw, thinking: "_Thinking | None"
) -> tuple[Tensor, Tensor]:
    batch = _Batch(model, contexts, draw.pad)
    n, device = len(contexts), model.device
    ends = torch.tensor(list(draw.ends), device=device)
    rows, ended = torch.arange(n, device=device), torch.zeros(n, dtype=torch.bool, device=device)
    tokens = torch.full((n, draw.max_new_tokens), draw.pad, device=device)
    logprobs = torch.zeros(n, draw.max_new_tokens, device=device)
    first_bad = torch.full((n,), draw.max_new_tokens, device=device)  # first token of each row with logits not finite
    width = torch.zeros((), dtype=torch.int64, device=device)  # tokens until all rows have ended
    every = 1 if device.type == "cpu" else LOOK
    count_to(draw.max_new_tokens, "token", at_most=True)
    for t in range(draw.max_new_tokens):
        scores = batch.logits.float() / draw.temperature
        bad = ~scores.isfinite().all(-1) & ~ended
        first_bad[rows] = first_bad[rows].where(~bad, first_bad[rows].clamp(max=t))
        width += ~ended.all()
        if thinking is not None and t < draw.soft:  # no row has ended yet, so all are there
            token, logprob = thinking.draw(scores, t)
        else:
            log_pi = scores.log_softmax(-1)
            # for all n rows, also those that have left the batch: so a seed draws the same whatever rows are left
            waiting = torch.empty(n, scores.shape[1], device=device).exponential_()
            token = (log_pi.exp() / (waiting if len(rows) == n else waiting[rows])).argmax(-1)
            logprob = log_pi.gather(1, token[:, None])[:, 0]
        tokens[rows, t], logprobs[rows, t] = token, logprob
        ended |= torch.isin(token, ends)
        left = len(rows)
        if (t + 1) % every == 0 or t + 1 == draw.max_new_tokens:
            left, count, worst = torch.stack([(~ended).sum(), width, first_bad.min()]).tolist()
            if worst < draw.max_new_tokens:
                raise NonFiniteLogits(int((first_bad == worst).nonzero()[0]), worst)
            if left == 0 or t + 1 == draw.max_new_tokens:
                return tokens[:, :count], logprobs[:, :count]
        if left <= SPARSE * len(rows):
            kept = (~ended).nonzero()[:, 0]
            batch.select(kept)
            rows, ended, token = rows[kept], ended[kept], token[kept]
        batch.append(token)
        advance()
    return tokens, logprobs


class _Thinking:
    """The soft tokens of a batch while they are drawn, [N · K] of them: those of a row lie side by side."""

    def __init__(self, model: PreTrainedModel, rows: int, draw: Draw):
        self.table, self.each = embeddings_of(model).weight, draw.soft
        sigma = draw.noise * float(self.table.detach().double().square().mean().sqrt())
        vectors = torch.zeros(rows * draw.soft, self.table.shape[1], device=model.device)
        likeliest = torch.zeros(len(vectors), dtype=torch.long, device=model.device)
        self.soft = SoftTokens(vectors, sigma, len(self.table), likeliest)

    def draw(self, z: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Draw the soft tokens at position `t` from logits/τ [N, V]; return their ids and log-densities [N]."""
        at = torch.arange(t, len(self.soft.vectors), self.each, device=z.device)
        mean = mixtures(z, self.table)
        self.soft.vectors[at] = mean + self.soft.sigma * torch.randn_like(mean)
        self.soft.likeliest[at] = z.argmax(-1)
        return self.soft.first + at, log_density(z, self.soft.vectors[at], self.table, self.soft.sigma)


class _Batch:
    """Contexts in a model's cache, padded behind what all share, and the `logits` [n, V] of what follows each."""

    def __init__(self, model: PreTrainedModel, contexts: Sequence[Sequence[int]], pad: int):
        distinct = {context: i for i, context in enumerate(dict.fromkeys(map(tuple, contexts)))}
        ends = [len(context) for context in distinct]
        shared = min(len(os.path.commonprefix([*distinct])), min(ends) - 1)  # noqa: RUF071 - tokens, no paths
        if shared * (len(distinct) - 1) < HEAD or not keeps_beginnings(model):
            shared = 0
        self.model, width, device = model, max(ends), model.device
        self.layers = [_InPlace() for _ in DynamicCache(config=model.config).layers]
        self.cache = Cache(layers=[*self.layers])
        self.last_only: dict[str, Any] = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        )
        # Padding is hidden from a new token by the mask itself, where the model takes one: of what is real transformers
        # would make it for sdpa, and read it back once a token.
        settings, usual = model.config, hasattr(inspect.getmodule(type(model)), "create_causal_mask")
        self.is_masked = usual and settings._attn_implementation == "sdpa" and not getattr(settings, "alibi", False)
        self.is_even = len({*ends}) == 1
        # padding stands between the shared beginning and the rest, so that both are without a gap
        ids = torch.tensor([[*c[:shared], *[pad] * (width - len(c)), *c[shared:]] for c in distinct], device=device)
        unseen = torch.tensor([width - end for end in ends], device=device)[:, None]
        column = torch.arange(width, device=device)
        self.real = ((column < shared) | (column >= shared + unseen)).long()
        self.next = self.real.sum(1)
        positions = (self.real.cumsum(1) - 1).clamp(min=0)
        if shared:
            self._read(ids[:1, :shared], positions[:1, :shared], self.real[:1, :shared])
            for layer in self.layers:
                layer.select(torch.zeros(len(distinct), dtype=torch.long, device=device))
        self._read(ids[:, shared:], positions[:, shared:], self.real)
        if len(distinct) < len(contexts):
            self.select(torch.tensor([distinct[tuple(c)] for c in contexts], device=device))

    def append(self, token: Tensor) -> None:
        """Put one token [n] behind every row."""
        self.real = torch.cat([self.real, self.real.new_ones(len(token), 1)], dim=1)
        mask = self.real[:, None, None].bool() if self.is_masked else self.real
        self._read(token[:, None], self.next[:, None], None if self.is_even else mask)
        self.next = self.next + 1

    def select(self, rows: Tensor) -> None:
        """Go on with some rows, or several copies of them."""
        for layer in self.layers:
            layer.select(rows)
        self.real, self.next, self.logits = self.real[rows], self.next[rows], self.logits[rows]

    def _read(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> None:
        self.logits = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **self.last_only,
        ).logits[:, -1]


class _InPlace(DynamicLayer):
    """Keys and values of one layer in buffers with room for more, so that a token is written and nothing moved."""

    buffers: tuple[Tensor, ...] = ()  # Of keys and values, once there are any

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [n, heads, new, d]; return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.buffers or end > self.buffers[0].shape[-2]:
            full, room = self.buffers, end + max(ROOM, end // SHARE)
            self.buffers = tuple(x.new_empty(*x.shape[:2], room, x.shape[-1]) for x in (key_states, value_states))
            for buffer, old in zip(self.buffers, full, strict=bool(full)):
                buffer[:, :, :start] = old[:, :, :start]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        return self._show(end)

    def select(self, rows: Tensor) -> None:
        """Go on with some rows, or several copies of them."""
        length = self.get_seq_length()
        # whole buffers: rows without a gap are copied in long runs, and the room comes along
        self.buffers = tuple(buffer.index_select(0, rows) for buffer in self.buffers)
        self._show(length)

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, :length] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values
