"""One step's arrays rebuilt from disk are those that were written, ragged rollouts and unmeasured tokens included."""

import numpy as np
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.estimators import available, estimate
from otb_analysis.store import RunStore, StepTables, measured
from otb_analysis.types import EstimatorInputs

NAN = np.nan

# Rollouts 0 and 1 answer prompt 5, rollout 2 prompt 9; rollout 1 has no token at all, rollout 2 a tool token at t = 1.
TOKENS = {
    "group": [5, 5, 9, 9, 9],
    "rollout": [0, 0, 2, 2, 2],
    "turn": [0, 0, 0, 0, 1],
    "t": [0, 1, 0, 1, 2],
    "token_id": [3, 4, 5, 6, 7],
    "mask": [True, True, True, False, True],
    "reward": [0.0, 1.0, 0.0, 0.0, 0.5],
    "energy_proxy": [0.5, 0.25, 1.0, None, 1.5],
    "grad_norm_sq": [2.0, 4.0, 8.0, None, None],
    "measured_by": ["exact", "exact", "exact", "none", "none"],
    "value": [0.5, 0.5, 0.5, None, 0.5],
}
ROLLOUTS = {"group": [5, 5, 9], "rollout": [0, 1, 2], "score_norm_sq": [3.0, 0.0, None]}


def arrays(writer, tokens=TOKENS, rollouts=ROLLOUTS):
    writer.write_step(0, StepTables(tokens=tokens, rollouts=rollouts))
    return RunStore(writer.path).token_arrays(0)


def test_arrays_hold_each_token_at_its_rollout_and_position(writer):
    read = arrays(writer)
    assert read.rollout.tolist() == [0, 1, 2]
    assert read.group.tolist() == [5, 5, 9]
    assert read.mask.tolist() == [[True, True, False], [False] * 3, [True, False, True]]
    assert read.reward.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0.5]]
    assert read.turn.tolist() == [[0, 0, -1], [-1] * 3, [0, 0, 1]]
    assert read.token_id.tolist() == [[3, 4, -1], [-1] * 3, [5, 6, 7]]


def test_unmeasured_and_padding_are_nan(writer):
    read = arrays(writer)
    np.testing.assert_array_equal(read.energy_proxy, [[0.5, 0.25, NAN], [NAN] * 3, [1.0, NAN, 1.5]])
    np.testing.assert_array_equal(read.grad_norm_sq, [[2, 4, NAN], [NAN] * 3, [8, NAN, NAN]])
    np.testing.assert_array_equal(read.rollout_norm_sq, [3, 0, NAN])
    assert np.isnan(read.behavior_logprob).all()


def test_order_of_rows_on_disk_does_not_matter(writer):
    order = [4, 2, 0, 3, 1]
    read = arrays(writer, {name: [values[i] for i in order] for name, values in TOKENS.items()})
    assert read.mask.tolist() == [[True, True, False], [False] * 3, [True, False, True]]
    assert read.reward.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0.5]]


def test_inputs_carry_the_asked_energy_and_only_complete_optional_columns(writer):
    inputs = arrays(writer).estimator_inputs("proxy")
    np.testing.assert_array_equal(inputs.energy[inputs.mask], [0.5, 0.25, 1.0, 1.5])
    assert inputs.value is not None
    assert inputs.rollout_norm_sq is None
    assert inputs.ratio is None


def test_every_estimator_from_disk_is_the_one_from_memory(writer, tables):
    writer.write_step(3, tables(3))
    from_disk = RunStore(writer.path).token_arrays(3).estimator_inputs()
    from_memory = _inputs(tables(3).tokens)
    names = available(from_memory)
    assert names == available(from_disk)
    assert {"none", "rloo", "otb", "otb_loo", "sequence_optimal"} <= set(names)
    for name in names:
        expected, read = estimate(name, from_memory), estimate(name, from_disk)
        np.testing.assert_array_equal(read.baseline, expected.baseline, err_msg=name)
        np.testing.assert_array_equal(read.advantage, expected.advantage, err_msg=name)


def _inputs(tokens):
    """The [N, T] inputs of the small run, filled token by token, in the float32 of the disk."""
    shape = (4, 4)
    reward, energy, mask = np.zeros(shape), np.full(shape, NAN), np.zeros(shape, dtype=bool)
    token_id, turn, group = np.full(shape, -1), np.full(shape, -1), np.zeros(4, dtype=np.int64)
    for i, (n, t) in enumerate(zip(tokens["rollout"], tokens["t"], strict=True)):
        reward[n, t], energy[n, t] = np.float32(tokens["reward"][i]), np.float32(tokens["energy_proxy"][i])
        token_id[n, t], turn[n, t], mask[n, t], group[n] = tokens["token_id"][i], 0, True, tokens["group"][i]
    return EstimatorInputs(reward=reward, mask=mask, group=group, energy=energy, token_id=token_id, turn=turn)


def test_exact_energy_needs_every_policy_token_and_measured_groups_give_those(writer):
    read = arrays(writer)
    with pytest.raises(InputError, match=r"1 of 4 .*no exact energy"):
        read.estimator_inputs("exact")
    whole = read.measured_groups()
    assert whole.rollout.tolist() == [0, 1]
    inputs = whole.estimator_inputs("exact")
    assert inputs.energy[inputs.mask].tolist() == [2.0, 4.0]
    assert inputs.rollout_norm_sq.tolist() == [3.0, 0.0]


def test_an_estimated_norm_is_not_exact(writer):
    read = arrays(writer, TOKENS | {"measured_by": ["sketch"] * 5})
    assert not read.exact.any()
    assert read.grad_norm_sq[0, 0] == 2.0


def test_unknown_energy_source_is_refused(writer):
    with pytest.raises(InputError, match=r"energy_source is 'sketched'; .*'calibrated'"):
        arrays(writer).estimator_inputs("sketched")


def test_tokens_without_rollouts_table_are_enough(writer):
    read = arrays(writer, rollouts=None)
    assert read.rollout.tolist() == [0, 2]
    assert np.isnan(read.rollout_norm_sq).all()


def test_step_without_tokens_gives_arrays_of_width_zero(writer):
    read = arrays(writer, tokens=None)
    assert read.mask.shape == (3, 0)
    assert arrays(writer, tokens=None, rollouts=None).mask.shape == (0, 0)


def test_step_that_is_not_complete_is_refused(writer):
    store = RunStore(writer.path)
    with pytest.raises(InputError, match=r"step 7 of .*no step is complete"):
        store.token_arrays(7)
    writer.write_step(2, StepTables())
    with pytest.raises(InputError, match="steps 2 to 2 are there"):
        store.token_arrays(7)


def test_tokens_without_a_mask_are_a_sentence(writer):
    with pytest.raises(StoreError, match="has tokens without a mask"):
        arrays(writer, {name: values for name, values in TOKENS.items() if name != "mask"})


def test_of_many_measured_tokens_whole_prompts_are_read_with_keys_of_four_bytes(writer, monkeypatch):
    n = np.arange(80)
    tokens = {"group": n // 2, "rollout": n, "turn": 0 * n, "t": 0 * n, "mask": n >= 0, "grad_norm_sq": n + 1.0}
    rollouts = {"group": n // 2, "rollout": n}
    writer.write_step(0, StepTables(tokens=tokens | {"measured_by": ["exact"] * 80}, rollouts=rollouts))
    monkeypatch.setattr(measured, "MAX_TOKENS", 40)
    store, columns = RunStore(writer.path), ["step", "group", "rollout", "t", "grad_norm_sq"]
    table, total = measured.exact_groups(store, columns)
    assert total == 80 and len(table) == 40 and set(table["group"].value_counts()) == {2}
    monkeypatch.setattr(measured, "MAX_TOKENS", 3)
    table, _ = measured.exact_groups(store, columns)
    assert set(table["group"].value_counts()) == {2} and table["group"].nunique() == measured.LEAST_GROUPS
    assert {table[name].dtype for name in measured.KEYS} == {np.dtype("int32")}


def test_tokens_without_an_exact_norm_count_among_those_that_are_loaded(writer, monkeypatch):
    n = np.arange(80)
    tokens = {"group": n // 2, "rollout": n, "turn": 0 * n, "t": 0 * n, "mask": n >= 0}
    tokens |= {"grad_norm_sq": np.ma.masked_where(n % 2 == 0, n + 1.0), "measured_by": ["exact"] * 80}
    writer.write_step(0, StepTables(tokens=tokens, rollouts={"group": n // 2, "rollout": n}))
    monkeypatch.setattr(measured, "MAX_TOKENS", 60)
    table, total = measured.exact_groups(RunStore(writer.path), ["step", "grad_norm_sq"])
    assert (total, len(table), table["grad_norm_sq"].count()) == (40, 60, 30)
