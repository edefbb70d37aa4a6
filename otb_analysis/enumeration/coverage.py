"""Measured coverage of the intervals, where the truth is known: enumerated policies and heavy-tailed laws.

`python -m otb_analysis.enumeration.coverage > docs/coverage.md` repeats the study (2,000 repetitions a row, seeded).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otb_analysis.enumeration.groups import group_gradients, multisets
from otb_analysis.enumeration.pages import page
from otb_analysis.enumeration.trees import TreeSpec, random_tree
from otb_analysis.statistics.inference.intervals import Interval
from otb_analysis.statistics.moments import measures
from otb_analysis.statistics.moments.gradients import pooled_statistics
from otb_analysis.statistics.moments.gram import REFERENCE
from otb_analysis.statistics.moments.measures import Moments
from otb_analysis.statistics.moments.paired import NOTHING, paired_ratios
from otb_analysis.types import Float, Gram, Label, Proved

REPETITIONS = 2000
NOMINAL_FLOOR = 0.92
"""Coverage below this is published in bold."""

OTHER: Label = ("other", "exact")
QUANTITIES = ("variance", "projection", "SF", "efficiency", "variance ratio", "SF ratio", "efficiency ratio")


@dataclass(frozen=True)
class Law:
    """The law of one prompt's group gradients under RLOO (row 0) and another estimator (row 1)."""

    name: str
    draw: Callable[[np.random.Generator, int], Float]  # (generator, n) → group gradients of n prompts [2, n, D]
    moments: Moments  # Exact, both rows in one array [2]

    @property
    def noise_scale(self) -> float:
        """V/‖∇J‖² of RLOO in prompts."""
        return float((self.moments.reference_power[0] - self.moments.truth_sq[0]) / self.moments.truth_sq[0])


@dataclass(frozen=True)
class Coverage:
    """Coverage of one quantity in one setting."""

    covered: float  # Share of the intervals given that contain the truth
    given: float  # Share of the repetitions that gave an interval


def enumerated(seed: int, n_prompts: int = 4, size: int = 4, names: Sequence[str] = ("rloo", "otb")) -> Law:
    """Build the law of `rloo` and another (exact energies) on random softmax policies, every group enumerated.

    A prompt is one of a few policies with shared parameters and three tokens; every multiset of completions is an
    outcome with its exact probability, so that groups with equal rewards (gradient 0) are as frequent as they really
    are.
    """
    rng = np.random.default_rng(seed)
    gradients, probabilities = [], []
    for _ in range(n_prompts):
        tree = random_tree(TreeSpec(vocabulary=2, horizon=3, shared=6), rng)
        members, prob = multisets(tree, size)
        gradients.append(np.stack([group_gradients(name, tree, members) for name in names]))
        probabilities.append(prob / n_prompts)
    g, p = np.concatenate(gradients, axis=1), np.concatenate(probabilities)
    cumulative = np.cumsum(p / p.sum())
    cumulative[-1] = 1.0  # rounding must not leave a gap at the end
    # Exact over outcomes; sampling a group is then one draw from the cumulative probabilities.
    mean, power = np.einsum("o,mod->md", p, g), np.einsum("o,mod->m", p, g**2)
    law = Law("", lambda rng, n: g[:, np.searchsorted(cumulative, rng.random(n), side="right")], _moments(mean, power))
    return Law(f"enumerated policies, noise scale {law.noise_scale:.0f} prompts", law.draw, law.moments)


def scaled_normal(
    name: str, scale: Callable[[np.random.Generator, int], NDArray[np.floating]], mean_square: float
) -> Law:
    """Build the law of a fixed gradient plus normal noise whose size differs between prompts.

    The other estimator shares most of RLOO's noise and shrinks the gradient to .56 of it.

    Args:
        scale: (generator, n) → size of each prompt's noise [n].
        mean_square: Its exact mean square.
    """
    dim, gradient = 8, np.array([1.5, 0, 0, 0, 0, 0, 0, 0])

    def draw(rng: np.random.Generator, n: int) -> Float:
        size = scale(rng, n)[:, None]
        shared, separate = size * rng.normal(size=(n, dim)), size * rng.normal(size=(n, dim))
        return np.stack([gradient + shared, 0.56 * (gradient + shared) + 0.35 * separate])

    mean = np.stack([gradient, 0.56 * gradient])
    noise = dim * mean_square * np.array([1, 0.56**2 + 0.35**2])
    return Law(name, draw, _moments(mean, (mean**2).sum(axis=1) + noise))


def _moments(mean: Float, power: Float) -> Moments:
    along = mean @ mean[0]
    return Moments(power, (mean**2).sum(axis=1), along, np.full(2, along[0]), np.full(2, power[0]))


LAWS: dict[str, Callable[[], Law]] = {
    "quiet": lambda: enumerated(8),
    "noisy": lambda: enumerated(2),
    "normal": lambda: scaled_normal("normal noise", lambda rng, n: np.ones(n), 1.0),
    "half": lambda: scaled_normal("half the prompts without noise", lambda rng, n: rng.integers(0, 2, n) * 1.0, 0.5),
    "lognormal": lambda: scaled_normal(
        "log-normal power, variance 6 mean²", lambda rng, n: np.exp(rng.normal(0, 0.7, n)), np.exp(0.98)
    ),
    "student": lambda: scaled_normal(
        "power with infinite variance (tail index .5)", lambda rng, n: 2 / np.sqrt(rng.chisquare(4, n)), 2.0
    ),
    "extreme": lambda: scaled_normal(
        "log-normal power, variance 54 mean²", lambda rng, n: np.exp(rng.normal(0, 1, n)), np.exp(2.0)
    ),
}

ROWS = (
    *((law, 1, prompts) for law in LAWS for prompts in (24, 64)),
    ("noisy", 1, 16),
    ("noisy", 16, 2),
    ("noisy", 8, 8),
    ("lognormal", 8, 8),
)
"""Law, steps and prompts of each row of the published table, every prompt a new one; the seed of a row is its index."""


def measure(
    law: Law, steps: int, prompts: int, repetitions: int = REPETITIONS, seed: int = 0, known: Proved = NOTHING
) -> dict[str, Coverage]:
    """Repeat a measurement of steps × prompts and count how often each interval contains the truth."""
    rng = np.random.default_rng(seed)
    truth = _truth(law, prompts)
    n_covered, n_given = np.zeros(len(QUANTITIES)), np.zeros(len(QUANTITIES))
    for _ in range(repetitions):
        gradients = [law.draw(rng, prompts) for _ in range(steps)]
        grams = [Gram(np.einsum("mpd,nqd->mnpq", g, g), (REFERENCE, OTHER), g.shape[1]) for g in gradients]
        for index, interval in enumerate(_intervals(grams, known)):
            if interval is not None and interval.low is not None and interval.high is not None:
                n_given[index] += 1
                n_covered[index] += interval.low <= truth[index] <= interval.high
    return {
        name: Coverage(float(c / n) if n else 0.0, float(n / repetitions))
        for name, c, n in zip(QUANTITIES, n_covered, n_given, strict=True)
    }


def _intervals(grams: Sequence[Gram], known: Proved) -> list[Interval | None]:
    other, pair = pooled_statistics(grams, known=known)[1], paired_ratios(grams, known=known)[0]
    return [*other.intervals.values(), pair.variance, pair.sf, pair.efficiency]


def _truth(law: Law, prompts: int) -> list[float]:
    variance = measures.batch_variance(law.moments, prompts)
    sf, efficiency = measures.sf(law.moments, prompts), measures.efficiency(law.moments, prompts)
    alone = [variance[1], measures.projection(law.moments)[1], sf[1], efficiency[1]]
    return [float(v) for v in (*alone, variance[1] / variance[0], sf[1] / sf[0], efficiency[1] / efficiency[0])]


def row_text(index: int, repetitions: int = REPETITIONS) -> str:
    """Run one row of the table and format it."""
    name, steps, prompts = ROWS[index]
    law = LAWS[name]()
    coverage = measure(law, steps, prompts, repetitions, seed=index)
    cells = [_cell(coverage[quantity]) for quantity in QUANTITIES]
    size = f"{prompts}" if steps == 1 else f"{steps} × {prompts}"
    return f"| {law.name} | {size} | {' | '.join(cells)} |"


def _cell(coverage: Coverage) -> str:
    if coverage.given == 0:
        return "no interval"
    text = f"{100 * coverage.covered:.1f}"
    text = text if coverage.covered >= NOMINAL_FLOOR else f"**{text}**"
    return text if coverage.given > 0.995 else f"{text} ({100 * coverage.given:.0f})"


def coverage_page(rows: Sequence[str]) -> str:
    """Return the whole page as Markdown around the rows of its table."""
    stderr, floor = 100 * np.sqrt(0.95 * 0.05 / REPETITIONS), 100 * NOMINAL_FLOOR
    facts = {"repetitions": REPETITIONS, "stderr": stderr, "floor": floor, "quantities": QUANTITIES, "rows": rows}
    return page("coverage.md.j2", **facts)


if __name__ == "__main__":
    print(coverage_page([row_text(index) for index in range(len(ROWS))]), end="")
