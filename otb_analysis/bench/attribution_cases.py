"""Attribution of whole batches, which is what it is for, beside one forward and one backward pass of the same batch."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from otb_analysis.bench.config import EngineConfig
from otb_analysis.bench.engine_cases import STEP, Case, candidates, forward_backward
from otb_analysis.bench.engine_rows import EngineRow, Recorder
from otb_analysis.bench.timing import interleaved, timed
from otb_analysis.types import Attribution


def batch_calls(case: Case) -> dict[str, Callable[[], Any]]:
    """Return the yardstick and the attributions of a batch by the names of their rows."""
    runs = {name: run for name, run in candidates(case).items() if name.startswith("attribution")}
    return {STEP: lambda: forward_backward(case)} | runs


def measure_batch(config: EngineConfig, place: tuple[str, int, int], case: Case) -> Iterator[EngineRow]:
    """Let the calls of one batch take turns.

    Args:
        config: Repetitions, time limit and device.
        place: Model, N and T.
        case: The batch.
    """
    recorders = {name: Recorder(run) for name, run in batch_calls(case).items()}
    for recorder in recorders.values():
        recorder()  # engines look at a model once, and memory is fetched from the system once
    turns = {name: timed(run, config.device) for name, run in recorders.items()}
    found = interleaved(turns, config.repeats, config.seconds, STEP)
    for name, recorder in recorders.items():
        row = EngineRow(*place, name)
        if recorder.remark:
            yield replace(row, remark=recorder.remark)
        else:
            yield replace(row, **row.timed(found), error=sum_error(recorder.result))


def sum_error(result: object) -> float | None:
    """|Σ share / ‖ḡ‖² − 1| of an attribution along the batch's own gradient ḡ, None of anything else."""
    return abs(float(result.share.sum()) / result.norm_sq - 1) if isinstance(result, Attribution) else None
