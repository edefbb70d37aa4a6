"""Advice for one run: which estimator, and which group size, makes the most of its rollouts.

Every candidate is judged by its efficiency, the share of an update that points along ∇J. It is compared with what the
run trains with, on the same prompts. With m other candidates each interval has level 1 − .05/m (Bonferroni): all of
them hold together with 95 %, so that the luckiest of many noisy numbers is not taken for a better estimator.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    NOTHING,
    REFERENCE,
    Interval,
    deleted_moments,
    efficiency,
    jackknife_interval,
)
from otb_analysis.statistics.moments.gram import truth_of
from otb_analysis.statistics.moments.measures import known_number, quotient, with_projection
from otb_analysis.types import Float, Gram, Label, Proved

RISK = 0.05
"""Chance that any interval misses, all candidates together."""

NO_TRUTH = (
    "on these prompts ‖∇J‖² is lost in the noise, so no efficiency is known; measure more prompts or steps "
    "(--measure.exact.prompts 0, a smaller --measure.exact.every)"
)

SIZES_UNKNOWN = (
    "Group sizes were not compared: the run has no gradients of smaller groups, which the level exact measures where "
    "groups of at least 4 can be halved (--measure.exact.every 10 --measure.subgroups otb)."
)

NOT_HALVED = "Group sizes were not compared: groups of {} cannot be cut into equal groups of at least 2."


@dataclass(frozen=True)
class Choice:
    """An estimator with its energies, in groups of one size."""

    estimator: str
    energy_source: str
    size: int

    def __str__(self) -> str:
        """Return how it is named in a sentence."""
        energies = "" if self.energy_source == "none" else f" ({self.energy_source} energies)"
        return f"{self.estimator}{energies} in groups of {self.size}"


@dataclass(frozen=True)
class Advised:
    """One candidate beside the present choice."""

    choice: Choice
    efficiency: float | None  # Share of an update that points along ∇J, None where it is undefined
    # Efficiency over that of the present choice with its simultaneous interval, None where it is undefined.
    ratio: Interval | None

    @property
    def better(self) -> bool:
        """True when the simultaneous interval lies above 1."""
        return self.ratio is not None and self.ratio.low is not None and self.ratio.low > 1


@dataclass(frozen=True)
class Advice:
    """What to train with instead, if anything was shown to be better."""

    present: Choice
    best: Advised | None  # The most efficient of the candidates shown to be better, None where none was
    candidates: tuple[Advised, ...]  # All of them, most efficient first
    n_rollouts: int
    reason: str

    @property
    def sizes_line(self) -> str:
        """One sentence: which group sizes were compared, or what measures them."""
        *smaller, whole = sorted({one.choice.size for one in self.candidates})
        if not smaller:
            return SIZES_UNKNOWN if whole >= 4 and whole % 2 == 0 else NOT_HALVED.format(whole)
        return (
            f"Groups of {', '.join(map(str, smaller))} and {whole} were compared at the same {self.n_rollouts} "
            "rollouts, smaller ones with more prompts."
        )


def advise(
    grams: Mapping[int, Gram],
    subgroups: Mapping[int, Mapping[int, Gram]],
    present: Label,
    n_rollouts: int | None = None,
    known: Proved = NOTHING,
) -> Advice:
    """Judge every estimator that all measured steps have, at the run's own group size and at the smaller ones.

    `grams` holds the Gram matrix of each measured step, `subgroups` those of smaller groups by size and step. Where
    there are any, only steps that have all sizes count, so that all candidates see the same prompts. Smaller groups are
    judged at the same R rollouts of an update: R/n prompts in groups of n. `n_rollouts` is R, which may be more than
    were measured; by default as many. Projections that are `known` at the run's own size are not estimated.

    Raises:
        InputError: No step has both `present` and `rloo`, or smaller groups are of other prompts.
    """
    both = {step: gram for step, gram in grams.items() if {present, REFERENCE} <= set(gram.labels)}
    if not both:
        measured = dict.fromkeys("/".join(label) for gram in grams.values() for label in gram.labels)
        raise InputError(
            f"no measured step has both {'/'.join(present)} and {'/'.join(REFERENCE)}; "
            f"{nearest('/'.join(present), measured) if measured else 'measure some: --measure.exact.every 10.'}"
        )
    common = [step for step in both if all(step in by_step for by_step in subgroups.values())]
    whole = [both[step] for step in common or both]
    mean_rollouts = round(np.mean([gram.n_rollouts for gram in whole]))
    size = round(mean_rollouts / np.mean([gram.n_prompts for gram in whole]))
    rollouts = n_rollouts or mean_rollouts
    values = choice_values(size, whole, rollouts, known)
    # A mean over the whole group shrinks by 1 − 1/n, which is another number in smaller groups.
    at_every_size = replace(known, projection={label: c for label, c in known.projection.items() if c == 1})
    for part, by_step in subgroups.items() if common else ():
        parts = [by_step[step] for step in common]
        if [(gram.prompt, gram.n_prompts) for gram in parts] != [(gram.prompt, gram.n_prompts) for gram in whole]:
            raise InputError(f"groups of {part} were measured on other prompts than whole ones; pass the same steps'.")
        values |= choice_values(part, parts, rollouts, at_every_size)
    return judge(values, Choice(*present, size), rollouts)


def trained_label(config: Mapping[str, Any], measured: Collection[Label] = ()) -> Label:
    """Return (estimator, energy source) of the estimator that a run trains with, as its Gram matrices name it.

    `measured` are the labels of its Gram matrices. They name custom estimators, which are not in `ESTIMATORS`.

    Raises:
        InputError: The configuration names no known estimator, and none that was measured.
    """
    chosen = config.get("estimator")
    name = str(chosen.get("name", "") if isinstance(chosen, Mapping) else chosen or "")
    energy = str(chosen.get("energy", "proxy") if isinstance(chosen, Mapping) else "proxy")
    if name not in ESTIMATORS:
        sources = [source for estimator, source in measured if estimator == name]
        if not sources:
            known = dict.fromkeys([*ESTIMATORS, *(estimator for estimator, _ in measured)])
            raise InputError(f"the run's configuration has the estimator {name!r}; {nearest(name, known)}")
        return name, energy if energy in sources else sources[0]
    needs = ESTIMATORS[name].needs
    if "energy" in needs:
        return name, energy
    return name, "exact" if {"rollout_norm_sq", "position_baseline"} & set(needs) else "none"


def update_rollouts(config: Mapping[str, Any]) -> int | None:
    """Return the rollouts of one of a run's updates, None where its configuration does not say."""
    sample = config.get("sample")
    prompts, size = (sample.get(name) if isinstance(sample, Mapping) else None for name in ("prompts", "group_size"))
    if not isinstance(prompts, int) or not isinstance(size, int):
        return None
    return prompts * size or None


def judge(values: Mapping[Choice, Float], present: Choice, n_rollouts: int) -> Advice:
    """Compare candidates with the present choice, all intervals together at 95 %.

    `values` holds the efficiency of each candidate [1 + K]: from all K prompts, then without each of them in turn.

    Raises:
        InputError: `present` is not among the candidates.
    """
    if present not in values:
        raise InputError(f"{present} was not measured; {nearest(str(present), map(str, values))}")
    base = values[present]
    # Entries that agree on these rollouts (otb and otb_turn in one turn) are one comparison.
    others = {replicates.tobytes() for replicates in values.values()} - {base.tobytes()}
    level = 1 - RISK / max(len(others), 1)
    candidates = [
        Advised(choice, known_number(replicates[0]), None if choice == present else _ratio(replicates, base, level))
        for choice, replicates in values.items()
    ]
    candidates.sort(key=lambda one: -np.inf if one.efficiency is None else one.efficiency, reverse=True)
    better = [one for one in candidates if one.better]
    best = better[0] if better else None
    together = f"95 % together with {len(others)} comparisons over {base.size - 1} prompts"
    return Advice(present, best, tuple(candidates), n_rollouts, _reason(present, best, candidates, together))


def choice_values(size: int, grams: Sequence[Gram], n_rollouts: int, known: Proved) -> dict[Choice, Float]:
    """Return the efficiency of R rollouts in groups of one size, of every estimator that all steps have."""
    labels = [label for label in grams[0].labels if all(label in gram.labels for gram in grams)]
    truth = truth_of(grams, REFERENCE, known)
    moments = {label: deleted_moments(grams, label, truth) for label in labels}
    return {
        Choice(*label, size): efficiency(with_projection(one, known.projection.get(label)), n_rollouts / size)
        for label, one in moments.items()
    }


def _ratio(above: Float, below: Float, level: float) -> Interval | None:
    ratio = quotient(above, below)
    return jackknife_interval(ratio[0], ratio[1:], "ratio of the two efficiencies", "log", level)


def _reason(present: Choice, best: Advised | None, candidates: Sequence[Advised], together: str) -> str:
    now = next(one for one in candidates if one.choice == present)
    tested = [one for one in candidates if one.ratio is not None and one.ratio.low is not None]
    if now.efficiency is None or now.efficiency <= 0:
        return f"Not known: {NO_TRUTH}."
    if best is not None and best.ratio is not None:
        return (
            f"{best.choice} was {best.ratio.estimate:.2f} times as efficient as {present} "
            f"[{best.ratio.low:.2f}, {best.ratio.high:.2f}] ({together})."
        )
    if not tested:
        return f"Not tested: no comparison has an interval, which takes {MIN_CLUSTERS} prompts; measure more of them."
    top = max(tested, key=lambda one: one.ratio.estimate if one.ratio else 0.0)
    ratio = top.ratio
    ends = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else ""
    return (
        f"No difference shown: nothing was more efficient than {present} beyond chance; the highest estimate is "
        f"{ratio.estimate if ratio else np.nan:.2f}{ends} for {top.choice} ({together})."
    )
