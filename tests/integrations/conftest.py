"""What every test of an integration needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEEPSPEED = ROOT / ".cache" / "deepspeed"
"""Where `make test-trl` puts DeepSpeed, apart, so that no other test imports it."""


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    """Keep TRL from reporting each trainer to its makers: a thread that waits for the network beside the training."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # for processes that a test starts
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture(scope="session")
def by_two_processes():
    """Return what trains as `trl_runs` does in two processes, and returns what they printed as errors.

    They are forked from one process for all tests, or from one with DeepSpeed: imports take longer than a training.
    """
    servers = {}

    def train(out, environment=None, **spec):
        out.mkdir(exist_ok=True)
        environment, errors, sped = environment or {}, out / "errors.txt", "deepspeed" in spec
        if sped not in servers:
            paths = [str(ROOT), str(DEEPSPEED) if sped else "", os.environ.get("PYTHONPATH", "")]
            of_all = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "default::RuntimeWarning"}
            of_all |= {"OMP_NUM_THREADS": "1", **(environment if sped else {})}
            command = [sys.executable, str(Path(__file__).with_name("trl_runs.py"))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            servers[sped] = subprocess.Popen(command, env={**os.environ, **of_all}, **pipes)
        asked = {"environment": environment, "errors": str(errors), "spec": {"out": str(out), **spec}}
        print(json.dumps(asked), file=servers[sped].stdin, flush=True)
        codes = json.loads(servers[sped].stdout.readline())
        told = errors.read_text()
        errors.unlink()
        assert codes == [0, 0], told[-3000:]
        return told

    yield train
    for server in servers.values():
        server.stdin.close()
        server.wait(60)
        server.stdout.close()
