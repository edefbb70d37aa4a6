"""Study 13: shares of the gradient, by hand and against norms of all tokens."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.gradients import token_score_norms
from otb_analysis.rollouts.models import load_policy
from otb_analysis.tasks import make_task
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.types import Gram
from studies.lib.policies import Policy, fresh_policy, write
from studies.lib.record import load_study

NAMES = load_study(Path(__file__).parent.parent.parent / "studies" / "13_token_weights").names
POOLS = sys.modules["study_13_token_weights.study"]
CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=16),
    chain_sum=ChainSumConfig(terms_max=2, largest=20),
)


@pytest.fixture(scope="module")
def policy():
    return fresh_policy(CONFIG)


def gram_of_shares(share):
    """Gradients of 20 prompts, and the same without a share of each."""
    g = np.random.default_rng(0).normal(size=(20, 5)) + 1
    both = np.stack([g, (1 - share) * g])
    return Gram(np.einsum("mpk,nqk->mnpq", both, both), (("rloo", "none"), ("stapo", "none")), 160)


def test_share_of_the_squared_gradient_is_what_was_taken_away():
    assert NAMES["square_share"](gram_of_shares(0.25), "stapo").estimate == pytest.approx(0.25, rel=1e-12)
    assert NAMES["square_share"](gram_of_shares(0.0), "stapo").estimate == pytest.approx(0.0, abs=1e-12)


def test_share_of_an_update_is_that_of_its_expected_square():
    gram = gram_of_shares(0.25)
    # without prompt 0, by the definition: means over the others, an update of 32 prompts
    rest = gram.inner[:, :, 1:, 1:]
    count = rest.shape[-1]
    square = [
        np.trace(rest[m, 0]) / count / 32 + 31 / 32 * (rest[m, 0].sum() - np.trace(rest[m, 0])) / (count * (count - 1))
        for m in (0, 1)
    ]
    found = NAMES["square_share"](replace(gram, inner=rest), "stapo").estimate
    assert found == pytest.approx(1 - square[1] / square[0], rel=1e-12)


def test_share_of_power_by_hand():
    names = NAMES["SUMS"]
    # 2 silenced tokens with ‖s‖² 6 each and A = ½; 4 drawn ones with 1 each
    row = dict(tokens=100, positive=40, silenced=2, norm_silenced=12, power_silenced=3, drawn=4, norm_drawn=4)
    row |= dict(power_all=30)
    found = NAMES["silenced_part"](np.tile([float(row[name]) for name in names], (20, 1)))
    assert found["norm_ratio"] == pytest.approx(6.0)
    assert found["power_share"] == pytest.approx(3 / 30)


def test_norms_of_chosen_tokens_are_those_of_all(policy):
    prompts = distinct_prompts(policy.task, "train", 3)
    written = write(policy, prompts, SampleConfig(prompts=3, group_size=4, max_new_tokens=8), seed=0)
    every = written.by_token(token_score_norms(policy.model, *written.batch).norm_sq)
    chosen = written.table.mask & (np.random.default_rng(1).random(written.table.mask.shape) < 0.3)
    np.testing.assert_allclose(POOLS.exact_norms(policy, written, chosen), np.where(chosen, every, 0.0), rtol=1e-5)


def test_drawn_tokens_stand_for_the_power_of_all(monkeypatch):
    model, tokenizer = load_policy("demo")
    policy = Policy(model, tokenizer, make_task(TrainConfig()))
    monkeypatch.setattr(POOLS, "LOT", 4000)
    setting = NAMES["Setting"](4, 8, 32, group=4, gram=0, buckets=64, block=4, pairs=((0.5, 9.0),))
    prompts = distinct_prompts(policy.task, "train", 4)
    found = NAMES["collect"](policy, prompts, setting, lambda *_: None)
    written = write(policy, prompts, SampleConfig(group_size=8, max_new_tokens=32), seed=10)
    every = written.by_token(token_score_norms(policy.model, *written.batch).norm_sq)
    reward = written.table.total_reward.reshape(-1, 4)
    advantage = (4 / 3 * (reward - reward.mean(axis=1, keepdims=True))).reshape(-1, 1)
    exact = float((advantage**2 * every).sum())
    assert exact > 0
    assert np.concatenate(found.sums)[:, -1].sum() == pytest.approx(exact, rel=0.05)


def test_arms_silence_as_many_tokens_and_the_first_is_rloo(policy):
    setting = NAMES["Setting"](4, 8, 8, group=4, gram=4, buckets=64, block=2, pairs=((1.0, 9.0), (0.0, 9.0)))
    found = NAMES["collect"](policy, distinct_prompts(policy.task, "train", 4), setting, lambda *_: None)
    sums, grid = np.concatenate(found.sums), np.concatenate(found.grid)
    positive = sums[:, NAMES["SUMS"].index("positive")]
    assert (grid[:, 0] == positive).all() and (grid[:, 1] == 0).all()  # below 1: all of them; below 0: none
    gradients = np.concatenate(found.gradients, axis=1)
    assert gradients.shape == (len(NAMES["ARMS"]), 8, 64) and NAMES["ARMS"][0] == "rloo"
