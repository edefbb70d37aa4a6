"""What the generic engine must know about a model, found once by a probe and checked against the reference engine.

A token signals at its own position only in the layers above the last attention. Where those begin is not read from an
architecture but measured: three backward signals of a short random text show which layers they stay put in, and which
layer's input separates those from the rest.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import (
    Experts,
    InnerMatrix,
    SummedExperts,
    inner_layers,
    layers_of,
    plain_kernels,
)
from otb_analysis.gradients.batch.scope import layer_input
from otb_analysis.gradients.exact.attention import many_signals
from otb_analysis.gradients.exact.layers import (
    BELOW_ONLY,
    EMBEDDING,
    HEADED_MATRIX,
    HEADED_SCALE,
    INNER_VECTOR,
    MATRIX,
    SCALE,
    Rule,
    UnfitError,
    pull_back,
    rule_for,
)
from otb_analysis.gradients.exact.verdicts import probe


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


ELSEWHERE = 'pass engine="reference" or leave it out of scope.'


@dataclass(frozen=True)
class ParameterUse:
    """One parameter in one layer: its name in the scope, the module that applies it, and the rule."""

    parameter: str
    module: str
    rule: Rule


@dataclass(frozen=True)
class Plan:
    """How the scores of one model and scope are taken apart; it holds names, not the model."""

    above: tuple[ParameterUse, ...]  # Uses in layers where a token signals at its own position only
    below: tuple[ParameterUse, ...]  # Uses in all other layers
    cut: str | None  # Module whose input separates the two; None when nothing is below
    width: int  # Numbers per position that one backward signal has at the widest layer below
    widths: int = 0  # The same of all layers below together

    @property
    def tied(self) -> dict[str, ParameterUse]:
        """By parameter, the use above of a matrix that is also an embedding below."""
        embeddings = {u.parameter for u in self.below if u.rule is EMBEDDING}
        return {u.parameter: u for u in self.above if u.parameter in embeddings}


def find_plan(batch: ScoreBatch) -> Plan:
    """Find how to decompose the scores of a model.

    Raises:
        UnfitError: A parameter in scope has no rule, or the engine has no rule for something in the model.
    """
    uses = _uses(batch)
    rollout = probe(batch)
    leaves = [name for name, module in batch.model.named_modules() if next(module.children(), None) is None]
    watched = dict.fromkeys([u.module for u in uses] + leaves)
    trace = traced(batch, (rollout,), watched)
    placed = list[ParameterUse]()
    for use in uses:
        if use.module in trace.repeated or use.module not in trace.outputs:
            often = "more than once" if use.module in trace.repeated else "not by a plain call"
            raise UnfitError(f"the layer of parameter {use.parameter} is used {often} in one forward pass; {ELSEWHERE}")
        inputs, output = trace.inputs[use.module], trace.outputs[use.module]
        # Positions may be on the third axis, behind the heads; a layer that has them on neither has no rule.
        headed = inputs.ndim == 4 and inputs.shape[0] == 1 and inputs.shape[:3] == output.shape[:3]
        headed = headed and (use.rule is SCALE or (use.rule is MATRIX and inputs.shape[1] == 1))
        if headed and inputs.shape[2] == rollout.length:
            if inputs.shape[1] == rollout.length:
                raise UnfitError(
                    f"parameter {use.parameter} is applied to shape {tuple(inputs.shape)}, where heads and positions "
                    f"cannot be told apart; {ELSEWHERE}"
                )
            placed.append(replace(use, rule=HEADED_SCALE if use.rule is SCALE else HEADED_MATRIX))
            continue
        rows = (rollout.length, len(rollout.targets))
        kept = all(x.ndim >= 2 and x.shape[0] == 1 and x.shape[1] in rows for x in (inputs, output))
        odd = not kept or output.ndim < 3 or (use.rule is MATRIX and inputs.ndim != 3)
        if odd and use.rule is not INNER_VECTOR:
            raise UnfitError(
                f"parameter {use.parameter} is applied to shape {tuple(inputs.shape)} where one row per position was "
                f"expected; {ELSEWHERE}"
            )
        placed.append(use)
    return _split(tuple(placed), trace, rollout)


def _uses(batch: ScoreBatch) -> tuple[ParameterUse, ...]:
    scope, uses = batch.scope, list[ParameterUse]()
    if scope.head is not None:
        place = next(name for name, m in batch.model.named_modules() if m is scope.head)
        leaves = [(name, place, scope.head, name.rpartition(".")[2]) for name in scope.names]
    else:
        names = {id(p): name for name, p in zip(scope.names, scope.parameters, strict=True)}
        leaves = [
            (names[id(p)], place, module, leaf)
            for place, module in batch.model.named_modules()
            for leaf, p in module.named_parameters(recurse=False)
            if id(p) in names
        ]
    for parameter, place, module, leaf in leaves:
        # What hides inside of a module is applied by a layer that is called after its matrix.
        inner, matrix = inner_layers(module), leaf.removesuffix("_bias").replace("bias", "weight")
        if matrix in inner:
            place, module, leaf = f"{place}.{matrix}", inner[matrix], "bias" if "bias" in leaf else "weight"
        rule = rule_for(module, leaf)
        if rule is None:
            raise UnfitError(
                f"parameter {parameter} of a {type(module).__name__} has no rule in the generic engine; {ELSEWHERE}"
            )
        uses.append(ParameterUse(parameter, place, rule))
    for name in scope.names:
        rules = [u.rule for u in uses if u.parameter == name]
        if len(rules) != 1 and rules not in ([EMBEDDING, MATRIX], [MATRIX, EMBEDDING]):
            raise UnfitError(
                f"parameter {name} is shared by {len(rules)} layers in a way that has no rule; {ELSEWHERE}"
            )
    return tuple(uses)


def _split(uses: tuple[ParameterUse, ...], trace: Trace, rollout: Rollout) -> Plan:
    """Find out which uses are above, and the first layer whose input carries everything that reaches those below."""
    modules = list(dict.fromkeys(u.module for u in uses))
    inputs = {n: x for n, x in trace.inputs.items() if x.requires_grad and n not in trace.repeated}
    # One signal per token, to see whose signal is where.
    seeds = torch.eye(len(trace.logprob), device=trace.logprob.device).to(trace.logprob)
    outputs = [trace.outputs[n] for n in modules]
    signals = pull_back(trace.logprob, [*outputs, *inputs.values()], seeds)
    at_output = dict(zip(modules, signals, strict=False))
    at_input = dict(zip(inputs, signals[len(modules) :], strict=True))
    above = {u for u in uses if u.rule not in BELOW_ONLY and _stays(at_output[u.module], rollout)}
    below = tuple(u for u in uses if u not in above)
    if not below:
        return Plan(uses, (), None, 0)
    if any(u.rule is MATRIX and u.parameter in {v.parameter for v in below if v is not u} for u in below):
        raise UnfitError('a tied matrix is not the last layer of the model; pass engine="reference".')
    direct = {u.module: at_output[u.module] for u in below}
    targets = [trace.outputs[n] for n in direct]
    for name, x in inputs.items():
        if _stays(at_input[name], rollout):
            # A cut carries everything: what goes down from it alone must be what came down by all ways.
            chained = pull_back(x, targets, at_input[name])
            pairs = zip(chained, direct.values(), strict=True)
            if all(float((c - d).abs().max()) <= 1e-3 * float(d.abs().max()) for c, d in pairs):
                break
    else:
        raise UnfitError(
            'no layer of the model separates its last attention from what follows; pass engine="reference".'
        )
    # Where no signal comes back at all, nothing shows whether it would stay: an adapter's B starts at zero, and A then
    # has none. What runs behind the cut is above it. A pass that stops at the cut would not reach such a layer.
    ran = list(trace.outputs)
    behind = set(ran[ran.index(name) :])
    silent = {n for n, signal in direct.items() if not signal.any()}
    above |= {u for u in uses if u.module in behind & silent}
    below = tuple(u for u in uses if u not in above)
    reached = [direct[n] for n in {u.module for u in below}]
    widths = [math.prod(s.shape[3:]) * s.shape[2] // rollout.length for s in reached]
    cut = name if below else None
    return Plan(tuple(u for u in uses if u in above), below, cut, max(widths, default=0), sum(widths))


def _stays(signal: Tensor, rollout: Rollout) -> bool:
    """Whether signal k of [K, 1, n, ...] is zero everywhere but at the position that predicts token k."""
    if signal.ndim < 3 or signal.shape[1] != 1 or signal.shape[2] not in (rollout.length, len(rollout.targets)):
        return False
    rest = signal[:, 0].clone()
    rest[torch.arange(len(rest), device=rest.device), own_rows(signal[0], rollout)] = 0
    return not rest.any() and bool(signal.any())
