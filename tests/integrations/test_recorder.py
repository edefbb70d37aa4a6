"""The recorder as a reward function: what it writes is what TRL sampled, and `otb import` and `otb score` read it."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from otb_analysis.config import ImportConfig, ScoreConfig
from otb_analysis.errors import InputError
from otb_analysis.integrations.recorder import RolloutRecorder
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore


def paid(completions, **columns):
    return [1.0, None]


def half(completions, **columns):
    return [0.5, None]


def call(functions, step=0, **more):
    """What a trainer does with reward functions at a step."""

    class State:
        global_step = step

    batch = {"prompts": ["1+1=", "1+1="], "completions": ["2", "3#"], "completion_ids": [[5], [6, 17]], **more}
    return [list(function(**batch, trainer_state=State())) for function in functions]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_pays_nothing_and_writes_the_weighted_sum_of_what_others_paid(tmp_path):
    path = tmp_path / "deep" / "rollouts.jsonl"
    functions = RolloutRecorder(path, weights=[1.0, 2.0]).around([paid, half])
    assert call(functions, answer=["a", "b"]) == [[1.0, None], [0.5, None], [None, None]]
    (row,) = lines(path)  # the second could not be scored by anybody
    assert row == {
        "step": 0, "group": 0, "prompt": "1+1=", "completion": "2", "turns": 1, "reward": 2.0,
        "rewards": {"paid": 1.0, "half": 0.5}, "ids": [5], "columns": {"answer": "a"},
    }  # fmt: skip


def test_steps_ascend_where_a_trainer_generates_twice_within_one(tmp_path):
    functions = RolloutRecorder(tmp_path / "a.jsonl").around(paid)
    for step in (0, 0, 2, 2):
        call(functions, step)
    assert [row["step"] for row in lines(tmp_path / "a.jsonl")] == [0, 1, 2, 3]


def test_chats_become_messages_and_count_the_turns_of_the_policy(tmp_path):
    functions = RolloutRecorder(tmp_path / "a.jsonl").around(lambda completions, **columns: [1.0])
    chat = [
        {"role": "assistant", "content": "add"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    for function in functions:
        function(prompts=[[{"role": "user", "content": "1+1"}]], completions=[chat], completion_ids=[[5, 6, 7]])
    (row,) = lines(tmp_path / "a.jsonl")
    assert (row["prompt"], row["completion"], row["turns"]) == ([{"role": "user", "content": "1+1"}], "add\n2", 2)
    with pytest.raises(InputError, match="2 turns but no ids with a mask"):
        import_rollouts(tmp_path / "a.jsonl", ImportConfig(root=tmp_path / "runs"))


def test_functions_of_one_name_keep_their_own_rewards_and_weights(tmp_path):
    functions = [lambda completions, **columns: [1.0, 0.0], lambda completions, **columns: [0.0, 1.0]]
    recorder = RolloutRecorder(tmp_path / "a.jsonl", weights=[1.0, 10.0])
    call(recorder.around(functions))
    assert [row["rewards"] for row in lines(tmp_path / "a.jsonl")] == [
        {"<lambda>": 1.0, "<lambda> 2": 0.0}, {"<lambda>": 0.0, "<lambda> 2": 1.0},
    ]  # fmt: skip
    assert [row["reward"] for row in lines(tmp_path / "a.jsonl")] == [1.0, 10.0]


def test_disk_that_refuses_is_a_warning(tmp_path):
    functions = RolloutRecorder(tmp_path / "file" / "a.jsonl").around(paid)
    (tmp_path / "file").write_text("no directory")
    with pytest.warns(RuntimeWarning, match="step 0 is missing"):
        assert call(functions)[0] == [1.0, None]


async def slowly(completions, **columns):
    return [1.0]


@pytest.mark.parametrize("function", [torch.nn.Linear(1, 1), slowly, "a/reward-model"])
def test_what_runs_out_of_sight_is_refused(tmp_path, function):
    with pytest.raises(InputError, match="pass a function"):
        RolloutRecorder(tmp_path / "a.jsonl").around([paid, function])


def test_file_that_exists_is_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(InputError, match="already exists"):
        RolloutRecorder(tmp_path / "a.jsonl")


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("trl_runs")


@pytest.mark.skipif(find_spec("trl") is None, reason="no trl here; `make test-all` runs this in .venv-trl")
@pytest.mark.filterwarnings("ignore")
def test_unchanged_trainer_with_a_recorder_makes_a_run_that_is_imported_and_scored(runs, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    spec = {"rewards": ("odd", "length"), "reward_weights": [1.0, 2.0, 0.0], "learning_rate": 0.0}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    trainer = runs.made(tmp_path, unchanged=True, recorder=str(path), **spec, **evaluation)
    trainer.train()
    rows = lines(path)
    assert [row["step"] for row in rows] == [0] * 8 + [1] * 8 + [2] * 8  # evaluation is left out
    assert [row["group"] for row in rows[:8]] == [0] * 4 + [1] * 4
    for row in rows:
        known = {"odd": runs.odd([row["completion"]])[0], "length": runs.length([row["completion"]])[0]}
        expected = known["odd"] + 2 * (known["length"] or 0.0)
        assert row["reward"] == pytest.approx(expected)
        assert row["finish_reason"] == ("stop" if row["ids"][-1] == trainer.processing_class.eos_token_id else "length")
        assert row["columns"] == {"answer": str(runs.PROMPTS.index(row["prompt"]))}

    imported = RunStore(import_rollouts(path, ImportConfig(root=tmp_path / "runs")))
    assert imported.complete_steps() == [0, 1, 2]
    assert imported.sql("select token_id from tokens order by step, rollout, t")["token_id"].tolist() == [
        i for row in rows for i in row["ids"]
    ]

    model, tokenizer = runs.tiny()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    config = ScoreConfig(rollouts=path, model=str(tmp_path / "model"), temperature=0.8, root=tmp_path / "runs")
    scored = RunStore(score(config))
    np.testing.assert_allclose(
        scored.sql("select reward from rollouts order by step, rollout")["reward"], [row["reward"] for row in rows]
    )
    assert scored.steps_df()["certificate_prob_z"].abs().max() < 4  # this policy at this temperature wrote them
