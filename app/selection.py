"""The one selection that all pages share beside the runs: run in focus, step, prompt, rollout, token and more.

It lives in the session and in the URL, defaults included, so that every page can be opened again by its address.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import streamlit as st
from plain_text import plain

NAMES = (
    *("focus", "step", "prompt", "rollout", "token", "color", "estimator", "against", "beside", "part"),
    *("compare", "setting", "a", "b"),
)
_WRITTEN = "_written"
_ASKED = "_asked"
"""What addresses asked for and no page has looked up yet."""
_REFUSED = "_refused"
"""Name → what an address asked for in vain, and what is shown instead."""
_BOXES = "_boxes"
"""Name → the box that showed it last."""


def restore() -> None:
    """Take over what the URL asks for, and write into it what the session knows: a change of page empties it."""
    for name in NAMES:
        if take(name):  # opened by a link, or typed
            st.session_state.setdefault(_ASKED, set()).add(name)
        elif (text := known(name)) is not None and name not in st.query_params:
            st.query_params[name] = text


def take(name: str, many: bool = False) -> bool:
    """Take over what the URL asks for under a name, all values or the last; return whether that is new."""
    asked = st.query_params.get_all(name)
    texts = asked if many else asked[-1] if asked else None
    new = bool(asked) and texts != known(name)
    if new:
        st.session_state[_WRITTEN][name] = texts
    return new


def known(name: str) -> Any:
    """Return what is written under a name, a text or several; None where nothing is."""
    return st.session_state.setdefault(_WRITTEN, {}).get(name)


def remembered(name: str) -> str | None:
    """Return what is selected, as text; None where nothing is."""
    return known(name)


def remember(name: str, value: object) -> None:
    """Select something, or several texts; None selects nothing."""
    written: dict[str, Any] = st.session_state.setdefault(_WRITTEN, {})
    if value is None:
        written.pop(name, None)
        if name in st.query_params:
            del st.query_params[name]
        return
    texts = [*value] if isinstance(value, list) else [str(value)]
    written[name] = texts if isinstance(value, list) else texts[0]
    if st.query_params.get_all(name) != texts:
        st.query_params[name] = texts


def choose(
    name: str,
    label: str,
    options: Sequence[Any],
    default: Any,
    within: Any = st,
    of: object = "",
    words: Callable[[Any], str] = str,
    **options_of_box: Any,
) -> Any:
    """Let a page choose one of some options: the selected one where it is among them, else a default.

    Args:
        name: One of `NAMES`.
        of: What the options belong to, such as a run and a step; with another one the box and its labels are new.
        words: An option in words.
    """
    by_text = {str(option): option for option in options}
    key, wanted = f"{name}-{of}", remembered(name) or ""
    at_box(name, key, by_text)
    st.session_state[key] = by_text.get(wanted, default)
    if name in st.session_state.get(_ASKED, ()) or name in st.session_state.get(_REFUSED, ()):
        _say_what_is_not_here(name, label, wanted, wanted in by_text, (str(default), words(default)))
    within.selectbox(
        label, list(options), key=key, format_func=words, on_change=_changed, args=(name, key), **options_of_box
    )
    remember(name, st.session_state[key])
    return st.session_state[key]


def _say_what_is_not_here(name: str, label: str, wanted: str, there: bool, instead: tuple[str, str]) -> None:
    """Say that an address asked for what a page does not have, until something else is chosen."""
    asked: set[str] = st.session_state.setdefault(_ASKED, set())
    refused: dict[str, tuple[str, str]] = st.session_state.setdefault(_REFUSED, {})
    if name in asked:
        asked.discard(name)
        refused[name] = wanted, instead[0]
        if there:
            del refused[name]
    elif wanted not in ("", refused[name][1]):
        del refused[name]
    if name in refused:
        sentence = f"The address asks for {label.lower()} {refused[name][0]}, which is not here; {instead[1]} is shown."
        st.warning(plain(sentence), icon=":material/link_off:")


def at_box(name: str, key: str, options: Container[str]) -> None:
    """Forget what an address asked for in vain where a box has it, and where another box than before shows the name."""
    boxes, refused = st.session_state.setdefault(_BOXES, {}), st.session_state.setdefault(_REFUSED, {})
    if boxes.get(name, key) != key or (name in refused and refused[name][0] in options):
        refused.pop(name, None)
    boxes[name] = key


def _changed(name: str, key: str) -> None:
    """A box was changed by hand."""
    st.session_state.get(_REFUSED, {}).pop(name, None)
    remember(name, st.session_state[key])
