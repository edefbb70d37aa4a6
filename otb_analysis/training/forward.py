"""One forward pass over a batch of rollouts: log-probabilities with their graph, and everything `forward` measures."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from otb_analysis.errors import NonFiniteError
from otb_analysis.logit_stats import logit_stats
from otb_analysis.models import output_layer
from otb_analysis.sampling import Rollouts
from otb_analysis.types import LogitStats


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass gives, by completion token; made by `forward_pass`, read by the loop and the critic.

    Attributes:
        logprob: log π(y_t) in nats [N, T], float32 with its graph; arbitrary outside the mask.
        hidden: Final hidden state that predicts y_t [N, T, d], detached.
        mask: True at policy tokens [N, T], on the model's device.
        stats: Statistics of the distributions [N, T], zero outside the mask.
    """

    logprob: Tensor
    hidden: Tensor
    mask: Tensor
    stats: LogitStats


def forward_pass(model: PreTrainedModel, rollouts: Rollouts, temperature: float) -> ForwardPass:
    """Score every completion token once, keeping the graph for the update.

    Prompts start at column 0 and padding is on the right, so that the model's own positions are
    cumsum(attention_mask) − 1 at every token, also in architectures that take no position ids.

    Args:
        model: The policy.
        rollouts: N rollouts.
        temperature: τ of the policy softmax(logits / τ).

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    device = model.device
    ids = torch.as_tensor(rollouts.input_ids, device=device)
    attention = torch.as_tensor(rollouts.attention_mask, device=device)
    columns = torch.as_tensor(rollouts.completion_columns(), device=device)
    mask = torch.as_tensor(rollouts.mask, device=device).gather(1, columns) & torch.as_tensor(
        rollouts.present(), device=device
    )
    with _output_input(model) as seen:
        logits = model(
            input_ids=ids,
            attention_mask=attention.long(),
            use_cache=False,
        ).logits
    before = (columns - 1).clamp(min=0)[..., None]
    logits = logits.gather(1, before.expand(-1, -1, logits.shape[-1]))
    hidden = seen[0].detach().gather(1, before.expand(-1, -1, seen[0].shape[-1]))
    _refuse_non_finite(logits, mask)
    targets = ids.gather(1, columns)
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprob = scaled.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return ForwardPass(logprob, hidden, mask, _stats(logits.detach(), hidden, targets, mask, temperature))


def _refuse_non_finite(logits: Tensor, mask: Tensor) -> None:
    bad = mask & ~logits.detach().isfinite().all(-1)
    if bool(bad.any()):
        n, t = bad.nonzero()[0].tolist()
        raise NonFiniteError(
            f"logits are not finite at rollout {n}, token {t}; "
            "lower the learning rate or go back to an earlier checkpoint."
        )


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
