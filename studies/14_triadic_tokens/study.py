"""Numbers in triads with a magnitude suffix against single characters: success, score norms and noise at the digits.

Both models have as many parameters, demonstrations and steps. Norms and noise are measured at the first check at which
a policy is right often enough, so that unequal success does not stand behind them.
"""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig, WarmStartConfig
from otb_analysis.estimators import estimate
from otb_analysis.statistics import Partition, pool_gram
from otb_analysis.statistics.moments import deleted_moments
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.policies import Policy, demonstrated, exact_norms, fresh_policy, group_sketches, write

TASKS = {
    "19": ChainSumConfig(terms_min=2, terms_max=3, largest=19),
    "99": ChainSumConfig(terms_min=2, terms_max=2, largest=99),
    "999": ChainSumConfig(terms_min=2, terms_max=2, largest=999),
}
"""Sums by their largest term. Only those of terms up to 999 reach numbers with a suffix."""
MODELS = {
    "characters": SmallModelConfig(layers=2, width=64, feed_forward=345),
    "triads": SmallModelConfig(layers=2, width=64, feed_forward=160),
}
"""The wider feed-forward block has as many parameters as the rows of the embedding that triads take."""
SEEDS, STEPS = {"19": 5, "99": 5, "999": 4}, {"19": 1000, "99": 1000, "999": 3000}
"""Seeds and steps of 16 demonstrations, by task."""
CHECKS, HELDOUT = 10, 256
"""How often success is measured, and on how many held-out prompts."""
MEASURED, ENOUGH = "19", 0.4
"""The task whose policies are measured, and the success from which they are."""
PROMPTS, POOL, GROUP, BUCKETS, LENGTH = 96, 32, 8, 2048, 40
QUICK = {"checks": 2, "heldout": 16, "prompts": 16, "pool": 16, "buckets": 128, "enough": 0.0}


def cells(quick: bool) -> list[Cell]:
    """Return one cell per task, tokenizer and seed."""
    size = {"checks": CHECKS, "heldout": HELDOUT, "prompts": PROMPTS, "pool": POOL, "buckets": BUCKETS}
    size |= {"enough": ENOUGH} | (QUICK if quick else {}) | {"group": GROUP, "length": LENGTH}
    made = list[Cell]()
    for task, count in ({MEASURED: 1} if quick else SEEDS).items():
        facts = {"task": task, "settings": asdict(TASKS[task]), "measured": task == MEASURED} | size
        facts["steps"] = 60 if quick else STEPS[task]
        for seed, (tokens, model) in product(range(count), MODELS.items()):
            settings = {"tokens": tokens, "model": asdict(model), "seed": seed}
            made.append(Cell(f"{tokens}-{task}-s{seed}", facts | settings))
    return made


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Train on demonstrations, follow held-out success, and measure the policy where it first is good enough.

    `nats` is the mean −log π of a whole demonstration since the check before: it can be compared between tokenizers.
    """
    s = cell.settings
    config = TrainConfig(
        task="chain_sum", chain_sum=TASKS[s["task"]], tokenizer=s["tokens"], small_model=MODELS[s["tokens"]],
        seed=s["seed"], warm_start=WarmStartConfig(max_steps=s["steps"]),
    )  # fmt: skip
    policy = fresh_policy(config)
    key = {"task": s["task"], "tokens": s["tokens"], "seed": s["seed"]}
    curve, policies = list[dict[str, Any]](), list[dict[str, Any]]()
    checks = demonstrated(policy, config, s["steps"] // s["checks"], s["heldout"], s["length"])
    for step, success, nats in checks:
        curve.append(key | {"step": step, "success": success, "nats": rounded(nats)})
        if s["measured"] and not policies and success >= s["enough"]:
            policies.append(key | {"step": step, "success": success} | measured(policy, s))
        bar(step, s["steps"], f"{cell.name}: {success:.0%}")
    models = [key | {"parameters": policy.model.num_parameters(), "vocabulary": len(policy.tokenizer)}]
    return {"curves": curve, "policies": policies, "models": models}


def measured(policy: Policy, s: Any) -> dict[str, float | None]:
    """Return norms and noise of a policy at the tokens that hold digits, per token and per answer.

    V is the variance of one prompt's gradient of `rloo` in groups; the noise scale is V/‖∇J‖², in prompts.
    """
    prompts = distinct_prompts(policy.task, "train", s["prompts"])
    sample = SampleConfig(prompts=len(prompts), group_size=s["pool"], max_new_tokens=s["length"])
    written = write(policy, prompts, sample, seed=1000 + s["seed"])
    table = written.table
    norm = exact_norms(policy, written, table.mask)
    ids = [i for token, i in policy.tokenizer.get_vocab().items() if token.isdigit()]  # suffixes left out
    digits = table.mask & np.isin(table.token_id, ids)
    group = np.arange(len(table.group)) // s["group"]
    advantage = estimate("rloo", replace(table.inputs(None), group=group)).advantage
    weights = np.stack([advantage, advantage * digits]) / s["group"]
    groups = np.arange(int(group.max()) + 1)
    gradients = group_sketches(policy, written, weights, group, s["buckets"])
    cut = Partition(group, groups // (s["pool"] // s["group"]))
    gram = pool_gram([gradients], [cut], [("rloo", "none"), ("digits", "none")]).gram()
    moments = {label[0]: deleted_moments([gram], label) for label in gram.labels}
    variance = {name: float(one.power[0] - one.mean_sq[0]) for name, one in moments.items()}
    square = float(moments["rloo"].mean_sq[0])
    scale = variance["rloo"] / square if square > 0 else None
    rollouts, other = len(table.mask), table.mask & ~digits
    counts = {"answer_tokens": float(table.mask.sum() / rollouts), "digit_tokens": float(digits.sum() / rollouts)}
    measures = {"norm_digit": norm[digits].mean(), "norm_other": norm[other].mean()}
    measures |= {"norm_answer": norm[digits].sum() / rollouts, "entropy_digit": table.stats.entropy[digits].mean()}
    measures |= {"variance": variance["rloo"], "variance_digits": variance["digits"], "noise_scale": scale}
    return counts | {name: rounded(None if value is None else float(value)) for name, value in measures.items()}


STUDY = Study(
    title="Numbers in triads",
    question="Do numbers in triads with a magnitude suffix teach a small model more arithmetic than single characters, "
    "and are its gradients calmer at the digits?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
