"""Baselines from the other prompts: worked numbers, what they reduce to, what they remember, and what they refuse."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import (
    EstimatorInputs,
    NormalEquations,
    RegressionOptions,
    available,
    estimate,
    options_from_dict,
    with_limit,
)

NAMES = ("energy_across_loo", "energy_regression")
EXACT = RegressionOptions(ridge=0.0)


def batch(reward, energy, group, entropy=None):
    """Rollouts of equal length, paid at the end."""
    energy = np.array(energy, float)
    paid = np.zeros(energy.shape)
    paid[:, -1] = reward
    entropy = np.zeros(energy.shape) if entropy is None else np.array(entropy, float)
    return EstimatorInputs(paid, np.ones(energy.shape, bool), np.array(group), energy=energy, entropy=entropy)


def random_batch(seed, prompts=5, size=4, width=6):
    rng = np.random.default_rng(seed)
    n = prompts * size
    length = rng.integers(1, width + 1, n)
    mask = np.arange(width) < length[:, None]
    reward = np.zeros((n, width))
    reward[np.arange(n), length - 1] = rng.normal(size=n)
    energy, entropy = rng.exponential(size=(2, n, width))
    return EstimatorInputs(reward, mask, np.arange(n) // size, energy=energy, entropy=entropy)


def rows_of(inputs, rows):
    return EstimatorInputs(**{k: None if v is None else v[rows] for k, v in vars(inputs).items()})


def test_other_prompts_count_by_their_rollouts_energy():
    # Σ W and Σ W·R of the prompts: W = 1 3, R = 1 0: 4 and 1; W = 2 2, R = 1 1: 4 and 4; W = 4 0, R = 0 1: 4 and 0.
    # B = (4 + 0)/8, (1 + 0)/8, (1 + 4)/8
    inputs = batch([1, 0, 1, 1, 0, 1], [[1, 0], [1, 2], [1, 1], [2, 0], [0, 4], [0, 0]], [7, 7, 2, 2, 5, 5])
    got = estimate("energy_across_loo", inputs)
    np.testing.assert_allclose(got.baseline, np.repeat([0.5, 0.5, 1 / 8, 1 / 8, 5 / 8, 5 / 8], 2).reshape(6, 2))
    assert not got.fallback.any() and got.state is None


def test_feature_m_alone_shrinks_rloo_by_the_others_slope():
    # prompt 0: R = 2 1, m = 1 2, w = 1 2: Σ w m R = 2 + 4 = 6, Σ w m² = 1 + 8 = 9; prompt 1: R = 3 1, m = 1 3, w = 1:
    # Σ w m R = 3 + 3 = 6, Σ w m² = 10. B of prompt 0 is 6/10·m, of prompt 1 6/9·m; a ridge of ¼ divides by 1.25
    inputs = batch([2, 1, 3, 1], [[1], [2], [1], [1]], [0, 0, 1, 1])
    options = RegressionOptions(features=("m",), ridge=0.0)
    got = estimate("energy_regression", inputs, options)
    np.testing.assert_allclose(got.baseline[:, 0], [0.6, 1.2, 2 / 3, 2])
    np.testing.assert_allclose(got.baseline[:2], 0.6 * estimate("rloo", inputs).baseline[:2])
    shrunk = estimate("energy_regression", inputs, replace(options, ridge=0.25))
    np.testing.assert_allclose(shrunk.baseline, got.baseline / 1.25)


# Prompt 1 has w = 1 1 with R = 1 and w = 1 3 with R = 0. Its weighted means are (1·1 + 1·0)/2 = ½ at t = 1 and
# (1·1 + 3·0)/4 = ¼ at t = 2; a line through two points meets both.
LINE = batch([5, 6, 1, 0], [[3, 1], [1, 1], [1, 1], [1, 3]], [0, 0, 1, 1], [[1, 1], [0, 3], [0, 1], [0, 1]])


def test_energy_before_the_token_is_what_f_sees():
    # u = 0 and 1, so f = 0 and ½ and B = ½ − ½ f; prompt 0 has u = 3 and 1 before its second token: f = ¾, ½
    got = estimate("energy_regression", LINE, RegressionOptions(features=("1", "f"), ridge=0.0))
    np.testing.assert_allclose(got.baseline[:2], [[0.5, 1 / 8], [0.5, 0.25]])


def test_entropy_at_the_token_is_what_h_sees():
    # H = 0 and 1: h = 0 and ½, B = ½ − ½ h; prompt 0 has H = 1 1 | 0 3: h = ½ ½ | 0 ¾
    got = estimate("energy_regression", LINE, RegressionOptions(features=("1", "h"), ridge=0.0))
    np.testing.assert_allclose(got.baseline[:2], [[0.25, 0.25], [0.5, 1 / 8]])


@pytest.mark.parametrize("limit", [2, 64])
def test_position_counts_from_one_and_its_unit_does_not_matter(limit):
    options = RegressionOptions(features=("1", "x"), ridge=0.0, T_max=limit)
    np.testing.assert_allclose(estimate("energy_regression", LINE, options).baseline[:2], [[0.5, 0.25]] * 2)
    wide = replace(options, features=RegressionOptions().features, ridge=0.1)
    narrow = estimate("energy_regression", random_batch(0), replace(wide, T_max=6)).baseline
    np.testing.assert_allclose(
        estimate("energy_regression", random_batch(0), replace(wide, T_max=6 * limit)).baseline, narrow, atol=1e-12
    )


def test_feature_1_alone_is_energy_across_loo():
    inputs = random_batch(1)
    got = estimate("energy_regression", inputs, RegressionOptions(features=("1",), ridge=0.5))
    np.testing.assert_allclose(got.baseline, estimate("energy_across_loo", inputs).baseline, rtol=1e-12)


def test_ridge_without_end_leaves_energy_across_loo():
    got = estimate("energy_regression", random_batch(1), RegressionOptions(ridge=1e14, T_max=6))
    np.testing.assert_allclose(got.baseline, estimate("energy_across_loo", random_batch(1)).baseline, atol=1e-12)


def test_constant_in_all_rewards_moves_the_baseline_alone():
    # a penalty on coefficients of m itself would take a large constant for a reason to ignore m
    inputs, options = random_batch(22), RegressionOptions(T_max=6)
    last = inputs.mask & (np.cumsum(inputs.mask[:, ::-1], axis=1)[:, ::-1] == 1)
    shifted = replace(inputs, reward=inputs.reward + 1000.0 * last)
    got, before = (estimate("energy_regression", x, options).advantage for x in (shifted, inputs))
    np.testing.assert_allclose(got, before, atol=1e-8)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_means_that_are_all_alike_elsewhere_say_nothing_of_m(ridge):
    # prompts 1 … 4 pay everyone .1: what is left of m − mean there is rounding, and must not be blown up
    inputs = random_batch(23)
    last = inputs.mask & (np.cumsum(inputs.mask[:, ::-1], axis=1)[:, ::-1] == 1)
    reward = np.where(inputs.group[:, None] > 0, 0.1 * last, inputs.reward)
    got = estimate("energy_regression", replace(inputs, reward=reward), RegressionOptions(ridge=ridge, T_max=6))
    np.testing.assert_allclose(got.baseline[:4], 0.1 * inputs.mask[:4], atol=1e-7)


def test_constant_energy_counts_the_others_by_length():
    inputs = replace(random_batch(2), energy=np.full((20, 6), 0.3))
    length, total = inputs.mask.sum(axis=1), inputs.reward.sum(axis=1)
    got = estimate("energy_across_loo", inputs).baseline[:, 0]
    for i, p in enumerate(inputs.group):
        others = inputs.group != p
        assert got[i] == pytest.approx((length * total)[others].sum() / length[others].sum(), rel=1e-13)


def test_return_that_features_explain_leaves_no_advantage():
    # every prompt pays all its rollouts alike, so R = m
    inputs = random_batch(3)
    paid = np.zeros(inputs.mask.shape)
    paid[:, 0] = inputs.group * 0.7 - 1
    got = estimate("energy_regression", replace(inputs, reward=paid), EXACT)
    np.testing.assert_allclose(got.baseline[:, 0], paid[:, 0], atol=1e-9)


def test_equal_returns_leave_no_advantage_whatever_the_ridge():
    inputs = random_batch(4)
    last = inputs.mask & (np.cumsum(inputs.mask[:, ::-1], axis=1)[:, ::-1] == 1)
    for name, options in (("energy_across_loo", None), ("energy_regression", RegressionOptions(ridge=0.5, T_max=6))):
        got = estimate(name, replace(inputs, reward=0.1 * last), options)
        np.testing.assert_allclose(got.advantage, 0, atol=1e-12)
        assert not got.fallback.any()


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_scaling_rewards_scales_the_answer_and_scaling_weights_does_nothing(ridge):
    inputs, options = random_batch(5), RegressionOptions(("1", "m", "h", "m·h"), ridge)
    got = estimate("energy_regression", inputs, options).baseline
    scaled = replace(inputs, reward=100 * inputs.reward, energy=1e9 * inputs.energy)
    np.testing.assert_allclose(estimate("energy_regression", scaled, options).baseline, 100 * got, rtol=1e-8)


def test_baseline_has_not_seen_its_token_nor_what_follows():
    inputs = random_batch(6)
    i, t = 9, int(inputs.mask[9].sum()) - 1
    later = np.arange(6) >= t
    changed = replace(
        inputs,
        reward=inputs.reward + (np.arange(20) == i)[:, None] * later * inputs.mask,
        energy=np.where((np.arange(20) == i)[:, None] & later, 50.0, inputs.energy),
        entropy=np.where((np.arange(20) == i)[:, None] & (np.arange(6) > t), 9.0, inputs.entropy),
    )
    for name, options in (("energy_across_loo", None), ("energy_regression", RegressionOptions(T_max=6))):
        before, after = (estimate(name, x, options).baseline for x in (inputs, changed))
        np.testing.assert_allclose(before[i, : t + 1], after[i, : t + 1], rtol=1e-12)  # `rloo` subtracts the own return
        assert np.abs(before[0] - after[0]).max() > 1e-6


@pytest.mark.parametrize("scale", [1e12, 1e20, 1e200])
def test_prompt_that_holds_nearly_all_the_weight_keeps_its_digits(scale):
    # total − own would keep no digit of what the others say to the first prompt
    inputs = random_batch(7)
    heavy = replace(inputs, energy=np.where(inputs.group[:, None] == 0, scale * inputs.energy, inputs.energy))
    options = RegressionOptions(features=("1", "m", "h", "m·h"))
    for name, chosen in (("energy_across_loo", None), ("energy_regression", options)):
        light, got = (estimate(name, x, chosen).baseline[:4] for x in (inputs, heavy))
        np.testing.assert_array_equal(got, light)
    # the others see that prompt alone
    alone = rows_of(inputs, np.flatnonzero(inputs.group < 2))
    for name, chosen in (("energy_across_loo", None), ("energy_regression", options)):
        expected = estimate(name, alone, chosen).baseline[4:8]
        np.testing.assert_allclose(estimate(name, heavy, chosen).baseline[4:8], expected, rtol=1e-7)


def test_exact_energies_that_drive_f_to_one_everywhere_stay_solvable():
    inputs = random_batch(8)
    huge = replace(inputs, energy=1e9 * inputs.energy)
    for options in (RegressionOptions(), EXACT):
        got = estimate("energy_regression", huge, options).baseline
        assert np.abs(got).max() < 20 * np.abs(inputs.reward).max()


def test_one_prompt_is_rloo():
    inputs = random_batch(9, prompts=1)
    for name in NAMES:
        got = estimate(name, inputs)
        np.testing.assert_array_equal(got.baseline, estimate("rloo", inputs).baseline)
        np.testing.assert_array_equal(got.fallback, inputs.mask)


def test_no_energy_anywhere_else_gives_the_plain_mean_of_the_other_prompts():
    inputs = random_batch(10, prompts=3)
    total = inputs.reward.sum(axis=1)
    means = np.repeat([total[4:].mean(), np.delete(total, slice(4, 8)).mean(), total[:8].mean()], 4)
    still = replace(inputs, energy=np.zeros(inputs.mask.shape))
    for name in NAMES:
        got = estimate(name, still)
        np.testing.assert_allclose(got.baseline, means[:, None] * inputs.mask)
        np.testing.assert_array_equal(got.fallback, inputs.mask)
        # only the first prompt has energy: the fallback is where it is the one looked at from, not where it is seen
        first = replace(inputs, energy=inputs.energy * (inputs.group == 0)[:, None])
        got = estimate(name, first)
        np.testing.assert_array_equal(got.fallback, inputs.mask & (inputs.group == 0)[:, None])
        np.testing.assert_allclose(got.baseline[:4], (means[:, None] * inputs.mask)[:4])


def test_rollout_alone_in_its_group_has_no_m():
    inputs = random_batch(11)
    group = np.where(np.arange(20) == 3, 99, inputs.group)
    got = estimate("energy_regression", replace(inputs, group=group))
    assert got.fallback[3, 0] and not got.fallback[np.arange(20) != 3].any()
    across = estimate("energy_across_loo", replace(inputs, group=group)).baseline
    np.testing.assert_array_equal(got.baseline[3], across[3])
    # it takes no part in the fit: what it was paid changes nothing for the others
    reward = inputs.reward + (np.arange(20) == 3)[:, None] * inputs.mask
    again = estimate("energy_regression", replace(inputs, group=group, reward=reward)).baseline
    np.testing.assert_array_equal(np.delete(again, 3, axis=0), np.delete(got.baseline, 3, axis=0))
    # without m it is a rollout as any other
    own = estimate("energy_regression", replace(inputs, group=group), RegressionOptions(features=("1", "f")))
    assert not own.fallback.any()


def test_nothing_forgotten_is_one_long_batch():
    first, second = random_batch(12, prompts=3), random_batch(13, prompts=2)
    options = RegressionOptions(ridge=0.1, T_max=6, memory=1.0)  # no ridge of its own for the number of prompts
    kept = estimate("energy_regression", first, options).state
    got = estimate("energy_regression", replace(second, state=kept), options)
    together = {k: np.concatenate([v, getattr(second, k)]) for k, v in vars(first).items() if v is not None}
    whole = EstimatorInputs(**together | {"group": np.concatenate([first.group, 10 + second.group])})
    expected = estimate("energy_regression", whole, options)
    np.testing.assert_allclose(got.baseline, expected.baseline[12:], atol=1e-10)
    np.testing.assert_allclose(got.state.gram, expected.state.gram, rtol=1e-13)
    np.testing.assert_allclose(got.state.moment, expected.state.moment, rtol=1e-12)


def test_memory_forgets_at_its_rate():
    # each step adds Σ w φφᵀ = 2 and Σ w φ R = 2·R̄; λ = ½: ½·2 + 2 = 3 and ½·2·1 + 2·0 = 1
    options = RegressionOptions(features=("1",), ridge=0.0, memory=0.5)
    kept = estimate("energy_regression", batch([1, 1], [[1], [1]], [0, 1]), options).state
    assert (kept.features, kept.gram.tolist(), kept.moment.tolist()) == (("1",), [[2]], [2])
    got = estimate("energy_regression", replace(batch([0, 0], [[1], [1]], [0, 1]), state=kept), options)
    assert (got.state.gram.tolist(), got.state.moment.tolist()) == ([[3]], [1])
    # what a prompt sees: the other's 1 and 0, and half of 2 and 2: B = 1/2
    np.testing.assert_allclose(got.baseline, 0.5)


def test_memory_serves_a_batch_of_one_prompt():
    options = RegressionOptions(memory=0.9)
    kept = estimate("energy_regression", random_batch(14), options).state
    got = estimate("energy_regression", replace(random_batch(15, prompts=1), state=kept), options)
    assert not got.fallback.any()


def test_without_memory_nothing_is_kept_and_nothing_read():
    inputs = random_batch(16)
    kept = estimate("energy_regression", inputs, RegressionOptions(memory=0.5)).state
    got = estimate("energy_regression", replace(inputs, state=kept))
    assert got.state is None
    np.testing.assert_array_equal(got.baseline, estimate("energy_regression", inputs).baseline)


def test_state_of_other_features_or_without_numbers_is_refused():
    inputs, options = random_batch(17), RegressionOptions(memory=0.5)
    kept = estimate("energy_regression", inputs, options).state
    with pytest.raises(InputError, match=r"state has features .*'m·h'"):
        estimate("energy_regression", replace(inputs, state=kept), replace(options, T_max=6))
    for broken in (replace(kept, gram=np.full((6, 6), np.nan)), replace(kept, moment=np.full(6, np.inf))):
        with pytest.raises(InputError, match="state has a NaN or infinity"):
            estimate("energy_regression", replace(inputs, state=broken), options)
    narrow = NormalEquations(kept.features, np.eye(3), np.ones(3))
    with pytest.raises(InputError, match="state of the same options"):
        estimate("energy_regression", replace(inputs, state=narrow), options)


def test_position_needs_the_sampling_limit():
    assert RegressionOptions().used == ("1", "m", "f", "m·f", "h", "m·h")
    assert RegressionOptions(T_max=64).used == RegressionOptions().features
    with pytest.raises(InputError, match=r"T_max is 5 .* 6 policy tokens"):
        estimate("energy_regression", random_batch(18, prompts=9), RegressionOptions(T_max=5))


def test_limit_is_filled_in_where_it_was_not_chosen():
    assert with_limit("energy_regression", None, 64) == RegressionOptions(T_max=64)
    assert with_limit("energy_regression", RegressionOptions(T_max=8), 64).T_max == 8
    assert with_limit("energy_regression", None, 0) == RegressionOptions()
    assert with_limit("otb", None, 64) == options_from_dict("otb", {})


def test_entropy_is_needed_unless_no_feature_reads_it():
    bare = replace(random_batch(19), entropy=None)
    assert "energy_regression" not in available(bare) and "energy_across_loo" in available(bare)
    with pytest.raises(InputError, match="needs entropy"):
        estimate("energy_regression", bare)
    chosen = RegressionOptions(features=("1", "m", "f", "m·f"))
    full = estimate("energy_regression", random_batch(19), chosen)
    np.testing.assert_array_equal(estimate("energy_regression", bare, chosen).baseline, full.baseline)
    with pytest.raises(InputError, match="needs energy"):
        estimate("energy_regression", replace(bare, energy=None), chosen)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["entropy", "energy", "reward"])
def test_numbers_that_are_none_are_named(field, value):
    inputs = random_batch(20)
    x = getattr(inputs, field).copy()
    x[7, 0] = value
    with pytest.raises(InputError, match=rf"{field} is {value} at rollout 7, token 0"):
        estimate("energy_regression", replace(inputs, **{field: x}))


def test_entropy_rounded_below_zero_counts_as_zero():
    inputs = random_batch(21)
    low, zero = (np.where(inputs.entropy < 0.3, x, inputs.entropy) for x in (-1e-7, 0.0))
    got, expected = (estimate("energy_regression", replace(inputs, entropy=x)).baseline for x in (low, zero))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"features": "1,n"}, "features has 'n'"),
        ({"features": "1,m,1"}, "name at least one, each once"),
        ({"features": "x"}, "and T_max for those of x"),
        ({"ridge": "much"}, "ridge is 'much'; pass a number, or auto"),
        ({"ridge": "-1"}, "ridge is -1.0 but must be a finite number of at least 0"),
        ({"ridge": "nan"}, "ridge is nan but"),
        ({"memory": "1.5"}, r"memory is 1.5 but must lie in \[0, 1\]"),
        ({"T_max": "-3"}, "T_max is -3; pass the sampling limit"),
        ({"T_max": "many"}, "'T_max' of energy_regression is 'many'; pass a int"),
        ({"decay": "1"}, "option 'decay' does not exist for energy_regression"),
    ],
)
def test_options_that_cannot_be_are_refused(values, sentence):
    with pytest.raises(InputError, match=sentence):
        options_from_dict("energy_regression", values)


def test_ridge_follows_from_the_number_of_prompts():
    options = RegressionOptions()
    assert [options.ridge_for(p) for p in (1, 15, 16, 31, 32, 500)] == [10, 10, 1, 1, 0.1, 0.1]
    remembering = RegressionOptions(memory=0.75)
    assert [remembering.ridge_for(4, remembers) for remembers in (False, True)] == [10, 1]
    assert [RegressionOptions(memory=1.0).ridge_for(4, remembers) for remembers in (False, True)] == [10, 0.1]
    assert options_from_dict("energy_regression", {"ridge": "0.5"}).ridge_for(3) == 0.5
    for prompts, ridge in ((9, 10.0), (20, 1.0), (40, 0.1)):
        inputs = random_batch(24, prompts=prompts)
        got, expected = (estimate("energy_regression", inputs, RegressionOptions(ridge=r)) for r in ("auto", ridge))
        np.testing.assert_array_equal(got.baseline, expected.baseline)


def test_features_are_read_from_text():
    options = options_from_dict("energy_regression", {"features": "1, m,m*f", "memory": "0.9", "T_max": "64"})
    assert options == RegressionOptions(("1", "m", "m·f"), memory=0.9, T_max=64)
    assert options_from_dict("energy_regression", {"features": ["1", "m"]}).features == ("1", "m")


def test_where_prompts_differ_and_energies_tell_nothing_james_stein_is_calmer_and_the_regression_is_not():
    prompts, size, tokens, batches = 8, 4, 4, 200
    random = np.random.default_rng(0)
    spread = {name: np.zeros(batches) for name in ("rloo", "james_stein", "energy_regression")}
    for k in range(batches):
        success = 1 / (1 + np.exp(1 - 2 * random.standard_normal((prompts, 1))))  # from hardly ever to nearly always
        reward, shape = (random.random((prompts, size)) < success).ravel(), (prompts * size, tokens)
        group = np.repeat(np.arange(prompts), size)
        inputs = batch(reward, random.lognormal(size=shape), group, random.random(shape))
        for name, of in spread.items():  # of scores that are independent of the rewards and of each other
            of[k] = (estimate(name, inputs).advantage ** 2 * inputs.energy).sum()
    over = {name: of - spread["rloo"] for name, of in spread.items()}
    errors = {name: of.mean() / (of.std(ddof=1) / batches**0.5) for name, of in over.items() if name != "rloo"}
    assert errors["james_stein"] < -3 and errors["energy_regression"] > 3
