"""Predicted and realised gain of every arm over `rloo`: points of the scatter, and how well they agree.

With curvature κ alike in all directions a step ηĝ gains η⟨ĝ, ∇J⟩ − ½η²κ‖ĝ‖². Its mean is largest at
η* = ⟨m, ∇J⟩/(κ E‖ĝ‖²), and there it is ⟨m, ∇J⟩²/(2κ E‖ĝ‖²) = efficiency·‖∇J‖²/(2κ): at its best length an arm's gain
over that of `rloo` is its efficiency over that of `rloo`. Under a preconditioner D the same holds where the curvature
is κD⁻¹, with norms and products in that metric: ⟨x, y⟩ = xᵀDy for the gradients x and y.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.types import Float
from studies.lib import rounded

from .checkpoint import ARMS, UNBIASED, clip_factor
from .judged import LINES, STEPS

GRID = tuple(float(x) for x in np.round(np.linspace(0.1, 2.0, 20), 2))
"""Lengths among which an arm's best one is chosen, times the pilot's, where gains were measured.

Between and beyond, a batch's gain is the quadratic through its slope at 0 and that measured gain.
"""
BEST = ("sgd", "sgd_clipped", "adamw", "adamw_clipped")
"""Optimisers that take each arm's best length; a gradient is clipped batch by batch, then the length is tuned."""
OPTIMISERS = (*BEST, *STEPS)
KNOWN = ("sgd_known", "adamw_known")
"""The best lengths again, with the proof that unbiased arms have one slope: less noise, and no part of `all`."""
LEAST_ESS = 0.5
GROUPS = {"slope known": KNOWN, "best length": BEST, "AdamW's own step": STEPS, "all": OPTIMISERS}


@dataclass(frozen=True)
class Metric:
    """What efficiency is made of in one metric; made by `of_policy` and `of_process`."""

    power: Float  # ‖ĝ‖² [A, B]
    cross: Float | None = None  # ⟨ĝ_a, ĝ_a'⟩ of all batches [A, A, B, B], where ∇J is estimated
    along: Float | None = None  # ⟨ĝ, ∇J⟩ [A, B] where ∇J is known
    truth: float = 0.0  # ‖∇J‖² where it is known

    def efficiency(self, weight: Float) -> Float:
        """Return the efficiency of one batch of every arm [A], with weights [B] of the batches.

        ⟨m, ∇J⟩²/(‖∇J‖² E‖ĝ‖²). Where ∇J is not known, products are over different batches, ∇J is the mean of the
        proved unbiased arms, and their own ⟨m, ∇J⟩ is ‖∇J‖².
        """
        power = self.power @ weight / weight.sum()
        if self.along is not None:
            along, truth = self.along @ weight / weight.sum(), self.truth
        else:
            assert self.cross is not None
            pairs = np.outer(weight, weight)
            np.fill_diagonal(pairs, 0.0)
            inner = np.einsum("acbd,bd->ac", self.cross, pairs, optimize=True) / pairs.sum()
            known = [ARMS.index(name) for name in UNBIASED]
            truth, along = inner[np.ix_(known, known)].mean(), inner[:, known].mean(axis=1)
        along = np.where(np.isin(ARMS, UNBIASED), truth, along)
        return along**2 / (truth * power)


@dataclass(frozen=True)
class Judged:
    """Gains of a checkpoint's batches under every optimiser, and the metrics of the predictions."""

    name: str
    kind: str  # model or derailment
    gains: Mapping[str, Float]  # Optimiser → [A, B, G], G lengths in the order of size
    allowed: Mapping[str, np.ndarray]  # Optimiser → lengths with enough ESS [A, G]
    metrics: Mapping[str, Metric]  # sgd and adamw

    def over_rloo(self, optimiser: str, weight: Float) -> tuple[Float, Float, Float, Float]:
        """Return predicted and realised ratios to `rloo` [A], gains [A], and the realised ratios of two halves [2, A].

        Efficiency and the best length are estimated on every second batch, and the gain on the others; both ways.
        """
        odd = np.arange(len(weight)) % 2 == 1
        gains, halves = self.gains[optimiser], []
        for fitted in (odd, ~odd):
            first, second = np.where(fitted, weight, 0.0), np.where(fitted, 0.0, weight)
            efficiency = self.metrics[optimiser.split("_")[0]].efficiency(first)
            chosen = np.where(self.allowed[optimiser], np.einsum("abg,b->ag", gains, first), -np.inf).argmax(axis=1)
            gain = np.einsum("ab,b->a", gains[np.arange(len(ARMS)), :, chosen], second) / second.sum()
            halves.append((efficiency, gain))
        predicted = np.mean([e / e[0] for e, _ in halves], axis=0)
        gain = np.mean([g for _, g in halves], axis=0)
        return predicted, gain / gain[0], gain, np.stack([g / g[0] for _, g in halves])


def of_policy(name: str, products: Mapping[str, Float], parts: Sequence[Mapping[str, Float]], best: Float) -> Judged:
    """Put together what cells measured of a checkpoint; `best` are the pilot's lengths [2, A]."""
    keys = [key for key in parts[0] if "sampled" not in key]
    joined = {key: np.concatenate([part[key] for part in parts], axis=-1) for key in keys}
    gains, allowed, unbiased = dict[str, Float](), dict[str, np.ndarray](), np.isin(ARMS, UNBIASED)
    factor = clip_factor(joined["norm"])
    one, clipped = np.ones_like(factor), factor / factor.mean()
    for m, line in enumerate(LINES):
        slope, length = joined[f"{line}_slope"], best[m][:, None]
        bend = (joined[f"{line}_gain"] - length * slope) / length**2
        lost = 1 - joined[f"{line}_ess"].mean(axis=1)  # it grows with the square of the length
        # Unbiased arms have one slope in expectation: with their mean in its place only curvature tells them apart.
        common = np.where(unbiased[:, None], slope[unbiased].mean(axis=0), slope)
        for kind, share, along in (("", one, slope), ("_clipped", clipped, slope), ("_known", one, common)):
            eta = share[..., None] * (length[..., None] * np.array(GRID))
            gains[line + kind] = eta * (along[..., None] + eta * bend[..., None])
            allowed[line + kind] = lost[:, None] * np.array(GRID) ** 2 <= 1 - LEAST_ESS
    for step in STEPS:
        gains[step] = (joined[step] - joined[f"{step}_alone"])[..., None]
        allowed[step] = np.ones((len(ARMS), 1), bool)
    metrics = {line: Metric(np.einsum("aabb->ab", products[line]), products[line]) for line in LINES}
    return Judged(name, "model", gains, allowed, metrics)


def check_rows(parts: Sequence[Mapping[str, Float]]) -> list[dict[str, Any]]:
    """Return the mean gain of steps by sampling anew, with its standard error over prompts, and by importance weights.

    Of SGD at the pilot's best length, and of AdamW's clipped step; the mean over all arms and the sampled batches. The
    ESS is the least of all arms' means over batches.
    """
    change = np.mean([part["sampled"] for part in parts], axis=0)
    rows = []
    for i, (name, gain) in enumerate((("sgd", "sgd_gain"), (STEPS[0], STEPS[0]))):
        weighted = np.mean([part[gain][:, : part["n_sampled"]] for part in parts])
        error = float(change[i].std(ddof=1) / np.sqrt(change.shape[1]))
        row = {"optimiser": name, "sampled": rounded(float(change[i].mean())), "error": rounded(error)}
        ess = np.concatenate([part[f"{name}_ess"] for part in parts], axis=1)
        rows.append(row | {"weighted": rounded(float(weighted)), "ess": rounded(float(ess.mean(axis=1).min()))})
    return rows


def of_process(name: str, found: Mapping[str, Any]) -> Judged:
    """Put together what a cell measured of the derailment process."""
    gains, metrics = {key: found[key] for key in OPTIMISERS if key in found}, dict[str, Metric]()
    for line in LINES:
        power, along, truth = (found[f"{line}_{of}"] for of in ("power", "along", "truth"))
        metrics[line] = Metric(power, along=along, truth=float(truth))
    return Judged(name, "derailment", gains, {line: found[f"{line}_ess"] >= LEAST_ESS for line in gains}, metrics)


def tables(judged: Sequence[Judged], replicates: int, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Return the points with intervals over batches, and correlations with those over checkpoints and batches."""
    rng = np.random.default_rng(seed)  # Bayesian bootstrap: no batch has weight 0, so no product of one with itself
    whole, again = dict[str, dict[str, Any]](), dict[str, list[dict[str, Any]]]()
    for one in judged:
        batches = one.metrics["sgd"].power.shape[1]
        weights = [np.ones(batches), *(rng.exponential(size=batches) for _ in range(replicates))]
        whole[one.name], *again[one.name] = ({k: one.over_rloo(k, weight) for k in one.gains} for weight in weights)
    points = list[dict[str, Any]]()
    for one in judged:  # with percentile intervals over its batches
        for optimiser, found in whole[one.name].items():
            for a, arm in enumerate(ARMS):
                row: dict[str, Any] = {"policy": one.name, "kind": one.kind, "optimiser": optimiser, "arm": arm}
                for k, name in enumerate(("predicted", "realised", "gain")):
                    low, high = np.percentile([draw[optimiser][k][a] for draw in again[one.name]], (2.5, 97.5))
                    row |= {name: rounded(found[k][a]), f"{name}_low": rounded(low), f"{name}_high": rounded(high)}
                points.append(row)
    rows = []
    for kind in dict.fromkeys(one.kind for one in judged):
        names = [one.name for one in judged if one.kind == kind]
        draws = rng.integers(len(names), size=(replicates, len(names)))
        for group, optimisers in ({name: (name,) for name in (*OPTIMISERS, *KNOWN)} | GROUPS).items():
            named = [name for name in optimisers if name in whole[names[0]]]
            if not named:
                continue
            estimate = agreement([whole[name] for name in names], named)
            anew = [agreement([again[names[k]][i] for k in chosen], named) for i, chosen in enumerate(draws)]
            low, high = np.nanpercentile(np.array([one["correlation"] for one in anew], float), (2.5, 97.5))
            ends = {"correlation_low": rounded(low), "correlation_high": rounded(high)}
            rows.append({"kind": kind, "optimiser": group, "checkpoints": len(names)} | estimate | ends)
    return {"points": points, "correlations": rows}


def agreement(found: Sequence[Mapping[str, Any]], optimisers: Sequence[str]) -> dict[str, Any]:
    """Return the rank correlation of predicted and realised ratios over all points but `rloo`.

    Beside it the rank correlation of realised ratios from one half of the batches with those from the other, which is
    what noise leaves, and the share of points that fall on the predicted side of `rloo`.
    """
    each = [np.stack([one[0], one[1], *one[3]])[:, 1:] for one in (of[name] for of in found for name in optimisers)]
    x, y, one, two = np.concatenate(each, axis=1)
    ranks = {"correlation": rank_correlation(x, y), "repeated": rank_correlation(one, two)}
    return {"points": len(x), **ranks, "same_side": rounded(float(np.mean((x > 1) == (y > 1))))}


def rank_correlation(x: Float, y: Float) -> float | None:
    return rounded(float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1]))
