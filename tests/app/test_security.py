"""What a dashboard must not do: listen elsewhere, leave its folder, run text, or fall over while a run is written."""

import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from otb_analysis.commands import serve
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore, RunWriter, StepTables, compact
from tests.app.test_pages import open_page

APP = Path(__file__).parents[2] / "app" / "streamlit_app.py"
LOOKING = """
import logging, sys
from pathlib import Path
from streamlit.testing.v1 import AppTest
logging.disable(logging.CRITICAL)
app = AppTest.from_file(sys.argv[1], default_timeout=120)
looks = 0
while not Path(sys.argv[2]).exists() or looks < 3:
    for page in ("triage", "run", "rollouts", "tokens", "estimators"):
        app.switch_page(f"views/{page}.py").run() if looks else app.run()
        said = [element.value for element in (*app.exception, *app.warning)]
        assert not said, (page, said)
    looks += 1
    print(looks, flush=True)
"""


def test_dashboard_listens_on_this_machine_only(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(serve, "supervised", lambda *asked: started.append(asked) or 0)
    serve.serve(serve.DashboardConfig(root=tmp_path))
    ((command, environment),) = started
    assert command[command.index("--server.address") + 1] == "127.0.0.1" and environment == {serve.TOKEN: ""}
    assert "--server.allowedHosts" not in command
    server = tomllib.loads((APP.parent / ".streamlit" / "config.toml").read_text())["server"]
    assert server["address"] == "127.0.0.1" and set(server["allowedHosts"]) == set(serve.LOOPBACK)


def test_beyond_this_machine_a_token_is_asked_for(store_root, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(serve, "supervised", lambda *asked: started.append(asked) or 0)
    serve.serve(serve.DashboardConfig(root=store_root, host="0.0.0.0"))
    ((command, environment),) = started
    said, token, port = capsys.readouterr().out, environment[serve.TOKEN], command[command.index("--server.port") + 1]
    assert len(token) > 16 and f"http://0.0.0.0:{port}/?token={token}" in said and "can read every run" in said
    assert command[command.index("--server.allowedHosts") + 1] == "*"
    monkeypatch.setenv(serve.TOKEN, token)
    app = AppTest.from_file(APP, default_timeout=60).run()
    assert not app.title and [box.label for box in app.text_input] == ["Token"]
    assert not app.text_input[0].input("wrong").run().title
    assert app.text_input[0].input(token).run().title
    assert "Token" not in [box.label for box in app.text_input]  # whether runs can be found by words or not
    assert open_page(store_root, "triage", monkeypatch, token=token).title


def test_an_address_that_is_not_this_machines_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match="no address"):
        serve.serve(serve.DashboardConfig(root=tmp_path, host="nowhere.invalid"))


def asked_as(name, port):
    """The status of opening a session from a page that calls this machine by a name."""
    place = f"{name}:{port}"
    asking = (
        f"GET /_stcore/stream HTTP/1.1\r\nHost: {place}\r\nOrigin: http://{place}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    for _ in range(600):
        try:
            with socket.create_connection(("127.0.0.1", port), 60) as connection:
                connection.sendall(asking.encode())
                return int(connection.recv(100).split()[1])
        except ConnectionRefusedError:  # not up yet
            time.sleep(0.1)
    return None


@pytest.mark.slow
def test_a_page_under_a_foreign_name_gets_no_session(tmp_path):
    port = serve.free_port(8790)
    command = [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        "app",
        "--server.port",
        str(port),
        "--",
        "--root",
        str(tmp_path),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=APP.parents[1], **quiet) as process:
        try:
            answers = {name: asked_as(name, port) for name in ("127.0.0.1", "localhost", "rebound.example")}
        finally:
            process.terminate()
    assert answers == {"127.0.0.1": 101, "localhost": 101, "rebound.example": 403}


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", "outside", "chain-otb-s0/../../outside"])
@pytest.mark.parametrize("page", ["triage", "run", "tokens"])
def test_address_opens_no_run_outside_the_folder(page, name, store_root, tmp_path, monkeypatch):
    root = tmp_path / "runs"
    shutil.copytree(store_root / "failed-rloo", root / "inside")
    shutil.copytree(store_root / "chain-otb-s0", tmp_path / "outside")
    (root / "linked").symlink_to(tmp_path / "outside")
    app = open_page(root, page, monkeypatch, run=[name, "linked"], focus=name)
    assert not app.exception
    assert app.multiselect[0].options == ["inside"] and app.multiselect[0].value == ["inside"]


SQL = (
    "SELECT 1; SELECT 2", "COPY rollouts TO 'x.csv'", "SELECT * FROM '/etc/passwd'", "SET memory_limit='99GB'",
    "SELECT * FROM read_text('../../../etc/passwd')",
)  # fmt: skip


@pytest.mark.parametrize("query", SQL)
def test_sql_box_answers_with_a_sentence(query, store_root, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0")
    app.text_area(key="sql").set_value(query).run()
    app.button[[b.label for b in app.button].index("Run")].click().run()
    assert not app.exception and len(app.warning) == 1


@pytest.mark.parametrize(
    "cell", ["repeat('x', 100000000)", "[repeat('x', 100000000)]", "{'a': repeat('x', 100000000)}"]
)
def test_answer_of_100_megabytes_in_one_cell_does_not_reach_the_browser(cell, store_root, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0")
    shown = len(app.dataframe)
    app.text_area(key="sql").set_value(f"SELECT {cell} AS a").run()
    app.button[[b.label for b in app.button].index("Run")].click().run()
    assert not app.exception and len(app.dataframe) == shown
    (warning,) = app.warning
    assert "is larger than 20 MB; ask for fewer rows or columns" in warning.value.replace("\\", "")


def test_query_that_joins_everything_ends_within_its_memory_and_time(store_root):
    store = RunStore(store_root / "chain-otb-s0", memory_limit="256MB")
    began = time.monotonic()
    with pytest.raises(InputError, match="took longer than 1 s"):
        store.sql("SELECT count(*) FROM tokens a, tokens b, tokens c WHERE a.t + b.t * c.t % 7 = 1", seconds=1)
    assert time.monotonic() - began < 30


def test_token_of_a_megabyte_and_hostile_answers_stay_text(tmp_path, monkeypatch):
    texts = ["x" * 1_000_000, "<script>alert(1)</script>", "\u202ertl", "\x00\x1b[31m", "**md** $x$ :red[y]"]
    n = len(texts)
    keys = {"group": [0] * n, "rollout": [0] * n, "turn": [0] * n, "t": range(n), "mask": [True] * n}
    writer = RunWriter.create(tmp_path, "hostile", {})
    rollouts = {"group": [0], "rollout": [0], "prompt": ["<b>" * 9], "completion": ["".join(texts)], "reward": [1.0],
                "length": [n], "finish_reason": ["stop"], "turns": [1]}  # fmt: skip
    writer.write_step(0, StepTables(keys | {"token": texts, "entropy": [0.5] * n}, rollouts, {"reward_mean": 1.0}))
    writer.finish()
    assert RunStore(writer.path).tokens_df()["token"].tolist() == texts
    for page in ("rollouts", "tokens"):
        app = open_page(tmp_path, page, monkeypatch)
        assert not app.exception and not app.warning
        assert not any("<script>" in element.value or "<b>" in element.value for element in app.markdown)


@pytest.mark.parametrize("page", ["triage", "run", "rollouts", "tokens", "estimators", "compare"])
def test_no_text_of_a_run_turns_the_letters_around_it(page, tmp_path, monkeypatch):
    for seed, name in enumerate("ab"):
        config = {"seed": seed, "estimator": {"name": "otb\u202e"}, "task": f"\u202e{name}", f"odd\u202e{name}": seed}
        writer = RunWriter.create(tmp_path, name, config)
        tokens = {"group": [0, 0], "rollout": [0, 1], "t": [0, 0], "turn": [0, 0], "mask": [True] * 2}
        tokens |= {"token": ["x\u202e"] * 2, "reward": [1.0, 0.0], "logprob": [-0.5] * 2}
        rollouts = {"group": [0, 0], "rollout": [0, 1], "prompt": ["p\u202e"] * 2, "completion": ["x\u202e"] * 2,
                    "reward": [1.0, 0.0], "reward_a\u202e": [1.0, 0.0], "reward_b\u202e": [0.0, 0.0],
                    "length": [1, 1], "finish_reason": ["stop\u202e"] * 2}  # fmt: skip
        for step in range(2):
            writer.write_step(step, StepTables(tokens, rollouts, {"reward_mean": 0.5 + step, "grad_norm": 1.0}))
        writer.finish()
        writer.path.rename(f"{writer.path}\u202e")
    app = open_page(tmp_path, page, monkeypatch, run=["a\u202e", "b\u202e"])
    assert not app.exception
    blocks, shown = [app._tree], []
    for block in blocks:  # grows
        blocks += [child for child in block.children.values() if hasattr(child, "children")]
        shown += [child for child in block.children.values() if not hasattr(child, "children")]
    sent = [child.proto.SerializeToString() for child in shown if child.type != "code"]  # which is to be copied
    assert not [text for text in sent if "\u202e".encode() in text or b'\\u202e"' in text]
    assert "⟨202E⟩".encode() in b"".join(sent)


@pytest.mark.slow
def test_two_dashboards_look_on_while_a_run_is_written_and_compacted(store_root, write_next_step, tmp_path):
    root, ended = tmp_path / "runs", tmp_path / "ended"
    writer = RunWriter.create(root, "live", {"estimator": {"name": "otb"}})
    for step in range(3):
        write_next_step(writer, step, 1)
    environment = os.environ | {"OTB_RUNS": str(root), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(APP.parents[1]), str(APP.parent)])
    command = [sys.executable, "-W", "ignore", "-c", LOOKING, str(APP), str(ended)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    looking = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for step in range(3, 30):
        write_next_step(writer, step, 1)
    before = RunStore(writer.path).tokens_df()
    writer.finish()
    compact(writer.path)
    ended.touch()
    for process in looking:
        said, failed = process.communicate(timeout=300)
        assert process.returncode == 0, failed[-2000:]
        assert len(said.split()) >= 3
    pd.testing.assert_frame_equal(RunStore(writer.path).tokens_df(), before)
