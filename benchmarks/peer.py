"""A peer's code in an interpreter of its own, run once per turn so that it takes turns with ours.

The script gets one JSON argument. It prepares, prints one line of JSON about that, and then answers every line on its
input with one line of JSON, `{"seconds": …}`. Its packages may replace torch, which is why they stay out of ours.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from otb_analysis.errors import InputError


@dataclass(frozen=True)
class Peer:
    """A running peer; made by `peer`."""

    facts: Mapping[str, Any]  # What its script printed once it was ready
    process: subprocess.Popen[str]
    errors: IO[str]  # Its stderr, in a file so that it never waits for a reader

    def turn(self) -> float:
        """Let it run once; return the seconds that it measured."""
        return float(self.answer()["seconds"])

    def answer(self) -> Mapping[str, Any]:
        """Let it run once; return its answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the peer has ended; reading its answer raises and says why
            self.process.stdin.write("run\n")
            self.process.stdin.flush()
        return _answer(self.process, self.errors)


@contextmanager
def peer(python: Path, script: Path, spec: Mapping[str, object]) -> Iterator[Peer]:
    """Start a script that imports nothing of ours, with a spec in JSON's types, and end it afterwards.

    Raises:
        InputError: The interpreter does not exist, or the script failed; the sentence ends with its last line.
    """
    command = [str(python), "-P", str(script), json.dumps(dict(spec))]
    with TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        except OSError as error:
            raise InputError(
                f"{python} cannot be run ({error.strerror}); pass the Python of the peer's environment."
            ) from error
        try:
            yield Peer(_answer(process, errors), process, errors)
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()


def _answer(process: subprocess.Popen[str], errors: IO[str]) -> dict[str, Any]:
    """The next line of JSON; whatever else its libraries print is passed over."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    process.wait()
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    assert isinstance(process.args, list)
    script, words = Path(str(process.args[2])).name, lines[-1] if lines else "it said nothing"
    raise InputError(f"{script} ended early: {words}; install what its first lines name.")
