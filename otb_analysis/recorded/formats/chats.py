"""Formats whose records are chats: ART's trajectories."""

from collections.abc import Mapping

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Fields, Message, RecordedRollout
from otb_analysis.recorded.rows import Tally, number_in

FAILED = "message without a text (content is null) counts as empty"


def art(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a trajectory of ART; its messages say which of them the policy wrote (`trainable`).

    The step is the number in the file's name.

    Raises:
        InputError: No message is the policy's, the first one is, or one of the policy's calls tools: then the text that
            was sampled is not recorded.
    """
    rows = fields.row.get("messages") or []
    messages = []
    for n, row in enumerate(rows):
        sampled = bool(row.get("trainable"))
        if sampled and row.get("tool_calls"):
            raise InputError(
                f"{fields.place}: message {n} of the policy calls tools, and the text that it sampled is not recorded; "
                "leave the trajectory out, or record token ids."
            )
        if row.get("content") is None:
            tally[FAILED] += 1
        messages.append(Message(str(row.get("role")), row.get("content") or "", sampled))
    if not any(message.sampled for message in messages) or messages[0].sampled:
        raise InputError(
            f"{fields.place} has no message of the policy behind a prompt (trainable, not the first); leave it out."
        )
    return RecordedRollout(
        place=fields.place,
        reward=fields.number("reward"),
        messages=tuple(messages),
        group=fields.whole_number("group_index"),
        step=number_in(fields.place.file),
    )
