"""The committed example of a training configuration is one, and runs."""

import tomllib
from dataclasses import replace
from pathlib import Path

from otb_analysis.commands.cli import from_toml, main
from otb_analysis.config import TrainConfig
from otb_analysis.store import RunStore

EXAMPLE = Path(__file__).parent.parent / "docs" / "train.toml"


def test_example_fills_the_configuration_with_what_it_says():
    config, told = from_toml(TrainConfig, EXAMPLE), tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert config.run_name == told["run"]
    assert (config.evaluate.samples, config.checkpoint.every) == (told["evaluate"]["samples"], 20)
    assert replace(config, run="", if_exists="error") != TrainConfig()


def test_example_runs_tiny_and_prints_what_was_learned(checkpoint, tmp_path, capsys):
    small = (
        "--sample.prompts 2 --sample.group-size 2 --sample.max-new-tokens 6 --optimize.steps 2 --evaluate.prompts 16"
    )
    words = f"train --config {EXAMPLE} --root {tmp_path} --model {checkpoint} {small} --trackers tensorboard"
    assert main(words.split()) == 0
    path = tmp_path / "chain-sum-otb"
    store = RunStore(path)
    assert store.complete_steps() == [0, 1]
    assert store.steps_df()["heldout_samples"].tolist() == [4, 4]
    assert store.steps_df()["tracker_gaps"].tolist() == [0, 0]
    printed = capsys.readouterr().out
    assert "what they learned" in printed and "pass@4" in printed
    assert f"{path} is complete" in printed.replace("\n", "")


def test_the_same_command_again_goes_on_where_the_run_is(checkpoint, tmp_path):
    small = (
        "--sample.prompts 2 --sample.group-size 2 --sample.max-new-tokens 6 --evaluate.every 0 --measure.exact.every 0"
    )
    words = f"train --config {EXAMPLE} --root {tmp_path} --model {checkpoint} {small}"
    assert main([*words.split(), "--optimize.steps", "1"]) == 0
    assert main([*words.split(), "--optimize.steps", "2"]) == 0
    store = RunStore(tmp_path / "chain-sum-otb")
    assert store.complete_steps() == [0, 1]
    assert store.info["resumed"][0]["from_step"] == 1
