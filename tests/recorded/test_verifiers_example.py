"""Traces that verifiers 0.4.0 itself wrote are read as what they are."""

import json
from pathlib import Path

import numpy as np

from otb_analysis.config import ImportConfig
from otb_analysis.recorded.formats import find_source
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.traces import UNPAID
from otb_analysis.store import RunStore

TRACES = Path(__file__).parents[2] / "docs" / "examples" / "verifiers" / "traces.jsonl"


def test_it_was_written_by_verifiers_itself():
    rows = [json.loads(line) for line in TRACES.read_text().splitlines()]
    assert {trace["verifiers"]["version"] for row in rows for trace in row["traces"]} == {"0.4.0"}


def test_its_tokens_rewards_and_turns_become_a_run(tmp_path):
    source = find_source(TRACES)
    assert source.name == "verifiers"
    records = list(source.records())
    assert len(records) == 9 and not source.tally[UNPAID]
    raw = [json.loads(line)["traces"][0] for line in TRACES.read_text().splitlines()]
    for record, trace in zip(records, raw, strict=True):
        sampled = [node for node in trace["nodes"] if node["sampled"]]
        assert record.mask.sum() == sum(map(len, (node["logprobs"] for node in sampled))) == trace["num_output_tokens"]
        given = record.columns["behavior_logprob"]
        np.testing.assert_array_equal(given[record.mask], [p for node in sampled for p in node["logprobs"]])
        assert np.isnan(given[~record.mask]).all()
        assert record.reward == 1.0 * trace["rewards"]["correct"]["score"] + 0.5 * trace["rewards"]["form"]["score"]
    store = RunStore(import_rollouts(TRACES, ImportConfig(root=tmp_path)))
    (step,) = store.steps_df().to_dict("records")
    assert (step["n_prompts"], step["n_rollouts"]) == (3, 9)
    assert store.sql("select max(turn) as last from tokens")["last"].item() == 1  # two turns


def test_an_evaluation_may_end_in_any_order_and_failed_episodes_are_counted(tmp_path):
    lines = TRACES.read_text().splitlines()
    failed = json.loads(lines[0]) | {"ok": False, "traces": []}
    mixed = tmp_path / "traces.jsonl"
    mixed.write_text("\n".join([json.dumps(failed), *lines[::3], *lines[1::3], *lines[2::3]]) + "\n")
    source = find_source(mixed)
    assert len(list(source.records())) == 9 and source.tally[UNPAID] == 1
    store = RunStore(import_rollouts(mixed, ImportConfig(root=tmp_path)))
    assert store.complete_steps() == [0]
    assert store.sql('select count(*) as n from rollouts group by "group"')["n"].tolist() == [3, 3, 3]
