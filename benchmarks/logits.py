"""Time and memory of `logit_stats` beside the plain way and beside TRL's fused head, on the same inputs.

From hidden states, TRL's head and the plain way round the logits to the inputs' dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.config import LogitsConfig
from benchmarks.peer_side import head_inputs, peak
from benchmarks.publish import Column, Report, notes_of, report_of, seconds_cell
from benchmarks.timing import in_fresh_process, interleaved, peer, threads, timed
from otb_analysis.logit_stats import logit_stats

PLAIN = {"logits": "plain, from logits", "hidden": "plain, from hidden states"}
OURS = {"logits": "logit_stats, from logits", "hidden": "logit_stats, from hidden states"}
TRL = "TRL fused head, from hidden states"
SCRIPT = Path(__file__).with_name("trl_peer.py")
CHECKED = 16
"""Rows whose log-probabilities are compared with float64."""
COLUMNS: dict[str, Column] = {
    "V": "{vocabulary:,}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "what": "{name}",
    "seconds": seconds_cell,
    "median": "{median_seconds:.3f}",
    "× plain": "{to_plain:.2f}",
    "memory ÷ [R, V]": lambda row: None if row["memory"] is None else f"{100 * row['memory']:.1f} %",
    "log π error": "{error:.0e}",
}

Inputs = tuple[Tensor, Tensor, Tensor]
"""Hidden states [R, d], output matrix [V, d] and drawn tokens [R]; made by `head_inputs`."""


def run(config: LogitsConfig) -> Report:
    """Measure every part of the table.

    Raises:
        InputError: The peer's interpreter does not work.
    """
    parts = product(config.vocabularies, config.dtypes, config.threads)
    rows = [row for part in parts for row in _measure(config, *part)]
    title = f"Statistics of {config.rows} drawn tokens, d = {config.width}"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))


def plain_from_logits(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities by log_softmax in float32 and gather."""
    return logits.float().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


def peak_of(inputs: dict[str, Any], name: str) -> int | None:
    """Return the peak bytes of one way, in a fresh process; `inputs` are the arguments of `head_inputs`."""
    torch.set_num_threads(1)
    _candidates(head_inputs(**{**inputs, "rows": 4, "vocabulary": 300}))[name]()
    return peak(_candidates(head_inputs(**inputs), name)[name], inputs["device"])


def _candidates(inputs: Inputs, only: str = "", logits: Tensor | None = None) -> dict[str, Callable[[], Any]]:
    """Every way. All logits are made unless they are given, or `only` is a way from hidden states."""
    h, w, y = inputs
    ways: dict[str, Callable[[], Any]] = {
        PLAIN["hidden"]: torch.no_grad()(lambda: plain_from_logits(torch.nn.functional.linear(h, w), y)),
        OURS["hidden"]: lambda: logit_stats(hidden=h, weight=w, token_ids=y),
    }
    if only in ways:
        return ways
    z = torch.nn.functional.linear(h, w) if logits is None else logits
    return {
        PLAIN["logits"]: torch.no_grad()(lambda: plain_from_logits(z, y)),
        OURS["logits"]: lambda: logit_stats(z, token_ids=y),
    } | ways


def _measure(config: LogitsConfig, vocabulary: int, dtype: str, number: int) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {"rows": config.rows, "width": config.width, "vocabulary": vocabulary, "dtype": dtype}
    made |= {"device": config.device}
    inputs = head_inputs(**made)
    candidates = {name: timed(call, config.device) for name, call in _candidates(inputs).items()}
    # Errors on the first rows; the ways from logits are given the exact logits, rounded.
    hidden, weight, token_ids = inputs[0][:CHECKED], inputs[1], inputs[2][:CHECKED]
    exact = hidden.double() @ weight.double().T
    rounded, errors = exact.to(hidden.dtype), dict[str, float]()
    for name, call in _candidates((hidden, weight, token_ids), logits=rounded).items():
        result = call()
        logprob = result if isinstance(result, Tensor) else torch.from_numpy(result.logprob)
        errors[name] = _gap(logprob, rounded.double() if "from logits" in name else exact, token_ids)
    memory: dict[str, int | None] = {}
    with ExitStack() as stack, threads(number):
        if config.trl_python is not None:
            spec = {"inputs": made, "threads": number, "checked": CHECKED}
            trl = stack.enter_context(peer(config.trl_python, SCRIPT, spec))
            candidates[TRL] = trl.turn
            errors[TRL] = _gap(torch.tensor(trl.facts["logprob"]), exact, token_ids)
            memory[TRL] = trl.facts["bytes"]
        timings = interleaved(candidates, config.repeats)
    memory = {name: in_fresh_process(peak_of, made, name) for name in errors if name != TRL} | memory
    for name in (*PLAIN.values(), *OURS.values(), TRL):
        row = {"vocabulary": vocabulary, "dtype": dtype, "threads": number, "name": name, "seconds": None}
        if name in timings:
            time, plain = timings[name], timings[PLAIN["logits" if "from logits" in name else "hidden"]]
            row |= {"seconds": time.minimum, "median_seconds": time.median, "to_plain": time.minimum / plain.minimum}
            held = memory[name]
            row["memory"] = None if held is None else held / (4 * config.rows * vocabulary)
            row["error"] = errors[name]
        yield row


def _gap(logprob: Tensor, logits: Tensor, token_ids: Tensor) -> float:
    """Largest |log π − log π of these logits in float64| / max(1, max |z|), on the first rows."""
    exact = logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    return float((logprob.to(exact) - exact).abs().max() / max(1.0, float(logits.abs().max())))
