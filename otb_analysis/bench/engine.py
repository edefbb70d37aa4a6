"""Time, memory and accuracy of every score-gradient engine beside a plain loop of one `autograd.grad` per token.

The loop's forward pass is not timed, every other row is one whole call. All rows take turns in every repetition, peers
in an interpreter of their own too. Whatever is in `ENGINES` is in the table.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.bench.attribution_cases import batch_calls, measure_batch
from otb_analysis.bench.config import EngineConfig, check_positive
from otb_analysis.bench.engine_cases import (
    LOOP,
    STEP,
    Case,
    candidates,
    forward_backward,
    make_case,
    make_model,
    model_config,
    plain_loop,
)
from otb_analysis.bench.engine_error import Exact, error_of
from otb_analysis.bench.engine_rows import HEADERS, EngineRow, Recorder, cells
from otb_analysis.bench.memory import fresh_peaks
from otb_analysis.bench.peer import Peer, peer
from otb_analysis.bench.publish import Report, flags
from otb_analysis.bench.timing import interleaved, threads, timed
from otb_analysis.errors import InputError

OPACUS = {"Opacus GradSampleModule": False, "Opacus ghost norms (untied)": True}
SCRIPT = Path(__file__).with_name("opacus_peer.py")
WARM_UP = 4
"""Tokens of the call before the first timed one: engines look at a model once, kernels are chosen once."""


def run_engine(config: EngineConfig) -> Report:
    """Measure every size and T.

    Raises:
        InputError: A setting is not positive, there is no GPU, or the peer's interpreter does not work.
    """
    check_positive(repeats=config.repeats, **({"tokens": min(config.tokens)} if config.tokens else {}))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda but torch sees no GPU; pass --device cpu.")
    rows: list[EngineRow] = []
    with threads(1):
        for size in dict.fromkeys(size for size, _ in config.cases()):
            model = make_model(size, config.device, config.dtype)
            for tokens in (t for s, t in config.cases() if s == size):
                rows += _measure(config, size, make_case(model, tokens))
            for place in (p for p in config.batches() if p[0] == size):
                rows += measure_batch(config, place, make_case(model, place[2], place[1]))
    if not config.quick:
        rows = _with_memory(config, rows)
    settings = {k: v for k, v in vars(config).items() if k not in ("out", "opacus_python")}
    named = settings | {"opacus_python": None if config.opacus_python is None else "OPACUS_PYTHON"}
    return Report(
        name="engine",
        command=f"otb bench engine {flags(named)}",
        settings=settings,
        title=f"Exact score norms and their relatives, {config.dtype}, one thread"
        + (f", on {torch.cuda.get_device_name()}" if config.device == "cuda" else ""),
        headers=HEADERS,
        cells=[cells(row) for row in rows],
        rows=[asdict(row) for row in rows],
        notes=_notes(config),
    )


def memory_jobs(spec: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Yield (label, call, device) of one row at each of its places, in their order, for a fresh process.

    Args:
        spec: "name" of the row, "places" (size, N and T), "device" and "dtype".
    """
    torch.set_num_threads(1)
    for size in dict.fromkeys(size for size, _, _ in spec["places"]):
        model = make_model(size, spec["device"], spec["dtype"])
        _calls(make_case(model, WARM_UP), spec["device"])[spec["name"]]()
        for _, rollouts, tokens in (p for p in spec["places"] if p[0] == size):
            run = _calls(make_case(model, tokens, rollouts), spec["device"])[spec["name"]]
            yield EngineRow(size, rollouts, tokens, spec["name"]).label, run, spec["device"]


def _calls(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    if len(case.mask) > 1:
        return batch_calls(case)
    return {LOOP: lambda: plain_loop(case, device), STEP: lambda: forward_backward(case)} | candidates(case)


def _measure(config: EngineConfig, size: str, case: Case) -> Iterator[EngineRow]:
    tokens = int(case.mask.sum())
    for run in _calls(make_case(case.model, min(WARM_UP, tokens)), config.device).values():
        Recorder(run)()
    recorders = {name: Recorder(run) for name, run in _calls(case, config.device).items()}
    turns = {name: timed(run, config.device) for name, run in recorders.items()}
    turns[LOOP] = lambda: _loop_seconds(recorders[LOOP])
    with ExitStack() as stack:
        peers = _peers(config, size, tokens, stack)
        found = interleaved(turns | {name: p.turn for name, p in peers.items()}, config.repeats, config.seconds, LOOP)
    exact = Exact.of(Case(deepcopy(case.model).double(), case.input_ids, case.mask, case.weights, case.direction))
    for name, recorder in recorders.items():
        if recorder.remark:
            yield EngineRow(size, 1, tokens, name, remark=recorder.remark)
        else:
            row = EngineRow(size, 1, tokens, name, error=error_of(name, recorder.result, exact))
            yield replace(row, **row.timed(found))
    for name in OPACUS:
        if name in peers:
            norm_sq = np.concatenate([[0.0], peers[name].facts["norm_sq"]])[None]
            error = error_of(name, (0.0, norm_sq), exact) if "untied" not in name else None
            row = EngineRow(size, 1, tokens, name, memory=peers[name].facts["bytes"], error=error)
            yield replace(row, **row.timed(found))
        else:
            yield EngineRow(size, 1, tokens, name, remark="no --opacus-python was given")


def _loop_seconds(recorder: Recorder) -> float:
    recorder()
    return recorder.result[0] if recorder.result else math.nan


def _peers(config: EngineConfig, size: str, tokens: int, stack: ExitStack) -> dict[str, Peer]:
    if config.opacus_python is None:
        return {}
    common = {"model": model_config(size), "tokens": tokens, "device": config.device, "dtype": config.dtype}
    return {
        name: stack.enter_context(peer(config.opacus_python, SCRIPT, common | {"ghost": ghost}))
        for name, ghost in OPACUS.items()
    }


def _with_memory(config: EngineConfig, rows: list[EngineRow]) -> list[EngineRow]:
    """Fill in the memory of our rows: one fresh process per row name, its places one after the other."""
    measured = [row for row in rows if row.seconds is not None and row.name not in OPACUS]
    peaks: dict[str, dict[str, int | None]] = {}
    for name in dict.fromkeys(row.name for row in measured):
        places = [row.place for row in measured if row.name == name]
        spec = {"name": name, "places": places, "device": config.device, "dtype": config.dtype}
        peaks[name] = fresh_peaks(__name__, spec)
    return [replace(r, memory=peaks[r.name].get(r.label)) if r in measured else r for r in rows]


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
