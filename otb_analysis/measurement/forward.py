"""Forward passes over rollouts, cut to fit into memory: log-probabilities with their graph, and the level `forward`.

Where a model allows it each prompt is run once: its rollouts continue from its keys and values, which keep their graph.
log π(y_t | x, y_{<t}) and its gradient are those of a pass over prompt and completion. A group of G rollouts runs its
prompt once instead of G times, and the last token of a rollout, which predicts nothing, is not run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from otb_analysis.devices import widenable
from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.soft import drawn_logprobs, soft_inputs
from otb_analysis.logit_stats import logit_stats
from otb_analysis.phases import advance, count_to
from otb_analysis.rollouts.decoding import keeps_beginnings, unsupported_reason
from otb_analysis.rollouts.models import chosen_states, is_shared_out, output_layer
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Int, LogitStats

MASKED = ("sdpa", "eager")
"""Attention that takes any mask: prompts of unequal length stand, padded, before their completions."""


@dataclass(frozen=True)
class PrefixCache:
    """The different prompts of a batch as a model read them; made by `read_prompts`, read by scoring passes."""

    keys: tuple[Tensor, ...]  # Of each layer [P, heads, S, d'], S the length of the longest prompt
    values: tuple[Tensor, ...]  # The same
    real: Tensor  # 1 at tokens, 0 at padding [P, S]
    hidden: Tensor  # Final hidden state behind each prompt [P, d], with its graph
    of: Tensor  # Each rollout's prompt [n]

    def inputs(self, ids: Tensor, present: Tensor) -> dict[str, Any]:
        """Return a model's inputs for completions [n, T]; `present` is false at padding."""
        before = self.real[self.of]
        steps = torch.arange(ids.shape[1], device=ids.device)
        layers = zip(self.keys, self.values, strict=True)
        return {
            "input_ids": ids,
            "attention_mask": torch.cat([before, present.long()], dim=1),
            "position_ids": before.sum(1, keepdim=True) + steps,
            "past_key_values": Cache(layers=[_Continued(k[self.of], v[self.of]) for k, v in layers]),
            "use_cache": True,
        }


class _Continued(DynamicLayer):
    """Keys and values of prompts, put in front of those of their completions; nothing is kept."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values [n, heads, S + T, d']."""
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def supports_prefix_cache(model: PreTrainedModel) -> bool:
    """Return whether completions of a model can be scored behind prompts that were read before.

    Its cache must keep every key and value, as they are before any completion; its inputs be prepared as most models'
    are, its attention take any mask.
    """
    is_masked = getattr(model.config, "_attn_implementation", None) in MASKED
    return is_masked and unsupported_reason(model) is None and keeps_beginnings(model)


def read_prompts(model: PreTrainedModel, rollouts: Rollouts) -> PrefixCache | None:
    """Read every different prompt of a batch once.

    None where nothing would be saved: rollouts have no prompt in common, or none has a second token.
    """
    texts = [
        tuple(row[:length].tolist()) for row, length in zip(rollouts.input_ids, rollouts.prompt_length, strict=True)
    ]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    if len(number) == len(texts) or rollouts.completion_length.max() < 2:
        return None
    real = np.zeros((len(number), max(map(len, number))), dtype=np.int64)
    ids = np.zeros_like(real)
    for i, text in enumerate(number):
        ids[i, : len(text)], real[i, : len(text)] = text, 1
    layers = [DynamicLayer() for _ in DynamicCache(config=model.config).layers]
    seen, mask = torch.as_tensor(ids, device=model.device), torch.as_tensor(real, device=model.device)
    last = mask.sum(1) - 1
    with chosen_states(
        model, lambda hidden: hidden[torch.arange(len(last), device=hidden.device), last], logits=False
    ) as states:
        model(input_ids=seen, attention_mask=mask, past_key_values=Cache(layers=[*layers]), use_cache=True)
    return PrefixCache(
        keys=tuple(layer.keys for layer in layers if layer.keys is not None),
        values=tuple(layer.values for layer in layers if layer.values is not None),
        real=mask,
        hidden=states[0],
        of=torch.as_tensor([number[text] for text in texts], device=model.device),
    )


T = TypeVar("T")


class NonFiniteScore(NonFiniteError):
    """The policy's logits are NaN or infinite, at rollout `row` of the pass and its completion token `token`."""

    def __init__(self, row: int, token: int):
        super().__init__(
            f"logits are not finite at rollout {row}, token {token}; "
            "lower the learning rate or go back to an earlier checkpoint."
        )
        self.row, self.token = row, token


@dataclass(frozen=True)
class CompletionLogprobs:
    """Log-probabilities with their graph, by completion token; made by `completion_logprobs`, read by the update."""

    logprob: Tensor  # log π(y_t) in nats [N, T], float32; zero outside the mask
    # Entropy of each token's distribution in nats [N, T], zero outside the mask, or None if it was not asked for.
    entropy: Tensor | None = None

    @classmethod
    def concatenate(
        cls, parts: Sequence["CompletionLogprobs"], rollouts: Rollouts, rows: Sequence[Int]
    ) -> "CompletionLogprobs":
        """Put passes over parts of `rollouts` together, `rows` being the rollouts of each."""
        entropies = [part.entropy for part in parts if part.entropy is not None]
        return cls(
            _in_order([part.logprob for part in parts], rollouts, rows),
            _in_order(entropies, rollouts, rows) if entropies else None,
        )


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass gives, by completion token; made by `forward_pass`, read by the loop and the critic."""

    # log π(y_t) in nats [N, T], float32, with its graph if memory held the whole batch; zero outside the mask.
    logprob: Tensor
    # Final hidden state that predicts y_t [N, T, d], detached; zero outside the mask; d is 0 where nobody asked for it.
    hidden: Tensor
    mask: Tensor  # True at policy tokens [N, T], on the model's device
    stats: LogitStats  # Statistics of the distributions [N, T], zero outside the mask

    @classmethod
    def concatenate(cls, parts: Sequence["ForwardPass"], rollouts: Rollouts, rows: Sequence[Int]) -> "ForwardPass":
        """Put passes over parts of `rollouts` together, `rows` being the rollouts of each."""
        tensors = ([getattr(part, name) for part in parts] for name in ("logprob", "hidden", "mask"))
        logprob, hidden, mask = (_in_order(one, rollouts, rows) for one in tensors)
        stats = {field.name: np.zeros(tuple(mask.shape)) for field in fields(LogitStats)}
        for part, index in zip(parts, rows, strict=True):
            for name, out in stats.items():
                out[index, : part.mask.shape[1]] = getattr(part.stats, name)
        return cls(logprob, hidden, mask, LogitStats(**stats))


def _in_order(parts: Sequence[Tensor], rollouts: Rollouts, rows: Sequence[Int]) -> Tensor:
    """Put passes [n, T', ...] together as [N, T, ...] in the order of the rollouts."""
    rest, width = parts[0].shape[2:], rollouts.width
    widened = [torch.cat([x, x.new_zeros(len(x), width - x.shape[1], *rest)], dim=1) for x in parts]
    back = torch.as_tensor(np.argsort(np.concatenate(rows)), device=parts[0].device)
    return torch.cat(widened)[back]


@dataclass(frozen=True)
class PolicyLogits:
    """Logits of K policy tokens while they exist; made by `forward_pass`, shown to `ForwardOutputs.observe`."""

    logits: Tensor  # Before the temperature [K, V]
    hidden: Tensor  # Final hidden states that predict the tokens [K, d], detached
    targets: Tensor  # The tokens drawn [K]
    row: Tensor  # Their rollouts in `rollouts` [K]
    token: Tensor  # Their positions within the completion [K]
    rollouts: Rollouts  # Of this pass
    temperature: float


@dataclass(frozen=True)
class ForwardOutputs:
    """What a forward pass gives besides log-probabilities and statistics."""

    hidden: bool = True  # True for the final hidden states
    observe: Callable[[PolicyLogits], None] | None = None  # Called with the logits of every pass
    # Context in which the statistics are computed, for whoever times them apart.
    timed: Callable[[], AbstractContextManager[object]] = nullcontext


def forward_pass(
    model: PreTrainedModel,
    rollouts: Rollouts,
    temperature: float,
    prompts: PrefixCache | None = None,
    wanted: ForwardOutputs | None = None,
    states: Sequence[Tensor] | None = None,
) -> ForwardPass:
    """Score every completion token once, with every statistic of the level `forward`.

    Prompts start at column 0 and padding is on the right, so that the model's own positions are
    cumsum(attention_mask) − 1 at every token, also in architectures that take no position ids.
    The policy is softmax(logits / temperature). `prompts` holds the prompts where the model has read them already;
    `wanted` says what else to return, hidden states by default. `states` are the final hidden states before every
    completion token, [T_i, d] a rollout, where a pass has made them: then only the output layer is called.

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    wanted = wanted or ForwardOutputs()
    view = _View.from_rollouts(rollouts, model.device)
    with soft_inputs(model, rollouts.soft):
        logits, hidden = view.policy_tokens(model, prompts, states)
    targets = view.targets[view.mask]
    logprob = drawn_logprobs(_cooled(logits, temperature), targets, rollouts.soft, model)
    soft = None if rollouts.soft is None else rollouts.soft.among(targets)
    if wanted.observe is not None:
        row, token = view.mask.nonzero(as_tuple=True)
        wanted.observe(PolicyLogits(logits.detach(), hidden, targets, row, token, rollouts, temperature))
    with wanted.timed():
        ids = targets if soft is None else targets.masked_fill(soft, 0)
        stats = logit_stats(logits.detach(), token_ids=ids, temperature=temperature)
        norm_sq = widenable(hidden.float()).square().sum(-1, dtype=torch.float64).cpu().numpy()
        columns = {field.name: getattr(stats, field.name) for field in fields(LogitStats)} | {"hidden_norm_sq": norm_sq}
        if soft is not None:  # soft tokens have their log-density, and nothing of what a drawn token has
            here, density = soft.cpu().numpy(), logprob.detach().cpu().double().numpy()
            columns = {name: np.where(here, np.nan, x) for name, x in columns.items()}
            columns |= {"logprob": np.where(here, density, stats.logprob), "hidden_norm_sq": norm_sq}
        inside = view.mask.cpu().numpy()
        whole = {name: np.zeros(inside.shape) for name in columns}
        for name, values in columns.items():
            whole[name][inside] = values
        kept = view.scatter(hidden if wanted.hidden else hidden[:, :0])
    return ForwardPass(view.scatter(logprob), kept, view.mask, LogitStats(**whole))


def completion_logprobs(
    model: PreTrainedModel,
    rollouts: Rollouts,
    temperature: float,
    entropy: bool = False,
    prompts: PrefixCache | None = None,
) -> CompletionLogprobs:
    """Score every completion token without the statistics, as an update needs it.

    The policy is softmax(logits / temperature). `entropy` adds the entropies, with their graph; `prompts` holds the
    prompts where the model has read them already.

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    view = _View.from_rollouts(rollouts, model.device)
    with soft_inputs(model, rollouts.soft):
        z = _cooled(view.policy_tokens(model, prompts)[0], temperature)
    logprob = drawn_logprobs(z, view.targets[view.mask], rollouts.soft, model)
    entropies = None
    if entropy:
        log_pi = z.log_softmax(-1)
        entropies = view.scatter(-(log_pi.exp() * log_pi).sum(-1))
    return CompletionLogprobs(view.scatter(logprob), entropies)


def hidden_states(backbone: PreTrainedModel, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the final hidden states before the completion tokens [N, T, d], with their graph, and the mask [N, T].

    `backbone` is a language model without its output layer. The states are arbitrary outside the mask.
    """
    view = _View.from_rollouts(rollouts, backbone.device)
    hidden = backbone(input_ids=view.ids, attention_mask=view.attention, use_cache=False).last_hidden_state
    return hidden.gather(1, view.before.expand(-1, -1, hidden.shape[-1])), view.mask


@dataclass(frozen=True)
class _View:
    """A batch on the model's device, seen by completion token."""

    ids: Tensor
    attention: Tensor
    mask: Tensor
    present: Tensor
    targets: Tensor
    before: Tensor

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts, device: torch.device) -> "_View":
        ids, mask, attention = rollouts.tensors(device)
        columns = torch.as_tensor(rollouts.completion_columns(), device=device)
        present = torch.as_tensor(rollouts.present(), device=device)
        before = (columns - 1).clamp(min=0)[..., None]
        return cls(ids, attention, mask.gather(1, columns) & present, present, ids.gather(1, columns), before)

    def policy_tokens(
        self, model: PreTrainedModel, prompts: PrefixCache | None, states: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [K, V] and detached final hidden states [K, d] before each of the K policy tokens.

        The output layer sees only these: no logits of prompts, tool tokens or padding are ever made.
        """
        row, token = self.mask.nonzero(as_tuple=True)
        if states is not None:
            rows = zip(states, self.mask.to(states[0].device), strict=True)
            hidden = torch.cat([one[inside[: len(one)]] for one, inside in rows]).to(self.mask.device)
            return finite(output_layer(model)(hidden), row, token), hidden.detach()
        if prompts is None:
            inputs = {"input_ids": self.ids, "attention_mask": self.attention, "use_cache": False}
            column = self.before[row, token, 0]
            choice = chosen_states(model, lambda hidden: hidden[row, column])
        else:
            inputs = prompts.inputs(self.targets[:, :-1], self.present[:, :-1])
            behind = prompts.hidden[prompts.of][:, None]  # the first token is predicted behind the prompt
            choice = chosen_states(model, lambda hidden: torch.cat([behind, hidden], dim=1)[row, token])
        with choice as seen:
            logits = model(**inputs).logits[0]
        return finite(logits, row, token), seen[0].detach()

    def scatter(self, values: Tensor) -> Tensor:
        """Numbers of the policy tokens [K, ...] as [N, T, ...], zero elsewhere."""
        out = values.new_zeros(*self.mask.shape, *values.shape[1:])
        return out.index_put(self.mask.nonzero(as_tuple=True), values)


def finite(logits: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """Return the logits [K, V] of these rollouts and tokens [K].

    Raises:
        NonFiniteScore: One of them is NaN or infinite.
    """
    bad = ~logits.detach().isfinite().all(-1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise NonFiniteScore(int(row[first]), int(token[first]))
    return logits


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scaled if temperature == 1 else scaled / temperature


POSITIONS, LOGIT_BYTES = 1 << 14, 1 << 30
"""Default limits of a micro-batch: padded positions, and bytes of float32 logits."""
SHORT = 1 << 11
"""Padded positions of one pass on a CPU; activations of more do not stay in its cache."""


@torch.no_grad()
def forward_statistics(
    model: PreTrainedModel,
    rollouts: Rollouts,
    temperature: float,
    size: int = 0,
    observe: Callable[[PolicyLogits], None] | None = None,
) -> ForwardPass:
    """Score a batch with every statistic of the level `forward`, in passes of at most `size` rollouts, without a graph.

    `size` 0 takes what fits into memory. `observe` is called with the logits of every pass. Where processes share out
    the weights (FSDP2, ZeRO-3) each must call it, with as many rollouts and the same size.

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    wanted = ForwardOutputs(hidden=False, observe=observe)

    def score(part: Rollouts, prompts: PrefixCache | None) -> ForwardPass:
        return forward_pass(model, part, temperature, prompts, wanted)

    # Processes that share out the weights make each pass together: one a micro-batch, the failed ones too.
    together = is_shared_out(model)
    shares, fault, passes = None if together else supports_prefix_cache(model), None, []
    count_to(len(rollouts.group), "rollout")
    for part in micro_batches(model, rollouts, size):
        try:
            for rows, output in in_passes(model, rollouts, [part], shares, score):
                passes.append((rows, output))
                advance(len(rows))
        except NonFiniteScore as error:
            if not together:
                raise
            fault = fault or error
    if fault is not None:
        raise fault
    return ForwardPass.concatenate([output for _, output in passes], rollouts, [rows for rows, _ in passes])


@torch.no_grad()
def statistics_of_states(
    model: PreTrainedModel,
    rollouts: Rollouts,
    states: Sequence[Tensor],
    temperature: float,
    observe: Callable[[PolicyLogits], None] | None = None,
) -> ForwardPass:
    """Do what `forward_statistics` does where other passes have made the final hidden states: call the output layer.

    `states` are those before every completion token, [T_i, d] a rollout, on any device; at once as many as fit into
    memory. A model that changes its logits behind the output layer (soft caps, scales) gets other numbers than by
    `forward_statistics`.

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    wanted, passes = ForwardOutputs(hidden=False, observe=observe), []
    parts = micro_batches(model, rollouts)
    for part in parts:
        try:
            of_part = [states[n] for n in part.tolist()]
            passes.append(forward_pass(model, rollouts.take(part), temperature, wanted=wanted, states=of_part))
        except NonFiniteScore as error:
            raise NonFiniteScore(int(part[error.row]), error.token) from error
    return ForwardPass.concatenate(passes, rollouts, parts)


def micro_batches(model: PreTrainedModel, rollouts: Rollouts, size: int = 0, rows: Int | None = None) -> list[Int]:
    """Cut a batch, or some rows of it, into parts of `size` rollouts; 0 takes what fits into memory."""
    index = np.arange(len(rollouts.group)) if rows is None else rows
    if not size:
        vocabulary = next(output_layer(model).parameters()).shape[0]
        fits = min(POSITIONS, LOGIT_BYTES // (4 * vocabulary)) // max(rollouts.input_ids.shape[1], 1)
        size = max(1, fits)
    return [index[start : start + size] for start in range(0, len(index), size)]


def in_passes(
    model: PreTrainedModel,
    rollouts: Rollouts,
    parts: Sequence[Int],
    shares: bool | None,
    score: Callable[[Rollouts, PrefixCache | None], T],
) -> Iterator[tuple[Int, T]]:
    """Cut micro-batches of a batch into passes, and yield each pass's rollouts and what `score` makes of them.

    Prompts are read once where the model `shares` them; None takes each micro-batch as one pass. An error names the
    rollout by its number in the batch.
    """
    for rows in parts:
        part = rollouts.take(rows)
        prompts = read_prompts(model, part) if shares else None
        length = part.attention_mask.sum(axis=1) if prompts is None else part.completion_length
        for some in [np.arange(len(rows))] if shares is None else short_passes(length, model.device):
            # A completion of one token needs no position after the prompt.
            cached = None if prompts is None or part.completion_length[some].max() <= 1 else prompts
            if cached is not None:
                cached = replace(cached, of=cached.of[torch.as_tensor(some, device=cached.of.device)])
            try:
                yield rows[some], score(part.take(some), cached)
            except NonFiniteScore as error:
                raise NonFiniteScore(int(rows[some][error.row]), error.token) from error
        prompts = cached = None  # not beside those of the next micro-batch


def short_passes(length: Int, device: torch.device) -> list[Int]:
    """Cut a batch into passes of rollouts of like length [N], shortest first: little padding, and a warm CPU cache.

    There are as few passes as `SHORT` allows, because each has a fixed cost; then the largest is as small as possible.
    A GPU takes the batch as it is.
    """
    if device.type != "cpu":
        return [np.arange(len(length))]
    order = np.argsort(length, kind="stable")
    low, high = 0, SHORT
    fewest = len(_passes(length, order, high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_passes(length, order, middle)) == fewest else (middle, high)
    return _passes(length, order, high)


def _passes(length: Int, order: Int, most: int) -> list[Int]:
    """Fill one pass after the other, in this order, with at most `most` padded positions; a longer rollout is alone."""
    cuts, first = [], 0
    for i, positions in enumerate(length[order].tolist()):
        if i > first and (i + 1 - first) * positions > most:
            cuts.append(i)
            first = i
    return np.split(order, cuts)
