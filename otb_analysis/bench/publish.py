"""Benchmark rows as a terminal table, and as Markdown and JSON files that a document can quote."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from otb_analysis.bench.estimators import BenchRow
from otb_analysis.errors import StoreError

HEADERS = ("estimator", "seconds", "÷ torch loop of otb", "÷ multiply and sum")


def bench_table(rows: Sequence[BenchRow]) -> Table:
    """Return the rows as a terminal table."""
    table = Table(box=SIMPLE_HEAD, title="One call on one thread, best of the repetitions", title_justify="left")
    for i, name in enumerate(HEADERS):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def publish(folder: Path, name: str, rows: Sequence[BenchRow], command: str, settings: Mapping[str, object]) -> None:
    """Write NAME.md and NAME.json: the numbers, the command that made them, and the machine.

    Raises:
        StoreError: The folder cannot be written.
    """
    machine = {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "threads": 1,
    }
    facts = {"command": command, "settings": dict(settings), "machine": machine, "rows": [asdict(r) for r in rows]}
    lines = [f"# `{command}`", "", ", ".join(f"{k} {v}" for k, v in machine.items()), ""]
    lines += ["| " + " | ".join(HEADERS) + " |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")
        (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise StoreError(f"cannot write the benchmark to {folder} ({error.strerror}); pass another --out.") from error


def _cells(row: BenchRow) -> tuple[str, str, str, str]:
    return row.name, f"{row.seconds:.3f}", f"{row.to_loop:.2f}", f"{row.to_pass:.1f}"
