"""What the page of the study says: The seven facts, enumerated."""

from collections.abc import Mapping

from otb_analysis.enumeration.fact_rows import (
    COMPARED,
    LARGE,
    SMALL,
)
from otb_analysis.enumeration.figures import SAMPLED
from otb_analysis.enumeration.tables import spread
from otb_analysis.figures.styles import GREY, estimator_style
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.study import Findings, Rows, distinct, markdown_table, select
from otb_analysis.study.claims import claims_table, claims_verdict, facts_table

from .facts import fifth, first, fourth, second, seventh, sixth, third
from .found import column, fact, mean_words, mistake_rates, with_corr

FACTS = {
    1: "Scores at different positions are orthogonal; the best constant per position is B*, and regret is exact",
    2: "`token_optimal` is B* without shared parameters; `otb` minimises another objective",
    3: "A baseline that includes its own rollout shrinks, so raw variance ranks wrongly",
    4: "Leave-one-out forms are unbiased; corr(W_T, R) decides whether energies help them",
    5: "V(h) is not variance-optimal",
    6: "An unclipped ratio leaves the mean alone, a clip does not",
    7: "“`otb` at N = 4 equals the mean at N = 32” holds in raw variance, not at equal progress",
}
HOW_TO_READ = """\
A claim *holds* where it holds on every policy that was enumerated, *does not* where it holds on none, else the share of
policies is given with its exact (Clopper–Pearson) 95 % interval. Policies are drawn at random, so a share or a median
is one over *such* policies (V = 3, T = 3 or 4, parameters of standard deviation 1), not over language models.
Figures are median [quartiles] over policies. On the derailment process (64 tokens, one mistake leads into a noisy
state) groups are sampled, all estimators on the same ones, with Student's 95 % interval over chunks of groups."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say which facts hold, and where."""
    claims = [claim for fact in (first, second, third, fourth, fifth, sixth, seventh) for claim in fact(tables)]
    body = "\n\n".join(
        [
            "## Fact by fact",
            facts_table(claims, FACTS),
            "## Claim by claim",
            claims_table(claims),
            "## Groups of four on random policies, relative to `rloo`",
            groups_table(tables["groups"]),
            "## The derailment process, groups relative to the variance of B*",
            derailment_table(tables),
            HOW_TO_READ,
        ]
    )
    return Findings(claims_verdict(claims, FACTS), body, {"corr.svg": figure(tables["groups"], tables["sizes"])})


def groups_table(groups: Rows) -> str:
    """Return variance, SF and efficiency of each estimator relative to `rloo`."""
    rows = []
    for setting in distinct(groups, "setting"):
        own = select(groups, setting=setting)
        for name in COMPARED:
            found = [spread(column(own, f"{what} {name}")) for what in ("v", "sf", "e1", "e1000")]
            rows.append([f"`{name}`, {setting}", *found])
    return markdown_table(["estimator", "variance", "SF", "efficiency, 1 prompt", "efficiency, 1,000 prompts"], rows)


def derailment_table(tables: Mapping[str, Rows]) -> str:
    """Return N·V and N·SF of each estimator at each rate of mistakes."""
    rates, rows = mistake_rates(tables), []
    for name in SAMPLED:
        for n in (SMALL, LARGE):
            found = [f"{mean_words(tables, m, n, name, 'nv')} / {mean_words(tables, m, n, name, 'nsf')}" for m in rates]
            rows.append([f"`{name}`, N = {n}", *found])
    heads = [f"J = {fact(tables, m, 'success'):.2f}, corr {fact(tables, m, 'corr'):+.2f}: N·V / N·SF" for m in rates]
    return markdown_table(["estimator", *heads], rows)


def figure(groups: Rows, sizes: Rows) -> str:
    """Draw the variance of `otb_loo` over `rloo`, and the two ratios of fact 7, against corr(W_T, R)."""
    left = [
        Curve(
            column(rows, "corr").tolist(),
            column(rows, "v otb_loo").tolist(),
            f"otb_loo, {name}",
            width=0,
            color=color,
        )
        for name, color in (("ragged", estimator_style("otb_loo").color), ("equal", GREY))
        for rows in [with_corr(select(groups, setting=name))]
    ]
    known = with_corr(sizes)
    right = [
        Curve(column(known, "corr").tolist(), column(known, what).tolist(), words, width=0, color=color)
        for what, words, color in (("variance", "raw variance", GREY), ("sf", "SF", estimator_style("rloo").color))
    ]
    panels = [
        Panel("otb_loo over rloo, N = 4", "variance, one point a policy", "corr(W_T, R)", left, ((1.0, "equal"),)),
        Panel("otb at N = 4 over the mean at N = 32", "one point a policy", "corr(W_T, R)", right, ((1.0, "equal"),)),
    ]
    return svg(panels)
