"""Advantages of every entry on one cut of a pool, and the mean gradients of its groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, estimate, with_limit
from otb_analysis.objectives.shaping import add_last
from otb_analysis.statistics import Partition
from otb_analysis.types import Bool, Float, Int
from studies.lib.pools import Pool, cuts_of

ALONE = (
    *("none", "group_mean", "grpo", "rloo", "opo", "opo_loo", "classic_optimal", "classic_optimal_loo"),
    *("sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "otb_carry", "otb_carry_loo", "token_optimal"),
    *("token_optimal_loo", "energy_ema", "energy_ema_loo", "tempo", "tempo_loo", "value"),
)
"""Entries that look at one prompt at a time. `trloo`, `otb_turn` and `tvm` are `rloo`, `otb` and `value` here."""
HALF = "blend_otb_regression"
ACROSS = ("batch_mean", "batch_mean_loo", "james_stein", "energy_across_loo", "energy_regression", HALF)
"""Entries that look at the other prompts: in batches of as many prompts as the update that is quoted."""
EXACT = ("sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "token_optimal", "token_optimal_loo")
"""Entries measured with exact norms, too; all others that take energies have the proxy, as published."""
OFFSET = ("none", "otb", "otb_loo", "token_optimal", "token_optimal_loo", "energy_ema", "energy_ema_loo", HALF)
"""Entries that rewards of ±1 change, which are rewards of 0 and 1 less ½, doubled: those whose baseline can be 0."""
UPDATES = (8, 32, 128, 1024)
"""Prompts of the update that efficiency is stated for; the second heads the page."""
ASKED_SIZES = (4, 8)
"""Group sizes of the study's question; prompts that the pilot answered both ways are also measured alone there."""


class Way(NamedTuple):
    """One way to centre."""

    estimator: str
    source: str  # Of the energies
    rewards: str = "0/1"
    prompts: int = 0  # Of the batch that it looks at; 0 where it looks at its own prompt only
    mixed: bool = False  # Whether all of these are prompts that the pilot answered both ways


@dataclass(frozen=True)
class Gradients:
    """Gradients of groups, averaged over the groups of a prompt and over cuts."""

    ways: tuple[Way, ...]
    mean: NDArray[np.float32]  # [M, P, K]
    power: Float  # Mean of ‖g‖² over groups [M, P]
    apart: Float  # Mean of ⟨g_a, g_b⟩ over disjoint groups of the prompt [M, P]; NaN where there is one
    together: Float  # Mean of ⟨g_p, g_q⟩ over prompts p ≠ q of one update [M]; NaN where that was not measured


def gradients(pool: Pool, size: int, shuffles: int, mixed: Bool | None) -> Gradients:
    """Return the gradients of groups of one size under every way, on the same cuts.

    Args:
        mixed: Which prompts the pilot answered both ways [P]; None where ways are not to be measured on them alone.
    """
    total, ways = None, tuple[Way, ...]()
    for number in range(shuffles):
        cut = cuts_of(pool.inputs.group, size, 1, 1000 * size + number)[0]
        advantages, updates = every_way(pool, cut, mixed, np.random.default_rng(number))
        ways, sums = tuple(advantages), group_sums(pool, cut, advantages, updates)
        if total is None:
            total = sums
        else:  # in place: mean gradients of all ways are a gigabyte
            for whole, part in zip(total, sums, strict=True):
                whole += part
    assert total is not None
    for whole in total:
        whole /= shuffles
    return Gradients(ways, *total)


def every_way(
    pool: Pool, cut: Partition, mixed: Bool | None, random: np.random.Generator
) -> tuple[dict[Way, Float], dict[tuple[int, bool], Int]]:
    """Return the advantages [N, T] of every way on a cut, and of the updates the one of each group, −1 for none [G].

    Updates are numbered by their size and whether they are of the pilot's choice alone.
    """
    exact = replace(pool.inputs, group=cut.group)
    proxy = replace(exact, energy=pool.proxy)
    shifted = replace(proxy, reward=add_last(proxy.reward, proxy.mask, np.full(len(proxy.mask), -0.5)))
    ways, updates = dict[Way, Float](), dict[tuple[int, bool], Int]()
    sources = {name: "proxy" if ESTIMATORS[name].reads_energy else "none" for name in (*ALONE, *ACROSS[:-1])}
    for name in ALONE:
        source = sources[name]
        ways[Way(name, source)] = estimate(name, proxy).advantage
        if name in EXACT:
            ways[Way(name, "exact")] = estimate(name, exact).advantage
        if name in OFFSET:
            ways[Way(name, source, "±1")] = estimate(name, shifted).advantage
    prompts = int(cut.prompt.max()) + 1
    for only in (False, True) if mixed is not None else (False,):
        chosen = np.flatnonzero(mixed) if only and mixed is not None else np.arange(prompts)
        for update in UPDATES:
            place = [random.permutation(chosen) for _ in range(len(cut.prompt) // prompts)]
            updates[update, only] = whole_updates(place, update, prompts)
            for name in ACROSS[:-1]:
                way = Way(name, sources[name], "0/1", update, only)
                ways[way] = in_updates(name, proxy, cut, place, update, pool)
            regression = ways[Way("energy_regression", "proxy", "0/1", update, only)]  # a constant leaves it alone
            for rewards in ("0/1", "±1"):
                otb = ways[Way("otb", "proxy", rewards)]
                ways[Way(HALF, "proxy", rewards, update, only)] = 0.5 * otb + 0.5 * regression
    return ways, updates


def whole_updates(place: Sequence[Int], update: int, prompts: int) -> Int:
    """Return the update of every group [G], numbered from 0; −1 where it is in none of full size of its own."""
    number, count = np.full((prompts, len(place)), -1), 0
    for turn, order in enumerate(place):
        full = len(order) // update
        number[order[: full * update], turn] = count + np.arange(full * update) // update
        count += full
    return number.ravel()


def in_updates(
    name: str, inputs: EstimatorInputs, cut: Partition, place: Sequence[Int], update: int, pool: Pool
) -> Float:
    """Return advantages [N, T] of an entry that sees updates of so many prompts, a group of each; 0 of other prompts.

    The k-th groups of the prompts are put into updates in the order of `place[k]`. Where prompts are left over, the
    first ones join them once more, so that no update is smaller than stated, unless there are fewer prompts.
    """
    options = with_limit(name, None, pool.written.table.limit)
    needs = ("reward", "mask", *ESTIMATORS[name].needed(options))
    rows = np.argsort(cut.group, kind="stable").reshape(len(cut.prompt), -1)
    turns, size, out = len(place), rows.shape[1], np.zeros(inputs.mask.shape)
    for turn, order in enumerate(place):
        for start in range(0, len(order), update):
            members = order[start : start + update]
            seen = np.concatenate([members, order[: min(update, len(order)) - len(members)]])
            at = rows[seen * turns + turn].ravel()
            part: dict[str, Any] = {need: getattr(inputs, need)[at] for need in needs}
            estimates = estimate(name, EstimatorInputs(**part, group=np.repeat(np.arange(len(seen)), size)), options)
            count = len(members) * size
            out[at[:count]] = estimates.advantage[:count]
    return out


def group_sums(
    pool: Pool, cut: Partition, advantages: dict[Way, Float], updates: dict[tuple[int, bool], Int]
) -> tuple[NDArray[np.float32], Float, Float, Float]:
    """Return mean gradients [M, P, K], ‖g‖² and ⟨g_a, g_b⟩ of every prompt's groups [M, P], ⟨g_p, g_q⟩ of updates [M].

    g_a = (1/N) Σ_{i in a} Σ_t A_{i,t} s_{i,t}: one matrix product for every group, over its rollouts and tokens.
    """
    weights = np.stack([advantage.astype(np.float32) for advantage in advantages.values()])
    rows = np.argsort(cut.group, kind="stable").reshape(len(cut.prompt), -1)
    prompts, size = int(cut.prompt.max()) + 1, rows.shape[1]
    mean = np.empty((len(weights), prompts, pool.sketch.shape[1]), np.float32)
    power, apart = np.empty((2, len(weights), prompts))
    whole = {m: UpdateSums(updates[way[3:]], pool.sketch.shape[1]) for m, way in enumerate(advantages) if way.prompts}
    for p in range(prompts):
        groups = np.flatnonzero(cut.prompt == p)
        mine = rows[groups]  # [G, N]
        features = pool.features(mine.ravel())
        width = features.shape[1]
        factors = weights[:, mine, :width].reshape(len(weights), len(mine), size * width).transpose(1, 0, 2)
        g = factors @ features.reshape(len(mine), size * width, -1) / np.float32(size)  # [G, M, K]
        mean[:, p] = g.mean(axis=0)
        squares = np.einsum("gmk,gmk->m", g, g, dtype=float)
        power[:, p] = squares / len(mine)
        pairs = len(mine) * (len(mine) - 1)
        every = len(mine) ** 2 * np.einsum("mk,mk->m", mean[:, p], mean[:, p], dtype=float)
        apart[:, p] = (every - squares) / pairs if pairs else np.nan
        for m, sums in whole.items():
            sums.add(groups, g[:, m])
    together = [whole[m].mean_product() if m in whole else np.nan for m in range(len(weights))]
    return mean, power, apart, np.array(together)


class UpdateSums:
    """Sums of the group gradients of every update, and of their squares."""

    def __init__(self, update: Int, dim: int) -> None:
        self.update, self.count = update, int(update.max(initial=-1)) + 1
        self.total, self.squares = np.zeros((self.count, dim), np.float32), 0.0

    def add(self, groups: Int, g: NDArray[np.float32]) -> None:
        """Add the gradients [G, K] of different groups of one prompt: each is in another update, or in none."""
        used = self.update[groups] >= 0
        self.total[self.update[groups[used]]] += g[used]
        self.squares += float(np.einsum("gk,gk->", g[used], g[used], dtype=float))

    def mean_product(self) -> float:
        """Return the mean of ⟨g_p, g_q⟩ over prompts p ≠ q of one update."""
        if not self.count:
            return np.nan
        size = int((self.update >= 0).sum()) // self.count
        products = float(np.einsum("uk,uk->", self.total, self.total, dtype=float)) - self.squares
        return products / (self.count * size * (size - 1))
