"""`otb score` of recorded rollouts by one process, by two that share the blocks out, and by two actors of Ray."""

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.audit import write_rollouts
from benchmarks.config import ScoreBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import run_otb
from otb_analysis.config import SampleConfig
from otb_analysis.phases import phase

COLUMNS = {
    "scored": "{what}", "by": "{by}", "wall, s": "{wall:.0f}", "÷ one process": "{ratio:.2f}",
    "÷ plain processes": "{plain:.2f}",
}  # fmt: skip
EXACT = ["--measure.exact.every", "1", "--measure.exact.prompts"]
LEVELS = {"forward passes": [], "exact norms": [*EXACT, "0"]}
"""What is scored of every token, and its options."""
FEW = {"exact norms of 2 prompts of 16": [*EXACT, "2"]}
ONE, PLAIN, RAY = "one process", "{} processes", "{} actors of Ray"


def run(config: ScoreBenchConfig) -> Report:
    """Score the same rollouts in every way, one after the other, and again.

    Raises:
        InputError: A command fails.
    """
    n = config.processes
    tasks = [["--task", str(task), "--tasks", str(n)] for task in range(n)]
    ways = {ONE: [[[]]], PLAIN.format(n): [tasks, [["--finish"]]]}  # commands that follow, and those side by side
    if find_spec("ray"):
        ways[RAY.format(n)] = [[["--ray", "--actors", str(n)]]]
    levels = FEW if config.few else LEVELS
    least = {case: {"wall": float("inf")} for case in product(levels, ways)}
    with TemporaryDirectory() as folder:
        with phase("sampling the rollouts"):
            sample = SampleConfig(prompts=config.rollouts // 8, group_size=8, max_new_tokens=64)
            facts = write_rollouts(Path(folder) / "rollouts.jsonl", "demo", sample)
        for turn, (what, by) in product(range(config.repeats), least):
            with phase(f"{what} by {by}"):
                found = spent(Path(folder), f"{turn}-{what}-{by}".replace(" ", "-"), ways[by], levels[what])
                least[what, by] = min(least[what, by], found, key=lambda one: one["wall"])
    rows = [
        {"what": what, "by": by, **one, "ratio": one["wall"] / least[what, ONE]["wall"]}
        | {"plain": one["wall"] / least[what, PLAIN.format(n)]["wall"], "load": os.getloadavg()[1], **facts}
        for (what, by), one in least.items()
    ]
    title = f"`otb score` of {facts['rollouts']:,} rollouts of {facts['length']:.1f} tokens, the demo's model"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, rows=rows))


def spent(folder: Path, name: str, stages: list[list[list[str]]], level: list[str]) -> dict[str, float]:
    """Return what commands take: seconds by the clock, of the processor, and of the last command by the clock.

    Those of a stage run side by side; each way has parts of its own.
    """
    words = ["score", "--model", "demo", "--rollouts", str(folder / "rollouts.jsonl"), "--root", str(folder / "runs")]
    words += ["--run", name, *level]
    parts = ["--parts", str(folder / name)]
    start, used = perf_counter(), list[dict[str, float]]()
    for stage in stages:
        with ThreadPoolExecutor(len(stage)) as threads:
            asked = [[*words, *parts * bool(more), *more] for more in stage]
            used += [one for one, _ in threads.map(lambda one: run_otb(one, {"OMP_NUM_THREADS": "1"}), asked)]
    return {"wall": perf_counter() - start, "processor": sum(x["processor"] for x in used), "last": used[-1]["wall"]}
