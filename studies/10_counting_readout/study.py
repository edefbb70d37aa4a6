"""Do a model's states hold the count, do the digit rows of its output layer read it, and does training them help?"""

from pathlib import Path

from otb_analysis.training.runtime.progress import Bar
from studies.lib import Cell, Study, Tables

from . import real, small
from .real import FITTED, JUDGED
from .small import NORMS, RATES, STARTS, STEPS

__all__ = ["FITTED", "JUDGED", "NORMS", "RATES", "STARTS", "STEPS", "STUDY"]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Probe and train small models, or the pretrained one."""
    return (small if "start" in cell.settings else real).measure(cell, bar)


STUDY = Study(
    title="Counting readout",
    question="Do a model's states hold a count that the digit rows of its output layer do not read, and does training "
    "only those rows make it answer?",
    cells=[*small.cells(quick=False), *real.cells()],
    quick=small.cells(quick=True),
    measure=measure,
)
