"""A run that was stopped goes on bit for bit: same rollouts, same parameters as the run that was not."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from otb_analysis.config import (
    ChainSumConfig,
    CheckpointConfig,
    CriticConfig,
    EstimatorConfig,
    LoraConfig,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    Schedule,
    plain_config,
)
from otb_analysis.errors import InputError, StoreError
from otb_analysis.rollouts.models import load_policy
from otb_analysis.store import RunStore, RunWriter
from otb_analysis.training.loop import train
from otb_analysis.training.runtime import checkpoints
from otb_analysis.training.setup import refuse_other_configuration

STEPS = OptimizeConfig(steps=5, learning_rate=0.01)


class Stop(BaseException):
    """Stands for whatever ends a process."""


def interrupted(config, after):
    """Train, and fall over once `after` steps are stored."""

    def bar(done, total, text):
        if done == after:
            raise Stop

    with pytest.raises(Stop):
        train(config, bar)


def assert_same_run(a, b):
    """Everything on disk but the clock is equal, and so are the final weights."""
    for table in ("tokens", "rollouts", "gradients", "grams", "steps"):
        frames = [RunStore(path).sql(f"select * from {table} order by all") for path in (a, b)]
        clock = [c for c in frames[0] if c.startswith("seconds_")]
        pd.testing.assert_frame_equal(*(f.drop(columns=clock) for f in frames), check_exact=True)
    first, second = (load_policy(path / "model")[0].state_dict() for path in (a, b))
    assert all(torch.equal(first[name], second[name]) for name in first)


VARIANTS = {
    "plain": {},
    "off_policy": {"objective": ObjectiveConfig(ratio="ppo", minibatches=2, epochs=2, staleness=2)},
    "divergence": {"objective": ObjectiveConfig(kl_coefficient=0.1, entropy_bonus=0.01)},
    "adapters": {"lora": LoraConfig(rank=2)},
    # `value` trains on what the critic says, so the policy shows it when the critic does not go on as it was.
    "critic_head": {
        "critic": CriticConfig(width=8, updates=2, target="gae"),
        "estimator": EstimatorConfig(name="value", options={"decay": "0.95"}),
    },
    "critic_model": {
        "critic": CriticConfig(kind="model", updates=1, target="tvm"),
        "estimator": EstimatorConfig(name="tvm"),
    },
    # The advantages after the checkpoint show whether the sums of the steps before it came back.
    "memory": {"estimator": EstimatorConfig(name="energy_regression", options={"memory": "0.9"})},
    "all_rollouts": {"estimator": EstimatorConfig(name="ebpo")},
    # A hundred prompts, of which steps after the checkpoints meet one and two from before them
    "prompts": {
        "estimator": EstimatorConfig(name="dbb_loo"),
        "chain_sum": ChainSumConfig(terms_min=2, terms_max=2, largest=10),
    },
    "schedule": {"optimize": replace(STEPS, schedule="cosine", warmup_steps=2)},
}


# Of two steps a checkpoint: one stop before the first, the others one step and right behind one.
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "after"), [*((name, 3) for name in VARIANTS), ("plain", 1), ("plain", 4)])
def test_resume_is_bit_for_bit_the_uninterrupted_run(tiny_config, tmp_path, one_thread, variant, after):
    own = {"optimize": STEPS, "checkpoint": CheckpointConfig(every=2)} | VARIANTS[variant]
    config = replace(tiny_config, run="run", **own)
    whole = train(replace(config, root=tmp_path / "whole"))
    broken = replace(config, root=tmp_path / "broken")
    interrupted(broken, after)
    again = train(replace(broken, if_exists="resume"))
    assert_same_run(whole, again)
    info = RunStore(again).info
    assert info["status"] == "complete"
    assert info["resumed"][0]["from_step"] == 2 * (after // 2)


def test_resume_without_a_run_begins_one(tiny_config, tmp_path):
    path = train(replace(tiny_config, run="new", root=tmp_path, if_exists="resume"))
    assert RunStore(path).complete_steps() == [0, 1, 2]


def test_resume_goes_on_to_more_steps_than_first_asked_for(tiny_config, tmp_path, one_thread):
    config = replace(tiny_config, run="run", optimize=STEPS, checkpoint=CheckpointConfig(every=2))
    whole = train(replace(config, root=tmp_path / "whole"))
    short = replace(config, root=tmp_path / "short", optimize=replace(STEPS, steps=3))
    train(short)
    longer = train(replace(short, optimize=STEPS, if_exists="resume"))
    assert RunStore(longer).complete_steps() == [0, 1, 2, 3, 4]
    first, second = (load_policy(path / "model")[0].state_dict() for path in (whole, longer))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resume_with_another_configuration_is_refused_and_changes_nothing(tiny_config, tmp_path):
    config = replace(tiny_config, run="run", root=tmp_path)
    path = train(config)
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    other = replace(config, if_exists="resume", optimize=replace(config.optimize, learning_rate=0.5))
    with pytest.raises(InputError, match=r"optimize.learning_rate is 0.5 but run 'run'") as caught:
        train(other)
    assert "\n" not in str(caught.value)
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()} == before


def test_a_setting_that_is_newer_than_the_run_had_its_default_there(tiny_config, tmp_path):
    config = replace(tiny_config, run="run", root=tmp_path)
    file = RunWriter.create(tmp_path, "run", plain_config(config)).path / "run.json"
    info = json.loads(file.read_text())
    del info["config"]["sample"]["filter"], info["checksum"]
    file.write_text(json.dumps(info))
    refuse_other_configuration(config)
    with pytest.raises(InputError, match=r"sample.filter is 'dynamic' .*'none'"):
        refuse_other_configuration(replace(config, sample=replace(config.sample, filter="dynamic")))


def test_resume_from_a_damaged_checkpoint_names_the_file(tiny_config, tmp_path):
    config = replace(tiny_config, run="run", root=tmp_path, checkpoint=CheckpointConfig(every=1, keep=2))
    path = train(config)
    newest = checkpoints(path)[-1].path
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(StoreError, match=rf"{newest.name} cannot be read .*delete it"):
        train(replace(config, if_exists="resume"))
    newest.unlink()
    assert RunStore(train(replace(config, if_exists="resume"))).info["status"] == "complete"


def test_only_the_newest_checkpoints_stay(tiny_config, tmp_path):
    config = replace(
        tiny_config, run="run", root=tmp_path, optimize=STEPS, checkpoint=CheckpointConfig(every=1, keep=2)
    )
    assert [c.step for c in checkpoints(train(config))] == [4, 5]


@pytest.mark.slow
def test_full_disk_while_a_checkpoint_is_written_leaves_the_one_before(tiny_config, tmp_path, monkeypatch, one_thread):
    config = replace(tiny_config, run="run", optimize=STEPS, checkpoint=CheckpointConfig(every=1))
    whole = train(replace(config, root=tmp_path / "whole"))
    real, broken = torch.save, replace(config, root=tmp_path / "broken")

    def full(state, file):
        if state["batch"] == 3:
            raise OSError(28, "No space left on device")
        real(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StoreError, match=r"checkpoint after step 2 .*No space left"):
        train(broken)
    assert [c.step for c in checkpoints(tmp_path / "broken" / "run")] == [2]
    monkeypatch.setattr(torch, "save", real)
    assert_same_run(whole, train(replace(broken, if_exists="resume")))


@pytest.mark.slow
def test_budgeted_run_trains_as_one_that_measures_nothing_and_goes_on_with_its_plan(tiny_config, tmp_path, one_thread):
    # What is measured follows from the clock, so only the training is bit for bit the same.
    quiet = replace(
        tiny_config,
        root=tmp_path,
        optimize=STEPS,
        measure=MeasureConfig(exact=Schedule()),
        checkpoint=CheckpointConfig(2),
    )
    budgeted = replace(quiet, measure=MeasureConfig(budget=1e6))  # a budget that pays for everything
    plain, watched, stopped = (replace(quiet, run="plain"), *(replace(budgeted, run=n) for n in ("whole", "stopped")))
    train(plain), train(watched), interrupted(stopped, 3)
    train(replace(stopped, if_exists="resume"))
    models = [load_policy(quiet.root / run / "model")[0].state_dict() for run in ("plain", "whole", "stopped")]
    assert all(torch.equal(models[0][name], other[name]) for name in models[0] for other in models[1:])
    for run in ("whole", "stopped"):
        measured = RunStore(quiet.root / run).steps_df()["n_measured_prompts"]
        assert (measured == tiny_config.sample.prompts).all()
