"""Time, memory and accuracy of every score-gradient engine beside a plain loop of one `autograd.grad` per token.

The loop's forward pass is not timed, every other row is one whole call. All rows take turns in every repetition, peers
in an interpreter of their own too. Every engine of `ENGINES` has its rows. Attribution is of whole batches as a rule,
so it is also measured on batches, beside one forward and one backward pass of the same batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.config import EngineConfig
from benchmarks.engine_cases import (
    LEFT_OUT,
    LOOP,
    LOOPED,
    REAL,
    STEP,
    Case,
    Exact,
    candidates,
    error_of,
    forward_backward,
    make_case,
    model_config,
    model_of,
    plain_loop,
)
from benchmarks.memory import in_fresh_process
from benchmarks.peer import peer
from benchmarks.peer_side import peak
from benchmarks.publish import Column, Report, Row, mebibytes_cell, notes_of, report_of, seconds_cell
from benchmarks.timing import Timing, interleaved, threads, timed
from otb_analysis.devices import device_of, words_of
from otb_analysis.errors import InputError
from otb_analysis.phases import plural

OPACUS = {"Opacus GradSampleModule": False, "Opacus ghost norms (untied)": True}
SCRIPT = Path(__file__).with_name("opacus_peer.py")
WARM_UP = 4
"""Tokens of the call before the first timed one: engines look at a model once, kernels are chosen once."""


def length(row: Row) -> str:
    """T, with N in front of it where there are several rollouts: "128", "8 × 128"."""
    return str(row["tokens"]) if row["rollouts"] == 1 else f"{row['rollouts']} × {row['tokens']}"


COLUMNS: dict[str, Column] = {
    "model": "{size}",
    "T": length,
    "what": "{name}",
    "seconds": seconds_cell,
    "median": "{median_seconds:.3f}",
    "loop ÷ it": "{loop_ratio:.2f}",
    "medians": "{loop_ratio_median:.2f}",
    "× fwd+bwd": "{step_ratio:.2f}",
    "MiB": mebibytes_cell,
    "error": "{error:.0e}",
}


class Recorder:
    """A call that remembers its last result, and the sentence with which it was refused."""

    def __init__(self, call: Callable[[], Any]):
        self.call, self.remark = call, ""
        self.result: Any = None

    def __call__(self) -> None:
        """Run unless it was refused before."""
        if self.remark:
            return
        try:
            self.result = self.call()
        except InputError as refusal:
            self.remark = str(refusal)


def run(config: EngineConfig) -> Report:
    """Measure every size and T, then the batches of that size.

    Raises:
        InputError: The peer's interpreter does not work.
    """
    rows: list[dict[str, Any]] = []
    with threads(config.threads):
        for size, places in config.places().items():
            model = model_of(size, config.device, config.dtype)
            for rollouts, tokens in places:
                rows += _measure(config, size, make_case(model, tokens, rollouts, size in REAL))
    _add_memory(config, rows)
    gpu = "" if config.device == "cpu" else f", on {words_of(torch.device(config.device))}"
    title = f"Exact score norms and their relatives, {config.dtype}, {plural(config.threads, 'thread')}{gpu}"
    names = [REAL[size] for size in config.sizes if size in REAL]
    name = "_".join(["engine", *names, *([config.dtype, str(config.threads)] if names else [])])
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config), name=name)


def peaks(config: EngineConfig, name: str, size: str, places: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the peak bytes of one row of a size at each of its places (N, T); for a fresh process."""
    torch.set_num_threads(config.threads)
    model = model_of(size, config.device, config.dtype)
    _calls(size, make_case(model, WARM_UP))[name]()
    calls = (_calls(size, make_case(model, tokens, rollouts))[name] for rollouts, tokens in places)
    return [peak(call, str(device_of(config.device))) for call in calls]


def _calls(size: str, case: Case) -> dict[str, Callable[[], Any]]:
    """What is measured of a case, by the names of its rows: of a batch the attributions alone."""
    step: dict[str, Callable[[], Any]] = {STEP: lambda: forward_backward(case)}
    if len(case.mask) > 1:
        return step | {name: call for name, call in candidates(case).items() if name.startswith("attribution")}
    calls = {LOOP: lambda: plain_loop(case, LOOPED if size in REAL else None)} | step | candidates(case)
    return {name: call for name, call in calls.items() if size not in REAL or not name.endswith(LEFT_OUT)}


def _measure(config: EngineConfig, size: str, case: Case) -> Iterator[dict[str, Any]]:
    rollouts, tokens = len(case.mask), case.mask.shape[1] - 1
    batch, real = rollouts > 1, size in REAL
    for call in _calls(size, case if batch else make_case(case.model, min(WARM_UP, tokens))).values():
        Recorder(call)()
    recorders = {name: Recorder(call) for name, call in _calls(size, case).items()}
    turns = {name: timed(call, config.device) for name, call in recorders.items()}
    if not batch:
        turns[LOOP] = lambda: _loop_seconds(recorders[LOOP])
    peers = {}
    with ExitStack() as stack:
        if config.opacus_python is not None and not batch and not real:
            spec: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
            spec |= {"model": model_config(size), "ids": case.input_ids.tolist()}
            for name, ghost in OPACUS.items():
                peers[name] = stack.enter_context(peer(config.opacus_python, SCRIPT, spec | {"ghost": ghost}))
        turns |= {name: running.turn for name, running in peers.items()}
        # The loop of a pretrained model is long even so: once is enough, and its time is not the others'.
        once = interleaved({LOOP: turns.pop(LOOP)}, 1) if real and not batch else {}
        timings = once | interleaved(turns, config.repeats, config.seconds, LOOP if LOOP in turns else STEP)
    exact = None if batch else Exact.of(case, real)
    for name in (*recorders, *(() if batch or real else OPACUS)):
        row = {"size": size, "rollouts": rollouts, "tokens": tokens, "name": name, "seconds": None}
        if name in peers:
            norm_sq = np.array([[0.0, *peers[name].facts["norm_sq"]]])
            error = error_of(name, (0.0, norm_sq), exact) if "untied" not in name else None
            row |= _times(name, timings) | {"memory": peers[name].facts["bytes"], "error": error}
        elif name in recorders and not recorders[name].remark:
            row |= _times(name, timings) | {"error": error_of(name, recorders[name].result, exact)}
        elif name in recorders:
            row |= {"remark": recorders[name].remark}
        yield row


def _loop_seconds(recorder: Recorder) -> float:
    """Run the plain loop; return its seconds without the forward pass."""
    recorder()
    return recorder.result[0]


def _times(name: str, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """A row's times, those of the plain loop over them, and its best over that of a forward and backward pass."""
    timing, loop = timings[name], timings.get(LOOP)
    return {
        "seconds": timing.minimum,
        "median_seconds": timing.median,
        "repeats": timing.repeats,
        "loop_ratio": None if loop is None else loop.minimum / timing.minimum,
        "loop_ratio_median": None if loop is None else loop.median / timing.median,
        "step_ratio": timing.minimum / timings[STEP].minimum,
    }


def _add_memory(config: EngineConfig, rows: list[dict[str, Any]]) -> None:
    """Fill in the memory of our rows: one fresh process per size and row name, its places one after the other."""
    for row in rows:
        row.setdefault("memory", None)
    ours = [row for row in rows if config.memory and row["seconds"] is not None and row["name"] not in OPACUS]
    for size, name in dict.fromkeys((row["size"], row["name"]) for row in ours):
        mine = [row for row in ours if (row["size"], row["name"]) == (size, name)]
        places = [(row["rollouts"], row["tokens"]) for row in mine]
        measured = in_fresh_process(peaks, config, name, size, places) or [None] * len(mine)
        for row, held in zip(mine, measured, strict=True):
            row["memory"] = held
