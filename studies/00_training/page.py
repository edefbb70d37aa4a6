"""What the page of the study says: Training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from otb_analysis.errors import InputError
from otb_analysis.figures.styles import BLUE, GREY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import (
    Findings,
    Rows,
    distinct,
    markdown_table,
    select,
    share,
    with_interval,
)

MINUTES = 20
"""What a seed may take."""


@dataclass(frozen=True)
class Goal:
    """Held-out success that training is to reach, and to aim at."""

    target: float
    aim: float


GOALS = {"chain_sum": Goal(0.75, 0.90), "calculator": Goal(0.80, 0.90)}
HOW_TO_READ = """\
A seed's success is the share of right answers to {prompts} held-out prompts, {samples} sampled to each at temperature
1, the same prompts at every evaluation; its 95 % interval is over prompts. An evaluation at step k comes before that
step's update: the one at step 0 is of the supervised start, the last one of the policy before its last update. The
interval over seeds is Student's on the logit scale: with so few seeds ({seeds}) it is wide, and it trusts that seeds
are about normal there.

No prompt is in both splits: a hash of its text decides. Short ones are few (19² sums of two numbers), so that a
held-out one has neighbours among those trained on. Seeds differ in initial weights, demonstrations, prompts and
sampling. A supervised start stops by its own check, on other prompts of the training split, once 35 % to 60 % are
right.

Minutes are processor time of the run's one thread, since the machine was shared; by the clock they are in
[cost.csv](results/cost.csv). Settings: [chain_sum.toml](chain_sum.toml), [calculator.toml](calculator.toml); outside
the study, `otb train --config studies/00_training/chain_sum.toml --seed 0` is the same run."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say whether the goals were reached, by which seeds, in which time."""
    curves, cost = tables["curves"], {row["cell"]: row for row in tables["cost"]}
    runs = [{**run, **cost[run["cell"]], **_ends(run, curves)} for run in tables["runs"]]
    parts = ["## Each seed", seeds_table(runs), "## Over seeds", pooled_table(curves), how_to_read(runs)]
    return Findings(verdict(runs), "\n\n".join(parts), {"curves.svg": figure(curves)})


def verdict(runs: Rows) -> str:
    """Return the answer in one line: success before and after, and which seeds met target and time."""
    slowest = max(run["processor_minutes"] or run["minutes"] for run in runs)
    said = "; ".join(_task_verdict(task, select(runs, task=task)) for task in distinct(runs, "task"))
    clock = max(run["minutes"] for run in runs)
    spent = f"at most {slowest:.1f} min of one core's processor time (allowed: {MINUTES}), supervised start included"
    return f"{said}; a seed takes {spent}, and up to {clock:.0f} min by the clock on a core shared with other work."


def _task_verdict(task: str, runs: Rows) -> str:
    goal = GOALS[task]
    met, aimed = (sum(run["after"]["success"] >= level for run in runs) for level in (goal.target, goal.aim))
    outcome = "met by every seed" if met == len(runs) else "missed" if not met else f"met by {met} of {len(runs)} seeds"
    before, after = (over_seeds([run[end]["success"] for run in runs]) for end in ("before", "after"))
    return (
        f"`{task}` goes from {share(before.estimate)} to {with_interval(after.estimate, after.low, after.high, 0)} "
        f"held-out success (target {share(goal.target)}: {outcome}; "
        f"aim {share(goal.aim)}: {aimed} of {len(runs)} seeds)"
    )


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean over seeds of a share, with Student's interval on the logit scale."""
    found = seed_mean(values, "held-out success of a seed", scale="logit")
    if found is None:
        raise InputError("a seed has no held-out success; run the study again.")
    return found


def seeds_table(runs: Rows) -> str:
    """Return success before and after with intervals over prompts, and cost, of each seed."""
    headers = ["task", "seed", "before RL", "after RL", "steps", "rollouts"]
    headers += ["supervised start, min", "RL, min", "in all, min", "memory, MiB"]
    rows = []
    for run in runs:
        ends = [with_interval(run[end]["success"], run[end]["low"], run[end]["high"]) for end in ("before", "after")]
        spent = [f"{run[name]:.1f}" for name in ("minutes_warm_start", "minutes_training", "processor_minutes")]
        size = str(run["steps"]), f"{run['rollouts']:,}"
        rows.append([f"`{run['task']}`", str(run["seed"]), *ends, *size, *spent, f"{run['peak_mib'] or math.nan:,.0f}"])
    return markdown_table(headers, rows)


def pooled_table(curves: Rows) -> str:
    """Return the mean learning curve over seeds with its interval, tasks side by side."""
    tasks = distinct(curves, "task")
    rows = [
        [str(step), *(_pooled(select(curves, task=task, step=step)) for task in tasks)]
        for step in sorted(distinct(curves, "step"))
    ]
    return markdown_table(["step", *(f"`{task}`" for task in tasks)], rows)


def _pooled(rows: Rows) -> str:
    """Return the mean of a task at a step; a dash where it was not evaluated then."""
    if not rows:
        return "–"
    mean = over_seeds([row["success"] for row in rows])
    return with_interval(mean.estimate, mean.low, mean.high)


def how_to_read(runs: Rows) -> str:
    """Say what the numbers are, and what they are not."""
    first = runs[0]
    seeds = ", ".join(f"{len(select(runs, task=task))} of `{task}`" for task in distinct(runs, "task"))
    return HOW_TO_READ.format(prompts=first["heldout_prompts"], samples=first["heldout_samples"], seeds=seeds)


def figure(curves: Rows) -> str:
    """Draw each task's learning curves: the seeds thin, their mean with its interval."""
    return svg([_panel(task, select(curves, task=task)) for task in distinct(curves, "task")])


def _panel(task: str, curves: Rows) -> Panel:
    steps = sorted(distinct(curves, "step"))
    at = [over_seeds([row["success"] for row in select(curves, step=step)]) for step in steps]
    low, high = ([_known(end) for end in ends] for ends in ([x.low for x in at], [x.high for x in at]))
    mean = Curve(steps, [x.estimate for x in at], "mean over seeds, 95 % interval", low, high, BLUE)
    seeds = [
        Curve([row["step"] for row in own], [row["success"] for row in own], "one seed", color=GREY, width=1.0)
        for own in (select(curves, seed=seed) for seed in distinct(curves, "seed"))
    ]
    rules = ((GOALS[task].target, "target"), (GOALS[task].aim, "aim"))
    return Panel(task, "success on held-out prompts", "step", [mean, *seeds], rules, (0.0, 1.0), percent=True)


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _ends(run: Mapping[str, Any], curves: Rows) -> dict[str, Mapping[str, Any]]:
    """Return the first and the last point of a run's curve."""
    own = select(curves, task=run["task"], seed=run["seed"])
    return {"before": own[0], "after": own[-1]}
