"""How measuring grows with the length of an answer, as one picture of two committed benchmarks.

`python -m benchmarks.growth docs/results` draws growth.svg from long.json and lengths.json.
"""

import json
import sys
from pathlib import Path

from benchmarks.long import BEFORE, DRAWN, GRADIENTS, NORMS
from otb_analysis.figures.styles import BLUE, GREEN, GREY, ORANGE, PINK, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.measurement.level import NORM

NAMES = {GRADIENTS: "gradients", DRAWN: "drawn tokens", NORMS.split(",")[0]: "norms of all"}
COLORS = {"gradients": BLUE, "drawn tokens": SKY, "norms of all": ORANGE}


def growth(results: Path) -> str:
    """Return the picture: passes by length beside theory, and peak memory by length."""
    passes = json.loads((results / "long.json").read_text())["rows"]
    memory = json.loads((results / "lengths.json").read_text())["rows"]
    curves = []
    for words, name in NAMES.items():
        rows = [row for row in passes if row["what"].startswith(words)]
        tokens, cost = [row["tokens"] for row in rows], [row["passes"] for row in rows]
        curves.append(Curve(tokens, cost, name, color=COLORS[name]))
    tokens = sorted({row["tokens"] for row in passes})
    # Each token's signals go back over all before it: Σ_t (before + t)/(before + T), a third of a pass each.
    theory = [NORM["fast"] * t * (BEFORE + t / 2) / (BEFORE + t) for t in tokens]
    curves.append(Curve(tokens, theory, "theory", color=ORANGE, dashed=True))
    kinds = {"forward + backward": GREY, "fast": GREEN, "generic": PINK}
    held = []
    for what, color in kinds.items():
        rows = [row for row in memory if row["name"] == what]
        held.append(Curve([r["tokens"] for r in rows], [r["memory"] / 2**20 for r in rows], what, color=color))
    passes = Panel("Forward and backward passes", "norms of all tokens grow with T, gradients do not", "T", curves)
    return svg([passes, Panel("Peak memory of exact norms, MiB", "nothing grows with T²", "T", held)])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "growth.svg").write_text(growth(folder), encoding="utf-8")
