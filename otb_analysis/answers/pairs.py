"""Runs side by side: what each learned, and B against A.

These are two runs, two groups of runs whose seeds are paired, or two estimators of one run; the answer comes first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.answers.measured import MeasuredSteps
from otb_analysis.answers.run import RunAnswers
from otb_analysis.answers.runs import in_common
from otb_analysis.config import section
from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators.proved import trained_labels
from otb_analysis.figures.comparison import DECIDES, RATIOS
from otb_analysis.figures.pairs import (
    NoiseInfo,
    NoiseRow,
    PairPanel,
    compare_curves,
    compare_estimators,
    differs,
    on_same_rollouts,
)
from otb_analysis.figures.runs import (
    Differences,
    Pairing,
    default_values,
    first_groups,
    group_keys,
    pair_groups,
    pair_runs,
)
from otb_analysis.figures.styles import MISSING, interval_cell, labels, number
from otb_analysis.phases import plural
from otb_analysis.statistics import MIN_CLUSTERS, REFERENCE, Interval, Update, is_informative, seed_mean, update_ratios
from otb_analysis.statistics.gradients import has_signal
from otb_analysis.statistics.moments import clusters, deleted_moments, truth_of, typical
from otb_analysis.types import Gram, Label, Proved

NOT_MEASURED = (
    "No gradient noise is compared: no step was measured in both. Give both the same --measure settings, or "
    "compare estimators of one run."
)
OTHER_PROMPTS = "The runs' own updates are not compared: at shared measured steps they answered other prompts."
UNLIKE = "No gradient noise is compared: the runs differ in {}, and such gradients do not compare."
NOT_SAMPLED = "No gradient noise is compared: another sampler drew the tokens."
NO_SIGNAL = (
    "at every step all rewards within a group were equal, so its gradients say nothing; "
    "start from a policy that sometimes succeeds, or choose an easier task."
)
CUT = (
    "at every step all answers ended at max_new_tokens = {budget}, and all rewards within a group were equal, so its "
    "gradients say nothing; raise --sample.max-new-tokens."
)
ENDS = ("heldout_reward", "heldout_reward_low", "heldout_reward_high")


@dataclass(frozen=True)
class Pair:
    """Two sides with what differs."""

    a: str
    b: str
    verdict: str  # What differs, in a sentence or two of at most 40 words
    note: str  # How the two are paired
    panels: tuple[PairPanel, ...]
    noise: NoiseInfo

    @property
    def notes(self) -> list[str]:
        """What the intervals do not say."""
        return [*filter(None, [self.note, drift_note(self.panels)]), *self.noise.notes]


@dataclass(frozen=True)
class Sides:
    """What to compare where it is not what the page begins with; empty for that."""

    setting: str = ""  # A setting by which the runs are grouped
    a: str = ""  # Its value of A; of one run the estimator A, in the page's words
    b: str = ""


def pairing_of(runs: Mapping[str, RunAnswers], sides: Sides | None = None) -> Pairing | None:
    """Return groups whose seeds are paired, else the second of two runs against the first; None of other runs.

    Raises:
        InputError: No seed is in both groups that `sides` asks for, or there is no such setting or value.
    """
    configs = {name: run.config for name, run in runs.items()}
    if sides is None or not sides.setting:
        return pair_runs(*runs) if len(runs) == 2 else first_groups(configs)
    key, keys = sides.setting, group_keys(configs)
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


def pair_of(runs: Mapping[str, RunAnswers], pairing: Pairing) -> Pair:
    """Compare two runs, or two groups of them: held-out reward first, then gradient noise."""
    chosen = {name: runs[name] for name in pairing.runs}
    steps = {name: run.steps for name, run in chosen.items()}
    known, grams = in_common(list(chosen.values()))
    of_runs = {name: RunGrams(run.config, of, run.scope) for (name, run), of in zip(chosen.items(), grams, strict=True)}
    alarms = [f"{name}: {run.alarm}" for name, run in chosen.items() if run.alarm]
    panels = compare_curves(steps, pairing)
    noise = NoiseInfo((), (NOT_SAMPLED,)) if alarms else compare_noise(pairing, of_runs, known)
    verdict = " ".join([*alarms, *_reward(panels, chosen, pairing), *_noise(noise)])
    nothing = "A and B share no step, so nothing can be compared."
    return Pair(pairing.a, pairing.b, verdict or nothing, pairing_note(pairing), panels, noise)


def pairing_note(pairing: Pairing) -> str:
    """Say how A and B are paired, what else differs, and which runs are left out."""
    words = f"Paired by seed: {len(pairing.pairs)} pairs, Student's 95 % intervals over seeds."
    if pairing.by != "seed":
        blocks = "One pair of runs: 95 % intervals are over blocks of steps."
        words = f"{blocks} They hold for these two runs, not for other seeds."
    if pairing.also:
        words += f" The pairs differ in more than what is compared: {', '.join(pairing.also)}."
    return words + (f" Without a partner of the same seed: {', '.join(pairing.left_out)}." if pairing.left_out else "")


def left_out_note(differences: Differences) -> str:
    """Say about what a table of configurations is silent; empty where about nothing."""
    count = differences.left_out
    note = f"Left out, not recorded in some runs and at its default in the others: {plural(count, 'setting')}."
    return note * (count > 0)


def zero_note(panels_: Sequence["PairPanel"]) -> str:
    """Say which values of 0 are not drawn, since a logarithmic axis has none; empty where there are none."""
    counts = {panel.quantity.title.lower(): int(panel.at_zero.sum()) for panel in panels_}
    which = ", ".join(f"{title} at {count} of them" for title, count in counts.items() if count)
    return which and f"Blocks where A or B is 0 are not drawn, since a logarithmic axis has no 0: {which}."


def drift_note(panels_: Sequence["PairPanel"]) -> str:
    """Say for which quantities the interval over blocks of steps is too short; empty where for none."""
    which = ", ".join(panel.quantity.title.lower() for panel in panels_ if panel.drifts)
    return which and (
        f"The difference drifts over training in {which}: neighbouring blocks are alike, so these intervals are too "
        "short. Read the blocks, and compare several seeds."
    )


@dataclass(frozen=True)
class RunGrams:
    """What one run measured of gradients: Gram matrices by step, reduced ones suffice."""

    config: Mapping[str, Any]
    grams: Mapping[int, Gram]
    scope: str


def compare_noise(pairing: Pairing, runs: Mapping[str, RunGrams], known: Proved) -> NoiseInfo:
    """Compare what A and B train with, on the measured steps that the runs of a pair share.

    Each run's own update over the other's, on the same prompts; and, where the estimators differ, the one over the
    other on the same rollouts, those of both. Prompts are the clusters of both intervals.
    """
    sides = [[runs[pair[side]] for pair in pairing.pairs] for side in (0, 1)]
    steps = [sorted(set(one.grams) & set(other.grams)) for one, other in zip(*sides, strict=True)]
    trained = [{next(iter(trained_labels(r.config, r.grams.values())), None) for r in side} for side in sides]
    if not any(steps) or any(len(labels) != 1 or None in labels for labels in trained):
        return NoiseInfo((), (NOT_MEASURED,))
    every = [one for side in sides for one in side]
    for name, values in (("task", {str(r.config.get("task")) for r in every}), ("scope", {r.scope for r in every})):
        if len(values) > 1:
            return NoiseInfo((), (UNLIKE.format(name),))
    a, b = (label for labels in trained for label in labels if label is not None)
    of_a, of_b = ([one.grams[s] for one, shared in zip(side, steps, strict=True) for s in shared] for side in sides)
    rows = []
    named = all(gram.prompt is not None for gram in (*of_a, *of_b))
    if named and clusters(of_a)[1] == clusters(of_b)[1]:
        above, below = (Update(g, one, typical([x.n_prompts for x in g])) for g, one in ((of_b, b), (of_a, a)))
        truth = truth_of([*of_a, *of_b], REFERENCE, known)
        pair = update_ratios(above, below, truth, known)
        along = all(has_signal(deleted_moments(grams, one, truth)) for grams, one in ((of_a, a), (of_b, b)))
        may = {"variance": True, "sf": pair.c_known or along, "efficiency": along}
        ratios = tuple(r if is_informative(r := getattr(pair, name)) and may[name] else None for name, *_ in RATIOS)
        what, decides = "each run's own rollouts: updates as trained", "sf" if pair.c_known else "efficiency"
        rows.append(NoiseRow(what, ratios, len(of_a), len(clusters(of_a)[1]), decides))
    notes = () if rows else (OTHER_PROMPTS,)
    both = [gram for gram in (*of_a, *of_b) if a in gram.labels and b in gram.labels]
    sizes = {round(gram.n_rollouts / max(gram.n_prompts, 1)) for gram in both}
    if a != b and len(sizes) == 1:
        _, same = on_same_rollouts(both, a, b, known)
        rows.append(replace(same, what=f"the rollouts of all these runs: {same.what}"))
    return NoiseInfo(tuple(rows), notes)


def estimator_pair(measured: MeasuredSteps, a: str = "", b: str = "") -> Pair | None:
    """Compare two estimators of one run on the same rollouts; None where fewer than two were measured.

    Args:
        a: In the page's words, as `rloo` or `otb · exact`; empty for what the page begins with. `b` likewise.

    Raises:
        InputError: An estimator was not measured, or both are the same.
    """
    names = estimator_names(measured)
    if len(names) < 2:
        return None
    chosen = [one or first for one, first in zip((a, b), first_estimators(measured), strict=True)]
    for name in chosen:
        if name not in names:
            raise InputError(f"estimator {name!r} was not measured; {nearest(name, names)}")
    if chosen[0] == chosen[1]:
        raise InputError(f"A and B are both {chosen[0]}; choose another A or B.")
    if measured.alarm:
        return Pair(chosen[0], chosen[1], measured.alarm, "", (), NoiseInfo((), (NOT_SAMPLED,)))
    grams = dict(zip(measured.steps or count(), measured.grams, strict=False))  # of several runs they are counted
    whose = "the rollouts of this run" if measured.steps else "the rollouts of all these runs"
    panels, noise = compare_estimators(grams, names[chosen[0]], names[chosen[1]], measured.known)
    # Any pair may be asked for, so one is judged as all baselines are: together.
    decision = measured.decided(names[chosen[0]])
    one = decision.comparison_of(names[chosen[1]])
    # Of a family of multiples the first one was judged, by the ratio that it can be.
    looks: Any = one and {"together": one.together, "looked_at": decision.looked_at, "decides": DECIDES[one.by]}
    noise = replace(noise, rows=tuple(replace(row, what=f"{whose}: {row.what}", **looks or {}) for row in noise.rows))
    noise = noise if noise.rows else NoiseInfo((), (NOT_MEASURED,))
    verdict = " ".join(_noise(noise) or noise.notes)
    return Pair(chosen[0], chosen[1], verdict, "", panels, noise)


def first_estimators(measured: MeasuredSteps) -> tuple[str, str]:
    """Return the two of at least two estimators to begin with: what trained, and what is better, or may be.

    That is the one to train with, or else the best against `rloo`, or else the nearest; never the same update as A.
    """
    names = {label: name for name, label in estimator_names(measured).items()}
    decision, over_rloo = measured.decision, measured.over_rloo
    telling = (decision.best, over_rloo.best, decision.nearest, over_rloo.nearest)
    labels_ = [*(one.label for one in telling if one), REFERENCE, *names]
    a = decision.against if decision.against in names else next(iter(names))
    other = [label for label in labels_ if label in names and label != a]
    return names[a], names[next((one for one in other if decision.comparison_of(one)), other[0])]


def estimator_names(measured: MeasuredSteps) -> dict[str, Label]:
    """Return every measured estimator by what it is called in figures."""
    every = dict.fromkeys(label for gram in measured.grams for label in gram.labels)
    return {name: label for label, name in labels(every).items()}


def _reward(panels: Sequence[PairPanel], runs: Mapping[str, RunAnswers], pairing: Pairing) -> list[str]:
    """Say by how much held-out rewards differ at the last shared evaluation; without any, training rewards.

    One at the first step is none: it was before training. Of seeds the interval is Student's. Both runs of one pair
    answer the same held-out prompts, whose answers are stored as their mean alone, so their interval takes the two
    errors as independent: too wide rather than too short.
    """
    of_column = {panel.quantity.column: panel for panel in panels}
    value, over, what = None, "held-out prompts", ""
    panel, begun = of_column.get("heldout_reward"), min(runs[name].series.step[0] for name in pairing.pairs[0])
    if panel is not None and panel.step[-1] > begun:
        what, words = f"Held-out reward at step {panel.step[-1]}", "held-out reward of B − A"
        difference = panel.b[:, -1] - panel.a[:, -1]
        if pairing.by == "seed":
            value = seed_mean(difference, words)
        else:
            of_runs = [runs[n].steps.set_index("step").reindex(columns=list(ENDS)) for n in pairing.pairs[0]]
            at = np.array([rows.loc[panel.step[-1]].to_numpy(np.float64, na_value=np.nan) for rows in of_runs])
            middle, (down, up) = float(difference[0]), np.abs(at[:, 1:] - at[:, :1]).T  # of A, of B
            low, high = float(middle - np.hypot(down[1], up[0])), float(middle + np.hypot(up[1], down[0]))
            known = np.isfinite([low, high]).all()
            value = Interval(middle, low if known else None, high if known else None, 1, words)
    if (value is None or value.low is None) and (panel := of_column.get("reward_mean")) is not None:
        value, over, what = panel.whole, "blocks of steps", "Training reward"
        if value is not None and panel.drifts:  # blocks that are alike are no independent clusters
            value = replace(value, low=None, high=None)
    if value is None:
        return []
    if value.low is None or value.high is None:
        return [f"{what}: B − A is {_signed(value.estimate)}, without an interval."]
    told = "" if differs(value, 0.0) else ", not told from 0"
    over = f"{len(pairing.pairs)} seeds" if pairing.by == "seed" else f"{over}; other seeds may differ"
    ends = f"({_signed(value.low)} to {_signed(value.high)})"
    return [f"{what}: B − A is {_signed(value.estimate)} {ends}{told}, over {over}."]


def _noise(noise: NoiseInfo) -> list[str]:
    """Say which of the two is less noisy: by variance where both step lengths are proved, else by efficiency."""
    known = [(row, one) for row in noise.rows if (one := row.judged) is not None and one.low is not None]
    if not known:
        n = max((row.n_prompts for row in noise.rows), default=0)
        why = f"{n} prompts are too few" if n < MIN_CLUSTERS else f"noise hides the true gradient on {n} prompts"
        return [f"Gradient noise at equal progress is not told apart: {why}."] if noise.rows else []
    row, ratio = known[0]
    what = "variance at equal progress" if row.decides == "sf" else "efficiency"
    told = "" if differs(ratio, 1.0) else ", not told from 1"
    told = f", all {row.looked_at} baselines looked at together" * (row.looked_at > 1) + told
    ends = f"{number(ratio.low)} to {number(ratio.high)}"
    return [f"Gradient noise: B has {number(ratio.estimate)} ({ends}) times A's {what}{told}."]


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def learning_notes(run: RunAnswers) -> list[str]:
    """Return what to say of a run: status unless complete, missing batches, last evaluation, why it cannot learn."""
    (status, reason), numbers = run.store.live_status, run.store.complete_steps()
    notes = [] if status == "complete" else [": ".join(filter(None, (status, reason)))]
    batches = numbers[-1] - numbers[0] + 1 if numbers else 0
    if batches > len(numbers) and section(run.config, "source").get("made_by") == "OTBMonitor":
        notes.append(
            f"{batches - len(numbers):,} of {batches:,} batches are missing: not watched, failed, or without a reward"
        )
    steps: Any = run.steps
    evaluated = steps.dropna(subset=["heldout_reward"])
    if len(evaluated):
        last = evaluated.iloc[-1]
        shown = {"reward": "heldout_reward"}
        if pd.notna(last["heldout_samples"]) and last["heldout_samples"] > 1:  # older runs answered each prompt once
            shown[f"avg@{last['heldout_samples']:.0f}"] = "heldout_success"
            shown[f"pass@{last['heldout_pass_k']:.0f}"] = "heldout_pass_at_k"
        parts = []
        for name, of in shown.items():
            if pd.notna(low := last[f"{of}_low"]):
                parts.append(f"{name} {interval_cell(Interval(last[of], low, last[f'{of}_high'], 0, ''), '.3f')}")
        notes += [f"held-out prompts at step {last['step']:.0f}: {' · '.join(parts)}"] if parts else []
    if bool((steps["n_zero_variance_groups"] >= steps["n_prompts"]).fillna(False).all()):
        cut = bool((steps["n_truncated"] >= steps["n_rollouts"]).fillna(False).all())
        budget = section(run.config, "sample").get("max_new_tokens", "its limit")
        notes.append(CUT.format(budget=budget) if cut else NO_SIGNAL)
    return [note for note in notes if note]


def learning_table(runs: Mapping[str, RunAnswers]) -> pd.DataFrame:
    """Return one row per run as it is read: what it learned, how large its gradients were, where its time went."""
    rows = []
    for name, run in runs.items():
        steps: Any = run.steps
        heldout = steps["heldout_reward"].dropna()
        edge = max(1, len(steps) // 10)
        numbers = {
            "‖ḡ‖": (steps["grad_norm"].median(), ".3g"),
            "clipped": (steps["clipped"].mean(), ".0%"),
            "tokens": (steps["n_tokens"].sum(min_count=1), ",.0f"),
        }
        for part in ("sample", "update", "measure"):
            numbers[f"{part} s"] = steps[f"seconds_{part}"].sum(min_count=1), ".0f"
        rows.append({
            "run": name,
            "estimator": run.estimator or MISSING,
            "steps": str(len(steps)),
            "held-out reward": f"{heldout.iloc[0]:.3f} → {heldout.iloc[-1]:.3f}" if len(heldout) else MISSING,
            "reward": f"{steps['reward_mean'].head(edge).mean():.3f} → {steps['reward_mean'].tail(edge).mean():.3f}",
            **{column: MISSING if pd.isna(x) else number(float(x), form) for column, (x, form) in numbers.items()},
        })  # fmt: skip
    return pd.DataFrame(rows)


def provenance_table(runs: Mapping[str, RunAnswers]) -> pd.DataFrame:
    """Return what each run was made with, from its run.json."""
    rows = []
    for name, run in runs.items():
        info: Any = run.store.info
        git, packages = info.get("git") or {}, info.get("packages") or {}
        rows.append({
            "run": name, "created": info.get("created"), "seed": run.config.get("seed"), "scope": run.scope,
            "schema": info.get("schema_version"), "commit": str(git.get("commit") or "–")[:12],
            "changed files": bool(git.get("diff")), "torch": packages.get("torch", "–"),
        })  # fmt: skip
    return pd.DataFrame(rows)
