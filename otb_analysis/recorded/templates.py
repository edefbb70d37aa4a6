"""Prompts and chat templates: a chat as text, and a text that lost its special tokens put back into its template."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import Message
from otb_analysis.recorded.rows import Place

MARKS = ("\ue000", "\ue001")
"""Characters for private use, which no prompt holds: they stand for the contents of messages."""


def chat_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: Place, goes_on: bool) -> str:
    """Return messages in the tokenizer's chat template, with the beginning of an answer where one `goes_on`.

    Raises:
        InputError: The tokenizer has no template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise InputError(
            f"{place} is a chat, but the model's tokenizer has no chat template; pass the model that sampled it, or "
            "record texts or token ids."
        )
    rows = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(rows, add_generation_prompt=goes_on, tokenize=False))
    except Exception as error:  # a template is a program of the model's makers
        reason = " ".join(str(error).split())[:120].rstrip(".")
        raise InputError(
            f"{place}: the chat template refuses its messages ({reason}); record texts or token ids instead."
        ) from error


def restored(tokenizer: PreTrainedTokenizerBase, text: str, place: Place) -> str:
    """Return a prompt with its special tokens, of which only the text without them was recorded.

    The template, filled with marks and stripped of special tokens, says where the messages stand. The result counts
    only if stripping it gives the recorded text again.

    Raises:
        InputError: The text is not that of one user message, with or without a system message, in this template.
    """
    for roles in (("user",), ("system", "user")):
        pieces = _pieces(tokenizer, roles, place)
        contents = _between(text, pieces) if pieces else None
        if contents is None:
            continue
        messages = [Message(role, content, False) for role, content in zip(roles, contents, strict=True)]
        whole = chat_text(tokenizer, messages, place, goes_on=True)
        if _stripped(tokenizer, whole) == text:
            return whole
    raise InputError(
        f"{place}: its prompt was recorded without special tokens, and the chat template does not give the "
        "same text; pass --text plain if no template was used, --text chat if the prompt is the bare question, or "
        "record token ids."
    )


def next_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a template writes between a user's message and the answer, without special tokens.

    In a completion it is the beginning of another turn. Empty where the template writes nothing but blanks there.
    """
    pieces = _pieces(tokenizer, ("user",), Place(Path(), 0)) if tokenizer.chat_template else None
    return pieces[-1] if pieces and pieces[-1].strip() else ""


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
        piece, found, text = text.partition(mark)
        if not found:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _between(text: str, pieces: Sequence[str]) -> list[str] | None:
    """Return what stands between the pieces, in their order from both ends; None where they are not all there."""
    first, *inner, last = pieces
    if not (text.startswith(first) and text.endswith(last) and len(text) >= len(first) + len(last)):
        return None
    rest, contents = text[len(first) : len(text) - len(last)], []
    for piece in inner:
        content, found, rest = rest.partition(piece)
        if not found:
            return None
        contents.append(content)
    return [*contents, rest]


def _stripped(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))
