"""What the page of the study says: Baselines and variance."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.figures.styles import estimator_style
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.study import Findings, Rows, distinct, markdown_table, select, share
from otb_analysis.study.words import column_words, number_words, span_words
from otb_analysis.types import Label

from .regimes import regimes_table
from .study import FAMILY, HEAD, LESSON, REGIME_SIZE, UPDATES

SHOWN = ("rloo", "none", "value", "grpo", "sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "token_optimal")
HOW_TO_READ = """\
{prompts} prompts a policy, each with a pool of {pool} rollouts at temperature 1, cut into disjoint groups of N
({shuffles} shuffles); prompts are those that a separate pilot of {pilot} rollouts answered rightly sometimes, and
sometimes not. Qwen3-type models of {parameters:,} parameters.

- *Efficiency(P)*: share of an update of P prompts that points along ∇J, ⟨m,∇J⟩²/(‖∇J‖²·(‖m‖² + V/P)); ∇J is `rloo`'s
  gradient on *other* prompts. *Equivalents*: rollouts with which `rloo` would reach the same, for every 100 used.
- *SF* is variance at equal progress, V/c², c the projection on ∇J. *Raw variance* is shown beside it because a baseline
  that includes its own rollout shrinks: read c.
- Ratios to `rloo` are paired on the same rollouts; 95 % intervals are over prompts (jackknife). “≠” marks those that
  stand at a false-discovery rate of 5 % (Benjamini–Yekutieli) over all estimators of that policy and group size.
- Energies: `exact` norms of all parameters' scores, or the forward-only `proxy`. B* of `position_optimal` comes from
  the other half of the prompt's pool and is a ratio of noisy means, worst where tokens are nearly certain: what is
  listed is what it costs to estimate B*, not B* itself. `batch_mean`, `james_stein` and the like see batches of one
  group per prompt.
- `value` is a critic, a language model of its own that starts from the policy's weights, fitted to returns of
  {lessons} batches of {lesson} other rollouts; of the pools' returns it explains {explained}. `tvm` is `value` here:
  where all reward comes at the end, the mean over rollouts that share a prefix makes the same least squares.
- `opob` is `classic_optimal` on-policy, `trloo` is `rloo` and `otb_turn` is `otb` in one turn.
- Inner products are of count sketches with {buckets:,} buckets: they add a standard error of at most {noise:.1%} to a
  ratio of batch variances, which the intervals do not contain.
- Policies are not pooled: the two of `chain_sum` share some prompts. Where a rollout's energy goes with a low reward,
  corr(W_T, R) < 0, the energy-weighted mean reward is near 0, and so is the best baseline: leaving it out costs least
  there, and any estimate of it from {small} rollouts is noise (the rows of `none` under *Which prompts*)."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say which estimators are worth it, at which group size, on which prompts."""
    rows, policies = tables["estimators"], tables["policies"]
    found = {
        (p, n): _different(select(rows, policy=p, size=n), p)
        for p in distinct(rows, "policy")
        for n in distinct(rows, "size")
    }
    small, large = _shown_sizes(rows)
    body = "\n\n".join([
        "## Policies", policies_table(policies, tables["prompts"]),
        f"## Every estimator in groups of {small}, update of {HEAD} prompts",
        whole_table(select(rows, size=small), found),
        f"## Every estimator in groups of {large}, update of {HEAD} prompts",
        whole_table(select(rows, size=large), found),
        "## Efficiency over that of `rloo` at the same group size, by size of the update", updates_table(rows),
        f"## The same rollouts in groups of another size: efficiency at {HEAD * small:,} rollouts", budget_table(rows),
        f"## Which prompts: variance over that of `rloo` in groups of {REGIME_SIZE}", regimes_table(tables),
        how_to_read(policies, rows),
    ])  # fmt: skip
    return Findings(verdict(rows), body, {"sizes.svg": figure(rows)})


def _shown_sizes(rows: Rows) -> tuple[int, int]:
    sizes = sorted(distinct(rows, "size"))
    return (4 if 4 in sizes else sizes[0]), (16 if 16 in sizes else sizes[-1])


def _different(rows: Rows, policy: str) -> set[Label]:
    """Labels of a policy whose efficiency differs from that of `rloo`, false-discovery rate 5 % over all rows."""
    tested = [row for row in rows if row["p_value"] is not None]
    if not tested:
        return set()
    q = stats.false_discovery_control([row["p_value"] for row in tested], method="by")
    kept = [row for row, x in zip(tested, q, strict=True) if x <= 0.05 and row["policy"] == policy]
    return {(row["estimator"], row["source"]) for row in kept}


def verdict(rows: Rows) -> str:
    """Return the answer in one line: who differs from `rloo`, `otb` over no baseline, what raw variance says."""
    size, policies = _shown_sizes(rows)[0], distinct(rows, "policy")
    named = [row for row in rows if row["estimator"] in FAMILY and row["size"] == size]
    shown = [row for policy in policies for row in _rows_of(named, policy, _different(named, policy))]
    bare = "; ".join(
        f"with {words} "
        + ", ".join(
            f"{column_words(r, 'gain_bare')} on `{r['policy']}`" for r in select(named, estimator="otb", source=s)
        )
        for s, words in (("proxy", "the proxy, as published,"), ("exact", "exact norms"))
    )
    return (
        f"In updates of {HEAD} prompts with groups of {size}, efficiency is shown to be above that of `rloo` for "
        f"{_counts(shown, True)}, below it for {_counts(shown, False)} (of {len(policies)} policies; tested were "
        f"{', '.join(f'`{name}`' for name in FAMILY)}, with the proxy and with exact norms, false discovery rate 5 %). "
        f"Over no baseline at all `otb`'s efficiency is {bare}. {_raw_variance_words(rows)}"
    )


def _rows_of(rows: Rows, policy: str, labels: set[Label]) -> Rows:
    return [row for row in select(rows, policy=policy) if (row["estimator"], row["source"]) in labels]


def _counts(shown: Rows, above: bool) -> str:
    """On how many policies each estimator, by its energies, is shown to be above, or below."""
    own = [_name(row["estimator"], row["source"]) for row in shown if (row[f"gain{HEAD}"] > 1) == above]
    return ", ".join(f"{name} on {own.count(name)}" for name in dict.fromkeys(own)) or "none"


def _raw_variance_words(rows: Rows) -> str:
    """Say how often raw variance is shown to be lower where SF, variance at equal progress, is not."""
    compared = [row for row in rows if row["variance_high"] is not None and row["sf_high"] is not None]
    lower = [row for row in compared if row["variance_high"] < 1]
    return (
        f"Raw variance is shown below that of `rloo` in {len(lower)} of {len(compared)} rows (all estimators, N, "
        f"policies, each at 95 %), variance at equal progress in {sum(row['sf_high'] < 1 for row in lower)} of those, "
        f"and above it in {sum(row['sf_low'] > 1 for row in lower)}."
    )


def policies_table(policies: Rows, prompts: Rows) -> str:
    """Return what the pools are."""
    rows = []
    for row in policies:
        own = select(prompts, policy=row["policy"])
        ranges = [
            span_words([x[name] for x in own if x[name] is not None])
            for name in ("success", "corr", "length", "spread")
        ]
        rows.append([f"`{row['policy']}`", f"{row['tokens']:,}", *ranges, f"{row['corr']:+.2f}"])
    heads = ["policy", "tokens", "success", "corr(W_T, R)", "length", "length sd/mean", "corr(W_T, R), pooled"]
    return markdown_table(heads, rows)


def whole_table(rows: Rows, found: Mapping[tuple[str, int], set[Label]]) -> str:
    """Return every estimator of every policy, most efficient first."""
    out = []
    for policy in distinct(rows, "policy"):
        own = sorted(select(rows, policy=policy), key=lambda r: -(r[f"efficiency{HEAD}"] or 0))
        for row in own:
            differs = " ≠" if (row["estimator"], row["source"]) in found[policy, row["size"]] else ""
            out.append([
                f"`{policy}`: {_name(row['estimator'], row['source'])}", column_words(row, "efficiency"),
                column_words(row, f"gain{HEAD}") + differs, number_words(row["equivalents"], ".0f"),
                column_words(row, "projection"),
                column_words(row, "sf"), column_words(row, "variance"),
            ])  # fmt: skip
    heads = ["estimator", "efficiency", "× `rloo`", "equivalents of 100", "c", "SF × `rloo`", "raw variance × `rloo`"]
    return markdown_table(heads, out)


def _named(rows: Rows, estimator: str) -> Mapping[str, Any]:
    """The row of an estimator, with exact energies where it takes any."""
    return next(row for row in rows if row["estimator"] == estimator and row["source"] != "proxy")


def updates_table(rows: Rows) -> str:
    """Return the efficiency of the chosen estimators over that of `rloo` at each size of update."""
    out = []
    for policy in distinct(rows, "policy"):
        for size in _shown_sizes(rows):
            for row in select(rows, policy=policy, size=size):
                if row["estimator"] in SHOWN and row["source"] != "proxy" and row["estimator"] != "rloo":
                    cells = [column_words(row, f"gain{p}") for p in UPDATES]
                    out.append([f"`{policy}`, N = {size}: {_name(row['estimator'], row['source'])}", *cells])
    return markdown_table(["estimator", *(f"{p:,} prompts" for p in UPDATES)], out)


def budget_table(rows: Rows) -> str:
    """Return the efficiency at one number of rollouts, split into more or fewer groups."""
    small = _shown_sizes(rows)[0]
    budget, out = HEAD * small, []
    for policy in distinct(rows, "policy"):
        for name in ("rloo", "otb", "otb_loo", "sequence_optimal"):
            cells = []
            for size in sorted(distinct(rows, "size")):
                row = _named(select(rows, policy=policy, size=size), name)
                cells.append(number_words(_efficiency_at(row, budget / size)))
            out.append([f"`{policy}`: `{name}`", *cells])
    return markdown_table(["estimator", *(f"N = {n}" for n in sorted(distinct(rows, "size")))], out)


def _efficiency_at(row: Mapping[str, Any], prompts: float) -> float | None:
    """Efficiency at any P from those at two: 1/e is linear in 1/P."""
    low, high = UPDATES[0], UPDATES[-1]
    if not row[f"efficiency{low}"] or not row[f"efficiency{high}"]:
        return None
    a, b = 1 / row[f"efficiency{low}"], 1 / row[f"efficiency{high}"]
    slope = (a - b) / (1 / low - 1 / high)
    return 1 / (b + slope * (1 / prompts - 1 / high))


def how_to_read(policies: Rows, rows: Rows) -> str:
    """Say what the numbers are."""
    first = policies[0]
    return HOW_TO_READ.format(
        prompts=first["prompts"], pool=first["pool"], shuffles=first["shuffles"], pilot=first["pilot"],
        parameters=first["parameters"], buckets=first["buckets"],
        noise=max(row["sketch_noise"] for row in rows if row["sketch_noise"] is not None),
        small=REGIME_SIZE, lessons=first["lessons"], lesson=LESSON.prompts * LESSON.group_size,
        explained=", ".join(f"{_percent(row['explained'])} (`{row['policy']}`)" for row in policies),
    )  # fmt: skip


def _percent(value: float | None) -> str:
    return "–" if value is None else share(value)


def figure(rows: Rows) -> str:
    """Draw efficiency, and raw variance and SF over `rloo`'s, against the group size, for each policy."""
    panels = []
    for policy in distinct(rows, "policy"):
        own = [r for r in select(rows, policy=policy) if r["source"] != "proxy" and r["estimator"] in SHOWN]
        for name, note in (
            (f"efficiency{HEAD}", f"efficiency, {HEAD} prompts"),
            ("sf", "SF over rloo's"),
            ("variance", "raw variance over rloo's"),
        ):
            curves = [_curve(e, [r for r in own if r["estimator"] == e], name) for e in SHOWN]
            if any(c.x for c in curves):
                panels.append(Panel(policy, note, "log₂ of the group size N", [c for c in curves if c.x]))
    return svg(panels, columns=3)


def _curve(name: str, rows: Rows, column: str) -> Curve:
    known = [row for row in rows if row[column] is not None]
    style = estimator_style(name)
    x = [float(np.log2(row["size"])) for row in known]
    return Curve(x, [row[column] for row in known], name, color=style.color, dashed=style.dash != "solid")


def _name(estimator: str, source: str) -> str:
    return f"`{estimator}`" + (f" ({source})" if source != "none" else "")
