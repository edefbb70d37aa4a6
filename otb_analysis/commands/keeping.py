"""Commands about the files of a store: `otb compact`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from otb_analysis.commands.inspect import RunsConfig, complete_runs, parsed, run_path
from otb_analysis.commands.watching import shown
from otb_analysis.phases import phase, plural


@dataclass(frozen=True)
class CompactConfig(RunsConfig):
    """Merge the many small files of finished runs into few with the same rows, which read several times faster.

    Readers may go on meanwhile; a run that is being written is refused. Stopped or killed, a run stays whole.
    """


def compact_command(words: Sequence[str]) -> None:
    """Compact runs."""
    config = parsed(CompactConfig, "compact", words, CompactConfig())
    from otb_analysis.store import compact

    for name in config.runs or complete_runs(config.root):
        path = run_path(config.root, name)
        with shown(), phase(f"compacting {path.name}"):
            done = compact(path)
        sizes = f"{done.bytes_before / 1e6:.1f} MB → {done.bytes_after / 1e6:.1f} MB"
        files = f"{plural(done.steps, 'step')}, {plural(done.parts, 'file')} → {done.files}, {sizes}"
        sys.stdout.write(f"{path.name}: {files if done.parts else 'nothing to compact'}.\n")
