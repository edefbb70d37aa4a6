"""How long each arm lasts, and whether shorter steps alone explain it."""

from collections.abc import Mapping

import numpy as np

from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import Rows, column_words, distinct, interval_columns, markdown_table, select, share
from otb_analysis.study.seeds import difference_words, paired_difference

from .study import ARMS

CONTRASTS = (
    ("scaled", "rloo"),
    ("otb", "rloo"),
    ("otb", "scaled"),
    ("otb_loo", "scaled"),
    ("sequence_optimal_loo", "scaled"),
    ("otb", "otb_loo"),
    ("otb_long", "rloo_long"),
    ("rloo_long", "rloo"),
)
"""Arms whose lifetimes are compared seed by seed: the first minus the second."""
SHORTER = "scaled"
ASKED = (("otb", "rloo"), ("otb_long", "rloo_long"))
"""Contrasts that the verdict quotes beside those against `scaled`."""
NEEDED = """\
Were it a fixed learning rate at which `rloo` breaks, c times the rate would let it last 1/c times as long: `scaled`
would last {expected:.0f} steps (it lasted {found:.0f}), and to last as long as `otb` it would take {most}c =
{needed:.2f}, {where} the interval of `otb`'s projection ({low:.2f} to {high:.2f})."""


def staged(runs: Rows) -> Rows:
    """Return the runs of the arms that were driven into collapse."""
    return [row for row in runs if not ARMS[row["arm"]].calm]


def calm(runs: Rows) -> Rows:
    """Return the runs of the other arm."""
    return [row for row in runs if ARMS[row["arm"]].calm]


def survived(runs: Rows, name: str) -> dict[int, float]:
    """Return the steps that each seed lasted, all of them where it never collapsed."""
    own = select(runs, arm=name)
    return {row["seed"]: float(row["steps"] if row["collapse"] is None else row["collapse"]) for row in own}


def lasted(runs: Rows, name: str) -> int:
    """Return how many runs of an arm never collapsed, so that their lifetime is not known."""
    return sum(row["collapse"] is None for row in select(runs, arm=name))


def collapsed_words(runs: Rows, name: str) -> str:
    """Return how many runs of an arm collapsed, as in `7 of 10`."""
    total = len(select(runs, arm=name))
    return f"{total - lasted(runs, name)} of {total}"


def contrast(runs: Rows, own: str, base: str) -> Interval | None:
    """Return by how many steps one arm outlasts another, seed by seed, both cut at the last step."""
    return paired_difference(survived(runs, own), survived(runs, base), f"steps survived beyond {base}")


def bound(runs: Rows, own: str, base: str) -> str:
    """Say which side the last step cuts a difference of lifetimes on: none, the first, the second or both."""
    if lasted(runs, own):
        return "both cut: " if lasted(runs, base) else "at least "
    return "at most " if lasted(runs, base) else ""


def contrast_words(runs: Rows, own: str, base: str) -> str:
    """Return a difference of lifetimes in words, with its sign, interval and side."""
    return bound(runs, own, base) + difference_words(contrast(runs, own, base))


def contrasts_of(runs: Rows) -> list[tuple[str, str]]:
    """Return the contrasts both of whose arms were run."""
    arms = distinct(runs, "arm")
    return [(own, base) for own, base in CONTRASTS if own in arms and base in arms]


def survival_verdict(runs: Rows, projection: Rows) -> str:
    """Say how many runs collapsed, what each arm gains over shorter steps alone, and whether that explains it."""
    arms = distinct(runs, "arm")
    counted = ", ".join(f"`{name}` {collapsed_words(runs, name)}" for name in arms)
    against = [own for own, base in contrasts_of(runs) if base == SHORTER]
    gained = ", ".join(f"`{name}` {contrast_words(runs, name, SHORTER)}" for name in against)
    c = c_words(projection)
    beyond = f"steps survived beyond `scaled`, whose steps are c = {c} times as long as `rloo`'s"
    others = [f"`{own}` − `{base}` {contrast_words(runs, own, base)}" for own, base in ASKED if own in arms]
    return f"{explained(runs, against)}: {beyond}, {gained}; {', '.join(others)}; collapsed: {counted}"


def explained(runs: Rows, names: list[str]) -> str:
    """Say which arms outlast shorter steps by more than their interval."""
    found = {name: contrast(runs, name, SHORTER) for name in names}
    longer = [name for name, one in found.items() if one is not None and one.low is not None and one.low > 0]
    rest = [name for name in names if name not in longer]
    if not longer:
        return "No arm is shown to outlast shorter steps"
    said = f"{listed(longer)} outlast{'s' * (len(longer) == 1)} what shorter steps explain"
    return said + (f", {listed(rest)} {'is' if len(rest) == 1 else 'are'} not shown to" if rest else "")


def listed(names: list[str]) -> str:
    """Return names in words, as in `a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def c_words(projection: Rows) -> str:
    """Return the projection of `otb` with its interval."""
    (row,) = select(projection, estimator="otb")
    return column_words(row, "projection")


def survival_table(runs: Rows) -> str:
    """Return how often and when each arm collapsed, and how its steps were clipped until then."""
    lines = []
    for name in distinct(runs, "arm"):
        own = select(runs, arm=name)
        mean = {key: float(np.mean([row[key] for row in own])) for key in ("clip_fraction", "best", "last")}
        steps = interval_columns("x", seed_mean(list(survived(runs, name).values()), "steps survived"))
        lines.append([
            f"`{name}`", collapsed_words(runs, name), column_words(steps, "x", ".0f"),
            share(mean["best"]), share(mean["last"]), f"{own[0]['rate']:.2g}", share(mean["clip_fraction"]),
        ])  # fmt: skip
    headers = ["arm", "collapsed", "steps survived", "best reward", "at the end", "learning rate", "clipped until then"]
    return markdown_table(headers, lines)


def contrasts_table(runs: Rows) -> str:
    """Return the differences of lifetimes, seed by seed."""
    lines = [[f"`{own}` − `{base}`", contrast_words(runs, own, base)] for own, base in contrasts_of(runs)]
    return markdown_table(["arms", "difference of steps survived"], lines)


def needed_words(runs: Rows, projection: Rows) -> str:
    """Say which c would explain `otb` by the length of steps, were a fixed length what breaks `rloo`."""
    (row,) = select(projection, estimator="otb")
    mean = {name: float(np.mean(list(survived(runs, name).values()))) for name in ("rloo", "scaled", "otb")}
    if row.get("projection_low") is None or min(mean.values()) == 0 or lasted(runs, "rloo"):
        return ""
    needed, low, high = mean["rloo"] / mean["otb"], row["projection_low"], row["projection_high"]
    return NEEDED.format(
        expected=mean["rloo"] / shortened(runs), found=mean["scaled"], needed=needed, low=low, high=high,
        most="at most " if lasted(runs, "otb") else "", where=where_words(needed, row),
    )  # fmt: skip


def shortened(runs: Rows) -> float:
    """Return the c that `scaled` was run at."""
    return select(runs, arm="scaled")[0]["rate"] / select(runs, arm="rloo")[0]["rate"]


def where_words(value: float, row: Mapping[str, float]) -> str:
    """Say on which side of the projection's interval a number is."""
    if value < row["projection_low"]:
        return "below"
    return "above" if value > row["projection_high"] else "within"
