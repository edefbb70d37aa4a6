"""Forward passes over rollouts: log-probabilities with their graph, and everything the level `forward` measures."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from otb_analysis.devices import widenable
from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.soft import drawn_logprobs, soft_inputs
from otb_analysis.logit_stats import logit_stats
from otb_analysis.rollouts.models import chosen_states
from otb_analysis.rollouts.prefix_cache import PrefixCache
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Int, LogitStats


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


def stacked(parts: Sequence[Tensor], width: int) -> Tensor:
    """Concatenate [n, T', ...] along the first axis after widening each to T columns of zeros."""
    rest = parts[0].shape[2:]
    return torch.cat([torch.cat([x, x.new_zeros(len(x), width - x.shape[1], *rest)], dim=1) for x in parts])


def _in_order(parts: Sequence[Tensor], rollouts: Rollouts, rows: Sequence[Int]) -> Tensor:
    """Put passes [n, T', ...] together as [N, T, ...] in the order of the rollouts."""
    back = torch.as_tensor(np.argsort(np.concatenate(rows)), device=parts[0].device)
    return stacked(parts, rollouts.width)[back]


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
) -> ForwardPass:
    """Score every completion token once, with every statistic of the level `forward`.

    Prompts start at column 0 and padding is on the right, so that the model's own positions are
    cumsum(attention_mask) − 1 at every token, also in architectures that take no position ids.
    The policy is softmax(logits / temperature). `prompts` holds the prompts where the model has read them already;
    `wanted` says what else to return, hidden states by default.

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    wanted = wanted or ForwardOutputs()
    view = _View.of(rollouts, model.device)
    with soft_inputs(model, rollouts.soft):
        logits, hidden = view.policy_tokens(model, prompts)
    targets = view.targets[view.mask]
    logprob = drawn_logprobs(_cooled(logits, temperature), targets, rollouts.soft, model)
    if wanted.observe is not None:
        row, token = view.mask.nonzero(as_tuple=True)
        wanted.observe(PolicyLogits(logits.detach(), hidden, targets, row, token, rollouts, temperature))
    with wanted.timed():
        if rollouts.soft is None:
            stats = _stats(logits.detach(), hidden, targets, view.mask, temperature)
        else:
            soft = rollouts.soft.among(targets)
            stats = _stats(logits.detach(), hidden, targets.masked_fill(soft, 0), view.mask, temperature)
            stats = _of_drawn_tokens(stats, view.placed(soft), view.placed(logprob.detach()))
        kept = view.placed(hidden if wanted.hidden else hidden[:, :0])
    return ForwardPass(view.placed(logprob), kept, view.mask, stats)


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
    view = _View.of(rollouts, model.device)
    with soft_inputs(model, rollouts.soft):
        z = _cooled(view.policy_tokens(model, prompts)[0], temperature)
    logprob = drawn_logprobs(z, view.targets[view.mask], rollouts.soft, model)
    entropies = None
    if entropy:
        log_pi = z.log_softmax(-1)
        entropies = view.placed(-(log_pi.exp() * log_pi).sum(-1))
    return CompletionLogprobs(view.placed(logprob), entropies)


def hidden_states(backbone: PreTrainedModel, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the final hidden states before the completion tokens [N, T, d], with their graph, and the mask [N, T].

    `backbone` is a language model without its output layer. The states are arbitrary outside the mask.
    """
    view = _View.of(rollouts, backbone.device)
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
    def of(cls, rollouts: Rollouts, device: torch.device) -> "_View":
        ids, mask, attention = rollouts.tensors(device)
        columns = torch.as_tensor(rollouts.completion_columns(), device=device)
        present = torch.as_tensor(rollouts.present(), device=device)
        before = (columns - 1).clamp(min=0)[..., None]
        return cls(ids, attention, mask.gather(1, columns) & present, present, ids.gather(1, columns), before)

    def policy_tokens(self, model: PreTrainedModel, prompts: PrefixCache | None) -> tuple[Tensor, Tensor]:
        """Logits [K, V] and detached final hidden states [K, d] before each of the K policy tokens.

        The output layer sees only these: no logits of prompts, tool tokens or padding are ever made.
        """
        row, token = self.mask.nonzero(as_tuple=True)
        if prompts is None:
            inputs = {"input_ids": self.ids, "attention_mask": self.attention, "use_cache": False}
            column = self.before[row, token, 0]
            choice = chosen_states(model, lambda hidden: hidden[row, column])
        else:
            inputs = prompts.inputs(self.targets[:, :-1], self.present[:, :-1])
            choice = chosen_states(model, lambda hidden: prompts.predicting(hidden, row, token))
        with choice as seen:
            logits = model(**inputs).logits[0]
        bad = ~logits.detach().isfinite().all(-1)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise NonFiniteScore(int(row[first]), int(token[first]))
        return logits, seen[0].detach()

    def placed(self, values: Tensor) -> Tensor:
        """Numbers of the policy tokens [K, ...] as [N, T, ...], zero elsewhere."""
        out = values.new_zeros(*self.mask.shape, *values.shape[1:])
        return out.index_put(self.mask.nonzero(as_tuple=True), values)


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scaled if temperature == 1 else scaled / temperature


def _of_drawn_tokens(stats: LogitStats, soft: Tensor, logprob: Tensor) -> LogitStats:
    """Return statistics [N, T] in which soft tokens have their log-density and none of what a drawn token has: NaN."""
    here = soft.cpu().numpy()
    whole = {field.name: np.where(here, np.nan, getattr(stats, field.name)) for field in fields(LogitStats)}
    density = np.where(here, logprob.cpu().double().numpy(), stats.logprob)
    return LogitStats(**whole | {"logprob": density, "hidden_norm_sq": stats.hidden_norm_sq})


def _stats(logits: Tensor, hidden: Tensor, targets: Tensor, mask: Tensor, temperature: float) -> LogitStats:
    """Return the statistics [N, T] of the policy tokens [K, ...]; entries outside the mask are zero."""
    stats = logit_stats(logits, token_ids=targets, temperature=temperature)
    norm_sq = widenable(hidden.float()).square().sum(-1, dtype=torch.float64).cpu().numpy()
    columns = {field.name: getattr(stats, field.name) for field in fields(LogitStats)} | {"hidden_norm_sq": norm_sq}
    inside = mask.cpu().numpy()
    whole = {name: np.zeros(inside.shape) for name in columns}
    for name, values in columns.items():
        whole[name][inside] = values
    return LogitStats(**whole)
