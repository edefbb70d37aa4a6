"""How far sketched norms lie from exact ones on the demo's warm-started, tied model, and how far they say they do.

Relative errors of every sampled token's norm², root mean square over tokens and seeds, beside the stated standard
errors. Scores of the model's rollouts; nothing is timed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from otb_analysis.bench.config import ScoreSketchConfig, check_positive
from otb_analysis.bench.publish import Report, flags
from otb_analysis.bench.sketch import SketchBatch, warm_batch
from otb_analysis.bench.timing import threads
from otb_analysis.gradients import sketch_score_norms, token_score_norms

ROLLOUTS = 4
"""Of each prompt."""
HEADERS = ("method", "K", "tokens", "error", "stated", "mean error")


@dataclass(frozen=True)
class ScoreSketchRow:
    """One method and number of directions.

    Attributes:
        method: Of `sketch_score_norms`.
        directions: K.
        tokens: Sampled tokens.
        error: Root mean square of (ŵ − w) / w over tokens and seeds.
        stated: The same of the stated standard errors over w.
        mean: Mean of (ŵ − w) / w, zero up to chance for an unbiased estimate.
    """

    method: str
    directions: int
    tokens: int
    error: float
    stated: float
    mean: float


def bench_score_sketch(
    batch: SketchBatch, directions: Sequence[int] = (8, 32, 128), seeds: int = 8
) -> list[ScoreSketchRow]:
    """Compare sketched norms with exact ones.

    Args:
        batch: Model and rollouts.
        directions: Every K to try.
        seeds: Sketches of each kind.

    Returns:
        One row per method, "hybrid" and "rank_one", and K.
    """
    args, inside = (batch.model, batch.ids, batch.mask, batch.real), batch.mask.numpy()
    exact, rows = token_score_norms(*args).norm_sq[inside], []
    for method in ("hybrid", "rank_one"):
        for count in directions:
            made = [sketch_score_norms(*args, directions=count, method=method, seed=seed) for seed in range(seeds)]
            off = np.stack([m.norm_sq[inside] / exact - 1 for m in made])
            stated = np.stack([np.zeros(0) if m.norm_sq_stderr is None else m.norm_sq_stderr[inside] for m in made])
            error, claimed = (float(np.sqrt((x**2).mean())) for x in (off, stated / exact))
            rows.append(ScoreSketchRow(method, count, len(exact), error, claimed, float(off.mean())))
    return rows


def run_score_sketch(config: ScoreSketchConfig) -> Report:
    """Run the benchmark and lay out its table.

    Raises:
        InputError: A setting is below 1.
    """
    check_positive(prompts=config.prompts, directions=min(config.directions, default=0), repeats=config.repeats)
    with threads(1):
        batch = warm_batch(config.prompts, ROLLOUTS)
        return report(config, bench_score_sketch(batch, config.directions, config.repeats))


def report(config: ScoreSketchConfig, rows: Sequence[ScoreSketchRow]) -> Report:
    """Lay out the table.

    Args:
        config: What was asked for.
        rows: From `bench_score_sketch`.
    """
    settings = {name: value for name, value in vars(config).items() if name != "out"}
    cells = [
        (r.method, str(r.directions), str(r.tokens), f"{r.error:.3f}", f"{r.stated:.3f}", f"{r.mean:+.3f}")
        for r in rows
    ]
    return Report(
        name="score_sketch",
        command=f"otb bench score-sketch {flags(settings)}",
        settings=settings,
        title="Relative errors of sketched norms of single scores",
        headers=HEADERS,
        cells=cells,
        rows=[asdict(row) for row in rows],
        notes=(
            f"Found and stated errors are root mean squares over tokens and {config.repeats} seeds; nothing is timed.",
            "Not measured on a GPU.",
        ),
    )
