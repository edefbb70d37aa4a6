"""Forward passes that remember what went into and came out of chosen layers, and the signals that come back to them."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import Experts, InnerMatrix, SummedExperts, layers_of, plain_kernels
from otb_analysis.gradients.batch.scope import layer_input
from otb_analysis.gradients.exact.attention import many_signals
from otb_analysis.gradients.exact.layers import UnfitError, rule_for


@dataclass
class Trace:
    """One forward pass with its graph: the log-probabilities [K] and, by module name, what the layers saw and gave.

    The modules appear in the order in which they ran; `repeated` are those that ran more than once.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    logprob: Tensor = field(default_factory=lambda: torch.zeros(0))


class ReachedCut(Exception):
    """Raised by a hook once a forward pass has come as far as it must; what follows is not run."""


Tap = Callable[[str, Tensor, Tensor], Tensor]
"""(module's name, input, output) → what stands in place of the output."""


def traced(
    batch: ScoreBatch,
    rollouts: tuple[Rollout, ...],
    names: Iterable[str],
    cut: str | None = None,
    tap: Tap | None = None,
) -> Trace:
    """Run rollouts up to their last sampled tokens while watching some modules, or handing what they see to `tap`.

    They run by plain kernels, a single one with attention whose backward pass takes many signals at once. With `cut`
    the pass stops at the input of that layer, so there are no log-probabilities.

    Raises:
        UnfitError: A layer does not work on one row per rollout.
    """
    modules, trace = layers_of(batch.model), Trace()
    shape = len(rollouts), max(r.length for r in rollouts)
    inner = replace(batch, scope=replace(batch.scope, head=None))

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = layer_input(args, kwargs)
        trace.inputs[str(cut)] = inputs.unflatten(0, shape) if _flattened(module, inputs, shape) else inputs
        raise ReachedCut

    with ExitStack() as context:
        context.enter_context(suppress(ReachedCut))
        context.enter_context(plain_kernels(batch.model))
        if cut is not None:
            context.enter_context(modules[cut].register_forward_pre_hook(stop, with_kwargs=True))
        # The scope's own hook comes first, so that a layer is seen with the leaves it is differentiated by.
        context.enter_context(batch.scope.active())
        for name in dict.fromkeys(names):
            watch = _watch(name, shape, trace, tap)
            context.enter_context(modules[name].register_forward_hook(watch, with_kwargs=True))
        if len(rollouts) == 1:
            # The fused attention kernels have no rule for many signals at once.
            context.enter_context(many_signals(rollouts[0].length))
        trace.logprob = sampled_logprobs(inner, rollouts)
    return trace


def _watch(name: str, shape: tuple[int, int], trace: Trace, tap: Tap | None) -> Callable[..., Any]:
    """A hook that remembers a layer's input and output, with one row per rollout, or hands them to `tap`.

    `shape` is that of the pass, rollouts and positions. A layer on flattened positions is seen with them unflattened.
    """
    rows = shape[0]

    def observed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # A layer that runs twice has two signals; which of them a rule saw would be chance.
        if name in trace.outputs:
            trace.repeated.add(name)
        inputs = next(iter((*args, *kwargs.values())), None)
        if not (isinstance(inputs, Tensor) and isinstance(output, Tensor)):
            return output
        if _flattened(module, inputs, shape):
            x, y = inputs.unflatten(0, shape), output.unflatten(0, shape)
            return observed(module, (x,), kwargs, y).flatten(0, 1)
        if type(module).__name__.endswith("LearnedPositionalEmbedding"):
            inputs = output.detach()  # positions are read, whatever the arguments are
        if rows > 1 and (inputs.shape[0] not in (1, rows) or output.shape[0] != inputs.shape[0]):
            raise UnfitError(
                f"layer {name} works on shape {tuple(inputs.shape)} where {rows} rollouts were expected; "
                'pass engine="reference".'
            )
        if type(module).__name__ == "DoraLinearLayer":
            # Its output is m∘u − base, so ∂output/∂m is u = (output + base)/m.
            bias = kwargs["base_layer"].bias
            base = kwargs["base_result"] if bias is None else kwargs["base_result"] - bias
            inputs = (output + base) / module.weight
        # A layer that runs once for all rows, such as a table of positions, is spread over them: through the shared
        # output the signals of all rows would add up.
        if inputs.shape[:1] == (1,) and rows > 1:
            inputs, output = (x.expand(rows, *x.shape[1:]) for x in (inputs, output))
        if tap is not None:
            return tap(name, inputs, output)
        trace.inputs[name], trace.outputs[name] = inputs, output
        return output

    return observed


def _flattened(module: nn.Module, x: object, shape: tuple[int, int]) -> bool:
    """Whether a layer that works on any number of leading axes is given rollouts and positions as one."""
    if not isinstance(x, Tensor) or x.ndim != (3 if isinstance(module, SummedExperts) else 2):
        return False
    if len(x) != shape[0] * shape[1] or not x.is_floating_point():
        return False
    return isinstance(module, InnerMatrix | Experts) or any(rule_for(module, leaf) for leaf in module._parameters)


def pull_back(source: Tensor, targets: list[Tensor], seeds: Tensor) -> tuple[Tensor, ...]:
    """Backward signals at `targets` for many seeds at `source`: seeds [C, *source] → one [C, *target] per target.

    Raises:
        UnfitError: An operation of the model has no rule for many signals at once.
    """

    def one(seed: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(source, targets, seed, retain_graph=True, materialize_grads=True)

    # Not `is_grads_batched`, which is an older vmap whose results are wrong where a hook looks at them.
    try:
        return vmap(one)(seeds)
    except torch.OutOfMemoryError:  # a RuntimeError too, but no fault of the model's
        raise
    except RuntimeError as error:  # how torch says that an operation cannot be batched
        why = str(error).split(". ")[0].splitlines()[0]
        raise UnfitError(
            f'the model has an operation without a batched backward pass ({why}); pass engine="reference".'
        ) from error


def own_rows(tensor: Tensor, rollout: Rollout) -> Tensor:
    """Rows of a layer's input or output [1, n, ...] at the positions that predict the sampled tokens.

    A layer runs on the whole prefix or, like the output layer, on the kept positions only.
    """
    # If both are equal every position is kept, and either index is right.
    length, kept = rollout.length, len(rollout.targets)
    if tensor.ndim < 2 or tensor.shape[0] != 1 or tensor.shape[1] not in (length, kept):
        raise UnfitError(
            f"a layer works on shape {tuple(tensor.shape)} where [1, {length}, ...] was expected; "
            'pass engine="reference".'
        )
    positions = rollout.targets - 1
    return positions if tensor.shape[1] == length else torch.arange(kept, device=positions.device)
