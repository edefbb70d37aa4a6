"""Runs side by side: what they say of their baselines, what they learned, B against A, the proxy."""

from collections.abc import Mapping
from dataclasses import replace

from otb_analysis.answers import MeasuredSteps, RunAnswers, designs
from otb_analysis.answers.measured import SHORTER
from otb_analysis.answers.pairs import learning_notes, learning_table, pair_of, pairing_of
from otb_analysis.answers.runs import unlike_scopes
from otb_analysis.figures.comparison import display_table
from otb_analysis.figures.fidelity import agreement_display
from otb_analysis.figures.pairs import noise_display, pair_display
from otb_analysis.phases import plural
from otb_analysis.report.document import Grid, Part, Section
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.statistics.gradients import NOT_SHOWN
from otb_analysis.store.measured import CHOSEN

EXPLAINED = """\
SF: variance at equal progress, variance/c², a ratio below 1 is better. efficiency: share of an update along the true
gradient ∇J, a ratio above 1 is better. c: step length along ∇J; two with a proved c are compared by SF, others by
efficiency. {looks} equiv.: rollouts {base} would need for the same. energy: what tokens are weighted by: exact
‖∇ log π‖², its free proxy, or none. –: noise hides it."""
LOOKS = (
    "÷: 95 % by itself, in one look; {together}: 95 % for all of them, which is what is claimed. Other intervals: one "
    "look."
)
LEFT = "otb compare --top 0 shows what is left."
UNJUDGED = "Nothing is judged: {}. Intervals, where there are any, are 95 % of one look."
PROXY = "Proxy against exact norms: does the free proxy order tokens as exact norms do?"
WITHIN = (
    "energy: squared norm of the gradient of log π, of one token w_t, or of all up to it W_t = Σ_{j≤t} w_j\n"
    "within: among rollouts of one prompt at one position, the only comparison OTB makes. "
    f"{CHOSEN}"
)


def comparison(runs: Mapping[str, RunAnswers], top: int | None = None, conclude_last: bool = False) -> list[Section]:
    """Return what `otb compare` and `otb demo` print: what to train with per design, then the other tables.

    Args:
        top: Rows per table of estimators; 0 means all, None the eight that matter.
        conclude_last: Put the sentences and their tables behind the others, where a long command ends, without B
            against A.
    """
    of_designs, several = designs(runs), len(runs) > 1
    concluded = [
        Section(name, ("\n".join([*[f"{name}:"][: len(of_designs) - 1], *steps.lines]), *estimator_parts(steps, top)))
        for name, steps in of_designs.items()
    ]
    if not concluded:
        concluded = [Section("Estimators", run.lines) for run in [*runs.values()][:1]]
    others = [Section("Runs", (learning_grid(runs),))]
    others += [] if conclude_last else pair_sections(runs)
    if measured := [(name, *row) for name, run in runs.items() for row in run.fidelity]:
        lines = [f"{name}: " * several + run.proxy_line for name, run in runs.items() if run.proxy_line]
        others.append(Section("Proxy", (Grid(WITHIN, agreement_display(measured), PROXY, texts=("of",)), *lines)))
    return others + concluded if conclude_last else concluded + others


def pair_sections(runs: Mapping[str, RunAnswers]) -> list[Section]:
    """Return B against A: of two runs, or of two groups of them whose seeds are paired; empty of other runs."""
    pairing = pairing_of(runs)
    if pairing is None:
        return []
    pair = pair_of(runs, pairing)
    parts: list[Part] = [f"A is {pair.a}, B is {pair.b}. {pair.verdict}"]
    if pair.panels:
        parts.append(Grid("means over the shared steps [95 %]", pair_display(pair.panels), "B against A"))
    if len(shown := noise_display(pair.noise)):
        caption = f"below 1 is less noise; of efficiency, above 1 is better. {SHORTER}"
        parts.append(Grid(caption, shown, "Gradient noise, B ÷ A"))
    return [Section("B against A", (*parts, *pair.notes))]


def learning_grid(runs: Mapping[str, RunAnswers]) -> Grid:
    """Return one row per run: what it learned, how large its gradients were, where its time went."""
    captions = ["reward: mean of the first → last tenth of the steps · ‖ḡ‖: before clipping, median over steps"]
    captions += [f"{name}: {line}" for name, run in runs.items() for line in learning_notes(run)]
    if apart := unlike_scopes({name: run for name, run in runs.items() if run.grams}):
        captions.append(f"{apart}: each has a table of estimators of its own.")
    title = "Runs: what they learned, and where their time went"
    return Grid("\n".join(captions), learning_table(runs), title, texts=("estimator",))


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
    if not info.judged and info.n_prompts >= MIN_CLUSTERS and top is None:
        return [f"No ratio has an interval: noise hides the true gradient. {LEFT}", *steps.notes]
    rows = [row for row in info.rows if not steps.repeats(row.key)]
    shown = rows[: top or None] if top is not None else [row for row in rows if row.key in steps.matter]
    some = f"; {len(shown)} of {len(rows)} rows, --top 0 shows all" if len(shown) < len(rows) else ""
    title = (
        f"Estimators on the same rollouts ({steps.name}{some}): an update of "
        f"{plural(steps.decision.update, 'prompt')}, measured on {plural(info.n_prompts, 'prompt')} over "
        f"{plural(info.n_steps, 'step')}"
    )
    beside = None if steps.against_rloo is None else steps.decision
    frame = display_table(replace(info, rows=tuple(shown)), beside, top is not None)
    why = "another sampler drew the tokens" if steps.alarm else f"fewer than {MIN_CLUSTERS} prompts, or too much noise"
    looks = LOOKS.format(together=info.together) if info.judged else UNJUDGED.format(why)
    caption = EXPLAINED.replace("\n", " ").format(looks=looks, base=info.against)
    grid = Grid(caption, frame, title, texts=("energy", "c"))
    absolute = [NOT_SHOWN] if top is not None and any(row.intervals["efficiency"] is None for row in rows) else []
    return [grid, "\n".join([*steps.notes, *absolute])]
