"""What STAPO would silence on a pretrained model: expected shares at its contexts, so that rare tokens need no luck.

At a context with distribution π and entropy H < τ_h the chance of a token with π(y) < τ_p is Σ_v π_v 1(π_v < τ_p). Its
mean over contexts is the expected share of tokens that STAPO would silence if all advantages were positive.
"""

from dataclasses import asdict

import numpy as np
import torch

from otb_analysis.config import ReasoningGymConfig, SampleConfig, TrainConfig
from otb_analysis.gradients import token_score_norms
from otb_analysis.objectives.token_weights import StapoOptions
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Float, Int
from studies.lib import Cell, Tables, interval_columns
from studies.lib.formats import ratio_interval
from studies.lib.policies import Policy, ScoredRollouts, different_prompts, pretrained, write

TASK = ReasoningGymConfig(name=("letter_counting",), config=('{"min_words": 1, "max_words": 2}',))
PROMPTS, ROLLOUTS, TOKENS, NORMS, FIRST = 48, 8, 24, 48, 80_000_000


def cell(pairs: tuple[tuple[float, float], ...]) -> Cell:
    """Return the cell of the pretrained model."""
    facts = {"model": "smollm2", "task": asdict(TASK), "prompts": PROMPTS, "rollouts": ROLLOUTS, "tokens": TOKENS}
    return Cell("smollm2-letters", facts | {"norms": NORMS, "pairs": [list(pair) for pair in pairs]})


def measure(cell: Cell, bar: Bar) -> Tables:
    """Return expected shares by thresholds, and exact norms of tokens that would be silenced and of others."""
    s = cell.settings
    policy = pretrained(TrainConfig(model="smollm2", task="reasoning_gym", reasoning_gym=TASK))
    sample = SampleConfig(group_size=s["rollouts"], max_new_tokens=s["tokens"])
    written = write(policy, different_prompts(policy, FIRST, s["prompts"]), sample, seed=3, at_once=16)
    bar(1, 3, "sampled")
    mass, rare, prompt = rare_mass(policy, written, s["pairs"])
    bar(2, 3, "contexts scored")
    rows = []
    for k, (probability, entropy) in enumerate(s["pairs"]):
        share = ratio_interval(np.bincount(prompt, mass[:, k]), np.bincount(prompt), "share of tokens", "linear")
        row = {"policy": cell.name, "probability": probability, "entropy": entropy}
        rows.append(row | interval_columns("share", share))
    default = s["pairs"].index([StapoOptions().probability, StapoOptions().entropy])
    norms = rare_norms(policy, written, rare, mass[:, default], s["norms"])
    bar(3, 3, "norms")
    whole = {
        "policy": cell.name,
        "parameters": policy.model.num_parameters(),
        "tokens": len(prompt),
        "prompts": s["prompts"],
    }
    whole |= {"rollouts": s["rollouts"], "success": float(written.table.total_reward.mean()), "norms": len(norms)}
    ratio = ratio_interval(norms[:, 0], norms[:, 1], "mean ‖s‖² of silenced over drawn tokens")
    return {"thresholds": rows, "policies": [whole | interval_columns("norm_ratio", ratio)]}


def rare_mass(policy: Policy, written: ScoredRollouts, pairs: list[list[float]]) -> tuple[Float, Int, Int]:
    """Return Σ_v π_v 1(π_v < τ_p)·1(H < τ_h) of each policy token [n, pairs], a rare token there or −1, its prompt [n].

    The rare token is drawn from those below the default τ_p, in proportion to π, where H is below the default τ_h.
    """
    ids, mask, attention = written.batch
    rng, default, mass, rare, prompt = np.random.default_rng(0), StapoOptions(), [], [], []
    for n in range(len(ids)):
        length = int(attention[n].sum())
        with torch.inference_mode():
            logits = policy.model(input_ids=ids[n : n + 1, :length].to(policy.model.device)).logits[0]
        at = np.flatnonzero(mask[n].numpy())
        pi = torch.softmax(logits[at - 1].double() / written.temperature, dim=-1).cpu().numpy()
        entropy = -(pi * np.log(np.maximum(pi, 1e-300))).sum(axis=1)
        mass += [[p[p < a].sum() * (h < b) for a, b in pairs] for p, h in zip(pi, entropy, strict=True)]
        for p, h in zip(pi, entropy, strict=True):
            few = np.where(p < default.probability, p, 0.0)
            rare.append(int(rng.choice(len(p), p=few / few.sum())) if h < default.entropy else -1)
        prompt += [int(written.rollouts.group[n])] * len(at)
    return np.array(mass), np.array(rare), np.array(prompt)


def rare_norms(policy: Policy, written: ScoredRollouts, rare: Int, mass: Float, count: int) -> Float:
    """Return ‖s‖² of rare tokens put in place of those sampled, and of tokens drawn by lot [count, 2].

    Contexts are drawn in proportion to the chance of a rare token there, each once at most.
    """
    ids, mask, attention = written.batch
    rng = np.random.default_rng(1)
    where = np.argwhere(mask.numpy())
    chance = np.where(rare >= 0, mass, 0.0)
    size = min(count, int((chance > 0).sum()))
    confident = rng.choice(len(where), size, replace=False, p=chance / chance.sum())
    others = rng.choice(len(where), len(confident), replace=False)
    out = np.zeros((len(confident), 2))
    for k, pair in enumerate(zip(confident, others, strict=True)):
        for side, token in enumerate(pair):
            n, at = where[token]
            row = ids[n : n + 1, : at + 1].clone()
            if side == 0:
                row[0, at] = int(rare[token])
            only = torch.zeros_like(row, dtype=torch.bool)
            only[0, at] = True
            found = token_score_norms(
                policy.model, row, only, attention[n : n + 1, : at + 1], temperature=written.temperature
            )
            out[k, side] = found.norm_sq[0, at]
    return out
