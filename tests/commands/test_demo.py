"""The demo: complete runs are reused, half-made ones replaced, and a worker's error becomes the demo's."""

import io
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from time import monotonic, sleep

import pytest
from rich.console import Console

from otb_analysis.commands import demo
from otb_analysis.commands.demo import DemoConfig, demo_configs, is_complete, run_demo, train_together
from otb_analysis.config import EstimatorConfig, OptimizeConfig, SampleConfig, TrainConfig, plain_config
from otb_analysis.errors import InputError, Interrupted, StoreError
from otb_analysis.store import RunStore


@pytest.fixture
def finished(otb_run, tiny_config, tmp_path):
    """A configuration whose run is complete, in a root of its own."""
    shutil.copytree(otb_run, tmp_path / "otb")
    return replace(tiny_config, run="otb", root=tmp_path)


def edit(made, **changes):
    path = made.root / made.run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def silent():
    return Console(file=io.StringIO())


def test_the_two_runs_differ_in_the_estimator_alone_and_measure_the_same_steps():
    configs = demo_configs(DemoConfig(seed=4))
    first, second = (plain_config(c) for c in configs)
    assert {key for key in first if first[key] != second[key]} == {"run", "estimator"}
    due = sum(c.measure.exact.due(step) for c in configs for step in range(c.optimize.steps))
    assert due * configs[0].sample.prompts == 704  # that is most of a demo's time
    assert [first["estimator"]["name"], second["estimator"]["name"]] == ["group_mean", "otb"]
    assert first["estimator"] | {"name": "otb"} == second["estimator"]
    assert first["seed"] == 4
    assert first["if_exists"] == "replace"


def test_complete_run_of_the_same_configuration_is_complete_wherever_it_lies(finished):
    assert is_complete(finished)
    assert is_complete(replace(finished, if_exists="replace"))


@pytest.mark.parametrize("status", ["running", "failed"])
def test_half_made_run_is_not_complete(finished, status):
    edit(finished, status=status)
    assert not is_complete(finished)


def test_run_of_another_configuration_is_not_complete(finished):
    assert not is_complete(replace(finished, seed=1))
    assert not is_complete(replace(finished, optimize=OptimizeConfig(steps=4)))
    assert not is_complete(replace(finished, run="other"))


@pytest.mark.parametrize("damage", ["empty", "no_run_file", "broken", "newer", "config_of_another_kind"])
def test_damaged_run_is_not_complete_and_never_an_error(finished, damage):
    path = finished.root / finished.run
    if damage == "empty":
        shutil.rmtree(path)
        path.mkdir()
    elif damage == "no_run_file":
        (path / "run.json").unlink()
    elif damage == "broken":
        (path / "run.json").write_text("{")
    elif damage == "newer":
        edit(finished, schema_version=999)
    else:
        edit(finished, config=["a", "list"])
    assert not is_complete(finished)


def with_runs(monkeypatch, configs):
    """Let the demo run other configurations, in this process."""
    from otb_analysis.training.loop import train

    made = []

    def together(missing, open_phases, threads):
        made.extend(c.run_name for c in missing)
        for config in missing:
            train(config)

    monkeypatch.setattr(demo, "demo_configs", lambda config: configs)
    monkeypatch.setattr(demo, "train_together", together)
    return made


def test_demo_makes_what_is_missing_and_reuses_what_is_complete(finished, monkeypatch, one_thread):
    again = replace(finished, if_exists="replace")
    other = replace(again, run="short", optimize=OptimizeConfig(steps=1))
    made = with_runs(monkeypatch, [again, other])
    before = (finished.root / "otb" / "run.json").read_bytes()
    paths = run_demo(DemoConfig(root=finished.root), silent())
    assert paths == [finished.root / "otb", finished.root / "short"]
    assert made == ["short"]
    assert (finished.root / "otb" / "run.json").read_bytes() == before
    run_demo(DemoConfig(root=finished.root), silent())
    assert made == ["short"]
    # A half-made run is made again from its first step.
    edit(other, status="running")
    run_demo(DemoConfig(root=finished.root), silent())
    assert made == ["short", "short"]
    assert RunStore(finished.root / "short").info["status"] == "complete"


@pytest.mark.parametrize(
    ("complete", "begun", "told"),
    [
        (False, False, "stopped; no run was begun."),
        (True, False, "stopped; otb is complete and kept."),
        (
            True,
            True,
            "stopped; otb is complete and kept; short can be read as far as it is, and begins anew with otb demo.",
        ),
    ],
)
def test_interrupted_demo_says_what_it_kept(complete, begun, told, finished, monkeypatch):
    def stop(*given):
        raise KeyboardInterrupt

    other = replace(finished, run="short", optimize=OptimizeConfig(steps=1))
    with_runs(monkeypatch, [finished, other])
    monkeypatch.setattr(demo, "train_together", stop)
    if not complete:
        shutil.rmtree(finished.root / "otb")
    if begun:
        (finished.root / "short").mkdir()
    with pytest.raises(Interrupted) as stopped:
        run_demo(DemoConfig(root=finished.root), silent())
    assert str(stopped.value) == told


class Watched(dict):
    """Keeps the names of all phases that were ever reported."""

    def __init__(self, known, seen):
        super().__init__(known)
        self.seen = seen

    def __setitem__(self, run, stack):
        self.seen |= {phase.name for phase in stack}
        super().__setitem__(run, stack)


@pytest.mark.slow
def test_runs_are_trained_side_by_side(finished):
    plain = replace(finished, task="chain_sum", optimize=OptimizeConfig(steps=2))
    configs = [replace(plain, run=f"side_{n}", estimator=EstimatorConfig(name=n)) for n in ("rloo", "otb")]
    seen = set()
    watched = Watched({}, seen)
    train_together(configs, watched)
    assert [(stack[0].done, stack[0].total) for stack in watched.values()] == [(2, 2)] * 2
    assert seen > {f"{config.run}: starting" for config in configs}  # and the phases inside that a report caught
    for config in configs:
        assert is_complete(config)


@pytest.mark.slow
def test_error_of_one_worker_is_the_demos_and_stops_the_other(finished):
    plain = replace(finished, task="chain_sum")
    endless = replace(plain, run="endless", optimize=OptimizeConfig(steps=100_000))
    doomed = replace(plain, run="doomed", model=str(finished.root / "nowhere"))
    with pytest.raises(InputError, match="nowhere does not exist"):
        train_together([endless, doomed], {})
    assert not is_complete(endless)


def deaf(config, threads, news):
    """A training to which the word is lost, as to one that is told in a destructor."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    news.send(InputError("this run cannot go on."))
    sleep(600)


def test_worker_that_does_not_end_when_it_is_told_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_work", deaf)
    monkeypatch.setattr(demo, "PATIENCE", 0.5)
    with pytest.raises(InputError, match="cannot go on"):
        train_together([TrainConfig(root=tmp_path)], {})


@pytest.mark.slow
def test_worker_that_dies_without_a_word_stops_the_demo_at_once(finished, monkeypatch):
    plain = replace(finished, task="chain_sum")
    endless = replace(plain, run="endless", optimize=OptimizeConfig(steps=100_000))
    broken = replace(plain, run="broken", sample=SampleConfig(prompts=1.5))  # a float where a count belongs: a bug
    with pytest.raises(StoreError, match=r"broken ended without a word"):
        train_together([endless, broken], {})


@pytest.mark.slow
def test_workers_end_when_the_demo_is_killed(tmp_path):
    words = [sys.executable, "-m", "otb_analysis", "demo", "--no-serve", "--root", str(tmp_path)]
    killed = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs = [tmp_path / name / "run.json" for name in ("demo-group_mean-s0", "demo-otb-s0")]
    wait_for(lambda: all(run.is_file() for run in runs))
    killed.kill()
    killed.wait()
    wait_for(lambda: all(json.loads(run.read_text())["status"] == "failed" for run in runs))


def wait_for(happened, seconds=120):
    end = monotonic() + seconds
    while not happened():
        assert monotonic() < end
        sleep(0.2)
