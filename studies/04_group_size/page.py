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

from .arms import ARMS, LARGE_GROUP
from .study import chosen_rate

BASE = "otb4"
"""The arm that the question is about: all others are measured against it."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say what an update of each arm is worth, and what training makes of the same number of rollouts."""
    pool, sweep, curves = tables["pool"], tables["sweep"], tables["curves"]
    parts = ["## The same rollouts", POOLS.format(**pool[0]), pool_table(pool)]
    parts += ["### One update over another", RATIOS, ratios_table(tables["ratios"])]
    parts += ["## Learning rates", SWEEP.format(seeds=len(distinct(sweep, "seed"))), sweep_table(sweep)]
    parts += ["## Training", training_words(curves), training_table(curves)]
    parts += ["### Learning curves", curves_table(curves)]
    return Findings(verdict(tables["ratios"], curves), "\n\n".join(parts), {"learning.svg": figure(curves)})


POOLS = """\
An update of 64 or of 512 rollouts, cut from the same pools into groups of 4 or of 32: more prompts, or more rollouts of
each. Efficiency is the share of the update that points along ∇J. Raw variance rewards an estimator for taking smaller
steps (c is their length along ∇J); SF and efficiency do not. `otb` weighs by the forward-only proxy, here and in
training. Intervals are over {clusters} prompts."""
AHEAD_OF = ("mean32", "rloo4")
"""Arms whose distance from it the figure shows."""
RATIOS = """\
Each arm's whole update over another's, on the same pools: a ratio of SFs or raw variances below 1, or of efficiencies
above 1, is calmer. Intervals leave each prompt out of both. An update of 16 × 32 or 128 × 4 has 512 rollouts, one of
16 × 4 has 64."""
SWEEP = """\
Mean held-out success over the run, on other seeds than the comparison's ({seeds}); each arm takes its best learning
rate. `c·rloo` takes that of `otb` in groups of 4, times the projection c of `otb` measured above: under AdamW a factor
on the gradient would be lost, so that steps along ∇J are matched by the learning rate."""
TRAINING = """\
{seeds} seeds, other than the sweep's; arms of a seed share start and held-out prompts. The mean is over evaluations
after {common} rollouts, where every arm has one; *at the end* is before the last update, after {ends} rollouts.
Intervals are Student's over seeds, those of differences over the same seeds; each stands for itself."""


def training_words(curves: Rows) -> str:
    """Say how the arms were trained and evaluated."""
    common = sorted({row["n_rollouts"] for row in shared_evaluations(curves) if row["step"] > 0})
    ends = sorted({max(row["n_rollouts"] for row in select(curves, arm=name)) for name in distinct(curves, "arm")})
    return TRAINING.format(
        seeds=len(distinct(curves, "seed")),
        common=", ".join(f"{n:,}" for n in common),
        ends=" or ".join(f"{n:,}" for n in ends),
    )


def shared_evaluations(curves: Rows) -> Rows:
    """Return the evaluations after numbers of rollouts at which every arm has one."""
    at = [{row["n_rollouts"] for row in select(curves, arm=name)} for name in distinct(curves, "arm")]
    return [row for row in curves if row["n_rollouts"] in set.intersection(*at)]


def words_of(name: str) -> str:
    """Return an arm in words, as in `otb 16 × 4`."""
    return ARMS[name].words.replace(",", "")


def verdict(ratios: Rows, curves: Rows) -> str:
    """Return the answer in one line: what the small `otb` groups learn, and what one update of theirs is worth."""
    gaps = {name: gained(curves, name) for name in distinct(curves, "arm") if name != BASE}
    kinds = {
        "learns more than": lambda gap: gap.low is not None and gap.low > 0,
        "learns less than": lambda gap: gap.high is not None and gap.high < 0,
        "is not shown to differ from": lambda gap: gap.low is None or gap.high is None or gap.low <= 0 <= gap.high,
    }
    said = []
    for words, holds in kinds.items():
        own = [_gap_words(name, gap) for name, gap in gaps.items() if gap and holds(gap)]
        said += [f"{words} {', '.join(own)}"] if own else []
    return (
        f"On equally many rollouts {words_of(BASE)} {'; '.join(said)} (points of held-out success, mean over the run). "
        f"One update: {_ratio_words(ratios, BASE, 'mean32')}, an eighth of its rollouts; at as many rollouts "
        f"{_ratio_words(ratios, 'otb4-wide', 'mean32')} and {_ratio_words(ratios, 'otb4-wide', 'rloo4-wide')}."
    )


def _gap_words(name: str, gap: Interval) -> str:
    ends = "" if gap.low is None or gap.high is None else f"; {100 * gap.low:+.1f} to {100 * gap.high:+.1f}"
    return f"{words_of(name)} ({100 * gap.estimate:+.1f}{ends})"


def _ratio_words(ratios: Rows, name: str, other: str) -> str:
    (row,) = select(ratios, arm=name, against=other)
    kinds = {"raw variance": "variance", "SF": "sf", "efficiency": "efficiency"}
    found = ", ".join(f"{words} {column_words(row, kind)}" for words, kind in kinds.items())
    return f"{words_of(name)} over {words_of(other)}: {found}"


def pool_table(pool: Rows) -> str:
    """Return variance, projection, SF and efficiency of every estimator, group size and update size."""
    lines = []
    for row in pool:
        head = [f"`{row['estimator']}`", str(row["size"]), str(row["update"])]
        forms = {"variance": ".3f", "projection": ".2f", "sf": ".3f", "efficiency": ".2f"}
        lines.append([*head, *(column_words(row, name, form) for name, form in forms.items())])
    return markdown_table(["estimator", "N", "rollouts", "raw variance", "c", "SF", "efficiency"], lines)


def ratios_table(ratios: Rows) -> str:
    """Return ratios of raw variance, SF and efficiency of whole updates."""
    lines = [
        [f"{words_of(row['arm'])} over {words_of(row['against'])}",
         *(column_words(row, name) for name in ("variance", "sf", "efficiency"))]
        for row in ratios
    ]  # fmt: skip
    return markdown_table(["update", "raw variance", "SF", "efficiency"], lines)


def sweep_table(sweep: Rows) -> str:
    """Return mean held-out success by arm and learning rate, and which one each arm took."""
    rates = sorted(distinct(sweep, "rate"))
    lines = []
    for name in distinct(sweep, "arm"):
        own = select(sweep, arm=name)
        means = [float(np.mean([row["mean"] for row in select(own, rate=rate)])) for rate in rates]
        lines.append([words_of(name), *(share(mean) for mean in means), f"{chosen_rate(own):g}"])
    table = markdown_table(["arm", *(f"{rate:g}" for rate in rates), "taken"], lines)
    edge = [words_of(n) for n in distinct(sweep, "arm") if chosen_rate(select(sweep, arm=n)) in (rates[0], rates[-1])]
    return f"{table}\n\nAt the edge of the sweep, so perhaps not its best: {', '.join(edge)}." if edge else table


def gained(curves: Rows, name: str) -> Interval | None:
    """Return the paired difference of the small `otb` groups' mean held-out success from an arm's."""
    shared = shared_evaluations(curves)
    own, other = (later_success(select(shared, arm=arm)) for arm in (BASE, name))
    return paired_difference(own, other, f"held-out success of {BASE} minus that of {name}")


def training_table(curves: Rows) -> str:
    """Return each arm's success, that of the small `otb` groups minus it, updates, norms and clipping."""
    lines = []
    for name in distinct(curves, "arm"):
        own = select(curves, arm=name)
        last = max(row["step"] for row in own)
        shared = select(shared_evaluations(curves), arm=name)
        mean = seed_mean(list(later_success(shared).values()), "mean held-out success", "logit")
        final = seed_mean(final_success(own), "final held-out success", "logit")
        gap = "" if name == BASE else difference_words(gained(curves, name), 100, 1)
        facts = {key: float(np.mean([row[key] for row in own])) for key in ("rate", "grad_norm", "clipped")}
        lines.append([
            words_of(name), *(column_words(interval_columns("x", found), "x") for found in (mean, final)), gap,
            f"{facts['rate']:.2g}", str(last + 1), f"{facts['grad_norm']:.1f}", share(facts["clipped"]),
        ])  # fmt: skip
    headers = ["arm", "mean success", "at the end", f"{words_of(BASE)} minus it, points", "learning rate",
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
    """Draw mean learning curves over thousands of sampled tokens, and how far the small `otb` groups are ahead."""
    names = distinct(curves, "arm")
    ahead = [gap_curve(shared_evaluations(curves), name) for name in names if name in AHEAD_OF]
    return svg(
        [
            Panel("Held-out success", "mean over seeds", "thousand tokens sampled",
                  [mean_curve(select(curves, arm=name)) for name in names], percent=True),
            Panel(f"{words_of(BASE)} minus others", "points, same seeds, 95 % interval", "thousand rollouts", ahead,
                  rules=[(0.0, "")], percent=True),
        ],
        columns=2,
    )  # fmt: skip


def mean_curve(rows: Rows) -> Curve:
    """Return an arm's mean learning curve; seeds differ in all arms alike, so the other panel has intervals."""
    arm, steps = ARMS[rows[0]["arm"]], sorted(distinct(rows, "step"))
    at = [select(rows, step=step) for step in steps]
    y, x = ([float(np.mean([row[name] for row in point])) for point in at] for name in ("success", "n_tokens"))
    thousands = [tokens / 1000 for tokens in x]
    return Curve(thousands, y, words_of(rows[0]["arm"]), color=arm.color, dashed=arm.group == LARGE_GROUP)


def gap_curve(shared: Rows, name: str) -> Curve:
    """Return the paired difference of the small `otb` groups from an arm at each evaluation that both have."""
    rollouts = sorted(distinct(select(shared, arm=BASE), "n_rollouts"))
    ends = []
    for count in rollouts:
        own, other = (
            {row["seed"]: row["success"] for row in select(shared, arm=arm, n_rollouts=count)} for arm in (BASE, name)
        )
        ends.append(interval_columns("x", paired_difference(own, other, f"held-out success of {BASE} minus {name}")))
    y, low, high = ([known(end[f"x{side}"]) for end in ends] for side in ("", "_low", "_high"))
    return Curve([n / 1000 for n in rollouts], y, f"minus {words_of(name)}", low, high, ARMS[name].color)
