"""Time and memory of `logit_stats` beside the plain way and beside TRL's fused head, on the same inputs.

The plain way computes the log-probability alone. From logits: log_softmax in float32 and gather. From hidden states:
the matrix product to all logits in the inputs' dtype, then the same. `logit_stats` returns six statistics in that time,
TRL's head three (log-probability, entropy, log Σπ²) from logits rounded to the inputs' dtype, as the plain way's are.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from otb_analysis.bench.config import LogitsConfig, check_positive
from otb_analysis.bench.memory import fresh_peaks
from otb_analysis.bench.peer import peer
from otb_analysis.bench.publish import Report, flags
from otb_analysis.bench.timing import interleaved, threads, timed
from otb_analysis.logit_stats import logit_stats

PLAIN = {"logits": "plain, from logits", "hidden": "plain, from hidden states"}
OURS = {"logits": "logit_stats, from logits", "hidden": "logit_stats, from hidden states"}
TRL = "TRL fused head, from hidden states"
SCRIPT = Path(__file__).with_name("trl_peer.py")
QUICK = {"vocabularies": (500, 900), "rows": 12, "width": 8, "repeats": 1, "threads": (1,)}
CHECKED = 16
"""Rows whose log-probabilities are compared with float64."""


@dataclass(frozen=True)
class LogitRow:
    """One line of the table.

    Attributes:
        vocabulary: V.
        dtype: Of the inputs.
        threads: Threads.
        name: What ran.
        seconds: Best time of one call; None if it was not measured.
        median_seconds: Median time.
        to_plain: `seconds` over those of the plain way from the same inputs, minima of the same run.
        memory: Peak extra memory over the bytes of one float32 array [R, V].
        error: Largest |log π − log π in float64 of the same inputs| / max(1, max |z|).
    """

    vocabulary: int
    dtype: str
    threads: int
    name: str
    seconds: float | None
    median_seconds: float | None
    to_plain: float | None
    memory: float | None
    error: float | None


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

    def logits(self) -> Tensor:
        """All logits, in the inputs' dtype."""
        return torch.nn.functional.linear(self.hidden, self.weight)

    def exact(self) -> Tensor:
        """The first rows' logits in float64."""
        return self.hidden[:CHECKED].double() @ self.weight.double().T


def run_logits(config: LogitsConfig) -> Report:
    """Measure every part of the table.

    Raises:
        InputError: A size is not positive, or the peer's interpreter does not work.
    """
    config = replace(config, **QUICK) if config.quick else config
    for number in (*config.vocabularies, *config.threads):
        check_positive(vocabularies_and_threads=number)
    check_positive(rows=config.rows, width=config.width, repeats=config.repeats)
    rows = [row for part in _parts(config) for row in _measure(config, *part)]
    settings = {name: value for name, value in vars(config).items() if name not in ("out", "trl_python", "quick")}
    named = settings | {"trl_python": None if config.trl_python is None else "TRL_PYTHON"}
    return Report(
        name="logits",
        command=f"otb bench logits {flags(named)}",
        settings=settings,
        title=f"Statistics of {config.rows} drawn tokens, d = {config.width}",
        headers=("V", "dtype", "threads", "what", "seconds", "median", "× plain", "memory ÷ [R, V]", "log π error"),
        cells=[_cells(row) for row in rows],
        rows=[asdict(row) for row in rows],
        notes=_notes(config),
    )


def plain_from_logits(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities by log_softmax in float32 and gather."""
    return logits.float().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


def plain_from_hidden(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities from all logits, in the inputs' dtype, then as `plain_from_logits`."""
    return plain_from_logits(torch.nn.functional.linear(hidden, weight), token_ids)


def memory_jobs(spec: Mapping[str, object]) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Yield (label, call, device) of one part of the table, for a fresh process.

    Args:
        spec: Fields of `LogitsConfig` under "config", "vocabulary", "dtype", and the "name" of the row.
    """
    fields = spec["config"]
    assert isinstance(fields, dict)
    config, name = LogitsConfig(**fields), str(spec["name"])
    torch.set_num_threads(1)
    small = _candidates(Inputs.made(replace(config, rows=4), 300, str(spec["dtype"])))
    small[name]()
    inputs = Inputs.made(config, int(str(spec["vocabulary"])), str(spec["dtype"]))
    yield name, _candidates(inputs, name)[name], config.device


def _parts(config: LogitsConfig) -> list[tuple[int, str, int]]:
    return [(v, dtype, n) for v in config.vocabularies for dtype in config.dtypes for n in config.threads]


def _candidates(inputs: Inputs, name: str | None = None) -> dict[str, Callable[[], object]]:
    """Every way, or those whose inputs one of them needs."""
    h, w, y = inputs.hidden, inputs.weight, inputs.token_ids
    found: dict[str, Callable[[], object]] = {
        PLAIN["hidden"]: torch.no_grad()(lambda: plain_from_hidden(h, w, y)),
        OURS["hidden"]: lambda: logit_stats(hidden=h, weight=w, token_ids=y),
    }
    if name in found:
        return found
    z = inputs.logits()
    return {
        PLAIN["logits"]: torch.no_grad()(lambda: plain_from_logits(z, y)),
        OURS["logits"]: lambda: logit_stats(z, token_ids=y),
    } | found


def _measure(config: LogitsConfig, vocabulary: int, dtype: str, number: int) -> Iterator[LogitRow]:
    inputs = Inputs.made(config, vocabulary, dtype)
    candidates = {name: timed(run, config.device) for name, run in _candidates(inputs).items()}
    facts: dict[str, dict[str, float | None]] = {name: {"error": _error(inputs, name)} for name in candidates}
    with ExitStack() as stack, threads(number):
        if config.trl_python is not None:
            spec = {"rows": config.rows, "width": config.width, "vocabulary": vocabulary, "dtype": dtype}
            spec |= {"threads": number, "device": config.device, "checked": CHECKED}
            trl = stack.enter_context(peer(config.trl_python, SCRIPT, spec))
            candidates[TRL] = trl.turn
            facts[TRL] = {"error": _distance(inputs, torch.tensor(trl.facts["logprob"])), "bytes": trl.facts["bytes"]}
        found = interleaved(candidates, config.repeats)
    for name in (*PLAIN.values(), *OURS.values(), TRL):
        if name not in found:
            yield LogitRow(vocabulary, dtype, number, name, None, None, None, None, None)
            continue
        plain = found[PLAIN["logits" if "from logits" in name else "hidden"]].minimum
        held = facts[name].get("bytes", None) if name == TRL else _peak(config, vocabulary, dtype, name)
        share = None if held is None else held / (4 * config.rows * vocabulary)
        time = found[name]
        yield LogitRow(
            vocabulary, dtype, number, name, time.minimum, time.median, time.minimum / plain, share,
            facts[name]["error"],
        )  # fmt: skip


def _peak(config: LogitsConfig, vocabulary: int, dtype: str, name: str) -> float | None:
    fields = {"rows": config.rows, "width": config.width, "device": config.device}
    spec: dict[str, object] = {"config": fields, "vocabulary": vocabulary, "dtype": dtype, "name": name}
    return fresh_peaks(__name__, spec).get(name)


def _error(inputs: Inputs, name: str) -> float:
    """Largest error of a way's log-probabilities on the first rows; those from logits are given float64's, rounded."""
    few = Inputs(inputs.hidden[:CHECKED], inputs.weight, inputs.token_ids[:CHECKED])
    z = few.exact()
    y = few.token_ids
    if "from logits" in name:
        rounded = z.to(few.hidden.dtype)
        got = (
            plain_from_logits(rounded, y)
            if name == PLAIN["logits"]
            else torch.from_numpy(logit_stats(rounded, token_ids=y).logprob)
        )
        return _gap(got, rounded.double(), y)
    got = (
        plain_from_hidden(few.hidden, few.weight, y)
        if name == PLAIN["hidden"]
        else torch.from_numpy(logit_stats(hidden=few.hidden, weight=few.weight, token_ids=y).logprob)
    )
    return _gap(got, z, y)


def _distance(inputs: Inputs, logprob: Tensor) -> float:
    return _gap(logprob, inputs.exact(), inputs.token_ids[:CHECKED])


def _gap(logprob: Tensor, logits: Tensor, token_ids: Tensor) -> float:
    exact = logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    return float((logprob.to(exact) - exact).abs().max() / max(1.0, float(logits.abs().max())))


def _cells(row: LogitRow) -> tuple[str, ...]:
    what = (f"{row.vocabulary:,}", row.dtype, str(row.threads), row.name)
    if row.seconds is None or row.median_seconds is None:
        return (*what, "not measured", "–", "–", "–", "–")
    share = "–" if row.memory is None else f"{100 * row.memory:.1f} %"
    error = "–" if row.error is None else f"{row.error:.0e}"
    return (*what, f"{row.seconds:.3f}", f"{row.median_seconds:.3f}", f"{row.to_plain:.2f}", share, error)


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
