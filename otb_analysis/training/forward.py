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
from otb_analysis.types import LogitStats


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
        logprob: log π(y_t) in nats [N, T], float32; arbitrary outside the mask.
        mask: True at policy tokens [N, T], on the model's device.
        entropy: Entropy of each token's distribution in nats [N, T], or None if it was not asked for.
    """

    logprob: Tensor
    mask: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass gives, by completion token; made by `forward_pass`, read by the loop and the critic.

    Attributes:
        logprob: log π(y_t) in nats [N, T], float32, with its graph if one pass held the whole batch; arbitrary outside
            the mask.
        hidden: Final hidden state that predicts y_t [N, T, d], detached.
        mask: True at policy tokens [N, T], on the model's device.
        stats: Statistics of the distributions [N, T], zero outside the mask.
    """

    logprob: Tensor
    hidden: Tensor
    mask: Tensor
    stats: LogitStats

    @classmethod
    def concatenate(cls, parts: Sequence["ForwardPass"], rollouts: Rollouts) -> "ForwardPass":
        """Put passes over consecutive parts of `rollouts` together."""
        stats = [{f.name: getattr(part.stats, f.name) for f in fields(LogitStats)} for part in parts]
        width = rollouts.completion_columns().shape[1]
        whole = {name: np.concatenate([_widened(s[name], width) for s in stats]) for name in stats[0]}
        tensors = ([getattr(p, name) for p in parts] for name in ("logprob", "hidden", "mask"))
        logprob, hidden, mask = (stacked(t, width) for t in tensors)
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
    with _output_input(model) as seen:
        logits = view.logits(model)
    hidden = seen[0].detach().gather(1, view.before.expand(-1, -1, seen[0].shape[-1]))
    logprob = _logprobs(logits, view.targets, temperature)
    stats = _stats(logits.detach(), hidden, view.targets, view.mask, temperature)
    return ForwardPass(logprob, hidden, view.mask, stats)


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
    logits = view.logits(model)
    logprob = _logprobs(logits, view.targets, temperature)
    return Scored(logprob, view.mask, _entropies(logits, temperature) if entropy else None)


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

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Logits [N, T, V] that predict the completion tokens."""
        logits = model(input_ids=self.ids, attention_mask=self.attention, use_cache=False).logits
        logits = logits.gather(1, self.before.expand(-1, -1, logits.shape[-1]))
        _refuse_non_finite(logits, self.mask)
        return logits


def _logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def _entropies(logits: Tensor, temperature: float) -> Tensor:
    log_pi = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return -(log_pi.exp() * log_pi).sum(-1)


def _widened(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def _refuse_non_finite(logits: Tensor, mask: Tensor) -> None:
    bad = mask & ~logits.detach().isfinite().all(-1)
    if bool(bad.any()):
        raise NonFiniteScore(*bad.nonzero()[0].tolist())


def _stats(logits: Tensor, hidden: Tensor, targets: Tensor, mask: Tensor, temperature: float) -> LogitStats:
    """Return the statistics [N, T]; entries outside the mask are zero and were not looked at."""
    clean = torch.where(mask[..., None], logits, 0.0)
    stats = logit_stats(clean, token_ids=torch.where(mask, targets, 0), temperature=temperature)
    inside = mask.cpu().numpy()
    norm = hidden.double().square().sum(-1).cpu().numpy()
    return LogitStats(
        logprob=np.where(inside, stats.logprob, 0.0),
        entropy=np.where(inside, stats.entropy, 0.0),
        sum_pi_sq=np.where(inside, stats.sum_pi_sq, 0.0),
        energy=np.where(inside, stats.energy, 0.0),
        hidden_norm_sq=np.where(inside, norm, 0.0),
        pi_variance=np.where(inside, stats.pi_variance, 0.0),
        logprob_variance=np.where(inside, stats.logprob_variance, 0.0),
    )


@contextmanager
def _output_input(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect what enters the output layer: the final hidden state, whatever the architecture calls it."""
    seen: list[Tensor] = []
    hook = output_layer(model).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()
