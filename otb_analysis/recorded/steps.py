"""A stream of records cut into steps of whole groups; one step is in memory at a time."""

import hashlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import RecordedRollout
from otb_analysis.types import Int


@dataclass(frozen=True)
class Layout:
    """How records stand in their files."""

    runs_of_prompts: bool = False  # True where a group ends where the prompt changes
    group_size: int = 0  # Rows in a row that are one group; 0 where group or prompt tells
    prompts: int = 16  # Groups per step, where the records name no step


@dataclass(frozen=True)
class RecordedStep:
    """The rollouts of one step, groups together; made by `steps_of`."""

    step: int
    records: tuple[RecordedRollout, ...]
    group: Int  # Index of each record's prompt within the step [N]
    repeated: bool = False  # True where its rollouts are those of the step before

    @property
    def prompt_ids(self) -> list[str]:
        """Name of each group's prompt [P]: a hash, the same in every step and run."""
        first = {int(g): record for g, record in reversed(list(zip(self.group, self.records, strict=True)))}
        return [hashlib.sha256(repr(first[g].prompt_key).encode()).hexdigest()[:16] for g in sorted(first)]

    @property
    def provenance(self) -> dict[str, object]:
        """Columns of `rollouts` that say where each record stood."""
        return {
            "source_file": [record.place.file.name for record in self.records],
            "source_record": [record.place.number for record in self.records],
        }

    @property
    def logged_norm(self) -> dict[str, object]:
        """The column of `steps` with the trainer's gradient norm, empty where it was not recorded.

        Raises:
            InputError: Records of the step have different ones.
        """
        first = self.records[0]
        for record in self.records:
            if record.grad_norm != first.grad_norm:
                raise InputError(
                    f"{record.place} has grad_norm {record.grad_norm} but record {first.place.number} of the same step "
                    f"has {first.grad_norm}; write that of the step's update into all of its records."
                )
        return {} if first.grad_norm is None else {"grad_norm": first.grad_norm}


def steps_of(records: Iterable[RecordedRollout], layout: Layout) -> Iterator[RecordedStep]:
    """Yield steps in their order; where records name none, so many groups in a row are one, counted from 0.

    Raises:
        InputError: Steps do not ascend, a group is not in one piece or has two prompts, or a prompt is in two groups.
    """
    stream = iter(records)
    first = next(stream, None)
    if first is None:
        return
    whole = chain([first], stream)
    yield from _counted_steps(whole, layout) if first.step is None else _named_steps(whole, layout)


def _named_steps(records: Iterator[RecordedRollout], layout: Layout) -> Iterator[RecordedStep]:
    """Yield the steps that the records name."""
    part = [next(records)]
    for record in records:
        here, before = record.step, part[-1].step
        if here is None or before is None or here < before:
            raise InputError(
                f"{record.place} is of step {here} but comes behind step {before}; sort the records by step, or pass "
                "each run's files alone."
            )
        if here != before:
            yield grouped(before, part, layout)
            part = []
        part.append(record)
    assert part[-1].step is not None
    yield grouped(part[-1].step, part, layout)


def _counted_steps(records: Iterable[RecordedRollout], layout: Layout) -> Iterator[RecordedStep]:
    """Yield a step for so many groups in a row; a group that comes back after it ended is refused."""
    part: list[RecordedRollout] = []
    keys: list[Hashable] = []  # Of the groups in `part`
    ended: dict[bytes, int] = {}  # Hash of each group that ended → its first record; a hash, so that millions fit
    step = 0
    for row, record in enumerate(records):
        if layout.group_size:
            key: Hashable = row // layout.group_size
        else:
            key = record.prompt_key if record.group is None else record.group
        if not keys or key != keys[-1]:
            name = hashlib.blake2b(repr(key).encode(), digest_size=12).digest()
            if name in ended:
                what = "prompt" if record.group is None else f"group {record.group!r}"
                raise InputError(
                    f"{record.place} goes on with the {what} of record {ended[name]}, behind other groups; put the "
                    "rollouts of a group together, write step and group into every record, or pass --group-size N if "
                    "every N records in a row are a group."
                )
            ended[name] = record.place.number
            if len(keys) == layout.prompts:
                yield grouped(step, part, layout)
                step, part, keys = step + 1, [], []
            keys.append(key)
        part.append(record)
    if part:
        yield grouped(step, part, layout)


def grouped(step: int, records: Iterable[RecordedRollout], layout: Layout) -> RecordedStep:
    """Return the records of one step with the index of each one's group, groups in the order of their first record.

    Raises:
        InputError: A group has two prompts, or a prompt is in two groups.
    """
    part = tuple(records)
    keys = _keys(part, layout)
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([index[key] for key in keys], np.int64)
    prompt_of: dict[int, RecordedRollout] = {}
    group_of: dict[Hashable, int] = {}
    for g, record in zip(group.tolist(), part, strict=True):
        first = prompt_of.setdefault(g, record)
        if first.prompt_key != record.prompt_key:
            raise InputError(
                f"{record.place} is in the group of record {first.place.number} but has another prompt; a group is the "
                "rollouts of one prompt, so mend group, or --group-size."
            )
        if (other := group_of.setdefault(record.prompt_key, g)) != g:
            raise InputError(
                f"{record.place} has the prompt of record {prompt_of[other].place.number} but is in another group of "
                f"step {step}; give rollouts of one prompt one group, or put the groups into different steps."
            )
    order = np.argsort(group, kind="stable")
    return RecordedStep(step, tuple(part[i] for i in order), group[order])


def _keys(part: tuple[RecordedRollout, ...], layout: Layout) -> list[Hashable]:
    """Return what names each record's group."""
    if part[0].group is not None:
        return [record.group for record in part]
    if layout.group_size:
        return [i // layout.group_size for i in range(len(part))]
    if not layout.runs_of_prompts:
        return [record.prompt_key for record in part]
    changes = [a.prompt_key != b.prompt_key for a, b in pairwise(part)]
    return np.cumsum([0, *changes]).tolist()
