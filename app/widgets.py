"""What pages share: the frame around a page, boxes bound to its address, the choice of runs, charts with their data.

A bound box that stands at its default leaves the address; a value there that is none is ignored. The session keeps what
was chosen while other pages are open. Model output, names and committed pages hold markup that no page may follow: they
are shown as text.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import data
import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from markdown_it import MarkdownIt
from pandas.api.types import is_numeric_dtype
from streamlit.components.v2 import component

from otb_analysis.errors import STOPS
from otb_analysis.figures.styles import CONFIG, for_background, stacked
from otb_analysis.figures.texts import ONE_LINE, legible


def plain(text: str) -> str:
    """Return text that Streamlit's Markdown shows as it is: no markup, directive, formula or link."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", one_line(text.replace("\n", " ")))


INTERVAL = re.compile(r"-?[\d.,]+(?: %)? \([^()\n|]{1,24}\)")


def prose(markdown: str) -> str:
    """Return Markdown as it reads below the headings of a page: no picture, link, formula or directive of Streamlit's.

    A number and its interval stay on one line.
    """
    text = re.sub(r"!\[[^]]*]\([^)]*\)|\[([^]]*)]\([^)]*\)", lambda found: found[1] or "", markdown)
    text = re.sub(r"^(#+) ", r"##\1 ", text, flags=re.MULTILINE)
    text = INTERVAL.sub(lambda found: found[0].replace(" ", "\u00a0").replace("–", "\u2060–\u2060"), text)
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else re.sub(r"([$<]|:(?=\w))", r"\\\1", part) for part in parts)


COMMAND = re.compile(r"(?:(?<=: )|(?<=then ))(otb (?:train|audit|compare) .*?)(?:; |$)", re.MULTILINE)


def sentences(lines: Sequence[str], bold: bool = False) -> None:
    """Show a line each, the first one bold if asked; a command that a sentence ends in stands below it to be copied."""
    for n, part in enumerate(COMMAND.split("\n".join(lines))):
        lines = [line for line in part.splitlines() if line]
        if n and lines:  # what follows a command
            lines[0] = lines[0][0].upper() + lines[0][1:]
        texts = list(map(plain, lines))
        if n % 2:
            st.code(part, language="bash", wrap_lines=True)
        elif texts:
            st.markdown("  \n".join([f"**{texts[0]}**" if bold and not n else texts[0], *texts[1:]]))


MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
MARKDOWN.disable(["link", "image", "autolink", "reference", "entity"])


def raw(text: str, within: Any = st) -> None:
    """Show text in letters of one width as it is: nothing in it is markup, and no blank of it is lost."""
    within.html(f'<pre class="raw">\n{escape(text)}</pre>')  # a browser leaves out the first line break


def rendered(text: str) -> None:
    """Show what a model wrote as the Markdown it may be: its links, pictures and HTML stay text."""
    st.html(MARKDOWN.render(legible(text)) or "<i>empty</i>")


def one_line(shown: Any) -> Any:
    """Return a text with a sign for each character that would rearrange others or begin a line; a table with all its.

    So do lists and mappings, as a figure is made of.
    """
    if isinstance(shown, str):
        return legible(shown, ONE_LINE)
    if isinstance(shown, pd.DataFrame):
        texts: Any = shown.apply(lambda column: column if is_numeric_dtype(column) else column.map(one_line))
        return texts.rename(columns=one_line)
    if isinstance(shown, Mapping):
        return {key: one_line(value) for key, value in shown.items()}
    return [one_line(value) for value in shown] if isinstance(shown, list | tuple) else shown


def as_wide_as_texts(table: pd.DataFrame) -> dict[str, Any]:
    """Return columns of a table that cut none of its texts."""
    longest = {str(name): max([0, *(len(str(text)) for text in table[name])]) for name in table}
    return {name: st.column_config.TextColumn(width=max(70, 22 + 7 * long)) for name, long in longest.items()}


Choices = Sequence[Any] | Mapping[Any, str]
"""What can be chosen; a mapping has it in words, which stand in the address, too."""


def box(
    within: Any,
    label: str,
    key: str,
    choices: Choices,
    default: Any = None,
    look: str = "box",
    *,
    of: str = "",
    **options: Any,
) -> Any:
    """Let the page choose one of several by a bound selectbox, by `buttons` or a `slider`; the first to begin with.

    With `of`, the run that the choice is of, what was chosen of one run is not kept for another, and the first choice
    moves on as the run grows.
    """
    words = choices if isinstance(choices, Mapping) else {one: str(one) for one in choices}
    first = default if default in words else next(iter(words))
    chosen = st.session_state.get(key, first)
    page = st.session_state["_shown"]  # each has a first choice of its own
    before = st.session_state.get(f"_{key} of", (of, None, None, page))
    grown = of and before == (of, chosen, chosen, page) and key not in st.query_params
    if grown or (before[0] != of and before[1] == chosen):  # else Back or a link brought both
        st.session_state[key] = chosen = first
    st.session_state[f"_{key} of"] = of, chosen, first, page
    if chosen != first and chosen in words and key not in st.query_params:
        st.session_state[key] = chosen  # the default of another run or step, and not this one's: into the address
    options |= {"format_func": lambda one: one_line(words.get(one, str(one))), "key": key, "bind": "query-params"}
    if look == "box":
        return within.selectbox(label, list(words), list(words).index(first), **options)
    if look == "slider":
        return within.select_slider(label, list(words), first, **options)
    chosen = within.segmented_control(label, list(words), default=first, required=True, **options)
    return first if chosen is None else chosen


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


def new_query_value(name: str) -> str | None:
    """Return what the address asks for where no widget is bound, if that is new: by a link, by hand, or by Back.

    Back to before the first choice on this page takes the choice with it.
    """
    text, written = st.query_params.get(name), st.session_state.get(f"_{name}")
    if text is None and st.session_state["_stayed"] and st.session_state.get(name) == written:
        for key in (name, f"_{name}"):  # a newer choice, which the address does not have yet, is none of them
            st.session_state.pop(key, None)
    return None if text == written else text


def write(**values: object) -> None:
    """Write values that no widget holds into the address, in one message, so that one Back leaves the page."""
    texts = {name: str(value) for name, value in values.items() if value is not None}
    st.session_state.update({f"_{name}": text for name, text in texts.items()})
    if any(st.query_params.get(name) != text for name, text in texts.items()):
        st.query_params.update(texts)


@contextmanager
def frame(title: str = "", question: str = "") -> Iterator[None]:
    """Frame a page with its title and the question it answers, or a part of one.

    An error inside, such as a broken file, is shown as a sentence; what follows goes on.
    """
    if title:
        st.title(title, anchor=False)
        st.caption(question)
    try:
        yield
    except STOPS as error:
        st.warning(plain(str(error)), icon=":material/warning:")


def go_to(name: str, **address: object) -> None:
    """Let the run of the script that a click causes open another page; it cannot be opened in the click itself.

    Args:
        name: The page.
        address: What it is asked for, but for what a box of this page is bound to: that writes itself again.
    """
    st.session_state["_page"] = name, {key: str(value) for key, value in address.items()}


def chosen_runs() -> list[data.Run]:
    """Return the runs chosen in the sidebar; without any the page ends with a hint."""
    chosen: list[data.Run] = st.session_state.get("_selection", [])
    if chosen:
        return chosen
    if st.session_state.get("_readable"):
        st.info("No run is chosen. Choose at least one in the sidebar.", icon=":material/arrow_back:")
    else:
        st.info("None of the runs in this folder has a step that can be read.", icon=":material/inbox:")
        reasons(st.session_state["_runs"])
    st.stop()


def compared_runs() -> list[data.Run]:
    """Return the chosen runs as they are compared: the reference first, the others by name, as `otb compare` does."""
    return sorted(chosen_runs(), key=lambda run: (run.name != st.session_state.get("_reference"), run.name))


def reasons(table: pd.DataFrame) -> None:
    """Say why runs are broken or failed, one line each."""
    for name, reason in zip(table["run"], table["reason"].fillna(""), strict=True):
        if reason:
            st.caption(f":material/warning: **{plain(str(name))}**: {plain(str(reason))}")


def one_run(within: Any = st, width: int = 420) -> data.Run:
    """Let the page choose one of the chosen runs; the choice holds across pages and in the URL.

    Where another sampler drew its tokens, every page says so.
    """
    chosen = {run.name: run for run in chosen_runs()}
    if len(chosen) == 1:
        st.session_state["focus"] = next(iter(chosen))  # still shown once another begins to run
    else:
        box(within, "Run", "focus", list(chosen), width=width)
    run = chosen[st.session_state["focus"]]
    if alarm := data.answers(run).alarm:
        st.warning(plain(alarm), icon=":material/warning:")
    return run


def clicked_data(key: str) -> list[Any]:
    """Return the data of the point of a figure that was just clicked; empty where it has none, or none was clicked."""
    data = [point["customdata"] for point in st.session_state[key]["selection"]["points"] if point.get("customdata")]
    if not data:
        return []
    return list(data[0].values()) if isinstance(data[0], dict) else list(data[0])  # a browser's array has keys


SHOWN = "as shown"
WIDTHS = {SHOWN: None, "one column (3.25 in)": 3.25, "two columns (6.75 in)": 6.75}
"""Widths of a saved figure, in inches."""
SVG_INCH, PNG_INCH = 96, 300
"""Pixels of an inch: as SVG defines it, and as printed."""
SHRUNK = 13 / 16
"""How much smaller than on the page a figure is printed: text of 13 pixels then has 8 points, notes of 11 have 6.7."""


_window = component("otb_analysis.window", js=Path(__file__).with_name("window.js").read_text(encoding="utf-8"))


def watch_window() -> None:
    """Let the browser say whether the window is narrow, and describe figures to screen readers.

    Streamlit keeps the callback, and with it all names of its module: those of a script are made anew at each run.
    """
    narrow = _window(key="window", on_narrow_change=lambda: None).get("narrow")
    if narrow is not None:  # another page begins without it, and the window is as it was
        st.session_state["_narrow"] = narrow


@st.fragment  # what is chosen below a figure draws it again, and not its page
def chart(
    figure: go.Figure,
    key: str,
    says: str,
    table: pd.DataFrame | Callable[[], pd.DataFrame] | None = None,
    python: str = "",
    clicked: Callable[[], None] | None = None,
) -> None:
    """Show a figure, with what saves it below: the size of its image, its numbers as CSV, and the Python that draws it.

    Args:
        key: Unique on the page; also the name of the downloaded files.
        says: What it shows, in a sentence for a screen reader.
        table: The numbers, or what makes them when they are asked for.
        python: Lines that draw the figure, for a notebook; see `scripts`.
        clicked: Called where a point was clicked, which is then in the session under `key`; the page is drawn again.
    """

    def on_select() -> None:
        st.session_state["_clicked"] = key
        if clicked:
            clicked()

    if st.session_state.get("_clicked") == key:
        del st.session_state["_clicked"]
        st.rerun()
    figure = go.Figure(one_line(figure.to_plotly_json()))  # the page's own is drawn again
    kind, inches = st.session_state.get(f"format-{key}") or "svg", WIDTHS[st.session_state.get(f"width-{key}", SHOWN)]
    # The camera button draws it `width` pixels wide and writes `scale` times as many, in SVG too.
    options: dict[str, Any] = {"filename": f"otb-{key}", "format": kind, "scale": 1 if kind == "svg" else 3}
    dark = st.context.theme.type == "dark"
    if st.session_state.get("_narrow"):
        stacked(figure)
    if inches is not None:  # for the white paper it is printed on
        layout: Any = figure.layout
        if dark:
            figure.update_layout(paper_bgcolor="#FFFFFF")
        drawn = round(inches * SVG_INCH / SHRUNK)
        printed = inches * SVG_INCH if kind == "svg" else round(inches * PNG_INCH)
        options |= {"width": drawn, "height": layout.height or 450, "scale": printed / drawn}
    for_background(figure, dark and inches is None)
    select: dict[str, Any] = {"on_select": on_select, "selection_mode": "points"} if clicked else {}
    config = CONFIG | {"toImageButtonOptions": options}
    st.plotly_chart(
        figure, width="stretch", theme=None, key=key, config=config, alt=f"Figure. {one_line(says)}", **select
    )
    with st.popover("Save", icon=":material/download:", type="tertiary", key=f"save-{key}"):
        st.segmented_control("Format", ["svg", "png"], default="svg", required=True, key=f"format-{key}")
        st.selectbox("Width", list(WIDTHS), key=f"width-{key}")
        st.caption("The camera above the figure saves it like this.")
        if table is not None:
            download(table, key)
        if python:
            st.caption("This Python draws the figure where the dashboard was started.")
            st.code(python.replace(str(data.root()), os.path.relpath(data.root())), language="python")


def download(table: pd.DataFrame | Callable[[], pd.DataFrame], key: str) -> None:
    """Offer a table as CSV, which is written when it is asked for."""
    st.download_button(
        "CSV", lambda: (table() if callable(table) else table).to_csv(index=False).encode(), f"otb-{key}.csv",
        "text/csv", key=f"csv-{key}", on_click="ignore", type="tertiary", icon=":material/download:",
    )  # fmt: skip
