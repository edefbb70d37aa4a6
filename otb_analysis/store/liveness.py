"""Whether a run that says "running" still is: a process that was killed cannot say that it ended.

Only a reader that sees the same processes as the writer can tell: on the same host, in the same process namespace.
Anywhere else a run is believed, and when it was last heard of is said beside it.
"""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress

import psutil

STOPPED = "its process ended without a word; its complete steps can be read, go on with --if-exists resume."


def this_process() -> dict[str, object]:
    """Return what identifies this process: host, place in which its number is valid, number, second of its start."""
    return {"host": platform.node(), "place": _place(), "pid": os.getpid(), "started": psutil.Process().create_time()}


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
    """Return the number of another process that is known to write a run; None where none is known."""
    process = info.get("process")
    if info.get("status") != "running" or not isinstance(process, Mapping) or not _lives(process):
        return None
    return None if process["pid"] == os.getpid() else process["pid"]


def _lives(process: Mapping[str, object]) -> bool | None:
    """Return whether a process is running; None where this process cannot see it by number."""
    pid, started = process.get("pid"), process.get("started")
    if process.get("place") != _place() or not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    try:
        one = psutil.Process(pid)
        # Another process may have the number by now. The clock may have been set meanwhile, by less than a second.
        return abs(one.create_time() - started) < 1 and one.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _place() -> str:
    """Return host and process namespace; processes of one place see each other's numbers."""
    namespace = ""
    with suppress(OSError):  # only Linux has these
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {namespace}".strip()
