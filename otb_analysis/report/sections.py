"""From runs to sections: the tables and figures of the dashboard and the terminal, from the same functions."""

from collections import Counter
from collections.abc import Mapping

import pandas as pd

from otb_analysis.answers import RunAnswers, designs
from otb_analysis.answers.formulas import ALARM_FORMULAS, ATTRIBUTION_FORMULAS, FIDELITY_FORMULAS
from otb_analysis.answers.holders import Attributed
from otb_analysis.answers.learning import provenance_table
from otb_analysis.answers.proxy import MEASURED_GROUPS
from otb_analysis.errors import InputError
from otb_analysis.figures.alarms import alarms_line, alarms_table
from otb_analysis.figures.attribution import attribution_info, plot_attribution
from otb_analysis.figures.collapse import QUANTITIES, degenerate_table, derived
from otb_analysis.figures.comparison import display_table, plot_comparison
from otb_analysis.figures.curves import curves_info
from otb_analysis.figures.fidelity import (
    fidelity_columns,
    fidelity_info,
    fidelity_table,
    gain_lost_words,
    plot_fidelity,
)
from otb_analysis.figures.gradient_table import MEASURES, NOISE_SCALE
from otb_analysis.figures.learning import learning_info, plot_learning
from otb_analysis.figures.runs import config_differences
from otb_analysis.figures.timeline import plot_timeline, timeline_info
from otb_analysis.report.audit import planner_parts
from otb_analysis.report.compare import learning_grid
from otb_analysis.report.diagnosis import holder_grids
from otb_analysis.report.document import Formulas, Grid, Part, Picture, Section
from otb_analysis.store import attributed_steps, largest_attributed_step

Runs = Mapping[str, RunAnswers]

WINDOW = 10
"""Steps of the running means."""

DEGENERATE = "Degenerate input over all steps: allowed, but nothing can be learned from it."

TOP = 12
"""Holders listed per level."""


def overview(runs: Runs) -> Section:
    """Return what the runs are and whether they learn."""
    info = learning_info(_steps(runs), _estimators(runs), WINDOW)
    differences = config_differences({name: run.config for name, run in runs.items()})
    parts: list[Part] = [
        *(f"{name}: {run.alarm}" for name, run in runs.items() if run.alarm),
        learning_grid(runs),
        Picture("learning", f"Running means over {WINDOW} steps.", plot_learning(info), info),
    ]
    alike = Counter(run.design for run in runs.values() if run.grams)
    pooled = {name: of.lines for name, of in designs(runs).items() if alike[name] > 1}
    parts += ["\n".join([f"{alike[name]} runs pooled ({name}):", *lines]) for name, lines in pooled.items()]
    if len(runs) > 1:
        same = f"The runs have the same configuration. {differences.note}".rstrip()
        caption = f"Where the configurations differ. {differences.note}".rstrip()
        parts.append(same if differences.table.empty else Grid(caption, differences.table))
    return Section("Runs", tuple(parts))


def collapse(runs: Runs) -> Section:
    """Return alarms, health over steps and change points."""
    findings = {name: run.findings for name, run in runs.items()}
    fired = "An alarm uses only steps up to its own; change points are dated in hindsight."
    pictures = [
        Picture(
            f"health-{name}", f"{name} over its steps, with the events that were seen.",
            plot_timeline(timeline_info(run.steps, run.findings, run.changes, more=True)),
            curves_info({name: derived(run.steps)}, QUANTITIES, {name: run.estimator}, WINDOW),
        )
        for name, run in runs.items()
    ]  # fmt: skip
    return Section(
        "Alarms and health over steps",
        (
            Grid(f"{alarms_line(findings)} {fired}", alarms_table(findings)),
            *(f"{run}. {of.change_line}" for run, of in runs.items()),
            *pictures,
            Grid(DEGENERATE, degenerate_table(_steps(runs))),
            Formulas(ALARM_FORMULAS),
        ),
    )


def estimators(run: RunAnswers) -> Section:
    """Return what to train with, every estimator on the run's own rollouts, and group sizes."""
    title, measured = f"Estimators on the rollouts of {run.name}", run.measured
    if measured is None or measured.over_rloo.cause == "no reference":
        return Section(title, run.lines)
    info = measured.comparison()
    picture = Picture(f"estimators-{run.name}", info.words, plot_comparison(info))
    formulas = Formulas((*((measure.title, measure.formula) for measure in MEASURES), NOISE_SCALE))
    table = Grid("Each ratio with its 95 % intervals, then each estimator's own values.", display_table(info))
    planner = planner_parts(run.planner)
    noise = filter(None, [measured.noise_scale_line])
    return Section(title, (*run.lines, picture, table, *noise, *planner, formulas))


def fidelity(run: RunAnswers) -> Section:
    """Return how well the proxy follows exact norms."""
    title = f"Proxy against exact norms in {run.name}"
    try:
        info = fidelity_info(run.store.tokens_df(columns=fidelity_columns(), where=MEASURED_GROUPS))
    except InputError as error:
        return Section(title, (str(error),))
    lost = None if run.proxy is None else run.proxy.gain_lost
    share, rests_on = gain_lost_words(lost)
    line = f"Gain lost by the proxy: {share} of otb's gain over rloo ({rests_on})."
    picture = Picture(f"fidelity-{run.name}", f"{info.n_tokens:,} tokens with both energies.", plot_fidelity(info))
    caption = "Within: among rollouts of one prompt at one position, the only comparison OTB makes."
    table = Grid(caption, fidelity_table(info))
    return Section(title, (*filter(None, [run.proxy_line]), picture, line, table, Formulas(FIDELITY_FORMULAS)))


def attribution_section(run: RunAnswers) -> Section:
    """Return who holds the gradient at the attributed step where it was largest."""
    title = f"Who holds the gradient of {run.name}"
    found = run.attribution(largest_attributed_step(run.store)) if attributed_steps(run.store) else None
    if not isinstance(found, Attributed):
        without = "No step was attributed; --measure.attribution.every 1 of otb train, or of otb score, does."
        return Section(title, (without,))
    picture = Picture(f"attribution-{run.name}", found.says, plot_attribution(attribution_info(found.shares)))
    return Section(title, (picture, *holder_grids(found, TOP), Formulas(ATTRIBUTION_FORMULAS)))


def provenance(runs: Runs) -> Section:
    """Return what each run was made with."""
    return Section("How the runs were made", (Grid("From each run's run.json.", provenance_table(runs)),))


def _steps(runs: Runs) -> dict[str, pd.DataFrame]:
    return {name: run.steps for name, run in runs.items()}


def _estimators(runs: Runs) -> dict[str, str]:
    return {name: run.estimator for name, run in runs.items()}
