"""What benchmarks share: how one is run, its command line, its table in the terminal, as Markdown and as JSON."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import torch
from jinja2 import StrictUndefined, Template
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.config import BENCHMARKS, BenchConfig, ModelBenchConfig, check_positive
from otb_analysis.devices import device_of, use, words_of
from otb_analysis.errors import StoreError
from otb_analysis.phases import note

Row = Mapping[str, Any]
Column = str | Callable[[Row], str | None]
"""How a cell is made of its row: a format string with the row's keys, or a function. None is printed as a dash."""
NO_GPU = "Not measured on a GPU."
ON_GPU = "On {}: seconds are by the clock until its queue was empty, memory is PyTorch's allocations there."
NOTES = Path(__file__).with_name("notes")


@dataclass(frozen=True)
class Report:
    """One benchmark, measured."""

    name: str  # Of its files
    command: str
    settings: Mapping[str, object]
    title: str
    columns: Mapping[str, Column]  # By header, how the cells are made
    rows: Sequence[Row]  # Facts in JSON's types; JSON holds all of them, the table what the columns show
    notes: Sequence[str] = (NO_GPU,)  # Sentences on how to read the table

    @property
    def cells(self) -> list[list[str]]:
        """The rows as they are printed."""
        return [[cell(column, row) for column in self.columns.values()] for row in self.rows]


def run_bench(config: BenchConfig) -> Report:
    """Run the benchmark that a configuration belongs to.

    Raises:
        InputError: A setting does not fit.
    """
    check_positive(config)
    if (name := getattr(config, "device", None)) is not None:
        device = use(name)
        note(f"Device: {words_of(device)}.")
        config = replace(config, **{"device": str(device)})
    return import_module(f"benchmarks.{_name(config)}").run(config)


def notes_of(config: BenchConfig, **facts: Any) -> list[str]:
    """Return the sentences on how to read a benchmark's table: one for each paragraph of `notes/NAME.md.j2`."""
    template = Template((NOTES / f"{_name(config)}.md.j2").read_text(encoding="utf-8"), undefined=StrictUndefined)
    paragraphs = template.render(config=config, gpu=_gpu(config), **facts).split("\n\n")
    return [" ".join(words) for paragraph in paragraphs if (words := paragraph.split())]


def report_of(
    config: BenchConfig, title: str, columns: Mapping[str, Column], rows: Sequence[Row], **more: Any
) -> Report:
    """Return the report of a benchmark; its name, settings and command line follow from its configuration.

    `more` holds other fields of the report. JSON names every key in every row.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    full = [{key: row.get(key) for key in keys} for row in rows]
    names = {"name": _name(config), "command": command_line(config), "settings": settings_of(config)} | more
    if card := _gpu(config):
        names |= {"name": f"{names['name']}_cuda", "notes": [ON_GPU.format(card), *names.get("notes", ())]}
    return Report(**{"title": title, "columns": columns, "rows": full} | names)


def _gpu(config: BenchConfig) -> str:
    """The card that a benchmark of models ran on, or nothing."""
    device = device_of() if hasattr(config, "device") else torch.device("cpu")
    return "" if device.type == "cpu" else words_of(device)


def command_line(config: BenchConfig) -> str:
    """Return the command that repeats a benchmark, with the names of interpreters in place of their paths."""
    words = [f"otb bench {_name(config).replace('_', '-')}"]
    for field in fields(config):
        value, option = getattr(config, field.name), field.name.replace("_", "-")
        if field.name.endswith("_python"):
            words += [f"--{option} {field.name.upper()}"] if value is not None else []
        elif isinstance(value, bool):  # a switch is named where it is not at its default
            words += [] if value == field.default else [f"--{option}" if value else f"--no-{option}"]
        elif isinstance(value, tuple):
            words += [f"--{option} {' '.join(map(str, value))}"] if value else []
        elif field.name == "device" and isinstance(config, ModelBenchConfig) and value in ("auto", "cpu"):
            pass  # what most benchmarks were measured on
        elif field.name in settings_of(config):
            words.append(f"--{option} {value}")
    return " ".join(words)


def settings_of(config: BenchConfig) -> dict[str, Any]:
    """Return what a benchmark was told, without paths, which belong to a machine."""
    return {field.name: getattr(config, field.name) for field in fields(config) if "Path" not in str(field.type)}


def cell(column: Column, row: Row) -> str:
    """Return one cell; a fact that is missing or None is a dash."""
    if callable(column):
        return column(row) or "–"
    needed = [name for _, name, _, _ in Formatter().parse(column) if name]
    return "–" if any(row.get(name) is None for name in needed) else column.format_map(row)


def seconds_cell(row: Row) -> str:
    """The seconds of a row that may not have been measured."""
    return "not measured" if row["seconds"] is None else f"{row['seconds']:.3f}"


def mebibytes_cell(row: Row) -> str | None:
    """The memory of a row."""
    return None if row["memory"] is None else f"{row['memory'] / 2**20:.0f}"


def bench_table(report: Report) -> Table:
    """Return the rows as a terminal table, its notes below."""
    caption = "\n".join(report.notes) or None
    table = Table(box=SIMPLE_HEAD, title=report.title, title_justify="left", caption=caption, caption_justify="left")
    for i, name in enumerate(report.columns):
        marks = [row[i].replace("–", "").replace("×", "").strip() for row in report.cells]
        words = all(not mark or not row[i][0].isdigit() for mark, row in zip(marks, report.cells, strict=True))
        table.add_column(name, justify="left" if words else "right")
    for row in report.cells:
        table.add_row(*row)
    return table


def publish(folder: Path, report: Report) -> None:
    """Write NAME.md and NAME.json: the numbers, the command that made them, and the machine.

    Raises:
        StoreError: The folder cannot be written.
    """
    facts = {"command": report.command, "settings": report.settings, "machine": machine(), "rows": report.rows}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{report.name}.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
        (folder / f"{report.name}.md").write_text(markdown(report))
    except OSError as error:
        raise StoreError(f"cannot write the benchmark to {folder} ({error.strerror}); pass another --out.") from error


def markdown(report: Report) -> str:
    """Return the report as a Markdown page."""
    header, *body = (f"| {' | '.join(row)} |" for row in [report.columns, *report.cells])
    table = "\n".join([header, "|" + "---|" * len(report.columns), *body])
    measured_on = ", ".join(f"{name} {value}" for name, value in machine().items())
    return "\n\n".join([f"# `{report.command}`", measured_on, f"{report.title}.", table, *report.notes]) + "\n"


def machine() -> dict[str, str]:
    """Return what the figures depend on besides the code; a load far above the threads that ran spoils them."""
    cores = os.cpu_count()
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    # The load of cores that this process may not use says little about its figures.
    pinned = "" if bound == cores else f", this on {bound} of its own"
    facts = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    facts |= {"numpy": np.__version__, "torch": torch.__version__}
    facts |= {"load": f"{os.getloadavg()[1]:.1f} on {cores} cores{pinned}"}
    return facts | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def _name(config: BenchConfig) -> str:
    return next(name for name, kind in BENCHMARKS.items() if isinstance(config, kind)).replace("-", "_")
