"""One update from one checkpoint with every arm, on many batches: does the arm with more efficiency gain more?

Checkpoints are small policies in the middle of training. All arms see the same batches. What a step gains is judged on
held-out prompts, by importance weights and by sampling anew; on the derailment process it is exact.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.record import keep_arrays, keep_pickle, kept_file, kept_pickle

from . import checkpoint, derailed, judged, points
from .checkpoint import ARMS

POOL, PART = ("prompts", "rollouts", "blocks", "pilot"), ("part", "sampled", "sampled_prompts")
"""What the pool and the pilot depend on, and what a cell of gains depends on besides."""
HELD_OUT = "pool.pickle"
POLICIES = tuple(f"{task}-{band}" for task in checkpoint.LENGTHS for band in checkpoint.BANDS)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    policies: tuple[str, ...] = POLICIES
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
    policies=("chain_sum-low",),
    training=checkpoint.Training(updates=3, lessons=1, lesson_prompts=8),
    judging=judged.Judging(
        prompts=32, rollouts=2, blocks=2, pilot=2, batches=4, part=2, sampled=1, sampled_prompts=16
    ),
    processes=("middle",), horizon=8, process_batches=16, moment_batches=4, replicates=20,
)  # fmt: skip


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return checkpoints, pilots, inner products, gains, the derailment process, and the comparison of all."""
    made, judging = list[Cell](), size.judging
    for policy in size.policies:
        facts = checkpoint.settings_of(policy, size.training, quick)
        first = Cell(f"checkpoint-{policy}", facts)
        pool = {**facts, "judging": settings_of(judging, POOL), "arms": list(ARMS)}
        pilot = Cell(f"pilot-{policy}", pool, (first,))
        products = {**facts, "batches": judging.batches, "arms": list(ARMS)}
        made += [first, pilot, Cell(f"products-{policy}", products, (first,))]
        for k in range(judging.batches // judging.part):
            part = {**pool, "judging": settings_of(judging, (*POOL, *PART)), "part": k}
            made.append(Cell(f"gains-{policy}-{k}", part, (first, pilot)))
    process = {
        "quick": quick, "horizon": size.horizon, "batches": size.process_batches, "clip": size.clip,
        "moment_batches": size.moment_batches, "prompts": size.training.prompts, "group": size.training.group,
        "seed": 0, "pays": list(derailed.PAYS), "multiples": list(derailed.MULTIPLES), "arms": list(ARMS),
    }  # fmt: skip
    made += [
        Cell(f"derailment-{band}", {**process, "band": band, "mistakes": derailed.MISTAKES[band]})
        for band in size.processes
    ]
    last = {"quick": quick, "grid": list(points.GRID), "replicates": size.replicates, "ess": points.LEAST_ESS}
    return [*made, Cell("points", last, tuple(made))]


def settings_of(judging: judged.Judging, names: tuple[str, ...]) -> dict[str, int]:
    """Return some of the settings: cells do not depend on how many batches there are besides their own."""
    return {name: getattr(judging, name) for name in names}


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Train a checkpoint, try its pilot, take inner products, judge steps, or compare."""
    quick = cell.settings["quick"]
    size = SMALL if quick else FULL
    kind = cell.name.split("-")[0]
    if kind == "checkpoint":
        return checkpoint.trained_checkpoint(cell, size.training, quick, work, bar)
    if kind == "points":
        return compared(cell, size, work)
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


def compared(cell: Cell, size: Size, work: Path) -> Tables:
    """Return points and correlations, and how sampling anew agrees with importance weights."""
    arrays = {
        one.name: dict(np.load(kept_file(one, work)))
        for one in cell.after
        if one.name.split("-")[0] in ("products", "gains", "derailment")
    }
    found, checks = [], []
    for policy in size.policies:
        parts = [arrays[name] for name in arrays if name.startswith(f"gains-{policy}-")]
        lengths = [row for row in cell.given["pilot"] if row["policy"] == policy]
        best = np.array([judged.best_lengths(lengths, line) for line in judged.LINES])
        found.append(points.of_policy(policy, arrays[f"products-{policy}"], parts, best))
        checks += [{"policy": policy} | row for row in points.check_rows(parts)]
    processes = [name for name in arrays if name.startswith("derailment-")]
    found += [points.of_process(name, arrays[name]) for name in processes]
    facts = [{"policy": name, "success": rounded(float(arrays[name]["success"]))} for name in processes]
    return points.tables(found, size.replicates) | {"checks": checks, "processes": facts}


STUDY = Study(
    title="Progress",
    question="Does the efficiency of one update predict what the update gains, in SGD at its best length and in AdamW?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
