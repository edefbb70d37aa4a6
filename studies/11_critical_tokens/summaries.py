"""What is kept of thousands of tokens: sums of their ranks by prompt, from which correlations and shares follow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import rankdata

from otb_analysis.types import Float, Int
from studies.lib import rounded

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
    wrong = [token for token in tokens if not token["right"]]
    sums = [
        {"kind": kind} | row
        for kind, right in KINDS.items()
        for row in rank_sums([token for token in tokens if right is None or token["right"] == right])
    ]
    return {"sums": sums, "found": found_rows(wrong), "fifths": fifth_rows(wrong)}


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


def by_prompt(tokens: Sequence[Token]) -> tuple[Int, Int]:
    """Return the prompts, and where each token's stands among them."""
    prompts, place = np.unique([token["prompt"] for token in tokens], return_inverse=True)
    return prompts.astype(np.int64), place.reshape(-1)


def rank_sums(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return by prompt Σx², Σy² and Σxy of each score's rank x and its target's rank y, the effect's or its size's."""
    ranked, (prompts, place) = {name: ranks(x) for name, x in values(tokens).items()}, by_prompt(tokens)
    columns = {"tokens": np.ones(len(tokens))}
    for target, names in (("effect", SCORES), ("size", SIZES)):
        columns[f"{target}_sq"] = ranked[target] ** 2
        columns |= {f"{name}_sq": ranked[name] ** 2 for name in names}
        columns |= {f"{name}_{target}": ranked[name] * ranked[target] for name in names}
    summed = {name: np.bincount(place, x, len(prompts)) for name, x in columns.items()}
    return [
        {"prompt": int(prompt)} | {name: rounded(float(x[k])) for name, x in summed.items()}
        for k, prompt in enumerate(prompts)
    ]


def found_rows(tokens: Sequence[Token]) -> list[dict[str, int]]:
    """Return by prompt the tokens, the decisive ones, and how many of these are in the lowest tenth of each score."""
    x, (prompts, place) = values(tokens), by_prompt(tokens)
    bad = x["effect"] <= DECISIVE
    columns = {"tokens": np.ones(len(bad)), "decisive": bad}
    columns |= {name: bad & (ranks(x[name]) < LOWEST - 0.5) for name in FINDERS}
    summed = {name: np.bincount(place, value, len(prompts)).astype(int) for name, value in columns.items()}
    return [
        {"prompt": int(prompt)} | {name: int(value[k]) for name, value in summed.items()}
        for k, prompt in enumerate(prompts)
    ]


def fifth_rows(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the mean effect of each fifth of some scores, lowest first."""
    x, rows = values(tokens), list[dict[str, Any]]()
    for name in DRAWN:
        part = np.clip(((ranks(x[name]) + 0.5) * BINS).astype(int), 0, BINS - 1)
        for k in np.unique(part):
            effect = x["effect"][part == k]
            rows.append(
                {"score": name, "fifth": int(k) + 1, "tokens": len(effect), "effect": rounded(float(effect.mean()))}
            )
    return rows
