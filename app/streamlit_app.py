"""The dashboard's router: which pages there are, which runs they look at. Start it with `streamlit run app`."""

import gc
import os
import sys
from hmac import compare_digest
from pathlib import Path
from typing import Any

import data
import pandas as pd
import streamlit as st
from widgets import box, frame, one_line, plain, watch_window

from otb_analysis.errors import STOPS
from otb_analysis.figures.styles import run_styles
from otb_analysis.store.runs import can_be_opened, estimator_names, matching

EMPTY = """Make some in minutes with `make demo`, train with `otb train`, or point the dashboard at another
folder: `otb dashboard --root <folder>`, `streamlit run app -- --root <folder>` or the variable `OTB_RUNS`."""
STYLE = """<style>
.stMainBlockContainer { padding: 3.5rem 3rem 4rem; max-width: 1480px; }
@media (max-width: 1100px) { .stMainBlockContainer { padding-left: 1.5rem; padding-right: 1.5rem; } }
@media (min-width: 641px) and (max-width: 1100px) {
  .st-key-curves [data-testid="stHorizontalBlock"] { flex-wrap: wrap; }
  .st-key-curves [data-testid="stColumn"] { min-width: 30%; }
}
@media (max-width: 640px) {
  [class*="st-key-one-row"] { flex-wrap: nowrap; overflow-x: auto; }
  [class*="st-key-one-row"] > * { flex: none; }
}
.st-key-fired button, .st-key-curves button { min-height: 1.6rem; padding-top: 0; padding-bottom: 0; }
.st-key-curves [data-testid="stColumn"] [data-testid="stVerticalBlock"] { gap: 0.4rem; }
/* A click on a small curve is one on the first alarm below it. */
.st-key-curves button { position: relative; }
.st-key-curves :has(> .stHtml) + * button::after { content: ""; position: absolute; inset: -3.2rem -8rem 0 0; }
.st-key-curves [data-testid="stColumn"] { overflow: hidden; }
.st-key-ahead, .st-key-window-watch { display: none; }
pre.raw { font-family: monospace; font-size: 14px; margin: 0; padding: 0; background: none; border: none;
  white-space: pre-wrap; overflow-wrap: anywhere; color: inherit; }
.st-key-reader { min-height: 30rem; }
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
SMALL = ("#59636D", "#A3ADB7")  # of small text, which Streamlit makes too pale to read
STILL = "[data-stale=true] { opacity: 1 !important; transition: none !important; } "
INVERTED = "filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen;"  # pictures made for paper
STUDIES = "Studies"  # the page that needs no runs
OF_ONE = ("Run", "Rollouts", "Tokens", "Estimators")  # those that show one run
PAGES = {  # in the order of the menu, with their icons
    "Triage": "monitoring", "Run": "timeline", "Rollouts": "list_alt", "Tokens": "abc", "Estimators": "target",
    "Compare": "compare_arrows", STUDIES: "menu_book",
}  # fmt: skip
DEFAULT_RUNS = 4
LIVE_SECONDS = 3
FIND = (
    "Chooses all runs that fit every word: a part of the name, or a setting or result with `=`, `<` or `>`, such as "
    "`seed=1`, `learning_rate<0.001`, `heldout_reward>0.4`, `status=failed`."
)
PINNED = "Always chosen and first: A on Compare, and the run in which the others' settings are read against."


@st.cache_resource(max_entries=1, show_spinner=False)
def loaded(modules: int) -> None:
    """Leave what is loaded for good out of the collection that Streamlit forces after every run.

    Called at the beginning of a run, when that of the run before has left no garbage.
    """
    gc.freeze()


def choose_runs(table: pd.DataFrame, folder: Path, stamps: dict[str, str]) -> list[data.Run]:
    """Let the sidebar choose runs, for all pages and in the URL; all running and a few new ones to begin with.

    What is typed to find runs chooses those that fit, and Triage lists no others. The reference is always chosen and
    stands first. A run that begins to run while the page is open is chosen, too.
    """
    # Those that can be opened and have a complete step: running ones first, newest first.
    columns: Any = table[["run", "status", "created", "n_steps"]]  # of a hundred, in pieces
    estimators = estimator_names(table)
    styles = run_styles(columns.sort_values(["created", "run"])["run"], estimators)
    usable = columns[can_be_opened(columns)]
    rank = usable["status"].map({"running": 0, "complete": 1}).fillna(2)
    usable = usable.assign(_rank=rank).sort_values(["_rank", "created", "run"], ascending=[True, False, True])
    rows = [(str(name), str(status)) for name, status in zip(usable["run"], usable["status"], strict=True)]
    runs = [data.Run(str(folder / n), stamps.get(n, ""), n, estimators.get(n, ""), s, styles[n]) for n, s in rows]
    names, pinned = [run.name for run in runs], ""
    running = [run.name for run in runs if run.status == "running"]
    wanted = st.sidebar.text_input("Find runs", key="find", bind="query-params", placeholder="otb seed=1", help=FIND)
    fits, first = pd.Series(True, table.index), names[: max(DEFAULT_RUNS, len(running))]  # running ones come first
    with frame():  # what cannot be asked chooses none
        fits = matching(table, wanted) if wanted else fits
        first = [name for name in names if name in set(table["run"][fits])] if wanted else first
        if wanted != st.session_state.setdefault("_find", wanted):
            st.session_state.update(_find=wanted, run=first)
    begun = [name for name in running if name not in st.session_state.setdefault("_running", running)]
    if begun:
        st.session_state["run"] = [name for name in names if name in (*begun, *st.session_state["run"])]
    shown = [run.name for run in st.session_state.get("_selection", ())]  # one of them may be gone
    missing = [name for name in dict.fromkeys([*st.query_params.get_all("run"), *shown]) if name not in names]
    chosen = st.sidebar.multiselect(
        "Runs", names, first, key="run", bind="query-params", placeholder="Choose runs", format_func=one_line
    )
    if len(names) > 1:
        pinned = box(st.sidebar, "Reference", "reference", {"": "none"} | {n: n for n in names}, help=PINNED)
    if pinned != st.session_state.setdefault("_reference", pinned):
        st.session_state["_reference"] = pinned
        if pinned and st.session_state.get("compare") == "runs":
            other = next((name for name in (*chosen, *names) if name != pinned), pinned)
            st.session_state.update(a=pinned, b=other)
    if missing:
        st.session_state["_missing"] = missing, chosen
    missing, instead = st.session_state.get("_missing", ((), None))
    if chosen == instead:
        named = ", ".join(missing)
        st.warning(plain(f"{named} cannot be opened here, or no longer; Triage lists all runs."))
    selection = [run for run in sorted(runs, key=lambda run: run.name != pinned) if run.name in (*chosen, pinned)]
    st.session_state.update(
        _running=running, _runs=table[fits | (table["run"] == pinned)], _selection=selection, _readable=runs
    )
    return selection


loaded(len(sys.modules))
st.set_page_config(page_title="otb-analysis", page_icon="🔬", layout="wide")
st.html(STYLE)
if secret := os.environ.get("OTB_TOKEN", "").encode():
    known = compare_digest(st.query_params.get("token", "").encode(), secret)
    if not st.session_state.setdefault("_admitted", known):
        given = st.text_input("Token", type="password", help="`otb dashboard --host` printed it.")
        if not compare_digest(given.encode(), secret):
            st.stop()
        st.session_state["_admitted"] = True
        st.rerun()
dark = st.context.theme.type == "dark"
follows = st.session_state.pop("_follows", False)
# Of a run that grows nothing fades while the page is drawn again: what did not change stands still.
st.html(
    f"<style>{STILL * follows}.st-key-token-panel {{ background: {PAPER[dark]}; }}"
    f"[data-testid=stCaptionContainer] {{ color: {SMALL[dark]}; opacity: 1; }}"
    f"[class*=st-key-on-paper] img {{ {INVERTED * dark} }}"
    f"[data-testid=stMultiSelect] span[title] {{ color: {PAPER[dark]}; }}</style>"  # of chips, bright on a dark page
)
pages = [st.Page(f"views/{title.lower()}.py", title=title, icon=f":material/{icon}:") for title, icon in PAGES.items()]
# The first page is at `/`, whatever its path; one that is not in the menu answers where its name is typed.
first = st.Page("views/triage.py", title="Triage", icon=pages[0].icon, url_path="start", default=True)
typed = st.Page("views/triage.py", title="Triage", url_path="triage", visibility="hidden")
page = st.navigation([first, *pages[1:], typed])
if target := st.session_state.pop("_page", None):
    st.switch_page(f"views/{target[0]}.py", query_params=target[1])
st.session_state.update(_stayed=st.session_state.get("_shown") == page.title, _shown=page.title)
without_runs = page.title == STUDIES
# The browser loads Plotly, a second's work, while the server reads; without the file it waits for a figure.
for script in Path(st.__file__).parent.glob("static/static/js/PlotlyChart.*.js") if not without_runs else ():
    load = f"<script>import('./static/js/{script.name}')</script>"
    st.container(key="ahead").html(load, unsafe_allow_javascript=True)
with st.sidebar.container(key="window-watch"):
    watch_window()
folder, stamps, table = data.root(), data.stamps(), pd.DataFrame()
try:
    table = data.runs(str(folder), stamps)
except STOPS as error:
    if not without_runs:
        st.warning(plain(str(error)), icon=":material/warning:")
        st.stop()
if not table.empty:
    chosen = choose_runs(table, folder, stamps)
    arrived = st.session_state.setdefault("_arrived", not page.url_path and not st.query_params)
    if arrived and any(run.status == "running" for run in chosen):
        st.session_state["_arrived"] = False  # Back leads to Triage
        st.switch_page("views/run.py")
    st.session_state["_arrived"] = False
    if any(run.status == "running" for run in chosen):
        live = st.sidebar.toggle(
            "Follow running runs", value=True, key="live", help="Looks for new steps every 3 seconds."
        )
        seen, alone = data.states(stamps), page.title in OF_ONE

        @st.fragment(run_every=LIVE_SECONDS if live else None)
        def watch() -> None:
            """Draw the page again when a run that it shows grew, or any began, ended or was killed."""
            (grown, *now), of = data.states(data.stamps()), st.session_state.get("focus", "") if alone else ""
            if live and (now != seen[1:] or grown.get(of, grown) != stamps.get(of, stamps)):
                st.session_state["_follows"] = True
                st.rerun(scope="app")

        watch()
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    st.sidebar.caption(f"{len(table)} run{'s' * (len(table) != 1)} in {plain(str(shown))}")
    st.sidebar.button("Reload runs", help="Reads the folder again.", type="tertiary", icon=":material/refresh:")
if table.empty and not without_runs:
    missing = "There are no runs in this folder. " if folder.is_dir() else "This folder does not exist. "
    with frame("No runs yet", plain(str(folder))):
        st.info(missing + EMPTY)
else:
    page.run()
