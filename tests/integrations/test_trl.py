"""The contract with TRL: real training steps, whose per-token advantages are recomputed from rewards and energies."""

import importlib
import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError
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
def trained(runs, tmp_path):
    """Train in this process; return the trainer, which kept its batches, and the stored run."""

    def train(**spec):
        trainer = runs.made(tmp_path, **spec)
        trainer.train()
        return trainer, RunStore(tmp_path / "run")

    return train


def rewards_of(call, weights=None):
    """Total rewards [N], NaN where no function could score: by hand."""
    by_function = call["rewards"].double().numpy()
    weights = np.ones(by_function.shape[1]) if weights is None else np.array(weights)
    total = []
    for row in by_function:
        known = ~np.isnan(row)
        total.append((row * weights)[known].sum() if known.any() else np.nan)
    return np.array(total)


def joined(calls):
    """The same batch of several processes, as one: rows in the order of the ranks, widened with zeros."""
    names = ("advantages", "energy", "mask")
    for call in calls:
        tools = call.get("tool_mask", torch.ones_like(call["completion_mask"]))
        call["mask"] = call["completion_mask"] * tools
    width = max(call["energy"].shape[1] for call in calls)
    return [
        np.concatenate([np.pad(c[n].double().numpy(), ((0, 0), (0, width - c[n].shape[1]))) for c in calls])
        for n in names
    ]


def otb_loo(energy, mask, reward, size):
    """A_{i,t} = R_i − Σ_{j≠i} W_{j,t} R_j / Σ_{j≠i} W_{j,t}, j of the group, scored, with a policy token number t.

    Written from the formula, token by token; t counts policy tokens. R_i where nobody else is alive; 0 without reward.
    """
    out = np.zeros(mask.shape)
    rows = [i for i in range(len(mask)) if np.isfinite(reward[i]) and mask[i].any()]
    realized = {i: np.cumsum(energy[i][mask[i] > 0]) for i in rows}
    for i in rows:
        for t, column in enumerate(np.flatnonzero(mask[i])):
            others = [j for j in rows if j != i and j // size == i // size and len(realized[j]) > t]
            weight = [realized[j][t] for j in others]
            baseline = sum(w * reward[j] for w, j in zip(weight, others, strict=True)) / sum(weight) if others else 0.0
            out[i, column] = reward[i] - baseline
    return out


def completions(call):
    """Token ids and mask of each row of a batch."""
    return zip(call["completion_ids"], call["completion_mask"], strict=True)


def assert_recomputed(calls, size=4, weights=None):
    advantages, energy, mask = joined(calls)
    reward = rewards_of(calls[0], weights)
    expected = otb_loo(energy, mask, reward, size)
    groups = reward.reshape(-1, size)
    differ = (np.nanmax(groups, axis=1) > np.nanmin(groups, axis=1)).any()
    assert not differ or np.abs(expected).max() > 0.1
    np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-5)


@pytest.mark.contract
def test_three_steps_train_on_advantages_that_the_formula_gives(trained):
    trainer, store = trained()
    assert len(trainer.calls) == 3
    for call in trainer.calls:
        assert call["advantages"].shape == call["completion_ids"].shape
        assert_recomputed([call])
    assert any(call["advantages"].std(dim=1).max() > 1e-3 for call in trainer.calls)  # they differ within a rollout
    assert store.info["status"] == "complete"
    assert store.complete_steps() == [0, 1, 2]


@pytest.mark.contract
def test_stored_tokens_are_those_that_trained(trained):
    trainer, store = trained(measure=2)
    tokens = store.sql("select * from tokens where step = 1 order by rollout, t")
    call = trainer.calls[1]
    inside = call["completion_mask"].bool().numpy()
    np.testing.assert_array_equal(tokens["token_id"], call["completion_ids"].numpy()[inside])
    np.testing.assert_allclose(tokens["advantage"], call["advantages"].numpy()[inside], atol=1e-6)
    np.testing.assert_allclose(tokens["energy_proxy"], call["energy"].numpy()[inside], atol=1e-5)
    measured = store.sql("select step, count(grad_norm_sq) as known from tokens group by step order by step")
    assert (measured["known"] > 0).tolist() == [True, False, True]
    assert set(store.sql("select distinct estimator from gradients")["estimator"]) >= {"otb_loo", "rloo", "grpo"}
    rewards = store.sql("select reward, reward_odd from rollouts where step = 1 order by rollout")
    np.testing.assert_allclose(rewards["reward"], call["rewards"][:, 0].numpy())
    np.testing.assert_allclose(rewards["reward_odd"], call["rewards"][:, 0].numpy())


def test_measuring_changes_nothing_of_the_training(runs, tmp_path):
    """The same weights to the bit, whether exact norms are measured at every step or never."""
    weights = []
    for name, measure in (("with", 1), ("without", 0)):
        trainer = runs.made(tmp_path / name, measure=measure)
        trainer.train()
        weights.append({key: x.clone() for key, x in trainer.model.state_dict().items()})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.contract
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo", "vespo", "luspo"])
def test_loss_types_run_and_move_the_weights(runs, trained, loss_type):
    before = runs.tiny()[0].state_dict()
    trainer, _ = trained(loss_type=loss_type, max_steps=1)
    assert_recomputed(trainer.calls)
    after = trainer.model.state_dict()
    assert all(x.isfinite().all() for x in after.values())
    assert any((after[name].cpu() - before[name]).abs().max() > 1e-3 for name in after)


@pytest.mark.contract
def test_loss_is_that_of_our_advantages(trained):
    """dr_grpo at the first update: −Σ A / (N·max_completion_length), since every ratio is 1."""
    trainer, _ = trained(loss_type="dr_grpo", max_steps=1, logging_steps=1)
    call = trainer.calls[0]
    expected = -(call["advantages"] * call["completion_mask"]).sum().item() / (8 * 8)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0] == pytest.approx(expected, abs=1e-5)


def test_rewards_that_are_missing_take_no_part(trained):
    trainer, store = trained(rewards=("first_digit",))
    missing = [call["rewards"].isnan().all(dim=1) for call in trainer.calls]
    assert sum(int(rows.sum()) for rows in missing) > 0
    for call, rows in zip(trainer.calls, missing, strict=True):
        assert_recomputed([call])
        assert (call["advantages"][rows] == 0).all()
    assert store.steps_df()["n_left_out"].tolist() == [int(rows.sum()) for rows in missing]


def test_reward_weights_count(trained):
    trainer, _ = trained(rewards=("odd", "length"), reward_weights=[1.0, 3.0])
    for call in trainer.calls:
        assert_recomputed([call], weights=[1.0, 3.0])


@pytest.mark.contract
def test_truncated_completions_that_TRL_masks_take_no_part(trained):
    trainer, store = trained(mask_truncated_completions=True)
    # What is left over ended early, which is no sample of what the policy draws.
    assert not {"certificate_prob_z", "certificate_logprob_z", "n_truncated"} & set(store.steps_df().dropna(axis=1))
    gone = [call["completion_mask"].sum(dim=1) == 0 for call in trainer.calls]
    assert 0 < sum(int(rows.sum()) for rows in gone) < 24
    for call in trainer.calls:
        if (call["completion_mask"].sum(dim=1) > 0).any():
            advantages, energy, mask = joined([call])
            expected = otb_loo(energy, mask, rewards_of(call), 4)
            np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-5)


def test_batch_without_any_token_trains_on_nothing(runs, tmp_path):
    """Every completion is cut after one token and masked: no advantage, a warning, and no step in the store."""
    trainer = runs.made(tmp_path, mask_truncated_completions=True, max_completion_length=1, max_steps=1)
    with pytest.warns(RuntimeWarning, match="step 0: no rollout has a reward"):
        trainer.train()
    assert (trainer.calls[0]["completion_mask"] == 0).all()
    assert (trainer.calls[0]["advantages"] == 0).all()
    assert not (tmp_path / "run").exists()


def test_nothing_is_stored_where_no_record_is_asked_for(runs, tmp_path):
    trainer = runs.made(tmp_path, stored=False)
    trainer.train()
    assert_recomputed(trainer.calls[:1])
    assert not (tmp_path / "run").exists()


@pytest.mark.contract
def test_batches_larger_than_an_update_and_reused_are_stored_once(trained):
    trainer, store = trained(steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=1, max_steps=8)
    assert [len(call["advantages"]) for call in trainer.calls] == [16, 16]
    for call in trainer.calls:
        assert_recomputed([call])
    assert store.complete_steps() == [0, 1]
    steps = store.steps_df()
    assert steps["trl_global_step"].tolist() == [0, 4]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert steps["n_updates"].tolist() == [4, 4]
    np.testing.assert_allclose(steps["grad_norm"], norms[::4])
    np.testing.assert_allclose(steps["grad_norm_max"], [max(norms[:4]), max(norms[4:])])
    assert steps["clipped"].tolist() == [max(norms[:4]) > 1, max(norms[4:]) > 1]  # TRL's max_grad_norm is 1


@pytest.mark.contract
def test_adapters_train_on_the_same_formula(trained):
    trainer, store = trained(peft=True, measure=1)
    for call in trainer.calls:
        assert_recomputed([call])
    assert any(call["advantages"].abs().max() > 0.1 for call in trainer.calls)
    assert store.steps_df()["measurement_gaps"].tolist() == [0, 0, 0]
    assert all("lora" in name for name, x in trainer.model.named_parameters() if x.requires_grad)


@pytest.mark.contract
def test_evaluation_groups_by_its_own_size_and_is_not_stored(trained):
    trainer, store = trained(num_generations_eval=2, per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=3)
    evaluated = [call for call in trainer.calls if not call["training"]]
    assert evaluated
    for call in evaluated:
        advantages, energy, mask = joined([call])
        expected = otb_loo(energy, mask, rewards_of(call), 2)
        np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-5)
    assert store.complete_steps() == [0, 1, 2]
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.contract
def test_tool_tokens_get_no_advantage_and_count_no_position(trained):
    trainer, store = trained(tools=True, estimator="otb_turn_loo", measure=1)
    for call in trainer.calls:
        assert_recomputed([call])
        assert (call["advantages"][:, 2:4] == 0).all()
    tokens = store.sql("select t, turn, mask, advantage from tokens where step = 0 and rollout = 0 order by t")
    assert tokens["mask"].tolist() == [True, True, False, False, True]
    assert tokens["turn"].tolist() == [0, 0, 0, 0, 1]
    assert tokens["advantage"].isna().tolist() == [False, False, True, True, False]


def test_estimator_without_gaps_refuses_tool_tokens(trained):
    with pytest.raises(InputError, match="use otb_turn_loo"):
        trained(tools=True, estimator="otb_loo")


@pytest.mark.parametrize("processes", [2])
def test_groups_that_span_processes(tmp_path, processes):
    """Two processes of six rows in groups of four: the second group is half here and half there."""
    spec = {"out": str(tmp_path), "per_device_train_batch_size": 6, "measure": 2, "rewards": ["first_digit"]}
    spec["recorder"] = str(tmp_path / "rollouts.jsonl")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    script = str(Path(__file__).parent / "trl_runs.py")
    done = subprocess.run(
        [*command, script, json.dumps(spec)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = [torch.load(tmp_path / f"calls-{rank}.pt") for rank in range(processes)]
    assert len(calls[0]) == 3
    for step in range(3):
        assert_recomputed([rank[step] for rank in calls])
    store = RunStore(tmp_path / "run")
    steps = store.steps_df()
    assert store.info["status"] == "complete"
    assert (steps["n_rollouts"] + steps["n_left_out"]).tolist() == [12, 12, 12]
    assert len(store.sql("select distinct estimator from gradients")) > 10
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    ids = [
        row[mask.bool()].tolist() for call in zip(*calls, strict=True) for one in call for row, mask in completions(one)
    ]
    scored = [known for call in calls[0] for known in (~call["rewards"].isnan().all(dim=1)).tolist()]
    assert [row["ids"] for row in rows] == [one for one, known in zip(ids, scored, strict=True) if known]


@pytest.mark.parametrize(
    "name",
    [
        "grpo", "rloo", "energy_regression", "otb_turn", "trloo", "tempo_loo", "james_stein", "james_stein_corrected",
        "maxrl", "mc_grpo", "qae", "gpg", "reinforce_plus_plus_baseline", "blend_otb_regression",
        "0.5*rloo+0.5*energy_across_loo",
    ],
)  # fmt: skip
def test_other_estimators_train(trained, name):
    options = {"memory": 0.5} if name in ("energy_regression", "blend_otb_regression") else None
    trainer, store = trained(estimator=name, options=options)
    assert all(call["advantages"].isfinite().all() for call in trainer.calls)
    assert store.info["config"]["estimator"]["name"] == name


def test_rloo_is_the_mean_of_the_others(trained):
    trainer, _ = trained(estimator="rloo", max_steps=1)
    (call,) = trainer.calls
    reward = rewards_of(call).reshape(-1, 4)
    expected = (reward - (reward.sum(1, keepdims=True) - reward) / 3).reshape(-1)
    np.testing.assert_allclose(call["advantages"][:, 0], expected, atol=1e-6)


def test_store_that_fails_is_a_warning_and_training_goes_on(runs, tmp_path, monkeypatch):
    trainer = runs.made(tmp_path)
    (tmp_path / "run").write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="step 0 is missing from the run"):
        trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"estimator": "tvm"}, "estimator 'tvm' needs a critic, which TRL does not have"),
        ({"estimator": "classic_optimal"}, "needs exact norms of all rollouts"),
        ({"estimator": "otb_lo"}, "estimator 'otb_lo' does not exist; did you mean 'otb_loo'"),
        ({"options": {"tale": "zero"}}, "tale"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "set it to 'sum_then_normalize'"),
    ],
)
def test_what_cannot_work_is_refused_before_training(runs, tmp_path, spec, sentence):
    with pytest.raises(InputError, match=sentence):
        runs.made(tmp_path, **spec)


def test_run_that_exists_is_refused_and_can_be_gone_on_with(runs, tmp_path):
    runs.made(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    with pytest.raises(InputError, match="run 'run' already exists"):
        runs.made(tmp_path)
    again = runs.made(tmp_path, if_exists="resume")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert RunStore(tmp_path / "run").complete_steps() == [0, 1, 2]
    assert len(again.calls) == 1


def test_a_trainer_that_no_longer_asks_for_our_batch_stops_before_its_first_update(runs, tmp_path, monkeypatch):
    trainer = runs.made(tmp_path)
    theirs = super(runs.OTBGRPOTrainer, trainer)._generate_and_score_completions
    monkeypatch.setattr(trainer, "_generate_and_score_completions", theirs)
    with pytest.raises(InputError, match="'otb_loo' would have no effect"):
        trainer.train()


@pytest.mark.parametrize(("name", "value", "plain"), [("top_p", 0.9, 1.0), ("top_k", 5, 0), ("min_p", 0.1, None)])
def test_filtered_generation_is_told_before_training(runs, tmp_path, name, value, plain):
    with pytest.warns(RuntimeWarning, match=f"{name} is {value}: .* set it to {plain}"):
        runs.made(tmp_path, stored=False, **{name: value})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no baseline is unbiased")
        runs.made(tmp_path, stored=False, **{name: plain})
    with pytest.warns(RuntimeWarning, match=f"{name} is {value}"):
        runs.made(tmp_path, stored=False, generation_kwargs={name: value})
