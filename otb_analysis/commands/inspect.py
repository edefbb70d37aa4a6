"""`otb compare` and `otb report`, and what commands share: how they find runs, and how they print."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from otb_analysis.commands.options import parsed
from otb_analysis.commands.screen import print_all, shown
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import phase

Result = TypeVar("Result")


@dataclass(frozen=True)
class RunsConfig:
    """Which runs a command reads."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of runs, or their paths; by default all complete runs of the root."""
    root: Path = Path("runs")
    """Directory that holds the runs."""


@dataclass(frozen=True)
class CompareConfig(RunsConfig):
    """Say which baseline is less noisy, what runs learned and whether the proxy will do; of two runs, B against A."""

    top: int | None = None
    """Rows per table of estimators, best first; 0 shows all, and without a number the eight most useful are shown."""
    format: Literal["text", "json", "csv", "latex", "markdown"] = "text"
    """text for the terminal, json with all numbers, or the table of estimators alone for a paper."""
    json: bool = False
    """The same as --format json."""
    setting: str = ""
    """With --json: group the runs by this setting, and compare B with A seed by seed."""
    a: str = ""
    """With --json: the value of that setting on side A; or, in a single run, estimator A, such as rloo."""
    b: str = ""
    """With --json: the same of B, such as "otb · exact"."""
    curves: bool = False
    """With --json: add the curves of rewards."""
    window: int = 10
    """Steps of the running means of --curves."""
    by: str = ""
    """With --curves: one curve per value of this setting, the mean over its runs."""


@dataclass(frozen=True)
class ReportConfig(RunsConfig):
    """Write what the dashboard and the terminal say about runs into one self-contained HTML file, or into Markdown."""

    out: Path = Path("report.html")
    """File to write; its ending, .html or .md, decides the form."""
    figures: Path | None = None
    """Folder for every figure as PDF and SVG, at the widths of one column and of a page; needs Chrome or Chromium."""


def compare_command(words: Sequence[str]) -> None:
    """Compare finished runs; of those that were not asked for by name, one that cannot be read is left out."""
    config = parsed(CompareConfig, "compare", words, CompareConfig())
    config = replace(config, json=config.json or config.format == "json")
    if config.top is not None and config.top < 0:
        raise InputError(f"--top is {config.top}; pass a number of rows, or 0 for all.")
    if config.window < 1:
        raise InputError(f"--window is {config.window}; pass at least 1 step.")
    if config.by and not config.curves:
        raise InputError("--by groups the curves of --curves; pass that, too.")
    if not config.json and (config.setting or config.a or config.b or config.curves):
        raise InputError("--setting, --a, --b and --curves go with --json; the page Compare shows the same.")
    with shown(), phase("comparing runs"):
        from otb_analysis.answers import designs, opened
        from otb_analysis.answers.pairs import Sides
        from otb_analysis.report.compare import comparison, pair_sections
        from otb_analysis.report.document import printed
        from otb_analysis.report.records import comparison_record, following

        if config.json:
            sides = Sides(config.setting, config.a, config.b)
            if (config.a or config.b) and not config.setting and len(config.runs) != 1:
                raise InputError("--a and --b are estimators of one run, or values of --setting; pass either.")
            curves = (config.curves, config.window, config.by)
            record = _of_readable(config, lambda paths: comparison_record(opened(paths), sides, *curves))
            print_json(following("compare", record))
            return
        if config.format != "text":
            from otb_analysis.report.paper import comparison_text

            def text_of(paths: Sequence[Path]) -> str:
                runs = opened(paths)
                return comparison_text(designs(runs), config.format, pair_sections(runs))

            sys.stdout.write(_of_readable(config, text_of))
            return
        tables = _of_readable(config, lambda paths: printed(comparison(opened(paths), config.top)))
    print_all(tables)


def print_json(record: object) -> None:
    """Print a record for scripts; null for every number that is unknown, NaN or infinite."""
    from otb_analysis.report.records import jsonable

    sys.stdout.write(json.dumps(jsonable(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _of_readable(config: CompareConfig, of: Callable[[Sequence[Path]], Result]) -> Result:
    """Compare the runs that were named, else all complete ones, of which one that cannot be read is left out."""
    if config.runs:
        return of(list(dict.fromkeys(run_path(config.root, name) for name in config.runs)))
    paths = [config.root / name for name in complete_runs(config.root)]
    try:
        return of(paths)
    except StoreError:
        from otb_analysis.answers import opened
        from otb_analysis.report.compare import comparison

        readable = list[Path]()
        for path in paths:
            try:
                comparison(opened([path]))
                readable.append(path)
            except StoreError as error:
                sys.stderr.write(f"otb: {path.name} is left out: {error}\n")
        if not readable:
            raise
        return of(readable)


def report_command(words: Sequence[str]) -> None:
    """Report on runs."""
    config = parsed(ReportConfig, "report", words, ReportConfig())
    with shown(), phase("writing the report"):
        from otb_analysis.report import write_report

        paths = [run_path(config.root, name) for name in config.runs or complete_runs(config.root)]
        files = write_report(paths, config.out, shlex.join(["otb", "report", *words]), config.figures)
    more = f" and {len(files) - 1} pictures" if len(files) > 1 else ""
    sys.stdout.write(f"{files[0]} is written ({files[0].stat().st_size / 1e6:.1f} MB){more}.\n")


def run_path(root: Path, name: str) -> Path:
    """Return a run of the root by its name or, as a shell completes it, by its path."""
    from otb_analysis.store.layout import is_run

    path = Path(name)
    return path if len(path.parts) > 1 and not is_run(root / name) else root / name


def complete_runs(root: Path) -> list[str]:
    """Return the names of the complete runs of a root; say on stderr why one that cannot be read is left out.

    Raises:
        InputError: There are none; the sentence names one that began.
    """
    from otb_analysis.store import runs_df

    table = runs_df(root)
    complete = [str(name) for name in table.loc[table["status"] == "complete", "run"]]
    if complete:
        for name, reason in table.loc[table["status"] == "broken", ["run", "reason"]].to_numpy().tolist():
            sys.stderr.write(f"otb: {name} is left out: {reason}\n")
        return complete
    begun = table.loc[table["n_steps"].fillna(0) > 0, ["run", "status"]].astype(str).to_numpy().tolist()
    if begun:
        name, status = begun[0]
        raise InputError(
            f"{root} holds no complete run, but {name} is {status}; compare it by its name: otb compare "
            f"{name} --root {root}."
        )
    raise InputError(f"{root} holds no complete run; make some with make demo or otb train.")
