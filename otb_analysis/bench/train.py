"""Tokens per second of sampling and updating beside TRL's GRPOTrainer, and what every measurement adds to a step.

Both train the same model on the same prompts, group by group, with one AdamW update per batch and no filter on what is
drawn; they take turns, one step each, their phases timed apart. `sampling` is generation (ours with prompts and texts),
`update` is one forward pass that keeps its graph, loss, backward pass, clipping and optimizer; all that lies between
and behind them, rewards, statistics, advantages, rows and scalars of the record, has a row of its own for each, and
so has the whole step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from otb_analysis.bench.config import TrainBenchConfig
from otb_analysis.bench.memory import fresh_peaks
from otb_analysis.bench.peer import Peer, peer
from otb_analysis.bench.publish import NO_GPU, Column, Report, Row, mebibytes_cell, report_of
from otb_analysis.bench.timing import CLOCKS, least_seconds, threads
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
NOT_MEASURED = dict.fromkeys(("seconds", "rate", "rate_median", "to_trl", "to_trl_median", "share", "memory"))
"""A row before anything is known of it. Phases have no `seconds`, since steps differ in length."""
COLUMNS: dict[str, Column] = {
    "model": "{model}",
    "what": "{what}",
    "seconds": "{seconds:.4f}",
    "tokens/s": "{rate:,.0f}",
    "median": "{rate_median:,.0f}",
    "× TRL": "{to_trl:.2f}",
    "medians": "{to_trl_median:.2f}",
    "% of step": lambda row: None if row["share"] is None else f"{100 * row['share']:.1f}",
    "MiB": mebibytes_cell,
}


def run(config: TrainBenchConfig) -> Report:
    """Measure every model.

    Raises:
        InputError: The peer's interpreter does not work.
    """
    rows: list[dict[str, Any]] = []
    with threads(1), TemporaryDirectory() as folder:
        for model in ("small",) if config.quick else config.models:
            measured = _measured(model, bench_config(model, Path(folder), config.quick), config)
            rows += [{"model": model} | NOT_MEASURED | row for row in measured]
    title = "A training step: sampling, update, measurement, one thread"
    return report_of(config, title, COLUMNS, rows, notes=_notes(config, rows))


def memory_jobs(spec: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Yield (number, one step of ours, device) for a fresh process, after a step that warms up.

    Args:
        spec: "model", "path" of its weights, "steps".
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        steps = Steps(replace(plain_config(spec["model"], Path(folder)), model=spec["path"]))
        steps.turn()
        for number in range(spec["steps"]):
            yield str(number), steps.turn, "cpu"


def _measured(model: str, config: TrainConfig, bench: TrainBenchConfig) -> Iterator[dict[str, Any]]:
    ours = Steps(config, CLOCKS[bench.clock])
    repeats = min(bench.repeats, REPEATS.get(model, bench.repeats))
    ours.turn()
    turns: dict[str, list[Turn]] = {OURS: []}
    with ExitStack() as stack:
        rival = None
        if bench.trl_python is not None:
            rival = stack.enter_context(peer(bench.trl_python, SCRIPT, _spec(config, repeats, bench.clock)))
            turns[TRL] = []
        for _ in range(repeats):
            turns[OURS].append(ours.turn())
            if rival is not None:
                turns[TRL].append(_rival_turn(rival))
    yield from _phase_rows(turns, {} if bench.quick else _memory(model, config, bench.trl_python))
    yield from _level_rows(model, config, bench, ours, turns[OURS])


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
    answer = rival.answer()
    return Turn(answer["sample"], answer["update"], answer["seconds"], answer["tokens"])


def _memory(model: str, config: TrainConfig, trl_python: Path | None) -> dict[str, int | None]:
    """Median peak of a step of each, in processes of their own that time nothing."""
    steps = MEMORY_STEPS[model]
    spec = {"model": model, "path": str(Path(config.model).absolute()), "steps": steps}
    peaks = {OURS: _median_known(fresh_peaks(__name__, spec).values())}
    if trl_python is not None:
        with peer(trl_python, SCRIPT, _spec(config, steps, "wall", memory=True)) as rival:
            peaks[TRL] = _median_known([rival.answer()["bytes"] for _ in range(steps)])
    return peaks


def _median_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(median(known)) if known else None


def _phase_rows(turns: Mapping[str, list[Turn]], memory: Mapping[str, int | None]) -> Iterator[dict[str, Any]]:
    for phase in PHASES:
        rates = {name: [turn.rate(phase) for turn in steps] for name, steps in turns.items()}
        for name in (OURS, TRL):
            row: dict[str, Any] = {"what": f"{phase}, {name}"}
            if name in rates:
                row |= {"rate": max(rates[name]), "rate_median": median(rates[name])}
                row |= {"memory": memory.get(name) if phase == BOTH else None}
            if TRL in rates:
                row |= {"to_trl": row["rate"] / max(rates[TRL])}
                row |= {"to_trl_median": row["rate_median"] / median(rates[TRL])}
            yield row


def _level_rows(
    model: str, config: TrainConfig, bench: TrainBenchConfig, ours: Steps, turns: Sequence[Turn]
) -> Iterator[dict[str, Any]]:
    """What statistics, store and levels add to a step, over the best step without any of them."""
    forward, outside, whole = (min(getattr(turn, x) for turn in turns) for x in ("statistics", "outside", "whole"))
    store = outside + _store_seconds(config, bench, ours)
    step, tokens = whole - outside - forward, int(ours.tables.steps["n_tokens"])  # pyright: ignore[reportArgumentType]
    for what, seconds in {"level forward": forward, "store": store, FREE: forward + store}.items():
        rate = None if what == FREE or seconds <= 0 else tokens / seconds
        yield {"what": what, "seconds": seconds, "rate": rate, "share": seconds / step}
    for level in levels() if model == "small" else {}:
        seconds, measured = _level_cost(config, level, ours.clock)
        yield {"what": f"level {level}", "seconds": seconds, "rate": measured / seconds, "share": seconds / step}


def _store_seconds(config: TrainConfig, bench: TrainBenchConfig, ours: Steps) -> float:
    """Time the writing of one new step: one written again costs its removal too, which no step of a run does."""
    writer, steps = RunWriter.create(config.root, config.run_name, {}, if_exists="replace"), count()
    write = {"store": lambda: writer.write_step(next(steps), ours.tables)}
    return least_seconds(write, 1 if bench.quick else WRITINGS, ours.clock)["store"]


def _level_cost(config: TrainConfig, level: str, clock: Callable[[], float] = perf_counter) -> tuple[float, int]:
    """Time of a level at a step where it is due, after one at which its engine looks at the model; tokens measured."""
    steps = Steps(replace(config, measure=replace(config.measure, **{level: levels()[level]})), clock)
    steps.turn()
    return steps.turn().measured, measured_tokens(steps.tables, level)


def _notes(config: TrainBenchConfig, rows: Sequence[Row]) -> list[str]:
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
        NO_GPU,
    ]
    if config.clock == "cpu":
        notes.append(
            "Seconds are the processor's on each process: waits, as for the disk, and other work do not count."
        )
    if config.trl_python is None:
        notes.append(f"{TRL} was not measured: pass `--trl-python` an interpreter with torch, transformers and trl.")
    return notes


def _reaches(rows: Sequence[Row]) -> Iterator[str]:
    """What was aimed at on the small model, and whether it was reached."""
    small = {row["what"]: row for row in rows if row["model"] == "small"}
    if not small:
        return
    share = small[FREE]["share"]
    if share is not None:
        verdict = "reached" if share <= MOST_ADDED else "missed"
        yield f"At most {MOST_ADDED:.0%} of a step of `small` for {FREE}: {verdict}, {share:.1%}."
    ours, rival = small[f"{BOTH}, {OURS}"], small[f"{BOTH}, {TRL}"]
    best, middle = ours["to_trl"], ours["to_trl_median"]
    if best is not None and middle is not None:
        verdict = "reached" if min(best, middle) >= LEAST_FASTER else "missed"
        yield (
            f"At least {LEAST_FASTER}× TRL's tokens per second of sampling and update on `small`: {verdict}, "
            f"{best:.2f}× of best steps, {middle:.2f}× of medians."
        )
    if ours["memory"] is not None and rival["memory"] is not None:
        ratio = ours["memory"] / rival["memory"]
        yield f"No more memory than TRL on `small`: {'reached' if ratio <= 1 else 'missed'}, {ratio:.2f} of its."
