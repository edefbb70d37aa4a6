"""Runs side by side: what they say of their baselines, what they learned, B against A, the proxy."""

from collections.abc import Mapping

from otb_analysis.answers import RunAnswers, designs
from otb_analysis.answers.learning import learning_notes, learning_table
from otb_analysis.answers.pairs import Pair, pair_of, pairing_of
from otb_analysis.figures.fidelity import agreement_display
from otb_analysis.figures.pair_curves import pair_display
from otb_analysis.figures.pair_gradients import noise_display
from otb_analysis.report.document import Grid, Part, Section
from otb_analysis.report.estimators import estimator_parts
from otb_analysis.store.reader import unlike_scopes

PROXY = "Proxy against exact norms: does the free proxy order tokens as exact norms do?"
WITHIN = (
    "energy: squared norm of the gradient of log π, of one token w_t, or of all up to it W_t = Σ_{j≤t} w_j\n"
    "within: among rollouts of one prompt at one position, the only comparison OTB makes."
)


def comparison(runs: Mapping[str, RunAnswers], top: int | None = None, conclude_last: bool = False) -> list[Section]:
    """Return what `otb compare` and `otb demo` print: what to train with per design, then the other tables.

    Args:
        top: Rows per table of estimators; 0 means all, None the eight that matter.
        conclude_last: Put the sentences and their tables behind the others, where a long command ends, without B
            against A.
    """
    of_designs = designs(runs)
    concluded = [
        Section(name, ("\n".join([*[f"{name}:"][: len(of_designs) - 1], *steps.lines]), *estimator_parts(steps, top)))
        for name, steps in of_designs.items()
    ]
    unmeasured = [run for run in runs.values() if not run.grams]
    if not concluded and unmeasured:
        concluded = [Section("Estimators", unmeasured[0].lines)]
    pairing = None if conclude_last else pairing_of(runs)
    others = [Section("Runs", (learning_grid(runs),))]
    others += [Section("B against A", pair_parts(pair_of(runs, pairing)))] if pairing else []
    measured = [(name, *row) for name, run in runs.items() for row in run.fidelity]
    others += (
        [Section("Proxy", (Grid(WITHIN, agreement_display(measured), PROXY, texts=("of",)), *_proxy_lines(runs)))]
        if measured
        else []
    )
    return others + concluded if conclude_last else concluded + others


def _proxy_lines(runs: Mapping[str, RunAnswers]) -> list[Part]:
    several = len(runs) > 1
    return [f"{name}: {run.proxy_line}" if several else run.proxy_line for name, run in runs.items() if run.proxy_line]


def learning_grid(runs: Mapping[str, RunAnswers]) -> Grid:
    """Return one row per run: what it learned, how large its gradients were, where its time went."""
    captions = ["reward: mean of the first → last tenth of the steps · ‖ḡ‖: before clipping, median over steps"]
    captions += [f"{name}: {line}" for name, run in runs.items() for line in learning_notes(run)]
    if apart := unlike_scopes({name: run.store for name, run in runs.items() if run.grams}):
        captions.append(f"{apart}: each has a table of estimators of its own.")
    title = "Runs: what they learned, and where their time went"
    return Grid("\n".join(captions), learning_table(runs), title, texts=("estimator",))


def pair_parts(pair: Pair) -> tuple[Part, ...]:
    """Return the verdict, one row per quantity, the ratios of gradient noise where there are any, and the notes."""
    parts: list[Part] = [f"A is {pair.a}, B is {pair.b}. {pair.verdict}"]
    parts += (
        [Grid("means over the shared steps [95 %]", pair_display(pair.panels), "B against A")] if pair.panels else []
    )
    shown = noise_display(pair.noise)
    if len(shown):
        parts.append(Grid("below 1 is less noise; of efficiency, above 1 is better", shown, "Gradient noise, B ÷ A"))
    return (*parts, *pair.notes)
