"""Peak memory of the exact engines as a text grows, beside one forward and one backward pass of the same text."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.config import LengthsConfig
from benchmarks.engine import STEP, Case, forward_backward, model_of
from benchmarks.peer_side import peak
from benchmarks.publish import Column, Report, mebibytes_cell, notes_of, report_of
from benchmarks.timing import in_fresh_process
from otb_analysis.gradients import ENGINES
from otb_analysis.gradients.batch.inputs import Batch, ScoreBatch, prepare
from otb_analysis.gradients.exact import generic
from otb_analysis.gradients.exact.generic import DecomposedRollout
from otb_analysis.gradients.exact.gram import NormAccumulator
from otb_analysis.gradients.exact.reference import Mix
from otb_analysis.gradients.manual import fast
from otb_analysis.gradients.manual.fast import ManualBackward

WARM_UP = 40
COLUMNS: dict[str, Column] = {
    "model": "{size}",
    "T": "{tokens}",
    "what": "{name}",
    "MiB": mebibytes_cell,
    "× fwd+bwd": "{ratio:.2f}",
    "asked for": "{asked:.0f}",
}


def run(config: LengthsConfig) -> Report:
    """Measure every engine at every length, each in a process of its own."""
    rows: list[dict[str, Any]] = []
    for tokens in config.tokens:
        found = {name: in_fresh_process(measured, config.size, tokens, name) for name in (STEP, *LAST_BLOCKS)}
        step = found[STEP]
        for name, both in found.items():
            held, asked = both or (None, None)
            ratio = held / step[0] if held and step and step[0] else None
            row = {"size": config.size, "tokens": tokens, "name": name, "memory": held, "ratio": ratio}
            rows.append(row | {"asked": None if asked is None else asked / 2**20})
    return report_of(config, "Peak extra memory of one text, float32, 1 thread", COLUMNS, rows, notes=notes_of(config))


def measured(size: str, tokens: int, name: str) -> tuple[int | None, int | None]:
    """Return peak bytes, and what the engine asks for (None of a forward and backward pass); for a fresh process."""
    torch.set_num_threads(1)
    model = model_of(size, "cpu", "float32")

    def call(length: int) -> tuple[Callable[[], object], ScoreBatch]:
        ids = torch.randint(model.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, 0] = False
        batch = prepare(model, Batch(ids, mask), "all", 1.0)
        if name == STEP:
            return partial(forward_backward, Case(model, ids, mask, np.zeros(0), {})), batch
        return partial(LAST_BLOCKS[name], batch), batch

    call(WARM_UP)[0]()
    run, batch = call(tokens)
    return peak(run, "cpu"), None if name == STEP else ENGINES[name].needed_bytes(batch, False)


@torch.no_grad()
def _fast(batch: ScoreBatch) -> None:
    manual = ManualBackward(fast.checked_layout(batch), batch.rollouts[0], 1.0)
    size, accumulator = manual.block_size, NormAccumulator(manual.work)
    for stop in (manual.rollout.length - size, manual.rollout.length):
        manual.below(Mix(None, slice(max(0, stop - size), max(stop, 1))), accumulator)
        accumulator.total()


def _generic(batch: ScoreBatch) -> None:
    decomposed = DecomposedRollout(batch, generic.plan_for(batch), batch.rollouts[0])
    size, stop = decomposed.block_size, 0
    for block in decomposed.rollout.blocks(size):
        start, stop = stop, stop + len(block.columns)
        if stop > len(decomposed.rollout.columns) - 2 * size:
            decomposed.below(block, Mix(None, slice(start, stop)), lambda _use, _coordinates: None)


LAST_BLOCKS: dict[str, Callable[[ScoreBatch], None]] = {"fast": _fast, "generic": _generic}
"""What an engine does first with a text whose every token was sampled, and with the last blocks of tokens, which reach
over all of it and take the most memory; the others would take hours."""
