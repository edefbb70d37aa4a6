"""`otb report`: runs as one self-contained HTML file or as Markdown, with tables, figures, formulas and the command."""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from otb_analysis.answers import reportable
from otb_analysis.answers.pairs import provenance_table
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import counted, plural
from otb_analysis.report.compare import pair_sections
from otb_analysis.report.document import Document, Grid, Section, to_html, to_markdown
from otb_analysis.report.paper import write_figures
from otb_analysis.report.sections import attribution_section, collapse, estimators, fidelity, overview, verdicts

__all__ = ["report", "write_report"]


def report(paths: Sequence[Path], command: str) -> Document:
    """Return what there is to say about some runs.

    Raises:
        InputError: A run does not exist or has no step, or the runs disagree in scope or schema.
        StoreError: A run cannot be read.
    """
    runs = reportable(paths)
    parts = [(make, run) for make in (estimators, fidelity, attribution_section) for run in runs.values()]
    each = [make(run) for make, run in counted(parts, "section")]
    provenance = Section("How the runs were made", (Grid("From each run's run.json.", provenance_table(runs)),))
    made, version = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), metadata.version("otb-analysis")
    note = f"Made {made} by otb-analysis {version} from {plural(len(runs), 'run')}."
    sections = (verdicts(runs), overview(runs), *pair_sections(runs), collapse(runs), *each, provenance)
    return Document(" · ".join(runs), command, note, sections)


def write_report(paths: Sequence[Path], out: Path, command: str, figures: Path | None = None) -> list[Path]:
    """Write a report and return the files it is made of, the page first.

    Args:
        out: A file ending in .html or .md; pictures of the latter lie in a folder beside it.
        figures: Folder for every figure as PDF and SVG at the widths of a paper; None writes none.

    Raises:
        InputError: The ending is another, or as `report`.
        StoreError: A run cannot be read, or the file cannot be written.
    """
    if out.suffix not in (".html", ".md"):
        raise InputError(f"--out is {out}; pass a file that ends in .html or .md.")
    document = report(paths, command)
    folder = out.with_name(f"{out.stem}_files")
    if out.suffix == ".html":
        page, pictures = to_html(document), dict[str, str]()
    else:
        page, pictures = to_markdown(document, folder.name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if pictures:
            folder.mkdir(exist_ok=True)
        for name, text in pictures.items():
            (folder / name).write_text(text, encoding="utf-8")
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the report to {out} ({error.strerror}); pass another --out.") from error
    drawn = [] if figures is None else write_figures(document, figures)
    return [out, *(folder / name for name in pictures), *drawn]
