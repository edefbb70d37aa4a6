"""What must not change an answer, and what must turn one estimator into another."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.estimators import (
    ESTIMATORS,
    DecayOptions,
    EstimatorInputs,
    TailOptions,
    estimate,
    evaluate,
)

ENERGY_NAMES = [name for name, entry in ESTIMATORS.items() if entry.reads_energy]
LOO = [name for name in ESTIMATORS if name.endswith("_loo") or name == "rloo"]
SHIFT_EXEMPT = {"none", "value", "position_optimal"}
GAP_FREE = [name for name, entry in ESTIMATORS.items() if not entry.takes_gaps]


def rows_of(inputs, rows):
    return EstimatorInputs(**{k: None if v is None else v[rows] for k, v in vars(inputs).items()})


def same(a, b, **tolerance):
    np.testing.assert_allclose(a.baseline, b.baseline, **({"atol": 1e-10} | tolerance))
    np.testing.assert_allclose(a.advantage, b.advantage, **({"atol": 1e-10} | tolerance))
    np.testing.assert_array_equal(a.fallback, b.fallback)


def full(seed, n=4, t=5):
    """One group of equal lengths, terminal rewards."""
    rng = np.random.default_rng(seed)
    reward = np.zeros((n, t))
    reward[:, -1] = rng.normal(size=n)
    return EstimatorInputs(reward, np.ones((n, t), bool), np.zeros(n, np.int64), energy=rng.exponential(size=(n, t)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_permuting_rollouts_permutes_the_answer(name, make_inputs):
    inputs = make_inputs(0)
    order = np.random.default_rng(1).permutation(len(inputs.group))
    whole = estimate(name, inputs)
    expected = type(whole)(whole.baseline[order], whole.advantage[order], whole.fallback[order])
    same(estimate(name, rows_of(inputs, order)), expected)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_is_never_read(name, make_inputs):
    inputs = make_inputs(2)
    clean = {
        k: np.where(np.isnan(v), 0.5, v) if v is not None and v.dtype == np.float64 else v
        for k, v in vars(inputs).items()
    }
    same(estimate(name, inputs), estimate(name, EstimatorInputs(**clean)), atol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_answer_is_zero_outside_the_mask(name, make_inputs):
    inputs = make_inputs(3)
    got = estimate(name, inputs)
    for x in (got.baseline, got.advantage, got.fallback):
        assert not x[~inputs.mask].any()


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - SHIFT_EXEMPT))
def test_shifting_all_returns_changes_no_advantage(name):
    # one rollout in each group ends last alone, where tail own_return is not centred: use tail group there
    inputs = random_terminal(4)
    last = inputs.mask & (np.cumsum(inputs.mask[:, ::-1], axis=1)[:, ::-1] == 1)
    options = tail_group(name)
    shifted = replace(inputs, reward=inputs.reward + 3.0 * last)
    np.testing.assert_allclose(
        estimate(name, inputs, options).advantage, estimate(name, shifted, options).advantage, atol=1e-12
    )


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if not e.batch_coupled])
def test_splitting_a_batch_by_prompts_changes_nothing(name, make_inputs, monkeypatch):
    inputs = make_inputs(5)
    whole = estimate(name, inputs)
    for label in np.unique(inputs.group):
        rows = np.flatnonzero(inputs.group == label)
        part = estimate(name, rows_of(inputs, rows))
        same(part, type(whole)(whole.baseline[rows], whole.advantage[rows], whole.fallback[rows]))
    monkeypatch.setattr(evaluate, "BLOCK_ELEMENTS", 1)
    same(estimate(name, inputs), whole)


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if e.batch_coupled])
def test_batch_coupled_entries_do_look_across_prompts(name, make_inputs):
    inputs = make_inputs(5, sizes=(4, 4))
    rows = np.flatnonzero(inputs.group == inputs.group[0])
    assert np.abs(estimate(name, rows_of(inputs, rows)).baseline - estimate(name, inputs).baseline[rows]).max() > 0.01


@pytest.mark.parametrize("name", ESTIMATORS)
def test_float32_inputs_give_float64_answers(name, make_inputs):
    single = make_inputs(6, dtype=np.float32)
    double = EstimatorInputs(
        **{k: np.float64(v) if getattr(v, "dtype", None) == np.float32 else v for k, v in vars(single).items()}
    )
    got = estimate(name, single)
    assert got.baseline.dtype == got.advantage.dtype == np.float64
    same(got, estimate(name, double), atol=0)


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if e.takes_gaps])
def test_tool_tokens_shift_positions_and_nothing_else(name, make_inputs):
    inputs = make_inputs(7, gaps=True)
    width = np.count_nonzero(inputs.mask, axis=1).max()
    inside = np.arange(width) < np.count_nonzero(inputs.mask, axis=1)[:, None]

    def packed(x):
        if x is None or x.ndim == 1:
            return x
        out = np.full(inside.shape, np.nan)
        out[inside] = x[inputs.mask]
        return out

    fields = {k: inside if k == "mask" else packed(v) for k, v in vars(inputs).items()}
    dense = estimate(name, EstimatorInputs(**fields))
    got = estimate(name, inputs)
    np.testing.assert_array_equal(got.advantage[inputs.mask], dense.advantage[inside])
    np.testing.assert_array_equal(got.fallback[inputs.mask], dense.fallback[inside])


def test_constant_energy_turns_sequence_optimal_into_opo(make_inputs):
    inputs = replace(make_inputs(8), ratio=None)
    same(estimate("sequence_optimal", replace(inputs, energy=np.ones(inputs.mask.shape))), estimate("opo", inputs))


@pytest.mark.parametrize("name", ["otb", "token_optimal", "energy_ema", "otb_turn"])
def test_constant_energy_gives_the_mean_of_the_alive(name):
    # G = 1 1 | 0 0 0 | 2 2 2: means 1 at t ≤ 2, then (0 + 2)/2 over the two left
    mask = np.arange(3) < np.array([2, 3, 3])[:, None]
    reward = np.array([[0, 1, 0], [0, 0, 0], [0, 0, 2.0]])
    got = estimate(name, EstimatorInputs(reward, mask, np.zeros(3, np.int64), energy=np.full((3, 3), 0.7)))
    np.testing.assert_allclose(got.baseline, np.where(mask, 1.0, 0.0))


@pytest.mark.parametrize("name", [n for n in LOO if n in ENERGY_NAMES or n in ("rloo", "opo_loo")])
def test_leave_one_out_of_two_is_the_other_return(name):
    inputs = full(9, n=2)
    other = inputs.reward[::-1, -1:]
    np.testing.assert_allclose(estimate(name, inputs).baseline, np.broadcast_to(other, (2, 5)), rtol=1e-13)


@pytest.mark.parametrize(("plain", "reduced"), [("opo", "group_mean"), ("opo_loo", "rloo"), ("otb_carry", "otb")])
def test_equal_lengths_reduce(plain, reduced):
    same(estimate(plain, full(10)), estimate(reduced, full(10)))


@pytest.mark.parametrize("suffix", ["", "_loo"])
def test_energy_ema_ends_at_token_optimal_and_otb(suffix, make_inputs):
    inputs = make_inputs(11)
    for decay, name in ((0.0, "token_optimal"), (1.0, "otb")):
        same(estimate(f"energy_ema{suffix}", inputs, DecayOptions(decay=decay)), estimate(f"{name}{suffix}", inputs))


@pytest.mark.parametrize("suffix", ["", "_loo"])
def test_otb_turn_without_gaps_is_otb(suffix, make_inputs):
    same(estimate(f"otb_turn{suffix}", make_inputs(12)), estimate(f"otb{suffix}", make_inputs(12)), atol=0)


@pytest.mark.parametrize(
    "name", ["group_mean", "opo", "sequence_optimal", "otb", "otb_carry", "token_optimal", "energy_ema"]
)
def test_self_inclusion_shrinks_by_the_own_share_of_the_weight(name):
    # G − B_self = (1 − ω_i)(G − B_{−i}), ω_i = own weight / total weight
    inputs = full(13)
    w = inputs.energy
    decayed = np.stack([sum(0.9 ** (t - j) * w[:, j] for j in range(t + 1)) for t in range(5)], axis=1)
    weight = {
        "sequence_optimal": w.sum(axis=1, keepdims=True),
        "otb": np.cumsum(w, axis=1),
        "otb_carry": np.cumsum(w, axis=1),
        "token_optimal": w,
        "energy_ema": decayed,
    }.get(name, np.ones((4, 1)))
    share = weight / weight.sum(axis=0)
    loo = estimate({"group_mean": "rloo"}.get(name, f"{name}_loo"), inputs)
    np.testing.assert_allclose(estimate(name, inputs).advantage, (1 - share) * loo.advantage, atol=1e-14)


def test_leave_one_out_survives_a_rollout_that_holds_nearly_all_the_weight():
    # total − own would be 1e20 + 3 − 1e20 = 0; the others' mean is (1·1 + 2·4)/3
    energy = np.array([[1e20], [1.0], [2.0]])
    inputs = EstimatorInputs(np.array([[5.0], [1.0], [4.0]]), energy > 0, np.zeros(3, np.int64), energy=energy)
    for name in ("otb_loo", "sequence_optimal_loo", "token_optimal_loo", "otb_carry_loo"):
        got = estimate(name, inputs)
        np.testing.assert_allclose(got.baseline[0, 0], 3.0, rtol=1e-15)
        assert not got.fallback.any()


def tail_group(name):
    kind = ESTIMATORS[name].options
    return kind(tail="group") if kind in (TailOptions, DecayOptions) else kind()


def random_terminal(seed):
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(3), [2, 4, 6]))
    length = rng.integers(1, 7, 12)
    mask = np.arange(6) < length[:, None]
    reward = np.zeros((12, 6))
    reward[np.arange(12), length - 1] = rng.normal(size=12)
    energy = rng.exponential(size=(12, 6))
    return EstimatorInputs(reward, mask, group, energy=energy, rollout_norm_sq=rng.exponential(size=12))
