"""What stops a run: one sentence with the step, run.json says failed, and earlier steps stay readable."""

import errno
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from otb_analysis.config import (
    CheckpointConfig,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    SmallModelConfig,
    WarmStartConfig,
    plain_config,
)
from otb_analysis.errors import InputError, Interrupted, NonFiniteError, StoreError
from otb_analysis.rollouts.models import load_policy
from otb_analysis.store import RunStore, writer
from otb_analysis.training import loop, setup
from otb_analysis.training.runtime import checkpoints
from otb_analysis.training.setup import Trainer
from otb_analysis.training.update import Objective

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def config(tiny_config, tmp_path):
    return replace(tiny_config, run="doomed", root=tmp_path, measure=MeasureConfig(exact=Schedule(0, 0)))


def failed(config, error, match):
    """Train, expect the error, and return the run as it was left."""
    with pytest.raises(error, match=match) as caught:
        loop.train(config)
    assert "\n" not in str(caught.value)
    store = RunStore(config.root / config.run)
    assert store.info["status"] == "failed"
    assert store.info["reason"] == str(caught.value)
    assert not (store.path / "model").exists()
    return store


def poison_after(monkeypatch, step, poison):
    """Spoil the policy after some updates."""
    update, done = Trainer.update, []

    def spoiling(self, batch, forward):
        scalars = update(self, batch, forward)
        done.append(1)
        if len(done) == step:
            poison(self)
        return scalars

    monkeypatch.setattr(Trainer, "update", spoiling)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_stops_the_next_step_by_name(config, monkeypatch, value):
    def poison(trainer):
        with torch.no_grad():
            trainer.model.model.norm.weight[3] = value

    poison_after(monkeypatch, 2, poison)
    quiet = replace(config, evaluate=EvaluateConfig(every=0))
    store = failed(
        quiet, NonFiniteError, r"^step 2: logits of rollout 0 \(group 0, prompt '.*', turn 0\) are not finite"
    )
    assert store.complete_steps() == [0, 1]
    assert store.tokens_df()["step"].max() == 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_reward_that_is_not_finite_stops_its_step_by_name(config, monkeypatch, value):
    from otb_analysis.tasks import TASKS

    task = TASKS["half"](config)
    ninth = task.prompt("train", 9)  # of 4 prompts a step, the second of step 2

    class Spoiled(TASKS["half"]):
        def reward(self, prompt, turns):
            return [{"odd": value}] if prompt.id == ninth.id else super().reward(prompt, turns)

    monkeypatch.setitem(TASKS, "half", Spoiled)
    store = failed(
        config, NonFiniteError, r"^step 2: reward part 'odd' of rollout 3 \(group 1, prompt '.*'\) is (nan|-inf)"
    )
    assert store.complete_steps() == [0, 1]


def test_reward_that_is_not_finite_in_an_evaluation_stops_the_run(config, monkeypatch):
    from otb_analysis.tasks import TASKS

    class Spoiled(TASKS["half"]):
        def prompt(self, split, index):
            prompt = super().prompt(split, index)
            return replace(prompt, answer="spoiled") if split == "heldout" else prompt

        def reward(self, prompt, turns):
            return [{"odd": float("nan")}] if prompt.answer == "spoiled" else super().reward(prompt, turns)

    monkeypatch.setitem(TASKS, "half", Spoiled)
    failed(config, NonFiniteError, r"^step 0: reward part 'odd' of rollout 0")


def test_loss_that_is_not_finite_names_step_and_rollout(config, monkeypatch):
    from otb_analysis.tasks import TASKS

    class Huge(TASKS["half"]):
        """Finite in float64, infinite in the policy's float32."""

        def reward(self, prompt, turns):
            return [{"odd": 1e300}]

    monkeypatch.setitem(TASKS, "half", Huge)
    quiet = replace(config, estimator=EstimatorConfig(name="none"), critic=CriticConfig(enabled=False))
    store = failed(
        quiet, NonFiniteError, r"^step 0: the loss of rollout 0, token \d+, is inf; scale the task's rewards down"
    )
    assert store.complete_steps() == []


def test_nan_loss_names_step_rollout_and_token_and_leaves_the_last_checkpoint(config, monkeypatch, one_thread):
    """Estimator, reward and logits are fine; one coefficient of step 3 is not."""
    longer = replace(config, optimize=replace(config.optimize, steps=5), checkpoint=CheckpointConfig(every=2))
    whole = loop.train(replace(longer, root=config.root / "whole"))
    real = Objective.coefficients

    def spoiled(self, batch, logprob):
        found = real(self, batch, logprob)
        calls.append(1)
        if len(calls) == 4:  # one in each step
            rows, columns = np.nonzero(batch.mask)
            place.extend((int(rows[-1]), int(columns[-1])))
            found[0][rows[-1], columns[-1]] = np.nan
        return found

    calls, place = [], []
    monkeypatch.setattr(Objective, "coefficients", spoiled)
    store = failed(longer, NonFiniteError, r"^step 3: the loss of rollout \d+, token \d+, is nan; scale")
    assert f"rollout {place[0]}, token {place[1]}," in store.info["reason"]
    assert store.complete_steps() == [0, 1, 2]
    assert [c.step for c in checkpoints(store.path)] == [2]
    monkeypatch.undo()
    again = loop.train(replace(longer, if_exists="resume"))
    first, second = (load_policy(path / "model")[0].state_dict() for path in (whole, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradient_that_is_not_finite_changes_nothing(trainer):
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    weight = next(trainer.model.parameters())
    (weight * 0.0).sum().sqrt().backward()  # 0, with an infinite derivative times 0: NaN
    with pytest.raises(NonFiniteError, match=r"grad_norm is nan; .*learning_rate"):
        trainer.optimizer.step()
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())


def test_existing_run_is_refused_and_nothing_of_it_is_lost(otb_run, tiny_config):
    before = {p: p.stat().st_mtime_ns for p in otb_run.rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=r"run 'otb' already exists in .*replace") as caught:
        loop.train(replace(tiny_config, run="otb", root=otb_run.parent))
    assert "\n" not in str(caught.value)
    assert {p: p.stat().st_mtime_ns for p in otb_run.rglob("*") if p.is_file()} == before


def test_replaced_run_is_the_new_one(config):
    short = replace(config, optimize=OptimizeConfig(steps=1))
    loop.train(short)
    loop.train(replace(short, if_exists="replace", seed=1))
    assert RunStore(config.root / "doomed").info["seed"] == 1


def _no_space(*args, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_stops_the_run_and_keeps_the_steps_before(config, monkeypatch):
    real = writer.atomic_file

    @contextmanager
    def full(path):
        if path.parent.name == "tokens" and "part-00000002" in path.name:
            _no_space()
        with real(path) as file:
            yield file

    monkeypatch.setattr(writer, "atomic_file", full)
    store = failed(config, StoreError, r"cannot write step 2 to .*No space left on device.*steps up to 1 are complete")
    assert store.complete_steps() == [0, 1]
    assert len(store.rollouts_df()) == 2 * 12


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")])
def test_model_that_cannot_be_saved_is_a_sentence_and_every_step_is_kept(config, monkeypatch, error):
    def refuse(*args, **named):
        raise error

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", refuse)
    store = failed(
        config, StoreError, r"cannot write the trained model to .*(No space left|I/O error).*free some space\.$"
    )
    assert store.complete_steps() == [0, 1, 2]
    assert not list(store.path.glob(".model*"))


def test_interrupt_is_recorded_and_goes_on(config):
    def bar(done, total, text):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        loop.train(config, bar)
    store = RunStore(config.root / "doomed")
    assert (store.info["status"], store.info["reason"]) == ("failed", "interrupted; its complete steps can be read.")
    assert store.complete_steps() == [0, 1]
    assert str(stopped.value) == (
        f"stopped after step 1; 2 steps can be read in {store.path}; it has no checkpoint yet "
        "(checkpoint.every is 50), so --if-exists resume begins anew."
    )


def test_interrupt_names_the_step_that_resuming_goes_on_after(config):
    def bar(done, total, text):
        if done == 3:
            raise KeyboardInterrupt

    own = replace(config, checkpoint=CheckpointConfig(every=2), optimize=replace(config.optimize, steps=4))
    with pytest.raises(Interrupted, match=r"^stopped after step 2; 3 steps .*after step 1,"):
        loop.train(own, bar)


def test_interrupt_before_a_step_is_complete_says_that_nothing_is_kept(config, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train_step", interrupted)
    with pytest.raises(Interrupted, match=r"^stopped before the first step .*doomed holds nothing"):
        loop.train(config)


def test_interrupt_during_the_warm_start_writes_nothing(config, monkeypatch, tmp_path):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "warm_started", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        loop.train(replace(config, model="", root=tmp_path / "none"))
    assert str(stopped.value) == "" and not (tmp_path / "none").exists()


def test_progress_that_fails_does_not_end_the_run(config):
    def broken(done, total, text):
        raise ZeroDivisionError("no screen")

    with pytest.warns(RuntimeWarning, match="no longer shown: no screen"):
        path = loop.train(config, broken)
    assert RunStore(path).info["status"] == "complete"


def test_bug_is_recorded_with_its_type_and_goes_on(config, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(loop, "step_columns", broken)
    with pytest.raises(ZeroDivisionError):
        loop.train(config)
    assert RunStore(config.root / "doomed").info["reason"] == "ZeroDivisionError: by zero"


FULL = """
import resource, signal, sys
from otb_analysis.commands.cli import main
from otb_analysis.training import loop, setup

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
step = loop.train_step

def limited(trainer, k):
    if k == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
    return step(trainer, k)

loop.train_step = limited
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_system_that_refuses_to_write_more_ends_otb_train_with_a_sentence(checkpoint, tmp_path):
    words = f"train --root {tmp_path} --run full --model {checkpoint} --sample.prompts 4 --sample.group-size 2 "
    words += "--sample.max-new-tokens 8 --optimize.steps 3 --measure.exact.every 0 --evaluate.every 0"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), *words.split()],
        env=environment,
        cwd=tmp_path,  # outside of any repository, whose diff would be part of run.json
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "otb: cannot write step 1 to" in done.stderr.splitlines()[-1]
    assert "File too large" in done.stderr
    store = RunStore(tmp_path / "full")
    assert store.complete_steps() == [0]
    assert store.info["status"] == "failed"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"task": "chain_sun"}, "did you mean 'chain_sum'"),
        ({"estimator": EstimatorConfig(name="otbb")}, "did you mean 'otb'"),
        ({"estimator": EstimatorConfig(name="position_optimal")}, "needs position_baseline; training cannot provide"),
        ({"estimator": EstimatorConfig(name="otb", options={"tale": "zero"})}, "did you mean 'tail'"),
        ({"estimator": EstimatorConfig(name="otb", options={"tail": "gruop"})}, "choose own_return, group or zero"),
        ({"estimator": EstimatorConfig(name="rloo", options={"tail": "zero"})}, "it has no options"),
        ({"estimator": EstimatorConfig(name="energy_ema", options={"decay": "often"})}, "'often'; pass a float"),
        ({"estimator": EstimatorConfig(name="value"), "critic": CriticConfig(enabled=False)}, "set critic.enabled"),
        ({"sample": SampleConfig(prompts=0)}, "sample.prompts is 0"),
        ({"sample": SampleConfig(temperature=float("nan"))}, "sample.temperature is nan"),
        ({"optimize": OptimizeConfig(learning_rate=float("inf"))}, "optimize.learning_rate is inf"),
        ({"optimize": OptimizeConfig(max_grad_norm=-1.0)}, "optimize.max_grad_norm is -1"),
        ({"optimize": OptimizeConfig(weight_decay=-0.1)}, "optimize.weight_decay is -0.1"),
        ({"evaluate": EvaluateConfig(prompts=0)}, "evaluate.prompts is 0"),
        ({"evaluate": EvaluateConfig(samples=0)}, "evaluate.samples is 0"),
        ({"critic": CriticConfig(width=0)}, "critic.width is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"measure": MeasureConfig(scope="no_such_layer")}, "scope 'no_such_layer' matches no parameter"),
        ({"warm_start": WarmStartConfig(success_low=0.9, success_high=0.5)}, "success_low is 0.9"),
        ({"model": "", "small_model": SmallModelConfig(width=30)}, "small_model.width is 30"),
        ({"model": "nowhere"}, "model directory nowhere does not exist"),
    ],
)
def test_configuration_that_cannot_work_is_refused_before_anything_is_written(config, changes, named, monkeypatch):
    monkeypatch.chdir(config.root)
    with pytest.raises(InputError) as caught:
        loop.train(replace(config, **changes))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(config.root.iterdir())


def test_plain_config_can_be_written_and_read_as_json(config):
    import json

    plain = plain_config(config)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["root"] == str(config.root)
    assert np.isfinite(plain["optimize"]["learning_rate"])
