"""Every entry against loops that spell the formula out, over ragged groups, gaps, ratios and dense rewards."""

from math import prod, sqrt
from statistics import median

import numpy as np
import pytest

from otb_analysis.estimators import ESTIMATORS, DecayOptions, TailOptions, available, estimate
from otb_analysis.types import EstimatorInputs

TREES = ("tempo", "tempo_loo", "trloo")
REMEMBERED = ("krpo", "ebpo", "ebpo_loo", "dbb", "dbb_loo", "evpo")
PUBLISHED = ("maxrl", "mc_grpo", "qae", "gpg", "reinforce_plus_plus_baseline")
ENERGY = {"otb": "W", "otb_turn": "W", "token_optimal": "w", "energy_ema": "decayed"}


def rollout(inputs, i):
    """What one rollout is, as lists over its policy tokens."""
    tokens = np.flatnonzero(inputs.mask[i])
    rewards = [float(inputs.reward[i, t]) for t in tokens]
    w = [0.0 if inputs.energy is None else float(inputs.energy[i, t]) for t in tokens]
    if inputs.ratio is not None:
        w = [float(inputs.ratio[i, t]) ** 2 * x for t, x in zip(tokens, w, strict=True)]
    return {
        "tokens": tokens,
        "G": [sum(rewards[k:]) for k in range(len(rewards))],
        "R": sum(rewards),
        "w": w,
        "W": [sum(w[: k + 1]) for k in range(len(w))],
        "decayed": [sum(0.9 ** (k - j) * w[j] for j in range(k + 1)) for k in range(len(w))],
        "norm": float(inputs.rollout_norm_sq[i]) if len(tokens) else 0.0,
        "rho": 1.0 if inputs.ratio is None else prod(float(inputs.ratio[i, t]) for t in tokens),
        "turn": [int(inputs.turn[i, t]) for t in tokens],
        "y": [int(inputs.token_id[i, t]) for t in tokens],
        "H": [float(inputs.entropy[i, t]) for t in tokens],
        "group": int(inputs.group[i]),
    }


def mean(values, weights):
    """Weighted mean, plain when all weights are zero, and whether it was."""
    total = sum(weights)
    if total == 0:
        return (sum(values) / len(values) if values else 0.0), True
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total, False


def twin(name, inputs, tail):
    shape = inputs.mask.shape
    baseline, advantage, fallback = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    everyone = [rollout(inputs, i) for i in range(shape[0])]
    for i, me in enumerate(everyone):
        pool = [
            (j, r)
            for j, r in enumerate(everyone)
            if len(r["tokens"]) and (inputs.group[j] == inputs.group[i] or name.startswith("batch_mean"))
        ]
        others = [r for j, r in pool if j != i]
        peers = others if name.endswith("_loo") or name == "rloo" else [r for _, r in pool]
        for k, t in enumerate(me["tokens"]):
            if name == "blend_otb_regression":
                own, fell = baseline_of("otb", inputs, (i, t, k), me, peers, others, "own_return")
                other, undefined = regressed(k, me, others, everyone)
                b, fell = (own + other) / 2, fell or undefined
            elif name in TREES:
                b, fell = tree_baseline(name, k, me, peers, others)
            elif name.startswith("james_stein"):
                b, fell = (shrunk if name == "james_stein" else shrunk_by_noise)(me, others, everyone)
            elif name == "energy_across_loo":
                b, fell = across(me, others, everyone)
            elif name in (*PUBLISHED, *REMEMBERED):
                b, fell = 0.0, False
            elif name == "energy_regression":
                b, fell = regressed(k, me, others, everyone)
            else:
                b, fell = baseline_of(name.removesuffix("_loo"), inputs, (i, t, k), me, peers, others, tail)
            scale = 1.0
            if name in ("grpo", "tempo"):
                returns = [r["R"] for r in peers]
                std = np.std(returns, ddof=int(name == "grpo")) if others else 0.0
                fell = not others or max(returns) - min(returns) < 1e-9
                scale = 0.0 if fell else 1 / (std + 1e-6 * (name == "grpo"))
            if name in REMEMBERED:
                b, scale, fell = remembered(name, inputs, (i, t), me, [r for _, r in pool], everyone)
            elif name in PUBLISHED:
                b, scale, fell = published(name, me, [r for _, r in pool], everyone)
            baseline[i, t], advantage[i, t], fallback[i, t] = b, (me["G"][k] - b) * scale, fell
    return baseline, advantage, fallback


def tree_baseline(name, k, me, peers, others):
    if not others:
        return 0.0, True
    if name == "trloo":
        same = [r["G"][r["turn"].index(me["turn"][k])] for r in others if me["turn"][k] in r["turn"]]
        return (sum(same) / len(same), False) if same else (0.0, True)

    def through(rollouts, depth):
        paid = [r["R"] for r in rollouts if r["y"][:depth] == me["y"][:depth] and len(r["y"]) >= depth]
        return sum(paid) / len(paid) if paid else None

    if name == "tempo":
        return through(peers, 0) + through(peers, k) - through(peers, k + 1), False
    values = [through(others, depth) for depth in range(k + 1)]
    return [v for v in values if v is not None][-1], values[-1] is None


def shrunk(me, others, everyone):
    if not others:
        return 0.0, True
    own = sum(r["R"] for r in others) / len(others)
    labels = {r["group"] for r in everyone if len(r["tokens"])} - {me["group"]}
    if not labels:
        return own, True
    paid = [[r["R"] for r in everyone if r["group"] == q and len(r["tokens"])] for q in sorted(labels)]
    noise = [np.var(p, ddof=1) / len(p) for p in paid if len(p) > 1]
    v_sq, s_sq = np.mean(noise) if noise else 0.0, np.var([np.mean(p) for p in paid])
    shrinkage = v_sq / (v_sq + s_sq + 1e-6)
    return (1 - shrinkage) * own + shrinkage * np.mean([np.mean(p) for p in paid]), False


def shrunk_by_noise(me, others, everyone):
    if not others:
        return 0.0, True
    own = sum(r["R"] for r in others) / len(others)
    labels = {r["group"] for r in everyone if len(r["tokens"])} - {me["group"]}
    paid = [[r["R"] for r in everyone if r["group"] == q and len(r["tokens"])] for q in sorted(labels)]
    several = [p for p in paid if len(p) > 1]
    if len(paid) < 2 or not several:
        return own, True
    spread = np.var([np.mean(p) for p in paid], ddof=1) - np.mean([np.var(p, ddof=1) / len(p) for p in several])
    noise = np.mean([np.var(p, ddof=1) for p in several]) / len(others)
    shrinkage = noise / (noise + max(spread, 0.0)) if noise else 0.0
    return (1 - shrinkage) * own + shrinkage * np.mean([np.mean(p) for p in paid]), False


def published(name, me, group, everyone):
    """B, scale and whether it is a fallback."""
    paid = sorted(r["R"] for r in group)
    n, alone = len(paid), len(paid) == 1
    centre = 0.0 if alone else sum(paid) / n
    batch = [r for r in everyone if len(r["tokens"])]
    if name == "maxrl":
        return (centre, 0.0, True) if alone or abs(centre) < 1e-12 else (centre, 1 / centre, False)
    if name == "mc_grpo":
        return (0.0, 1.0, True) if alone else (median(paid), n / (n - 1) if n % 2 else 1.0, False)
    if name == "qae":
        return (0.0, 1.0, True) if alone else (min(x for x in paid if sum(y <= x for y in paid) >= 0.4 * n), 1.0, False)
    if name == "gpg":
        return centre, len(batch) / max(sum(r["R"] != 0 for r in batch), 1), alone
    means = {}
    for r in batch:
        means.setdefault(r["group"], []).append(r["R"])
    x = [r["R"] - (np.mean(means[r["group"]]) if len(means[r["group"]]) > 1 else 0.0) for r in batch for _ in r["G"]]
    return centre + np.mean(x), 1 / np.sqrt(np.var(x, ddof=1) + 1e-8), alone


def remembered(name, inputs, place, me, group, everyone):
    """B, scale and whether it is a fallback, at a first step."""
    batch = [r for r in everyone if len(r["tokens"])]
    paid, n = [r["R"] for r in group], len(group)
    if name == "krpo":
        x, p = 0.0, 1.0
        for r in group:
            p += 1e-5
            gain = p / (p + 1e-2)
            x, p = x + gain * (r["R"] - x), p * (1 - gain)
            if r is me:
                return (0.0, 1.0, True) if n == 1 else (x, 1 / (sqrt(p) + 1e-8), False)
    if name == "ebpo_loo":
        return (0.0, 1.0, True) if n == 1 else ((sum(paid) - me["R"]) / (n - 1), 1.0, False)
    if name == "dbb":
        mean = (0.75 + sum(paid)) / (1.5 + n)
        return (mean, 1 / sqrt(mean * (1 - mean)), False) if 0 < mean < 1 else (mean, 0.0, True)
    if name == "dbb_loo":
        return (0.75 + sum(paid) - me["R"]) / (1.5 + n - 1), 1.0, False
    if name == "evpo":
        token = [
            (g, float(inputs.value[i, t]))
            for i, r in enumerate(everyone)
            for t, g in zip(r["tokens"], r["G"], strict=True)
        ]
        if np.var([g - v for g, v in token]) < np.var([g for g, _ in token]):
            return float(inputs.value[place]), 1.0, False
        return float(np.mean([r["R"] for r in batch])), 1.0, False
    groups = {}
    for r in batch:
        groups.setdefault(r["group"], []).append(r["R"])
    every = [r["R"] for r in batch]
    sigma_sq, tau_sq = np.var(every, ddof=1), np.var([np.mean(g) for g in groups.values()], ddof=1)

    def centre(of):
        share = sigma_sq / len(of) / (sigma_sq / len(of) + tau_sq)
        return (1 - share) * np.mean(of) + share * np.mean(every) if len(of) > 1 else 0.0

    raw = [r["R"] - centre(groups[r["group"]]) for r in batch]
    return centre(paid) + np.mean(raw), 1 / (np.std(raw, ddof=1) + 1e-8), n == 1


def across(me, others, everyone):
    elsewhere = [r for r in everyone if len(r["tokens"]) and r["group"] != me["group"]]
    if not elsewhere:
        return (sum(r["R"] for r in others) / len(others) if others else 0.0), True
    return mean([r["R"] for r in elsewhere], [r["W"][-1] for r in elsewhere])


def features(k, r, everyone, origin=0.0):
    """φ of a rollout's k-th token without x, m counted from some origin; None for a rollout alone in its group."""
    same = [q["R"] for q in everyone if q is not r and q["group"] == r["group"] and len(q["tokens"])]
    if not same:
        return None
    m, u, h = sum(same) / len(same) - origin, sum(r["w"][:k]), r["H"][k]
    f, h = u / (1 + u), h / (1 + h)
    return [1.0, m, f, m * f, h, m * h]


def regressed(k, me, others, everyone, ridge=10.0):
    """One least-squares problem per token, with returns and m counted from their mean and the penalty as rows."""
    tokens = [
        (w, j, r)
        for r in everyone
        if r["group"] != me["group"]
        for j, w in enumerate(r["w"])
        if w > 0 and features(j, r, everyone)
    ]
    if features(k, me, everyone) is None or not tokens:
        return across(me, others, everyone)[0], True
    weight, y = (np.array(part) for part in zip(*((w, r["R"]) for w, _, r in tokens), strict=True))
    origin = float(weight @ y / weight.sum())
    x = np.array([features(j, r, everyone, origin) for _, j, r in tokens])
    root = np.sqrt(weight)[:, None]
    penalty = np.sqrt(ridge * (weight[:, None] * x**2).sum(axis=0))[1:]
    design = np.concatenate([root * x, np.diag(penalty, k=1)[:-1]])
    target = np.concatenate([root[:, 0] * (y - origin), np.zeros(len(penalty))])
    beta = np.linalg.lstsq(design, target, rcond=None)[0]
    return origin + float(np.dot(features(k, me, everyone, origin), beta)), False


def baseline_of(name, inputs, place, me, peers, others, tail):
    i, t, k = place
    if name == "none":
        return 0.0, False
    if name in ("value", "tvm", "position_optimal"):
        return float((inputs.position_baseline if name == "position_optimal" else inputs.value)[i, t]), False
    if not others:
        return 0.0, True
    if name in ENERGY:
        if not any(len(r["G"]) > k for r in others):
            finished = mean([r["R"] for r in others], [r["W"][-1] for r in others])[0]
            return {"own_return": 0.0, "zero": me["G"][k], "group": finished}[tail], True
        alive = [r for r in peers if len(r["G"]) > k]
        return mean([r["G"][k] for r in alive], [r[ENERGY[name]][k] for r in alive])
    if name == "otb_carry":
        carried = [r["G"][k] if len(r["G"]) > k else r["R"] for r in peers]
        return mean(carried, [r["W"][min(k, len(r["W"]) - 1)] for r in peers])
    weight = {
        "opo": lambda r: len(r["G"]),
        "length_power": lambda r: sqrt(len(r["G"])),
        "sequence_optimal": lambda r: r["W"][-1],
        "classic_optimal": lambda r: r["norm"],
        "opob": lambda r: r["rho"] ** 2 * r["norm"],
    }.get(name, lambda r: 1.0)
    return mean([r["R"] for r in peers], [weight(r) for r in peers])


def options_for(name, tail):
    kind = ESTIMATORS[name].options
    return kind(tail=tail) if kind in (TailOptions, DecayOptions) else kind()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("tail", ["own_return", "group", "zero"])
def test_estimate_equals_the_loops(name, tail, make_inputs):
    options = options_for(name, tail)
    for seed in range(12):
        inputs = make_inputs(seed, gaps=seed % 2 == 1 and ESTIMATORS[name].takes_gaps, dense=seed % 3 > 0)
        if seed % 4 == 0 and "ratio" not in ESTIMATORS[name].needs:
            inputs = EstimatorInputs(**{**vars(inputs), "ratio": None})
        assert name in available(inputs)
        got = estimate(name, inputs, options)
        baseline, advantage, fallback = twin(name, inputs, tail)
        np.testing.assert_array_equal(got.fallback, fallback)
        np.testing.assert_allclose(got.baseline, baseline, atol=1e-10)
        np.testing.assert_allclose(got.advantage, advantage, atol=1e-10)
