"""Critics of studies: fitted on other rollouts, equal for both targets where reward comes at the end."""

import numpy as np
import pytest

from otb_analysis.config import ChainSumConfig, CriticConfig, SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import available, estimate
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.critic import explained_variance
from studies.lib.policies import critic_batches, fitted_critic, fresh_policy, with_values, write

CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=32),
    chain_sum=ChainSumConfig(terms_max=2, largest=10),
)
SAMPLE = SampleConfig(prompts=16, group_size=4, max_new_tokens=6)


@pytest.fixture(scope="module")
def policy():
    return fresh_policy(CONFIG)


@pytest.fixture(scope="module")
def batches(policy):
    found = critic_batches(policy, 0, 4, SAMPLE, seed=1)
    for written in found:
        pay_first_token(written)
    return found


def pay_first_token(written):
    """Pay at the end whatever begins with an even token: what a critic can learn from one token on."""
    table = written.table
    ends = table.mask.cumsum(axis=1).argmax(axis=1)
    table.reward[:] = 0.0
    table.reward[np.arange(len(ends)), ends] = (table.token_id[:, 0] % 2 == 0).astype(float)
    return written


def test_a_critic_explains_returns_of_rollouts_it_has_not_seen(policy, batches):
    fresh = pay_first_token(write(policy, draw_prompts(policy.task, "train", 1000, 16), SAMPLE, seed=9))
    own = CriticConfig(kind="model", learning_rate=3e-3, updates=20)
    found = with_values(policy, fitted_critic(policy, own, batches), fresh)
    assert fresh.table.value is None  # what was given stays as it was
    assert explained_variance(found.table) > 0.2
    assert (found.table.value[~found.table.mask] == 0).all()
    assert {"value", "tvm"} <= set(available(found.table.inputs(None)))
    advantage = estimate("value", found.table.inputs(None)).advantage
    to_go = fresh.table.reward.sum(axis=1, keepdims=True) - found.table.value
    np.testing.assert_allclose(advantage[found.table.mask], to_go[found.table.mask], atol=1e-12)


def test_mean_return_of_a_prefix_makes_the_same_critic_as_each_return(policy, batches):
    configs = [CriticConfig(kind="model", target=target, learning_rate=1e-2) for target in ("return", "tvm")]
    values = [with_values(policy, fitted_critic(policy, c, batches), batches[0]).table.value for c in configs]
    assert np.ptp(values[0]) > 0.05
    np.testing.assert_allclose(values[0], values[1], atol=1e-4)  # the same gradients but for float32's rounding


def test_lessons_are_of_different_prompts(policy):
    first, second = critic_batches(policy, 0, 2, SAMPLE, seed=1)
    assert {p.id for p in first.rollouts.prompts} != {p.id for p in second.rollouts.prompts}


@pytest.mark.parametrize("own", [CriticConfig(), CriticConfig(enabled=False)])
def test_nothing_to_fit_is_one_sentence(policy, batches, own):
    with pytest.raises(InputError, match="at least one batch"):
        fitted_critic(policy, own, [] if own.enabled else batches)
