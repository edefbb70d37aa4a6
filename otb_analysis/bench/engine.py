"""Time, memory and accuracy of every score-gradient engine beside a plain loop of one `autograd.grad` per token.

The loop's forward pass is not timed, every other row is one whole call. All rows take turns in every repetition, peers
in an interpreter of their own too. Whatever is in `ENGINES` is in the table.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from otb_analysis.bench.memory import fresh_peaks
from otb_analysis.bench.peer import Peer, peer
from otb_analysis.bench.publish import Report, flags
from otb_analysis.bench.timing import Timing, interleaved, threads, timed
from otb_analysis.errors import InputError

OPACUS = {"Opacus GradSampleModule": False, "Opacus ghost norms (untied)": True}
SCRIPT = Path(__file__).with_name("opacus_peer.py")
WARM_UP = 4
"""Tokens of the call before the first timed one: engines look at a model once, kernels are chosen once."""


@dataclass(frozen=True)
class EngineRow:
    """One line of the table.

    Attributes:
        size: Model.
        tokens: T.
        name: What ran.
        seconds: Best time of one call; None if it was not measured.
        median_seconds: Median time.
        repeats: Repetitions.
        loop_ratio: Best time of the plain loop over `seconds`.
        loop_ratio_median: The same of medians.
        step_ratio: `seconds` over the best time of one forward and one backward pass.
        memory: Peak extra bytes of one call in a fresh process.
        error: Largest difference from float64 over the largest value (see the notes).
        remark: Why it was not measured.
    """

    size: str
    tokens: int
    name: str
    seconds: float | None = None
    median_seconds: float | None = None
    repeats: int = 0
    loop_ratio: float | None = None
    loop_ratio_median: float | None = None
    step_ratio: float | None = None
    memory: int | None = None
    error: float | None = None
    remark: str = ""


class Recorder:
    """A candidate that remembers its last result, and the sentence with which it was refused."""

    def __init__(self, run: Callable[[], Any]):
        self.run, self.result, self.remark = run, None, ""

    def __call__(self) -> None:
        """Run unless it was refused before."""
        if self.remark:
            return
        try:
            self.result = self.run()
        except InputError as refusal:
            self.remark = str(refusal)


def run_engine(config: EngineConfig) -> Report:
    """Measure every size and T.

    Raises:
        InputError: A setting is not positive, there is no GPU, or the peer's interpreter does not work.
    """
    check_positive(repeats=config.repeats, **({"tokens": min(config.tokens)} if config.tokens else {}))
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda but torch sees no GPU; pass --device cpu.")
    cases = config.cases()
    rows: list[EngineRow] = []
    with threads(1):
        for size in dict.fromkeys(size for size, _ in cases):
            model = make_model(size, config.device, config.dtype)
            for tokens in (t for s, t in cases if s == size):
                rows += _measure(config, size, make_case(model, tokens))
    if not config.quick:
        rows = _with_memory(config, cases, rows)
    settings = {k: v for k, v in vars(config).items() if k not in ("out", "opacus_python")}
    named = settings | {"opacus_python": None if config.opacus_python is None else "OPACUS_PYTHON"}
    return Report(
        name="engine",
        command=f"otb bench engine {flags(named)}",
        settings=settings,
        title=f"Exact score norms and their relatives, {config.dtype}, one thread"
        + (f", on {torch.cuda.get_device_name()}" if config.device == "cuda" else ""),
        headers=("model", "T", "what", "seconds", "median", "loop ÷ it", "medians", "× fwd+bwd", "MiB", "error"),
        cells=[_cells(row) for row in rows],
        rows=[asdict(row) for row in rows],
        notes=_notes(config),
    )


def memory_jobs(spec: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Yield (size and T, call, device) of one row for each case, smallest first, for a fresh process.

    Args:
        spec: "name" of the row, "cases", "device" and "dtype".
    """
    torch.set_num_threads(1)
    for size in dict.fromkeys(size for size, _ in spec["cases"]):
        model = make_model(size, spec["device"], spec["dtype"])
        _calls(make_case(model, WARM_UP), spec["device"])[spec["name"]]()
        for tokens in (t for s, t in spec["cases"] if s == size):
            yield f"{size} {tokens}", _calls(make_case(model, tokens), spec["device"])[spec["name"]], spec["device"]


def _calls(case: Case, device: str) -> dict[str, Callable[[], Any]]:
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
            yield EngineRow(size, tokens, name, remark=recorder.remark)
        else:
            yield _row(size, tokens, name, found, error=error_of(name, recorder.result, exact))
    for name in OPACUS:
        if name in peers:
            norm_sq = np.concatenate([[0.0], peers[name].facts["norm_sq"]])[None]
            error = error_of(name, (0.0, norm_sq), exact) if "untied" not in name else None
            yield _row(size, tokens, name, found, peers[name].facts["bytes"], error)
        else:
            yield EngineRow(size, tokens, name, remark="no --opacus-python was given")


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


def _row(
    size: str,
    tokens: int,
    name: str,
    found: Mapping[str, Timing],
    memory: int | None = None,
    error: float | None = None,
) -> EngineRow:
    mine, loop, step = found[name], found[LOOP], found[STEP]
    return EngineRow(
        size, tokens, name, mine.minimum, mine.median, mine.repeats, loop.minimum / mine.minimum,
        loop.median / mine.median, mine.minimum / step.minimum, memory, error,
    )  # fmt: skip


def _with_memory(config: EngineConfig, cases: list[tuple[str, int]], rows: list[EngineRow]) -> list[EngineRow]:
    """Fill in the memory of our rows: one fresh process per row name, its cases one after the other."""
    spec: dict[str, Any] = {"cases": cases, "device": config.device, "dtype": config.dtype}
    names = dict.fromkeys(row.name for row in rows if row.seconds is not None and row.name not in OPACUS)
    peaks = {name: fresh_peaks(__name__, spec | {"name": name}) for name in names}
    return [
        EngineRow(**{**asdict(r), "memory": peaks[r.name].get(f"{r.size} {r.tokens}")}) if r.name in peaks else r
        for r in rows
    ]


def _cells(row: EngineRow) -> tuple[str, ...]:
    what = (row.size, str(row.tokens), row.name)
    if row.seconds is None or row.median_seconds is None:
        return (*what, "not measured", *["–"] * 6)
    numbers = (
        f"{row.seconds:.3f}",
        f"{row.median_seconds:.3f}",
        f"{row.loop_ratio:.2f}",
        f"{row.loop_ratio_median:.2f}",
    )
    memory = "–" if row.memory is None else f"{row.memory / 2**20:.0f}"
    return (*what, *numbers, f"{row.step_ratio:.2f}", memory, "–" if row.error is None else f"{row.error:.0e}")


def _notes(config: EngineConfig) -> list[str]:
    sizes = "S 4 layers d128 V512 (0.85 M parameters), M 8 layers d512 V8192 (29 M), L 12 layers d768 V32768 (110 M)"
    notes = [
        f"Qwen2-type, tied: {sizes}; one text of T sampled tokens after a prompt of one. `loop ÷ it`: best time of one "
        "`autograd.grad` per token over one kept graph, its forward pass not counted, over the row's whole call; "
        "`medians`: the same of medians; `× fwd+bwd`: the row's best time over one forward and backward pass.",
        "`MiB`: peak extra memory of one call in a fresh process. `error`: largest difference from float64 over the "
        "largest value, of norms, path norms, weighted sums or alignments, at up to 32 tokens; of a sketch the root "
        "mean square of relative errors (the model is untrained, where the hybrid gains nothing).",
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
