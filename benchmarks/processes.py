"""What several processes save of a measured step, level by level."""

import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.config import ProcessesConfig
from benchmarks.engine import model_of
from benchmarks.long import PLANS, random_rollouts
from benchmarks.publish import Report, notes_of, report_of
from otb_analysis.config import MeasureConfig, Schedule
from otb_analysis.measurement.forward import forward_statistics
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import TokenMeasurements, token_table
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import gathered
from otb_analysis.training.runtime import shard

COLUMNS = {
    "level": "{level}", "processes": "{processes}", "weights": "{weights}", "seconds": "{seconds:.1f}",
    "÷ one process": "{ratio:.2f}",
    "÷ whole weights": lambda row: None if row["sharded_ratio"] is None else f"{row['sharded_ratio']:.2f}",
}  # fmt: skip
GRAM = "gram"
"""The Gram matrix by itself: no level has it without the statistics that follow from it."""
WEIGHTS = {False: "whole", True: "FSDP2"}


def run(config: ProcessesConfig) -> Report:
    """Time one measured step by every number of processes, a thread each; they take turns."""
    ways = [(size, sharded) for size in config.processes for sharded in (False, True) if size > 1 or not sharded]
    cases = [(level, *way) for level in config.levels for way in ways]
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(config.repeats):
        for case in cases:
            least[case] = min(least[case], seconds(config, *case))
    rows = [
        {"level": level, "processes": size, "weights": WEIGHTS[sharded], "seconds": found}
        | {"ratio": found / least[level, 1, False]}
        | {"sharded_ratio": found / least[level, size, False] if sharded else None}
        for (level, size, sharded), found in least.items()
    ]
    step = f"{config.prompts} prompts × {config.group_size} rollouts of {config.tokens} tokens"
    name = "processes" if "exact" in config.levels else "processes_levels"
    name = "processes_gram" if config.levels == ("gram",) else name
    title = f"Measuring {step} under {config.model}"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config), name=name)


def seconds(config: ProcessesConfig, level: str, size: int, sharded: bool) -> float:
    """Seconds by the clock from when all processes are ready until the last has the result."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_measured, (config, level, size, sharded, folder), nprocs=size)
        return max(float((Path(folder) / str(rank)).read_text()) for rank in range(size))


def _measured(rank: int, config: ProcessesConfig, level: str, size: int, sharded: bool, folder: str) -> None:
    warnings.filterwarnings("ignore")  # whatever torch says about a process group on a CPU
    torch.set_num_threads(1)
    processes = SINGLE_PROCESS
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
        processes = Processes(rank, size, torch.device("cpu"), sharded, dist.group.WORLD)
    model = model_of(config.model, "cpu", "float32")
    rollouts = random_rollouts(model.config.vocab_size, config, config.tokens)
    table = token_table(rollouts, forward_statistics(model, rollouts, 1.0), None)
    if sharded:
        shard(model, processes)
    plan: Any = {"exact": Schedule()} | ({} if level == GRAM else {level: PLANS[level]})
    measurer = GradientMeasurer(model, MeasureConfig(subgroups=(), **plan), 1.0, processes=processes)
    nothing, groups = TokenMeasurements.nothing(table.mask.shape), np.arange(config.prompts)
    processes.barrier()
    start = perf_counter()
    with gathered(model) if sharded else nullcontext():
        if level == GRAM:
            measurer.gram(rollouts, table, nothing, groups)
        else:
            assert not measurer.measure(0, rollouts, table, None, lambda: table.mask / 1.0).gaps
    Path(folder, str(rank)).write_text(str(perf_counter() - start))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
