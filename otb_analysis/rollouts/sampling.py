"""From prompts to rollouts: groups, any number of turns, and what the environment inserts between them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from otb_analysis.config import SampleConfig
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.batch.soft import SoftTokens
from otb_analysis.rollouts.generation import Generator, NonFiniteLogits, TransformersGenerator
from otb_analysis.rollouts.models import special_id
from otb_analysis.tasks import Prompt, Task, Turn
from otb_analysis.tasks.task_calls import ask_reply
from otb_analysis.types import Bool, FinishReason, Float, Int

BY_COLUMN = {"input_ids": 0, "attention_mask": 0, "mask": 0, "turn": 0, "reward": 0, "behavior_logprob": np.nan}
"""The fields [N, L] of `Rollouts`, with what widening them fills in."""


@dataclass(frozen=True)
class Rollouts:
    """A batch of finished rollouts, prompt first, padded on the right; made by `sample`, read by `training`."""

    prompts: tuple[Prompt, ...]  # The prompt of each group [P]
    group: Int  # Index into `prompts` of each rollout [N]
    input_ids: Int  # Prompt and completion tokens [N, L]; soft ones have ids beyond the vocabulary
    attention_mask: Bool  # True at tokens, false at padding [N, L]
    mask: Bool  # True at tokens the policy sampled [N, L]
    turn: Int  # Turn of each completion token [N, L]
    behavior_logprob: Float  # Log-probability reported by the generator, in nats [N, L]; NaN outside the mask
    prompt_length: Int  # Tokens before the completion [N]
    turns: tuple[tuple[Turn, ...], ...]  # What was written, turn by turn
    finish_reason: tuple[FinishReason, ...]  # stop (end token), length (budget used up), turns (turn limit); unknown
    reward: Float  # Zero until `compute_rewards`; then a turn's reward, on its last policy token [N, L]
    reward_parts: Mapping[str, Float] = field(default_factory=dict)  # Its parts by name, summed over the rollout [N]
    soft: SoftTokens | None = None  # The vectors behind those ids, where soft tokens were sampled

    @property
    def completion_length(self) -> Int:
        """Tokens after the prompt, tool tokens included [N]."""
        return self.attention_mask.sum(axis=1) - self.prompt_length

    def take(self, rows: slice | Int) -> "Rollouts":
        """Return some of the rollouts, as wide as the longest of them; every group keeps its number and its prompt."""
        index = np.arange(len(self.group))[rows]
        width = int(self.attention_mask[index].sum(axis=1).max(initial=0))
        return replace(
            self,
            **{name: getattr(self, name)[index, :width] for name in BY_COLUMN},
            **{name: getattr(self, name)[index] for name in ("group", "prompt_length")},
            turns=tuple(self.turns[i] for i in index),
            finish_reason=tuple(self.finish_reason[i] for i in index),
            reward_parts={name: paid[index] for name, paid in self.reward_parts.items()},
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """Put parts of one batch together, in this order; they have the same prompts and number groups alike."""
        if len(parts) == 1:
            return parts[0]
        renumbered, soft = list[Rollouts](), None
        for part in parts:  # soft tokens, all of one vocabulary, are numbered one after the other
            if part.soft is not None:
                ahead = 0 if soft is None else len(soft.vectors)
                ids = np.where(part.input_ids >= part.soft.first, part.input_ids + ahead, part.input_ids)
                part, soft = replace(part, input_ids=ids), part.soft if soft is None else soft.joined(part.soft)
            renumbered.append(part)
        parts = renumbered
        width = max(part.input_ids.shape[1] for part in parts)
        names = dict.fromkeys(name for part in parts for name in part.reward_parts)
        columns: dict[str, NDArray] = {}
        for name, fill in BY_COLUMN.items():
            arrays = [getattr(part, name) for part in parts]
            wide = [np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill) for x in arrays]
            columns[name] = np.concatenate(wide)
        return replace(
            parts[0],
            **columns,
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in ("group", "prompt_length")},
            turns=tuple(turns for part in parts for turns in part.turns),
            finish_reason=tuple(reason for part in parts for reason in part.finish_reason),
            # Parts can differ in what their rollouts were paid for: what is missing is 0.
            reward_parts={
                name: np.concatenate([part.reward_parts.get(name, np.zeros(len(part.group))) for part in parts])
                for name in names
            },
            soft=soft,
        )

    @property
    def width(self) -> int:
        """Tokens of the longest completion, T."""
        return int(self.completion_length.max(initial=0))

    def rewards(self) -> Float:
        """Return what the task paid at each completion token [N, T], zero outside the mask."""
        return np.where(self.policy_tokens(), self.by_token(self.reward), 0.0)

    def completion_columns(self) -> NDArray[np.int64]:
        """Return the column in [N, L] of each completion token, [N, T]; padding repeats the last column."""
        return np.minimum(self.prompt_length[:, None] + np.arange(self.width), self.input_ids.shape[1] - 1)

    def present(self) -> Bool:
        """Return True where an [N, T] entry is a completion token."""
        return np.arange(self.width) < self.completion_length[:, None]

    def policy_tokens(self) -> Bool:
        """Return True where an [N, T] entry is a token that the policy sampled."""
        return self.by_token(self.mask) & self.present()

    def by_token(self, by_column: NDArray, rows: Bool | Int | slice = slice(None)) -> NDArray:
        """Return numbers by column [n, L] of some rollouts by completion token [n, T]; padding holds any number."""
        return np.take_along_axis(by_column, self.completion_columns()[rows], axis=1)

    def by_column(self, by_token: Float, rows: Bool | slice = slice(None)) -> Float:
        """Return numbers by completion token [M, n, T] of some rollouts by column [n, M, L], zero elsewhere."""
        columns = self.completion_columns()[rows]
        out = np.zeros((by_token.shape[1], by_token.shape[0], self.input_ids.shape[1]))
        n, t = np.nonzero(self.present()[rows])
        out[n, :, columns[n, t]] = by_token[:, n, t].T
        return out

    def tensors(self, device: torch.device, rows: Bool | Int | slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, policy mask and attention mask [n, L] of some rollouts, for the gradient engine."""
        arrays = (self.input_ids[rows], self.mask[rows], self.attention_mask[rows])
        ids, mask, attention = (torch.as_tensor(x, device=device) for x in arrays)
        return ids, mask, attention.long()


class Draft:
    """One rollout under construction; made by `sample`, or by `audit` from a recorded one."""

    def __init__(self, prompt_ids: list[int]):
        self.prompt_length = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.mask = [False] * len(prompt_ids)
        self.turn = [0] * len(prompt_ids)
        self.logprob = [float("nan")] * len(prompt_ids)
        self.turns: list[Turn] = []
        self.finish_reason: FinishReason | None = None

    def extend(self, ids: Sequence[int], turn: int, logprobs: Sequence[float] | None = None) -> None:
        """Append tokens of a turn: sampled ones with their log-probabilities, or the environment's reply to it."""
        self.ids += ids
        self.mask += [logprobs is not None] * len(ids)
        self.turn += [turn] * len(ids)
        self.logprob += logprobs if logprobs is not None else [float("nan")] * len(ids)


def draft_of(
    prompt: Sequence[int],
    completion: Sequence[tuple[int, bool]],
    logprobs: Sequence[float] | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
) -> Draft:
    """Return a rollout from its prompt's token ids and its completion's, each with whether the policy sampled it.

    Sampled tokens in a row are one turn; those of `ends` end it and are no part of its text. What follows is the reply
    to it. `logprobs` are the sampler's, one per completion token, in nats; None where they were not recorded. It ended
    with `stop` where its last turn did, else by its `length`.
    """
    draft, at = Draft(list(prompt)), 0
    for sampled, run in groupby(completion, key=lambda token: token[1]):
        ids = [token for token, _ in run]
        span = slice(at, at := at + len(ids))
        if sampled:
            ended = ids[-1] in ends
            draft.turns.append(Turn(str(tokenizer.decode(ids[:-1] if ended else ids)), ended))
        elif draft.turns:
            draft.turns[-1] = replace(draft.turns[-1], reply=str(tokenizer.decode(ids)))
        known = [float("nan")] * len(ids) if logprobs is None else list(logprobs[span])
        draft.extend(ids, max(len(draft.turns) - 1, 0), known if sampled else None)
    draft.finish_reason = "stop" if draft.turns and draft.turns[-1].finished else "length"
    return draft


def sample(
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prompts: Sequence[Prompt],
    config: SampleConfig,
    group: Int | None = None,
) -> Rollouts:
    """Draw `group_size` rollouts of every prompt.

    A turn that ends with the end token is answered by the task; the reply's tokens follow it, masked, and the next turn
    begins. The episode ends when the task has no reply, the length budget of a turn is used up, or at `max_turns`.
    `group` is the index of the prompt that each rollout answers [N], where not all are wanted. Soft tokens are no part
    of a turn's text.

    Raises:
        InputError: A prompt has no tokens, prompt and budget exceed the model's positions, or soft tokens are asked for
            where they cannot be.
        NonFiniteError: The policy's logits are NaN or infinite.
    """
    check_soft_sampling(config)
    group = np.repeat(np.arange(len(prompts)), config.group_size) if group is None else group
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    drafts = [Draft(encoded[g]) for g in group]
    active, soft = list(range(len(drafts))), None
    for _ in range(config.max_turns):
        if not active:
            break
        contexts = [drafts[i].ids for i in active]
        if soft is not None:
            raise InputError(
                f"the task {task.name} goes on after its first turn, but soft tokens work on tasks of one turn; set "
                "sample.soft to 0 or sample.max_turns to 1."
            )
        try:
            if config.soft:
                if not isinstance(generator, TransformersGenerator):
                    raise InputError(f"{type(generator).__name__} samples no soft tokens; set sample.soft to 0.")
                outputs, soft = generator.generate_soft(
                    contexts, config.max_new_tokens, config.temperature, config.soft, config.soft_noise
                )
            else:
                outputs = generator.generate(contexts, config.max_new_tokens, config.temperature)
        except NonFiniteLogits as error:
            n = active[error.row]
            raise NonFiniteError(
                f"logits of rollout {n} (group {group[n]}, prompt {prompts[group[n]].id!r}, turn "
                f"{len(drafts[n].turns)}) are not finite at generated token {error.token}; "
                "lower the learning rate or go back to an earlier checkpoint."
            ) from error
        for i, output in zip(active, outputs, strict=True):
            draft, turn = drafts[i], len(drafts[i].turns)
            text = str(tokenizer.decode(output.token_ids[config.soft : -1 if output.finished else None]))
            draft.extend(output.token_ids, turn, output.logprobs)
            draft.turns.append(Turn(text, output.finished))
            reply = ask_reply(task, prompts[group[i]], draft.turns) if output.finished else None
            if reply is None:
                draft.finish_reason = "stop" if output.finished else "length"
                continue
            draft.turns[-1] = Turn(text, output.finished, reply)
            draft.extend(tokenizer(reply, add_special_tokens=False)["input_ids"], turn)
        active = [i for i in active if drafts[i].finish_reason is None]
    return replace(collate(drafts, tuple(prompts), group, special_id(tokenizer, "pad")), soft=soft)


def check_soft_sampling(config: SampleConfig) -> None:
    """Refuse soft tokens that leave no room for an answer, or have no noise.

    Raises:
        InputError: Naming the setting.
    """
    if config.soft < 0:
        raise InputError(f"sample.soft is {config.soft}; choose a number of at least 0.")
    if config.soft >= config.max_new_tokens:
        raise InputError(
            f"sample.soft is {config.soft} of sample.max_new_tokens={config.max_new_tokens}, which leaves no token for "
            "the discrete answer; lower it or raise the budget."
        )
    if config.soft and not 0 < config.soft_noise < np.inf:
        raise InputError(
            f"sample.soft_noise is {config.soft_noise}, where soft tokens have no density; choose a finite number "
            "above 0."
        )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return a prompt's tokens: the text's, or the chat template's with the text as the user's message.

    Examples come before the text: in the chat as earlier messages of user and assistant.

    Raises:
        InputError: There are none.
    """
    if prompt.chat and getattr(tokenizer, "chat_template", None):
        contents = [text for example in prompt.examples for text in example] + [prompt.text]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes the special ones itself
    else:
        ids = tokenizer(prompt.shown)["input_ids"]
    if not ids:
        raise InputError(f"prompt {prompt.id!r} has no tokens; give every prompt at least one.")
    return list(ids)


def collate(drafts: list[Draft], prompts: tuple[Prompt, ...], group: Int, pad: int) -> Rollouts:
    """Return finished drafts as a batch, padded with the token `pad`; nothing is paid yet."""
    length = np.array([len(draft.ids) for draft in drafts], dtype=np.int64)
    attention = np.arange(length.max(initial=0)) < length[:, None]
    columns = {"ids": pad, "mask": False, "turn": 0, "logprob": np.nan}
    arrays = {name: np.full(attention.shape, fill) for name, fill in columns.items()}
    for name, array in arrays.items():
        array[attention] = [x for draft in drafts for x in getattr(draft, name)]
    return Rollouts(
        prompts=prompts,
        group=group,
        input_ids=arrays["ids"],
        attention_mask=attention,
        mask=arrays["mask"],
        turn=arrays["turn"],
        behavior_logprob=arrays["logprob"],
        prompt_length=np.array([d.prompt_length for d in drafts], dtype=np.int64),
        turns=tuple(tuple(d.turns) for d in drafts),
        finish_reason=tuple(d.finish_reason or "turns" for d in drafts),
        reward=np.zeros(attention.shape),
    )
