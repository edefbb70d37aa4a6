import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from otb_analysis.commands.serve import free_port, supervised
from otb_analysis.errors import InputError


def test_a_taken_port_gives_way_to_the_next_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < free_port(port) <= port + 19


@pytest.mark.parametrize("port", [0, -1, 70000])
def test_a_number_that_is_no_port_is_named(port):
    with pytest.raises(InputError, match=f"--port is {port}"):
        free_port(port)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)])
def test_the_dashboard_ends_with_the_command_that_serves_it(sent, code):
    # Only the command gets the signal, as from `kill PID`; a terminal's Ctrl-C reaches both.
    served = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # tests under nohup ignore it
    serving = [
        sys.executable,
        "-c",
        f"{heed}; from otb_analysis.commands.serve import supervised; supervised({served!r})",
    ]
    with subprocess.Popen(serving, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as command:
        assert command.stdout is not None
        child = int(command.stdout.readline())
        command.send_signal(sent)
        try:
            assert command.wait(30) == code
        finally:
            command.kill()
    # An orphan that has ended is there, a zombie, until the system's first process asks for it.
    deadline = time.monotonic() + 30
    with pytest.raises(psutil.NoSuchProcess):
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise psutil.NoSuchProcess(child)


def test_the_code_of_a_dashboard_that_ended_by_itself_is_handed_on():
    before = signal.getsignal(signal.SIGTERM)
    assert supervised([sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert signal.getsignal(signal.SIGTERM) == before
