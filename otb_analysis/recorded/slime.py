"""Dumps of slime and miles: what the sampler made and what every rank trained on, one sample for each rollout.

`rollout_data/{id}.pt` has texts, groups and rewards; `train_data/{id}.pt` (slime) or `{id}_{rank}.pt` (miles) the
trainer's numbers: a part of the samples in each file, the same ones in those of tensor-parallel ranks, and slices of
the lists per token in those of context-parallel ones.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Fields, Place, RecordedRollout, Row, Tally, number_in, rows_of
from otb_analysis.types import FinishReason, Float, Int

UNFINISHED = "sample of slime that was aborted was left out"
UNTRAINED = "sample has no token that trains (remove_sample, or wholly masked): it counts in its group's rewards only"
NOT_TRAINED = "sample of rollout_data was left out, because train_data has none like it"
EARLIER = "sample before the last of its rollout_id was left out: one execution is one rollout"
SLIME_ENDS: dict[str, FinishReason] = {"completed": "stop", "truncated": "length"}
SLIME_COLUMNS = {"behavior_logprob": "rollout_log_probs", "logprob": "log_probs", "advantage": "advantages"}
"""Our columns → fields, all of which context-parallel ranks cut into slices."""
DUMPS = ("rollout_data", "train_data")
"""Folders of `dump_details`."""
PARALLEL = 1e-3
"""Normalised rewards are those of raw ones where they are parallel to them within every group, to this share."""
Sample = tuple[Place, Row]


def slime(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a sample of slime or miles: all tokens, and lists over the response; None for one that was aborted.

    The reward is the raw one: `rewards` of training data are normalised within the group. A sample that does not train
    has an empty mask.

    Raises:
        InputError: The reward is a dict or only normalised, or the response is longer than all tokens.
    """
    place, row = fields.place, fields.row
    if row.get("status") in ("aborted", "pending"):
        tally.note(UNFINISHED, place)
        return None
    tokens = fields.ids("tokens")
    length = fields.whole_number("response_length" if "response_length" in fields else "response_lengths")
    if length > len(tokens):
        raise InputError(f"{place}: the response has {length} tokens of {len(tokens)}; write its true length.")
    mask = next((fields.flags(n) for n in ("loss_mask", "loss_masks") if n in fields), np.ones(length, bool))
    mask &= not row.get("remove_sample")
    if not mask.any():
        tally.note(UNTRAINED, place)
    if "rewards" in fields and "raw_reward" not in fields:
        raise InputError(
            f"{place} has rewards that slime normalised, and no raw_reward of its own; pass the folder that has both "
            "rollout_data and train_data (dump_details), or rollout_data alone."
        )
    reward = "raw_reward" if "raw_reward" in fields else "reward"
    if isinstance(row.get(reward), dict):
        raise InputError(
            f"{place}: {reward} is a dict ({', '.join(map(str, row[reward]))}); save the one that trained (slime's "
            "--reward-key), or pass train_data beside rollout_data."
        )
    cut, prompt, response = len(tokens) - length, row.get("prompt"), row.get("response")
    return RecordedRollout(
        place=place,
        reward=fields.number(reward),
        prompt=prompt if isinstance(prompt, str) else None,
        completion=response if isinstance(response, str) else None,
        group=fields.key("group_index"),
        step=fields.whole_number("file_step") if "file_step" in fields else number_in(place.file),
        prompt_ids=tokens[:cut],
        opening=row.get("opening"),
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


def joined(rows: Iterable[Sample], files: Sequence[Path], tally: Tally) -> Iterator[Sample]:
    """Yield each sample once, step by step, whatever files hold parts of it; a step's files are in memory together.

    Files belong together where their names have the same id (`7.pt`, `7_0.pt`) in one dump. They are read here, since
    `rows` come file after file.
    """
    parts = dict[tuple[Path, str], list[Path]]()
    for file in files:
        root = file.parent.parent if file.parent.name in DUMPS else file.parent
        named = re.search(r"(\d+)(_\d+)?$", file.stem)
        parts.setdefault((root, named[1] if named else file.stem), []).append(file)
    both = {file.parent.name for file in files} >= set(DUMPS)
    for together in parts.values():
        steps = dict[object, list[Sample]]()  # what a file says of itself counts, not its name
        for place, row in chain.from_iterable(rows_of(file, tally) for file in together):
            steps.setdefault(row.get("file_step"), []).append((place, row))
        for samples in steps.values():
            trained = [sample for sample in samples if "response_lengths" in sample[1]]
            sampled = [sample for sample in samples if "response_lengths" not in sample[1]]
            yield from _last_of_each(_matched(sampled, trained, tally) if trained or both else sampled, tally)


def _matched(sampled: list[Sample], trained: list[Sample], tally: Tally) -> list[Sample]:
    """Return a step's samples as they trained, with what the sampler's dump says of them where there is one."""
    parts = dict[object, list[Sample]]()
    # What tells a sample from others of its step: its place in the sampler's dump, or its index.
    marks = dict.fromkeys(("rollout_position", "partition"), "position")
    marks |= dict.fromkeys(("sample_index", "sample_indices"), "index")
    for n, sample in enumerate(trained):
        keys = ((kind, int(sample[1][name])) for name, kind in marks.items() if sample[1].get(name) is not None)
        parts.setdefault(next(keys, ("row", n)), []).append(sample)
    whole = {key: _assembled(ranks) for key, ranks in parts.items()}
    if not sampled:
        ordered = sorted(whole, key=lambda key: key[1] if isinstance(key, tuple) else 0)
        return _with_raw_rewards([whole[key] for key in ordered])
    indices = [row.get("index") for _, row in sampled]
    unique = indices if len(set(indices)) == len(indices) else [None] * len(indices)
    samples = list[Sample]()
    for n, (place, row) in enumerate(sampled):
        there = next((key for key in (("position", n), ("index", unique[n])) if key in whole), None)
        if there is None:
            tally.note(NOT_TRAINED, place)
            continue
        where, train = whole.pop(there)
        if _tokens(train) != _tokens(row):
            raise InputError(
                f"{where} has other tokens than {place}, though both are of {there[0]} {there[1]}; pass the "
                "rollout_data and train_data of one run, or one of them alone."
            )
        raw, several = train.get("batch_raw_reward"), isinstance(row.get("reward"), dict)
        paid = {"raw_reward": raw[n] if several and raw is not None and len(raw) > n else None, "rewards": None}
        samples.append((place, {**train, **{k: v for k, v in row.items() if v is not None}, **paid}))
    if whole:
        where, row = next(iter(whole.values()))
        raise InputError(f"{where} is a sample that rollout_data beside it does not have; pass one of them alone.")
    return samples


def _tokens(row: Row) -> list[int]:
    return np.asarray(row["tokens"], np.int64).tolist()


def _assembled(ranks: Sequence[Sample]) -> Sample:
    """Return a sample of which every rank has a copy, or its slice of the lists per token.

    Context-parallel rank r of s has chunks r and 2s − 1 − r of 2s equal ones of the sequence, the prompt included; a
    log-probability stands where its logit does, one place before its token.

    Raises:
        InputError: A rank's slice is missing, or has another length.
    """
    place, row = ranks[0]
    size, lists = int(row.get("cp_size") or 1), dict[str, object]()
    for name in SLIME_COLUMNS.values():
        # Pipeline stages leave out what the last one alone computes; tensor-parallel ranks have the same.
        slices = dict[int, Float]()
        for _, one in ranks[::-1]:
            if (values := one.get(name)) is not None:
                listed = values.tolist() if hasattr(values, "tolist") else values
                slices[int(one.get("cp_rank") or 0)] = np.array(listed, np.float64)
        if not slices:
            continue
        if size == 1:
            lists[name] = slices[0]
            continue
        length, total = int(row["response_lengths"]), len(row["tokens"])
        widest = row.get("max_seq_lens") if row.get("qkv_format", "thd") != "thd" else None  # padded to it
        lists[name] = whole = np.full(length, np.nan)
        chunk = -(-int(total if widest is None else widest) // (2 * size))
        for rank in range(size):
            at: Int = np.concatenate([np.arange(chunk) + part * chunk for part in (rank, 2 * size - 1 - rank)])
            at = at[(at >= total - length - 1) & (at < total - 1)] - (total - length - 1)
            if rank not in slices or len(slices[rank]) != len(at):
                has = f"{len(slices[rank])} entries, not {len(at)}" if rank in slices else "none"
                raise InputError(
                    f"{place}: {name} is cut into slices of {size} context-parallel ranks (cp_size), and of cp_rank "
                    f"{rank} there are {has}; pass the files of all ranks, or rollout_data alone."
                )
            whole[at] = slices[rank]
    return place, {**row, **lists}


def _with_raw_rewards(samples: list[Sample]) -> list[Sample]:
    """Return samples without a sampler's dump with the raw rewards of the batch, where their places in it are sure.

    A rank's samples may stand in another order. In theirs the normalised rewards must be those of the raw ones.
    """
    if not samples or samples[0][1].get("raw_reward") is not None:
        return samples
    raw = samples[0][1].get("batch_raw_reward")
    rewards = [row.get("rewards") for _, row in samples]
    if raw is None or len(raw) != len(samples) or any(reward is None for reward in rewards):
        return samples
    prompts = [str(_tokens(row)[: -int(row["response_lengths"]) or None]) for _, row in samples]
    x, y = np.array(raw, np.float64), np.array(rewards, np.float64)
    for prompt in set(prompts):
        rows = np.array([other == prompt for other in prompts])
        a, b = x[rows] - x[rows].mean(), y[rows] - y[rows].mean()
        product = float(np.linalg.norm(a) * np.linalg.norm(b))
        if bool(np.ptp(x[rows])) != bool(np.ptp(y[rows])) or a @ b < (1 - PARALLEL) * product:
            return samples
    return [(place, {**row, "raw_reward": one}) for (place, row), one in zip(samples, raw, strict=True)]


def _last_of_each(samples: Sequence[Sample], tally: Tally) -> Iterator[Sample]:
    """Yield of every execution its last sample; siblings of one `rollout_id` share a reward and count once.

    The last one's `opening` is the prompt of the first: that of the group.
    """
    executions = dict[object, list[Sample]]()
    groups = dict[object, set[object]]()
    for n, (place, row) in enumerate(samples):
        execution = next((row[name] for name in ("rollout_id", "rollout_ids") if row.get(name) is not None), None)
        key = ("row", n) if execution is None else int(execution)
        executions.setdefault(key, []).append((place, row))
        groups.setdefault(key, set()).add(row.get("group_index"))
    # One id for everything, or for several groups, names no execution.
    if len(executions) == 1 or any(len(indices) > 1 for indices in groups.values()):
        yield from samples
        return
    for siblings in executions.values():
        for place, _ in siblings[:-1]:
            tally.note(EARLIER, place)
        first, (place, last) = siblings[0][1], siblings[-1]
        if len(siblings) == 1:
            yield place, last
            continue
        length = int(first["response_length" if "response_length" in first else "response_lengths"])
        tokens = _tokens(first)
        yield place, {**last, "opening": tuple(tokens[: len(tokens) - length])}
