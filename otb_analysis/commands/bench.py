"""`otb bench`: what things cost and how exact estimates are, measured on this machine."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, cast

import tyro

from otb_analysis.commands.clone import enter_clone
from otb_analysis.commands.inspect import print_all
from otb_analysis.commands.loading import models_loading
from otb_analysis.commands.watching import shown
from otb_analysis.phases import phase


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
