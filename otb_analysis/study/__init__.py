"""Studies: a question, cells that can be interrupted, small committed tables, and a README that is made of them."""

from otb_analysis.study.folder import find_studies_folder, find_study, load_study, study_folders
from otb_analysis.study.formats import column, interval_columns, known, mean, rounded
from otb_analysis.study.record import Cell, Row, Rows, Study, Tables
from otb_analysis.study.report import index_page, study_page
from otb_analysis.study.results import distinct, read_tables, select
from otb_analysis.study.run import Setting, run_study

__all__ = [
    "Cell",
    "Row",
    "Rows",
    "Setting",
    "Study",
    "Tables",
    "column",
    "distinct",
    "find_studies_folder",
    "find_study",
    "index_page",
    "interval_columns",
    "known",
    "load_study",
    "mean",
    "read_tables",
    "rounded",
    "run_study",
    "select",
    "study_folders",
    "study_page",
]
