"""What must not change an answer, and what must turn one estimator into another."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.estimators import (
    ESTIMATORS,
    DecayOptions,
    EstimatorInputs,
    TailOptions,
    ValueOptions,
    estimate,
    evaluate,
)

ENERGY_NAMES = [name for name, entry in ESTIMATORS.items() if entry.reads_energy]
LOO = [name for name in ESTIMATORS if name.endswith("_loo") or name == "rloo"]
# The half of `blend_otb_regression` that is `otb` has the tail own_return; `maxrl` and `gpg` ask what is paid at all;
# `krpo` and `dbb` begin with a guess
SHIFT_EXEMPT = {"none", "value", "tvm", "evpo", "position_optimal", "blend_otb_regression", "maxrl", "gpg"}
SHIFT_EXEMPT |= {"krpo", "dbb", "dbb_loo"}
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
    mask, energy, token = np.ones((n, t), bool), rng.exponential(size=(n, t)), rng.integers(0, 2, (n, t))
    entropy = rng.exponential(size=(n, t))
    return EstimatorInputs(reward, mask, np.zeros(n, np.int64), energy=energy, token_id=token, entropy=entropy)


@pytest.mark.parametrize("name", [name for name, entry in ESTIMATORS.items() if not entry.ordered])
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
        k: np.where(np.isnan(v), 0.0 if k == "reward" else 0.5, v) if v is not None and v.dtype == np.float64 else v
        for k, v in vars(inputs).items()
    }
    same(estimate(name, inputs), estimate(name, EstimatorInputs(**clean)), atol=0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_reward_paid_outside_the_mask_counts_at_the_policy_token_before_it(name, make_inputs):
    inputs = make_inputs(2)
    mask = np.asarray(inputs.mask)
    inside, outside = np.where(mask, inputs.reward, 0.0), np.where(mask, inputs.reward, 0.0)
    for n in np.flatnonzero(mask.any(axis=1) & ~mask[:, -1]):
        last = np.flatnonzero(mask[n])[-1]
        inside[n, last] += 0.75
        outside[n, -1] += 0.75
    assert (outside[~mask] != 0).any()
    same(estimate(name, replace(inputs, reward=outside)), estimate(name, replace(inputs, reward=inside)), atol=0)


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
    inputs = make_inputs(5, sizes=(4, 4, 4), dense=False)
    whole, off = estimate(name, inputs).advantage, 0.0
    for group in np.unique(inputs.group):
        rows = np.flatnonzero(inputs.group == group)
        off = max(off, np.abs(estimate(name, rows_of(inputs, rows)).advantage - whole[rows]).max())
    assert off > 0.01


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


@pytest.mark.parametrize("name", [n for n in LOO if n in ENERGY_NAMES or n in ("rloo", "opo_loo", "tempo_loo")])
def test_leave_one_out_of_two_is_the_other_return(name):
    inputs = full(9, n=2)
    other = inputs.reward[::-1, -1:]
    np.testing.assert_allclose(estimate(name, inputs).baseline, np.broadcast_to(other, (2, 5)), rtol=1e-13)


@pytest.mark.parametrize(("plain", "reduced"), [("opo", "group_mean"), ("opo_loo", "rloo"), ("otb_carry", "otb")])
def test_equal_lengths_reduce(plain, reduced):
    same(estimate(plain, full(10)), estimate(reduced, full(10)))


@pytest.mark.parametrize("name", ["trloo", "tempo_loo"])
def test_one_turn_or_nothing_shared_leaves_rloo(name):
    inputs = random_terminal(15)
    distinct = replace(inputs, token_id=np.arange(72).reshape(12, 6))
    np.testing.assert_allclose(estimate(name, distinct).advantage, estimate("rloo", inputs).advantage, atol=1e-14)


def test_nothing_shared_turns_tempo_into_the_group_mean_over_std():
    inputs = replace(random_terminal(15), token_id=np.arange(72).reshape(12, 6))
    got, centred = estimate("tempo", inputs), estimate("group_mean", inputs)
    first = inputs.mask & (np.arange(6) == 0)
    # the first token turns the mean into R: R − mean is counted twice there, and once after
    for label in np.unique(inputs.group):
        rows = inputs.group == label
        std = np.where(inputs.mask, inputs.reward, 0.0).sum(axis=1)[rows].std()
        expected = centred.advantage[rows] * np.where(first[rows], 2, 1) / std
        np.testing.assert_allclose(got.advantage[rows], expected, atol=1e-12)


def test_ratios_of_one_turn_opob_into_classic_optimal(make_inputs):
    inputs = make_inputs(16)
    on_policy = replace(inputs, ratio=np.ones(inputs.mask.shape))
    same(estimate("opob", on_policy), estimate("classic_optimal", inputs))


def test_scaling_all_ratios_of_a_rollout_by_thousands_of_nats_overflows_nowhere():
    inputs = replace(full(17, n=3), rollout_norm_sq=np.ones(3), ratio=np.full((3, 5), 1e200))
    same(estimate("opob", inputs), estimate("group_mean", inputs))


def test_james_stein_of_one_prompt_is_rloo():
    got = estimate("james_stein", full(18))
    np.testing.assert_array_equal(got.advantage, estimate("rloo", full(18)).advantage)
    assert got.fallback.all()


def test_james_stein_of_prompts_alike_takes_the_others_mean():
    # s² = 0 and v² ≫ 1e-6 among the others, so λ = 1 up to 1e-6/v²: with two prompts it is the other's mean
    first, second = full(19), full(20)
    both = EstimatorInputs(
        *(np.concatenate([getattr(x, f) for x in (first, second)]) for f in ("reward", "mask")), np.repeat([0, 1], 4)
    )
    got = estimate("james_stein", both).baseline
    np.testing.assert_allclose(got[:4], second.reward.sum(axis=1).mean(), atol=1e-5)
    np.testing.assert_allclose(got[4:], first.reward.sum(axis=1).mean(), atol=1e-5)


def test_gae_of_lambda_one_is_the_value_baseline_and_of_zero_the_one_step_surprise(make_inputs):
    inputs = make_inputs(21)
    v, r = (np.where(inputs.mask, x, 0.0) for x in (inputs.value, inputs.reward))
    following = np.concatenate([v[:, 1:], np.zeros((len(v), 1))], axis=1)
    same(estimate("value", inputs), estimate("value", inputs, ValueOptions(1.0, 1.0)), atol=0)
    near = estimate("value", inputs, ValueOptions(1.0, 1 - 1e-12))
    np.testing.assert_allclose(near.advantage, estimate("value", inputs).advantage, atol=1e-10)
    surprise = np.where(inputs.mask, r + 0.9 * following - v, 0.0)
    np.testing.assert_allclose(estimate("value", inputs, ValueOptions(0.9, 0.0)).advantage, surprise, atol=1e-12)


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
    return EstimatorInputs(
        reward,
        mask,
        group,
        energy=rng.exponential(size=(12, 6)),
        rollout_norm_sq=rng.exponential(size=12),
        ratio=rng.uniform(0.5, 1.5, (12, 6)),
        turn=np.zeros((12, 6), np.int64),  # a turn that no other rollout has is not centred by trloo
        token_id=rng.integers(0, 2, (12, 6)),
        entropy=rng.exponential(size=(12, 6)),
    )
