"""An audit as sections: for the terminal, for HTML, and as files in its run's directory."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pandas as pd

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.audit import AuditReport
from otb_analysis.answers.measured import planner_words
from otb_analysis.answers.telling import telling_rollouts
from otb_analysis.atomic import atomic_file
from otb_analysis.checks.bookkeeping import bookkeeping_lines
from otb_analysis.checks.sampling_report import sampling_lines
from otb_analysis.config import section
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.errors import StoreError
from otb_analysis.figures.comparison import comparison_table, planner_display, plot_planner
from otb_analysis.figures.styles import MISSING, interval_cell, number
from otb_analysis.phases import plural
from otb_analysis.report.compare import estimator_parts
from otb_analysis.report.document import Document, Formulas, Grid, Part, Picture, Section, to_html
from otb_analysis.report.records import following, jsonable
from otb_analysis.store.measured import CHOSEN
from otb_analysis.trackers import Trackers

BEST = "* best of its curve: intervals show that its neighbours are worse."
COST = (
    "What an update of the same rollouts costs, against the recorded size; below 1 is better. Proved step lengths: "
    "variance. Others: efficiency here over efficiency there. Intervals hold together with 95 %."
)
DEAD = (
    "dead: groups whose rewards are all equal; they teach nothing. From subsets of the recorded groups, intervals over "
    "prompts. informative: the other groups, per 100 rollouts; most in small groups, where each is noisier."
)
AUDIT_FORMULAS = (
    ("efficiency", "⟨m,∇J⟩²/(‖∇J‖²·(‖m‖² + V/P)), m = E ĝ, V the variance of one prompt's group gradient, P prompts"),
    ("c", "⟨m,∇J⟩/‖∇J‖²"),
    ("bias", "‖m − ∇J‖/‖∇J‖"),
    ("SF", "variance/c²; of proved step lengths E‖g‖²/c² − ‖∇J‖²"),
    ("between", "2·V(N) − V(N/2) of no baseline; within = V − between"),
    ("dead groups", "mean over prompts of Σ_v C(k_v, n)/C(G, n), k_v of G rewards equal v; estimates pⁿ + (1−p)ⁿ"),
    ("share", "c·s·ḡ of a token, s = ∇log π, c its coefficient in the update ḡ = Σ c·s; divided by Σ‖ḡ‖² over steps"),
    ("signal, noise", "c·s·(ḡ − ḡ_p) and c·s·ḡ_p, ḡ_p the part of the token's own prompt"),
    ("gain lost", "(e_exact − e_proxy)/(e_exact − e_rloo), e the efficiency"),
)  # fmt: skip
NO_GRADIENT = "The gradient was exactly 0 at all of {}, since all rewards of each group were equal: no token holds any."
Z_SCORES = "Standard normal if the model drew the tokens: of Σ(log π_y + H), and of Σ(π_y − Σπ²)."


def free_sections(report: AuditReport) -> list[Section]:
    """Return what needs no model, in order."""
    lines = (*report.traits.lines, *bookkeeping_lines(report.bookkeeping))
    planner = (*dead_parts(report.planner), *filter(None, [report.planner.note]))
    rollouts = Section("Rollouts", (report.headline, *(f"• {sentence}" for sentence in lines)))
    return [rollouts, Section("Budget planner", planner)]


def audit_sections(run: RunAnswers, report: AuditReport, top: int | None = None) -> list[Section]:
    """Return what an audit says, in order; for the terminal the rows that matter, with `top` 0 all of them."""
    verdict = [sentence for sentence in report.verdict if sentence not in report.alarms]
    verdict = verdict or ["Nothing can be said yet; see below what is missing."]
    sections = [Section("Alarms", tuple(f"Alarm: {sentence}" for sentence in report.alarms))] if report.alarms else []
    sections.append(Section("Verdict", (report.headline, *(f"• {sentence}" for sentence in verdict))))
    sections.append(Section("Rollouts", tuple(f"• {sentence}" for sentence in report.traits.lines)))
    if report.estimators is not None and run.measured is not None:
        between = () if report.between is None else (f"Variance between prompts, times prompts: {report.between:.3g}.",)
        sketched = () if report.sketches is None else (report.sketches.sentence,)
        sections.append(Section("Estimators", (*estimator_parts(run.measured, top), *between, *sketched)))
    sections.append(Section("Budget planner", tuple(planner_parts(report.planner))))
    if (tokens := report.tokens) is not None and not tokens.half:
        sections.append(Section("Tokens", (NO_GRADIENT.format(plural(tokens.steps, "attributed step")),)))
    elif tokens is not None:
        caption = (
            f"Shares of Σ‖ḡ‖² over {plural(tokens.steps, 'step')}, {plural(tokens.n_tokens, 'token')}; "
            f"{tokens.half:,} hold half of Σ|share|."
        )
        kinds = {"kind": tokens.by_class, "position": tokens.by_position, "prompt": tokens.by_prompt}
        title = "Tokens: who holds the gradient, by"
        grids = list[Grid]()
        for kind, of in kinds.items():
            rows = pd.DataFrame(
                {
                    kind: " ".join(row.name.split())[-32:] or MISSING, "tokens": f"{row.n_tokens:,}",
                    "share": f"{row.share:.1%}", "of Σ|share|": f"{row.size:.1%}",
                    "signal": number(row.signal, ".1%"), "noise": number(row.noise, ".1%"),
                }
                for row in of
            )  # fmt: skip
            grids.append(Grid(caption, rows, f"{title} {kind}"))
        sections.append(Section("Tokens", tuple(grids)))
    if (proxy := report.proxy) is not None:
        values = {
            "log correlation, all tokens": proxy.pooled, "log correlation, within": proxy.within,
            "efficiency kept": proxy.kept, "share of otb's gain over rloo lost": proxy.gain_lost,
        }  # fmt: skip
        caption = (
            f"{proxy.n_tokens:,} tokens with both. within: among rollouts of one prompt at one position, where "
            f"baselines compare. efficiency kept: of otb, the proxy over exact norms. {CHOSEN}"
        )
        rows = pd.DataFrame({"measure": name, "value": interval_cell(one, ".2f")} for name, one in values.items())
        sections.append(Section("Proxy", (Grid(caption, rows, "Proxy: can it stand for exact norms?"),)))
    if (sampling := report.sampling) is not None:
        grids = list[Grid]()
        for name, of in (("step", sampling.by_step), ("position", sampling.by_position)):
            rows = pd.DataFrame(
                {
                    name: str(row.at), "tokens": f"{row.n_tokens:,}", "temperature": number(row.temperature, "+.1f"),
                    "probability": number(row.probability, "+.1f"),
                }
                for row in of
            )  # fmt: skip
            grids.append(Grid(Z_SCORES, rows, f"Sampling check: both z-scores by {name}"))
        stated = section(run.config, "sample").get("temperature")
        sections.append(Section("Sampling check", (*sampling_lines(sampling, stated), *grids)))
    sections.append(Section("Bookkeeping", tuple(bookkeeping_lines(report.bookkeeping))))
    return [*sections, Section("What is missing", report.missing)] if report.missing else sections


def write_audit(run: RunAnswers, report: AuditReport, folder: Path, command: str) -> list[Path]:
    """Write `audit.json` and `audit.html` into a run's directory and return them.

    Raises:
        StoreError: They cannot be written.
    """
    sections = (*audit_sections(run, report, 0), Section("Formulas", (Formulas(AUDIT_FORMULAS),)))
    texts = {
        "audit.json": json.dumps(jsonable(audit_record(report)), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "audit.html": to_html(Document(f"Audit of {report.run}", command, report.headline, sections)),
    }
    for name, text in texts.items():
        try:
            with atomic_file(folder / name) as file:
                file.write(text.encode())
        except OSError as error:
            raise StoreError(f"cannot write {folder / name} ({error.strerror}); make the run writable.") from error
    return [folder / name for name in texts]


def audit_record(report: AuditReport) -> dict[str, object]:
    """Return an audit for JSON, with the table of its estimators."""
    rows = None if report.estimators is None else comparison_table(report.estimators)
    return following("audit", vars(report) | {"estimators": rows})


def send_audit(run: RunAnswers, report: AuditReport, names: Sequence[str]) -> None:
    """Send to trackers the scalars of a run's steps and, at its last step, what `audit.html` says and what to read.

    Where a tracker fails, that is one warning.
    """
    tables = dict[str, pd.DataFrame | dict[str, list[str]]]()
    for part_of in audit_sections(run, report, 0):
        # Titles of grids hold counts; a name that every audit has can be compared in a tracker.
        name = f"audit/{part_of.title.lower().replace(' ', '_')}"
        tables[name] = {"sentence": [part for part in part_of.parts if isinstance(part, str)]}
        grids = [part.frame for part in part_of.parts if isinstance(part, Grid)]
        tables |= {f"{name}_{k + 1}": frame for k, frame in enumerate(grids)}
    rows = run.store.steps_df().to_dict("records")
    last = int(rows[-1]["step"])
    tables["audit/worth_reading"] = pd.DataFrame(telling_rollouts(run.store, last, last))
    shutil.rmtree(run.store.path / "tensorboard-audit", ignore_errors=True)  # it would hold every point twice
    with closing(Trackers(names, run.store.path, kind="-audit")) as trackers:
        for row in rows:
            scalars = {name: value for name, value in row.items() if name != "step"}
            trackers.log(int(row["step"]), scalars, tables if row is rows[-1] else {})


def planner_parts(planner: Planner) -> list[Part]:
    """Return group sizes at the same rollouts: picture, efficiencies, costs, dead groups and what cannot be known."""
    sizes, parts = planner_display(planner), list[Part]()
    if len(sizes):
        caption = f"{planner.n_rollouts} rollouts in groups of each size. {COST} {BEST}"
        parts.append(Picture("planner", planner_words(planner), plot_planner(planner)))
        parts.append(Grid(caption, sizes, "Budget planner: group sizes at the same rollouts"))
    return [*parts, *dead_parts(planner), *filter(None, [planner.note])]


def dead_parts(planner: Planner) -> list[Part]:
    """Return what success rates alone say about group sizes; empty where there is no group."""
    rows = pd.DataFrame(
        {
            "group size": str(row.size), "dead": interval_cell(row.share, ".1%"),
            "informative": interval_cell(row.informative, ".1f"), "groups": str(row.n_groups),
        }
        for row in planner.dead
    )  # fmt: skip
    return [Grid(DEAD, rows, "Budget planner: dead groups")] if planner.dead else []
