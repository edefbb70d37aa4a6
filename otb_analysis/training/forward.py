"""Forward passes over rollouts: log-probabilities with their graph, and everything the level `forward` measures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from otb_analysis.errors import NonFiniteError
from otb_analysis.logit_stats import logit_stats
from otb_analysis.models import output_layer
from otb_analysis.sampling import Rollouts
from otb_analysis.types import Int, LogitStats


class NonFiniteScore(NonFiniteError):
    """The policy's logits are NaN or infinite.

    Attributes:
        row: Index of the rollout in the pass.
        token: Index of its completion token.
    """

    def __init__(self, row: int, token: int):
        super().__init__(
            f"logits are not finite at rollout {row}, token {token}; "
            "lower the learning rate or go back to an earlier checkpoint."
        )
        self.row, self.token = row, token


@dataclass(frozen=True)
class Scored:
    """Log-probabilities with their graph, by completion token; made by `score`, read by the update.

    Attributes:
        logprob: log π(y_t) in nats [N, T], float32; zero outside the mask.
        mask: True at policy tokens [N, T], on the model's device.
        entropy: Entropy of each token's distribution in nats [N, T], or None if it was not asked for.
    """

    logprob: Tensor
    mask: Tensor
    entropy: Tensor | None = None

    @classmethod
    def concatenate(cls, parts: Sequence["Scored"], rollouts: Rollouts, rows: Sequence[Int]) -> "Scored":
        """Put passes over parts of `rollouts` together, `rows` being the rollouts of each."""
        width = rollouts.completion_columns().shape[1]
        back = torch.as_tensor(np.argsort(np.concatenate(rows)), device=parts[0].mask.device)
        entropies = [part.entropy for part in parts if part.entropy is not None]
        return cls(
            stacked([part.logprob for part in parts], width)[back],
            stacked([part.mask for part in parts], width)[back],
            stacked(entropies, width)[back] if entropies else None,
        )


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass gives, by completion token; made by `forward_pass`, read by the loop and the critic.

    Attributes:
        logprob: log π(y_t) in nats [N, T], float32, with its graph if memory held the whole batch; zero outside the
            mask.
        hidden: Final hidden state that predicts y_t [N, T, d], detached; zero outside the mask.
        mask: True at policy tokens [N, T], on the model's device.
        stats: Statistics of the distributions [N, T], zero outside the mask.
    """

    logprob: Tensor
    hidden: Tensor
    mask: Tensor
    stats: LogitStats

    @classmethod
    def concatenate(cls, parts: Sequence["ForwardPass"], rollouts: Rollouts, rows: Sequence[Int]) -> "ForwardPass":
        """Put passes over parts of `rollouts` together, `rows` being the rollouts of each."""
        stats = [{f.name: getattr(part.stats, f.name) for f in fields(LogitStats)} for part in parts]
        width, back = rollouts.completion_columns().shape[1], np.argsort(np.concatenate(rows))
        whole = {name: np.concatenate([_widened(s[name], width) for s in stats])[back] for name in stats[0]}
        tensors = ([getattr(p, name) for p in parts] for name in ("logprob", "hidden", "mask"))
        logprob, hidden, mask = (stacked(t, width)[torch.as_tensor(back, device=t[0].device)] for t in tensors)
        return cls(logprob, hidden, mask, LogitStats(**whole))


def stacked(parts: Sequence[Tensor], width: int) -> Tensor:
    """Concatenate [n, T', ...] along the first axis after widening each to T columns of zeros."""
    rest = parts[0].shape[2:]
    return torch.cat([torch.cat([x, x.new_zeros(len(x), width - x.shape[1], *rest)], dim=1) for x in parts])


def forward_pass(model: PreTrainedModel, rollouts: Rollouts, temperature: float) -> ForwardPass:
    """Score every completion token once, with every statistic of the level `forward`.

    Prompts start at column 0 and padding is on the right, so that the model's own positions are
    cumsum(attention_mask) − 1 at every token, also in architectures that take no position ids.

    Args:
        model: The policy.
        rollouts: N rollouts.
        temperature: τ of the policy softmax(logits / τ).

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    view = _View.of(rollouts, model.device)
    logits, hidden = view.policy_tokens(model)
    targets = view.targets[view.mask]
    logprob = _log_pi(logits, temperature).gather(-1, targets[:, None])[:, 0]
    stats = _stats(logits.detach(), hidden, targets, view.mask, temperature)
    return ForwardPass(view.placed(logprob), view.placed(hidden), view.mask, stats)


def score(model: PreTrainedModel, rollouts: Rollouts, temperature: float, entropy: bool = False) -> Scored:
    """Score every completion token without the statistics, as an update needs it.

    Args:
        model: The policy.
        rollouts: N rollouts.
        temperature: τ of the policy softmax(logits / τ).
        entropy: Also the entropies, with their graph.

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    view = _View.of(rollouts, model.device)
    log_pi = _log_pi(view.policy_tokens(model)[0], temperature)
    logprob = log_pi.gather(-1, view.targets[view.mask][:, None])[:, 0]
    own = -(log_pi.exp() * log_pi).sum(-1) if entropy else None
    return Scored(view.placed(logprob), view.mask, None if own is None else view.placed(own))


def hidden_states(backbone: PreTrainedModel, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the final hidden states that precede the completion tokens, with their graph, and the mask.

    Args:
        backbone: The layers of a language model without its output layer.
        rollouts: N rollouts.

    Returns:
        Hidden states [N, T, d], arbitrary outside the mask, and the mask of policy tokens [N, T].
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
    targets: Tensor
    before: Tensor

    @classmethod
    def of(cls, rollouts: Rollouts, device: torch.device) -> "_View":
        ids, attention, columns, mask, present = (
            torch.as_tensor(x, device=device)
            for x in (
                rollouts.input_ids,
                rollouts.attention_mask,
                rollouts.completion_columns(),
                rollouts.mask,
                rollouts.present(),
            )
        )
        before = (columns - 1).clamp(min=0)[..., None]
        return cls(ids, attention.long(), mask.gather(1, columns) & present, ids.gather(1, columns), before)

    def policy_tokens(self, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """Logits [K, V] and detached final hidden states [K, d] before each of the K policy tokens.

        The output layer sees only these: no logits of prompts, tool tokens or padding are ever made.
        """
        row, token = self.mask.nonzero(as_tuple=True)
        with _chosen(model, row, self.before[row, token, 0]) as seen:
            logits = model(input_ids=self.ids, attention_mask=self.attention, use_cache=False).logits[0]
        bad = ~logits.detach().isfinite().all(-1)
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise NonFiniteScore(int(row[first]), int(token[first]))
        return logits, seen[0]

    def placed(self, values: Tensor) -> Tensor:
        """Numbers of the policy tokens [K, ...] as [N, T, ...], zero elsewhere."""
        out = values.new_zeros(*self.mask.shape, *values.shape[1:])
        return out.index_put(self.mask.nonzero(as_tuple=True), values)


def _log_pi(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (scaled if temperature == 1 else scaled / temperature).log_softmax(-1)


def _widened(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def _stats(logits: Tensor, hidden: Tensor, targets: Tensor, mask: Tensor, temperature: float) -> LogitStats:
    """Return the statistics [N, T] of the policy tokens [K, ...]; entries outside the mask are zero."""
    found = logit_stats(logits, token_ids=targets, temperature=temperature)
    inside = mask.cpu().numpy()

    def placed(values: np.ndarray) -> np.ndarray:
        out = np.zeros(inside.shape)
        out[inside] = values
        return out

    return LogitStats(
        logprob=placed(found.logprob),
        entropy=placed(found.entropy),
        sum_pi_sq=placed(found.sum_pi_sq),
        energy=placed(found.energy),
        hidden_norm_sq=placed(hidden.double().square().sum(-1).cpu().numpy()),
        pi_variance=placed(found.pi_variance),
        logprob_variance=placed(found.logprob_variance),
    )


@contextmanager
def _chosen(model: PreTrainedModel, row: Tensor, column: Tensor) -> Iterator[list[Tensor]]:
    """Let the output layer see only some positions, as one row; collect what it sees, detached.

    What enters the output layer is the final hidden state, whatever the architecture calls it.
    """
    seen: list[Tensor] = []

    def choose(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0][row, column]
        seen.append(hidden.detach())
        return (hidden[None], *inputs[1:])

    hook = output_layer(model).register_forward_pre_hook(choose)
    try:
        yield seen
    finally:
        hook.remove()
