"""Settings of a page: boxes, switches and sliders whose value stands in the URL, defaults too, and lasts the session.

A page that is left takes its settings out of the URL; they are there again when it is opened again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import selection
import streamlit as st

_OWNERS = "_owners"
"""Name → what its setting belonged to last."""
_BOOLS = {"true": True, "false": False}

Texts = str | list[str]


def keep(
    widget: Callable[..., Any],
    *labels: Any,
    name: str,
    default: Any,
    read: Callable[[Any], Any],
    write: Callable[[Any], Texts] = str,
    of: str = "",
    many: bool = False,
    **options: Any,
) -> Any:
    """Draw a widget with the value that the URL asks for or the session knows, else a default; return its value.

    Args:
        read: Makes a value of what stands in the URL; raises ValueError or KeyError where it is none.
        write: The reverse.
        of: What the setting belongs to, such as a run; with another one it begins with the default.
        many: The URL has the name several times, one for each of several values.
    """
    owners = st.session_state.setdefault(_OWNERS, {})
    if not selection.take(name, many) and owners.get(name, of) != of:
        selection.remember(name, None)
    owners[name] = of
    text, value = selection.known(name), default
    with suppress(ValueError, KeyError):  # typed by hand, or of another run
        value = default if text is None else read(text)
    key = f"{name}-{of}" if of else name
    st.session_state[key] = value
    value = widget(*labels, key=key, on_change=_changed, args=(name, key, write), **options)
    selection.remember(name, write(value))
    return value


def _changed(name: str, key: str, write: Callable[[Any], Texts]) -> None:
    selection.remember(name, write(st.session_state[key]))


def switch(within: Any, label: str, name: str, **options: Any) -> bool:
    """Let the page switch something on."""
    write = _words_of({on: word for word, on in _BOOLS.items()})
    return bool(keep(within.toggle, label, name=name, default=False, read=_BOOLS.__getitem__, write=write, **options))


def pick(
    widget: Callable[..., Any],
    label: str,
    name: str,
    choices: Sequence[Any] | Mapping[Any, str],
    default: Any = None,
    text: Callable[[Any], str] | None = None,
    **options: Any,
) -> Any:
    """Let the page pick one of some choices, by their words if they have some; the first one to begin with.

    Args:
        text: How a choice is written into the URL; its words if not given.
    """
    words = dict(choices) if isinstance(choices, Mapping) else {choice: str(choice) for choice in choices}
    written = {choice: text(choice) for choice in words} if text else words
    return keep(
        widget, label, list(words), name=name, default=next(iter(words)) if default is None else default,
        read={word: choice for choice, word in written.items()}.__getitem__, write=_words_of(written),
        format_func=words.__getitem__, **options,
    )  # fmt: skip


def pick_many(
    within: Any, label: str, name: str, choices: Sequence[str], default: Sequence[str], **options: Any
) -> Any:
    """Let the page pick several of some choices; those that are not here are left out."""

    def read(texts: Sequence[str]) -> list[str]:
        found = [choice for choice in choices if choice in texts]
        if not found and any(texts):
            raise KeyError(name)
        return found

    # No value at all would say nothing: an empty text says that none is picked.
    return keep(
        within.multiselect, label, list(choices), name=name, default=list(default), read=read, many=True,
        write=lambda chosen: list(chosen) or [""], **options,
    )  # fmt: skip


def whole(within: Any, label: str, name: str, low: int, high: int, default: int, **options: Any) -> int:
    """Let the page choose a whole number with a slider."""
    read = _between(low, high, int)
    return int(keep(within.slider, label, low, high, name=name, default=default, read=read, **options))


def span(within: Any, label: str, name: str, low: Any, high: Any, **options: Any) -> tuple[Any, Any] | None:
    """Let the page choose a range with a slider; None for the whole one, or where there is only one value.

    The URL says `all` for the whole one, so that it is still whole once a run has grown.
    """
    if low is None or low == high:
        return None
    one = _between(low, high, type(low))

    def read(text: str) -> tuple[Any, Any]:
        if text == "all":
            return low, high
        first, _, last = text.partition("..")
        return one(min(first, last, key=float)), one(max(first, last, key=float))

    def write(ends: tuple[Any, Any]) -> str:
        return "all" if tuple(ends) == (low, high) else "..".join(map(str, ends))

    ends = keep(within.slider, label, low, high, name=name, default=(low, high), read=read, write=write, **options)
    return None if tuple(ends) == (low, high) else tuple(ends)


def _between(low: Any, high: Any, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what makes a number of a text, put between two ends: another run has others."""

    def read(text: str) -> Any:
        number = kind(text)
        if number != number:
            raise ValueError(text)
        return max(low, min(number, high))

    return read


def _words_of(words: Mapping[Any, str]) -> Callable[[Any], str]:
    return lambda choice: words[choice]
