"""Formats whose records are texts: the plain one, TRL's completions, verl's dumps."""

import re
from collections.abc import Mapping
from typing import cast, get_args

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Fields, Message, RecordedRollout
from otb_analysis.recorded.rows import Tally
from otb_analysis.types import FinishReason

ADDED_BY_TRL = ("step", "advantage", "mode")
"""Numbers in TRL's tables that are no rewards."""
PADDING = re.compile(r"pad[0-9a-f]{32}")
"""How the uid of a row begins that verl made up to fill a batch."""
PADDED = "synthetic padding row of verl was left out"
UNSCORED = "reward function of TRL gave no number (NaN) and counts as 0, as TRL counts it"


def plain(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read {prompt, completion, reward[, answer, group, step, ids, prompt_ids, mask, logprobs, advantages, …]}.

    `prompt` is a text, or a list of messages with role and content.

    Raises:
        InputError: A field is missing or of another type, or there are several turns and no mask.
    """
    if "turns" in fields and fields.number("turns") > 1 and not ("ids" in fields and "mask" in fields):
        raise InputError(
            f"{fields.place} has {fields.number('turns'):g} turns but no ids with a mask, so nothing says which tokens "
            "the policy sampled and which a tool wrote; add ids and mask."
        )
    if "advantages" in fields and "ids" not in fields:
        raise InputError(f"{fields.place} has advantages but no ids; add the ids of the tokens they are of.")
    columns = {"behavior_logprob": "logprobs", "advantage": "advantages"}
    chat = isinstance(fields.row.get("prompt"), list)
    completion = fields.text("completion")
    return RecordedRollout(
        place=fields.place,
        reward=fields.number("reward"),
        prompt=None if chat else fields.text("prompt"),
        answer=fields.text("answer") if "answer" in fields else None,
        completion=None if chat else completion,
        messages=(*_messages(fields), Message("assistant", completion, True)) if chat else (),
        group=fields.key("group"),
        step=fields.whole_number("step") if "step" in fields else None,
        prompt_ids=fields.ids("prompt_ids") if "prompt_ids" in fields else None,
        ids=fields.ids("ids") if "ids" in fields else None,
        mask=fields.flags("mask") if "mask" in fields else None,
        finish_reason=_finish_reason(fields),
        columns={ours: fields.numbers(theirs) for ours, theirs in columns.items() if theirs in fields},
        grad_norm=fields.number("grad_norm") if "grad_norm" in fields else None,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def trl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a row of TRL: the reward is the weighted sum of its reward columns, by default of every number.

    Raises:
        InputError: It has no reward column, or lacks one that was asked for.
    """
    numbers = [
        name for name, value in fields.row.items()
        if name not in ADDED_BY_TRL and (value is None or _is_number(value))
    ]  # fmt: skip
    used = dict(weights) or dict.fromkeys(numbers, 1.0)
    if not used:
        raise InputError(f"{fields.place} has no reward column, which is a number; it has {', '.join(fields.row)}.")
    parts: dict[str, float] = {}
    for name in used:
        value = fields.row.get(name)
        if value is None or (isinstance(value, float) and np.isnan(value)):
            tally[UNSCORED] += 1
        else:
            parts[name] = fields.number(name)
    if not parts:
        raise InputError(f"{fields.place}: no reward function gave a number ({', '.join(used)}); leave the row out.")
    return RecordedRollout(
        place=fields.place,
        reward=sum(used[name] * value for name, value in parts.items()),
        prompt=fields.text("prompt"),
        completion=fields.text("completion"),
        stripped=True,
        step=fields.whole_number("step"),
        reward_parts=parts,
    )


def verl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a row of verl; None for one that was made up to fill a batch.

    V1 names prompt, session and output in `uid`; V0 has none, and the prompt decides.
    """
    uid = fields.text("uid") if "uid" in fields else None
    if uid is not None and PADDING.match(uid):
        tally[PADDED] += 1
        return None
    if "num_turns" in fields and fields.number("num_turns") > 2:  # verl counts the prompt as a turn, too
        raise InputError(
            f"{fields.place} has {fields.number('num_turns'):g} turns, but verl's dumps hold no masks, so nothing says "
            "which tokens the policy sampled; dump token ids with their response mask instead."
        )
    return RecordedRollout(
        place=fields.place,
        reward=fields.number("score"),
        prompt=fields.text("input"),
        completion=fields.text("output"),
        stripped=True,
        group=None if uid is None else uid.rsplit("_", 2)[0],
        step=fields.whole_number("step"),
    )


def _messages(fields: Fields) -> list[Message]:
    messages = []
    for message in fields.row["prompt"]:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise InputError(
                f"{fields.place}: prompt is a list, so each entry must have a role and a content (a text)."
            )
        messages.append(Message(str(message.get("role", "user")), message["content"], False))
    return messages


def _finish_reason(fields: Fields) -> FinishReason:
    if "finish_reason" not in fields:
        return "unknown"
    reason = fields.text("finish_reason")
    if reason not in get_args(FinishReason):
        raise InputError(f"{fields.place}: finish_reason is {reason!r}; write {', '.join(get_args(FinishReason))}.")
    return cast(FinishReason, reason)
