"""`otb bench` and `otb study`, of a clone: no wheel has `benchmarks/` and `studies/`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, cast

import tyro
from rich.console import Console

import otb_analysis
from otb_analysis.commands.inspect import print_json
from otb_analysis.commands.options import parsed
from otb_analysis.commands.screen import models_loading, print_all, shown
from otb_analysis.errors import InputError, Interrupted, StoreError
from otb_analysis.phases import note, phase


def enter_clone(command: str) -> Path:
    """Make `benchmarks` and `studies` importable and return the folder of the clone.

    It goes onto `sys.path`, which processes that are spawned inherit.

    Raises:
        InputError: The package was installed from a wheel.
    """
    clone = Path(otb_analysis.__file__).parent.parent
    if not all((clone / room / "__init__.py").is_file() for room in ("benchmarks", "studies")):
        raise InputError(f"{command} works in a clone: git clone the repository, then pip install -e '.[all]' in it.")
    if str(clone) not in sys.path:
        sys.path.insert(0, str(clone))
    return clone


def bench_command(words: Sequence[str]) -> None:
    """Measure costs."""
    enter_clone("otb bench")
    from benchmarks.config import BENCHMARKS, BenchConfig

    kinds = reduce(or_, (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in BENCHMARKS.items()))
    config: BenchConfig = tyro.cli(
        cast(Any, kinds), prog="otb bench", description=bench_command.__doc__, args=list(words), config=()
    )
    with shown(), phase(f"otb bench {words[0]}"):
        with models_loading("otb bench"):
            from benchmarks.publish import bench_table, publish, run_bench

        report = run_bench(config)
    print_all([bench_table(report)])
    if config.out is not None:
        publish(config.out, report)


@dataclass(frozen=True)
class StudyConfig:
    """Run a study: measure the cells that are not finished yet, then write its tables, figures and README.

    If it is stopped, the same command goes on; finished cells are kept in runs/studies/, and those of the
    committed tables are not measured again, but where a missing one needs what they left to others.
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """Name, number or slug of a study: 00_training, 0 or training; without one the studies are listed."""
    quick: bool = False
    """Run all of it at reduced constants in less than two minutes, into --out or a temporary directory."""
    out: Path | None = None
    """Directory for README and results instead of the study's own folder."""
    only: tuple[str, ...] = ()
    """Measure these cells and no others; tables and README follow once none is missing."""
    render: bool = False
    """Measure nothing; write README, figures and index again from the result tables."""
    device: str = "auto"
    """Where its models run: auto, cpu, cuda or cuda:N. What is committed was measured on a CPU."""
    json: bool = False
    """Measure and write nothing; print the committed verdict and result tables as JSON, or all studies' verdicts."""


def study_command(words: Sequence[str]) -> None:
    """Run a study."""
    config = parsed(StudyConfig, "study", words, StudyConfig())
    enter_clone("otb study")
    if config.json:
        from otb_analysis.store import committed_studies, study_table, study_tables
        from studies.lib.record import find_studies_folder, find_study

        if config != StudyConfig(config.name, json=True):
            raise InputError("--json prints what is committed; leave the other options of otb study out.")
        root = find_studies_folder()
        studies = committed_studies(root)
        if not config.name:
            print_json(studies)
            return
        folder, tables = find_study(config.name, root), dict[str, object]()
        for name in study_tables(folder):
            try:
                tables[name] = study_table(folder, name)
            except StoreError as error:
                tables[name] = {"not_read": str(error)}
        print_json(vars(next(study for study in studies if study.folder == folder)) | {"tables": tables})
        return
    with shown(), phase("starting") as whole:
        with models_loading("otb study"):
            from otb_analysis.devices import use, words_of
            from studies.lib.record import find_studies_folder, find_study
            from studies.lib.run import Setting, run_study

        folder = find_study(config.name, find_studies_folder())
        note(f"Device: {words_of(use(config.device))}.")
        try:
            written = run_study(folder, Setting(config.quick, config.out, config.only, config.render), whole)
        except KeyboardInterrupt:
            kept = (
                "nothing of a quick study is kept" if config.quick else "finished cells are kept for the same command"
            )
            raise Interrupted(f"stopped; {kept}.") from None
    console = Console()
    result = f"{written / 'README.md'} is written." if written else "The cells are kept; others are still missing."
    console.print(result, soft_wrap=True)
