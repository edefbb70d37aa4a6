"""Studies: a question, cells that can be interrupted, small committed tables, and a README that is made of them."""

from otb_analysis.study.columns import grid, interval_curve, known
from otb_analysis.study.folder import find_studies_folder, find_study, load_study, study_folders
from otb_analysis.study.page import index_page, study_page
from otb_analysis.study.record import Cell, Findings, Rows, Study, Tables
from otb_analysis.study.results import distinct, read_tables, select
from otb_analysis.study.run import Setting, run_study
from otb_analysis.study.words import column_words, interval_columns, markdown_table, share, with_interval

__all__ = [
    "Cell",
    "Findings",
    "Rows",
    "Setting",
    "Study",
    "Tables",
    "column_words",
    "distinct",
    "find_studies_folder",
    "find_study",
    "grid",
    "index_page",
    "interval_columns",
    "interval_curve",
    "known",
    "load_study",
    "markdown_table",
    "read_tables",
    "run_study",
    "select",
    "share",
    "study_folders",
    "study_page",
    "with_interval",
]
