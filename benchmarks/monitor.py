"""What OTBMonitor adds to a step of TRL's GRPOTrainer: its own time inside a step, over the rest of that step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.config import MonitorBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import peer
from benchmarks.train import BUDGETS, REPEATS, SCRIPT, bench_config, peer_spec
from otb_analysis.errors import InputError

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
        remedy = "pass --trl-python an interpreter with trl and this package"
        raise InputError(f"otb bench monitor runs inside TRL; {remedy}.")
    rows = []
    with TemporaryDirectory() as folder:
        for model in ("small",) if config.quick else config.models:
            most = config.repeats if config.by_default else min(config.repeats, REPEATS.get(model, config.repeats))
            spec = peer_spec(bench_config(model, Path(folder), config.quick), most, config)
            spec |= {"monitor": str(Path(folder) / f"watched-{model}"), "by_default": config.by_default}
            with peer(config.trl_python, SCRIPT, spec) as watched:
                turns = [watched.facts, *(watched.answer() for _ in range(most))]
            parts = {model: turns[1:]}  # the first warms up
            if config.by_default:
                parts = {model: turns, f"{model}, first step": turns[:1], f"{model}, all others": turns[1:]}
            rows += [{"model": name, **_row(part, config.by_default)} for name, part in parts.items()]
    title = "A step of TRL's GRPOTrainer and what OTBMonitor adds to it where it watches"
    name = "monitor_by_default" if config.by_default else "monitor"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, **BUDGETS), name=name)


def _row(turns: Sequence[Mapping[str, Any]], by_default: bool) -> dict[str, Any]:
    """Return what steps took: their median where each is watched, else their mean, since some are and others not."""
    names = ("tokens", "seconds", "monitor", "check")
    row = {name: (mean if by_default else median)(turn[name] for turn in turns) for name in names}
    step, shares = row["seconds"] - row["monitor"], [t["monitor"] / (t["seconds"] - t["monitor"]) for t in turns]
    found = {"percent": row["monitor"] / step, "least": min(shares), "largest": max(shares)}
    found |= {"without": (row["monitor"] - row["check"]) / step}
    return {**row, "tokens": int(row["tokens"]), "step": step, **{name: 100 * x for name, x in found.items()}}
