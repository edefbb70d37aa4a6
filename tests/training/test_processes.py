"""Several processes are one run: the same advantages and gradient as one process, one store, one end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from otb_analysis.config import MeasureConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import load_policy
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore
from otb_analysis.training.check import check
from otb_analysis.training.runtime import asked_for, gather_rollouts, refuse_unsharded_only, shard_rows

SCRIPT = Path(__file__).with_name("run_of_two.py")
ROOT = SCRIPT.parents[2]
SCALARS = ("grad_norm", "grad_norm_max", "loss", "critic_loss", "critic_explained_variance", "reward_mean", "n_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint):
    """What pairs of processes left behind: results, runs, what each said and how it ended."""
    folder = tmp_path_factory.mktemp("two")
    running = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), str(checkpoint)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = running.communicate(timeout=600)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # the processes that it forked, too
    assert running.returncode == 0, said
    return folder


def ends(folder, what, size=2):
    """Return exit codes and words of some processes."""
    words = [(folder / f"{what}-{rank}.txt").read_text() for rank in range(size)]
    return [int((folder / f"{what}-{rank}.code").read_text()) for rank in range(size)], words


@pytest.fixture(scope="module")
def updates(folder):
    """One step of each case by two processes and by one, as either process saw it."""
    codes, words = ends(folder, "updates")
    assert codes == [0, 0], "\n".join(words)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def runs(folder):
    """A whole run and a resumed one, with whole and with sharded parameters."""
    codes, words = ends(folder, "runs")
    assert codes == [0, 0], "\n".join(words)
    return folder


CASES = [
    (sharded, case)
    for sharded in (False, True)
    for case in ("plain", "micro_batches", "tvm", "gae", "regression", "exact", "off_policy")
]


@pytest.mark.slow
@pytest.mark.parametrize(("sharded", "case"), CASES)
def test_two_processes_follow_the_gradient_of_one(updates, sharded, case):
    for found in updates:
        for name in SCALARS:
            one, many = (found[f"{sharded} {case} {who} {name}"] for who in ("one", "two"))
            np.testing.assert_allclose(many, one, rtol=1e-5)
        assert found[f"{sharded} {case} one grad_norm"] > 0.1
        for name in ("weights", "critic"):
            one, many = (found[f"{sharded} {case} {who} {name}"] for who in ("one", "two"))
            np.testing.assert_allclose(many, one, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("sharded", "case"), CASES)
def test_two_processes_have_the_advantages_of_one_in_a_group_that_spans_both(updates, sharded, case):
    first, second = updates
    key = f"{sharded} {case}"
    assert first[f"{key} two rollouts"].tolist() == [0, 1, 2, 3, 4]
    assert second[f"{key} two rollouts"].tolist() == [5, 6, 7, 8]
    for name in ("advantage", "rollout"):
        together = np.concatenate([found[f"{key} two {name}"] for found in updates])
        np.testing.assert_allclose(together, first[f"{key} one {name}"], rtol=1e-6, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("sharded", "case"), CASES)
def test_exact_statistics_of_two_processes_are_those_of_one(updates, sharded, case):
    first, second = updates
    key = f"{sharded} {case}"
    np.testing.assert_allclose(first[f"{key} two exact"], first[f"{key} one exact"], rtol=1e-5)
    assert second[f"{key} two exact"].tolist() == [0.0]  # the first process records them
    for name in ("norms", "attribution"):
        together = np.concatenate([found[f"{key} two {name}"] for found in updates])
        np.testing.assert_allclose(together, first[f"{key} one {name}"], rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def measured(folder):
    """One batch measured by every level, by two processes and by one, as either process saw it."""
    codes, words = ends(folder, "levels")
    assert codes == [0, 0], "\n".join(words)
    return [dict(np.load(folder / f"levels{rank}.npz")) for rank in range(2)]


LEVELS = ("norms", "stderr", "prob", "attribution", "signal", "noise", "contrast", "alone", "gram")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["above_cut", "proxy", "uniform", "sharded"])
def test_two_processes_measure_every_level_as_one_does(measured, by):
    alone = "above_cut" if by == "sharded" else by  # weights that FSDP2 shards, whole while they are measured
    for found in measured:
        assert found[f"{alone} one gaps"] == found[f"{by} two gaps"] == 0
        for name in set(LEVELS) - {"alone"}:
            one, two = found[f"{alone} one {name}"], found[f"{by} two {name}"]
            scale = np.abs(one[np.isfinite(one)]).max()
            np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6 * scale, err_msg=name)
        # groups measured whole, drawn from, and sketched
        exact, drawn, sketched = (np.isin(found[f"{by} two groups"], some) for some in ([0, 1], [2, 3, 4], [5, 6]))
        known, chance = (np.isfinite(found[f"{by} two {name}"]) for name in ("norms", "prob"))
        assert known[exact].any(axis=1).all() and 0 < known[drawn].sum() < chance[drawn].sum()
        assert np.isfinite(found[f"{by} two stderr"])[sketched].any(axis=1).all()
        assert (found[f"{by} two alone"] == 0).all()  # a level of one's own runs on the first process


@pytest.mark.slow
def test_four_processes_measure_every_level_as_one_does_and_the_exact_gram_matrix_with_shards_too(folder):
    codes, words = ends(folder, "four", 4)
    assert codes == [0] * 4, "\n".join(words)
    for rank in range(4):
        found = np.load(folder / f"four{rank}.npz")
        assert found["one gaps"] == found["four gaps"] == 0
        for name in set(LEVELS) - {"alone"}:
            one, four = found[f"one {name}"], found[f"four {name}"]
            scale = np.abs(one[np.isfinite(one)]).max()
            np.testing.assert_allclose(four, one, rtol=1e-5, atol=1e-6 * scale, err_msg=name)
        assert (found["four alone"] == 0).all()
        length = np.sqrt(np.einsum("mmpp->mp", one := found["exact one gram"]))
        for who in ("four", "sharded"):
            assert found[f"exact {who} gaps"] == 0
            error = np.abs(found[f"exact {who} gram"] - one)
            assert (error <= 1e-5 * length[:, None, :, None] * length[None, :, None, :]).all()


LOST = {"sampled": {"prob"}, "sketch": {"stderr"}, "attribution": {"attribution", "signal", "noise"}}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["sampled", "sketch", "attribution", "contrast", "gram"])
def test_a_level_that_fails_on_one_process_is_missing_from_both_and_alone(measured, level):
    lost = LOST.get(level, {level})
    cases = {key.rsplit(" ", 1)[0] for key in measured[0] if key.startswith(f"{level} without ")}
    assert len(cases) > 1
    for case in cases:
        for found in measured:
            assert found[f"{case} gaps"] == 1
            for name in set(LEVELS) - lost:
                if level in ("sampled", "sketch") and name in ("norms", "stderr", "gram"):
                    continue  # what one level left, the next one measures
                np.testing.assert_allclose(found[f"{case} {name}"], found[f"above_cut two {name}"], rtol=1e-6)
        for name in LEVELS:
            first, second = (found.get(f"{case} {name}") for found in measured)
            assert (first is None) == (second is None)
            if first is not None:
                np.testing.assert_array_equal(first, second)
            if name in lost:
                assert first is None or np.isnan(first).all()


@pytest.mark.slow
def test_a_process_without_forward_mode_takes_differences_and_the_other_does_not_care(measured):
    for found in measured:
        assert found["differences gaps"] == 0
        exact = found["above_cut two attribution"]
        near = 3e-3 * np.nansum(exact)
        np.testing.assert_allclose(found["differences attribution"], exact, atol=abs(near), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_parts_of_both_processes_make_every_step(runs, kind):
    store = RunStore(runs / "whole" / kind)
    assert store.info["status"] == "complete"
    steps = store.steps_df().set_index("step")
    assert steps["heldout_samples"].tolist() == [3, 3, 3]
    assert steps["tracker_gaps"].tolist() == [0, 0, 0]
    assert len(list((runs / "whole" / kind).rglob("events.out.tfevents.*"))) == 1  # one process tells the tracker
    assert store.complete_steps() == [0, 1, 2]
    for step in range(3):
        rows = store.sql(f"select rollout from rollouts where step = {step} order by rollout")
        assert rows["rollout"].tolist() == list(range(9))
        n_tokens = store.sql(f"select sum(mask::int) as n from tokens where step = {step}")["n"][0]
        assert steps.loc[step, "n_tokens"] == n_tokens
    assert not list((runs / "whole" / kind).rglob("part-*"))  # of both processes, one file a table once the run ended


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "memory"])
def test_two_processes_resume_as_if_they_had_not_stopped(runs, kind):
    paths = [runs / where / kind for where in ("whole", "resumed")]
    for table in TABLES:
        frames = [RunStore(path).sql(f"select * from {table} order by all") for path in paths]
        left = [c for c in frames[0] if c.startswith("seconds_")]
        pd.testing.assert_frame_equal(*(f.drop(columns=left) for f in frames), rtol=1e-6)
    first, second = (load_policy(path / "model")[0].state_dict() for path in paths)
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["0", "1"])
def test_a_failure_on_one_process_ends_both_with_its_sentence(folder, fails):
    codes, words = ends(folder, f"fails{fails}")
    assert codes == [2, 2], "\n".join(words)
    for error in words:
        said = [line for line in error.splitlines() if line.startswith("otb: ")]
        assert len(said) == 1
        assert "the grader is out" in said[0]
    own = [pq.read_table(path)["rollout"].unique() for path in sorted((folder / f"fails{fails}/tokens").iterdir())]
    assert [one.to_pylist() for one in own] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]  # each process writes its own rollouts
    info = RunStore(folder / f"fails{fails}").info
    assert info["status"] == "failed"
    assert "the grader is out" in str(info["reason"])


@pytest.mark.slow
def test_processes_that_disagree_on_the_configuration_are_refused_before_anything_is_written(folder):
    codes, words = ends(folder, "disagree")
    assert codes == [2, 2], "\n".join(words)
    sentence = "optimize.steps is 3 on process 1 and 2 on process 0; launch all processes with one configuration."
    for error in words:
        said = [line for line in error.splitlines() if line.startswith("otb: ")]
        assert len(said) == 1 and said[0].endswith(sentence)
    assert not (folder / "disagree").exists()


def test_a_process_alone_shares_and_gathers_nothing():
    rows, x = np.arange(5), np.ones((5, 2))
    assert SINGLE_PROCESS.shard(rows).tolist() == [0, 1, 2, 3, 4]
    assert SINGLE_PROCESS.gather(x)[0] is x
    assert SINGLE_PROCESS.broadcast_from_main(lambda: x) is x
    assert SINGLE_PROCESS.seed == ()


def test_shares_are_consecutive_and_differ_by_at_most_one():
    # 7 rows over 3 processes: 3 + 2 + 2.
    parts = [Processes(rank, 3).shard(np.arange(7)).tolist() for rank in range(3)]
    assert parts == [[0, 1, 2], [3, 4], [5, 6]]


def test_own_rows_are_those_of_the_own_rollouts():
    columns = {"rollout": np.array([0, 0, 1, 2]), "text": ["a", "b", "c", "d"]}
    columns["logprob"] = np.ma.masked_array([1.0, 2.0, 3.0, 4.0], mask=[False, True, False, True])
    # 3 rollouts over 2 processes: 0 and 1 on the first, 2 on the second.
    first, second = (shard_rows(columns, Processes(rank, 2), 3) for rank in range(2))
    assert first["text"] == ["a", "b", "c"]
    assert second["text"] == ["d"]
    assert first["logprob"].mask.tolist() == [False, True, False]
    assert second["rollout"].tolist() == [2]


def test_shares_cut_from_a_batch_join_to_the_batch(trainer, monkeypatch):
    from otb_analysis.measurement.table import compute_rewards
    from otb_analysis.rollouts.sampling import sample

    config = trainer.config.sample
    prompts = [trainer.task.prompt("train", i) for i in range(config.prompts)]
    torch.manual_seed(0)
    whole = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, config)

    def share(rows):
        part = whole.take(rows)
        return compute_rewards(trainer.task, part), trainer.policy.forward(part, keep_graph=False).stats, None

    parts = [share(np.arange(0, 5)), share(np.arange(5, 12))]
    monkeypatch.setattr(Processes, "gather", lambda self, value: parts)
    expected, expected_stats, _ = share(np.arange(12))
    rollouts, stats, _ = gather_rollouts(Processes(0, 2), *parts[0])
    for name in ("attention_mask", "mask", "turn", "group", "prompt_length", "behavior_logprob"):
        np.testing.assert_array_equal(getattr(rollouts, name), getattr(whole, name))
    inside = whole.attention_mask
    np.testing.assert_array_equal(rollouts.input_ids[inside], whole.input_ids[inside])
    assert rollouts.turns == whole.turns
    np.testing.assert_array_equal(rollouts.rewards(), expected.rewards())
    np.testing.assert_array_equal(rollouts.reward_parts["odd"], expected.reward_parts["odd"])
    np.testing.assert_allclose(stats.energy, expected_stats.energy, rtol=1e-5, atol=1e-7)


def test_fsdp_of_version_1_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match="add --fsdp_version 2"):
        asked_for()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert asked_for()


def test_a_budget_is_refused_under_fsdp():
    refuse_unsharded_only(TrainConfig())
    with pytest.raises(InputError, match=r"measure\.budget is 0\.1, .*FSDP2"):
        refuse_unsharded_only(TrainConfig(measure=MeasureConfig(budget=0.1)))


def test_more_processes_than_rollouts_are_refused(tiny_config):
    with pytest.raises(InputError, match="at least one rollout"):
        check(tiny_config, processes=tiny_config.sample.prompts * tiny_config.sample.group_size + 1)


def test_vllm_on_several_processes_is_refused(tiny_config):
    config = replace(tiny_config, sample=replace(tiny_config.sample, engine="vllm"))
    with pytest.raises(InputError, match="set it to 'transformers'"):
        check(config, processes=2)
