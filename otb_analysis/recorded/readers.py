"""Formats of one row per rollout: texts (plain, TRL, verl), chats (ART), token ids (prime-rl, NeMo-RL).

Each is one function of a row's fields, a tally and the reward columns' weights; traces, and slime's files by rank, have
files of their own.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import (
    Fields,
    Message,
    Place,
    RecordedRollout,
    Row,
    Tally,
    messages_of,
    number_in,
    step_in,
)
from otb_analysis.recorded.traces import MASKED
from otb_analysis.types import Bool, FinishReason, Float

ADDED_BY_TRL = ("step", "advantage", "mode")
"""Numbers in TRL's tables that are no rewards."""
LARGEST = 1e100
"""Rewards from here on are no numbers that weights are looked for with."""
PARALLEL = 1e-3
"""Weights give the advantages where they leave less than this share of the rewards' norm: float32, rounding."""
UNFOLDED = (
    "completion", "reward", "ids", "mask", "logprobs", "trainer_logprobs", "advantages", "advantage", "finish_reason",
)  # fmt: skip
"""Fields of `plain` of which a row of several rollouts has a list."""
NOT_POLICY = ("user", "system", "developer", "tool", "function")
"""Who else may stand alone in the completion of a rollout that failed."""
TOTALS = ("score", "total", "total_reward", "reward")
"""Parts of a reward that are all of it, where one of them is there: verl's score, others' sum."""
BY_TOTAL = "reward is its part {}, and not the sum of all parts"
SUMMED = "reward is the sum of its parts {}"
TOGETHER = "rollouts of one row"
"""A field that such a row's rollouts get: they are a group, whatever its prompt."""
PADDING = re.compile(r"pad[0-9a-f]{32}")
"""How the uid of a row begins that verl made up to fill a batch."""
SESSION = re.compile(r"((.+)_\d+)_(\d+)")
"""What verl's V1 puts into a uid: prompt, session and output. Elsewhere it names a prompt, as `gsm8k_12` does."""
PADDED = "synthetic padding row of verl was left out"
UNSCORED = "reward function of TRL gave no number (NaN) and counts as 0, as TRL counts it"
UNSCORABLE = "completion that no reward function could score is left out, as TRL leaves it out of the baseline"
FAILED = "message without a text (content is null) counts as empty"
UNSCORED_SAMPLE = "sample of Inspect without a score was left out"
LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
ONE_SCORED = "sample has several replies, of which lm-eval scored one: the first is read"
ERRED = "rollout ended with an error and counts with the reward that it was given"
EARLIER = "output before the last of its session was left out: only the last enters verl's baseline"
BY_NAME = "record without a step is of the step that the name of its file or folder says"
EXCLUDED = "sample was left out of the loss by its trainer (sample_loss_mask 0) and is kept here"
PLAIN_FIELDS = (
    "prompt", "completion", "reward", "answer", "group", "step", "prompt_ids", "ids", "mask", "logprobs",
    "trainer_logprobs", "advantages", "advantage", "finish_reason", "turns", "grad_norm",
)  # fmt: skip
# Our columns → fields
PLAIN_COLUMNS = {"behavior_logprob": "logprobs", "logprob": "trainer_logprobs", "advantage": "advantages"}
PRIME_RL_COLUMNS = {
    "behavior_logprob": "inference_logprobs",
    "logprob": "trainer_logprobs",
    "entropy": "entropy",
    "advantage": "advantages",
}
OPEN_INSTRUCT_COLUMNS = {"behavior_logprob": "logprobs"}
NEMO_RL_COLUMNS = {"behavior_logprob": "generation_logprobs", "logprob": "prev_logprobs"}


def plain(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read {prompt, completion, reward[, answer, group, step, ids, prompt_ids, mask, logprobs, advantages, …]}.

    Prompt and completion are texts, lists of messages with role and content, or token ids alone. The reward is a
    number, an object of named parts, or a list by token or turn; the last two are summed.

    Raises:
        InputError: A field is missing or of another type, or there are several turns and no mask.
    """
    place, prompt, reason = fields.place, fields.row.get("prompt"), "unknown"
    if "turns" in fields and fields.number("turns") > 1 and not ("ids" in fields and "mask" in fields):
        raise InputError(
            f"{place} has {fields.number('turns'):g} turns but no ids with a mask, so nothing says which tokens "
            "the policy sampled and which a tool wrote; add ids and mask."
        )
    if isinstance(fields.row.get("advantages"), int | float):  # one for all tokens
        fields = replace(fields, row={**fields.row, "advantage": fields.row["advantages"], "advantages": None})
    if "advantages" in fields and "ids" not in fields:
        raise InputError(f"{place} has advantages but no ids; add the ids of the tokens they are of.")
    if "finish_reason" in fields and (reason := fields.text("finish_reason")) not in get_args(FinishReason):
        raise InputError(f"{place}: finish_reason is {reason!r}; write {', '.join(get_args(FinishReason))}.")
    completion, messages = fields.row.get("completion"), list[Message]()
    if isinstance(prompt, list) or isinstance(completion, list):
        messages = chat_of(fields, tally)
    prompted, given = ("prompt" in fields or "prompt_ids" not in fields), "completion" in fields or "ids" not in fields
    parts, paid = fields.parts("reward"), fields.row["reward"]
    total = next((name for name in TOTALS if name in parts and isinstance(paid, dict) and len(parts) > 1), "")
    if isinstance(paid, dict) and len(parts) > 1:
        tally.note(BY_TOTAL.format(total) if total else SUMMED.format(" + ".join(parts)), place)
    ids, mask = (fields.ids("ids") if "ids" in fields else None), (fields.flags("mask") if "mask" in fields else None)
    turns = 1 if mask is None else int((np.diff(mask, prepend=False) & mask).sum())
    if isinstance(paid, list) and ids is not None and len(paid) not in (1, len(ids), turns):
        raise InputError(
            f"{place}: {fields.named('reward')} has {len(paid)} entries, but there are {len(ids)} completion tokens in "
            f"{turns} turns; write one per token, one per turn, or their sum."
        )
    return RecordedRollout(
        place=place,
        reward=parts[total] if total else sum(parts.values()),
        reward_parts=parts if isinstance(paid, dict) else {},
        prompt=None if messages or not prompted else fields.text("prompt"),
        answer=str(fields.key("answer")) if "answer" in fields else None,
        completion=None if messages or not given else fields.text("completion"),
        messages=tuple(messages),
        group=str(place) if TOGETHER in fields and "group" not in fields else fields.key("group"),
        step=step_of(fields, tally),
        prompt_ids=fields.ids("prompt_ids") if "prompt_ids" in fields else None,
        ids=ids,
        mask=mask,
        finish_reason=cast(FinishReason, reason),
        columns=fields.columns(PLAIN_COLUMNS),
        advantage=fields.real("advantage") if "advantage" in fields else None,
        grad_norm=fields.number("grad_norm") if "grad_norm" in fields else None,
    )


def step_of(fields: Fields, tally: Tally) -> int | None:
    """Return the step of a record, or that of its file's or folder's name, which is counted; None without either."""
    if "step" in fields:
        return fields.whole_number("step")
    if (named := step_in(fields.place.file)) is not None:
        tally.note(BY_NAME, fields.place)
    return named


def chat_of(fields: Fields, tally: Tally) -> list[Message]:
    """Return the messages of prompt and completion, in which the assistant's are the policy's; at least one is.

    Raises:
        InputError: A message is none, or there is no prompt.
    """
    prompt = messages_of(fields.row.get("prompt"), fields.named("prompt"), fields.place)
    recorded = fields.row.get("completion")
    turns = messages_of(recorded or "", fields.named("completion"), fields.place, sampled=True)
    if not prompt:
        raise InputError(f"{fields.place}: {fields.named('prompt')} is empty; give every rollout a prompt.")
    if not any(message.sampled for message in turns) and (role := {m.role for m in turns}.difference(NOT_POLICY)):
        raise InputError(
            f"{fields.place}: {fields.named('completion')} has messages of {', '.join(sorted(role))} and none of the "
            "assistant; write assistant for the policy."
        )
    if isinstance(recorded, list):
        tally[FAILED] += sum(m.sampled and not m.content and not m.lacks for m in turns[: len(recorded)])
    return [*prompt, *turns] if any(message.sampled for message in turns) else [*prompt, Message("assistant", "", True)]


def unfolded(row: Row) -> Iterator[Row]:
    """Yield the rollouts of a row that has a list of completions, or of their ids, and a list of their rewards."""
    made, paid = row.get("completion", row.get("ids")), row.get("reward")
    if not (isinstance(made, list) and isinstance(paid, list) and made and len(made) == len(paid)):
        yield row
    elif all(isinstance(one, list) or (isinstance(one, str) and "completion" in row) for one in made):
        lists = [name for name in UNFOLDED if isinstance(row.get(name), list) and len(row[name]) == len(made)]
        for n in range(len(made)):
            yield {**row, **{name: row[name][n] for name in lists}, TOGETHER: True}
    else:
        yield row


def results(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a line of an evaluation that verifiers wrote before it wrote traces: messages, and a reward by example."""
    metrics = fields.row.get("metrics") or {}
    tally[ERRED] += bool(fields.row.get("error"))
    return RecordedRollout(
        place=fields.place,
        reward=fields.number("reward"),
        reward_parts={n: float(x) for n, x in metrics.items() if isinstance(x, int | float) and np.isfinite(x)},
        answer=str(fields.row["answer"]) if "answer" in fields else None,
        messages=tuple(chat_of(fields, tally)),
        group=fields.key("example_id"),
        step=step_of(fields, tally) or 0,
        finish_reason="length" if fields.row.get("is_truncated") else "unknown",
    )


def lm_eval(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a sample of lm-evaluation-harness: the request's text, its first reply, and its first metric as reward.

    Groups are the replies to one request, in one step: those of several files, each of a run of its own.

    Raises:
        InputError: The sample has no generated text, as those of multiple choice, or no metric.
    """
    row, asked = fields.row, fields.row.get("arguments")
    first = next(iter(asked.values() if isinstance(asked, dict) else asked or [None]))
    prompt = first.get("arg_0") if isinstance(first, dict) else first[0] if isinstance(first, list) and first else first
    replies = (row.get("resps") or [None])[0]
    texts = [one for one in (replies if isinstance(replies, list) else [replies]) if isinstance(one, str)]
    if not texts or not isinstance(prompt, str) or len(row["resps"]) > 1:
        raise InputError(
            f"{fields.place}: resps has no single generated text for its arguments, as with multiple choice; pass "
            "samples of tasks that generate (generate_until)."
        )
    if len(texts) > 1:
        tally.note(ONE_SCORED, fields.place)
    numbers = [n for n, x in row.items() if isinstance(x, int | float) and n != "doc_id"]
    paid = {n: float(row[n]) for n in row.get("metrics") or numbers if n in numbers and np.isfinite(row[n])}
    if not paid:
        raise InputError(f"{fields.place} has no metric that is a number; it has {', '.join(row)}.")
    target = row.get("target")
    return RecordedRollout(
        place=fields.place,
        reward=next(iter(paid.values())),
        reward_parts=paid,
        prompt=prompt,
        completion=texts[0],
        answer=None if target is None else str(target),
        step=0,
    )


def inspect(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a sample of an Inspect log: its messages, and its first score; epochs of one sample are a group.

    Letters count as Inspect's `value_to_float` has them: C 1, P ½, I and N 0. None for a sample without a score.

    Raises:
        InputError: The score is neither a number nor one of those letters.
    """
    scores = fields.row.get("scores") or {}
    values = {name: score.get("value") for name, score in scores.items()}
    if not values:
        tally.note(UNSCORED_SAMPLE, fields.place)
        return None
    paid = {name: LETTERS.get(x, x) if isinstance(x, str) else x for name, x in values.items()}
    target, limit = fields.row.get("target"), fields.row.get("limit")
    history = messages_of(fields.row.get("messages") or [], "messages", fields.place, sampled=True)
    if not history or history[0].sampled or not any(message.sampled for message in history):
        text = (fields.row.get("output") or {}).get("completion") or ""
        history = [*messages_of(fields.row.get("input"), "input", fields.place), Message("assistant", str(text), True)]
    return RecordedRollout(
        place=fields.place,
        reward=Fields(fields.place, {"scores": next(iter(paid.values()))}).parts("scores")["scores"],
        reward_parts={name: float(x) for name, x in paid.items() if isinstance(x, int | float) and np.isfinite(x)},
        messages=tuple(history),
        answer=target if isinstance(target, str) else None,
        group=fields.key("id"),
        step=0,
        finish_reason="length" if limit else "unknown",
    )


def samples_of(row: Row) -> Iterator[Row]:
    """Yield the samples of a whole Inspect log, or the row itself."""
    samples = row.get("samples")
    yield from samples if isinstance(samples, list) and all(isinstance(one, dict) for one in samples) else [row]


def first_filter(rows: Iterable[tuple[Place, Row]], files: Sequence[Path], tally: Tally) -> Iterator[tuple[Place, Row]]:
    """Yield lm-eval's samples under the first filter of each file; the same replies come again under every filter."""
    filters = dict[Path, object]()
    for place, row in rows:
        if filters.setdefault(place.file, row.get("filter")) == row.get("filter"):
            yield place, row
        else:
            tally.note(f"sample under another filter than {filters[place.file]} was left out", place)


def trl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a row of TRL: the reward is the weighted sum of its reward columns, by default of every number.

    None for a completion that no reward function could score, which TRL leaves out of the baseline.

    Raises:
        InputError: It has no reward column, or lacks one that was asked for.
    """
    row = fields.row
    used = dict(weights) or dict.fromkeys(reward_columns(row), 1.0)
    if not used:
        raise InputError(f"{fields.place} has no reward column, which is a number; it has {', '.join(row)}.")
    # NaN is the number that differs from itself.
    parts = {name: fields.number(name) for name in used if name in fields and row[name] == row[name]}
    if not parts:
        tally.fault(UNSCORABLE, fields.place)
        return None
    tally[UNSCORED] += len(used) - len(parts)
    return RecordedRollout(
        place=fields.place,
        reward=sum(used[name] * value for name, value in parts.items()),
        prompt=fields.text("prompt"),
        completion=fields.text("completion"),
        special="removed",
        step=fields.whole_number("step"),
        advantage=fields.real("advantage"),
        reward_parts=parts,
    )


def reward_columns(row: Row) -> list[str]:
    """Return the columns of TRL's table that may be rewards: numbers that TRL did not add."""
    numbers = [n for n, x in row.items() if x is None or (isinstance(x, int | float) and not isinstance(x, bool))]
    return [name for name in numbers if name not in ADDED_BY_TRL]


def trl_weights(rows: Iterable[Row]) -> tuple[dict[str, float], str]:
    """Return the weights of TRL's reward columns that the recorded advantages agree with, and what to say of them.

    TRL writes rewards without their weights (`reward_weights`), and numbers that a reward function logged beside them.
    So weights are looked for where the plain sum of all columns does not give the recorded advantages.
    """
    names, groups = _centred_groups(rows)
    everything, words = dict.fromkeys(names, 1.0), f"reward = {' + '.join(names)}"
    if not any(a.any() for a, _ in groups):
        return everything, f"{words}, with no recorded advantages to check the weights by"
    if _agrees(np.ones(len(names)), groups):
        return everything, f"{words}; the recorded advantages agree"
    w = fitted_weights(groups)
    if not _agrees(w, groups):
        return everything, (
            f"{words}, but no weights of these columns give the recorded advantages; pass --reward-weights with those "
            "that trained"
        )
    weights = {name: float(one) for name, one in zip(names, w, strict=True) if one}
    terms = " ".join(f"{'−' if one < 0 else '+'} {abs(one):g} × {name}" for name, one in weights.items())
    return weights, (
        f"reward = {terms.removeprefix('+ ').replace(' 1 × ', ' ').removeprefix('1 × ')}: the weights that give the "
        f"recorded advantages, which the plain sum {' + '.join(names)} does not; --reward-weights sets others"
    )


def _centred_groups(rows: Iterable[Row]) -> tuple[list[str], list[tuple[Float, Float]]]:
    """Return the reward columns, and of every group its advantages [n] and centred columns [n, K].

    A completion that no function scored is in none; a single missing number counts as 0, as TRL counts it.
    """
    names, groups = list[str](), list[tuple[Float, Float]]()
    stretches = [list(part) for _, part in groupby(rows, key=lambda row: (row["step"], row["prompt"]))]
    usual = max(Counter(map(len, stretches)).items(), key=lambda of: (of[1], -of[0]), default=(1, 0))[0]
    # A question that stands twice in a row is several groups.
    sizes = [usual if len(part) % usual == 0 else len(part) for part in stretches]
    for members in (p[k : k + n] for p, n in zip(stretches, sizes, strict=True) for k in range(0, len(p), n)):
        names = names or reward_columns(members[0])
        x = np.array([[np.nan if row.get(name) is None else row[name] for name in names] for row in members], float)
        a = np.array([np.nan if row.get("advantage") is None else row["advantage"] for row in members], float)
        scored = ~np.isnan(x).all(axis=1)
        a, x = a[scored], np.where(np.isnan(x[scored]), 0.0, x[scored])
        if len(a) > 1 and np.isfinite(a).all() and (np.abs(x) < LARGEST).all():
            groups.append((a, x - x.mean(axis=0)))
    return names, groups


def _agrees(w: Float, groups: Sequence[tuple[Float, Float]]) -> bool:
    """Return whether centred rewards x @ w are parallel to the advantages of every group, and of their sign."""
    along = across = size = 0.0
    for a, x in groups:
        reward, unit = x @ w, a / (np.linalg.norm(a) or 1.0)
        along += float(unit @ reward)
        across += float(np.square(reward - unit * (unit @ reward)).sum())
        size += float(np.square(reward).sum())
    return along > 0 and across < PARALLEL**2 * size


def fitted_weights(groups: Sequence[tuple[Float, Float]]) -> Float:
    """Return weights [K] of centred reward columns with which they are parallel to every group's advantages.

    An advantage is a centred reward, over a standard deviation or not. Where plain least squares of advantages [n] on
    columns [n, K] fits round numbers, it gives the scale too. Else w is the smallest right singular vector of all
    x − â âᵀx, and the first column weighs ±1. Columns without variance within groups, and those whose part is lost in
    rounding, get 0.
    """
    a, x = (np.concatenate(both) for both in zip(*groups, strict=True))
    scale = np.linalg.norm(x, axis=0)
    varies = scale > 1e-9 * scale.max(initial=0.0)
    w = np.zeros(len(scale))
    if not varies.any():
        return w
    scaled = x[:, varies] / scale[varies]
    w[varies], *_ = np.linalg.lstsq(scaled, a, rcond=None)
    exact = np.linalg.norm(a - scaled @ w[varies]) < PARALLEL * np.linalg.norm(a)
    if not exact:
        units = ((u / (np.linalg.norm(u) or 1.0), part[:, varies] / scale[varies]) for u, part in groups)
        _, _, right = np.linalg.svd(np.concatenate([part - np.outer(u, u @ part) for u, part in units]), False)
        w[varies] = right[-1] * np.sign(a @ (scaled @ right[-1]))
    w[np.abs(w) <= PARALLEL * np.abs(w).max()] = 0.0
    w[varies] /= scale[varies]
    short = _three_digits(w)
    # Weights that somebody chose are round numbers; others were divided by the standard deviation of a whole step.
    if exact and np.allclose(w, short, rtol=1e-5):
        return short
    w = w / np.abs(w[w != 0][0]) if w.any() else w
    return short if _agrees(short := _three_digits(w), groups) else w


def _three_digits(w: Float) -> Float:
    return np.array([float(f"{one:.3g}") for one in w])


def open_instruct(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a rollout of open-instruct: token ids, one advantage, and the number of its prompt within the step."""
    ids, prompt = fields.ids("response_tokens"), fields.whole_number("prompt_idx")
    end = str(fields.row.get("finish_reason"))
    return RecordedRollout(
        place=fields.place,
        reward=fields.number("reward"),
        group=prompt,
        step=fields.whole_number("step"),
        prompt_ids=fields.ids("prompt_tokens"),
        ids=ids,
        mask=fields.flags("response_mask") if "response_mask" in fields else None,
        finish_reason=cast(FinishReason, end) if end in get_args(FinishReason) else "unknown",
        columns=fields.columns(OPEN_INSTRUCT_COLUMNS),
        advantage=fields.real("advantage") if "advantage" in fields else None,
    )


def verl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a row of verl; None for one that was made up to fill a batch.

    V1 names prompt, session and output in `uid`; V0 has none, and the prompt decides.
    """
    uid = fields.text("uid") if "uid" in fields else None
    session = SESSION.fullmatch(uid or "")
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
        special="removed",
        group=session[2] if session else uid,
        step=fields.whole_number("step"),
    )


def last_outputs(rows: Iterable[tuple[Place, Row]], files: Sequence[Path], tally: Tally) -> Iterator[tuple[Place, Row]]:
    """Yield of every session the last output, with the prompt of its first one; V1 gives the rest its advantage.

    A session's outputs are in one file, one step.
    """
    for _, part in groupby(rows, key=lambda one: one[0].file):
        sessions: dict[str, list[tuple[int, Place, Row]]] = {}
        for place, row in part:
            session = SESSION.fullmatch(str(row.get("uid") or ""))
            if session and not PADDING.match(session[1]):
                sessions.setdefault(session[1], []).append((int(session[3]), place, row))
            else:
                yield place, row
        for outputs in sessions.values():
            outputs.sort(key=lambda one: one[0])
            for _, place, _ in outputs[:-1]:
                tally.note(EARLIER, place)
            yield outputs[-1][1], {**outputs[-1][2], "input": outputs[0][2].get("input")}


def art(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a trajectory of ART; its messages say which of them the policy wrote (`trainable`).

    The step is the number in the file's name.

    Raises:
        InputError: No message is the policy's, or the first one is.
    """
    messages = []
    for row in fields.row.get("messages") or []:
        tally[FAILED] += row.get("content") is None and not row.get("tool_calls")
        (message,) = messages_of([row], "messages", fields.place)
        messages.append(replace(message, sampled=bool(row.get("trainable"))))
    if not any(message.sampled for message in messages) or messages[0].sampled:
        raise InputError(
            f"{fields.place} has no message of the policy behind a prompt (trainable, not the first); leave it out."
        )
    return RecordedRollout(
        place=fields.place,
        reward=fields.number("reward"),
        messages=tuple(messages),
        tools=tuple(json.loads(fields.row.get("tools") or "[]")),
        group=fields.whole_number("group_index"),
        step=number_in(fields.place.file),
    )


def areal(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a trajectory of AReaL, whose texts have their special tokens.

    A task is a group, and its step the newest weights that wrote a token of it (`tail_version`). Tasks that AReaL
    rejected are written like others.
    """
    return RecordedRollout(
        place=fields.place,
        reward=fields.number("reward"),
        prompt=fields.text("prompt"),
        completion=fields.text("completion"),
        special="kept",
        n_tokens=fields.whole_number("seqlen") - fields.whole_number("prompt_len"),
        group=fields.whole_number("task_id"),
        step=fields.whole_number("tail_version"),
    )


def prime_rl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a token export of prime-rl: prompt and completion in one list; the prompt's tokens name the group.

    Raises:
        InputError: It has no rewards, which prime-rl writes only where its orchestrator sends them.
    """
    ids, mask = fields.ids("token_ids"), fields.flags("loss_mask")
    if "rewards" not in fields:
        raise InputError(f"{fields.place} has no rewards, only advantages; export rewards too, a run needs them.")
    columns = fields.columns(PRIME_RL_COLUMNS) | {"reward": fields.numbers("rewards")}
    if "is_masked" in fields:
        tally[MASKED] += int(fields.flags("is_masked").sum())
    step = fields.whole_number("export_step" if "export_step" in fields else "step")
    return _split(fields, ids, mask, columns, step)


def nemo_rl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a sample of NeMo-RL, padded; the step is in the file's name, the prompt's tokens name the group.

    Every value is a list of one, since a sample is written as a batch of one. With dynamic sampling the rewards of the
    samples that train are `filtered_rewards`.
    """
    alone = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in fields.row.items()}
    fields = Fields(fields.place, alone)
    ids, mask = fields.ids("token_ids"), fields.flags("token_loss_mask")
    length = fields.whole_number("input_lengths") if "input_lengths" in fields else len(ids)
    if "sample_loss_mask" in fields and not fields.number("sample_loss_mask"):
        tally[EXCLUDED] += 1
    columns = fields.columns(NEMO_RL_COLUMNS)
    if "advantages" in fields:  # one per token, or one of the rollout
        one = np.size(alone["advantages"]) == 1
        columns["advantage"] = np.full(len(ids), fields.number("advantages")) if one else fields.numbers("advantages")
    paid = fields.number("filtered_rewards" if "filtered_rewards" in fields else "rewards")
    columns["reward"] = np.full(max(length, len(ids)), paid)  # a length beyond the tokens is refused below
    return _split(fields, ids, mask, columns, number_in(fields.place.file), length)


def _split(
    fields: Fields,
    ids: tuple[int, ...],
    mask: Bool,
    columns: dict[str, Float],
    step: int | None,
    length: int | None = None,
) -> RecordedRollout:
    """Return a rollout of which prompt and completion stand in one list: the completion begins with the mask.

    What stands behind `length` tokens is padding.
    """
    for name, values in {"the mask": mask, **columns}.items():
        if len(values) != len(ids):
            raise InputError(
                f"{fields.place}: {name} has {len(values)} entries but there are {len(ids)} token ids; write one "
                "per token."
            )
    sampled = np.flatnonzero(mask[:length])
    if not len(sampled) or not sampled[0]:
        what = "no token" if not len(sampled) else "the first token, so there is no prompt"
        raise InputError(f"{fields.place}: the mask has {what}; a rollout is a prompt and sampled tokens.")
    first = int(sampled[0])
    paid = columns.pop("reward")[sampled]
    if not np.isfinite(paid).all() or (paid != paid[0]).any():
        raise InputError(f"{fields.place}: its rewards are not one finite number; a rollout has one total reward.")
    return RecordedRollout(
        place=fields.place,
        reward=float(paid[0]),
        step=step,
        prompt_ids=ids[:first],
        ids=ids[first:length],
        mask=mask[first:length],
        columns={name: values[first:length] for name, values in columns.items()},
    )
