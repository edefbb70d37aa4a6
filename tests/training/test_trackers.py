"""Scalars go to the trackers that are there; one that fails is a warning and a gap, never the end of the run."""

import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import tracking

from otb_analysis.config import EvaluateConfig, MeasureConfig, Schedule
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore
from otb_analysis.training.loop import train
from otb_analysis.training.runtime import Trackers


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


@pytest.mark.parametrize(("method", "gaps"), [("__init__", [1, 1, 1]), ("start", [1, 1, 1]), ("log", [1, 1, 1])])
def test_tracker_that_fails_is_one_warning_and_gaps_and_the_run_goes_on(config, monkeypatch, method, gaps):
    def unreachable(*args, **named):
        raise ConnectionError("nobody answers\nat all")

    monkeypatch.setattr(tracking.TensorBoardTracker, method, unreachable)
    with pytest.warns(RuntimeWarning) as caught:
        path = train(config)
    said = [str(w.message) for w in caught if "tracker" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith("tracker tensorboard could not ") and "(nobody answers); the run goes on" in said[0]
    store = RunStore(path)
    assert store.info["status"] == "complete"
    assert store.steps_df()["tracker_gaps"].tolist() == gaps


def test_tracker_that_fails_once_is_one_gap(config, monkeypatch):
    real = tracking.TensorBoardTracker.log

    def flaky(self, values, step=None, **named):
        if step == 1:
            raise TimeoutError
        real(self, values, step, **named)

    monkeypatch.setattr(tracking.TensorBoardTracker, "log", flaky)
    with pytest.warns(RuntimeWarning, match=r"could not log step 1 \(TimeoutError\)"):
        path = train(config)
    assert RunStore(path).steps_df()["tracker_gaps"].tolist() == [0, 1, 0]


def test_trackers_change_nothing_that_is_trained(config, tmp_path, one_thread):
    paths = train(config), train(replace(config, run="alone", trackers=()))
    first, second = (RunStore(path).tokens_df() for path in paths)
    assert first.equals(second)


def test_missing_package_is_a_sentence_before_anything_is_written(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"^wandb is needed for the tracker 'wandb'; pip install 'wandb'\.$"):
        train(replace(config, trackers=("tensorboard", "wandb")))
    assert not config.root.joinpath("tracked").exists()


def test_unknown_tracker_is_answered_with_the_nearest(config):
    with pytest.raises(InputError, match="trackers holds 'tensorbord'; did you mean 'tensorboard'"):
        train(replace(config, trackers=("tensorbord",)))


def test_only_finite_numbers_are_logged(tmp_path):
    logged, trackers = [], Trackers((), tmp_path)
    trackers.names = ("mine",)
    trackers.running["mine"] = SimpleNamespace(log=lambda numbers, step: logged.append(numbers))
    row = {"a": 1, "b": None, "c": float("nan"), "d": np.float32(0.5), "e": np.bool_(True), "f": "x"}
    assert trackers.log(0, row) == 0
    assert logged == [{"a": 1.0, "d": 0.5, "e": 1.0}]


def test_resumed_run_is_told_once_per_step(config):
    path = train(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        longer = replace(config, if_exists="resume", optimize=replace(config.optimize, steps=5))
        train(longer)
        assert [step for step, _ in events(path)["reward_mean"]] == [0, 1, 2, 3, 4]
