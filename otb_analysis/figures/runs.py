"""Runs side by side: what their configurations do not share, and which is compared with which."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Literal

import pandas as pd

from otb_analysis.config import TrainConfig
from otb_analysis.phases import plural

NOT_RECORDED = "–"
"""Shown where a run's configuration does not have a setting."""

FIRST = (
    "estimator.name", "estimator", "optimize.learning_rate", "objective.staleness", "objective", "optimize",
    "sample.group_size", "sample.prompts", "sample", "task", "model", "lora", "critic",
)  # fmt: skip
"""Settings that explain how training went, what matters most first; others follow, then the seed."""

LAST = (
    "seed", "warm_start", "evaluate", "measure", "precision", "device", "checkpoint", "processes", "trackers",
    "if_exists", "root", "run",
)  # fmt: skip
"""Settings that do not: how a run was watched, and where it is kept."""

KEPT = ("trackers", "if_exists", "root", "run")
"""Of them those that say only where a run is kept."""


def flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a nested configuration with dotted names: {"task": {"terms": 3}} → {"task.terms": 3}."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def importance(name: str) -> tuple[int, str]:
    """Return a key that sorts settings, those that explain most first."""
    order = (*FIRST, None, *LAST)
    places = [place for place, one in enumerate(order) if one and f"{name}.".startswith(f"{one}.")]
    return (places or [order.index(None)])[0], name


@dataclass(frozen=True)
class Differences:
    """In which settings some runs differ."""

    # One row per setting, what matters first, one column per run, all as text; a dash where a run did not record it.
    table: pd.DataFrame
    left_out: int  # Number of settings that some runs did not record and the others have at their defaults


def config_differences(configs: Mapping[str, Mapping[str, object]]) -> Differences:
    """Return the settings in which some runs differ, without those that only newer versions know and leave alone.

    The setting `run` is the name of the run and never listed. One that some runs did not record is listed where another
    run has changed it, or where no default of it is known.
    """
    flat = {run: flatten(config) for run, config in configs.items()}
    names = sorted({name for config in flat.values() for name in config if name != "run"}, key=importance)
    rows = {name: {run: str(config.get(name, NOT_RECORDED)) for run, config in flat.items()} for name in names}
    differing = {name: row for name, row in rows.items() if len(set(row.values())) > 1}
    # The default configuration as a run stores it: JSON has no tuples and no paths.
    defaults = json.loads(json.dumps(asdict(TrainConfig()), default=str))
    known = {name: str(value) for name, value in flatten(defaults).items()}
    shown = {name: row for name, row in differing.items() if set(row.values()) != {NOT_RECORDED, known.get(name)}}
    table = pd.DataFrame.from_dict(shown, orient="index", columns=list(flat)).rename_axis("setting").reset_index()
    return Differences(table, len(differing) - len(shown))


def grouped(differences: Differences, setting: str) -> dict[str, list[str]]:
    """Return the runs of each value of a setting, by a name that says how many they are."""
    values = differences.table.set_index("setting").loc[setting]
    groups = {str(value): [str(run) for run in values.index[values == value]] for value in values.unique()}
    return {f"{setting} = {value} ({plural(len(runs), 'run')})": runs for value, runs in groups.items()}


By = Literal["seed", "step blocks"]
"""Where intervals come from: differences of several seeds, or of blocks of steps of one pair."""

Configs = Mapping[str, Mapping[str, object]]
"""Nested configuration of each run."""


@dataclass(frozen=True)
class Pairing:
    """Runs of A and of B, one pair after the other."""

    a: str  # What each side is called
    b: str
    pairs: tuple[tuple[str, str], ...]  # (run of A, run of B)
    also: tuple[str, ...] = ()  # Settings other than the compared one and the seed in which a pair differs
    left_out: tuple[str, ...] = ()  # Runs of either side without a partner of their seed

    @property
    def by(self) -> By:
        """Where the intervals come from: one pair of runs has no second seed."""
        return "seed" if len(self.pairs) > 1 else "step blocks"

    @property
    def runs(self) -> tuple[str, ...]:
        """All runs, each once."""
        return tuple(dict.fromkeys(run for pair in self.pairs for run in pair))


def pair_runs(a: str, b: str) -> Pairing:
    """Pair two runs."""
    return Pairing(a, b, ((a, b),))


def pair_groups(configs: Configs, key: str, a: str, b: str) -> Pairing:
    """Pair the runs whose setting `key` reads `a` with those whose reads `b`, seed by seed.

    Of several partners of one seed the one that differs in the fewest other settings is taken, each once.
    """
    flat = {run: _settings(config) for run, config in configs.items()}
    of_a, of_b = ([run for run, one in flat.items() if one.get(key, NOT_RECORDED) == value] for value in (a, b))
    pairs, also = dict[str, str](), set[str]()
    for run in of_a:
        same = [one for one in of_b if one not in pairs.values() and flat[one].get("seed") == flat[run].get("seed")]
        if same:
            differing = {other: _differing(flat[run], flat[other], key) for other in same}
            pairs[run] = min(same, key=lambda other: len(differing[other]))
            also |= {*differing[pairs[run]]}
    left_out = tuple(run for run in (*of_a, *of_b) if run not in (*pairs, *pairs.values()))
    others = tuple(sorted(also, key=importance))
    return Pairing(f"{key} = {a}", f"{key} = {b}", tuple(pairs.items()), others, left_out)


def group_keys(configs: Configs) -> dict[str, list[str]]:
    """Return settings by which runs can be grouped, what matters first, each with its values in order of runs.

    At least two runs of one seed must differ in it.
    """
    flat = [_settings(config) for config in configs.values()]
    names = sorted(set().union(*flat) - {"seed"}, key=importance)
    keys = {}
    for name in names:
        values = list(dict.fromkeys(one.get(name, NOT_RECORDED) for one in flat))
        seeds = [{one.get("seed") for one in flat if one.get(name, NOT_RECORDED) == value} for value in values]
        if len(values) > 1 and any(seeds[i] & seeds[j] for i in range(len(seeds)) for j in range(i)):
            keys[name] = values
    return keys


def default_values(configs: Configs, key: str, values: Sequence[str]) -> tuple[str, str]:
    """Return the two values of a setting to begin with: the first two among those with the most pairs of seeds."""
    return max(combinations(values, 2), key=lambda two: len(pair_groups(configs, key, *two).pairs))


def first_groups(configs: Configs) -> Pairing | None:
    """Return the groups of the setting that matters most, where several of their seeds are paired."""
    if not (keys := group_keys(configs)):
        return None
    key, values = next(iter(keys.items()))
    groups = pair_groups(configs, key, *default_values(configs, key, values))
    return groups if groups.by == "seed" else None


def default_pairing(configs: Configs, runs: Sequence[str]) -> tuple[str, str] | None:
    """Return the two runs to begin with: the first, and the next that differs in the fewest settings."""
    if len(runs) < 2:
        return None
    flat = {run: _settings(configs[run]) for run in runs}
    return runs[0], min(runs[1:], key=lambda other: len(_differing(flat[runs[0]], flat[other])))


def _settings(config: Mapping[str, object]) -> dict[str, str]:
    """Return what a run was asked to do, as text: its configuration without where it is kept."""
    return {name: str(value) for name, value in flatten(config).items() if name.split(".")[0] not in KEPT}


def _differing(one: Mapping[str, str], other: Mapping[str, str], key: str = "") -> list[str]:
    """Return the settings but `key` and the seed in which two runs differ."""
    # A setting that only one of them recorded is of another version, not of another experiment.
    return [n for n in one if n not in (key, "seed") and n in other and one[n] != other[n]]
