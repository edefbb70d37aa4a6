"""The table of estimators at every door: each over `rloo`, by itself and with all others, proved step lengths first."""

from dataclasses import replace

from otb_analysis.answers import MeasuredSteps
from otb_analysis.figures.comparison import display_table
from otb_analysis.phases import plural
from otb_analysis.report.document import Grid, Part
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.statistics.moments.absolute import NOT_SHOWN

EXPLAINED = """\
SF: variance at equal progress, variance/c², a ratio below 1 is better. efficiency: share of an update along the true
gradient ∇J, a ratio above 1 is better. c: step length along ∇J; two with a proved c are compared by SF, others by
efficiency. {looks} equiv.: rollouts {base} would need for the same. energy: what tokens are weighted by: exact
‖∇ log π‖², its free proxy, or none. –: noise hides it."""
LOOKS = "÷: 95 % by itself, in one look; {together}: 95 % for all of them, which is what is claimed."
LEFT = "otb compare --top 0 shows what is left."
UNJUDGED = "Nothing is judged: {}. Intervals, where there are any, are 95 % of one look."


def estimator_parts(steps: MeasuredSteps, top: int | None = None) -> list[Part]:
    """Return the table of estimators over `rloo` with how to read it; empty where `rloo` was not measured.

    Args:
        top: Rows that are kept, the first ones; 0 keeps all, None the eight that matter.
    """
    cause = steps.over_rloo.cause
    if cause in ("no reference", "equal rewards") or (cause == "alone" and top is None):
        return []
    info = steps.comparison()
    if steps.alarm and top is None:
        return [f"No estimators are compared: another sampler drew the tokens. {LEFT}"]
    if not info.looked_at and info.n_prompts >= MIN_CLUSTERS and top is None:
        return [f"No ratio has an interval: noise hides the true gradient. {LEFT}", *steps.notes]
    rows = [row for row in info.rows if not steps.repeats(row.key)]
    shown = rows[: top or None] if top is not None else [row for row in rows if row.key in steps.matter]
    some = f"; {len(shown)} of {len(rows)} rows, --top 0 shows all" if len(shown) < len(rows) else ""
    title = (
        f"Estimators on the same rollouts ({steps.name}{some}): an update of "
        f"{plural(steps.decision.update, 'prompt')}, measured on {plural(info.n_prompts, 'prompt')} over "
        f"{plural(info.n_steps, 'step')}"
    )
    beside = None if steps.beside is None else steps.decision
    frame = display_table(replace(info, rows=tuple(shown)), beside, top is not None)
    why = "another sampler drew the tokens" if steps.alarm else f"fewer than {MIN_CLUSTERS} prompts, or too much noise"
    looks = LOOKS.format(together=info.together) if info.looked_at else UNJUDGED.format(why)
    caption = EXPLAINED.replace("\n", " ").format(looks=looks, base=info.against)
    grid = Grid(caption, frame, title, texts=("energy", "c"))
    absolute = [NOT_SHOWN] if top is not None and any(row.intervals["efficiency"] is None for row in rows) else []
    return [grid, "\n".join([*steps.notes, *absolute])]
