"""Critical tokens by contrast, against exact attribution and against what replacing a token does to success.

The contrast is fitted on one half of each group and read on the other. The truth is measured by continuing rollouts
after a token, and after another one drawn in its place.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import (
    ChainSumConfig,
    ContrastSchedule,
    ReasoningGymConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.measurement.contrast import contrasts
from otb_analysis.measurement.level import MeasuredPolicy
from otb_analysis.measurement.levels import shares
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Bool, Int
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.policies import Policy, ScoredRollouts, demonstrated, exact_norms, fresh_policy, pretrained, write
from studies.lib.results import Gathered

from .effects import token_effects
from .summaries import summaries

TASK = ChainSumConfig(terms_min=2, terms_max=3, largest=19)
MODEL = SmallModelConfig(layers=2, width=64)
SUMS = ReasoningGymConfig(
    name=("chain_sum",), config=('{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}',), shots=1
)
REASONING: dict[str, Any] = {"task": "reasoning_gym", "reasoning_gym": SUMS}
RIGHT = 0.5
"""Reward from which an answer is right."""
ENOUGH, CHECK, STEPS = 0.4, 100, 2000
"""Success at which the small policy is measured, demonstrations between two looks at it, and the most of them."""
FULL: dict[str, Any] = {
    "small": {
        "prompts": 32, "group": 16, "each": 3, "positions": 0, "draws": 32, "length": 40,
        "plan": asdict(ContrastSchedule(1, steps=40, batch=16, learning_rate=3e-4, threshold=RIGHT)),
    },
    "smollm2": {
        "prompts": 40, "group": 8, "each": 2, "positions": 4, "draws": 16, "length": 16,
        "plan": asdict(ContrastSchedule(1, steps=12, batch=8, learning_rate=2e-5, threshold=RIGHT)),
    },
}  # fmt: skip
"""What is drawn and measured. Of each prompt, tokens of `each` right and `each` wrong rollouts are replaced."""
SEEDS = 4
QUICK = {"prompts": 32, "group": 16, "each": 1, "draws": 4, "enough": 0.0, "steps": 200}


def cells(quick: bool) -> list[Cell]:
    """Return one cell per seed of the small policy, and one of SmolLM2."""
    small = {"task": asdict(TASK), "model": asdict(MODEL), "enough": ENOUGH, "steps": STEPS, **FULL["small"]}
    if quick:
        plan = {**FULL["small"]["plan"], "steps": 4}
        return [Cell("small-s0", {"policy": "small", "seed": 0, **small, **QUICK, "plan": plan})]
    made = [Cell(f"small-s{seed}", {"policy": "small", "seed": seed, **small}) for seed in range(SEEDS)]
    return [*made, Cell("smollm2", {"policy": "smollm2", "seed": 0, "task": asdict(SUMS), **FULL["smollm2"]})]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Replace tokens, and return how their effects go with the contrast and with what the gradient says."""
    s = cell.settings
    small = s["policy"] == "small"
    policy = small_policy(s, bar) if small else pretrained(TrainConfig(model="smollm2", **REASONING))
    prompts = distinct_prompts(policy.task, "train", s["prompts"])
    sample = SampleConfig(prompts=len(prompts), group_size=s["group"], max_new_tokens=s["length"])
    written = write(policy, prompts, sample, seed=1000 + s["seed"], at_once=16)
    right = written.table.total_reward >= RIGHT
    bar(0, 3, f"{cell.name}: {right.mean():.0%} right")
    chosen = chosen_tokens(written, right, s["each"], s["positions"], s["seed"])
    columns = scores(policy, written, right, np.flatnonzero(chosen.any(axis=1)), s)
    bar(2, 3, f"{cell.name}: continuing")
    kept, other = token_effects(policy, written.rollouts, chosen, RIGHT, s["draws"], s["length"], 2000 + s["seed"], bar)
    columns |= {"kept": kept, "replaced": other}
    n, t = np.nonzero(chosen)
    tokens = [
        {"prompt": int(written.table.group[i]), "right": bool(right[i])}
        | {name: rounded(float(x[i, j])) for name, x in columns.items()}
        for i, j in zip(n.tolist(), t.tolist(), strict=True)
    ]
    mixed = {int(g) for g in np.unique(written.table.group) if 0 < right[written.table.group == g].mean() < 1}
    facts = {"policy": s["policy"], "seed": s["seed"], "success": float(right.mean()), "mixed": len(mixed)}
    facts |= {"rollouts": len(right), "policy_tokens": int(written.table.mask.sum()), "tokens": len(tokens)}
    tables = Gathered(policies=[facts])
    tables.add({"policy": s["policy"], "seed": s["seed"]}, **summaries(tokens))
    return tables


def scores(policy: Policy, written: ScoredRollouts, right: Bool, rows: Int, s: Any) -> dict[str, Any]:
    """Return what is said of every token [N, T] without replacing it.

    The update is that of `rloo` over all these rollouts; norms are exact, and of some rows alone.
    """
    table = written.table
    advantage = estimate("rloo", table.inputs(None)).advantage
    columns: dict[str, Any] = {
        "contrast": contrasts(policy.model, written.rollouts, right, ContrastSchedule(**s["plan"]), s["seed"]),
        "logprob": table.stats.logprob,
    }
    columns |= shares(MeasuredPolicy(policy.model, "all", 1.0), written.rollouts, advantage / len(right), split=True)
    some = np.isin(np.arange(len(right)), rows)[:, None]
    return columns | {"norm": exact_norms(policy, written, table.mask & some)}


def chosen_tokens(written: ScoredRollouts, right: Bool, each: int, positions: int, seed: int) -> Bool:
    """Choose tokens [N, T] of some right and some wrong rollouts of every prompt that has both; `positions` of each."""
    random, mask = np.random.default_rng(seed), written.table.mask
    chosen = np.zeros(mask.shape, dtype=bool)
    for g in np.unique(written.table.group):
        kinds = [np.flatnonzero((written.table.group == g) & kind) for kind in (right, ~right)]
        if min(map(len, kinds)) == 0:
            continue
        for n in (int(i) for rows in kinds for i in random.permutation(rows)[:each]):
            t = np.flatnonzero(mask[n])
            chosen[n, random.permutation(t)[:positions] if positions else t] = True
    if not chosen.any():
        raise InputError("no prompt has right and wrong answers; take a policy that is right now and then.")
    return chosen


def small_policy(s: Any, bar: Bar) -> Policy:
    """Return a small policy trained on demonstrations until it is right often enough."""
    config = TrainConfig(
        task="chain_sum", chain_sum=ChainSumConfig(**s["task"]), small_model=SmallModelConfig(**s["model"]),
        seed=s["seed"], warm_start=WarmStartConfig(max_steps=s["steps"]),
    )  # fmt: skip
    policy = fresh_policy(config)
    for step, success, _ in demonstrated(policy, config, CHECK, 128, s["length"]):
        bar(step, s["steps"], f"{success:.0%} success")
        if success >= s["enough"]:
            return policy
    raise InputError(f"the small policy did not reach {s['enough']:.0%} success; allow more demonstrations.")


STUDY = Study(
    title="Critical tokens by contrast",
    question="Does the contrast of a copy fitted on right and one fitted on wrong rollouts find the tokens that decide "
    "success, and better than the gradient's own numbers?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
