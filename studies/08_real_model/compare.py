"""What a pool says: agreement of energies, every estimator's variance and efficiency, and regression across prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from otb_analysis.estimators import estimate, options_from_dict
from otb_analysis.estimators.spec import FEATURES, RegressionOptions
from otb_analysis.statistics import (
    Partition,
    Update,
    deleted_moments,
    gradient_noise_scale,
    jackknife_interval,
    paired_ratios,
    pooled_statistics,
    sketch_noise,
    update_ratios,
)
from otb_analysis.types import Float, Gram, Label, Proved
from studies.lib import Cell, Tables, interval_columns, rounded
from studies.lib.formats import by_label, ratio_columns, statistics_columns
from studies.lib.pools import (
    REFERENCE,
    Pool,
    agreement_rows,
    energies_beside,
    every_estimate,
    gram_of_prompts,
    in_batches,
    proved_of_pool,
    turns,
)
from studies.lib.record import Gathered

NONE = ("none", "none")
SIZES = (4, 8)
"""Rollouts of a group."""
UPDATES = (8, 32, 128, 1024)
"""Prompts of the update that efficiency is stated for; estimators that look at their batch see as many, or all."""
ACROSS, AGAINST = "energy_regression", ("otb", "rloo", "sequence_optimal", "none", "value")
"""Is the baseline from other prompts ahead of each of these, all with the proxy?"""
CALIBRATION_SHARE = 0.1
"""Tokens on which the calibrated proxy is fitted."""
FACTS = ("prompts", "rollouts", "tokens", "distinct_tokens", "success", "mixed", "corr", "explained", "top_share")
"""What was written: success, tokens, tails, and corr(W_T, R) within prompts."""


def comparison(cell: Cell, pool: Pool, hybrid: Float) -> Tables:
    """Return agreement of every energy, and variance, SF and efficiency of every estimator."""
    s, key = cell.settings, {"policy": cell.settings["policy"]}
    table, exact = pool.written.table, pool.inputs.energy
    assert exact is not None
    energies = energies_beside(pool.written, exact, CALIBRATION_SHARE, seed=0)
    agreement = agreement_rows(table, energies, ("proxy", "calibrated", "lm_head"))
    sketched = np.isfinite(hybrid) & table.mask
    if sketched.any():
        some = {"exact": exact, "hybrid": np.where(sketched, hybrid, 0.0)}
        agreement += agreement_rows(replace(table, mask=sketched), some, ("hybrid",))
    energy = np.sort(exact[table.mask])[::-1]
    paid = table.total_reward.reshape(len(np.unique(table.group)), -1)
    mixed, top = (np.ptp(paid, axis=1) > 0).mean(), energy[: max(1, energy.size // 100)].sum() / energy.sum()
    facts = pool.facts() | {"rollouts": paid.size, "mixed": float(mixed), "top_share": rounded(float(top))}
    tables = Gathered().add(key, policies=[{name: facts[name] for name in FACTS}], agreement=agreement)
    for n in SIZES:
        seen = {p: min(p, s["prompts"]) for p in UPDATES}
        estimates = {p: partial(every_estimate, batch=p) for p in set(seen.values())}
        by_batch = {p: gram_of_prompts(pool, n, s["shuffles"], n, every) for p, every in estimates.items()}
        grams = {p: by_batch[batch] for p, batch in seen.items()}
        known = proved_of_pool(grams[UPDATES[0]].labels, s["prompts"], n)
        signal = signal_columns(grams[UPDATES[0]], known)
        compared = {"estimators": estimator_rows(grams, known, s["buckets"]), "pairs": pair_rows(grams, known)}
        tables.add(key | {"size": n}, **compared, signal=[signal])
    return tables


def estimator_rows(grams: Mapping[int, Gram], known: Proved, buckets: int) -> list[dict[str, Any]]:
    """Return every measure of every estimator, over `rloo` and over no baseline; `grams` by prompts of the update."""
    statistics = {p: by_label(pooled_statistics([gram], n_prompts=p, known=known)) for p, gram in grams.items()}
    ratios = {p: by_label(paired_ratios([gram], n_prompts=p, known=known)) for p, gram in grams.items()}
    first, last = grams[UPDATES[0]], UPDATES[-1]
    bare = by_label(paired_ratios([grams[last]], NONE, n_prompts=last, known=known))
    noise = sketch_noise(first.inner, buckets).log_ratio[:, first.labels.index(REFERENCE)]
    rows = []
    for m, label in enumerate(first.labels):
        one, pair = statistics[last][label], ratios[last].get(label)
        row = {"estimator": label[0], "source": label[1], "c_known": one.c_known}
        row |= statistics_columns(one, "projection")
        row |= ratio_columns(pair, {"variance": "variance", "sf": "sf"})
        row |= ratio_columns(bare.get(label), {"variance_bare": "variance", "sf_bare": "sf"})
        for p in UPDATES:
            of = statistics[p][label]
            row |= {f"efficiency{p}": None if of.shown("efficiency") is None else rounded(of.efficiency)}
            row |= ratio_columns(ratios[p].get(label), {f"gain{p}": "efficiency"})
        rows.append(row | {"sketch_noise": rounded(float(noise[m]))})
    return rows


def pair_rows(grams: Mapping[int, Gram], known: Proved) -> list[dict[str, Any]]:
    """Return the efficiency of the baseline from other prompts over those that it is asked against, by update."""
    rows = []
    for name in AGAINST:
        below = next(label for label in grams[UPDATES[0]].labels if label[0] == name and label[1] != "exact")
        row: dict[str, Any] = {"estimator": ACROSS, "against": name}
        for p, gram in grams.items():
            above, base = (Update([gram], label, p) for label in ((ACROSS, "proxy"), below))
            truth = known.truth & frozenset(gram.labels) or REFERENCE
            row |= ratio_columns(update_ratios(above, base, truth, known), {f"gain{p}": "efficiency"})
        rows.append(row)
    return rows


def signal_columns(gram: Gram, known: Proved) -> dict[str, Any]:
    """Return ‖∇J‖² and the noise scale of `rloo`, with intervals over prompts, and how many prompts would show it."""
    value = deleted_moments([gram], REFERENCE, known.truth & frozenset(gram.labels) or REFERENCE).truth_sq
    signal = jackknife_interval(value[0], value[1:], "‖∇J‖²", "linear")
    scale = gradient_noise_scale([gram], REFERENCE, known)
    wanted = None  # at which an interval of ‖∇J‖² would leave 0 out, if the estimate is right
    if signal is not None and signal.low is not None and signal.estimate > 0:
        # Where noise dominates, the standard error falls with the number of prompts: pairs count, not prompts.
        wanted = int(np.ceil(gram.n_prompts * (signal.estimate - signal.low) / signal.estimate))
    return {**interval_columns("signal", signal), **interval_columns("noise_scale", scale), "prompts_wanted": wanted}


GROUP = 4
BATCHES = (8, 16, 32, 64)
"""Prompts of a batch, all others of which predict a prompt's reward."""
RIDGES = (0.01, 0.1, 1.0, 10.0)
ALL = tuple(FEATURES)
SETS: dict[str, tuple[str, ...]] = {
    "all": ALL,
    **{f"without {part}": tuple(name for name in ALL if part not in name) for part in "mfhx"},
    "1, m": ("1", "m"),
}
"""Features that are compared at the automatic ridge."""
ENDLESS = "energy_across_loo"
"""What an endless ridge leads to."""


def regressions(cell: Cell, pool: Pool, hybrid: Float) -> Tables:
    """Return variance over that of `rloo` by prompts of a batch, and by ridge or features."""
    s, batches = cell.settings, [count for count in BATCHES if count <= cell.settings["prompts"]]
    gram = gram_of_prompts(pool, GROUP, s["shuffles"], seed=GROUP, estimates=batched(batches, s["tokens"]))
    ratios = by_label(paired_ratios([gram]))
    tables = Gathered({"regressions": [], "features": []})
    for (name, setting), pair in ratios.items():
        count, _, estimator = name.partition(" ")
        case = {"features": setting} if setting in SETS else {"estimator": estimator, "ridge": setting}
        row = case | ratio_columns(pair, {"variance": "variance"})
        key = {"policy": cell.settings["policy"], "batch": int(count)}
        tables.add(key, **{"features" if setting in SETS else "regressions": [row]})
    return tables


def batched(batches: Sequence[int], limit: int) -> Callable[[Pool, Partition], dict[Label, Float]]:
    """Return the regression with every ridge and set of features, on batches of prompts drawn afresh from every cut.

    It gives advantages [N, T] by batch size and estimator, and by ridge or features, beside those of `rloo`.
    """
    random = np.random.default_rng(0)
    asked = {f"{ridge:g}": {"ridge": str(ridge), "T_max": str(limit)} for ridge in RIDGES}
    ways: dict[str, Any] = {label: options_from_dict("energy_regression", x) for label, x in asked.items()}
    ways |= {label: RegressionOptions(features=names, T_max=limit) for label, names in SETS.items()}

    def estimates(pool: Pool, cut: Partition) -> dict[Label, Float]:
        inputs = replace(pool.inputs, group=cut.group, energy=pool.proxy)
        advantages: dict[Label, Float] = {REFERENCE: estimate("rloo", inputs).advantage}
        prompts = int(cut.prompt.max()) + 1
        for count in batches:
            batch = (turns(cut) * prompts + (random.permutation(prompts) // count)[cut.prompt])[cut.group]
            advantages[f"{count} {ENDLESS}", "none"] = in_batches(ENDLESS, inputs, batch, None)
            for label, options in ways.items():
                advantages[f"{count} {ACROSS}", label] = in_batches(ACROSS, inputs, batch, options)
        return advantages

    return estimates
