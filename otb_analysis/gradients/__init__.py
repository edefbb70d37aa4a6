"""Exact norms and inner products of score gradients, their sketches, and their attribution to tokens.

The score of token t is s_t = ∇_θ log π(y_t | x, y_{<t}): the gradient of a *log-probability* (not of a loss) over the
parameters in scope, without 1/N and without an advantage factor. Three questions are answered about it: how large each
token's score is, how large any weighted sum of a rollout's scores is, and how the gradients of whole groups relate.
`sketch` estimates the last for models of any size with a stated error; `attribution` says which tokens make a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.inputs import Batch, ScoreBatch, Weights, check_group, check_weights, prepare
from otb_analysis.gradients.batch.tree import distinct, distinct_rollouts
from otb_analysis.gradients.directional.attribution import (
    batch_gradient,
    gradient_attribution,
    predicted_logprob_change,
    signal_noise,
)
from otb_analysis.gradients.exact import generic, reference
from otb_analysis.gradients.exact.gram import gram_from_features
from otb_analysis.gradients.groups import group_gram
from otb_analysis.gradients.manual import fast
from otb_analysis.gradients.sampled.sampled import sampled_score_norms
from otb_analysis.gradients.sketched.hashing import count_sketch
from otb_analysis.gradients.sketched.score_sketch import sketch_score_norms
from otb_analysis.gradients.sketched.sketch import gradient_sketch
from otb_analysis.types import Float, Int, ScoreNorms

__all__ = [
    "ENGINES",
    "Engine",
    "batch_gradient",
    "count_sketch",
    "gradient_attribution",
    "gradient_sketch",
    "gram_from_features",
    "group_gradient_gram",
    "predicted_logprob_change",
    "sampled_score_norms",
    "signal_noise",
    "sketch_score_norms",
    "token_score_norms",
    "weighted_score_norms",
]


@dataclass(frozen=True)
class Engine:
    """How one engine answers the three questions; every engine gives the same numbers."""

    token_score_norms: Callable[[ScoreBatch, bool], ScoreNorms]
    weighted_score_norms: Callable[[ScoreBatch, Float], Float]
    group_gradient_gram: Callable[[ScoreBatch, Float, Int], Float]


ENGINES: dict[str, Engine] = {
    "fast": Engine(fast.token_score_norms, fast.weighted_score_norms, group_gram.group_gradient_gram),
    "generic": Engine(generic.token_score_norms, generic.weighted_score_norms, group_gram.group_gradient_gram),
    "reference": Engine(reference.token_score_norms, reference.weighted_score_norms, reference.group_gradient_gram),
}
"""Engines of this version, best first. `reference` takes M ordinary backward passes per prompt for a Gram matrix, the
others as many as the prompt's weights have rank, and none in scope "lm_head"."""


@torch.inference_mode(False)
@torch.enable_grad()
def token_score_norms(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None = None,
    *,
    engine: str = "auto",
    scope: str = "all",
    path: bool = False,
    temperature: float = 1.0,
) -> ScoreNorms:
    """Exact squared norm of every sampled token's score.

    w_{n,t} = ‖s_{n,t}‖², s_{n,t} = ∇_θ log π(y_{n,t} | y_{n,<t}), and with `path` also ‖Σ_{j≤t} s_{n,j}‖².

    Scores are gradients of the log-probability over the parameters in `scope`, not of a loss: no sign change, no 1/N,
    no advantage factor. For an untied output layer alone w = ‖e_y − π‖²‖h‖²/τ²; the path norm at a rollout's first
    sampled token is that token's own. Padding is never read, whichever its side; position ids are
    cumsum(attention_mask) − 1. The model is left as found: parameters, `.grad`, `requires_grad` and training mode.

    Args:
        model: A causal language model with the Hugging Face call convention.
        input_ids: Token ids [N, L].
        mask: True at the tokens the policy sampled, the end token included [N, L]; gaps are allowed.
        attention_mask: True at real tokens [N, L]; None means that nothing is padding.
        engine: "fast" (a backward pass written by hand for Llama, Mistral, Qwen2 and Qwen3; raises where it does not
            follow the model), "generic" (batched signals, no weight gradients; raises where it has no rule),
            "reference" (one backward pass per token) or "auto" (fast, else generic where it is verified and pays, else
            reference; why an engine was passed over is logged).
        scope: "all" is every parameter that requires grad, tied ones once; "lm_head" the output layer's own use, also
            when it is tied; anything else a regular expression searched in the parameter names.
        path: Whether to measure path norms too.
        temperature: τ of the policy softmax(logits / τ).

    Returns:
        `norm_sq` [N, L] (norm²), `logprob` [N, L] (nats) and, if asked for, `path_norm_sq` [N, L] (norm²), float64,
        zero outside the mask; `engine` names the engine that ran.

    Raises:
        InputError: Something passed does not fit; the sentence says what and what to do.
        NonFiniteError: A logit is NaN or infinite; the sentence names rollout and token.
    """
    _known(engine)
    problem = prepare(model, Batch(input_ids, mask, attention_mask), scope, temperature)
    chosen = _engine(engine, problem)
    if path or engine == "reference":
        return chosen.token_score_norms(problem, path)
    once = distinct(problem)
    found = chosen.token_score_norms(once.problem, path)
    return replace(found, norm_sq=once.spread(found.norm_sq, problem), logprob=once.spread(found.logprob, problem))


@torch.inference_mode(False)
@torch.enable_grad()
def weighted_score_norms(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    attention_mask: Tensor | None = None,
    *,
    engine: str = "auto",
    scope: str = "all",
    temperature: float = 1.0,
) -> Float:
    """Exact squared norm of weighted sums of a rollout's scores.

    ‖Σ_t weights[n,m,t] s_{n,t}‖², s_{n,t} = ∇_θ log π(y_{n,t} | y_{n,<t}).

    Scores are gradients of the log-probability over the parameters in `scope`: no 1/N and no advantage factor beyond
    `weights`. Unit rows give `token_score_norms`, a row of ones the path norm of the whole rollout. A row of zeros
    costs nothing.

    Args:
        model: A causal language model with the Hugging Face call convention.
        input_ids: Token ids [N, L].
        mask: True at the tokens the policy sampled [N, L].
        weights: M rows of weights per rollout [N, M, L]; never read outside the mask.
        attention_mask: True at real tokens [N, L]; None means that nothing is padding.
        engine: As in `token_score_norms`.
        scope: As in `token_score_norms`.
        temperature: τ of the policy softmax(logits / τ).

    Returns:
        Squared norms [N, M], float64, in the square of the weights' unit times norm².

    Raises:
        InputError: Something passed does not fit; the sentence says what and what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
    """
    _known(engine)
    problem = prepare(model, Batch(input_ids, mask, attention_mask), scope, temperature)
    checked = check_weights(weights, problem.mask)
    chosen = _engine(engine, problem, checked.shape[1])
    if engine == "reference":
        return chosen.weighted_score_norms(problem, checked)
    once, twin = distinct_rollouts(problem, checked)
    return chosen.weighted_score_norms(once, checked)[twin]


@torch.inference_mode(False)
@torch.enable_grad()
def group_gradient_gram(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    group: Tensor | np.ndarray,
    attention_mask: Tensor | None = None,
    *,
    engine: str = "auto",
    scope: str = "all",
    temperature: float = 1.0,
) -> Float:
    """Inner products of the gradients of whole groups, for many rows of weights at once.

    G[m, m', p, p'] = ⟨g_{m,p}, g_{m',p'}⟩,  g_{m,p} = Σ_{n in p} Σ_t weights[n,m,t] s_{n,t}.

    g_{m,p} is the *sum* over the prompt's rollouts of log-probability gradients over the parameters in `scope`: no 1/N,
    no advantage factor beyond `weights`. Put 1/N_p into the weights (or divide by N_p N_p') for the mean gradient ḡ_p.
    Power, batch variance, bias, projection and paired intervals all follow from this matrix. With one rollout per
    prompt, G[m, m, p, p] is `weighted_score_norms`.

    Cost: a prompt's M rows are factored, and only the gradients of their r ≤ M basis rows are formed (`basis`): one
    forward and r + 1 backward passes of the prompt's rollouts, in one round over the model, one block of it at a time
    (`layered`). Each entry is right to 1e-6 of ‖g‖‖g'‖ in float32. A model that is not made of blocks has the basis'
    gradients formed whole, with one more round of passes for each 4 GiB of them (`gram.GRADIENT_BYTES`), and
    "reference" forms those of all M rows; `gram_from_features` estimates the matrix without any.

    Args:
        model: A causal language model with the Hugging Face call convention.
        input_ids: Token ids [N, L].
        mask: True at the tokens the policy sampled [N, L].
        weights: M rows of weights per rollout [N, M, L], usually advantages; never read outside the mask.
        group: Prompt of each rollout [N], any integers; axis p is ordered by the sorted distinct values.
        attention_mask: True at real tokens [N, L]; None means that nothing is padding.
        engine: As in `token_score_norms`.
        scope: As in `token_score_norms`.
        temperature: τ of the policy softmax(logits / τ).

    Returns:
        Gram matrix [M, M, P, P], float64, symmetric under exchange of (m, p) and (m', p').

    Raises:
        InputError: Something passed does not fit; the sentence says what and what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
    """
    _known(engine)
    problem = prepare(model, Batch(input_ids, mask, attention_mask), scope, temperature)
    checked = check_weights(weights, problem.mask), check_group(group, problem.shape[0])
    return ENGINES["generic" if engine == "auto" else engine].group_gradient_gram(problem, *checked)


def _known(name: str) -> None:
    if name not in (*ENGINES, "auto"):
        raise InputError(f"engine {name!r} is not available in this version; pass one of: {', '.join(ENGINES)}, auto.")


def _engine(name: str, problem: ScoreBatch, rows: int | None = None) -> Engine:
    if name == "auto":
        name = "fast" if fast.fits(problem) else "generic" if generic.fits(problem, rows) else "reference"
    return ENGINES[name]
