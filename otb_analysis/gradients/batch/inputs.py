"""Checks at the door: the memory, the model, and the padding-free view of a batch from which every engine starts."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from otb_analysis.devices import GRAPH, NO_FLOAT64, working_set
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.batch.kernels import plain_attention, replaced, unwrapped
from otb_analysis.gradients.batch.scope import Scope, end_of, select_scope
from otb_analysis.gradients.batch.soft import SoftTokens, embeddings_of
from otb_analysis.processes import Processes
from otb_analysis.types import Bool, Float, Int

_LIMIT, _USED = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))


def memory_bytes(device: torch.device) -> int:
    """All memory of a device, or of this machine, of which processes of one run have equal parts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return psutil.virtual_memory().total // _local_processes()
    except OSError:  # /proc is closed
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _local_processes()


def _local_processes() -> int:
    """How many processes of this run are on this machine, as whoever launched them says."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on a device, or on this machine within the limit of its container.

    Processes of one run on a machine share its memory in equal parts.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = memory_bytes(device) * _local_processes()
    with suppress(OSError):
        free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # a system without such files, or "max", where there is no limit
        free = min(free, int(_LIMIT.read_text()) - int(_USED.read_text()))
    return free // _local_processes()


def gibibytes(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.3g} GiB"


def refuse_more_than_fit(name: str, count: int, each: int, device: torch.device) -> None:
    """Raise where `count` things of `each` bytes exceed the memory; the sentence says how many fit."""
    fit = memory_bytes(device) // each
    if count > fit:
        raise InputError(
            f"{name} is {count} but the memory of this machine holds {fit} of them ({each:,} bytes each); "
            f"pass at most {fit}."
        )


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
            is not positive, soft tokens are of another model's embeddings, or nothing trainable is in scope.
    """
    if not (np.isfinite(temperature) and temperature > 0):
        raise InputError(f"temperature is {temperature}; pass a positive number, 1.0 for the model's own distribution.")
    model = unwrapped(model)
    _check_model(model, sharded=sharded)
    device, rollouts = next(model.parameters()).device, list[Rollout]()
    ids, mask, real = _aligned(batch)
    if soft is not None:
        size, width = embeddings_of(model).weight.shape
        if (size, width) != (soft.first, soft.vectors.shape[-1]):
            raise InputError(
                f"soft tokens are of {soft.first} embeddings of size {soft.vectors.shape[-1]} but the model has {size} "
                f"of size {width}; pass the model that drew them."
            )
        if not 0 < soft.sigma < np.inf:
            raise InputError(f"soft tokens have σ = {soft.sigma}, where they have no density; pass a positive number.")
    for row in mask.any(-1).nonzero()[:, 0].tolist():
        kept = real[row].nonzero()[:, 0]
        targets = mask[row, kept].nonzero()[:, 0]
        columns = kept[targets].numpy().astype(np.int64)
        rollouts.append(Rollout(row, ids[row, kept].long().to(device), targets.to(device), columns))
    if rollouts:
        _check_texts(model, rollouts, soft)
    chosen, shape = select_scope(model, scope), (ids.shape[0], ids.shape[1])
    return ScoreBatch(model, tuple(rollouts), shape, mask.numpy(), chosen, float(temperature), soft)


def _check_model(model: nn.Module, *, sharded: bool) -> None:
    """Raise where a parameter has no gradient here, or dropout is active, under which log-probabilities are random."""
    for name, p in model.named_parameters():
        if p.is_meta and type(p.detach()) is Tensor:  # a subclass may say so and hold numbers
            raise InputError(
                f"parameter {name!r} is on the meta device, where it has no values: the model was never loaded, or "
                "this part of it is offloaded; load it whole onto one device."
            )
        if isinstance(p, DTensor) and not sharded:
            raise InputError(
                f"parameter {name!r} is sharded, and this process holds only a part of it; gather the model, or use "
                "gradient_sketch, which adds shards up."
            )
        if p.is_inference():
            raise InputError(
                f"parameter {name!r} was made inside torch.inference_mode, so it has no gradient; "
                "load the model outside of it."
            )
    for name, module in model.named_modules():
        rates = {"p": module.p} if isinstance(module, nn.modules.dropout._DropoutNd) else vars(module)
        for attribute, rate in rates.items() if module.training else ():
            if (attribute == "p" or "dropout" in attribute) and isinstance(rate, float) and rate > 0:
                raise InputError(
                    f"model is in training mode with dropout {rate:g} at {name or 'its root'}, so its "
                    "log-probabilities are random; call model.eval() first."
                )
    device = next(model.parameters()).device
    if device.type in NO_FLOAT64:
        raise InputError(
            f"the model is on {device}, which has no float64, in which scores are summed; move it to the cpu."
        )


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


def _check_texts(model: nn.Module, rollouts: Sequence[Rollout], soft: SoftTokens | None) -> None:
    """Raise where a token is outside the vocabulary, or a text longer than the model has positions.

    A rotary embedding that looks at the text's length turns its first tokens too. Engines cut a text behind the token
    that they score, which changes nothing as long as no token looks ahead.
    """
    size = getattr(end_of(model, "input"), "num_embeddings", None) if soft is None else soft.first + len(soft.vectors)
    for rollout in rollouts:
        low, high = int(rollout.ids.min()), int(rollout.ids.max())
        if low < 0 or (size is not None and high >= size):
            raise InputError(
                f"input_ids of rollout {rollout.row} holds {low if low < 0 else high} but the model's vocabulary has "
                f"{size} entries; encode the text with this model's own tokenizer, and mark padding in attention_mask."
            )
    longest = max(rollouts, key=lambda r: len(r.ids))
    row, length = longest.row, len(longest.ids)
    for name, module in model.named_modules():
        types: Any = getattr(module, "rope_type", None)
        for layer, kind in types.items() if isinstance(types, Mapping) else ((None, types),):
            if not isinstance(kind, str) or ("dynamic" not in kind and kind != "longrope"):
                continue
            steady: Any = module
            options = steady.config.rope_parameters if layer is None else steady.config.rope_parameters[layer]
            stated = options.get("original_max_position_embeddings") if kind == "longrope" else None
            limit = int(stated or steady.original_max_seq_len)  # up to where the embedding stays put
            if length > limit:
                raise InputError(
                    f"rollout {row} has {length} tokens but beyond {limit} the {kind!r} rotary embedding {name} "
                    "depends on the length of the whole text, so that no token has a score of its own; "
                    f"pass at most {limit}."
                )
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Attention that is biased by distance reads no positions, whatever the configuration says.
    limit = None if getattr(config, "alibi", False) else getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length - 1:  # the last token is predicted and never read
        raise InputError(
            f"rollout {row} has {length} tokens but the model has {limit} positions, beyond which its "
            f"log-probabilities mean nothing; pass at most {limit + 1} tokens, or load the model with more positions "
            "(max_position_embeddings) if it was trained on them."
        )


def restricted(batch: ScoreBatch, mask: Bool) -> ScoreBatch:
    """The same rollouts in full length, with only some of the sampled tokens to be measured [N, L]."""
    rollouts = []
    for rollout in batch.rollouts:
        at = np.flatnonzero(mask[rollout.row, rollout.columns])
        if len(at):
            rollouts.append(replace(rollout, targets=rollout.targets[at], columns=rollout.columns[at]))
    return replace(batch, rollouts=tuple(rollouts), mask=mask)


def shared_out(batch: ScoreBatch, processes: Processes) -> ScoreBatch:
    """This process's part of a batch: some of its rollouts, equal in number up to one."""
    if processes.size == 1:
        return batch
    rows = processes.shard(np.array([r.row for r in batch.rollouts], dtype=np.int64))
    return restricted(batch, batch.mask & np.isin(np.arange(len(batch.mask)), rows)[:, None])


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


@contextmanager
def measured(
    model: nn.Module, batch: Batch, scope: str, temperature: float, soft: SoftTokens | None = None
) -> Iterator[ScoreBatch]:
    """Check a batch as `prepare` does; inside the block the model's weights are `widened`."""
    checked = prepare(model, batch, scope, temperature, soft=soft)
    with widened(checked.model) as copied:
        yield replace(checked, scope=select_scope(checked.model, scope)) if copied else checked


COPY = "otb_copy"
"""Attribute of a weight that `widened` put in another one's place."""


@contextmanager
def widened(model: nn.Module) -> Iterator[bool]:
    """Put float32 copies in place of all weights in bfloat16 and float16, 4 bytes each; tell whether there are any.

    Products in half precision leave norms that are off by percents. Inside the block the model's layers hold the
    copies, of a tied weight one, and attention is by a kernel that takes them; afterwards all is as it was. A block
    inside of another one copies nothing.

    Raises:
        InputError: The copies do not fit in memory.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            named = ((name, t) for name, t in held.items() if t is not None)
            places += [(held, name, t) for name, t in named if t.dtype in (torch.float16, torch.bfloat16)]
    narrow = {id(t): t for _, _, t in places}
    if not narrow:
        yield False
        return
    needed, device = 4 * sum(t.numel() for t in narrow.values()), next(iter(narrow.values())).device
    if needed > (free := free_bytes(device)):
        raise InputError(
            f"float32 copies of the weights in half precision take {gibibytes(needed)} but {gibibytes(free)} of "
            f"{gibibytes(memory_bytes(device))} are free; free some or measure on a machine with more memory."
        )
    # New tensors instead of new `.data`: what else holds the parameters, an optimizer say, never sees the copies.
    wide: dict[int, Tensor] = {}
    for key, t in narrow.items():
        copy = t.detach().float()
        wide[key] = nn.Parameter(copy, t.requires_grad) if isinstance(t, nn.Parameter) else copy
        setattr(wide[key], COPY, True)
    with ExitStack() as undo:
        for held, name, t in places:
            undo.enter_context(replaced(held, name, wide[id(t)]))
        undo.enter_context(plain_attention(model))
        yield True
