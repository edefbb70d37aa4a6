"""`otb score` of recorded rollouts by one process, by two that share the blocks out, and by two actors of Ray."""

import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.audit import write_rollouts
from benchmarks.config import ScoreBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import run_otb
from otb_analysis.config import SampleConfig
from otb_analysis.phases import phase

COLUMNS = {"by": "{by}", "wall, s": "{wall:.0f}", "÷ one process": "{ratio:.2f}", "÷ plain processes": "{plain:.2f}"}
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
    least = dict.fromkeys(ways, float("inf"))
    with TemporaryDirectory() as folder:
        with phase("sampling the rollouts"):
            sample = SampleConfig(prompts=config.rollouts // 8, group_size=8, max_new_tokens=64)
            facts = write_rollouts(Path(folder) / "rollouts.jsonl", "demo", sample)
        for turn in range(config.repeats):
            for by, stages in ways.items():
                with phase(f"scoring by {by}"):
                    least[by] = min(least[by], seconds(Path(folder), f"{turn}-{by}".replace(" ", "-"), stages))
    rows = [
        {"by": by, "wall": wall, "ratio": wall / least[ONE], "plain": wall / least[PLAIN.format(n)]}
        | {"load": os.getloadavg()[1], **facts}
        for by, wall in least.items()
    ]
    title = f"`otb score` of {facts['rollouts']:,} rollouts of {facts['length']:.1f} tokens, the demo's model"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))


def seconds(folder: Path, name: str, stages: list[list[list[str]]]) -> float:
    """Return what commands take by the clock, those of a stage side by side; each way has parts of its own."""
    words = ["score", "--model", "demo", "--rollouts", str(folder / "rollouts.jsonl"), "--root", str(folder / "runs")]
    words += ["--run", name]
    parts = ["--parts", str(folder / name)]
    start = perf_counter()
    for stage in stages:
        with ThreadPoolExecutor(len(stage)) as threads:
            asked = [[*words, *parts * bool(more), *more] for more in stage]
            list(threads.map(lambda one: run_otb(one, {"OMP_NUM_THREADS": "1"}), asked))
    return perf_counter() - start
