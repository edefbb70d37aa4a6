"""Time and memory of `logit_stats` beside the plain way and beside TRL's fused head, on the same inputs.

The plain way computes the log-probability alone. From logits: log_softmax in float32 and gather. From hidden states:
the matrix product to all logits in the inputs' dtype, then the same. `logit_stats` returns six statistics in that time,
TRL's head three (log-probability, entropy, log Σπ²) from logits rounded to the inputs' dtype, as the plain way's are.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otb_analysis.bench.config import LogitsConfig
from otb_analysis.bench.memory import fresh_peaks
from otb_analysis.bench.peer import peer
from otb_analysis.bench.publish import Column, Report, report_of, seconds_cell
from otb_analysis.bench.timing import interleaved, threads, timed
from otb_analysis.logit_stats import logit_stats

PLAIN = {"logits": "plain, from logits", "hidden": "plain, from hidden states"}
OURS = {"logits": "logit_stats, from logits", "hidden": "logit_stats, from hidden states"}
TRL = "TRL fused head, from hidden states"
SCRIPT = Path(__file__).with_name("trl_peer.py")
QUICK = {"vocabularies": (500, 900), "rows": 12, "width": 8, "repeats": 1, "threads": (1,), "quick": False}
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


@dataclass(frozen=True)
class Inputs:
    """Random hidden states and an output matrix whose logits have a standard deviation of 3, and the drawn tokens."""

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor

    @classmethod
    def made(cls, config: LogitsConfig, vocabulary: int, dtype: str) -> "Inputs":
        """The inputs of one part of the table; the seed is fixed, so that every process has the same."""
        torch.manual_seed(0)
        hidden = torch.randn(config.rows, config.width)
        weight = torch.randn(vocabulary, config.width) * (3 / config.width**0.5)
        to = {"dtype": getattr(torch, dtype), "device": config.device}
        return cls(hidden.to(**to), weight.to(**to), torch.randint(vocabulary, (config.rows,)).to(config.device))

    def first(self) -> "Inputs":
        """The rows that are compared with float64."""
        return Inputs(self.hidden[:CHECKED], self.weight, self.token_ids[:CHECKED])


def run(config: LogitsConfig) -> Report:
    """Measure every part of the table.

    Raises:
        InputError: The peer's interpreter does not work.
    """
    config = replace(config, **QUICK) if config.quick else config
    parts = product(config.vocabularies, config.dtypes, config.threads)
    rows = [row for part in parts for row in _measure(config, *part)]
    title = f"Statistics of {config.rows} drawn tokens, d = {config.width}"
    return report_of(config, title, COLUMNS, rows, notes=_notes(config))


def plain_from_logits(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities by log_softmax in float32 and gather."""
    return logits.float().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


def plain_from_hidden(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities from all logits, in the inputs' dtype, then as `plain_from_logits`."""
    return plain_from_logits(torch.nn.functional.linear(hidden, weight), token_ids)


def memory_jobs(spec: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Yield (label, call, device) of one part of the table, for a fresh process.

    Args:
        spec: Fields of `LogitsConfig` under "config", "vocabulary", "dtype", and the "name" of the row.
    """
    config, name = LogitsConfig(**spec["config"]), spec["name"]
    torch.set_num_threads(1)
    _candidates(Inputs.made(replace(config, rows=4), 300, spec["dtype"]))[name]()
    yield name, _candidates(Inputs.made(config, spec["vocabulary"], spec["dtype"]), name)[name], config.device


def _candidates(inputs: Inputs, only: str = "", logits: Tensor | None = None) -> dict[str, Callable[[], Any]]:
    """Every way. All logits are made unless they are given, or `only` is a way from hidden states."""
    h, w, y = inputs.hidden, inputs.weight, inputs.token_ids
    ways: dict[str, Callable[[], Any]] = {
        PLAIN["hidden"]: torch.no_grad()(lambda: plain_from_hidden(h, w, y)),
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
    inputs = Inputs.made(config, vocabulary, dtype)
    candidates = {name: timed(call, config.device) for name, call in _candidates(inputs).items()}
    facts: dict[str, dict[str, Any]] = {name: {"error": error} for name, error in _errors(inputs).items()}
    with ExitStack() as stack, threads(number):
        if config.trl_python is not None:
            spec = {"rows": config.rows, "width": config.width, "vocabulary": vocabulary, "dtype": dtype}
            spec |= {"threads": number, "device": config.device, "checked": CHECKED}
            trl = stack.enter_context(peer(config.trl_python, SCRIPT, spec))
            candidates[TRL] = trl.turn
            facts[TRL] = {"error": _gap(torch.tensor(trl.facts["logprob"]), _exact_logits(inputs.first()), inputs)}
            facts[TRL] |= {"bytes": trl.facts["bytes"]}
        timings = interleaved(candidates, config.repeats)
    fields = {"rows": config.rows, "width": config.width, "device": config.device}
    for name in (*PLAIN.values(), *OURS.values(), TRL):
        row = {"vocabulary": vocabulary, "dtype": dtype, "threads": number, "name": name}
        row |= dict.fromkeys(("seconds", "median_seconds", "to_plain", "memory", "error"))
        if name in timings:
            job = {"config": fields, "vocabulary": vocabulary, "dtype": dtype, "name": name}
            held = facts[name]["bytes"] if name == TRL else fresh_peaks(__name__, job).get(name)
            time, plain = timings[name], timings[PLAIN["logits" if "from logits" in name else "hidden"]]
            row |= {"seconds": time.minimum, "median_seconds": time.median, "to_plain": time.minimum / plain.minimum}
            row["memory"] = None if held is None else held / (4 * config.rows * vocabulary)
            row["error"] = facts[name]["error"]
        yield row


def _errors(inputs: Inputs) -> dict[str, float]:
    """Largest error of every way on the first rows; the ways from logits are given float64's, rounded."""
    few = inputs.first()
    exact = _exact_logits(few)
    rounded = exact.to(few.hidden.dtype)
    errors = {}
    for name, call in _candidates(few, logits=rounded).items():
        result = call()
        logprob = result if isinstance(result, Tensor) else torch.from_numpy(result.logprob)
        errors[name] = _gap(logprob, rounded.double() if "from logits" in name else exact, inputs)
    return errors


def _exact_logits(inputs: Inputs) -> Tensor:
    return inputs.hidden.double() @ inputs.weight.double().T


def _gap(logprob: Tensor, logits: Tensor, inputs: Inputs) -> float:
    """Largest |log π − log π of these logits in float64| / max(1, max |z|)."""
    exact = logits.log_softmax(-1).gather(-1, inputs.token_ids[:CHECKED, None])[:, 0]
    return float((logprob.to(exact) - exact).abs().max() / max(1.0, float(logits.abs().max())))


def _notes(config: LogitsConfig) -> list[str]:
    notes = [
        "`× plain`: against the product to all logits (from hidden states), log_softmax in float32 and gather, on the "
        "same inputs. `logit_stats` returns log π, entropy, Σπ², energy and two variances; TRL's head log π, entropy "
        "and log Σπ²; plain is log π alone.",
        "`memory`: peak extra memory of one call in a fresh process on one thread. `log π error`: against float64 on "
        "the same inputs, over max(1, max |z|).",
    ]
    if config.trl_python is None:
        notes.append("TRL was not measured: pass `--trl-python` an interpreter that has torch and trl>=1.15.")
    if config.device == "cpu":
        notes.append("Not measured on a GPU: pass `--device cuda` on a machine that has one.")
    return notes
