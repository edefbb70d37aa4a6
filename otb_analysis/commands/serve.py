"""The dashboard as a process: Streamlit on loopback, on the first free port."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import otb_analysis
from otb_analysis.errors import InputError, Interrupted
from otb_analysis.extras import require

PORTS_TRIED = 20
STOPPED = (0, -2, 130)
"""Exit codes of a dashboard that was stopped, not broken."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN = "OTB_TOKEN"
"""Variable with what a visitor of the pages must know; empty or missing where only this machine can reach them."""

PATIENCE = 5.0
"""Seconds that the dashboard has to end by itself once it is told to."""


@dataclass(frozen=True)
class DashboardConfig:
    """Serve the dashboard on a folder of runs, on loopback only unless --host names an address of this machine."""

    root: Path = Path("runs")
    """Directory that holds the runs."""
    port: int = 8501
    """Port to listen on; the next free one when it is taken."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback whoever has the printed link, with its token, can read all runs there."""
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
    port = free_port(config.port, config.host)
    token = "" if config.host in LOOPBACK else secrets.token_urlsafe(16)
    if not config.root.is_dir():
        sys.stderr.write(
            f"otb: {config.root} is no folder of runs; the pages are empty until runs are written there.\n"
        )
    taken = "" if port == config.port else f"{config.port} is taken; "
    name = f"[{config.host}]" if ":" in config.host else config.host
    link = f"http://{name}:{port}{f'/?token={token}' if token else ''}"
    sys.stdout.write(f"Dashboard: {taken}{link}  (Ctrl-C stops it)\n")
    if token:
        sys.stdout.write(f"Unencrypted; who has this link can read every run in {config.root.resolve()}.\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    command += ["--server.address", config.host, "--browser.gatherUsageStats", "false", "--server.headless", "true"]
    if token:  # whatever name leads here: the token protects it
        command += ["--server.allowedHosts", "*"]
    command += ["--", "--root", str(config.root.resolve())]
    if config.studies is not None:
        command += ["--studies", str(config.studies.resolve())]
    try:
        code = supervised(command, {TOKEN: token})
    except KeyboardInterrupt:
        raise Interrupted("the dashboard is stopped.") from None
    if code not in STOPPED:
        raise InputError(f"the dashboard ended with code {code}; what it said above names the cause.")


def supervised(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command to its end and return its exit code; Ctrl-C or SIGTERM to this process ends the command, too.

    `environment` is added to that of this process.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(command, env=os.environ | {"PYTHONUTF8": "1", **(environment or {})})
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


def free_port(wanted: int, host: str = "127.0.0.1") -> int:
    """Return the first free port of an address of this machine, from the wanted one up.

    Raises:
        InputError: That is no port, or it and those after it are taken, or the address is not this machine's.
    """
    try:
        family = socket.getaddrinfo(host, None)[0][0]
    except OSError as error:
        raise InputError(f"--host is {host!r}, which is no address ({error}); pass one of this machine's.") from error
    if not 1 <= wanted <= 65535:
        raise InputError(f"--port is {wanted}; pass a number from 1 to 65535.")
    for port in range(wanted, min(wanted + PORTS_TRIED, 65536)):
        with socket.socket(family) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    last = wanted + PORTS_TRIED - 1
    raise InputError(f"ports {wanted} to {last} of {host} are taken, or it is not this machine's; pass others.")
