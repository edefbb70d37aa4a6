"""slime's and miles's dumps: files of several ranks are one step, slices whole lists, and two folders one set."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.checks.advantages import advantage_lines, check_advantages
from otb_analysis.config import ImportConfig, MeasureConfig, Schedule, ScoreConfig
from otb_analysis.errors import InputError
from otb_analysis.phases import NOTES
from otb_analysis.recorded.formats import find_source
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.recorded.slime import EARLIER, NOT_TRAINED, UNTRAINED
from otb_analysis.store import RunStore

PAID = (1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 0.0, 1.0)
"""Raw rewards of two groups of four."""


def samples(step, removed=()):
    """Return what miles's sampler dumps: prompts of 2 and 3 tokens, responses of 3 to 10."""
    rows = []
    for n, paid in enumerate(PAID):
        length = 3 + n
        prompt = [1, 2] if n < 4 else [1, 2, 3]
        rows.append(
            {
                "group_index": 10 * step + n // 4, "index": 8 * step + n, "rollout_id": None,
                "prompt": "p" * len(prompt),
                "tokens": prompt + list(range(4, 4 + length)), "response": "r" * length, "response_length": length,
                "reward": np.float64(paid), "loss_mask": None, "remove_sample": n in removed, "status": "completed",
                "rollout_log_probs": [-0.25 - 0.125 * t for t in range(length)], "metadata": {},
                "rollout_routed_experts": np.zeros((2, 1, 2), np.int32),
            }
        )  # fmt: skip
    return rows


def normalised(rows):
    """Return rewards as the trainer normalises them, over the group of four, and rounds to float32."""
    paid = np.array([row["reward"] for row in rows]).reshape(-1, 4)
    centred = paid - paid.mean(axis=1, keepdims=True)
    return np.float32(centred / (paid.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1).tolist()


def zigzag(values, rank, size, prompt):
    """Return a rank's slice as the trainer cuts it, token by token: which chunk holds the logit before each."""
    chunk = -(-(prompt + len(values)) // (2 * size))
    held = {rank: [], 2 * size - 1 - rank: []}
    for t, value in enumerate(values):
        held.get((prompt + t - 1) // chunk, []).append(value)
    return torch.tensor(held[rank] + held[2 * size - 1 - rank])


def miles(root, step, removed=(), data=2, tensor=2, context=2, sampled=True):
    """Write a step as miles does: the sampler's file, and one for each rank of the trainer."""
    rows = samples(step, removed)
    if sampled:
        (root / "rollout_data").mkdir(parents=True, exist_ok=True)
        torch.save({"rollout_id": step, "metadata": {}, "samples": rows}, root / "rollout_data" / f"{step}.pt")
    (root / "train_data").mkdir(parents=True, exist_ok=True)
    rewards = normalised(rows)
    for rank in range(data * tensor * context):
        part, cp = range(rank // (tensor * context), len(rows), data), rank // tensor % context
        own = [rows[n] for n in part]
        lengths = [row["response_length"] for row in own]

        def cut(values, row, cp=cp):
            prompt = len(row["tokens"]) - row["response_length"]
            return zigzag(values, cp, context, prompt) if context > 1 else torch.tensor(values)

        columns = {
            "tokens": [torch.tensor(row["tokens"]) for row in own],
            "response_lengths": lengths,
            "total_lengths": [len(row["tokens"]) for row in own],
            "rewards": [rewards[n] for n in part],
            "raw_reward": [row["reward"] for row in rows],
            "truncated": [0] * len(own),
            "sample_indices": [row["index"] for row in own],
            "rollout_ids": [row["index"] for row in own],
            "loss_masks": [
                torch.full((length,), int(not row["remove_sample"])) for length, row in zip(lengths, own, strict=True)
            ],
            "rollout_log_probs": [cut(row["rollout_log_probs"], row) for row in own],
            "log_probs": [cut([x - 0.0625 for x in row["rollout_log_probs"]], row) for row in own],
            "advantages": [cut([rewards[n]] * len_, rows[n]) for n, len_ in zip(part, lengths, strict=True)],
        }
        pack = {"rollout_id": step, "rank": rank, "rollout_data": columns, "cp_rank": cp, "cp_size": context}
        torch.save(pack | {"qkv_format": "thd"}, root / "train_data" / f"{step}_{rank}.pt")
    return root


def read(path):
    source = find_source(path)
    return list(source.records()), source.tally


@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_dump_of_two_folders_and_many_ranks_has_each_sample_once_and_its_lists_whole(tmp_path, context):
    for step in (3, 10):
        miles(tmp_path, step, context=context)
    records, _ = read(tmp_path)
    assert [(r.step, r.group) for r in records] == [(s, 10 * s + n // 4) for s in (3, 10) for n in range(8)]
    for n, record in enumerate(records[:8]):
        own = samples(3)[n]
        assert (record.reward, record.prompt, record.completion) == (PAID[n], own["prompt"], own["response"])
        assert record.place.file.parent.name == "rollout_data"
        np.testing.assert_array_equal(record.columns["behavior_logprob"], own["rollout_log_probs"])
        np.testing.assert_array_equal(record.columns["logprob"], np.array(own["rollout_log_probs"]) - 0.0625)
        np.testing.assert_array_equal(record.columns["advantage"], [normalised(samples(3))[n]] * len(record.ids))


def test_ranks_without_the_samplers_file_get_raw_rewards_where_their_order_is_sure(tmp_path):
    miles(tmp_path, 0, sampled=False)
    records, _ = read(tmp_path / "train_data")
    assert [record.reward for record in records] == list(PAID)
    assert [len(record.ids) for record in records] == list(range(3, 11))
    # One data-parallel rank of two has half the samples, and nothing says which of the batch's raw rewards are theirs.
    for rank in range(4, 8):
        (tmp_path / "train_data" / f"0_{rank}.pt").unlink()
    with pytest.raises(InputError, match=r"no raw_reward of its own"):
        read(tmp_path)


def test_raw_rewards_in_another_order_than_the_normalised_ones_are_refused(tmp_path):
    columns = {"tokens": [[5, 6], [5, 7]], "response_lengths": [1, 1], "rewards": [0.7, -0.7], "raw_reward": [0.0, 1.0]}
    torch.save({"rollout_id": 9, "rollout_data": columns}, tmp_path / "9.pt")
    with pytest.raises(InputError, match="no raw_reward of its own"):
        read(tmp_path / "9.pt")


def test_a_missing_slice_is_refused_with_its_rank(tmp_path):
    miles(tmp_path, 0, tensor=1)
    (tmp_path / "train_data" / "0_1.pt").unlink()
    with pytest.raises(InputError, match=r"record 1: rollout_log_probs is cut .* cp_rank 1"):
        read(tmp_path)


def test_folders_of_two_runs_are_refused(tmp_path):
    miles(tmp_path, 0)
    rows = samples(0)
    rows[5]["tokens"][-1] = 99
    torch.save({"rollout_id": 0, "samples": rows}, tmp_path / "rollout_data" / "0.pt")
    with pytest.raises(InputError, match=r"other tokens than .*0\.pt, record 6, .*index 5"):
        read(tmp_path)


def test_samples_that_the_trainer_cut_off_are_left_out_and_counted(tmp_path):
    miles(tmp_path, 0)
    rows = [*samples(0), {**samples(0)[0], "index": 8, "group_index": 2}]
    torch.save({"rollout_id": 0, "samples": rows}, tmp_path / "rollout_data" / "0.pt")
    torch.save({"rollout_id": 1, "samples": samples(1)}, tmp_path / "rollout_data" / "1.pt")
    records, tally = read(tmp_path)
    assert len(records) == 8 and tally == {NOT_TRAINED: 9}  # all of a step that did not train yet


def test_removed_samples_count_in_the_mean_that_their_groups_advantages_were_made_with(tmp_path, checkpoint):
    for step in range(2):
        miles(tmp_path / "dump", step, removed=(1, 6))
    NOTES.clear()
    store = RunStore(import_rollouts(tmp_path / "dump", ImportConfig(root=tmp_path / "runs")))
    rollouts, steps = store.rollouts_df(), store.steps_df()
    assert rollouts["reward"].tolist() == [*PAID, *PAID] and rollouts["length"].tolist()[:2] == [3, 0]
    assert steps["reward_mean"].tolist() == [np.mean(PAID)] * 2 and steps["n_rollouts"].tolist() == [8, 8]
    assert any(UNTRAINED in note for note in NOTES)
    # Dropped, the two would move the means of both groups: no convention would fit.
    check = check_advantages(store)
    assert "grpo" in check.exact and check.n_rollouts == 12
    assert "are those of grpo" in advantage_lines(check)[0]
    for step in range(2):  # texts of the tokens, which this model's tokenizer has other ones for
        rows = [{**row, "prompt": None, "response": None} for row in samples(step, (1, 6))]
        torch.save({"rollout_id": step, "samples": rows}, tmp_path / "dump" / "rollout_data" / f"{step}.pt")
    config = ScoreConfig(rollouts=tmp_path / "dump", model=str(checkpoint), root=tmp_path / "scored")
    scored = RunStore(score(replace(config, measure=MeasureConfig(exact=Schedule(every=1)))))
    assert scored.rollouts_df()["reward"].tolist() == [*PAID, *PAID]
    assert scored.rollouts_df()["length"].tolist() == rollouts["length"].tolist()
    assert "grpo" in check_advantages(scored).exact


def test_siblings_of_one_rollout_id_are_one_execution_in_the_group_of_its_first_prompt(tmp_path):
    rows = samples(0)[:3]
    for n, row in enumerate(rows):
        row |= {"rollout_id": n, "group_index": 0}
    later = {**rows[1], "tokens": [1, 9, 9, 7, 8], "response_length": 2, "rollout_log_probs": [-1.0, -2.0], "index": 7}
    torch.save({"rollout_id": 0, "samples": [*rows[:2], later, rows[2]]}, tmp_path / "0.pt")
    records, tally = read(tmp_path)
    assert [record.prompt_ids for record in records] == [(1, 2), (1, 9, 9), (1, 2)] and tally == {EARLIER: 1}
    store = RunStore(import_rollouts(tmp_path / "0.pt", ImportConfig(root=tmp_path / "runs")))
    assert store.steps_df()["n_prompts"].tolist() == [1] and store.rollouts_df()["reward"].tolist() == list(PAID[:3])
    # One id for all samples is no execution's.
    torch.save({"rollout_id": 0, "samples": [{**row, "rollout_id": 5} for row in rows]}, tmp_path / "0.pt")
    assert len(read(tmp_path / "0.pt")[0]) == 3
