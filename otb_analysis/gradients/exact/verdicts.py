"""What is tried out on a model at its first use: a probe, compared with plain backward passes, and the verdict kept."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.devices import forms_products, products
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.batch.forward import model_logits, padded, sampled_logprobs
from otb_analysis.gradients.batch.inputs import Batch, Rollout, ScoreBatch, measured
from otb_analysis.gradients.batch.kernels import plain_kernels
from otb_analysis.gradients.batch.scope import Scope, end_of
from otb_analysis.gradients.exact.gram import flat_norm_sq
from otb_analysis.gradients.exact.layers import UnfitError

PROBE_LENGTH, PROBE_TARGETS = 12, (3, 5, 11)
"""The forward pass has 11 positions. Hardly a model has 11 heads, so the two axes cannot be mistaken."""
T = TypeVar("T")
_log = logging.getLogger(__name__)
_TOLD: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_KEYS: WeakKeyDictionary[Scope, tuple[object, ...]] = WeakKeyDictionary()
"""What a verdict depends on besides the identity of the model: layers, attention, dtypes, scope and zeros."""


@dataclass
class Verdicts(Generic[T]):
    """By model and scope, what was found at the first use, or the reason why the model does not fit."""

    # Weak keys: a verdict must not keep a model's weights alive.
    _known: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], T | UnfitError]] = field(
        default_factory=WeakKeyDictionary
    )

    def get(self, batch: ScoreBatch, find: Callable[[], T]) -> T:
        """Return what `find` found at the first use; raises `UnfitError` where it did, then and ever after."""
        known, model = self._known.setdefault(batch.model, {}), batch.model
        key = _KEYS.get(batch.scope)  # found once for each batch that was checked
        if key is None:
            # `forward` itself is part of the key, because a class may be patched after the first use.
            layers = tuple((name, type(m), type(m).forward, m.training) for name, m in model.named_modules())
            attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
            dtypes = tuple(p.dtype for p in model.parameters())
            # An adapter's B starts at zero, where A has no gradient that could be compared: once it has moved, the
            # model is tried out again. The first row tells, so that not all weights are read at every call.
            zeros = tuple(p.ndim > 1 and not p.detach()[0].any() for p in batch.scope.parameters)
            key = batch.scope.names, batch.scope.head is None, attention, dtypes, layers, zeros
            _KEYS[batch.scope] = key
        if key not in known:
            try:
                with products("float32"):  # coarser ones say nothing about an engine
                    known[key] = find()
            except UnfitError as reason:
                known[key] = UnfitError(str(reason))  # without the traceback, whose frames hold the model
            except NonFiniteError as error:
                # Not kept: it says nothing about the model's layers, and its place is the probe's, not the caller's.
                raise UnfitError(
                    "logits are not finite on a probe of the vocabulary; check the model's weights for NaN or "
                    'infinity, or pass engine="reference".'
                ) from error
        value = known[key]
        if isinstance(value, UnfitError):
            raise UnfitError(str(value))
        return value


def first_told(model: nn.Module, sentence: str) -> bool:
    """Whether a sentence about a model is new, so that it is logged once."""
    told = _TOLD.setdefault(model, set())
    new = sentence not in told
    told.add(sentence)
    return new


def fits_or_told(batch: ScoreBatch, find: Callable[[ScoreBatch], object], what: str, level: int) -> bool:
    """Whether a model fits; one that does not is logged once, as `what` with the reason."""
    try:
        find(batch)
    except UnfitError as reason:
        sentence = f"{type(batch.model).__name__} is {what}: {reason}"
        if first_told(batch.model, sentence):
            _log.log(level, sentence)
        return False
    return True


def probe(batch: ScoreBatch) -> Rollout:
    """A short random text over the model's vocabulary with three sampled tokens."""
    size = getattr(end_of(batch.model, "input"), "num_embeddings", None)
    known = torch.cat([r.ids for r in batch.rollouts]).unique()
    pool = known.cpu() if size is None else torch.arange(size, device="cpu")
    # A generator of its own: a measurement must not move torch's random state, from which rollouts are drawn.
    order = torch.randint(len(pool), (PROBE_LENGTH,), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    targets = torch.tensor(PROBE_TARGETS, device=known.device)
    return Rollout(0, pool[order].to(known.device), targets, np.array(PROBE_TARGETS))


@torch.enable_grad()
def graph_bytes(batch: ScoreBatch) -> int:
    """What the graph of a forward pass keeps per position, seen on a probe; weights are not counted.

    What grows with the square of the length, as the plain kernel of attention does, is as small as the probe.
    """
    # One tensor is often kept by several operations. Kept alive, so that no two have the same address.
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with plain_kernels(batch.model), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model_logits(batch.model, padded((probe(batch),)))
    weights = {t.untyped_storage().data_ptr() for t in (*batch.model.parameters(), *batch.model.buffers())}
    del logits
    return sum(len(x) for pointer, x in kept.items() if pointer not in weights) // (PROBE_LENGTH - 1)


@torch.enable_grad()
def reference_norms(batch: ScoreBatch, rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities [K] by the model's own kernels, and ‖s_t‖² [K] of each parameter by plain backward passes."""
    values = sampled_logprobs(batch, (rollout,))
    norms = torch.zeros(len(batch.scope.names), len(values), dtype=torch.float64, device=values.device)
    for k, value in enumerate(values):
        grads = torch.autograd.grad(value, batch.scope.parameters, retain_graph=True, materialize_grads=True)
        norms[:, k] = torch.cat([flat_norm_sq(g.flatten()[None]) for g in grads])
        del grads  # before the next ones are formed: each is as large as the model
    return values.detach().double(), dict(zip(batch.scope.names, norms, strict=True))


def refuse_difference(
    batch: ScoreBatch, how: str, remedy: str, measure: Callable[[Rollout], tuple[Tensor, dict[str, Tensor]]]
) -> None:
    """Raise where a probe's log-probabilities [K] or, by parameter, its norms [K] are not the reference ones."""
    rollout = probe(batch)
    logprob, parts = measure(rollout)
    expected, norms = reference_norms(batch, rollout)
    off = float((logprob.detach().double() - expected).abs().max())
    # `not ≤` instead of `>`: a NaN must fail as well.
    if not off <= 1e-4:
        raise UnfitError(f"log-probabilities {how} are {off:.2g} nats from the model's own; {remedy}.")
    if reason := disagreement(parts, norms):
        raise UnfitError(f"{reason}; {remedy}.")


def disagreement(parts: dict[str, Tensor], norms: dict[str, Tensor]) -> str | None:
    """The first parameter whose ‖s_t‖² on a probe are not the reference ones, in a clause; None where all agree."""
    # A parameter with a tiny share of the norm is mostly rounding, so part of the tolerance is a share of the total.
    total = sum(norms.values())
    for name, norm in norms.items():
        got = parts.get(name, torch.zeros_like(norm))
        if ((got - norm).abs() > 1e-3 * norm + 1e-6 * total).any():
            return (
                f"parameter {name} has squared score norms {got.tolist()} on a probe where the reference gives "
                f"{norm.tolist()}"
            )
    return None


@torch.enable_grad()
def arithmetic(model: nn.Module, asked: str, scope: str = "all", temperature: float = 1.0) -> tuple[str, str]:
    """Return how products are formed while a model is measured, as asked for or else float32, and why.

    Plain backward passes with `asked` products must give the probe's log-probabilities within 1e-4 nats, and ‖s_t‖² of
    every parameter within 1e-3 of those with float32 products: what an engine must do to be used (`verdicts`).

    Raises:
        InputError: PyTorch has no such products on the model's device, or the scope holds nothing.
    """
    device = next(model.parameters()).device
    if asked == "float32":
        return asked, ""
    if asked == "bfloat16" and device.type != "cpu":
        raise InputError(
            f"--precision is bfloat16, but products of float32 numbers have no such form on {device.type} in PyTorch; "
            "pass tf32."
        )
    if not forms_products(device, asked):
        return "float32", f"PyTorch forms no {asked} products of float32 numbers on this {device.type}"

    def measure(rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        with products(asked):
            return reference_norms(batch, rollout)

    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    checked = measured(model, Batch(ids, torch.tensor([[False, True]], device=device)), scope, temperature)
    try:
        with checked as batch, products("float32"):
            refuse_difference(batch, f"with {asked} products", "that is too coarse", measure)
    except UnfitError as reason:
        return "float32", str(reason).rstrip(".")
    return asked, "on a probe the norms of scores agree with those in float32 to 1e-3"
