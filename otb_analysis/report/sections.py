"""From runs to sections: the tables and figures of the dashboard and the terminal, from the same functions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import certificate, change_points, changes, decline, diagnose, shares
from otb_analysis.errors import InputError
from otb_analysis.estimators import proved
from otb_analysis.figures.alarms import alarm_marks, alarms_line, alarms_table
from otb_analysis.figures.attribution import attribution_info, attribution_line, plot_attribution
from otb_analysis.figures.collapse import collapse_info, degenerate_table, plot_collapse
from otb_analysis.figures.comparison import comparison_info, display_table, plot_comparison
from otb_analysis.figures.conclusion import advice_line
from otb_analysis.figures.fidelity import (
    fidelity_columns,
    fidelity_info,
    fidelity_table,
    gain_lost_words,
    plot_fidelity,
)
from otb_analysis.figures.gradient_table import MEASURES, NOISE_SCALE
from otb_analysis.figures.learning import learning_info, plot_learning
from otb_analysis.figures.runs import config_differences, headline_info
from otb_analysis.report.compare import MEASURED_GROUPS
from otb_analysis.report.designs import designs
from otb_analysis.report.document import Formulas, Grid, Part, Picture, Section
from otb_analysis.report.runs import ReportedRun
from otb_analysis.report.verdicts import attributed, change_line
from otb_analysis.statistics import gain_lost
from otb_analysis.store import attributed_steps
from otb_analysis.store.reader import scope_of

WINDOW = 10
"""Steps of the running means."""

TOP = 12
"""Holders listed per level."""


def _from(bounds: tuple[float, float]) -> str:
    return f"≥ {bounds[0]:.3g}" + (f", {bounds[1]:.3g}" if np.isfinite(bounds[1]) else "")


ALARM_FORMULAS = (
    ("reward_fall", f"(highest median₅ of the reward − median₃ − 3·spread) as a share of it {_from(decline.LOST)}"),
    ("vanished_gradient", f"share of the last 5 steps with ‖ḡ‖ = 0 {_from(decline.GONE)}"),
    ("not_finite", "number of an update's scalars that are NaN or infinite ≥ 1"),
    ("gradient_surge", f"exp(median₅ log‖ḡ‖ − median of the 20 to 100 steps before − 2·spread) {_from(changes.SURGE)}"),
    ("entropy_collapse", f"exp(highest running median − median₁₀ − 1.5·spread) of log entropy {_from(changes.FALL)}"),
    ("entropy_rise", f"exp(median₁₀ − lowest running median − 1.5·spread) of log entropy {_from(changes.RISE)}"),
    ("length_drift", f"exp(|median₁₀ − median of the first 20| − 1.5·spread) of log length {_from(changes.DRIFT)}"),
    ("zero_variance_groups", f"lower 99.9 % bound of their share over 20 steps {_from(shares.NO_SIGNAL)}"),
    ("ratio_tails", f"median₅ of max |log π/μ| {_from(shares.RATIO)}; mean₁₀ clipped {_from(shares.RATIO_CLIPPED)}"),
    ("tail_index", f"lower 99.9 % bound of the mean Pareto-k of exact norms over 10 records {_from(shares.HEAVY)}"),
    ("clip_fraction", f"rise of the share of 20 steps clipped over all steps before {_from(shares.RISE)}"),
    ("sampling_certificate", "a mixture martingale E of Σz with P(ever E ≥ 1/α) ≤ α = "
     f"{certificate.RISK[0]:g}, {certificate.RISK[1]:g}"),
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


def overview(runs: Sequence[ReportedRun]) -> Section:
    """Return what the runs are and whether they learn."""
    rows = [headline_info(run.name, run.estimator, run.steps) for run in runs]
    table = pd.DataFrame(
        {
            "run": [row.run for row in rows],
            "estimator": [row.estimator or "–" for row in rows],
            "status": [run.status for run in runs],
            "steps": [row.steps for row in rows],
            "reward": [row.reward for row in rows],
            "change": [row.reward_gain for row in rows],
            "held-out reward": [row.heldout for row in rows],
            "median ‖ḡ‖": [row.grad_norm for row in rows],
            "clipped": [None if row.clipped is None else f"{row.clipped:.0%}" for row in rows],
        }
    )
    info = learning_info({r.name: r.steps for r in runs}, {r.name: r.estimator for r in runs}, WINDOW)
    differences = config_differences({run.name: run.config for run in runs})
    parts: list[Part] = [
        Grid(
            "Reward: mean of the last tenth of the steps; change since the first tenth. ‖ḡ‖, clipped: last 20 steps.",
            table,
        ),
        Picture("learning", f"Running means over {WINDOW} steps.", plot_learning(info), info),
    ]
    if len(runs) > 1:
        same = f"The runs have the same configuration. {differences.note}".rstrip()
        caption = f"Where the configurations differ. {differences.note}".rstrip()
        parts.append(same if differences.table.empty else Grid(caption, differences.table))
    return Section("Runs", tuple(parts))


def collapse(runs: Sequence[ReportedRun]) -> Section:
    """Return alarms, health over steps and change points."""
    findings = {run.name: diagnose(run.series) for run in runs}
    points = {run.name: change_points(run.series) for run in runs}
    steps = {run.name: run.steps for run in runs}
    info = collapse_info(steps, {run.name: run.estimator for run in runs}, WINDOW)
    fired = "An alarm uses only steps up to its own; change points are dated in hindsight."
    return Section(
        "Alarms and health over steps",
        (
            Grid(f"{alarms_line(findings)} {fired}", alarms_table(findings)),
            *(f"{run}. {change_line(changed)}" for run, changed in points.items()),
            Picture(
                "collapse",
                f"Running means over {WINDOW} steps; the interactive form marks first firings and change points.",
                plot_collapse(info, marks=alarm_marks(findings, points)),
                info,
            ),
            Grid(
                "Degenerate input over all steps: allowed, but nothing can be learned from it.", degenerate_table(steps)
            ),
            Formulas(ALARM_FORMULAS),
        ),
    )


def estimators(run: ReportedRun) -> Section:
    """Return every estimator on the run's own rollouts, and the advice."""
    title = f"Estimators on the rollouts of {run.name}"
    by_step = run.store.grams()
    advice = advice_line(by_step, run.store.subgroup_grams(), run.config)
    grams = list(by_step.values())
    if not grams:
        return Section(title, (advice,))
    names = {name for gram in grams for name, _ in gram.labels}
    known = proved({label for gram in grams for label in gram.labels}, run.config)
    info = comparison_info(grams, "rloo" if "rloo" in names else sorted(names)[0], known=known)
    sentences = [" ".join(design.sentences) for design in designs([run.store]).values()]
    picture = Picture(f"estimators-{run.name}", info.estimand, plot_comparison(info))
    formulas = Formulas((*((measure.title, measure.formula) for measure in MEASURES), NOISE_SCALE))
    table = Grid("Each estimator's own values, then its ratios with 95 % intervals.", display_table(info))
    return Section(title, (*sentences, f"Advice. {advice}", picture, table, formulas))


def fidelity(run: ReportedRun) -> Section:
    """Return how well the proxy follows exact norms."""
    title = f"Proxy against exact norms in {run.name}"
    try:
        info = fidelity_info(run.store.tokens_df(columns=fidelity_columns(), where=MEASURED_GROUPS))
    except InputError as error:
        return Section(title, (str(error),))
    picture = Picture(f"fidelity-{run.name}", f"{info.n_tokens:,} tokens with both energies.", plot_fidelity(info))
    caption = "Within: among rollouts of one prompt at one position, the only comparison OTB makes."
    table = Grid(caption, fidelity_table(info))
    return Section(title, (picture, lost_line(run), table, Formulas(FIDELITY_FORMULAS)))


def lost_line(run: ReportedRun) -> str:
    """Return which share of otb's gain over rloo the proxy loses on the run's own rollouts, or that none is known."""
    grams = list(run.store.grams().values())
    known = proved({label for gram in grams for label in gram.labels}, run.config)
    lost = gain_lost(grams, ("otb", "proxy"), ("otb", "exact"), known=known)
    if lost is None:
        return "Gain lost by the proxy: not known, exact energies show no gain of otb over rloo on these rollouts."
    share, rests_on = gain_lost_words(lost)
    return f"Gain lost by the proxy: {share} of otb's gain over rloo ({rests_on})."


def attribution_section(run: ReportedRun) -> Section:
    """Return who holds the gradient at the attributed step where it was largest."""
    title = f"Who holds the gradient of {run.name}"
    if not attributed_steps(run.store):
        return Section(
            title, ("No step was attributed; --measure.attribution.every 1 of otb train, or of otb score, does.",)
        )
    shares, holders = attributed(run.store, None, TOP)
    grids = [
        Grid(f"The {level}s with the largest |share| of {total:,}; shares of ‖ḡ‖².", rows)
        for level, (rows, total) in holders.items()
    ]
    formulas = (
        ("share", "c·s·ḡ of a token, ḡ = Σ c·s, c its coefficient in the update, s = ∇log π; their sum is ‖ḡ‖²"),
        ("signal, noise", "c·s·(ḡ − ḡ_p) and c·s·ḡ_p, ḡ_p the part of the token's own prompt"),
    )
    picture = Picture(f"attribution-{run.name}", attribution_line(shares), plot_attribution(attribution_info(shares)))
    return Section(title, (picture, *grids, Formulas(formulas)))


def provenance(runs: Sequence[ReportedRun]) -> Section:
    """Return what each run was made with."""
    rows = []
    for run in runs:
        info: Any = run.store.info
        git, packages = info.get("git") or {}, info.get("packages") or {}
        row = {"run": run.name, "created": info.get("created"), "seed": run.config.get("seed")}
        row |= {"scope": scope_of(run.store), "schema": info.get("schema_version")}
        row |= {"commit": str(git.get("commit") or "–")[:12], "changed files": bool(git.get("diff"))}
        rows.append(row | {"torch": packages.get("torch", "–")})
    return Section("How the runs were made", (Grid("From each run's run.json.", pd.DataFrame(rows)),))
