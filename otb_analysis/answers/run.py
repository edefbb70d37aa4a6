"""What one run says, each answer once and when it is first asked; and runs pooled where they can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.answers.holders import Attributed, NotAttributed, Tokens, attributed_tokens, attribution_of
from otb_analysis.answers.measured import MeasuredSteps
from otb_analysis.answers.proxy import Proxy, fidelity_of, proxy_line, proxy_of
from otb_analysis.answers.sentences import NOT_MEASURED, size_line
from otb_analysis.answers.traits import Traits, traits_of
from otb_analysis.answers.triage import Triage, triage, triage_row, worst_first
from otb_analysis.checks.sampling_report import SamplingReport, recorded_line, sampling_lines, sampling_report
from otb_analysis.diagnostics import (
    ChangePoint,
    Finding,
    Outlier,
    StepSeries,
    change_points,
    diagnose,
    single_step_outliers,
)
from otb_analysis.diagnostics.detectors import sampling_certificate
from otb_analysis.diagnostics.outliers import LEAST, OUTLIERS
from otb_analysis.diagnostics.planner import Planner, plan, reward_groups
from otb_analysis.errors import InputError
from otb_analysis.estimators import proved, proved_in_all, standing_for_truth, unproved_because
from otb_analysis.estimators.proved import trained_labels
from otb_analysis.figures.numbers import number
from otb_analysis.statistics import REFERENCE, Fidelity
from otb_analysis.store import RunStore, runs_df, step_series
from otb_analysis.store.runs import can_be_opened, estimator_names
from otb_analysis.types import Gram, Label, Proved

PLAIN = (
    "The sampling check is clean. If no answer was left out for its outcome, add --plain-sampling: unbiased baselines "
    "are then compared by variance alone, which takes far fewer prompts."
)


LISTED = 2
"""Outliers that the sentence names; all of them are marked in the figure."""
HOLDS = {"advantage_max": ("tokens", "abs(advantage)"), "length_max": ("rollouts", "length")}
"""Table and number that say which rollout a step's largest value is of."""
WHOLE = "all"
"""The scope of a run that measured the gradient of all parameters; those of unlike scopes do not compare."""


class RunAnswers:
    """What one run says. Safe to share between pages: every answer is made once and never changed."""

    def __init__(self, store: RunStore) -> None:
        """Answer for a run as it stands when each answer is first asked."""
        self.store = store
        self.name = store.path.name

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The stored configuration, nested; empty where there is none."""
        config = self.store.info.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def estimator(self) -> str:
        """Name of the estimator that trained; empty where the configuration has none."""
        chosen = self.config.get("estimator") or {}
        return str(chosen.get("name", "") if isinstance(chosen, Mapping) else chosen)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The table `steps`, in order.

        Raises:
            InputError: There is no complete step.
        """
        steps = self.store.steps_df()
        if steps.empty:
            raise InputError(f"run {self.name} has no complete step yet; wait for one, or train it again.")
        return steps.sort_values("step")

    @cached_property
    def series(self) -> StepSeries:
        """The scalars of every step."""
        return step_series(self.steps)

    @cached_property
    def findings(self) -> list[Finding]:
        """What every detector says."""
        return diagnose(self.series)

    @cached_property
    def changes(self) -> list[ChangePoint]:
        """Where a scalar changed its level for good."""
        return change_points(self.series)

    @property
    def change_line(self) -> str:
        """The change points in one sentence."""
        if not self.changes:
            return "Change points: none of gradient norm, entropy, length and tail changed its level for good."
        listed = [f"{p.column} at step {p.step} ({number(p.before)} → {number(p.after)})" for p in self.changes]
        return f"Change points: {', '.join(listed)}."

    @cached_property
    def outliers(self) -> list[Outlier]:
        """Single steps far above the steps around them, the largest multiple first."""
        return single_step_outliers(self.series)

    @cached_property
    def outlier_line(self) -> str:
        """The largest of them in one sentence, with the record that a length or an advantage is of."""
        if not self.outliers:
            looked = [name for name in OUTLIERS if len(self.series.recorded(name)[0]) > LEAST]
            return f"Single-step outliers: none of {', '.join(looked)}." if looked else ""
        listed = []
        for one in self.outliers[:LISTED]:
            whose = self._record(one)
            usual = f"{number(one.multiple)} × the usual {number(one.usual)}{', ' * bool(whose)}{whose}"
            listed.append(f"{one.column} {number(one.value)} at step {one.step} ({usual})")
        more = f", {len(self.outliers) - LISTED} more" if len(self.outliers) > LISTED else ""
        return f"Single-step outliers: {'; '.join(listed)}{more}."

    def _record(self, outlier: Outlier) -> str:
        """Return the rollout that an outlier's value is of, with its place in the file it came from; empty without."""
        if outlier.column not in HOLDS:
            return ""
        table, size = HOLDS[outlier.column]
        query = f"SELECT rollout FROM {table} WHERE {size} IS NOT NULL ORDER BY {size} DESC, rollout LIMIT 1"
        largest = self.store.sql(query, steps=[outlier.step])
        if largest.empty:
            return ""
        n = int(largest["rollout"].iloc[0])
        row = self.store.rollouts_df([outlier.step], where="rollout = ?", params=[n]).iloc[0]
        if pd.isna(row.get("source_record")):
            return f"rollout {n}"
        return f"rollout {n}: {row['source_file']} record {row['source_record']}"

    @property
    def mismatch_line(self) -> str:
        """How far sampler and trainer are apart, in one sentence; empty where their log-probabilities are unknown."""
        step, (rms, k3, share) = self.series.recorded("mismatch_rms", "mismatch_k3", "mismatch_ratio_share")
        if not step.size:
            return ""
        worst = int(rms.argmax())
        return (
            f"Sampler against trainer: {number(float(np.median(rms)))} nats (root mean square), k3 "
            f"{number(float(np.median(k3)))} nats, {np.median(share):.2%} of ratios beyond 2 (medians over steps); at "
            f"worst {number(float(rms[worst]))}, {number(float(k3[worst]))}, {share[worst]:.2%} at step {step[worst]}."
        )

    @cached_property
    def triage(self) -> Triage:
        """The run in one line."""
        status, reason = self.store.standing
        return triage(self.name, self.estimator, status, self.steps, self.findings, reason=reason)

    @cached_property
    def sampling(self) -> SamplingReport | None:
        """The sampling check of recorded rollouts; None where no token was scored again."""
        rows = self.store.frame("sampling")
        return None if rows.empty else sampling_report(rows)

    @cached_property
    def alarm(self) -> str:
        """The sentence of the sampling check where another sampler drew the tokens; then nothing here is proved."""
        if self.sampling is not None:
            return sampling_lines(self.sampling)[0] if self.sampling.alarm else ""
        # A policy that trains on older rollouts is known to be another sampler, and nothing is proved of it anyway.
        certificate = None if unproved_because(self.config) else sampling_certificate(self.series)
        if certificate is None or certificate.alarm_step is None:
            return ""
        return f"Tokens were not drawn by the policy that is scored: {certificate.reason}"

    @cached_property
    def alarms(self) -> tuple[str, ...]:
        """What stands before everything else: another sampler, and what recorded log-probabilities are instead."""
        stated = (self.config.get("sample") or {}).get("temperature")
        cause = "" if self.sampling is None else recorded_line(self.sampling, stated)
        return tuple(filter(None, [self.alarm, cause]))

    @property
    def believed(self) -> Mapping[str, Any]:
        """The configuration, as far as it may be believed: nothing of it where another sampler drew the tokens."""
        return {} if self.alarm else self.config

    @cached_property
    def grams(self) -> dict[int, Gram]:
        """What compares the estimators of every measured step."""
        truth = standing_for_truth(self.store.stored_labels(), self.believed)
        return self.store.reduced_grams((REFERENCE, truth))

    @cached_property
    def known(self) -> Proved:
        """What is proved of the estimators."""
        return proved({label for gram in self.grams.values() for label in gram.labels}, self.believed)

    @cached_property
    def trained(self) -> tuple[Label, ...]:
        """The estimator that trained, where it was measured."""
        return trained_labels(self.config, self.grams.values())

    @cached_property
    def measured(self) -> MeasuredSteps | None:
        """All measured steps with what they decide; None without any."""
        if not self.grams:
            return None
        reserved = list[str]()
        if not self.alarm and not self.trained:
            who = f"Its own estimator, {self.estimator}," if self.estimator else "What trained is not stored, or"
            name_it = "; name it as --estimator.name" if "source" in self.config else ""
            reserved.append(f"{who} was not measured, so all are compared with {REFERENCE[0]}{name_it}.")
        if not self.alarm and (reason := unproved_because(self.config)):
            reserved.append(f"Step lengths are estimated for every baseline of this run, since {reason}.")
            reserved += [PLAIN] if "source" in self.config and self.sampling is not None else []
        about = (self.trained, self.config, str(self.store.path), self.alarm, tuple(reserved), self._size_line)
        return MeasuredSteps(self.design, tuple(self.grams.values()), self.known, *about)

    def _size_line(self) -> str:
        # What trained may be rloo with another step length, which depends on the size; what it judges by does not.
        like_rloo = self.measured is not None and self.measured.beside is None
        return size_line(self.planner, () if like_rloo else self.trained)

    @property
    def scope(self) -> str:
        """Whose parameters' gradient was measured, as the configuration says; all where it does not say."""
        measure = self.config.get("measure")
        return str(measure.get("scope", WHOLE)) if isinstance(measure, Mapping) else WHOLE

    @property
    def design(self) -> str:
        """What makes measured steps comparable: task, group size, soft tokens and scope."""
        sizes = [gram.n_rollouts / max(gram.n_prompts, 1) for gram in self.grams.values()]
        sample = self.config.get("sample")
        soft = sample.get("soft") if isinstance(sample, Mapping) else 0  # their J is that of other answers
        of_part = "" if self.scope == WHOLE else f", scope {self.scope!r}"
        size = round(sum(sizes) / len(sizes)) if sizes else 0
        task = self.config.get("task", "task not stored")
        return f"{task}, groups of {size}{f', {soft} soft tokens' * bool(soft)}{of_part}"

    @cached_property
    def rewards(self) -> pd.DataFrame:
        """Step, group, reward and prompt of every rollout."""
        return self.store.rollouts_df(columns=["step", "group", "reward", "prompt_id"])

    @cached_property
    def traits(self) -> Traits:
        """What the rollouts show without a model."""
        return traits_of(self.store, self.config, self.steps, self.rewards, self.planner.filtered)

    @cached_property
    def planner(self) -> Planner:
        """How efficient the rollouts would be in groups of other sizes."""
        if self.alarm:  # neither the gradients nor the success rates are those of the policy
            return plan({}, {}, [], 0)
        subgroups = self.store.subgroup_grams() if self.grams else {}
        steps = len(self.store.complete_steps())
        return plan(self.grams, subgroups, reward_groups(self.rewards), steps, self.known)

    @cached_property
    def tokens(self) -> Tokens | None:
        """Who holds the gradient over all attributed steps; None without one."""
        return attributed_tokens(self.store)

    @cached_property
    def proxy(self) -> Proxy | None:
        """Whether the free proxy can stand for exact norms; None where no token has one."""
        return proxy_of(self.store, [] if self.alarm else list(self.grams.values()), self.known)

    @cached_property
    def fidelity(self) -> list[tuple[str, Fidelity]]:
        """How well the proxy follows exact norms, for single tokens and for their running sums."""
        return fidelity_of(self.store)

    def attribution(self, step: int) -> Attributed | NotAttributed:
        """Return who holds the gradient of a step, or why that is not known.

        Raises:
            InputError: There is no such step.
        """
        return attribution_of(self.store, self.config, step)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """What the run says of its baseline and its group size, as every door says it; an alarm first."""
        if self.measured is not None:
            return self.measured.lines
        return (self.alarm, NOT_MEASURED) if self.alarm else (NOT_MEASURED, *filter(None, [self._size_line()]))

    @cached_property
    def proxy_line(self) -> str:
        """What the proxy costs, in a sentence; empty where nothing is known, or another sampler drew the tokens."""
        return "" if self.alarm or self.proxy is None else proxy_line(self.proxy)


def by_name(stores: Sequence[RunStore]) -> dict[str, RunAnswers]:
    """Return runs by what tells them apart: their names, after as many folders as repeated ones need; each run once."""
    folders, names = dict[Path, RunStore](), dict[str, RunAnswers]()
    for store in stores:
        folders.setdefault(store.path.resolve(), store)
    for folder, store in folders.items():
        others = [other.parts for other in folders if other != folder and other.name == folder.name]
        count = 1
        while any(other[-count:] == folder.parts[-count:] for other in others):
            count += 1
        answers = RunAnswers(store)
        answers.name = "/".join(folder.parts[-count:]) if count > 1 else store.path.name
        names[answers.name] = answers
    return names


def opened(paths: Sequence[Path]) -> dict[str, RunAnswers]:
    """Open runs that are compared, by what tells them apart.

    Raises:
        InputError: A run does not exist or has no complete step.
        StoreError: A run cannot be read.
    """
    runs = by_name([RunStore(path) for path in paths])
    for run in runs.values():
        run.steps  # noqa: B018  # says which run has no step, before anything is computed
    return runs


def reportable(paths: Sequence[Path]) -> dict[str, RunAnswers]:
    """Open runs that can stand in one report.

    Raises:
        InputError: There is none, one has no step, or they disagree in scope.
        StoreError: One cannot be read.
    """
    if not paths:
        raise InputError("there is no run to report on; pass names of runs, as in otb report demo-otb-s0.")
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        raise InputError(f"runs are {', '.join(names)}; pass each name once.")
    runs = opened(paths)
    if apart := unlike_scopes(runs):
        raise InputError(f"{apart}; report them apart, or train one again with the other's --measure.scope.")
    return runs


def designs(runs: Mapping[str, RunAnswers]) -> dict[str, MeasuredSteps]:
    """Return the measured steps of some runs, pooled where they can be compared: of one task, group size and scope.

    Bias and variance depend on N, and tasks and scopes do not share a gradient, so steps that differ in any of these
    are never averaged. Steps of different policies on one task are: the figures then describe an average policy of
    these runs. Proved is what is proved in all of them.
    """
    parts: dict[str, list[RunAnswers]] = {}
    for run in runs.values():
        if run.grams:
            parts.setdefault(run.design, []).append(run)
    pooled = dict[str, MeasuredSteps]()
    for name, some in parts.items():
        first = some[0].measured
        assert first is not None
        pooled[name] = replace(first, name=name)
        if len(some) > 1:
            known, grams = in_common(some)
            reserved = [f"{run.name}: {line}" for run in some if run.measured for line in run.measured.reservations]
            pooled[name] = replace(
                first, name=name, known=known,
                grams=tuple(gram for of_run in grams for gram in of_run.values()),
                trained=tuple(dict.fromkeys(label for run in some for label in run.trained)),
                alarm=" ".join(f"{run.name}: {run.alarm}" for run in some if run.alarm),
                reservations=tuple(reserved), sized=str, _decided={},
            )  # fmt: skip
    return pooled


def in_common(runs: Sequence[RunAnswers]) -> tuple[Proved, list[dict[int, Gram]]]:
    """Return what is proved in all of some runs, and each one's matrices for it: reduced anew where its own differ."""
    labels = [{label for gram in run.grams.values() for label in gram.labels} for run in runs]
    known = proved_in_all([(of, run.believed) for of, run in zip(labels, runs, strict=True)])
    grams = list[dict[int, Gram]]()
    for run in runs:
        own = all(gram.stands(known.truth) for gram in run.grams.values())
        grams.append(run.grams if own else run.store.reduced_grams((REFERENCE, known.truth)))
    return known, grams


def unlike_scopes(runs: Mapping[str, RunAnswers]) -> str:
    """Return which two runs measured gradients of other parameters, for a remedy to follow; empty where none did."""
    for name, run in runs.items():
        first, one = next(iter(runs.items()))
        if run.scope != one.scope:
            return (
                f"{first} measured gradients of scope {one.scope!r} but {name} of {run.scope!r}, which do not compare"
            )
    return ""


def compare(*paths: str | Path) -> MeasuredSteps:
    """Return what the measured steps of one run say of its baselines, or of several runs that can be pooled.

    `.lines` are the sentences, `.decision` the claims, `.to_dataframe()` every estimator with its intervals.

    Raises:
        InputError: A run does not exist, none measured its estimators, or the runs cannot be pooled.
        StoreError: A run cannot be read.
    """
    found = designs(opened([Path(path) for path in paths]))
    if not found:
        raise InputError(NOT_MEASURED)
    if len(found) > 1:
        raise InputError(f"these runs cannot be pooled: {'; '.join(found)}; compare each design alone.")
    return next(iter(found.values()))


def triaged(root: Path) -> list[Triage]:
    """Return every run of a folder as the page Triage lists them, the worst first.

    Raises:
        StoreError: The folder cannot be listed.
    """
    table: Any = runs_df(root)
    names, readable = estimator_names(table), can_be_opened(table)

    def judged(run: str) -> tuple[pd.DataFrame, list[Finding]]:
        answers = RunAnswers(RunStore(root / run))
        return answers.steps, answers.findings

    return worst_first([
        triage_row(row, names.get(run, ""), (lambda run=run: judged(run)) if can else None)
        for run, can, (_, row) in zip(map(str, table["run"]), readable, table.iterrows(), strict=True)
    ])  # fmt: skip
