"""What the level `sampled` costs and how well it knows the total energy of a batch, beside measuring every token.

The model is the demo's, warm-started: energies of an untrained one have no heavy tail, which is what makes a sample
hard. Times are processor seconds of one thread, every candidate taking its turn in every repetition, the least counts.
Errors are over many draws from the same exact norms: the norm of a token does not depend on which others were drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import process_time

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.bench.config import SampledConfig, check_positive
from otb_analysis.bench.publish import Report
from otb_analysis.config import TrainConfig
from otb_analysis.gradients import sampled_score_norms, token_score_norms
from otb_analysis.measurement.forward import forward_pass
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.sampling import sample
from otb_analysis.statistics import horvitz_thompson, systematic_sample
from otb_analysis.tasks import make_task
from otb_analysis.training.warm_start import warm_started
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


@dataclass(frozen=True)
class SampledRow:
    """One line of the table.

    Attributes:
        by: Size measure, or "every token" for the exact norms that all others are compared with.
        tokens: Tokens measured.
        share: The same over all tokens.
        cost: Processor time over that of the exact norms, drawing and size measure included.
        error: Standard deviation of the estimated total over draws, relative to the total.
        stated: Root mean square of the standard errors stated with them, relative to the total.
        coverage: Share of draws whose total ± 1.96 standard errors holds the true one.
    """

    by: str
    tokens: int
    share: float
    cost: float
    error: float
    stated: float
    coverage: float


@dataclass(frozen=True)
class _Batch:
    model: PreTrainedModel
    ids: torch.Tensor
    mask: torch.Tensor
    attention: torch.Tensor
    proxy: Float


def bench_sampled(prompts: int = 40, repeats: int = 3) -> tuple[list[SampledRow], float]:
    """Measure cost and error on rollouts of the demo's warm-started model.

    Args:
        prompts: Prompts, of eight rollouts each; 40 give more than 5,000 tokens.
        repeats: Repetitions, of which the least time counts.

    Returns:
        The row of the exact norms, then one per case; and the processor seconds of the exact norms.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batch = _rollouts(prompts)
        args = (batch.model, batch.ids, batch.mask, batch.attention)
        exact = token_score_norms(*args).norm_sq
        tokens = int(batch.mask.sum())
        drawn = [_sampler(batch, by, round(share * tokens)) for by, share in CASES]
        runs: list[Callable[[], object]] = [lambda: token_score_norms(*args), *drawn]
        seconds = _least(runs, repeats)
        rows = [SampledRow("every token", tokens, 1.0, 1.0, 0.0, 0.0, 1.0)]
        for (by, _), run, spent in zip(CASES, drawn, seconds[1:], strict=True):
            rows.append(_row(by, run(), exact, spent / seconds[0]))
    finally:
        torch.set_num_threads(threads)
    return rows, seconds[0]


def run_sampled(config: SampledConfig) -> Report:
    """Run the benchmark and lay out its table.

    Raises:
        InputError: A setting is below 1.
    """
    check_positive(prompts=config.prompts, repeats=config.repeats)
    rows, seconds = bench_sampled(config.prompts, config.repeats)
    return report(config, rows, seconds)


def report(config: SampledConfig, rows: Sequence[SampledRow], seconds: float) -> Report:
    """Lay out the table.

    Args:
        config: What was asked for.
        rows: From `bench_sampled`.
        seconds: Processor seconds of the exact norms.
    """
    settings = {"prompts": config.prompts, "repeats": config.repeats}
    cells = [
        (
            r.by, f"{r.tokens:,}", f"{r.share:.1%}", f"{r.cost:.1%}",
            f"{r.error:.2%}", f"{r.stated:.2%}", f"{r.coverage:.0%}",
        )
        for r in rows
    ]  # fmt: skip
    return Report(
        name="sampled",
        command="otb bench sampled " + " ".join(f"--{name} {value}" for name, value in settings.items()),
        settings=settings,
        title=f"Total energy of a batch from drawn tokens; exact norms of all took {seconds:.1f} s of processor time",
        headers=("drawn by", "tokens", "of all", "cost of exact", "error", "stated error", "95 % covers"),
        cells=cells,
        rows=[asdict(row) for row in rows],
        notes=(
            f"Error and coverage of the Horvitz–Thompson total over {DRAWS} draws from the same exact norms.",
            "Not measured on a GPU.",
        ),
    )


def _rollouts(prompts: int) -> _Batch:
    config = TrainConfig()
    model, tokenizer = load_policy(warm_started(config))
    task = make_task(config)
    torch.manual_seed(0)
    asked = [task.prompt("train", i) for i in range(prompts)]
    rollouts = sample(TransformersGenerator(model, tokenizer), tokenizer, task, asked, config.sample)
    proxy = forward_pass(model, rollouts, config.sample.temperature).stats.energy
    return _Batch(model, *rollouts.tensors(model.device), rollouts.by_column(proxy[None])[:, 0])


def _sampler(batch: _Batch, by: str, tokens: int) -> Callable[[], SampledNorms]:
    def run() -> SampledNorms:
        return sampled_score_norms(
            batch.model, batch.ids, batch.mask, batch.attention, tokens=tokens, by=by, proxy=batch.proxy
        )

    return run


def _least(runs: list[Callable[[], object]], repeats: int) -> list[float]:
    least = [np.inf] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            start = process_time()
            run()
            least[i] = min(least[i], process_time() - start)
    return least


def _row(by: str, norms: SampledNorms, exact: Float, cost: float) -> SampledRow:
    inside = norms.inclusion_prob > 0
    prob, energy = norms.inclusion_prob[inside], exact[inside]
    draws = [horvitz_thompson(np.where(systematic_sample(prob, s), energy, np.nan), prob) for s in range(DRAWS)]
    total, error = np.array([(d.estimate[0], d.stderr[0]) for d in draws]).T / energy.sum()
    covered = float((np.abs(total - 1) <= 1.96 * error).mean())
    n = int(norms.drawn.sum())
    return SampledRow(by, n, n / energy.size, cost, float(total.std()), float(np.sqrt((error**2).mean())), covered)
