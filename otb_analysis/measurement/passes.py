"""A batch cut into forward passes that fit into memory and waste little on padding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.measurement.forward import ForwardOutputs, ForwardPass, NonFiniteScore, PolicyLogits, forward_pass
from otb_analysis.phases import advance, count_to
from otb_analysis.rollouts.models import output_layer
from otb_analysis.rollouts.prefix_cache import PrefixCache, read_prompts, supports_prefix_cache
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Int

POSITIONS, LOGIT_BYTES = 1 << 14, 1 << 30
"""Default limits of a micro-batch: padded positions, and bytes of float32 logits."""
SHORT = 1 << 11
"""Padded positions of one pass on a CPU; activations of more do not stay in its cache."""


@torch.no_grad()
def forward_statistics(
    model: PreTrainedModel,
    rollouts: Rollouts,
    temperature: float,
    size: int = 0,
    observe: Callable[[PolicyLogits], None] | None = None,
) -> ForwardPass:
    """Score a batch with every statistic of the level `forward`, in passes of at most `size` rollouts, without a graph.

    `size` 0 takes what fits into memory. `observe` is called with the logits of every pass.

    Raises:
        NonFiniteError: A logit at a policy token is NaN or infinite; the message names rollout and token.
    """
    shares = supports_prefix_cache(model)
    passes, outputs, wanted = [], [], ForwardOutputs(hidden=False, observe=observe)
    count_to(len(rollouts.group), "rollout")
    for rows in micro_batches(model, rollouts, size):
        part = rollouts.take(rows)
        for some, prompts in passes_of(model, part, shares):
            with rows_numbered(rows[some]):
                outputs.append(forward_pass(model, part.take(some), temperature, prompts, wanted))
            passes.append(rows[some])
            advance(len(some))
    return ForwardPass.concatenate(outputs, rollouts, passes)


def micro_batches(model: PreTrainedModel, rollouts: Rollouts, size: int = 0, rows: Int | None = None) -> list[Int]:
    """Cut a batch, or some rows of it, into parts of `size` rollouts; 0 takes what fits into memory."""
    index = np.arange(len(rollouts.group)) if rows is None else rows
    vocabulary = next(output_layer(model).parameters()).shape[0]
    fits = min(POSITIONS, LOGIT_BYTES // (4 * vocabulary)) // max(rollouts.input_ids.shape[1], 1)
    size = size or max(1, fits)
    return [index[start : start + size] for start in range(0, len(index), size)]


def passes_of(model: PreTrainedModel, rollouts: Rollouts, shares: bool) -> Iterator[tuple[Int, PrefixCache | None]]:
    """Cut a micro-batch into passes, each with its prompts read once where the model `shares` them."""
    prompts = read_prompts(model, rollouts) if shares else None
    length = rollouts.attention_mask.sum(axis=1) if prompts is None else rollouts.completion_length
    for rows in short_passes(length, model.device):
        # A completion of one token needs no position after the prompt.
        goes_on = prompts is not None and rollouts.completion_length[rows].max() > 1
        yield rows, prompts.take(rows) if prompts is not None and goes_on else None


def short_passes(length: Int, device: torch.device) -> list[Int]:
    """Cut a batch into passes of rollouts of like length [N], shortest first: little padding, and a warm CPU cache.

    There are as few passes as `SHORT` allows, because each has a fixed cost; then the largest is as small as possible.
    A GPU takes the batch as it is.
    """
    if device.type != "cpu":
        return [np.arange(len(length))]
    order = np.argsort(length, kind="stable")
    low, high = 0, SHORT
    fewest = len(_passes(length, order, high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_passes(length, order, middle)) == fewest else (middle, high)
    return _passes(length, order, high)


def _passes(length: Int, order: Int, most: int) -> list[Int]:
    """Fill one pass after the other, in this order, with at most `most` padded positions; a longer rollout is alone."""
    cuts, first = [], 0
    for i, positions in enumerate(length[order].tolist()):
        if i > first and (i + 1 - first) * positions > most:
            cuts.append(i)
            first = i
    return np.split(order, cuts)


@contextmanager
def rows_numbered(rows: Int) -> Iterator[None]:
    """Correct the rollout's number in an error: the pass counts its own rows, the batch has others."""
    try:
        yield
    except NonFiniteScore as error:
        raise NonFiniteScore(int(rows[error.row]), error.token) from error
