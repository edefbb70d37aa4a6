"""What the page of the study says: Group size."""

from collections.abc import Mapping

import numpy as np

from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import (
    Findings,
    Rows,
    column_words,
    distinct,
    grid,
    interval_columns,
    known,
    markdown_table,
    select,
    share,
)
from otb_analysis.study.seeds import difference_words, final_success, later_success, paired_difference

from .study import ARMS, LARGE_GROUP, SMALL_GROUP, chosen_rate, pick

AGAINST = "mean32"


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say what an update of each arm is worth, and what training makes of the same number of rollouts."""
    pool, sweep, curves = tables["pool"], tables["sweep"], tables["curves"]
    parts = ["## The same rollouts", POOLS.format(**pool[0]), pool_table(pool)]
    parts += ["## Learning rates", SWEEP.format(seeds=len(distinct(sweep, "seed"))), sweep_table(sweep)]
    parts += ["## Training", TRAINING.format(seeds=len(distinct(curves, "seed")), rollouts=most_rollouts(curves))]
    parts += [training_table(curves), "### Learning curves", curves_table(curves)]
    return Findings(verdict(pool, curves), "\n\n".join(parts), {"learning.svg": figure(curves)})


POOLS = """\
An update of 64 or of 512 rollouts, cut from the same pools into groups of 4 or of 32: more prompts, or more rollouts of
each. Efficiency is the share of the update that points along ∇J. Raw variance rewards an estimator for taking smaller
steps (c is their length along ∇J); SF and efficiency do not. Intervals are over {clusters} prompts."""
SWEEP = """\
Mean held-out success over the run, on other seeds than the comparison's ({seeds}); each arm takes its best learning
rate. `c·rloo` takes that of `otb` in groups of 4, times the projection c of `otb` measured above: under AdamW a factor
on the gradient would be lost, so that steps along ∇J are matched by the learning rate."""
TRAINING = """\
{seeds} seeds, other than the sweep's; arms of a seed share start and held-out prompts, and are evaluated at the same
numbers of rollouts; the last evaluation stands before the last update, after {rollouts:,} at most. The mean is over the
evaluations after the first; intervals are Student's over seeds, those of differences over the same seeds."""


def most_rollouts(curves: Rows) -> int:
    """Return the rollouts before the last evaluation of the arm with the smallest updates."""
    return max(row["n_rollouts"] for row in curves)


def words_of(name: str) -> str:
    """Return an arm in words."""
    return ARMS[name].words


def verdict(pool: Rows, curves: Rows) -> str:
    """Return the answer in one line: small `otb` groups against large mean groups, per update and in training."""
    small = pick(pool, "otb", SMALL_GROUP, 64)
    large = pick(pool, "group_mean", LARGE_GROUP, 512)
    ratios = ", ".join(
        f"{word} {small[name] / large[name]:.2f}" if small[name] and large[name] else f"{word} –"
        for name, word in (("variance", "raw variance"), ("sf", "SF"), ("efficiency", "efficiency"))
    )
    gaps = ", ".join(
        f"{words_of(name)} {difference_words(gained(curves, name), 100, 1)}"
        for name in distinct(curves, "arm")
        if name != AGAINST
    )
    return (
        f"An update of 16 prompts with `otb` at N = 4 over one with the mean at N = 32 and eight times the rollouts: "
        f"{ratios}; trained on equally many rollouts, held-out success minus that of {words_of(AGAINST)}, in points: "
        f"{gaps}."
    )


def pool_table(pool: Rows) -> str:
    """Return variance, projection, SF and efficiency of every estimator, group size and update size."""
    lines = []
    for row in pool:
        head = [f"`{row['estimator']}`", str(row["size"]), str(row["update"])]
        forms = {"variance": ".3f", "projection": ".2f", "sf": ".3f", "efficiency": ".2f"}
        lines.append([*head, *(column_words(row, name, form) for name, form in forms.items())])
    return markdown_table(["estimator", "N", "rollouts", "raw variance", "c", "SF", "efficiency"], lines)


def sweep_table(sweep: Rows) -> str:
    """Return mean held-out success by arm and learning rate, and which one each arm took."""
    rates = sorted(distinct(sweep, "rate"))
    lines = []
    for name in distinct(sweep, "arm"):
        own = select(sweep, arm=name)
        means = [float(np.mean([row["mean"] for row in select(own, rate=rate)])) for rate in rates]
        lines.append([words_of(name), *(share(mean) for mean in means), f"{chosen_rate(own):g}"])
    return markdown_table(["arm", *(f"{rate:g}" for rate in rates), "taken"], lines)


def gained(curves: Rows, name: str) -> Interval | None:
    """Return the paired difference of an arm's mean held-out success from that of the large mean groups."""
    own, base = (later_success(select(curves, arm=arm)) for arm in (name, AGAINST))
    return paired_difference(own, base, f"held-out success minus that of {AGAINST}")


def training_table(curves: Rows) -> str:
    """Return each arm's success, its difference from the large mean groups, updates, norms and clipping."""
    lines = []
    for name in distinct(curves, "arm"):
        own = select(curves, arm=name)
        last = max(row["step"] for row in own)
        mean = seed_mean(list(later_success(own).values()), "mean held-out success", "logit")
        final = seed_mean(final_success(own), "final held-out success", "logit")
        gap = "" if name == AGAINST else difference_words(gained(curves, name), 100, 1)
        facts = {key: float(np.mean([row[key] for row in own])) for key in ("rate", "grad_norm", "clipped")}
        lines.append([
            words_of(name), *(column_words(interval_columns("x", found), "x") for found in (mean, final)), gap,
            f"{facts['rate']:.2g}", str(last + 1), f"{facts['grad_norm']:.1f}", share(facts["clipped"]),
        ])  # fmt: skip
    headers = ["arm", "mean success", "at the end", f"mean minus {words_of(AGAINST)}, points", "learning rate",
               "updates", "gradient norm", "clipped"]  # fmt: skip
    return markdown_table(headers, lines)


def curves_table(curves: Rows) -> str:
    """Return mean held-out success over seeds by rollouts sampled so far."""
    rows = []
    for name in distinct(curves, "arm"):
        own = select(curves, arm=name)
        for number, step in enumerate(sorted(distinct(own, "step"))):
            at = select(own, step=step)
            mean = float(np.mean([row["success"] for row in at]))
            tokens = float(np.mean([row["n_tokens"] for row in at]))
            rows.append({"arm": words_of(name), "evaluation": number, "words": f"{share(mean)} ({tokens:,.0f})"})
    return "Held-out success (tokens sampled so far)\n\n" + grid(rows, "arm", "evaluation", lambda row: row["words"])


def figure(curves: Rows) -> str:
    """Draw mean learning curves over thousands of sampled tokens, with intervals over seeds."""
    return svg([
        Panel("Held-out success", "mean over seeds, 95 % interval", "thousand tokens sampled",
              [mean_curve(select(curves, arm=name)) for name in distinct(curves, "arm")], percent=True)
    ])  # fmt: skip


def mean_curve(rows: Rows) -> Curve:
    """Return an arm's mean learning curve with Student's band over seeds."""
    arm, steps = ARMS[rows[0]["arm"]], sorted(distinct(rows, "step"))
    at = [select(rows, step=step) for step in steps]
    found = [seed_mean([row["success"] for row in point], "held-out success", "logit") for point in at]
    ends = [interval_columns("x", one) for one in found]
    y, low, high = ([known(end[f"x{side}"]) for end in ends] for side in ("", "_low", "_high"))
    tokens = [float(np.mean([row["n_tokens"] for row in point])) / 1000 for point in at]
    return Curve(tokens, y, arm.words, low, high, arm.color, dashed=arm.group == LARGE_GROUP)
