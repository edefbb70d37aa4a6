"""What the store costs: appending a step, the variance of a column by step and position, what each page opens with.

Everything is read by a new `RunStore`, so nothing is held from before; the operating system may hold the files.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.config import StoreConfig
from benchmarks.peer_side import peak
from benchmarks.publish import Report, mebibytes_cell, notes_of, report_of
from benchmarks.synthetic_run import Shape, synthetic_step, write_synthetic_run
from benchmarks.timing import least_seconds, run_otb
from otb_analysis.estimators import standing_for_truth
from otb_analysis.statistics import REFERENCE, pooled_statistics
from otb_analysis.store import EXACT_ROWS, RolloutFilter, RunStore, find_rollouts, runs_df

COLUMNS = {"what": "{what}", "seconds": "{seconds:.3f}", "extra memory, MiB": mebibytes_cell}
DUCKDB, PANDAS = "variance by step and position, DuckDB", "variance by step and position, pandas"
WHOLE = "`otb compare` of two runs: processor seconds, and all memory of the process"
VARIANCE = """SELECT step, t // 64 AS bin, count(*) AS n, avg(entropy) AS mean, var_samp(entropy) AS variance
FROM tokens WHERE mask GROUP BY step, bin ORDER BY step, bin"""


def run(config: StoreConfig) -> Report:
    """Write synthetic runs, and time reading them.

    Raises:
        InputError: There are runs of these names under `root`.
        StoreError: The disk refuses.
    """
    shape = Shape(config.steps, config.measured, config.tokens, config.prompts, config.group_size, config.estimators)
    with tempfile.TemporaryDirectory() as temporary:
        root = config.root or Path(temporary)
        for seed in range(config.runs):
            write_synthetic_run(root, f"synthetic-{seed}", shape, seed)
        writer = write_synthetic_run(Path(temporary) / "appended", "run", Shape(1, 1, 1, 2, 2, 2), finish=False)
        appended = synthetic_step(np.random.default_rng(0), 1, shape, config.append, measured=False)
        append = f"append a step of {config.append:,} tokens"
        calls = {append: lambda: writer.write_step(1, appended)} | reads(root, "synthetic-0")
        timed_calls = {name: call for name, call in calls.items() if config.pandas or name != PANDAS}
        least = least_seconds(timed_calls, config.repeats, perf_counter)
        rows = [{"what": name, "seconds": x, "memory": peak(calls[name], "cpu")} for name, x in least.items()]
        if config.runs > 1:
            words = ["compare", *(str(root / f"synthetic-{seed}") for seed in (0, 1))]
            spent, _ = run_otb(words, {"OMP_NUM_THREADS": "1"})
            rows.append({"what": WHOLE, "seconds": spent["processor"], "memory": int(1e9 * spent["peak"])})
    title = f"The store: {config.runs} runs of {shape.tokens:,} tokens, {shape.steps} steps, {shape.measured} measured"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))


def variance_in_pandas(path: Path) -> pd.DataFrame:
    """Return the answer to `VARIANCE` as pandas computes it from the same files."""
    tokens: Any = pd.read_parquet(path / "tokens.parquet", columns=["step", "t", "mask", "entropy"])
    tokens = tokens[tokens["mask"]]
    tokens["bin"], tokens["entropy"] = tokens["t"] // 64, tokens["entropy"].astype(float)
    measures = {"n": ("entropy", "size"), "mean": ("entropy", "mean"), "variance": ("entropy", "var")}
    return tokens.groupby(["step", "bin"]).agg(**measures).reset_index()


def reads(root: Path, run: str) -> dict[str, Callable[[], object]]:
    """Return what reads a run, by name: the variance both ways, and what the first chart of each page needs."""
    path, against = root / run, (REFERENCE, standing_for_truth((), {}))
    proxy = f"SELECT energy_proxy, grad_norm_sq FROM tokens WHERE {EXACT_ROWS}"
    return {
        DUCKDB: lambda: RunStore(path).sql(VARIANCE),
        PANDAS: lambda: variance_in_pandas(path),
        "Triage: list of runs": lambda: runs_df(root),
        "Run: every step": lambda: RunStore(path).steps_df(),
        "Rollouts: a search over all steps": lambda: find_rollouts(RunStore(path), RolloutFilter(text="token1")),
        "Tokens: one prompt": lambda: (s := RunStore(path)).tokens_df(s.complete_steps()[-1:], where='"group" = 0'),
        "Estimators: measures over steps": lambda: [
            pooled_statistics([gram]) for gram in list(RunStore(path).reduced_grams(against).values())[:40]
        ],
        "Proxy: measured tokens": lambda: RunStore(path).sql(proxy),
    }
