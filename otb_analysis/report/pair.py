"""B against A as the page Compare begins, for JSON and the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.numbers import interval_cell, number
from otb_analysis.figures.pair_curves import PairPanel, compare_curves, drift_note
from otb_analysis.figures.pair_gradients import NoiseInfo, RunGrams, compare_noise, joint_proofs, noise_display
from otb_analysis.figures.pair_verdict import runs_verdict
from otb_analysis.figures.pairing import (
    Configs,
    Pairing,
    default_values,
    first_groups,
    group_keys,
    pair_groups,
    pair_runs,
)
from otb_analysis.report.runs import by_name, config_of
from otb_analysis.report.terminal import terminal_table
from otb_analysis.store import RunStore
from otb_analysis.store.reader import scope_of


@dataclass(frozen=True)
class Pair:
    """Two runs, or two groups of runs whose seeds are paired, with what differs."""

    pairing: Pairing
    panels: tuple[PairPanel, ...]
    noise: NoiseInfo

    @property
    def verdict(self) -> str:
        """What differs, in a sentence or two."""
        return runs_verdict(self.panels, self.noise)

    @property
    def notes(self) -> list[str]:
        """What the intervals do not say."""
        return [*filter(None, [drift_note(self.panels)]), *self.noise.notes]


@dataclass(frozen=True)
class Sides:
    """What to compare where it is not what the page begins with; empty for that."""

    setting: str = ""  # A setting by which the runs are grouped
    a: str = ""  # Its value of A; of one run the estimator A, in the page's words
    b: str = ""


def pair_of(stores: Sequence[RunStore], sides: Sides | None = None) -> Pair | None:
    """Compare groups whose seeds are paired, else the second of two runs with the first; None of other runs.

    Raises:
        InputError: No seed is in both groups that `sides` asks for, or there is no such setting or value.
    """
    named = by_name(stores)
    configs = {name: config_of(store) for name, store in named.items()}
    if sides is not None and sides.setting:
        pairing = _grouped(configs, sides)
    else:
        pairing = pair_runs(*named) if len(named) == 2 else first_groups(configs)
    if pairing is None:
        return None
    runs = {name: RunGrams(configs[name], named[name].grams(), scope_of(named[name])) for name in pairing.runs}
    panels = compare_curves({name: named[name].steps_df() for name in pairing.runs}, pairing)
    return Pair(pairing, panels, compare_noise(pairing, runs, joint_proofs(list(runs.values()))))


def _grouped(configs: Configs, sides: Sides) -> Pairing:
    keys = group_keys(configs)
    key = sides.setting
    if key not in keys:
        raise InputError(f"--setting is {key!r}, by which these runs form no groups; {nearest(key, keys)}")
    for value in filter(None, (sides.a, sides.b)):
        if value not in keys[key]:
            raise InputError(f"{key} is never {value!r} in these runs; {nearest(value, keys[key])}")
    first, second = default_values(configs, key, keys[key])
    pairing = pair_groups(configs, key, sides.a or first, sides.b or second)
    if not pairing.pairs or pairing.a == pairing.b:
        raise InputError(f"{pairing.a} and {pairing.b} share no seed or are the same; pass another --a or --b.")
    return pairing


def pair_tables(pair: Pair) -> list[Table | str]:
    """Return the verdict, one row per quantity, the ratios of gradient noise where there are any, and the notes."""
    curves = terminal_table(
        "B against A", "means over the shared steps [95 %]", ("quantity",), ("A", "B", "B − A", "steps")
    )
    for panel in pair.panels:
        means = (number(float(side.mean())) for side in (panel.a, panel.b))
        curves.add_row(panel.quantity.title, *means, interval_cell(panel.whole), str(len(panel.step)))
    verdict = f"A is {pair.pairing.a}, B is {pair.pairing.b}. {pair.verdict}"
    parts: list[Table | str] = [verdict, curves, "\n".join([pair.pairing.note, *pair.notes])]
    shown = noise_display(pair.noise)
    if len(shown):
        better = "below 1 is less noise; of efficiency, above 1 is better"
        noise = terminal_table("Gradient noise, B ÷ A", better, list(shown)[:1], list(shown)[1:])
        for row in shown.itertuples(index=False):
            noise.add_row(*row)
        parts.insert(2, noise)
    return parts
