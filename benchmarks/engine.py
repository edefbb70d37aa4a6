"""Time, memory and accuracy of every score-gradient engine beside a plain loop of one `autograd.grad` per token.

The loop's forward pass is not timed, every other row is one whole call. All rows take turns in every repetition, peers
in an interpreter of their own too. Every engine of `ENGINES` has its rows. Attribution is of whole batches as a rule,
so it is also measured on batches, beside one forward and one backward pass of the same batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.config import EngineConfig
from benchmarks.peer_side import make_model, peak
from benchmarks.publish import Column, Report, mebibytes_cell, notes_of, report_of, seconds_cell
from benchmarks.timing import Timing, in_fresh_process, interleaved, peer, threads, timed
from otb_analysis import gradients
from otb_analysis.devices import device_of, synchronize, words_of
from otb_analysis.errors import InputError
from otb_analysis.gradients.exact.gram import norm_sq_of
from otb_analysis.phases import plural
from otb_analysis.rollouts.models import load_policy
from otb_analysis.types import Attribution, Float, ScoreNorms

SIZES: dict[str, dict[str, int]] = {
    "S": {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512},
    "M": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 8192},
    "L": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 32768},
    "Q": {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 151936},
}
REAL = {"R": "smollm2"}
"""Pretrained models by size, which write their rollouts themselves."""
LEFT_OUT = ("path=True", "weighted rows", "reference")
"""Rows of which a pretrained model has none: what they add to others, smaller models show."""
LOOP = "plain loop"
STEP = "forward + backward"
ROWS, DIRECTIONS = 8, (16, 32)
"""Rows of `weighted_score_norms`; directions of `sketch_score_norms`."""
CHECKED, PATHS = 32, 8
"""Tokens whose norms are compared, and whose path norms are: one float64 backward pass each."""
LOOPED = 16
"""Tokens of a pretrained model's plain loop, and those that are compared there: each takes a second."""


@dataclass(frozen=True)
class Case:
    """A model and N rollouts, one as a rule, of T sampled tokens after a prompt of one."""

    model: PreTrainedModel
    input_ids: Tensor  # Token ids [N, T + 1]
    mask: Tensor  # True at all but the first [N, T + 1]
    weights: Float  # Random rows of weights [N, 8, T + 1]
    direction: Mapping[str, Tensor]  # The gradient along the first of them, by parameter name


def model_config(size: str) -> dict[str, Any]:
    """Return the fields of the Qwen2 configuration of a size; the peer builds the same model from them."""
    base, same = SIZES[size], {"max_position_embeddings": 8192, "tie_word_embeddings": True}
    widths = {"intermediate_size": 3 * base["hidden_size"], "num_key_value_heads": base["num_attention_heads"] // 2}
    return base | widths | same


def model_of(size: str, device: str, dtype: str) -> PreTrainedModel:
    """Return the model of a size.

    Raises:
        InputError: It is a pretrained one that was not fetched.
    """
    if size not in REAL:
        return make_model(model_config(size), str(device_of(device)), dtype)
    return load_policy(REAL[size])[0].to(device=device_of(device), dtype=getattr(torch, dtype))  # pyright: ignore[reportCallIssue]


def make_case(model: PreTrainedModel, tokens: int, rollouts: int = 1, written: bool = False) -> Case:
    """Return rollouts for a model, the same in every process: random tokens, or `written` by the model itself."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (rollouts, tokens + 1), generator=generator)
    if written:
        first = torch.full((rollouts, 1), model.config.bos_token_id, device=model.device)
        settings: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        settings |= {"min_new_tokens": tokens, "max_new_tokens": tokens, "attention_mask": torch.ones_like(first)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            ids = model.generate(first, **settings).cpu()  # pyright: ignore[reportCallIssue, reportArgumentType]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    weights = torch.randn(rollouts, ROWS, tokens + 1, generator=generator).double().numpy() / tokens
    return Case(model, ids, mask, weights, gradients.batch_gradient(model, ids, mask, weights[:, 0]))


def plain_loop(case: Case, count: int | None = None) -> tuple[float, Float]:
    """Run one `autograd.grad` per token over one kept graph, with which every row is compared.

    Returns its seconds without the forward pass, and ‖s_t‖² [1, T + 1], zero outside the mask. Only `count` tokens,
    evenly spread, may run: each takes as long as any other, so seconds are scaled to all, and other norms are zero.
    """
    values, parameters = _logprobs(case)[0], list(case.model.parameters())
    norm_sq, columns = np.zeros(case.mask.shape), _spread(len(values), count or len(values))
    synchronize(values.device)
    start = perf_counter()
    for t in columns:
        norm_sq[0, t] = norm_sq_of(torch.autograd.grad(values[t - 1], parameters, retain_graph=True))
    synchronize(values.device)
    return (perf_counter() - start) * len(values) / len(columns), norm_sq


def forward_backward(case: Case) -> list[Tensor]:
    """One forward pass and one backward pass of Σ_t log π(y_t): the yardstick of attribution and sketches."""
    return list(torch.autograd.grad(_logprobs(case).sum(), list(case.model.parameters())))


def candidates(case: Case) -> dict[str, Callable[[], Any]]:
    """Return every engine and instrument by the name of its row, engines of the registry first.

    Attribution is along a given direction, and once along the gradient of the case itself, which is then formed too.
    """
    args = (case.model, case.input_ids, case.mask)
    calls: dict[str, Callable[[], Any]] = {}
    for name in gradients.ENGINES:
        norms = partial(gradients.token_score_norms, *args, engine=name)
        calls[name] = norms
        if name != "reference":
            calls[f"{name}, path=True"] = partial(norms, path=True)
            weighted = partial(gradients.weighted_score_norms, *args, case.weights, engine=name)
            calls[f"{name}, {ROWS} weighted rows"] = weighted
    for count in DIRECTIONS:
        calls[f"sketch hybrid, K={count}"] = partial(gradients.sketch_score_norms, *args, directions=count)
    attribution = partial(gradients.gradient_attribution, *args, case.weights[:, 0])
    for method in ("jvp", "difference"):
        calls[f"attribution, {method}"] = partial(attribution, method=method, direction=case.direction)
    calls["attribution, jvp, its own gradient"] = attribution
    cluster = np.zeros(len(case.mask), dtype=np.int64)
    calls["gradient_sketch"] = partial(gradients.gradient_sketch, *args, case.weights[:, :1], cluster)
    return calls


@dataclass(frozen=True)
class Exact:
    """Values by the reference engine on float64 copies of the weights."""

    tokens: np.ndarray  # Columns of the tokens whose norms ‖s_t‖² are compared
    norm_sq: Float
    paths: np.ndarray  # Columns of the tokens whose path norms ‖Σ_{j≤t} s_j‖² are compared
    path_norm_sq: Float
    rows: Float  # ‖Σ_t weights s_t‖² of the case's rows of weights
    alignment: Float  # s_t·direction of all tokens [1, T + 1]

    @classmethod
    def of_case(cls, case: Case, real: bool = False) -> "Exact":
        """Compute them for a case, on a copy of its model in float64; of a `real` one fewer norms and nothing else."""
        length = case.mask.shape[1]
        tokens, paths = (_spread(length - 1, n) for n in ((LOOPED, 0) if real else (CHECKED, PATHS)))
        unit, prefix, rows = np.eye(length)[tokens], np.tri(length)[paths], case.weights[0, : 0 if real else ROWS]
        weights = np.concatenate([unit, prefix, rows])[None]
        args = (deepcopy(case.model).double(), case.input_ids, case.mask)
        norms = gradients.weighted_score_norms(*args, weights, engine="reference")[0]
        norm_sq, path_norm_sq, rows = np.split(norms, [len(tokens), len(tokens) + len(paths)])
        direction = {name: value.double() for name, value in case.direction.items()}
        along = gradients.gradient_attribution(*args, case.weights[:, 0], direction=direction, method="jvp")
        return cls(tokens, norm_sq, paths, path_norm_sq, rows, along.alignment)


def error_of(name: str, result: Any, exact: Exact | None) -> float | None:
    """Largest difference over the largest value; of a sketch the root mean square of relative errors.

    Of a batch, where nothing exact is known, an attribution along the batch's own gradient ḡ has |Σ share / ‖ḡ‖² − 1|.
    Returns None for a result that holds none of these values.
    """
    if exact is None:
        return abs(float(result.share.sum()) / result.norm_sq - 1) if isinstance(result, Attribution) else None
    if isinstance(result, Attribution):
        got, expected = result.alignment, exact.alignment
    elif isinstance(result, ScoreNorms) and result.path_norm_sq is not None:
        got, expected = result.path_norm_sq[0, exact.paths], exact.path_norm_sq
    elif isinstance(result, ScoreNorms | tuple):  # of a loop: seconds and norms
        norm_sq = result[1] if isinstance(result, tuple) else result.norm_sq
        got, expected = norm_sq[0, exact.tokens], exact.norm_sq
        if name.startswith("sketch"):
            return float(np.sqrt(np.mean((got / expected - 1) ** 2)))
    elif isinstance(result, np.ndarray) and result.shape == (1, len(exact.rows)):
        got, expected = result[0], exact.rows
    else:
        return None
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def _spread(last: int, count: int) -> np.ndarray:
    """So many columns from 1 to the last, evenly spread."""
    return np.unique(np.linspace(1, last, count).round().astype(int))


def _logprobs(case: Case) -> Tensor:
    """Log π(y_t) of the T sampled tokens [N, T], with its graph."""
    ids = case.input_ids.to(case.model.device)
    logits = case.model(input_ids=ids[:, :-1], use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


OPACUS = {"Opacus GradSampleModule": False, "Opacus ghost norms (untied)": True}
SCRIPT = Path(__file__).with_name("opacus_peer.py")
WARM_UP = 4
"""Tokens of the call before the first timed one: engines look at a model once, kernels are chosen once."""


COLUMNS: dict[str, Column] = {
    "model": "{size}",
    "T": lambda row: f"{row['rollouts']} × {row['tokens']}" if row["rollouts"] > 1 else str(row["tokens"]),
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
    # One fresh process per size and row name, its places one after the other
    ours = [row for row in rows if config.memory and row["seconds"] is not None and row["name"] not in OPACUS]
    for size, name in dict.fromkeys((row["size"], row["name"]) for row in ours):
        mine = [row for row in ours if (row["size"], row["name"]) == (size, name)]
        places = [(row["rollouts"], row["tokens"]) for row in mine]
        measured = in_fresh_process(peaks, config, name, size, places) or [None] * len(mine)
        for row, held in zip(mine, measured, strict=True):
            row["memory"] = held
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

    def loop_seconds() -> float:
        recorders[LOOP]()
        return recorders[LOOP].result[0]  # without the forward pass

    if not batch:
        turns[LOOP] = loop_seconds
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
    exact = None if batch else Exact.of_case(case, real)
    for name in (*recorders, *(() if batch or real else OPACUS)):
        row = {"size": size, "rollouts": rollouts, "tokens": tokens, "name": name, "seconds": None, "memory": None}
        if name in peers:
            norm_sq = np.array([[0.0, *peers[name].facts["norm_sq"]]])
            error = error_of(name, (0.0, norm_sq), exact) if "untied" not in name else None
            row |= _times(name, timings) | {"memory": peers[name].facts["bytes"], "error": error}
        elif name in recorders and recorders[name].remark:
            row |= {"remark": recorders[name].remark}
        elif name in recorders:
            row |= _times(name, timings) | {"error": error_of(name, recorders[name].result, exact)}
        yield row


def _times(name: str, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """A row's times, those of the plain loop over them, and its best over that of a forward and backward pass."""
    one, loop = timings[name], timings.get(LOOP)
    times = {"seconds": one.minimum, "median_seconds": one.median, "repeats": one.repeats}
    times |= {"loop_ratio": loop and loop.minimum / one.minimum, "loop_ratio_median": loop and loop.median / one.median}
    return times | {"step_ratio": one.minimum / timings[STEP].minimum}
