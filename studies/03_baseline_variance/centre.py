"""A regression across prompts that chooses its centre, a memory, a probe and portfolios: what `studies/LOG.md` asks.

Every feature is a number of the rollout times a number of the token, so the score of a rollout is needed along four
rows only, and ‖ḡ‖² is a quadratic form of the coefficients. Of a batch the estimators see `gram`, `moment` and `stats`;
`second` judges them. Letters: P prompts, N rollouts, K features.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from otb_analysis.config import GraphPathConfig, RunningTotalConfig, SampleConfig, TrainConfig, WarmStartConfig
from otb_analysis.estimators import RegressionOptions, estimate
from otb_analysis.estimators.spec import FEATURES
from otb_analysis.statistics import jackknife_interval
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.policy import Policy as RunningPolicy
from otb_analysis.types import Bool, Float, Int
from studies.lib.enumeration.facts import GROUP
from studies.lib.enumeration.groups import multisets
from studies.lib.enumeration.regression import regressed
from studies.lib.enumeration.trees import random_tree
from studies.lib.formats import interval_columns, rounded
from studies.lib.policies import Policy, ScoredRollouts, different_prompts, group_sketches, score, taught, write
from studies.lib.record import write_tables
from studies.lib.seeds import MODEL
from studies.lib.worlds import WORLD_TOKENS, toy_world

PARTS = ("1", "f", "h", "x")
PRODUCTS = (*FEATURES.values(), ("probe", "1"))
PLAIN = {1: 0, 3: 2, 5: 4, 7: 6, 8: 0}
"""Features that count from the mean return, and what they multiply."""
K = len(FEATURES)
NEW = ("james_stein_centre", "stacked", "picked")
MEMBERS = ("rloo", "none", "james_stein_corrected", "energy_across_loo", "energy_regression")
UPDATES, BLOCK, ROLLOUTS, PROMPTS, BUCKETS = (8, 16, 32), 32, 8, 512, 2048
FIRST, LESSON, PATH, AMONG = 110_000_000, 120_000_000, 130_000_000, 8192
SEEN = (40_000_000, 135_000_000)
"""Prompts of studies 03 and 17, and of a trial of this file."""
OVER = ("rloo", "energy_regression")
START, HIGH = (WarmStartConfig(success_low=low, success_high=high) for low, high in ((0.35, 0.60), (0.65, 0.85)))
BASE = TrainConfig(small_model=MODEL, warm_start=START, seed=1, graph_path=GraphPathConfig(nodes=6, edges=8))
POLICIES = {
    "chain_sum": (replace(BASE, task="chain_sum"), 32, 1536),
    "chain_sum_high": (replace(BASE, task="chain_sum", warm_start=HIGH), 32, 1536),
    "graph_path": (replace(BASE, task="graph_path"), 16, 1536),
    "running_total": (replace(BASE, task="running_total", running_total=RunningTotalConfig(4, 5)), 50, 256),
}  # fmt: skip
"""Configuration, tokens that an answer may have, and how many prompts at `SEEN` were looked at."""
WORLDS = [(mean, spread, link) for mean in (-1.0, 1.0) for spread in (0.0, 1.0, 2.0) for link in (0.0, 1.5)]
WORLD_BLOCKS, TREES, FIRST_TREE = 100, 512, 5_000
MEMORIES, STEPS, SKIPPED = (0.5, 0.9, 0.97), 120, 8
RIDGES, FITTED_ON = (0.0, 0.01, 0.1, 1.0, np.inf), (16, 32, 64)
"""ρ of a portfolio: without end its weights are equal; and prompts that fit them."""


@dataclass(frozen=True)
class Groups:
    """One group of N rollouts of each of P prompts, as sums."""

    gram: Float  # Σ w φφᵀ [P, K + 1, K + 1]
    moment: Float  # Σ w φ R [P, K + 1]
    stats: Float  # 1, mean return, its square, variance (ddof 1) [P, 4]
    second: Float  # ⟨x_a, x_b⟩ of ΣR·s and Σφ·s over N [P, K + 2, K + 2]

    def take(self, rows: Int) -> "Groups":
        """Return the groups of some prompts."""
        return Groups(*(getattr(self, one.name)[rows] for one in fields(self)))


def groups(total: Float, inner: Float, products: Float, probe: Float) -> Groups:
    """Return the sums of groups: returns [P, N], Σ w z zᵀ [P, N, 4, 4], ⟨Σ z s, Σ z s⟩ [P, N, 4, N, 4].

    `probe` [P, N] is what the probe says of a rollout from the hidden states of the others.
    """
    size, mean = total.shape[1], total.mean(axis=1)
    factor = {"1": np.ones(total.shape), "m": (size * mean[:, None] - total) / (size - 1), "probe": probe}
    c, z = np.stack([factor[a] for a, _ in PRODUCTS], axis=-1), [PARTS.index(b) for _, b in PRODUCTS]
    gram = np.einsum("pia,pib,piab->pab", c, c, inner[:, :, z][:, :, :, z])
    moment = np.einsum("pia,pi,pia->pa", c, total, inner[:, :, z, 0])
    stats = np.stack([np.ones(len(total)), mean, mean**2, total.var(axis=1, ddof=1)], axis=1)
    rows = np.concatenate([total[:, :, None], c], axis=2)[..., None] * np.eye(4)[[0, *z]]
    second = np.einsum("piaz,pizjx,pjbx->pab", rows, products, rows, optimize=True)
    return Groups(gram, moment, stats, second / size**2)


def fitted(gram: Float, moment: Float, ridge: float, slope: Float) -> Float:
    """Return β [..., k] of the ridge regression that pulls the coefficient of m to `slope` [...], all others to 0.

    With slope 0 it is that of `energy_regression`: m counts from the mean return, and 1 is free.
    """
    k, mean = moment.shape[-1], moment[..., 0] / gram[..., 0, 0]
    shift = np.tile(np.eye(k), (*mean.shape, 1, 1))
    for m, plain in PLAIN.items():
        if m < k:
            shift[..., m, plain] = -mean
    back = shift.swapaxes(-1, -2)
    centred, target = shift @ gram @ back, (shift @ (moment - mean[..., None] * gram[..., 0])[..., None])[..., 0]
    square, whole = (np.diagonal(x, axis1=-2, axis2=-1) for x in (centred, gram))
    penalty = np.where(square > 1e-12 * whole, ridge * square, 1.0)  # where nothing is left but rounding, β is 0
    penalty[..., 0] = 0.0
    start = np.eye(k)[1] * slope[..., None]
    rest = (target - (centred @ start[..., None])[..., 0])[..., None]
    beta = (back @ (start[..., None] + np.linalg.solve(centred + penalty[..., None] * np.eye(k), rest)))[..., 0]
    beta[..., 0] += mean
    return beta


def baselines(
    batch: Groups, size: int, ridge: float, old: Float | float = 0.0, peeking: bool = False
) -> tuple[dict[str, Float], Float, Float]:
    """Return β [P, K + 1] of every estimator, the weight of James–Stein's centre [P], and the state of the next step.

    Every number of prompt p is made of the sums of the prompts q ≠ p, and of an `old` state, which the caller has
    forgotten a bit of. `peeking` lets the choice see p, which biases it.
    """
    p, apart = len(batch.stats), ~np.eye(len(batch.stats), dtype=bool)
    facts = np.concatenate([batch.gram.reshape(p, -1), batch.moment, batch.stats], axis=1)
    old = np.zeros(facts.shape[1] + 2) + old

    def fits(sums: Float, k: int = K) -> tuple[Float, Float, Float]:
        gram, moment = sums[..., : (K + 1) ** 2].reshape(*sums.shape[:-1], K + 1, K + 1), sums[..., -5 - K : -4]
        count, mean, square, spread = (sums[..., j] for j in range(-4, 0))
        between = np.maximum((square - mean**2 / count) / (count - 1) - spread / count / size, 0.0)
        noise = spread / count / (size - 1)
        slope = np.where(noise > 0, between / np.where(noise > 0, noise + between, 1.0), 1.0)
        gram, moment = gram[..., :k, :k], moment[..., :k]
        return fitted(gram, moment, ridge, 0 * slope), fitted(gram, moment, ridge, slope), slope

    once = apart @ facts + old[:-2]
    # Without p and without q: how well each centre predicts q
    first, second, _ = fits((apart[:, None] & apart).astype(float) @ facts + old[:-2])
    d, gram, moment = second - first, batch.gram[:, :K, :K], batch.moment[:, :K]
    better = np.einsum("pqk,qk->pq", d, moment) - np.einsum("pqk,qkl,pql->pq", d, gram, first)
    length = np.einsum("pqk,qkl,pql->pq", d, gram, d)
    b, n = (((apart | peeking) * x).sum(axis=1, keepdims=True) for x in (better, length))
    b, n = b + old[-2], n + old[-1]
    weight = np.clip(np.divide(b, n, out=np.full((p, 1), 0.5), where=n > 0), 0.0, 1.0)
    (plain, shrunk, slope), (one, m) = fits(once), np.eye(K)[:2]
    mean, across, s = once[:, -3:-2] / once[:, -4:-3], once[:, -5 - K, None] / once[:, :1], slope[:, None]
    found = {
        "rloo": m + 0 * s, "none": 0 * plain, "james_stein_corrected": s * m + (1 - s) * mean * one,
        "energy_across_loo": across * one, "energy_regression": plain, "james_stein_centre": shrunk,
        "stacked": plain + weight * (shrunk - plain), "picked": np.where(2 * b > n, shrunk, plain),
    }  # fmt: skip
    betas = {name: np.pad(beta, ((0, 0), (0, 1))) for name, beta in found.items()}
    if batch.gram[:, K, K].any():
        betas["probe"] = fits(once, K + 1)[0]
    # What this step leaves: its sums, and how well its prompts were predicted by each other
    left = np.concatenate([facts.sum(axis=0), [np.trace(better), np.trace(length)]])
    return betas, weight[:, 0], left + old


def products(batch: Groups, size: int, ridge: float, old: Float | float = 0.0) -> tuple[list[str], Float, Float]:
    """Return estimators, their mean ⟨ḡ_k, ḡ_l⟩ over the prompts of a batch [M, M], and the state of the next step."""
    betas, _, state = baselines(batch, size, ridge, old)
    v = np.stack([np.pad(-beta, ((0, 0), (1, 0)), constant_values=1.0) for beta in betas.values()], axis=1)
    return list(betas), (v @ batch.second @ v.swapaxes(1, 2)).mean(axis=0), state


def judged(cuts: Sequence[Groups], size: int, update: int) -> tuple[list[str], Float]:
    """Return estimators and their matrix of mean products in each update of each block [B, U, M, M]."""
    ridge, prompts = RegressionOptions().ridge_for(update), len(cuts[0].stats)
    blocks = np.arange(prompts).reshape(-1, BLOCK // update, update)
    found = [[products(cut.take(at), size, ridge) for cut in cuts for at in block] for block in blocks]
    return found[0][0][0], np.array([[x for _, x, _ in block] for block in found])


def deleted(x: Float) -> Float:
    """Return the mean over blocks [B, …], and the means without each of them [1 + B, …]."""
    return np.concatenate([x.mean(axis=0, keepdims=True), (x.sum(axis=0) - x) / (len(x) - 1)])


def ratio_rows(means: Mapping[str, Float], over: Sequence[str], key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ratios of paired means [1 + B], as `deleted` has them, with their intervals."""
    pairs = [(name, base, means[name] / means[base]) for base in over for name in means if name != base]
    found = [jackknife_interval(x[0], x[1:], "mean square") for _, _, x in pairs]
    rows = zip(pairs, found, strict=True)
    return [dict(key) | {"estimator": a, "over": b} | interval_columns("ratio", one) for (a, b, _), one in rows]


def compared(cuts: Sequence[Groups], size: int, key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the mean square of every estimator over that of some others, in updates of several sizes."""
    rows = list[dict[str, Any]]()
    for update in UPDATES:
        names, found = judged(cuts, size, update)
        means = dict(zip(names, deleted(np.einsum("bumm->bm", found)).T, strict=True))
        rows += ratio_rows(means, OVER, dict(key) | {"size": size, "update": update})
    return rows


def token_parts(weight: Float, entropy: Float, limit: int) -> Float:
    """Return 1, f, h and x of every token [..., 4, T]; weights are zero outside the mask."""
    before, h = np.cumsum(weight, axis=-1) - weight, np.maximum(entropy, 0.0)
    x = np.broadcast_to(np.arange(1, weight.shape[-1] + 1) / limit, weight.shape)
    return np.stack([np.ones(weight.shape), before / (1 + before), h / (1 + h), x], axis=-2)


def world(mean: float, spread: float, link: float, random: np.random.Generator, size: int = 4) -> Groups:
    """Return the groups of a `toy_world`; ∇J is 0 there, so the mean square is the variance."""
    total, weight, entropy = toy_world(mean, spread, link, (WORLD_BLOCKS * BLOCK, size), random)
    z = token_parts(weight, entropy, WORLD_TOKENS)
    inner = np.einsum("pnt,pnat,pnbt->pnab", weight, z, z)
    return groups(total, inner, np.einsum("pnab,nm->pnamb", inner, np.eye(size)), np.zeros(total.shape))


def tree_groups(random: np.random.Generator) -> Groups:
    """Return one drawn group of 4 of each of many random policies; `second` is exact, less ‖∇J‖²."""
    found = list[tuple[Float, ...]]()
    for seed in range(FIRST_TREE, FIRST_TREE + TREES):
        tree = random_tree(GROUP, np.random.default_rng(seed))
        law, (members, prob) = regressed(tree, 4), multisets(tree, 4)
        k = random.choice(len(prob), p=prob)
        total, second = tree.total[members[k]], law.second.copy()
        second[0, 0] -= law.gradient_sq
        stats = np.array([1, total.mean(), total.mean() ** 2, total.var(ddof=1)])
        gram, moment, second = (np.pad(x, (0, 1)) for x in (law.gram[k], law.moment[k], second))
        found.append((gram, moment, stats, second))
    return Groups(*(np.stack(parts) for parts in zip(*found, strict=True)))


def states(policy: Policy, written: ScoredRollouts) -> tuple[Float, Float]:
    """Return the hidden states before the answers [P, d], and before their last tokens [P, N, d]."""
    hidden, prompts = score(policy, written.rollouts, 1.0).hidden.numpy().astype(float), len(written.rollouts.prompts)
    last = hidden[np.arange(len(hidden)), written.table.mask.sum(axis=1) - 1].reshape(prompts, -1, hidden.shape[2])
    return hidden[:: last.shape[1], 0], last


def probe_of(policy: Policy, written: ScoredRollouts) -> Float:
    """Return the ridge regression [1 + 2d] of R on a prompt's state and the mean last state of 3 other rollouts."""
    before, last = states(policy, written)
    last, y = last.reshape(2 * len(before), 4, -1), written.table.total_reward.reshape(-1, 4)
    others = (last.sum(axis=1, keepdims=True) - last) / 3
    x = np.concatenate([np.broadcast_to(before.repeat(2, axis=0)[:, None], others.shape), others], axis=2)
    fold, shares = np.arange(len(x)) // 2 % 4, 10.0 ** np.arange(-3, 3)

    def ridge(rows: Bool, share: float) -> Float:
        a, b = x[rows].reshape(-1, x.shape[-1]), y[rows].ravel()
        gram = (a - a.mean(axis=0)).T @ (a - a.mean(axis=0))
        penalised = gram + share * np.trace(gram) / len(gram) * np.eye(len(gram))
        beta = np.linalg.solve(penalised, (a - a.mean(axis=0)).T @ (b - b.mean()))
        return np.concatenate([[b.mean() - a.mean(axis=0) @ beta], beta])

    kept = [[(fold == k, ridge(fold != k, share)) for k in range(4)] for share in shares]
    errors = [sum(((y[own] - beta[0] - x[own] @ beta[1:]) ** 2).sum() for own, beta in one) for one in kept]
    return ridge(fold >= 0, shares[np.argmin(errors)])


def drawn(policy: Policy, written: ScoredRollouts, cuts: Sequence[Int], probe: Float) -> list[Groups]:
    """Return cuts of every prompt's rollouts, each the numbers [N'] of one group, with sketched scores.

    `probe` [1 + 2d] is an intercept and weights of hidden states; zeros are none.
    """
    table, prompts, (before, last) = written.table, len(written.rollouts.prompts), states(policy, written)
    weight, entropy = (np.where(table.mask, x, 0.0) for x in (table.stats.energy, table.stats.entropy))
    z = token_parts(weight, entropy, table.limit)
    inner = np.einsum("nt,nat,nbt->nab", weight, z, z).reshape(prompts, -1, 4, 4)
    sketch = group_sketches(policy, written, z.swapaxes(0, 1) * table.mask, np.arange(len(z)), BUCKETS)
    flat = sketch.swapaxes(0, 1).reshape(prompts, -1, BUCKETS).astype(float)
    whole = (flat @ flat.swapaxes(1, 2)).reshape(prompts, *(2 * (len(z) // prompts, 4)))
    found, total = list[Groups](), table.total_reward.reshape(prompts, -1)
    for cut in cuts:
        others = (last[:, cut].sum(axis=1, keepdims=True) - last[:, cut]) / (len(cut) - 1)
        said = probe[0] + (before @ probe[1 : 1 + last.shape[2]])[:, None] + others @ probe[1 + last.shape[2] :]
        found.append(groups(total[:, cut], inner[:, cut], whole[:, cut][:, :, :, cut], said))
    return found


def policy_rows(name: str) -> list[dict[str, Any]]:
    """Return every estimator on fresh prompts of a policy, and portfolios of some."""
    config, length, before = POLICIES[name]
    policy, sample = taught(config), SampleConfig(group_size=ROLLOUTS, max_new_tokens=length)
    seen = {prompt.id for first in SEEN for prompt in different_prompts(policy, first, before)}
    drawn_from = [different_prompts(policy, first, 4 * PROMPTS, among=AMONG) for first in (FIRST, LESSON)]
    fresh = [p for p in drawn_from[0] if p.id not in seen][:PROMPTS]
    lesson = [p for p in drawn_from[1] if p.id not in seen | {p.id for p in fresh}]
    probe = probe_of(policy, write(policy, lesson[: PROMPTS // 2], sample, seed=1, at_once=128))
    written = write(policy, fresh, sample, seed=2, at_once=128)
    *halves, whole = drawn(policy, written, [np.arange(8)[0::2], np.arange(8)[1::2], np.arange(8)], probe)
    key = {"of": name, "success": rounded(float(written.table.total_reward.mean()), 3)}
    return compared(halves, 4, key) + compared([whole], 8, key) + portfolio_rows(halves, key)


def portfolio_rows(cuts: Sequence[Groups], key: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return portfolios' mean squares over others'; weights are judged on blocks that they have not seen."""
    names, blocks = judged(cuts, 4, UPDATES[1])
    at, size, rows = [names.index(name) for name in MEMBERS], len(MEMBERS), list[dict[str, Any]]()
    blocks = blocks[:, :, at][:, :, :, at]
    parts = blocks.reshape(len(blocks), len(cuts), -1, size, size).swapaxes(0, 1)
    truth, number = blocks.mean(axis=1), np.arange(len(blocks))
    for count in FITTED_ON:
        fits = parts.reshape(len(cuts), -1, count // UPDATES[1], size, size).mean(axis=2)
        start = np.arange(fits.shape[1])[:, None] * count
        away = (number < start // BLOCK) | (number > (start + count - 1) // BLOCK)
        kept = [away, *(away & away[:, b : b + 1] & (number != b) for b in number)]
        values = {OVER[1]: np.broadcast_to(truth[:, 4, 4], away.shape)}
        for ridge in RIDGES:
            shrink = np.trace(fits, axis1=2, axis2=3)[..., None, None] / size * np.eye(size)
            a = np.linalg.solve(shrink if np.isinf(ridge) else fits + ridge * shrink, np.ones((size, 1)))[..., 0]
            a /= a.sum(axis=-1, keepdims=True)
            values[f"ridge {ridge:g}"] = np.einsum("csk,bkl,csl->sb", a, truth, a, optimize=True) / len(cuts)
        means = {name: np.array([value[one].mean() for one in kept]) for name, value in values.items()}
        rows += ratio_rows(means, ("ridge 0", "ridge inf", OVER[1]), dict(key) | {"fitted_on": count})
    return rows


def path_rows() -> list[dict[str, Any]]:
    """Return what a memory is worth at 8 prompts along updates of a policy, over the regression without."""
    (config, length, _), size, prompts, found, names = POLICIES["chain_sum"], 4, UPDATES[0], list[Float](), list[str]()
    policy, paid = taught(config), list[float]()
    left: dict[float, Any] = dict.fromkeys((0.0, *MEMORIES), 0.0)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3, weight_decay=0.0)
    sample = SampleConfig(prompts=prompts, group_size=size, max_new_tokens=length)
    for step in range(STEPS):
        written = write(policy, draw_prompts(policy.task, "train", PATH + step * prompts, prompts), sample, seed=step)
        (batch,), values = drawn(policy, written, [np.arange(size)], np.zeros(1 + 2 * MODEL.width)), list[Float]()
        for memory, old in left.items():
            ridge = RegressionOptions(memory=memory).ridge_for(prompts, memory > 0 and step > 0)
            names, products_of, left[memory] = products(batch, size, ridge, memory * old)
            values.append(np.diagonal(products_of))
        found.append(np.stack(values))
        table, paid = written.table, [*paid, float(written.table.total_reward.mean())]
        inputs = table.inputs(np.where(table.mask, table.stats.energy, 0.0))
        advantage = estimate(OVER[1], inputs, RegressionOptions(T_max=table.limit)).advantage
        scored = RunningPolicy(policy.model, TrainConfig()).forward(written.rollouts, keep_graph=True)
        optimizer.zero_grad()
        (-(torch.as_tensor(advantage) * scored.logprob).sum() / len(advantage)).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
    blocks = deleted(np.stack(found)[SKIPPED:].reshape(16, -1, len(left), len(names)).mean(axis=1))
    means = {f"{n}, memory {o:g}": blocks[:, k, m] for k, o in enumerate(left) for m, n in enumerate(names)}
    key = {"success": rounded(float(np.mean(paid[:16])), 3), "success_end": rounded(float(np.mean(paid[-16:])), 3)}
    return ratio_rows(means, [f"{name}, memory 0" for name in OVER], key)


def world_rows() -> list[dict[str, Any]]:
    """Return every estimator in the toy worlds and on random policies."""
    rows = list[dict[str, Any]]()
    for number, facts in enumerate([*WORLDS, None]):
        random = np.random.default_rng(1000 + number)
        cut = world(*facts, random) if facts else tree_groups(random)
        rows += compared([cut], 4, dict(zip(("mean", "spread", "link"), facts or ("random policies",), strict=False)))
    return rows


def main() -> None:
    """Measure the parts that are named, by default all, and write a table of each."""
    parts: dict[str, Any] = {name: partial(policy_rows, name) for name in POLICIES}
    parts |= {"memory": path_rows, "worlds": world_rows}
    for name in sys.argv[1:] or parts:
        write_tables(Path(__file__).parent / "centre", {name: parts[name]()})


if __name__ == "__main__":
    main()
