"""The view in the address: widgets are bound to it, and what no widget holds is written by hand.

A bound widget that stands at its default leaves the address; a value there that is none is ignored. The session keeps
what was chosen while other pages are open.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import streamlit as st

Choices = Sequence[Any] | Mapping[Any, str]
"""What can be chosen; a mapping has it in words, which stand in the address, too."""


def box(within: Any, label: str, key: str, choices: Choices, default: Any = None, **options: Any) -> Any:
    """Let the page choose one of several by a bound selectbox; the first one to begin with."""
    words = choices if isinstance(choices, Mapping) else {one: str(one) for one in choices}
    first = default if default in words else next(iter(words))
    keep(key, words, first)
    return within.selectbox(
        label, list(words), list(words).index(first), format_func=lambda one: words.get(one, str(one)), key=key,
        bind="query-params", **options,
    )  # fmt: skip


def segments(within: Any, label: str, key: str, choices: Choices, default: Any = None, **options: Any) -> Any:
    """Let the page choose one of a few by a bound row of buttons; the first one to begin with."""
    words = choices if isinstance(choices, Mapping) else {one: str(one) for one in choices}
    first = default if default in words else next(iter(words))
    keep(key, words, first)
    chosen = within.segmented_control(
        label, list(words), default=first, format_func=lambda one: words.get(one, str(one)), key=key, required=True,
        bind="query-params", **options,
    )  # fmt: skip
    return first if chosen is None else chosen


def keep(key: str, choices: Container[Any], default: Any) -> None:
    """Write a choice into the address that was the default of another run or step and is not this one's."""
    chosen = st.session_state.get(key, default)
    if chosen != default and chosen in choices and key not in st.query_params:
        st.session_state[key] = chosen


def span(within: Any, label: str, key: str, low: Any, high: Any, **options: Any) -> tuple[Any, Any] | None:
    """Let the page choose a range with a bound slider; None for the whole one, or where there is only one value."""
    if low is None or low == high:
        return None
    before = st.session_state.get(f"_{key}")
    if before not in (None, (low, high)) and st.session_state.get(key) == before:
        st.session_state[key] = low, high  # all of a run that grows stays all of it
    st.session_state[f"_{key}"] = low, high
    chosen = within.slider(label, low, high, (low, high), key=key, bind="query-params", **options)
    return None if chosen == (low, high) else chosen


def asked(name: str) -> str | None:
    """Return what the address asks for where no widget is bound, if that is new: by a link, by hand, or by Back."""
    text = st.query_params.get(name)
    return None if text == st.session_state.get(f"_{name}") else text


def write(**values: object) -> None:
    """Write values that no widget holds into the address, in one message, so that one Back leaves the page."""
    texts = {name: str(value) for name, value in values.items() if value is not None}
    st.session_state.update({f"_{name}": text for name, text in texts.items()})
    if any(st.query_params.get(name) != text for name, text in texts.items()):
        st.query_params.update(texts)
