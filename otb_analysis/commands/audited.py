"""`otb audit`: what it costs, then which estimator, group size and tokens, from rollouts or from a run."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from otb_analysis.commands.inspect import parsed, print_all
from otb_analysis.commands.loading import models_loading
from otb_analysis.commands.watching import shown
from otb_analysis.config import AuditConfig
from otb_analysis.errors import InputError
from otb_analysis.phases import note, phase


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
        from otb_analysis.report.terminal import printed
        from otb_analysis.store import RunStore

        run = RunAnswers(RunStore(path))
        report = audit_run(run, config.aggregation, config.accumulate)
        files = write_audit(run, report, path, command)
    print_all(printed(audit_sections(run, report)))
    print_all([f"Written: {', '.join(map(str, files))}. Look on: otb dashboard --root {path.parent}"])
