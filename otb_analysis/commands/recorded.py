"""`otb score` and `otb import`: somebody else's rollouts become a run."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from otb_analysis.commands.inspect import parsed, print_all
from otb_analysis.commands.loading import models_loading
from otb_analysis.commands.watching import shown
from otb_analysis.config import ImportConfig, ScoreConfig
from otb_analysis.phases import phase


@dataclass(frozen=True)
class ImportCommand(ImportConfig):
    """Read rollouts that another trainer recorded into a run, without a model.

    Prompt, completion and reward are enough for reward curves, dead groups, length drift and alarms, and for what
    success rates say about group sizes. Token ids and per-token numbers are kept where they were recorded.
    """

    rollouts: Annotated[Path, tyro.conf.Positional] = Path()
    """File or directory with the rollouts."""


def score_command(words: Sequence[str]) -> None:
    """Measure rollouts that another trainer recorded, with the model that sampled them.

    The run has what `otb train` stores of its own rollouts: every token's log-probability, entropy and energy, and with
    --measure options exact gradient norms and every estimator's variance. docs/audit.md has examples.
    """
    config = parsed(ScoreConfig, "score", words, ScoreConfig(), score_command.__doc__)
    first = os.environ.get("RANK", "0") == "0"  # only the first process prints
    with shown() if first else nullcontext(), phase("otb score"):
        with models_loading("otb score"):
            from otb_analysis.recorded.score import score
        path = score(config)
    if first:
        tell(path)
        from otb_analysis.checks.sampling_report import sampling_report
        from otb_analysis.checks.sampling_text import sampling_lines
        from otb_analysis.store import RunStore

        for line in sampling_lines(sampling_report(RunStore(path).frame("sampling"))):
            Console().print(line, soft_wrap=True, highlight=False)


def import_command(words: Sequence[str]) -> None:
    """Import rollouts."""
    command = parsed(ImportCommand, "import", words, ImportCommand())
    with shown(), phase("otb import"):
        from otb_analysis.recorded.importing import import_rollouts

        path = import_rollouts(command.rollouts, command)
    tell(path)
    from otb_analysis.answers import RunAnswers
    from otb_analysis.report.audit import dead_parts
    from otb_analysis.report.terminal import printed_parts
    from otb_analysis.store import RunStore

    planner = RunAnswers(RunStore(path)).planner
    print_all(printed_parts([*dead_parts(planner), planner.note]) if planner.dead else [])


def tell(path: Path) -> None:
    """Print what the run holds, and where to look on."""
    with shown(), phase("reading the run"):
        from otb_analysis.answers import opened
        from otb_analysis.report.compare import learning_grid
        from otb_analysis.report.terminal import grid_table

        table = grid_table(learning_grid(opened([path])))
    print_all([table])
    look = f"look at it with: otb compare {path.name} --root {path.parent}"
    Console().print(f"{path} is complete; {look}", soft_wrap=True)
