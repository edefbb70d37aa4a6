"""The one place where log-probabilities are shifted: the logits at index t − 1 predict token t."""

import inspect

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.inputs import Problem, Rollout


def sampled_logprobs(problem: Problem, rollouts: tuple[Rollout, ...]) -> Tensor:
    """Log-probabilities of every sampled token of some rollouts, from one forward pass, with its graph.

    log π(y_t) = z_t[y_t] − lse(z_t), z_t = logits at index t − 1, divided by the temperature, in float32 or better.
    Each rollout is run up to the last token that a sampled one is predicted from; several rollouts are padded on the
    right, where causal attention never looks, so that indices stay position ids.

    Args:
        problem: Model, scope and temperature.
        rollouts: Those to run together.

    Returns:
        One vector [Σ K] in the order of the rollouts and, within each, of its sampled tokens.

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary of the output layer.
    """
    keep = torch.cat([r.targets for r in rollouts]).unique() - 1
    prefixes = [r.ids[: int(r.targets[-1])] for r in rollouts]
    ids = pad_sequence(prefixes, batch_first=True)
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=ids.device)
    real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    with problem.scope.active():
        logits = _logits(problem.model, ids, None if bool(real.all()) else real.long(), keep)
    z = policy_logits(_at_targets(logits, keep, rollouts), rollouts, problem.temperature)
    targets = torch.cat([r.ids[r.targets] for r in rollouts])
    return z.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def policy_logits(logits: Tensor, rollouts: tuple[Rollout, ...], temperature: float) -> Tensor:
    """Logits of the policy that sampled, z / τ in float32 or better [Σ K, V].

    Args:
        logits: The model's, at the positions that predict the sampled tokens of the rollouts [Σ K, V].
        rollouts: Those that the rows belong to.
        temperature: τ.

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary of the output layer.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    _refuse_non_finite(z, rollouts)
    _refuse_outside(torch.cat([r.ids[r.targets] for r in rollouts]), z.shape[-1])
    return z


def _logits(model: nn.Module, ids: Tensor, real: Tensor | None, keep: Tensor) -> Tensor:
    """Logits at the kept positions only [n, |keep|, V], without a key-value cache."""
    inputs = {"input_ids": ids, "use_cache": False} | ({} if real is None else {"attention_mask": real})
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(**inputs, logits_to_keep=keep).logits
    return model(**inputs).logits[:, keep]


def _at_targets(logits: Tensor, keep: Tensor, rollouts: tuple[Rollout, ...]) -> Tensor:
    if len(rollouts) == 1:
        return logits[0]
    rows = [n * len(keep) + torch.searchsorted(keep, r.targets - 1) for n, r in enumerate(rollouts)]
    return logits.flatten(0, 1).index_select(0, torch.cat(rows))


def _where(index: int, rollouts: tuple[Rollout, ...]) -> str:
    places = [(r.row, column) for r in rollouts for column in r.columns]
    return "rollout {}, token {}".format(*places[index])


def _refuse_non_finite(z: Tensor, rollouts: tuple[Rollout, ...]) -> None:
    bad = ~z.detach().isfinite().all(-1)
    if bad.any():
        raise NonFiniteError(
            f"logits are not finite at {_where(int(bad.nonzero()[0]), rollouts)}; "
            "check the model's weights for NaN or infinity, or load it in float32."
        )


def _refuse_outside(targets: Tensor, vocabulary: int) -> None:
    if int(targets.max()) >= vocabulary:
        raise InputError(
            f"input_ids holds the sampled token {int(targets.max())} but the output layer has {vocabulary} entries; "
            "encode the text with this model's own tokenizer."
        )
