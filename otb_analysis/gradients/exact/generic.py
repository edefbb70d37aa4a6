"""The exact engine for any causal language model whose layers have rules: hooks, batched signals, no weight gradients.

One forward and one ordinary backward pass of a rollout give each token's own signal at and above the *cut*, the input
of the first layer behind the last attention. From there the signals of several tokens go back together, on the prefix
that they see, to the outputs of the layers below, where ‖Aᵀδ‖ = ‖Rδ‖ replaces every weight gradient.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim

from otb_analysis.gradients.batch.forward import sampled_logits
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.kernels import layers_of, plain_kernels, replaced
from otb_analysis.gradients.batch.scope import layer_input, unreached
from otb_analysis.gradients.exact.gram import norm_sq, outer_norms, outer_row_norms, sum_of_squares
from otb_analysis.gradients.exact.layers import EMBEDDING, MATRIX, pull_back, wide
from otb_analysis.gradients.exact.plan import ELSEWHERE, ParameterUse, Plan, Trace, find_plan, own_rows, traced
from otb_analysis.gradients.exact.reference import Asked, Mix, Norms, graph_per_position, norms_of, pass_bytes
from otb_analysis.gradients.exact.verdicts import Verdicts, fits_or_told, refuse_difference

SIGNAL_BYTES = 1 << 27
"""What the signals of one block may occupy at the widest layer below the cut; longer rollouts get smaller blocks."""
TOGETHER_BYTES = 1 << 20
"""What one signal may occupy at all layers together, for those of a block to be taken off the pass at its end: watching
every layer takes a tenth longer on short texts."""

Take = Callable[[ParameterUse, Tensor], None]
"""Is handed a use below the cut and the coordinates [C, ...] of C gradients in it."""


@dataclass
class _Arrivals:
    """Who is handed the signals that come back to the layers of one forward pass; nobody outside of a backward pass."""

    # An object of its own: a graph that held the pass, whose tensors hold the graph, would never be freed.
    zero: Tensor  # On which every layer's output formally depends
    take: Callable[[str, Tensor], None] | None = None


class _Tap(torch.autograd.Function):
    """The identity, with a zero on which it formally depends: to form the zero's gradient all signals come by."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _zero: Tensor, name: str, arrivals: _Arrivals) -> Tensor:
        ctx.name, ctx.arrivals = name, arrivals
        return output.clone()  # a view could not be changed in place, as Falcon does

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor | None, ...]:
        # Under vmap a signal stands for those of many tokens. A function with a `vmap` rule would be handed all of them
        # too, but takes half as long again on short texts.
        if ctx.arrivals.take is not None and is_batchedtensor(signals[0]):
            ctx.arrivals.take(ctx.name, get_unwrapped(signals[0]).movedim(maybe_get_bdim(signals[0]), 0))
        return signals[0], None, None, None


class DecomposedRollout:
    """Everything that one forward and one ordinary backward pass of a rollout with K sampled tokens give."""

    def __init__(self, batch: ScoreBatch, plan: Plan, rollout: Rollout) -> None:
        self.batch, self.plan, self.rollout = batch, plan, rollout
        each = rollout.length * batch.scope.parameters[0].element_size()
        self._together = each * plan.widths <= TOGETHER_BYTES
        # Signals that go back together: few enough for the cache and for the memory allowed.
        self.block_size = min(BLOCK, max(1, SIGNAL_BYTES // max(each * plan.width, 1)))
        self._uses: dict[str, list[ParameterUse]] = {}  # By module below the cut
        for use in plan.below:
            self._uses.setdefault(use.module, []).append(use)
        self.trace, self._arrivals = self._traced(rollout, None)  # its graph is kept
        # By use above the cut, the tokens' gradients as outer products (left [K, a], right [K, b]); of a tied matrix
        # only those rows that the rollout does not read as input.
        self.outer: dict[ParameterUse, tuple[Tensor, Tensor]] = {}
        # By tied parameter, the other rows: (right [K, U], left [K, d]) for the U distinct tokens read.
        self.shared: dict[str, tuple[Tensor, Tensor]] = {}
        self._modules = modules = layers_of(batch.model)
        names = list(dict.fromkeys(u.module for u in plan.above))
        outputs = [self.trace.outputs[n] for n in names]
        cut = outputs[0] if plan.cut is None else self.trace.inputs[plan.cut]
        # One pass for all tokens: nothing at or above the cut mixes positions, so what the sum of all log-probabilities
        # sends to a position there is the signal of the one token that it predicts.
        *signals, last = torch.autograd.grad(self.trace.logprob.sum(), [*outputs, cut], retain_graph=True)
        self.token_signals = last[0, own_rows(last, rollout)]  # each token's own signal at the cut [K, ...]
        for use in plan.above:
            inputs, signal = self.trace.inputs[use.module].detach(), signals[names.index(use.module)]
            at = own_rows(inputs, rollout)
            self.outer[use] = use.rule.outer(modules[use.module], inputs[0, at], signal[0, own_rows(signal, rollout)])
        # In the rows that are also read as input both uses add before they are squared.
        tokens = rollout.ids[: rollout.length].unique()
        for parameter, use in plan.tied.items():
            left, right = self.outer[use]
            self.shared[parameter] = right[:, tokens], left
            self.outer[use] = left, right.index_fill(1, tokens, 0.0)

    def _traced(self, rollout: Rollout, cut: str | None) -> tuple[Trace, _Arrivals]:
        """A pass over the rollout or a prefix, as far as `cut`, whose layers below the cut hand over their signals."""
        arrivals = _Arrivals(self.batch.scope.parameters[0].new_zeros((), requires_grad=True))
        seen, versions = Trace(), list[tuple[Tensor, int]]()

        def tap(name: str, inputs: Tensor, output: Tensor) -> Tensor:
            seen.inputs[name], seen.outputs[name] = inputs, output
            versions.append((output, output._version))
            tapped = name in self._uses and not self._together
            return _Tap.apply(output, arrivals.zero, name, arrivals) if tapped else output  # pyright: ignore[reportReturnType]

        names = [u.module for u in (*self.plan.above, *self.plan.below)]
        if self.plan.cut is not None:
            names.append(self.plan.cut)
        trace = traced(self.batch, (rollout,), names, cut, tap)
        if self._together and any(output._version != before for output, before in versions):
            self._together = False  # the model changes outputs in place: a tap returns a copy
            return self._traced(rollout, cut)
        trace.inputs |= seen.inputs
        trace.outputs |= seen.outputs
        return trace, arrivals

    @cached_property
    def prepared_inputs(self) -> dict[ParameterUse, Tensor]:
        """By use below the cut, what its rule keeps of the layer's inputs; made when first asked for."""
        # Query, key and value read one tensor; what is kept of it is made once.
        made: dict[tuple[object, ...], Tensor] = {}
        kept = {}
        for use in self.plan.below:
            inputs = self.trace.inputs[use.module].detach()
            same = (inputs.data_ptr(), inputs.shape, inputs.stride()) if use.rule is MATRIX else (use,)
            if same not in made:
                made[same] = use.rule.prepare(self._modules[use.module], inputs)
            kept[use] = made[same]
        return kept

    def zeros(self, *shape: int) -> Tensor:
        """Float64 zeros [K, *shape], to add up numbers of the sampled tokens."""
        return torch.zeros(len(self.rollout.columns), *shape, dtype=torch.float64, device=self.token_signals.device)

    def below(self, rollout: Rollout, mix: Mix, take: Take) -> None:
        """Hand over the coordinates [C, ...] below the cut of several weighted scores, the last layer's first.

        `rollout` is this one, or a prefix of it that ends with the tokens of the mix, over which there is a pass of its
        own. Signals are let go layer by layer: all layers' together would take many times as much memory.
        """
        if self.plan.cut is None:
            return
        trace, arrivals = self.trace, self._arrivals
        if rollout.length < self.rollout.length:
            trace, arrivals = self._traced(rollout, self.plan.cut)
        source, signals = trace.inputs[self.plan.cut], self.token_signals[mix.span]
        weights = mix.matrix(self.token_signals)
        seeds = source.new_zeros(len(weights), *source.shape)
        at = own_rows(source, rollout)[-len(signals) :]  # the last block shares the whole rollout's pass
        seeds[:, 0, at] = torch.einsum("ck,k...->ck...", weights, signals)

        kept = self.prepared_inputs  # made here: inside of the batched backward pass a layer's own kernel may not run

        def arrived(name: str, at_output: Tensor) -> None:
            for use in self._uses[name]:
                coordinates = use.rule.coordinates(kept[use], at_output[:, 0])
                if use.rule is EMBEDDING and use.parameter in self.shared:
                    right, left = (part[mix.span] for part in self.shared[use.parameter])
                    for total, row in zip(coordinates, weights.to(right), strict=True):
                        total += (row[:, None] * right).T @ left
                take(use, coordinates)

        if self._together:
            signals = pull_back(source, [trace.outputs[name] for name in self._uses], seeds)
            for name, at_output in zip(self._uses, signals, strict=True):
                arrived(name, at_output)
            return
        with replaced(vars(arrivals), "take", arrived):
            pull_back(source, [arrivals.zero], seeds)


def _head_norms(
    batch: ScoreBatch, path: bool, rollout: Rollout, first: int, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of the output layer's own use in closed form: ‖s_t‖² = ‖δ_t‖² ‖h_t‖², with a bias ‖δ_t‖² (‖h_t‖² + 1).

    For z = W h + b, ∇_W log π(y) = δ ⊗ h, where δ = (e_y − π)/τ times the slope of what the model does to z behind the
    layer, such as a soft-cap or a scale. Arguments and results are those of `norms_of`.
    """
    head, seen = batch.scope.head, list[Tensor]()
    assert head is not None

    def leaf_at_output(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        # The graph starts here: what is below the layer needs none.
        seen[:] = layer_input(args, kwargs), wide(output.detach()).requires_grad_()
        torch.set_grad_enabled(True)  # until the `no_grad` below ends
        return seen[1]

    # The scope's own hook would replace the output; the leaf does what is needed.
    inner = replace(batch, scope=replace(batch.scope, head=None))
    with torch.no_grad(), head.register_forward_hook(leaf_at_output, with_kwargs=True):
        run = sampled_logits(inner, (rollout,), batch.temperature)
        if not seen:
            raise unreached(head)
        hidden, output = seen
        logprob, at = run.z.detach().log_softmax(-1), run.targets[:, None]
        # e_y − π with 1 − π_y as the sum of the other π: the difference would cancel for a sure token.
        others = logprob.exp().scatter(-1, at, 0.0)
        (delta,) = torch.autograd.grad(run.z, output, (-others).scatter(-1, at, others.sum(-1, keepdim=True)))
    left, right = (wide(x[0, own_rows(x, rollout)]) for x in (delta, hidden))
    if len(batch.scope.parameters) > 1:
        # A bias is a weight on a constant input of 1.
        right = torch.cat([right, torch.ones_like(right[:, :1])], dim=-1)
    pair = left[first:], right[first:]
    # In float64 throughout: squares of the δ of a sure token are too small for float32.
    squares = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square() for x in pair]
    norms = squares[0] * squares[1]
    path_norms = outer_norms([pair], pair[0], True)[1] if path else torch.zeros_like(norms)
    of_rows = outer_row_norms([(left, right)], rows.to(left.device))
    return logprob.gather(-1, at)[first:, 0].double(), norms, path_norms, of_rows


NAME = "generic"
BLOCK = 16
"""Tokens whose signals travel together and share one forward graph on their common prefix; more spill the cache."""
FEW, POSITIONS_PER_SIGNAL = 8, 32
"""Up to 8 + positions / 32 signals per rollout the reference engine is no slower (measured with 15 to 256 prompt tokens
on models of width 16 and 128): the whole rollout's own pass and the factors of its inputs must first be earned back."""

SIGNAL_COPIES = 16
"""Tensors as large as the signals at the widest layer that are alive at once on the way through a block (measured)."""

_PLANS = Verdicts[Plan]()


def norms(batch: ScoreBatch, asked: Asked) -> Norms:
    """Squared norms of scores, of running sums and of weighted sums, without forming a gradient.

    Every token and every row of weights that is not all zero takes one backward signal.

    Raises:
        UnfitError: A parameter in scope has no rule; the sentence names it.
    """
    if batch.scope.head is not None:
        return norms_of(batch, asked, partial(_head_norms, batch, asked.path))
    take_apart = partial(DecomposedRollout, batch, plan_for(batch))
    with plain_kernels(batch.model):  # once for all passes
        return norms_of(batch, asked, partial(_rollout_norms, take_apart, asked.path))


def fits(batch: ScoreBatch, asked: Asked) -> bool:
    """Whether "auto" should use this engine; a model that has no plan is logged once, with the reason."""
    if batch.scope.head is not None:
        return True
    signals = asked.tokens.sum() + len(batch.rollouts) * asked.weights.shape[1]
    if signals <= sum(FEW + r.length / POSITIONS_PER_SIGNAL for r in batch.rollouts):
        return False
    return has_plan(batch)


def has_plan(batch: ScoreBatch) -> bool:
    """Whether there is a plan for the model; one without is logged once, with the reason."""
    return fits_or_told(batch, plan_for, 'measured by engine="reference"', logging.WARNING)


def plan_for(batch: ScoreBatch) -> Plan:
    """Plan of a model and scope, made and checked against the reference engine at first use; raises if none fits."""
    return _PLANS.get(batch, lambda: _checked_plan(batch)) if batch.rollouts else Plan((), (), None, 0)


def needed_bytes(batch: ScoreBatch, path: bool) -> int:
    """What measuring the longest rollout takes at most, about: two graphs, signals, factors of inputs and logits."""
    if batch.scope.head is not None or not batch.rollouts:
        return 0
    plan, length = plan_for(batch), max(r.length for r in batch.rollouts)
    tensors = dict(zip(batch.scope.names, batch.scope.parameters, strict=True))
    item = batch.scope.parameters[0].element_size()
    shapes = [tensors[u.parameter].shape[-2:] for u in plan.below if u.rule is MATRIX]
    signals = max(min(BLOCK * length * plan.width * item, SIGNAL_BYTES), length * plan.width * item)
    factors = item * length * sum(min(columns, length) for _, columns in shapes)
    # With `path` the running sums of all coordinates.
    sums = item * sum(rows * min(columns, length) for rows, columns in shapes) if path else 0
    return 2 * pass_bytes(batch) + SIGNAL_COPIES * signals + factors + sums


def _checked_plan(batch: ScoreBatch) -> Plan:
    plan = find_plan(batch)

    def measure(rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        decomposed, parts = DecomposedRollout(batch, plan, rollout), dict[str, Tensor]()
        norms = [(use, norm_sq(left) * norm_sq(right)) for use, (left, right) in decomposed.outer.items()]
        every = Mix(None, slice(None))
        decomposed.below(rollout, every, lambda use, coordinates: norms.append((use, norm_sq(coordinates))))
        for use, norm in norms:
            parts[use.parameter] = parts.get(use.parameter, 0.0) + norm
        return decomposed.trace.logprob, parts

    refuse_difference(batch, "with plain attention kernels", ELSEWHERE.removesuffix("."), measure)
    graph_per_position(batch)  # what cannot be measured has no plan, so that another engine takes the model
    return plan


def _rollout_norms(
    take_apart: Callable[[Rollout], DecomposedRollout], path: bool, rollout: Rollout, first: int, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, ‖s_t‖² and, with `path`, ‖Σ_{j≤t} s_j‖² of the tokens from `first` on, ‖Σ_k rows[m,k] s_k‖²."""
    decomposed = take_apart(rollout)
    size, outer = decomposed.block_size, decomposed.outer.values()
    some = outer if first < len(rollout.columns) else ()
    norms, path_norms = outer_norms(some, decomposed.token_signals, path)
    single, summed, running = list[Tensor](), list[Tensor](), dict[ParameterUse, Tensor]()

    def take(use: ParameterUse, x: Tensor) -> None:
        single.append(torch.linalg.vector_norm(x, dim=-1))
        if not path:
            return
        # Running sums over the tokens so far. A product with a triangle of ones: on one thread `cumsum` along the first
        # axis takes up to ten times as long.
        ones = torch.ones(len(x), len(x), dtype=x.dtype, device=x.device).tril()
        total = (ones @ x.flatten(1)).view_as(x)
        if use in running:  # coordinates are nested in the prefix: a longer one only appends some
            total[:, : len(running[use])] += running[use]
        running[use] = total[-1].clone()
        summed.append(torch.linalg.vector_norm(total, dim=-1))

    start = first
    # Each block of tokens goes back on the prefix that it sees.
    for block in rollout.blocks(size, first) if decomposed.plan.cut else ():
        span = slice(start, start := start + len(block.columns))
        decomposed.below(block, Mix(None, span), take)
        norms[span] += sum_of_squares(single)
        path_norms[span] += sum_of_squares(summed)
        single.clear()
        summed.clear()
    running.clear()
    rows = rows.to(decomposed.token_signals.device)
    of_rows = outer_row_norms(outer, rows)
    # Rows of weights reach over all tokens, so every block goes through the whole rollout's pass.
    for start in range(0, len(rows), size):
        mix = Mix(rows[start : start + size], slice(None))
        decomposed.below(rollout, mix, lambda _use, x: single.append(torch.linalg.vector_norm(x, dim=-1)))
        of_rows[start : start + size] += sum_of_squares(single)
        single.clear()
    return decomposed.trace.logprob[first:].detach(), norms[first:], path_norms[first:], of_rows
