"""`otb score`, `otb import` and `otb audit`: somebody else's rollouts become a run, and what they say."""

import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from otb_analysis.commands.inspect import parsed, print_all
from otb_analysis.commands.screen import models_loading, shown
from otb_analysis.config import AuditConfig, ImportConfig, ScoreConfig
from otb_analysis.errors import InputError
from otb_analysis.phases import note, phase


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
        from otb_analysis.checks.sampling_report import sampling_lines, sampling_report
        from otb_analysis.store import RunStore

        for line in sampling_lines(sampling_report(RunStore(path).frame("sampling")), config.temperature):
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
    from otb_analysis.report.document import printed_parts
    from otb_analysis.store import RunStore

    planner = RunAnswers(RunStore(path)).planner
    print_all(printed_parts([*dead_parts(planner), planner.note]) if planner.dead else [])


def tell(path: Path) -> None:
    """Print what the run holds, and where to look on."""
    with shown(), phase("reading the run"):
        from otb_analysis.answers import opened
        from otb_analysis.report.compare import learning_grid
        from otb_analysis.report.document import grid_table

        table = grid_table(learning_grid(opened([path])))
    print_all([table])
    look = f"look at it with: otb compare {path.name} --root {path.parent}"
    Console().print(f"{path} is complete; {look}", soft_wrap=True)


def audit_command(words: Sequence[str]) -> None:
    """Say which baseline and group size suit recorded rollouts best, and which tokens make up the gradient.

    With --model and --rollouts it prints what the audit costs and stops; --go measures. With --run alone it audits a
    run that is there, at no cost. docs/audit.md explains every number.
    """
    config = parsed(AuditConfig, "audit", words, AuditConfig(), audit_command.__doc__)
    command = shlex.join(["otb", "audit", *words])
    if config.run and not config.model and config.rollouts == Path():
        if config.estimator != AuditConfig().estimator:
            raise InputError(
                f"--estimator.name says what trained when rollouts are read, but run {config.run} has that already; "
                "leave it out."
            )
        _finish(config.root / config.run, config, command)
        return
    with shown(), phase("otb audit"):
        with models_loading("otb audit of rollouts"):
            from otb_analysis.commands.audit_cost import audit_cost
            from otb_analysis.devices import words_of
            from otb_analysis.recorded.runs import refuse_existing, run_path
            from otb_analysis.recorded.score import check, load, score
        config = replace(config, run=config.run or run_path(config.rollouts, config, "audited").name)
        check(config)
        refuse_existing(config.root / config.run, config)
        policy = load(config)
        if not config.go:  # else the run says it
            note(f"Device: {words_of(policy[0].device)}.")
        cost = audit_cost(config, policy)
    print_all([cost.sentence])
    if not config.go:
        print_all([f"Nothing was written. To measure: {command} --go"])
        return
    with shown(), phase("otb audit"):
        path = score(replace(config, measure=cost.measure), policy)
    _finish(path, config, command)


def _finish(path: Path, config: AuditConfig, command: str) -> None:
    """Audit a run, write its files and print what they say."""
    with shown(), phase("auditing"):
        from otb_analysis.answers import RunAnswers
        from otb_analysis.answers.audit import audit_run
        from otb_analysis.report.audit import audit_sections, write_audit
        from otb_analysis.report.document import printed
        from otb_analysis.store import RunStore

        run = RunAnswers(RunStore(path))
        report = audit_run(run, config.aggregation, config.accumulate)
        files = write_audit(run, report, path, command)
    print_all(printed(audit_sections(run, report)))
    print_all([f"Written: {', '.join(map(str, files))}. Look on: otb dashboard --root {path.parent}"])
