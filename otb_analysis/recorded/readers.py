"""Formats of one row per rollout: texts (plain, TRL, verl), chats (ART), token ids (prime-rl, NeMo-RL, slime, miles).

Each is one function of a row's fields, a tally and the reward columns' weights; traces have a file of their own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Fields, Message, Place, RecordedRollout, Row, Tally, number_in
from otb_analysis.types import Bool, FinishReason, Float

ADDED_BY_TRL = ("step", "advantage", "mode")
"""Numbers in TRL's tables that are no rewards."""
PARALLEL = 1e-3
"""Weights give the advantages where they leave less than this share of the rewards' norm: float32, rounding."""
PADDING = re.compile(r"pad[0-9a-f]{32}")
"""How the uid of a row begins that verl made up to fill a batch."""
PADDED = "synthetic padding row of verl was left out"
UNSCORED = "reward function of TRL gave no number (NaN) and counts as 0, as TRL counts it"
UNSCORABLE = "completion that no reward function could score is left out, as TRL leaves it out of the baseline"
FAILED = "message without a text (content is null) counts as empty"
EARLIER = "output before the last of its session was left out: only the last enters verl's baseline"
UNFINISHED = "sample of slime that was aborted, or wholly masked, was left out"
EXCLUDED = "sample was left out of the loss by its trainer (sample_loss_mask 0) and is kept here"
SLIME_ENDS: dict[str, FinishReason] = {"completed": "stop", "truncated": "length"}
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
SLIME_COLUMNS = {"behavior_logprob": "rollout_log_probs", "logprob": "log_probs", "advantage": "advantages"}


def plain(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read {prompt, completion, reward[, answer, group, step, ids, prompt_ids, mask, logprobs, advantages, …]}.

    `prompt` is a text, or a list of messages with role and content.

    Raises:
        InputError: A field is missing or of another type, or there are several turns and no mask.
    """
    place, prompt, reason = fields.place, fields.row.get("prompt"), "unknown"
    if "turns" in fields and fields.number("turns") > 1 and not ("ids" in fields and "mask" in fields):
        raise InputError(
            f"{place} has {fields.number('turns'):g} turns but no ids with a mask, so nothing says which tokens "
            "the policy sampled and which a tool wrote; add ids and mask."
        )
    if "advantages" in fields and "ids" not in fields:
        raise InputError(f"{place} has advantages but no ids; add the ids of the tokens they are of.")
    if "finish_reason" in fields and (reason := fields.text("finish_reason")) not in get_args(FinishReason):
        raise InputError(f"{place}: finish_reason is {reason!r}; write {', '.join(get_args(FinishReason))}.")
    completion, messages = fields.text("completion"), list[Message]()
    if isinstance(prompt, list):
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise InputError(f"{place}: prompt is a list, so each entry must have a role and a content (a text).")
            messages.append(Message(str(message.get("role", "user")), message["content"], False))
        messages.append(Message("assistant", completion, True))
    return RecordedRollout(
        place=place,
        reward=fields.number("reward"),
        prompt=None if messages else fields.text("prompt"),
        answer=fields.text("answer") if "answer" in fields else None,
        completion=None if messages else completion,
        messages=tuple(messages),
        group=fields.key("group"),
        step=fields.whole_number("step") if "step" in fields else None,
        prompt_ids=fields.ids("prompt_ids") if "prompt_ids" in fields else None,
        ids=fields.ids("ids") if "ids" in fields else None,
        mask=fields.flags("mask") if "mask" in fields else None,
        finish_reason=cast(FinishReason, reason),
        columns=fields.columns(PLAIN_COLUMNS),
        advantage=fields.real("advantage") if "advantage" in fields else None,
        grad_norm=fields.number("grad_norm") if "grad_norm" in fields else None,
    )


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
        stripped=True,
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
    everything, said = dict.fromkeys(names, 1.0), f"reward = {' + '.join(names)}"
    if not any(a.any() for a, _ in groups):
        return everything, f"{said}, with no recorded advantages to check the weights by"
    if _agrees(np.ones(len(names)), groups):
        return everything, f"{said}; the recorded advantages agree"
    w = fitted_weights(groups)
    if not _agrees(w, groups):
        return everything, (
            f"{said}, but no weights of these columns give the recorded advantages; pass --reward-weights with those "
            "that trained"
        )
    found = {name: float(one) for name, one in zip(names, w, strict=True) if one}
    terms = " ".join(f"{'−' if one < 0 else '+'} {abs(one):g} × {name}" for name, one in found.items())
    return found, (
        f"reward = {terms.removeprefix('+ ').replace(' 1 × ', ' ').removeprefix('1 × ')}: the weights that give the "
        f"recorded advantages, which the plain sum {' + '.join(names)} does not; --reward-weights sets others"
    )


def _centred_groups(rows: Iterable[Row]) -> tuple[list[str], list[tuple[Float, Float]]]:
    """Return the reward columns, and of every group its advantages [n] and centred columns [n, K].

    A completion that no function scored is in none; a single missing number counts as 0, as TRL counts it.
    """
    names, groups = list[str](), list[tuple[Float, Float]]()
    for _, part in groupby(rows, key=lambda row: (row["step"], row["prompt"])):
        members = list(part)
        names = names or reward_columns(members[0])
        x = np.array([[np.nan if row.get(name) is None else row[name] for name in names] for row in members], float)
        a = np.array([np.nan if row.get("advantage") is None else row["advantage"] for row in members], float)
        scored = ~np.isnan(x).all(axis=1)
        a, x = a[scored], np.nan_to_num(x[scored])
        if len(a) > 1 and np.isfinite(a).all() and np.isfinite(x).all():
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


def last_outputs(rows: Iterable[tuple[Place, Row]], files: Sequence[Path], tally: Tally) -> Iterator[tuple[Place, Row]]:
    """Yield of every session the last output, with the prompt of its first one; V1 gives the rest its advantage.

    A session's outputs are in one file, one step.
    """
    for _, part in groupby(rows, key=lambda one: one[0].file):
        sessions: dict[str, list[tuple[int, Place, Row]]] = {}
        for place, row in part:
            session, _, output = str(row.get("uid") or "").rpartition("_")
            if session.count("_") and output.isdecimal() and not PADDING.match(session):
                sessions.setdefault(session, []).append((int(output), place, row))
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
        InputError: No message is the policy's, the first one is, or one of the policy's calls tools: then the text that
            was sampled is not recorded.
    """
    messages = []
    for n, row in enumerate(fields.row.get("messages") or []):
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


def prime_rl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a token export of prime-rl: prompt and completion in one list; the prompt's tokens name the group.

    Raises:
        InputError: It has no rewards, which prime-rl writes only where its orchestrator sends them.
    """
    ids, mask = fields.ids("token_ids"), fields.flags("loss_mask")
    if "rewards" not in fields:
        raise InputError(f"{fields.place} has no rewards, only advantages; export rewards too, a run needs them.")
    columns = fields.columns(PRIME_RL_COLUMNS) | {"reward": fields.numbers("rewards")}
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
    for name, values in {"token_loss_mask": mask, **columns}.items():
        if len(values) != len(ids):
            raise InputError(
                f"{fields.place}: {name} has {len(values)} entries but token_ids has {len(ids)}; write one per token."
            )
    paid = "filtered_rewards" if "filtered_rewards" in fields else "rewards"
    columns = {name: values[:length] for name, values in columns.items()}
    columns["reward"] = np.full(length, fields.number(paid))
    return _split(fields, ids[:length], mask[:length], columns, number_in(fields.place.file))


def _split(
    fields: Fields, ids: tuple[int, ...], mask: Bool, columns: dict[str, Float], step: int | None
) -> RecordedRollout:
    """Return a rollout of which prompt and completion stand in one list: the completion begins with the mask."""
    for name, values in {"the mask": mask, **columns}.items():
        if len(values) != len(ids):
            raise InputError(
                f"{fields.place}: {name} has {len(values)} entries but there are {len(ids)} token ids; write one "
                "per token."
            )
    sampled = np.flatnonzero(mask)
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
        ids=ids[first:],
        mask=mask[first:],
        columns={name: values[first:] for name, values in columns.items()},
    )


def slime(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a sample of slime or miles: all tokens, and lists over the response; None for one that does not train.

    The reward is the raw one: `rewards` of training data are normalised within the group.

    Raises:
        InputError: The reward is a dict or only normalised, or the response is longer than all tokens.
    """
    place, row = fields.place, fields.row
    idle = row.get("status") in ("aborted", "pending")
    mask = None if idle else next((fields.flags(n) for n in ("loss_mask", "loss_masks") if n in fields), None)
    if idle or (mask is not None and not mask.any()):
        tally[UNFINISHED] += 1
        return None
    tokens = fields.ids("tokens")
    length = fields.whole_number("response_length" if "response_length" in fields else "response_lengths")
    if length > len(tokens):
        raise InputError(f"{place}: the response has {length} tokens of {len(tokens)}; write its true length.")
    if "rewards" in fields and "raw_reward" not in fields:
        raise InputError(
            f"{place} has rewards that slime normalised, and no raw_reward; pass rollout_data instead of train_data."
        )
    reward = "raw_reward" if "raw_reward" in fields else "reward"
    if isinstance(row.get(reward), dict):
        raise InputError(
            f"{place}: {reward} is a dict ({', '.join(map(str, row[reward]))}); save the one that trained (slime's "
            "--reward-key)."
        )
    cut, prompt, response = len(tokens) - length, row.get("prompt"), row.get("response")
    return RecordedRollout(
        place=place,
        reward=fields.number(reward),
        prompt=prompt if isinstance(prompt, str) else None,
        completion=response if isinstance(response, str) else None,
        group=row.get("group_index"),
        step=fields.whole_number("file_step") if "file_step" in fields else number_in(place.file),
        prompt_ids=tokens[:cut],
        ids=tokens[cut:],
        mask=mask,
        finish_reason="length" if row.get("truncated") else SLIME_ENDS.get(str(row.get("status")), "unknown"),
        columns=fields.columns(SLIME_COLUMNS),
    )


def miles_columns(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Refuse miles's mirror of token columns, which has neither rewards nor groups.

    Raises:
        InputError: Always; miles writes both into the rollout_data beside it.
    """
    raise InputError(
        f"{fields.place}: miles's dashboard_columns have tokens and log-probabilities but no rewards; pass the folder "
        "rollout_data of the same dump, which has both."
    )
