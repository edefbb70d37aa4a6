"""A run says "running" until it is known that its process is gone, and never the other way round."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.store import RunStore, RunWriter, StepTables, layout, runs_df
from otb_analysis.store.layout import live_status, this_process


@pytest.fixture
def gone():
    """What a process that has ended had said of itself."""
    code = "import json; from otb_analysis.store.layout import this_process; print(json.dumps(this_process()))"
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    return json.loads(done.stdout)


def test_this_process_is_running():
    assert live_status({"status": "running", "reason": "", "process": this_process()}) == ("running", "")


def test_process_that_has_ended_has_stopped(gone):
    status, reason = live_status({"status": "running", "process": gone})
    assert status == "stopped" and "--if-exists resume" in reason


def test_number_that_now_belongs_to_another_process_has_stopped():
    assert live_status({"status": "running", "process": this_process() | {"started": 1.0}})[0] == "stopped"


def test_process_that_ended_and_was_not_waited_for_has_stopped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = this_process() | {"pid": child.pid, "started": psutil.Process(child.pid).create_time()}
    assert live_status({"status": "running", "process": process})[0] == "running"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is a zombie
    assert live_status({"status": "running", "process": process})[0] == "stopped"
    child.communicate()


@pytest.mark.parametrize("place", ["another machine", None])
def test_run_elsewhere_is_believed_and_last_seen(gone, place):
    told = {"status": "running", "process": gone | {"host": "far", "place": place}}
    assert live_status(told, "noon") == ("running", "running on far, last seen noon.")


def test_reader_that_cannot_tell_believes(gone, monkeypatch):
    monkeypatch.setattr(layout, "_host", lambda: "elsewhere")
    assert live_status({"status": "running", "process": gone})[0] == "running"


def test_run_from_before_processes_were_named_is_believed():
    assert live_status({"status": "running", "reason": ""}) == ("running", "")


@pytest.mark.parametrize("status", ["complete", "failed"])
def test_how_a_run_ended_stays_whatever_became_of_its_process(gone, status):
    assert live_status({"status": status, "reason": "why", "process": gone}) == (status, "why")


def test_table_of_runs_and_reader_tell_a_stopped_run(tmp_path, gone):
    writer = RunWriter.create(tmp_path, "demo", {})
    writer.write_step(0, StepTables(steps={"reward_mean": 0.5}))
    file = writer.path / "run.json"
    assert runs_df(tmp_path)["status"].tolist() == ["running"]
    info = RunStore(writer.path).info
    file.write_text(json.dumps(info | {"process": gone}))
    assert runs_df(tmp_path)[["status", "reason"]].to_numpy().tolist() == [["stopped", layout.STOPPED]]
    assert RunStore(writer.path).live_status == ("stopped", layout.STOPPED)
    file.write_text(json.dumps(info | {"process": gone | {"host": "far", "place": "there"}}))
    assert runs_df(tmp_path)["status"].tolist() == ["running"]
    assert runs_df(tmp_path)["reason"][0].startswith("running on far, last seen 20")
    RunWriter.resume(writer.path, 1)
    assert RunStore(writer.path).live_status == ("running", "")


def test_run_appears_with_its_file_or_not_at_all(tmp_path, monkeypatch):
    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr("otb_analysis.store.writer.write_run_file", killed)
    with pytest.raises(KeyboardInterrupt):
        RunWriter.create(tmp_path, "demo", {})
    assert runs_df(tmp_path).empty
    assert not (tmp_path / "demo").exists()


def test_run_that_another_process_writes_is_left_alone(tmp_path, gone):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        process = this_process() | {"pid": other.pid, "started": psutil.Process(other.pid).create_time()}
        path = RunWriter.create(tmp_path, "demo", {}).path
        info = RunStore(path).info
        (path / "run.json").write_text(json.dumps(info | {"process": process}))
        before = sorted(path.rglob("*"))
        refused = rf"^run 'demo' is being written by process {other.pid}; end it first, or choose another name\.$"
        with pytest.raises(InputError, match=refused):
            RunWriter.resume(path, 0)
        with pytest.raises(InputError, match=refused):
            RunWriter.create(tmp_path, "demo", {}, if_exists="replace")
        assert sorted(path.rglob("*")) == before
        other.kill()
    assert RunStore(RunWriter.resume(path, 0).path).live_status == ("running", "")


@pytest.mark.parametrize(
    "told", [{"status": "complete"}, {"process": None}, {"process": {"place": "there", "pid": 1}}, {"process": "gone"}]
)
def test_run_that_nobody_is_known_to_write_may_be_taken_over(tmp_path, gone, told):
    path = RunWriter.create(tmp_path, "demo", {}).path
    told = {"process": gone} if told.get("process") == "gone" else told
    info = RunStore(path).info | told
    (path / "run.json").write_text(json.dumps(info))
    RunWriter.resume(path, 0)
    RunWriter.create(tmp_path, "demo", {}, if_exists="replace")


@pytest.mark.parametrize("if_exists", ["resume", "replace"])
def test_a_writer_stops_once_one_on_another_machine_has_gone_on_with_its_run(tmp_path, monkeypatch, if_exists):
    old = RunWriter.create(tmp_path, "demo", {})
    old.write_step(0, StepTables(steps={"reward_mean": 0.5}))
    with monkeypatch.context() as there:  # its number says nothing there, so it may be taken for gone
        there.setattr(layout, "_host", lambda: "there")
        there.setattr(layout.platform, "node", lambda: "far")
        again = (tmp_path, "demo", {}) if if_exists == "replace" else (old.path, 1)
        new = RunWriter.create(*again, if_exists="replace") if if_exists == "replace" else RunWriter.resume(*again)
    before = sorted(old.path.rglob("*"))
    for late in (lambda: old.write_step(1, StepTables(steps={"reward_mean": 9.0})), lambda: old.finish("failed")):
        with pytest.raises(StoreError, match=rf"process {os.getpid()} on far"):
            late()
    assert sorted(old.path.rglob("*")) == before and RunStore(new.path).live_status[0] == "running"
    new.write_step(1, StepTables(steps={"reward_mean": 1.0}))
    new.finish()
    assert RunStore(new.path).steps_df()["reward_mean"].tolist() == [0.5, 1.0][if_exists == "replace" :]
