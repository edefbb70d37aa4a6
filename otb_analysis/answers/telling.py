"""Which of a run's newest rollouts are worth reading."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.figures.styles import number
from otb_analysis.store import RunStore
from otb_analysis.store.token_arrays import floats

WRONG = "Newest wrong answer to a prompt it could solve"
LONGEST = "Longest answer"
MOST = 3
"""Rollouts that are told."""


@dataclass(frozen=True)
class Telling:
    """A rollout with what makes it worth reading."""

    why: str
    step: int
    group: int
    rollout: int
    t: int  # The token that it is about, else the first
    prompt: str
    completion: str
    reward: float


def telling_rollouts(store: RunStore, since: int, last: int | None = None) -> list[Telling]:
    """Return at most three rollouts of the steps from `since` to `last`, each once; empty where none were stored.

    They are the newest whose reward is below another one that its prompt has had in this run, the longest, and that of
    the newest step's token with the smallest probability. One that is told already is told for a further reason, too,
    and the next best of that reason comes beside it. `last` is by default the newest step.

    Raises:
        StoreError: The run cannot be read.
    """
    new = [step for step in store.complete_steps() if since <= step and (last is None or step <= last)]
    rows: Any = store.rollouts_df(new, ["step", "group", "rollout", "prompt_id", "reward", "length"])
    if rows.empty:
        return []
    reward, step = floats(rows, "reward"), rows["step"].to_numpy(np.int64)
    name = rows["prompt_id"].fillna(rows["step"].astype(str) + "/" + rows["group"].astype(str))
    best = pd.Series(reward).groupby(name.to_numpy(object)).transform("max").to_numpy()
    if not (best > reward).any():  # reading all steps takes a second in a long run
        past = store.sql("SELECT prompt_id, max(reward) AS best FROM rollouts GROUP BY prompt_id").set_index(
            "prompt_id"
        )
        best = name.map(past["best"]).astype("Float64").to_numpy(np.float64, na_value=-np.inf)
    with np.errstate(invalid="ignore"):  # infinite rewards
        short_of_best = best - reward
    chosen: dict[tuple[int, int], tuple[str, int]] = {}  # step and rollout → why, and the token

    def choose(ranked: list[tuple[int, int, int, str]]) -> None:
        """Tell the best of some (step, rollout, token, why), and if it is told already the next best, too."""
        for step, rollout, t, why in ranked:
            small, at = why[0].lower() + why[1:], (step, rollout)
            if at not in chosen:
                chosen[at] = (why if why is ranked[0][-1] else f"Next {small}"), t
                return
            if why is ranked[0][-1]:
                chosen[at] = f"{chosen[at][0]}; {small}", t

    at = list(zip(step.tolist(), rows["rollout"].tolist(), strict=True))
    if len(wrong := np.flatnonzero(short_of_best > 0)):
        worst = wrong[np.lexsort((-short_of_best[wrong], -step[wrong]))[0]]
        choose([(*at[worst], 0, WRONG)])
    length = floats(rows, "length")
    longest = [k for k in np.argsort(-length, kind="stable")[:MOST] if not np.isnan(length[k])]
    choose([(*at[k], 0, f"{LONGEST}, {length[k]:,.0f} tokens") for k in longest])
    newest = int(step.max())
    of = f" of step {newest}" * bool(step.min() < newest)
    tokens: Any = store.tokens_df([newest], ["rollout", "t", "token", "logprob"], "mask AND logprob IS NOT NULL")
    ranked = []
    for _, one in tokens.sort_values("logprob").drop_duplicates("rollout").head(MOST).iterrows():
        shown = "" if pd.isna(one["token"]) else f" {str(one['token'])!r}"
        why = f"Most surprising token{of}{shown}, probability {number(float(np.exp(one['logprob'])))}"
        ranked.append((newest, int(one["rollout"]), int(one["t"]), why))
    choose(ranked)
    told = list[Telling]()
    for (at_step, rollout), (why, t) in chosen.items():
        row = store.rollouts_df([at_step], where="rollout = ?", params=[rollout]).iloc[0]
        prompt, completion = ("" if pd.isna(row[one]) else str(row[one]) for one in ("prompt", "completion"))
        told.append(Telling(why, at_step, int(row["group"]), rollout, t, prompt, completion, float(row["reward"])))
    return told
