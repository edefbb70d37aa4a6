"""What the demo concludes from several seeds and with several numbers of threads: it must not depend on luck."""

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from otb_analysis.bench.config import DemoSeedsConfig, check_positive
from otb_analysis.bench.publish import Report
from otb_analysis.phases import counted
from otb_analysis.report.designs import designs
from otb_analysis.statistics.comparisons.verdicts import names
from otb_analysis.store import RunStore

DECIDED = 3
"""Estimators told from rloo, or shown to be within 15 % of it, with which a demo counts as concluding."""


@dataclass(frozen=True)
class DemoRow:
    """One demo.

    Attributes:
        threads: Threads of each of its two runs.
        seed: Its seed.
        reward: Mean reward of its first step.
        prompts: Different prompts measured.
        told: Estimators told from rloo.
        within: Estimators whose interval lies within 15 % of rloo.
        tested: Estimators tested.
        minutes: Of the longer run, without loading.
        says: The first sentence of its conclusion.
    """

    threads: int
    seed: int
    reward: float
    prompts: int
    told: int
    within: int
    tested: int
    minutes: float
    says: str

    @property
    def concludes(self) -> bool:
        """Whether enough estimators are decided."""
        return self.told + self.within >= DECIDED


def run_demo_seeds(config: DemoSeedsConfig) -> Report:
    """Run what is missing of the demos and lay out what they conclude.

    Raises:
        InputError: A setting is below 1, or a demo failed.
    """
    check_positive(seeds=config.seeds, threads=min(config.threads, default=0))
    cases = [(t, s) for t in config.threads for s in range(config.seeds)]
    return report(config, [demo_row(config.root, *case) for case in counted(cases, "demo")])


def demo_row(root: Path, threads: int, seed: int) -> DemoRow:
    """Return what one demo concludes, running it first where it is missing."""
    own = root / f"demo-t{threads}-s{seed}"
    words = ["demo", "--no-serve", "--root", str(own), "--seed", str(seed), "--threads", str(threads)]
    # More threads than cores would spend their time waiting for each other, at full load.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "otb_analysis", *words]
    runs = _complete(own)
    if len(runs) < 2:
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        runs = _complete(own)
    (design,) = designs(runs).values()
    found = design.conclusion
    steps = [run.steps_df() for run in runs]
    seconds = max(float(s.filter(regex="^seconds_").sum().sum()) for s in steps)
    counts = names(found.told), names(found.within), names(found.tested)
    reward = float(steps[0]["reward_mean"].iloc[0])
    return DemoRow(threads, seed, reward, found.n_prompts, *counts, seconds / 60, design.sentences[0])


def _complete(root: Path) -> list[RunStore]:
    """Return a demo's complete runs; what else would have to be made again is for `otb demo` to say."""
    stores = [RunStore(path.parent) for path in sorted(root.glob("*/run.json"))]
    return [store for store in stores if store.info["status"] == "complete"]


def report(config: DemoSeedsConfig, rows: list[DemoRow]) -> Report:
    """Lay out the table.

    Args:
        config: What was asked for.
        rows: One per demo.
    """
    settings = {"seeds": config.seeds, "threads": list(config.threads)}
    threads = " ".join(map(str, config.threads))
    concluding = sum(row.concludes for row in rows)
    return Report(
        name="demo_seeds",
        command=f"otb bench demo-seeds --seeds {config.seeds} --threads {threads}",
        settings=settings,
        title=f"{concluding} of {len(rows)} demos decide on {DECIDED} estimators or more",
        headers=("threads", "seed", "first reward", "prompts", "told", "within 15 %", "of", "minutes", "says"),
        cells=[_cells(row) for row in rows],
        rows=[asdict(row) for row in rows],
        notes=(
            "Told: at a false-discovery rate of 5 % over all tests of a demo. Within 15 %: the 95 % interval of the "
            "ratio to rloo at equal progress. Estimators identical to rloo up to a factor are not counted.",
            "Minutes of the longer of the two runs, without installing and loading, on a machine with other work.",
        ),
    )


def _cells(row: DemoRow) -> tuple[str, ...]:
    counts = (row.prompts, row.told, row.within, row.tested)
    return (str(row.threads), str(row.seed), f"{row.reward:.2f}", *map(str, counts), f"{row.minutes:.1f}", row.says)
