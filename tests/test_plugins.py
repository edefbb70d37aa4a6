"""What installed packages register is found by name; one that is broken is a sentence, and all others work."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.config import ImportConfig
from otb_analysis.custom import plugins
from otb_analysis.errors import InputError
from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.phases import NOTES
from otb_analysis.recorded.formats import find_source
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.store import RunStore
from otb_analysis.tasks import make_task, task_files
from otb_analysis.training.loop import train

MODULE = """
from otb_analysis.recorded.formats import Format
from otb_analysis.recorded.records import RecordedRollout
from otb_analysis.tasks import Counting

def halved(inputs):
    return inputs.reward.sum(axis=1, keepdims=True) * inputs.mask / 2

def task(config):
    return Counting(config.counting, config.seed)

def read(fields, tally, weights):
    text = fields.text
    return RecordedRollout(fields.place, fields.number("paid"), prompt=text("ask"), completion=text("say"))

ours = Format("lines of ask, say, paid", frozenset({"ask", "say", "paid"}), read)
"""
POINTS = """
[otb_analysis.estimators]
halved = ours_for_test:halved
otb = ours_for_test:halved
broken = ours_for_test_missing:nothing
[otb_analysis.tasks]
ours = ours_for_test:task
[otb_analysis.formats]
broken = ours_for_test_missing:nothing
number = ours_for_test:__name__
ours = ours_for_test:ours
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package that is installed for the test."""
    (tmp_path / "site" / "ours-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "ours_for_test.py").write_text(MODULE)
    (tmp_path / "site" / "ours-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n"
    )
    (tmp_path / "site" / "ours-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    plugins.cache_clear()
    yield
    plugins.cache_clear()


def inputs():
    return EstimatorInputs(
        reward=np.array([[0.0, 1.0], [2.0, 0.0]]), mask=np.ones((2, 2), bool), group=np.zeros(2, int)
    )


def test_registered_estimator_is_estimated_and_the_catalogue_keeps_its_names():
    assert estimate("halved", inputs()).advantage.tolist() == [[0.5, 0.5], [1.0, 1.0]]
    with pytest.raises(InputError, match="otb needs energy"):  # ours, which the package cannot replace
        estimate("otb", inputs())


def test_a_broken_package_is_one_sentence_with_its_name_and_others_work():
    with pytest.raises(InputError, match=r"'broken' of package ours .*ours_for_test_missing"):
        estimate("broken", inputs())
    with pytest.raises(InputError, match="did you mean 'halved'"):
        estimate("halfed", inputs())
    assert estimate("rloo", inputs()).advantage.any()


def test_registered_task_and_estimator_train(tiny_config, tmp_path):
    config = replace(tiny_config, task="ours", root=tmp_path / "runs")
    config = replace(config, estimator=replace(config.estimator, name="halved"))
    assert make_task(config).name == "counting"
    assert [file.name for file in task_files(config)] == ["ours_for_test.py"]
    store = RunStore(train(config))
    assert "halved" in set(store.sql("select estimator from gradients")["estimator"])


def test_registered_format_is_recognised_where_others_are_broken(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"ask": "1+1=", "say": "2", "paid": 1}\n{"ask": "1+1=", "say": "3", "paid": 0}\n')
    NOTES.clear()
    path = import_rollouts(file, ImportConfig(root=tmp_path / "runs"))
    assert RunStore(path).info["config"]["source"]["format"] == "ours"
    assert any("format 'broken' of package ours" in note for note in NOTES)
    for name, fact in {"broken": "of package ours", "number": "is a str", "ourz": "'ours'"}.items():
        with pytest.raises(InputError, match=fact):
            find_source(file, name)
