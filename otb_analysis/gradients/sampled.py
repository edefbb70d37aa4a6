"""The level `sampled`: exact norms for a random part of the tokens, each with a known probability of being drawn.

The tokens are drawn in proportion to a size measure. The engines `fast` and `generic` send the signals of a rollout's
drawn tokens back through its own pass; of short rollouts under `generic` copies are taken instead, many in one pass:

    rollout          P P P a b c d        drawn: b, d
    copies of it     P P P a b            one sampled token per row, so that every signal in the row is that token's
                     P P P a b c d        alone: norms by row follow from the layers' inputs and signals

Above the last attention no two tokens mix, so one ordinary backward pass gives that share for every token of the batch.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.devices import GRAPH, working_set
from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients.batch.inputs import (
    Batch,
    Rollout,
    ScoreBatch,
    measured,
    microbatches,
    restricted,
    shared_out,
)
from otb_analysis.gradients.batch.kernels import layers_of
from otb_analysis.gradients.exact import generic, reference
from otb_analysis.gradients.exact.gram import norm_sq
from otb_analysis.gradients.exact.layers import (
    BIAS,
    EMBEDDING,
    HEADED_SCALE,
    INNER_VECTOR,
    MATRIX,
    SCALE,
    UnfitError,
    row_factors,
    wide,
)
from otb_analysis.gradients.exact.plan import ParameterUse, Plan, traced
from otb_analysis.gradients.exact.reference import Asked
from otb_analysis.gradients.manual import fast
from otb_analysis.phases import advance, count_to
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.statistics import inclusion_probabilities, systematic_sample
from otb_analysis.types import Bool, Float, SampledNorms

Layer = tuple[ParameterUse, nn.Module, Tensor, Tensor]
"""One use in a pass: the parameter, its module, the module's input and the signal at its output, rows first."""

POSITIONS = 512
"""Padded positions of one pass over copies, whose graph reaches through all layers."""


def norms_above_cut(batch: ScoreBatch, plan: Plan) -> Float:
    """The part of every token's squared score norm that lies in the layers above the last attention [N, L].

    One forward and one backward pass over the batch. A tied matrix counts with its output use only. It is a lower
    bound of ‖s_t‖² up to that matrix's cross term, and all of ‖s_t‖² where nothing in scope is below.
    """
    result, modules = np.zeros(batch.shape), layers_of(batch.model)

    def enable(_module: nn.Module, _args: tuple[object, ...]) -> None:
        torch.set_grad_enabled(True)  # a pass keeps no graph until it comes to one of the layers

    for micro in microbatches(batch.rollouts):
        one = _Pass(batch, plan.above, micro)

        def take(layer: Layer, one: _Pass = one) -> None:
            left, right = one.outer(layer)
            result[one.places] += (norm_sq(left) * norm_sq(right)).cpu().numpy()

        with torch.no_grad(), ExitStack() as handles:
            for name in {use.module for use in plan.above}:
                handles.enter_context(modules[name].register_forward_pre_hook(enable))
            one.run(take)
    return result


def token_norms(batch: ScoreBatch, plan: Plan) -> Float:
    """Exact squared norm of the score of every token in the mask [N, L], zero elsewhere."""
    result = np.zeros(batch.shape)
    # Each copy ends at its token: what comes after has no part in its score.
    copies = [one for rollout in batch.rollouts for one in rollout.blocks(1)]
    count_to(len(copies), "token")
    # The rows of a pass share a vector that is read as a whole, such as attention sinks: there each has a pass.
    shared = any(use.rule is INNER_VECTOR for use in plan.below)
    positions = working_set(batch.scope.parameters[0].device, POSITIONS, GRAPH)
    for micro in microbatches(copies, 1 if shared else positions):
        one = _Pass(batch, (*plan.above, *plan.below), micro)
        result[one.places] = _row_norms(plan, one).cpu().numpy()
        advance(len(micro))
    return result


class _Pass:
    """One forward and one backward pass over some rollouts, summed over all their sampled tokens."""

    def __init__(self, batch: ScoreBatch, uses: Sequence[ParameterUse], rollouts: tuple[Rollout, ...]) -> None:
        self.batch, self.uses, self.rollouts = batch, uses, rollouts
        counts = [len(r.columns) for r in rollouts]
        self.position = torch.cat([r.targets for r in rollouts]) - 1
        # Row of each sampled token within the pass [K].
        self.row = torch.as_tensor(np.repeat(np.arange(len(counts)), counts), device=self.position.device)
        self.kept = self.position.unique()
        # Rollouts and columns of the tokens in the padded batch.
        self.places = np.repeat([r.row for r in rollouts], counts), np.concatenate([r.columns for r in rollouts])

    def run(self, take: Callable[[Layer], None]) -> None:
        """Hand over every use with its layer's input and the signal at its output, the last layer first.

        Signals are let go one by one: all layers' together take as much memory as the graph.
        """
        modules = layers_of(self.batch.model)
        # A zero on which every layer's output depends: its gradient needs all their signals, and none is kept.
        zero = torch.zeros((), device=self.position.device, requires_grad=True)

        def tap(name: str, inputs: Tensor, output: Tensor) -> Tensor:
            inputs, tapped = inputs.detach(), output + zero.to(output.dtype)

            def arrived(signal: Tensor) -> None:
                for use in self.uses:
                    if use.module == name:
                        take((use, modules[name], inputs, signal))

            tapped.register_hook(arrived)
            return tapped

        trace = traced(self.batch, self.rollouts, (use.module for use in self.uses), tap=tap)
        # Rows do not mix, so the signals of the sum are those of each row's own tokens.
        torch.autograd.grad(trace.logprob.sum(), zero)

    def outer(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Gradients of the sampled tokens, which signal at one position each, as outer products [K, a] ⊗ [K, b]."""
        use, module, *pair = layer
        # The output layer may run on the kept positions only.
        kept = torch.searchsorted(self.kept, self.position)
        inputs, signal = (x[self.row, kept if x.shape[1] == len(self.kept) else self.position] for x in pair)
        return use.rule.outer(module, inputs, signal)


def _row_norms(plan: Plan, one: _Pass) -> Tensor:
    """‖s‖² [B] of the one token that each row of a pass holds."""
    total = torch.zeros(len(one.row), dtype=torch.float64, device=one.row.device)
    outer: dict[str, tuple[Tensor, Tensor]] = {}
    above, tied = set(plan.above), plan.tied

    def take(layer: Layer) -> None:
        use, module, ids, signal = layer
        if use in above:
            left, right = one.outer(layer)
            total.add_(norm_sq(left) * norm_sq(right))
            if use.parameter in tied:
                outer[use.parameter] = left, right
            return
        total.add_(_below(layer))
        if use.rule is EMBEDDING and use.parameter in tied:
            # 2⟨input use, output use⟩ of a tied matrix [B]: 2 Σ_t (δ_t·h) · (e_y − π)[x_t].
            left, right = outer[use.parameter]
            along = (wide(signal) * left[:, None, :]).sum(-1)
            total.add_(2 * (along.double() * right.gather(1, ids).double() * row_factors(module, ids)).sum(1))

    one.run(take)
    return total


def _below(layer: Layer) -> Tensor:
    """‖gradient‖² of each row [B]."""
    use, module, inputs, signal = layer
    if use.rule is MATRIX:
        a, b, length = inputs.shape[2], signal.shape[2], inputs.shape[1]
        if length * (a + b) >= a * b:
            return norm_sq(wide(inputs).mT @ wide(signal))
        # By Gram matrices of positions, which is less work here. The sum over pairs of positions cancels, so it is
        # taken in float64; the products are exact enough.
        inputs, signal = wide(inputs), wide(signal)
        pairs = (inputs @ inputs.mT).double() * (signal @ signal.mT).double()
        return pairs.flatten(1).sum(1).clamp(min=0.0)
    if use.rule in (BIAS, SCALE, HEADED_SCALE):  # their outer product sums over all axes between the first and the last
        left, right = use.rule.outer(module, inputs, signal)
        return norm_sq(left) * norm_sq(right)
    if use.rule is not EMBEDDING:
        kept = (use.rule.prepare(module, inputs[row : row + 1]) for row in range(len(signal)))
        return torch.cat([norm_sq(use.rule.coordinates(k, row[None])) for k, row in zip(kept, signal, strict=True)])
    # An embedding: signals of positions that read the same token add up before they are squared.
    same = inputs[:, :, None] == inputs[:, None, :]
    scaled = wide(signal) * row_factors(module, inputs)[..., None]
    return ((scaled @ scaled.mT).double() * same).flatten(1).sum(1).clamp(min=0.0)


SIZES = ("uniform", "proxy", "above_cut")
SHORT = 40
"""Mean positions of a rollout up to which copies of it are quicker than the fast engine, whose signals share each
rollout's own pass. Time of the fast engine over that of copies on the demo's model, a tenth of the tokens: 1.7 at 26
positions, .85 at 44, .5 at 140, .35 at 268 and more. The generic engine runs a block's prefix forward anew: 1.6 at 44,
.9 and .6, so it pays where a pass holds one copy."""


@torch.inference_mode(False)
@torch.enable_grad()
def sampled_score_norms(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tokens: int,
    by: str = "above_cut",
    proxy: Float | None = None,
    seed: int = 0,
    scope: str = "all",
    temperature: float = 1.0,
    processes: Processes = SINGLE_PROCESS,
) -> SampledNorms:
    """Exact squared norms of the scores of randomly drawn tokens, in their whole context, with inclusion probabilities.

    w_{n,t} = ‖s_{n,t}‖², s_{n,t} = ∇_θ log π(y_{n,t} | y_{n,<t}), drawn with π_{n,t} proportional to a size measure, a
    tenth of them uniformly; Σ_drawn w/π estimates Σ w without bias (`statistics.horvitz_thompson`).

    Scores are gradients of the log-probability over the parameters in `scope`: no sign change, no 1/N, no advantage
    factor. With `tokens` at or above the number of sampled tokens this is `token_score_norms`, all probabilities 1.
    `norm_sq` [N, L] is exact where drawn, NaN at the other tokens of the mask and zero outside it; `inclusion_prob` and
    `size` [N, L] are zero outside the mask. `engine` is "fast" or "generic" (the drawn tokens of a rollout share its
    pass), "scattered" (many copies of short rollouts in one pass) or, for a model without rules, "reference". Arguments
    that are not listed are those of `token_score_norms`.

    Args:
        tokens: How many to draw among the true entries of `mask`.
        by: Size measure: "above_cut" (‖s‖² restricted to the layers above the last attention), "proxy" or "uniform".
        proxy: Energies to draw in proportion to with by="proxy" [N, L], such as those of `logit_stats`.
        seed: Seed of the draw; torch's random state is left alone.
        processes: Share out the rollouts: each holds the whole model, calls with the same arguments, and gets the whole
            result, of one draw.

    Raises:
        InputError: An argument does not fit, or "above_cut" is asked of a model without rules or of a scope with
            nothing up there; the sentence says what to do.
        NonFiniteError: A logit is NaN or infinite; the sentence names rollout and token.
        ProcessError: Another process failed.
    """
    if by not in SIZES:
        raise InputError(f"by is {by!r}; {nearest(by, SIZES)}")
    with ExitStack() as copies:
        arguments = model, Batch(input_ids, mask, attention_mask), scope, temperature
        batch = processes.agreed(lambda: copies.enter_context(measured(*arguments)))
        size = _size(batch, by, proxy, processes)

        def draw() -> tuple[Float, Bool]:
            prob, drawn = np.zeros(batch.shape), np.zeros(batch.shape, bool)
            prob[batch.mask] = inclusion_probabilities(size[batch.mask], tokens) if batch.mask.any() else 0.0
            drawn[batch.mask] = systematic_sample(prob[batch.mask], seed)
            return prob, drawn

        prob, drawn = processes.broadcast_from_main(draw)
        # Whole rollouts with fewer tokens marked: a score needs all of its context.
        some = restricted(batch, drawn)
        length = sum(r.length for r in some.rollouts) / max(len(some.rollouts), 1)
        if length > SHORT and fast.fits(some):
            engine = fast
        elif not generic.has_plan(some):
            engine = reference
        else:
            engine = generic
        shard, scattered = shared_out(some, processes), engine is generic and length <= POSITIONS // 2

        def norms() -> Float:
            if scattered:
                return token_norms(shard, generic.plan_for(some))
            return engine.norms(shard, Asked.of_tokens(shard)).norm_sq

        exact, name = processes.added(norms), "scattered" if scattered else engine.NAME
    return SampledNorms(np.where(drawn, exact, np.where(batch.mask, np.nan, 0.0)), prob, size, name)


def _size(batch: ScoreBatch, by: str, proxy: Float | None, processes: Processes) -> Float:
    if by == "uniform" or not batch.rollouts:
        return np.where(batch.mask, 1.0, 0.0)
    if by == "proxy":
        if proxy is None or np.shape(proxy) != batch.shape:
            raise InputError(
                f"proxy has shape {None if proxy is None else np.shape(proxy)} but input_ids {batch.shape}; "
                'pass one energy per token, shape [N, L], or by="above_cut".'
            )
        return np.where(batch.mask, proxy, 0.0)
    try:
        plan = generic.plan_for(batch)
        if plan.above:
            return processes.added(lambda: norms_above_cut(shared_out(batch, processes), plan))
    except UnfitError as reason:
        raise InputError(
            f'the norm above the cut is not available for this model, pass by="proxy": {reason}'
        ) from reason
    raise InputError(
        f'scope {batch.scope.name!r} holds no parameter above the last attention, where by="above_cut" measures; '
        'pass by="proxy" with energies, or by="uniform".'
    )
