"""How far sketched norms lie from exact ones on the demo's warm-started, tied model, and how far they say they do."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.config import ScoreSketchConfig
from benchmarks.demo_batch import DemoBatch, demo_batch
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import threads
from otb_analysis.gradients import sketch_score_norms, token_score_norms

ROLLOUTS = 4
"""Of each prompt."""
COLUMNS = {
    "method": "{method}",
    "K": "{directions}",
    "tokens": "{tokens}",
    "error": "{error:.3f}",
    "stated": "{stated:.3f}",
    "mean error": "{mean:+.3f}",
}


def run(config: ScoreSketchConfig) -> Report:
    """Compare both methods on rollouts of the model; nothing is timed."""
    with threads(1):
        rows = bench_score_sketch(demo_batch(config.prompts, ROLLOUTS), config.directions, config.repeats)
    return report_of(
        config, "Relative errors of sketched norms of single scores", COLUMNS, rows, notes=notes_of(config)
    )


def bench_score_sketch(batch: DemoBatch, directions: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Compare sketched norms ŵ with exact ones w, by method and number of directions K.

    `error`: root mean square of (ŵ − w) / w over tokens and seeds; `stated`: that of the stated standard errors over w;
    `mean`: mean of (ŵ − w) / w, zero up to chance for an unbiased estimate.
    """
    inside = batch.args[2].numpy()
    exact, rows = token_score_norms(*batch.args).norm_sq[inside], []
    for method in ("hybrid", "rank_one"):
        for count in directions:
            sketch = partial(sketch_score_norms, *batch.args, directions=count, method=method)
            sketches = [sketch(seed=seed) for seed in range(seeds)]
            off = np.stack([s.norm_sq[inside] / exact - 1 for s in sketches])
            stated = np.stack([np.asarray(s.norm_sq_stderr)[inside] / exact for s in sketches])
            row = {"method": method, "directions": count, "tokens": len(exact), "error": _rms(off)}
            rows.append(row | {"stated": _rms(stated), "mean": float(off.mean())})
    return rows


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))
