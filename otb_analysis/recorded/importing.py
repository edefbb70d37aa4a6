"""`otb import`: recorded rollouts as a run, without a model; what was not recorded is null."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from otb_analysis.arrays import zero_variance_groups
from otb_analysis.config.audit import ImportConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import require_models
from otb_analysis.phases import note, phase
from otb_analysis.recorded.records import RecordedRollout
from otb_analysis.recorded.runs import record_run, remaining_estimators, run_path, source_of, stored_config
from otb_analysis.recorded.steps import RecordedStep
from otb_analysis.store import RunStore, StepTables
from otb_analysis.types import Bool, Int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def import_rollouts(rollouts: Path, config: ImportConfig) -> Path:
    """Make a run of recorded rollouts and return its directory.

    Raises:
        InputError: The rollouts or a setting cannot work, or a record is refused; the steps before it stay.
        StoreError: The store cannot be read or written.
    """
    source = source_of(rollouts, config)
    tokenizer = None
    if config.tokenizer:
        if not Path(config.tokenizer).is_dir():
            raise InputError(f"--tokenizer is {config.tokenizer!r}, which is no directory; pass the model's.")
        require_models("--tokenizer")
        with phase(f"loading the tokenizer {config.tokenizer}"):
            from otb_analysis.rollouts.models import load_tokenizer

            tokenizer = load_tokenizer(config.tokenizer)
    path = run_path(rollouts, config, "imported")
    stored = stored_config(config, source, "otb import", {})
    record_run(path, config, stored, source, lambda step: recorded_tables(step, tokenizer))
    names = {"length_mean": "lengths in tokens", "logprob_mean": "log-probabilities", "entropy_mean": "entropies"}
    steps = RunStore(path).steps_df(columns=[*names, "n_singleton_groups", "n_prompts"])
    lacking = [words for name, words in names.items() if steps[name].isna().to_numpy().all()]
    lacking.append("energies, gradient norms and estimators")
    note(f"{path.name} has no {', no '.join(lacking)}; add them with: otb score --model DIR --rollouts {rollouts}")
    if np.all(steps["n_singleton_groups"].to_numpy() == steps["n_prompts"].to_numpy()):
        note(f"every prompt has one rollout, so these estimators remain: {', '.join(remaining_estimators())}.")
    return path


def recorded_tables(step: RecordedStep, tokenizer: "PreTrainedTokenizerBase | None" = None) -> StepTables:
    """Return what is known of a step without a model.

    `tokenizer` decodes token ids; without ids it counts the tokens of texts.
    """
    records, names = step.records, step.prompt_ids
    prompts = [r.shown_prompt or _decoded(r.prompt_ids, tokenizer) for r in records]
    texts = [_completion(r, tokenizer) for r in records]
    lengths = [_sampled_tokens(r, tokenizer) for r in records]
    parts = dict.fromkeys(name for record in records for name in record.reward_parts)
    rollouts = {
        "group": step.group,
        "rollout": np.arange(len(records)),
        "prompt_id": [names[g] for g in step.group],
        "prompt": prompts,
        "answer": [record.answer for record in records],
        "completion": texts,
        "reward": [record.reward for record in records],
        "length": lengths,
        "turns": [_turns(record) for record in records],
        "finish_reason": [record.finish_reason for record in records],
        **{f"reward_{name}": [record.reward_parts.get(name) for record in records] for name in parts},
        **step.provenance,
    }
    tokens = _token_rows(step, tokenizer) if all(record.ids is not None for record in records) else None
    return StepTables(tokens=tokens, rollouts=rollouts, steps=_scalars(step, texts, lengths))


def _decoded(ids: Sequence[int] | None, tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    return str(tokenizer.decode(list(ids))) if tokenizer and ids else None


def _completion(record: RecordedRollout, tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """Return a completion's text; None where only its ids were recorded and nothing decodes them."""
    if record.messages:
        first = next(i for i, message in enumerate(record.messages) if message.sampled)
        return "\n".join(message.content for message in record.messages[first:])
    return _decoded(record.ids, tokenizer) if record.completion is None else record.completion


def _sampled_tokens(record: RecordedRollout, tokenizer: "PreTrainedTokenizerBase | None") -> int | None:
    """Return how many tokens the policy sampled; None where neither ids nor a tokenizer says."""
    if (sampled := record.policy_tokens) is not None:
        return int(sampled.sum())
    if tokenizer is None:
        return None
    texts = [message.content for message in record.messages if message.sampled] or [record.completion or ""]
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def _turns(record: RecordedRollout) -> int:
    if record.messages:
        return sum(message.sampled for message in record.messages)
    return 1 if record.policy_tokens is None else len(_turn_starts(record.policy_tokens))


def _turn_starts(sampled: Bool) -> Int:
    """Return where each turn begins: a sampled token behind one that was not."""
    return np.flatnonzero(sampled & ~np.concatenate([[False], sampled[:-1]]))


def _scalars(step: RecordedStep, texts: Sequence[str | None], lengths: Sequence[int | None]) -> dict[str, object]:
    """Return the step's row of `steps`; what some record lacks is left out. Means of numbers are over policy tokens."""
    records, reward = step.records, np.array([record.reward for record in step.records])
    scalars: dict[str, object] = {
        "reward_mean": reward.mean(),
        "reward_std": reward.std(),
        "n_prompts": len(step.prompt_ids),
        "n_rollouts": len(records),
        "n_zero_variance_groups": int(zero_variance_groups(reward, step.group).sum()),
        "n_singleton_groups": int((np.bincount(step.group) == 1).sum()),
    }
    if len(written := [text for text in texts if text is not None]) == len(records):
        scalars["n_empty_completions"] = sum(not text for text in written)
        scalars["characters_mean"] = float(np.mean([len(text) for text in written]))
    if all(record.finish_reason != "unknown" for record in records):
        scalars["n_truncated"] = sum(record.finish_reason == "length" for record in records)
    if len(counts := [n for n in lengths if n is not None]) == len(records):
        scalars |= {"length_mean": float(np.mean(counts)), "length_max": max(counts), "n_tokens": sum(counts)}
    if all(record.prompt_ids is not None for record in records):
        scalars["prompt_length_max"] = max(len(record.prompt_ids or ()) for record in records)
    sampled = [slice(None) if (mask := record.policy_tokens) is None else mask for record in records]
    inside = {
        name: np.concatenate([record.columns[name][mask] for record, mask in zip(records, sampled, strict=True)])
        for name in ("logprob", "behavior_logprob", "entropy")
        if all(name in record.columns for record in records)
    }
    known = {name: values for name, values in inside.items() if values.size}
    scalars |= {f"{name}_mean": float(known[name].mean()) for name in ("logprob", "entropy") if name in known}
    if "logprob" in known and "behavior_logprob" in known:
        mismatch = known["logprob"] - known["behavior_logprob"]
        scalars |= {"mismatch_mean": float(mismatch.mean()), "mismatch_max": float(np.abs(mismatch).max())}
    return scalars | step.logged_norm


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
    turn = [np.maximum(np.searchsorted(_turn_starts(m), np.arange(len(m)), side="right") - 1, 0) for m in masks]
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
