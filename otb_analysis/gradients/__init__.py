"""Exact norms and inner products of score gradients, their sketches, and their attribution to tokens.

The score of token t is s_t = ∇_θ log π(y_t | x, y_{<t}): the gradient of a *log-probability* (not of a loss) over the
parameters in scope, without 1/N and without an advantage factor.

| function                                      | what it returns                              | folders          |
|-----------------------------------------------|----------------------------------------------|------------------|
| `token_score_norms`                           | ‖s_t‖² of every token, path norms            | manual, exact    |
| `weighted_score_norms`                        | ‖Σ_t w_t s_t‖² of every rollout              | manual, exact    |
| `group_gradient_gram`                         | ⟨g_p, g_p'⟩ of whole groups' gradients       | groups, exact    |
| `sketch_score_norms`                          | ‖s_t‖² estimated, with standard errors       | sketched, exact  |
| `gradient_sketch`, `count_sketch`             | short vectors with the inner products of g_p | sketched         |
| `sketched_group_gram`                         | ⟨g_p, g_p'⟩ from those                       | sketched, groups |
| `sampled_score_norms`                         | ‖s_t‖² of randomly drawn tokens              | sampled.py       |
| `gradient_attribution`, `signal_noise`        | each token's share of ‖ḡ‖²                   | attribution.py   |
| `batch_gradient`                              | ḡ, as a direction for the attribution        | attribution.py   |

Every function starts from `batch`, which checks the arguments and strips the padding. A folder imports only from those
above it: batch · exact · manual · groups · sketched; the room's own files stand above them all.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError
from otb_analysis.gradients.attribution import batch_gradient, gradient_attribution, signal_noise
from otb_analysis.gradients.batch.forward import sampled_nodes, tree_of
from otb_analysis.gradients.batch.inputs import (
    Batch,
    ScoreBatch,
    Weights,
    check_group,
    check_weights,
    free_bytes,
    gibibytes,
    measured,
    memory_bytes,
    restricted,
)
from otb_analysis.gradients.batch.soft import SoftTokens
from otb_analysis.gradients.exact import generic, reference
from otb_analysis.gradients.exact.reference import Asked, Norms
from otb_analysis.gradients.exact.verdicts import first_told
from otb_analysis.gradients.groups import group_gram
from otb_analysis.gradients.manual import fast
from otb_analysis.gradients.sampled import sampled_score_norms
from otb_analysis.gradients.sketched.score_sketch import sketch_score_norms
from otb_analysis.gradients.sketched.sketch import count_sketch, gradient_sketch, sketched_group_gram
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.types import Float, Int, ScoreNorms

__all__ = [
    "ENGINES",
    "Engine",
    "SoftTokens",
    "batch_gradient",
    "count_sketch",
    "gradient_attribution",
    "gradient_sketch",
    "group_gradient_gram",
    "sampled_score_norms",
    "signal_noise",
    "sketch_score_norms",
    "sketched_group_gram",
    "token_score_norms",
    "weighted_score_norms",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """How one engine answers the questions; every engine gives the same numbers."""

    norms: Callable[[ScoreBatch, Asked], Norms]
    group_gradient_gram: Callable[[ScoreBatch, Float, Int, Processes], Float]
    fits: Callable[[ScoreBatch, Asked], bool] = lambda _batch, _asked: True
    """Whether "auto" takes it for norms; why not is logged."""
    needed_bytes: Callable[[ScoreBatch, bool], int] = lambda _batch, _path: 0
    """What norms of the longest rollout take, with path norms or not."""


def _plain_gram(batch: ScoreBatch, weights: Float, group: Int, processes: Processes) -> Float:
    """Plain backward passes are not shared out: they are what others are tested against."""
    return processes.broadcast_from_main(lambda: reference.group_gradient_gram(batch, weights, group))


ENGINES: dict[str, Engine] = {
    "fast": Engine(fast.norms, group_gram.group_gradient_gram, fast.fits, fast.needed_bytes),
    "generic": Engine(generic.norms, group_gram.group_gradient_gram, generic.fits, generic.needed_bytes),
    "reference": Engine(reference.norms, _plain_gram, needed_bytes=reference.needed_bytes),
}
"""Engines of this version, best first. `reference` takes M ordinary backward passes per prompt for a Gram matrix, the
others as many as the prompt's weights have rank."""


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
    whole: bool = False,
    temperature: float = 1.0,
    soft: SoftTokens | None = None,
) -> ScoreNorms:
    """Exact squared norm of every sampled token's score.

    w_{n,t} = ‖s_{n,t}‖², s_{n,t} = ∇_θ log π(y_{n,t} | y_{n,<t}), with `path` also ‖Σ_{j≤t} s_{n,j}‖² and with `whole`
    ‖Σ_t s_{n,t}‖², from the same forward pass.

    Scores are gradients of the log-probability over the parameters in `scope`, not of a loss: no sign change, no 1/N,
    no advantage factor. For an untied output layer alone w = ‖e_y − π‖²‖h‖²/τ². Padding is never read, whichever its
    side; position ids are cumsum(attention_mask) − 1. The model is left as found.

    Args:
        model: A causal language model with the Hugging Face call convention.
        input_ids: Token ids [N, L].
        mask: True at the tokens the policy sampled, the end token included [N, L]; gaps are allowed.
        attention_mask: True at real tokens [N, L]; None means that nothing is padding.
        engine: "fast" (a backward pass written by hand for Llama, Mistral, Qwen2 and Qwen3; raises for other models),
            "generic" (batched signals, no weight gradients; raises where it has no rule), "reference" (one backward
            pass per token) or "auto" (fast, else generic where it is verified and pays, else reference; why an engine
            was passed over is logged).
        scope: "all" is every parameter that requires grad, tied ones once; "lm_head" the output layer's own use, also
            when it is tied; anything else a regular expression searched in the parameter names.
        path: Whether to measure path norms too.
        whole: Whether to measure the norm of every whole rollout too, for one more backward signal.
        temperature: τ of the policy softmax(logits / τ).
        soft: Soft tokens behind ids beyond the vocabulary, each with the score of its log-density; "auto" is then
            "reference".

    Returns:
        `norm_sq` [N, L] (norm²), `logprob` [N, L] (nats) and, if asked for, `path_norm_sq` [N, L] and `rollout_norm_sq`
        [N] (norm²), float64, zero outside the mask; `engine` names the engine that ran.

    Raises:
        InputError: An argument does not fit; the sentence says what and what to do.
        NonFiniteError: A logit is NaN or infinite; the sentence names rollout and token.
    """
    _check_engine(engine)
    with measured(model, Batch(input_ids, mask, attention_mask), scope, temperature, soft) as batch:
        asked = Asked.of_tokens(batch, path)
        name, norms = _norms(batch, engine, replace(asked, weights=batch.mask[:, None] * 1.0) if whole else asked)
    of_paths, of_rollouts = norms.path_norm_sq if path else None, norms.weighted[:, 0] if whole else None
    return ScoreNorms(norms.norm_sq, norms.logprob, name, of_paths, rollout_norm_sq=of_rollouts)


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
    soft: SoftTokens | None = None,
) -> Float:
    """Exact squared norm [N, M] of weighted sums of a rollout's scores, float64.

    ‖Σ_t weights[n,m,t] s_{n,t}‖², s_{n,t} = ∇_θ log π(y_{n,t} | y_{n,<t}).

    Scores are gradients of the log-probability over the parameters in `scope`: no 1/N and no advantage factor beyond
    `weights` [N, M, L], which are never read outside the mask. Unit rows give `token_score_norms`, a row of ones the
    path norm of the whole rollout. A row of zeros costs nothing. The other arguments are those of `token_score_norms`.

    Raises:
        InputError: An argument does not fit; the sentence says what and what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
    """
    _check_engine(engine)
    with measured(model, Batch(input_ids, mask, attention_mask), scope, temperature, soft) as batch:
        asked = Asked(np.zeros_like(batch.mask), check_weights(weights, batch.mask))
        return _norms(batch, engine, asked)[1].weighted


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
    soft: SoftTokens | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> Float:
    """Inner products of the gradients of whole groups [M, M, P, P], for M rows of weights at once, float64.

    G[m, m', p, p'] = ⟨g_{m,p}, g_{m',p'}⟩,  g_{m,p} = Σ_{n in p} Σ_t weights[n,m,t] s_{n,t}.

    g_{m,p} is the *sum* over the prompt's rollouts of log-probability gradients over the parameters in `scope`: no 1/N,
    no advantage factor beyond `weights` [N, M, L]. Put 1/N_p into the weights (or divide by N_p N_p') for the mean
    gradient ḡ_p. `group` holds the prompt of each rollout [N], any integers; axis p is ordered by the distinct values.
    Power, batch variance, bias, projection and paired intervals all follow from this matrix. With one rollout per
    prompt, G[m, m, p, p] is `weighted_score_norms`. The other arguments are those of `token_score_norms`.

    Cost: one forward and r + 1 backward passes of a prompt's rollouts, r ≤ M the rank of its rows, one block of the
    model at a time (`basis`, `layered`); where memory is short, of some of the rollouts at a time, and where signals do
    not fit in half of it, two parts of the batch at a time: with k parts k − 1 times the passes. In float32 each
    entry is that of plain backward passes to 1e-6 of ‖g‖‖g'‖; recurrent layers round by 1e-5 themselves. A model that
    is not made of blocks has r gradients formed whole, in one more round for each 4 GiB of them
    (`gram.GRADIENT_BYTES`), and "reference" those of all M rows.

    `processes` share the prompts out: each holds the whole model, calls with the same arguments, and gets the whole
    matrix. They pass on half of the gradients' bytes (two of them) or more.

    Raises:
        InputError: An argument does not fit; the sentence says what and what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
        ProcessError: Another process failed.
    """
    _check_engine(engine)
    arguments = model, Batch(input_ids, mask, attention_mask), scope, temperature, soft
    with ExitStack() as copies:
        batch = processes.agreed(lambda: copies.enter_context(measured(*arguments)))
        checked = check_weights(weights, batch.mask), check_group(group, batch.shape[0])
        name = "generic" if engine == "auto" else engine
        if soft is not None:
            name = _chosen(engine, batch, Asked.of_tokens(batch))
        return ENGINES[name].group_gradient_gram(batch, *checked, processes)


def _check_engine(name: str) -> None:
    if name not in (*ENGINES, "auto"):
        raise InputError(f"engine {name!r} is not available in this version; pass one of: {', '.join(ENGINES)}, auto.")


def _norms(batch: ScoreBatch, engine: str, asked: Asked) -> tuple[str, Norms]:
    """The engine that ran and what it found; what rollouts have in common is measured once."""
    name = _chosen(engine, batch, asked)
    run = ENGINES[name].norms
    if engine == "reference" or asked.path or not batch.rollouts:
        return name, run(batch, asked)
    # Equal texts have equal scores, which rollouts of one prompt often share at their beginning: the first of them is
    # measured for all. Rows and columns of the tokens, and of those that stand for them.
    row, column = np.nonzero(batch.mask)
    nodes = sampled_nodes(batch.rollouts, tree_of(batch.rollouts))
    _, first, twin = np.unique(nodes, return_index=True, return_inverse=True)
    kept = np.zeros_like(batch.mask)
    kept[row[first], column[first]] = True
    once, rows = restricted(batch, kept), np.arange(batch.shape[0])
    if asked.weights.any():
        # A rollout that has another one's text and weights is left out, and takes that one's norms.
        known, different = dict[tuple[bytes, ...], int](), []
        for rollout in batch.rollouts:
            weights = asked.weights[rollout.row][:, rollout.columns]
            key = tuple(x.tobytes() for x in (rollout.ids.cpu().numpy(), rollout.targets.cpu().numpy(), weights))
            rows[rollout.row] = known.setdefault(key, rollout.row)
            if rows[rollout.row] == rollout.row:
                different.append(rollout)
        once = replace(batch, rollouts=tuple(different))
    norms = run(once, replace(asked, tokens=asked.tokens & kept))
    by_token = {"norm_sq": np.zeros(batch.shape), "logprob": np.zeros(batch.shape)}
    for field, values in by_token.items():
        values[batch.mask] = getattr(norms, field)[row[first[twin]], column[first[twin]]]
    return name, replace(norms, **by_token, weighted=norms.weighted[rows])


def _chosen(name: str, batch: ScoreBatch, asked: Asked) -> str:
    """The engine of a name, or the first of "auto" that has a rule for the model; with the memory that it needs."""
    if batch.soft is not None and name not in ("auto", "reference"):
        raise InputError(f'engine {name!r} has no rule for soft tokens; pass engine="reference".')
    tried = ("reference",) if batch.soft is not None else ENGINES if name == "auto" else (name,)
    device = batch.scope.parameters[0].device
    free, lacking = free_bytes(device), list[str]()
    for one in tried:
        if name == "auto" and not ENGINES[one].fits(batch, asked):
            continue
        needed = ENGINES[one].needed_bytes(batch, asked.path)
        if needed <= free:
            if lacking and first_told(batch.model, sentence := f"{one} measures, because {' and '.join(lacking)}."):
                _log.warning(sentence)
            return one
        longest = max(batch.rollouts, key=lambda r: r.length)
        lacking.append(f"{one} needs {gibibytes(needed)} for rollout {longest.row} of {len(longest.ids)} tokens")
    raise InputError(
        f"engine {' and '.join(lacking)} but {gibibytes(free)} of {gibibytes(memory_bytes(device))} are free; pass "
        "shorter rollouts, a smaller scope"
        + (', engine="auto"' if name != "auto" else "")
        + " or estimate the norms by sketch_score_norms."
    )
