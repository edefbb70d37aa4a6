"""Scalars go to the trackers that are there; one that fails is a warning and a gap, never the end of the run."""

import json
import shutil
import sys
import warnings
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from otb_analysis.commands.cli import main
from otb_analysis.config import EvaluateConfig, MeasureConfig, Schedule
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore
from otb_analysis.trackers import Trackers
from otb_analysis.training.loop import train


@pytest.fixture
def config(tiny_config, tmp_path):
    return replace(
        tiny_config,
        run="tracked",
        root=tmp_path,
        measure=MeasureConfig(exact=Schedule(0, 0)),
        evaluate=EvaluateConfig(every=2, prompts=8),
        trackers=("tensorboard",),
    )


def events(path):
    """Every scalar in TensorBoard's files: name → [(step, value), …]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(path / "tensorboard"))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_file_holds_the_steps_table(config):
    path = train(config)
    steps, found = RunStore(path).steps_df().set_index("step"), events(path)
    assert {"reward_mean", "grad_norm", "heldout_reward", "clipped", "seconds_sample"} <= set(found)
    for name, points in found.items():
        recorded = steps[name].dropna().astype(float)
        assert [step for step, _ in points] == recorded.index.tolist()
        np.testing.assert_allclose([value for _, value in points], recorded, rtol=1e-6)
    assert steps["tracker_gaps"].tolist() == [0, 0, 0]


def test_run_without_trackers_has_no_gaps_to_count(otb_run):
    assert RunStore(otb_run).steps_df()["tracker_gaps"].isna().all()


class Tracker:
    """Stands for the package of a tracker that takes numbers and tables."""

    def __init__(self, fails=()):
        self.rows, self.tables, self.calls, self.fails = [], {}, [], fails

    def init(self, **named):
        self.calls.append("init")
        if "init" in self.fails:
            raise ConnectionError("nobody answers.\nat all")
        self.settings = named
        return self

    def Table(self, dataframe):
        return dataframe

    def Trace(self, messages, metadata):
        return SimpleNamespace(columns=(), messages=messages, metadata=metadata)

    def log(self, values, step=None):
        if step in self.fails:
            raise TimeoutError
        numbers = {name: value for name, value in values.items() if not hasattr(value, "columns")}
        self.rows.append((step, numbers))
        self.tables |= {(step, name): table for name, table in values.items() if name not in numbers}

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def stand_in(monkeypatch):
    def made(name, fails=()):
        tracker = Tracker(fails)
        monkeypatch.setitem(sys.modules, name, tracker)
        return tracker

    return made


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_gets_scalars_of_every_step_and_tables_of_the_worst_tokens(config, stand_in, name):
    tracker = stand_in(name)
    path = train(replace(config, trackers=(name,)))
    steps = RunStore(path).steps_df()
    assert tracker.settings["name"] == "tracked" and tracker.calls == ["init", "finish"]
    assert [(step, row["reward_mean"]) for step, row in tracker.rows] == list(
        steps[["step", "reward_mean"]].itertuples(index=False, name=None)
    )
    traces = {(0, f"rollouts/{k}") for k in range(3)} if name == "trackio" else set()
    assert set(tracker.tables) == {(0, "tokens"), (0, "rollouts")} | traces  # three steps, a table every ten
    for k, (_, key) in enumerate(sorted(traces)):
        row, trace = tracker.tables[0, "rollouts"].iloc[k], tracker.tables[0, key]
        assert [said["content"] for said in trace.messages] == [row["prompt"], row["completion"]]
        assert trace.metadata["reward"] == row["reward"] and trace.metadata["share"] == row["share"]
    tokens, rollouts = tracker.tables[0, "tokens"], tracker.tables[0, "rollouts"]
    assert len(tokens) == 10 and len(rollouts) == 3 and tokens["share"].is_monotonic_decreasing
    # The largest A²w of the stored columns, as a share of their sum.
    stored = RunStore(path).tokens_df([0], columns=["advantage", "energy_proxy"])
    power = stored["advantage"] ** 2 * stored["energy_proxy"]
    assert tokens["share"].iloc[0] == pytest.approx(power.max() / power.sum(), rel=1e-5)


def test_mlflow_gets_numbers_and_a_file_per_table(config, monkeypatch):
    calls, spans = [], []

    @contextmanager
    def start_span(name, attributes):
        spans.append(one := {"name": name, **attributes})
        said, did = (lambda x, key=key: one.update({key: x}) for key in ("said", "did"))
        yield SimpleNamespace(set_inputs=said, set_outputs=did)

    names = ("set_experiment", "start_run", "log_metrics", "log_table", "end_run")
    module = {
        name: (lambda *words, name=name, **named: calls.append((name, *words, *named.values()))) for name in names
    }
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**module, start_span=start_span))
    train(replace(config, trackers=("mlflow",)))
    assert [span["name"] for span in spans] == [f"rollouts/{k}" for k in range(3)] and {s["step"] for s in spans} == {0}
    assert all(span["said"] and isinstance(span["did"], str) and "reward" in span for span in spans)
    assert calls[:2] == [("set_experiment", "otb-analysis"), ("start_run", "tracked")] and calls[-1] == ("end_run",)
    assert [call[2] for call in calls if call[0] == "log_metrics"] == [0, 1, 2]
    assert [call[2] for call in calls if call[0] == "log_table"] == ["tokens/000000.json", "rollouts/000000.json"]


@pytest.mark.parametrize(("fails", "gaps"), [(("init",), [1, 1, 1]), ((0, 1, 2), [1, 1, 1]), ((1,), [0, 1, 0])])
def test_tracker_that_fails_is_one_warning_and_gaps_and_the_run_goes_on(config, stand_in, fails, gaps):
    stand_in("wandb", fails)
    with pytest.warns(RuntimeWarning) as caught:
        path = train(replace(config, trackers=("wandb",)))
    said = [str(w.message) for w in caught if "tracker" in str(w.message)]
    assert len(said) == 1 and "\n" not in said[0]
    what = "start (nobody answers)" if "init" in fails else f"log step {fails[0]} (TimeoutError)"
    assert said[0].startswith(f"tracker wandb could not {what}; ")
    store = RunStore(path)
    assert store.info["status"] == "complete"
    assert store.steps_df()["tracker_gaps"].tolist() == gaps


def test_trackers_change_nothing_that_is_trained(config, tmp_path, one_thread):
    paths = train(config), train(replace(config, run="alone", trackers=()))
    first, second = (RunStore(path).tokens_df() for path in paths)
    assert first.equals(second)


def test_a_package_that_is_missing_is_one_warning_and_the_others_are_told(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(RuntimeWarning, match=r"could not start \(wandb is needed"):
        path = train(replace(config, trackers=("tensorboard", "wandb")))
    assert RunStore(path).steps_df()["tracker_gaps"].tolist() == [1, 1, 1]
    assert len(events(path)["reward_mean"]) == 3


def test_unknown_tracker_is_answered_with_the_nearest(config):
    with pytest.raises(InputError, match=r"'tensorbord'; .*'tensorboard'"):
        train(replace(config, trackers=("tensorbord",)))


def test_only_finite_numbers_are_logged(tmp_path, stand_in):
    tracker, trackers = stand_in("wandb"), Trackers(("wandb",), tmp_path)
    row = {"a": 1, "b": None, "c": float("nan"), "d": np.float32(0.5), "e": np.bool_(True), "f": "x"}
    assert trackers.log(0, row) == 0
    assert tracker.rows == [(0, {"a": 1.0, "d": 0.5, "e": 1.0})]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_tables_as_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(Trackers(("tensorboard",), tmp_path)) as trackers:
        assert trackers.log(4, {}, {"tokens": {"token": ["a|b", "c\nd"], "share": [0.5, 0.25]}}) == 0
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    ((event,),) = [found.Tensors(tag) for tag in found.Tags()["tensors"]]
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 4
    assert lines == ["| token | share |", "| --- | --- |", "| a\\|b | 0.5 |", "| c d | 0.25 |"]


def test_an_audit_of_a_run_reaches_a_tracker_with_its_scalars_and_what_it_says(otb_run, stand_in, tmp_path, capsys):
    shutil.copytree(otb_run, tmp_path / "mine")
    tracker = stand_in("trackio")
    assert main(["audit", "--run", "mine", "--root", str(tmp_path), "--report-to", "trackio"]) == 0
    steps = RunStore(otb_run).steps_df()
    assert tracker.settings["name"] == "mine-audit"
    assert [step for step, _ in tracker.rows] == steps["step"].tolist()
    assert tracker.rows[-1][1]["reward_mean"] == steps["reward_mean"].iloc[-1]
    assert {step for step, _ in tracker.tables} == {steps["step"].iloc[-1]}
    verdict = tracker.tables[steps["step"].iloc[-1], "audit/verdict"]["sentence"].tolist()
    assert verdict and all(sentence in " ".join(capsys.readouterr().out.split()) for sentence in verdict[:1])
    names = {name for _, name in tracker.tables}
    assert names >= {"audit/verdict", "audit/rollouts", "audit/estimators_1", "audit/proxy_1", "audit/worth_reading/0"}


def test_what_a_tracker_prints_is_no_part_of_the_json_of_an_audit(otb_run, stand_in, tmp_path, capsys, monkeypatch):
    shutil.copytree(otb_run, tmp_path / "mine")
    monkeypatch.setattr(stand_in("trackio"), "finish", lambda: print("* Run finished."))
    assert main(["audit", "--run", "mine", "--root", str(tmp_path), "--report-to", "trackio", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["run"] == "mine" and "* Run finished." in err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_second_audit_replaces_the_first_in_tensorboard(otb_run, tmp_path):
    shutil.copytree(otb_run, tmp_path / "mine")
    for _ in range(2):
        assert main(["audit", "--run", "mine", "--root", str(tmp_path), "--report-to", "tensorboard"]) == 0
    assert len(list((tmp_path / "mine" / "tensorboard-audit").iterdir())) == 1


@pytest.mark.parametrize("more", [[], ["--run", "mine"], ["--model", "demo"]])
def test_an_audit_without_a_run_has_nothing_to_send(tmp_path, capsys, more):
    assert main(["audit", str(tmp_path), "--report-to", "wandb", *more]) == 2
    assert "pass --model DIR --go, or --run alone" in capsys.readouterr().err


def test_resumed_run_is_told_once_per_step(config):
    path = train(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        longer = replace(config, if_exists="resume", optimize=replace(config.optimize, steps=5))
        train(longer)
        assert [step for step, _ in events(path)["reward_mean"]] == [0, 1, 2, 3, 4]
