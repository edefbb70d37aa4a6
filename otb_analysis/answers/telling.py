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
    the newest step's token with the smallest probability. `last` is by default the newest step.

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

    def choose(at: tuple[int, int], why: str, t: int = 0) -> None:
        """Tell a rollout, or one that is told already for another reason, too."""
        before = f"{chosen[at][0]}; " if at in chosen else ""
        chosen[at] = before + (why[0].lower() + why[1:] if before else why), t

    if len(wrong := np.flatnonzero(short_of_best > 0)):
        worst = wrong[np.lexsort((-short_of_best[wrong], -step[wrong]))[0]]
        choose((int(step[worst]), int(rows["rollout"].iloc[worst])), WRONG)
    length = floats(rows, "length")
    if not np.isnan(length).all():
        longest = np.nanargmax(length)
        choose((int(step[longest]), int(rows["rollout"].iloc[longest])), f"{LONGEST}, {np.nanmax(length):,.0f} tokens")
    newest = int(step.max())
    tokens: Any = store.tokens_df([newest], ["rollout", "t", "token", "logprob"], "mask AND logprob IS NOT NULL")
    if len(tokens):
        least = tokens.iloc[int(floats(tokens, "logprob").argmin())]
        shown = "" if pd.isna(least["token"]) else f" {str(least['token'])!r}"
        why = f"Most surprising token{shown}, probability {number(float(np.exp(least['logprob'])))}"
        choose((newest, int(least["rollout"])), why, int(least["t"]))
    found = list[Telling]()
    for (at, rollout), (why, t) in chosen.items():
        row = store.rollouts_df([at], where="rollout = ?", params=[rollout]).iloc[0]
        prompt, completion = ("" if pd.isna(row[one]) else str(row[one]) for one in ("prompt", "completion"))
        found.append(Telling(why, at, int(row["group"]), rollout, t, prompt, completion, float(row["reward"])))
    return found
