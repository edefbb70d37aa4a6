"""A step's tables without a model: rewards, lengths, and the per-token numbers that were recorded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from otb_analysis.arrays import zero_variance_groups
from otb_analysis.errors import InputError
from otb_analysis.recorded.records import RecordedRollout
from otb_analysis.recorded.steps import RecordedStep
from otb_analysis.store import StepTables
from otb_analysis.types import Bool, Float

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def recorded_tables(step: RecordedStep, tokenizer: "PreTrainedTokenizerBase | None" = None) -> StepTables:
    """Return what is known of a step without a model; what was not recorded is null.

    `tokenizer` decodes token ids; without ids it counts the tokens of texts.
    """
    policy = [_policy_tokens(record, tokenizer) for record in step.records]
    return StepTables(
        tokens=_token_rows(step, tokenizer) if all(record.ids is not None for record in step.records) else None,
        rollouts=_rollout_rows(step, policy, tokenizer),
        steps=_scalars(step, policy, tokenizer),
    )


def provenance(step: RecordedStep) -> dict[str, object]:
    """Return columns of `rollouts` that say where each record stood."""
    return {
        "source_file": [record.place.file.name for record in step.records],
        "source_record": [record.place.number for record in step.records],
    }


def logged_norm(step: RecordedStep) -> dict[str, object]:
    """Return the column of `steps` with the trainer's gradient norm, empty where it was not recorded.

    Raises:
        InputError: Records of the step have different ones.
    """
    first = step.records[0]
    for record in step.records:
        if record.grad_norm != first.grad_norm:
            raise InputError(
                f"{record.place} has grad_norm {record.grad_norm} but record {first.place.number} of the same step has "
                f"{first.grad_norm}; write that of the step's update into all of its records."
            )
    return {} if first.grad_norm is None else {"grad_norm": first.grad_norm}


def _policy_tokens(record: RecordedRollout, tokenizer: "PreTrainedTokenizerBase | None") -> int | None:
    """Return how many tokens the policy sampled; None where neither ids nor a tokenizer says."""
    if (sampled := record.policy_tokens) is not None:
        return int(sampled.sum())
    if tokenizer is None:
        return None
    texts = [message.content for message in record.messages if message.sampled] or [record.completion or ""]
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def completion_text(record: RecordedRollout, tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Return a completion's text; None where only its ids were recorded and nothing decodes them."""
    if record.messages:
        first = next(i for i, message in enumerate(record.messages) if message.sampled)
        return "\n".join(message.content for message in record.messages[first:])
    if record.completion is None and record.ids is not None and tokenizer is not None:
        return str(tokenizer.decode(list(record.ids)))
    return record.completion


def _turns(record: RecordedRollout) -> int:
    if record.messages:
        return sum(message.sampled for message in record.messages)
    sampled = record.policy_tokens
    return 1 if sampled is None else len(_starts(sampled))


def _starts(sampled: Bool) -> np.ndarray:
    """Return where each turn begins: a sampled token behind one that was not."""
    return np.flatnonzero(sampled & ~np.concatenate([[False], sampled[:-1]]))


def _rollout_rows(
    step: RecordedStep, policy: Sequence[int | None], tokenizer: "PreTrainedTokenizerBase | None"
) -> dict[str, object]:
    names, records = step.prompt_ids, step.records
    parts = dict.fromkeys(name for record in records for name in record.reward_parts)
    decoded = [
        r.shown_prompt or (str(tokenizer.decode(list(r.prompt_ids))) if tokenizer and r.prompt_ids else None)
        for r in records
    ]
    return {
        "group": step.group,
        "rollout": np.arange(len(records)),
        "prompt_id": [names[g] for g in step.group],
        "prompt": decoded,
        "answer": [record.answer for record in records],
        "completion": [completion_text(record, tokenizer) for record in records],
        "reward": [record.reward for record in records],
        "length": list(policy),
        "turns": [_turns(record) for record in records],
        "finish_reason": [record.finish_reason for record in records],
        **{f"reward_{name}": [record.reward_parts.get(name) for record in records] for name in parts},
        **provenance(step),
    }


def _scalars(
    step: RecordedStep, policy: Sequence[int | None], tokenizer: "PreTrainedTokenizerBase | None"
) -> dict[str, object]:
    records, reward = step.records, np.array([record.reward for record in step.records])
    lengths = [n for n in policy if n is not None]
    texts = [text for record in records if (text := completion_text(record, tokenizer)) is not None]
    scalars: dict[str, object] = {
        "reward_mean": reward.mean(),
        "reward_std": reward.std(),
        "n_prompts": len(step.prompt_ids),
        "n_rollouts": len(records),
        "n_zero_variance_groups": int(zero_variance_groups(reward, step.group).sum()),
        "n_singleton_groups": int((np.bincount(step.group) == 1).sum()),
    }
    if len(texts) == len(records):
        scalars |= {"n_empty_completions": sum(not text for text in texts)}
        scalars |= {"characters_mean": float(np.mean([len(text) for text in texts]))}
    if all(record.finish_reason != "unknown" for record in records):
        scalars["n_truncated"] = sum(record.finish_reason == "length" for record in records)
    if len(lengths) == len(records):
        scalars |= {"length_mean": float(np.mean(lengths)), "length_max": max(lengths), "n_tokens": sum(lengths)}
    if all(record.prompt_ids is not None for record in records):
        scalars["prompt_length_max"] = max(len(record.prompt_ids or ()) for record in records)
    return scalars | _token_scalars(records) | logged_norm(step)


def _token_scalars(records: Sequence[RecordedRollout]) -> dict[str, object]:
    """Return means over policy tokens of what was recorded; empty where nothing was."""
    inside = {name: _over_policy(records, name) for name in ("logprob", "behavior_logprob", "entropy")}
    scalars: dict[str, object] = {}
    logprob, behavior, entropy = (inside[name] for name in ("logprob", "behavior_logprob", "entropy"))
    if logprob is not None:
        scalars["logprob_mean"] = float(logprob.mean())
    if entropy is not None:
        scalars["entropy_mean"] = float(entropy.mean())
    if logprob is not None and behavior is not None:
        mismatch = logprob - behavior
        scalars |= {"mismatch_mean": float(mismatch.mean()), "mismatch_max": float(np.abs(mismatch).max())}
    return scalars


def _over_policy(records: Sequence[RecordedRollout], name: str) -> Float | None:
    """Return a recorded column at all policy tokens; None where it was not recorded, or there are none."""
    if any(name not in record.columns for record in records):
        return None
    values = [
        record.columns[name] if (m := record.policy_tokens) is None else record.columns[name][m] for record in records
    ]
    whole = np.concatenate(values)
    return whole if whole.size else None


def _token_rows(step: RecordedStep, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, object]:
    """Return a row per completion token; the reward is paid at the last one that the policy sampled."""
    ids = np.concatenate([np.array(record.ids, np.int64) for record in step.records])
    lengths = np.array([len(record.ids or ()) for record in step.records])
    masks = [mask for record in step.records if (mask := record.policy_tokens) is not None]
    mask = np.concatenate(masks)
    rollout, start = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    reward = np.zeros(len(ids))
    for n, (one, record) in enumerate(zip(masks, step.records, strict=True)):
        if one.any():
            reward[start[n] + np.flatnonzero(one)[-1]] = record.reward
    turn = [np.maximum(np.searchsorted(_starts(one), np.arange(len(one)), side="right") - 1, 0) for one in masks]
    columns: dict[str, object] = {
        "group": step.group[rollout],
        "rollout": rollout,
        "turn": np.concatenate(turn),
        "t": np.arange(len(ids)) - start[rollout],
        "token_id": ids,
        "mask": mask,
        "reward": np.ma.masked_array(reward, mask=~mask),
    }
    if tokenizer is not None:
        texts = {i: str(tokenizer.decode([i])) for i in np.unique(ids).tolist()}
        columns["token"] = [texts[i] for i in ids.tolist()]
    for name in step.records[0].columns:
        values = np.concatenate([record.columns[name] for record in step.records])
        columns[name] = np.ma.masked_array(values, mask=~mask | np.isnan(values))
    return columns
