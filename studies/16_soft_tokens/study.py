"""Soft tokens against discrete ones on the same policies: scores, variance, signal.

A policy that learned `chain_sum` from demonstrations answers the same prompts with discrete tokens, and with its first
tokens soft, at several noises. Each way of answering has a mean reward and so a gradient of its own; its slope along
the gradient of discrete tokens compares noise at equal progress.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig, WarmStartConfig
from otb_analysis.estimators import estimate
from otb_analysis.statistics.moments.vectors import vector_moments
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import EstimatorInputs, Float
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.policies import Policy, ScoredRollouts, exact_norms, taught, write

from .gradients import by_scores, through_tokens
from .slopes import slopes

TASK = ChainSumConfig(terms_min=3, terms_max=3, largest=19)
MODEL = SmallModelConfig(layers=2, width=64, feed_forward=160, tied=False)
START = WarmStartConfig(success_low=0.45, success_high=0.65)
ARMS = {
    "discrete": (0, 0.3),
    "8 soft, noise 0.1": (8, 0.1),
    "8 soft, noise 0.3": (8, 0.3),
    "8 soft, noise 1": (8, 1.0),
    "4 soft, noise 0.3": (4, 0.3),
}
"""Soft tokens at the beginning of an answer, and their σ in root-mean-square entries of the table."""
FIRST, MAIN = 8, "8 soft, noise 0.3"
"""Tokens of the first partial sum, about, of about 19 in an answer; and the arm that the verdict is about."""
SEEDS = 5
PROMPTS, GROUP, BUCKETS, LENGTH = 256, 8, 2048, 32
MEASURED = 48
"""Prompts whose tokens have exact norms; `otb_loo` is compared on these."""
OTHERS, STEP = 1536, 0.03
"""Prompts on which J is measured beside the policy, and how far beside it, as ‖Δθ‖."""
QUICK: dict[str, Any] = {"prompts": 6, "measured": 3, "buckets": 128, "low": 0.1, "high": 1.0}
QUICK_MODEL = SmallModelConfig(layers=1, width=32, heads=2, key_value_heads=1, feed_forward=64, tied=False)


def cells(quick: bool) -> list[Cell]:
    """Return two cells per seed: gradients, and slopes of J."""
    size: dict[str, Any] = {"prompts": PROMPTS, "measured": MEASURED, "buckets": BUCKETS}
    size |= {"low": START.success_low, "high": START.success_high} | (QUICK if quick else {})
    size |= {"group": GROUP, "length": LENGTH, "arms": {name: list(arm) for name, arm in ARMS.items()}}
    model = QUICK_MODEL if quick else MODEL
    task = replace(TASK, largest=5) if quick else TASK
    made = [
        Cell(f"s{seed}", {"seed": seed, "task": asdict(task), "model": asdict(model)} | size)
        for seed in range(1 if quick else SEEDS)
    ]
    beside = {"others": 32 if quick else OTHERS, "step": STEP}
    return [*made, *(Cell(f"slopes-{cell.name}", {**cell.settings, **beside}) for cell in made)]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Teach one policy, let it answer in every way, and compare the gradients."""
    s = cell.settings
    sample = SampleConfig(prompts=s["prompts"], group_size=s["group"], max_new_tokens=s["length"])
    config = TrainConfig(
        task="chain_sum", chain_sum=ChainSumConfig(**s["task"]), small_model=SmallModelConfig(**s["model"]),
        seed=s["seed"], warm_start=replace(START, success_low=s["low"], success_high=s["high"]), sample=sample,
    )  # fmt: skip
    policy = taught(config)
    if cell.name.startswith("slopes"):
        bar(0, 1, cell.name)
        return {"slopes": [{"seed": s["seed"]} | row for row in slopes(policy, s, sample)]}
    prompts = distinct_prompts(policy.task, "train", s["prompts"])
    rows, discrete = [], None
    for done, (name, (soft, noise)) in enumerate(s["arms"].items()):
        chosen = replace(sample, soft=soft, soft_noise=noise)
        written = write(policy, prompts, chosen, seed=1000 + s["seed"])
        found, signal = measured(policy, written, s, discrete)
        discrete = signal if discrete is None else discrete
        rows.append({"seed": s["seed"], "arm": name, "soft": soft, "noise": noise} | found)
        bar(done + 1, len(s["arms"]), f"{cell.name}: {name}")
    return {"arms": rows}


def measured(
    policy: Policy, written: ScoredRollouts, s: Any, discrete: Float | None
) -> tuple[dict[str, float | None], Float]:
    """Return what is known of one way to answer, and its prompts' gradients [P, K] with the least noise.

    Columns that end in `_rest` leave the table of embeddings out.
    """
    table, buckets = written.table, s["buckets"]
    inputs = table.inputs(None)
    few = table.group < s["measured"]
    norm = exact_norms(policy, written, table.mask & few[:, None])
    advantage = {name: estimate(name, inputs).advantage for name in ("rloo", "none")}
    part = EstimatorInputs(inputs.reward[few], inputs.mask[few], inputs.group[few], norm[few])
    advantage["otb_loo"] = np.zeros(table.mask.shape)
    advantage["otb_loo"][few] = estimate("otb_loo", part).advantage
    weights = np.stack(list(advantage.values())) / s["group"]
    rloo, none, otb = by_scores(policy, written, weights, table.group, buckets)
    path = None if table.soft is None else through_tokens(policy, written, weights[0], table.group, buckets)
    truth = rloo if path is None else path
    found: dict[str, float | None] = {"success": float(table.total_reward.mean())} | norms_of(written, norm)
    for words, columns in (("", slice(None)), ("_rest", slice(buckets, None))):
        own = truth[:, columns]
        found |= {f"variance{words}": variance(rloo[:, columns]), f"signal{words}": cross_product(own, own)}
        if path is not None and discrete is not None:
            theirs = discrete[:, columns]
            found[f"through{words}"] = variance(own)
            found |= {f"along{words}": cross_product(own, theirs), f"discrete{words}": cross_product(theirs, theirs)}
    found["none"] = ratio_or_none(variance(none), variance(rloo))
    found["otb_loo"] = ratio_or_none(variance(otb[: s["measured"]]), variance(rloo[: s["measured"]]))
    return {name: rounded(value) for name, value in found.items()}, truth


def norms_of(written: ScoredRollouts, norm: Float) -> dict[str, float | None]:
    """Return the mean ‖s‖² of the tokens of the first partial sum, and behind them."""
    table = written.table
    known = table.mask & (norm.sum(axis=1) > 0)[:, None]
    first = np.arange(known.shape[1]) < FIRST
    return {
        "norm_first": float(norm[known & first].mean()),
        "norm_later": float(norm[known & ~first].mean()),
        "tokens": float(table.mask.sum() / len(table.mask)),
    }


def variance(groups: Float) -> float:
    """Return V, the variance of one prompt's group gradient, from the groups of different prompts [P, K]."""
    return float(np.square(groups).sum(axis=1).mean()) - cross_product(groups, groups)


def cross_product(a: Float, b: Float) -> float:
    """Return the mean of a_p·b_q over different prompts: ‖∇J‖² without bias where both are the same gradients."""
    zero = np.zeros(len(a))
    return float(vector_moments(a, zero, b, zero).along[0])


def ratio_or_none(a: float, b: float) -> float | None:
    """Return a/b, None where b is not above 0."""
    return a / b if b > 0 else None


STUDY = Study(
    title="Soft tokens",
    question="Is the policy gradient calmer when a policy thinks in soft tokens, noisy mixtures of embeddings, than in "
    "discrete ones?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
