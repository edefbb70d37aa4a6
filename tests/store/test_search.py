import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.store import (
    RolloutFilter,
    RunStore,
    RunWriter,
    StepTables,
    compact,
    facts_of_rollouts,
    find_rollouts,
    one_look,
    reward_histogram,
)
from otb_analysis.store.held import rollout_rows
from otb_analysis.store.parts import visible_parts


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


def test_answers_over_many_parts_are_those_over_few_and_a_new_step_is_found(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "many", {})
    asked = [RolloutFilter(), RolloutFilter(reward=(1.0, 1.0)), RolloutFilter(equal=True), RolloutFilter(steps=(2, 3))]
    for step in range(6):
        rollouts = {
            "group": [0, 0, 1], "rollout": [0, 1, 2], "prompt": ["a", "a", "b"], "completion": ["x", "y", "z"],
            "reward": [1.0, step % 2, 0.5], "length": [1, 2, 3], "finish_reason": ["stop", None, "length"],
        }  # fmt: skip
        writer.write_step(step, StepTables(None, rollouts, {"reward_mean": 0.5}))
        if step < 4:
            continue
        answers = []
        for many in (2, 100):
            monkeypatch.setattr("otb_analysis.store.reader.MANY", many)
            store = RunStore(writer.path)
            answers.append([(find_rollouts(store, a), reward_histogram(store, a)) for a in asked])
            with pytest.raises(InputError, match="prompt"):
                store.sql("SELECT prompt FROM rollouts", texts=False)
        for ((held, n), bins), ((read, m), others) in zip(*answers, strict=True):
            pd.testing.assert_frame_equal(held, read)
            pd.testing.assert_frame_equal(bins, others)
            assert n == m
        assert answers[0][0][0][1] == 3 * (step + 1)
    monkeypatch.setattr("otb_analysis.store.held.MOST_ROWS", 17)
    assert rollout_rows(writer.path, visible_parts(writer.path, ["rollouts"])["rollouts"]) is None


def test_a_broken_part_is_named_where_columns_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr("otb_analysis.store.reader.MANY", 1)
    writer = RunWriter.create(tmp_path, "run", {})
    for step in range(3):
        writer.write_step(step, StepTables(None, {"group": [0], "rollout": [0], "reward": [1.0]}, {"reward_mean": 1.0}))
    store = RunStore(writer.path)
    assert len(store.rollouts_df(columns=["reward"])) == 3
    part = writer.path / "rollouts" / "part-00000001-r0.parquet"
    part.write_bytes(part.read_bytes()[:-40] + bytes(40))
    with pytest.raises(StoreError, match=r"part-00000001-r0.parquet is broken"):
        store.rollouts_df(columns=["reward"])


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


@pytest.mark.parametrize("many", [2, 100])
@pytest.mark.parametrize("decimals", [0, 3])
def test_a_run_that_grows_goes_back_and_is_compacted_answers_as_if_read_anew(tmp_path, monkeypatch, many, decimals):
    monkeypatch.setattr("otb_analysis.store.reader.MANY", many)
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


def test_a_part_that_comes_late_and_an_older_look_count_nothing_twice(tmp_path):
    rng = np.random.default_rng(6)
    writer = RunWriter.create(tmp_path, "run", {})
    store = RunStore(writer.path)
    for step in range(3):
        writer.write_step(step, random_step(rng, step, 0))
        compare_with_all_rows(store)
    late = random_step(rng, 2, 0)
    late.rollouts["rollout"] = range(8, 16)
    RunWriter(writer.path, rank=1, size=2).write_step(2, StepTables(rollouts=late.rollouts))
    compare_with_all_rows(store)
    assert find_rollouts(store, RolloutFilter())[1] == 32
    with one_look():
        assert store.complete_steps() == [0, 1, 2]
        writer.write_step(3, random_step(rng, 3, 0))
        with one_look():
            compare_with_all_rows(store)
        compare_with_all_rows(store)
    compare_with_all_rows(store)


def test_answers_that_are_too_long_to_keep_are_right(tmp_path, monkeypatch):
    monkeypatch.setattr("otb_analysis.store.search.MOST_KEPT", 20)
    rng = np.random.default_rng(7)
    writer = RunWriter.create(tmp_path, "run", {})
    for step in range(5):
        writer.write_step(step, random_step(rng, step, 3))
        compare_with_all_rows(RunStore(writer.path))


@pytest.mark.parametrize("name", ASKED)
def test_a_new_step_alone_is_asked(tmp_path, monkeypatch, name):
    rng, asked = np.random.default_rng(4), ASKED[name][0]
    writer = RunWriter.create(tmp_path, "run", {})
    store = RunStore(writer.path)
    for step in range(4):
        writer.write_step(step, random_step(rng, step, 0))

    def answers():
        return find_rollouts(store, asked, 1), reward_histogram(store, asked), facts_of_rollouts(store)

    answers()
    writer.write_step(4, random_step(rng, 4, 0))
    steps, sql = [], RunStore.sql
    monkeypatch.setattr(RunStore, "sql", lambda self, *a, **k: steps.append(list(k["steps"])) or sql(self, *a, **k))
    answers()
    counted, listed, facts = steps  # the histogram is made of what was counted
    assert counted == facts == [4] and max(listed) < 4
