"""How far sketched norms lie from exact ones on the demo's warm-started, tied model, and how far they say they do.

    python -m otb_analysis.bench.score_sketch docs/results

Relative errors of every sampled token's norm², root mean square over tokens and seeds, beside the stated standard
errors. Scores of the model's rollouts; nothing is timed.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from otb_analysis.bench.sketch import SketchBatch, warm_batch
from otb_analysis.errors import StoreError
from otb_analysis.gradients import sketch_score_norms, token_score_norms

COMMAND = "python -m otb_analysis.bench.score_sketch docs/results"
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


def publish_score_sketch(folder: Path, rows: list[ScoreSketchRow]) -> None:
    """Write score_sketch.md and score_sketch.json: the numbers and the command that made them.

    Raises:
        StoreError: The folder cannot be written.
    """
    facts = {"command": COMMAND, "torch": torch.__version__, "rows": [asdict(r) for r in rows]}
    lines = [f"# `{COMMAND}`", "", "| " + " | ".join(HEADERS) + " |", "|" + "---|" * len(HEADERS)]
    for r in rows:
        cells = r.method, r.directions, r.tokens, f"{r.error:.3f}", f"{r.stated:.3f}", f"{r.mean:+.3f}"
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "score_sketch.json").write_text(json.dumps(facts, indent=2) + "\n")
        (folder / "score_sketch.md").write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise StoreError(f"cannot write the benchmark to {folder} ({error.strerror}); pass another folder.") from error


if __name__ == "__main__":
    torch.set_num_threads(1)
    publish_score_sketch(Path(sys.argv[1]), bench_score_sketch(warm_batch(prompts=4, group_size=4)))
