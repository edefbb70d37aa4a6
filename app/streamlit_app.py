"""The dashboard's router: which pages there are, which runs they look at. Start it with `streamlit run app`."""

import gc
import sys
from pathlib import Path

import data
import pandas as pd
import streamlit as st
from widgets import choose_runs, follow, page, plain

from otb_analysis.errors import STOPS

EMPTY = """Make some in minutes with `make demo`, train with `otb train`, or point the dashboard at another
folder: `otb dashboard --root <folder>`, `streamlit run app -- --root <folder>` or the variable `OTB_RUNS`."""
STYLE = """<style>
.stMainBlockContainer { padding-left: 3rem; padding-right: 3rem; max-width: 1480px; }
@media (max-width: 1100px) { .stMainBlockContainer { padding-left: 1.5rem; padding-right: 1.5rem; } }
.st-key-ahead { display: none; }
.st-key-prompt-text { max-height: 9rem; overflow: auto; }
[data-testid="stLayoutWrapper"]:has(> .st-key-token-panel) { position: sticky; bottom: 0; z-index: 20; }
.st-key-token-panel { max-height: 40vh; overflow: auto; padding: 6px 12px; border-radius: 6px 6px 0 0; gap: 0.3rem;
  border: 1px solid rgba(125, 130, 140, .4); border-bottom: none; }
.st-key-token-panel td { padding: 1px 6px; }
.st-key-token-panel td, .st-key-token-panel td p { font-size: 13px; }
.st-key-token-panel [data-testid="stVerticalBlock"] { gap: 0.3rem; }
.st-key-token-panel pre { padding: 2px 8px; }
[data-testid="stMarkdownContainer"] > table { display: block; max-width: 100%; overflow-x: auto; border: none; }
</style>"""


PAPER = ("#FFFFFF", "#12171C")  # of .streamlit/config.toml, light and dark
STUDIES = "Studies"  # the page that needs no runs
PAGES = {  # in the order of the menu, with their icons
    "Triage": "monitoring", "Run": "timeline", "Rollouts": "list_alt", "Tokens": "abc", "Estimators": "target",
    "Compare": "compare_arrows", STUDIES: "menu_book",
}  # fmt: skip


def offer_runs(folder: Path, table: pd.DataFrame, stamps: dict[str, str]) -> None:
    """Let the sidebar choose among the runs of a folder, and leave the choice to the pages."""
    runs = data.readable(table, stamps)
    chosen = choose_runs(runs)
    st.session_state.update(_runs=table, _selection=chosen, _readable=runs)
    follow(chosen, stamps)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    st.sidebar.caption(f"{len(table)} run{'s' * (len(table) != 1)} in {plain(str(shown))}")
    st.sidebar.button("Reload runs", help="Reads the folder again.", type="tertiary", icon=":material/refresh:")


@st.cache_resource(max_entries=1, show_spinner=False)
def loaded(modules: int) -> None:
    """Leave what is loaded for good out of the collection that Streamlit forces after every run.

    Called at the beginning of a run, when that of the run before has left no garbage.
    """
    gc.freeze()


def main() -> None:
    """Choose the runs, then hand over to the page."""
    loaded(len(sys.modules))
    st.set_page_config(page_title="otb-analysis", page_icon="🔬", layout="wide")
    st.html(STYLE)
    st.html(f"<style>.st-key-token-panel {{ background: {PAPER[st.context.theme.type == 'dark']}; }}</style>")
    chosen_page = st.navigation([
        st.Page(f"views/{title.lower()}.py", title=title, icon=f":material/{icon}:", default=title == "Triage")
        for title, icon in PAGES.items()
    ])  # fmt: skip
    if target := st.session_state.pop("_page", None):
        st.switch_page(f"views/{target[0]}.py", query_params=target[1])
    without_runs = chosen_page.title == STUDIES
    # The browser loads Plotly, a second's work, while the server reads; without the file it waits for a figure.
    for script in Path(st.__file__).parent.glob("static/static/js/PlotlyChart.*.js") if not without_runs else ():
        load = f"<script>import('./static/js/{script.name}')</script>"
        st.container(key="ahead").html(load, unsafe_allow_javascript=True)
    folder, stamps = data.root(), data.stamps()
    try:
        table = data.runs(str(folder), stamps)
    except STOPS as error:
        if not without_runs:
            st.warning(plain(str(error)), icon=":material/warning:")
            return
        table = pd.DataFrame()
    if not table.empty:
        offer_runs(folder, table, stamps)
    if table.empty and not without_runs:
        missing = "There are no runs in this folder. " if folder.is_dir() else "This folder does not exist. "
        with page("No runs yet", plain(str(folder))):
            st.info(missing + EMPTY)
    else:
        chosen_page.run()


main()
