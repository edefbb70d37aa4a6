"""Critical tokens by contrast, against exact attribution and against what replacing a token does to success.

The contrast is fitted on one half of each group and read on the other. The truth is measured by continuing rollouts
after a token, and after another one drawn in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

from otb_analysis.config import (
    ChainSumConfig,
    ContrastSchedule,
    ReasoningGymConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.devices import random_forked
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.measurement.level import MeasuredPolicy, contrasts, shares
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.generation import Generation, TransformersGenerator
from otb_analysis.rollouts.sampling import Draft, Rollouts, collate
from otb_analysis.tasks import Turn
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Bool, Float, Int
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.policies import Policy, ScoredRollouts, demonstrated, exact_norms, fresh_policy, pretrained, write
from studies.lib.record import Gathered

SCORES = {
    "contrast": "contrast",
    "lift": "contrast ÷ π",
    "logprob": "log π",
    "attribution": "attribution",
    "signal": "signal",
    "noise": "noise",
}
"""What may tell a token that helps from one that harms."""
SIZES = {
    "uncertain": "1 − π",
    "far": "log(contrast ÷ π), size",
    "norm": "exact ‖s‖²",
    "attribution_size": "attribution, size",
    "noise_size": "noise, size",
}
"""What may tell a token that matters, either way, from one that does not."""
KINDS: dict[str, bool | None] = {"all": None, "right": True, "wrong": False}
FINDERS = ("contrast", "lift", "logprob", "attribution")
DRAWN: tuple[str, ...] = ("contrast", "logprob", "attribution")
DECISIVE, LOWEST, BINS = -0.5, 0.1, 5
"""Effect from which a token is decisive for the worse; the share of tokens that a score may point at; fifths."""

Token = Mapping[str, Any]


def summaries(tokens: Sequence[Token]) -> dict[str, list[dict[str, Any]]]:
    """Return tables of one policy's replaced tokens: sums of ranks and what was found, by prompt, and mean effects.

    A token has its prompt, whether its rollout is right, contrast, log π, attribution, signal, noise, norm, and the
    success `kept` with it and `replaced` with another.
    """
    sums, fifths = list[dict[str, Any]](), list[dict[str, Any]]()
    for kind, right in KINDS.items():
        of_kind = [token for token in tokens if right is None or token["right"] == right]
        # Σx², Σy² and Σxy of each score's rank x and its target's rank y, the effect's or its size's
        ranked, columns = {name: ranks(x) for name, x in values(of_kind).items()}, {"tokens": np.ones(len(of_kind))}
        for target, names in (("effect", SCORES), ("size", SIZES)):
            columns[f"{target}_sq"] = ranked[target] ** 2
            columns |= {f"{name}_sq": ranked[name] ** 2 for name in names}
            columns |= {f"{name}_{target}": ranked[name] * ranked[target] for name in names}
        sums += [{"kind": kind} | row for row in sums_by_prompt(of_kind, columns)]
    x = values(wrong := [token for token in tokens if not token["right"]])
    for name in DRAWN:  # the mean effect of each fifth of some scores, lowest first
        part = np.clip(((ranks(x[name]) + 0.5) * BINS).astype(int), 0, BINS - 1)
        effects = {int(k) + 1: x["effect"][part == k] for k in np.unique(part)}
        one = {"score": name}
        fifths += [one | {"fifth": k, "tokens": len(e), "effect": rounded(e.mean())} for k, e in effects.items()]
    return {"sums": sums, "found": found_rows(wrong), "fifths": fifths}


def values(tokens: Sequence[Token]) -> dict[str, Float]:
    """Return scores, sizes and the measured effect of tokens, each [n]."""
    names = ("contrast", "logprob", "attribution", "signal", "noise", "norm", "kept", "replaced")
    x = {name: np.array([token[name] for token in tokens], float) for name in names}
    x["effect"] = x["kept"] - x["replaced"]
    # 0 where a float64 probability underflows; ranks need no more.
    x["lift"] = np.log(np.maximum(x["contrast"], 1e-300)) - x["logprob"]
    x |= {"uncertain": 1 - np.exp(x["logprob"]), "far": np.abs(x["lift"]), "size": np.abs(x["effect"])}
    return x | {f"{name}_size": np.abs(x[name]) for name in ("attribution", "noise")}


def ranks(x: Float) -> Float:
    """Return ranks from −½ to ½."""
    return (rankdata(x) - 0.5) / len(x) - 0.5


def sums_by_prompt(tokens: Sequence[Token], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per prompt with the sums of columns [n] over its tokens."""
    prompts, place = np.unique([token["prompt"] for token in tokens], return_inverse=True)
    summed = {name: np.bincount(place.reshape(-1), x, len(prompts)) for name, x in columns.items()}
    return [{"prompt": int(p)} | {n: rounded(x[k]) for n, x in summed.items()} for k, p in enumerate(prompts)]


def found_rows(tokens: Sequence[Token]) -> list[dict[str, int]]:
    """Return by prompt the tokens, the decisive ones, and how many of these are in the lowest tenth of each score."""
    x = values(tokens)
    bad = x["effect"] <= DECISIVE
    columns = {"tokens": np.ones(len(bad)), "decisive": bad}
    columns |= {name: bad & (ranks(x[name]) < LOWEST - 0.5) for name in FINDERS}
    return [{name: int(value) for name, value in row.items()} for row in sums_by_prompt(tokens, columns)]


def token_effects(
    policy: Policy, rollouts: Rollouts, chosen: Bool, right: float, draws: int, limit: int, seed: int, bar: Bar
) -> tuple[Float, Float]:
    """Return P(right | h, y) and P(right | h, not y) of the chosen tokens [N, T], each from so many continuations.

    Not y is a token drawn from π(·|h) without y. NaN where a token was not chosen; single turns, sampled at
    temperature 1, of at most `limit` tokens. The global random state is kept.
    """
    kept, other = np.full(chosen.shape, np.nan), np.full(chosen.shape, np.nan)
    generator = TransformersGenerator(policy.model, policy.tokenizer)
    with random_forked(policy.model.device):
        torch.manual_seed(seed)
        for t in range(chosen.shape[1]):
            rows = np.flatnonzero(chosen[:, t])
            if len(rows):
                at = rollouts.prompt_length[rows] + t
                begun = [rollouts.input_ids[n, :end].tolist() for n, end in zip(rows, at, strict=True)]
                token = rollouts.input_ids[rows, at]
                same, another = np.repeat(token[:, None], draws, axis=1), others(policy, begun, token, draws)
                for out, follow in ((kept, same), (other, another)):
                    out[rows, t] = successes(policy, generator, rollouts, rows, begun, follow, right, limit - t - 1)
            bar(t + 1, chosen.shape[1], f"{int(chosen.sum())} tokens replaced, position {t}")
    return kept, other


@torch.no_grad()
def others(policy: Policy, begun: list[list[int]], token: Int, draws: int) -> Int:
    """Draw tokens [n, draws] from π(·|h) without the token that was written."""
    drawn = []
    for ids, y in zip(begun, token.tolist(), strict=True):
        logits = policy.model(torch.tensor([ids], device=policy.model.device)).logits[0, -1].double()
        logits[y] = -torch.inf
        drawn.append(torch.multinomial(torch.softmax(logits, -1), draws, replacement=True))
    return torch.stack(drawn).cpu().numpy()


def successes(
    policy: Policy,
    generator: TransformersGenerator,
    rollouts: Rollouts,
    rows: Int,
    begun: list[list[int]],
    follow: Int,
    right: float,
    left: int,
) -> Float:
    """Return the share of right answers [n] among continuations of each beginning by each of its next tokens [n, K]."""
    n, draws = follow.shape
    texts = [[*begun[i], int(follow[i, k])] for i in range(n) for k in range(draws)]
    ended = np.isin(follow.reshape(-1), generator.ends) | (left < 1)
    going = np.flatnonzero(~ended)
    written = [Generation([], [], True)] * len(texts)
    if len(going):
        for i, generation in zip(going, generator.generate([texts[i] for i in going], left, 1.0), strict=True):
            written[i] = generation
    drafts = []
    for i, (text, more) in enumerate(zip(texts, written, strict=True)):
        start = int(rollouts.prompt_length[rows[i // draws]])
        draft, ids = Draft(text[:start]), [*text[start:], *more.token_ids]
        finished = ids[-1] in generator.ends
        draft.extend(ids, 0, [0.0] * len(ids))
        draft.turns.append(Turn(str(policy.tokenizer.decode(ids[:-1] if finished else ids)), finished))
        draft.finish_reason = "stop" if finished else "length"
        drafts.append(draft)
    paid = compute_rewards(policy.task, collate(drafts, rollouts.prompts, np.repeat(rollouts.group[rows], draws), 0))
    return (paid.reward.sum(axis=1) >= right).reshape(n, draws).mean(axis=1)


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
    if s["policy"] == "small":
        config = TrainConfig(
            task="chain_sum", chain_sum=ChainSumConfig(**s["task"]), small_model=SmallModelConfig(**s["model"]),
            seed=s["seed"], warm_start=WarmStartConfig(max_steps=s["steps"]),
        )  # fmt: skip
        policy = fresh_policy(config)
        for step, success, _ in demonstrated(policy, config, CHECK, 128, s["length"]):
            bar(step, s["steps"], f"{success:.0%} success")
            if success >= s["enough"]:
                break
        else:
            raise InputError(f"the small policy did not reach {s['enough']:.0%} success; allow more demonstrations.")
    else:
        policy = pretrained(TrainConfig(model="smollm2", **REASONING))
    prompts = distinct_prompts(policy.task, "train", s["prompts"])
    sample = SampleConfig(prompts=len(prompts), group_size=s["group"], max_new_tokens=s["length"])
    written = write(policy, prompts, sample, seed=1000 + s["seed"], at_once=16)
    right = written.table.total_reward >= RIGHT
    bar(0, 3, f"{cell.name}: {right.mean():.0%} right")
    chosen = chosen_tokens(written, right, s["each"], s["positions"], s["seed"])
    # What is said of every token without replacing it, the update being that of `rloo` over all these rollouts
    advantage = estimate("rloo", written.table.inputs(None)).advantage / len(right)
    contrast = contrasts(policy.model, written.rollouts, right, ContrastSchedule(**s["plan"]), s["seed"])
    columns: dict[str, Any] = {"contrast": contrast, "logprob": written.table.stats.logprob}
    columns |= shares(MeasuredPolicy(policy.model, "all", 1.0), written.rollouts, advantage, split=True)
    n, t = np.nonzero(chosen)
    columns["norm"] = exact_norms(policy, written, written.table.mask & np.isin(np.arange(len(right)), n)[:, None])
    bar(2, 3, f"{cell.name}: continuing")
    kept, other = token_effects(policy, written.rollouts, chosen, RIGHT, s["draws"], s["length"], 2000 + s["seed"], bar)
    columns |= {"kept": kept, "replaced": other}
    tokens = list[Token]()
    for i, j in zip(n.tolist(), t.tolist(), strict=True):
        facts = {"prompt": int(written.table.group[i]), "right": bool(right[i])}
        tokens.append(facts | {name: rounded(x[i, j]) for name, x in columns.items()})
    share = np.bincount(written.table.group, right) / np.bincount(written.table.group)
    facts = {"success": float(right.mean()), "mixed": int(((share > 0) & (share < 1)).sum()), "rollouts": len(right)}
    facts |= {"policy_tokens": int(written.table.mask.sum()), "tokens": len(tokens)}
    return Gathered().add({"policy": s["policy"], "seed": s["seed"]}, policies=[facts], **summaries(tokens))


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


STUDY = Study(
    title="Critical tokens by contrast",
    question="Does the contrast of a copy fitted on right and one fitted on wrong rollouts find the tokens that decide "
    "success, and better than the gradient's own numbers?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
