"""Measured coverage of the intervals, where the truth is known: enumerated policies and heavy-tailed laws.

`python -m studies.lib.enumeration.coverage 4 > docs/coverage.md` repeats the study in four processes (500
repetitions a row of the first table, seeded; those of the others are in `PROMPTS`).
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otb_analysis.estimators import estimate
from otb_analysis.statistics import moments as measures
from otb_analysis.statistics.comparisons import NOTHING, paired_ratios
from otb_analysis.statistics.gradients import pooled_statistics
from otb_analysis.statistics.intervals import Interval
from otb_analysis.statistics.moments import REFERENCE, Moments
from otb_analysis.types import Float, Gram, Label, Proved
from studies.lib.enumeration.catalogue import page
from studies.lib.enumeration.derailment import Derailment
from studies.lib.enumeration.groups import group_gradients, multisets
from studies.lib.enumeration.trees import TreeSpec, random_tree


@dataclass(frozen=True)
class Law:
    """The law of one prompt's group gradients under RLOO (row 0), another estimator (row 1) and perhaps more."""

    name: str
    draw: Callable[[np.random.Generator, int], Float]  # (generator, n) → group gradients of n prompts [M, n, D]
    moments: Moments  # Exact, all rows in one array [M]

    @property
    def noise_scale(self) -> Float:
        """V/‖m‖² of each row [M], in prompts."""
        return measures.batch_variance(self.moments, 1) / self.moments.mean_sq


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
    law = _discrete(np.concatenate(gradients, axis=1), np.concatenate(probabilities))
    return replace(law, name=f"enumerated policies, noise scale {law.noise_scale[0]:.0f} prompts")


def _discrete(g: Float, p: Float) -> Law:
    """Build the law of finitely many outcomes: gradients [M, O, D] and their probabilities [O]."""
    cumulative = np.cumsum(p / p.sum())
    cumulative[-1] = 1.0  # rounding must not leave a gap at the end
    # Exact over outcomes; sampling a group is then one draw from the cumulative probabilities.
    mean, power = np.einsum("o,mod->md", p, g), np.einsum("o,mod->m", p, g**2)
    return Law("", lambda rng, n: g[:, np.searchsorted(cumulative, rng.random(n), side="right")], _moments(mean, power))


LONG = Derailment(horizon=512, mistake=0.7 / 512, recovery=0.32 / 512)
"""Half of its answers of 512 tokens are right, as of 64 with the rates of 64."""


def long_answers(process: Derailment = LONG, groups: int = 4000, size: int = 4) -> Law:
    """Build the law of `rloo` and `otb` on long answers of the derailment process, all positions sharing parameters.

    A table for each position would leave hardly any signal in a position, so ∇J is the sum over positions. Its groups
    are too many to enumerate: the law is that of this many drawn ones, each as likely, so its moments are exact.
    """
    rng, names, parts = np.random.default_rng(512), ("rloo", "otb"), []
    for _ in range(groups // 500):
        state, token, reward = process.sample(500 * size, rng)
        inputs = process.inputs(state, token, reward, size)
        gradients = [process.group_gradients(state, token, estimate(one, inputs).advantage, size) for one in names]
        parts.append(np.stack(gradients).reshape(len(names), 500, process.horizon, -1).sum(axis=2))
    law = _discrete(np.concatenate(parts, axis=1), np.full(groups, 1 / groups))
    return replace(law, name=f"answers of {process.horizon} tokens, noise scale {law.noise_scale[0]:.0f} prompts")


@dataclass(frozen=True)
class Noise:
    """Normal noise whose size differs between prompts."""

    name: str
    scale: Callable[[np.random.Generator, int], NDArray[np.floating]]  # (generator, n) → size of each prompt's [n]
    mean_square: float  # Exact mean square of the size
    directions: int = 8

    def law(self, noise_scale: float | None = None) -> Law:
        """Build the law of a fixed gradient plus this noise, of a noise scale in prompts, by default with ‖∇J‖ = 1.5.

        Row 1 shares most of RLOO's noise and shrinks the gradient to .56 of it; row 2 is unbiased and less noisy.
        """
        dim = self.directions
        gradient = np.zeros(dim)
        gradient[0] = 1.5 if noise_scale is None else np.sqrt(dim * self.mean_square / noise_scale)

        def draw(rng: np.random.Generator, n: int) -> Float:
            size = self.scale(rng, n)[:, None]
            shared, separate = size * rng.normal(size=(n, dim)), size * rng.normal(size=(n, dim))
            rloo = gradient + shared
            return np.stack([rloo, 0.56 * rloo + 0.35 * separate, gradient + 0.8 * shared + 0.3 * separate])

        mean = np.stack([gradient, 0.56 * gradient, gradient])
        noise = dim * self.mean_square * np.array([1, 0.56**2 + 0.35**2, 0.8**2 + 0.3**2])
        return Law(self.name, draw, _moments(mean, (mean**2).sum(axis=1) + noise))


def _moments(mean: Float, power: Float) -> Moments:
    along = mean @ mean[0]
    return Moments(power, (mean**2).sum(axis=1), along, np.full(len(mean), along[0]), np.full(len(mean), power[0]))


NOISES = {
    "normal": Noise("normal noise", lambda rng, n: np.ones(n), 1.0),
    "half": Noise("half the prompts without noise", lambda rng, n: rng.integers(0, 2, n) * 1.0, 0.5),
    "lognormal": Noise(
        "log-normal power, variance 6 mean²", lambda rng, n: np.exp(rng.normal(0, 0.7, n)), np.exp(0.98)
    ),
    "student": Noise(
        "power with infinite variance (tail index .5)", lambda rng, n: 2 / np.sqrt(rng.chisquare(4, n)), 2.0
    ),
    "extreme": Noise("log-normal power, variance 54 mean²", lambda rng, n: np.exp(rng.normal(0, 1, n)), np.exp(2.0)),
}
WEAK = NOISES | {"wide": replace(NOISES["normal"], name="normal noise in 100 directions", directions=100)}
"""Noises that are also measured with weaker signals."""

LAWS: dict[str, Callable[[], Law]] = {
    "quiet": lambda: enumerated(8),
    "noisy": lambda: enumerated(2),
    **{name: noise.law for name, noise in NOISES.items()},
    "long": long_answers,
}


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
    *((law, 1, prompts) for law in LAWS if law != "long" for prompts in (24, 64)),
    ("noisy", 1, 16),
    ("noisy", 16, 2),
    ("noisy", 8, 8),
    ("lognormal", 8, 8),
    *(("long", 1, prompts) for prompts in (24, 64, 192)),
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

    m = law.moments
    variance, sf, efficiency = (f(m, prompts) for f in (measures.batch_variance, measures.sf, measures.efficiency))
    equivalents = measures.rollout_equivalents(m, prompts, prompts)
    bias, scale = measures.relative_bias(m), law.noise_scale
    truth = (variance, measures.projection(m), sf, bias, equivalents, efficiency, scale)
    ratios = [float(v[1] / v[0]) for v in (variance, sf, efficiency)]
    coverages = _count(law, (steps, prompts), repetitions, seed, intervals, [float(v[1]) for v in truth] + ratios)
    return dict(zip(QUANTITIES, coverages, strict=True))


def measure_by_scale(law: Law, prompts: int, repetitions: int = REPETITIONS, seed: int = 0) -> list[list[Coverage]]:
    """Return the coverage of each of `BY_SCALE`, of the unbiased estimator and of the other one."""

    def intervals(grams: Sequence[Gram]) -> list[Interval | None]:
        _, other, unbiased = pooled_statistics(grams, known=KNOWN)
        pairs = {(pair.estimator, pair.energy_source): pair.efficiency for pair in paired_ratios(grams, known=KNOWN)}
        alone = [row.intervals[name] for name in ("efficiency", "noise_scale") for row in (unbiased, other)]
        return [*alone, pairs[UNBIASED], pairs[OTHER]]

    efficiency, scale = measures.efficiency(law.moments, prompts), law.noise_scale
    truth = [float(x[row]) for x in (efficiency, scale, efficiency / efficiency[0]) for row in (2, 1)]
    coverages = _count(law, (1, prompts), repetitions, seed, intervals, truth)
    return [coverages[2 * k : 2 * k + 2] for k in range(len(BY_SCALE))]


Intervals = Callable[[Sequence[Gram]], Sequence[Interval | None]]


def _count(
    law: Law, size: tuple[int, int], repetitions: int, seed: int, intervals: Intervals, truth: Sequence[float]
) -> list[Coverage]:
    rng = np.random.default_rng(seed)
    covered, given = np.zeros(len(truth)), np.zeros(len(truth))
    for _ in range(repetitions):
        grams = []
        for _ in range(size[0]):
            g = law.draw(rng, size[1])
            flat = g.reshape(len(g) * size[1], -1)
            inner = (flat @ flat.T).reshape(len(g), size[1], len(g), size[1]).transpose(0, 2, 1, 3)
            grams.append(Gram(inner, LABELS[: len(g)], size[1]))
        for index, interval in enumerate(intervals(grams)):
            if interval is not None and interval.low is not None and interval.high is not None:
                given[index] += 1
                covered[index] += interval.low <= truth[index] <= interval.high
    return [Coverage(float(c / n) if n else 0.0, float(n / repetitions)) for c, n in zip(covered, given, strict=True)]


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
    by_prompts = [measure_by_scale(law, prompts, count, seed=1000 + index) for prompts, count in PROMPTS.items()]
    each = range(len(BY_SCALE))
    cells = [[_cell(of_prompts[k][estimator]) for estimator in range(2) for of_prompts in by_prompts] for k in each]
    return [f"| {law.name} | {scale:,} | {' | '.join(row)} |" for row in cells]


def _cell(coverage: Coverage) -> str:
    text = f"{100 * coverage.covered:.1f}"
    text = text if float(text) >= 100 * NOMINAL_FLOOR else f"**{text}**"
    share = "" if coverage.given > 0.995 else f" ({100 * coverage.given:.0f})"
    return f"{text}{share}" if coverage.given else "none"


def coverage_page(rows: Sequence[str], by_scale: Sequence[Sequence[str]]) -> str:
    """Return the whole page as Markdown around the rows of its first table and of those of `BY_SCALE`."""
    stderr = {count: float(100 * np.sqrt(0.95 * 0.05 / count)) for count in (REPETITIONS, *PROMPTS.values())}
    facts: dict[str, Any] = {"repetitions": REPETITIONS, "stderr": stderr[REPETITIONS], "long": LONG}
    facts["by_prompts"] = {prompts: (count, stderr[count]) for prompts, count in PROMPTS.items()}
    tables = {"quantities": QUANTITIES, "rows": rows, "by_scale": dict(zip(BY_SCALE, by_scale, strict=True))}
    return page("coverage.md.j2", floor=100 * NOMINAL_FLOOR, prompts=list(PROMPTS), **facts, **tables)


if __name__ == "__main__":
    with ProcessPoolExecutor(int(sys.argv[1]) if len(sys.argv) > 1 else 1) as processes:
        first = processes.map(row_text, range(len(ROWS)))
        scaled = list(processes.map(scaled_rows, range(len(SCALED))))
        print(coverage_page(list(first), [list(table) for table in zip(*scaled, strict=True)]), end="")
