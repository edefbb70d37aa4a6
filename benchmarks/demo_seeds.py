"""What the demo concludes from several seeds and with several numbers of threads: it must not depend on luck."""

from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.config import DemoSeedsConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import run_otb
from otb_analysis.answers import by_name, designs
from otb_analysis.phases import counted
from otb_analysis.store import RunStore

COLUMNS = {
    "threads": "{threads}", "seed": "{seed}", "first reward": "{reward:.2f}", "prompts": "{prompts}", "told": "{told}",
    "of": "{tested}", "minutes": "{minutes:.1f}", "says": "{says}",
}  # fmt: skip


def run(config: DemoSeedsConfig) -> Report:
    """Run what is missing of the demos and lay out what they conclude."""
    rows = list[dict[str, Any]]()
    for threads, seed in counted(list(product(config.threads, range(config.seeds))), "demo"):
        folder = config.root / f"demo-t{threads}-s{seed}"
        runs = complete_runs(folder)
        if len(runs) < 2:
            words = ["demo", "--no-serve", "--root", str(folder), "--seed", str(seed), "--threads", str(threads)]
            # More threads than cores would spend their time waiting for each other, at full load.
            run_otb(words, {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"})
            runs = complete_runs(folder)
        answers = by_name(runs)
        (design,) = designs(answers).values()
        decision, steps = design.decision, [run.steps for run in answers.values()]
        seconds = max(float(s.filter(regex="^seconds_").sum().sum()) for s in steps)
        rows.append({
            "threads": threads, "seed": seed, "reward": float(steps[0]["reward_mean"].iloc[0]),
            "prompts": decision.n_prompts, "told": len(decision.better), "tested": decision.looked_at,
            "minutes": seconds / 60, "says": design.lines[0],
        })  # fmt: skip
    concluding = sum(row["told"] > 0 for row in rows)
    title = f"{concluding} of {len(rows)} demos show a baseline that is better than rloo"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))


def complete_runs(root: Path) -> list[RunStore]:
    """Return a demo's complete runs; `otb demo` decides what to do with others."""
    stores = [RunStore(path.parent) for path in sorted(root.glob("*/run.json"))]
    return [store for store in stores if store.info["status"] == "complete"]
