"""The one selection that all pages share beside the runs: step, prompt, rollout, token, colour, estimators, part, A, B.

It lives in the session and in the URL, defaults included, so that every page can be opened again by its address.
"""

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

NAMES = (
    *("step", "prompt", "rollout", "token", "color", "estimator", "against", "beside", "part"),
    *("compare", "setting", "a", "b"),
)
_WRITTEN = "_written"


def restore() -> None:
    """Take over what the URL asks for, and write into it what the session knows: a change of page empties it."""
    written: dict[str, str] = st.session_state.setdefault(_WRITTEN, {})
    for name in NAMES:
        asked = st.query_params.get(name)
        if asked is not None and asked != written.get(name):
            written[name] = asked  # opened by a link, or typed
        elif name in written and asked is None:
            st.query_params[name] = written[name]


def remembered(name: str) -> str | None:
    """Return what is selected, as text; None where nothing is."""
    return st.session_state.get(_WRITTEN, {}).get(name)


def remember(name: str, value: object) -> None:
    """Select something; None selects nothing."""
    written: dict[str, str] = st.session_state.setdefault(_WRITTEN, {})
    if value is None:
        written.pop(name, None)
        if name in st.query_params:
            del st.query_params[name]
    elif written.get(name) != str(value) or st.query_params.get(name) != str(value):
        written[name] = str(value)
        st.query_params[name] = str(value)


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
    key = f"{name}-{of}"
    st.session_state[key] = by_text.get(remembered(name) or "", default)
    within.selectbox(
        label, list(options), key=key, format_func=words, on_change=_changed, args=(name, key), **options_of_box
    )
    remember(name, st.session_state[key])
    return st.session_state[key]


def _changed(name: str, key: str) -> None:
    """A box was changed by hand."""
    remember(name, st.session_state[key])
