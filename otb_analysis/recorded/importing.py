"""`otb import`: recorded rollouts as a run, without a model; what was not recorded is null."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from otb_analysis.arrays import zero_variance_groups
from otb_analysis.config.train import ImportConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import require_models
from otb_analysis.objectives.ratios import mismatch_scalars
from otb_analysis.phases import note, phase
from otb_analysis.recorded.records import COLUMNS, RecordedRollout
from otb_analysis.recorded.runs import (
    RecordedStep,
    record_run,
    remaining_estimators,
    run_path,
    source_of,
    stored_config,
)
from otb_analysis.store import RunStore, StepTables
from otb_analysis.types import Float

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def import_rollouts(rollouts: Path, config: ImportConfig, lasting: bool = True) -> Path:
    """Make a run of recorded rollouts and return its directory; one that is not `lasting` is only read and removed.

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
    record_run(path, config, stored, source, partial(recorded_tables, tokenizer=tokenizer), lasting=lasting)
    if not lasting:
        return path
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
    texts = [_texts(record, tokenizer) for record in records]
    parts = dict.fromkeys(name for record in records for name in record.reward_parts)
    rollouts = {
        "group": step.group,
        "rollout": np.arange(len(records)),
        "prompt_id": [names[g] for g in step.group],
        **{name: [row[name] for row in texts] for name in texts[0]},
        "answer": [record.answer for record in records],
        "reward": [record.reward for record in records],
        "finish_reason": [record.finish_reason for record in records],
        **{f"reward_{name}": [record.reward_parts.get(name) for record in records] for name in parts},
        **step.provenance,
    }
    tokens = _token_rows(step, tokenizer) if all(record.ids is not None for record in records) else None
    return StepTables(tokens=tokens, rollouts=rollouts, steps=_scalars(step, texts))


def _texts(record: RecordedRollout, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, Any]:
    """Return a rollout's texts, sampled tokens and turns; None where nothing recorded or decoded says them."""

    def decoded(ids: Sequence[int] | None) -> str | None:
        return str(tokenizer.decode(list(ids))) if tokenizer and ids else None

    completion, turns, length = record.completion, 1, None
    sampled = [message.content for message in record.messages if message.sampled]
    if record.messages:
        completion = "\n".join(message.content for message in record.messages[len(record.prompt_messages) :])
        turns = len(sampled)
    elif completion is None:
        completion = decoded(record.ids)
    if record.ids is not None:
        mask = record.mask
        length = len(record.ids) if mask is None else int(np.count_nonzero(mask))
        if not record.messages:
            turns = min(1, length) if mask is None else int((np.diff(mask, prepend=False) & mask).sum())
    elif record.n_tokens is not None:
        length = record.n_tokens
    elif tokenizer is not None:
        texts = sampled or [record.completion or ""]
        length = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    prompt = record.shown_prompt or decoded(record.prompt_ids)
    return {"prompt": prompt, "completion": completion, "length": length, "turns": turns}


def _scalars(step: RecordedStep, texts: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the step's row of `steps`; what some record lacks is left out. Means of numbers are over policy tokens."""
    records, reward = step.records, np.array([record.reward for record in step.records])
    with np.errstate(over="ignore"):  # the square of 1e300
        spread = reward.std()
    scalars: dict[str, object] = {
        "reward_mean": reward.mean(),
        "reward_std": spread,
        "n_prompts": len(step.prompt_ids),
        "n_rollouts": len(records),
        "n_zero_variance_groups": int(zero_variance_groups(reward, step.group).sum()),
        "n_singleton_groups": int((np.bincount(step.group) == 1).sum()),
    }
    completions, lengths = [row["completion"] for row in texts], [row["length"] for row in texts]
    if None not in completions:
        scalars["n_empty_completions"] = sum(not text for text in completions)
        scalars["characters_mean"] = float(np.mean([len(text) for text in completions]))
    if all(record.finish_reason != "unknown" for record in records):
        scalars["n_truncated"] = sum(record.finish_reason == "length" for record in records)
    if None not in lengths:
        scalars |= {"length_mean": float(np.mean(lengths)), "length_max": max(lengths), "n_tokens": sum(lengths)}
    if all(record.prompt_ids is not None for record in records):
        scalars["prompt_length_max"] = max(len(record.prompt_ids or ()) for record in records)
    inside, none = dict[str, Float](), np.empty(0)
    for name in COLUMNS:
        if all(name in record.columns for record in records):
            lists = [(record.columns[name], record.mask) for record in records]
            values = np.concatenate([values if mask is None else values[mask] for values, mask in lists])
            inside |= {name: values} if values.size else {}
    known = {name: values[~np.isnan(values)] for name, values in inside.items()}
    scalars |= {f"{name}_mean": float(x.mean()) for name in ("logprob", "entropy") if (x := known.get(name, none)).size}
    whole = np.array([record.advantage for record in records], np.float64)
    if (advantage := np.concatenate([known.get("advantage", none), whole[~np.isnan(whole)]])).size:
        scalars["advantage_max"] = float(np.abs(advantage).max())
    if "logprob" in inside and "behavior_logprob" in inside:
        scalars |= mismatch_scalars(inside["logprob"] - inside["behavior_logprob"])
    return scalars | step.logged_norm


def _token_rows(step: RecordedStep, tokenizer: "PreTrainedTokenizerBase | None") -> dict[str, object]:
    """Return a row per completion token; the reward is paid at the last one that the policy sampled."""
    lengths = np.array([len(record.ids or ()) for record in step.records])
    n, start = int(lengths.sum()), np.cumsum(lengths) - lengths
    ids = np.fromiter(chain.from_iterable(record.ids or () for record in step.records), np.int64, n)
    masks = [flags for record in step.records if (flags := record.policy_tokens) is not None]
    mask = np.concatenate([np.zeros(0, bool), *masks])
    rollout = np.repeat(np.arange(len(lengths)), lengths)
    t = np.arange(n) - start[rollout]
    sampled = np.flatnonzero(mask)
    last, reward = np.full(len(lengths), -1), np.zeros(n)
    last[rollout[sampled]] = sampled  # of several the last one stays
    reward[last[last >= 0]] = np.array([record.reward for record in step.records])[last >= 0]
    # A turn begins at a sampled token behind one that was not.
    begins = np.cumsum(mask & (np.diff(mask, prepend=False) | (t == 0)))
    before = np.concatenate([[0], begins])[start[rollout]]
    columns: dict[str, object] = {
        "group": step.group[rollout],
        "rollout": rollout,
        "turn": np.maximum(begins - before - 1, 0),
        "t": t,
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
