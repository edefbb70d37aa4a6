"""A run on a device that is not the CPU: no operation mixes its tensors with others, and its numbers are the CPU's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.config import (
    ContrastSchedule,
    CriticConfig,
    EstimatorConfig,
    LoraConfig,
    MeasureConfig,
    ObjectiveConfig,
    SampleConfig,
    SampledSchedule,
    Schedule,
    ScoreConfig,
)
from otb_analysis.recorded.score import score
from otb_analysis.rollouts.models import load_policy
from otb_analysis.store import RunStore
from otb_analysis.tasks import make_task
from otb_analysis.training.loop import train_step
from otb_analysis.training.setup import Trainer
from tests.second_device import Random, There, second_device

EVERY, SMALL = Schedule(every=1), SampleConfig(prompts=2, group_size=4, max_new_tokens=3)
CASES = {
    "fast, drawn tokens, head": {"measure": MeasureConfig(exact=Schedule(1, prompts=1), sampled=SampledSchedule(1))},
    "generic": {"measure": MeasureConfig(exact=EVERY, engine="generic", subgroups=())},
    "reference": {"measure": MeasureConfig(exact=EVERY, engine="reference", subgroups=())},
    "sketched Gram matrix": {"measure": MeasureConfig(exact=EVERY, gram="sketch")},
    "adapters": {"lora": LoraConfig(rank=2), "measure": MeasureConfig(exact=EVERY)},
    "contrast": {
        "sample": SampleConfig(prompts=12, group_size=6, max_new_tokens=4),
        "measure": MeasureConfig(exact=Schedule(), contrast=ContrastSchedule(1, steps=2, batch=8)),
    },
    "several updates, a critic of its own, a reference policy": {
        "critic": CriticConfig(kind="model"),
        "estimator": EstimatorConfig(name="otb", energy="exact"),
        "objective": ObjectiveConfig(epochs=2, minibatches=2, entropy_bonus=0.1, kl_coefficient=0.1, ratio="ppo"),
        "measure": MeasureConfig(exact=EVERY, subgroups=()),
    },
    "soft tokens": {
        "sample": replace(SMALL, soft=2),
        "critic": CriticConfig(enabled=False),
        "estimator": EstimatorConfig(name="rloo"),
        "measure": MeasureConfig(exact=EVERY, subgroups=()),
    },
}
COLUMNS = ("logprob", "energy_proxy", "entropy", "grad_norm_sq", "advantage", "contrast", "value")


def begun(config, device=None):
    """The state of a run whose model is on a device."""
    model, tokenizer = load_policy(config.model)
    if device is not None:
        model.to(device)
        model.tie_weights()
    return Trainer(config, model, tokenizer, make_task(config))


def column(tables, name):
    return np.ma.filled(np.ma.asarray(tables.tokens[name], dtype=float), np.nan)


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_run_on_another_device_records_the_same_numbers(tiny_config, one_thread, changes):
    config = replace(tiny_config, **{"sample": SMALL} | changes)
    here = begun(config)
    ours = train_step(here, 0)
    with second_device() as device:
        there = begun(config, device)
        theirs = train_step(there, 0)
        assert all(isinstance(p, There) for p in there.model.parameters())
    assert ours.steps["measurement_gaps"] == theirs.steps["measurement_gaps"] == 0
    assert theirs.steps["grad_norm"] == pytest.approx(ours.steps["grad_norm"], rel=1e-3) != 0
    assert list(ours.tokens["token_id"]) == list(theirs.tokens["token_id"])
    for name in (name for name in COLUMNS if name in ours.tokens):
        np.testing.assert_allclose(column(theirs, name), column(ours, name), rtol=2e-3, atol=2e-4, err_msg=name)
    for one, other in zip(here.model.parameters(), there.model.parameters(), strict=True):
        np.testing.assert_allclose(other.held.detach(), one.detach(), rtol=1e-3, atol=1e-5)
    if ours.gradients is not None:
        power = [np.array(tables.gradients["total_power"], float) for tables in (ours, theirs)]
        np.testing.assert_allclose(power[1], power[0], rtol=2e-3)


def test_a_checkpoint_keeps_the_random_state_of_the_device_and_restores_it_there(tiny_config, one_thread):
    with second_device() as device:
        trainer = begun(tiny_config, device)
        train_step(trainer, 0)
        state = trainer.state()
        assert set(state["random"]) == {"cpu", "meta"}
        Random.states.clear()
        again = begun(tiny_config, device)
        again.load_state(state)
        assert [torch.equal(x, state["random"]["meta"]) for x in Random.states] == [True]
        weights = [p.cpu() for p in again.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, (p.held for p in trainer.model.parameters()), strict=True))


def test_recorded_rollouts_are_scored_on_another_device(checkpoint, jsonl, simple, tmp_path, one_thread):
    measure = MeasureConfig(exact=EVERY, sampled=SampledSchedule(1), subgroups=())
    settings = {"rollouts": jsonl(simple()), "model": str(checkpoint), "measure": measure, "ended": "all"}
    score(ScoreConfig(run="here", root=tmp_path, **settings))
    with second_device() as device:
        model, tokenizer = load_policy(checkpoint)
        model.to(device)
        model.tie_weights()
        score(ScoreConfig(run="there", root=tmp_path, **settings), (model, tokenizer))
    here, there = (RunStore(tmp_path / name) for name in ("here", "there"))
    assert [run.info["machine"]["device"] for run in (here, there)] == ["cpu", "meta"]
    for name in ("logprob", "grad_norm_sq", "energy_proxy"):
        ours, theirs = (run.tokens_df()[name].to_numpy(float) for run in (here, there))
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-6)
    ours, theirs = (run.frame("sampling")["score"].to_numpy(float) for run in (here, there))
    np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-3)


def test_tensors_of_two_devices_are_not_mixed_silently():
    with second_device() as device:
        there = torch.ones(3, device=device)
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError):
            np.asarray(there.numpy())
        assert (there + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0, 2.0]
