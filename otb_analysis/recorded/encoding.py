"""Recorded rollouts as `Rollouts`: token ids as recorded, or from the texts; what cannot be known is refused."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Message, RecordedRollout
from otb_analysis.recorded.rows import Tally
from otb_analysis.recorded.steps import RecordedStep
from otb_analysis.recorded.templates import chat_text, next_turn, restored
from otb_analysis.rollouts.drafts import draft_of
from otb_analysis.rollouts.models import special_id
from otb_analysis.rollouts.sampling import Draft, Rollouts, collate
from otb_analysis.tasks import Prompt
from otb_analysis.types import FinishReason

NOT_ENDED = "completion without its end token, because the record does not say that it ended (--ended all scores one)"
RESTORED = "prompt was put back into the chat template, because its text had lost its special tokens"

Segment = tuple[tuple[int, ...], bool]
"""Tokens in a row, and whether the policy sampled them."""


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
        texts = {int(g): record for g, record in zip(step.group, step.records, strict=True)}
        prompts = tuple(
            Prompt(name, one.shown_prompt or self._decoded(one.prompt_ids or ()), answer=one.answer or "")
            for name, one in ((name, texts[g]) for g, name in enumerate(step.prompt_ids))
        )
        rollouts = collate(drafts, prompts, step.group, special_id(self.tokenizer, "pad"))
        reward = np.zeros(rollouts.mask.shape)
        for n, record in enumerate(step.records):
            sampled = np.flatnonzero(rollouts.mask[n])
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
        prompt, segments = self._tokens(record)
        self._check_ids(record, (*prompt, *(i for ids, _ in segments for i in ids)))
        tokens = [(token, sampled) for ids, sampled in segments for token in ids]
        known = record.columns.get("behavior_logprob")
        if known is not None and len(tokens) != len(known):
            raise InputError(
                f"{record.place} has {len(known)} log-probabilities but its text has {len(tokens)} tokens under this "
                "tokenizer; record the token ids, or leave the log-probabilities out."
            )
        draft = draft_of(prompt, tokens, None if known is None else known.tolist(), self.tokenizer, self._ends)
        draft.finish_reason = self._finish_reason(record, draft)
        return draft

    def _tokens(self, record: RecordedRollout) -> tuple[tuple[int, ...], list[Segment]]:
        """Return the prompt's tokens, and the completion's in segments."""
        if record.ids is not None:
            self._check_text(record, "completion", record.completion, record.ids)
            self._check_chat(record)
            prompt = record.prompt_ids
            if prompt is None:
                prompt = self._prompt(record)
            else:
                self._check_text(record, "prompt", record.prompt, prompt)
            sampled = record.policy_tokens
            assert sampled is not None
            return prompt, [((token,), flag) for token, flag in zip(record.ids, sampled.tolist(), strict=True)]
        if any(message.sampled for message in record.messages[:-1]):
            return self._chat(record)
        return self._prompt(record), self._completion(record)

    def _prompt(self, record: RecordedRollout) -> tuple[int, ...]:
        """Return a prompt's tokens from its text or its messages."""
        if record.prompt_ids is not None:
            return record.prompt_ids
        text, place = record.prompt, record.place
        if record.messages:
            first = next(i for i, message in enumerate(record.messages) if message.sampled)
            return self._ids(chat_text(self.tokenizer, record.messages[:first], place, goes_on=True), special=False)
        assert text is not None
        if self.text == "chat":
            message = Message("user", text, False)
            return self._ids(chat_text(self.tokenizer, [message], place, goes_on=True), special=False)
        if self.text == "auto" and record.stripped and self.tokenizer.chat_template:
            self.tally[RESTORED] += 1
            return self._ids(restored(self.tokenizer, text, place), special=False)
        ids = self._ids(text, special=True)
        if not ids:
            raise InputError(f"{place} has a prompt without tokens; give every prompt at least one.")
        return ids

    def _completion(self, record: RecordedRollout) -> list[Segment]:
        """Return a completion's tokens from its text, with the end token where it ended."""
        text = record.messages[-1].content if record.messages else record.completion
        assert text is not None
        if self.text == "auto" and record.stripped and (mark := next_turn(self.tokenizer)) and mark in text:
            raise InputError(
                f"{record.place}: its completion holds {mark!r}, with which the chat template begins a turn, and "
                "no mask says which tokens the policy sampled; record token ids with a mask, or pass --text plain if "
                "it wrote all of it."
            )
        ids = self._ids(text, special=False)
        end = special_id(self.tokenizer, "eos")
        if ids[-1:] != (end,) and self._has_ended(record):
            ids = (*ids, end)
        return [(ids, True)] if ids else []

    def _has_ended(self, record: RecordedRollout) -> bool:
        """Return whether a completion without token ids ended with the end token; counted where nothing says so."""
        if self.ended == "recorded" and record.finish_reason == "unknown":
            self.tally[NOT_ENDED] += 1
        return self.ended == "all" or record.finish_reason in ("stop", "turns")

    def _chat(self, record: RecordedRollout) -> tuple[tuple[int, ...], list[Segment]]:
        """Return a chat's tokens, each message's as the template adds it behind those before.

        The policy wrote its messages up to the end token; what the template adds behind that is not its own.
        """
        first = next(i for i, message in enumerate(record.messages) if message.sampled)
        before = chat_text(self.tokenizer, record.messages[:first], record.place, goes_on=True)
        prompt, segments, end = self._ids(before, special=False), [], str(self.tokenizer.eos_token)
        for i in range(first, len(record.messages)):
            goes_on = i + 1 < len(record.messages) and record.messages[i + 1].sampled
            whole = chat_text(self.tokenizer, record.messages[: i + 1], record.place, goes_on)
            if not whole.startswith(before):
                raise InputError(
                    f"{record.place}: the chat template rewrites earlier messages when message {i} comes, so its "
                    "tokens are not those that were sampled; record token ids with a mask."
                )
            added, before = whole[len(before) :], whole
            last = i + 1 == len(record.messages)
            own, stop, rest = added.partition(end) if record.messages[i].sampled else ("", "", added)
            if last and not self._has_ended(record):
                stop = ""
            if own + stop:
                segments.append((self._ids(own + stop, special=False), True))
            if rest and not last:
                segments.append((self._ids(rest, special=False), False))
        return prompt, segments

    def _check_text(self, record: RecordedRollout, name: str, text: str | None, ids: tuple[int, ...]) -> None:
        """Refuse ids that do not decode to the recorded text, with or without special tokens."""
        if text is None:
            return
        self._check_ids(record, ids)
        ends = ids[:-1] if ids and ids[-1] in self._ends else ids
        forms = (
            self._decoded(ids),
            self._decoded(ends),
            str(self.tokenizer.decode(list(ids), skip_special_tokens=True)),
        )
        if text not in forms:
            raise InputError(
                f"{record.place}: the tokenizer decodes the {name}'s ids to {forms[0]!r:.60}, but {text!r:.60} was "
                "recorded; pass the model that sampled them."
            )

    def _check_chat(self, record: RecordedRollout) -> None:
        """Refuse a chat's prompt ids in which a message of the system or the user is not to be read.

        Templates may drop parts of earlier answers and add what they like, so nothing else is looked for.
        """
        if record.prompt_ids is None or not record.messages:
            return
        text = self._decoded(record.prompt_ids)
        for message in record.messages:
            if message.sampled:
                return
            if message.role in ("system", "user") and message.content.strip() not in text:
                raise InputError(
                    f"{record.place}: the tokenizer decodes the prompt's ids to {text!r:.60}, in which the "
                    f"{message.role}'s {message.content!r:.60} is not; pass the model that sampled them."
                )

    def _check_ids(self, record: RecordedRollout, ids: tuple[int, ...]) -> None:
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

    @property
    def _ends(self) -> tuple[int, ...]:
        return (special_id(self.tokenizer, "eos"),)

    def _finish_reason(self, record: RecordedRollout, draft: Draft) -> FinishReason:
        """Return how a rollout ended: as recorded, or `stop` where its last token is the end token."""
        if record.finish_reason != "unknown":
            return record.finish_reason
        return "stop" if draft.turns and draft.turns[-1].finished else "unknown"

    def _ids(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _decoded(self, ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(ids)))
