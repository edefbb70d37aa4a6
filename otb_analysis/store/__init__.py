"""The only door to disk: one writer, read-only readers, and the table of all runs."""

from otb_analysis.store.asked import (
    ASKED_MEMORY,
    ASKED_ROWS,
    RolloutFilter,
    facts_of_rollouts,
    find_rollouts,
    reward_histogram,
)
from otb_analysis.store.compact import Compacted, compact
from otb_analysis.store.gram import GRAM_TEXTS, gram_rows, subgroup_rows
from otb_analysis.store.measured import attributed_steps, step_attribution
from otb_analysis.store.reader import RunStore
from otb_analysis.store.runs import runs_df
from otb_analysis.store.studies import CommittedStudy, committed_studies, study_figure, study_table, study_tables
from otb_analysis.store.token_arrays import EXACT_ROWS, StoredPrompt, TokenArrays, step_series
from otb_analysis.store.writer import RunWriter, StepTables

__all__ = [
    "ASKED_MEMORY",
    "ASKED_ROWS",
    "EXACT_ROWS",
    "GRAM_TEXTS",
    "CommittedStudy",
    "Compacted",
    "RolloutFilter",
    "RunStore",
    "RunWriter",
    "StepTables",
    "StoredPrompt",
    "TokenArrays",
    "attributed_steps",
    "committed_studies",
    "compact",
    "facts_of_rollouts",
    "find_rollouts",
    "gram_rows",
    "reward_histogram",
    "runs_df",
    "step_attribution",
    "step_series",
    "study_figure",
    "study_table",
    "study_tables",
    "subgroup_rows",
]
