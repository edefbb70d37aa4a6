"""What the level `sampled` costs and how well it knows the total energy of a batch, beside measuring every token.

The model is the demo's, warm-started: energies of an untrained one have no heavy tail, which is what makes a sample
hard. Times are processor seconds of one thread. Errors are over many draws from the same exact norms: the norm of a
token does not depend on which others were drawn.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from otb_analysis.bench.config import SampledConfig
from otb_analysis.bench.publish import NO_GPU, Report, report_of
from otb_analysis.bench.sketch import WarmBatch, warm_batch
from otb_analysis.bench.timing import least_seconds, threads
from otb_analysis.gradients import sampled_score_norms, token_score_norms
from otb_analysis.statistics import horvitz_thompson, systematic_sample
from otb_analysis.types import Float, SampledNorms

DRAWS = 400
CASES = (
    ("uniform", 0.15),
    ("proxy", 0.05),
    ("proxy", 0.06),
    ("proxy", 0.10),
    ("above_cut", 0.03),
    ("above_cut", 0.05),
    ("above_cut", 0.10),
    ("above_cut", 0.15),
)
"""Size measure and share of the tokens."""
EXACT = "every token"
COLUMNS = {
    "drawn by": "{by}",
    "tokens": "{tokens:,}",
    "of all": "{share:.1%}",
    "cost of exact": "{cost:.1%}",
    "error": "{error:.2%}",
    "stated error": "{stated:.2%}",
    "95 % covers": "{coverage:.0%}",
}


def run(config: SampledConfig) -> Report:
    """Measure cost and error on rollouts of the demo's warm-started model."""
    with threads(1):
        rows, seconds = bench_sampled(warm_batch(config.prompts), config.repeats)
    note = f"Error and coverage of the Horvitz–Thompson total over {DRAWS} draws from the same exact norms."
    title = f"Total energy of a batch from drawn tokens; exact norms of all took {seconds:.1f} s of processor time"
    return report_of(config, title, COLUMNS, rows, notes=(note, NO_GPU))


def bench_sampled(batch: WarmBatch, repeats: int) -> tuple[list[dict[str, Any]], float]:
    """Return the row of the exact norms, then one per case, and the processor seconds of the exact norms."""
    tokens = int(batch.mask.sum())
    runs: dict[str, Callable[[], Any]] = {EXACT: partial(token_score_norms, *args_of(batch))}
    runs |= {f"{by} {share}": sampler(batch, by, round(share * tokens)) for by, share in CASES}
    exact = runs[EXACT]().norm_sq
    seconds = least_seconds(runs, repeats)
    rows: list[dict[str, Any]] = [{"by": EXACT, "tokens": tokens, "share": 1.0, "cost": 1.0}]
    rows[0] |= {"error": 0.0, "stated": 0.0, "coverage": 1.0}
    for (by, _), run, cost in zip(CASES, list(runs.values())[1:], list(seconds.values())[1:], strict=True):
        rows.append(sampled_row(by, run(), exact, cost / seconds[EXACT]))
    return rows, seconds[EXACT]


def args_of(batch: WarmBatch) -> tuple[Any, ...]:
    """What every call measures."""
    return batch.model, batch.ids, batch.mask, batch.real


def sampler(batch: WarmBatch, by: str, tokens: int) -> Callable[[], SampledNorms]:
    """The call that draws and measures this many tokens, its size measure included."""
    return partial(sampled_score_norms, *args_of(batch), tokens=tokens, by=by, proxy=batch.proxy)


def sampled_row(by: str, norms: SampledNorms, exact: Float, cost: float) -> dict[str, Any]:
    """Draw again and again with the same inclusion probabilities.

    Relative to the true total: `error`, the standard deviation of the estimated total over draws; `stated`, the root
    mean square of the standard errors stated with them; `coverage`, the share of draws whose total ± 1.96 standard
    errors holds it. `cost`: processor time over that of the exact norms.
    """
    inside = norms.inclusion_prob > 0
    prob, energy = norms.inclusion_prob[inside], exact[inside]
    draws = [horvitz_thompson(np.where(systematic_sample(prob, s), energy, np.nan), prob) for s in range(DRAWS)]
    total, stderr = np.array([(d.estimate[0], d.stderr[0]) for d in draws]).T / energy.sum()
    covered = float((np.abs(total - 1) <= 1.96 * stderr).mean())
    n = int(norms.drawn.sum())
    row = {"by": by, "tokens": n, "share": n / energy.size, "cost": cost, "error": float(total.std())}
    return row | {"stated": float(np.sqrt((stderr**2).mean())), "coverage": covered}
