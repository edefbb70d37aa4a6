"""What the generic engine must know about a model, found once by a probe and checked against the reference engine.

A token signals at its own position only in the layers above the last attention. Where those begin is not read from an
architecture but measured: three backward signals of a short random text show which layers they stay put in, and which
layer's input separates those from the rest.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import inner_layers
from otb_analysis.gradients.exact.hooks import Trace, own_rows, pull_back, traced
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
    rule_for,
)
from otb_analysis.gradients.exact.verdicts import probe

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
    graph: int = 0  # Bytes per position that the graph of a forward pass keeps

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module to watch in a forward pass."""
        cut = () if self.cut is None else (self.cut,)
        return tuple(dict.fromkeys([u.module for u in (*self.above, *self.below)] + [*cut]))

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
    for use in uses:
        if use.module in trace.repeated or use.module not in trace.outputs:
            often = "more than once" if use.module in trace.repeated else "not by a plain call"
            raise UnfitError(f"the layer of parameter {use.parameter} is used {often} in one forward pass; {ELSEWHERE}")
    return _split(tuple(_placed(use, trace, rollout) for use in uses), trace, rollout)


def _placed(use: ParameterUse, trace: Trace, rollout: Rollout) -> ParameterUse:
    """The use with the rule for its layout: positions on the second axis, or behind the heads on the third.

    A layer that has them on neither has no rule.
    """
    inputs, output = trace.inputs[use.module], trace.outputs[use.module]
    if use.rule is INNER_VECTOR:
        return use
    headed = inputs.ndim == 4 and inputs.shape[0] == 1 and inputs.shape[:3] == output.shape[:3]
    if headed and (use.rule is SCALE or (use.rule is MATRIX and inputs.shape[1] == 1)):
        on_second, on_third = (size == rollout.length for size in inputs.shape[1:3])
        if on_third and not on_second:
            return replace(use, rule=HEADED_SCALE if use.rule is SCALE else HEADED_MATRIX)
        if on_third:
            raise UnfitError(
                f"parameter {use.parameter} is applied to shape {tuple(inputs.shape)}, where heads and positions "
                f"cannot be told apart; {ELSEWHERE}"
            )
    rows = (rollout.length, len(rollout.targets))
    kept = all(x.ndim >= 2 and x.shape[0] == 1 and x.shape[1] in rows for x in (inputs, output))
    if not kept or output.ndim < 3 or (use.rule is MATRIX and inputs.ndim != 3):
        raise UnfitError(
            f"parameter {use.parameter} is applied to shape {tuple(inputs.shape)} where one row per position was "
            f"expected; {ELSEWHERE}"
        )
    return use


def _uses(batch: ScoreBatch) -> tuple[ParameterUse, ...]:
    scope, uses = batch.scope, []
    if scope.head is not None:
        module = next(name for name, m in batch.model.named_modules() if m is scope.head)
        return tuple(_use(name, module, scope.head, name.rpartition(".")[2]) for name in scope.names)
    names = {id(p): name for name, p in zip(scope.names, scope.parameters, strict=True)}
    for module_name, module in batch.model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in names:
                uses.append(_use(names[id(parameter)], module_name, module, leaf))
    for name in names.values():
        rules = [u.rule for u in uses if u.parameter == name]
        if len(rules) != 1 and rules not in ([EMBEDDING, MATRIX], [MATRIX, EMBEDDING]):
            raise UnfitError(
                f"parameter {name} is shared by {len(rules)} layers in a way that has no rule; {ELSEWHERE}"
            )
    return tuple(uses)


def _use(parameter: str, module_name: str, module: nn.Module, leaf: str) -> ParameterUse:
    # What hides inside of a module is applied by a layer that is called after its matrix.
    inner, matrix = inner_layers(module), leaf.removesuffix("_bias").replace("bias", "weight")
    if matrix in inner:
        module_name, module, leaf = f"{module_name}.{matrix}", inner[matrix], "bias" if "bias" in leaf else "weight"
    rule = rule_for(module, leaf)
    if rule is None:
        raise UnfitError(
            f"parameter {parameter} of a {type(module).__name__} has no rule in the generic engine; {ELSEWHERE}"
        )
    return ParameterUse(parameter, module_name, rule)


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
            if all(_close(c, d) for c, d in zip(chained, direct.values(), strict=True)):
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


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= 1e-3 * float(b.abs().max())
