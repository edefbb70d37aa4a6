"""What the demo concludes from several seeds and with several numbers of threads: it must not depend on luck."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from otb_analysis.bench.config import DemoSeedsConfig
from otb_analysis.bench.publish import Report, notes_of, report_of
from otb_analysis.phases import counted
from otb_analysis.report.designs import designs
from otb_analysis.statistics.comparisons.verdicts import names
from otb_analysis.store import RunStore

DECIDED = 3
"""Estimators told from rloo, or shown to be within 15 % of it, with which a demo counts as concluding."""
COLUMNS = {
    "threads": "{threads}",
    "seed": "{seed}",
    "first reward": "{reward:.2f}",
    "prompts": "{prompts}",
    "told": "{told}",
    "within 15 %": "{within}",
    "of": "{tested}",
    "minutes": "{minutes:.1f}",
    "says": "{says}",
}


def run(config: DemoSeedsConfig) -> Report:
    """Run what is missing of the demos and lay out what they conclude."""
    cases = [(threads, seed) for threads in config.threads for seed in range(config.seeds)]
    rows = [demo_row(config.root, *case) for case in counted(cases, "demo")]
    concluding = sum(row["told"] + row["within"] >= DECIDED for row in rows)
    title = f"{concluding} of {len(rows)} demos decide on {DECIDED} estimators or more"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))


def demo_row(root: Path, threads: int, seed: int) -> dict[str, Any]:
    """Return what one demo concludes, running it first where it is missing."""
    folder = root / f"demo-t{threads}-s{seed}"
    runs = _complete(folder)
    if len(runs) < 2:
        options = ["--no-serve", "--root", str(folder), "--seed", str(seed), "--threads", str(threads)]
        # More threads than cores would spend their time waiting for each other, at full load.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-m", "otb_analysis", "demo", *options]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        runs = _complete(folder)
    (design,) = designs(runs).values()
    conclusion, steps = design.conclusion, [run.steps_df() for run in runs]
    seconds = max(float(s.filter(regex="^seconds_").sum().sum()) for s in steps)
    return {
        "threads": threads,
        "seed": seed,
        "reward": float(steps[0]["reward_mean"].iloc[0]),
        "prompts": conclusion.n_prompts,
        "told": names(conclusion.different),
        "within": names(conclusion.within),
        "tested": names(conclusion.tested),
        "minutes": seconds / 60,
        "says": design.sentences[0],
    }


def _complete(root: Path) -> list[RunStore]:
    """A demo's complete runs; `otb demo` decides what to do with others."""
    stores = [RunStore(path.parent) for path in sorted(root.glob("*/run.json"))]
    return [store for store in stores if store.info["status"] == "complete"]
