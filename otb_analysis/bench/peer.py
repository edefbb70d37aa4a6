"""A peer's code in an interpreter of its own, run once per turn so that it takes turns with ours.

The script gets one JSON argument. It prepares, prints one line of JSON about that, and then answers every line on its
input with one line of JSON, `{"seconds": …}`. Its packages may move torch, which is why they stay out of ours.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otb_analysis.errors import InputError


@dataclass(frozen=True)
class Peer:
    """A running peer; made by `peer`.

    Attributes:
        facts: What its script printed once it was ready.
        process: The interpreter.
    """

    facts: Mapping[str, Any]
    process: subprocess.Popen[str]

    def turn(self) -> float:
        """Let it run once; return the seconds that it measured."""
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return float(_answer(self.process)["seconds"])


@contextmanager
def peer(python: Path, script: Path, spec: Mapping[str, object]) -> Iterator[Peer]:
    """Start a peer and end it afterwards.

    Args:
        python: Interpreter that has the peer's packages.
        script: Its script, which imports nothing of ours.
        spec: What to run, in JSON's types.

    Raises:
        InputError: The interpreter does not exist, or the script failed; the sentence ends with its last line.
    """
    command = [str(python), "-P", str(script), json.dumps(dict(spec))]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise InputError(
            f"{python} cannot be run ({error.strerror}); pass the Python of the peer's environment."
        ) from error
    with process:
        try:
            yield Peer(_answer(process), process)
        finally:
            process.kill()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of JSON; whatever else its libraries print is passed over."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    said = process.stderr.read().strip().splitlines()
    script = Path(str(process.args[2])).name if isinstance(process.args, list) else "the peer"
    raise InputError(
        f"{script} ended early: {said[-1] if said else 'it said nothing'}; install what its first lines name."
    )
