"""A finished benchmark as a terminal table, and as Markdown and JSON files that a document can quote."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from otb_analysis.errors import StoreError


@dataclass(frozen=True)
class Report:
    """One benchmark, measured; made by each benchmark's module.

    Attributes:
        name: Of the benchmark and of its files.
        command: What measured it.
        settings: Its options.
        title: What the table shows.
        headers: Its columns.
        cells: Its rows, formatted.
        rows: The same rows as plain facts, for JSON.
        notes: Sentences on how to read it.
    """

    name: str
    command: str
    settings: Mapping[str, object]
    title: str
    headers: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, object]]
    notes: Sequence[str] = ()


def bench_table(report: Report) -> Table:
    """Return the rows as a terminal table, its notes below."""
    caption = "\n".join(report.notes) or None
    table = Table(box=SIMPLE_HEAD, title=report.title, title_justify="left", caption=caption, caption_justify="left")
    words = [all(_is_word(row[i]) for row in report.cells) for i in range(len(report.headers))]
    for name, word in zip(report.headers, words, strict=True):
        table.add_column(name, justify="left" if word else "right")
    for row in report.cells:
        table.add_row(*row)
    return table


def publish(folder: Path, report: Report) -> None:
    """Write NAME.md and NAME.json: the numbers, the command that made them, and the machine.

    Raises:
        StoreError: The folder cannot be written.
    """
    facts = {
        "command": report.command,
        "settings": dict(report.settings),
        "machine": machine(),
        "rows": [dict(row) for row in report.rows],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{report.name}.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
        (folder / f"{report.name}.md").write_text(markdown(report))
    except OSError as error:
        raise StoreError(f"cannot write the benchmark to {folder} ({error.strerror}); pass another --out.") from error


def markdown(report: Report) -> str:
    """Return the report as a Markdown page."""
    lines = [f"# `{report.command}`", "", ", ".join(f"{k} {v}" for k, v in machine().items()), ""]
    lines += [f"{report.title}.", ""]
    lines += ["| " + " | ".join(report.headers) + " |", "|" + "---|" * len(report.headers)]
    lines += ["| " + " | ".join(row) + " |" for row in report.cells]
    lines += [line for note in report.notes for line in ("", note)]
    return "\n".join(lines) + "\n"


def machine() -> dict[str, str]:
    """Return what the figures depend on besides the code; a load far above the threads that ran spoils them."""
    found = {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "load": f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores{_pinned()}",
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def _pinned() -> str:
    """Where a benchmark is bound to some cores, others' load on the rest of them says little about it."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return "" if bound == os.cpu_count() else f", this on {bound} of its own"


def flags(values: Mapping[str, object]) -> str:
    """Return settings as command-line options, those that are not set left out."""
    return " ".join(part for name, value in values.items() if (part := _flag(name.replace("_", "-"), value)))


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else ""
    if isinstance(value, tuple):
        return f"--{name} {' '.join(map(str, value))}" if value else ""
    return "" if value is None else f"--{name} {value}"


def _is_word(cell: str) -> bool:
    return not cell.replace("–", "").replace("×", "").strip() or not cell[0].isdigit()
