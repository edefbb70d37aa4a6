"""Checks at the door, and the padding-free view of a batch from which every engine starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.devices import GRAPH, NO_FLOAT64, working_set
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.batch.kernels import unwrapped
from otb_analysis.gradients.batch.model_checks import refuse_dropout, refuse_lengths, refuse_parameters
from otb_analysis.gradients.batch.scope import Scope, end_of, select_scope
from otb_analysis.gradients.batch.soft import SoftTokens, check_soft
from otb_analysis.types import Bool, Float, Int

Weights = Tensor | np.ndarray

BATCH_POSITIONS = 1024
"""Padded positions of one forward pass over several rollouts, few enough for a small model to stay in a CPU's cache; a
longer rollout has a pass of its own."""


@dataclass(frozen=True)
class Batch:
    """What the caller passed, still padded."""

    input_ids: Tensor  # Token ids [N, L]; read only where `attention_mask` is true
    mask: Tensor  # True at the tokens the policy sampled [N, L]
    attention_mask: Tensor | None = None  # True at real tokens [N, L], or None when nothing is padding


@dataclass(frozen=True)
class Rollout:
    """One rollout with its padding stripped, so that a token's index is its position id, cumsum(attention_mask) − 1."""

    row: int  # Index n of the rollout in the batch
    ids: Tensor  # Its real tokens, on the model's device [ℓ]
    targets: Tensor  # Increasing indices into `ids` of the K sampled tokens, each ≥ 1, on the same device [K]
    columns: Int  # Columns of those tokens in the padded batch [K]

    @property
    def length(self) -> int:
        """Positions that a forward pass has: up to the last token that a sampled one is predicted from."""
        return int(self.targets[-1])

    def blocks(self, size: int, first: int = 0) -> Iterator["Rollout"]:
        """The same rollout with at most `size` consecutive sampled tokens at a time, from the `first` on."""
        for k in range(first, len(self.columns), size):
            yield replace(self, targets=self.targets[k : k + size], columns=self.columns[k : k + size])


@dataclass(frozen=True)
class ScoreBatch:
    """A checked batch and what to differentiate; made by `prepare`, read by every engine."""

    model: nn.Module  # The causal language model, left as it was found
    rollouts: tuple[Rollout, ...]  # Those rollouts that hold a sampled token
    shape: tuple[int, int]  # (N, L) of the padded batch
    mask: Bool  # True at sampled tokens [N, L]
    scope: Scope  # The parameters of the score
    temperature: float  # τ; the policy is softmax(logits / τ)
    soft: SoftTokens | None = None  # The vectors behind ids beyond the vocabulary, where there are any


def prepare(
    model: nn.Module,
    batch: Batch,
    scope: str,
    temperature: float,
    *,
    sharded: bool = False,
    soft: SoftTokens | None = None,
) -> ScoreBatch:
    """Check a batch against a model and strip padding and wrappers; `sharded` allows parameters that processes share.

    Raises:
        InputError: Parameters are shards, on the meta device or were made in inference mode, shapes disagree, a sampled
            token is padding or has nothing before it, a token id is outside the vocabulary, dropout is active, a
            rollout is longer than the model has positions or a rotary embedding depends on its length, the temperature
            is not positive, or nothing trainable is in scope.
    """
    if not (np.isfinite(temperature) and temperature > 0):
        raise InputError(f"temperature is {temperature}; pass a positive number, 1.0 for the model's own distribution.")
    model = unwrapped(model)
    refuse_parameters(model, sharded=sharded)
    refuse_dropout(model)
    device = next(model.parameters()).device
    if device.type in NO_FLOAT64:
        raise InputError(
            f"the model is on {device}, which has no float64, in which scores are summed; move it to the cpu."
        )
    ids, mask, real = _aligned(batch)
    rollouts = tuple(_strip(row, ids, mask, real, device) for row in range(len(ids)) if mask[row].any())
    if soft is not None:
        check_soft(soft, model)
    for rollout in rollouts:
        _check_vocabulary(model, rollout, soft)
    if rollouts:
        longest = max(rollouts, key=lambda r: len(r.ids))
        refuse_lengths(model, longest.row, len(longest.ids))
    shape = (ids.shape[0], ids.shape[1])
    return ScoreBatch(model, rollouts, shape, mask.numpy(), select_scope(model, scope), float(temperature), soft)


def restricted(batch: ScoreBatch, mask: Bool) -> ScoreBatch:
    """The same rollouts in full length, with only some of the sampled tokens to be measured [N, L]."""
    rollouts = []
    for rollout in batch.rollouts:
        at = np.flatnonzero(mask[rollout.row, rollout.columns])
        if len(at):
            rollouts.append(replace(rollout, targets=rollout.targets[at], columns=rollout.columns[at]))
    return replace(batch, rollouts=tuple(rollouts), mask=mask)


def microbatches(rollouts: Sequence[Rollout], positions: int | None = None) -> Iterator[tuple[Rollout, ...]]:
    """Cut rollouts into batches of at most so many padded positions, like lengths together; a longer one is alone.

    By default these are `BATCH_POSITIONS`, and on an accelerator `GRAPH` times as many.
    """
    batch: tuple[Rollout, ...] = ()
    # Longest first: the first rollout of a batch is then as long as its padded rows.
    for rollout in sorted(rollouts, key=lambda r: -r.length):
        most = positions or working_set(rollout.ids.device, BATCH_POSITIONS, GRAPH)
        if batch and (len(batch) + 1) * batch[0].length > most:
            yield batch
            batch = ()
        batch = (*batch, rollout)
    if batch:
        yield batch


def check_weight_row(weights: Weights, mask: Bool) -> Float:
    """Return one row of weights per rollout [N, L] as float64, zero outside the mask; raises as `check_weights`."""
    if tuple(weights.shape) != mask.shape:
        raise InputError(
            f"weights has shape {tuple(weights.shape)} but input_ids has shape {mask.shape}; "
            "pass one weight per token, shape [N, L]."
        )
    return check_weights(weights[:, None], mask)[:, 0]


def check_weights(weights: Weights, mask: Bool) -> Float:
    """Return weights [N, M, L] as float64 with zeros outside the mask, where they are never read.

    Raises:
        InputError: The shape does not fit the mask.
        NonFiniteError: A weight inside the mask is NaN or infinite.
    """
    array = weights.detach().cpu().double().numpy() if isinstance(weights, Tensor) else np.asarray(weights, np.float64)
    n, length = mask.shape
    if array.ndim != 3 or array.shape[0] != n or array.shape[2] != length:
        raise InputError(
            f"weights has shape {array.shape} but input_ids has shape {mask.shape}; "
            "pass one row of weights per estimator, shape [N, M, L]."
        )
    # `where`, not a product: NaN · 0 is NaN, and padding must never be read.
    array = np.where(mask[:, None, :], array, 0.0)
    if not np.isfinite(array).all():
        row, m, column = np.argwhere(~np.isfinite(array))[0]
        raise NonFiniteError(
            f"weights is {array[row, m, column]} at rollout {row}, row {m}, token {column}; "
            "pass finite weights wherever the mask is true."
        )
    return array


def check_group(group: Tensor | np.ndarray, n: int, name: str = "group") -> Int:
    """Return the group (or whatever `name` calls it) of each rollout as int64 [N]; raises on anything else."""
    array = group.detach().cpu().numpy() if isinstance(group, Tensor) else np.asarray(group)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise InputError(
            f"{name} has shape {array.shape} and dtype {array.dtype} but input_ids has {n} rollouts; "
            "pass one integer per rollout, shape [N]."
        )
    return array.astype(np.int64)


def _aligned(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    for name, value in vars(batch).items():
        if not isinstance(value, Tensor) and (value is not None or name != "attention_mask"):
            raise InputError(f"{name} is a {type(value).__name__}; pass a torch tensor, shape [N, L].")
    ids = batch.input_ids.detach().cpu()
    if ids.ndim != 2:
        raise InputError(f"input_ids has shape {tuple(ids.shape)}; pass one row per rollout, shape [N, L].")
    real = torch.ones_like(ids) if batch.attention_mask is None else batch.attention_mask.detach().cpu()
    mask = batch.mask.detach().cpu()
    for name, other in (("mask", mask), ("attention_mask", real)):
        if other.shape != ids.shape:
            raise InputError(
                f"{name} has shape {tuple(other.shape)} but input_ids has shape {tuple(ids.shape)}; "
                "pass one entry per token, shape [N, L]."
            )
    mask, real = mask.bool(), real.bool()
    for wrong, what in (
        (mask & ~real, "padding (its attention_mask is 0)"),
        (mask & (real.cumsum(-1) == 1), "the first token of its rollout, which nothing predicts"),
    ):
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise InputError(
                f"mask is true at rollout {row}, token {column}, but that is {what}; "
                "set mask only at tokens the policy sampled."
            )
    return ids, mask, real


def _strip(row: int, ids: Tensor, mask: Tensor, real: Tensor, device: torch.device) -> Rollout:
    kept = real[row].nonzero()[:, 0]
    targets = mask[row, kept].nonzero()[:, 0]
    columns = kept[targets].numpy().astype(np.int64)
    return Rollout(row, ids[row, kept].long().to(device), targets.to(device), columns)


def _check_vocabulary(model: nn.Module, rollout: Rollout, soft: SoftTokens | None) -> None:
    size = getattr(end_of(model, "input"), "num_embeddings", None)
    low, high = int(rollout.ids.min()), int(rollout.ids.max())
    if soft is not None:
        size = soft.first + len(soft.vectors)
    if low < 0 or (size is not None and high >= size):
        raise InputError(
            f"input_ids of rollout {rollout.row} holds {low if low < 0 else high} but the model's vocabulary has "
            f"{size} entries; encode the text with this model's own tokenizer, and mark padding in attention_mask."
        )
