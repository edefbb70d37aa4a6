"""The one place where log-probabilities are shifted: the logits at index t − 1 predict token t."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import layer_by_layer
from otb_analysis.gradients.batch.layout import Layout, padded
from otb_analysis.gradients.batch.scope import end_of, layer_input
from otb_analysis.gradients.batch.soft import SoftTokens, drawn_logprobs, soft_inputs

BLOCK = 32
"""Tokens whose rows of the output layer are widened to float64 at a time."""


def sampled_logprobs(batch: ScoreBatch, rollouts: tuple[Rollout, ...], layout: Layout | None = None) -> Tensor:
    """Log-probabilities of every sampled token of some rollouts [Σ K], from one forward pass, with its graph.

    log π(y_t) = z_t[y_t] − lse(z_t), z_t = logits at index t − 1, divided by the temperature, in float32 or better.
    Each rollout is run up to the last token that a sampled one is predicted from. Of soft tokens it is the log-density.

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary of the output layer.
    """
    run = _run(batch, rollouts, layout)
    return drawn_logprobs(_cooled(run.z, batch.temperature), run.targets, batch.soft, batch.model)


def sampled_logits(batch: ScoreBatch, rollouts: tuple[Rollout, ...]) -> tuple[Tensor, Tensor]:
    """Logits z_t / τ [Σ K, V] behind `sampled_logprobs`, with their graph, and the sampled tokens y_t [Σ K]."""
    run = _run(batch, rollouts)
    return _cooled(run.z, batch.temperature), run.targets


def policy_logits(
    logits: Tensor, rollouts: tuple[Rollout, ...], temperature: float, soft: SoftTokens | None = None, first: int = 0
) -> Tensor:
    """Logits of the policy that sampled, z / τ in float32 or better, from the model's of all Σ K tokens or of a slice.

    Args:
        logits: [n, V], of the sampled tokens `first`, `first` + 1, ….

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary of the output layer.
    """
    z = _cooled(logits.to(torch.promote_types(logits.dtype, torch.float32)), temperature)
    # One NaN or infinity makes the sum so, which takes a fifth of the time; finite logits may overflow it, hence the
    # second look.
    if not z.detach().sum().isfinite() and (bad := ~z.detach().isfinite().all(-1)).any():
        row, column = [(r.row, c) for r in rollouts for c in r.columns][first + int(bad.nonzero()[0])]
        raise NonFiniteError(
            f"logits are not finite at rollout {row}, token {column}; check the model's weights for NaN or infinity, "
            "or load it in float32."
        )
    ids = torch.cat([r.ids[r.targets] for r in rollouts])
    ids = ids if soft is None else ids[~soft.among(ids)]
    if len(ids) and int(ids.max()) >= z.shape[-1]:
        raise InputError(
            f"input_ids holds the sampled token {int(ids.max())} but the output layer has {z.shape[-1]} entries; "
            "encode the text with this model's own tokenizer."
        )
    return z


@torch.no_grad()
def sharp_logprobs(batch: ScoreBatch, rollouts: tuple[Rollout, ...]) -> Tensor:
    """Log-probabilities [Σ K] as from `sampled_logprobs`, without a graph, in float64, nearly free of float32 rounding.

    A model whose logits are not what a linear output layer returned (scaled, soft-capped, adapted, quantised) keeps
    them as they are.
    """
    # When logits round, log π(y) moves by δz_y − Σ_v π_v δz_v: the logits of y and of the likeliest token matter most.
    # Those are taken again as float64 products of the output layer's weight with its own input, and exponentials are
    # summed in float64: rounding falls several times at the price of two rows of the product.
    with _watched(batch) as calls:
        run = _run(batch, rollouts)
    # The largest logit is taken off before exponentials, so that none overflows.
    peak, likeliest = run.z.max(-1, keepdim=True)
    columns = torch.cat([run.targets[:, None], likeliest], dim=-1)
    rough = run.z.gather(-1, columns).double()
    sharp = calls[-1].at(columns, run) if calls and calls[-1].made(run.logits) else rough
    # The sum is corrected where it matters: the term of the likeliest token is replaced by its sharper value.
    total = (run.z - peak).div_(batch.temperature).exp_().sum(-1, dtype=torch.float64)
    sharp, rough = ((x - peak) / batch.temperature for x in (sharp, rough))
    moved = sharp[:, 1:].exp() - rough[:, 1:].exp()
    return sharp[:, 0] - (total + moved.sum(-1)).log()


@dataclass(frozen=True)
class _Run:
    """One forward pass: logits as the model gave them, and at the sampled tokens."""

    logits: Tensor
    layout: Layout
    z: Tensor
    targets: Tensor


@dataclass(frozen=True)
class _OutputCall:
    """What the output layer was given and returned."""

    inputs: Tensor
    output: Tensor
    weight: Tensor
    bias: Tensor | None

    def made(self, logits: Tensor) -> bool:
        """Whether these logits are the layer's output, untouched."""
        return logits.data_ptr() == self.output.data_ptr() and logits.shape == self.output.shape

    def at(self, columns: Tensor, run: _Run) -> Tensor:
        """Logits of some vocabulary entries of every sampled token [Σ K, k] as float64 products."""
        hidden = run.layout.pick(self.inputs).double()
        # Some tokens at a time: the gathered rows of the weight are float64 copies.
        blocks = zip(columns.split(BLOCK), hidden.split(BLOCK), strict=True)  # of [BLOCK, k, d] each
        logits = torch.cat([(self.weight[c].double() * h[:, None]).sum(-1) for c, h in blocks])
        return logits if self.bias is None else logits + self.bias[columns].double()


@contextmanager
def _watched(batch: ScoreBatch) -> Iterator[list[_OutputCall]]:
    """Note every call of a plain linear output layer inside the block, with the weights it used."""
    calls: list[_OutputCall] = []
    head = end_of(batch.model, "output")
    if type(head) is not nn.Linear:
        yield calls
        return

    def note(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        # In scope "lm_head" the layer is evaluated on the scope's leaves, not on its own tensors.
        used = [module.weight, module.bias] if batch.scope.head is None else [*batch.scope.parameters, module.bias]
        calls.append(_OutputCall(layer_input(args, kwargs), output, used[0], used[1]))

    with head.register_forward_hook(note, with_kwargs=True):
        yield calls


def _run(batch: ScoreBatch, rollouts: tuple[Rollout, ...], layout: Layout | None = None) -> _Run:
    layout = padded(rollouts) if layout is None else layout
    with batch.scope.active(), soft_inputs(batch.model, batch.soft), layer_by_layer(batch.model):
        logits = model_logits(batch.model, layout)
    # Temperature 1: `sharp_logprobs` corrects logits before they are divided.
    z = policy_logits(layout.pick(logits), rollouts, 1.0, batch.soft)
    targets = torch.cat([r.ids[r.targets] for r in rollouts])
    return _Run(logits, layout, z, targets)


def model_logits(model: nn.Module, layout: Layout) -> Tensor:
    """Logits without a key-value cache, at the kept positions only [n, |keep|, V] where the model can do that."""
    inputs = {"input_ids": layout.ids, "use_cache": False, **layout.inputs}
    replaced = vars(model).get("forward")
    # A method replaced on the object is not looked up in the cache, which would keep the object alive.
    if _takes_kept.__wrapped__(replaced) if replaced else _takes_kept(type(model).forward):
        return model(**inputs, logits_to_keep=layout.keep).logits
    return model(**inputs).logits


@lru_cache(maxsize=16)  # reading a signature takes longer than a small layer
def _takes_kept(forward: Callable[..., Any]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters


def _cooled(z: Tensor, temperature: float) -> Tensor:
    """Logits / τ, which at τ = 1 is no copy."""
    return z if temperature == 1 else z / temperature
