"""The peer protocol, with a peer that needs no package."""

import sys
from pathlib import Path

import pytest

from benchmarks import peer_side
from benchmarks.timing import peer
from otb_analysis.errors import InputError

SCRIPT = """
import json, sys
spec = json.loads(sys.argv[1])
print("a library says hello")
print(json.dumps({"ready": spec["n"]}), flush=True)
for i, _ in enumerate(sys.stdin):
    print(json.dumps({"seconds": spec["n"] + i}), flush=True)
"""


def test_a_peer_answers_one_turn_at_a_time(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with peer(Path(sys.executable), tmp_path / "script.py", {"n": 5}) as found:
        assert found.facts == {"ready": 5}
        assert [found.turn(), found.turn()] == [5.0, 6.0]
        assert found.answer() == {"seconds": 7}
    assert found.process.returncode is not None


def test_what_peers_scripts_load_by_path_answers_turns_and_measures_memory(tmp_path):
    # 64 MiB of ones are resident at once, which a process's status shows.
    side = Path(peer_side.__file__)
    (tmp_path / "script.py").write_text(
        f"import runpy, torch\nside = runpy.run_path({str(side)!r})\nrun = lambda: torch.ones(1 << 24).sum()\n"
        "run()\nside['say']({'bytes': side['peak'](run, 'cpu')})\nside['take_turns'](run, 'cpu')\n"
    )
    with peer(Path(sys.executable), tmp_path / "script.py", {}) as found:
        held = found.facts["bytes"]
        assert held is None or 60 << 20 < held < 100 << 20
        assert all(0 < found.turn() < 10 for _ in range(2))


def test_a_peer_that_fails_says_why_in_one_sentence(tmp_path):
    (tmp_path / "script.py").write_text("import no_such_package")
    with (
        pytest.raises(InputError, match=r"ended early: .*no_such_package"),
        peer(Path(sys.executable), tmp_path / "script.py", {}),
    ):
        pass


def test_a_peer_that_dies_between_turns_says_so_although_it_wrote_much(tmp_path):
    talk = "import sys\nprint('{}', flush=True)\nsys.stderr.write('x' * 200_000 + '\\nout of breath')\n"
    (tmp_path / "script.py").write_text(talk)
    with peer(Path(sys.executable), tmp_path / "script.py", {}) as found:
        found.process.wait()
        with pytest.raises(InputError, match="ended early: out of breath"):
            found.turn()


def test_an_interpreter_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match="no/python cannot be run"), peer(Path("no/python"), tmp_path / "x.py", {}):
        pass
