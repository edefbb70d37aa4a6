import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import InputError
from otb_analysis.store import (
    RolloutFilter,
    RunStore,
    RunWriter,
    StepTables,
    compact,
    facts_of_rollouts,
    find_rollouts,
    reward_histogram,
)
from otb_analysis.store.asked import DISAGREEING, ORDERS


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Three steps of two prompts with two rollouts each; the first prompt has equal rewards, rollout 3 two turns."""
    writer = RunWriter.create(tmp_path_factory.mktemp("runs"), "mine", {})
    for step in range(3):
        rollouts = {
            "group": [0, 0, 1, 1], "rollout": [0, 1, 2, 3], "prompt": ["2+2="] * 2 + ["What is 100 % of 3?"] * 2,
            "completion": ["4", "4", "3", "Three"], "reward": [1.0, 1.0, 0.0, 1.0 + step], "length": [1, 2, 3, 4],
            "turns": [1, 1, 1, 2], "reward_form": [0.0, 0.5, 0.0, None],
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
        (RolloutFilter(where="3 <= length <= 4", steps=(0, 0)), [2, 3]),
        (RolloutFilter(finish_reasons=("length",)), [2, 2, 2]),
        (RolloutFilter(equal=True, steps=(2, 2)), [0, 1]),
        (RolloutFilter(equal=False, steps=(2, 2)), [2, 3]),
        (RolloutFilter(where="turns >= 2"), [3, 3, 3]),
        (RolloutFilter(where="reward == 0 and tokens > 2"), [2, 2, 2]),
        (
            RolloutFilter(where="0 < reward < 3 and not tokens <= 2 or step == 1 and finish_reason == 'length'"),
            [3, 2, 3],
        ),
        (RolloutFilter(where="-length * 2 + 1 == -7 or length / turns < 1.5"), [0, 3, 0, 3, 0, 3]),
        (RolloutFilter(where="length / reward > 100"), [2, 2, 2]),  # a division by 0 is infinite
        (RolloutFilter(where="reward_form == 0.5", steps=(0, 1)), [1, 1]),
        (RolloutFilter(where="not reward_form == 0.5", steps=(0, 0)), [0, 2]),  # rollout 3 has none
        (RolloutFilter(text="THREE", steps=(0, 0)), [3]),
        (RolloutFilter(text="100 %", steps=(0, 0)), [2, 3]),  # a percent sign is no wildcard
        (RolloutFilter(text="'; DROP TABLE rollouts; --"), []),
    ],
)
def test_filters_are_those_of_a_loop_over_the_rows(store, asked, rollouts):
    table, total = find_rollouts(store, asked)
    assert table["rollout"].tolist() == rollouts and total == len(rollouts)


@pytest.mark.parametrize(
    "where",
    ["reward = 0", "reward", "(", "'", "\x00", "reward > 'x'", "__import__('os')", "reward.real > 0", "reward ** 2 > 0",
     "length > 9 ** 999", "lambda: 0", "rewards > 0", "not " * 5000 + "reward", "length > 1" + "0" * 400],
)  # fmt: skip
def test_what_is_no_condition_is_refused_in_a_sentence_that_names_the_columns(where, store):
    with pytest.raises(InputError, match=r"tokens, step.*reward_form") as refused:
        find_rollouts(store, RolloutFilter(where=where))
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("where", ["0" + "<1" * 20_000, "0 <= reward" + " and 1 < 2" * 10_000])
def test_a_condition_that_would_overflow_the_stack_is_refused(where, store):
    with pytest.raises(InputError, match=r"characters, of 1,000 at most"):
        find_rollouts(store, RolloutFilter(where=where))
    assert find_rollouts(store, RolloutFilter(where="0 <= reward" + " and 1 < 2" * 98))[1]


def test_prompts_whose_answers_disagree_come_first_also_where_a_filter_leaves_answers_of_one_kind(tmp_path):
    writer = RunWriter.create(tmp_path, "mine", {})
    for step in range(2):
        rollouts = {
            "group": np.repeat([0, 1, 2, 3], 4), "rollout": range(16), "length": range(16),
            "reward": [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, None, 0, 1, 0],
        }  # fmt: skip
        writer.write_step(step, StepTables(None, rollouts, {"reward_mean": 0.25}))
    writer.finish()
    store = RunStore(writer.path)
    # Half and half disagrees most, then one of four; equal rewards come next, and last a group with a missing one.
    for where, expected in (("", [2, 2, 1, 1, 0, 0, 3, 3]), ("reward == 0 and tokens > 3", [2, 2, 1, 1, 3, 3])):
        table, _ = find_rollouts(store, RolloutFilter(where=where), order=DISAGREEING)
        groups = table.drop_duplicates(["step", "group"])
        assert groups["group"].tolist() == expected and groups["step"].tolist() == [1, 0] * (len(expected) // 2)


def test_each_order_is_that_of_a_sorted_list(store):
    rows = store.rollouts_df()
    for order, keys in ORDERS.items():
        if "spread" in keys:
            continue
        signs = {name: -1 if way == "descending" else 1 for name, way in keys.items()}
        by = sorted(
            rows.to_dict("records"),
            key=lambda row: [*(row[n] * s for n, s in signs.items()), row["step"], row["rollout"]],
        )
        table, _ = find_rollouts(store, RolloutFilter(), most=7, order=order)
        assert table[["step", "rollout"]].to_numpy().tolist() == [[row["step"], row["rollout"]] for row in by][:7]
    with pytest.raises(InputError, match="oldest steps first"):
        find_rollouts(store, RolloutFilter(), order="by luck")


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


def test_rewards_that_are_not_finite_are_found_but_not_counted_by_reward(tmp_path):
    writer = RunWriter.create(tmp_path, "mine", {})
    rewards = [1.0, float("nan"), float("inf"), 0.0]
    rollouts = {"group": [0] * 4, "rollout": [0, 1, 2, 3], "reward": rewards}
    writer.write_step(0, StepTables(rollouts=rollouts, steps={"reward_mean": float("nan")}))
    found, total = find_rollouts(RunStore(writer.path), RolloutFilter())
    assert total == 4 and found["rollout"].tolist() == [0, 1, 2, 3]
    histogram = reward_histogram(RunStore(writer.path), RolloutFilter())
    assert histogram["reward"].tolist() == [0.0, 1.0] and histogram["n"].tolist() == [1, 1]


ASKED = {
    "all": (RolloutFilter(), lambda rows: rows["step"] >= 0),
    "steps": (RolloutFilter(steps=(2, 5)), lambda rows: rows["step"].between(2, 5)),
    "reward": (RolloutFilter(reward=(0.25, 1.0)), lambda rows: rows["reward"].between(0.25, 1.0)),
    "text": (RolloutFilter(text="1"), lambda rows: rows["completion"].str.contains("1")),
    "reasons": (RolloutFilter(finish_reasons=("stop",)), lambda rows: rows["finish_reason"] == "stop"),
    "different": (
        RolloutFilter(equal=False),
        lambda rows: rows.groupby(["step", "group"])["reward"].transform(lambda r: r.nunique(dropna=False) > 1),
    ),
}


def random_step(rng, step, decimals):
    reward = np.round(rng.uniform(-1, 1, 8), decimals)
    reward[rng.random(8) < 0.1] = rng.choice([np.nan, np.inf])
    rollouts = {
        "group": np.repeat([0, 1], 4), "rollout": range(8), "prompt": ["p"] * 8, "reward": reward,
        "completion": [str(n) for n in rng.integers(0, 30, 8)], "length": rng.integers(1, 9, 8),
        "finish_reason": rng.choice(np.array(["stop", "length", None, f"odd{step}"], object), 8),
    }  # fmt: skip
    return StepTables(None, rollouts, {"reward_mean": 0.0})


def compare_with_all_rows(store, most=10):
    """Compare each answer with that of a loop over all rows, read anew."""
    rows = store.rollouts_df()
    finite = rows["reward"][np.isfinite(rows["reward"])]
    assert facts_of_rollouts(store) == {
        "first": rows["step"].min(), "last": rows["step"].max(), "short": rows["length"].min(),
        "long": rows["length"].max(), "low": finite.min(), "high": finite.max(), "turns": 1,
        "lost": len(rows) - len(finite), "reasons": sorted(set(rows["finish_reason"].dropna())),
    }  # fmt: skip
    for asked, chosen in ASKED.values():
        expected = rows[chosen(rows)].sort_values(["step", "rollout"])
        table, total = find_rollouts(store, asked, most)
        assert total == len(expected)
        keys = ["step", "rollout"]
        assert table[keys].to_numpy().tolist() == expected[keys].head(most).to_numpy().tolist()
        histogram = reward_histogram(store, asked)
        assert histogram["n"].sum() == np.isfinite(expected["reward"]).sum()
        if len(histogram) and not histogram["height"].iloc[0]:
            by_reward = expected[np.isfinite(expected["reward"])].groupby(["step", "reward"]).size()
            assert histogram.set_index(["step", "reward"])["n"].to_dict() == by_reward.to_dict()


@pytest.mark.parametrize("decimals", [0, 3])
def test_a_run_that_grows_goes_back_and_is_compacted_answers_as_if_read_anew(tmp_path, decimals):
    rng = np.random.default_rng(3)
    writer = RunWriter.create(tmp_path, "run", {})
    store = RunStore(writer.path)
    for step in range(6):
        writer.write_step(step, random_step(rng, step, decimals))
        compare_with_all_rows(store)
    writer.write_step(2, random_step(rng, 2, decimals))
    compare_with_all_rows(store)
    writer = RunWriter.resume(writer.path, 4)
    for step in (4, 5, 6):
        writer.write_step(step, random_step(rng, step, decimals))
        compare_with_all_rows(store)
    writer.finish()
    compact(writer.path)
    compare_with_all_rows(store)
