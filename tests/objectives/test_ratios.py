"""Importance ratios: worked numbers, and coefficients that are the gradient of the surrogate they belong to."""

import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError
from otb_analysis.objectives.ratios import (
    RATIOS,
    BandOptions,
    BoundOptions,
    ClipOptions,
    DivergenceOptions,
    GateOptions,
    GspoOptions,
    MaskOptions,
    MeanOptions,
    MoveOptions,
    PositionOptions,
    RatioInputs,
    ThresholdOptions,
    TruncationOptions,
    WeightOptions,
    importance_ratio,
    learning_rate_factor,
    mismatch_scalars,
)
from otb_analysis.objectives.registry import options_from_table

RHO = np.array([[0.9, 1.2, 0.5, 1.1]])
WIDE = {  # options under which some tokens are clipped and some are not
    "ppo": ClipOptions(dual=1.6),
    "gspo": GspoOptions(low=0.05, high=0.05),
    "ctpo": PositionOptions(low=0.2, high=0.2, dual=1.6),
    "cumulative_truncated": BoundOptions(low=0.2, high=0.2),
    "tis": TruncationOptions(cap=1.2),
    "sequence_mask": MaskOptions(low=0.1, high=0.1),
    "icepop": BandOptions(low=0.7, high=1.4),
    "ipo": ThresholdOptions(0.01),  # the sampler's probability is e^−3 = .05 throughout
    "dppo_tv": MoveOptions(low=0.003, high=0.005),
    "dppo_kl": DivergenceOptions(low=2e-4, high=3e-4),
    "sapo": GateOptions(positive=1.5, negative=3.0),
    "gmpo": MeanOptions(low=0.2, high=0.3),
}


def inputs_of(rho, mask=None):
    rho = np.asarray(rho, float)
    mask = np.ones(rho.shape, bool) if mask is None else np.asarray(mask)
    return RatioInputs(np.where(mask, np.log(rho) - 3.0, np.nan), np.where(mask, -3.0, np.nan), mask)


def random_inputs(seed, *, gaps=True, n=9, t=6, spread=0.4):
    rng = np.random.default_rng(seed)
    mask = np.arange(t) < rng.integers(0, t + 1, n)[:, None]
    if gaps:
        mask &= rng.random(mask.shape) < 0.7
    return inputs_of(np.exp(rng.normal(scale=spread, size=(n, t))), mask), rng


def value(name, rho=RHO, options=None):
    return importance_ratio(name, inputs_of(rho), options).value


def test_values_of_four_tokens_by_hand():
    # ρ = .9 1.2 .5 1.1: products .9 1.08 .54 .594; minimum before 1 .9 .9 .5; fourth root of .594 = .878
    expected = {
        "none": [1, 1, 1, 1],
        "token": RHO[0],
        "ppo": RHO[0],
        "sequence": [0.594] * 4,
        "gspo": [0.594**0.25] * 4,
        "cumulative": [0.9, 1.08, 0.54, 0.594],
        "ctpo": [0.9, 1.08, 0.54, 0.594],
        "minpro": [0.9, 1.08, 0.45, 0.55],
        "sequence_mask": RHO[0],
        "tis": RHO[0],
    }
    for name, row in expected.items():
        np.testing.assert_allclose(value(name)[0], row, rtol=1e-14, err_msg=name)
    assert abs(0.594**0.25 - 0.878) < 5e-4


def test_bounds_of_ctpo_widen_with_the_root_of_the_position():
    # clipped to e^{−.025 √t} = .9753 .9653 .9576 .9512 and e^{.05 √t} = 1.0513 1.0733 1.0904 1.1052
    expected = [0.975, 1.073, 0.958, 0.951]
    got = importance_ratio("ctpo", inputs_of(RHO))
    np.testing.assert_allclose(np.clip(got.value, got.limits.low, got.limits.high)[0], expected, atol=5e-4)
    np.testing.assert_allclose(value("cumulative_truncated")[0], expected, atol=5e-4)


def test_truncation_caps_and_says_where():
    got = importance_ratio("tis", inputs_of(RHO), TruncationOptions(cap=1.0))
    np.testing.assert_allclose(got.value[0], [0.9, 1, 0.5, 1])
    assert got.limited.tolist() == [[False, True, False, True]]
    np.testing.assert_allclose(got.coefficient(np.full((1, 4), -2.0)), -2 * got.value)


def test_sequence_mask_drops_by_geometric_mean_and_by_one_impossible_token():
    # geometric means .878, 1.0005 and √(1e-5 · 1e5) = 1, the last with a token below the veto of 1e-4
    rho = [[0.9, 1.2, 0.5, 1.1], [1.001, 1, 1.001, 1], [1e-5, 1e5, 1, 1]]
    got = importance_ratio("sequence_mask", inputs_of(rho))
    assert got.kept.all(axis=1).tolist() == [False, True, False]
    assert (got.limited == ~got.kept).all()
    np.testing.assert_allclose(got.coefficient(np.ones((3, 4))), [[0] * 4, rho[1], [0] * 4])


def test_ppo_clip_depends_on_the_sign_of_the_advantage():
    # bounds .8 and 1.2: A > 0 stops at 1.3, A < 0 stops at .5, and dual clip stops A < 0 at 3.5
    rho = [[0.5, 1.3, 3.5, 1.0]]
    got = importance_ratio("ppo", inputs_of(rho), ClipOptions(dual=3.0))
    np.testing.assert_allclose(got.coefficient(np.ones((1, 4))), [[0.5, 0, 0, 1]])
    np.testing.assert_allclose(got.coefficient(-np.ones((1, 4))), [[0, -1.3, 0, -1]])
    assert got.clipped(np.ones((1, 4))).tolist() == [[False, True, True, False]]
    assert not got.clipped(np.zeros((1, 4))).any()


def test_gspo_gradient_flows_through_every_token_with_one_over_the_length():
    # r = .878 unclipped, u = 4 0 0 2: every token gets .878 · 6/4
    got = importance_ratio("gspo", inputs_of(RHO), GspoOptions(low=0.5, high=0.5))
    assert got.through == "rollout"
    np.testing.assert_allclose(got.coefficient(np.array([[4.0, 0, 0, 2]])), [[0.594**0.25 * 1.5] * 4])


def test_cispo_holds_the_weight_and_keeps_every_gradient():
    # bounds .8 and 1.2: .9 1.2 .8 1.1, for either sign; without a lower bound it is a truncation
    got = importance_ratio("cispo", inputs_of(RHO))
    for u in (np.ones((1, 4)), -np.ones((1, 4))):
        np.testing.assert_allclose(got.coefficient(u), u * [[0.9, 1.2, 0.8, 1.1]])
    assert got.limited.tolist() == [[False, False, True, False]]
    np.testing.assert_array_equal(
        value("cispo", options=WeightOptions(1.0, 0.1)), value("tis", options=TruncationOptions(1.1))
    )


def test_icepop_drops_tokens_outside_its_band():
    # α = .5 and β = 5, for either sign
    got = importance_ratio("icepop", inputs_of([[0.6, 0.4, 4.0, 6.0]]))
    np.testing.assert_allclose(got.coefficient(np.array([[2.0, 2.0, -2.0, -2.0]])), [[1.2, 0, -8.0, 0]])


def of_probabilities(policy, sampler):
    return RatioInputs(np.log([policy]), np.log([sampler]), np.ones((1, len(policy)), bool))


def test_ipo_drops_tokens_whose_probability_moved():
    # differences .1 .15 .09 .001: ρ = 100 at a rare token stays, ρ = 1.375 at a likely one goes
    got = importance_ratio(
        "ipo", of_probabilities([0.55, 0.55, 0.1, 0.00101], [0.45, 0.4, 0.01, 0.00001]), ThresholdOptions(0.101)
    )
    np.testing.assert_allclose(got.coefficient(np.ones((1, 4))), [[0.55 / 0.45, 0, 10, 101]])
    assert got.limited.tolist() == [[False, True, False, False]]


def test_dppo_stops_good_tokens_that_rose_and_bad_ones_that_fell():
    # moves +.2 −.2 +.1 with ρ = 1.5 .5 2
    inputs = of_probabilities([0.6, 0.2, 0.2], [0.4, 0.4, 0.1])
    for sign, expected in ((1.0, [0, 0.5, 2]), (-1.0, [-1.5, 0, -2])):
        got = importance_ratio("dppo_tv", inputs).coefficient(np.full((1, 3), sign))
        np.testing.assert_allclose(got, [expected], atol=1e-15)
    # D = .4 log(2/3) + .6 log 1.5 = .081, .4 log 2 + .6 log .75 = .105 and .1 log ½ + .9 log 1.125 = .0367
    limits = DivergenceOptions(low=0.1, high=0.09)
    for sign, expected in ((1.0, [1.5, 0.5, 2]), (-1.0, [-1.5, 0, -2])):
        np.testing.assert_allclose(
            importance_ratio("dppo_kl", inputs, limits).coefficient(np.full((1, 3), sign)), [expected]
        )
    np.testing.assert_allclose(importance_ratio("dppo_kl", inputs).coefficient(np.ones((1, 3))), [[0, 0.5, 2]])


def test_sapo_closes_its_gate_smoothly():
    # τ = 2 and ρ = 1 + ½ log 3: σ = ¾, so 4·¾·¼·ρ = ¾ρ; τ = 4: σ = 9/10, 4·9/100·ρ = .36ρ
    rho = 1 + np.log(3) / 2
    got = importance_ratio("sapo", inputs_of([[rho, rho, 1.0]]), GateOptions(2.0, 4.0))
    np.testing.assert_allclose(got.coefficient(np.array([[1.0, -1.0, 5.0]])), [[0.75 * rho, -0.36 * rho, 5.0]])


def test_gmpo_clips_tokens_before_the_geometric_mean():
    # log 4 is held at log 2: r = (2·½·1·1)^¼ = 1 for a good rollout; mean u = 1, the clipped token has no gradient
    options = MeanOptions(low=np.log(4), high=np.log(2))
    got = importance_ratio("gmpo", inputs_of([[4, 0.5, 1, 1]]), options)
    np.testing.assert_allclose(got.coefficient(np.array([[4.0, 0, 0, 0]])), [[0, 1, 1, 1]])
    # for a bad one nothing is below ¼: r = (4·½)^¼
    np.testing.assert_allclose(got.coefficient(np.full((1, 4), -1.0)), np.full((1, 4), -(2**0.25)))


def surrogate(name, logprob, inputs, u):
    """The objective of each entry as torch would train it, written without the library."""
    mask = torch.tensor(inputs.mask)
    log = torch.where(mask, logprob - torch.tensor(inputs.behavior_logprob), 0.0)
    rho, length = log.exp(), mask.sum(1, keepdim=True).clamp(min=1)
    position = torch.cumsum(mask, 1).clamp(min=1).sqrt()

    def clipped(r, low, high, dual=torch.inf):
        least = torch.minimum(r * u, r.clamp(low, high) * u)
        return torch.where(u < 0, torch.maximum(least, dual * u) if dual < torch.inf else least, least)

    before = torch.cumsum(log, 1).detach() - log.detach()
    detached = {
        "none": lambda: torch.ones_like(rho),
        "sequence": lambda: log.sum(1, keepdim=True).exp(),
        "cumulative": lambda: torch.cumsum(log, 1).exp(),
        "cumulative_truncated": lambda: torch.clamp(torch.cumsum(log, 1), -0.2 * position, 0.2 * position).exp(),
        "tis": lambda: rho.clamp(max=1.2),
        "sequence_mask": lambda: rho * ((log.sum(1, keepdim=True) / length).exp() - 1).abs().le(0.1),
        "cispo": lambda: rho.clamp(0.8, 1.2),
    }
    policy, sampler = logprob.exp(), torch.tensor(inputs.behavior_logprob).exp()
    binary = sampler * (sampler / policy).log() + (1 - sampler) * ((1 - sampler) / (1 - policy)).log()
    kept = {
        "icepop": lambda: (rho >= 0.7) & (rho <= 1.4),
        "ipo": lambda: (policy - sampler).abs() <= 0.01,
        "dppo_tv": lambda: torch.where(u > 0, policy - sampler <= 0.005, policy - sampler >= -0.003),
        "dppo_kl": lambda: torch.where(
            u > 0, (binary <= 3e-4) | (policy <= sampler), (binary <= 2e-4) | (policy >= sampler)
        ),
    }
    if name in detached:
        per_token = detached[name]().detach() * u * logprob
    elif name in kept:
        per_token = rho * u * kept[name]()
    elif name == "sapo":
        tau = torch.where(u > 0, 1.5, 3.0)
        per_token = torch.sigmoid(tau * (rho - 1)) * 4 / tau * u
    elif name == "gmpo":
        total = torch.where(mask, u, 0.0).sum(1, keepdim=True)
        sign = total.sign()
        least = sign * torch.minimum(sign * log, sign * log.clamp(-0.2, 0.3))
        per_token = (torch.where(mask, least, 0.0).sum(1, keepdim=True) / length).exp() * total / length
    elif name == "token":
        per_token = rho * u
    elif name == "minpro":
        smallest = torch.where(mask, rho, torch.inf).cummin(1).values
        shifted = torch.cat([torch.full_like(smallest[:, :1], torch.inf), smallest[:, :-1]], 1).detach()
        per_token = rho * torch.where(shifted.isinf(), 1.0, shifted) * u
    elif name == "ppo":
        per_token = clipped(rho, 0.8, 1.2, 1.6)
    elif name == "gspo":
        per_token = clipped((log.sum(1, keepdim=True) / length).exp(), 0.95, 1.05)
    else:
        per_token = clipped(before.exp() * rho, (-0.2 * position).exp(), (0.2 * position).exp(), 1.6)
    return torch.where(mask, per_token, 0.0).sum()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RATIOS)
def test_coefficients_are_the_gradient_of_the_surrogate(name, seed):
    # c_k = ∂/∂log π_k, so the loss −Σ c log π has the surrogate's gradient in any parameters behind log π
    inputs, rng = random_inputs(seed)
    u = np.where(inputs.mask, rng.normal(size=inputs.mask.shape), 0.0)
    logprob = torch.tensor(inputs.logprob, requires_grad=True)
    (gradient,) = torch.autograd.grad(surrogate(name, logprob, inputs, torch.tensor(u)), logprob)
    got = importance_ratio(name, inputs, WIDE.get(name))
    np.testing.assert_allclose(got.coefficient(u), gradient.numpy(), atol=1e-13)
    assert name not in ("ppo", "gspo", "ctpo", "dppo_tv", "dppo_kl", "gmpo") or 0 < got.clipped(u).mean() < 0.9
    assert name not in ("icepop", "ipo", "cispo") or 0 < got.limited.mean() < 0.9


@pytest.mark.parametrize("name", ["token", "ppo", "gspo", "sapo", "gmpo"])
def test_coefficients_are_finite_differences_of_the_objective(name):
    inputs, rng = random_inputs(3)
    u = np.where(inputs.mask, rng.normal(size=inputs.mask.shape), 0.0)
    direction, step = rng.normal(size=u.shape), 1e-6

    def objective(x):
        return float(surrogate(name, torch.tensor(x), inputs, torch.tensor(u)))

    ends = [objective(inputs.logprob + sign * step * direction) for sign in (1, -1)]
    slope = importance_ratio(name, inputs, WIDE.get(name)).coefficient(u) * direction
    assert abs((ends[0] - ends[1]) / (2 * step) - slope.sum()) < 1e-7


@pytest.mark.parametrize("name", RATIOS)
def test_on_policy_every_ratio_is_one_and_every_objective_the_policy_gradient(name):
    mask = np.arange(5) < np.array([[5], [3], [0], [1]])
    inputs = inputs_of(np.ones(mask.shape), mask)
    u = np.where(mask, np.array([[2.0], [-1.5], [3.0], [0.5]]), 0.0)
    got = importance_ratio(name, inputs)
    np.testing.assert_allclose(got.value, mask)
    np.testing.assert_allclose(got.coefficient(u), u, atol=1e-15)
    assert not got.clipped(u).any() and not got.limited.any()


@pytest.mark.parametrize("name", RATIOS)
def test_padding_is_never_read_and_answers_are_zero_there(name):
    inputs, rng = random_inputs(5)
    dirty = RatioInputs(
        *(np.where(inputs.mask, x, np.nan) for x in (inputs.logprob, inputs.behavior_logprob)), inputs.mask
    )
    u = np.where(inputs.mask, rng.normal(size=inputs.mask.shape), np.nan)
    got, clean = importance_ratio(name, dirty), importance_ratio(name, inputs)
    np.testing.assert_array_equal(got.value, clean.value)
    np.testing.assert_array_equal(got.coefficient(u), clean.coefficient(np.nan_to_num(u)))
    for x in (got.value, got.coefficient(u), got.kept, got.limited, got.clipped(u)):
        assert not x[~inputs.mask].any()


@pytest.mark.parametrize("name", RATIOS)
def test_rollouts_do_not_know_each_other(name):
    inputs, rng = random_inputs(6)
    order = rng.permutation(len(inputs.mask))
    u = np.where(inputs.mask, rng.normal(size=inputs.mask.shape), 0.0)
    shuffled = RatioInputs(inputs.logprob[order], inputs.behavior_logprob[order], inputs.mask[order])
    got = importance_ratio(name, shuffled, WIDE.get(name)).coefficient(u[order])
    np.testing.assert_allclose(got, importance_ratio(name, inputs, WIDE.get(name)).coefficient(u)[order], rtol=1e-13)


@pytest.mark.parametrize("name", RATIOS)
def test_tool_tokens_are_skipped(name):
    mask = np.array([[True, False, True, True, False, True]])
    rho, u = np.array([[0.9, 7, 1.2, 0.5, 7, 1.1]]), np.array([[1.0, 9, -1, 1, 9, -1]])
    gapped = importance_ratio(name, inputs_of(rho, mask), WIDE.get(name)).coefficient(u)
    dense = importance_ratio(name, inputs_of(RHO), WIDE.get(name)).coefficient(u[mask][None])
    np.testing.assert_allclose(gapped[mask], dense[0], rtol=1e-13)


@pytest.mark.parametrize("name", RATIOS)
def test_a_thousand_nats_overflow_nowhere(name):
    mask = np.ones((2, 400), bool)
    inputs = RatioInputs(np.array([[-0.01], [-9.0]]) * mask, np.array([[-9.0], [-0.01]]) * mask, mask)
    assert np.isfinite(importance_ratio(name, inputs).coefficient(np.ones(mask.shape))).all()


def test_learning_rate_factor_by_hand():
    # ρ = 2 .5 1 .1: the effective sample size is 3.6²/5.26 = 2.464, and √(2.464/4) = .785
    assert abs(learning_rate_factor([2, 0.5, 1, 0.1]) - (12.96 / 5.26 / 4) ** 0.5) < 1e-14
    assert learning_rate_factor(np.full(7, 1e200)) == pytest.approx(1)
    assert learning_rate_factor(np.zeros(3)) == 0 and learning_rate_factor([0, 5, 0]) == pytest.approx((1 / 3) ** 0.5)
    assert learning_rate_factor(np.ones(9)) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: importance_ratio("ppoo", inputs_of(RHO)), "ratio 'ppoo' does not exist; did you mean 'ppo'"),
        (lambda: importance_ratio("ppo", inputs_of(RHO), TruncationOptions()), "options of ppo are TruncationOptions"),
        (lambda: options_from_table("tis", RATIOS["tis"].options, {"capp": 2}), "'capp' .* did you mean 'cap'"),
        (lambda: TruncationOptions(cap=0.0), "cap is 0.0 but must be above 0"),
        (lambda: ClipOptions(low=-1.0), "low=-1.0.* does not clip"),
        (lambda: PositionOptions(dual=0.5), "dual is 0.5 but must be above 1"),
        (lambda: BoundOptions(high=-0.1), "high=-0.1.* no room"),
        (lambda: MaskOptions(veto=-1), "veto=-1.* is no mask"),
        (lambda: ThresholdOptions(-0.1), "threshold is -0.1 but must be 0 or more"),
        (lambda: GateOptions(negative=0.0), "negative=0.0.* has no gate"),
        (lambda: RatioInputs(np.zeros(3), np.zeros((1, 3)), np.ones((1, 3), bool)), r"logprob has shape \(3,\)"),
        (
            lambda: RatioInputs(np.zeros((1, 2)), np.array([[0, np.nan]]), np.ones((1, 2), bool)),
            "behavior_logprob is nan at rollout 0, token 1",
        ),
        (lambda: learning_rate_factor([1, -1]), "weight has a value of -1.0"),
        (lambda: learning_rate_factor([]), "weight is empty"),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()


def test_options_from_text_are_numbers():
    assert options_from_table("ppo", RATIOS["ppo"].options, {"high": "0.28", "dual": "3"}) == ClipOptions(
        0.2, 0.28, 3.0
    )
    assert options_from_table("gspo", RATIOS["gspo"].options, {}) == GspoOptions(3e-4, 4e-4)


def test_mismatch_does_not_cancel_and_counts_raw_ratios_beyond_two():
    found = mismatch_scalars([1.0, -1.0, 0.5, -0.5, np.nan])
    assert found["mismatch_mean"] == 0.0 and found["mismatch_max"] == 1.0
    assert found["mismatch_rms"] == pytest.approx((2.5 / 4) ** 0.5)
    # r − 1 − log r: e − 2, 1/e, e^½ − 1.5, e^−½ − .5; ratios 2.7 and .37 lie beyond 2, 1.6 and .61 do not
    assert found["mismatch_k3"] == pytest.approx((np.e - 2 + 1 / np.e + np.e**0.5 - 1.5 + np.e**-0.5 - 0.5) / 4)
    assert found["mismatch_ratio_share"] == 0.5


def test_k3_estimates_the_divergence_from_sampler_to_trainer():
    sampler, trainer = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    token = np.random.default_rng(0).choice(3, size=200_000, p=sampler)
    log_ratio = np.log(trainer / sampler)
    forward = float(-(sampler * log_ratio).sum())  # KL(μ‖π) = .635, KL(π‖μ) = .676
    terms = np.exp(log_ratio[token]) - 1 - log_ratio[token]
    found = mismatch_scalars(log_ratio[token])["mismatch_k3"]
    assert found == pytest.approx(forward, abs=4 * terms.std() / len(token) ** 0.5)  # ± .006


def test_a_ratio_beyond_float64_is_infinite_without_a_warning_and_no_token_is_unknown():
    assert mismatch_scalars([0.0, 800.0])["mismatch_k3"] == np.inf
    assert set(mismatch_scalars([np.nan]).values()) == {None}
