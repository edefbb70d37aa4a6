"""How many prompts a regression across prompts takes, which ridge and features, on the same rollouts as the others."""

from dataclasses import replace
from typing import Any

import numpy as np

from otb_analysis.estimators import estimate, options_from_dict
from otb_analysis.estimators.spec import FEATURES, RegressionOptions
from otb_analysis.statistics import Partition, paired_ratios
from otb_analysis.types import Float, Label
from studies.lib import Cell, Tables
from studies.lib.formats import by_label, ratio_columns
from studies.lib.pools import REFERENCE, Pool, gram_of_prompts, in_batches, turns

from .pool import Measured, Size

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
ACROSS = "energy_across_loo"
"""What an endless ridge leads to."""


def regressions(cell: Cell, size: Size, measured: Measured) -> Tables:
    """Return variance over that of `rloo` by prompts of a batch, and by ridge or features."""
    pool, batches = measured.pool, [count for count in BATCHES if count <= size.prompts]
    gram = gram_of_prompts(pool, GROUP, size.shuffles, seed=GROUP, estimates=Batched(tuple(batches), size.tokens))
    ratios = by_label(paired_ratios([gram]))
    tables: Tables = {"regressions": [], "features": []}
    for (name, setting), pair in ratios.items():
        count, _, estimator = name.partition(" ")
        key: dict[str, Any] = {"policy": cell.settings["policy"], "batch": int(count)}
        table = "features" if setting in SETS else "regressions"
        key |= {"features": setting} if setting in SETS else {"estimator": estimator, "ridge": setting}
        tables[table].append(key | ratio_columns(pair, {"variance": "variance"}))
    return tables


class Batched:
    """The regression with every ridge and set of features, on batches of prompts drawn afresh from every cut."""

    def __init__(self, batches: tuple[int, ...], limit: int) -> None:
        self.batches, self.limit, self.random = batches, limit, np.random.default_rng(0)

    def __call__(self, pool: Pool, cut: Partition) -> dict[Label, Float]:
        """Return advantages [N, T] by batch size and estimator, and by ridge or features, beside those of `rloo`."""
        inputs = replace(pool.inputs, group=cut.group, energy=pool.proxy)
        advantages: dict[Label, Float] = {REFERENCE: estimate("rloo", inputs).advantage}
        prompts = int(cut.prompt.max()) + 1
        for count in self.batches:
            place = self.random.permutation(prompts) // count
            batch = (turns(cut) * prompts + place[cut.prompt])[cut.group]
            advantages[f"{count} {ACROSS}", "none"] = in_batches(ACROSS, inputs, batch, None)
            for ridge in RIDGES:
                options = options_from_dict("energy_regression", {"ridge": str(ridge), "T_max": str(self.limit)})
                label = (f"{count} energy_regression", f"{ridge:g}")
                advantages[label] = in_batches("energy_regression", inputs, batch, options)
            for label, names in SETS.items():
                options = RegressionOptions(features=names, T_max=self.limit)
                advantages[f"{count} energy_regression", label] = in_batches(
                    "energy_regression", inputs, batch, options
                )
        return advantages
