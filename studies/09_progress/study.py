"""One update from one checkpoint with every arm, on many batches: does the arm with more efficiency gain more?

Checkpoints are small policies in the middle of training. All arms see the same batches. What a step gains is judged on
held-out prompts, by importance weights and by sampling anew; on the derailment process it is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables, rounded, select
from studies.lib.record import keep_arrays, keep_pickle, kept_file, kept_pickle

from . import checkpoint, derailed, judged, points
from .checkpoint import ARMS

POOL, PART = ("prompts", "rollouts", "blocks", "pilot"), ("part", "sampled", "sampled_prompts")
"""What the pool and the pilot depend on, and what a cell of gains depends on besides."""
HELD_OUT = "pool.pickle"
POLICIES, NEW_POLICIES = (
    tuple(f"{task}-{band}" for task in tasks for band in checkpoint.BANDS)
    for tasks in (("chain_sum", "graph_path"), ("counting", "running_total"))
)
"""The checkpoints in whose tables the analysis was found, and those on which it is tried."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    policies: tuple[str, ...] = POLICIES
    new_policies: tuple[str, ...] = NEW_POLICIES
    training: checkpoint.Training = field(default_factory=checkpoint.Training)
    judging: judged.Judging = field(default_factory=judged.Judging)
    processes: tuple[str, ...] = tuple(derailed.MISTAKES)
    horizon: int = 64
    process_batches: int = 300
    moment_batches: int = 100
    clip: float = 0.1  # Norm at which the process's gradients are clipped, times the root mean square of `rloo`'s
    replicates: int = 400  # Of the bootstrap


FULL = Size()
SMALL = Size(
    policies=("chain_sum-low",), new_policies=("counting-low",),
    training=checkpoint.Training(updates=3, lessons=1, lesson_prompts=8),
    judging=judged.Judging(
        prompts=32, rollouts=2, blocks=2, pilot=2, batches=4, part=2, sampled=1, sampled_prompts=16
    ),
    processes=("middle",), horizon=8, process_batches=16, moment_batches=4, replicates=20,
)  # fmt: skip


def cells(size: Size, quick: bool) -> tuple[list[Cell], list[Cell]]:
    """Return cells of checkpoints, the derailment process and their comparison, and those of new checkpoints."""
    old, new = (
        list(chain.from_iterable(cells_of(policy, size, quick) for policy in policies))
        for policies in (size.policies, size.new_policies)
    )
    process = {
        "quick": quick, "horizon": size.horizon, "batches": size.process_batches, "clip": size.clip,
        "moment_batches": size.moment_batches, "prompts": size.training.prompts, "group": size.training.group,
        "seed": 0, "pays": list(derailed.PAYS), "multiples": list(derailed.MULTIPLES), "arms": list(ARMS),
    }  # fmt: skip
    old += [
        Cell(f"derailment-{band}", {**process, "band": band, "mistakes": derailed.MISTAKES[band]})
        for band in size.processes
    ]
    last = {"quick": quick, "grid": list(points.GRID), "replicates": size.replicates, "ess": points.LEAST_ESS}
    return [*old, Cell("points", last, tuple(old))], [*new, Cell("new_points", last, tuple(new))]


def cells_of(policy: str, size: Size, quick: bool) -> list[Cell]:
    """Return a checkpoint, its pilot, its inner products and its gains."""
    judging, facts = size.judging, checkpoint.settings_of(policy, size.training, quick)
    # Cells do not depend on how many batches there are besides their own.
    pool, part = ({name: getattr(judging, name) for name in names} for names in (POOL, (*POOL, *PART)))
    first, known = Cell(f"checkpoint-{policy}", facts), {**facts, "arms": list(ARMS)}
    pilot = Cell(f"pilot-{policy}", known | {"judging": pool}, (first,))
    products = Cell(f"products-{policy}", known | {"batches": judging.batches}, (first,))
    numbers, of_part = range(judging.batches // judging.part), known | {"judging": part}
    gains = [Cell(f"gains-{policy}-{k}", of_part | {"part": k}, (first, pilot)) for k in numbers]
    return [first, pilot, products, *gains]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Train a checkpoint, try its pilot, take inner products, judge steps, or compare."""
    quick = cell.settings["quick"]
    size = SMALL if quick else FULL
    kind = cell.name.split("-")[0]
    if kind == "checkpoint":
        return checkpoint.trained_checkpoint(cell, size.training, quick, work, bar)
    if kind == "points":
        return compared(cell, size.policies, size.replicates, work)
    if kind == "new_points":
        tables = compared(cell, size.new_policies, size.replicates, work)
        return {"new_points": tables["points"], "new_checks": tables["checks"]}
    if kind == "derailment":
        keep_arrays(work, **derailed.measured(cell.settings))
        return {}
    at, key = checkpoint.load(cell.after[0], size.training, quick, work), {"policy": cell.settings["policy"]}
    if kind == "pilot":
        tables, pool = judged.pilot(at, size.judging, key, bar)
        keep_pickle(work, pool, HELD_OUT)
        return tables
    if kind == "products":
        keep_arrays(work, **judged.inner_products(at, size.judging, bar))
    else:
        pool = kept_pickle(cell.after[1], work, HELD_OUT)
        keep_arrays(work, **judged.gains(at, pool, size.judging, cell.settings["part"], cell.given["pilot"], bar))
    return {}


def compared(cell: Cell, policies: Sequence[str], replicates: int, work: Path) -> Tables:
    """Return points and correlations, and how sampling anew agrees with importance weights."""
    kept = [one for one in cell.after if one.name.startswith(("products-", "gains-", "derailment-"))]
    arrays, judgements, checks = {one.name: dict(np.load(kept_file(one, work))) for one in kept}, [], []
    for policy in policies:
        parts = [arrays[name] for name in arrays if name.startswith(f"gains-{policy}-")]
        lengths = select(cell.given["pilot"], policy=policy)
        best = np.array([judged.best_lengths(lengths, line) for line in judged.LINES])
        judgements.append(points.of_policy(policy, arrays[f"products-{policy}"], parts, best))
        checks += [{"policy": policy} | row for row in points.check_rows(parts)]
    processes = [name for name in arrays if name.startswith("derailment-")]
    judgements += [points.of_process(name, arrays[name]) for name in processes]
    facts = [{"policy": name, "success": rounded(float(arrays[name]["success"]))} for name in processes]
    return points.tables(judgements, replicates) | {"checks": checks, "processes": facts}


OLD, NEW = cells(FULL, quick=False)
STUDY = Study(
    title="Progress",
    question="Does the efficiency of one update predict what the update gains, in SGD at its best length and in AdamW?",
    cells=OLD,
    later=NEW,
    quick=[cell for some in cells(SMALL, quick=True) for cell in some],
    measure=measure,
)
