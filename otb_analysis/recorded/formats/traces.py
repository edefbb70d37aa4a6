"""Traces of verifiers, as it and prime-rl write them: a graph of messages with the tokens that each added."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Fields, RecordedRollout
from otb_analysis.recorded.rows import Row, Tally
from otb_analysis.types import FinishReason, Float

NOT_TRAINED = "trace of an agent that is not trained was left out"
UNPAID = "trace without a reward was left out (its rollout failed, or nothing scored it)"
BRANCHED = "trace with several branches was left out, because they share tokens and one reward"
NO_TOKENS = "trace without token ids was left out (its client recorded texts only)"
ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
PER_TOKEN = {
    "behavior_logprob": "logprobs",
    "logprob": "trainer_logprobs",
    "entropy": "entropies",
    "advantage": "advantages",
}
"""Our columns → fields of a message, with one number per sampled token."""


def traces_of(row: Row) -> Iterator[Row]:
    """Yield the traces of an episode, each with the episode's group and step; a trace alone yields itself.

    An evaluation is one step of one policy: its episodes are written as they end, so a prompt's are not together. An
    episode that failed has no trace, and yields an empty one, which is left out and counted.
    """
    if not isinstance(row.get("traces"), list):
        yield row
        return
    group, run = row.get("group") or {}, row.get("run") or {}
    step = 0 if run.get("type") == "eval" else (run.get("work") or {}).get("step")
    shared = {"group": group.get("id"), "step": step}
    for trace in row["traces"] or [{"nodes": [], "rewards": {}}]:
        yield {**trace, **shared}


def verifiers(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a trace: the tokens of its messages in a row, the prompt up to the first that was sampled.

    The reward is Σ score · weight over its named rewards. None where the trace is no rollout to train on; counted.

    Raises:
        InputError: A message's mask or numbers are not one per token.
    """
    row = fields.row
    paid = {name: reward for name, reward in (row.get("rewards") or {}).items() if reward is not None}
    nodes = row.get("nodes") or []
    left_out = {
        NOT_TRAINED: not (row.get("agent") or {}).get("trainable", True),
        UNPAID: not paid,
        NO_TOKENS: not any(node.get("token_ids") for node in nodes),
        BRANCHED: _branches(nodes) > 1,
    }
    if reason := next((sentence for sentence, holds in left_out.items() if holds), None):
        tally[reason] += 1
        return None
    parts = [_Node(fields, number, node) for number, node in enumerate(nodes)]
    ids = [i for part in parts for i in part.ids]
    mask = np.array([flag for part in parts for flag in part.mask], bool)
    first = int(np.argmax(mask))
    if not first:
        raise InputError(f"{fields.place}: no token was sampled behind a prompt; leave the trace out.")
    columns: dict[str, Float] = {}
    for ours, theirs in PER_TOKEN.items():
        if any(node.get(theirs) for node in nodes):
            columns[ours] = np.concatenate([part.by_token(theirs) for part in parts])[first:]
    scores = {name: (Fields(fields.place, reward), reward) for name, reward in paid.items()}
    parts_paid = {name: own.number("score") for name, (own, _) in scores.items()}
    weight = {name: float(reward.get("weight", 1.0)) for name, (_, reward) in scores.items()}
    calls = row.get("calls") or []
    return RecordedRollout(
        place=fields.place,
        reward=sum(value * weight[name] for name, value in parts_paid.items()),
        group=row.get("group"),
        step=row.get("step"),
        prompt_ids=tuple(ids[:first]),
        ids=tuple(ids[first:]),
        mask=mask[first:],
        finish_reason=ENDS.get(str(calls[-1].get("finish_reason")), "unknown") if calls else "unknown",
        columns=columns,
        reward_parts=parts_paid,
    )


class _Node:
    """One message of a trace."""

    def __init__(self, fields: Fields, number: int, node: Mapping[str, Any]):
        own = Fields(fields.place, node)
        self.node, self.where = node, f"{fields.place}, message {number}"
        self.ids = own.ids("token_ids") if node.get("token_ids") else ()
        self.mask = own.flags("mask").tolist() if node.get("mask") else [False] * len(self.ids)
        if len(self.mask) != len(self.ids):
            raise InputError(
                f"{self.where} has {len(self.mask)} mask entries for {len(self.ids)} tokens; write one each."
            )

    def by_token(self, name: str) -> Float:
        """Return numbers of the sampled tokens by token, NaN at the others.

        A message that was assigned no advantages has none to give: 0, as verifiers reads it.
        """
        out = np.full(len(self.ids), np.nan)
        values: Sequence[float] = self.node.get(name) or ([0.0] * sum(self.mask) if name == "advantages" else [])
        if len(values) != sum(self.mask):
            raise InputError(
                f"{self.where} has {len(values)} {name} for {sum(self.mask)} sampled tokens; write one for each."
            )
        out[np.array(self.mask, bool)] = values
        return out


def _branches(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Return how many messages nothing follows."""
    parents = {node.get("parent") for node in nodes}
    return sum(number not in parents for number in range(len(nodes)))
