"""One recorded rollout, whoever wrote it, and what must hold of it before anything is computed."""

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.rows import Place, Row, Tally
from otb_analysis.types import Bool, FinishReason, Float

LOGPROBS = ("behavior_logprob", "logprob")
COLUMNS = (*LOGPROBS, "entropy", "advantage")
"""Per-token columns: the sampler's and the trainer's log-probabilities in nats, entropy in nats, advantages."""
ABOVE_ZERO = 1e-3
"""A log-probability may exceed 0 by this much: rounding."""
UNREAD = "placeholder outside the mask was not read"


@dataclass(frozen=True)
class Message:
    """One message of a recorded chat."""

    role: str
    content: str
    sampled: bool  # True where the policy wrote it


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout as somebody recorded it; made by a format, read by `encoding` and `importing`."""

    place: Place
    reward: float
    prompt: str | None = None
    completion: str | None = None
    answer: str | None = None  # Reference answer of the prompt
    messages: tuple[Message, ...] = ()  # A chat, which stands for prompt and completion
    stripped: bool = False  # True where the texts were decoded without their special tokens
    group: Hashable = None  # Names its group within the step; None where the prompt does
    step: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    ids: tuple[int, ...] | None = None  # Completion tokens, those of tools included
    mask: Bool | None = None  # True where the policy sampled the token [T]; None means everywhere
    finish_reason: FinishReason = "unknown"
    columns: Mapping[str, Float] = field(default_factory=dict)  # Of COLUMNS, one number per completion token [T]
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None  # ‖ḡ‖ of its step's update, before clipping

    @property
    def prompt_key(self) -> Hashable:
        """What tells this prompt from others: its tokens, or its text where they were not recorded."""
        if self.messages:
            first = next(i for i, message in enumerate(self.messages) if message.sampled)
            return tuple((message.role, message.content) for message in self.messages[:first])
        return self.prompt if self.prompt_ids is None else self.prompt_ids

    @property
    def shown_prompt(self) -> str:
        """The prompt as pages show it; empty where only its ids were recorded."""
        if not self.messages:
            return self.prompt or ""
        first = next(i for i, message in enumerate(self.messages) if message.sampled)
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages[:first])

    @property
    def policy_tokens(self) -> Bool | None:
        """True where the policy sampled a completion token [T]; None where no ids were recorded."""
        if self.ids is None:
            return None
        return np.ones(len(self.ids), bool) if self.mask is None else self.mask


def checked(record: RecordedRollout, tally: Tally) -> RecordedRollout:
    """Return a record that is whole; placeholders outside its mask are counted.

    Raises:
        InputError: A list has the wrong length, or holds numbers that cannot be; the sentence names the record.
    """
    sampled = record.policy_tokens
    if sampled is None or record.ids is None:
        if record.mask is not None:
            raise InputError(f"{record.place} has a mask but no ids, so nothing says which tokens it is of; add ids.")
        for name, values in record.columns.items():
            _refuse_impossible(record, name, np.ones(len(values), bool))
        return record
    tokens = len(record.ids)
    for name, values in {"mask": sampled, **record.columns}.items():
        if len(values) != tokens:
            shift = " (a list that is off by one belongs to other tokens)" if abs(len(values) - tokens) == 1 else ""
            raise InputError(
                f"{record.place}: {name} has {len(values)} entries but there are {tokens} completion tokens{shift}; "
                "write one per token."
            )
    for name in record.columns:
        _refuse_impossible(record, name, sampled)
    if record.columns and not sampled.all():
        tally[UNREAD] += int((~sampled).sum())
    return record


def _refuse_impossible(record: RecordedRollout, name: str, sampled: Bool) -> None:
    """Refuse what no policy token can have; numbers outside the mask are not looked at."""
    values = record.columns[name]
    inside = np.flatnonzero(sampled)
    for t in inside[~np.isfinite(values[inside])][:1]:
        raise InputError(f"{record.place}: {name} of completion token {t} is {values[t]}; write a finite number.")
    if name not in LOGPROBS:
        return
    for t in inside[values[inside] > ABOVE_ZERO][:1]:
        raise InputError(
            f"{record.place}: {name} of completion token {t} is {values[t]:.4g}, and no log-probability is above 0; "
            "write natural logarithms of probabilities."
        )
    if len(inside) > 1 and not values[inside].any():
        raise InputError(
            f"{record.place}: {name} is 0 at all {len(inside)} policy tokens, which is a placeholder; leave the list "
            "out."
        )


class Fields:
    """A row's fields by name; what is missing or of another type is refused with the record's number."""

    def __init__(self, place: Place, row: Row):
        self.place, self.row = place, row

    def __contains__(self, name: str) -> bool:
        return self.row.get(name) is not None

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._value(name)
        if not isinstance(value, str):
            raise self._unfit(name, value, "a text")
        return value

    def number(self, name: str) -> float:
        """Return a finite number, or a tensor or list that holds one."""
        value = self._value(name)
        if not isinstance(value, str | bytes | int | float) and np.size(value) == 1:
            value = np.asarray(value).reshape(-1)[0].item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unfit(name, value, "a number")
        if abs(value) > sys.float_info.max:
            value = np.inf
        if not np.isfinite(value):
            raise InputError(f"{self.place}: {name} is {value}; write a finite number, or leave the rollout out.")
        return float(value)

    def whole_number(self, name: str) -> int:
        """Return a whole number from 0 that a table can hold, also where it was written as a text."""
        value = self._value(name)
        try:
            whole = int(str(value))
        except ValueError:
            raise self._unfit(name, value, "a whole number") from None
        if not 0 <= whole < 2**63:
            raise self._unfit(name, value, "a whole number from 0 to 2⁶³ − 1")
        return whole

    def ids(self, name: str) -> tuple[int, ...]:
        """Return token ids."""
        values = np.asarray(self._list(name))
        if values.size and (values.dtype.kind not in "iu" or values.min() < 0):
            raise self._unfit(name, values.tolist(), "a list of token ids")
        return tuple(values.tolist())

    def key(self, name: str) -> Hashable:
        """Return a name or a number that tells things apart, None where there is none."""
        value = self.row.get(name)
        if not (value is None or isinstance(value, str | int | float)):
            raise self._unfit(name, value, "a text or a number")
        return value

    def numbers(self, name: str) -> Float:
        """Return a list of numbers; None in it becomes NaN."""
        try:
            return np.array(self._list(name), np.float64)
        except (TypeError, ValueError):
            raise self._unfit(name, self.row[name], "a list of numbers") from None

    def flags(self, name: str) -> Bool:
        """Return a mask: a list of 0 and 1, or of false and true."""
        values = self.numbers(name)
        if not np.isin(values, (0, 1)).all():
            raise self._unfit(name, self.row[name], "a list of 0 and 1")
        return values.astype(bool)

    def _list(self, name: str) -> Sequence[Any]:
        value = self._value(name)
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, list | tuple):
            raise self._unfit(name, value, "a list")
        return value

    def _value(self, name: str) -> Any:
        if name not in self:
            what = "is null" if name in self.row else "is missing"
            raise InputError(f"{self.place}: {name} {what}; write it into every record (it has {', '.join(self.row)}).")
        return self.row[name]

    def _unfit(self, name: str, value: object, expected: str) -> InputError:
        return InputError(f"{self.place}: {name} is {' '.join(repr(value).split())[:60]}; it must be {expected}.")
