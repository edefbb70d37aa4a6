"""The level `sampled`: exact norms for a random part of the tokens, each with a known probability of being drawn."""

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients.batch.inputs import Batch, ScoreBatch, restricted
from otb_analysis.gradients.batch.per_rollout import Asked
from otb_analysis.gradients.batch.widening import measured
from otb_analysis.gradients.exact import generic, reference
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.manual import fast
from otb_analysis.gradients.sampled import scattered
from otb_analysis.statistics import inclusion_probabilities, systematic_sample
from otb_analysis.types import Float, SampledNorms

SIZES = ("uniform", "proxy", "above_cut")
SHORT = 40
"""Mean positions of a rollout up to which copies of it are quicker than the fast engine."""


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

    Raises:
        InputError: An argument does not fit, or "above_cut" is asked of a model without rules or of a scope with
            nothing up there; the sentence says what to do.
        NonFiniteError: A logit is NaN or infinite; the sentence names rollout and token.
    """
    if by not in SIZES:
        raise InputError(f"by is {by!r}; {nearest(by, SIZES)}")
    with measured(model, Batch(input_ids, mask, attention_mask), scope, temperature) as batch:
        size = _size(batch, by, proxy)
        prob = np.zeros(batch.shape)
        prob[batch.mask] = inclusion_probabilities(size[batch.mask], tokens) if batch.mask.any() else 0.0
        drawn = np.zeros(batch.shape, bool)
        drawn[batch.mask] = systematic_sample(prob[batch.mask], seed)
        # Whole rollouts with fewer tokens marked: a score needs all of its context.
        found, name = _norms(restricted(batch, drawn))
    return SampledNorms(np.where(drawn, found, np.where(batch.mask, np.nan, 0.0)), prob, size, name)


def _norms(drawn: ScoreBatch) -> tuple[Float, str]:
    """Norms of the drawn tokens, and by which way: their signals share each rollout's own pass, or each has a copy.

    Time of the fast engine over that of copies on the demo's model, a tenth of the tokens: 1.7 at 26 positions, .85 at
    44, .5 at 140, .35 at 268 and more. The generic engine runs a block's prefix forward anew: 1.6 at 44, .9 and .6, so
    it pays where a pass holds one copy.
    """
    length = sum(r.length for r in drawn.rollouts) / max(len(drawn.rollouts), 1)
    if length > SHORT and fast.fits(drawn):
        engine = fast
    elif not generic.has_plan(drawn):
        engine = reference
    elif length > scattered.POSITIONS // 2:
        engine = generic
    else:
        return scattered.token_norms(drawn, generic.plan_for(drawn)), "scattered"
    return engine.norms(drawn, Asked.of_tokens(drawn)).norm_sq, engine.NAME


def _size(batch: ScoreBatch, by: str, proxy: Float | None) -> Float:
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
            return scattered.norms_above_cut(batch, plan)
    except UnfitError as reason:
        raise InputError(
            f'the norm above the cut is not available for this model, pass by="proxy": {reason}'
        ) from reason
    raise InputError(
        f'scope {batch.scope.name!r} holds no parameter above the last attention, where by="above_cut" measures; '
        'pass by="proxy" with energies, or by="uniform".'
    )
