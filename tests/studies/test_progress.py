"""The machinery of study 09: gains against enumeration, AdamW's step against torch, efficiency against the library."""

import dataclasses
import importlib
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch.nn.utils import parameters_to_vector

from otb_analysis.config import SampleConfig
from otb_analysis.estimators import proved
from otb_analysis.statistics import Gram, deleted_moments
from otb_analysis.tasks.task_calls import draw_prompts
from studies.lib.enumeration.derailment import Derailment
from studies.lib.policies import fresh_policy, write
from studies.lib.record import load_study
from studies.lib.seeds import BASE, QUICK_TASK

load_study(Path(__file__).parent.parent.parent / "studies" / "09_progress")
checkpoint, judged, points, derailed = (
    importlib.import_module(f"study_09_progress.{name}") for name in ("checkpoint", "judged", "points", "derailed")
)
N_TOKENS = 2


def first_token(rollouts):
    return rollouts.input_ids[np.arange(len(rollouts.group)), rollouts.prompt_length]


@pytest.fixture(scope="module")
def tiny():
    """An untrained policy that writes up to two tokens, a step, and every completion of one prompt with its reward."""
    config = replace(BASE, chain_sum=QUICK_TASK, small_model=replace(BASE.small_model, layers=1, width=16, heads=2))
    policy = fresh_policy(config)
    prompts = draw_prompts(policy.task, "heldout", 0, 1)
    sample = SampleConfig(prompts=1, group_size=4000, max_new_tokens=N_TOKENS)
    written = write(policy, prompts, sample, seed=0)
    size, end = len(policy.tokenizer), policy.tokenizer.eos_token_id
    drawn = written.rollouts
    one = drawn.take(np.flatnonzero(drawn.mask.sum(axis=1) == N_TOKENS)[:1])
    every = [(a, b) for a, b in itertools.product(range(size), repeat=2) if a != end] + [(end, None)]
    ids = np.repeat(one.input_ids, len(every), axis=0)
    mask, attention = (np.repeat(x, len(every), axis=0) for x in (one.mask, one.attention_mask))
    start = int(one.prompt_length[0])
    for row, (a, b) in enumerate(every):
        ids[row, start] = a
        if b is None:
            mask[row, start + 1 :] = attention[row, start + 1 :] = False
        else:
            ids[row, start + 1] = b
    whole = replace(
        one, input_ids=ids, mask=mask, attention_mask=attention, group=np.zeros(len(every), int),
        prompt_length=np.full(len(every), start), reward_parts={}, turns=one.turns * len(every),
        finish_reason=one.finish_reason * len(every), **{
            name: np.repeat(getattr(one, name), len(every), axis=0) for name in ("turn", "behavior_logprob", "reward")
        },
    )  # fmt: skip
    base = parameters_to_vector(policy.model.parameters()).detach().clone()
    step = 0.02 * torch.randn(base.shape, generator=torch.Generator().manual_seed(1))
    return policy.model, base, step, drawn, whole


def paid(rollouts):
    """A reward that depends on both tokens: 1 where the first is odd, .5 more where a second one follows."""
    return (first_token(rollouts) % 2) + 0.5 * (rollouts.mask.sum(axis=1) > 1)


def exact_success(model, base, step, whole):
    with judged.parameters_moved(model, base, step):
        return float(np.exp(judged.sequence_logprob(model, whole)) @ paid(whole))


def test_enumerated_completions_are_all_there_are(tiny):
    model, base, step, _, whole = tiny
    for delta in (torch.zeros_like(step), step):
        with judged.parameters_moved(model, base, delta):
            assert np.exp(judged.sequence_logprob(model, whole)).sum() == pytest.approx(1, abs=1e-5)
    assert torch.equal(parameters_to_vector(model.parameters()), base)


def test_weighted_gain_is_the_enumerated_gain_within_its_standard_error(tiny):
    model, base, step, drawn, whole = tiny
    exact = exact_success(model, base, step, whole) - exact_success(model, base, torch.zeros_like(step), whole)
    centre = 0.7
    reward = paid(drawn) - centre
    old = judged.sequence_logprob(model, drawn)
    with judged.parameters_moved(model, base, step):
        new = judged.sequence_logprob(model, drawn)
    gain, ess = judged.weighted_gain(old, new, reward)
    error = ((np.exp(new - old) - 1) * reward).std() / len(old) ** 0.5
    assert abs(exact) > 4 * error  # a gain of 0 would fail
    assert gain == pytest.approx(exact, abs=3 * error)
    assert 0.5 < ess < 0.999
    blocks = [np.arange(k, len(old), 2) for k in range(2)]
    pool = judged.pool_of(model, drawn, reward, blocks)
    by_block = [judged.pool_gain(base, step, model, pool, k)[0] for k in range(2)]
    assert np.mean(by_block) == pytest.approx(gain, abs=1e-6)  # slopes of the blocks cancel


def test_weighted_gain_is_exact_where_rollouts_are_the_whole_distribution(tiny):
    model, base, step, _, whole = tiny
    old = judged.sequence_logprob(model, whole)
    with judged.parameters_moved(model, base, step):
        new = judged.sequence_logprob(model, whole)
    p = np.exp(old)
    centred = p * len(p) * (paid(whole) - 0.3)  # each completion as often as it is drawn
    exact = exact_success(model, base, step, whole) - exact_success(model, base, torch.zeros_like(step), whole)
    assert judged.weighted_gain(old, new, centred)[0] == pytest.approx(exact, abs=2e-6)


def test_slope_is_the_derivative_of_enumerated_success(tiny):
    model, base, step, _, whole = tiny
    p = np.exp(judged.sequence_logprob(model, whole))
    pool = judged.pool_of(model, whole, p * len(p) * paid(whole), [np.arange(len(p))])
    by_difference = (
        exact_success(model, base, 0.03 * step, whole) - exact_success(model, base, -0.03 * step, whole)
    ) / 0.06
    assert judged.slope_of(pool, step) == pytest.approx(by_difference, rel=0.02)


@pytest.mark.parametrize("clipped", [True, False])
def test_adamw_step_is_that_of_torch(clipped):
    gradients = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.AdamW(
        [weight], lr=checkpoint.OPTIMIZE.learning_rate, betas=checkpoint.OPTIMIZE.betas, weight_decay=0.0
    )
    for gradient in gradients:
        weight.grad = -gradient  # torch descends
        before = weight.detach().clone()
        if clipped:
            torch.nn.utils.clip_grad_norm_([weight], checkpoint.OPTIMIZE.max_grad_norm)
        state = optimizer.state[weight]
        moments = (-state["exp_avg"].clone(), state["exp_avg_sq"].clone()) if state else (torch.zeros(5),) * 2
        optimizer.step()
    both = {"clipped": moments, "unclipped": moments}
    at = checkpoint.Checkpoint(None, None, None, before, both, updates=3)
    assert torch.allclose(at.adamw_step(gradients[-1], clipped), weight - before, atol=1e-9, rtol=1e-4)


def test_efficiency_is_made_of_the_library_s_moments():
    rng, count = np.random.default_rng(0), 12
    own = rng.normal(size=(len(checkpoint.ARMS), count, 30)) + rng.normal(size=30)
    own[checkpoint.ARMS.index("otb")] *= 0.4
    inner = np.einsum("abd,ced->acbe", own, own)
    labels = tuple((name, "none") for name in checkpoint.ARMS)
    unbiased = frozenset(label for label in labels if label[0] in checkpoint.UNBIASED)
    efficiency = points.Metric(np.einsum("aabb->ab", inner), inner).efficiency(np.ones(count))
    for label, found in zip(labels, efficiency, strict=True):
        power, _, along, truth, _ = dataclasses.astuple(deleted_moments([Gram(inner, labels, count)], label, unbiased))
        share = truth[0] if label in unbiased else along[0]
        assert found == pytest.approx(share**2 / (truth[0] * power[0]))


def test_unbiased_arms_are_those_the_registry_proves():
    config = {
        "objective": {"staleness": 0, "epochs": 1, "minibatches": 1, "ratio": "none", "shaping": "none"},
        "sample": {"engine": "transformers", "prompts": 16, "group_size": 4}, "optimize": {"precision": "float32"},
        "estimator": {"name": "rloo", "options": {}},
    }  # fmt: skip
    known = proved([(name, "proxy") for name in checkpoint.ARMS], config)
    assert {label[0] for label, c in known.projection.items() if c == 1} == set(checkpoint.UNBIASED)


def test_a_duplicated_batch_has_no_product_with_itself():
    rng = np.random.default_rng(1)
    own = rng.normal(size=(len(checkpoint.ARMS), 6, 40)) + rng.normal(size=40)
    inner = np.einsum("abd,ced->acbe", own, own)
    metric = points.Metric(np.einsum("aabb->ab", inner), inner)
    pairs = [(b, c) for b in range(6) for c in range(6) if b != c]
    known = [checkpoint.ARMS.index(name) for name in checkpoint.UNBIASED]
    weight = np.arange(1.0, 7.0)
    total = sum(weight[b] * weight[c] for b, c in pairs)
    slow = (
        sum(weight[b] * weight[c] * own[known, b].mean(axis=0) @ own[known, c].mean(axis=0) for b, c in pairs) / total
    )
    power = (weight * (own[0] ** 2).sum(axis=1)).sum() / weight.sum()
    assert metric.efficiency(weight)[0] == pytest.approx(slow / power)


def test_best_lengths_make_gains_proportional_to_efficiency_where_curvature_is_alike():
    rng, count, arms = np.random.default_rng(2), 4000, len(checkpoint.ARMS)
    truth = np.array([1.0, 0.5, 0.0])
    noise = np.linspace(1, 3, arms)[:, None, None] * rng.normal(size=(arms, count, 3))
    own = truth + noise - noise.mean(axis=1, keepdims=True)
    eta = np.linspace(0.01, 1, 200)
    curve = (own @ truth)[..., None] * eta - (own**2).sum(axis=2)[..., None] * eta**2 / 2
    metric = points.Metric((own**2).sum(axis=2), along=own @ truth, truth=float(truth @ truth))
    one = points.Judged("x", "model", {"sgd": curve}, {"sgd": np.ones((arms, 200), bool)}, {"sgd": metric})
    predicted, realised, *_ = one.over_rloo("sgd", np.ones(count))
    assert realised == pytest.approx(predicted, rel=0.06)
    assert predicted[-1] < 0.3


def test_gains_of_a_line_are_the_quadratic_through_slope_and_gain_with_and_without_clipping():
    arms, best = len(checkpoint.ARMS), np.full((2, len(checkpoint.ARMS)), 0.5)
    norm = np.tile([0.5, 1.0, 2.0, 4.0], (arms, 1))
    part = {"norm": norm} | {f"{line}_slope": np.full((arms, 4), 2.0) for line in judged.LINES}
    part |= {f"{line}_gain": np.full((arms, 4), 2 * 0.5 - 3 * 0.25) for line in judged.LINES}
    part |= {f"{line}_ess": np.full((arms, 4), 0.8) for line in judged.LINES}
    part |= {name: np.full((arms, 4), 0.3) for name in judged.STEPS}
    part |= {f"{name}_alone": np.full(4, 0.1) for name in judged.STEPS}
    products = {line: np.ones((arms, arms, 4, 4)) for line in judged.LINES}
    one = points.of_policy("x", products, [part, part], best)
    eta = 0.5 * np.array(points.GRID)
    assert one.gains["sgd"].shape == (arms, 8, len(eta))
    assert one.gains["sgd"][0, 0] == pytest.approx(2 * eta - 3 * eta**2)
    factor = np.array([1, 1, 0.5, 0.25])
    eta = (factor / factor.mean())[:, None] * eta
    assert one.gains["sgd_clipped"][0, :4] == pytest.approx(2 * eta - 3 * eta**2)
    assert one.gains["adamw_step"][:, :, 0] == pytest.approx(np.full((arms, 8), 0.2))
    assert one.allowed["sgd"][0].tolist() == [0.2 * x**2 <= 0.5 for x in points.GRID]


def test_success_slope_and_ess_of_the_derailment_process_are_exact():
    at = derailed.process("middle", 6)
    base = log_softmax(np.log(at.policy) + np.zeros((6, 1, 1)), axis=-1)
    assert derailed.exact_success(base, at.follows) == pytest.approx(at.success)
    step = 0.3 * np.random.default_rng(0).normal(size=base.size)
    delta = 1e-5 * step.reshape(base.shape)
    slope = (derailed.exact_success(base + delta, at.follows) - derailed.exact_success(base - delta, at.follows)) / 2e-5
    assert np.mean(derailed.PAYS) * slope == pytest.approx(step @ (np.mean(derailed.PAYS) * at.gradient), rel=1e-6)
    new, other = base + step.reshape(base.shape), Derailment(horizon=6, mistake=at.mistake, pay=1.0)
    state, token, _ = other.sample(200_000, np.random.default_rng(1))
    where = (np.arange(6), state, token)
    ratio = np.exp((log_softmax(new, axis=-1)[where] - base[where]).sum(axis=1))
    assert derailed.exact_ess(base, new, at.follows) == pytest.approx(1 / np.mean(ratio**2), rel=0.05)


def test_group_mean_steps_are_those_of_rloo_made_shorter():
    at = derailed.process("middle", 8)
    state, token, on = at.sample(32, np.random.default_rng(3))
    inputs = at.inputs(state, token, on, 4)
    means = [checkpoint.estimate(name, inputs).advantage for name in ("group_mean", "rloo")]
    assert means[0] == pytest.approx(0.75 * means[1])
