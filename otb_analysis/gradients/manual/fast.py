"""The exact engine for Llama, Mistral, Qwen2 and Qwen3 models: forward and backward pass written by hand.

One forward pass of a rollout is kept; nothing is recomputed and no autograd graph is built. Blocks of tokens go back
together on the prefix that they see, as in the generic engine, but every layer is a few matrix products into memory
that is used again.
"""

import logging
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.inputs import ScoreBatch
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.norm_accumulators import Parts, Running, Single, norm_sq, outer_gram
from otb_analysis.gradients.exact.plan import disagreement, length, probe, reference_norms
from otb_analysis.gradients.manual.llama_layout import Anatomy, read
from otb_analysis.gradients.manual.manual_backward import Mix, Unrolled
from otb_analysis.phases import counted
from otb_analysis.types import Float, ScoreNorms

NAME = "fast"
BLOCK, CACHE_BYTES, SIGNAL_BYTES = 8, 1 << 21, 1 << 27
"""Tokens in a block, twice as many while their widest signal stays in cache, and what that signal may occupy."""

_log = logging.getLogger(__name__)
_VERDICTS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str | None]] = WeakKeyDictionary()
_TOLD: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@torch.no_grad()
def token_score_norms(problem: ScoreBatch, path: bool) -> ScoreNorms:
    """Squared norm of every token's score, and with `path` of the running sums, without forming a gradient.

    Args:
        problem: The checked batch.
        path: Also keep a running sum of the signals' coordinates from token to token.

    Raises:
        UnfitError: The model is not one that the engine follows; the sentence says why.
    """
    norms, path_norms, logprob = (np.zeros(problem.shape) for _ in range(3))
    anatomy = anatomy_for(problem)
    for rollout in counted(problem.rollouts, "rollout"):
        where = rollout.row, rollout.columns
        unrolled = Unrolled(anatomy, rollout, problem.temperature)
        logprob[where] = unrolled.logprob.double().cpu().numpy()
        single, running = _token_norms(unrolled, path)
        norms[where], path_norms[where] = single.cpu().numpy(), running.cpu().numpy()
    return ScoreNorms(norms, logprob, NAME, path_norms if path else None)


@torch.no_grad()
def weighted_score_norms(problem: ScoreBatch, weights: Float) -> Float:
    """‖Σ_t weights[n,m,t] s_{n,t}‖² with one backward signal per row that is not all zero.

    Raises:
        UnfitError: The model is not one that the engine follows; the sentence says why.
    """
    anatomy = anatomy_for(problem)
    result = np.zeros(weights.shape[:2])
    for rollout in counted(problem.rollouts, "rollout"):
        rows = weights[rollout.row][:, rollout.columns]
        active = np.flatnonzero(rows.any(-1))
        if len(active):
            unrolled = Unrolled(anatomy, rollout, problem.temperature)
            found = _weighted_norms(unrolled, torch.from_numpy(rows[active]).to(unrolled.own.device))
            result[rollout.row, active] = found.cpu().numpy()
    return result


def anatomy_for(problem: ScoreBatch) -> Anatomy:
    """The model in parts, which at first use is checked against the model's own passes.

    Raises:
        UnfitError: The model or the scope does not fit.
    """
    anatomy = read(problem)
    verdicts, key = _VERDICTS.setdefault(problem.model, {}), _key(problem)
    if problem.rollouts and key not in verdicts:
        with torch.no_grad():
            verdicts[key] = _objection(problem, anatomy)
    if reason := verdicts.get(key):
        raise UnfitError(reason)
    return anatomy


def fits(problem: ScoreBatch) -> bool:
    """Whether "auto" should use this engine; why it does not follow a model is logged once."""
    try:
        anatomy_for(problem)
    except UnfitError as reason:
        if _TOLD.get(problem.model) != str(reason):
            _TOLD[problem.model] = str(reason)
            _log.info('%s is not measured by engine="fast": %s', type(problem.model).__name__, reason)
        return False
    return True


def _key(problem: ScoreBatch) -> tuple[object, ...]:
    """What a verdict depends on besides the identity of the model: attention, dtypes, the scope and what layers run."""
    attention = getattr(getattr(problem.model, "config", None), "_attn_implementation", None)
    dtypes = tuple(p.dtype for p in problem.model.parameters())
    code = frozenset(type(module).forward for module in problem.model.modules())
    return problem.scope.names, problem.scope.head is None, attention, dtypes, code


def _objection(problem: ScoreBatch, anatomy: Anatomy) -> str | None:
    """Compare a probe's log-probabilities and, parameter by parameter, its norms with the reference computation."""
    rollout = probe(problem)
    try:
        unrolled = Unrolled(anatomy, rollout, problem.temperature)
        with torch.enable_grad():
            expected, norms = reference_norms(problem, rollout)
    except NonFiniteError as error:  # says nothing about the layers, and the place is the probe's
        raise UnfitError(
            "logits are not finite on a probe of the vocabulary; check the model's weights for NaN or infinity, "
            'or pass engine="reference".'
        ) from error
    coarse = problem.scope.parameters[0].dtype.itemsize < 4
    off = float((unrolled.logprob.double() - expected).abs().max())
    if not off <= (0.2 if coarse else 1e-4):
        return f'log-probabilities by hand are {off:.2g} nats from the model\'s own; pass engine="generic".'
    found = disagreement(problem, _parts(unrolled), norms)
    return f'{found}; pass engine="generic".' if found else None


def _parts(unrolled: Unrolled) -> dict[str, Tensor]:
    """‖s_t‖² parameter by parameter, in one block."""
    tally = Parts(unrolled.work)
    for name, left, right in unrolled.outer:
        tally.by_name[name] = tally.by_name.get(name, 0.0) + norm_sq(left) * norm_sq(right)
    unrolled.below(Mix(None, slice(None)), tally)
    return tally.by_name


def block_size(unrolled: Unrolled) -> int:
    """Tokens whose signals travel together: fewer are slower to call, more waste the tail of their prefix."""
    widest = max(2 * len(layer.up.weight) for layer in unrolled.anatomy.layers)
    each = length(unrolled.rollout) * widest * unrolled.own.element_size()
    wanted = BLOCK if each * 2 * BLOCK > CACHE_BYTES else 2 * BLOCK
    return max(1, min(wanted, SIGNAL_BYTES // each))


def _token_norms(unrolled: Unrolled, path: bool) -> tuple[Tensor, Tensor]:
    """‖s_t‖² and, if asked for, ‖Σ_{j≤t} s_j‖² of a rollout's K sampled tokens."""
    count = len(unrolled.own)
    norms = torch.zeros(count, dtype=torch.float64, device=unrolled.own.device)
    path_norms = torch.zeros_like(norms)
    for _, left, right in unrolled.outer:
        norms += norm_sq(left) * norm_sq(right)
        if path:
            path_norms += outer_gram(left, right).cumsum(0).cumsum(1).diagonal()
    size = block_size(unrolled)
    tally = Running(unrolled.work) if path else Single(unrolled.work)
    for start in range(0, count, size) if unrolled.anatomy.reaches_below else ():
        span = slice(start, start + size)
        unrolled.below(Mix(None, span), tally)
        if isinstance(tally, Running):
            single, running = tally.total()
            path_norms[span] += running
        else:
            single = tally.total()
        norms[span] += single
    return norms, path_norms


def _weighted_norms(unrolled: Unrolled, rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] s_k‖² of one rollout [M]."""
    result = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for _, left, right in unrolled.outer:
        result += (rows @ outer_gram(left, right) * rows).sum(-1)
    size, tally = block_size(unrolled), Single(unrolled.work)
    for start in range(0, len(rows), size) if unrolled.anatomy.reaches_below else ():
        unrolled.below(Mix(rows[start : start + size], slice(None)), tally)
        result[start : start + size] += tally.total()
    return result
