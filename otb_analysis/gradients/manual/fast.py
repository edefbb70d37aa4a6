"""The exact engine for Llama, Mistral, Qwen2 and Qwen3 models: forward and backward pass written by hand.

One forward pass of a rollout is kept; nothing is recomputed and no autograd graph is built. Blocks of tokens go back
together on the prefix that they see, as in the generic engine, but every layer is a few matrix products into memory
that is used again.
"""

import logging
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.per_rollout import norms_of_rows, norms_of_tokens
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.norm_accumulators import Parts, Running, Single, norm_sq, outer_gram
from otb_analysis.gradients.exact.plan import disagreement, probe, reference_norms
from otb_analysis.gradients.manual.llama_layout import LlamaLayout, read
from otb_analysis.gradients.manual.manual_backward import ManualBackward, Mix
from otb_analysis.types import Float, ScoreNorms

NAME = "fast"
BLOCK, CACHE_BYTES, SIGNAL_BYTES = 8, 1 << 21, 1 << 27
"""Tokens in a block, twice as many while their widest signal stays in cache, and what that signal may occupy."""

_log = logging.getLogger(__name__)
_VERDICTS: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str | None]] = WeakKeyDictionary()
_TOLD: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@torch.no_grad()
def token_score_norms(batch: ScoreBatch, path: bool) -> ScoreNorms:
    """Squared norm of every token's score, and with `path` of the running sums, without forming a gradient."""
    layout = checked_layout(batch)

    def measure(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        manual = ManualBackward(layout, rollout, batch.temperature)
        return manual.logprob, *_token_norms(manual, path)

    return norms_of_tokens(batch, NAME, path, measure)


@torch.no_grad()
def weighted_score_norms(batch: ScoreBatch, weights: Float) -> Float:
    """‖Σ_t weights[n,m,t] s_{n,t}‖² with one backward signal per row that is not all zero."""
    layout = checked_layout(batch)
    return norms_of_rows(
        batch, weights, lambda rollout, rows: _row_norms(ManualBackward(layout, rollout, batch.temperature), rows)
    )


def checked_layout(batch: ScoreBatch) -> LlamaLayout:
    """The model in parts, which at first use is checked against the model's own passes; raises if it does not fit."""
    layout = read(batch)
    verdicts, key = _VERDICTS.setdefault(batch.model, {}), _key(batch)
    if batch.rollouts and key not in verdicts:
        with torch.no_grad():
            verdicts[key] = _objection(batch, layout)
    if reason := verdicts.get(key):
        raise UnfitError(reason)
    return layout


def fits(batch: ScoreBatch) -> bool:
    """Whether "auto" should use this engine; a model that it does not support is logged once, with the reason."""
    try:
        checked_layout(batch)
    except UnfitError as reason:
        if _TOLD.get(batch.model) != str(reason):
            _TOLD[batch.model] = str(reason)
            _log.info('%s is not measured by engine="fast": %s', type(batch.model).__name__, reason)
        return False
    return True


def _key(batch: ScoreBatch) -> tuple[object, ...]:
    """What a verdict depends on besides the identity of the model: attention, dtypes, the scope and what layers run."""
    attention = getattr(getattr(batch.model, "config", None), "_attn_implementation", None)
    dtypes = tuple(p.dtype for p in batch.model.parameters())
    code = frozenset(type(module).forward for module in batch.model.modules())
    return batch.scope.names, batch.scope.head is None, attention, dtypes, code


def _objection(batch: ScoreBatch, layout: LlamaLayout) -> str | None:
    """Compare a probe's log-probabilities and, parameter by parameter, its norms with the reference computation."""
    rollout = probe(batch)
    try:
        manual = ManualBackward(layout, rollout, batch.temperature)
        with torch.enable_grad():
            expected, norms = reference_norms(batch, rollout)
    except NonFiniteError as error:  # says nothing about the layers, and the place is the probe's
        raise UnfitError(
            "logits are not finite on a probe of the vocabulary; check the model's weights for NaN or infinity, "
            'or pass engine="reference".'
        ) from error
    coarse = batch.scope.parameters[0].dtype.itemsize < 4
    off = float((manual.logprob.double() - expected).abs().max())
    if not off <= (0.2 if coarse else 1e-4):
        return f'log-probabilities by hand are {off:.2g} nats from the model\'s own; pass engine="generic".'
    reason = disagreement(batch, _parts(manual), norms)
    return f'{reason}; pass engine="generic".' if reason else None


def _parts(manual: ManualBackward) -> dict[str, Tensor]:
    """‖s_t‖² parameter by parameter, in one block."""
    accumulator = Parts(manual.work)
    for name, left, right in manual.outer:
        accumulator.by_name[name] = accumulator.by_name.get(name, 0.0) + norm_sq(left) * norm_sq(right)
    manual.below(Mix(None, slice(None)), accumulator)
    return accumulator.by_name


def block_size(manual: ManualBackward) -> int:
    """Tokens whose signals travel together: fewer are slower to call, more waste the tail of their prefix."""
    widest = max(2 * len(layer.up.weight) for layer in manual.layout.layers)
    each = manual.rollout.length * widest * manual.token_signals.element_size()
    wanted = BLOCK if each * 2 * BLOCK > CACHE_BYTES else 2 * BLOCK
    return max(1, min(wanted, SIGNAL_BYTES // each))


def _token_norms(manual: ManualBackward, path: bool) -> tuple[Tensor, Tensor]:
    """‖s_t‖² and, if asked for, ‖Σ_{j≤t} s_j‖² of a rollout's K sampled tokens."""
    count = len(manual.token_signals)
    norms = torch.zeros(count, dtype=torch.float64, device=manual.token_signals.device)
    path_norms = torch.zeros_like(norms)
    for _, left, right in manual.outer:
        norms += norm_sq(left) * norm_sq(right)
        if path:
            path_norms += outer_gram(left, right).cumsum(0).cumsum(1).diagonal()
    size = block_size(manual)
    accumulator = Running(manual.work) if path else Single(manual.work)
    for start in range(0, count, size) if manual.layout.reaches_below else ():
        span = slice(start, start + size)
        manual.below(Mix(None, span), accumulator)
        if isinstance(accumulator, Running):
            single, running = accumulator.total()
            path_norms[span] += running
        else:
            single = accumulator.total()
        norms[span] += single
    return norms, path_norms


def _row_norms(manual: ManualBackward, rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] s_k‖² of one rollout [M]."""
    rows = rows.to(manual.token_signals.device)
    result = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for _, left, right in manual.outer:
        result += (rows @ outer_gram(left, right) * rows).sum(-1)
    size, accumulator = block_size(manual), Single(manual.work)
    for start in range(0, len(rows), size) if manual.layout.reaches_below else ():
        manual.below(Mix(rows[start : start + size], slice(None)), accumulator)
        result[start : start + size] += accumulator.total()
    return result
