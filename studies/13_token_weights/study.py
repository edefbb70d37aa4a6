"""Token weights: which tokens STAPO silences, what of the gradient they carry, and what such weights do to an update.

On millions of tokens of small policies, with exact norms of the silenced ones and of as many drawn by lot; and expected
shares on a pretrained model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.config import (
    ReasoningGymConfig,
    SampleConfig,
    TrainConfig,
    WarmStartConfig,
)
from otb_analysis.estimators import estimate
from otb_analysis.gradients import token_score_norms
from otb_analysis.objectives.aggregation import DelightOptions, StapoOptions, TokenWeightInputs, token_weights
from otb_analysis.statistics import (
    Interval,
    Partition,
    cluster_jackknife,
    jackknife_interval,
    paired_ratios,
    pool_gram,
    pool_statistics,
)
from otb_analysis.tasks import Prompt
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Bool, Float, Gram, Int
from studies.lib import Cell, Study, Tables, interval_columns, rounded
from studies.lib.formats import by_label, ratio_columns, ratio_interval, statistics_columns, with_deleted
from studies.lib.policies import (
    Policy,
    ScoredRollouts,
    different_prompts,
    exact_norms,
    group_sketches,
    pretrained,
    taught,
    write,
)
from studies.lib.record import Gathered
from studies.lib.seeds import taught_config

ARMS = ("rloo", "stapo", "drawn", "delightful")
"""`drawn` silences as many tokens as `stapo`, by lot among those with A > 0."""
LOT = 256
"""Fewest tokens of a block that are drawn by lot, whose exact norms stand for all tokens."""
SUMS = ("tokens", "positive", "silenced", "norm_silenced", "power_silenced", "drawn", "norm_drawn", "power_all")
"""Columns of a prompt: tokens, those with A > 0, those silenced with their Σ‖s‖² and ΣA²‖s‖², and tokens drawn by lot.

`power_all` estimates ΣA²‖s‖² of all tokens, from others drawn in proportion to A² times the proxy of ‖s‖².
"""


@dataclass
class Found:
    """What all blocks together gave."""

    sums: list[Float] = field(default_factory=list)  # Rows of SUMS, a row per prompt
    grid: list[Float] = field(default_factory=list)  # Silenced tokens of each prompt at each pair of thresholds
    gradients: list[Float] = field(default_factory=list)  # [M, G, K] of the first prompts
    silenced: Counter[str] = field(default_factory=Counter)
    every: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Setting:
    """How much is drawn and measured."""

    prompts: int
    rollouts: int
    length: int  # Tokens an answer may have
    group: int  # Rollouts of a group: R − leave-one-out mean is A
    gram: int  # Prompts whose group gradients are sketched
    buckets: int
    block: int  # Prompts at a time
    pairs: tuple[tuple[float, float], ...]  # (τ_p, τ_h) of the grid


def collect(policy: Policy, prompts: Sequence[Prompt], setting: Setting, bar: Bar) -> Found:
    """Sample and measure the prompts in blocks, so that memory holds one of them."""
    totals, rng = Found(), np.random.default_rng(0)
    sample = SampleConfig(group_size=setting.rollouts, max_new_tokens=setting.length)
    for start in range(0, len(prompts), setting.block):
        written = write(policy, prompts[start : start + setting.block], sample, seed=10 + start)
        _block(policy, written, setting, totals, start < setting.gram, rng)
        bar(min(start + setting.block, len(prompts)), len(prompts), "sampling and measuring")
    return totals


def _block(
    policy: Policy, written: ScoredRollouts, setting: Setting, totals: Found, sketched: bool, rng: np.random.Generator
) -> None:
    table, prompt = written.table, written.rollouts.group
    place = np.arange(len(prompt)) - np.searchsorted(prompt, prompt)  # of a rollout in its prompt
    group = prompt * (setting.rollouts // setting.group) + place // setting.group
    advantage = estimate("rloo", replace(table.inputs(None), group=group)).advantage
    inputs = TokenWeightInputs(table.mask, advantage, table.stats.logprob, table.stats.entropy)
    silenced = table.mask & (token_weights("stapo", inputs) == 0)
    count, positive = int(silenced.sum()), table.mask & (advantage > 0)
    drawn, other = _by_lot(table.mask, max(count, LOT), rng), _by_lot(positive, count, rng)
    likely = advantage**2 * np.where(table.mask, table.stats.energy, 0.0)
    times = np.zeros(likely.shape)  # none where every group was paid alike
    if likely.any():
        times = rng.multinomial(LOT, likely.reshape(-1) / likely.sum()).reshape(likely.shape)
    norm = exact_norms(policy, written, silenced | drawn | (times > 0))
    power = advantage**2 * norm
    # Horvitz and Thompson: each draw stands for 1/(LOT · its chance) tokens
    stands_for = np.divide(times * likely.sum(), LOT * likely, out=np.zeros(likely.shape), where=times > 0)
    parts = [silenced * norm, silenced * power, drawn, drawn * norm, stands_for * power]
    columns = [table.mask, positive, silenced, *parts]
    options = [StapoOptions(*pair) for pair in setting.pairs]
    counts = [table.mask & (token_weights("stapo", inputs, one) == 0) for one in options]
    for gathered, parts in ((totals.sums, columns), (totals.grid, counts)):
        gathered.append(np.stack([np.bincount(prompt, x.sum(axis=1)) for x in parts], axis=1).astype(float))
    for counter, where in ((totals.silenced, silenced), (totals.every, table.mask)):
        ids, times = np.unique(table.token_id[where], return_counts=True)
        for i, n in zip(ids, times, strict=True):
            counter[str(policy.tokenizer.decode([int(i)]))] += int(n)
    if sketched:
        factors = (1.0, ~silenced, ~other, token_weights("delightful", inputs))
        weights = np.stack([advantage * factor for factor in factors]) / setting.group
        totals.gradients.append(group_sketches(policy, written, weights, group, setting.buckets))


def _by_lot(where: Bool, count: int, rng: np.random.Generator) -> Bool:
    at = np.flatnonzero(where)
    return np.isin(np.arange(where.size), rng.choice(at, min(count, len(at)), replace=False)).reshape(where.shape)


REAL_TASK = ReasoningGymConfig(name=("letter_counting",), config=('{"min_words": 1, "max_words": 2}',))
PROMPTS, ROLLOUTS, TOKENS, NORMS, FIRST = 48, 8, 24, 48, 80_000_000


def measure_real(cell: Cell, bar: Bar) -> Tables:
    """Return expected shares by thresholds, and exact norms of tokens that would be silenced and of others."""
    s = cell.settings
    policy = pretrained(TrainConfig(model="smollm2", task="reasoning_gym", reasoning_gym=REAL_TASK))
    sample = SampleConfig(group_size=s["rollouts"], max_new_tokens=s["tokens"])
    written = write(policy, different_prompts(policy, FIRST, s["prompts"]), sample, seed=3, at_once=16)
    bar(1, 3, "sampled")
    mass, rare, prompt = rare_mass(policy, written, s["pairs"])
    bar(2, 3, "contexts scored")
    rows = share_rows(np.stack([np.bincount(prompt, x) for x in mass.T], axis=1), np.bincount(prompt), s["pairs"])
    default = s["pairs"].index([StapoOptions().probability, StapoOptions().entropy])
    norms = rare_norms(policy, written, rare, mass[:, default], s["norms"])
    bar(3, 3, "norms")
    whole = {"parameters": policy.model.num_parameters(), "tokens": len(prompt), "prompts": s["prompts"]}
    whole |= {"rollouts": s["rollouts"], "success": float(written.table.total_reward.mean()), "norms": len(norms)}
    ratio = ratio_interval(norms[:, 0], norms[:, 1], "mean ‖s‖² of silenced over drawn tokens")
    key, whole = {"policy": cell.name}, whole | interval_columns("norm_ratio", ratio)
    return Gathered().add(key, thresholds=rows, policies=[whole])


def share_rows(counts: Float | Int, tokens: Float | Int, pairs: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return by pair of thresholds the share of tokens that they silence, from counts of each prompt [P, pairs]."""
    rows = []
    for k, (probability, entropy) in enumerate(pairs):
        share = ratio_interval(counts[:, k], tokens, "share of tokens", "linear")
        rows.append({"probability": probability, "entropy": entropy} | interval_columns("share", share))
    return rows


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
        few = np.where(pi < default.probability, pi, 0.0)
        rare += [
            int(rng.choice(len(p), p=p / p.sum())) if h < default.entropy else -1
            for p, h in zip(few, entropy, strict=True)
        ]
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
    confident = rng.choice(len(where), min(count, int((chance > 0).sum())), replace=False, p=chance / chance.sum())
    others = rng.choice(len(where), len(confident), replace=False)
    out = np.zeros((len(confident), 2))
    for k, pair in enumerate(zip(confident, others, strict=True)):
        for side, token in enumerate(pair):
            n, at = where[token]
            row = ids[n : n + 1, : at + 1].clone()
            if side == 0:
                row[0, at] = int(rare[token])
            only, real = torch.arange(at + 1)[None] == at, attention[n : n + 1, : at + 1]
            norms = token_score_norms(policy.model, row, only, real, temperature=written.temperature)
            out[k, side] = norms.norm_sq[0, at]
    return out


POLICIES = {
    "chain_sum": ("chain_sum", 32, WarmStartConfig(success_low=0.35, success_high=0.60)),
    "chain_sum_high": ("chain_sum", 32, WarmStartConfig(success_low=0.65, success_high=0.85)),
    "graph_path": ("graph_path", 16, WarmStartConfig(success_low=0.35, success_high=0.60)),
}
"""Task, tokens an answer may have, and how far the policy was taught."""
PAIRS = tuple((p, h) for p in (0.001, 0.01, 0.05) for h in (0.1, 0.5, 1.0))
"""Thresholds (τ_p, τ_h) at which shares are counted; the default is one of them."""
FULL = Setting(512, 128, 0, group=8, gram=256, buckets=2048, block=32, pairs=PAIRS)
SMALL = Setting(24, 16, 0, group=8, gram=24, buckets=256, block=24, pairs=PAIRS)
UPDATE = 32
"""Prompts of the update whose efficiency and shares of ‖ḡ‖² are stated."""
FIRST_PROMPT = 90_000_000


def cells(quick: bool) -> list[Cell]:
    """Return one cell per small policy, and one of the pretrained model."""
    size = asdict(SMALL if quick else FULL) | {"pairs": [list(pair) for pair in PAIRS]}
    options = {"stapo": asdict(StapoOptions()), "delightful": asdict(DelightOptions())}
    made = []
    for name, (task, length, start) in POLICIES.items():
        config = taught_config(task, start, quick)
        learner = {"model": asdict(config.small_model), "start": asdict(config.warm_start)}
        learner |= {"task": task, "task_settings": asdict(getattr(config, task)), "update": UPDATE}
        made.append(Cell(name, size | learner | options | {"length": length, "quick": quick, "arms": list(ARMS)}))
    facts = {"model": "smollm2", "task": asdict(REAL_TASK), "prompts": PROMPTS, "rollouts": ROLLOUTS, "tokens": TOKENS}
    real = Cell("smollm2-letters", facts | {"norms": NORMS, "pairs": size["pairs"]})
    return made[:1] if quick else [*made, real]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Measure a small policy's tokens, or a pretrained one's contexts."""
    if cell.name.startswith("smollm2"):
        return measure_real(cell, bar)
    s = cell.settings
    setting = Setting(**{name: s[name] for name in asdict(FULL) if name != "pairs"}, pairs=PAIRS)
    policy = taught(taught_config(s["task"], POLICIES[cell.name][2], s["quick"]))
    prompts = different_prompts(policy, FIRST_PROMPT, setting.prompts)
    totals = collect(policy, prompts, setting, bar)
    gradients = np.concatenate(totals.gradients, axis=1)  # of the groups of the first prompts, in order
    groups = np.arange(gradients.shape[1])
    cut = Partition(np.repeat(groups, setting.group), groups // (setting.rollouts // setting.group))
    gram = pool_gram([gradients], [cut], [(arm, "none") for arm in ARMS])
    sums = np.concatenate(totals.sums)
    whole = {"parameters": policy.model.num_parameters(), "prompts": len(prompts), "rollouts": setting.rollouts}
    whole |= {name: int(total) for name, total in zip(SUMS, sums.sum(axis=0), strict=True) if "_" not in name}
    shares = share_rows(np.concatenate(totals.grid), sums[:, SUMS.index("tokens")], PAIRS)
    silenced, every = sum(totals.silenced.values()), sum(totals.every.values())
    kinds = [
        {"token": repr(text), "silenced": count / silenced, "all": totals.every[text] / every}
        for text, count in totals.silenced.most_common(6)
    ]
    arms, pairs = [], by_label(paired_ratios([gram.gram()], n_prompts=UPDATE))
    for one in pool_statistics(gram, n_prompts=UPDATE):
        row = {"arm": one.estimator, "bias": rounded(one.relative_bias)} | statistics_columns(one, "projection")
        pair = pairs.get((one.estimator, one.energy_source))
        row |= ratio_columns(pair, {name: name for name in ("variance", "sf", "efficiency")})
        arms.append(row | interval_columns("square_share", square_share(gram.gram(), one.estimator)))
    key, whole = {"policy": cell.name}, whole | silenced_part(sums)
    return Gathered().add(key, policies=[whole], thresholds=shares, kinds=kinds, arms=arms)


def silenced_part(sums: Float) -> dict[str, float | None]:
    """Return how long silenced scores are, over those drawn by lot, and their share of ΣA²‖s‖² over all tokens."""
    k = {name: at for at, name in enumerate(SUMS)}
    four = sums[:, [k[name] for name in ("norm_silenced", "silenced", "norm_drawn", "drawn")]]
    words = "mean ‖s‖² of silenced over drawn tokens"
    ratio = cluster_jackknife(four, lambda m: m[..., 0] / m[..., 1] / (m[..., 2] / m[..., 3]), words)
    share = ratio_interval(sums[:, k["power_silenced"]], sums[:, k["power_all"]], "share of ΣA²‖s‖²")
    return interval_columns("norm_ratio", ratio) | interval_columns("power_share", share)


def square_share(gram: Gram, arm: str) -> Interval | None:
    """Return what share of E‖ḡ‖² of `rloo` in an update the tokens carry that an arm takes away: 1 − ⟨ḡ_arm, ḡ⟩/‖ḡ‖².

    E⟨a, b⟩ of means over U prompts is (mean of a_p·b_p)/U + (1 − 1/U)·(mean of a_p·b_q, p ≠ q).
    """
    labels = [label[0] for label in gram.labels]
    r, m, count = labels.index("rloo"), labels.index(arm), gram.n_prompts

    def every(x: Float) -> Float:
        diagonal = np.diag(x)
        # Products of each prompt with the others, and of all pairs
        pairs, total = x.sum(axis=0) + x.sum(axis=1) - 2 * diagonal, x.sum() - diagonal.sum()
        across = np.concatenate([[total / count], (total - pairs) / (count - 2)]) / (count - 1)
        return with_deleted(diagonal) / UPDATE + (1 - 1 / UPDATE) * across

    share = 1 - every(gram.inner[m, r]) / every(gram.inner[r, r])
    return jackknife_interval(float(share[0]), share[1:], "share of ‖ḡ‖²", "linear")


STUDY = Study(
    title="Token weights",
    question="Which tokens does STAPO silence, what share of the gradient do they carry, and what do STAPO and "
    "Delightful Policy Gradient make of an update?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
