"""Formats whose records are token ids with per-token numbers: prime-rl's exports, NeMo-RL's, slime's and miles's."""

from collections.abc import Mapping, Sequence

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Fields, RecordedRollout
from otb_analysis.recorded.rows import Tally, number_in
from otb_analysis.types import Bool, FinishReason, Float

UNFINISHED = "sample of slime that was aborted, or wholly masked, was left out"
SLIME_ENDS: dict[str, FinishReason] = {"completed": "stop", "truncated": "length"}
EXCLUDED = "sample was left out of the loss by its trainer (sample_loss_mask 0) and is kept here"


def prime_rl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a token export of prime-rl: prompt and completion in one list; the prompt's tokens name the group.

    Raises:
        InputError: It has no rewards, which prime-rl writes only where its orchestrator sends them.
    """
    ids, mask = fields.ids("token_ids"), fields.flags("loss_mask")
    if "rewards" not in fields:
        raise InputError(f"{fields.place} has no rewards, only advantages; export rewards too, a run needs them.")
    names = {
        "behavior_logprob": "inference_logprobs",
        "logprob": "trainer_logprobs",
        "entropy": "entropy",
        "advantage": "advantages",
    }
    columns = {ours: fields.numbers(theirs) for ours, theirs in names.items() if theirs in fields}
    columns["reward"] = fields.numbers("rewards")
    return _split(
        fields, ids, mask, columns, step=fields.whole_number("export_step" if "export_step" in fields else "step")
    )


def nemo_rl(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout:
    """Read a sample of NeMo-RL, padded; the step is in the file's name, the prompt's tokens name the group.

    Every value is a list of one, since a sample is written as a batch of one. With dynamic sampling the rewards of the
    samples that train are `filtered_rewards`.
    """
    alone = {name: value[0] if _is_batch_of_one(value) else value for name, value in fields.row.items()}
    fields = Fields(fields.place, alone)
    ids, mask = fields.ids("token_ids"), fields.flags("token_loss_mask")
    length = fields.whole_number("input_lengths") if "input_lengths" in fields else len(ids)
    if "sample_loss_mask" in fields and not fields.number("sample_loss_mask"):
        tally[EXCLUDED] += 1
    names = {"behavior_logprob": "generation_logprobs", "logprob": "prev_logprobs", "advantage": "advantages"}
    columns: dict[str, Float] = {}
    for ours, theirs in names.items():
        if theirs in fields:
            per_rollout = ours == "advantage" and np.size(fields.row[theirs]) == 1
            columns[ours] = np.full(len(ids), fields.number(theirs)) if per_rollout else fields.numbers(theirs)
    for name, values in {"token_loss_mask": mask, **columns}.items():
        if len(values) != len(ids):
            raise InputError(
                f"{fields.place}: {name} has {len(values)} entries but token_ids has {len(ids)}; write one per token."
            )
    columns = {name: values[:length] for name, values in columns.items()}
    paid = "filtered_rewards" if "filtered_rewards" in fields else "rewards"
    columns["reward"] = np.full(length, fields.number(paid))
    return _split(fields, ids[:length], mask[:length], columns, step=number_in(fields.place.file))


def slime(fields: Fields, tally: Tally, weights: Mapping[str, float]) -> RecordedRollout | None:
    """Read a sample of slime or miles: all tokens, and lists over the response; None for one that does not train.

    The reward is the raw one: `rewards` of training data are normalised within the group.

    Raises:
        InputError: The reward is a dict or only normalised, or the response is longer than all tokens.
    """
    mask = next((name for name in ("loss_mask", "loss_masks") if name in fields), None)
    if fields.row.get("status") in ("aborted", "pending") or (mask and not fields.flags(mask).any()):
        tally[UNFINISHED] += 1
        return None
    tokens = fields.ids("tokens")
    length = fields.whole_number("response_length" if "response_length" in fields else "response_lengths")
    if not 0 <= length <= len(tokens):
        raise InputError(f"{fields.place}: the response has {length} tokens of {len(tokens)}; write its true length.")
    if "rewards" in fields and "raw_reward" not in fields:
        raise InputError(
            f"{fields.place} has rewards that slime normalised, and no raw_reward; pass rollout_data instead of "
            "train_data."
        )
    reward = "raw_reward" if "raw_reward" in fields else "reward"
    if isinstance(fields.row[reward], dict):
        raise InputError(
            f"{fields.place}: {reward} is a dict ({', '.join(map(str, fields.row[reward]))}); save the one that "
            "trained (slime's --reward-key)."
        )
    lists = {
        "behavior_logprob": ("rollout_log_probs",),
        "logprob": ("log_probs",),
        "advantage": ("advantages",),
    }
    ended = "length" if fields.row.get("truncated") else SLIME_ENDS.get(str(fields.row.get("status")), "unknown")
    cut = len(tokens) - length
    return RecordedRollout(
        place=fields.place,
        reward=fields.number(reward),
        prompt=fields.text("prompt") if isinstance(fields.row.get("prompt"), str) else None,
        completion=fields.text("response") if isinstance(fields.row.get("response"), str) else None,
        group=fields.row.get("group_index"),
        step=fields.whole_number("file_step") if "file_step" in fields else number_in(fields.place.file),
        prompt_ids=tokens[:cut],
        ids=tokens[cut:],
        mask=None if mask is None else fields.flags(mask),
        finish_reason=ended,
        columns={ours: fields.numbers(names[0]) for ours, names in lists.items() if names[0] in fields},
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


def _split(
    fields: Fields, ids: Sequence[int], mask: Bool, columns: dict[str, Float], step: int | None
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
        prompt_ids=tuple(ids[:first]),
        ids=tuple(ids[first:]),
        mask=mask[first:],
        columns={name: values[first:] for name, values in columns.items()},
    )


def _is_batch_of_one(value: object) -> bool:
    return isinstance(value, list) and len(value) == 1
