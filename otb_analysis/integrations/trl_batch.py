"""What stands between TRL's trainer and our rollouts: its contract, and its batch as our rollouts.

Every process scores its own rows. Then all processes know all rows, since a group can span processes.
"""

import hashlib
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.measurement.forward import ForwardPass
from otb_analysis.measurement.table import TokenTable, token_table
from otb_analysis.rollouts.models import special_id
from otb_analysis.rollouts.sampling import Draft, Rollouts, collate, draft_of
from otb_analysis.tasks import Prompt
from otb_analysis.types import Bool, Float, Int, LogitStats

WATCHED = ("_generate_and_score_completions", "_calculate_rewards")
"""Methods of TRL's trainers whose results are seen, or replaced."""
READ = (
    "_metrics", "accelerator", "reward_weights", "reward_func_names", "num_generations", "num_iterations",
    "temperature",
)  # fmt: skip
"""What else of them is read; `_metrics` is also written, since that is what they log."""
METHODS = (*WATCHED, "_get_grad_norm", "compute_loss", "_compute_loss")
"""Methods of GRPOTrainer that OTBGRPOTrainer overrides, and the loss that reads its advantages."""
OTHERS = "use trl 1.13, 1.14 or 1.16, which were tested, or RolloutRecorder, which takes any"
"""What to do about a trainer that does not keep the contract."""


def refuse_lacking(owner: Any, names: Sequence[str], kind: str) -> None:
    """Raise where a trainer of this `kind`, or its class, lacks what is overridden or read of it.

    Raises:
        InputError: It does; the first of them is named.
    """
    if lacking := [name for name in names if not hasattr(owner, name)]:
        raise InputError(f"{kind} of trl {version('trl')} has no {lacking[0]}, which is needed; {OTHERS}.")


def load_trl() -> Any:
    """Return the package trl, whose trainer keeps the contract that ours relies on, whatever its version.

    Raises:
        InputError: It is not installed, a method is missing, or the loss takes no advantages by token.
    """
    require("trl", "OTBGRPOTrainer")
    trl = importlib.import_module("trl")
    refuse_lacking(trl.GRPOTrainer, METHODS, "GRPOTrainer")
    if not re.search(r"advantages\.(dim\(\)|ndim)", inspect.getsource(trl.GRPOTrainer._compute_loss)):
        raise InputError(
            f"GRPOTrainer._compute_loss of trl {version('trl')} does not look whether advantages are by rollout [B] or "
            f"by token [B, T], which OTBGRPOTrainer gives it; {OTHERS}."
        )
    return trl


def ends_of(trainer: Any, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Return the tokens that end a completion; TRL before 1.14.2 takes the tokenizer's alone."""
    return getattr(trainer, "eos_token_ids", None) or [special_id(tokenizer, "eos")]


@dataclass(frozen=True)
class ScoredDraft:
    """One rollout and its forward statistics; travels between processes."""

    draft: Draft
    stats: Mapping[str, Float]  # Fields of LogitStats by completion token [T_i]


@dataclass(frozen=True)
class GatheredBatch:
    """The rollouts of all processes that take part in the update; made by `gathered_batch`."""

    rollouts: Rollouts  # Rewarded
    table: TokenTable
    kept: Bool  # Over all N rows of the batch: true at those that `rollouts` holds


def drafts_of(batch: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> list[Draft]:
    """Return this process's rows of TRL's batch, each as prompt and turns; what a tool wrote is not the policy's.

    TRL pads prompts on the left and completions on the right. `ends` are the tokens that end a completion.
    """
    present = batch["completion_mask"].bool().cpu()
    prompt_present = batch["prompt_mask"].bool().cpu()
    tools = batch.get("tool_mask")
    sampled = present if tools is None else present & tools.bool().cpu()
    logprobs = batch.get("sampling_per_token_logps")
    drafts = []
    for i in range(len(present)):
        prompt = batch["prompt_ids"][i].cpu()[prompt_present[i]].tolist()
        ids = batch["completion_ids"][i].cpu()[present[i]].tolist()
        known = None if logprobs is None else logprobs[i].cpu()[present[i]].tolist()
        completion = list(zip(ids, sampled[i][present[i]].tolist(), strict=True))
        drafts.append(draft_of(prompt, completion, known, tokenizer, ends))
    return drafts


def collated(drafts: Sequence[Draft], pad: int) -> Rollouts:
    """Return one process's drafts as a batch without rewards; rollouts with the same prompt are one group."""
    number: dict[tuple[int, ...], int] = {}
    group = [number.setdefault(tuple(draft.ids[: draft.prompt_length]), len(number)) for draft in drafts]
    prompts = tuple(Prompt(str(n), "", answer="") for n in number.values())
    return collate(list(drafts), prompts, np.array(group, np.int64), pad)


def scored(drafts: Sequence[Draft], rollouts: Rollouts, forward: ForwardPass) -> list[ScoredDraft]:
    """Return drafts with the forward statistics of their batch, made by `collated`."""
    return [
        ScoredDraft(draft, {f.name: getattr(forward.stats, f.name)[n, :length] for f in fields(LogitStats)})
        for n, (draft, length) in enumerate(zip(drafts, rollouts.completion_length, strict=True))
    ]


def gathered_batch(
    every: Sequence[ScoredDraft],
    rewards: Float,
    parts: Mapping[str, Float],
    group: Int,
    tokenizer: PreTrainedTokenizerBase,
) -> GatheredBatch | None:
    """Return the rows of all processes, rewarded at their last policy token, in groups of the same label in `group`.

    `rewards` [N] is NaN where no function could score a rollout. Those, and rollouts without a policy token, are left
    out: TRL gives them no advantage. None where no rollout is left. `parts` [N] are the functions' rewards by name.
    """
    drafts = [one.draft for one in every]
    kept = np.isfinite(rewards) & np.array([any(draft.mask) for draft in drafts])
    rows = np.flatnonzero(kept)
    if not len(rows):
        return None
    # Groups without a kept rollout have no number.
    _, firsts, group = np.unique(group[rows], return_index=True, return_inverse=True)
    prompts = list[Prompt]()
    for first in rows[firsts].tolist():
        ids = drafts[first].ids[: drafts[first].prompt_length]
        name = hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
        prompts.append(Prompt(name, str(tokenizer.decode(ids)), answer=""))
    rollouts = collate([drafts[n] for n in rows.tolist()], tuple(prompts), group, special_id(tokenizer, "pad"))
    reward = np.zeros(rollouts.mask.shape)
    last = rollouts.mask.shape[1] - 1 - rollouts.mask[:, ::-1].argmax(axis=1)
    reward[np.arange(len(rows)), last] = rewards[rows]
    named = {name: np.nan_to_num(values[rows]) for name, values in parts.items()}  # as TRL's sum takes them
    rollouts = replace(rollouts, reward=reward, reward_parts=named)
    stats: dict[str, Any] = {"hidden_norm_sq": None}
    stats |= {name: np.zeros((len(rows), rollouts.width)) for name in every[0].stats}
    for i, n in enumerate(rows.tolist()):
        for name, values in every[n].stats.items():
            stats[name][i, : len(values)] = values
    nothing = torch.zeros(0)
    table = token_table(rollouts, ForwardPass(nothing, nothing, nothing, LogitStats(**stats)), None)
    return GatheredBatch(rollouts, table, kept)


def local_rows(values: Float, batch: GatheredBatch, first: int, like: Tensor) -> Tensor:
    """Return numbers of the kept rollouts [n, T] as this process's [B, T'] of TRL, zero where nothing was kept.

    `first` is the number of this process's first row among all, `like` its completion ids [B, T'].
    """
    out = np.zeros((len(batch.kept), max(like.shape[1], values.shape[1])))
    out[batch.kept, : values.shape[1]] = values
    local = out[first : first + len(like), : like.shape[1]]
    return torch.as_tensor(local, dtype=torch.float32, device=like.device)
