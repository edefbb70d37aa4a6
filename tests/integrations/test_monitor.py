"""OTBMonitor beside unchanged trainers: nothing of the training changes, and every number by another road."""

import importlib
import math
import os
import random
import sys
import warnings
from collections import Counter
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import TrainerCallback

from otb_analysis.answers.pairs import learning_notes
from otb_analysis.answers.run import RunAnswers
from otb_analysis.checks.sampling import SamplingCheck
from otb_analysis.checks.sampling_report import sampling_report
from otb_analysis.errors import InputError
from otb_analysis.estimators import unproved_because
from otb_analysis.integrations.monitor import OTBMonitor
from otb_analysis.integrations.run_log import RecordConfig, RunLog
from otb_analysis.integrations.trl_run import not_plain, refuse_unreadable, stored_config
from otb_analysis.integrations.trl_states import CaughtStates
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.store import RunStore

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="no trl here; `make test-all` runs this in .venv-trl"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and its libraries' own
]


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("trl_runs")


@pytest.fixture
def watched(runs, tmp_path):
    """Train an unchanged trainer under the monitor; return it, the stored run, and its batches with true energies."""

    def train(**spec):
        trainer = runs.made(tmp_path, unchanged=True, monitor="run", **spec)
        generate, batches = trainer._generate_and_score_completions, []

        def keep(inputs):
            batch = generate(inputs)
            policy = deepcopy(trainer.accelerator.unwrap_model(trainer.model))
            kept = {name: x.clone().cpu() for name, x in batch.items() if isinstance(x, torch.Tensor)}
            batches.append(kept | {"energy": runs.energies(policy, batch, trainer.temperature)})
            return batch

        trainer._generate_and_score_completions = keep
        trainer.train()
        assert trainer._generate_and_score_completions is keep  # left as it was
        return trainer, RunStore(tmp_path / "run"), batches

    return train


def logged(trainer, name):
    return [logs[f"otb/{name}"] for logs in trainer.state.log_history if f"otb/{name}" in logs]


def said(record):
    return [str(one.message) for one in record if "OTBMonitor" in str(one.message)]


def training_of(runs, out, monitor, **spec):
    """Return everything that a training leaves behind: weights, what was logged, and the state of random numbers."""
    random.seed(3), np.random.seed(3)
    trainer = runs.made(out, unchanged=True, monitor=monitor, **spec)
    trainer.train()
    weights = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    lines = [{k: v for k, v in logs.items() if "otb/" not in k and "time" not in k and "per_second" not in k}
             for logs in trainer.state.log_history]  # fmt: skip
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    return weights, lines, states


REUSED = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 6}
OTHER = ({"rloo": True, "beta": 0.0}, {"gradients": 2}, {"peft": True, "beta": 0.1})


@pytest.mark.contract
@pytest.mark.parametrize("spec", [{}, {"unreadable": True}, REUSED, *OTHER])
def test_weights_logs_and_random_numbers_are_those_without_the_monitor(runs, tmp_path, monkeypatch, spec):
    if "unreadable" in spec:  # then a pass of ours reads the batch between the backward pass and the update
        monkeypatch.setattr(CaughtStates, "_found", lambda *_: 1 / 0)
        spec = {}
    plain, seen = (training_of(runs, tmp_path / name, name and "run", **spec) for name in ("", "seen"))
    for name, weight in plain[0].items():
        assert torch.equal(weight, seen[0][name]), name
    assert plain[1] == seen[1]
    assert torch.equal(plain[2][0], seen[2][0]) and plain[2][1:] == seen[2][1:]
    assert len(RunStore(tmp_path / "seen" / "run").complete_steps()) > 1


def test_a_run_says_what_measures_its_baselines_and_one_that_measured_says_which_is_quieter(watched):
    _, store, _ = watched(gradients=2)
    assert store.sql("select distinct step from gradients order by step")["step"].tolist() == [0, 2]
    assert set(store.sql("select distinct estimator from gradients")["estimator"]) >= {"otb_loo", "rloo", "grpo"}
    answers = RunAnswers(store)
    assert "measure=MeasureConfig" not in answers.lines[0]
    # The trainer's own generate drew the tokens, at a temperature alone: what is proved of baselines holds here.
    assert answers.proved.projection["rloo", "none"] == answers.proved.projection["otb_loo", "proxy"] == 1.0
    assert not any("plain" in line or "estimated" in line for line in answers.lines)


CONDITIONS = [
    ({}, ""),
    ({"top_p": 0.9}, "its sampling has the setting top_p"),
    ({"generation_kwargs": {"typical_p": 0.5}}, "its sampling has the setting typical_p"),
    ({"generation_kwargs": {"top_p": 1.0}}, ""),
    ({"num_iterations": 2}, "it updates more than once on a batch"),
    ({"steps_per_generation": 2}, "it updates more than once on a batch"),
    ({"mask_truncated_completions": True}, "answers cut at the limit are left out"),
    ({"model_dtype": "bfloat16"}, "it sampled in half precision"),
    ({"tools": True}, "a function of its own drew its rollouts"),
    ({"rloo": True, "beta": 0.0}, ""),
]


@pytest.mark.parametrize(("spec", "reason"), CONDITIONS, ids=lambda one: str(one)[:40])
def test_a_run_says_whether_its_tokens_are_plain_draws_of_the_policy(runs, tmp_path, spec, reason):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", **spec)
    assert not_plain(trainer) == reason
    stored = stored_config(trainer, RecordConfig(run="run", root=tmp_path), {"name": "grpo"}, "OTBMonitor")
    assert unproved_because(stored) == reason
    trainer.model.add_module("noise", torch.nn.Dropout(0.1))
    assert not_plain(trainer) == (reason or "it sampled with dropout")


def test_settings_of_the_checkpoint_that_change_what_is_drawn_are_seen_too(runs, tmp_path, monkeypatch):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run")
    monkeypatch.setattr(trainer.model.generation_config, "min_p", 0.3)  # TRL leaves it open
    assert not_plain(trainer) == "its sampling has the setting min_p"
    monkeypatch.setattr(trainer.model.generation_config, "min_p", None)
    monkeypatch.setattr(trainer.model.config, "attention_dropout", 0.3)
    assert not_plain(trainer) == "it sampled with dropout"
    monkeypatch.setattr(trainer.model.config, "attention_dropout", 0.0)
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "bf16")
    assert not_plain(trainer) == "it sampled in half precision"


def test_a_run_that_was_plain_does_not_go_on_with_another_sampler(runs, tmp_path, watched):
    _, store, _ = watched(save_strategy="steps", save_steps=3)
    kept = store.complete_steps()
    log = RunLog(
        RecordConfig(run="run", root=tmp_path, if_exists="resume"), "", {"not_plain": "it sampled with dropout"}
    )
    log.keep(kept[-1] + 1, lambda: None)
    with pytest.warns(RuntimeWarning, match="plainly before, .*with dropout"):
        log.release({})
    assert RunStore(tmp_path / "run").complete_steps() == kept


def test_nothing_is_proved_where_rollouts_without_a_reward_were_left_out(watched):
    _, store, _ = watched(gradients=1, rewards=("first_digit",))
    answers = RunAnswers(store)
    assert store.steps_df()["n_left_out"].sum() > 0 and answers.config["plain_sampling"]
    assert not answers.proved.projection
    assert any("since rollouts without a reward were left out" in line for line in answers.measured.reservations)


def test_a_run_without_gradients_says_what_measures_them(watched):
    _, store, _ = watched()
    assert "measure=MeasureConfig(exact=Schedule(), gradients" in RunAnswers(store).lines[0]


def by_hand(batch, reward, size):
    """Numbers of a batch from energies in float64, group by group and token by token."""
    mask, w = batch["completion_mask"].double().numpy(), batch["energy"].numpy()
    advantage = batch["advantages"].double().numpy()[:, None] * mask
    power = (advantage**2 * w).sum(axis=1)
    total = (w * mask).sum(axis=1)
    groups = [range(g, g + size) for g in range(0, len(mask), size)]
    dead = np.mean([len({reward[i] for i in rows}) == 1 for rows in groups])

    def centred(x):
        return np.concatenate([x[list(g)] - x[list(g)].mean() for g in groups if np.ptp(reward[list(g)]) > 0])

    alive = dead < 1
    dw, dr = (centred(total), centred(reward)) if alive else (np.ones(1), np.ones(1))
    raw, others = (reward[:, None] ** 2 * w * mask).sum(), 0.0
    for rows in groups:
        for i in rows:
            baseline = np.mean([reward[j] for j in rows if j != i])
            others += (reward[i] - baseline) ** 2 * (w * mask)[i].sum()
    return {
        "dead_groups": dead,
        "rho": (dw * dr).sum() / np.sqrt((dw**2).sum() * (dr**2).sum()) if alive else None,
        "rollout_share": power.max() / power.sum() if alive else None,
        "power_none": raw / others if alive else None,
    }


@pytest.mark.contract
def test_numbers_of_a_batch_are_those_by_hand(watched):
    trainer, store, batches = watched(max_steps=5)
    rewards = store.rollouts_df(columns=["step", "rollout", "reward"]).sort_values(["step", "rollout"])
    expected = [by_hand(b, rewards[rewards["step"] == k]["reward"].to_numpy(), 4) for k, b in enumerate(batches)]
    assert len({one["dead_groups"] for one in expected}) > 1
    for name in expected[0]:
        values = [one[name] for one in expected if one[name] is not None]
        np.testing.assert_allclose(logged(trainer, name), values, rtol=1e-4, err_msg=name)
    assert len(logged(trainer, "sampling_z")) == 5 and len(logged(trainer, "power_otb_loo")) > 2


@pytest.mark.contract
def test_stored_batches_are_those_that_trained(watched):
    trainer, store, batches = watched()
    assert store.info["status"] == "complete" and store.complete_steps() == [0, 1, 2]
    for step, batch in enumerate(batches):
        tokens = store.sql(f"select * from tokens where step = {step} order by rollout, t")
        inside = batch["completion_mask"].bool().numpy()
        np.testing.assert_array_equal(tokens["token_id"], batch["completion_ids"].numpy()[inside])
        np.testing.assert_allclose(tokens["energy_proxy"], batch["energy"].numpy()[inside], atol=1e-5)
        advantage = batch["advantages"].numpy()[:, None] * np.ones(inside.shape)
        np.testing.assert_allclose(tokens["advantage"], advantage[inside], atol=1e-6)
    norms = [logs["grad_norm"] for logs in trainer.state.log_history if "grad_norm" in logs]
    np.testing.assert_allclose(store.steps_df()["grad_norm"], norms)
    assert set(store.frame("sampling")["test"]) >= {"temperature", "probability"}


def test_a_batch_that_is_used_twice_is_one_step_and_our_pass_agrees_with_that_of_trl(watched, monkeypatch):
    monkeypatch.setattr(importlib.import_module("otb_analysis.integrations.monitor"), "_catchable", lambda _: False)
    spec = {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 8}
    trainer, store, batches = watched(**spec)
    assert len(batches) == 2 and store.complete_steps() == [0, 1]
    assert store.steps_df()["n_updates"].tolist() == [4, 4]
    assert "old_per_token_logps" in batches[0] and max(logged(trainer, "trainer_max")) < 1e-5


@pytest.fixture
def passes(monkeypatch):
    """Count how batches are scored: by a pass of ours, or from states that passes of the trainer made."""
    module, count = importlib.import_module("otb_analysis.integrations.monitor"), Counter()

    def counted(name):
        score = getattr(module, name)

        def scored(*args):
            count[name] += 1
            return score(*args)

        monkeypatch.setattr(module, name, scored)

    counted("forward_statistics"), counted("statistics_of_states")
    return count


def scale(model):
    """Let a model change its logits behind its output layer."""

    def scaled(module, inputs, output):
        if getattr(output, "logits", None) is not None:
            output.logits = 1.5 * output.logits

    model.register_forward_hook(scaled)


class SimpleCallback(TrainerCallback):
    """Remembers each update."""

    def __init__(self, updates):
        self.updates = updates

    def on_step_end(self, *args, **kwargs):
        self.updates.append(1)


TWICE = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 8}
SMALLER = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
SEVERAL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
"""Two batches an update."""


@pytest.mark.contract
@pytest.mark.parametrize("spec", [{}, SMALLER, TWICE, SEVERAL, *OTHER[::2], {"tools": True}])
def test_one_pass_of_ours_is_enough_where_those_of_the_trainer_give_the_same_numbers(watched, passes, spec):
    """Two rollouts of the first batch are scored both ways; energies of all are those of another road."""
    _, store, batches = watched(**spec)
    assert passes == {"forward_statistics": 1, "statistics_of_states": len(batches)} and len(batches) > 1
    assert store.complete_steps() == list(range(len(batches)))
    for step, batch in enumerate(batches if "tools" not in spec else ()):
        stored = store.sql(f"select energy_proxy from tokens where step = {step} order by rollout, t")
        inside = batch["completion_mask"].bool().numpy()
        np.testing.assert_allclose(stored["energy_proxy"], batch["energy"].numpy()[inside], atol=1e-5)


def test_passes_in_training_mode_are_not_read_where_they_draw(runs, tmp_path, passes):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run")
    trainer.model.model.layers[0].mlp.append_dropout = torch.nn.Dropout(0.1)
    trainer.train()
    assert passes == {"forward_statistics": 3}


def test_an_adapter_that_draws_without_a_layer_for_it_is_not_read_either(runs, tmp_path, passes):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", peft=True)
    trainer.model.peft_config["default"].module_dropout = 0.1
    trainer.train()
    assert passes == {"forward_statistics": 3}


@pytest.mark.parametrize("spec", [{"bf16": True}, {"model_dtype": "bfloat16"}])
def test_rounded_passes_of_the_trainer_are_read_too(runs, tmp_path, passes, spec):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", **spec)
    trainer.train()
    assert passes == {"forward_statistics": 1, "statistics_of_states": 3}
    assert RunStore(tmp_path / "run").complete_steps() == [0, 1, 2]


def test_a_first_batch_without_a_token_shows_nothing(runs, tmp_path, passes):
    """The model scales its logits; a batch whose tokens are all a tool's would agree with anything."""
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", tools=True)
    rollout, calls = trainer.rollout_func, []

    def tool_alone(prompts, of):
        calls.append(found := rollout(prompts, of))
        return found | ({"env_mask": [[0] * 5] * len(prompts)} if len(calls) == 1 else {})

    trainer.rollout_func = tool_alone
    scale(trainer.model)
    trainer.train()
    assert passes["forward_statistics"] == 3 and RunStore(tmp_path / "run").complete_steps() == [1, 2]


def test_the_comparison_is_made_again_once_adapters_are_no_longer_zero(runs, tmp_path, passes, monkeypatch):
    monkeypatch.setattr(importlib.import_module("otb_analysis.integrations.monitor"), "AGAIN", 3)
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", max_steps=5)
    layer, update = trainer.model.model.layers[0], []
    layer.register_forward_hook(lambda module, _, out: out + 0.1 * len(update) if module.training else out)
    trainer.add_callback(SimpleCallback(update))
    trainer.train()
    assert passes == {"forward_statistics": 5, "statistics_of_states": 3}  # two to compare, then three batches


@pytest.mark.contract
def test_a_rloo_batch_that_spans_updates_is_read_as_it_is_generated(watched, passes):
    _, store, batches = watched(rloo=True, beta=0.0, **TWICE)
    assert passes == {"forward_statistics": 1, "statistics_of_states": len(batches)} and len(batches) > 1
    for step, batch in enumerate(batches):
        stored = store.sql(f"select energy_proxy from tokens where step = {step} order by rollout, t")
        np.testing.assert_allclose(
            stored["energy_proxy"], batch["energy"].numpy()[batch["completion_mask"].bool().numpy()], atol=1e-5
        )


def test_an_error_of_the_training_leaves_no_states_behind(runs, tmp_path):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", **SMALLER)
    monitor = next(one for one in trainer.callback_handler.callbacks if isinstance(one, OTBMonitor))

    def interrupted(module, inputs):  # in the second half of a batch
        if module.training and monitor._caught._caught:
            raise KeyboardInterrupt

    hook = trainer.model.model.layers[0].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not monitor._caught._caught and not monitor._caught._open
    hook.remove()
    trainer.evaluate()
    assert not monitor._caught._caught


@pytest.mark.parametrize("spec", [{"gradients": 2}, {"gradients": 1, **TWICE}])
def test_no_states_wait_while_gradients_are_measured(runs, tmp_path, monkeypatch, spec):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", **spec)
    monitor = next(one for one in trainer.callback_handler.callbacks if isinstance(one, OTBMonitor))
    measure, kept = GradientMeasurer.measure, []

    def measured(*args, **kwargs):
        assert monitor._caught is not None
        kept.append(len(monitor._caught._caught))
        return measure(*args, **kwargs)

    monkeypatch.setattr(GradientMeasurer, "measure", measured)
    trainer.train()
    assert kept and not any(kept[:: spec["gradients"]])  # of the steps that were measured


def test_a_model_whose_logits_are_more_than_its_output_layer_is_read_by_passes_of_ours(runs, tmp_path, passes):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run")
    scale(trainer.model)
    trainer.train()
    assert passes == {"forward_statistics": 4, "statistics_of_states": 1}  # one of two rollouts, to compare
    assert RunStore(tmp_path / "run").complete_steps() == [0, 1, 2]


def test_an_optimizer_that_updates_in_the_backward_pass_has_its_batches_read_before_it(runs, tmp_path):
    catchable = importlib.import_module("otb_analysis.integrations.monitor")._catchable
    trainer = runs.made(tmp_path, unchanged=True)
    assert catchable(trainer)
    for name in ("lomo", "adalomo", "galore_adamw_layerwise"):
        trainer.args.optim = name
        assert not catchable(trainer)


def test_a_batch_that_is_no_text_leaves_no_states_behind(runs, tmp_path, monkeypatch):
    def refuse(monitor, batch):
        raise InputError("the batch holds images.")

    monkeypatch.setattr(OTBMonitor, "_rollouts_of", refuse)
    trainer, kept = runs.made(tmp_path, unchanged=True, monitor="run"), []
    found = CaughtStates._found
    monkeypatch.setattr(CaughtStates, "_found", lambda states, *args: kept.append(states) or found(states, *args))
    updates = SimpleCallback([])
    updates.on_step_end = lambda *args, **kwargs: updates.updates.append((kept[-1]._open, len(kept[-1]._caught)))
    trainer.add_callback(updates)
    with pytest.warns(RuntimeWarning, match="holds images"):
        trainer.train()
    assert updates.updates == [(False, 0)] * 3


@pytest.mark.contract
def test_where_a_pass_cannot_be_looked_at_one_of_ours_reads_that_batch_and_all_others(watched, passes, monkeypatch):
    keep, calls = CaughtStates._found, []

    def failing(states, *args):
        calls.append(args)
        return keep(states, *args) if len(calls) == 1 else 1 / 0

    monkeypatch.setattr(CaughtStates, "_found", failing)
    trainer, store, batches = watched(max_steps=4, learning_rate=0.1)
    assert store.complete_steps() == [0, 1, 2, 3] and passes["forward_statistics"] == 4
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)
    for step, batch in enumerate(batches):
        stored = store.sql(f"select energy_proxy from tokens where step = {step} order by rollout, t")
        inside = batch["completion_mask"].bool().numpy()
        np.testing.assert_allclose(stored["energy_proxy"], batch["energy"].numpy()[inside], atol=1e-5)


def test_where_time_is_short_the_sampling_check_looks_at_fewer_tokens(runs, tmp_path, monkeypatch):
    """With a clock on which a pass of ours takes 6 s, a whole check 1, what else is watched .05, and a batch 10."""
    clock, module = SimpleNamespace(now=0.0), importlib.import_module("otb_analysis.integrations.monitor")
    states = importlib.import_module("otb_analysis.integrations.trl_states")
    for one in (module, states):
        monkeypatch.setattr(one, "perf_counter", lambda: clock.now)
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", max_steps=40, share=0.07)
    generate, observe, write = trainer._generate_and_score_completions, SamplingCheck.observe, OTBMonitor._write
    seconds, spent = [], []

    def taking(price, call):
        def timed(*args):
            clock.now += price(*args)
            return call(*args)

        return timed

    def of_check(check, part):
        seconds.append(1.0 / check.every)
        return seconds[-1]

    def counted(monitor, *args):
        spent.append(monitor._spent)
        return write(monitor, *args)

    monkeypatch.setattr(SamplingCheck, "observe", taking(of_check, observe))
    monkeypatch.setattr(module, "forward_statistics", taking(lambda *args: 6.0, module.forward_statistics))
    monkeypatch.setattr(OTBMonitor, "_write", taking(lambda *args: 0.05, counted))
    trainer._generate_and_score_completions = taking(lambda *args: 10.0, generate)
    trainer.train()
    tokens = RunStore(tmp_path / "run").sql("SELECT DISTINCT step FROM sampling ORDER BY step")["step"].tolist()
    # The first batch and the pass of ours at the tenth make a debt. Until it is paid a position of eight is checked;
    # the tenth leaves one out. Then .07 × .8 × 10 s are paid for each: .05 s for the rest and every second token.
    assert seconds[0] == 1 and set(seconds[1:30]) == {0.125} and set(seconds[35:]) == {0.5}
    assert tokens == [*range(10), *range(11, 40)] and len(logged(trainer, "seconds")) == 39
    assert sum(seconds) + 39 * 0.05 + 2 * 6.0 <= 0.07 * 400
    assert all(before - spent[1] <= max(0.7 * n, 2.0) for n, before in zip(tokens[1:], spent[1:], strict=True))
    notes = learning_notes(RunAnswers(RunStore(tmp_path / "run")))
    assert notes == ["1 of 40 batches are missing: not watched, failed, or without a reward"]


def test_batches_beyond_the_share_of_time_are_left_out(watched, monkeypatch):
    monkeypatch.setattr(importlib.import_module("otb_analysis.integrations.monitor"), "FREE", 1e-9)
    trainer, store, batches = watched(share=0.0, max_steps=12)
    assert len(batches) == 12 and store.complete_steps() == [0, 1] and len(logged(trainer, "seconds")) == 2
    assert store.steps_df()["n_updates"].tolist() == [1, 1]  # those on the batch itself


@pytest.mark.contract
def test_reference_and_sampler_are_told_apart_from_the_trainer_before_truncation(runs, watched):
    def shifted(prompts, trainer):
        """Rollouts whose sampler recorded −1.5 at every token."""
        made = runs.with_tool(prompts, trainer) | {"logprobs": [[-1.5] * 5] * len(prompts)}
        return {name: made[name] for name in ("prompt_ids", "completion_ids", "logprobs")}

    trainer, _, batches = watched(rollouts=shifted, beta=0.1, peft=True, max_steps=2, learning_rate=0.1)
    for k, batch in enumerate(batches):
        logprob = torch.from_numpy(RunStore(trainer.args.output_dir + "/run").sql(
            f"select logprob from tokens where step = {k} order by rollout, t")["logprob"].to_numpy(float))  # fmt: skip
        d = (logprob + 1.5).numpy()
        assert logged(trainer, "sampler_rms")[k] == pytest.approx(np.sqrt((d**2).mean()), rel=1e-5)
        assert logged(trainer, "sampler_k3")[k] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-5)
        d = (batch["ref_per_token_logps"].double().flatten() - logprob).numpy()
        assert logged(trainer, "reference_k3")[k] == pytest.approx((np.exp(d) - 1 - d).mean(), rel=1e-3, abs=1e-9)


def test_a_sampler_that_keeps_two_tokens_is_told_with_its_cause(watched):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer, _, _ = watched(top_k=2, max_steps=4, per_device_train_batch_size=16)
    told = said(record)
    assert len(told) == 1 and "top-k of about 2" in told[0]
    assert max(logged(trainer, "sampling_z")) > 5 and 1.0 in logged(trainer, "sampling_alarm")


def test_unscorable_rollouts_are_counted_and_take_no_part(watched):
    trainer, store, _ = watched(rewards=("first_digit",))
    left = logged(trainer, "left_out")
    assert sum(left) > 0 and left == store.steps_df()["n_left_out"].tolist()


def test_tokens_of_tools_are_not_the_policys(watched):
    trainer, store, _ = watched(tools=True)
    assert store.sql("select count(*) filter (mask) as n, count(*) as m from tokens").iloc[0].tolist() == [72, 120]
    assert len(logged(trainer, "power_otb_loo")) > 0 and set(logged(trainer, "length")) == {3.0}


@pytest.mark.contract
def test_rloo_is_watched_too(watched):
    trainer, store, batches = watched(rloo=True, beta=0.0)
    assert store.info["config"]["estimator"]["name"] == "rloo" and len(batches) == 3
    assert len(logged(trainer, "rho")) > 0


def test_a_failure_is_told_once_and_training_goes_on(runs, tmp_path, monkeypatch):
    plain = training_of(runs, tmp_path / "plain", "")
    monkeypatch.setattr("otb_analysis.integrations.monitor.drafts_of", lambda *args: 1 / 0)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        seen = training_of(runs, tmp_path / "seen", "run")
    assert all(torch.equal(plain[0][name], x) for name, x in seen[0].items())
    first, last = said(record)
    assert "division by zero" in first and "goes on" in first and "3 of 3 batches" in last


def test_a_training_that_failed_and_begins_anew_is_watched_once(runs, tmp_path):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run")
    functions, trainer.reward_funcs = trainer.reward_funcs, [lambda **columns: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.reward_funcs = functions
    trainer.train()
    assert len(logged(trainer, "seconds")) == 3 and RunStore(tmp_path / "run").complete_steps() == [0, 1, 2]
    assert not {"_generate_and_score_completions", "_calculate_rewards"} & set(vars(trainer))


@pytest.mark.parametrize("if_exists", ["error", "replace", "resume"])
def test_each_training_of_a_trainer_ends_its_own_run(runs, tmp_path, if_exists):
    trainer = runs.made(tmp_path, unchanged=True)
    functions, calls = trainer.reward_funcs, []

    def fails(**columns):
        calls.append(1)
        return functions[0](**columns) if len(calls) < 3 else 1 / 0

    trainer.reward_funcs = [fails]
    trainer.add_callback(OTBMonitor(tmp_path / "run", share=math.inf, if_exists=if_exists))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.reward_funcs, trainer.args.max_steps = functions, 1
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer.train()
    store = RunStore(tmp_path / "run")
    ended = ("failed", [0, 1]) if if_exists == "error" else ("complete", [0])
    assert (store.info["status"], store.complete_steps()) == ended
    assert ["already exists" in text for text in said(record)] == [True] * (if_exists == "error")
    assert len(logged(trainer, "seconds")) == 1


@pytest.mark.contract
@pytest.mark.parametrize("rloo", [False, True])
def test_masked_truncated_rollouts_leave_out_what_they_would_decide(watched, rloo):
    spec = {"max_steps": 8, "per_device_train_batch_size": 16, "max_completion_length": 3}
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer, store, _ = watched(mask_truncated_completions=True, rloo=rloo, beta=0.0, **spec)
    assert said(record) == [] and len(store.complete_steps()) > 0
    assert max(logged(trainer, "left_out")) > 0 and len(logged(trainer, "token_top_share")) > 0
    for name in (*BY_REWARD, "length", "truncated", "reward_length_corr", "sampling_z", "sampling_alarm"):
        assert logged(trainer, name) == [], name
    steps = store.steps_df()
    assert steps[["n_truncated", "certificate_prob_z"]].isna().all(axis=None) and store.frame("sampling").empty
    assert store.sql("select count(baseline) as n from tokens")["n"].item() == 0


BY_REWARD = ("dead_groups", "rho", "power_none", "power_otb_loo", "power_sequence_optimal_loo")


@pytest.mark.parametrize(
    ("setting", "known"),
    [({}, False), ({"reward_clip_range": (0.0, 0.5)}, False), ({"normalize_advantages": True}, False),
     ({"beta": 0.0}, True)],
)  # fmt: skip
def test_rloo_with_another_reward_than_ours_leaves_out_what_the_reward_decides(watched, setting, known):
    spec = {"beta": 0.05 if not setting else 0.0, "learning_rate": 0.1} | setting
    trainer, store, _ = watched(rloo=True, peft=not setting, **spec)
    assert {name: bool(logged(trainer, name)) for name in BY_REWARD} == dict.fromkeys(BY_REWARD, known)
    tokens = store.sql("select reward, baseline, advantage from tokens where mask")
    assert tokens["baseline"].notna().all() if known else tokens["baseline"].isna().all()
    assert tokens["advantage"].notna().all() and len(logged(trainer, "sampling_z")) == 3


def test_rewards_normalized_one_by_one_turn_it_off_in_a_sentence(runs, tmp_path):
    trainer = runs.made(
        tmp_path, ("odd", "length"), unchanged=True, monitor="run", multi_objective_aggregation="normalize_then_sum"
    )
    with pytest.warns(RuntimeWarning, match="one reward per rollout"):
        trainer.train()
    assert trainer.state.global_step == 3 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("slow", ["store", "tracker"])
def test_writing_and_sending_count_as_time_of_watching(runs, tmp_path, monkeypatch, slow):
    """With a clock on which writing, or sending, takes 1,000 s, and everything else a second a batch."""
    clock, tracker, module = SimpleNamespace(now=0.0), Tracker(), "otb_analysis.integrations.monitor"
    monkeypatch.setattr(f"{module}.perf_counter", lambda: clock.now)
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", share=1.0, max_steps=6)
    generate, write = trainer._generate_and_score_completions, RunLog.release

    def timed(inputs):
        clock.now += 1
        return generate(inputs)

    def release(log, scalars):
        write(log, scalars)
        clock.now += 1000 * (slow == "store")

    tracker.log = lambda values, step: setattr(clock, "now", clock.now + 1000 * (slow == "tracker"))
    monkeypatch.setattr(RunLog, "release", release)
    monkeypatch.setattr(f"{module}.TRACKERS", ("paper",))
    monkeypatch.setitem(sys.modules, "paper", tracker)
    trainer._generate_and_score_completions, trainer.args.report_to = timed, ["paper"]
    trainer.train()
    assert len(logged(trainer, "seconds")) == 2


class TakesThePlace(TrainerCallback):
    """Puts a file where the run should be, once training has begun."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        self.path.write_text("not a directory")


@pytest.mark.parametrize("fault", ["batch", "store", "sampler"])
def test_warnings_that_are_errors_stop_nothing(runs, tmp_path, monkeypatch, caplog, fault):
    spec = {"top_k": 2, "max_steps": 4, "per_device_train_batch_size": 16} if fault == "sampler" else {}
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", **spec)
    if fault == "batch":
        monkeypatch.setattr("otb_analysis.integrations.monitor.drafts_of", lambda *args: 1 / 0)
    if fault == "store":
        trainer.add_callback(TakesThePlace(tmp_path / "run"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*(OTBMonitor|is missing from).*")
        trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    assert {"batch": "division by zero", "store": "is missing from", "sampler": "top-k"}[fault] in caplog.text


def test_a_store_that_cannot_be_written_is_told_once(runs, tmp_path):
    trainer = runs.made(tmp_path, unchanged=True, monitor="run")
    trainer.add_callback(TakesThePlace(tmp_path / "run"))
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer.train()
    assert sum("is missing from the run" in str(one.message) for one in record) == 1


@pytest.mark.parametrize("spec", [{"mask_truncated_completions": True, "max_completion_length": 1}, {}])
def test_a_batch_without_a_token_of_the_policy_is_counted(runs, tmp_path, spec):
    def nothing(prompts, trainer):
        return runs.with_tool(prompts, trainer) | {"env_mask": [[0] * 5] * len(prompts)}

    rollouts = None if spec else nothing
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", rollouts=rollouts, max_steps=2, **spec)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer.train()
    assert said(record) == [] and logged(trainer, "left_out") == [8.0, 8.0]


def test_a_trainer_without_a_method_is_named_and_goes_on():
    trainer = SimpleNamespace(args="these", callback_handler=None, _generate_and_score_completions=None)

    class Caller:
        args, callback_handler = "these", None

        def train(self, monitor):
            monitor.on_train_begin(self.args, None, None)
            monitor.on_train_end(self.args, None, None)

    with pytest.warns(RuntimeWarning, match="Caller of trl .*_generate_and_score_completions"):
        Caller().train(OTBMonitor())
    with pytest.warns(RuntimeWarning, match="no trainer calls it"):
        OTBMonitor().on_train_begin(trainer.args, None, None)


def test_a_run_that_exists_is_refused_before_training(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match=r"already exists in .*if_exists"):
        OTBMonitor(tmp_path / "run")


class Tracker:
    """Stands for the module of a tracker that takes tables."""

    def __init__(self, fails=False):
        self.tables, self.fails = [], fails

    def Table(self, dataframe):
        return dataframe

    def log(self, values, step=None):
        if self.fails:
            raise ConnectionError("the tracker is down")
        self.tables.append(values)


@pytest.mark.parametrize("fails", [False, True])
def test_tables_reach_a_tracker_and_one_that_is_down_stops_nothing(runs, tmp_path, monkeypatch, fails):
    tracker = Tracker(fails)
    monkeypatch.setitem(sys.modules, "paper", tracker)
    monkeypatch.setattr("otb_analysis.integrations.monitor.TRACKERS", ("paper",))  # TRL looks for those it knows
    trainer = runs.made(tmp_path, unchanged=True, monitor="run")
    trainer.args.report_to = ["paper"]
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer.train()
    assert trainer.state.global_step == 3 and len(said(record)) == fails
    if not fails:
        tables = {name: table for one in tracker.tables for name, table in one.items()}
        assert len(tables["otb/tokens"]) == 10 and len(tables["otb/rollouts"]) == 3
        assert tables["otb/tokens"]["share"].is_monotonic_decreasing and tables["otb/tokens"]["share"].iloc[0] > 0


def test_numbers_and_tables_reach_tensorboard_by_the_trainers_own_writer(runs, tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = runs.made(tmp_path, unchanged=True, monitor="run", report_to="tensorboard")
    trainer.train()
    found = events.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert len(found.Scalars("train/otb/dead_groups")) == 3
    tables = found.Tensors("otb/tokens/text_summary")
    assert [one.step for one in tables] == [1, 2, 3]
    lines = tables[0].tensor_proto.string_val[0].decode().splitlines()
    assert lines[0].startswith("| rollout | position | token |") and len(lines) == 12


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
IS_NEWEST = ".cache/trl-" not in os.environ.get("PYTHONPATH", "")
"""Whether this is the newest TRL: what takes minutes and meets little of TRL is tried with it alone."""
HAS_DEEPSPEED = (ROOT / ".cache" / "deepspeed").is_dir() and IS_NEWEST
ON_CPU = {"DS_ACCELERATOR": "cpu"}


def zero(stage):
    """Settings of DeepSpeed, with every weight shared out where the stage shares weights out."""
    shared = {"stage": stage, "stage3_param_persistence_threshold": 0}
    left = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"], "auto")
    return {"deepspeed": left | {"zero_optimization": shared, "zero_allow_untested_optimizer": True}}


SHARDED = {"fsdp2": (FSDP2, {}), "zero2": (ON_CPU, zero(2)), "zero3": (ON_CPU, zero(3))}


TOKENS = "select step, rollout, t, token, logprob, energy_proxy, advantage, grad_norm_sq from tokens order by 1, 2, 3"
GRADIENTS = "select step, estimator, energy_source, mean_norm_sq, variance from gradients order by 1, 2, 3"


@pytest.mark.parametrize(
    ("how", "peft"), [("fsdp2", False), ("fsdp2", True), ("zero3", False), ("zero3", True), ("zero2", False)]
)
def test_sharded_weights_give_the_run_of_whole_ones_and_measuring_them_changes_nothing(
    by_two_processes, tmp_path, how, peft
):
    """Some batches are measured and some are not; an update goes over two parts of a batch."""
    environment, settings = SHARDED[how]
    if settings and not HAS_DEEPSPEED:
        pytest.skip("no DeepSpeed here; `make test-trl` installs it")
    spec = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "peft": peft}
    measured = {**spec, "measure": 2, "gradients": 2}
    monitored = {**measured, "unchanged": True, "monitor": "run"}
    told = by_two_processes(tmp_path / "whole", **monitored)
    told += by_two_processes(tmp_path / "sharded", environment, **monitored, **settings)
    told += by_two_processes(tmp_path / "ours", environment, estimator="rloo", **measured, **settings)
    assert "OTBMonitor" not in told and "missing from" not in told
    by_two_processes(tmp_path / "unseen", environment, unchanged=True, **spec, **settings)
    stores = [RunStore(tmp_path / name / "run") for name in ("whole", "sharded", "ours")]
    whole, sharded, ours = ((store.sql(TOKENS), store.sql(GRADIENTS)) for store in stores)
    assert [set(table["step"]) for table in whole] == [{0, 1, 2}, {0, 2}]
    assert whole[0].groupby("step")["grad_norm_sq"].count().gt(20).tolist() == [True, False, True]
    for got, wanted in zip(sharded, whole, strict=True):
        pd.testing.assert_frame_equal(got, wanted, check_exact=False, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(ours, whole, strict=True):  # of the first step: then other advantages train
        keys = ["rollout", "t", "token"] if "token" in wanted else ["estimator", "energy_source"]
        first = [table[table["step"] == 0].drop(columns="advantage", errors="ignore") for table in (got, wanted)]
        both = first[0].merge(first[1], on=["step", *keys], suffixes=("", "_of_whole"))
        assert len(both) >= 0.9 * len(first[1])
        for name in set(first[0]) - {"step", *keys}:
            np.testing.assert_allclose(both[name], both[f"{name}_of_whole"], rtol=1e-5, atol=1e-5)
    seen, unseen = (torch.load(tmp_path / name / "calls-0.pt") for name in ("sharded", "unseen"))
    for one, other in zip(seen[:3], unseen[:3], strict=True):
        assert (one["loss"], one["grad_norm"], one["reward"]) == (other["loss"], other["grad_norm"], other["reward"])


@pytest.mark.skipif(not IS_NEWEST, reason="tried with the newest TRL alone")
@pytest.mark.parametrize(
    ("size", "how", "peft"), [(2, "fsdp2", False), (2, "zero3", False), (6, "fsdp2", False), (6, "fsdp2", True)]
)
def test_processes_without_a_prompt_and_half_precision_are_measured_too(by_two_processes, tmp_path, size, how, peft):
    """A single prompt leaves one process without any; with three, training computes in bfloat16."""
    environment, settings = SHARDED[how]
    if settings and not HAS_DEEPSPEED:
        pytest.skip("no DeepSpeed here; `make test-trl` installs it")
    spec = {"per_device_train_batch_size": size, "bf16": size == 6, "unchanged": True, "peft": peft}
    measured = {**spec, "measure": 1, "gradients": 1, "monitor": "run"}
    told = by_two_processes(tmp_path / "whole", **measured)
    told += by_two_processes(tmp_path / "sharded", environment, **measured, **settings)
    by_two_processes(tmp_path / "unseen", environment, **spec, **settings)
    assert "OTBMonitor" not in told and "missing from" not in told
    first = f"{GRADIENTS.partition('order')[0]} where step = 0 order by 1, 2, 3"
    whole, sharded = (RunStore(tmp_path / name / "run").sql(first) for name in ("whole", "sharded"))
    assert len(whole) > 20 and whole["mean_norm_sq"].notna().all()
    pd.testing.assert_frame_equal(sharded, whole, check_exact=False, rtol=0.05 if spec["bf16"] else 1e-5)
    seen, unseen = (torch.load(tmp_path / name / "calls-0.pt") for name in ("sharded", "unseen"))
    for one, other in zip(seen[:3], unseen[:3], strict=True):
        assert (one["loss"], one["grad_norm"], one["reward"]) == (other["loss"], other["grad_norm"], other["reward"])


@pytest.mark.skipif(not IS_NEWEST, reason="tried with the newest TRL alone")
def test_where_whole_weights_do_not_fit_on_one_process_no_other_waits_for_it(by_two_processes, tmp_path):
    spec = {"unchanged": True, "per_device_train_batch_size": 6}
    told = by_two_processes(tmp_path / "short", FSDP2, monitor="run", gradients=2, short=1, **spec)
    assert told.count("training goes on: all weights take") == told.count("so batch 0 and others go unmeasured") == 1
    steps = RunStore(tmp_path / "short" / "run").steps_df()
    assert steps["measurement_gaps"].tolist() == [1, 0, 1] and steps["entropy_mean"].notna().all()
    by_two_processes(tmp_path / "unseen", FSDP2, **spec)
    seen, unseen = (torch.load(tmp_path / name / "calls-0.pt") for name in ("short", "unseen"))
    assert [line["loss"] for line in seen[:3]] == [line["loss"] for line in unseen[:3]]


def test_another_way_to_share_out_weights_is_refused_by_name():
    trainer = SimpleNamespace(
        is_fsdp_enabled=True, is_deepspeed_enabled=False, accelerator=SimpleNamespace(is_fsdp2=False)
    )
    with pytest.raises(InputError, match="FSDP of version 1"):
        refuse_unreadable(trainer)


def test_two_processes_share_out_what_is_measured_and_training_is_as_without(by_two_processes, tmp_path):
    spec = {"per_device_train_batch_size": 6, "unchanged": True}
    for name, more, size in (("shared", {}, 2), ("alone", {"alone": True}, 1)):
        told = by_two_processes(tmp_path / name, monitor="run", gradients=2, **spec, **more)  # not every batch
        assert "OTBMonitor" not in told and told.count(f"processes that measure: {size}") == 2
    by_two_processes(tmp_path / "unseen", **spec)
    shared, alone = (RunStore(tmp_path / name / "run") for name in ("shared", "alone"))
    assert shared.steps_df()["measurement_gaps"].tolist() == [0, 0, 0]
    pd.testing.assert_frame_equal(shared.sql(GRADIENTS), alone.sql(GRADIENTS), rtol=1e-5)
    seen, unseen = (torch.load(tmp_path / name / "calls-0.pt") for name in ("shared", "unseen"))
    for one, other in zip(seen[:3], unseen[:3], strict=True):
        assert (one["loss"], one["grad_norm"], one["reward"]) == (other["loss"], other["grad_norm"], other["reward"])


def test_a_pass_that_fails_in_one_process_costs_both_one_batch(by_two_processes, tmp_path):
    told = by_two_processes(tmp_path, unchanged=True, monitor="run", per_device_train_batch_size=6, fails=1)
    assert "nothing on batch 0" in told and "no room" in told
    assert RunStore(tmp_path / "run").complete_steps() == [1, 2]


@pytest.mark.contract
def test_two_processes_make_one_run_with_groups_that_span_both(by_two_processes, runs, tmp_path):
    by_two_processes(tmp_path, unchanged=True, monitor="run", per_device_train_batch_size=6)
    logs = [line for line in torch.load(tmp_path / "calls-0.pt") if "otb/length" in line]
    store = RunStore(tmp_path / "run")
    assert store.info["status"] == "complete" and store.steps_df()["n_rollouts"].tolist() == [12, 12, 12]
    for step, line in enumerate(logs):
        rows = store.sql(
            'select rollout, any_value("group") as g, sum(energy_proxy * advantage * advantage) as power, '
            f"count(*) as length from tokens where step = {step} group by rollout order by rollout"
        )
        assert rows["g"].tolist() == np.repeat([0, 1, 2], 4).tolist()
        assert line["otb/length"] == rows["length"].mean()
        assert line.get("otb/rollout_share", 0.0) == pytest.approx(
            rows["power"].max() / rows["power"].sum() if rows["power"].sum() else 0.0, rel=1e-5
        )
    sampling = store.frame("sampling")
    tested = sampling[sampling["test"] == "probability"]  # by position, of both processes
    assert tested.groupby("step")["n_tokens"].sum().tolist() == store.steps_df()["n_tokens"].tolist()


def test_processes_may_look_at_different_tokens_and_the_last_batches_are_judged_together(by_two_processes, tmp_path):
    """One looks at every second token, the other at every third; of the alarm the first one's share counts."""
    spec = {"unchanged": True, "monitor": "run", "per_device_train_batch_size": 6}
    for name, more in (("some", {"rare": True}), ("all", {})):
        by_two_processes(tmp_path / name, **spec, **more)
    some, every = (torch.load(tmp_path / name / "calls-0.pt") for name in ("some", "all"))
    assert [line["loss"] for line in some[:3]] == [line["loss"] for line in every[:3]]
    part, whole = (RunStore(tmp_path / name / "run").frame("sampling") for name in ("some", "all"))
    tested = [table[table["test"] == "probability"].groupby("step")["n_tokens"].sum() for table in (part, whole)]
    assert (tested[0] / tested[1]).between(0.3, 0.6).all()
    logs = [line for line in some if "otb/sampling_z" in line]
    for step, line in enumerate(logs):  # two halves make up a whole batch
        z = sampling_report(part[part["step"].between(step - 1, step)].drop(columns="step")).z
        assert line["otb/sampling_z"] == pytest.approx(z)
