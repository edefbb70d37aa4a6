"""A pretrained model on tasks that it half knows: do the verdicts of small models made in code hold there?

Cells draw a policy's rollouts, measure them a few prompts at a time, and compare. Others train.
"""

from dataclasses import asdict, replace
from pathlib import Path

from otb_analysis.estimators import ESTIMATORS
from otb_analysis.training.runtime.progress import Bar
from studies.lib import Cell, Study, Tables
from studies.lib.seeds import BASE, QUICK_START, QUICK_TASK, started

from . import pool, training
from .compare import AGAINST, CALIBRATION_SHARE, SIZES, UPDATES, comparison
from .regression import BATCHES, GROUP, RIDGES, SETS, regressions

RANK, TRAINED, LORA_UPDATES = training.LORA.rank, training.FULL, pool.FULL.updates
"""For the page."""


def cells(size: pool.Size, learning: training.Size, quick: bool) -> list[Cell]:
    """Return the pools of each policy, and the training."""
    made, common = list[Cell](), {"quick": quick}
    drawn, measured = ({name: getattr(size, name) for name in names} for names in (pool.DRAWN, pool.MEASURED))
    compared = {"shuffles": size.shuffles, "sizes": list(SIZES), "updates": list(UPDATES), "share": CALIBRATION_SHARE}
    compared["against"] = list(AGAINST)
    compared["estimators"] = sorted(ESTIMATORS)  # those that a pool cannot have leave no row
    for name in size.policies:
        task, critic = asdict(pool.TASKS[name]), asdict(pool.CRITIC)
        facts = {**common, "policy": name, "task": task, "critic": critic, **drawn}
        draw = Cell(f"draw-{name}", facts)
        count = -(-size.prompts // size.block)
        blocks = [Cell(f"measure-{name}-{k}", {**facts, **measured, "number": k}, after=(draw,)) for k in range(count)]
        made += [draw, *blocks, Cell(f"compare-{name}", {**facts, **measured, **compared}, after=(draw, *blocks))]
        tried = {"group": GROUP, "batches": list(BATCHES), "ridges": list(RIDGES)}
        tried |= {"features": {label: list(names) for label, names in SETS.items()}, "shuffles": size.shuffles}
        made.append(Cell(f"regression-{name}", {**facts, **measured, **tried}, after=(draw, *blocks)))
    return made + training.cells(learning, common)


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Draw, measure or compare the rollouts of a policy, or train an arm."""
    quick = cell.settings["quick"]
    start = started(replace(BASE, chain_sum=QUICK_TASK, warm_start=QUICK_START), work) if quick else None
    if "arm" in cell.settings:
        return training.measure(cell, training.SMALL if quick else training.FULL, start, work, bar)
    size = pool.SMALL if quick else pool.FULL
    if cell.name.startswith("draw"):
        return pool.drawn(cell, size, start, work, bar)
    if cell.name.startswith("measure"):
        return pool.measured(cell, size, start, work, bar)
    return (comparison if cell.name.startswith("compare") else regressions)(cell, size, pool.load(cell, work))


STUDY = Study(
    title="A real model",
    question="On a pretrained model of 135 M parameters and real tasks, do the proxy and the baselines behave as they "
    "do on the small models of the other studies?",
    cells=cells(pool.FULL, training.FULL, quick=False),
    quick=cells(pool.SMALL, training.SMALL, quick=True),
    measure=measure,
)
