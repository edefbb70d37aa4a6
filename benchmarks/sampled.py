"""What the level `sampled` costs and how well it knows the total energy of a batch, beside measuring every token.

The model is the demo's: energies of an untrained one have no heavy tail, which is what makes a sample hard. Times are
processor seconds of one thread. Errors are over many draws from the same exact norms: the norm of a token does not
depend on which others were drawn.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.config import SampledConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import least_seconds, sampled_step, threads
from otb_analysis.config import SampleConfig
from otb_analysis.gradients import sampled_score_norms, token_score_norms
from otb_analysis.measurement.forward import forward_pass
from otb_analysis.statistics import horvitz_thompson, systematic_sample
from otb_analysis.types import Float, SampledNorms

DRAWS = 400
SHARES = {"uniform": (0.15,), "proxy": (0.05, 0.06, 0.10), "above_cut": (0.03, 0.05, 0.10, 0.15)}
"""Shares of the tokens that are drawn, by size measure."""
EXACT = "every token"
COLUMNS = {
    "drawn by": "{by}", "tokens": "{tokens:,}", "of all": "{share:.1%}", "cost of exact": "{cost:.1%}",
    "error": "{error:.2%}", "stated error": "{stated:.2%}", "95 % covers": "{coverage:.0%}",
}  # fmt: skip


@dataclass(frozen=True)
class DemoBatch:
    """What engines take."""

    args: tuple[PreTrainedModel, Tensor, Tensor, Tensor]  # Model, token ids, sampled and real tokens [N, L]
    proxy: Float  # Energy proxy [N, L], zero outside the mask


def run(config: SampledConfig) -> Report:
    """Measure cost and error on rollouts of the demo's model."""
    with threads(1):
        rows, seconds = bench_sampled(demo_batch(config.prompts), config.repeats)
    title = f"Total energy of a batch from drawn tokens; exact norms of all took {seconds:.1f} s of processor time"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, draws=DRAWS))


def demo_batch(prompts: int) -> DemoBatch:
    """Return a batch of the demo's policy."""
    trainer, rollouts = sampled_step(SampleConfig(prompts=prompts, group_size=8))
    proxy = rollouts.by_column(forward_pass(trainer.model, rollouts, 1.0).stats.energy[None])[:, 0]
    return DemoBatch((trainer.model, *rollouts.tensors(trainer.model.device)), proxy)


def bench_sampled(batch: DemoBatch, repeats: int) -> tuple[list[dict[str, Any]], float]:
    """Return the row of the exact norms, then one per size measure and share, and the seconds of the exact norms."""
    tokens, exact = int(batch.args[2].sum()), partial(token_score_norms, *batch.args)
    sampled = partial(sampled_score_norms, *batch.args, proxy=batch.proxy)
    plan = [(by, share) for by, shares in SHARES.items() for share in shares]
    drawn = {f"{by} {share}": partial(sampled, tokens=round(share * tokens), by=by) for by, share in plan}
    norm_sq = exact().norm_sq
    seconds = least_seconds({EXACT: exact} | drawn, repeats)
    whole = {"by": EXACT, "tokens": tokens, "share": 1.0, "cost": 1.0, "error": 0.0, "stated": 0.0, "coverage": 1.0}
    cost = {name: seconds[name] / seconds[EXACT] for name in drawn}
    return [whole, *(sampled_row(k.split()[0], draw(), norm_sq, cost[k]) for k, draw in drawn.items())], seconds[EXACT]


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
