"""What the page of the study says: Proxy fidelity."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, ORANGE
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.study import Findings, Rows, distinct, markdown_table, select, share
from otb_analysis.study.words import column_words, number_words, span_words

from .study import CALIBRATION_SHARE, DIRECTIONS, ESTIMATORS, SOURCES, UPDATES

STAGE_WORDS = {"init": "random init", "warm": "supervised start", "rl": "during RL"}
COLORS: dict[str, str] = dict(zip(SOURCES, (ORANGE, AMBER, GREEN, BLUE), strict=True))
PILOTED = " (except at random init, prompts of which of {} other rollouts some were right and some wrong)"
HOW_TO_READ = """\
Task: `chain_sum`; {prompts} prompts with {group} rollouts each, other ones at every stage and temperature{pilot}.
Rollouts are sampled and scored at that temperature. *During RL* is after {steps} steps of `rloo` at temperature 1.
Exact norms are over all parameters of the model (`token_score_norms`).

- `proxy`: ‖e_y − π‖², from the forward pass. `calibrated`: c·proxy^b, fitted on exact norms of {calibration:.0%} of the
  tokens. `sketch`: the layers above the last attention exactly, those below by {directions} random directions; what
  comes out below 0 counts as 0. `lm_head`: the exact norm of the output layer's own use, ‖e_y − π‖²·‖h‖²/τ².
- *Within*: correlation of deviations from the mean of each (prompt, position), over the rollouts alive there, which is
  all that a baseline sees; *log*: of logarithms, over tokens at which both energies are positive; *linear*: of the
  energies themselves, which is what baselines weigh by and a few large ones decide; *pooled*: of energies, over all
  tokens at once. The last two come without intervals here ([agreement.csv](results/agreement.csv) has them). W_t is
  the running sum that `otb` weighs by, w_t one token's energy. The 95 % intervals are over prompts (jackknife on
  Fisher's scale).
- *Efficiency* is the share of an update that points along ∇J, each prompt judged by other prompts' `rloo` gradient,
  gradients exact. Ratios are paired on the same rollouts, with jackknife intervals over prompts; those at all
  temperatures are pooled ({clusters} prompts). Policies without a row had too few right answers for ‖∇J‖² to come out
  positive; a ratio without an interval had it so in part only. *Gain lost* is the share of what exact norms gain over
  `rloo` that the proxy does not; without a gain there is none to lose. Every interval stands for itself: of forty, two
  miss by chance. Each model is one seed. All sources at every size of update are in
  [efficiency.csv](results/efficiency.csv)."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say how well each source follows exact norms, and what it costs as a weight."""
    agreement, efficiency, policies = tables["agreement"], tables["efficiency"], tables["policies"]
    middle = UPDATES[1]
    body = "\n\n".join([
        "## Policies",
        policies_table(policies),
        "## Correlation with exact W_t within (prompt, t), temperature 1",
        agreement_table(agreement, "W"),
        "## Correlation with exact w_t within (prompt, t), temperature 1",
        agreement_table(agreement, "w"),
        "## By temperature: logarithms of the proxy's and exact W_t within (prompt, t)",
        temperature_table(agreement),
        f"## Efficiency with each source over that with exact norms, update of {middle} prompts, all temperatures",
        efficiency_table(efficiency, middle),
        "## Efficiency over that of `rloo`, by size of the update, all temperatures",
        updates_table(efficiency),
        how_to_read(policies, efficiency),
    ])  # fmt: skip
    return Findings(verdict(agreement, efficiency, middle), body, {"within.svg": figure(agreement, policies)})


def verdict(agreement: Rows, efficiency: Rows, update: int) -> str:
    """Return the answer in one line: the efficiency that each source costs, and how well it follows exact norms."""
    kept = [row for row in _pooled(efficiency, update, "otb") if row["to_rloo"] is not None]
    proxy = select(kept, source="proxy")
    exact = [row for row in select(kept, source="exact") if row["to_rloo_low"] is not None]
    others = "; ".join(_cost_words(source, select(kept, source=source)) for source in SOURCES if source != "proxy")
    stages = "; ".join(f"{STAGE_WORDS[stage]} {_followed(agreement, stage)}" for stage in distinct(agreement, "stage"))
    return (
        f"{_answer(proxy, update)} Other sources: {others}. `otb` with exact norms itself has "
        f"{_span(exact, 'to_rloo')} of `rloo`'s efficiency ({_shown(exact, 'to_rloo')}). "
        f"Correlation of W_t with the exact one within (prompt, t), linear (of logarithms), temperature 1: {stages}."
    )


def _answer(rows: Rows, update: int) -> str:
    """Say whether the proxy is shown to cost efficiency, and what loss is excluded."""
    tested = [row for row in rows if row["to_exact_low"] is not None]
    if not tested:
        return "Whether the proxy costs `otb` efficiency cannot be told: ‖∇J‖² did not come out positive."
    lower = sum(row["to_exact_high"] < 1 for row in tested)
    shown = f"is shown to cost `otb` efficiency on {lower} of {len(tested)} policies" if lower else (
        f"is not shown to cost `otb` efficiency on any of {len(tested)} policies"
    )  # fmt: skip
    bounds = sorted(1 - row["to_exact_low"] for row in tested)
    return (
        f"The proxy {shown}: in updates of {update} prompts it keeps {_span(tested, 'to_exact')} of what exact norms "
        f"give, and the intervals exclude a loss beyond {share(bounds[0])} on the best measured policy, beyond "
        f"{share(float(np.median(bounds)))} on the median one."
    )


def _followed(agreement: Rows, stage: str) -> str:
    rows = select(agreement, of="W", stage=stage, temperature=1.0)
    return ", ".join(
        f"`{s}` {span_words(_known(own, 'within'))} ({span_words(_known(own, 'log_within'))})"
        for s in ("proxy", "sketch")
        for own in [select(rows, source=s)]
    )


def _cost_words(source: str, rows: Rows) -> str:
    tested = [row for row in rows if row["to_exact_low"] is not None]
    return f"`{source}` {_span(tested, 'to_exact')} ({_shown(rows, 'to_exact')})"


def _span(rows: Rows, name: str) -> str:
    return span_words(_known(rows, name))


def _shown(rows: Rows, name: str) -> str:
    """On how many policies with an interval a ratio is shown to lie below or above 1."""
    tested = [row for row in rows if row[f"{name}_low"] is not None]
    lower = sum(row[f"{name}_high"] < 1 for row in tested)
    higher = sum(row[f"{name}_low"] > 1 for row in tested)
    if lower or higher:
        return f"shown lower on {lower}, higher on {higher} of {len(tested)}"
    return f"0 of {len(tested)} shown different"


def policies_table(policies: Rows) -> str:
    """Return success, tokens and corr(W_T, R) of each policy at each temperature."""
    rows = [
        [
            f"`{row['model']}`, {STAGE_WORDS[row['stage']]}", f"{row['parameters']:,}", f"{row['temperature']:.1f}",
            f"{100 * row['success']:.0f} %", f"{row['tokens']:,}", number_words(row["corr"], "+.2f"),
        ]
        for row in policies
    ]  # fmt: skip
    return markdown_table(["policy", "parameters", "temperature", "right", "tokens", "corr(W_T, R)"], rows)


def agreement_table(agreement: Rows, of: str) -> str:
    """Return correlations: of logarithms within (prompt, t), of energies there, and of energies pooled."""
    rows = []
    for row in select(agreement, of=of, temperature=1.0, source=SOURCES[0]):
        name = f"`{row['model']}`, {STAGE_WORDS[row['stage']]}"
        every = [
            select(agreement, of=of, temperature=1.0, source=s, model=row["model"], stage=row["stage"])[0]
            for s in SOURCES
        ]
        rows.append([name, *(_three(one) for one in every)])
    return markdown_table(["policy", *(f"`{s}`: log \\| linear \\| pooled" for s in SOURCES)], rows)


def _three(row: Mapping[str, Any]) -> str:
    return f"{column_words(row, 'log_within')} \\| {number_words(row['within'])} \\| {number_words(row['pooled'])}"


def temperature_table(agreement: Rows) -> str:
    """Return the proxy's correlation of logarithms within (prompt, t) at each temperature."""
    own = [row for row in select(agreement, of="W", source="proxy") if row["stage"] != "init"]
    temperatures, rows = sorted(distinct(own, "temperature")), []
    for model in distinct(own, "model"):
        for stage in distinct(own, "stage"):
            found = [_one(own, model=model, stage=stage, temperature=t) for t in temperatures]
            rows.append([f"`{model}`, {STAGE_WORDS[stage]}", *(column_words(row, "log_within") for row in found)])
    return markdown_table(["policy", *(f"temperature {t:.1f}" for t in temperatures)], rows)


def efficiency_table(efficiency: Rows, update: int) -> str:
    """Return what each source keeps of the efficiency that exact norms give."""
    rows = []
    for name in ESTIMATORS:
        kept = _pooled(efficiency, update, name)
        for row in select(kept, source="exact"):
            if row["to_rloo"] is None:
                continue
            found = [_one(kept, model=row["model"], stage=row["stage"], source=s) for s in SOURCES]
            words = f"`{name}`, `{row['model']}`, {STAGE_WORDS[row['stage']]}"
            lost = column_words(found[SOURCES.index("proxy")], "lost")
            kept_words = (column_words(one, "to_exact", ".3f") for one in found)
            rows.append([words, *kept_words, column_words(row, "to_rloo"), lost])
    heads = ["estimator, policy", *(f"`{s}`" for s in SOURCES), "exact over `rloo`", "gain lost by `proxy`"]
    return markdown_table(heads, rows)


def updates_table(efficiency: Rows) -> str:
    """Return the efficiency of `otb` over that of `rloo` with each source at each size of update."""
    rows = []
    for source in ("exact", "proxy"):
        for first in select(_pooled(efficiency, UPDATES[0], "otb"), source=source):
            if first["to_rloo"] is None:
                continue
            found = [
                _one(_pooled(efficiency, p, "otb"), model=first["model"], stage=first["stage"], source=source)
                for p in UPDATES
            ]
            words = f"`{source}`, `{first['model']}`, {STAGE_WORDS[first['stage']]}"
            rows.append([words, *(column_words(row, "to_rloo") for row in found), column_words(first, "sf_to_rloo")])
    return markdown_table(["source, policy", *(f"{p} prompts" for p in UPDATES), "SF"], rows)


def how_to_read(policies: Rows, efficiency: Rows) -> str:
    """Say what the numbers are."""
    return HOW_TO_READ.format(
        prompts=policies[0]["prompts"], group=policies[0]["group_size"], calibration=CALIBRATION_SHARE,
        directions=DIRECTIONS, steps=policies[0]["rl_steps"],
        pilot=PILOTED.format(pilot) if (pilot := max(row["pilot"] for row in policies)) else "",
        clusters=max((row["prompts"] for row in efficiency), default=0),
    )  # fmt: skip


def figure(agreement: Rows, policies: Rows) -> str:
    """Draw the correlation of log W_t within (prompt, t) at temperature 1 against Qwen3-type sizes, by stage."""
    size = {row["model"]: row["parameters"] / 1000 for row in policies}
    panels = []
    for stage in distinct(agreement, "stage"):
        rows = sorted(select(agreement, of="W", stage=stage, temperature=1.0), key=lambda row: size[row["model"]])
        curves = [
            _curve(source, [row for row in rows if row["source"] == source and row["model"].startswith("qwen3")], size)
            for source in SOURCES
        ]
        note = "correlation of log W_t with the exact one within (prompt, t)"
        panels.append(Panel(STAGE_WORDS[stage], note, "thousand parameters, Qwen3 type", curves))
    return svg(panels, columns=3)


def _curve(source: str, rows: Rows, size: Mapping[str, float]) -> Curve:
    low, high = ([np.nan if (x := row[f"log_within_{end}"]) is None else x for row in rows] for end in ("low", "high"))
    heights = [np.nan if row["log_within"] is None else row["log_within"] for row in rows]
    return Curve([size[row["model"]] for row in rows], heights, source, low, high, COLORS[source])


def _pooled(efficiency: Rows, update: int, name: str) -> Rows:
    """The rows of an estimator pooled over temperatures, or at the only one there is."""
    own = select(efficiency, update=update, estimator=name)
    whole = {(row["model"], row["stage"]) for row in own if row["temperature"] is None}
    return [r for r in own if r["temperature"] is None or (r["model"], r["stage"]) not in whole]


def _one(rows: Rows, **values: Any) -> Mapping[str, Any]:
    found = select(rows, **values)
    return found[0] if found else {}


def _known(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]
