"""What rollouts show without a model: groups, masks, lengths, rewards, log-probabilities of sampler and trainer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.answers.triage import headline
from otb_analysis.config import section
from otb_analysis.diagnostics.planner import Filtered
from otb_analysis.phases import plural
from otb_analysis.store import RunStore

PASSES = (15, 50)
"""Forward and backward passes over all rollouts that an audit with a model takes, by `training.budget`: least without
norms, most with norms of all tokens of short answers."""
RATIO = 2.0
"""A token whose probability differs by more than this factor between sampler and trainer is counted."""
AT_ONCE = 16
"""Steps whose texts are in memory at once."""

ALONE = (
    "Each group has one rollout, so no baseline can compare answers to one prompt, and nothing can be said of "
    "baselines or of group sizes. Sample four or more answers to each prompt; where a file has them without naming "
    "their prompt, --group-size says how many follow one another."
)


@dataclass(frozen=True)
class Mismatch:
    """The trainer's recorded log-probabilities against the sampler's, δ = trainer − sampler, over policy tokens."""

    n_tokens: int  # With both
    rms: float  # √mean δ², nats
    beyond: float  # Share of tokens with |δ| > log RATIO


@dataclass(frozen=True)
class Traits:
    """What needs no model; made by `traits_of`. A number is None where the records do not say it."""

    n_rollouts: int
    n_groups: int
    n_dead: int  # Groups of two or more with equal rewards
    sizes: tuple[tuple[int, int], ...]  # Group size and how many groups have it, the most frequent first
    filtered: Filtered | None  # Where no group is dead, and the success rates make that improbable
    n_lacking: int  # Rollouts that groups lack to the most frequent size
    first_lacking: str  # The first rollout of the first such group, as `file, record n`; empty where none lacks any
    policy_tokens: int | None  # In the mask; None without token ids
    completion_tokens: int | None  # Those of tools included
    unit: str  # Of lengths: tokens, or characters where no tokens were counted
    length_mean: float | None
    by_length: float | None  # Rank correlation of reward and length
    within: float | None  # The same of ranks less their group's mean: among rollouts of one prompt
    n_ended: int  # Rollouts of steps in which every rollout says how it ended
    n_truncated: int  # Of these, cut at the length limit
    n_empty: int | None  # Answers without a text
    n_steps: int
    n_short: int  # Steps with fewer rollouts than most steps have, but for the last one; 0 where sizes differ
    first_short: str  # The first of them with its rollouts and the usual number; empty where there is none
    reward_first: float | None  # Mean of the first tenth of the steps
    reward_last: float | None  # Mean of the last tenth
    mismatch: Mismatch | None  # None where not both log-probabilities were recorded

    @property
    def lines(self) -> tuple[str, ...]:
        """The traits in sentences, dead groups first."""
        usual, apart = self.sizes[0][0], self.mismatch
        kinds = ", ".join(f"{count:,} of {size}" for size, count in self.sizes[:4]) + ", …" * (len(self.sizes) > 4)
        groups = f"of {usual}" if len(self.sizes) == 1 else f"({kinds})"
        lines = [
            f"Dead groups, whose rewards are all equal: {self.n_dead:,} of {plural(self.n_groups, 'group')} {groups}, "
            f"{self.n_dead / self.n_groups:.0%}."
        ]
        if self.sizes[0] == (1, self.n_groups):
            lines = [ALONE]
        lines += [self.filtered.line] if self.filtered is not None else []
        if self.n_short:
            lines.append(f"Steps: {self.n_short:,} of {self.n_steps:,} fall short; the first is {self.first_short}.")
        if self.n_lacking:
            lack = f"Groups lack {plural(self.n_lacking, 'rollout')} to the usual {usual}"
            lines.append(f"{lack}; the first that does begins at {self.first_lacking}.")
        if apart is not None:
            lines.append(
                f"Sampler and trainer: log-probabilities of {apart.n_tokens:,} tokens differ by {apart.rms:.2g} nats "
                f"(root mean square); {apart.beyond:.2%} of probabilities by more than a factor of {RATIO:g}."
                if apart.rms
                else "The trainer's recorded log-probabilities are the sampler's, so they cannot tell the two apart."
            )
        if self.policy_tokens is None or self.completion_tokens is None:
            lines.append("No token ids were recorded, so masks and log-probabilities cannot be looked at.")
        elif self.policy_tokens < self.completion_tokens:
            counts = f"{self.policy_tokens:,} of {self.completion_tokens:,}"
            share = self.policy_tokens / self.completion_tokens
            lines.append(f"Mask: {counts} completion tokens are the policy's, {share:.1%}.")
        if self.reward_first is not None and self.reward_last is not None:
            ends = f"{self.reward_first:.3f} → {self.reward_last:.3f}"
            lines.append(f"Reward: {ends}, mean of the first → last tenth of {plural(self.n_steps, 'step')}.")
        if self.length_mean is not None:
            within = "" if self.within is None else f", {self.within:+.2f} among rollouts of one prompt"
            by = "" if self.by_length is None else f"; rank correlation with reward {self.by_length:+.2f}{within}"
            lines.append(f"Length: {self.length_mean:,.0f} {self.unit} in the mean{by}.")
        ended = [f"{self.n_truncated:,} of {self.n_ended:,} answers were cut at the limit"] if self.n_ended else []
        ended += [f"{self.n_empty:,} of {self.n_rollouts:,} are empty"] if self.n_empty else []
        return (*lines, *([f"Ends: {'; '.join(ended)}."] if ended else []))

    @property
    def price(self) -> str:
        """What an audit with a model takes, as far as it is known without one."""
        amount = f" with {self.n_rollouts * self.length_mean:,.0f} {self.unit}" if self.length_mean is not None else ""
        least, most = PASSES
        return (
            f"It passes {plural(self.n_rollouts, 'rollout')}{amount} forward and backward about {least} to {most} "
            "times. Without --go it times one pass, and says how long all take."
        )


def traits_of(
    store: RunStore,
    config: Mapping[str, Any],
    steps: pd.DataFrame,
    rewards: pd.DataFrame,
    filtered: Filtered | None,
) -> Traits:
    """Return what a run's rollouts show; of texts and tokens a few steps are in memory at a time.

    Args:
        steps: The table `steps`; `rewards`: step, group and reward of every rollout.
        filtered: What the planner says of groups that are not there.

    Raises:
        StoreError: The run cannot be read.
    """
    groups: Any = rewards.groupby(["step", "group"], sort=True)["reward"].agg(["size", "nunique"])
    kinds = Counter(groups["size"].tolist())
    sizes = tuple(sorted(kinds.items(), key=lambda of: (-of[1], -of[0])))
    usual = sizes[0][0]
    lacking = groups[groups["size"] < usual]
    tokens = _token_counts(store, config)
    lengths, unit = _lengths(store)
    rank: Any = pd.DataFrame({"length": lengths["length"].rank(), "reward": lengths["reward"].rank()})
    centred = rank - rank.groupby([lengths["step"], lengths["group"]]).transform("mean")
    scalars: Any = steps.reindex(columns=["n_rollouts", "n_truncated", "n_empty_completions"])
    ended = scalars["n_truncated"].notna().to_numpy()
    told = headline(steps)
    # Steps with fewer rollouts than most; the last one may end with the file.
    counts: Any = rewards.groupby("step", sort=True).size()
    common, times = Counter(counts.tolist()).most_common(1)[0]
    short = counts.iloc[:-1][counts.iloc[:-1] < common]
    short = short if 2 * times >= len(counts) else short.iloc[:0]
    first_short = ""
    if n_short := len(short):
        fewer = plural(int(short.iloc[0]), "rollout")
        first_short = f"step {short.index[0]} with {fewer} of the usual {common:,}"
    first_lacking = ""
    if len(lacking):
        step, group = map(int, lacking.index[0])
        row = store.rollouts_df([step], where='"group" = ?', params=[group]).iloc[0]
        in_file = "source_file" in row
        first_lacking = (
            f"{row['source_file']}, record {row['source_record']}" if in_file else f"step {step}, group {group}"
        )
    return Traits(
        n_rollouts=len(rewards), n_groups=len(groups),
        n_dead=int(((groups["size"] > 1) & (groups["nunique"] <= 1)).sum()),
        sizes=sizes, filtered=filtered,
        n_lacking=int((usual - lacking["size"]).sum()), first_lacking=first_lacking,
        policy_tokens=tokens and tokens[0], completion_tokens=tokens and tokens[1],
        unit=unit, length_mean=float(lengths["length"].mean()) if unit else None,
        by_length=_correlation(rank), within=_correlation(centred),
        n_ended=int(scalars["n_rollouts"].to_numpy(np.float64)[ended].sum()),
        n_truncated=int(scalars["n_truncated"].sum()),
        n_empty=None if scalars["n_empty_completions"].isna().all() else int(scalars["n_empty_completions"].sum()),
        n_steps=len(steps), n_short=n_short, first_short=first_short,
        reward_first=told.reward_first, reward_last=told.reward, mismatch=tokens and tokens[2],
    )  # fmt: skip


def _token_counts(store: RunStore, config: Mapping[str, Any]) -> tuple[int, int, Mismatch | None] | None:
    """Return tokens in the mask, all completion tokens, and how far the trainer is from the sampler; None without ids.

    In a run that a model scored, `logprob` is that model's, and the trainer's stands beside it.
    """
    if not store.steps_with("tokens", "mask"):
        return None
    made_by = section(config, "source").get("made_by")
    trainer = "logprob" if made_by in (None, "otb import") else "recorded_logprob"
    both = store.steps_with("tokens", trainer) and store.steps_with("tokens", "behavior_logprob")
    apart = f"{trainer} - behavior_logprob" if both else "NULL::DOUBLE"
    row = store.sql(
        "SELECT count(*) FILTER (mask) AS policy, count(*) AS tokens, count(d) AS n, sum(d * d) AS square, "
        f"count(*) FILTER (abs(d) > ln({RATIO})) AS beyond "
        f"FROM (SELECT mask, CASE WHEN mask AND isfinite({apart}) THEN {apart} END AS d FROM tokens)"
    ).iloc[0]
    n = int(row["n"])
    mismatch = Mismatch(n, float(row["square"] / n) ** 0.5, float(row["beyond"] / n)) if n else None
    return int(row["policy"]), int(row["tokens"]), mismatch


def _lengths(store: RunStore) -> tuple[Any, str]:
    """Return step, group, reward and length of every rollout, and the unit of lengths; empty where nothing has one."""
    names = ["step", "group", "reward"]
    rows: Any = store.rollouts_df(columns=[*names, "length"])
    rows["length"] = rows["length"].astype("Float64").to_numpy(np.float64, na_value=np.nan)
    if rows["length"].notna().any():
        return rows, "tokens"
    steps = store.complete_steps()
    parts = list[pd.DataFrame]()
    for some in (steps[k : k + AT_ONCE] for k in range(0, len(steps), AT_ONCE)):
        query = 'SELECT step, "group", reward, length(completion)::DOUBLE AS length FROM rollouts'
        parts.append(store.sql(query, steps=some))
    rows = pd.concat(parts, ignore_index=True)
    return rows, "characters" if rows["length"].notna().any() else ""


def _correlation(pair: pd.DataFrame) -> float | None:
    """Return Pearson's correlation of two columns; None where one does not vary."""
    both = pair.dropna().to_numpy(np.float64)
    if len(both) < 2 or (np.ptp(both, axis=0) < 1e-9).any():
        return None
    return float(np.corrcoef(both.T)[0, 1])
