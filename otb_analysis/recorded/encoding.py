"""Recorded rollouts as `Rollouts`: token ids as recorded, or from the texts; what cannot be known is refused."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Message, Place, RecordedRollout, Row, Tally
from otb_analysis.recorded.runs import RecordedStep
from otb_analysis.rollouts.models import special_id
from otb_analysis.rollouts.sampling import Draft, Rollouts, collate, draft_of
from otb_analysis.tasks import Prompt

CALLS = "message with tool calls, which the chat template writes: the model may have written them otherwise"
OTHER_SPLIT = "text splits into another number of tokens than the trainer counted"
NOT_ENDED = "completion without its end token, because the record does not say that it ended (--ended all scores one)"
RESTORED = "prompt was put back into the chat template, because its text had lost its special tokens"
IDLE = "rollout without policy tokens keeps its reward in its group, but no baseline of ours counts it"
MARKS = ("\ue000", "\ue001")
"""Characters for private use, which no prompt holds: they stand for the contents of messages."""
Tokens = tuple[int, ...]


@dataclass
class Encoder:
    """Turns records into rollouts with one tokenizer; counts in `tally` what it had to assume."""

    tokenizer: PreTrainedTokenizerBase
    vocabulary: int  # Rows of the model's output layer
    positions: int | None = None  # Most tokens that the model can read; None where it has no limit
    text: Literal["auto", "plain", "chat"] = "auto"
    ended: Literal["recorded", "all"] = "recorded"
    tally: Tally = field(default_factory=Tally)

    def rollouts(self, step: RecordedStep) -> Rollouts:
        """Return a step's rollouts, rewarded, with the sampler's log-probabilities where they were recorded.

        Raises:
            InputError: A record's tokens cannot be known, are not this model's, or are too many; the sentence names it.
        """
        drafts = [self._draft(record) for record in step.records]
        of_group = {int(g): record for g, record in zip(step.group, step.records, strict=True)}
        prompts = []
        for g, name in enumerate(step.prompt_ids):
            shown = of_group[g].shown_prompt or self._decoded(of_group[g].prompt_ids or ())
            prompts.append(Prompt(name, shown, answer=of_group[g].answer or ""))
        rollouts = collate(drafts, tuple(prompts), step.group, special_id(self.tokenizer, "pad"))
        reward = np.zeros(rollouts.mask.shape)
        for n, record in enumerate(step.records):
            sampled = np.flatnonzero(rollouts.mask[n])
            if record.mask is not None and not record.mask.any():
                self.tally.note(IDLE, record.place)
                continue
            if not len(sampled):
                raise InputError(
                    f"{record.place} has no token that the policy sampled, so its reward has no place; leave it out, "
                    "or pass --ended all where every completion ended with the end token."
                )
            reward[n, sampled[-1]] = record.reward
        names = dict.fromkeys(name for record in step.records for name in record.reward_parts)
        parts = {name: np.array([r.reward_parts.get(name, 0.0) for r in step.records]) for name in names}
        return replace(rollouts, reward=reward, reward_parts=parts)

    def _draft(self, record: RecordedRollout) -> Draft:
        """Return a record as a rollout that ended as recorded, or with `stop` where its last token is the end token."""
        chat = record.messages
        if record.ids is None and (any(message.sampled for message in chat[:-1]) or (chat and chat[-1].calls)):
            prompt, tokens = self._chat(record)
        elif record.ids is None:
            prompt, tokens = self._prompt(record), [(token, True) for token in self._completion(record)]
        else:
            self._check_texts(record, record.ids)
            assert record.policy_tokens is not None
            prompt = self._prompt(record)
            tokens = list(zip(record.ids, record.policy_tokens.tolist(), strict=True))
        self._check_ids(record, (*prompt, *(token for token, _ in tokens)))
        if record.n_tokens not in (None, len(tokens)):
            self.tally.note(OTHER_SPLIT, record.place)
        if any(message.calls for message in record.messages):
            self.tally.note(CALLS, record.place)
        logprobs = record.columns.get("behavior_logprob")
        if logprobs is not None and len(tokens) != len(logprobs):
            raise InputError(
                f"{record.place} has {len(logprobs)} log-probabilities but its text has {len(tokens)} tokens under "
                "this tokenizer; record the token ids, or leave the log-probabilities out."
            )
        ends = (special_id(self.tokenizer, "eos"),)
        draft = draft_of(prompt, tokens, None if logprobs is None else logprobs.tolist(), self.tokenizer, ends)
        if record.finish_reason != "unknown" or draft.finish_reason != "stop":
            draft.finish_reason = record.finish_reason
        return draft

    def _prompt(self, record: RecordedRollout) -> Tokens:
        """Return a prompt's tokens: as recorded, or from its text or its messages."""
        if record.prompt_ids is not None:
            return record.prompt_ids
        text, place = record.prompt, record.place
        if record.messages:
            return self._ids(chat_text(self.tokenizer, record.prompt_messages, place, True, record.tools))
        assert text is not None
        if self.text == "chat":
            return self._ids(chat_text(self.tokenizer, [Message("user", text, False)], place, goes_on=True))
        if self.text == "auto" and record.special == "removed" and self.tokenizer.chat_template:
            self.tally[RESTORED] += 1
            # The template, filled with marks and stripped of special tokens, says where the messages stand. The result
            # counts only if stripping it gives the recorded text again.
            for roles in (("user",), ("system", "user")):
                pieces = _pieces(self.tokenizer, roles, place)
                match = re.fullmatch("(.*?)".join(map(re.escape, pieces)), text, re.DOTALL) if pieces else None
                if match is None:
                    continue
                messages = [Message(role, content, False) for role, content in zip(roles, match.groups(), strict=True)]
                whole = chat_text(self.tokenizer, messages, place, goes_on=True)
                if _stripped(self.tokenizer, whole) == text:
                    return self._ids(whole)
            raise InputError(
                f"{place}: its prompt was recorded without special tokens, and the chat template does not give the "
                "same text; pass --text plain if no template was used, --text chat if the prompt is the bare question, "
                "or record token ids."
            )
        ids = self._ids(text) if record.special == "kept" else tuple(self.tokenizer(text)["input_ids"])
        if not ids:
            raise InputError(f"{place} has a prompt without tokens; give every prompt at least one.")
        return ids

    def _completion(self, record: RecordedRollout) -> Tokens:
        """Return a completion's tokens from its text, with the end token where it ended."""
        text = record.messages[-1].content if record.messages else record.completion
        assert text is not None
        ids, end = self._ids(text), special_id(self.tokenizer, "eos")
        if record.special == "kept":
            if end in ids[:-1]:
                raise InputError(
                    f"{record.place}: its completion has the end token {self.tokenizer.eos_token!r} before its end, so "
                    "it has several turns, and no mask says which the policy sampled; record token ids with a mask."
                )
            return ids
        if self.text == "auto" and record.special == "removed" and self.tokenizer.chat_template:
            # What the template writes behind a user's message, and in a completion the beginning of another turn.
            mark = (_pieces(self.tokenizer, ("user",), Place(Path(), 0)) or [""])[-1]
            if mark.strip() and mark in text:
                raise InputError(
                    f"{record.place}: its completion holds {mark!r}, with which the chat template begins a turn, and "
                    "no mask says which tokens the policy sampled; record token ids with a mask, or pass --text plain "
                    "if it wrote all of it."
                )
        return (*ids, end) if ids[-1:] != (end,) and self._has_ended(record) else ids

    def _has_ended(self, record: RecordedRollout) -> bool:
        """Return whether a completion without token ids ended with the end token; counted where nothing says so."""
        if self.ended == "recorded" and record.finish_reason == "unknown":
            self.tally[NOT_ENDED] += 1
        return self.ended == "all" or record.finish_reason in ("stop", "turns")

    def _chat(self, record: RecordedRollout) -> tuple[Tokens, list[tuple[int, bool]]]:
        """Return a chat's tokens, each message's as the template adds it behind those before.

        The policy wrote its messages up to the end token; what the template adds behind that is not its own.
        """
        messages, first = record.messages, len(record.prompt_messages)
        before = chat_text(self.tokenizer, messages[:first], record.place, True, record.tools)
        prompt, end = self._ids(before), str(self.tokenizer.eos_token)
        tokens: list[tuple[int, bool]] = []
        for i in range(first, len(messages)):
            last = i + 1 == len(messages)
            goes_on = not last and messages[i + 1].sampled
            whole = chat_text(self.tokenizer, messages[: i + 1], record.place, goes_on, record.tools)
            if not whole.startswith(before):
                raise InputError(
                    f"{record.place}: the chat template rewrites earlier messages when message {i} comes, so its "
                    "tokens are not those that were sampled; record token ids with a mask."
                )
            added, before = whole[len(before) :], whole
            content, stop, rest = added.partition(end) if messages[i].sampled else ("", "", added)
            if last:
                stop, rest = stop if self._has_ended(record) else "", ""
            tokens += [(token, True) for token in self._ids(content + stop)]
            tokens += [(token, False) for token in self._ids(rest)]
        return prompt, tokens

    def _check_texts(self, record: RecordedRollout, completion: Tokens) -> None:
        """Refuse ids that do not decode to the recorded texts, with or without special tokens.

        Of a chat's prompt, messages of the system and the user must be in it. Templates may drop parts of earlier
        answers and add what they like, so nothing else is looked for.
        """
        end, prompt = special_id(self.tokenizer, "eos"), record.prompt_ids
        for name, text, ids in (("completion", record.completion, completion), ("prompt", record.prompt, prompt)):
            if text is None or ids is None:
                continue
            self._check_ids(record, ids)
            decoded = self._decoded(ids)
            forms = (decoded, self._decoded(ids[:-1]) if ids[-1:] == (end,) else decoded)
            if text not in (*forms, str(self.tokenizer.decode(list(ids), skip_special_tokens=True))):
                raise InputError(
                    f"{record.place}: the tokenizer decodes the {name}'s ids to {decoded!r:.60}, but {text!r:.60} was "
                    "recorded; pass the model that sampled them."
                )
        if prompt is None or not record.messages:
            return
        text = self._decoded(prompt)
        for message in record.prompt_messages:
            if message.role in ("system", "user") and message.content.strip() not in text:
                raise InputError(
                    f"{record.place}: the tokenizer decodes the prompt's ids to {text!r:.60}, in which the "
                    f"{message.role}'s {message.content!r:.60} is not; pass the model that sampled them."
                )

    def _check_ids(self, record: RecordedRollout, ids: Tokens) -> None:
        if ids and max(ids) >= self.vocabulary:
            raise InputError(
                f"{record.place} has token {max(ids)}, but the model's vocabulary has {self.vocabulary}; pass the "
                "model that sampled it."
            )
        if self.positions is not None and len(ids) > self.positions:
            raise InputError(
                f"{record.place} has {len(ids)} tokens, but the model reads at most {self.positions}; leave it out, or "
                "raise the model's max_position_embeddings if it was sampled so."
            )

    def _ids(self, text: str) -> Tokens:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def _decoded(self, ids: Tokens) -> str:
        return str(self.tokenizer.decode(list(ids)))


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    place: Place,
    goes_on: bool,
    tools: Sequence[Row] = (),
) -> str:
    """Return messages in the tokenizer's chat template, with the beginning of an answer where one `goes_on`.

    The template is told of the tools, where there are any.

    Raises:
        InputError: The tokenizer has no template, or the template refuses the messages.
    """
    for number, message in enumerate(messages):
        if message.lacks:
            raise InputError(
                f"{place}: message {number} of the {message.role} has {message.lacks}, whose text as the model had it "
                "is not recorded; leave the rollout out, record token ids, or use otb import, which needs none."
            )
    if not tokenizer.chat_template:
        raise InputError(
            f"{place} is a chat, but the model's tokenizer has no chat template; pass the model that sampled it, or "
            "record texts or token ids."
        )
    rows: list[Any] = [
        {"role": message.role, "content": message.content} | ({"tool_calls": [*message.calls]} if message.calls else {})
        for message in messages
    ]
    try:
        given: Any = [*tools] or None
        return str(tokenizer.apply_chat_template(rows, tools=given, add_generation_prompt=goes_on, tokenize=False))
    except Exception as error:  # a template is a program of the model's makers
        reason = " ".join(str(error).split())[:120].rstrip(".")
        raise InputError(
            f"{place}: the chat template refuses its messages ({reason}); record texts or token ids instead."
        ) from error


def _pieces(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], place: Place) -> list[str] | None:
    """Return what the template writes around messages' contents, without special tokens; None where it refuses."""
    marks = MARKS[: len(roles)]
    try:
        messages = [Message(role, mark, False) for role, mark in zip(roles, marks, strict=True)]
        text = _stripped(tokenizer, chat_text(tokenizer, messages, place, goes_on=True))
    except InputError:  # some templates take no system message
        return None
    pieces = []
    for mark in marks:
        if mark not in text:
            return None
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


def _stripped(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))
