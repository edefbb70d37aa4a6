"""Which features of `energy_regression` pay on random policies, and how many prompts it takes: exact variances.

Nothing is timed. Every policy stands for a prompt with a law of its own; its groups are enumerated.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.config import RegressionConfig
from benchmarks.publish import Report, notes_of, report_of
from otb_analysis.errors import InputError
from otb_analysis.estimators.spec import FEATURES
from studies.lib.enumeration.facts import GROUP, GROUP_SIZE
from studies.lib.enumeration.regression import batch_variance, limit_variance, regressed
from studies.lib.enumeration.trees import random_tree

ALL = tuple(FEATURES)
SETS: dict[str, tuple[str, ...]] = {
    "all": ALL,
    **{f"without {part}": tuple(name for name in ALL if part not in name) for part in "mfhx"},
    "without products with m": tuple(name for name in ALL if "·" not in name),
    "1, m": ("1", "m"),
    **{f"1, m, {part}, m·{part}": ("1", "m", part, f"m·{part}") for part in "fhx"},
    "1 (`energy_across_loo`)": ("1",),
    "m": ("m",),
}
RIDGES = (0.01, 0.1, 1.0, 10.0)


def _key(ridge: float) -> str:
    return f"ridge_{ridge:g}".replace(".", "_")


MANY = "all others, endlessly often"
COLUMNS = {
    "prompts of a batch": "{prompts}",
    "features": "{features}",
    "without ridge": "{free:.2f}",
    **{f"ridge {ridge:g}": f"{{{_key(ridge)}:.2f}}" for ridge in RIDGES},
}


def run(config: RegressionConfig) -> Report:
    """Return variances over that of `rloo`: all feature sets in the limit, and by prompts of a batch and ridge."""
    if max(config.prompts) > config.policies:
        raise InputError(f"--prompts has {max(config.prompts)} but there are {config.policies} policies; draw more.")
    trees = (random_tree(GROUP, np.random.default_rng(seed)) for seed in range(config.policies))
    prompts = [regressed(tree, GROUP_SIZE) for tree in trees]
    rloo = np.array([prompt.variance(("m",), np.ones(1)) for prompt in prompts])
    found = list[tuple[str, str, Sequence[float]]]()
    for label, names in SETS.items():
        limits = [limit_variance(prompts, names, ridge).sum() / rloo.sum() for ridge in (0.0, *RIDGES)]
        found.append((MANY, label, limits))
    rng = np.random.default_rng(0)
    for count in config.prompts:
        chosen = np.stack([rng.permutation(config.policies)[:count] for _ in range(config.batches)])
        for label in ("all", "1, m"):
            variance = batch_variance(prompts, SETS[label], (0.0, *RIDGES), chosen, rng)
            found.append((str(count), label, list(variance.sum(axis=1) / rloo[chosen[:, 0]].sum())))
    rows = [
        {"prompts": count, "features": label, "free": float(ratios[0])}
        | {_key(ridge): float(ratio) for ridge, ratio in zip(RIDGES, ratios[1:], strict=True)}
        for count, label, ratios in found
    ]
    return report_of(config, "Variance of a group gradient over that of rloo", COLUMNS, rows, notes=notes_of(config))
