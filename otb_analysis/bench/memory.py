"""Peak extra memory of a call, measured in a fresh process that does nothing else.

On a CPU it is the high-water mark of resident memory, which the kernel is told to forget before the call, above what
was resident then; on a GPU the largest allocation above what was allocated.
"""

import ctypes
import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from otb_analysis.bench.timing import synchronize

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_extra_bytes(run: Callable[[], object], device: str = "cpu") -> int | None:
    """Run once; return the most memory it held beyond what was held before, or None where that cannot be read."""
    gc.collect()
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    if not STATUS.exists():
        return None
    _return_freed_memory()
    try:
        FORGET.write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def fresh_peaks(module: str, spec: Mapping[str, object]) -> dict[str, int | None]:
    """Measure in a fresh process.

    Args:
        module: Module whose `memory_jobs(spec)` yields (label, call, device), one after the other.
        spec: What to measure, in JSON's types.

    Returns:
        Peak extra bytes by label; empty if the process was ended, for want of memory for example.
    """
    command = [sys.executable, "-m", "otb_analysis.bench.memory", module, json.dumps(dict(spec))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def main() -> None:
    """Measure what the command line names and print it as one line of JSON."""
    module, spec = sys.argv[1:]
    jobs = importlib.import_module(module).memory_jobs(json.loads(spec))
    sys.stdout.write(json.dumps({label: peak_extra_bytes(run, device) for label, run, device in jobs}) + "\n")


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def _return_freed_memory() -> None:
    """Hand freed heap back to the kernel (glibc only), so that it does not hide what the call will need."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main()
