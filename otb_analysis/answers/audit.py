"""An audit of a run: everything that its tables say, as one tree of records, and which command adds the rest."""

from dataclasses import dataclass

import numpy as np

from otb_analysis.answers.holders import Tokens
from otb_analysis.answers.measured import OF_TRL
from otb_analysis.answers.proxy import Proxy
from otb_analysis.answers.run import RunAnswers
from otb_analysis.answers.traits import Traits
from otb_analysis.checks.bookkeeping import Bookkeeping, check_bookkeeping, trainer_loss
from otb_analysis.checks.sampling_report import SamplingReport
from otb_analysis.config import section
from otb_analysis.diagnostics.planner import Planner
from otb_analysis.errors import InputError
from otb_analysis.figures.comparison import ComparisonInfo
from otb_analysis.phases import plural
from otb_analysis.statistics import REFERENCE, Decision, deleted_moments, sketch_noise
from otb_analysis.types import Label

NONE: Label = ("none", "none")
OWN = "this run's own"
"""What was audited where no file was."""
SCORE = "otb audit --model DIR --rollouts FILE --go"
IN_TRL = ("attribution=AttributionSchedule", "exact=Schedule")


@dataclass(frozen=True)
class Sketches:
    """What estimating gradients from count sketches adds to the error of the estimators' rows."""

    steps: int  # Steps that were sketched
    buckets: int
    error: float | None  # Largest standard error that it adds to any log V/V_rloo of a step; None below 2 prompts

    @property
    def sentence(self) -> str:
        """The same in a sentence."""
        error = "" if self.error is None else f"; variances over rloo's are off by {self.error:.1%} or less (SE)"
        where = f"at {self.steps} step{'s' * (self.steps != 1)}"
        return f"Gradients {where} were estimated from count sketches of {self.buckets:,} buckets{error}."


@dataclass(frozen=True)
class Further:
    """A command that measures what an audit without a model, or before `--go`, lacks."""

    command: str
    words: str  # What it is for, or how long it takes
    seconds: float | None = None  # What it takes; None where no pass was timed


@dataclass(frozen=True)
class AuditReport:
    """One audit; a part is None or empty where the run lacks what it needs, and `missing` says what adds it."""

    run: str
    rollouts: str  # Where they came from
    model: str
    trained: str  # The trainer's estimator
    n_steps: int
    n_prompts: int
    n_rollouts: int
    alarms: tuple[str, ...]  # Another sampler, and the cause of recorded log-probabilities; usually empty
    verdict: tuple[str, ...]  # An alarm first, then the baseline, the group size, the proxy
    traits: Traits  # What needs no model
    decision: Decision | None  # Every estimator against the trainer's
    estimators: ComparisonInfo | None  # Every estimator over rloo
    between: float | None  # Part of prompts × variance that comes from prompts, of every unbiased estimator
    planner: Planner
    tokens: Tokens | None
    proxy: Proxy | None
    missing: tuple[str, ...]
    sketches: Sketches | None  # None where every Gram matrix is exact
    sampling: SamplingReport | None  # None where the tokens were not scored
    bookkeeping: Bookkeeping
    cost: str = ""  # What measuring takes, in a sentence; empty where it was done
    next: tuple[Further, ...] = ()  # Empty where it was done, and `missing` says what could be added

    @property
    def headline(self) -> str:
        """What was audited, in one line."""
        model = f" under {self.model}" if self.model else ""
        trained = f", trained with {self.trained}" if self.trained else ""
        exact = self.bookkeeping.advantages.exact if self.bookkeeping.advantages else ()
        if exact and not any(name.startswith(self.trained) for name in exact):
            trained += f" (--estimator.name), though its advantages are those of {' or '.join(exact)}"
        source = f"{OWN} rollouts" if self.rollouts == OWN else self.rollouts
        return (
            f"{self.run}: {plural(self.n_rollouts, 'rollout')} of {plural(self.n_prompts, 'prompt')} in "
            f"{plural(self.n_steps, 'step')}{model}{trained}; from {source}"
        )


def audit_run(run: RunAnswers, aggregation: str = "", accumulate: int = 0) -> AuditReport:
    """Return what a run's tables say.

    Args:
        aggregation: How the trainer's loss weighs tokens; by default as the run's configuration says.
        accumulate: Rollouts of the trainer's micro-batches, 0 where not known.

    Raises:
        InputError: The run has no complete step.
        StoreError: It cannot be read.
    """
    steps = run.store.complete_steps()
    if not steps:
        raise InputError(f"run {run.name} has no complete step; wait for one, or make it again.")
    measured, config = run.measured, dict(run.config)
    source, trained = config.get("source"), run.trained[0][0] if run.trained else run.estimator
    status, reason = run.store.live_status
    missing = [] if status == "complete" else [f"Run: {status} after {plural(len(steps), 'complete step')}: {reason}"]
    if config.get("first") == len(steps):
        missing.append(
            "Steps: no more were asked for (--first); without it the same command adds more, with --if-exists resume."
        )
    # Weights of a training are gone when it ends, so what was not measured then takes another one.
    tokens, proxy = ("--measure.attribution.every 10 of otb train", "--measure.exact.every 10 of otb train")
    check = "otb diagnose has that of a run of otb train, as sampling_certificate"
    if section(config, "source").get("made_by") in OF_TRL:
        tokens, proxy = (f"measure=MeasureConfig({level}(every=10)) (docs/trl.md)" for level in IN_TRL)
        check = "OTBMonitor does it while TRL trains (docs/trl.md)"
    elif source:
        tokens, proxy, check = SCORE, SCORE, f"{SCORE} does it"
    if run.tokens is None:
        missing.append(f"Tokens: no step was attributed; {tokens} does it.")
    if run.proxy is None:
        missing.append(f"Proxy: no token has an exact norm; {proxy} measures them.")
    if run.sampling is None:
        missing.append(f"Sampling check: no token was scored again; {check}.")
    decided, sketches = measured and measured.over_rloo.cause != "no reference", None
    if sketched := [step for step, gram in run.grams.items() if gram.sketch_dim is not None]:
        errors, dims = [np.zeros(0)], list[int]()  # how far sketching moves ratios of variances
        for gram in run.store.grams(sketched).values():
            dims.append(gram.sketch_dim or 0)
            if REFERENCE in gram.labels:
                errors.append(sketch_noise(gram.inner, dims[-1]).log_ratio[:, gram.labels.index(REFERENCE)])
        every = np.concatenate(errors)
        sketches = Sketches(len(dims), min(dims), float(np.nanmax(every)) if np.isfinite(every).any() else None)
    return AuditReport(
        run=run.name, rollouts=str(section(config, "source").get("path") or OWN),
        model=str(config.get("model") or ""), trained=trained, n_steps=len(steps),
        n_prompts=len(set(run.rewards["prompt_id"].dropna())) or len(run.rewards.drop_duplicates(["step", "group"])),
        n_rollouts=len(run.rewards), alarms=run.alarms, verdict=(*run.lines, *filter(None, [run.proxy_line])),
        traits=run.traits, decision=measured and measured.decision,
        estimators=measured.comparison() if measured and decided else None, between=_between(run),
        planner=run.planner, tokens=run.tokens, proxy=run.proxy, missing=tuple(missing), sketches=sketches,
        sampling=run.sampling,
        bookkeeping=check_bookkeeping(run.store, trained, trainer_loss(config, aggregation, accumulate)),
    )  # fmt: skip


def _between(run: RunAnswers) -> float | None:
    """Return the variance between prompts of an unbiased group gradient's mean, None without halves of groups.

    Without a baseline rollouts do not touch each other, so one prompt's group has the variance b + w/N, its halves
    b + 2w/N, and b = 2·V(N) − V(N/2) without bias; by chance it can be negative. Every estimator that is unbiased given
    the prompt has the same b.
    """
    decided = run.measured is not None and not run.measured.over_rloo.cause
    subgroups = run.store.subgroup_grams() if decided else {}
    if not subgroups:
        return None
    size, halves = max(subgroups.items())
    steps = [n for n, gram in run.grams.items() if n in halves and NONE in gram.labels and NONE in halves[n].labels]
    if not steps or round(run.grams[steps[0]].n_rollouts / run.grams[steps[0]].n_prompts) != 2 * size:
        return None
    whole, half = (deleted_moments([table[step] for step in steps], NONE) for table in (run.grams, halves))
    value = float(2 * (whole.power - whole.mean_sq)[0] - (half.power - half.mean_sq)[0])
    return value if np.isfinite(value) else None
