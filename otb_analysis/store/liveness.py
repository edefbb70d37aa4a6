"""Whether a run that says "running" still is: a process that was killed cannot say that it ended.

Only a reader that sees the same processes as the writer can tell: the same host, since the same boot, in the same
process namespace. Anywhere else a run is believed, and when it was last heard of is said beside it.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

STOPPED = "its process ended without a word; its complete steps can be read, go on with --if-exists resume."
_PROC = Path("/proc")


def this_process() -> dict[str, object]:
    """Return what identifies this process: host, the place in which its number is valid, number, start."""
    pid = os.getpid()
    return {"host": platform.node(), "place": _place(), "pid": pid, "start": _start(pid)}


def standing(info: Mapping[str, object], heard: str = "") -> tuple[str, str]:
    """Return the status of a run as it is now, and why.

    A run that says it is running is `stopped` where its process is known to be gone, and `running` otherwise.
    `heard` is when it was last written to, in words.
    """
    status, reason = str(info.get("status") or ""), str(info.get("reason") or "")
    process = info.get("process")
    if status != "running" or not isinstance(process, Mapping):
        return status, reason
    lives = _lives(process)
    if lives is None:
        last = f", last seen {heard}" if heard else ""
        return status, f"running on {process.get('host') or 'another machine'}{last}."
    return (status, reason) if lives else ("stopped", STOPPED)


def other_writer(info: Mapping[str, object]) -> int | None:
    """Return the number of another process that is known to write a run, or to compact it; None where none is known."""
    for process in (info.get("process") if info.get("status") == "running" else None, info.get("compacting")):
        if isinstance(process, Mapping) and _lives(process) and process["pid"] != os.getpid():
            return process["pid"]
    return None


def _lives(process: Mapping[str, object]) -> bool | None:
    """Return whether a process is running; None where this process cannot see it by number."""
    if process.get("place") is None or process.get("place") != _place():
        return None
    pid = process.get("pid")
    return isinstance(pid, int) and process.get("start") is not None and _start(pid) == process["start"]


def _place() -> str | None:
    """Return host, boot and process namespace; processes of one place see each other's numbers, None if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return None


def _start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where there is none, or one that has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") else int(fields[19])
