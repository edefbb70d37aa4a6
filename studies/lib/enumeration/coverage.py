"""Measured coverage of the intervals, where the truth is known: enumerated policies and heavy-tailed laws.

`python -m studies.lib.enumeration.coverage 4 > docs/coverage.md` repeats the study in four processes (500
repetitions a row of the first table, seeded; those of the others are in `PROMPTS`).
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from otb_analysis.statistics.inference.intervals import Interval
from otb_analysis.statistics.moments import measures
from otb_analysis.statistics.moments.gradients import pooled_statistics
from otb_analysis.statistics.moments.gram import REFERENCE
from otb_analysis.statistics.moments.paired import NOTHING, paired_ratios
from otb_analysis.types import Float, Gram, Label, Proved
from studies.lib.enumeration.coverage_laws import LAWS, WEAK, Law
from studies.lib.enumeration.pages import page

REPETITIONS = 500
"""Repetitions of a row of the first table."""
NOMINAL_FLOOR = 0.92
"""Coverage below this is published in bold."""

OTHER: Label = ("other", "exact")
UNBIASED: Label = ("unbiased", "exact")
LABELS = (REFERENCE, OTHER, UNBIASED)
"""What the rows of a law's gradients are called."""
KNOWN = Proved({REFERENCE: 1.0, UNBIASED: 1.0}, frozenset((REFERENCE, UNBIASED)))

QUANTITIES = (
    "variance", "projection", "SF", "bias", "equivalents", "efficiency", "noise scale",
    "variance ratio", "SF ratio", "efficiency ratio",
)  # fmt: skip
NAMES = ("variance", "projection", "sf", "relative_bias", "rollout_equivalents", "efficiency", "noise_scale")
"""The first quantities by their names in `GradientStatistics.intervals`."""

ROWS = (
    *((law, 1, prompts) for law in LAWS for prompts in (24, 64)),
    ("noisy", 1, 16),
    ("noisy", 16, 2),
    ("noisy", 8, 8),
    ("lognormal", 8, 8),
)
"""Law, steps and prompts of each row of the first table, every prompt a new one; the seed of a row is its index."""

SCALES = (50, 250, 1000)
"""Noise scales of the other tables, in prompts."""
PROMPTS = {24: 800, 64: 400, 192: 200}
"""Their measured prompts, and the repetitions of each: fewer prompts show fewer efficiencies, and cost less."""
BY_SCALE = ("efficiency", "noise scale", "efficiency ratio")
"""What the other tables are of, each of an unbiased estimator and of one whose projection is estimated."""
SCALED = tuple((name, scale) for name in WEAK for scale in SCALES)


@dataclass(frozen=True)
class Coverage:
    """Coverage of one quantity in one setting."""

    covered: float  # Share of the intervals given that contain the truth
    given: float  # Share of the repetitions that gave an interval


def measure(
    law: Law, steps: int, prompts: int, repetitions: int = REPETITIONS, seed: int = 0, known: Proved = NOTHING
) -> dict[str, Coverage]:
    """Repeat a measurement of steps × prompts and count how often each interval of row 1 contains the truth."""

    def intervals(grams: Sequence[Gram]) -> list[Interval | None]:
        other, pair = pooled_statistics(grams, known=known)[1], paired_ratios(grams, known=known)[0]
        return [*(other.intervals[name] for name in NAMES), pair.variance, pair.sf, pair.efficiency]

    found = _count(law, (steps, prompts), repetitions, seed, intervals, _truth(law, prompts))
    return dict(zip(QUANTITIES, found, strict=True))


def measure_by_scale(law: Law, prompts: int, repetitions: int = REPETITIONS, seed: int = 0) -> list[list[Coverage]]:
    """Return the coverage of each of `BY_SCALE`, of the unbiased estimator and of the other one."""

    def intervals(grams: Sequence[Gram]) -> list[Interval | None]:
        _, other, unbiased = pooled_statistics(grams, known=KNOWN)
        pairs = {(pair.estimator, pair.energy_source): pair.efficiency for pair in paired_ratios(grams, known=KNOWN)}
        alone = [row.intervals[name] for name in ("efficiency", "noise_scale") for row in (unbiased, other)]
        return [*alone, pairs[UNBIASED], pairs[OTHER]]

    efficiency, scale = measures.efficiency(law.moments, prompts), _noise_scale(law)
    truth = [float(x[row]) for x in (efficiency, scale, efficiency / efficiency[0]) for row in (2, 1)]
    found = _count(law, (1, prompts), repetitions, seed, intervals, truth)
    return [found[2 * k : 2 * k + 2] for k in range(len(BY_SCALE))]


def _count(
    law: Law,
    size: tuple[int, int],
    repetitions: int,
    seed: int,
    intervals: Callable[[Sequence[Gram]], Sequence[Interval | None]],
    truth: Sequence[float],
) -> list[Coverage]:
    rng = np.random.default_rng(seed)
    covered, given = np.zeros(len(truth)), np.zeros(len(truth))
    for _ in range(repetitions):
        gradients = [law.draw(rng, size[1]) for _ in range(size[0])]
        grams = [Gram(_inner(g), LABELS[: len(g)], g.shape[1]) for g in gradients]
        for index, interval in enumerate(intervals(grams)):
            if interval is not None and interval.low is not None and interval.high is not None:
                given[index] += 1
                covered[index] += interval.low <= truth[index] <= interval.high
    return [Coverage(float(c / n) if n else 0.0, float(n / repetitions)) for c, n in zip(covered, given, strict=True)]


def _inner(g: Float) -> Float:
    """Return ⟨g_{m,p}, g_{n,q}⟩ [M, M, P, P] of group gradients [M, P, D]."""
    rows, prompts, _ = g.shape
    flat = g.reshape(rows * prompts, -1)
    return (flat @ flat.T).reshape(rows, prompts, rows, prompts).transpose(0, 2, 1, 3)


def _noise_scale(law: Law) -> Float:
    return measures.batch_variance(law.moments, 1) / law.moments.mean_sq


def _truth(law: Law, prompts: int) -> list[float]:
    moments = law.moments
    variance, sf = measures.batch_variance(moments, prompts), measures.sf(moments, prompts)
    efficiency = measures.efficiency(moments, prompts)
    equivalents = measures.rollout_equivalents(moments, prompts, prompts)
    alone = (
        variance, measures.projection(moments), sf, measures.relative_bias(moments), equivalents, efficiency,
        _noise_scale(law),
    )  # fmt: skip
    return [float(v[1]) for v in alone] + [float(v[1] / v[0]) for v in (variance, sf, efficiency)]


def row_text(index: int, repetitions: int = REPETITIONS) -> str:
    """Run one row of the first table and format it."""
    name, steps, prompts = ROWS[index]
    law = LAWS[name]()
    coverage = measure(law, steps, prompts, repetitions, seed=index)
    cells = [_cell(coverage[quantity]) for quantity in QUANTITIES]
    size = f"{prompts}" if steps == 1 else f"{steps} × {prompts}"
    return f"| {law.name} | {size} | {' | '.join(cells)} |"


def scaled_rows(index: int) -> list[str]:
    """Run one row of each of the other tables and format them."""
    name, scale = SCALED[index]
    law = WEAK[name].law(scale)
    # By prompts, then by table, then by estimator.
    found = [measure_by_scale(law, prompts, count, seed=1000 + index) for prompts, count in PROMPTS.items()]
    rows = []
    for table in range(len(BY_SCALE)):
        cells = [_cell(of_prompts[table][estimator]) for estimator in range(2) for of_prompts in found]
        rows.append(f"| {law.name} | {scale:,} | {' | '.join(cells)} |")
    return rows


def _cell(coverage: Coverage) -> str:
    if coverage.given == 0:
        return "none"
    text = f"{100 * coverage.covered:.1f}"
    text = text if float(text) >= 100 * NOMINAL_FLOOR else f"**{text}**"
    return text if coverage.given > 0.995 else f"{text} ({100 * coverage.given:.0f})"


def coverage_page(rows: Sequence[str], by_scale: Sequence[Sequence[str]]) -> str:
    """Return the whole page as Markdown around the rows of its first table and of those of `BY_SCALE`."""
    facts = {"repetitions": REPETITIONS, "stderr": _stderr(REPETITIONS)}
    facts["by_prompts"] = {prompts: (count, _stderr(count)) for prompts, count in PROMPTS.items()}
    tables = {"quantities": QUANTITIES, "rows": rows, "by_scale": dict(zip(BY_SCALE, by_scale, strict=True))}
    return page("coverage.md.j2", floor=100 * NOMINAL_FLOOR, prompts=list(PROMPTS), **facts, **tables)


def _stderr(repetitions: int) -> float:
    return float(100 * np.sqrt(0.95 * 0.05 / repetitions))


if __name__ == "__main__":
    with ProcessPoolExecutor(int(sys.argv[1]) if len(sys.argv) > 1 else 1) as processes:
        first = processes.map(row_text, range(len(ROWS)))
        scaled = list(processes.map(scaled_rows, range(len(SCALED))))
        print(coverage_page(list(first), [list(table) for table in zip(*scaled, strict=True)]), end="")
