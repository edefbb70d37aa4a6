"""A base install lacks the extras: what needs one says so by the extra's name, before anything is written."""

import sys
from dataclasses import replace

import pytest

from otb_analysis.config import LoraConfig, SampleConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import EXTRAS, require
from otb_analysis.processes import Processes
from otb_analysis.training.loop import train


@pytest.mark.parametrize(
    ("module", "changes", "sentence"),
    [
        (
            "peft",
            {"lora": LoraConfig(rank=2)},
            "peft is needed for lora.rank above 0; pip install {}.",
        ),
        (
            "math_verify",
            {"task": "math_jsonl"},
            "math-verify is needed for grading the task 'math_jsonl'; pip install {}.",
        ),
        (
            "vllm",
            {"sample": SampleConfig(engine="vllm")},
            "vllm is needed for sample.engine 'vllm'; pip install '.[vllm]' in a clone, 'FILE.whl[vllm]' from a wheel.",
        ),
    ],
)
def test_missing_package_is_asked_for_before_anything_is_written(
    tiny_config, tmp_path, monkeypatch, module, changes, sentence
):
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 40)
    sums = replace(tiny_config.math_jsonl, train=str(tmp_path / "sums.jsonl"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as caught:
        train(replace(tiny_config, run="bare", root=tmp_path / "runs", math_jsonl=sums, **changes))
    assert str(caught.value) == sentence.format("'.[train]' in a clone, 'FILE.whl[train]' from a wheel")
    assert not (tmp_path / "runs").exists()


def test_several_processes_without_accelerate_are_one_sentence(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(InputError, match=r"^accelerate is needed .*'\.\[train\]'"):
        Processes.joined(False)


def test_a_plain_run_needs_the_extra_torch_alone(tiny_config, tmp_path, monkeypatch):
    for module in (name for name, (_, extra) in EXTRAS.items() if extra != "torch"):
        monkeypatch.setitem(sys.modules, module, None)
    assert train(replace(tiny_config, run="plain", root=tmp_path)).is_dir()


def test_a_package_that_is_there_is_not_asked_for(monkeypatch):
    monkeypatch.setitem(EXTRAS, "json", ("json", "nothing"))
    require("json", "this test")
