"""`otb score`, `otb import` and `otb audit`: somebody else's rollouts become a run, and what they say."""

import gc
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro
from rich.console import Console

from otb_analysis.commands.inspect import print_json
from otb_analysis.commands.options import parsed
from otb_analysis.commands.screen import models_loading, print_all, shown
from otb_analysis.config import AuditConfig, BlocksConfig, ImportConfig, RecordedConfig, ScoreConfig, TrackerNames
from otb_analysis.errors import InputError, Interrupted
from otb_analysis.phases import note, phase

if TYPE_CHECKING:
    from otb_analysis.answers.audit import AuditReport

Config = TypeVar("Config", bound=RecordedConfig | BlocksConfig)
SELDOM = 200_000
"""Objects between two looks for cycles while rollouts are read: many lists, no cycles; a tenth of the time."""


@dataclass(frozen=True)
class ImportCommand(ImportConfig):
    """Read rollouts that another trainer recorded into a run, without a model.

    Prompt, completion and reward are enough for reward curves, dead groups, length drift and alarms, and for what
    success rates say about group sizes. Token ids and per-token numbers are kept where they were recorded.
    """

    rollouts: Annotated[Path, tyro.conf.Positional] = Path()
    """File or directory with the rollouts."""


@dataclass(frozen=True)
class ScoreCommand(ScoreConfig, BlocksConfig):
    """What `otb score` takes."""


def score_command(words: Sequence[str]) -> None:
    """Measure rollouts that another trainer recorded, with the model that sampled them.

    The run has what `otb train` stores of its own rollouts: every token's log-probability, entropy and energy, and with
    --measure options exact gradient norms and every estimator's variance. docs/audit.md has examples.
    """
    asked = parsed(ScoreCommand, "score", words, ScoreCommand(), score_command.__doc__)
    config, how = _as(ScoreConfig, asked), _as(BlocksConfig, asked)
    alone = how.finish or how.ray is not None
    if (
        "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > how.tasks and not alone
    ):  # all would write one run
        raise InputError("several processes were launched; give each a share: --task $RANK --tasks $WORLD_SIZE.")
    with shown(), phase("otb score"):
        from otb_analysis.recorded.blocks import score_in_blocks, url_of

        if how != BlocksConfig() or url_of(config.rollouts) or url_of(config.model):
            path = score_in_blocks(config, how)
        else:
            with models_loading("otb score"):
                from otb_analysis.recorded.score import score
            path = score(config)
    if path:
        tell(path)
        from otb_analysis.checks.sampling_report import sampling_lines, sampling_report
        from otb_analysis.store import RunStore

        for line in sampling_lines(sampling_report(RunStore(path).frame("sampling")), config.temperature):
            Console().print(line, soft_wrap=True, highlight=False)


def import_command(words: Sequence[str]) -> None:
    """Import rollouts."""
    command = parsed(ImportCommand, "import", words, ImportCommand())
    with shown(), phase("otb import"), _seldom():
        from otb_analysis.recorded.importing import import_rollouts

        path = import_rollouts(command.rollouts, command)
    tell(path)
    from otb_analysis.answers import RunAnswers
    from otb_analysis.report.audit import dead_parts
    from otb_analysis.report.document import printed
    from otb_analysis.store import RunStore

    planner = RunAnswers(RunStore(path)).planner
    print_all(printed([*dead_parts(planner), planner.note]) if planner.dead else [])


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


@dataclass(frozen=True)
class AuditCommand(AuditConfig):
    """What `otb audit` takes."""

    folder: Annotated[Path, tyro.conf.Positional] = Path()
    """File or directory with the rollouts; the same as --rollouts."""
    json: bool = False
    """Print one JSON object instead, for scripts."""
    trackers: TrackerNames = ()
    """Where a run's audit goes besides its files: the scalars of every step, then the sentences and tables."""


def audit_command(words: Sequence[str]) -> None:
    """Say what recorded rollouts show, which baseline and group size suit them, and which tokens make up the gradient.

    A file or directory alone gives what needs no model, in seconds. With --model it also says what measuring costs, and
    --go measures. With --run alone it audits a run that is there, at no cost. docs/audit.md explains every number.
    """
    asked = parsed(AuditCommand, "audit", words, AuditCommand(), audit_command.__doc__)
    config, command = _as(AuditConfig, asked), shlex.join(["otb", "audit", *words])
    if asked.folder != Path():
        if config.rollouts not in (Path(), asked.folder):
            raise InputError(f"rollouts are {asked.folder} and --rollouts {config.rollouts}; pass one of the two.")
        config = replace(config, rollouts=asked.folder)
    if asked.trackers and not (config.go if config.model else config.run and config.rollouts == Path()):
        raise InputError("--trackers sends the audit of a run; pass --model DIR --go, or --run alone.")
    if config.model:
        run_or_report = _measured(config, command, asked.json)
    elif config.run and config.rollouts == Path():
        if config.estimator != AuditConfig().estimator:
            raise InputError(
                f"--estimator.name says what trained when rollouts are read, but run {config.run} has that already; "
                "leave it out."
            )
        run_or_report = config.root / config.run
    elif config.go:
        raise InputError("--go measures with the model that sampled the rollouts; pass --model DIR, or leave --go out.")
    else:
        from otb_analysis.answers.audit import Further

        adds = "Baselines, what each token adds to the gradient, and whether the model wrote these tokens"
        free = _free(config, asked.json)
        run_or_report = replace(free, cost=free.traits.price, next=(Further(f"{command} --model DIR --go", adds),))
    with shown(), phase("auditing"):
        from otb_analysis.answers import RunAnswers
        from otb_analysis.answers.audit import audit_run
        from otb_analysis.report.audit import audit_record, audit_sections, send_audit, write_audit
        from otb_analysis.report.document import printed
        from otb_analysis.store import RunStore

        if isinstance(run_or_report, Path):
            run = RunAnswers(RunStore(run_or_report))
            report = audit_run(run, config.aggregation, config.accumulate)
            files = ", ".join(map(str, write_audit(run, report, run_or_report, command)))
            if asked.trackers:
                send_audit(run, report, asked.trackers)
            look = f"Written: {files}. Look on: otb dashboard --root {run_or_report.parent}"
            parts = [] if asked.json else [*printed(audit_sections(run, report)), look]
        else:
            report = run_or_report
            parts = [f"{one.words}: {one.command}" for one in report.next] + [report.cost] * (not config.model)
    print_json(audit_record(report)) if asked.json else print_all(parts)


def _measured(config: AuditConfig, command: str, silent: bool) -> "Path | AuditReport":
    """Measure rollouts with their model and return the run; without --go what they say without, and what that costs."""
    from otb_analysis.answers.audit import Further

    with shown(), phase("otb audit"):
        with models_loading("otb audit of rollouts"):
            from otb_analysis.commands.audit_cost import audit_cost
            from otb_analysis.devices import words_of
            from otb_analysis.recorded.runs import refuse_existing, run_path
            from otb_analysis.recorded.score import check, load, score
            from otb_analysis.training.budget import rough_duration
        config = replace(config, run=config.run or run_path(config.rollouts, config, "audited").name)
        check(config)
        refuse_existing(config.root / config.run, config)
    free = None if config.go else _free(config, silent)
    with shown(), phase("otb audit"):
        policy = load(config)
        if not config.go:  # else the run says it
            note(f"Device: {words_of(policy[0].device)}.")
        cost = audit_cost(config, policy)
    if not silent:
        print_all([cost.sentence])
    if free is not None:
        further = [Further(f"{command} --go", "Nothing was written. To measure", cost.seconds)]
        if cost.cheaper:
            about = f"In about {rough_duration(cost.cheaper_seconds)}"
            further.append(Further(f"{command} {cost.cheaper} --go", about, cost.cheaper_seconds))
        return replace(free, model=config.model, cost=cost.sentence, next=tuple(further))
    try:
        with shown(), phase("otb audit"):
            return score(replace(config, measure=cost.measure), policy)
    except Interrupted as stop:
        if not (config.root / config.run).exists():
            raise
        audit = shlex.join(["otb", "audit", "--run", config.run, "--root", str(config.root)])
        raise Interrupted(f"{str(stop).rstrip('.')}. What they say: {audit}") from None


def _as(kind: type[Config], config: RecordedConfig) -> Config:
    """Return the fields of a configuration that another kind has, too."""
    return kind(**{one.name: getattr(config, one.name) for one in fields(kind) if hasattr(config, one.name)})


@contextmanager
def _seldom() -> Iterator[None]:
    """Look for cycles of objects seldom while rollouts are read."""
    before = gc.get_threshold()
    gc.set_threshold(SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _free(config: AuditConfig, silent: bool) -> "AuditReport":
    """Return what the rollouts say without a model, and print it unless `silent`; nothing stays on disk."""
    with shown(), phase("reading without a model"), _seldom(), TemporaryDirectory(prefix="otb-audit-") as folder:
        from otb_analysis.answers import RunAnswers
        from otb_analysis.answers.audit import audit_run
        from otb_analysis.recorded.importing import import_rollouts
        from otb_analysis.report.audit import free_sections
        from otb_analysis.report.document import printed
        from otb_analysis.store import RunStore

        plain = replace(_as(ImportConfig, config), root=Path(folder), run="", if_exists="error")
        run = RunAnswers(RunStore(import_rollouts(config.rollouts, plain, lasting=False)))
        run.name = config.rollouts.resolve().name
        report = audit_run(run, config.aggregation, config.accumulate)
    if not silent:
        print_all(printed(free_sections(report)))
    return report
