"""The exact engine for Llama, Mistral, Qwen2 and Qwen3 models: forward and backward pass written by hand.

One forward pass of a rollout is kept; nothing is recomputed and no autograd graph is built. Blocks of tokens go back
together on the prefix that they see, as in the generic engine, but every layer is a few matrix products into memory
that is used again.
"""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.per_rollout import Asked, Norms, norms_of
from otb_analysis.gradients.exact.norm_accumulators import (
    NormAccumulator,
    Parts,
    Running,
    norm_sq,
    outer_norms,
    outer_row_norms,
)
from otb_analysis.gradients.exact.passes import Mix
from otb_analysis.gradients.exact.verdicts import Verdicts, fits_or_told, refuse_difference
from otb_analysis.gradients.manual.activations import SLICE_BYTES
from otb_analysis.gradients.manual.backward import SCORE_BYTES
from otb_analysis.gradients.manual.llama_layout import LlamaLayout, read
from otb_analysis.gradients.manual.manual_backward import ManualBackward
from otb_analysis.gradients.manual.support_check import FAMILIES

NAME = "fast"
BLOCK, CACHE_BYTES, SIGNAL_BYTES = 8, 1 << 21, 1 << 27
"""Tokens in a block, twice as many while their widest signal stays in cache, and what that signal may occupy."""

_CHECKED = Verdicts[None]()


@torch.no_grad()
def norms(batch: ScoreBatch, asked: Asked) -> Norms:
    """Squared norms of scores, of running sums and of weighted sums, without forming a gradient."""
    take_apart = partial(ManualBackward, checked_layout(batch), temperature=batch.temperature)
    return norms_of(batch, asked, take_apart, _token_norms, _row_norms)


def checked_layout(batch: ScoreBatch) -> LlamaLayout:
    """The model in parts, which at first use is checked against the model's own passes; raises if it does not fit."""
    layout = read(batch)
    if batch.rollouts:
        _CHECKED.get(batch, lambda: _check(batch, layout))
    return layout


def fits(batch: ScoreBatch, _asked: Asked | None = None) -> bool:
    """Whether "auto" should use this engine; a model that it does not support is logged once, with the reason."""
    return fits_or_told(batch, checked_layout, 'not measured by engine="fast"', logging.INFO)


def needed_bytes(batch: ScoreBatch, path: bool) -> int:
    """What measuring the longest rollout takes at most, about: activations, factors, the signals of a block, logits."""
    if not batch.rollouts or type(batch.model) not in FAMILIES:
        return 0  # nothing to measure, or refused by the engine in its own words
    longest: Rollout = max(batch.rollouts, key=lambda r: r.length)
    config: Any = batch.model.config
    length, width, inner, depth = longest.length, config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or width // config.num_attention_heads)
    size = max(4, batch.scope.parameters[0].element_size())
    # Two norms, four projections, three parts of the feed-forward layer, and the factors of its inputs.
    kept = 6 * width + 4 * heads + 3 * inner
    inputs = 2 * min(width, length) + min(heads, length) + min(inner, length)
    count = max(1, min(2 * BLOCK, SIGNAL_BYTES // (2 * length * inner * size)))
    signals = count * (length * (2 * inner + 4 * width + 4 * heads) + min(width, length) * max(inner, 3 * heads))
    numbers = depth * length * (kept + inputs) + signals + 3 * len(longest.columns) * config.vocab_size
    sums = min(width, length) * (3 * inner + 4 * heads) * depth if path else 0
    return size * (numbers + sums) + SCORE_BYTES + SLICE_BYTES


def _check(batch: ScoreBatch, layout: LlamaLayout) -> None:
    @torch.no_grad()
    def measure(rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        manual = ManualBackward(layout, rollout, batch.temperature)
        accumulator = Parts(manual.work)
        for name, left, right in manual.outer:
            accumulator.by_name[name] = accumulator.by_name.get(name, 0.0) + norm_sq(left) * norm_sq(right)
        manual.below(Mix(None, slice(None)), accumulator)
        return manual.logprob, accumulator.by_name

    refuse_difference(batch, "by hand", 'pass engine="generic"', measure)


def block_size(manual: ManualBackward) -> int:
    """Tokens whose signals travel together: fewer are slower to call, more waste the tail of their prefix."""
    widest = max(2 * len(layer.up.weight) for layer in manual.layout.layers)
    each = manual.rollout.length * widest * manual.token_signals.element_size()
    wanted = BLOCK if each * 2 * BLOCK > CACHE_BYTES else 2 * BLOCK
    return max(1, min(wanted, SIGNAL_BYTES // each))


def _token_norms(manual: ManualBackward, first: int, path: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, ‖s_t‖² and, if wanted, ‖Σ_{j≤t} s_j‖² of the sampled tokens from `first` on."""
    norms, path_norms = outer_norms(((left, right) for _, left, right in manual.outer), manual.token_signals, path)
    size = block_size(manual)
    # Running sums take a Gram matrix per coordinate row; without `path` lengths are enough.
    accumulator = Running(manual.work) if path else NormAccumulator(manual.work)
    for start in range(first, len(norms), size) if manual.layout.reaches_below else ():
        span = slice(start, start + size)
        manual.below(Mix(None, span), accumulator)
        single, running = accumulator.total()
        norms[span] += single
        if running is not None:
            path_norms[span] += running
    return manual.logprob[first:], norms[first:], path_norms[first:]


def _row_norms(manual: ManualBackward, rows: Tensor) -> Tensor:
    """‖Σ_k rows[m,k] s_k‖² of one rollout [M]."""
    rows = rows.to(manual.token_signals.device)
    result = outer_row_norms(((left, right) for _, left, right in manual.outer), rows)
    size, accumulator = block_size(manual), NormAccumulator(manual.work)
    for start in range(0, len(rows), size) if manual.layout.reaches_below else ():
        manual.below(Mix(rows[start : start + size], slice(None)), accumulator)
        result[start : start + size] += accumulator.total()[0]
    return result
