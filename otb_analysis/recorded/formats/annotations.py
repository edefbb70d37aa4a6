"""prime-rl's traces since September 2026: a stream in order of arrival, and what was learned later folded onto it."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otb_analysis.recorded.rows import Place, Row, Tally, rows_of

STREAMS = ("advantages", "trainer_logprobs", "entropies")
"""Numbers per token that annotations have, by the names that messages get them under."""
NOT_SHIPPED = "trace that prime-rl did not train on was left out (evaluation, filtered, or not yet shipped)"
UNCOVERED = "trace whose annotations do not cover its tokens was left out, since others have theirs"
MISSING = "trace was annotated but is not in the stream"
ROUNDED = (
    "trace has log-probabilities rounded to 4 decimals (prime-rl's float_decimals): differences of 0.0001 say nothing"
)


def with_annotations(
    rows: Iterable[tuple[Place, Row]], files: Sequence[Path], tally: Tally
) -> Iterator[tuple[Place, Row]]:
    """Yield the traces that trained with their annotations, by ascending step of training.

    `annotations/<producer>/` lies beside the folder of the stream's files. Its numbers per token are held in memory;
    of the traces themselves, those whose step is not complete. Without annotations the stream comes as it is.
    """
    known = _Annotations(files[0].parent.parent / "annotations", tally)
    if not known.step:
        yield from rows
        return
    waiting: dict[int, list[tuple[Place, Row]]] = defaultdict(list)
    steps, seen = deque(sorted(known.expected)), Counter[int]()
    for place, row in rows:
        step = known.step.pop(str(row.get("id")), None)
        if step is None:
            tally[NOT_SHIPPED] += 1
            continue
        seen[step] += 1
        if (folded := known.fold({**row, "step": step})) is None:
            tally[UNCOVERED] += 1
        else:
            tally[ROUNDED] += _rounded(folded)
            waiting[step].append((place, folded))
        while steps and seen[steps[0]] == known.expected[steps[0]]:
            yield from waiting.pop(steps.popleft(), [])
    tally[MISSING] += len(known.step)
    for step in steps:
        yield from waiting.pop(step, [])


class _Annotations:
    """What the orchestrator and the trainer learned of each trace after it had been written."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.step: dict[str, int] = {}  # Trace → the step that trained on it, the newest one where there are several
        self.streams: dict[str, dict[str, NDArray[np.float32]]] = defaultdict(
            dict
        )  # Trace → name → by token, NaN unknown
        for producer in sorted(folder.glob("*/")):
            files = {path.name.removesuffix(".zst"): path for path in sorted(producer.glob("[0-9]*.jsonl*"))[::-1]}
            for _, path in sorted(files.items()):
                for _, update in rows_of(path, tally):
                    self._take(update)
        self.expected = Counter(self.step.values())
        shipped = [self.streams.get(trace, {}) for trace in self.step]
        self.names = {name for name in STREAMS if any(name in streams for streams in shipped)}

    def _take(self, update: Row) -> None:
        trace = str(update.get("trace_id"))
        ship = (update.get("info") or {}).get("ship")
        if ship is not None:
            self.step[trace] = int(ship["step"])
        for branch in update.get("branches") or []:
            for name in STREAMS:
                if branch.get("index") == 0 and branch.get(name):
                    self.streams[trace][name] = np.array(branch[name], np.float32)

    def fold(self, row: Row) -> Row | None:
        """Return a trace with its numbers per sampled token in each message; None where they do not cover it.

        Numbers belong to the tokens of a branch; a trace with several is left alone, and left out by its reader.
        """
        nodes = row.get("nodes") or []
        streams = self.streams.pop(str(row.get("id")), {})
        if any(node.get("parent") not in (None, number - 1) for number, node in enumerate(nodes)):
            return row
        mask = np.concatenate([np.array(_mask(node), bool) for node in nodes]) if nodes else np.zeros(0, bool)
        ends = np.cumsum([len(_mask(node)) for node in nodes])
        folded: list[dict[str, Any]] = [dict(node) for node in nodes]
        for name in self.names:
            values = streams.get(name, np.zeros(0))
            if len(values) < len(mask) or np.isnan(values[: len(mask)][mask]).any():
                return None
            for node, end in zip(folded, ends, strict=True):
                here = slice(end - len(_mask(node)), end)
                node[name] = values[here][mask[here]].tolist()
        return {**row, "nodes": folded}


def _mask(node: Mapping[str, Any]) -> Sequence[bool]:
    return node.get("mask") or [False] * len(node.get("token_ids") or ())


def _rounded(row: Row) -> bool:
    """Return whether all log-probabilities have at most 4 decimals."""
    values = [value for node in row.get("nodes") or [] for value in node.get("logprobs") or []]
    return bool(values) and all(round(value, 4) == value for value in values)
