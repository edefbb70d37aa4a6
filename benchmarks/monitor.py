"""What OTBMonitor adds to a step of TRL's GRPOTrainer: its own time inside a step, over the rest of that step."""

from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from benchmarks.config import MonitorBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import peer
from benchmarks.train import BUDGETS, REPEATS, SCRIPT, bench_config, peer_spec
from otb_analysis.errors import InputError
from otb_analysis.integrations.monitor import FIRST

COLUMNS = {
    "model": "{model}", "tokens": "{tokens:,}", "step, s": "{step:.2f}", "monitor, s": "{monitor:.2f}",
    "% of step": "{percent:.1f}", "least": "{least:.1f}", "largest": "{largest:.1f}",
    "of it the check, s": "{check:.2f}", "% without it": "{without:.1f}",
}  # fmt: skip


def run(config: MonitorBenchConfig) -> Report:
    """Time every model's steps, each of them watched, or as many as are by default.

    Raises:
        InputError: There is no interpreter with TRL, or it does not work.
    """
    if config.trl_python is None:
        raise InputError(
            "otb bench monitor runs inside TRL; pass --trl-python an interpreter with trl and this package."
        )
    rows = []
    with TemporaryDirectory() as folder:
        for model in ("small",) if config.quick else config.models:
            most = config.repeats if config.by_default else min(config.repeats, REPEATS.get(model, config.repeats))
            first, typical = (FIRST - 1, mean) if config.by_default else (0, median)  # one more warms up
            spec = peer_spec(bench_config(model, Path(folder), config.quick), first + most, config)
            spec |= {"monitor": str(Path(folder) / f"watched-{model}"), "by_default": config.by_default}
            with peer(config.trl_python, SCRIPT, spec) as watched:
                turns = [watched.answer() for _ in range(first + most)][first:]
            shares = [100 * turn["monitor"] / (turn["seconds"] - turn["monitor"]) for turn in turns]
            row = {name: typical(turn[name] for turn in turns) for name in ("tokens", "seconds", "monitor", "check")}
            step = row["seconds"] - row["monitor"]
            row |= {"percent": 100 * row["monitor"] / step, "least": min(shares), "largest": max(shares)}
            row |= {"without": 100 * (row["monitor"] - row["check"]) / step}
            rows.append({"model": model, "step": step, **row, "tokens": int(row["tokens"])})
    title = "A step of TRL's GRPOTrainer and what OTBMonitor adds to it where it watches"
    name = "monitor_by_default" if config.by_default else "monitor"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, **BUDGETS), name=name)
