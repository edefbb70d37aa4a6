"""Each format: what its files look like, how they are recognised, what becomes of a row, what is refused."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from otb_analysis.config import ImportConfig
from otb_analysis.errors import InputError
from otb_analysis.recorded.formats import FORMATS, LEFT, find_source
from otb_analysis.recorded.readers import (
    ONE_SCORED,
    PADDED,
    UNSCORABLE,
    UNSCORED,
    UNSCORED_SAMPLE,
    fitted_weights,
    trl_weights,
)
from otb_analysis.recorded.records import UNREAD
from otb_analysis.recorded.runs import source_of
from otb_analysis.recorded.slime import UNFINISHED, UNTRAINED
from otb_analysis.recorded.traces import BRANCHED, MASKED, MISSING, NOT_SHIPPED, ROUNDED, UNCOVERED

NAN = float("nan")


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def read(path, name="auto", weights=None):
    return list(source_of(path, ImportConfig(format=name, reward_weights=weights or {})).records())


def trl_rows(step, rewards=(1.0, 0.0, 0.5)):
    return [
        {"step": step, "prompt": f"p{k // 2}", "completion": f"c{k}", "correct": r, "form": 0.5, "advantage": 0.1}
        for k, r in enumerate(rewards)
    ]


def verl_rows(step, **more):
    return [
        {"input": "user\np\nassistant\n", "output": f"c{k}", "gts": "1", "score": float(k), "step": step, **more}
        for k in range(2)
    ]


PRIME = {
    "schema_version": 1, "step": 9, "export_step": 3, "rank": 0, "export_sequence_idx": 0, "token_ids": [5, 6, 7, 8, 9],
    "loss_mask": [False, False, True, False, True], "advantages": [0, 0, 0.5, 0, 0.5], "rewards": [0, 0, 1.0, 0, 1.0],
    "inference_logprobs": [0, 0, -0.5, 0, -0.25],
    "trainer_logprobs": [0, 0, -0.4, 0, -0.3], "entropy": [0, 1, 0.6, 1, 0.7],
}  # fmt: skip
NEMO = {
    "content": "", "rewards": 1.0, "token_ids": [5, 6, 7, 8, 0, 0], "input_lengths": 4, "sample_loss_mask": 1.0,
    "token_loss_mask": [0, 0, 1, 1, 0, 0], "advantages": [0.5] * 6, "generation_logprobs": [0, 0, -0.5, -0.2, 0, 0],
    "prev_logprobs": [0, 0, -0.6, -0.3, 0, 0],
}  # fmt: skip
SLIME = {
    "rollout_id": 77,
    "group_index": 2, "index": 5, "prompt": "p", "tokens": [5, 6, 7, 8], "response": "xy", "response_length": 2,
    "reward": 1.0, "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -0.25], "status": "truncated",
}  # fmt: skip


def node(parent, ids, logprobs=(), advantages=None):
    sampled = len(logprobs)
    mask = [False] * (len(ids) - sampled) + [True] * sampled
    return {"parent": parent, "token_ids": ids, "mask": mask, "logprobs": list(logprobs), "advantages": advantages}


TRACE = {
    "agent": {"trainable": True},
    "rewards": {"right": {"score": 1.0, "weight": 0.5}, "form": {"score": 0.25}, "x": None},
    "nodes": [
        node(None, [5, 6]), node(0, [7, 8, 9], [-0.5, -0.25], [0.1, 0.1]), node(1, [4]), node(2, [3, 2], [-0.75]),
    ],
    "calls": [{"finish_reason": "stop"}, {"finish_reason": "length"}],
}  # fmt: skip
OPEN_INSTRUCT = {
    "step": 1, "sample_idx": 0, "prompt_idx": 0, "prompt_tokens": [7, 1], "response_tokens": [26, 7], "reward": 0.0,
    "advantage": -1.0, "finish_reason": "length", "dataset": "sums", "ground_truth": [1], "request_info": None,
    "logprobs": [-0.5, -0.25],
}  # fmt: skip
EPISODE = {"group": {"id": "g"}, "run": {"type": "train", "work": {"type": "train", "step": 6}}, "traces": [TRACE]}


LM_EVAL = {
    "doc_id": 4, "doc": {"question": "1+1?"}, "target": "2", "arguments": {"gen_args_0": {"arg_0": "Q: 1+1?\nA:"}},
    "resps": [["is 2"]], "filtered_resps": ["2"], "filter": "strict", "metrics": ["exact_match"], "exact_match": 1.0,
}  # fmt: skip


INSPECT = {
    "id": "s1", "epoch": 1, "input": "1+1?", "target": "2", "limit": None,
    "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": [{"type": "reasoning", "reasoning": "r"}, {"type": "text", "text": "2"}]},
    ],
    "output": {"completion": "2"}, "scores": {"match": {"value": "C", "answer": "2"}},
}  # fmt: skip


AREAL = {
    "task_id": 1, "sample_idx": 0, "seqlen": 5, "prompt_len": 2, "head_version": 8, "tail_version": 9, "reward": 1.0,
    "prompt": "<s>q", "completion": "abc",
}  # fmt: skip


def art_rows():
    messages = [
        {"role": "system", "content": "s", "tool_calls": None, "tool_call_id": None, "trainable": False},
        {"role": "user", "content": "q", "tool_calls": None, "tool_call_id": None, "trainable": False},
        {"role": "assistant", "content": "a", "tool_calls": None, "tool_call_id": None, "trainable": True},
    ]
    return [{"group_index": g, "reward": float(g), "messages": messages} for g in (0, 1)]


def test_every_format_is_recognised_in_its_directory_and_named(tmp_path, jsonl):
    for step in (10, 9):
        parquet(tmp_path / "trl" / "completions" / f"completions_{step:05d}.parquet", trl_rows(step))
        jsonl(verl_rows(step), f"verl/{step}.jsonl")
        parquet(tmp_path / "art" / "trajectories" / "train" / f"{step:04d}.parquet", art_rows())
        jsonl([PRIME], f"prime_rl/token_exports/step_{step}/rank_0.jsonl")
        jsonl([EPISODE], f"verifiers/rollouts/step_{step}/train/effective/traces.jsonl")
        jsonl([EPISODE, EPISODE], f"verifiers/rollouts/step_{step}/train/all/traces.jsonl")
        jsonl([EPISODE], f"prime_rl_traces/monitors/file/traces/stream/{step:05d}.jsonl")
        jsonl([NEMO], f"nemo_rl/train_data_step{step}.jsonl")
        jsonl([OPEN_INSTRUCT], f"open_instruct/run_rollouts_{step:06d}.jsonl")
        jsonl([AREAL | {"tail_version": step}], f"areal/logs/rollout/{step}/1.jsonl")
        jsonl([{"run_name": "run"}], "open_instruct/run_metadata.jsonl")
        (tmp_path / "slime").mkdir(exist_ok=True)
        torch.save({"rollout_id": step, "samples": [SLIME]}, tmp_path / "slime" / f"{step}.pt")
        jsonl([{"prompt": "p", "completion": "c", "reward": 1, "step": step}], f"plain/part-{step}.jsonl")
        jsonl([LM_EVAL], f"lm_eval/samples_sums_{step}.jsonl")
        jsonl([{"version": 2, "samples": [INSPECT]}], f"inspect/{step}_sums.json")
        jsonl([{**PLAIN, "example_id": 3}], f"verifiers_results/{step}/results.jsonl")
    for name in set(FORMATS) - {"miles_columns"}:  # which is refused
        source = find_source(tmp_path / name)
        assert source.name == name
        assert ["9" in file.as_posix().removeprefix(tmp_path.as_posix()) for file in source.files] == [True, False], (
            name
        )


def test_plain_records_have_what_their_fields_say(jsonl):
    row = {
        "prompt": "p",
        "completion": "xy",
        "reward": 1,
        "answer": "7",
        "group": "g",
        "step": "4",
        "prompt_ids": [1],
        "ids": [2, 3, 4],
    }
    row |= {"mask": [1, 0, 1], "logprobs": [-0.5, None, -0.25], "finish_reason": "length", "turns": 2}
    (record,) = read(jsonl([row]))
    assert (record.prompt, record.completion, record.reward, record.group, record.step) == ("p", "xy", 1.0, "g", 4)
    assert record.answer == "7"
    assert (record.prompt_ids, record.ids, record.finish_reason) == ((1,), (2, 3, 4), "length")
    assert record.mask.tolist() == [True, False, True]
    np.testing.assert_array_equal(record.columns["behavior_logprob"], [-0.5, NAN, -0.25])
    assert record.special == "unknown"


def test_a_prompt_may_be_a_chat(jsonl):
    (record,) = read(jsonl([{"prompt": [{"role": "user", "content": "q"}], "completion": "a", "reward": 1}]))
    assert [(m.role, m.content, m.sampled) for m in record.messages] == [("user", "q", False), ("assistant", "a", True)]


def test_rewards_of_trl_are_the_weighted_sum_of_its_reward_columns(tmp_path):
    parquet(tmp_path / "completions_00001.parquet", trl_rows(1, (1.0, NAN, 0.25)))
    source = find_source(tmp_path)
    records = list(source.records())
    assert [record.reward for record in records] == [1.5, 0.5, 0.75]
    assert source.tally == {UNSCORED: 1}
    assert records[0].reward_parts == {"correct": 1.0, "form": 0.5} and records[0].special == "removed"
    # 2·1 and 2·0.25; TRL leaves a completion without any number out of the baseline.
    source = source_of(tmp_path, ImportConfig(reward_weights={"correct": 2.0}))
    assert [record.reward for record in source.records()] == [2.0, 0.5] and +source.tally == {UNSCORABLE: 1}
    parquet(tmp_path / "completions_00001.parquet", trl_rows(1, (1.0, 0.25, 0.5)))
    assert [record.reward for record in read(tmp_path, weights={"correct": 2.0})] == [2.0, 0.5, 1.0]


def test_a_reward_of_trl_that_is_null_counts_as_zero_and_is_counted(tmp_path):
    rows = [{**row, "reward_b": None} for row in trl_rows(1)]
    parquet(tmp_path / "completions_00001.parquet", rows)
    source = find_source(tmp_path)
    paid = [record.reward for record in source.records()]
    assert source.tally[UNSCORED] == len(rows) and len(paid) == len(rows)


NESTED = []
for _ in range(600):
    NESTED = [NESTED]
ODD = {
    "a list as its group": {"group": [1]},
    "an object as its group": {"group": {"a": 1}},
    "a step that no table holds": {"step": 2**63},
    "a step below 0": {"step": -1},
    "a reward that no float holds": {"reward": 10**400},
    "a reward nested deeper than Python goes": {"reward": NESTED},
}


@pytest.mark.parametrize("what", ODD)
def test_a_field_of_odd_type_or_size_is_refused_with_its_record(jsonl, what):
    good = {"prompt": "a", "completion": "b", "reward": 1.0, "group": 0, "step": 0}
    path = jsonl([good, {**good, **ODD[what]}])
    with pytest.raises(InputError, match="record 2: "):
        read(path)


def test_a_row_that_is_not_as_its_format_writes_it_is_refused_and_not_a_traceback(jsonl):
    rows = [{"nodes": 3, "rewards": 1.0, "id": "a"}]
    with pytest.raises(InputError, match="not as verifiers writes it"):
        list(find_source(jsonl(rows, "traces.jsonl"), "verifiers").records())


def test_verl_names_groups_by_uid_and_its_padding_rows_are_left_out_and_counted(jsonl):
    uids = ["abc_0_0", "abc_1_0", f"pad{'0f' * 16}_0_0"]
    rows = [{**verl_rows(1)[0], "uid": uid} for uid in uids]
    source = find_source(jsonl(rows, "1.jsonl"))
    assert [record.group for record in source.records()] == ["abc", "abc"]
    assert source.tally == {PADDED: 1}
    assert [record.group for record in read(jsonl(verl_rows(1), "2.jsonl"))] == [None, None]


@pytest.mark.parametrize("uid", ["gsm8k_12", "math_train_7", "gsm8k"])
def test_a_uid_of_verl_that_names_a_prompt_is_its_group_whole(jsonl, uid):
    rows = [row | {"uid": name} for row in verl_rows(2) for name in (uid, f"{uid}1")]
    assert [record.group for record in read(jsonl(rows, "1.jsonl"))] == [uid, f"{uid}1"] * 2


def test_a_multi_turn_dump_of_verl_is_refused_with_the_reason(jsonl):
    with pytest.raises(InputError, match=r"record 1 has 4 turns, .*no masks"):
        read(jsonl(verl_rows(1, num_turns=4)))


def test_prime_rl_prompts_end_where_the_loss_mask_begins(jsonl):
    (record,) = read(jsonl([PRIME], "step_3/rank_0.jsonl"))
    assert (record.prompt_ids, record.ids, record.step, record.reward) == ((5, 6), (7, 8, 9), 3, 1.0)
    assert record.mask.tolist() == [True, False, True]
    assert record.columns["behavior_logprob"].tolist() == [-0.5, 0, -0.25]
    assert record.columns["logprob"].tolist() == [-0.4, 0, -0.3]
    assert record.columns["advantage"].tolist() == [0.5, 0, 0.5]
    with pytest.raises(InputError, match="has no rewards, only advantages"):
        read(jsonl([{**PRIME, "rewards": None}]))


def test_traces_are_the_tokens_of_their_messages_in_a_row(jsonl):
    (record,) = read(jsonl([EPISODE], "traces.jsonl"))
    assert (record.prompt_ids, record.ids) == ((5, 6, 7), (8, 9, 4, 3, 2))
    # The last message has 2 tokens, of which the last was sampled.
    assert record.mask.tolist() == [True, True, False, False, True]
    assert (record.group, record.step, record.finish_reason) == ("g", 6, "length")
    assert record.reward == 0.5 * 1.0 + 0.25 and record.reward_parts == {"right": 1.0, "form": 0.25}
    np.testing.assert_array_equal(record.columns["behavior_logprob"], [-0.5, -0.25, NAN, NAN, -0.75])
    np.testing.assert_array_equal(record.columns["advantage"], [0.1, 0.1, NAN, NAN, 0.0])
    (alone,) = read(jsonl([TRACE], "alone.jsonl"))
    assert alone.ids == record.ids and alone.group is None and alone.step is None


def test_traces_that_are_no_rollouts_to_train_on_are_left_out_and_counted(jsonl):
    rows = [
        TRACE, {**TRACE, "agent": {"trainable": False}}, {**TRACE, "rewards": {}},
        {**TRACE, "nodes": [{"parent": None, "token_ids": [], "mask": []}]},
    ]  # fmt: skip
    source = find_source(jsonl(rows, "traces.jsonl"))
    assert len(list(source.records())) == 1
    assert source.tally.pop(UNREAD) == 2
    assert list(source.tally.values()) == [1, 1, 1]
    short = [TRACE["nodes"][0], {**TRACE["nodes"][1], "logprobs": [-0.5]}]
    with pytest.raises(InputError, match="record 1, message 1 has 1 logprobs"):
        read(jsonl([{**TRACE, "nodes": short}], "short.jsonl"))


def test_of_a_traces_branches_the_one_with_most_tokens_that_train_stays_in_the_group_of_the_first(jsonl):
    # A fork behind the first answer: its tokens train in the first branch, and are context in the second.
    fork = [*TRACE["nodes"], node(1, [4]), node(4, [3, 2, 1, 6, 5], [-0.5] * 4)]
    source = find_source(jsonl([TRACE, {**TRACE, "nodes": fork}], "traces.jsonl"))
    plain, forked = source.records()
    assert (forked.prompt_ids, forked.ids) == ((5, 6, 7, 8, 9, 4, 3), (2, 1, 6, 5)) and forked.mask.all()
    assert forked.opening == plain.prompt_ids == (5, 6, 7) and forked.prompt_key == plain.prompt_key
    assert source.tally[BRANCHED] == 1 and forked.reward == plain.reward
    # A branch in which nothing was sampled is no other rollout.
    idle = [*TRACE["nodes"], node(0, [7])]
    source = find_source(jsonl([{**TRACE, "nodes": idle}], "idle.jsonl"))
    (record,) = source.records()
    assert record.ids == plain.ids and record.opening is None and BRANCHED not in source.tally


def test_tokens_that_prime_rls_loss_masked_are_counted(jsonl):
    source = find_source(jsonl([{**PRIME, "is_masked": [False, False, True, False, False]}]))
    assert len(list(source.records())) == 1 and source.tally[MASKED] == 1


def test_lm_evals_samples_are_one_rollout_for_each_reply_under_the_first_filter(jsonl):
    loose = {**LM_EVAL, "filter": "flexible", "exact_match": 0.0}
    rows = [
        LM_EVAL,
        {**loose},
        {**LM_EVAL, "doc_id": 5, "arguments": [["Q: 2?", {"until": ["Q"]}]], "resps": [["a", "b"]]},
    ]
    source = find_source(jsonl(rows, "samples_sums.jsonl"))
    records = list(source.records())
    assert [(r.prompt, r.completion, r.reward, r.answer, r.step) for r in records] == [
        ("Q: 1+1?\nA:", "is 2", 1.0, "2", 0), ("Q: 2?", "a", 1.0, "2", 0)
    ]  # fmt: skip
    assert sum(source.tally.values()) == 2 and source.tally[ONE_SCORED] == 1
    choice = {**LM_EVAL, "resps": [[[-1.5, False]], [[-2.0, True]]]}
    with pytest.raises(InputError, match=r"record 1: resps has no single .*multiple choice"):
        read(jsonl([choice], "samples_choice.jsonl"))


def test_epochs_of_inspects_samples_are_groups_and_its_own_archive_names_the_command(jsonl, tmp_path, monkeypatch):
    samples = [
        INSPECT, {**INSPECT, "epoch": 2, "messages": [], "scores": {"match": {"value": "I"}}},
        {**INSPECT, "id": "s2", "scores": None}, {**INSPECT, "id": "s2", "scores": {"f1": {"value": 0.25}}},
    ]  # fmt: skip
    log = {"version": 2, "status": "success", "samples": samples}
    source = find_source(jsonl([log], "log.json"))
    records = list(source.records())
    assert [(r.group, r.reward, r.step, r.answer) for r in records] == [
        ("s1", 1.0, 0, "2"), ("s1", 0.0, 0, "2"), ("s2", 0.25, 0, "2")
    ]  # fmt: skip
    assert records[0].messages[-1].content.endswith("2") and records[1].messages[-1].content == "2"
    assert source.tally == {UNSCORED_SAMPLE: 1}
    with pytest.raises(InputError, match=f"1 × {UNSCORED_SAMPLE}"):
        read(jsonl([{**log, "samples": samples[2:3]}], "failed.json"))
    with pytest.raises(InputError, match=r"record 1: scores is 'good'"):
        read(jsonl([{**log, "samples": [{**INSPECT, "scores": {"x": {"value": "good"}}}]}], "odd.json"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "sums.eval").write_bytes(b"PK")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for path in (tmp_path / "logs", tmp_path / "logs" / "sums.eval"):
        with pytest.raises(InputError, match=r"inspect log convert --to json --output-dir DIR sums\.eval"):
            find_source(path)


def test_nemo_rl_padding_is_cut_off(jsonl):
    (record,) = read(jsonl([NEMO], "train_data_step7.jsonl"))
    assert (record.prompt_ids, record.ids, record.step, record.group) == ((5, 6), (7, 8), 7, None)
    assert record.columns["behavior_logprob"].tolist() == [-0.5, -0.2]
    assert record.columns["advantage"].tolist() == [0.5, 0.5]
    (record,) = read(jsonl([{**NEMO, "advantages": 0.25}], "train_data_step8.jsonl"))
    assert record.columns["advantage"].tolist() == [0.25, 0.25]


def test_nemo_rl_writes_a_sample_as_a_batch_of_one(jsonl):
    batch = {name: [value] for name, value in NEMO.items()}
    (record,) = read(
        jsonl([{**batch, "idx": 0, "rewards": [9.0], "filtered_rewards": [0.5]}], "train_data_step7.jsonl")
    )
    assert (record.prompt_ids, record.ids, record.reward) == ((5, 6), (7, 8), 0.5)
    assert record.columns["logprob"].tolist() == [-0.6, -0.3]


def test_slime_training_data_have_raw_rewards_by_their_place_in_the_batch(tmp_path):
    sample = {
        "tokens": torch.tensor([5, 6, 7]),
        "response_lengths": 2,
        "rewards": -0.7,
        "truncated": 1,
        "rollout_ids": 3,
    }
    samples = [{**sample, "rollout_position": place} for place in (2, 0)]
    pack = {"format_version": 2, "rollout_id": 8, "samples": samples, "raw_reward": [1.0, 0.5, 0.25]}
    torch.save(pack, tmp_path / "8.pt")
    assert [(r.reward, r.step, r.finish_reason) for r in read(tmp_path / "8.pt")] == [
        (1.0, 8, "length"),
        (0.25, 8, "length"),
    ]
    columns = {"tokens": [[5, 6], [5, 7]], "response_lengths": [1, 1], "rewards": [0.0, 0.0], "partition": [1, 0]}
    torch.save({"rollout_id": 9, "rollout_data": {**columns, "raw_reward": [1.0, 0.5, 0.25]}}, tmp_path / "9.pt")
    assert [r.reward for r in read(tmp_path / "9.pt")] == [1.0, 0.5]
    torch.save({"rollout_id": 9, "rollout_data": columns}, tmp_path / "9.pt")
    with pytest.raises(InputError, match=r"slime normalised, .*no raw_reward"):
        read(tmp_path / "9.pt")


def test_slime_samples_that_do_not_train_stay_in_their_group_and_evaluations_are_not_read(tmp_path):
    samples = [
        SLIME, {**SLIME, "status": "aborted", "rollout_id": 78, "reward": None},
        {**SLIME, "rollout_id": 79, "loss_mask": [0, 0]},
        {**SLIME, "rollout_id": 80, "loss_mask": None, "remove_sample": True},
    ]  # fmt: skip
    torch.save({"rollout_id": 4, "samples": samples}, tmp_path / "4.pt")
    torch.save({"rollout_id": 4, "samples": [SLIME]}, tmp_path / "eval_4.pt")
    source = find_source(tmp_path)
    assert [record.policy_tokens.sum() for record in source.records()] == [2, 0, 0]
    assert source.tally.pop(UNREAD) == 4 and source.tally == {UNFINISHED: 1, UNTRAINED: 2, LEFT: 1}


def test_slime_samples_and_training_columns(tmp_path):
    torch.save({"rollout_id": 4, "samples": [SLIME]}, tmp_path / "4.pt")
    (record,) = read(tmp_path / "4.pt")
    assert (record.prompt_ids, record.ids, record.group, record.step) == ((5, 6), (7, 8), 2, 4)
    assert (record.finish_reason, record.columns["behavior_logprob"].tolist()) == ("length", [-0.5, -0.25])
    columns = {
        "tokens": [torch.tensor([5, 6, 7])], "response_lengths": [2], "rewards": [-0.7], "raw_reward": [1.0],
        "loss_masks": [torch.tensor([1, 1])], "log_probs": [torch.tensor([-0.5, -0.1])],
        "advantages": [torch.tensor([-0.7, -0.7])],
    }  # fmt: skip
    torch.save({"rollout_id": 5, "rank": 0, "rollout_data": columns}, tmp_path / "5.pt")
    (record,) = read(tmp_path / "5.pt")
    assert (record.reward, record.step, record.ids) == (1.0, 5, (6, 7))
    np.testing.assert_allclose(record.columns["advantage"], [-0.7, -0.7], rtol=1e-6)
    torch.save({"rollout_id": 6, "samples": [{**SLIME, "reward": {"acc": 1}}]}, tmp_path / "6.pt")
    with pytest.raises(InputError, match=r"reward is a dict \(acc\)"):
        read(tmp_path / "6.pt")


def test_art_messages_say_what_the_policy_wrote(tmp_path):
    parquet(tmp_path / "0003.parquet", art_rows())
    records = read(tmp_path)
    assert [(record.group, record.step, record.reward) for record in records] == [(0, 3, 0.0), (1, 3, 1.0)]
    assert [message.sampled for message in records[0].messages] == [False, False, True]
    rows = art_rows()
    rows[0]["messages"][-1] = {**rows[0]["messages"][-1], "tool_calls": "[{}]"}
    parquet(tmp_path / "0003.parquet", rows)
    assert [message.lacks for message in read(tmp_path)[0].messages] == ["", "", "tool calls"]
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows[0]["messages"][-1]["tool_calls"] = json.dumps([called])
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    parquet(tmp_path / "0003.parquet", [{**row, "tools": json.dumps(tools)} for row in rows])
    record = read(tmp_path)[0]
    assert record.messages[-1].calls == ({"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},)
    assert list(record.tools) == tools and not record.messages[-1].lacks


def test_areal_tasks_are_groups_and_its_newest_weights_the_step(tmp_path, jsonl):
    for version, task in ((9, 40), (10, 41)):
        rows = [AREAL | {"task_id": task, "sample_idx": n, "tail_version": version} for n in range(2)]
        jsonl(rows, f"logs/rollout/{version}/{task}.jsonl")
    jsonl([AREAL], "logs/eval-rollout/9/3.jsonl")
    records = read(tmp_path / "logs")
    assert [(r.step, r.group, r.n_tokens, r.special) for r in records] == [
        *[(9, 40, 3, "kept")] * 2,
        *[(10, 41, 3, "kept")] * 2,
    ]


def test_tables_that_trackio_holds_are_read_of_its_newest_run(tmp_path, jsonl):
    tables = [{"_type": "trackio.table", "_value": trl_rows(step)} for step in (1, 2)]
    with closing(sqlite3.connect(tmp_path / "project.db")) as database, database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        logged = [("old", 1, {"completions": tables[0]}), ("new", 1, {"loss": 0.5})]
        logged += [("new", step, {"completions": table}) for step, table in enumerate(tables, start=1)]
        rows = [(run, step, json.dumps(metrics)) for run, step, metrics in logged]
        database.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", rows)
    records = read(tmp_path / "project.db")
    assert [r.step for r in records] == [row["step"] for step in (1, 2) for row in trl_rows(step)]
    source = source_of(tmp_path / "project.db", ImportConfig())
    assert len(list(source.records())) == len(records)
    assert source.tally["run of trackio was left out: old; the newest, new, is read"] == 1
    assert [r.completion for r in read(jsonl(tables[:1], "completions.json"))] == [
        row["completion"] for row in trl_rows(1)
    ]
    (tmp_path / "other.db").write_bytes(b"no database, but long enough to be looked at" * 9)
    with pytest.raises(InputError, match=r"other\.db cannot be read"):
        read(tmp_path / "other.db")
    for broken in (
        {"_type": "trackio.table"},
        {"_type": "trackio.table", "_value": 3},
        {"columns": ["a"], "data": [1]},
    ):
        with pytest.raises(InputError, match="holds no rows"):
            read(jsonl([broken], "broken.json"))


PLAIN = {"prompt": "p", "completion": "c", "reward": 1.0}
TOKENS = {**PLAIN, "ids": [1, 2, 3], "logprobs": [-1.0, -1.0, -1.0]}
REFUSED = {
    "no reward": ([PLAIN, {"prompt": "p", "completion": "c"}], r"record 2: reward is missing"),
    "reward a text": ([{**PLAIN, "reward": "good"}], r"record 1: reward is 'good'; it must be a number"),
    "no completion": ([{"prompt": "p", "reward": 1.0, "completion": None}], "record 1: completion is null"),
    "mixed": ([PLAIN, {**PLAIN, "group": 1}], "record 2 has group but .*record 1 has not"),
    "several turns": ([{**PLAIN, "turns": 3}], "3 turns but no ids with a mask"),
    "one too many": ([{**TOKENS, "logprobs": [-1.0] * 4}], "4 entries but there are 3 completion tokens .*off by one"),
    "far too few": ([{**TOKENS, "logprobs": [-1.0]}], "1 entries but there are 3 completion tokens; write"),
    "mask too short": ([{**TOKENS, "mask": [1, 1]}], "mask has 2 entries"),
    "mask of other numbers": ([{**TOKENS, "mask": [1, 2, 0]}], "mask is .* it must be a list of 0 and 1"),
    "mask without ids": ([{**PLAIN, "mask": [1]}], "a mask but no ids"),
    "probabilities": ([{**TOKENS, "logprobs": [0.5, 0.9, 0.1]}], "no log-probability is above 0"),
    "placeholders": ([{**TOKENS, "logprobs": [0, 0, 0]}], "0 at all 3 policy tokens, which is a placeholder"),
    "an unknown ending": ([{**PLAIN, "finish_reason": "eos"}], "finish_reason is 'eos'; write stop, length, turns"),
    "negative ids": ([{**TOKENS, "ids": [1, -2, 3]}], "it must be a list of token ids"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_record_is_refused_with_file_number_and_remedy(jsonl, what):
    rows, sentence = REFUSED[what]
    with pytest.raises(InputError, match=sentence) as caught:
        read(jsonl(rows))
    assert "rollouts.jsonl, record" in str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


FAULTS = {
    "reward null": ({**PLAIN, "reward": None}, "record without a finite reward was left out"),
    "reward not finite": ({**PLAIN, "reward": NAN}, "record without a finite reward was left out"),
    "infinite": ({**TOKENS, "logprobs": [-1.0, -float("inf"), -1.0]}, "logprobs not a finite number, and so not rec"),
    "null inside the mask": ({**TOKENS, "logprobs": [-1.0, None, -1.0]}, "logprobs not a finite number, and so not"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_wrong_with_one_record_is_counted_with_its_place_and_strict_reading_stops(jsonl, what):
    row, sentence = FAULTS[what]
    good = {name: [-1.0] * 3 if name == "logprobs" else value for name, value in row.items()} | {"reward": 1.0}
    source = find_source(jsonl([good, *[row] * 4, good]))
    records = list(source.records())
    (line,) = source.tally.lines()
    assert line.startswith("4 × " + sentence) and "rollouts.jsonl, record 2" in line and line.endswith("…).")
    assert "record 5" not in line  # the first three are named
    if "logprobs" in row:
        assert [np.isnan(one.columns["behavior_logprob"]).tolist() for one in records[1:3]] == [
            [False, True, False]
        ] * 2
    assert len(records) == (6 if "logprobs" in row else 2)
    source = find_source(jsonl([good, row]))
    source.tally.strict = True
    with pytest.raises(InputError, match=r"record 2.*--strict"):
        list(source.records())


def test_placeholders_outside_the_mask_are_not_read_and_counted(jsonl):
    row = {**TOKENS, "mask": [1, 0, 1], "logprobs": [-1.0, 0.0, -1.0]}
    source = find_source(jsonl([row]))
    list(source.records())
    assert sum(source.tally.values()) == 1 and "outside the mask" in next(iter(source.tally))


def test_what_is_no_source_says_what_would_be(tmp_path, jsonl):
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "none.jsonl", "auto", "does not exist"),
        (tmp_path / "empty", "auto", "has no file that ends in"),
        (jsonl([{"question": "q"}], "other.jsonl"), "auto", "in no known format: other.jsonl has question"),
        (jsonl([PLAIN]), "parquet", "--format is 'parquet'"),
        (tmp_path, "slime", r"no file of the format slime, which are called \*\.pt"),
    ]
    for path, name, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            find_source(path, name)
    with pytest.raises(InputError, match="holds no rollouts"):
        read(jsonl([]), "plain")


def test_format_overrides_what_would_be_recognised(jsonl):
    rows = [{**PLAIN, "input": "other", "output": "o", "score": 0.0, "step": 1}]
    assert find_source(jsonl(rows)).name == "verl"
    assert read(jsonl(rows), "plain")[0].prompt == "p"


# Made from the description of prime-rl's format (its file monitor and trace updates), not recorded by prime-rl.
def stream_episode(trace, group, dispatched, nodes=None, reward=1.0):
    nodes = nodes or [node(None, [5, 6]), node(0, [7, 8], [-0.5, -0.25]), node(1, [9]), node(2, [4], [-0.125])]
    trace = {**TRACE, "id": trace, "nodes": nodes, "rewards": {"right": {"score": reward}}}
    return {"group": {"id": group}, "run": {"work": {"step": dispatched}}, "traces": [trace]}


def shipped(trace, step, tokens=6):
    advantages = [None, None, 0.5, 0.5, None, 0.5][:tokens]
    return {
        "version": 1, "trace_id": trace, "info": {"effective": True, "ship": {"step": step}},
        "branches": [{"index": 0, "advantages": advantages}],
    }  # fmt: skip


def trained(trace):
    numbers = {"trainer_logprobs": [0, 0, -0.4, -0.3, 0, -0.2], "entropies": [0, 0, 1.5, 0.75, 0, 0.25]}
    return {"version": 1, "trace_id": trace, "info": {}, "branches": [{"index": 0, **numbers}]}


def prime_traces(jsonl, stream, orchestrator, trainer=()):
    for name, rows in (("stream", stream), ("annotations/orchestrator", orchestrator), ("annotations/rank_0", trainer)):
        if rows:
            path = jsonl(rows, f"run/monitors/file/traces/{name}/00000.jsonl")
    return path.parents[2] if path.parents[1].name == "annotations" else path.parents[1]


def test_prime_rl_traces_get_their_annotations_and_come_by_the_step_that_trained_on_them(jsonl):
    stream = [stream_episode(name, name[0], 0) for name in ("b1", "a1", "e1", "b2", "a2")]
    orchestrator = [shipped("a1", 3), shipped("a2", 3), shipped("b1", 4), shipped("b2", 4)]
    root = prime_traces(jsonl, stream, orchestrator, [trained(name) for name in ("a1", "a2", "b1", "b2")])
    source = find_source(root)
    records = list(source.records())
    assert source.name == "prime_rl_traces"
    assert [(r.step, r.group, r.place.number) for r in records] == [(3, "a", 2), (3, "a", 5), (4, "b", 1), (4, "b", 4)]
    columns = {name: values.tolist() for name, values in records[0].columns.items()}
    assert (records[0].prompt_ids, records[0].ids) == ((5, 6), (7, 8, 9, 4))
    np.testing.assert_array_equal(columns["behavior_logprob"], [-0.5, -0.25, NAN, -0.125])
    np.testing.assert_allclose(columns["logprob"], [-0.4, -0.3, NAN, -0.2], rtol=1e-6)
    np.testing.assert_array_equal(columns["entropy"], [1.5, 0.75, NAN, 0.25])
    np.testing.assert_array_equal(columns["advantage"], [0.5, 0.5, NAN, 0.5])
    assert source.tally[NOT_SHIPPED] == 1 and source.tally[ROUNDED] == 4
    assert find_source(root / "stream" / "00000.jsonl").name == "prime_rl_traces"


def test_prime_rl_traces_take_the_newest_annotation_and_leave_out_what_is_not_covered(jsonl):
    stream = [stream_episode(name, "g", 0) for name in ("a", "b", "c")]
    late = {**shipped("a", 2), "branches": [{"index": 0, "advantages": [None, None, 0.75, 0.75, None, 0.75]}]}
    orchestrator = [shipped("a", 1), shipped("b", 1, tokens=5), shipped("c", 1), late, shipped("lost", 1)]
    source = find_source(prime_traces(jsonl, stream, orchestrator))
    records = list(source.records())
    assert [(r.step, r.place.number) for r in records] == [(1, 3), (2, 1)]
    assert records[1].columns["advantage"][0] == 0.75
    assert source.tally[UNCOVERED] == 1 and source.tally[MISSING] == 1


def test_prime_rl_tokens_that_the_loss_left_out_are_counted_and_kept(jsonl):
    stream = [stream_episode(name, "g", 0) for name in ("a", "b", "c")]
    left_out = trained("a")
    left_out["branches"][0]["is_masked"] = [False, False, True, False, False, True]
    trainer = [left_out, trained("b"), trained("c")]
    source = find_source(prime_traces(jsonl, stream, [shipped(name, 1) for name in "abc"], trainer))
    records = list(source.records())
    assert source.tally[MASKED] == 2
    assert [r.mask.tolist() for r in records] == [[True, True, False, True]] * 3


def test_prime_rl_stream_without_annotations_is_read_as_traces_by_the_step_that_asked_for_them(jsonl):
    stream = [stream_episode("a", "g", 0), stream_episode("b", "g", 0)]
    assert [r.step for r in read(prime_traces(jsonl, stream, []))] == [0, 0]


def test_a_chunk_that_is_being_compressed_is_read_once(jsonl):
    root = prime_traces(jsonl, [stream_episode("a", "g", 0)], [])
    with pa.output_stream(str(root / "stream" / "00000.jsonl.zst"), compression="zstd") as file:
        file.write(b"")
    assert len(read(root)) == 1


def test_miles_columns_have_no_rewards_and_are_refused(tmp_path):
    row = {"sample_index": 0, "response_length": 2, "total_length": 4, "tokens": [5, 6, 7, 8], "loss_mask": [1, 1]}
    parquet(tmp_path / "dashboard_columns" / "rollout_3.parquet", [{**row, "rollout_log_probs": [-0.5, -0.25]}])
    with pytest.raises(InputError, match=r"record 1: .*dashboard_columns .*no rewards"):
        read(tmp_path)


@pytest.mark.parametrize("divide", ["none", "group", "batch"])
@pytest.mark.parametrize("seed", range(4))
def test_weights_are_found_from_advantages_however_they_were_scaled(divide, seed):
    random = np.random.default_rng(seed)
    w = np.array([1.0, -0.002, 0.0, 0.5])  # the third is a number that was logged
    x = random.random((24, 4, 4)) * [1.0, 300.0, 50.0, 1.0]
    reward = x @ w
    a = reward - reward.mean(axis=1, keepdims=True)
    if divide == "group":
        a /= reward.std(axis=1, ddof=1, keepdims=True) + 1e-4
    elif divide == "batch":
        a /= reward.std(ddof=1) + 1e-4
    groups = [(one, part - part.mean(axis=0)) for one, part in zip(a, x, strict=True)]
    np.testing.assert_allclose(fitted_weights(groups), w, rtol=1e-9, atol=1e-12)
    if divide == "none":  # then the scale is known, too
        doubled = [(2 * one, part) for one, part in groups]
        np.testing.assert_allclose(fitted_weights(doubled), 2 * w, rtol=1e-9, atol=1e-12)
    other = random.permutation(a.ravel()).reshape(a.shape)
    rows = [
        {"step": 1, "prompt": str(g), "completion": "", "advantage": other[g, k]}
        | dict(zip("abcd", x[g, k].tolist(), strict=True))
        for g in range(24) for k in range(4)
    ]  # fmt: skip
    weights, said = trl_weights(rows)
    assert weights == dict.fromkeys("abcd", 1.0) and "no weights of these columns" in said


def test_weights_are_found_where_a_question_stands_twice_in_a_row(tmp_path):
    random, rows = np.random.default_rng(0), []
    for prompt in ("p", "p", "q", "r"):
        x = random.random((6, 2)) * [1.0, 100.0]
        reward = x @ [1.0, -0.01]
        a = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-4)
        rows += [
            {"step": 1, "prompt": prompt, "completion": "", "right": r, "logged": n, "advantage": one}
            for (r, n), one in zip(x.tolist(), a.tolist(), strict=True)
        ]
    assert trl_weights(rows)[0] == {"right": 1.0, "logged": -0.01}


def test_an_infinite_log_probability_is_not_recorded_whatever_its_sign(jsonl):
    source = find_source(jsonl([{**TOKENS, "logprobs": [-1.0, float("inf"), -1.0]}]))
    (record,) = source.records()
    assert np.isnan(record.columns["behavior_logprob"]).tolist() == [False, True, False]
