"""Traces of verifiers, as it and prime-rl write them: a graph of messages with the tokens that each added.

prime-rl's traces since September 2026 are a stream in order of arrival, and what was learned later is folded onto it.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Fields, Place, RecordedRollout, Row, Tally, rows_of
from otb_analysis.types import Bool, FinishReason, Float

NOT_TRAINED = "trace of an agent that is not trained was left out"
UNPAID = "trace without a reward was left out (its rollout failed, or nothing scored it)"
BRANCHED = (
    "branch of a trace was left out: the one with most tokens that train is its rollout, in the group of the first"
)
MASKED = "token was masked in prime-rl's loss (is_masked): it is kept here"
NO_TOKENS = "trace without token ids was left out (its client recorded texts only)"
NOT_SHIPPED = "trace that prime-rl did not train on was left out (evaluation, filtered, or not yet shipped)"
UNCOVERED = "trace whose annotations do not cover its tokens was left out, since others have theirs"
MISSING = "trace was annotated but is not in the stream"
ROUNDED = (
    "trace has log-probabilities rounded to 4 decimals (prime-rl's float_decimals): differences of 0.0001 say nothing"
)
ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
PER_TOKEN = {
    "behavior_logprob": "logprobs",
    "logprob": "trainer_logprobs",
    "entropy": "entropies",
    "advantage": "advantages",
}
"""Our columns → fields of a message, with one number per sampled token."""
STREAMS = ("advantages", "trainer_logprobs", "entropies")
"""Numbers per token that annotations have, by the names that messages get them under."""


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
    for trace in row["traces"] or [{"nodes": [], "rewards": {}}]:
        yield {**trace, "group": group.get("id"), "step": step}


def verifiers(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a trace: the tokens of its messages in a row, the prompt up to the first that was sampled.

    The reward is Σ score · weight over its named rewards. None where the trace is no rollout to train on; counted. A
    message that was assigned no advantages has none to give: 0, as verifiers reads it.

    Raises:
        InputError: A message's mask or numbers are not one per token.
    """
    row, nodes, calls = fields.row, fields.row.get("nodes") or [], fields.row.get("calls") or []
    paid = {name: reward for name, reward in (row.get("rewards") or {}).items() if reward is not None}
    left_out = {
        NOT_TRAINED: not (row.get("agent") or {}).get("trainable", True),
        UNPAID: not paid,
        NO_TOKENS: not any(node.get("token_ids") for node in nodes),
    }
    if reason := next((sentence for sentence, holds in left_out.items() if holds), None):
        tally[reason] += 1
        return None
    columns = {ours: list[Float]() for ours, theirs in PER_TOKEN.items() if any(node.get(theirs) for node in nodes)}
    branches = branches_of(nodes)
    for _ in branches[1:]:
        tally.note(BRANCHED, fields.place)
    nodes = max(branches, key=_trained)
    ids, masks = list[int](), list[Bool]()
    for number, node in enumerate(nodes):
        message, where = Fields(fields.place, node), f"{fields.place}, message {number}"
        tokens = message.ids("token_ids") if node.get("token_ids") else ()
        mask = message.flags("mask") if node.get("mask") else np.zeros(len(tokens), bool)
        if len(mask) != len(tokens):
            raise InputError(f"{where} has {len(mask)} mask entries for {len(tokens)} tokens; write one each.")
        ids += tokens
        masks.append(mask)
        for ours, parts in columns.items():
            name, sampled = PER_TOKEN[ours], int(mask.sum())
            values = node.get(name) or ([0.0] * sampled if name == "advantages" else [])
            if len(values) != sampled:
                raise InputError(f"{where} has {len(values)} {name} for {sampled} sampled tokens; write one for each.")
            by_token = np.full(len(tokens), np.nan)
            by_token[mask] = values
            parts.append(by_token)
    mask = np.concatenate(masks)
    first = int(np.argmax(mask))
    if not first:
        raise InputError(f"{fields.place}: no token was sampled behind a prompt; leave the trace out.")
    named = {name: Fields(fields.place, reward) for name, reward in paid.items()}
    scores = {name: reward.number("score") for name, reward in named.items()}
    weigh = {name: reward.number("weight") if "weight" in reward else 1.0 for name, reward in named.items()}
    return RecordedRollout(
        place=fields.place,
        reward=sum(score * weigh[name] for name, score in scores.items()),
        group=fields.key("group"),
        step=fields.whole_number("step") if "step" in fields else None,
        prompt_ids=tuple(ids[:first]),
        opening=_opening(branches[0]) if len(branches) > 1 else None,
        ids=tuple(ids[first:]),
        mask=mask[first:],
        finish_reason=ENDS.get(str(calls[-1].get("finish_reason")), "unknown") if calls else "unknown",
        columns={ours: np.concatenate(parts)[first:] for ours, parts in columns.items()},
        reward_parts=scores,
    )


def branches_of(nodes: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the messages from the root to each leaf that train, in the order of the leaves; all where none does.

    A sampled message that branches share trains in the first of them and is context in the others, as prime-rl has it.
    One branch that trains is a chain, whatever else hangs on it.

    Raises:
        ValueError: A message's parents end in no root.
    """
    parents = {node.get("parent") for node in nodes}
    taken, branches = set[int](), list[list[Mapping[str, Any]]]()
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path, at = list[int](), leaf
        while at is not None:
            if at in path:
                raise ValueError(f"message {at} is its own parent")
            path.append(at)
            at = nodes[at].get("parent")
        context = dict.fromkeys(("mask", *PER_TOKEN.values()))
        branches.append([{**nodes[n], **context} if n in taken else nodes[n] for n in reversed(path)])
        taken |= set(path)
    return [branch for branch in branches if _trained(branch)] or [list(nodes)]


def _trained(nodes: Sequence[Mapping[str, Any]]) -> int:
    return sum(sum(map(bool, node.get("mask") or ())) for node in nodes)


def _opening(nodes: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return a branch's tokens before the first that was sampled."""
    ids = [token for node in nodes for token in node.get("token_ids") or ()]
    mask = [bool(m) for node in nodes for m in node.get("mask") or [False] * len(node.get("token_ids") or ())]
    return tuple(ids[: mask.index(True)])


def with_annotations(
    rows: Iterable[tuple[Place, Row]], files: Sequence[Path], tally: Tally
) -> Iterator[tuple[Place, Row]]:
    """Yield the traces that trained with their annotations, by ascending step of training.

    `annotations/<producer>/` lies beside the folder of the stream's files: what the orchestrator and the trainer
    learned of each trace after it had been written. Its numbers per token are held in memory; of the traces themselves,
    those whose step is not complete. Without annotations the stream comes as it is.
    """
    step_of: dict[str, int] = {}  # Trace → the step that trained on it, the newest one where there are several
    streams = defaultdict[str, dict[str, Any]](dict)  # Trace → name → by token, NaN where not known
    masked = Counter[str]()  # Trace → tokens that the loss left out
    for producer in sorted((files[0].parent.parent / "annotations").glob("*/")):
        annotations = {path.name.removesuffix(".zst"): path for path in sorted(producer.glob("[0-9]*.jsonl*"))[::-1]}
        for _, update in (row for _, path in sorted(annotations.items()) for row in rows_of(path, tally)):
            trace, ship = str(update.get("trace_id")), (update.get("info") or {}).get("ship")
            if ship is not None:
                step_of[trace] = int(ship["step"])
            for branch in update.get("branches") or []:
                if branch.get("index") == 0:
                    streams[trace] |= {n: np.array(branch[n], np.float32) for n in STREAMS if branch.get(n)}
                    masked[trace] = sum(map(bool, branch.get("is_masked") or ())) or masked[trace]
    if not step_of:
        yield from rows
        return
    names = {name for trace in step_of for name in streams.get(trace, {})}
    expected, seen = Counter(step_of.values()), Counter[int]()
    waiting, steps = defaultdict[int, list[tuple[Place, Row]]](list), deque(sorted(expected))
    for place, row in rows:
        trace = str(row.get("id"))
        step = step_of.pop(trace, None)
        if step is None:
            tally[NOT_SHIPPED] += 1
            continue
        seen[step] += 1
        tally[MASKED] += masked[trace]
        nodes = _annotated(row.get("nodes") or [], names, streams.pop(trace, {}))
        if nodes is None:
            tally[UNCOVERED] += 1
        else:
            logprobs = [value for node in nodes for value in node.get("logprobs") or []]
            tally[ROUNDED] += bool(logprobs) and all(round(value, 4) == value for value in logprobs)
            waiting[step].append((place, {**row, "step": step, "nodes": nodes}))
        while steps and seen[steps[0]] == expected[steps[0]]:
            yield from waiting.pop(steps.popleft(), [])
    tally[MISSING] += len(step_of)
    for step in steps:
        yield from waiting.pop(step, [])


def _annotated(
    nodes: Sequence[Mapping[str, Any]], names: Iterable[str], streams: Mapping[str, Float]
) -> list[dict[str, Any]] | None:
    """Return messages with their numbers per sampled token; None where the numbers do not cover the tokens.

    Numbers belong to the tokens of a branch, so they do not cover a trace with several.
    """
    annotated: list[dict[str, Any]] = [dict(node) for node in nodes]
    if any(node.get("parent") not in (None, number - 1) for number, node in enumerate(nodes)):
        return None if set(names) else annotated
    masks = [np.array(node.get("mask") or [False] * len(node.get("token_ids") or ()), bool) for node in nodes]
    mask = np.concatenate([np.zeros(0, bool), *masks])
    for name in names:
        values = streams.get(name, np.zeros(0))
        if len(values) < len(mask) or np.isnan(values[: len(mask)][mask]).any():
            return None
        end = 0
        for node, sampled in zip(annotated, masks, strict=True):
            start, end = end, end + len(sampled)
            node[name] = values[start:end][sampled].tolist()
    return annotated
