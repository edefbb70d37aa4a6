"""`docs/catalogue.md`, generated: `python -m studies.lib.enumeration.catalogue` rewrites it."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from otb_analysis.estimators import ESTIMATORS
from otb_analysis.objectives.aggregation import AGGREGATIONS, TOKEN_WEIGHTS
from otb_analysis.objectives.ratios import RATIOS
from otb_analysis.objectives.shaping import FILTERS, SHAPINGS
from otb_analysis.statistics import moments as measures
from otb_analysis.types import Float
from studies.lib.enumeration.facts import GROUP, GROUP_SIZE, SETTINGS
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.objectives import PEAKED, WEIGHT_CASES, weighed_moments
from studies.lib.enumeration.off_policy import CASES, DRIFT, case_moments, drifted, mean_shift, touched
from studies.lib.enumeration.trees import GroupMoments, random_tree


def page(template: str, **facts: Any) -> str:
    """Return a template filled in; an unknown name is an error."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    return environment.get_template(template).render(facts).strip() + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


ROUNDING = 1e-9
"""What holds exactly comes out below this."""
TARGETS: dict[str, Callable[[float], float]] = {
    "grpo": lambda p: (p * (1 - p)) ** -0.5,
    "maxrl": lambda p: sum((1 - p) ** (k - 1) for k in range(1, GROUP_SIZE)),
}
"""Entries with a target of their own: its gradient over ∇J where rewards are 0 or 1, p the success rate."""

ALONE = {
    "energy_across_loo": "rloo", "energy_regression": "rloo", "blend_otb_regression": "0.5*otb_turn+0.5*rloo",
}  # fmt: skip
"""What reads the energies of the other prompts, and what it is in a batch of one prompt: quicker to enumerate."""

DRAWN, POLICIES = 12, 60
"""Random policies behind the biases, and behind the shifts."""
BIAS_COLUMNS = ("estimator", "bias", "c", "V", "SF", "efficiency, P = 1", "P = 1000", "`rloo` ahead above P")
SHIFT_COLUMNS = (
    "ratio", "moved, tabular", "policies", "moved, shared", "policies", "off", "touched", "quoted",
)  # fmt: skip
WEIGHT_COLUMNS = ("weight", "bias", "c", "V", "SF", "efficiency, P = 1", "P = 1000", "share with m < ½")


def catalogue(bias: str, shift: str, weights: str) -> str:
    """Return the whole page as Markdown around its three enumerated tables."""
    return page(
        "catalogue.md.j2", estimators=ESTIMATORS, ratios=RATIOS, aggregations=AGGREGATIONS, token_weights=TOKEN_WEIGHTS,
        shapings=SHAPINGS, filters=FILTERS, drawn=DRAWN, policies=POLICIES, group_size=GROUP_SIZE, drift=DRIFT,
        bias_table=bias, shift_table=shift, weight_table=weights, vars=vars, repr=repr,
    )  # fmt: skip


def main(path: Path = Path("docs/catalogue.md")) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(catalogue(bias_table(), shift_table(), weight_table()), encoding="utf-8")


def shift_table() -> str:
    """Return how far the baseline J moves E ĝ under each ratio, over random policies of two kinds."""
    tabular, shared = (
        [drifted(SETTINGS[f"{kind}, terminal"], seed) for seed in range(POLICIES)] for kind in ("tabular", "shared")
    )
    rows = []
    for label, case in CASES.items():
        shifts = [np.array([mean_shift(tree, case) for tree in trees]) for trees in (tabular, shared)]
        moved = [words for x in shifts for words in (spread(x), f"{(x > ROUNDING).sum()} of {POLICIES}")]
        off = _median([case_moments(tree, case).relative_bias for tree in shared])
        rows.append([label, *moved, off, _median([touched(tree, case) for tree in shared]), case.quoted])
    return table(SHIFT_COLUMNS, rows)


def bias_table() -> str:
    """Return bias, projection, variance and efficiency of every estimator, medians over random policies."""
    trees = [random_tree(GROUP, np.random.default_rng(seed)) for seed in range(DRAWN)]
    reference = [group_moments("rloo", tree, GROUP_SIZE) for tree in trees]
    rows = []
    for name in ESTIMATORS:
        moments = [group_moments(ALONE.get(name, name), tree, GROUP_SIZE) for tree in trees]
        pairs = list(zip(moments, reference, strict=True))
        bias, *others = moment_cells(pairs)
        if name in TARGETS:
            targets = [TARGETS[name](tree.objective) * tree.gradient for tree in trees]
            off = [np.linalg.norm(m.mean - t) / np.linalg.norm(t) for m, t in zip(moments, targets, strict=True)]
            bias += f" ({_median(off)})"
        crossing = float(np.median([float(measures.crossing(m.measured(r))) for m, r in pairs]))
        efficiencies = [_median([m.efficiency(prompts) for m in moments]) for prompts in (1, 1000)]
        rows.append([f"`{name}`", bias, *others, *efficiencies, "∞" if math.isinf(crossing) else f"{crossing:.0f}"])
    return table(BIAS_COLUMNS, rows)


def moment_cells(pairs: Sequence[tuple[GroupMoments, GroupMoments]]) -> list[str]:
    """Return the medians of bias, c, and of V and SF over those of `rloo`, from moments beside those of `rloo`."""
    alone = [[getattr(m, name) for m, _ in pairs] for name in ("relative_bias", "projection")]
    over = [[getattr(m, name) / getattr(r, name) for m, r in pairs] for name in ("variance", "sf")]
    return [_median(values) for values in alone + over]


def weight_table() -> str:
    """Return what each token weight makes of `rloo`, medians over random policies that are sure of most tokens."""
    trees = [random_tree(PEAKED, np.random.default_rng(seed)) for seed in range(POLICIES)]
    reference = [weighed_moments(tree, "none", GROUP_SIZE)[0] for tree in trees]
    rows = []
    for label, (name, options) in WEIGHT_CASES.items():
        weighed = [weighed_moments(tree, name, GROUP_SIZE, options) for tree in trees]
        pairs = [(m, r) for (m, _), r in zip(weighed, reference, strict=True)]
        efficiencies = [_median([m.efficiency(p) / r.efficiency(p) for m, r in pairs]) for p in (1, 1000)]
        rows.append([label, *moment_cells(pairs), *efficiencies, _median([share for _, share in weighed])])
    return table(WEIGHT_COLUMNS, rows)


def _median(x: Sequence[Any]) -> str:
    return number(float(np.median(x)))


def number(x: float) -> str:
    """Return three decimals, and a bare 0 for rounding."""
    return "0" if abs(x) < ROUNDING else f"{x:.3f}"


def spread(x: Float) -> str:
    """Return the median and the quartiles."""
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75])
    return number(middle) if number(low) == number(high) else f"{number(middle)} [{number(low)}, {number(high)}]"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
