"""Tokens per second of sampling and updating beside TRL's GRPOTrainer, and what every measurement adds to a step.

Both train the same model on the same prompts and take turns, one step each. The notes below the table say what each
phase holds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.config import TrainBenchConfig
from benchmarks.peer_side import peak
from benchmarks.publish import Column, Report, mebibytes_cell, notes_of, report_of
from benchmarks.timing import CLOCKS, in_fresh_process, least_seconds, peer, threads
from otb_analysis.config import (
    CheckpointConfig,
    CriticConfig,
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    TrainConfig,
)
from otb_analysis.config.measuring import StepSchedule
from otb_analysis.devices import clock_of, device_of
from otb_analysis.measurement.forward import ForwardPass
from otb_analysis.phases import plural
from otb_analysis.rollouts.models import character_tokenizer, output_layer
from otb_analysis.rollouts.named_models import SHIPPED, fetched
from otb_analysis.store import RunWriter
from otb_analysis.tasks import make_task
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.loop import train_step
from otb_analysis.training.setup import Trainer

REST = "rewards, advantages, record"
PHASES = ("sampling", "update", "sampling + update", REST, f"{REST}, statistics", "whole step")
"""Statistics of the logits are part of the update, since TRL takes its entropies in that pass; the fifth phase is what
both do beside generation, the pass to the final hidden states, and what comes behind the loss."""
LEARNING_RATE = 1e-6
"""So small that the policy, and with it the length of what it writes, stays what it was."""
QUICK = SampleConfig(prompts=3, group_size=4, max_new_tokens=8)
BUDGETS = {"small": SampleConfig(), "M": SampleConfig(prompts=4, group_size=4, max_new_tokens=128)}
BUDGETS["R"] = SampleConfig(prompts=4, group_size=4, max_new_tokens=32)
"""What is drawn at each step, by model: the demo's settings, a few long rollouts, a few short ones."""
LARGE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One step: seconds of its phases, and its sampled tokens."""

    sample: float
    update: float  # Forward pass, statistics of its logits, loss, backward pass and optimizer
    whole: float
    tokens: int
    statistics: float = 0.0  # Those of the level `forward`, within the update
    head: float = 0.0  # From final hidden states to log-probabilities, within the update; of TRL to entropies, too
    measured: float = 0.0  # All other levels
    outside: float = 0.0  # What belongs to no phase: rows and scalars of the record

    def rate(self, phase: str) -> float:
        """Return the tokens per second of a phase of `PHASES`."""
        both, rest = self.sample + self.update, self.whole - self.sample - self.update
        seconds = self.sample, self.update, both, rest, rest + self.head + self.statistics, self.whole
        return self.tokens / seconds[PHASES.index(phase)]


def bench_config(model: str, folder: Path, quick: bool = False) -> TrainConfig:
    """Return the run that is timed, nothing measured beyond the level `forward`; it and its model are kept in a folder.

    `small` is the demo's model, `M` at its initial weights, `R` a pretrained one; `quick` draws few tokens.

    Raises:
        InputError: The pretrained model was not fetched.
    """
    places = {"small": SHIPPED["demo"], "M": folder / model}
    config = TrainConfig(
        run=model, root=folder / "runs", if_exists="replace",
        model=str(places[model] if model in places else fetched("smollm2")), sample=QUICK if quick else BUDGETS[model],
        optimize=OptimizeConfig(learning_rate=LEARNING_RATE), critic=CriticConfig(enabled=False),
        measure=MeasureConfig(exact=Schedule()), evaluate=EvaluateConfig(every=0), checkpoint=CheckpointConfig(every=0),
    )  # fmt: skip
    if model == "M":
        shape = Qwen3Config(**LARGE, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            Qwen3ForCausalLM(shape).save_pretrained(config.model)
        character_tokenizer(make_task(config).alphabet).save_pretrained(config.model)
    return config


def levels() -> dict[str, StepSchedule]:
    """Return every level that can be scheduled, due at each step, those that choose groups on two of them."""
    return {
        name: replace(level, every=1, prompts=2) if isinstance(level, Schedule) else replace(level, every=1)
        for name, level in MeasureConfig().schedules.items()
    }


class Steps:
    """Our trainer, one step per turn; the last step's tables are kept for the store."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = perf_counter):
        self.trainer = Trainer.from_config(config)
        on_cpu = self.trainer.model.device.type == "cpu"
        self.trainer.clock = self.clock = clock if on_cpu else clock_of(self.trainer.model.device)
        self.step, self.head, self.began = 0, 0.0, 0.0
        self.forward, self.timed = self.trainer.policy.forward, self.trainer.timed
        self.trainer.policy.forward, self.trainer.timed = self._forward, self._timed

    def _forward(self, *args: Any, **named: Any) -> ForwardPass:
        """Score a batch; note when the final hidden states of a pass are there."""
        hook = output_layer(self.trainer.model).register_forward_pre_hook(self._begin)
        try:
            return self.forward(*args, **named)
        finally:
            hook.remove()  # engines of the levels follow none

    def _begin(self, *args: Any) -> None:
        self.began = self.clock()

    def _timed(self, name: str, shown: str = "") -> Any:
        """Time a phase; where the statistics of a pass begin, its log-probabilities are there."""
        if name == "forward" and self.began:
            self.head, self.began = self.head + self.clock() - self.began, 0.0
        return self.timed(name, shown)

    def turn(self) -> Turn:
        """Take one step."""
        start, self.head = self.clock(), 0.0
        self.tables = train_step(self.trainer, self.step)
        whole = self.clock() - start
        self.step += 1
        scalars: Any = self.tables.steps
        phases = ("sample", "update", "forward", "estimate", "measure")
        sample, update, forward, estimate, measure = (float(scalars[f"seconds_{phase}"]) for phase in phases)
        outside = whole - sample - update - forward - estimate - measure
        return Turn(sample, update + forward, whole, int(scalars["n_tokens"]), forward, self.head, measure, outside)


OURS, TRL = "otb train", "TRL GRPOTrainer"
SCRIPT = Path(__file__).with_name("trl_train_peer.py")
REPEATS, WRITINGS, MEMORY_STEPS = {"M": 3, "R": 3}, 9, {"small": 3, "M": 1, "R": 1}
"""Steps at most; repetitions of writing one; steps of the memory."""
FREE = "level forward and store"
BOTH = PHASES[2]
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
    with threads(config.threads), TemporaryDirectory() as folder:
        for model in ("small",) if config.quick else config.models:
            run = bench_config(model, Path(folder), config.quick)
            rows += [{"model": model, "share": None, "memory": None} | row for row in _measured(model, run, config)]
    title = f"A training step: sampling, update, measurement, {plural(config.threads, 'thread')}"
    name = "train_smollm2" if config.models == ("R",) else "train"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, **BUDGETS), name=name)


def peaks(config: TrainConfig, steps: int, number: int) -> list[int | None]:
    """Return the peak bytes of so many steps of ours, after a step that warms up; for a fresh process."""
    torch.set_num_threads(number)
    ours = Steps(config)
    ours.turn()
    return [peak(ours.turn, str(device_of())) for _ in range(steps)]


def _measured(model: str, config: TrainConfig, bench: TrainBenchConfig) -> Iterator[dict[str, Any]]:
    ours = Steps(config, CLOCKS[bench.clock])
    repeats = min(bench.repeats, REPEATS.get(model, bench.repeats))
    ours.turn()
    turns: dict[str, list[Turn]] = {OURS: []}
    trl = bench.trl_python
    with nullcontext() if trl is None else peer(trl, SCRIPT, peer_spec(config, repeats, bench)) as rival:
        for _ in range(repeats):
            turns[OURS].append(ours.turn())
            if rival is not None:
                answer = rival.answer()
                facts = (answer[name] for name in ("sample", "update", "seconds", "tokens"))
                turns.setdefault(TRL, []).append(Turn(*facts, head=answer["statistics"]))
    steps, held = MEMORY_STEPS[model], dict[str, list[int | None]]()
    if not bench.quick:  # in processes of their own that time nothing
        held[OURS] = in_fresh_process(peaks, config, steps, bench.threads) or [None]
        if trl is not None:
            with peer(trl, SCRIPT, peer_spec(config, steps, bench, memory=True)) as rival:
                held[TRL] = [rival.answer()["bytes"] for _ in range(steps)]
    known = {name: [value for value in values if value is not None] for name, values in held.items()}
    yield from _phase_rows(turns, {name: int(median(values)) for name, values in known.items() if values})
    yield from _level_rows(model, config, bench, ours, turns[OURS])


def peer_spec(config: TrainConfig, repeats: int, bench: TrainBenchConfig, memory: bool = False) -> dict[str, object]:
    """What the peer is told; it warms up with one step of its own."""
    prompts = draw_prompts(make_task(config), "train", 0, config.sample.prompts * (repeats + 1))
    facts: dict[str, object] = {name: getattr(config.sample, name) for name in ("group_size", "max_new_tokens")}
    facts |= {"prompts_per_step": config.sample.prompts, "prompts": [prompt.text for prompt in prompts]}
    facts |= {"model": str(Path(config.model).absolute()), "threads": bench.threads, "device": str(device_of())}
    facts |= {"steps": repeats + 1, "learning_rate": LEARNING_RATE, "memory": memory}
    return facts | {"clock": "wall" if memory else bench.clock}


def _phase_rows(turns: Mapping[str, list[Turn]], memory: Mapping[str, int]) -> Iterator[dict[str, Any]]:
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
    # A new step at each turn: one written again costs its removal too, which no step of a run does.
    writer, steps = RunWriter.create(config.root, config.run_name, {}, if_exists="replace"), count()
    write = {"store": lambda: writer.write_step(next(steps), ours.tables)}
    store = outside + least_seconds(write, 1 if bench.quick else WRITINGS, ours.clock)["store"]
    step, tokens = whole - outside - forward, int(ours.tables.steps["n_tokens"])  # pyright: ignore[reportArgumentType]
    for what, seconds in {"level forward": forward, "store": store, FREE: forward + store}.items():
        rate = None if what == FREE or seconds <= 0 else tokens / seconds
        yield {"what": what, "seconds": seconds, "rate": rate, "share": seconds / step}
    for level in levels() if model == "small" else {}:
        seconds, measured = _level_cost(config, level, ours.clock)
        rate = measured / seconds or None
        yield {"what": f"level {level}", "seconds": seconds, "rate": rate, "share": seconds / step}


def _level_cost(config: TrainConfig, level: str, clock: Callable[[], float] = perf_counter) -> tuple[float, int]:
    """Time of a level at a step where it is due, after one at which its engine looks at the model; tokens measured."""
    steps = Steps(replace(config, measure=replace(config.measure, **{level: levels()[level]})), clock)
    steps.turn()
    seconds, tokens = steps.turn().measured, steps.tables.tokens
    assert tokens is not None
    values = np.ma.asarray(tokens["attribution" if level == "attribution" else "grad_norm_sq"])
    return seconds, int(np.ma.count(np.ma.masked_invalid(values)))
