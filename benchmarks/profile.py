"""Where the time of one call goes, operator by operator.

    python -m benchmarks.profile "sketch hybrid, K=32" S 128 docs/results

A row of `otb bench engine` is profiled on one thread; shares are of the time spent in operators themselves, the rest
of a call (Python, launching) is what the operators leave of its time without the profiler.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine_cases import REAL, candidates, make_case, model_of
from benchmarks.publish import NO_GPU, Report, publish
from benchmarks.timing import least_seconds
from otb_analysis.errors import InputError, nearest

REPEATS = 5
SHOWN = 12
"""Operators in the table; the others together make its last row."""
COLUMNS = {"operator": "{operator}", "share": "{share:.1%}", "calls": "{calls:,.0f}"}


def run_profile(name: str, size: str, tokens: int, rollouts: int = 1) -> Report:
    """Profile one row of the engine benchmark, at a model, T sampled tokens and so many rollouts in one call.

    Raises:
        InputError: There is no row of that name.
    """
    torch.set_num_threads(1)
    calls = candidates(make_case(model_of(size, "cpu", "float32"), tokens, rollouts, size in REAL))
    if name not in calls:
        raise InputError(f"row is {name!r}; {nearest(name, calls)}")
    call, place = calls[name], str(tokens) if rollouts == 1 else f"{rollouts}x{tokens}"
    call()  # the first call looks at the model
    seconds = least_seconds({name: call}, REPEATS)[name]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(REPEATS):
            call()
    note = f"Shares of the time inside operators themselves, over {REPEATS} calls; calls are per call of the row."
    return Report(
        name=re.sub(r"\W+", "_", f"profile {name} {size} {place}").strip("_").lower(),
        command=f'python -m benchmarks.profile "{name}" {size} {place} docs/results',
        settings={"row": name, "size": size, "tokens": tokens, "rollouts": rollouts},
        title=f"{name}, {size}, T = {place}: {1e3 * seconds:.0f} ms of processor time a call",
        columns=COLUMNS,
        rows=_rows(seen.key_averages()),
        notes=(note, NO_GPU),
    )


def _rows(events: Any) -> list[dict[str, Any]]:
    """The operators with the largest share, and the sum of all others."""
    times = sorted(((e.self_cpu_time_total, e.key, e.count) for e in events), reverse=True)
    total, rest = sum(time for time, _, _ in times), times[SHOWN:]
    others = (sum(time for time, _, _ in rest), f"{len(rest)} others", sum(count for _, _, count in rest))
    shown = [*times[:SHOWN], others]
    return [{"operator": name, "share": time / total, "calls": count / REPEATS} for time, name, count in shown]


if __name__ == "__main__":
    *several, length = map(int, sys.argv[3].split("x"))  # 128, or 8x128 for eight rollouts
    publish(Path(sys.argv[4]), run_profile(sys.argv[1], sys.argv[2], length, *several))
