"""Rollouts per prompt by predicted p(1 − p), as in VIP, against equal groups at equal cost.

Exactly, on batches of enumerated prompts, and on pools of two small policies. Sizes are chosen once for all prompts of
a population whose groups have N rollouts on average; an update draws its prompts from it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.config import SampleConfig, WarmStartConfig
from otb_analysis.diagnostics.allocation import allocate, bernoulli_variance, vip_variance
from otb_analysis.training.runtime import Bar
from otb_analysis.types import Float, Int
from studies.lib import Cell, Study, Tables, rounded
from studies.lib.enumeration.trees import Tree, TreeSpec, random_tree
from studies.lib.policies import different_prompts, group_sketches, taught, write
from studies.lib.seeds import taught_config


@dataclass(frozen=True)
class Laws:
    """One batch of prompts; V_p(n) = a/n + b/(n(n − 1)) is the variance of prompt p's gradient given the prompt."""

    gradient: Float  # E g of each prompt [P, K]: exact, or the mean over all pairs of rollouts
    square: Float  # q = ‖E g‖² [P], without bias
    single: Float  # a [P]
    pair: Float  # b [P]


def from_rollouts(score: Float, reward: Float) -> tuple[Float, float, float, float]:
    """Return gradient, q, a and b of one prompt, unbiased: means over pairs, triples and quadruples of rollouts.

    `score` holds S_i of each rollout [N, K], or a sketch that keeps inner products in expectation; `reward` is R [N].
    """
    n = len(reward)
    # Σ_j h(i, j), linear in the scores
    rest = 0.5 * (score * (n * reward - reward.sum())[:, None] - np.outer(reward, score.sum(0)) + reward @ score)
    total, inner = rest.sum(axis=0), score @ score.T
    norm = np.diag(inner)
    same = float((0.25 * (reward[:, None] - reward) ** 2 * (norm[:, None] + norm - 2 * inner)).sum())
    once, every = float((rest**2).sum()), float(total @ total)
    pairs, triples = n * (n - 1), n * (n - 1) * (n - 2)
    square = (every - 4 * once + 2 * same) / (triples * (n - 3))
    one, two = (once - same) / triples - square, same / pairs - square
    return total / pairs, square, 4 * one, 2 * two - 4 * one


def from_tree(tree: Tree) -> tuple[Float, float, float, float]:
    """Return gradient, q, a and b of an enumerated prompt, exactly."""
    score, reward, prob = tree.score.sum(axis=1), tree.total, tree.prob
    mean, moment = prob @ score, prob @ (score * reward[:, None])
    rest = 0.5 * (score * (reward - prob @ reward)[:, None] - np.outer(reward, mean) + moment)  # E[h(i, ·) | i]
    inner = score @ score.T
    norm = np.diag(inner)
    size = 0.25 * (reward[:, None] - reward) ** 2 * (norm[:, None] + norm - 2 * inner)
    gradient = prob @ rest
    square = float(gradient @ gradient)
    one, two = float(prob @ (rest**2).sum(axis=1)) - square, float(prob @ size @ prob) - square
    return gradient, square, 4 * one, 2 * two - 4 * one


SPEC = TreeSpec(vocabulary=3, horizon=4, shared=8, end_token=True)
SUCCESS = {"even": (1.0, 1.0), "extreme": (0.3, 0.3)}
"""Beta law of the success rates of enumerated prompts: anything, or mostly near 0 and 1."""
NOISE = 3.0
"""What decides besides the skill that prompts share which completions are right, in standard deviations of it."""
WORLDS, WORLD = 60, 64
"""Populations, and enumerated prompts in each."""
SIZES, MOST = (4, 8, 16), 4
"""N, and the largest group as a multiple of it."""
EARLIER = (8, 32)
"""Earlier rollouts of each prompt that p is predicted from."""
UPDATE = 32
"""Prompts of the update whose efficiency is stated."""
TASKS = {"chain_sum": 32, "graph_path": 16}
"""Tasks of the pools, and tokens an answer may have."""
START = WarmStartConfig(success_low=0.35, success_high=0.60)
PROMPTS, POOL, BUCKETS, FIRST_PROMPT = 192, 64, 1024, 70_000_000
QUICK = {"worlds": 17, "world": 16}
QUICK_POOL = {"prompts": 20, "pool": 16, "buckets": 256}


def cells(quick: bool) -> list[Cell]:
    """Return one cell per law of success rates, and one per task."""
    shared = {"sizes": list(SIZES), "most": MOST, "earlier": list(EARLIER), "update": UPDATE}
    worlds = QUICK if quick else {"worlds": WORLDS, "world": WORLD}
    tree = {"spec": asdict(SPEC), "noise": NOISE}
    exact = [Cell(f"exact-{name}", {"law": list(law), **tree, **worlds, **shared}) for name, law in SUCCESS.items()]
    pool: dict[str, Any] = {**QUICK_POOL} if quick else {"prompts": PROMPTS, "pool": POOL, "buckets": BUCKETS}
    learner = taught_config("chain_sum", START, quick)
    pool |= {"model": asdict(learner.small_model), "start": asdict(learner.warm_start), "quick": quick, **shared}
    some = {"chain_sum": 32} if quick else TASKS
    return [*exact, *(Cell(f"pool-{task}", {"task": task, "length": length, **pool}) for task, length in some.items())]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Return efficiencies of every population of enumerated prompts, or what each prompt of a pool is worth."""
    if cell.name.startswith("pool"):
        return pooled(cell, bar)
    rows, s = [], cell.settings
    for world in range(s["worlds"]):
        rng = np.random.default_rng(world)
        trees = prompts(rng, s["world"], s["law"])
        laws = Laws(*map(np.array, zip(*map(from_tree, trees), strict=True)))
        p = np.array([tree.objective for tree in trees])
        won = {k: rng.binomial(k, p) for k in s["earlier"]}
        for size in s["sizes"]:
            row = {"law": cell.name.removeprefix("exact-"), "world": world, "size": size}
            for arm, (n, weight) in arms(laws, p, won, size).items():
                rows.append(row | {"arm": arm} | worth(laws, n, weight, s["update"] * (2 if arm == "half" else 1)))
        bar(world + 1, s["worlds"], f"{cell.name}: populations enumerated")
    return {"worlds": rows}


def prompts(rng: np.random.Generator, count: int, law: Sequence[float]) -> list[Tree]:
    """Return prompts over one set of parameters whose right completions are those that show most of one skill.

    The skill of a completion is its score along a direction that all prompts share, plus noise; as many of the best are
    right as make a success rate from the law. So the gradients of different prompts agree in part.
    """
    direction = rng.normal(size=SPEC.shared)
    direction /= np.linalg.norm(direction)
    trees = []
    while len(trees) < count:
        tree = random_tree(SPEC, rng)
        skill = tree.score.sum(axis=1) @ direction
        skill += NOISE * skill.std() * rng.normal(size=skill.shape)
        order = np.argsort(-skill)
        right = np.zeros(len(order), bool)
        right[order[: 1 + np.argmin(np.abs(np.cumsum(tree.prob[order]) - rng.beta(law[0], law[1])))]] = True
        if not right.all():
            reward = np.zeros(tree.mask.shape)
            reward[np.arange(len(order)), tree.mask.sum(axis=1) - 1] = right
            trees.append(replace(tree, reward=reward))
    return trees


def arms(laws: Laws, p: Float, won: dict[int, Int], size: int) -> dict[str, tuple[Float, Float]]:
    """Return the group size and the weight of each prompt [P] under each arm, N rollouts per prompt on average.

    `half`: groups of N/2, for an update of twice the prompts. `averaged`: the sizes of `vip8`, and an average over
    rollouts, which weighs a prompt by its size.
    """
    count, most = len(p), MOST * size
    budget, one = count * size, np.ones(count)
    sizes = {"equal": np.full(count, size), "half": np.full(count, size // 2)}
    for k, successes in won.items():
        sizes[f"vip{k}"] = allocate(vip_variance(bernoulli_variance(successes, k), most), budget)
    sizes["vip"] = allocate(vip_variance(p * (1 - p), most), budget)
    n, table = np.arange(2, most + 1), np.full((count, most + 1), np.inf)  # V_p(n), as `allocate` takes it
    table[:, 2:] = laws.single[:, None] / n + laws.pair[:, None] / (n * (n - 1))
    sizes["best"] = allocate(table, budget)
    plans = {arm: (n.astype(float), one) for arm, n in sizes.items()}
    first = min(won)
    return plans | {"averaged": (plans[f"vip{first}"][0], sizes[f"vip{first}"] / size)}


def worth(laws: Laws, n: Float, weight: Float, update: int) -> dict[str, float | None]:
    """Return variance within prompts, efficiency, relative bias and projection of an arm, exactly.

    An update of U prompts is (1/U) Σ w_p ḡ_p over prompts drawn from the population: m = E[w_p ∇J_p].
    """
    truth, mean = laws.gradient.mean(axis=0), (weight[:, None] * laws.gradient).mean(axis=0)
    within = float((weight**2 * (laws.single / n + laws.pair / (n * (n - 1)))).mean())
    between = float((weight**2 * laws.square).mean() - mean @ mean)
    true_sq, along = float(truth @ truth), float(mean @ truth)
    values = {"within": within, "between": between}
    values["efficiency"] = along**2 / (true_sq * (float(mean @ mean) + (within + between) / update))
    values |= {"bias": float(np.linalg.norm(mean - truth)) / true_sq**0.5, "projection": along / true_sq}
    return {name: rounded(value) for name, value in values.items()}


def pooled(cell: Cell, bar: Bar) -> Tables:
    """Return of each prompt what its earlier rollouts say, its size in each arm, and q, a and b from other rollouts."""
    s = cell.settings
    task, policy = s["task"], taught(taught_config(s["task"], START, s["quick"]))
    chosen = different_prompts(policy, FIRST_PROMPT, s["prompts"])
    earlier = SampleConfig(prompts=len(chosen), group_size=max(s["earlier"]), max_new_tokens=s["length"])
    past = write(policy, chosen, earlier, seed=1, at_once=64).table.total_reward.reshape(len(chosen), -1)
    bar(1, 3, f"{cell.name}: earlier rollouts")
    later = write(policy, chosen, replace(earlier, group_size=s["pool"]), seed=2, at_once=64)
    bar(2, 3, f"{cell.name}: pool")
    first, back = later.distinct()  # one backward pass per different rollout
    place = np.full(len(back), -1)
    place[first] = np.arange(len(first))
    ones = later.table.mask[None].astype(float)
    sketch = group_sketches(policy, later, ones, place, s["buckets"])[0][back].astype(float)  # of S_i = Σ_t s_{i,t}
    paid, group = later.table.total_reward, later.rollouts.group
    parts = [from_rollouts(sketch[group == p], paid[group == p]) for p in range(len(chosen))]
    laws = Laws(*map(np.array, zip(*parts, strict=True)))
    along = (laws.gradient @ laws.gradient.sum(axis=0) - (laws.gradient**2).sum(axis=1)) / (len(chosen) - 1)
    values, rows = {"q": laws.square, "a": laws.single, "b": laws.pair, "along": along}, []
    for p in range(len(chosen)):
        row = {"task": task, "prompt": p, "success": float(paid[group == p].mean())}
        row |= {f"won{k}": float(past[p, :k].sum()) for k in s["earlier"]}
        rows.append(row | {name: rounded(x[p]) for name, x in values.items()})
    bar(3, 3, f"{cell.name}: measured")
    return {"prompts": rows}


STUDY = Study(
    title="Allocation of rollouts",
    question="Does it pay to give prompts rollouts by predicted p(1 − p), as VIP does, instead of equal groups at the "
    "same cost?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
