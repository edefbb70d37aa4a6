"""Which estimator, and which group size, makes the best of a rollout, on one run's own rollouts.

Every candidate is judged by its efficiency, the share of an update that points along ∇J, relative to what the run
trains with, on the same prompts. With m other candidates each interval has level 1 − .05/m (Bonferroni), so all of them
hold together with 95 % whichever is picked afterwards: the best of many noisy numbers is not mistaken for a better one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from otb_analysis.diagnostics.choices import Advice, Advised, Choice
from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.statistics import (
    MIN_CLUSTERS,
    REFERENCE,
    Interval,
    deleted_moments,
    efficiency,
    jackknife_interval,
)
from otb_analysis.types import Float, Gram, Label

RISK = 0.05
"""Chance that any interval misses, all candidates together."""

NO_TRUTH = (
    "on these prompts ‖∇J‖² is lost in the noise, so no efficiency is known; measure more prompts or steps "
    "(--measure.exact.prompts 0, a smaller --measure.exact.every)"
)


def advise_run(
    grams: Mapping[int, Gram],
    subgroups: Mapping[int, Mapping[int, Gram]],
    present: Label,
    reference: Label = REFERENCE,
    n_rollouts: int | None = None,
) -> Advice:
    """Judge every estimator of a stored run at its own group size, and those measured on smaller groups too.

    Args:
        grams: Gram matrix of each measured step (`RunStore.grams`).
        subgroups: Those of smaller groups, by size and step (`RunStore.subgroup_grams`). Where there are any, only
            steps that have all sizes count, so that all candidates see the same prompts.
        n_rollouts: Rollouts R of one of the run's updates, of which the measured groups may be a few; those measured
            by default.

    Raises:
        InputError: No step has both `present` and the reference.
    """
    whole = {step: gram for step, gram in grams.items() if {present, reference} <= set(gram.labels)} or dict(grams)
    common = [step for step in whole if all(step in by_step for by_step in subgroups.values())]
    if not subgroups or not common:
        return advise(list(whole.values()), present, reference, n_rollouts=n_rollouts)
    smaller = {size: [by_step[step] for step in common] for size, by_step in subgroups.items()}
    return advise([whole[step] for step in common], present, reference, smaller, n_rollouts)


def advise(
    grams: Sequence[Gram],
    present: Label,
    reference: Label = REFERENCE,
    smaller: Mapping[int, Sequence[Gram]] | None = None,
    n_rollouts: int | None = None,
) -> Advice:
    """Judge every estimator that was measured at all of a run's measured steps, at the run's own group size.

    With the same steps' products of smaller groups it also judges those, at the same rollouts R of an update: R/n
    prompts in groups of n.

    Args:
        grams: Gram matrices of group gradients, one per measured step, all of one design.
        smaller: Gram matrices of smaller groups of the same prompts at the same steps, by their size.
        n_rollouts: Rollouts R of one update, which efficiency is stated for; as many as were measured by default.

    Raises:
        InputError: No step has both `present` and the reference, or smaller groups are of other prompts.
    """
    both = [gram for gram in grams if present in gram.labels and reference in gram.labels]
    if not both:
        known = dict.fromkeys("/".join(label) for gram in grams for label in gram.labels)
        raise InputError(
            f"no measured step has both {'/'.join(present)} and {'/'.join(reference)}; "
            f"{nearest('/'.join(present), known) if known else 'measure some: --measure.exact.every 10.'}"
        )
    labels = [label for label in both[0].labels if all(label in gram.labels for gram in both)]
    measured = round(np.mean([gram.n_rollouts for gram in both]))
    size = round(measured / np.mean([gram.n_prompts for gram in both]))
    rollouts = n_rollouts or measured
    values = _values(size, both, labels, rollouts, reference)
    for own, found in (smaller or {}).items():
        if [(gram.prompt, gram.n_prompts) for gram in found] != [(gram.prompt, gram.n_prompts) for gram in both]:
            raise InputError(f"groups of {own} were measured on other prompts than whole ones; pass the same steps'.")
        named = [label for label in found[0].labels if all(label in gram.labels for gram in found)]
        values |= _values(own, found, named, rollouts, reference)
    if len({value.size for value in values.values()}) > 1:
        raise InputError("smaller groups were measured on other prompts than whole ones; pass those of the same steps.")
    return judge(values, Choice(*present, size), rollouts)


def trained_label(config: Mapping[str, Any], measured: Collection[Label] = ()) -> Label:
    """Return (estimator, energy source) of the estimator that a run trains with, as its Gram matrices name it.

    Args:
        measured: The labels of its Gram matrices: they alone tell an estimator of one's own, whose module is not asked.

    Raises:
        InputError: The configuration names no known estimator, and none that was measured.
    """
    own = config.get("estimator")
    name = str(own.get("name", "") if isinstance(own, Mapping) else own or "")
    energy = str(own.get("energy", "proxy") if isinstance(own, Mapping) else "proxy")
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
    own = config.get("sample")
    prompts, size = (own.get(name) if isinstance(own, Mapping) else None for name in ("prompts", "group_size"))
    if not isinstance(prompts, int) or not isinstance(size, int):
        return None
    return prompts * size or None


def judge(values: Mapping[Choice, Float], present: Choice, n_rollouts: int) -> Advice:
    """Compare candidates with the present choice, all intervals together at 95 %.

    Args:
        values: Efficiency of each candidate [1 + K]: from all K prompts, then without each of them in turn.

    Raises:
        InputError: `present` is not among the candidates.
    """
    if present not in values:
        raise InputError(f"{present} was not measured; {nearest(str(present), map(str, values))}")
    base = values[present]
    # Entries that agree on these rollouts (otb and otb_turn in one turn) are one comparison.
    others = {own.tobytes() for own in values.values()} - {base.tobytes()}
    level = 1 - RISK / max(len(others), 1)
    found = [
        Advised(choice, _number(own[0]), None if choice == present else _ratio(own, base, level))
        for choice, own in values.items()
    ]
    found.sort(key=lambda one: -np.inf if one.efficiency is None else one.efficiency, reverse=True)
    better = [one for one in found if one.better]
    n_clusters = base.size - 1
    best = better[0] if better else None
    together = f"95 % together with {len(others)} comparisons over {n_clusters} prompts"
    return Advice(present, best, tuple(found), n_rollouts, n_clusters, _reason(present, best, found, together))


def _values(
    size: int, grams: Sequence[Gram], labels: Sequence[Label], n_rollouts: int, reference: Label
) -> dict[Choice, Float]:
    """Return the efficiency of R rollouts in groups of one size, of some estimators."""
    return {
        Choice(*label, size): efficiency(deleted_moments(grams, label, reference), n_rollouts / size)
        for label in labels
    }  # fmt: skip


def _ratio(own: Float, base: Float, level: float) -> Interval | None:
    ratio = np.divide(own, base, out=np.full_like(own, np.nan), where=base > 0)
    return jackknife_interval(ratio[0], ratio[1:], "ratio of the two efficiencies", "log", level)


def _reason(present: Choice, best: Advised | None, found: Sequence[Advised], together: str) -> str:
    now = next(one for one in found if one.choice == present)
    tested = [one for one in found if one.ratio is not None and one.ratio.low is not None]
    if now.efficiency is None or now.efficiency <= 0:
        return f"Not known: {NO_TRUTH}."
    if best is not None and best.ratio is not None and best.efficiency is not None:
        return (
            f"{best.choice} was {best.ratio.estimate:.2f} times as efficient as {present} "
            f"[{best.ratio.low:.2f}, {best.ratio.high:.2f}] ({together}): {best.efficiency:.2f} against "
            f"{now.efficiency:.2f} of an update along ∇J."
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


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
