"""From runs to sections: the tables and figures of the dashboard and the terminal, from the same functions."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from otb_analysis.answers import RunAnswers, designs
from otb_analysis.answers.holders import Attributed
from otb_analysis.answers.measured import FORMULAS, forest_words
from otb_analysis.answers.pairs import left_out_note
from otb_analysis.answers.proxy import gain_lost_words
from otb_analysis.answers.triage import alarms_line
from otb_analysis.diagnostics import changes, detectors
from otb_analysis.errors import InputError
from otb_analysis.figures.alarms import alarms_table
from otb_analysis.figures.attribution import attribution_info, plot_attribution
from otb_analysis.figures.comparison import display_table, plot_comparison
from otb_analysis.figures.curves import QUANTITIES, curves_info, degenerate_table, derived, learning_info, plot_learning
from otb_analysis.figures.fidelity import (
    fidelity_columns,
    fidelity_info,
    fidelity_table,
    plot_fidelity,
)
from otb_analysis.figures.runs import config_differences
from otb_analysis.figures.styles import run_styles
from otb_analysis.figures.timeline import plot_timeline, timeline_info
from otb_analysis.report.audit import planner_parts
from otb_analysis.report.compare import learning_grid
from otb_analysis.report.diagnosis import holder_grids
from otb_analysis.report.document import Formulas, Grid, Part, Picture, Section
from otb_analysis.store.measured import CHOSEN, exact_groups

Runs = Mapping[str, RunAnswers]

WINDOW = 10
"""Steps of the running means."""

DEGENERATE = "Degenerate input over all steps: allowed, but nothing can be learned from it."

TOP = 12
"""Holders listed per level."""


def _from(bounds: tuple[float, float]) -> str:
    return f"≥ {bounds[0]:.3g}" + (f", {bounds[1]:.3g}" if np.isfinite(bounds[1]) else "")


ALARM_FORMULAS = (
    ("reward_fall", f"(highest median₅ of the reward − median₃ − 3·spread) as a share of it {_from(changes.LOST)}"),
    ("vanished_gradient", f"share of the last 5 steps with ‖ḡ‖ = 0 {_from(changes.GONE)}"),
    ("not_finite", "number of an update's scalars that are NaN or infinite ≥ 1"),
    ("gradient_surge", f"exp(median₅ log‖ḡ‖ − median of the 20 to 100 steps before − 2·spread) {_from(changes.SURGE)}"),
    ("entropy_collapse", f"exp(highest running median − median₁₀ − 1.5·spread) of log entropy {_from(changes.FALL)}"),
    ("entropy_rise", f"exp(median₁₀ − lowest running median − 1.5·spread) of log entropy {_from(changes.RISE)}"),
    ("length_drift", f"exp(|median₁₀ − median of the first 20| − 1.5·spread) of log length {_from(changes.DRIFT)}"),
    ("zero_variance_groups", f"lower 99.9 % bound of their share over 20 steps {_from(detectors.NO_SIGNAL)}"),
    ("ratio_tails", f"median₅ of max |log π/μ| {_from(detectors.RATIO)}; "
     f"mean₁₀ clipped {_from(detectors.RATIO_CLIPPED)}"),
    ("tail_index", f"lower 99.9 % bound of the mean Pareto-k of exact norms over 10 records {_from(detectors.HEAVY)}"),
    ("clip_fraction", f"rise of the share of 20 steps clipped over all steps before {_from(detectors.RISE)}"),
    ("sampling_certificate", "a mixture martingale E of Σz with P(ever E ≥ 1/α) ≤ α = "
     f"{detectors.RISK[0]:g}, {detectors.RISK[1]:g}"),
)  # fmt: skip
"""Score of each detector, and from which on it is a watch, and an alarm."""


FIDELITY_FORMULAS = (
    ("proxy w_t", "‖e_y − π‖² = (1 − π_y)² + Σ_{v≠y} π_v², π the distribution that y_t was drawn from: the squared "
     "gradient of log π_y in the logits, free in the forward pass"),
    ("exact w_t", "‖s_t‖², s_t = ∇ log π(y_t) over the measured parameters; no 1/N, no advantage factor"),
    ("Pearson, pooled", "corr(x, y) over all tokens, x the proxy and y the exact energy"),
    ("Pearson, within", "corr(x − x̄_c, y − ȳ_c), x̄_c and ȳ_c the means of the token's cell c = (step, prompt, t), "
     "in cells of two or more tokens"),
    ("log-Pearson", "the same of log x and log y: a factor per cell on the proxy changes nothing within"),
    ("Spearman", "the same of the ranks, within: of the ranks inside the cell, of values rounded to 0.1 %"),
    ("gain lost", "(e_exact − e_proxy)/(e_exact − e_rloo), e the efficiency of otb with these energies over all "
     "measured steps. 0: the proxy costs nothing. 1: the gain over rloo is gone"),
)  # fmt: skip
"""What the table of proxy and exact energies holds."""

ATTRIBUTION_FORMULAS = (
    ("share", "c·s·ḡ of a token, ḡ = Σ c·s, c its coefficient in the update, s = ∇log π; their sum is ‖ḡ‖²"),
    ("signal, noise", "c·s·(ḡ − ḡ_p) and c·s·ḡ_p, ḡ_p the part of the token's own prompt"),
)


def verdicts(runs: Runs) -> Section:
    """Return the answer first: of each run its state and its first sentence on baselines; of runs pooled, all."""
    parts: list[Part] = [f"{name}: {run.triage.sentence}. {run.lines[0]}" for name, run in runs.items()]
    alike = Counter(run.design for run in runs.values() if run.grams)
    pooled = {name: of.lines for name, of in designs(runs).items() if alike[name] > 1}
    parts += ["\n".join([f"{alike[name]} runs pooled ({name}):", *lines]) for name, lines in pooled.items()]
    return Section("Verdict", tuple(parts))


def overview(runs: Runs) -> Section:
    """Return what the runs are and whether they learn."""
    styles = run_styles(runs, {name: run.estimator for name, run in runs.items()})
    info = learning_info({name: run.steps for name, run in runs.items()}, styles, WINDOW)
    differences = config_differences({name: run.config for name, run in runs.items()})
    parts: list[Part] = [
        learning_grid(runs),
        Picture("learning", f"Running means over {WINDOW} steps.", plot_learning(info), info),
    ]
    if len(runs) > 1:
        same = f"The runs have the same configuration. {left_out_note(differences)}".rstrip()
        caption = f"Where the configurations differ. {left_out_note(differences)}".rstrip()
        parts.append(same if differences.table.empty else Grid(caption, differences.table))
    return Section("Runs", tuple(parts))


def collapse(runs: Runs) -> Section:
    """Return alarms, health over steps and change points."""
    findings = {name: run.findings for name, run in runs.items()}
    fired = "An alarm uses only steps up to its own; change points and outliers are dated in hindsight."
    pictures = [
        Picture(
            f"health-{name}", f"{name} over its steps, with the events that were seen.",
            plot_timeline(timeline_info(run.steps, run.findings, run.changes, more=True, outliers=run.outliers)),
            curves_info({name: derived(run.steps)}, QUANTITIES, {}, WINDOW),
        )
        for name, run in runs.items()
    ]  # fmt: skip
    alarms = Grid(f"{alarms_line(findings)} {fired}", alarms_table(findings))
    changes_seen = (f"{run}. {of.change_line} {of.outlier_line}".rstrip() for run, of in runs.items())
    degenerate = Grid(DEGENERATE, degenerate_table({name: run.steps for name, run in runs.items()}))
    parts = (alarms, *changes_seen, *pictures, degenerate, Formulas(ALARM_FORMULAS))
    return Section("Alarms and health over steps", parts)


def estimators(run: RunAnswers) -> Section:
    """Return what to train with, every estimator on the run's own rollouts, and group sizes."""
    title, measured = f"Estimators on the rollouts of {run.name}", run.measured
    if measured is None or measured.over_rloo.cause == "no reference":
        return Section(title, run.lines)
    info = measured.comparison()
    picture = Picture(f"estimators-{run.name}", forest_words(info), plot_comparison(info))
    formulas = Formulas(FORMULAS)
    table = Grid("Each ratio with its 95 % intervals, then each estimator's own values.", display_table(info))
    planner = planner_parts(run.planner)
    noise = filter(None, [measured.noise_scale_line])
    return Section(title, (*run.lines, picture, table, *noise, *planner, formulas))


def fidelity(run: RunAnswers) -> Section:
    """Return how well the proxy follows exact norms."""
    title = f"Proxy against exact norms in {run.name}"
    try:
        info = fidelity_info(exact_groups(run.store, fidelity_columns())[0])
    except InputError as error:
        return Section(title, (str(error),))
    lost = None if run.proxy is None else run.proxy.gain_lost
    share, rests_on = gain_lost_words(lost)
    line = f"Gain lost by the proxy: {share} of otb's gain over rloo ({rests_on})."
    picture = Picture(f"fidelity-{run.name}", f"{info.n_tokens:,} tokens with both energies.", plot_fidelity(info))
    caption = f"Within: among rollouts of one prompt at one position, the only comparison OTB makes. {CHOSEN}"
    table = Grid(caption, fidelity_table(info))
    return Section(title, (*filter(None, [run.proxy_line]), picture, line, table, Formulas(FIDELITY_FORMULAS)))


def attribution_section(run: RunAnswers) -> Section:
    """Return who holds the gradient of the step to look at first, else which of its tokens are large."""
    found, parts = run.attribution(run.look), list[Part]()
    shown = found if isinstance(found, Attributed) else run.sizes(run.look)
    if not isinstance(found, Attributed):
        parts = ["No step was attributed; --measure.attribution.every 1 of otb train, or of otb score, does."]
    if shown is None:
        return Section(f"Who holds the gradient of {run.name}", tuple(parts))
    figure = plot_attribution(attribution_info(shown.shares, shown.whole))
    parts = [Picture(f"attribution-{run.name}", shown.says, figure), *holder_grids(shown, TOP), *parts]
    formulas = [Formulas(ATTRIBUTION_FORMULAS)] if shown is found else []
    return Section(f"{shown.heading} step {run.look} of {run.name}", (*parts, *formulas))
