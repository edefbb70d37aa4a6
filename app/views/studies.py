"""Studies: the verdict and figure of one study first, its numbers and how it was made beneath, then all studies."""

import re
from pathlib import Path
from typing import Any

import data
import pandas as pd
import streamlit as st
from widgets import box, download, frame, new_query_value, plain, prose, write

from otb_analysis.figures.svg import results_table
from otb_analysis.store import CommittedStudy, committed_studies, study_figure, study_table, study_tables
from otb_analysis.store.studies import BROKEN, MEASURED, NOT_RUN

NONE = """There is no study in {folder}. The installed package comes without them: clone the repository and start
`otb dashboard` there, or name the folder: `otb dashboard --studies <folder>` or the variable `OTB_STUDIES`."""
LONG = 2500  # letters of a section that is closed to begin with; a string below would be shown on the page
SORTED = (
    "As committed: a click on a heading sorts, three significant digits are shown, the file has all of them. "
    "Interval: the two ends, of 95 % unless the text above says otherwise."
)


def label(study: CommittedStudy) -> str:
    """Return what a study is called in a list."""
    return f"{study.folder.name[:2]} · {study.title}"


def results(study: CommittedStudy) -> None:
    """Show the result tables, one at a time."""
    names = study_tables(study.folder)
    if not names:
        return
    st.subheader("Numbers", anchor=False)
    name = box(st, "Table", "table", names, look="buttons")
    table = study_table(study.folder, name)
    st.caption(f"{len(table):,} rows × {len(table.columns)} columns. {SORTED}")
    shown = results_table(table)
    three = st.column_config.NumberColumn(format="%.3g")
    whole = st.column_config.NumberColumn(format="%d")
    columns: dict[str, Any] = {c: three for c in shown.select_dtypes("floating").columns}
    columns |= {c: whole for c in shown.select_dtypes("integer").columns}
    st.dataframe(
        shown, hide_index=True, height="content" if len(shown) < 12 else 420, placeholder="–", column_config=columns,
        key=f"rows-{study.folder.name}-{name}",
    )  # fmt: skip
    download(table, f"{study.folder.name}-{name}")


def reading(study: CommittedStudy) -> None:
    """Show the study's own page section by section, long ones closed: its tables in words and what they mean."""
    if not study.body:
        return
    st.subheader("How to read them", anchor=False)
    before, *sections = re.split(r"^## ", study.body, flags=re.MULTILINE)
    st.markdown(prose(before))
    for section in sections:
        heading, _, text = section.partition("\n")
        with st.expander(prose(heading), expanded=len(text) < LONG):
            st.markdown(prose(text))


with frame("Studies", "Which claims about baselines were tested, what came out, and what did it cost?"):
    here, beside = Path("studies"), Path(__file__).parents[2] / "studies"
    folder = data.root("--studies", "OTB_STUDIES", here if here.is_dir() else beside)
    studies = committed_studies(folder)
    if not studies:
        st.info(NONE.format(folder=plain(str(folder))), icon=":material/inbox:")
        st.stop()

    by_name = {study.folder.name: study for study in studies}
    first = next((name for name, study in by_name.items() if study.state == MEASURED), next(iter(by_name)))
    if (name := new_query_value("study")) in by_name:
        st.session_state["study"] = name
    name = st.pills(
        "Study", list(by_name), default=first, format_func=lambda name: label(by_name[name]), key="study",
        required=True, persist_state="session",
    )  # fmt: skip
    write(study=name)  # a study's title changes, so the address has its folder
    study = by_name[str(name)]

    if study.state == NOT_RUN:
        st.info(f"This study was not run yet. `{study.command}` runs it; `--quick` tries it in two minutes.")
    elif study.state == BROKEN:
        st.warning(plain(study.verdict), icon=":material/warning:")
    else:
        with st.container(border=True):
            st.markdown(f"**Verdict.** {prose(study.verdict)}")
    st.caption(f"Question: {prose(study.question) or 'it stands in the file below.'}")
    for path in study.figures:
        with frame(), st.container(key=f"on-paper-{path.stem}"):
            st.image(study_figure(path), alt=f"Figure. {study.question}")
    with frame():
        results(study)
    reading(study)
    st.subheader("How it was made", anchor=False)
    st.code(study.command, language=None)
    if study.cost:
        st.caption(plain(study.cost))
    readme = study.folder / ("study.py" if study.state == NOT_RUN else "README.md")
    st.markdown(f"Page and code: `{readme}`")

    rows = [
        {
            "study": f"**{plain(label(study))}**",
            "question": prose(study.question) or "–",
            "verdict": prose(study.verdict) or "–",
            "state and cost": ", ".join(filter(None, [study.state, study.minutes])),
        }
        for study in studies
    ]
    st.subheader("All studies", anchor=False)
    st.table(pd.DataFrame(rows), border="horizontal", hide_index=True)
