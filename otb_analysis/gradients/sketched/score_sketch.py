"""Estimated norms of token scores from their projections on random directions, with standard errors."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients.batch.forward import Functional
from otb_analysis.gradients.batch.inputs import Batch, Rollout, ScoreBatch, measured, refuse_more_than_fit
from otb_analysis.gradients.exact import reference
from otb_analysis.gradients.exact.attention import forward_slopes
from otb_analysis.gradients.exact.generic import DecomposedRollout
from otb_analysis.gradients.exact.gram import outer_norms
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.plan import Plan
from otb_analysis.gradients.sketched.directions import Directions, aligned
from otb_analysis.gradients.sketched.tangents import above, below, checked_plan
from otb_analysis.phases import counted
from otb_analysis.types import Float, ScoreNorms

METHODS = ("hybrid", "rank_one", "gaussian")
TIED_SHARE = 5
"""A hybrid spends one direction in so many, two at least, on what the two uses of a tied matrix have in common."""
ENGINES = ("auto", "generic", "reference")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Projected:
    """What is known of the scores s = a + b of one rollout's T sampled tokens, a measured and b projected."""

    rollout: Rollout
    logprob: Float  # log π in nats [T]
    sketched: Float  # b·D_k [T, K]
    exact: Float | float = 0.0  # ‖a‖² of single tokens [T], or 0
    exact_path: Float | float = 0.0  # ‖Σ_{j≤t} a_j‖² [T], or 0
    # Of directions for ⟨a, b⟩, the known factors α_k and b·D_k [T, k]; zeros where a and b share no parameter
    known: Float = field(default_factory=lambda: np.zeros((1, 1)))
    projected: Float = field(default_factory=lambda: np.zeros((1, 1)))
    unseen: float = 0.0  # Share of a's span that they leave out


@torch.inference_mode(False)
@torch.enable_grad()
def sketch_score_norms(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None = None,
    *,
    directions: int = 32,
    method: str = "hybrid",
    engine: str = "auto",
    seed: int = 0,
    path: bool = False,
    features: bool = False,
    scope: str = "all",
    temperature: float = 1.0,
) -> ScoreNorms:
    """Unbiased estimate of every sampled token's squared score norm, with its standard error.

    ŵ = (1/K) Σ_k (s·D_k)²,  E[D Dᵀ] = I, so E[ŵ] = ‖s‖²; s_{n,t} = ∇_θ log π(y_{n,t} | y_{n,<t}), a gradient of the
    log-probability over the parameters in `scope`: no sign change, no 1/N, no advantage factor. Of the methods,
    "gaussian" has independent normal entries in D (one forward-mode pass a direction, any model), "rank_one" has
    D = u vᵀ with random signs u, v in each matrix and random signs in each vector (all directions share one pass), and
    "hybrid" measures the layers above the last attention exactly and sketches only those below:

    ŵ = ‖a‖² + mean_k (b·D_k)² + 2·mean_j α_j b·D'_j,  s = a + b,

    the last term only where the output matrix is also the embedding: a fifth of the directions, D'_j, lies in the span
    of what a has in the rows read as input, with known factors α_j (E[α_j b·D'_j] = ⟨a, b⟩). On an embedding D has
    independent signs in all entries.

    The relative error is √(2/K) for "gaussian", somewhat more for "rank_one", and for "hybrid" as much smaller as less
    of the norm lies below; a hybrid estimate can come out negative. Where everything lies above the last attention, as
    in scope "lm_head", hybrid is exact. All rollouts and all calls with one seed share the directions of a parameter.
    `features` [N, L, K] are s·D_k/√K, float32, so that E⟨f_t, f_k⟩ = s_t·s_k, across rollouts and calls. Arguments that
    are not listed are those of `token_score_norms`.

    Args:
        directions: K ≥ 2.
        method: "hybrid", "rank_one" or "gaussian".
        engine: "auto" (the batched pass; a model without rules for it gets "rank_one" by one forward-mode pass a
            direction instead, with a logged reason), "generic" (raises there) or "reference" (the same projections by
            one backward pass per token; not for "hybrid").
        seed: Seed of the directions.
        path: Whether to estimate path norms ‖Σ_{j≤t} s_{n,j}‖² too.
        features: Whether to return the projections, from which every s_t·s_k can be estimated; not with "hybrid".

    Raises:
        InputError: An argument does not fit, or so many directions do not fit in memory.
        NonFiniteError: A logit is NaN or infinite; the sentence names rollout and token.
    """
    if method not in METHODS:
        raise InputError(f"method is {method!r}; {nearest(method, METHODS)}")
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r} does not sketch score norms; pass one of: {', '.join(ENGINES)}.")
    if directions < 2:
        raise InputError(f"directions is {directions}; pass at least 2, so that a standard error exists.")
    if method == "hybrid" and features:
        raise InputError(
            'features=True needs every parameter projected, which "hybrid" avoids; pass method="rank_one".'
        )
    if method == "hybrid" and engine == "reference":
        raise InputError('engine "reference" projects whole scores, which "hybrid" avoids; pass method="rank_one".')
    with measured(model, Batch(input_ids, mask, attention_mask), scope, temperature) as batch:
        drawn = Directions(batch, directions, seed)
        parameters = batch.scope.parameters
        each = 4 * sum(sum(p.shape) for p in parameters) + 8 * math.prod(batch.shape)  # signs, and projections
        refuse_more_than_fit("directions", directions, each, parameters[0].device)
        ran, parts = _projections(drawn, method, engine)
        norm_sq, stderr, paths, logprob = (np.zeros(batch.shape) for _ in range(4))
        kept = np.zeros((*batch.shape, directions), dtype=np.float32) if features else None
        for part in parts:
            where = part.rollout.row, part.rollout.columns
            squares, products = part.sketched**2, 2 * part.known * part.projected
            norm_sq[where], logprob[where] = part.exact + squares.mean(1) + products.mean(1), part.logprob
            # Independent directions, and some of an orthonormal frame of a's span.
            variance = squares.var(1, ddof=1) / squares.shape[1]
            if part.unseen:  # directions that span all of a leave nothing of ⟨a, b⟩ to chance
                variance = variance + products.var(1, ddof=1) / products.shape[1] * part.unseen
            stderr[where] = np.sqrt(variance)
            if path:  # projections add up as scores do
                sketched, known, projected = (x.cumsum(0) for x in (part.sketched, part.known, part.projected))
                paths[where] = part.exact_path + (sketched**2).mean(1) + (2 * known * projected).mean(1)
            if kept is not None:
                kept[where] = part.sketched / np.sqrt(directions)
    return ScoreNorms(norm_sq, logprob, ran, paths if path else None, stderr, kept)


def _projections(directions: Directions, method: str, engine: str) -> tuple[str, Iterator[Projected]]:
    """The method that runs and its projections, rollout by rollout."""
    if engine == "reference" or method == "gaussian":
        return method, _one_by_one(directions, method, reference.token_alignments if engine == "reference" else _slopes)
    try:
        return method, _decomposed(directions, checked_plan(directions.batch), method == "hybrid")
    except UnfitError as reason:
        if engine == "generic":
            raise
        name = type(directions.batch.model).__name__
        _log.warning('%s is sketched by method "rank_one", one pass a direction: %s', name, reason)
        return "rank_one", _one_by_one(directions, "rank_one", _slopes)


def _decomposed(directions: Directions, plan: Plan, hybrid: bool) -> Iterator[Projected]:
    """All directions at once, for one rollout after the other; a hybrid measures the layers above the cut."""
    for rollout in counted(directions.batch.rollouts, "rollout"):
        decomposed = DecomposedRollout(directions.batch, plan, rollout)
        logprob = decomposed.trace.logprob.detach().double().cpu().numpy()
        if not hybrid:
            whole = above(decomposed, directions) + below(decomposed, directions, directions.count)
            yield Projected(rollout, logprob, whole.cpu().numpy())
            continue
        # Of the layers above the cut, of single tokens and of running sums.
        pairs = *decomposed.outer.values(), *decomposed.shared.values()
        single, running = outer_norms(pairs, decomposed.token_signals, True)
        measured = single.cpu().numpy(), running.cpu().numpy()
        kept = max(2, directions.count // TIED_SHARE) if decomposed.shared else 0
        along = aligned(decomposed.shared, single, kept, directions.stream("tied")) if decomposed.shared else None
        # Two at least of each kind, else there is no standard error.
        count = max(2, directions.count - kept)
        sketched = below(decomposed, directions, count, along, by_entry=True).cpu().numpy()
        projected = Projected(rollout, logprob, sketched[:, :count], *measured)
        if along is not None:
            known = along.known.cpu().numpy()
            projected = replace(projected, known=known, projected=sketched[:, count:], unseen=along.unseen)
        yield projected


def _slopes(batch: ScoreBatch, direction: Sequence[Tensor]) -> Float:
    return forward_slopes(Functional(batch), batch.rollouts, direction)


def _one_by_one(
    directions: Directions, method: str, slopes: Callable[[ScoreBatch, Sequence[Tensor]], Float]
) -> Iterator[Projected]:
    """One direction after the other, each formed in full."""
    batch, draw = directions.batch, directions.gaussian if method == "gaussian" else directions.rank_one
    projections = np.zeros((*batch.shape, directions.count), dtype=np.float32)
    for k in counted(range(directions.count), "direction"):
        projections[..., k] = slopes(batch, draw(k))
    function = Functional(batch)
    logprob = function.evaluate(function.parameters, batch.rollouts)
    for rollout in batch.rollouts:
        where = rollout.row, rollout.columns
        yield Projected(rollout, logprob[where], projections[where].astype(np.float64))
