"""OTBMonitor beside unchanged trainers: nothing of the training changes, and every number by another road."""

import importlib
import json
import os
import random
import subprocess
import sys
import warnings
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from otb_analysis.answers.run import RunAnswers
from otb_analysis.errors import InputError
from otb_analysis.integrations.monitor import OTBMonitor
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
            kept = {name: x.clone() for name, x in batch.items() if isinstance(x, torch.Tensor)}
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


@pytest.mark.parametrize("spec", [{}, REUSED, *OTHER])
def test_weights_logs_and_random_numbers_are_those_without_the_monitor(runs, tmp_path, spec):
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
    assert "measure=MeasureConfig" not in RunAnswers(store).lines[0]


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


def test_numbers_of_a_batch_are_those_by_hand(watched):
    trainer, store, batches = watched(max_steps=5)
    rewards = store.rollouts_df(columns=["step", "rollout", "reward"]).sort_values(["step", "rollout"])
    expected = [by_hand(b, rewards[rewards["step"] == k]["reward"].to_numpy(), 4) for k, b in enumerate(batches)]
    assert len({one["dead_groups"] for one in expected}) > 1
    for name in expected[0]:
        values = [one[name] for one in expected if one[name] is not None]
        np.testing.assert_allclose(logged(trainer, name), values, rtol=1e-4, err_msg=name)
    assert len(logged(trainer, "sampling_z")) == 5 and len(logged(trainer, "power_otb_loo")) > 2


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


def test_a_batch_that_is_used_twice_is_one_step_and_our_pass_agrees_with_that_of_trl(watched):
    spec = {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 8}
    trainer, store, batches = watched(**spec)
    assert len(batches) == 2 and store.complete_steps() == [0, 1]
    assert store.steps_df()["n_updates"].tolist() == [4, 4]
    assert "old_per_token_logps" in batches[0] and max(logged(trainer, "trainer_max")) < 1e-5


def test_batches_beyond_the_share_of_time_are_left_out(watched):
    trainer, store, batches = watched(share=0.0, max_steps=12)
    assert len(batches) == 12 and store.complete_steps() == list(range(10)) and len(logged(trainer, "seconds")) == 10
    assert store.steps_df()["n_updates"].tolist() == [1] * 10  # those on the batch itself


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


def test_a_trainer_without_a_method_is_named_and_goes_on():
    trainer = SimpleNamespace(args="these", callback_handler=None, _generate_and_score_completions=None)

    class Caller:
        args, callback_handler = "these", None

        def train(self, monitor):
            monitor.on_train_begin(self.args, None, None)
            monitor.on_train_end(self.args, None, None)

    with pytest.warns(RuntimeWarning, match="Caller has no _generate_and_score_completions"):
        Caller().train(OTBMonitor())
    with pytest.warns(RuntimeWarning, match="no trainer calls it"):
        OTBMonitor().on_train_begin(trainer.args, None, None)


def test_a_run_that_exists_is_refused_before_training(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match="already exists"):
        OTBMonitor(tmp_path / "run")


class Tracker:
    """Stands for the module of a tracker that takes tables."""

    def __init__(self, fails=False):
        self.tables, self.fails = [], fails

    def Table(self, dataframe):
        return dataframe

    def log(self, values):
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


def test_two_processes_make_one_run_with_groups_that_span_both(runs, tmp_path):
    spec = {"out": str(tmp_path), "unchanged": True, "monitor": "run", "per_device_train_batch_size": 6}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    script = str(Path(__file__).parent / "trl_runs.py")
    done = subprocess.run(
        [*command, script, json.dumps(spec)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
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
