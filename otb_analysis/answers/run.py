"""What one run says, each answer once and when it is first asked."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.answers.holders import (
    SIZED_BY,
    Attributed,
    NotAttributed,
    Sized,
    Tokens,
    attributed_tokens,
    attribution_command,
    sized,
)
from otb_analysis.answers.measured import MeasuredSteps, not_measured, size_line
from otb_analysis.answers.proxy import Proxy, fidelity_of, proxy_line, proxy_of
from otb_analysis.answers.traits import Traits, traits_of
from otb_analysis.answers.triage import Triage, triage
from otb_analysis.checks.sampling_report import SamplingReport, recorded_line, sampling_lines, sampling_report
from otb_analysis.config import section
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
from otb_analysis.estimators import proved, standing_for_truth, unproved_because
from otb_analysis.estimators.proved import trained_labels
from otb_analysis.figures.curves import NAMES
from otb_analysis.figures.styles import number
from otb_analysis.statistics import REFERENCE, Fidelity
from otb_analysis.store import RunStore, attributed_steps, step_attribution, step_series
from otb_analysis.store.token_arrays import floats
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

    @property
    def staleness(self) -> int:
        """By how many batches rollouts are older than the policy, as configured."""
        return section(self.config, "objective").get("staleness") or 0

    @cached_property
    def findings(self) -> list[Finding]:
        """What every detector says."""
        return diagnose(self.series, self.staleness)

    @cached_property
    def learned(self) -> list[int]:
        """Steps that say which tokens held their gradient, where it was not 0."""
        return self._moved(attributed_steps(self.store))

    @cached_property
    def sized_steps(self) -> list[int]:
        """The same, or in a run without any the steps that say which tokens were large, exact ones where there are."""
        trained = set(self.store.steps_with("tokens", "advantage"))
        known = (trained.intersection(self.store.steps_with("tokens", column)) for column in SIZED_BY)
        return self.learned or next(filter(None, (self._moved(sorted(steps)) for steps in known)), [])

    def _moved(self, steps: list[int]) -> list[int]:
        norm = floats(self.steps.reindex(columns=["grad_norm"]), "grad_norm")
        zero = set(self.steps["step"][norm == 0])
        return [step for step in steps if step not in zero]

    @cached_property
    def trouble(self) -> int | None:
        """The step at which the reward fell, or else the first alarm, or else what was first seen; None where calm."""
        if (fell := self.triage.reward_fell) is not None:
            return fell
        alarms = [one.alarm_step for one in self.findings if one.alarm_step is not None]
        return min(alarms, default=self.triage.first_warning)

    @cached_property
    def worth_reading(self) -> tuple[int, str] | None:
        """The step whose rollouts say most of a run that collapsed, or ended after its reward fell, and which it is.

        It is `look` where that is before the trouble, else the last step before it. None of others: their newest do.
        """
        trouble = self.trouble
        before = [int(step) for step in self.series.step if trouble is not None and step < trouble]
        ended = self.triage.status != "running" and self.triage.reward_fell is not None
        if not before or not (ended or self.triage.state == "collapsed"):
            return None
        known = "attributed step" if self.learned else "measured step"
        step, kind = (self.look, known) if self.look in before else (before[-1], "step")
        what = "the first alarm" if self.triage.reward_fell is None else "the reward fell"
        return step, f"Of step {step}, the last {kind} before {what} at step {trouble}."

    @cached_property
    def look(self) -> int:
        """The step to look at first: the last of `told` before the reward fell, or else before the first alarm.

        Without such a step it is the first of them. Where nothing fired it is the last. A run without any is looked at
        where the trouble is, or else at its last step.
        """
        if (trouble := self.trouble) is None:
            return max(self.sized_steps, default=int(self.series.step[-1]))
        before = [step for step in self.sized_steps if step < trouble]
        return max(before) if before else min(self.sized_steps, default=trouble)

    @property
    def look_line(self) -> str:
        """Which step `look` is, in a sentence; empty where it is the last, or nothing says which tokens were large."""
        if self.look == self.series.step[-1] or not self.sized_steps:
            return ""
        kind = "one with shares of the gradient" if self.learned else "one whose tokens have a size"
        after = self.trouble is not None and self.look >= self.trouble
        before = "" if self.trouble is None or after else f" before the trouble at step {self.trouble}"
        return f"Step {self.look} is the {'first' if after else 'last'} {kind}{before}."

    @cached_property
    def changes(self) -> list[ChangePoint]:
        """Where a scalar changed its level for good."""
        return change_points(self.series)

    @property
    def change_line(self) -> str:
        """The change points in one sentence."""
        if not self.changes:
            return "Change points: none of gradient norm, entropy, length and tail changed its level for good."
        listed = [f"{NAMES[p.column]} at step {p.step} ({number(p.before)} → {number(p.after)})" for p in self.changes]
        return f"Change points: {', '.join(listed)}."

    @cached_property
    def outliers(self) -> list[Outlier]:
        """Single steps far above the steps around them, the largest multiple first."""
        return single_step_outliers(self.series)

    @cached_property
    def outlier_line(self) -> str:
        """The largest of them in one sentence, with the record that a length or an advantage is of."""
        if not self.outliers:
            looked = [NAMES[name] for name in OUTLIERS if len(self.series.recorded(name)[0]) > LEAST]
            return f"Single-step outliers: none of {', '.join(looked)}." if looked else ""
        listed = []
        for one in self.outliers[:LISTED]:
            usual = f"{number(one.multiple)} × the usual {number(one.usual)}"
            if one.column in HOLDS:
                table, size = HOLDS[one.column]
                query = f"SELECT rollout FROM {table} WHERE {size} IS NOT NULL ORDER BY {size} DESC, rollout LIMIT 1"
                for n in self.store.sql(query, steps=[one.step])["rollout"].tolist():  # one, or none
                    row = self.store.rollouts_df([one.step], where="rollout = ?", params=[n]).iloc[0]
                    in_file = pd.notna(row.get("source_record"))
                    usual += f", rollout {n}"
                    usual += f": {row['source_file']} record {row['source_record']}" if in_file else ""
            listed.append(f"{NAMES[one.column]} {number(one.value)} at step {one.step} ({usual})")
        more = f", {len(self.outliers) - LISTED} more" if len(self.outliers) > LISTED else ""
        return f"Single-step outliers: {'; '.join(listed)}{more}."

    @property
    def mismatch_line(self) -> str:
        """How far sampler and trainer are apart, in one sentence; empty where their log-probabilities are unknown."""
        step, (rms, k3, share) = self.series.recorded("mismatch_rms", "mismatch_k3", "mismatch_ratio_share")
        if not step.size:
            return ""
        worst = int(rms.argmax())
        return (
            f"Sampler against trainer: {number(float(np.median(rms)))} nats (root mean square), KL "
            f"{number(float(np.median(k3)))} nats (estimate k3), {np.median(share):.2%} of ratios beyond 2 (medians "
            f"over steps); at worst {number(float(rms[worst]))}, {number(float(k3[worst]))}, {share[worst]:.2%} at "
            f"step {step[worst]}."
        )

    @property
    def judged(self) -> tuple[pd.DataFrame, list[Finding], str]:
        """What the list of runs is made of."""
        return self.steps, self.findings, self.alarm

    @cached_property
    def triage(self) -> Triage:
        """The run in one line."""
        status, reason = self.store.live_status
        return triage(self.name, self.estimator, status, self.judged, reason)

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
        by_itself = "source" not in self.config and not unproved_because(self.config)
        certificate = sampling_certificate(self.series) if by_itself else None
        if certificate is None or certificate.alarm_step is None:
            return ""
        return f"Tokens were not drawn by the policy that is scored: {certificate.reason}"

    @cached_property
    def alarms(self) -> tuple[str, ...]:
        """What stands before everything else: another sampler, and what recorded log-probabilities are instead."""
        stated = section(self.config, "sample").get("temperature")
        cause = "" if self.sampling is None else recorded_line(self.sampling, stated)
        return tuple(filter(None, [self.alarm, cause]))

    @property
    def believed(self) -> Mapping[str, Any]:
        """The configuration, as far as it may be believed: nothing of it where another sampler drew the tokens."""
        if self.alarm:
            return {}
        left_out: Any = self.steps.get("n_left_out", pd.Series(dtype=float))
        if not (left_out > 0).any() or "source" not in self.config:
            return self.config
        return {**self.config, "plain_sampling": False, "not_plain": "rollouts without a reward were left out"}

    @cached_property
    def grams(self) -> dict[int, Gram]:
        """What compares the estimators of every measured step."""
        truth = standing_for_truth(self.store.stored_labels(), self.believed)
        return self.store.reduced_grams((REFERENCE, truth))

    @cached_property
    def proved(self) -> Proved:
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
        if not self.alarm and (reason := unproved_because(self.believed)):
            reserved.append(f"Step lengths are estimated for every baseline of this run, since {reason}.")
            asks = "source" in self.config and "not_plain" not in self.config  # else it is known, and that was why
            reserved += [PLAIN] if asks and self.sampling is not None else []
        about = (self.trained, self.config, str(self.store.path), self.alarm, tuple(reserved), tuple(self.grams))
        return MeasuredSteps(self.design, tuple(self.grams.values()), self.proved, *about, self._size_line)

    def _size_line(self) -> str:
        # What trained may be rloo with another step length, which depends on the size; what it judges by does not.
        like_rloo = self.measured is not None and self.measured.against_rloo is None
        return size_line(self.planner, () if like_rloo else self.trained)

    @property
    def scope(self) -> str:
        """Whose parameters' gradient was measured, as the configuration says; all where it does not say."""
        return str(section(self.config, "measure").get("scope", WHOLE))

    @property
    def design(self) -> str:
        """What makes measured steps comparable: task, group size, soft tokens and scope."""
        sizes = [gram.n_rollouts / max(gram.n_prompts, 1) for gram in self.grams.values()]
        soft = section(self.config, "sample").get("soft")  # their J is that of other answers
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
        return plan(self.grams, subgroups, reward_groups(self.rewards), steps, self.proved)

    @cached_property
    def tokens(self) -> Tokens | None:
        """Who holds the gradient over all attributed steps; None without one."""
        return attributed_tokens(self.store)

    @cached_property
    def proxy(self) -> Proxy | None:
        """Whether the free proxy can stand for exact norms; None where no token has one."""
        return proxy_of(self.store, [] if self.alarm else list(self.grams.values()), self.proved)

    @cached_property
    def fidelity(self) -> list[tuple[str, Fidelity]]:
        """How well the proxy follows exact norms, for single tokens and for their running sums."""
        return fidelity_of(self.store)

    def attribution(self, step: int) -> Attributed | NotAttributed:
        """Return who holds ‖ḡ‖² at a step, or why that is not known.

        Raises:
            InputError: There is no such step.
            StoreError: The run cannot be read.
        """
        steps, attributed = self.store.complete_steps(), attributed_steps(self.store)
        if step not in steps:
            raise InputError(
                f"--step is {step}, but {self.store.path.name} has steps {steps[0]} to {steps[-1]}; pass one."
            )
        columns = ["grad_norm", "n_zero_variance_groups", "n_prompts"]
        row: Any = self.steps.set_index("step").reindex(columns=columns).loc[step]
        zero = not pd.isna(norm := row["grad_norm"]) and norm == 0
        known = self.sized_steps if zero else self.learned
        before = [other for other in known if other <= step]
        near = max(before) if before else min(known, default=None)
        if zero:
            alike = pd.notna(dead := row["n_zero_variance_groups"]) and dead == row["n_prompts"]
            why = ": the rewards of each group are all equal" if alike else ""
            look = "" if near is None else f" Look at step {near}."
            missing = f"The gradient of step {step} is 0, so no token held any of it{why}.{look}"
            return NotAttributed(step, missing, "", near)
        if step in attributed:
            tokens = self.store.tokens_df([step], ["rollout", "t", "token"])
            rollouts = self.store.rollouts_df([step], ["group", "rollout", "prompt", "reward"])
            return Attributed(step_attribution(self.store, step), tokens, rollouts)
        missing = "No step of this run says which tokens held its gradient."
        if near is not None:
            which = "last step before it" if near < step else "first step"
            missing = f"Step {step} has no attribution; the {which} that has is {near}."
        how, command = attribution_command(str(self.store.path), self.config, step)
        return NotAttributed(step, f"{missing} {how}", command, near)

    def sizes(self, step: int) -> Sized | None:
        """Return the tokens of a step by size; None where none is known, or the gradient is 0.

        Raises:
            StoreError: The run cannot be read.
        """
        return sized(self.store, step) if self._moved([step]) else None

    def held_record(self, step: int, top: int) -> dict[str, object]:
        """Return who holds ‖ḡ‖² at a step, or why that is not known, and then the sizes of its tokens where they are.

        Raises:
            InputError: There is no such step.
            StoreError: The run cannot be read.
        """
        if isinstance(found := self.attribution(step), Attributed):
            return {"attribution": found.record(top)}
        record: dict[str, object] = {"attribution": found}
        if (large := self.sizes(step)) is not None:
            record["sizes"] = large.record(top)
        return record

    def first_prompt(self, step: int) -> int | None:
        """Return the prompt that holds most of a step's gradient, else the one whose tokens are largest.

        None where neither is known.

        Raises:
            InputError: There is no such step.
            StoreError: The run cannot be read.
        """
        holding = self.attribution(step)
        holding = holding if isinstance(holding, Attributed) else self.sizes(step)
        return None if holding is None else int(holding.shares.prompts.group[0])

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """What the run says of its baseline and its group size, as every door says it; an alarm first."""
        if self.measured is not None:
            return self.measured.lines
        nothing = not_measured(self.config)
        return (self.alarm, nothing) if self.alarm else (nothing, *filter(None, [self._size_line()]))

    @cached_property
    def proxy_line(self) -> str:
        """What the proxy costs, in a sentence; empty where nothing is known, or another sampler drew the tokens."""
        return "" if self.alarm or self.proxy is None else proxy_line(self.proxy)
