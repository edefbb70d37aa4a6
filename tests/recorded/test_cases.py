"""Situations that people reported, rebuilt as small inputs (`cases/`): each is read right, and what is odd is said.

The right answers were worked out with NumPy or from the trainers' sources, independently of this package.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.answers.run import RunAnswers
from otb_analysis.checks.advantages import advantage_lines, check_advantages
from otb_analysis.checks.bookkeeping import TrainerLoss, check_bookkeeping
from otb_analysis.config import ImportConfig, MeasureConfig, Schedule, ScoreConfig
from otb_analysis.errors import InputError
from otb_analysis.phases import NOTES
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore

CASES = Path(__file__).with_name("cases")


@pytest.fixture
def read(tmp_path):
    """Import a case; return its run and what was noted."""

    def read(path, **settings):
        NOTES.clear()
        path = path if isinstance(path, Path) else CASES / path
        store = RunStore(import_rollouts(path, ImportConfig(root=tmp_path / "runs", run="run", **settings)))
        return store, "\n".join(NOTES)

    return read


def groups(store):
    """Return the sizes of groups by step, dead groups, and mean reward by step."""
    steps, rollouts = store.steps_df(), store.rollouts_df()
    sizes = rollouts.groupby(["step", "group"]).size().to_numpy()
    dead = int(steps["n_zero_variance_groups"].sum()), len(sizes)
    return set(sizes.tolist()), dead, steps["reward_mean"].to_numpy()


def said(store):
    return " ".join(advantage_lines(check_advantages(store)))


@pytest.mark.parametrize("file", ["rollouts.jsonl", "no-group.jsonl"])
def test_groups_of_one_that_trained_on_raw_rewards(read, file):
    store, notes = read(f"01-own-group-each/{file}")
    assert groups(store)[0] == {4} and groups(store)[1][1] == 24
    assert "those of none (the raw rewards, as from groups of one)" in said(store)
    assert ("the trainer's baseline saw one rollout" in notes) == (file == "rollouts.jsonl")


def test_a_leave_one_out_deviation_of_rounding_is_named_with_its_record(read):
    check = check_advantages(read("02-loo-std-spike/rollouts.jsonl")[0])
    best = check.matches[0]
    assert best.convention.startswith("leave-one-out mean over leave-one-out") and best.n_differ == 1
    assert check.n_rollouts == 96 and best.first == "rollouts.jsonl, record 57"
    text = " ".join(advantage_lines(check))
    assert "-2075.6 recorded" in text and "record 57" in text
    assert "other rewards are equal: a standard deviation of 0 was divided by" in text


def test_weights_of_trl_are_those_of_its_advantages(read):
    store, notes = read("06-trl-reward-weights")
    assert "Reward = correct − 0.001 × length" in notes
    np.testing.assert_allclose(groups(store)[2], [0.399, 0.494, 0.393, 0.162], atol=6e-4)
    assert "those of grpo" in said(store) and check_advantages(store).n_rollouts == 64


def test_numbers_that_a_reward_function_logged_are_no_rewards(read):
    store, notes = read("07-trl-log-extra")
    assert "Reward = correct: the weights that give the recorded advantages" in notes
    sizes, dead, mean = groups(store)
    assert sizes == {4} and dead == (5, 16)
    np.testing.assert_allclose(mean, [0.625, 0.8125, 0.5625, 0.6875])


def test_weights_that_give_the_advantages_of_no_sum_are_said_to_be_missing(read, tmp_path):
    folder = tmp_path / "trl"
    shutil.copytree(CASES / "06-trl-reward-weights", folder)
    import pandas as pd

    for path in folder.iterdir():
        frame = pd.read_parquet(path)
        frame["advantage"] = frame["advantage"].to_numpy()[::-1]
        frame.to_parquet(path)
    store, notes = read(folder)
    assert "Reward = correct + length, but no weights of these columns give the recorded advantages" in notes
    assert said(store).startswith("No convention reproduces")


def test_advantages_that_are_nan_are_counted_and_the_rest_is_audited(read):
    store, notes = read("08-nan-advantages/rollouts.jsonl")
    assert "4 × advantages not a finite number" in notes and "record 13, token 0" in notes
    check = check_advantages(store)
    assert "grpo" in check.exact and check.n_rollouts == 20 and check.n_groups == 5
    with pytest.raises(InputError, match=r"record 13.*--strict"):
        read("08-nan-advantages/rollouts.jsonl", strict=True, if_exists="replace")


@pytest.mark.parametrize("path", ["09-open-instruct", "09-open-instruct/run1_rollouts_000000.jsonl"])
def test_open_instruct_writes_ids_and_one_advantage(read, path):
    store, _ = read(path)
    sizes, (_, n), _ = groups(store)
    assert sizes == {4} and n == 9 and store.info["config"]["source"]["format"] == "open_instruct"
    assert "grpo with ddof 0" in check_advantages(store).exact


def test_a_completion_that_no_function_could_score_is_left_out(read):
    store, notes = read("11-trl-unscorable")
    assert store.steps_df()["n_rollouts"].sum() == 63
    assert "1 × completion that no reward function could score" in notes
    assert "completions_00002.parquet, record 5" in notes and "grpo" in check_advantages(store).exact


@pytest.mark.parametrize("size", [0, 4])
def test_a_question_that_stands_twice_in_a_batch_is_two_groups(read, size):
    sizes, dead, _ = groups(read("13-same-question-twice", group_size=size)[0])
    assert sizes == {4} and dead == (10, 15)


@pytest.mark.parametrize("folder", ["", "folded"])
def test_the_last_output_of_a_session_counts(read, tmp_path, folder):
    alone = tmp_path / "dump"
    alone.mkdir()
    for file in (CASES / "14-session-several-outputs" / folder).glob("*.jsonl"):
        shutil.copy(file, alone)
    store, notes = read(alone)
    sizes, dead, mean = groups(store)
    assert sizes == {4} and dead == (1, 12)
    np.testing.assert_allclose(mean, [0.583, 0.667, 0.417, 0.5], atol=5e-4)
    assert "42 × output before the last of its session was left out" in notes


@pytest.mark.parametrize("file", ["rollouts.jsonl", "null.jsonl"])
def test_a_log_probability_that_is_nan_is_counted_and_its_token_not_compared(read, file):
    store, notes = read(f"15-nan-logprob/{file}")
    assert "1 × logprobs not a finite number" in notes and f"{file}, record 11, token 1" in notes
    assert store.tokens_df()["behavior_logprob"].isna().sum() == 1


def test_the_later_attempt_of_a_resumed_run_counts(read):
    store, notes = read("17-resumed-steps/rollouts.jsonl")
    assert groups(store)[0] == {4} and store.complete_steps() == [1, 2, 3, 4, 5, 6, 7]
    assert "2 × step was replaced by a later attempt" in notes
    # Of two attempts, each of 12 records from 49 on, the later begins at record 73.
    assert store.rollouts_df([5])["source_record"].min() == 73


def test_two_attempts_sorted_into_one_step_are_noted(read, tmp_path):
    lines = (CASES / "17-resumed-steps" / "rollouts.jsonl").read_text().splitlines(keepends=True)
    import json

    path = tmp_path / "sorted.jsonl"
    path.write_text("".join(sorted(lines, key=lambda line: json.loads(line)["step"])))
    store, notes = read(path)
    assert groups(store)[0] == {4, 8} and "6 × group has more than the usual 4 rollouts" in notes


@pytest.mark.parametrize("name", ["ROLLOUTS.JSONL", "ndjson.ndjson", "array.json", "completions.table.json", "hf"])
def test_other_dialects_are_read(read, name):
    store, _ = read(f"19-other-dialects/{name}")
    assert groups(store)[0] == {8} and groups(store)[2].tolist() == [0.5]


def test_what_cannot_be_read_names_the_conversion(read):
    with pytest.raises(InputError, match="JSON lines or Parquet"):
        read("19-other-dialects/rollouts.msgpack")


CONVENTIONS = {
    "clipped": ["grpo, clipped to -1 … 1"],
    "length_normalised": ["group_mean, over the rollout's length"],
    "no_std_div_when_zero": ["grpo"],
    "only_positive": ["group_mean, clipped below at 0"],
    "rloo_then_whitened": [],
    "shifted_one_group": ["group_mean, shifted by one group"],
    "token_whitened": [],
    "trl_batch": ["group mean over the step's standard deviation"],
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_advantages_are_named_however_they_were_scaled(read, name):
    check = check_advantages(read(f"28-advantage-conventions/{name}.jsonl")[0])
    if CONVENTIONS[name]:
        assert set(CONVENTIONS[name]) <= set(check.exact)
    else:
        (match,) = check.scaled
        assert match.convention == "reinforce_plus_plus_baseline" and match.factor == pytest.approx(1.006, abs=5e-4)


def test_a_loss_that_accumulation_divided_once_more_is_a_quarter_of_the_rebuilt_norm(tmp_path):
    path = CASES / "23-norm-over-accumulation" / "rollouts.jsonl"
    exact = MeasureConfig(exact=Schedule(every=1))
    store = RunStore(score(ScoreConfig(rollouts=path, model="demo", root=tmp_path, measure=exact)))
    checked = check_bookkeeping(store, "grpo", TrainerLoss("token_mean", 4))
    assert checked.advantages is not None and "grpo" in checked.advantages.exact
    # By autograd alone, in a script that shares no code with this package
    assert [check.rebuilt for check in checked.norms] == pytest.approx([0.2091, 0.4873, 0.4792], rel=1e-3)
    assert [check.factor for check in checked.norms] == pytest.approx([0.25] * 3, rel=1e-3)


def test_two_steps_of_125_times_the_usual_norm_are_named(read):
    run = RunAnswers(read("27-grad-norm-spike/rollouts.jsonl")[0])
    norms = [one for one in run.outliers if one.column == "grad_norm"]
    assert {one.step: one.value for one in norms} == {41: 37.5, 47: 37.5}
    assert [one.multiple for one in norms] == pytest.approx([125, 125], rel=0.1)
