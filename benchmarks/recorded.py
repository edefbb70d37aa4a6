"""`otb audit FILE` without a model and `otb import FILE`, each in a process of its own: processor time, peak memory."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.config import RecordedBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import run_otb
from otb_analysis.phases import phase

COLUMNS = {
    "command": "{what}", "rollouts": "{rollouts:,}", "tokens each": "{tokens}", "code": "{code}",
    "processor, s": "{processor:.2f}", "against": "{against:.2f}", "wall, s": "{wall:.1f}", "peak, GB": "{peak:.2f}",
    "load": "{load:.0f}",
}  # fmt: skip
GROUP, STEP, PROMPT = 8, 16, 40
"""Rollouts of a group, groups of a step, and tokens of a prompt."""


def run(config: RecordedBenchConfig) -> Report:
    """Write plain records and read them, both code bases in turn.

    Raises:
        InputError: A command fails.
    """
    root = Path(__file__).parent.parent
    clones = {"this clone": root} | ({"the other clone": config.clone} if config.clone else {})
    rows = list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        cases = {"otb audit": (config.audited, config.audited_tokens), "otb import": (config.imported, config.tokens)}
        for what, (rollouts, tokens) in cases.items():
            file = Path(folder) / f"{rollouts}x{tokens}.jsonl"
            with phase(f"writing {rollouts:,} rollouts"), file.open("w", encoding="utf-8") as written:
                written.writelines(f"{json.dumps(row)}\n" for row in records(rollouts, tokens))
            words = [*what.split()[1:], str(file)]
            words += ["--root", f"{folder}/runs", "--if-exists", "replace"] if what == "otb import" else []
            found: dict[str, list[dict[str, float]]] = {code: [] for code in clones}
            with phase(f"{what} of {rollouts:,} rollouts"):
                for _ in range(config.repeats):
                    for code, clone in clones.items():
                        place = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(clone.resolve()), "TMPDIR": folder}
                        found[code].append(run_otb(words, place, Path(folder))[0])
            for code, runs in found.items():
                ratio = median(a["processor"] / b["processor"] for a, b in zip(runs, found["this clone"], strict=True))
                best = min(runs, key=lambda one: one["processor"])
                row = {"what": what, "rollouts": rollouts, "tokens": tokens, "code": code, **best}
                rows.append(row | {"against": ratio, "load": os.getloadavg()[1]})
    return report_of(config, "Recorded rollouts read without a model", COLUMNS, rows, notes=notes_of(config))


def records(rollouts: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield plain records with ids, both log-probabilities and the advantages of `grpo`; lengths differ by a fifth."""
    lot = np.random.default_rng(0)
    for group in range(rollouts // GROUP):
        paid = (lot.random(GROUP) < lot.random()).astype(float)
        advantage = (paid - paid.mean()) / (paid.std(ddof=1) + 1e-6)
        prompt = lot.integers(0, 50_000, PROMPT).tolist()
        for k in range(GROUP):
            length = int(lot.integers(tokens - tokens // 5, tokens + tokens // 5 + 1))
            sampler = -lot.exponential(0.5, length) - 0.1
            yield {
                "prompt": f"{group}=", "completion": "text" * length, "reward": paid[k], "group": group,
                "step": group // STEP, "prompt_ids": prompt, "ids": lot.integers(0, 50_000, length).tolist(),
                "logprobs": sampler.tolist(), "trainer_logprobs": (sampler + lot.normal(0, 0.01, length)).tolist(),
                "advantages": [advantage[k]] * length,
            }  # fmt: skip
