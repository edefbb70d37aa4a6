"""Whole audits as a user runs them, each in a process of its own: time, processor time, and peak memory."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.config import AuditBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import run_otb, sampled_step, threads
from otb_analysis.config import SampleConfig
from otb_analysis.phases import phase

COLUMNS = {
    "model": "{model}", "Gram": "{method}", "rollouts": "{rollouts:,}", "tokens": "{tokens:,}", "mean": "{length:.1f}",
    "steps": "{steps}", "forecast": "{forecast}", "wall, s": "{wall:.0f}", "processor, s": "{processor:.0f}",
    "load": "{load:.0f}", "peak, GB": "{peak:.2f}", "ratios off by": "{gap:.2%}",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Rollouts to audit."""

    sample: SampleConfig
    prompts: int  # Groups per step of the audit


CASES = {
    "demo": Case(SampleConfig(prompts=128, group_size=8, max_new_tokens=64), 32),
    "smollm2": Case(SampleConfig(prompts=16, group_size=4, max_new_tokens=48), 16),
}
QUICK = Case(SampleConfig(prompts=2, group_size=2, max_new_tokens=4), 2)


def run(config: AuditBenchConfig) -> Report:
    """Sample rollouts of every model, and audit them.

    Raises:
        InputError: A model cannot be loaded, or an audit fails.
    """
    rows: list[dict[str, Any]] = []
    for model in config.models:
        case = QUICK if config.quick else CASES[model]
        with TemporaryDirectory() as folder:
            with phase(f"sampling from {model}"), threads(config.threads):
                facts = write_rollouts(Path(folder) / "rollouts.jsonl", model, case.sample)
            variances = list[dict[tuple[str, str], float]]()
            for gram in config.gram:
                with phase(f"auditing {model}, Gram matrix {gram}"):
                    row, report = audit(Path(folder), model, case, gram, config.threads)
                variances.append(ratios(report))
                gap = largest_gap(variances[0], variances[-1]) if len(variances) > 1 else None
                rows.append({"model": model, "gram": gram} | facts | row | {"gap": gap})
    title = "`otb audit --go` on rollouts with recorded token ids"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))


def write_rollouts(path: Path, model: str, sample: SampleConfig) -> dict[str, Any]:
    """Write a model's rollouts as plain records, rewards 0 or 1 by lot; return how many, and their lengths."""
    trainer, rollouts = sampled_step(sample, model)
    lot = np.random.default_rng(0).integers(2, size=len(rollouts.group))
    with path.open("w", encoding="utf-8") as file:
        for n, group in enumerate(rollouts.group.tolist()):
            at, ids = int(rollouts.prompt_length[n]), rollouts.input_ids[n][rollouts.attention_mask[n]].tolist()
            prompt, completion = (str(trainer.tokenizer.decode(part)) for part in (ids[:at], ids[at:]))
            record = {"prompt": prompt, "completion": completion, "reward": float(lot[n]), "group": group}
            record |= {"prompt_ids": ids[:at], "ids": ids[at:]}
            file.write(json.dumps(record) + "\n")
    tokens = int(rollouts.mask.sum())
    return {"rollouts": len(lot), "tokens": tokens, "length": tokens / len(lot)}


def audit(folder: Path, model: str, case: Case, gram: str, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run `otb audit` in a process of its own; return what it took, and its report."""
    words = ["audit", "--model", model, "--rollouts", str(folder / "rollouts.jsonl"), "--prompts", str(case.prompts)]
    words += ["--measure.gram", gram, "--root", str(folder), "--run", gram, "--go"]
    spent, text = run_otb(words, {"OMP_NUM_THREADS": str(count), "COLUMNS": "500"})
    report: dict[str, Any] = json.loads((folder / gram / "audit.json").read_text())
    forecast = re.search(r"It takes about (.*?), and", text)
    row = {
        "method": "sketched" if report["sketches"] else "exact", "steps": report["n_steps"],
        "forecast": forecast[1] if forecast else None, **spent, "load": os.getloadavg()[1],
        "sketch_error": (report["sketches"] or {}).get("error"),
    }  # fmt: skip
    return row, report


def ratios(report: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the variance of every estimator over that of rloo."""
    rows = {(row["estimator"], row["energy_source"]): row["variance"] for row in report["estimators"]}
    whole = rows.get(("rloo", "none"))
    return {label: value / whole for label, value in rows.items() if value and whole}


def largest_gap(first: dict[tuple[str, str], float], second: dict[tuple[str, str], float]) -> float | None:
    """Return the largest relative difference between two audits' ratios."""
    return max((abs(second[label] / first[label] - 1) for label in first.keys() & second.keys()), default=None)
