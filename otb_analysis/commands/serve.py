"""The dashboard as a process: Streamlit on loopback, on the first free port."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import otb_analysis
from otb_analysis.errors import InputError, Interrupted
from otb_analysis.extras import require

PORTS_TRIED = 20
STOPPED = (0, -2, 130)
"""Exit codes of a dashboard that was stopped, not broken."""

PATIENCE = 5.0
"""Seconds that the dashboard has to end by itself once it is told to."""


@dataclass(frozen=True)
class DashboardConfig:
    """Serve the dashboard on a folder of runs, on loopback only."""

    root: Path = Path("runs")
    """Directory that holds the runs."""
    port: int = 8501
    """Port to listen on; the next free one when it is taken."""
    studies: Path | None = None
    """Directory that holds the studies; by default `studies` here, else the one beside the package."""


def serve(config: DashboardConfig) -> None:
    """Run Streamlit on the app until it is stopped, after printing the link.

    Raises:
        InputError: Streamlit or the app is missing from this installation, no port is free, or Streamlit ended itself.
    """
    require("streamlit", "otb dashboard")
    here = Path(otb_analysis.__file__).parent
    app = next((p for p in (here.parent / "app", here / "_app") if (p / "streamlit_app.py").is_file()), None)
    if app is None:
        raise InputError("the dashboard's files are missing from this installation; install otb-analysis again.")
    port = free_port(config.port)
    if not config.root.is_dir():
        sys.stderr.write(
            f"otb: {config.root} is no folder of runs; the pages are empty until runs are written there.\n"
        )
    taken = "" if port == config.port else f"{config.port} is taken; "
    sys.stdout.write(f"Dashboard: {taken}http://127.0.0.1:{port}  (Ctrl-C stops it)\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    command += ["--server.address", "127.0.0.1", "--browser.gatherUsageStats", "false", "--server.headless", "true"]
    command += ["--", "--root", str(config.root.resolve())]
    if config.studies is not None:
        command += ["--studies", str(config.studies.resolve())]
    try:
        code = supervised(command)
    except KeyboardInterrupt:
        raise Interrupted("the dashboard is stopped.") from None
    if code not in STOPPED:
        raise InputError(f"the dashboard ended with code {code}; what it said above names the cause.")


def supervised(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit code; Ctrl-C or SIGTERM to this process ends the command, too."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(command, env=os.environ | {"PYTHONUTF8": "1"})
    try:
        return process.wait()
    finally:
        process.terminate()  # nothing happens where it has ended
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, before)


def free_port(wanted: int) -> int:
    """Return the first free loopback port from the wanted one up.

    Raises:
        InputError: That is no port, or it and those after it are taken.
    """
    if not 1 <= wanted <= 65535:
        raise InputError(f"--port is {wanted}; pass a number from 1 to 65535.")
    for port in range(wanted, min(wanted + PORTS_TRIED, 65536)):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise InputError(f"ports {wanted} to {wanted + PORTS_TRIED - 1} are taken; pass another --port.")
