"""Tokens per second of sampling and updating beside TRL's GRPOTrainer, and what every measurement adds to a step.

Both train the same model on the same prompts, group by group, with one AdamW update per batch and no filter on what is
drawn; they take turns, one step each, their phases timed apart. `sampling` is generation (ours with prompts and texts),
`update` is one forward pass that keeps its graph, loss, backward pass, clipping and optimizer; all that lies between
and behind them, rewards, statistics, advantages, rows and scalars of the record, has a row of its own for each, and
so has the whole step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from otb_analysis.bench.config import TrainBenchConfig, check_positive
from otb_analysis.bench.memory import fresh_peaks
from otb_analysis.bench.peer import Peer, peer
from otb_analysis.bench.publish import Report, flags
from otb_analysis.bench.timing import CLOCKS, Timing, interleaved, threads, timed
from otb_analysis.bench.train_cases import (
    BUDGETS,
    LEARNING_RATE,
    PHASES,
    Steps,
    Turn,
    bench_config,
    levels,
    measured_tokens,
    plain_config,
)
from otb_analysis.config import TrainConfig
from otb_analysis.store import RunWriter
from otb_analysis.tasks import make_task
from otb_analysis.tasks.task_calls import draw_prompts

OURS, TRL = "otb train", "TRL GRPOTrainer"
SCRIPT = Path(__file__).with_name("trl_train_peer.py")
REPEATS, WRITINGS, MEMORY_STEPS = {"M": 3}, 9, {"small": 3, "M": 1}
"""Steps at most; repetitions of writing one; steps of the memory."""
FREE = "level forward and store"
BOTH = PHASES[2]
MOST_ADDED, LEAST_FASTER = 0.05, 1.5
"""Aims: share of a step that is always measured and stored, and tokens per second over TRL's."""
HEADERS = ("model", "what", "seconds", "tokens/s", "median", "× TRL", "medians", "% of step", "MiB")


@dataclass(frozen=True)
class TrainRow:
    """One line of the table.

    Attributes:
        model: Model and settings.
        what: Phase and whose, or what was measured.
        seconds: Best time of a measurement; None for phases, whose steps differ in length.
        rate: Best tokens per second over the steps.
        rate_median: Their median.
        to_trl: `rate` over TRL's; None where TRL was not measured.
        to_trl_median: The same of medians.
        share: `seconds` over the best time of a whole step without it.
        memory: Peak extra bytes of a step.
    """

    model: str
    what: str
    seconds: float | None = None
    rate: float | None = None
    rate_median: float | None = None
    to_trl: float | None = None
    to_trl_median: float | None = None
    share: float | None = None
    memory: int | None = None


def run_train(config: TrainBenchConfig) -> Report:
    """Measure every model.

    Raises:
        InputError: A setting is not positive, or the peer's interpreter does not work.
    """
    check_positive(repeats=config.repeats)
    rows: list[TrainRow] = []
    with threads(1), TemporaryDirectory() as folder:
        for model in ("small",) if config.quick else config.models:
            rows += _measured(model, bench_config(model, Path(folder), config.quick), config)
    settings = {k: v for k, v in vars(config).items() if k not in ("out", "trl_python")}
    named = settings | {"trl_python": None if config.trl_python is None else "TRL_PYTHON"}
    return Report(
        name="train",
        command=f"otb bench train {flags(named)}",
        settings=settings,
        title="A training step: sampling, update, measurement, one thread",
        headers=HEADERS,
        cells=[_cells(row) for row in rows],
        rows=[asdict(row) for row in rows],
        notes=_notes(config, rows),
    )


def memory_jobs(spec: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Yield (number, one step of ours, device) for a fresh process, after a step that warms up.

    Args:
        spec: "model", "path" of its weights, "steps".
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        config = replace(plain_config(spec["model"], Path(folder)), model=spec["path"])
        steps = Steps(config)
        steps.turn()
        for number in range(spec["steps"]):
            yield str(number), steps.turn, "cpu"


def _measured(model: str, config: TrainConfig, bench: TrainBenchConfig) -> Iterator[TrainRow]:
    ours, outside, statistics = Steps(config, CLOCKS[bench.clock]), [], []
    repeats = min(bench.repeats, REPEATS.get(model, bench.repeats))
    ours.turn()
    with ExitStack() as stack:
        rivals: dict[str, Peer] = {}
        if bench.trl_python is not None:
            rivals[TRL] = stack.enter_context(peer(bench.trl_python, SCRIPT, _spec(config, repeats, bench.clock)))
        turns: dict[str, list[Turn]] = {OURS: []} | {name: [] for name in rivals}
        for _ in range(repeats):
            turns[OURS].append(ours.turn())
            outside.append(ours.outside)
            statistics.append(ours.statistics)
            for name, rival in rivals.items():
                turns[name].append(_rival_turn(rival))
    memory = {} if bench.quick else _memory(model, config, bench.trl_python)
    yield from _phase_rows(model, turns, memory)
    least = min(statistics), min(outside), min(turn.whole for turn in turns[OURS])
    yield from _level_rows(model, config, bench, ours, least)


def _spec(config: TrainConfig, repeats: int, clock: str, memory: bool = False) -> dict[str, object]:
    """What the peer is told; it warms up with one step of its own."""
    task, count = make_task(config), config.sample.prompts * (repeats + 1)
    return {
        "model": str(Path(config.model).absolute()),
        "threads": 1,
        "device": "cpu",
        "prompts": [prompt.text for prompt in draw_prompts(task, "train", 0, count)],
        "prompts_per_step": config.sample.prompts,
        "group_size": config.sample.group_size,
        "max_new_tokens": config.sample.max_new_tokens,
        "steps": repeats + 1,
        "learning_rate": LEARNING_RATE,
        "clock": clock,
        "memory": memory,
    }


def _rival_turn(rival: Peer) -> Turn:
    said = rival.answer()
    return Turn(said["sample"], said["update"], said["seconds"], said["tokens"])


def _memory(model: str, config: TrainConfig, trl_python: Path | None) -> dict[str, int | None]:
    """Median peak of a step of each, in processes of their own that time nothing."""
    steps = MEMORY_STEPS[model]
    ours = {"model": model, "path": str(Path(config.model).absolute()), "steps": steps}
    found = {OURS: _middle(list(fresh_peaks(__name__, ours).values()))}
    if trl_python is not None:
        with peer(trl_python, SCRIPT, _spec(config, steps, "wall", memory=True)) as rival:
            found[TRL] = _middle([rival.answer()["bytes"] for _ in range(steps)])
    return found


def _middle(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(median(known)) if known else None


def _phase_rows(model: str, turns: Mapping[str, list[Turn]], memory: Mapping[str, int | None]) -> Iterator[TrainRow]:
    for phase in PHASES:
        rates = {name: [turn.rate(phase) for turn in own] for name, own in turns.items()}
        whole = phase == BOTH
        for name, own in rates.items():
            best, middle = max(own), median(own)
            rival = rates.get(TRL)
            ratios = (None, None) if rival is None else (best / max(rival), middle / median(rival))
            yield TrainRow(
                model, f"{phase}, {name}", None, best, middle, *ratios, memory=memory.get(name) if whole else None
            )
        if TRL not in rates:
            yield TrainRow(model, f"{phase}, {TRL}")


def _level_rows(
    model: str, config: TrainConfig, bench: TrainBenchConfig, ours: Steps, least: tuple[float, float, float]
) -> Iterator[TrainRow]:
    """What statistics, store and levels add to a step; of a step without any of it.

    `least`: seconds of statistics, of rows and scalars, and of a whole step, the best of all steps each.
    """
    forward, outside, whole = least
    store = outside + _store(config, bench, ours).minimum
    step, tokens = whole - outside - forward, int(ours.tables.steps["n_tokens"])  # pyright: ignore[reportArgumentType]
    added = {"level forward": forward, "store": store, FREE: forward + store}
    for what, seconds in added.items():
        rate = None if what == FREE or seconds <= 0 else tokens / seconds
        yield TrainRow(model, what, seconds, rate, share=seconds / step)
    for level in levels() if model == "small" else {}:
        seconds, count = _level_cost(config, level, ours.clock)
        yield TrainRow(model, f"level {level}", seconds, count / seconds, share=seconds / step)


def _store(config: TrainConfig, bench: TrainBenchConfig, ours: Steps) -> Timing:
    """Time the writing of one new step: one written again costs its removal too, which no step of a run does."""
    writer, steps = RunWriter.create(config.root, config.run_name, {}, if_exists="replace"), count()
    write = timed(lambda: writer.write_step(next(steps), ours.tables), clock=ours.clock)
    return interleaved({"store": write}, 1 if bench.quick else WRITINGS)["store"]


def _level_cost(config: TrainConfig, level: str, clock: Callable[[], float] = perf_counter) -> tuple[float, int]:
    """Time of a level at a step where it is due, after one at which its engine looks at the model; tokens measured."""
    steps = Steps(replace(config, measure=replace(config.measure, **{level: levels()[level]})), clock)
    steps.turn()
    steps.turn()
    return steps.measured, measured_tokens(steps.tables, level)


def _cells(row: TrainRow) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return (
        row.model,
        row.what,
        shown(row.seconds, ".4f"),
        shown(row.rate, ",.0f"),
        shown(row.rate_median, ",.0f"),
        shown(row.to_trl, ".2f"),
        shown(row.to_trl_median, ".2f"),
        shown(None if row.share is None else 100 * row.share, ".1f"),
        shown(None if row.memory is None else row.memory / 2**20, ".0f"),
    )


def _notes(config: TrainBenchConfig, rows: Sequence[TrainRow]) -> list[str]:
    small, large = BUDGETS["small"], BUDGETS["M"]
    notes = [
        f"`small`: the demo's warm-started model (3 layers, d128, 17 characters), {small.prompts} prompts × "
        f"{small.group_size} rollouts of at most {small.max_new_tokens} tokens; `M`: 8 layers, d512, vocabulary 8192 "
        f"at its initial weights, {large.prompts} × {large.group_size} of {large.max_new_tokens}. Temperature 1, no "
        "filter, float32, one AdamW update of all parameters per batch; TRL's batch is one of its device batches.",
        "`tokens/s`: sampled tokens over the phase's time, best step; `median`: the median step; `× TRL`, `medians`: "
        "over TRL's. The phases are timed apart. Sampling is generation: ours also draws and encodes the prompts and "
        "decodes the texts, TRL's does not. Update is, of both, one forward pass with its graph, loss, backward pass, "
        f"clipping and AdamW; TRL's pass also takes entropies. `{PHASES[3]}` is everything else in a step: ours "
        "rewards, statistics of the level `forward`, token table, advantages, rows and scalars of the record, not "
        "its writing; TRL's encoding and decoding, rewards, advantages and its trainer's bookkeeping. "
        "`whole step` is the sum.",
        "`seconds`: what a measurement adds to a step at which it is due, and `tokens/s` how many tokens it measures "
        "in that time; `% of step`: over the best whole step without record and statistics; `level forward`: its "
        "statistics, timed inside the step; `store`: rows and scalars, and writing one new step; "
        "levels that choose groups take two. `MiB`: peak extra memory of one step, median.",
        *_reaches(rows),
        "Not measured on a GPU.",
    ]
    if config.clock == "cpu":
        notes.append(
            "Seconds are the processor's on each process: waits, as for the disk, and other work do not count."
        )
    if config.trl_python is None:
        notes.append(f"{TRL} was not measured: pass `--trl-python` an interpreter with torch, transformers and trl.")
    return notes


def _reaches(rows: Sequence[TrainRow]) -> Iterator[str]:
    """What was aimed at on the small model, and whether it was reached."""
    found = {row.what: row for row in rows if row.model == "small"}
    if not found:
        return
    share = found[FREE].share
    if share is not None:
        verdict = "reached" if share <= MOST_ADDED else "missed"
        yield f"At most {MOST_ADDED:.0%} of a step of `small` for {FREE}: {verdict}, {share:.1%}."
    ours, rival = found[f"{BOTH}, {OURS}"], found[f"{BOTH}, {TRL}"]
    if ours.to_trl is not None and ours.to_trl_median is not None:
        verdict = "reached" if min(ours.to_trl, ours.to_trl_median) >= LEAST_FASTER else "missed"
        yield (
            f"At least {LEAST_FASTER}× TRL's tokens per second of sampling and update on `small`: {verdict}, "
            f"{ours.to_trl:.2f}× of best steps, {ours.to_trl_median:.2f}× of medians."
        )
    if ours.memory is not None and rival.memory is not None:
        verdict = "reached" if ours.memory <= rival.memory else "missed"
        yield f"No more memory than TRL on `small`: {verdict}, {ours.memory / rival.memory:.2f} of its."
