"""Rollouts of a small policy, block by block: which tokens STAPO silences, their exact norms, gradients of groups."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from otb_analysis.config import SampleConfig
from otb_analysis.estimators import estimate
from otb_analysis.objectives.token_weights import StapoOptions, TokenWeightInputs, token_weights
from otb_analysis.statistics import Partition, PoolGram, pool_gram
from otb_analysis.tasks import Prompt
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Bool, Float, Int
from studies.lib.policies import Policy, ScoredRollouts, exact_norms, group_sketches, write

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
    found, rng = Found(), np.random.default_rng(0)
    sample = SampleConfig(group_size=setting.rollouts, max_new_tokens=setting.length)
    for start in range(0, len(prompts), setting.block):
        written = write(policy, prompts[start : start + setting.block], sample, seed=10 + start)
        _block(policy, written, setting, found, start < setting.gram, rng)
        bar(min(start + setting.block, len(prompts)), len(prompts), "sampling and measuring")
    return found


def _block(
    policy: Policy, written: ScoredRollouts, setting: Setting, found: Found, sketched: bool, rng: np.random.Generator
) -> None:
    table, prompt = written.table, written.rollouts.group
    group = prompt * (setting.rollouts // setting.group) + _place(prompt) // setting.group
    advantage = estimate("rloo", replace(table.inputs(None), group=group)).advantage
    inputs = TokenWeightInputs(table.mask, advantage, table.stats.logprob, table.stats.entropy)
    silenced = table.mask & (token_weights("stapo", inputs) == 0)
    count = int(silenced.sum())
    drawn, other = _by_lot(table.mask, max(count, LOT), rng), _by_lot(table.mask & (advantage > 0), count, rng)
    likely = advantage**2 * np.where(table.mask, table.stats.energy, 0.0)
    times = np.zeros(likely.shape)  # none where every group was paid alike
    if likely.any():
        times = rng.multinomial(LOT, likely.reshape(-1) / likely.sum()).reshape(likely.shape)
    norm = exact_norms(policy, written, silenced | drawn | (times > 0))
    power = advantage**2 * norm
    # Horvitz and Thompson: each draw stands for 1/(LOT · its chance) tokens
    stands_for = np.divide(times * likely.sum(), LOT * likely, out=np.zeros(likely.shape), where=times > 0)
    columns = [table.mask, table.mask & (advantage > 0), silenced, silenced * norm, silenced * power, drawn]
    columns += [drawn * norm, stands_for * power]
    found.sums.append(np.stack([_per_prompt(x, prompt) for x in columns], axis=1))
    options = [StapoOptions(*pair) for pair in setting.pairs]
    counts = [table.mask & (token_weights("stapo", inputs, one) == 0) for one in options]
    found.grid.append(np.stack([_per_prompt(x, prompt) for x in counts], axis=1))
    for counter, where in ((found.silenced, silenced), (found.every, table.mask)):
        ids, times = np.unique(table.token_id[where], return_counts=True)
        for i, n in zip(ids, times, strict=True):
            counter[str(policy.tokenizer.decode([int(i)]))] += int(n)
    if sketched:
        factors = (1.0, ~silenced, ~other, token_weights("delightful", inputs))
        weights = np.stack([advantage * factor for factor in factors]) / setting.group
        found.gradients.append(group_sketches(policy, written, weights, group, setting.buckets))


def gram_of(found: Found, setting: Setting) -> PoolGram:
    """Return the Gram matrices of the arms; the groups are those of the first prompts, in order."""
    gradients = np.concatenate(found.gradients, axis=1)
    per = setting.rollouts // setting.group
    groups = np.arange(gradients.shape[1])
    cut = Partition(np.repeat(groups, setting.group), groups // per)
    return pool_gram([gradients], [cut], [(arm, "none") for arm in ARMS])


def _place(prompt: Int) -> Int:
    """Number the rollouts of each prompt from 0; they come prompt by prompt."""
    return np.arange(len(prompt)) - np.searchsorted(prompt, prompt)


def _by_lot(where: Bool, count: int, rng: np.random.Generator) -> Bool:
    out, at = np.zeros(where.shape, bool), np.flatnonzero(where)
    out.reshape(-1)[rng.choice(at, min(count, len(at)), replace=False)] = True
    return out


def _per_prompt(x: Float | Bool, prompt: Int) -> Float:
    return np.bincount(prompt, x.sum(axis=1)).astype(float)
