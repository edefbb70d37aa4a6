"""An audit as terminal text, as a document for HTML, and as files in its run's directory."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.table import Table

from otb_analysis.audit.bookkeeping import bookkeeping_lines
from otb_analysis.audit.results import (
    AuditReport,
    EstimatorRow,
    Proxy,
    Share,
    Sketches,
    Tokens,
    is_told,
)
from otb_analysis.audit.sampling_sums import ZScores
from otb_analysis.audit.sampling_text import sampling_lines
from otb_analysis.diagnostics.planner import Cell, Planner
from otb_analysis.errors import StoreError
from otb_analysis.figures.conclusion import noise_scale_cell
from otb_analysis.figures.numbers import formatted, interval_cell
from otb_analysis.figures.planner import planner_words, plot_planner
from otb_analysis.report.document import Document, Formulas, Grid, Part, Picture, Section
from otb_analysis.report.html import to_html
from otb_analysis.report.terminal import terminal_table
from otb_analysis.statistics import Interval
from otb_analysis.statistics.moments.absolute import NOT_SHOWN
from otb_analysis.store.atomic import atomic_file

MATTER = 8
"""Estimators in the terminal; the files hold all."""
ESTIMATORS = (
    "efficiency: share of an update along the true gradient ∇J · ratio: over the trainer's [together 95 %]"
    " · noise scale: prompts at which noise equals signal"
    "\nequiv.: rollouts rloo needs for the same · c: step length along ∇J · SF: variance at equal progress, variance/c²"
    f"\n{NOT_SHOWN}"
    "\nwithin, between: parts of prompts × variance, from rollouts and from prompts; unbiased estimators only"
)
BEST = "* best of its curve: intervals show that its neighbours are worse. † by formula."
COST = (
    "What an update of the same rollouts costs, against the recorded size; below 1 is better. none, rloo: variance. "
    "Others: efficiency there over efficiency here. Intervals hold together with 95 %."
)
DEAD = (
    "dead: groups whose rewards are all equal; they teach nothing. From subsets of the recorded groups, intervals over "
    "prompts. informative: the other groups, per 100 rollouts; most in small groups, where each is noisier."
)
Z_SCORES = "Standard normal if the model drew the tokens: of Σ(log π_y + H), and of Σ(π_y − Σπ²)."
FORMULAS = (
    ("efficiency", "⟨m,∇J⟩²/(‖∇J‖²·(‖m‖² + V/P)), m = E ĝ, V the variance of one prompt's group gradient, P prompts"),
    ("c", "⟨m,∇J⟩/‖∇J‖²"),
    ("bias", "‖m − ∇J‖/‖∇J‖"),
    ("SF", "variance/c²"),
    ("between", "2·V(N) − V(N/2) of no baseline; within = V − between"),
    ("larger groups", "E‖g_N‖² = q + a/N + b/(N(N−1)), b = 0 for none; variance at the same rollouts: N·V(N)/R"),
    ("best size of rloo", "1 + √(b/(q − ‖m‖²))"),
    ("dead groups", "mean over prompts of Σ_v C(k_v, n)/C(G, n), k_v of G rewards equal v; estimates pⁿ + (1−p)ⁿ"),
    ("share", "c·s·ḡ of a token, s = ∇log π, c its coefficient in the update ḡ = Σ c·s; divided by Σ‖ḡ‖² over steps"),
    ("signal, noise", "c·s·(ḡ − ḡ_p) and c·s·ḡ_p, ḡ_p the part of the token's own prompt"),
    ("gain lost", "(e_exact − e_proxy)/(e_exact − e_rloo), e the efficiency"),
)  # fmt: skip


def audit_text(report: AuditReport) -> list[Table | str]:
    """Return what the terminal shows, in order."""
    parts: list[Table | str] = [_headline(report), *(f"• {sentence}" for sentence in report.verdict)]
    parts += [_table(title, grid) for title, grid in _grids(report, MATTER)]
    return [*parts, report.planner.note, *(line for _, lines in _checks(report) for line in lines), *report.missing]


def rates_text(planner: Planner) -> list[Table | str]:
    """Return what success rates alone say about group sizes, for the terminal."""
    return [_table("Group sizes from success rates", Grid(DEAD, _dead(planner))), planner.note] if planner.dead else []


def _table(title: str, grid: Grid) -> Table:
    table = terminal_table(title, grid.caption, grid.frame.columns[:1].tolist(), grid.frame.columns[1:].tolist())
    for row in grid.frame.astype(str).to_numpy().tolist():
        table.add_row(*row)
    return table


def audit_document(report: AuditReport, command: str) -> Document:
    """Return the document that `audit.html` is made of."""
    sections = [Section("Verdict", report.verdict or ("Nothing can be said yet; see below what is missing.",))]
    picture = (
        Picture("planner", planner_words(report.planner), plot_planner(report.planner))
        if report.planner.cells
        else None
    )
    by_section: dict[str, list[Part]] = {}
    for title, grid in _grids(report, None):
        by_section.setdefault(title.split(":")[0], []).append(grid)
    for title, lines in _checks(report):
        by_section[title] = [*lines, *by_section.get(title, [])]
    for title, grids in by_section.items():
        more: list[Part] = [report.planner.note] if title == "Budget planner" else []
        drawn: list[Part] = [picture] if picture and title == "Budget planner" else []
        sections.append(Section(title, (*drawn, *grids, *more)))
    if report.missing:
        sections.append(Section("What is missing", report.missing))
    sections.append(Section("Formulas", (Formulas(FORMULAS),)))
    return Document(f"Audit of {report.run}", command, _headline(report), tuple(sections))


def write_audit(report: AuditReport, folder: Path, command: str) -> list[Path]:
    """Write `audit.json` and `audit.html` into a run's directory and return them.

    Raises:
        StoreError: They cannot be written.
    """
    texts = {"audit.json": report.as_json() + "\n", "audit.html": to_html(audit_document(report, command))}
    for name, text in texts.items():
        try:
            with atomic_file(folder / name) as file:
                file.write(text.encode())
        except OSError as error:
            raise StoreError(f"cannot write {folder / name} ({error.strerror}); make the run writable.") from error
    return [folder / name for name in texts]


def _checks(report: AuditReport) -> list[tuple[str, tuple[str, ...]]]:
    """Return the sampling check and the bookkeeping in sentences, by title."""
    checks = []
    if report.sampling is not None:
        checks.append(("Sampling check", tuple(sampling_lines(report.sampling))))
    if report.bookkeeping is not None:
        checks.append(("Bookkeeping", tuple(bookkeeping_lines(report.bookkeeping))))
    return checks


def _headline(report: AuditReport) -> str:
    model = f" under {report.model}" if report.model else ""
    trained = f", trained with {report.trained}" if report.trained else ""
    exact = report.bookkeeping.advantages.exact if report.bookkeeping and report.bookkeeping.advantages else ()
    if exact and not any(name.startswith(report.trained) for name in exact):
        trained += f" (--estimator.name), though its advantages are those of {' or '.join(exact)}"
    return (
        f"{report.run}: {report.n_rollouts:,} rollouts of {report.n_prompts:,} prompts in {report.n_steps} "
        f"steps{model}{trained}; from {report.rollouts}"
    )


def _grids(report: AuditReport, top: int | None) -> list[tuple[str, Grid]]:
    """Return every table with its title, in the order of an audit; the part before a colon names its section."""
    grids = []
    if report.estimators:
        caption = ESTIMATORS + (f"\n{_sketched(report.sketches, report.n_steps)}" if report.sketches else "")
        shown = report.estimators[:top]
        some = "" if len(shown) == len(report.estimators) else f", {len(shown)} of {len(report.estimators)}"
        grids.append((f"Estimators: the most efficient first{some}", Grid(caption, _estimators(shown))))
    if any(cell.efficiency is not None or is_told(cell.ratio) for cell in report.planner.cells):
        what = f"Efficiency of {report.planner.n_rollouts} rollouts in groups of each size (ratio to the trainer's)"
        caption = f"{what}. {BEST} A size without † was cut from recorded groups."
        grids.append(("Budget planner: group sizes at the same rollouts", Grid(caption, _sizes(report.planner))))
    if any(is_told(cell.cost) for cell in report.planner.cells):
        grids.append(("Budget planner: cost against the recorded size", Grid(COST, _costs(report.planner))))
    if report.planner.dead:
        grids.append(("Budget planner: dead groups", Grid(DEAD, _dead(report.planner))))
    if report.tokens:
        grids += _tokens(report.tokens, top)
    if report.proxy:
        grids.append(("Proxy: can it stand for exact norms?", Grid(_proxy_caption(report.proxy), _proxy(report.proxy))))
    if report.sampling:
        for name, rows in (("step", report.sampling.by_step), ("position", report.sampling.by_position)):
            grids.append((f"Sampling check: both z-scores by {name}", Grid(Z_SCORES, _z_scores(name, rows))))
    return grids


def _estimators(rows: tuple[EstimatorRow, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "estimator": row.estimator
            + ("" if row.energy_source == "none" else f"/{row.energy_source}")
            + " ~" * row.sketched,
            "efficiency": interval_cell(row.efficiency, ".2f"),
            "ratio": _ratio(row.ratio),
            "noise scale": noise_scale_cell(row.noise_scale, ".0f"),
            "equiv.": interval_cell(row.rollout_equivalents, ".0f"),
            "bias": interval_cell(row.relative_bias, ".2g"),
            "c": formatted(row.projection, ".2f") + (" proved" if row.c_known else ""),
            "SF": formatted(row.sf, ".3g"),
            "variance": formatted(row.variance, ".3g"),
            "within": formatted(row.within, ".3g"),
            "between": formatted(row.between, ".3g"),
        }
        for row in rows
    )


def _sketched(sketches: Sketches, steps: int) -> str:
    error = "" if sketches.error is None else f"; variances over rloo's are off by {sketches.error:.1%} or less (SE)"
    where = f"at {sketches.steps} of {steps} steps"
    return f"~: gradients {where} were estimated from count sketches of {sketches.buckets:,} buckets{error}"


def _ratio(ratio: Interval | None) -> str:
    return interval_cell(ratio if is_told(ratio) else None, ".2f")


def _sizes(planner: Planner) -> pd.DataFrame:
    sizes = sorted({cell.size for cell in planner.cells})
    curves: dict[str, dict[str, str]] = {}
    for cell in planner.cells:
        name = cell.estimator + ("" if cell.energy_source == "none" else f"/{cell.energy_source}")
        curve = curves.setdefault(name, dict.fromkeys((f"N = {size}" for size in sizes), formatted(None)))
        ratio = f" ({_ratio(cell.ratio)}×)" if is_told(cell.ratio) else ""
        curve[f"N = {cell.size}"] = f"{formatted(cell.efficiency, '.2f')}{_marks(cell)}{ratio}"
    return pd.DataFrame({"estimator": name, **curve} for name, curve in curves.items())


def _costs(planner: Planner) -> pd.DataFrame:
    """Return one row per estimator and size: a curve with its intervals is too wide for one row."""
    return pd.DataFrame(
        {
            "estimator": cell.estimator + ("" if cell.energy_source == "none" else f"/{cell.energy_source}"),
            "group size": f"{cell.size}{_marks(cell)}",
            "cost": _ratio(cell.cost),
        }
        for cell in planner.cells
        if cell.size != planner.recorded_size
    )


def _marks(cell: Cell) -> str:
    return ("*" if cell.best else "") + ("" if cell.cut else "†")


def _dead(planner: Planner) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "group size": str(row.size),
            "dead": interval_cell(row.share, ".1%"),
            "informative": interval_cell(row.informative, ".1f"),
            "groups": str(row.n_groups),
        }
        for row in planner.dead
    )


def _tokens(tokens: Tokens, top: int | None) -> list[tuple[str, Grid]]:
    caption = (
        f"Shares of Σ‖ḡ‖² over {tokens.steps} steps, {tokens.n_tokens:,} tokens; {tokens.half:,} hold half of Σ|share|."
    )
    kinds = (("kind", tokens.by_class), ("position", tokens.by_position), ("prompt", tokens.by_prompt[:top]))
    return [(f"Tokens: who holds the gradient, by {name}", Grid(caption, _shares(name, rows))) for name, rows in kinds]


def _shares(name: str, rows: tuple[Share, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            name: " ".join(row.name.split())[-32:] or "–",
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


def _proxy_caption(proxy: Proxy) -> str:
    return (
        f"{proxy.n_tokens:,} tokens with both. within: among rollouts of one prompt at one position, where baselines "
        "compare. efficiency kept: of otb, the proxy over exact norms."
    )


def _proxy(proxy: Proxy) -> pd.DataFrame:
    values = {
        "log correlation, all tokens": proxy.pooled,
        "log correlation, within": proxy.within,
        "efficiency kept": proxy.kept if is_told(proxy.kept) else None,
        "share of otb's gain over rloo lost": proxy.gain_lost,
    }
    return pd.DataFrame({"measure": name, "value": interval_cell(value, ".2f")} for name, value in values.items())
