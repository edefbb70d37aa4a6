"""What stands in for exact score norms, at which price: correlations where they matter, and efficiency as weights.

Each cell is one model at random init, after its supervised start, and after a few dozen steps of RL.
Energies are scaled within (prompt, position) by every baseline, so correlations are given there as well as pooled.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.arrays import policy_position
from otb_analysis.config import (
    CheckpointConfig,
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.energies import calibrate, lm_head_energy, realized_energy
from otb_analysis.estimators import estimate
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, ORANGE
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.gradients import group_gradient_gram, sketch_score_norms, token_score_norms
from otb_analysis.statistics import (
    Interval,
    fidelity,
    inclusion_probabilities,
    paired_ratios,
    pooled_statistics,
    position_cells,
    realized_fidelity,
    systematic_sample,
    weight_statistics,
)
from otb_analysis.study import Cell, Findings, Rows, Study, Tables, distinct, markdown_table, select
from otb_analysis.study.agreement import correlation
from otb_analysis.study.policies import Policy, Written, fresh_policy, trained, warm_start, write
from otb_analysis.study.words import column_words, interval_columns, number_words, rounded, span_words
from otb_analysis.tasks.asking import draw_prompts
from otb_analysis.training.progress import Bar
from otb_analysis.training.resume import plain_config
from otb_analysis.types import Float, Gram, Int, Label

MODELS = {
    "qwen3-s": ("qwen3", SmallModelConfig(layers=2, width=48, feed_forward=120)),
    "qwen3-m": ("qwen3", SmallModelConfig(layers=2, width=80, feed_forward=200)),
    "qwen3-l": ("qwen3", SmallModelConfig(layers=3, width=96, feed_forward=240)),
    "gpt2-m": ("gpt2", SmallModelConfig(layers=2, width=80, feed_forward=320)),
}
TEMPERATURES = (0.7, 1.0, 1.3)
PROMPTS, GROUP_SIZE = 16, 8
RL_STEPS, RL_RATE = 24, 5e-4
DIRECTIONS = 32
CALIBRATION_SHARE = 0.1
"""Tokens on which the calibrated proxy is fitted, drawn in proportion to the proxy."""
SOURCES = ("proxy", "calibrated", "sketch", "lm_head")
ESTIMATORS = ("otb", "otb_loo")
UPDATES = (8, 32, 256)
"""Prompts of the update that efficiency is stated for; the middle one heads the page."""
STAGES = ("init", "warm", "rl")
STAGE_WORDS = {"init": "random init", "warm": "supervised start", "rl": "during RL"}
FIRST_PROMPT = 30_000_000
"""Far from the prompts of training and of the supervised start."""

QUICK_MODELS = {
    "qwen3-s": ("qwen3", SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=64)),
    "gpt2-s": ("gpt2", SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=64)),
}
QUICK_PROMPTS = 16
QUICK_START = WarmStartConfig(success_low=0.02, success_high=1.0, check_prompts=64)

COLORS: dict[str, str] = dict(zip(SOURCES, (ORANGE, AMBER, GREEN, BLUE), strict=True))

HOW_TO_READ = """\
Task: `chain_sum`; {prompts} prompts with {group} rollouts each, other ones at every stage and temperature; rollouts are
sampled and scored at that temperature. *During RL* is after {steps} steps of `rloo` at temperature 1. Exact norms are
over all parameters of the model (`token_score_norms`).

- `proxy`: ‖e_y − π‖², from the forward pass. `calibrated`: c·proxy^b, fitted on exact norms of {calibration:.0%} of the
  tokens. `sketch`: the layers above the last attention exactly, those below by {directions} random directions; what
  comes out below 0 counts as 0. `lm_head`: the exact norm of the output layer's own use, ‖e_y − π‖²·‖h‖²/τ².
- *Within*: correlation of deviations from the mean of each (prompt, position), over the rollouts alive there, which is
  all that a baseline sees; *log*: of logarithms, over tokens at which both energies are positive; *linear*: of the
  energies themselves, which a few large ones decide, so that it comes without an interval here
  ([agreement.csv](results/agreement.csv) has it, and the pooled correlations). W_t is the running sum that `otb` weighs
  by, w_t one token's energy. The 95 % intervals are over prompts (jackknife on Fisher's scale).
- *Efficiency* is the share of an update that points along ∇J, each prompt judged by other prompts' `rloo` gradient,
  gradients exact. Ratios are paired on the same rollouts, with jackknife intervals over prompts; those at all
  temperatures are pooled ({clusters} prompts). At random init no answer is right: there is no gradient to compare."""


def config_of(name: str, quick: bool) -> TrainConfig:
    """Return the configuration of a model: sizes, supervised start, and the few dozen steps of RL."""
    return TrainConfig(
        small_model=(QUICK_MODELS if quick else MODELS)[name][1],
        warm_start=QUICK_START if quick else WarmStartConfig(),
        sample=SampleConfig(prompts=8 if quick else 16, group_size=GROUP_SIZE),
        estimator=EstimatorConfig(name="rloo"),
        optimize=OptimizeConfig(steps=2 if quick else RL_STEPS, learning_rate=RL_RATE),
        measure=MeasureConfig(exact=Schedule(every=0)),
        evaluate=EvaluateConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )


def cells(quick: bool) -> list[Cell]:
    """Return one cell per model."""
    constants = {"temperatures": [1.0] if quick else list(TEMPERATURES), "directions": DIRECTIONS}
    sizes = {"prompts": QUICK_PROMPTS if quick else PROMPTS, "group_size": GROUP_SIZE, "share": CALIBRATION_SHARE}
    steps = {"rl_steps": 2 if quick else RL_STEPS, "rl_rate": RL_RATE, "updates": list(UPDATES)}
    return [
        Cell(
            name,
            {"architecture": kind, "quick": quick, "config": plain_config(config_of(name, quick))}
            | constants
            | sizes
            | steps,
        )
        for name, (kind, _) in (QUICK_MODELS if quick else MODELS).items()
    ]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Make the three stages of a model and measure each of them."""
    torch.set_num_threads(1)
    config = config_of(cell.name, bool(cell.settings["quick"]))
    policy = fresh_policy(config, str(cell.settings["architecture"]))
    tables: dict[str, list[dict[str, Any]]] = {"policies": [], "agreement": [], "efficiency": []}
    _measure_stage(cell, "init", policy, tables, bar)
    warm_start(policy, config, bar)
    _measure_stage(cell, "warm", policy, tables, bar)
    _measure_stage(cell, "rl", trained(policy, config, work, bar), tables, bar)
    return tables


def _measure_stage(cell: Cell, stage: str, policy: Policy, tables: dict[str, list[dict[str, Any]]], bar: Bar) -> None:
    temperatures = [1.0] if stage == "init" else _numbers(cell, "temperatures")
    prompts, grams = int(str(cell.settings["prompts"])), []
    for k, temperature in enumerate(temperatures):
        key = {"model": cell.name, "stage": stage, "temperature": temperature}
        bar(k, len(temperatures), f"{cell.name}: {stage} at temperature {temperature}")
        sample = SampleConfig(prompts=prompts, group_size=GROUP_SIZE, temperature=temperature)
        first = FIRST_PROMPT + 10_000 * (STAGES.index(stage) * 10 + k)
        written = write(policy, draw_prompts(policy.task, "train", first, prompts), sample, seed=k)
        energies = energies_of(policy, written, k)
        facts = facts_of(policy, written, energies) | {"rl_steps": cell.settings["rl_steps"]}
        tables["policies"].append(key | facts)
        tables["agreement"] += [key | row for row in agreement_rows(written, energies)]
        if np.ptp(written.table.rewards.total) > 0:
            grams.append(gram_of(policy, written, energies))
            tables["efficiency"] += [key | row for row in efficiency_rows(grams[-1:])]
    if len(grams) > 1:
        pooled = {"model": cell.name, "stage": stage, "temperature": None}
        tables["efficiency"] += [pooled | row for row in efficiency_rows(grams)]


def energies_of(policy: Policy, written: Written, seed: int) -> dict[str, Float]:
    """Return every source's token energies [N, T], the exact ones first."""
    (first, back), stats = written.distinct(), written.table.stats
    args = (policy.model, *(x[first] for x in written.batch))
    exact, sketch = (
        written.by_token(measured.norm_sq[back])
        for measured in (
            token_score_norms(*args, temperature=written.temperature),
            sketch_score_norms(*args, temperature=written.temperature, directions=DIRECTIONS, seed=seed),
        )
    )
    hidden = 0.0 if stats.hidden_norm_sq is None else stats.hidden_norm_sq
    proxy, hidden = (np.where(written.table.mask, x, 0.0) for x in (stats.energy, hidden))
    return {
        "exact": exact,
        "proxy": proxy,
        "calibrated": calibrated(exact, proxy, written.table.mask, seed),
        "sketch": np.maximum(sketch, 0.0),
        "lm_head": lm_head_energy(proxy, hidden, written.temperature),
    }


def calibrated(exact: Float, proxy: Float, mask: np.ndarray, seed: int) -> Float:
    """Return the proxy calibrated on drawn tokens, as the level `sampled` does it."""
    prob = np.full(mask.shape, np.nan)
    prob[mask] = inclusion_probabilities(proxy[mask], round(CALIBRATION_SHARE * int(mask.sum())))
    drawn = np.zeros(mask.shape, bool)
    drawn[mask] = systematic_sample(prob[mask], seed)
    return calibrate(np.where(drawn, exact, np.nan), proxy, prob).predict(proxy)


def facts_of(policy: Policy, written: Written, energies: Mapping[str, Float]) -> dict[str, Any]:
    """Return what was written: success, tokens, and corr(W_T, R) within prompts."""
    table = written.table
    found = weight_statistics(energies["exact"], table.mask, table.rewards.total, table.group)
    return {
        "parameters": policy.model.num_parameters(),
        "success": float(table.rewards.total.mean()),
        "tokens": int(table.mask.sum()),
        "prompts": len(written.rollouts.prompts),
        "group_size": len(table.group) // len(written.rollouts.prompts),
        "corr": found.pooled_total_reward_corr,
    }


def agreement_rows(written: Written, energies: Mapping[str, Float]) -> list[dict[str, Any]]:
    """Return correlations of each source with exact norms, of w_t and of W_t."""
    table, rows = written.table, []
    cells = position_cells(table.group, table.mask.shape[1])[:, :1] + policy_position(table.mask)
    for source in SOURCES:
        for of in ("w", "W"):
            x, y = (
                (energies[name] if of == "w" else realized_energy(energies[name], table.mask))[table.mask]
                for name in (source, "exact")
            )
            pair = energies[source], energies["exact"], table.mask
            agree = fidelity(*pair, cells) if of == "w" else realized_fidelity(*pair, table.group)
            prompt = np.broadcast_to(table.group[:, None], table.mask.shape)[table.mask]
            rows.append({
                "source": source,
                "of": of,
                **interval_columns("pooled", correlation(x, y, prompt)),
                **interval_columns("within", correlation(x, y, prompt, cells[table.mask])),
                **interval_columns("log_within", log_correlation(x, y, prompt, cells[table.mask])),
                "positive": float(np.mean((x > 0) & (y > 0))),
                "spearman": agree.pooled.spearman,
                "spearman_within": agree.within.spearman if agree.within else None,
            })  # fmt: skip
    return rows


def log_correlation(x: Float, y: Float, prompt: Int, cell: Int) -> Interval | None:
    """Return the correlation of log x and log y within cells, over tokens at which both are positive."""
    both = (x > 0) & (y > 0)
    return correlation(np.log(x[both]), np.log(y[both]), prompt[both], cell[both])


def gram_of(policy: Policy, written: Written, energies: Mapping[str, Float]) -> Gram:
    """Return inner products of the prompts' mean gradients under `rloo` and both forms of `otb` with every source."""
    advantages: dict[Label, Float] = {("rloo", "none"): estimate("rloo", written.table.inputs(None)).advantage}
    for name in ESTIMATORS:
        for source, energy in energies.items():
            advantages[name, source] = estimate(name, written.table.inputs(energy)).advantage
    ids, mask, attention = written.batch
    weights = written.by_column(np.stack(list(advantages.values())) / GROUP_SIZE)
    group, temperature = written.rollouts.group, written.temperature
    inner = group_gradient_gram(policy.model, ids, mask, weights, group, attention, temperature=temperature)
    names = tuple(f"{temperature}: {prompt.id}" for prompt in written.rollouts.prompts)
    return Gram(inner, tuple(advantages), len(group), prompt=names)


def efficiency_rows(grams: Sequence[Gram]) -> list[dict[str, Any]]:
    """Return efficiency of every source at each size of update, against exact norms and against `rloo`."""
    rows = []
    for prompts in UPDATES:
        against = {
            name: {_label(r): r for r in paired_ratios(grams, (name, "exact"), n_prompts=prompts)}
            for name in ESTIMATORS
        }
        plain = {_label(r): r for r in paired_ratios(grams, n_prompts=prompts)}
        for row in pooled_statistics(grams, n_prompts=prompts):
            label = (row.estimator, row.energy_source)
            exact = against.get(row.estimator, {}).get(label)
            rows.append({
                "update": prompts,
                "estimator": row.estimator,
                "source": row.energy_source,
                "prompts": row.n_clusters,
                "efficiency": row.efficiency,
                "rollouts": row.n_rollouts,
                "equivalents": rounded(row.rollout_equivalents),
                "projection": row.projection,
                **interval_columns("to_exact", exact.efficiency if exact else None),
                **interval_columns("to_rloo", plain[label].efficiency if label in plain else None),
                **interval_columns("sf_to_rloo", plain[label].sf if label in plain else None),
                **interval_columns("variance_to_rloo", plain[label].variance if label in plain else None),
            })  # fmt: skip
    return rows


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
    """Return the answer in one line: correlations of each source, and the efficiency it costs."""
    rows = select(agreement, of="W")
    followed = "; ".join(
        f"`{source}` {span_words(_known(select(rows, source=source), 'log_within'))}" for source in SOURCES
    )
    kept = _pooled(efficiency, update, "otb")
    costs = "; ".join(_cost_words(source, select(kept, source=source)) for source in SOURCES)
    return (
        f"Within (prompt, t) the correlation of log W_t with its exact value is {followed}. As weights of `otb` in "
        f"updates of {update} prompts, efficiency over that with exact norms is {costs}; {_exact_words(kept)}."
    )


def _cost_words(source: str, rows: Rows) -> str:
    found = _known(rows, "to_exact")
    worse = sum(row["to_exact_high"] is not None and row["to_exact_high"] < 1 for row in rows)
    better = sum(row["to_exact_low"] is not None and row["to_exact_low"] > 1 for row in rows)
    return f"`{source}` {span_words(found)} (lower on {worse}, higher on {better} of {len(rows)})"


def _exact_words(rows: Rows) -> str:
    own = select(rows, source="exact")
    better = sum(row["to_rloo_low"] is not None and row["to_rloo_low"] > 1 for row in own)
    worse = sum(row["to_rloo_high"] is not None and row["to_rloo_high"] < 1 for row in own)
    return (
        f"`otb` with exact norms itself is {span_words(_known(own, 'to_rloo'))} of `rloo`'s "
        f"(more efficient on {better}, less on {worse} of {len(own)})"
    )


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
    """Return correlations within (prompt, t): of logarithms, and of energies behind a bar."""
    rows = []
    for row in select(agreement, of=of, temperature=1.0, source=SOURCES[0]):
        name = f"`{row['model']}`, {STAGE_WORDS[row['stage']]}"
        every = [
            select(agreement, of=of, temperature=1.0, source=s, model=row["model"], stage=row["stage"])[0]
            for s in SOURCES
        ]
        rows.append([name, *(f"{column_words(one, 'log_within')} \\| {number_words(one['within'])}" for one in every)])
    return markdown_table(["policy", *(f"`{s}`: log \\| linear" for s in SOURCES)], rows)


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
            found = [_one(kept, model=row["model"], stage=row["stage"], source=s) for s in SOURCES]
            words = f"`{name}`, `{row['model']}`, {STAGE_WORDS[row['stage']]}"
            rows.append([words, *(column_words(one, "to_exact", ".3f") for one in found), column_words(row, "to_rloo")])
    return markdown_table(["estimator, policy", *(f"`{s}`" for s in SOURCES), "exact over `rloo`"], rows)


def updates_table(efficiency: Rows) -> str:
    """Return the efficiency of `otb` over that of `rloo` with each source at each size of update."""
    rows = []
    for source in ("exact", *SOURCES):
        for first in select(_pooled(efficiency, UPDATES[0], "otb"), source=source):
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


def _label(row: Any) -> Label:
    return row.estimator, row.energy_source


def _numbers(cell: Cell, name: str) -> list[float]:
    found = cell.settings[name]
    return [float(x) for x in found] if isinstance(found, list) else []


def _known(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]


STUDY = Study(
    title="Proxy fidelity",
    question="How well do the proxy, the calibrated proxy, the hybrid sketch and the last layer's norm stand in for "
    "exact score norms, and what does each cost `otb`?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
    report=report,
)
