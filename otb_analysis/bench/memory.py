"""Peak extra memory of calls in a fresh process that does nothing else."""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping

from otb_analysis.bench.peer_side import peak


def fresh_peaks(module: str, spec: Mapping[str, object]) -> dict[str, int | None]:
    """Return peak extra bytes by label; none if the process was ended, for want of memory for example.

    The module's `memory_jobs(spec)` yields (label, call, device), one after the other; `spec` is in JSON's types.
    """
    command = [sys.executable, "-m", "otb_analysis.bench.memory", module, json.dumps(dict(spec))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


if __name__ == "__main__":
    jobs = importlib.import_module(sys.argv[1]).memory_jobs(json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps({label: peak(run, device) for label, run, device in jobs}) + "\n")
