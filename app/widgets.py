"""What pages share: the frame around a page, the choice of runs, charts with their data, text that stays text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import listing
import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from address import box
from plain_text import plain

from otb_analysis.errors import STOPS
from otb_analysis.figures.theme import CONFIG, for_background

DEFAULT_RUNS = 4
_LIVE_SECONDS = 3


@contextmanager
def page(title: str, question: str) -> Iterator[None]:
    """Frame a page: its title, the question it answers, and one sentence instead of a traceback."""
    st.title(title, anchor=False)
    st.caption(question)
    with errors_as_sentences():
        yield


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Show an error of the block, such as a broken file, as a sentence; the rest of the page goes on."""
    try:
        yield
    except STOPS as error:
        st.warning(plain(str(error)), icon=":material/warning:")


def choose_runs(runs: Sequence[listing.Run]) -> list[listing.Run]:
    """Let the sidebar choose runs, for all pages and in the URL; all running and a few new ones to begin with.

    A run that begins to run while the page is open is chosen, too.
    """
    names = [run.name for run in runs]
    running = [run.name for run in runs if run.status == "running"]
    begun = [name for name in running if name not in st.session_state.setdefault("_running", running)]
    if begun:
        st.session_state["run"] = [name for name in names if name in (*begun, *st.session_state["run"])]
    st.session_state["_running"] = running
    missing = [name for name in st.query_params.get_all("run") if name not in names]
    first = names[: max(DEFAULT_RUNS, len(running))]  # running ones come first
    chosen = st.sidebar.multiselect("Runs", names, first, key="run", bind="query-params", placeholder="Choose runs")
    if missing:
        st.session_state["_missing"] = missing, chosen
    missing, instead = st.session_state.get("_missing", ((), None))
    if chosen == instead:
        named = ", ".join(missing)
        st.warning(plain(f"The address asks for {named}, which cannot be opened here; Triage lists all runs."))
    return [run for run in runs if run.name in chosen]


def go_to(name: str, **address: object) -> None:
    """Let the run of the script that a click causes open another page; it cannot be opened in the click itself.

    Args:
        name: The page.
        address: What it is asked for, but for what a box of this page is bound to: that writes itself again.
    """
    st.session_state["_page"] = name, {key: str(value) for key, value in address.items()}


def chosen_runs() -> list[listing.Run]:
    """Return the runs chosen in the sidebar; without any the page ends with a hint."""
    chosen: list[listing.Run] = st.session_state.get("_selection", [])
    if chosen:
        return chosen
    if st.session_state.get("_readable"):
        st.info("No run is chosen. Choose at least one in the sidebar.", icon=":material/arrow_back:")
    else:
        st.info("None of the runs in this folder has a step that can be read.", icon=":material/inbox:")
        reasons(st.session_state["_runs"])
    st.stop()


def reasons(table: pd.DataFrame) -> None:
    """Say why runs are broken or failed, one line each."""
    for name, reason in zip(table["run"], table["reason"].fillna(""), strict=True):
        if reason:
            st.caption(f":material/warning: **{plain(str(name))}**: {plain(str(reason))}")


def one_run(within: Any = st, width: int = 420) -> listing.Run:
    """Let the page choose one of the chosen runs; the choice holds across pages and in the URL."""
    chosen = {run.name: run for run in chosen_runs()}
    if len(chosen) == 1:
        st.session_state["focus"] = next(iter(chosen))  # still shown once another begins to run
        return chosen[st.session_state["focus"]]
    return chosen[box(within, "Run", "focus", list(chosen), width=width)]


def follow(runs: Sequence[listing.Run], stamps: dict[str, str]) -> None:
    """While a run is running, look every few seconds whether it grew or was killed, and draw the page again then."""
    if not any(run.status == "running" for run in runs):
        return
    live = st.sidebar.toggle("Follow running runs", value=True, key="live", help="Looks for new steps every 3 seconds.")
    seen = listing.states(stamps)

    @st.fragment(run_every=_LIVE_SECONDS if live else None)
    def watch() -> None:
        if live and listing.states(listing.stamps()) != seen:
            st.rerun(scope="app")

    watch()


def background(figure: go.Figure, printed: bool) -> go.Figure:
    """Set a figure's colours for the page's theme, or for the white paper it is printed on, in place, and return it."""
    dark = st.context.theme.type == "dark"
    if dark and printed:
        figure.update_layout(paper_bgcolor="#FFFFFF")
    return for_background(figure, dark and not printed)


def clicked_data(key: str) -> list[Any]:
    """Return the data of the point of a figure that was just clicked; empty where it has none, or none was clicked."""
    data = [point["customdata"] for point in st.session_state[key]["selection"]["points"] if point.get("customdata")]
    if not data:
        return []
    return list(data[0].values()) if isinstance(data[0], dict) else list(data[0])  # a browser's array has keys


WIDTHS = {"as shown": None, "one column (3.25 in)": 3.25, "two columns (6.75 in)": 6.75}
"""Widths of a saved figure, in inches."""
SVG_INCH, PNG_INCH = 96, 300
"""Pixels of an inch: as SVG defines it, and as printed."""
SHRUNK = 13 / 16
"""How much smaller than on the page a figure is printed: text of 13 pixels then has 8 points, notes of 11 have 6.7."""


def chart(
    figure: go.Figure,
    key: str,
    table: pd.DataFrame | None = None,
    python: str = "",
    clicked: Callable[[], None] | None = None,
) -> None:
    """Show a figure, with what saves it below: numbers as CSV, the size of the image, and the Python that draws it.

    Args:
        key: Unique on the page; also the name of the downloaded files.
        python: Lines that draw the figure, for a notebook; see `scripts`.
        clicked: Called where a point was clicked, which is then in the session under `key`.
    """
    background(figure, WIDTHS[st.session_state.get(f"width-{key}", "as shown")] is not None)
    config = CONFIG | {"toImageButtonOptions": image_options(figure, key)}
    select: dict[str, Any] = {"on_select": clicked, "selection_mode": "points"} if clicked else {}
    st.plotly_chart(figure, width="stretch", theme=None, key=key, config=config, **select)
    row = st.container(horizontal=True)
    if table is not None:
        with row:
            download(table, key)
    with row.popover("Figure", icon=":material/image:", type="tertiary"):
        st.caption("The camera above the figure saves it like this.")
        st.segmented_control("Format", ["svg", "png"], default="svg", required=True, key=f"format-{key}")
        st.selectbox("Width", list(WIDTHS), key=f"width-{key}")
        if python:
            st.code(python, language="python")


def image_options(figure: go.Figure, key: str) -> dict[str, Any]:
    """Return how the camera button saves a figure: format and width as chosen below it.

    Plotly draws it `width` pixels wide and writes `scale` times as many, in SVG too.
    """
    kind = st.session_state.get(f"format-{key}") or "svg"
    options = {"filename": f"otb-{key}", "format": kind, "scale": 1 if kind == "svg" else 3}
    inches = WIDTHS[st.session_state.get(f"width-{key}", "as shown")]
    if inches is None:
        return options
    layout: Any = figure.layout
    drawn = round(inches * SVG_INCH / SHRUNK)
    printed = inches * SVG_INCH if kind == "svg" else round(inches * PNG_INCH)
    return options | {"width": drawn, "height": layout.height or 450, "scale": printed / drawn}


def download(table: pd.DataFrame, key: str) -> None:
    """Offer a table as CSV, which is written when it is asked for."""
    st.download_button(
        "CSV", lambda: table.to_csv(index=False).encode(), f"otb-{key}.csv", "text/csv",
        key=f"csv-{key}", on_click="ignore", type="tertiary", icon=":material/download:",
    )  # fmt: skip
