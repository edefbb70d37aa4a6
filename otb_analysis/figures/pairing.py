"""Which runs are compared with which: A against B, two runs or two groups of runs whose seeds are paired."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from otb_analysis.figures.runs import NOT_RECORDED, flatten, housekeeping, importance

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

    @property
    def note(self) -> str:
        """How the two are paired, what else differs, and which runs are left out."""
        words = (
            f"Paired by seed: {len(self.pairs)} pairs, Student's 95 % intervals over seeds."
            if self.by == "seed"
            else "One pair of runs: 95 % intervals are over blocks of steps. They hold for these two runs, not for "
            "other seeds."
        )
        if self.also:
            words += f" The pairs differ in more than what is compared: {', '.join(self.also)}."
        return words + (f" Without a partner of the same seed: {', '.join(self.left_out)}." if self.left_out else "")


def pair_runs(a: str, b: str) -> Pairing:
    """Pair two runs."""
    return Pairing(a, b, ((a, b),))


def pair_groups(configs: Configs, key: str, a: str, b: str) -> Pairing:
    """Pair the runs whose setting `key` reads `a` with those whose reads `b`, seed by seed.

    Of several partners of one seed the one that differs in the fewest other settings is taken, each once.
    """
    flat = {run: _settings(config) for run, config in configs.items()}
    sides = [[run for run, one in flat.items() if one.get(key, NOT_RECORDED) == value] for value in (a, b)]
    pairs, free, also = list[tuple[str, str]](), list(sides[1]), list[str]()
    for run in sides[0]:
        partners = [other for other in free if flat[other].get("seed") == flat[run].get("seed")]
        if partners:
            partner = min(partners, key=lambda other: len(_others(flat[run], flat[other], key)))
            free.remove(partner)
            pairs.append((run, partner))
            also += _others(flat[run], flat[partner], key)
    paired = {run for pair in pairs for run in pair}
    left_out = tuple(run for side in sides for run in side if run not in paired)
    others = tuple(sorted(set(also), key=importance))
    return Pairing(f"{key} = {a}", f"{key} = {b}", tuple(pairs), others, left_out)


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
    for key, values in list(group_keys(configs).items())[:1]:
        if (found := pair_groups(configs, key, *default_values(configs, key, values))).by == "seed":
            return found
    return None


def default_pairing(configs: Configs, runs: Sequence[str]) -> tuple[str, str] | None:
    """Return the two runs to begin with: the first, and the next that differs in the fewest settings."""
    if len(runs) < 2:
        return None
    flat = {run: _settings(configs[run]) for run in runs}
    return runs[0], min(runs[1:], key=lambda other: len(_others(flat[runs[0]], flat[other], "")))


def _settings(config: Mapping[str, object]) -> dict[str, str]:
    """Return what a run was asked to do, as text: its configuration without where it is kept."""
    return {name: str(value) for name, value in flatten(config).items() if not housekeeping(name)}


def _others(one: Mapping[str, str], other: Mapping[str, str], key: str) -> list[str]:
    names = dict.fromkeys([*one, *other])
    # A setting that only one of them recorded is of another version, not of another experiment.
    return [n for n in names if n not in (key, "seed") and n in one and n in other and one[n] != other[n]]
