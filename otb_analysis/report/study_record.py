"""Committed studies for JSON, as the page Studies shows them; nothing is measured."""

from otb_analysis.errors import StoreError
from otb_analysis.report.record import written
from otb_analysis.store import CommittedStudy, study_table, study_tables


def study_record(study: CommittedStudy) -> dict[str, object]:
    """Return a study's question, verdict, cost, figures and result tables; of a table that is broken, why."""
    return _about(study) | {
        "how_to_read": study.body, "figures": [str(figure) for figure in study.figures],
        "tables": {name: _table(study, name) for name in study_tables(study.folder)},
    }  # fmt: skip


def studies_record(studies: list[CommittedStudy]) -> list[dict[str, object]]:
    """Return what the list of all studies says."""
    return [_about(study) for study in studies]


def _about(study: CommittedStudy) -> dict[str, object]:
    return {
        "study": study.folder.name, "title": study.title, "question": study.question, "verdict": study.verdict,
        "state": study.state, "cost": study.cost, "command": study.command,
    }  # fmt: skip


def _table(study: CommittedStudy, name: str) -> object:
    try:
        return written(study_table(study.folder, name))
    except StoreError as error:
        return {"not_read": str(error)}
