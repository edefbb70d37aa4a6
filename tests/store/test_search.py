import numpy as np
import pandas as pd
import pytest

from otb_analysis.store import RolloutFilter, RunStore, RunWriter, StepTables, find_rollouts, reward_histogram


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Three steps of two prompts with two rollouts each; the first prompt has equal rewards, rollout 3 two turns."""
    writer = RunWriter.create(tmp_path_factory.mktemp("runs"), "mine", {})
    for step in range(3):
        rollouts = {
            "group": [0, 0, 1, 1], "rollout": [0, 1, 2, 3], "prompt": ["2+2="] * 2 + ["What is 100 % of 3?"] * 2,
            "completion": ["4", "4", "3", "Three"], "reward": [1.0, 1.0, 0.0, 1.0 + step], "length": [1, 2, 3, 4],
            "turns": [1, 1, 1, 2],
            "finish_reason": ["stop", "stop", "length", "stop"],
        }  # fmt: skip
        writer.write_step(step, StepTables(None, rollouts, {"reward_mean": 0.5}))
    writer.finish()
    return RunStore(writer.path)


@pytest.mark.parametrize(
    ("asked", "rollouts"),
    [
        (RolloutFilter(), [0, 1, 2, 3] * 3),
        (RolloutFilter(steps=(1, 1)), [0, 1, 2, 3]),
        (RolloutFilter(reward=(2.0, 3.0)), [3, 3]),
        (RolloutFilter(length=(3, 4), steps=(0, 0)), [2, 3]),
        (RolloutFilter(finish_reasons=("length",)), [2, 2, 2]),
        (RolloutFilter(equal=True, steps=(2, 2)), [0, 1]),
        (RolloutFilter(equal=False, steps=(2, 2)), [2, 3]),
        (RolloutFilter(turns=2), [3, 3, 3]),
        (RolloutFilter(text="THREE", steps=(0, 0)), [3]),
        (RolloutFilter(text="100 %", steps=(0, 0)), [2, 3]),  # a percent sign is no wildcard
        (RolloutFilter(text="'; DROP TABLE rollouts; --"), []),
    ],
)
def test_filters_are_those_of_a_loop_over_the_rows(store, asked, rollouts):
    table, total = find_rollouts(store, asked)
    assert table["rollout"].tolist() == rollouts and total == len(rollouts)


def test_a_long_list_is_cut_and_counted(store):
    table, total = find_rollouts(store, RolloutFilter(), most=5)
    assert (len(table), total) == (5, 12)


def test_few_rewards_have_a_row_each(store):
    table = reward_histogram(store, RolloutFilter())
    counted = {(int(r.step), r.reward): int(r.n) for r in table.itertuples()}
    assert counted == {(0, 0.0): 1, (0, 1.0): 3, (1, 0.0): 1, (1, 1.0): 2, (1, 2.0): 1, (2, 0.0): 1, (2, 1.0): 2,
                       (2, 3.0): 1}  # fmt: skip
    assert set(table["height"]) == {0.0} and set(table["width"]) == {1}


def test_many_rewards_and_steps_are_binned(tmp_path):
    writer = RunWriter.create(tmp_path, "long", {})
    reward = np.linspace(-1.0, 1.0, 21)
    for step in range(130):
        rollouts = {"group": [0] * 21, "rollout": range(21), "prompt": ["p"] * 21, "completion": ["c"] * 21,
                    "reward": reward, "length": [1] * 21, "finish_reason": ["stop"] * 21}  # fmt: skip
        writer.write_step(step, StepTables(None, rollouts, {"reward_mean": 0.0}))
    writer.finish()
    table = reward_histogram(RunStore(writer.path), RolloutFilter())
    assert set(table["width"]) == {3} and table["step"].nunique() == 44 and table["n"].sum() == 130 * 21
    expected = pd.Series(np.minimum(9, np.floor((reward + 1) / 0.2 + 1e-9)) * 0.2 - 1).value_counts()
    np.testing.assert_allclose(np.sort(table["reward"].unique()), np.sort(expected.index), atol=1e-12)


def test_a_run_without_rollouts_has_none(tmp_path):
    writer = RunWriter.create(tmp_path, "bare", {})
    writer.write_step(0, StepTables(None, None, {"reward_mean": 0.0}))
    writer.finish()
    store = RunStore(writer.path)
    assert find_rollouts(store, RolloutFilter(text="x"))[1] == 0 and reward_histogram(store, RolloutFilter()).empty
