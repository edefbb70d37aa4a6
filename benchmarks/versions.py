"""The store of two checkouts side by side: each writes the same steps and reads them in processes of its own, in turn.

`python -m benchmarks.versions ../before . --out docs/results` with `git worktree add ../before COMMIT`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from benchmarks.publish import Report, markdown

WRITE = """
import sys, time
import numpy as np
from pathlib import Path
from otb_analysis.store import RunWriter, StepTables, gram_rows
from otb_analysis.types import Gram

folder, run, steps, measured, tokens = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
rng, n = np.random.default_rng(0), 64
words, group = np.array([f" word{i}" for i in range(500)], dtype=object), np.repeat(np.arange(16), 4)
labels = (("rloo", "none"), ("otb", "proxy"), ("otb", "exact"), *((f"mine{i}", "none") for i in range(35)))
due, seconds = set(np.linspace(0, steps - 1, measured).astype(int).tolist()) if measured else set(), []
writer = RunWriter.create(folder, run, {"seed": 0, "estimator": {"name": "rloo"}})
for step in range(steps):
    reward = (rng.random(n) < 0.4).astype(float)
    rollouts = {
        "group": group, "rollout": np.arange(n), "reward": reward, "length": np.full(n, tokens // n),
        "turns": np.ones(n, int), "finish_reason": ["stop"] * n, "prompt_id": [f"p{step}-{g}" for g in group],
        "prompt": ["".join(rng.choice(words, 20)) for _ in range(n)],
        "completion": ["".join(rng.choice(words, 40)) for _ in range(n)],
    }
    rollout = np.repeat(np.arange(n), tokens // n)
    table = {
        "group": group[rollout], "rollout": rollout, "turn": np.zeros(len(rollout), int),
        "t": np.arange(len(rollout)) % (tokens // n), "token": words[rng.integers(0, 500, len(rollout))],
        "mask": np.ones(len(rollout), bool), "entropy": rng.random(len(rollout)),
        "energy_proxy": rng.random(len(rollout)),
    }
    names = ("reward_mean", "loss", "grad_norm", "entropy_mean", "seconds_update")
    scalars = {name: float(rng.random()) for name in names}
    grams = gradients = None
    if step in due:
        vectors = rng.normal(size=(len(labels), 16, 32)) + rng.normal(size=(16, 32))
        grams = gram_rows(step, Gram(np.einsum("mpd,nqd->mnpq", vectors, vectors, optimize=True), labels, n))
        names = dict(zip(("estimator", "energy_source"), map(list, zip(*labels))))
        gradients = names | {"variance": rng.random(len(labels)), "n_prompts": [16] * len(labels)}
    tables = StepTables(table, rollouts, scalars | {"n_tokens": len(rollout)}, gradients, grams)
    begun = time.perf_counter()
    writer.write_step(step, tables)
    seconds += [] if step in due else [time.perf_counter() - begun]
begun = time.perf_counter()
writer.finish("failed" if run == "live" else "complete")
print(1e3 * float(np.median(seconds)), time.perf_counter() - begun)
"""
"""Writes 64 rollouts a step; prints milliseconds of a step without Gram matrix (median), and seconds of the end."""

READ = """
import sys, time, resource
from pathlib import Path
folder, run, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
from otb_analysis.estimators import standing_for_truth
from otb_analysis.statistics import REFERENCE
from otb_analysis.store import RolloutFilter, RunStore, find_rollouts, reward_histogram, runs_df
begun, cpu, held = time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = RunStore(folder / run)
{
    "every step": lambda: store.steps_df(),
    "rollouts by step and reward": lambda: reward_histogram(store, RolloutFilter()),
    "a text in prompts and completions": lambda: find_rollouts(store, RolloutFilter(text="word17 word4")),
    "tokens of one prompt": lambda: store.tokens_df([store.complete_steps()[-1]], where='"group" = 0'),
    "all entropies by step": lambda: store.sql("SELECT step, avg(entropy) FROM tokens WHERE mask GROUP BY step"),
    "a list of 24 runs": lambda: runs_df(folder / "many"),
    "products of every Gram matrix": lambda: store.reduced_grams((REFERENCE, standing_for_truth((), {}))),
}[what]()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
print(time.perf_counter() - begun, time.process_time() - cpu, grown / 1024)
"""
WHATS = (
    "every step", "rollouts by step and reward", "a text in prompts and completions", "tokens of one prompt",
    "all entropies by step", "a list of 24 runs", "products of every Gram matrix",
)  # fmt: skip


def call(checkout: Path, code: str, *words: object) -> list[float]:
    """Run code with a checkout's package in a process of its own; return the numbers that it prints."""
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=checkout)
    return [float(number) for number in done.stdout.split()]


COLUMNS = {"what": "{what}", "before": "{before:.3f}", "after": "{after:.3f}", "after / before": "{ratio:.2f}"}


def measured(before: Path, after: Path, steps: int, grams: int, turns: int) -> list[dict[str, object]]:
    """Return a row for each thing that is done, with what both checkouts take: the least of some turns."""
    found, checkouts = dict[str, list[float]](), {"before": before, "after": after}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in checkouts}
        for run, length, due in (("live", steps, 0), ("ended", steps, 0), ("compared", grams, grams)):
            wrote = {name: call(checkouts[name], WRITE, folders[name], run, length, due, 2560) for name in folders}
            if not due:
                found[f"{run}: a step is written, ms"] = [numbers[0] for numbers in wrote.values()]
            if run == "ended":
                found["ended: the end of the run, s"] = [numbers[1] for numbers in wrote.values()]
        for name, at in product(checkouts, range(24)):
            call(checkouts[name], WRITE, folders[name] / "many", f"run{at}", 200, 0, 640)
        kinds = {"a list of 24 runs": ["ended"], "products of every Gram matrix": ["compared"]}
        for run, what in [(run, name) for name in WHATS for run in kinds.get(name, ["live", "ended"])]:
            took = [[call(checkouts[n], READ, folders[n], run, what) for n in folders] for _ in range(turns)]
            for i, unit in ((0, "s"), (2, "MiB more")):
                found[f"{run}: {what}, {unit}"] = [min(one[i] for one in each) for each in zip(*took, strict=True)]
    pairs = {what: dict(zip(checkouts, both, strict=True)) for what, both in found.items()}
    return [{"what": k, **x, "ratio": x["after"] / x["before"] if x["before"] else None} for k, x in pairs.items()]


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, shortened."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure two checkouts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for place, options in {"before": {}, "after": {}, "--out": {"required": True}}.items():
        parser.add_argument(place, type=Path, **options)
    for option, count in {"--steps": 2000, "--grams": 700, "--turns": 3}.items():
        parser.add_argument(option, type=int, default=count)
    asked = parser.parse_args()
    rows = measured(asked.before, asked.after, asked.steps, asked.grams, asked.turns)
    words = f"--out docs/results --steps {asked.steps} --grams {asked.grams} --turns {asked.turns}"
    command = f"python -m benchmarks.versions ../before . {words}"
    how = "Every call is a process of its own, in turn; the least of some turns, by the clock, imports left out."
    commits = f"Before: commit {commit_of(asked.before)}. After: commit {commit_of(asked.after)}."
    report = Report("store_versions", command, {}, "The store of two checkouts", COLUMNS, rows, notes=(how, commits))
    (asked.out / "store_versions.md").write_text(markdown(report))


if __name__ == "__main__":
    main()
