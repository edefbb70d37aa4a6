"""Planted faults against the sampling check: found or not, named right or not, and false alarms of clean audits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.config import SamplingCheckConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import threads
from otb_analysis.checks.sampling import SamplingCheck
from otb_analysis.checks.sampling_report import ALARM, SamplingSums, sampling_report
from otb_analysis.config import OptimizeConfig, TrainConfig
from otb_analysis.measurement.forward import forward_statistics
from otb_analysis.measurement.table import token_table
from otb_analysis.phases import advance, count_to, phase
from otb_analysis.rollouts.generation import end_tokens
from otb_analysis.rollouts.models import load_policy, special_id
from otb_analysis.rollouts.sampling import Draft, Rollouts, collate, encode_prompt
from otb_analysis.tasks import Prompt, Turn
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.loop import train
from otb_analysis.training.setup import Trainer

Change = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(token ids [N, L], which of them are real [N, L], logits [N, V]) → the sampler's logits [N, V]."""


def temperature(value: float) -> Change:
    """Divide by a temperature."""
    return lambda ids, real, logits: logits / value


def top_p(p: float) -> Change:
    """Keep the likeliest tokens with mass p, by transformers' own filter."""
    keep = TopPLogitsWarper(top_p=p)
    return lambda ids, real, logits: keep(ids.long(), logits)  # pyright: ignore[reportArgumentType]


def top_k(k: int) -> Change:
    """Keep the k likeliest tokens, by transformers' own filter."""
    keep = TopKLogitsWarper(top_k=k)
    return lambda ids, real, logits: keep(ids.long(), logits)  # pyright: ignore[reportArgumentType]


def repetition(penalty: float) -> Change:
    """Penalise tokens of prompt and completion; padding is no token."""

    def change(ids: Tensor, real: Tensor, logits: Tensor) -> Tensor:
        seen = torch.zeros_like(logits).scatter_add_(1, ids, real.float()) > 0
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return change


def noise(sigma: float) -> Change:
    """Add fresh Gaussian noise to every logit."""
    return lambda ids, real, logits: logits + sigma * torch.randn_like(logits)


@dataclass
class _Changed(LogitsProcessor):
    """Applies the change, and keeps the sampler's log-probabilities of every next token."""

    change: Change | None
    pad: Tensor  # Columns of padding on the left of each row [N]
    kept: list[Tensor]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        real = torch.arange(input_ids.shape[1], device=input_ids.device) >= self.pad[:, None]
        scores = scores.float() if self.change is None else self.change(input_ids, real, scores.float())
        self.kept.append(scores.log_softmax(-1))
        return scores


@torch.no_grad()
def planted_rollouts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    group_size: int,
    max_new_tokens: int,
    change: Change | None = None,
) -> Rollouts:
    """Return `group_size` rollouts of every prompt as a changed sampler draws them, with its log-probabilities.

    The prefixes are the changed sampler's own. Nothing is rewarded.
    """
    group = np.repeat(np.arange(len(prompts)), group_size)
    encoded = [encode_prompt(tokenizer, prompts[g]) for g in group.tolist()]
    width = max(map(len, encoded))
    pad, ends = special_id(tokenizer, "pad"), end_tokens(model, tokenizer)
    left = torch.tensor([width - len(ids) for ids in encoded], device=model.device)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=model.device)
    changed = _Changed(change, left, [])
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens, eos_token_id=ends,
        pad_token_id=pad, use_cache=True,
    )  # fmt: skip
    output = model.generate(  # pyright: ignore[reportCallIssue]
        inputs=ids, attention_mask=(torch.arange(width, device=model.device) >= left[:, None]).long(),
        generation_config=settings, logits_processor=LogitsProcessorList([changed]),
    )  # fmt: skip
    tokens = torch.as_tensor(output)[:, width:]
    logprob = torch.stack(changed.kept, 1).gather(2, tokens[..., None])[..., 0].double().tolist()
    drafts = []
    for prompt, row, logprobs in zip(encoded, tokens.tolist(), logprob, strict=True):
        length = next((t + 1 for t, token in enumerate(row) if token in ends), len(row))
        draft = Draft(prompt)
        draft.extend(row[:length], 0, logprobs[:length])
        draft.turns.append(Turn("", row[length - 1] in ends))
        draft.finish_reason = "stop" if row[length - 1] in ends else "length"
        drafts.append(draft)
    return collate(drafts, tuple(prompts), group, pad)


PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 64, 8, 48
SEEN = 5.0
"""z at which a fault counts as found, for the number of tokens it takes."""
COLUMNS = {
    "fault": "{fault}", "recorded": "{recorded}", "tokens": "{tokens:,.0f}", "alarms": "{alarms} of {audits}",
    "z": "{z:.1f}", "z > 5": "{seen:.0%}", "named": "{named:.0%}", "tied": "{tied:.0%}",
    "tokens for z = 5": "{needed:,.0f}",
}  # fmt: skip


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
    check, parts, n = SamplingCheck(), list[dict[str, Any]](), 0
    while n < tokens:
        prompts = draw_prompts(trainer.task, "train", 1000 * seed + len(parts), PROMPTS)
        rollouts = planted_rollouts(trainer.model, trainer.tokenizer, prompts, GROUP_SIZE, MAX_NEW_TOKENS, fault.change)
        forward = forward_statistics(scoring, rollouts, 1.0, 0, check.observe)
        found = check.rows(rollouts, token_table(rollouts, forward, None))
        parts.append({**found, "step": [len(parts)] * len(np.asarray(found["test"]))})
        n += int(rollouts.mask.sum())
    columns = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    told = np.isin(columns["test"], ("recorded", "repeated", "beyond_rounding"))
    silent = {name: [x for x, hide in zip(values, told, strict=True) if not hide] for name, values in columns.items()}
    advance()
    return [silent, columns]


def row_of(fault: Fault, audits: list[Any], recorded: bool) -> dict[str, Any]:
    """Return the row of a fault's audits."""
    reports = [sampling_report(columns) for columns in audits]
    right = [(fault.cause,) == report.causes for report in reports]
    tied = [len(report.causes) > 1 and fault.cause in report.causes for report in reports]
    tokens = float(np.mean([report.n_tokens for report in reports]))
    row: dict[str, Any] = {
        "recorded": "yes" if recorded else "no", "tokens": tokens, "audits": len(reports),
        "alarms": sum(report.alarm for report in reports), "z": float(np.median([report.z for report in reports])),
        "seen": float(np.mean([report.z > SEEN for report in reports])),
    }  # fmt: skip
    if fault.cause:
        # z of the family that should see the fault, with its sign: noise lowers π_y
        if recorded:
            z = [report.z for report in reports]
        elif fault.family != "probability":
            z = [report.families[fault.family].z for report in reports]
        else:
            sums = [SamplingSums.from_rows(columns) for columns in audits]
            z = [-s.total("probability", "score") / s.total("probability", "variance") ** 0.5 for s in sums]
        mean_z = np.mean(z)
        row |= {"named": float(np.mean(right)), "tied": float(np.mean(tied))}
        row["needed"] = tokens * (SEEN / float(mean_z)) ** 2 if mean_z > 0 else None
    return row
