"""Planted faults against the sampling check: found or not, named right or not, and false alarms of clean audits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.config import SamplingCheckConfig
from benchmarks.planted import Change, noise, planted_rollouts, repetition, temperature, top_p
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import threads
from otb_analysis.checks.sampling import SamplingCheck
from otb_analysis.checks.sampling_report import ALARM, SEEN, SamplingReport, sampling_report
from otb_analysis.checks.sampling_sums import SamplingSums
from otb_analysis.config import OptimizeConfig, TrainConfig
from otb_analysis.measurement.passes import forward_statistics
from otb_analysis.measurement.table import token_table
from otb_analysis.phases import advance, count_to, phase
from otb_analysis.rollouts.models import load_policy
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.loop import train
from otb_analysis.training.setup import Trainer

PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 64, 8, 48
COLUMNS = {
    "fault": "{fault}",
    "recorded": "{recorded}",
    "tokens": "{tokens:,.0f}",
    "alarms": "{alarms} of {audits}",
    "z": "{z:.1f}",
    "z > 5": "{seen:.0%}",
    "named": "{named:.0%}",
    "tied": "{tied:.0%}",
    "tokens for z = 5": "{needed:,.0f}",
}


@dataclass(frozen=True)
class Fault:
    """A sampler that is not the stated one."""

    name: str
    cause: str  # As the check should name it; empty for a clean sampler
    family: str  # The test that should see it
    change: Change | None = None
    stale: bool = False  # True where the older checkpoint samples


FAULTS = (
    Fault("none", "", "probability"),
    Fault("top-p .95", "top_p", "top_p", top_p(0.95)),
    Fault("temperature .9", "temperature", "temperature", temperature(0.9)),
    Fault("repetition penalty 1.05", "repetition", "repetition", repetition(1.05)),
    Fault("logit noise σ = .3", "noise", "probability", noise(0.3)),
    Fault("stale checkpoint", "other_weights", "other_weights", stale=True),
)


def run(config: SamplingCheckConfig) -> Report:
    """Audit rollouts of every fault."""
    rows: list[dict[str, Any]] = []
    with threads(1), TemporaryDirectory() as folder:
        trainer = Trainer.from_config(TrainConfig(model="demo"))
        with phase(f"training {config.updates} steps"):
            newer = newer_policy(config.updates, Path(folder))
        for fault in FAULTS:
            audits = config.repeats if fault.cause else config.clean
            name = fault.name.replace("stale", f"{config.updates} steps old") if fault.stale else fault.name
            with phase(name):
                count_to(audits, "audit")
                both = [audit(trainer, newer, fault, seed, config.tokens) for seed in range(audits)]
            for recorded in (False, True):
                rows.append({"fault": name, **row_of(fault, [pair[recorded] for pair in both], recorded)})
    title = f"Planted faults in audits of at least {config.tokens:,} tokens of the demo's policy"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, alarm=ALARM))


def newer_policy(updates: int, root: Path) -> PreTrainedModel:
    """Return the demo's policy after so many steps of training."""
    config = TrainConfig(model="demo", run="newer", root=root, optimize=OptimizeConfig(steps=updates))
    config = replace(config, evaluate=replace(config.evaluate, every=0))
    return load_policy(str(train(config) / "model"))[0]


def audit(trainer: Trainer, newer: PreTrainedModel, fault: Fault, seed: int, tokens: int) -> list[Any]:
    """Return the sums of one audit as (without recorded log-probabilities, with them)."""
    torch.manual_seed(seed)
    scoring = newer if fault.stale else trainer.model
    parts = list(_steps(trainer, scoring, fault, seed, tokens))
    columns = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    told = np.isin(columns["test"], ("recorded", "repeated", "beyond_rounding"))
    silent = {name: [x for x, hide in zip(values, told, strict=True) if not hide] for name, values in columns.items()}
    advance()
    return [silent, columns]


def _steps(
    trainer: Trainer, scoring: PreTrainedModel, fault: Fault, seed: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield steps of an audit until it has enough tokens."""
    check, n, step = SamplingCheck(), 0, 0
    while n < tokens:
        prompts = draw_prompts(trainer.task, "train", 1000 * seed + step, PROMPTS)
        rollouts = planted_rollouts(trainer.model, trainer.tokenizer, prompts, GROUP_SIZE, MAX_NEW_TOKENS, fault.change)
        forward = forward_statistics(scoring, rollouts, 1.0, 0, check.observe)
        columns = check.rows(rollouts, token_table(rollouts, forward, None))
        yield {**columns, "step": [step] * len(np.asarray(columns["test"]))}
        n, step = n + int(rollouts.mask.sum()), step + 1


def row_of(fault: Fault, audits: list[Any], recorded: bool) -> dict[str, Any]:
    """Return the row of a fault's audits."""
    reports = [sampling_report(columns) for columns in audits]
    right = [(fault.cause,) == report.causes for report in reports]
    tied = [len(report.causes) > 1 and fault.cause in report.causes for report in reports]
    tokens = float(np.mean([report.n_tokens for report in reports]))
    row: dict[str, Any] = {
        "recorded": "yes" if recorded else "no",
        "tokens": tokens,
        "audits": len(reports),
        "alarms": sum(report.alarm for report in reports),
        "z": float(np.median([report.z for report in reports])),
        "seen": float(np.mean([report.z > SEEN for report in reports])),
    }
    if fault.cause:
        mean_z = np.mean(
            [_z(fault, report, columns, recorded) for report, columns in zip(reports, audits, strict=True)]
        )
        row |= {"named": float(np.mean(right)), "tied": float(np.mean(tied))}
        row["needed"] = tokens * (SEEN / float(mean_z)) ** 2 if mean_z > 0 else None
    return row


def _z(fault: Fault, report: SamplingReport, columns: Any, recorded: bool) -> float:
    """Return the z of the family that should see a fault, with its sign: noise lowers π_y."""
    if recorded:
        return report.z
    if fault.family != "probability":
        return report.families[fault.family].z
    sums = SamplingSums.from_rows(columns)
    return -sums.total("probability", "score") / sums.total("probability", "variance") ** 0.5
