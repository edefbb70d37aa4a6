"""Soft tokens against discrete ones on the same policies: scores, variance, signal.

A policy that learned `chain_sum` from demonstrations answers the same prompts with discrete tokens, and with its first
tokens soft, at several noises. Each way of answering has a mean reward and so a gradient of its own; its slope along
the gradient of discrete tokens compares noise at equal progress.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig, WarmStartConfig
from otb_analysis.estimators import estimate
from otb_analysis.gradients import batch_gradient, count_sketch
from otb_analysis.gradients.batch.soft import SoftTokens, embeddings_of, mixtures
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.sampling import sample
from otb_analysis.statistics.moments import vector_moments
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime import Bar
from otb_analysis.types import EstimatorInputs, Float, Int
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.policies import Policy, ScoredRollouts, exact_norms, group_sketches, taught, write

TABLE, REST = r"embed_tokens", r"^(?!.*embed_tokens)"


def by_scores(policy: Policy, written: ScoredRollouts, weights: Float, group: Int, buckets: int) -> Float:
    """Return sketches of Σ weights·s of every group [M, G, 2·buckets], weights [M, N, T]."""
    parts = [group_sketches(policy, written, weights, group, buckets, scope) for scope in (TABLE, REST)]
    return np.concatenate(parts, axis=-1).astype(np.float64)


def through_tokens(policy: Policy, written: ScoredRollouts, weights: Float, group: Int, buckets: int) -> Float:
    """Return sketches of each group's gradient that flows through its soft tokens [G, 2·buckets], weights [N, T].

    h̃ = pE + σε with the noise ε held, so that ∇J = E[Σ_t A_t d/dθ log π(y_t | h̃(θ), y_<t)], a sum over discrete tokens
    only: the same mean as from scores. Every rollout must have the same number of soft tokens.
    """
    soft = written.rollouts.soft
    assert soft is not None
    ids, mask, attention = written.rollouts.tensors(policy.model.device)
    by_column = torch.as_tensor(written.rollouts.by_column(weights[None])[:, 0], device=ids.device)
    out = np.zeros((int(group.max()) + 1, 2 * buckets))
    for g in range(len(out)):
        rows = torch.as_tensor(np.flatnonzero(group == g))
        if not by_column[rows].any():
            continue
        length = int(attention[rows].sum(1).max())
        values = answer_logprobs(policy.model, ids[rows, :length], mask[rows, :length], soft, written.temperature)
        total = (by_column[rows, 1:length] * values).sum()
        out[g] = sketched(policy.model, torch.autograd.grad(total, list(policy.model.parameters())), buckets)
    return out


def answer_logprobs(model: nn.Module, ids: Tensor, mask: Tensor, soft: SoftTokens, temperature: float) -> Tensor:
    """Return log π of the discrete sampled tokens [n, L − 1], 0 elsewhere, as a function of θ through soft tokens.

    The rollouts are of one prompt, so their soft tokens stand at the same columns.
    """
    table = embeddings_of(model)
    here = soft.among(ids)
    read = [table(ids[:, k].masked_fill(here[:, k], 0)) for k in range(ids.shape[1])]
    for k in here[0].nonzero()[:, 0].tolist():
        z = model(inputs_embeds=torch.stack(read[:k], dim=1), use_cache=False).logits[:, -1] / temperature
        mean = mixtures(z, table.weight)
        read[k] = soft.embed(ids[:, k]) + mean - mean.detach()  # the vector that was drawn, moving as pE moves
    z = model(inputs_embeds=torch.stack(read, dim=1), use_cache=False).logits[:, :-1] / temperature
    logprob = z.log_softmax(-1).gather(-1, ids[:, 1:, None].masked_fill(here[:, 1:, None], 0))[..., 0]
    return torch.where(mask[:, 1:] & ~here[:, 1:], logprob, 0.0)


def sketched(model: nn.Module, gradient: tuple[Tensor, ...], buckets: int) -> Float:
    """Return the sketches of a whole gradient's two parts [2·buckets], as `gradient_sketch` hashes them."""
    parts, start = np.zeros((2, buckets)), 0
    for (name, parameter), grad in zip(model.named_parameters(), gradient, strict=True):
        parts[0 if TABLE in name else 1] += count_sketch(grad, start, buckets).cpu().numpy()
        start += parameter.numel()
    return parts.reshape(-1)


AT_ONCE = 256
"""Prompts sampled side by side."""


def slopes(policy: Policy, s: Any, base: SampleConfig) -> list[dict[str, Any]]:
    """Return (J₊ − J₋)/(2ε) of every way of answering."""
    prompts = distinct_prompts(policy.task, "train", s["prompts"] + s["others"])
    direction = discrete_gradient(policy, prompts[: s["prompts"]], replace(base, prompts=s["prompts"]), s["seed"])
    length = float(torch.sqrt(torch.stack([d.double().square().sum() for d in direction]).sum()))
    rows, generator, beside = [], TransformersGenerator(policy.model, policy.tokenizer), prompts[s["prompts"] :]
    for arm, (soft, noise) in s["arms"].items():
        config, ends = replace(base, soft=soft, soft_noise=noise), []
        for sign in (1, -1):
            move_parameters(policy, direction, sign * s["step"] / length)
            totals = list[float]()  # of a group of rollouts of every prompt; the same seed draws the same noise
            for first in range(0, len(beside), AT_ONCE):
                torch.manual_seed(5000 + s["seed"] + first)
                drawn = sample(generator, policy.tokenizer, policy.task, beside[first : first + AT_ONCE], config)
                totals += compute_rewards(policy.task, drawn).rewards().sum(axis=1).tolist()
            ends.append(float(np.mean(totals)))
            move_parameters(policy, direction, -sign * s["step"] / length)
        rows.append({"arm": arm, "slope": (ends[0] - ends[1]) / (2 * s["step"]), "above": ends[0], "under": ends[1]})
    return rows


def discrete_gradient(policy: Policy, prompts: Sequence[Prompt], config: SampleConfig, seed: int) -> list[Tensor]:
    """Return the gradient of `rloo` on discrete tokens, by parameter."""
    written = write(policy, prompts, config, seed=1000 + seed)
    advantage = estimate("rloo", written.table.inputs(None)).advantage
    weights = written.rollouts.by_column(advantage[None] / len(advantage))[:, 0]
    ids, mask, attention = written.batch
    gradient = batch_gradient(policy.model, ids, mask, weights, attention)
    return [gradient[name] for name, _ in policy.model.named_parameters()]


@torch.no_grad()
def move_parameters(policy: Policy, direction: Sequence[Tensor], step: float) -> None:
    """Move the policy's parameters in place."""
    for parameter, d in zip(policy.model.parameters(), direction, strict=True):
        parameter.add_(step * d)


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
        written = write(policy, prompts, replace(sample, soft=soft, soft_noise=noise), seed=1000 + s["seed"])
        measures, signal = measured(policy, written, s, discrete)
        discrete = signal if discrete is None else discrete
        rows.append({"seed": s["seed"], "arm": name, "soft": soft, "noise": noise} | measures)
        bar(done + 1, len(s["arms"]), f"{cell.name}: {name}")
    return {"arms": rows}


def measured(
    policy: Policy, written: ScoredRollouts, s: Any, discrete: Float | None
) -> tuple[dict[str, float | None], Float]:
    """Return what is known of one way to answer, and its prompts' gradients [P, K] with the least noise.

    Columns that end in `_rest` leave the table of embeddings out.
    """
    table, inputs, buckets = written.table, written.table.inputs(None), s["buckets"]
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
    known, first = table.mask & (norm.sum(axis=1) > 0)[:, None], np.arange(norm.shape[1]) < FIRST
    measures: dict[str, float | None] = {
        "success": float(table.total_reward.mean()), "norm_first": float(norm[known & first].mean()),
        "norm_later": float(norm[known & ~first].mean()), "tokens": float(table.mask.sum() / len(table.mask)),
    }  # fmt: skip
    for words, first_bucket in (("", 0), ("_rest", buckets)):
        ours = truth[:, first_bucket:]
        measures |= {f"variance{words}": variance(rloo[:, first_bucket:]), f"signal{words}": cross_product(ours, ours)}
        if path is not None and discrete is not None:
            theirs = discrete[:, first_bucket:]
            measures |= {f"through{words}": variance(ours), f"along{words}": cross_product(ours, theirs)}
            measures[f"discrete{words}"] = cross_product(theirs, theirs)
    for name, arm, base in (("none", none, rloo), ("otb_loo", otb[: s["measured"]], rloo[: s["measured"]])):
        spread = variance(base)
        measures[name] = variance(arm) / spread if spread > 0 else None
    return {name: rounded(value) for name, value in measures.items()}, truth


def variance(groups: Float) -> float:
    """Return V, the variance of one prompt's group gradient, from the groups of different prompts [P, K]."""
    return float(np.square(groups).sum(axis=1).mean()) - cross_product(groups, groups)


def cross_product(a: Float, b: Float) -> float:
    """Return the mean of a_p·b_q over different prompts: ‖∇J‖² without bias where both are the same gradients."""
    zero = np.zeros(len(a))
    return float(vector_moments(a, zero, b, zero).along[0])


STUDY = Study(
    title="Soft tokens",
    question="Is the policy gradient calmer when a policy thinks in soft tokens, noisy mixtures of embeddings, than in "
    "discrete ones?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
