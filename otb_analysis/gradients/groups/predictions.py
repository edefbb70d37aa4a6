"""Log-probabilities of many tokens, and their gradients at the output layer's input, without all logits at once.

The logits of 8 rollouts of 8,192 tokens over 152,000 entries are 37 GiB in float32, and a backward pass for every row
of weights would go through the output layer each time. Here it is run on a slice of the tokens, and its gradients are
taken there and then: a row of weights w pulls w_k ∂log π(y_k)/∂h_k back from the inputs h.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import model_logits, policy_logits
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.layout import Layout
from otb_analysis.gradients.batch.scope import end_of, layer_input
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups.vocabulary import CHECKED, agree

SLICE_BYTES, LOGIT_BYTES = 1 << 28, 16
"""What a slice of the tokens may occupy, and what a logit does: in float32, and what becomes of it on the way back."""


@dataclass(frozen=True)
class Predictions:
    """Sampled tokens of a pass, and where the signals of rows of weights begin."""

    logprob: Tensor  # log π(y_k) in nats [K]
    output: Tensor  # With its graph [K, ...]: the output layer's input, or log π itself
    slope: Tensor | None  # ∂log π(y_k)/∂output_k [K, ...]; None where it is 1

    def signal(self, row: Tensor) -> Tensor:
        """Return the gradient of Σ_k row_k log π(y_k) at `output`."""
        return row if self.slope is None else row.to(self.slope)[:, None] * self.slope


def plain_head(batch: ScoreBatch) -> nn.Linear | None:
    """Return the output layer where it is a linear one that can be run by itself, with no bias to differentiate by."""
    head = end_of(batch.model, "output")
    if batch.soft is not None or batch.scope.head is not None or type(head) is not nn.Linear:
        return None
    return None if any(head.bias is one for one in batch.scope.tensors) else head


def predictions(
    batch: ScoreBatch, rollouts: tuple[Rollout, ...], layout: Layout, head: nn.Linear
) -> Predictions | None:
    """Run some rollouts forward, the output layer in slices; None where the model does more to its logits.

    Raises:
        NonFiniteError: A logit is NaN or infinite.
        InputError: A sampled token lies outside the vocabulary.
        UnfitError: The output layer does not run once on every position.
    """
    inputs, outputs = list[Tensor](), list[Tensor]()

    def few(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        inputs.append(hidden := layer_input(args, kwargs))
        return (layout.pick(hidden)[None, :CHECKED],), {}

    def note(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        outputs.append(output)

    with head.register_forward_pre_hook(few, with_kwargs=True), head.register_forward_hook(note):
        own = model_logits(batch.model, layout)
    if len(inputs) != 1 or inputs[0].ndim != 3:
        raise UnfitError("its output layer does not run once on every position")
    hidden = layout.pick(inputs[0])
    targets = torch.cat([r.ids[r.targets] for r in rollouts])
    slope, logprob = torch.empty_like(hidden), list[Tensor]()
    size = max(1, SLICE_BYTES // (LOGIT_BYTES * len(head.weight)))
    for start in range(0, len(targets), size):
        leaf = hidden[start : start + size].detach().requires_grad_()
        with torch.enable_grad():
            z = policy_logits(head(leaf), rollouts, batch.temperature, first=start)
            values = z.log_softmax(-1).gather(-1, targets[start : start + size, None])[:, 0]
        (slope[start : start + size],) = torch.autograd.grad(values.sum(), leaf)
        logprob.append(values.detach())
    found = torch.cat(logprob)
    # A cap hardly changes small logits, but their slopes: what the layer returned must be what the model returns.
    untouched = own.data_ptr() == outputs[0].data_ptr() and own.shape == outputs[0].shape
    if not untouched or not agree(own[0], targets, found, batch.temperature):
        return None
    return Predictions(found, hidden, slope)
