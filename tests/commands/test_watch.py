"""`otb watch` and `otb diagnose --json`: what scripts and people are told of a run that goes on."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from time import monotonic, sleep, time

import pytest

from otb_analysis.commands import watch as sentinel
from otb_analysis.commands.cli import from_toml, main
from otb_analysis.config import TrainConfig, plain_config
from otb_analysis.store import RunWriter, StepTables, runs_df
from otb_analysis.store.layout import read_run_file, this_process, write_run_file

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # of apprise


class Server(HTTPServer):
    """A web server that keeps what it is sent."""

    taken: list[tuple[str, dict]]
    answer: int


class Taking(BaseHTTPRequestHandler):
    """Answers as its server is told."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((str(self.headers["Content-Type"]), json.loads(body)))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, format, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server(("127.0.0.1", 0), Taking) as server:
        server.taken, server.answer = [], 204
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def address(server):
    return f"http://127.0.0.1:{server.server_port}/secret-path"


def write(writer, first, last, reward):
    for step in range(first, last):
        writer.write_step(step, StepTables(steps={"reward_mean": reward, "grad_norm": 1.0, "entropy_mean": 0.5}))


def looks(monkeypatch, *acts):
    """Let each sleep between two looks do the next act; one more look than there are acts fails."""
    following = iter(acts)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        next(following)()

    monkeypatch.setattr(sentinel, "sleep", sleep)
    return slept


def test_a_run_that_collapses_while_it_is_watched_ends_the_watch_and_reaches_the_webhook(
    tmp_path, monkeypatch, capsys, server
):
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 10, 0.8)
    slept = looks(monkeypatch, lambda: write(writer, 10, 12, 0.8), lambda: write(writer, 12, 20, 0.0))
    assert main(["watch", "mine", "--root", str(tmp_path), "--every", "7", "--webhook", address(server)]) == 3
    assert slept == [7, 7]
    kind, body = server.taken[0]
    assert len(server.taken) == 1 and kind == "application/json"
    # The median of the last three steps is 0 from the second bad step on.
    assert (body["run"], body["event"], body["step"]) == ("mine", "alarm", 13)
    assert body["detectors"][0]["detector"] == "reward_fall" and body["detectors"][0]["first_alarm"] == 13
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "mine is running, step 9."
    assert out[-1] == body["text"] and out[-1].startswith("mine: alarm at step 13. Falling reward (alarm), first at")


WRITES = """
import sys, time
from otb_analysis.store import RunWriter, StepTables
writer = RunWriter.create(sys.argv[1], "live", {})
for step in range(100):
    reward = 0.8 * (step < 12)
    writer.write_step(step, StepTables(steps={"reward_mean": reward, "grad_norm": 1.0, "entropy_mean": 0.5}))
    time.sleep(0.1)
"""


def test_a_run_that_another_process_writes_is_followed_to_its_alarm(tmp_path, server):
    with subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)]) as writing:
        try:
            wait_until(lambda: runs_df(tmp_path)["n_steps"].sum() > 0)
            words = ["live", "--root", str(tmp_path), "--every", "1", "--webhook", address(server)]
            command = [sys.executable, "-m", "otb_analysis.commands.cli", "watch", *words]
            watched = subprocess.run(command, capture_output=True, text=True, timeout=60)
        finally:
            writing.kill()
    assert watched.returncode == 3 and watched.stderr == ""
    ((_, body),) = server.taken
    # The median of the last three steps is 0 from the second bad step on.
    assert (body["run"], body["event"], body["step"]) == ("live", "alarm", 13)
    assert watched.stdout.splitlines()[-1] == body["text"]


def wait_until(true):
    ends = monotonic() + 30
    while not true():
        assert monotonic() < ends, "the other process wrote nothing"
        sleep(0.05)


def test_a_run_that_is_deleted_while_it_is_watched_ends_the_watch_and_reaches_the_webhook(
    tmp_path, monkeypatch, capsys, server
):
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 3, 0.8)
    looks(monkeypatch, lambda: shutil.rmtree(writer.path))
    assert main(["watch", "mine", "--root", str(tmp_path), "--webhook", address(server)]) == 4
    assert server.taken[0][1]["event"] == "broken"
    assert capsys.readouterr().out.splitlines()[-1].startswith("mine can no longer be read: ")


def test_a_run_that_fails_before_its_first_step_names_no_step(tmp_path, capsys):
    RunWriter.create(tmp_path, "mine", {}).finish("failed", "the task has no prompts.")
    assert main(["watch", "mine", "--root", str(tmp_path)]) == 4
    assert capsys.readouterr().out.splitlines()[-1] == "mine failed before its first step: the task has no prompts."


def test_a_complete_run_without_alarm_is_status_zero_and_no_message(tmp_path, capsys, server):
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 12, 0.8)
    writer.finish()
    assert main(["watch", "mine", "--root", str(tmp_path), "--webhook", address(server)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "mine is complete, step 11; no alarm fired."
    assert server.taken == []


def test_a_run_that_fails_ends_the_watch_with_its_reason(tmp_path, monkeypatch, capsys, server):
    writer = RunWriter.create(tmp_path, "mine", {})
    looks(monkeypatch, lambda: write(writer, 0, 2, 0.8), lambda: writer.finish("failed", "the loss is NaN."))
    assert main(["watch", "mine", "--root", str(tmp_path), "--webhook", address(server)]) == 4
    assert capsys.readouterr().out.splitlines() == [
        "mine is running, no step yet.",
        "mine failed after step 1: the loss is NaN.",
    ]
    assert server.taken[0][1]["event"] == "failed"


def test_a_run_that_was_killed_ends_the_watch(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 2, 0.8)
    monkeypatch.setattr(sentinel, "sleep", lambda _: pytest.fail("a dead run was waited for"))
    info = read_run_file(writer.path)  # another process has its number by now
    write_run_file(writer.path, info | {"process": this_process() | {"started": 1.0}})
    assert main(["watch", "mine", "--root", str(tmp_path)]) == 4


def test_a_run_without_a_new_step_for_too_long_counts_as_dead(tmp_path, monkeypatch, capsys):
    write(RunWriter.create(tmp_path, "mine", {}), 0, 3, 0.8)
    began = time()
    clock = [began]
    monkeypatch.setattr(sentinel, "time", lambda: clock[0])
    monkeypatch.setattr(sentinel, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert main(["watch", "mine", "--root", str(tmp_path), "--silent", "2"]) == 4
    assert "has written no step for 2 minutes, step 2 is the last" in capsys.readouterr().out
    assert clock[0] - began in (120, 130)


def test_level_watch_ends_earlier_than_level_alarm(tmp_path, capsys):
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 20, 0.8)
    write(writer, 20, 30, 0.5)  # 0.375 of it is lost: worth a look, no alarm
    writer.finish()
    assert main(["watch", "mine", "--root", str(tmp_path)]) == 0
    assert "Falling reward (watch), first at step 21" in capsys.readouterr().out
    assert main(["watch", "mine", "--root", str(tmp_path), "--level", "watch"]) == 3


def test_a_webhook_that_refuses_is_one_sentence_without_the_secret_part_of_its_address(tmp_path, capsys, server):
    writer = RunWriter.create(tmp_path, "mine", {})
    writer.finish("failed", "the loss is NaN.")
    server.answer = 500
    assert main(["watch", "mine", "--root", str(tmp_path), "--webhook", address(server)]) == 4
    err = capsys.readouterr().err
    assert "the webhook at 127.0.0.1 did not take the message (it answered 500)" in err and "secret-path" not in err


def test_a_webhook_that_is_gone_is_one_sentence(tmp_path, capsys, server):
    url = address(server)
    server.server_close()
    assert "did not take the message (" in (sentinel.sent(url, {}) or "")


def addresses(server, *tokens):
    """Options that send to the server by apprise, to one path for each token."""
    pytest.importorskip("apprise")
    return [f"--url=json://127.0.0.1:{server.server_port}/{token}" for token in tokens]


def messages(server):
    return [(body["title"], body["type"]) for _, body in server.taken]


def test_messages_tell_each_alarm_once_and_the_end_and_a_later_watch_tells_nothing_again(
    tmp_path, monkeypatch, capsys, server
):
    urls = addresses(server, "secret-path")
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 10, 0.8)
    # The reward falls while it is watched; two looks later the run fails.
    acts = (lambda: write(writer, 10, 20, 0.0), lambda: None, lambda: writer.finish("failed", "the loss is NaN."))
    looks(monkeypatch, *acts)
    assert main(["watch", "mine", "--root", str(tmp_path), *urls]) == 4
    expected = [("mine: alarm", "warning"), ("mine: failed", "failure")]
    assert messages(server) == expected
    assert server.taken[0][1]["message"].startswith("mine: alarm at step 11. Falling reward (alarm), first at step 11")
    assert "secret-path" not in (tmp_path / "mine" / "told.json").read_text() + capsys.readouterr().out
    assert main(["watch", "mine", "--root", str(tmp_path), *urls]) == 4
    assert messages(server) == expected
    # Who is told for the first time hears both.
    assert main(["watch", "mine", "--root", str(tmp_path), *urls, *addresses(server, "another")]) == 4
    assert messages(server) == expected * 2


def test_a_look_of_cron_tells_what_came_since_the_last_one(tmp_path, server):
    words = ["watch", "mine", "--once", "--root", str(tmp_path), *addresses(server, "x")]
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 10, 0.8)
    assert main(words) == 0 and messages(server) == []
    write(writer, 10, 20, 0.0)
    assert [main(words), main(words)] == [3, 3] and messages(server) == [("mine: alarm", "warning")]
    writer.finish()
    assert main(words) == 3 and messages(server)[1:] == [("mine: complete", "success")]
    assert server.taken[-1][1]["message"] == "mine is complete, step 19; 1 detector fired."


def test_a_resumed_run_that_collapses_or_fails_again_is_told_again(tmp_path, server):
    words = ["watch", "mine", "--once", "--root", str(tmp_path), *addresses(server, "x")]
    writer, told = RunWriter.create(tmp_path, "mine", {}), []
    for good, bad in ((20, 30), (40, 60)):  # the second time it is resumed at step 20
        write(writer, 20 if told else 0, good, 0.8)
        write(writer, good, bad, 0.0)
        assert main(words) == 3
        writer.finish("failed", "the loss is NaN.")
        assert main(words) == 4
        told += [("mine: alarm", "warning"), ("mine: failed", "failure")]
        assert messages(server) == told
        writer = RunWriter.resume(writer.path, 20)
    for _ in range(2):  # twice at the same step, for the same reason
        writer.finish("failed", "the disk is full.")
        assert main(words) == 4
        writer = RunWriter.resume(writer.path, 20)
    assert messages(server) == [*told, *2 * [("mine: failed", "failure")]]


def test_a_message_that_is_not_taken_is_one_sentence_and_is_sent_when_it_can_be(tmp_path, monkeypatch, capsys, server):
    urls = addresses(server, "secret-path")
    server.answer = 500
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 10, 0.8)
    write(writer, 10, 20, 0.0)
    looks(monkeypatch, lambda: None, lambda: setattr(server, "answer", 204), writer.finish)
    assert main(["watch", "mine", "--root", str(tmp_path), *urls]) == 3
    assert messages(server) == [("mine: alarm", "warning")] * 3 + [("mine: complete", "success")]
    (said,) = capsys.readouterr().err.splitlines()
    assert "did not take the message (" in said and "error=500" in said and "secret-path" not in said


@pytest.mark.parametrize("failures", [2, 9])
def test_a_last_message_that_is_not_taken_is_tried_again_before_the_watch_ends(
    failures, tmp_path, monkeypatch, capsys, server
):
    RunWriter.create(tmp_path, "mine", {}).finish("failed", "the loss is NaN.")
    server.answer = 500
    acts = [lambda: None] * 3
    acts[failures - 1 : failures] = [lambda: setattr(server, "answer", 204)] if failures < 3 else []
    slept = looks(monkeypatch, *acts)
    assert main(["watch", "mine", "--root", str(tmp_path), *addresses(server, "x")]) == 4
    assert len(slept) == min(failures, 3) and len(server.taken) == 1 + len(slept)
    assert ("start otb watch again" in capsys.readouterr().err) == (failures > 3)


def test_an_alarm_after_a_watch_is_told_too(tmp_path, server):
    words = ["watch", "mine", "--once", "--level", "watch", "--root", str(tmp_path), *addresses(server, "x")]
    writer = RunWriter.create(tmp_path, "mine", {})
    write(writer, 0, 20, 0.8)
    write(writer, 20, 30, 0.5)  # 0.375 of it is lost: worth a look, no alarm
    assert main(words) == 3 and messages(server) == [("mine: watch", "warning")]
    write(writer, 30, 40, 0.0)
    assert main(words) == 3 and messages(server) == [("mine: watch", "warning"), ("mine: alarm", "warning")]


@pytest.mark.parametrize("told", ["5", "null", "{"])
def test_a_record_that_is_no_list_counts_as_none(told, tmp_path):
    writer = RunWriter.create(tmp_path, "mine", {})
    (writer.path / "told.json").write_text(told)
    assert main(["watch", "mine", "--once", "--root", str(tmp_path)]) == 0


def test_a_folder_without_a_run_is_said(tmp_path, monkeypatch, capsys):
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err
    looks(monkeypatch)  # the first sleep ends the watch
    with pytest.raises(StopIteration):
        main(["watch", str(tmp_path)])
    assert f"{tmp_path} is followed: 0 runs" in capsys.readouterr().out


def test_a_folder_is_followed_with_runs_that_begin_and_without_those_of_other_days(tmp_path, monkeypatch, server):
    urls = addresses(server, "x")
    RunWriter.create(tmp_path, "old", {}).finish("failed", "the loss is NaN.")
    monkeypatch.setattr(sentinel, "RECENT", -1)  # all is older
    assert main(["watch", str(tmp_path), "--once", *urls]) == 0 and messages(server) == []
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "old")
    first = RunWriter.create(tmp_path, "first", {})

    def second():
        RunWriter.create(tmp_path, "second", {}).finish("failed", "the task has no prompts.")

    def stop():
        raise KeyboardInterrupt

    looks(monkeypatch, second, first.finish, stop)
    assert main(["watch", str(tmp_path), *urls]) == 130  # a folder has no end
    assert messages(server) == [("second: failed", "failure"), ("first: complete", "success")]


def test_a_record_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys, server):
    urls = addresses(server, "x", "y")
    RunWriter.create(tmp_path, "mine", {}).finish("failed", "the loss is NaN.")

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sentinel, "atomic_file", full)
    assert main(["watch", "mine", "--root", str(tmp_path), *urls]) == 4 and len(server.taken) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "told.json cannot be written (No space left on device); a later watch sends" in said


def test_an_address_that_apprise_does_not_know_is_one_sentence_without_its_secret(tmp_path, capsys):
    pytest.importorskip("apprise")
    RunWriter.create(tmp_path, "mine", {})
    assert main(["watch", "mine", "--root", str(tmp_path), "--url", "nothing://secret-path"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "apprise cannot use nothing:…" in said and "secret-path" not in said


@pytest.mark.parametrize("address", ["secret-path:user@host", "secret-path"])
def test_an_address_without_a_scheme_is_not_printed(address, tmp_path, capsys):
    pytest.importorskip("apprise")
    RunWriter.create(tmp_path, "mine", {})
    assert main(["watch", "mine", "--root", str(tmp_path), "--once", "--url", address]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "apprise cannot use" in said and "secret-path" not in said


def test_messages_without_apprise_name_the_extra(tmp_path, monkeypatch, capsys):
    RunWriter.create(tmp_path, "mine", {})
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert main(["watch", "mine", "--root", str(tmp_path), "--url", "json://127.0.0.1"]) == 2
    assert "apprise is needed for --url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "otb watch needs a run"),
        (["nothing"], "there is no run 'nothing'"),
        (["nothing", "--every", "0"], "look at most once a second"),
        (["nothing", "--webhook", "file:///etc/passwd"], "--webhook is no address of a web server"),
        (["nothing", "--webhook", "http://[::1"], "--webhook is no address of a web server"),
    ],
)
def test_what_cannot_be_watched_is_one_sentence(words, said, tmp_path, capsys):
    assert main(["watch", *words, "--root", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_the_configuration_of_a_run_trains_it_again_under_another_name(tmp_path):
    config = TrainConfig(run="mine", root=tmp_path, seed=3, if_exists="replace", trackers=("tensorboard",))
    writer = RunWriter.create(tmp_path, "mine", plain_config(config))
    found = from_toml(TrainConfig, writer.path / "run.json")
    assert found == replace(config, if_exists="error")


def test_diagnose_json_has_the_numbers_of_the_page(tmp_path, capsys):
    for name, low in (("bad", 0.0), ("good", 0.8)):
        writer = RunWriter.create(tmp_path, name, {"estimator": {"name": "rloo"}})
        write(writer, 0, 12, 0.8)
        write(writer, 12, 20, low)
        writer.finish()
    assert main(["diagnose", "--root", str(tmp_path), "--json"]) == 0
    bad, good = json.loads(capsys.readouterr().out)
    assert (bad["run"], bad["estimator"], bad["status"], bad["state"]) == ("bad", "rloo", "complete", "collapsed")
    assert bad["steps"] == {"count": 20, "first": 0, "last": 19} and bad["first_warning"] == 13
    assert bad["what_happened"].startswith("reward 0.800 → 0, halfway down at step 12")
    fall = next(d for d in bad["detectors"] if d["detector"] == "reward_fall")
    assert (fall["level"], fall["first_watch"], fall["first_alarm"]) == ("alarm", 13, 13)
    assert good["first_warning"] is None and {d["first_alarm"] for d in good["detectors"]} == {None}
    assert "--measure.gradients.every" in good["conclusion"][0] and good["alarm"] == ""
