"""What the page of the study says: Collapse."""

from collections.abc import Mapping

import numpy as np

from otb_analysis.figures.styles import GREY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.study import Findings, Rows, distinct, select

from .fatal import control_table, fatal_table, paired
from .forecast import detectors_table, forecast, signals_table, signals_words, still_calm, tested
from .study import ARMS, CALM_RATE, LONG
from .survival import c_words, calm, contrasts_table, needed_words, staged, survival_table, survival_verdict


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say how long each arm lasts, who saw it coming, and who held the fatal gradient."""
    runs, detectors, signals = tables["runs"], tables["detectors"], tables["signals"]
    attribution, projection = tables.get("attribution", []), tables["projection"]
    own = staged(runs)
    parts = ["## Survival", how(runs, projection), survival_table(own)]
    parts += [LIFETIMES, contrasts_table(own), needed_words(own, projection), horizon(own, signals)]
    parts += ["## Detectors", warning(runs, detectors), detectors_table(runs, detectors)]
    parts += [signals_words(runs, signals), signals_table(runs, signals)]
    parts += ["## The fatal step", FATAL, fatal_table(attribution)] if attribution else []
    parts += [CONTROL, control_table(attribution)] if paired(attribution) else []
    verdict = f"{survival_verdict(own, projection)}; {forecast(runs, detectors)}."
    return Findings(verdict, "\n\n".join(filter(None, parts)), {"reward.svg": figure(tables["curves"])})


HOW = """\
{seeds} seeds; the arms of a seed share start, prompts and conditions: rollouts from the policy of four batches ago, not
corrected for, and a learning rate that rises from 0 to the one shown. `scaled` is `rloo` at c times that rate, c = {c}
the projection of `otb` on rollouts of the starts: what shorter steps alone do. AdamW divides by the gradient's own size
and clipping cuts nearly every step, so that c multiplies the learning rate and not the gradient. Collapsed means: the
mean reward of 6 steps is at most half of the highest such mean so far, and so for 6 steps on end. A run that lasts
counts with its {steps} steps. Intervals are Student's over seeds, each its own 95 %."""
LIFETIMES = """\
Lifetimes are cut at the last step, so that these are differences of mean lifetimes within it: *at least* where only the
first arm has runs that lasted, *at most* where only the second has, *both cut* where the side is not known."""
HORIZON = """\
The long arms, of {long} seeds, meet the same conditions on chains of {low} to {high} terms in place of 2 to 4: answers
of {tokens:.0f} tokens at the beginning in place of {usual:.0f}, from starts in the same band of success. Longer
horizons were not tried. Neither was another staleness, nor another end of the learning rate but `scaled`'s."""
NO_HORIZON = "The horizon was not varied: all arms add the same chains."
WARNING = """\
Lead: steps from a detector's first call to the collapse, over the runs that collapsed and that it called in time; a
detector may only look back. *At all* counts calls after the collapse, too: who makes none is blind to this collapse.
Runs that have not yet collapsed are no calm ones. False alarms are counted on the arm `calm` alone: `rloo` from the
same starts, on rollouts of its own policy, at a constant {rate:g}; {quiet} of its {all} runs did not collapse, and only
those are counted, with calls at any of their steps. `sampling_certificate` and `ratio_tails` call the old
rollouts, which all staged runs have and no calm one: no forecast of when. p: is the share called in time larger than
the share of calm runs called? The runs of a seed share its start, so that seeds are compared: by all signs of their
differences, one-sided, adjusted by Holm over the {tested} detectors that are left. `not measured`: exact norms, which
`tail_index` reads, were not."""
FATAL = """\
The step with the largest ‖ḡ‖ of the last 6 attributed ones up to the collapse (every second step is one), over the runs
that collapsed: median (range). The usual ‖ḡ‖ is the median of all steps before those 6. Shares of tokens and of failed
rollouts are of Σ|share| over the step's tokens, the largest prompt's of Σ|share| over its prompts; beside the share of
failed rollouts stands how many of the tokens are theirs. Noise is the part of ‖ḡ‖² that prompts do not have in common,
beyond 100 % where they pull against one another."""
CONTROL = """\
The control step is chosen in the same way from the same run: the largest of the last 6 attributed steps up to half of
the way, where those are 6 and all before the others. All arms together; the difference, of percentages in points, is
the median over a seed's runs, then the mean over seeds with Student's interval."""


def how(runs: Rows, projection: Rows) -> str:
    """Return the conditions in words."""
    return HOW.format(seeds=len(distinct(runs, "seed")), steps=runs[0]["steps"], c=c_words(projection))


def horizon(runs: Rows, signals: Rows) -> str:
    """Say what the long arms are, or that there are none."""
    seeds = len(distinct([row for row in runs if ARMS[row["arm"]].long], "seed"))
    if not seeds:
        return NO_HORIZON
    tokens, usual = (
        float(np.mean([row["length_first"] for row in select(signals, arm=arm)])) for arm in ("rloo_long", "rloo")
    )
    return HORIZON.format(long=seeds, low=LONG.terms_min, high=LONG.terms_max, tokens=tokens, usual=usual)


def warning(runs: Rows, detectors: Rows) -> str:
    """Return how detectors are judged, in words."""
    count = len(tested(detectors))
    return WARNING.format(rate=CALM_RATE, quiet=len(still_calm(runs)), all=len(calm(runs)), tested=count)


def figure(curves: Rows) -> str:
    """Draw the trailing reward of every arm: the seeds thin, their mean."""
    return svg([_panel(name, select(curves, arm=name)) for name in ARMS if name in distinct(curves, "arm")])


def _panel(name: str, curves: Rows) -> Panel:
    steps = sorted(distinct(curves, "step"))
    mean = [float(np.mean([row["reward"] for row in select(curves, step=step)])) for step in steps]
    seeds = [
        Curve([row["step"] for row in own], [row["reward"] for row in own], "one seed", color=GREY, width=1.0)
        for own in (select(curves, seed=seed) for seed in distinct(curves, "seed"))
    ]
    drawn_mean = Curve(steps, mean, name, color=ARMS[name].color, width=3.0)
    return Panel(
        name, "mean reward of the last 6 steps", "step", [*seeds, drawn_mean], y_range=(0.0, 1.0), percent=True
    )
