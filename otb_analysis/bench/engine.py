"""Time, memory and accuracy of every score-gradient engine beside a plain loop of one `autograd.grad` per token.

The loop's forward pass is not timed, every other row is one whole call. All rows take turns in every repetition, peers
in an interpreter of their own too. Whatever is in `ENGINES` is in the table. Attribution is of whole batches as a rule,
so it is also measured on batches, beside one forward and one backward pass of the same batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.bench.config import EngineConfig
from otb_analysis.bench.engine_cases import (
    LOOP,
    STEP,
    Case,
    Exact,
    candidates,
    error_of,
    forward_backward,
    make_case,
    make_model,
    model_config,
    plain_loop,
)
from otb_analysis.bench.memory import fresh_peaks
from otb_analysis.bench.peer import peer
from otb_analysis.bench.publish import Column, Report, Row, mebibytes_cell, report_of, seconds_cell
from otb_analysis.bench.timing import Timing, interleaved, threads, timed
from otb_analysis.errors import InputError

OPACUS = {"Opacus GradSampleModule": False, "Opacus ghost norms (untied)": True}
SCRIPT = Path(__file__).with_name("opacus_peer.py")
WARM_UP = 4
"""Tokens of the call before the first timed one: engines look at a model once, kernels are chosen once."""
NOT_MEASURED = {
    **dict.fromkeys(("seconds", "median_seconds")), "repeats": 0,
    **dict.fromkeys(("loop_ratio", "loop_ratio_median", "step_ratio", "memory", "error")), "remark": "",
}  # fmt: skip
"""A row before anything is known of it; `remark` says why it was not measured."""


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
        self.call, self.result, self.remark = call, None, ""

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
        InputError: There is no GPU, or the peer's interpreter does not work.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda but torch sees no GPU; pass --device cpu.")
    rows: list[dict[str, Any]] = []
    places = [(size, 1, tokens) for size, tokens in config.cases()]
    with threads(1):
        for size in dict.fromkeys(size for size, _, _ in places):
            model = make_model(size, config.device, config.dtype)
            for _, rollouts, tokens in (p for p in (*places, *config.batches()) if p[0] == size):
                rows += _measure(config, size, make_case(model, tokens, rollouts))
    if not config.quick:
        _add_memory(config, rows)
    gpu = f", on {torch.cuda.get_device_name()}" if config.device == "cuda" else ""
    title = f"Exact score norms and their relatives, {config.dtype}, one thread{gpu}"
    return report_of(config, title, COLUMNS, rows, notes=_notes(config))


def memory_jobs(spec: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Yield (label, call, device) of one row at each of its places, in their order, for a fresh process.

    Args:
        spec: "name" of the row, "places" (size, N and T), "device" and "dtype".
    """
    name, device = spec["name"], spec["device"]
    torch.set_num_threads(1)
    for size in dict.fromkeys(size for size, _, _ in spec["places"]):
        model = make_model(size, device, spec["dtype"])
        _calls(make_case(model, WARM_UP), device)[name]()
        for _, rollouts, tokens in (p for p in spec["places"] if p[0] == size):
            call = _calls(make_case(model, tokens, rollouts), device)[name]
            yield f"{size} {length({'rollouts': rollouts, 'tokens': tokens})}", call, device


def _calls(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    """What is measured of a case, by the names of its rows: of a batch the attributions alone."""
    step: dict[str, Callable[[], Any]] = {STEP: lambda: forward_backward(case)}
    if len(case.mask) > 1:
        return step | {name: call for name, call in candidates(case).items() if name.startswith("attribution")}
    return {LOOP: lambda: plain_loop(case, device)} | step | candidates(case)


def _measure(config: EngineConfig, size: str, case: Case) -> Iterator[dict[str, Any]]:
    rollouts, tokens = len(case.mask), case.mask.shape[1] - 1
    place = {"size": size, "rollouts": rollouts, "tokens": tokens}
    batch, peers, exact = rollouts > 1, {}, None
    for call in _calls(case if batch else make_case(case.model, min(WARM_UP, tokens)), config.device).values():
        Recorder(call)()
    recorders = {name: Recorder(call) for name, call in _calls(case, config.device).items()}
    turns = {name: timed(call, config.device) for name, call in recorders.items()}
    if not batch:
        turns[LOOP] = lambda: _loop_seconds(recorders[LOOP])
    with ExitStack() as stack:
        if config.opacus_python is not None and not batch:
            spec = {"model": model_config(size), "tokens": tokens, "device": config.device, "dtype": config.dtype}
            for name, ghost in OPACUS.items():
                peers[name] = stack.enter_context(peer(config.opacus_python, SCRIPT, spec | {"ghost": ghost}))
        turns |= {name: running.turn for name, running in peers.items()}
        timings = interleaved(turns, config.repeats, config.seconds, STEP if batch else LOOP)
    if not batch:
        exact = Exact.of(replace(case, model=deepcopy(case.model).double()))
    for name, recorder in recorders.items():
        row = place | {"name": name} | NOT_MEASURED | {"remark": recorder.remark}
        if not recorder.remark:
            row |= _times(name, timings) | {"error": error_of(name, recorder.result, exact)}
        yield row
    for name in OPACUS if exact is not None else ():
        row = place | {"name": name} | NOT_MEASURED | {"remark": "no --opacus-python was given"}
        if name in peers:
            norm_sq = np.concatenate([[0.0], peers[name].facts["norm_sq"]])[None]
            error = error_of(name, (0.0, norm_sq), exact) if "untied" not in name else None
            row |= _times(name, timings) | {"memory": peers[name].facts["bytes"], "error": error, "remark": ""}
        yield row


def _loop_seconds(recorder: Recorder) -> float:
    recorder()
    return recorder.result[0] if recorder.result else math.nan


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
    """Fill in the memory of our rows: one fresh process per row name, its places one after the other."""
    measured = [row for row in rows if row["seconds"] is not None and row["name"] not in OPACUS]
    for name in dict.fromkeys(row["name"] for row in measured):
        mine = [row for row in measured if row["name"] == name]
        places = [(row["size"], row["rollouts"], row["tokens"]) for row in mine]
        peaks = fresh_peaks(__name__, {"name": name, "places": places, "device": config.device, "dtype": config.dtype})
        for row in mine:
            row["memory"] = peaks.get(f"{row['size']} {length(row)}")


def _notes(config: EngineConfig) -> list[str]:
    sizes = "S 4 layers d128 V512 (0.85 M parameters), M 8 layers d512 V8192 (29 M), L 12 layers d768 V32768 (110 M)"
    notes = [
        f"Qwen2-type, tied: {sizes}; one text of T sampled tokens after a prompt of one, or N × T: N such "
        "texts in one call, where only attribution is measured. `loop ÷ it`: best time of one "
        "`autograd.grad` per token over one kept graph, its forward pass not counted, over the row's whole call; "
        "`medians`: the same of medians; `× fwd+bwd`: the row's best time over one forward and backward pass.",
        "`MiB`: peak extra memory of one call in a fresh process. `error`: largest difference from float64 over the "
        "largest value, of norms, path norms, weighted sums or alignments, at up to 32 tokens; of N × T tokens the "
        "relative distance of the sum of all shares from ‖ḡ‖²; of a sketch the root mean square "
        "of relative errors (the model is untrained, where the hybrid gains nothing).",
    ]
    if config.opacus_python is None:
        notes.append(
            "Opacus was not measured: pass `--opacus-python` an interpreter with torch, transformers and opacus."
        )
    if config.device == "cpu":
        notes.append(
            "Not measured on a GPU: pass `--device cuda --sizes L --dtype bfloat16` on a machine that has one."
        )
    return notes
