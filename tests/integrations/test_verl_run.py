"""verl's own trainer, end to end on a CPU: two sharded processes, rollouts served by transformers, our run of it."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its optional engines are not here, and it says so
    pytest.importorskip("verl", reason="verl is not here; `make test-verl` makes an environment that has it")

from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.integrations.verl_run import run_log, step_tables, trained_name
from otb_analysis.store import RunStore
from otb_analysis.types import EstimatorInputs

MODULES = "verl_on_cpu,otb_analysis.integrations.verl,otb_analysis.integrations.verl_trainer"
OPTIONS = """
algorithm.adv_estimator=otb_analysis/otb_loo trainer.v1.trainer_mode=otb_sync
+trainer.v1.otb_sync.run=sums
data.train_files={out}/sums.parquet data.val_files={out}/sums.parquet data.train_batch_size=4
data.max_prompt_length=16 data.max_response_length=8 data.dataloader_num_workers=0
reward.custom_reward_function.path={out}/reward.py reward.custom_reward_function.name=paid reward.num_workers=1
actor_rollout_ref.model.path={out}/model actor_rollout_ref.model.use_remove_padding=false
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.model_dtype=float32
actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.actor.optim.lr=0.03
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.name=transformers actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.calculate_log_probs=true
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.agent.num_workers=1
trainer.device=cpu trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_training_steps=3
trainer.val_before_train=false trainer.logger=[console] trainer.resume_mode=disable
trainer.rollout_data_dir={out}/dump trainer.default_local_dir={out}/checkpoints
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
ray_kwargs.ray_init.num_cpus=32 +ray_kwargs.ray_init.num_gpus=2 +ray_kwargs.ray_init.include_dashboard=false
"""
"""Two slots are called GPUs, since verl asks Ray for them; the platform of `verl_on_cpu` never touches one."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint) -> Path:
    """A folder with a run of three steps, and what verl itself wrote of it."""
    out = tmp_path_factory.mktemp("verl")
    shutil.copytree(checkpoint, out / "model")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(out / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+{n}="}], "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)}, "extra_info": {"index": n},
        }
        for n in range(4)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(out / "sums.parquet")
    (out / "reward.py").write_text(
        "def paid(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 2)\n"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "VERL_USE_EXTERNAL_MODULES": MODULES,
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *OPTIONS.format(out=out).split()]
    done = subprocess.run(command, env=env, cwd=out, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return out


@pytest.mark.slow
def test_every_step_is_stored_as_verl_wrote_it(trained):
    run, rollouts = RunStore(trained / "runs" / "sums"), RunStore(trained / "runs" / "sums").rollouts_df()
    assert run.info["status"] == "complete"
    for step in (1, 2, 3):
        dumped = [json.loads(line) for line in (trained / "dump" / f"{step}.jsonl").read_text().splitlines()]
        stored = rollouts[rollouts["step"] == step]
        written = stored["completion"].str.replace("<(pad|unk)>", "", regex=True)  # verl leaves them out
        pairs = zip(stored["prompt"], written, stored["reward"], strict=True)
        assert sorted(pairs) == sorted((row["input"], row["output"], row["score"]) for row in dumped)
        assert stored.groupby("group").size().tolist() == [4, 4, 4, 4]
    assert (run.steps_df()["grad_norm"] > 0).all()


@pytest.mark.slow
def test_it_trained_on_our_advantages(trained):
    tokens = RunStore(trained / "runs" / "sums").sql("SELECT * FROM tokens ORDER BY step, rollout, t")
    to_go = tokens[::-1].groupby(["step", "rollout"])["reward"].cumsum()[::-1]
    np.testing.assert_allclose(tokens["advantage"], to_go - tokens["baseline"], atol=1e-6)  # verl keeps float32
    first = tokens[tokens["step"] == 1]
    n, t = (first[name].to_numpy() for name in ("rollout", "t"))

    def by_token(name: str) -> np.ndarray:
        out = np.zeros((16, t.max() + 1))
        out[n, t] = first[name]
        return out

    mask = np.zeros((16, t.max() + 1), bool)
    mask[n, t] = True
    inputs = EstimatorInputs(by_token("reward"), mask, np.arange(16) // 4, energy=by_token("energy_proxy"))
    assert first.groupby("rollout")["group"].first().tolist() == [g for g in range(4) for _ in range(4)]
    np.testing.assert_allclose(by_token("advantage"), estimate("otb_loo", inputs).advantage, atol=1e-6)


@pytest.mark.slow
def test_the_sampler_gets_the_weights_that_were_trained(trained):
    steps = RunStore(trained / "runs" / "sums").steps_df()
    tokens = RunStore(trained / "runs" / "sums").sql("SELECT step, token, logprob FROM tokens WHERE t = 0")
    assert (steps["mismatch_rms"] < 0.1).all()  # bfloat16 of verl's passes against float32 of the sampler
    moved = tokens.groupby(["token", "step"])["logprob"].mean().unstack()
    assert (moved[3] - moved[1]).abs().max() > 0.2  # so old weights in the sampler would show


def nested(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(tokenizer) -> dict[str, object]:
    """Two rollouts of one prompt, one of them with a tool's token in between, and a synthetic padding row."""
    ids, end = tokenizer("12+")["input_ids"], tokenizer.eos_token_id
    rows = {
        "prompts": [ids, ids, ids],
        "responses": [[*ids[:2], end], ids, ids[:1]],
        "response_mask": [[1, 1, 1], [1, 0, 1], [0]],
        "rm_scores": [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0]],
        "old_log_probs": [[-0.5, -1.0, -0.25], [-2.0, -1.5, -0.125], [-1.0]],
        "entropy": [[1.0] * 3, [1.0] * 3, [0.0]],
        "sum_pi_squared": [[0.5] * 3, [0.25] * 3, [1.0]],
        "advantages": [[0.5, 0.5, 0.5], [-0.5, 0.0, -0.5], [0.0]],
    }
    return {"uid": ["p", "p", "padding"]} | {name: nested(values) for name, values in rows.items()}


def algorithm(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(get=settings.get, **settings)


def test_tool_tokens_and_padding_rows_are_no_policy_tokens(tokenizer):
    tables = step_tables(batch(tokenizer), algorithm(adv_estimator="otb_analysis/rloo"), tokenizer)
    tokens = tables.tokens
    assert tables.rollouts["reward"].tolist() == [1.0, 0.0] and tables.rollouts["length"].tolist() == [3, 2]
    assert tables.rollouts["finish_reason"] == ["stop", "length"]
    assert tokens["mask"].tolist() == [True, True, True, True, False, True]
    assert tokens["advantage"].compressed().tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]
    assert tokens["baseline"].compressed().tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    pi = np.exp(-2.0)
    assert tokens["energy_proxy"][3] == pytest.approx((1 - pi) ** 2 + 0.25 - pi**2)
    assert tokens["behavior_logprob"].mask.all()  # verl was not asked for them
    assert tables.steps["certificate_prob_z"] is None  # nor for what the test of the sampler reads


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"adv_estimator": "otb_analysis/otb_loo"}, "otb_loo"),
        ({"adv_estimator": "grpo"}, "grpo"),
        ({"adv_estimator": "grpo_vectorized", "norm_adv_by_std_in_grpo": False}, "group_mean"),
        ({"adv_estimator": "rloo_vectorized"}, "rloo"),
        ({"adv_estimator": "gae"}, "gae"),
    ],
)
def test_verls_own_estimators_have_the_names_of_ours(settings, name):
    assert trained_name(algorithm(**settings)) == name


def test_nothing_is_stored_unless_a_run_is_named_and_no_run_is_written_over(tmp_path):
    from omegaconf import OmegaConf

    rollout = dict.fromkeys(("n", "response_length", "temperature", "top_p", "top_k"), 1)
    actor = dict.fromkeys(("loss_agg_mode", "clip_ratio", "ppo_mini_batch_size", "ppo_epochs"), 1)
    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "otb_analysis/rloo"}, "trainer": {"v1": {}},
            "data": {"train_batch_size": 4, "train_files": "sums.parquet"},
            "actor_rollout_ref": {"model": {"path": "model"}, "rollout": rollout, "actor": actor},
        }
    )  # fmt: skip
    assert run_log(config) is None
    config.trainer.v1.otb_sync = {"run": "sums", "root": str(tmp_path)}
    log = run_log(config)
    assert log is not None and log.config["estimator"]["name"] == "rloo"
    (tmp_path / "sums").mkdir()
    with pytest.raises(InputError, match="already exists"):
        run_log(config)
    config.trainer.v1.otb_sync = {"rot": str(tmp_path)}
    with pytest.raises(InputError, match=r"'rot'.*'root'"):
        run_log(config)
