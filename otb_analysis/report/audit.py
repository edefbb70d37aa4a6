"""An audit as sections: for the terminal, for HTML, and as files in its run's directory."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.audit import AuditReport
from otb_analysis.answers.formulas import AUDIT_FORMULAS
from otb_analysis.answers.proxy import Proxy
from otb_analysis.answers.shares import Share
from otb_analysis.atomic import atomic_file
from otb_analysis.checks.bookkeeping import bookkeeping_lines
from otb_analysis.checks.sampling_sums import ZScores
from otb_analysis.checks.sampling_text import sampling_lines
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.errors import StoreError
from otb_analysis.figures.comparison import comparison_table
from otb_analysis.figures.numbers import MISSING, formatted, interval_cell
from otb_analysis.figures.planner import dead_display, planner_words, plot_planner, sizes_display
from otb_analysis.report.document import Document, Formulas, Grid, Part, Picture, Section
from otb_analysis.report.estimators import estimator_parts
from otb_analysis.report.html import to_html
from otb_analysis.report.record import written

BEST = "* best of its curve: intervals show that its neighbours are worse. † by formula, not measured."
COST = (
    "What an update of the same rollouts costs, against the recorded size; below 1 is better. Proved step lengths: "
    "variance. Others: efficiency here over efficiency there. Intervals hold together with 95 %."
)
DEAD = (
    "dead: groups whose rewards are all equal; they teach nothing. From subsets of the recorded groups, intervals over "
    "prompts. informative: the other groups, per 100 rollouts; most in small groups, where each is noisier."
)
Z_SCORES = "Standard normal if the model drew the tokens: of Σ(log π_y + H), and of Σ(π_y − Σπ²)."


def audit_sections(run: RunAnswers, report: AuditReport, top: int | None = None) -> list[Section]:
    """Return what an audit says, in order; for the terminal the rows that matter, with `top` 0 all of them."""
    verdict = report.verdict or ("Nothing can be said yet; see below what is missing.",)
    sections = [Section("Verdict", (report.headline, *(f"• {sentence}" for sentence in verdict)))]
    if report.estimators is not None and run.measured is not None:
        between = () if report.between is None else (f"Variance between prompts, times prompts: {report.between:.3g}.",)
        sketched = () if report.sketches is None else (report.sketches.words,)
        sections.append(Section("Estimators", (*estimator_parts(run.measured, top), *between, *sketched)))
    sections.append(Section("Budget planner", tuple(planner_parts(report.planner))))
    if report.tokens:
        caption = (
            f"Shares of Σ‖ḡ‖² over {report.tokens.steps} steps, {report.tokens.n_tokens:,} tokens; "
            f"{report.tokens.half:,} hold half of Σ|share|."
        )
        tokens = report.tokens
        kinds = {"kind": tokens.by_class, "position": tokens.by_position, "prompt": tokens.by_prompt}
        grids = [
            Grid(caption, _shares(kind, of), f"Tokens: who holds the gradient, by {kind}") for kind, of in kinds.items()
        ]
        sections.append(Section("Tokens", tuple(grids)))
    if report.proxy:
        sections.append(Section("Proxy", (_proxy(report.proxy),)))
    if report.sampling:
        by = {"step": report.sampling.by_step, "position": report.sampling.by_position}
        grids = [
            Grid(Z_SCORES, _z_scores(name, rows), f"Sampling check: both z-scores by {name}")
            for name, rows in by.items()
        ]
        sections.append(Section("Sampling check", (*sampling_lines(report.sampling), *grids)))
    sections.append(Section("Bookkeeping", tuple(bookkeeping_lines(report.bookkeeping))))
    return [*sections, Section("What is missing", report.missing)] if report.missing else sections


def audit_document(run: RunAnswers, report: AuditReport, command: str) -> Document:
    """Return the document that `audit.html` is made of."""
    sections = (*audit_sections(run, report, 0), Section("Formulas", (Formulas(AUDIT_FORMULAS),)))
    return Document(f"Audit of {report.run}", command, report.headline, sections)


def write_audit(run: RunAnswers, report: AuditReport, folder: Path, command: str) -> list[Path]:
    """Write `audit.json` and `audit.html` into a run's directory and return them.

    Raises:
        StoreError: They cannot be written.
    """
    fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
    rows = None if report.estimators is None else comparison_table(report.estimators)
    record = written(fields | {"estimators": rows})
    texts = {
        "audit.json": json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "audit.html": to_html(audit_document(run, report, command)),
    }
    for name, text in texts.items():
        try:
            with atomic_file(folder / name) as file:
                file.write(text.encode())
        except OSError as error:
            raise StoreError(f"cannot write {folder / name} ({error.strerror}); make the run writable.") from error
    return [folder / name for name in texts]


def planner_parts(planner: Planner) -> list[Part]:
    """Return group sizes at the same rollouts: picture, efficiencies, costs, dead groups and what cannot be known."""
    sizes, parts = sizes_display(planner), list[Part]()
    if len(sizes):
        caption = f"{planner.n_rollouts} rollouts in groups of each size. {COST} {BEST}"
        parts.append(Picture("planner", planner_words(planner), plot_planner(planner)))
        parts.append(Grid(caption, sizes, "Budget planner: group sizes at the same rollouts"))
    return [*parts, *dead_parts(planner), *filter(None, [planner.note])]


def dead_parts(planner: Planner) -> list[Part]:
    """Return what success rates alone say about group sizes; empty where there is no group."""
    return [Grid(DEAD, dead_display(planner), "Budget planner: dead groups")] if planner.dead else []


def _shares(name: str, rows: tuple[Share, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            name: " ".join(row.name.split())[-32:] or MISSING,
            "tokens": f"{row.n_tokens:,}",
            "share": f"{row.share:.1%}",
            "of Σ|share|": f"{row.size:.1%}",
            "signal": formatted(row.signal, ".1%"),
            "noise": formatted(row.noise, ".1%"),
        }
        for row in rows
    )


def _z_scores(name: str, rows: Sequence[ZScores]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            name: str(row.at),
            "tokens": f"{row.n_tokens:,}",
            "temperature": formatted(row.temperature, "+.1f"),
            "probability": formatted(row.probability, "+.1f"),
        }
        for row in rows
    )


def _proxy(proxy: Proxy) -> Grid:
    values = {
        "log correlation, all tokens": proxy.pooled,
        "log correlation, within": proxy.within,
        "efficiency kept": proxy.kept,
        "share of otb's gain over rloo lost": proxy.gain_lost,
    }
    caption = (
        f"{proxy.n_tokens:,} tokens with both. within: among rollouts of one prompt at one position, where baselines "
        "compare. efficiency kept: of otb, the proxy over exact norms."
    )
    rows = pd.DataFrame({"measure": name, "value": interval_cell(value, ".2f")} for name, value in values.items())
    return Grid(caption, rows, "Proxy: can it stand for exact norms?")
