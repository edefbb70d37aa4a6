from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError
from otb_analysis.gradients import weighted_score_norms
from otb_analysis.training.setup import Trainer
from studies.lib.pools import drawn_groups, prompt_gram, regrouped


@pytest.fixture
def trainer(tiny_config, tmp_path):
    return Trainer.from_config(replace(tiny_config, root=tmp_path))


@pytest.fixture
def pool(trainer):
    """Rollouts of three prompts, with two sets of random coefficients."""
    rollouts = drawn_groups(trainer, 3, 4, 1, start=0)
    return rollouts, np.random.default_rng(0).normal(size=(2, *rollouts.policy_tokens().shape))


def test_gram_of_two_labels_holds_the_gram_of_each(trainer, pool):
    rollouts, (one, other) = pool
    both = prompt_gram(trainer.model, rollouts, {("a", "none"): one, ("b", "none"): other})
    rounding = 1e-6 * np.einsum("mmpp->mp", both.inner).max()  # of float32 gradients, as a share of ‖g‖‖g'‖
    for m, c in enumerate((one, other)):
        alone = prompt_gram(trainer.model, rollouts, {("c", "none"): c}).inner[0, 0]
        np.testing.assert_allclose(both.inner[m, m], alone, atol=rounding)
    np.testing.assert_allclose(both.inner, both.inner.transpose(1, 0, 3, 2), rtol=1e-5, atol=1e-9)


def test_gradients_are_means_over_the_group(trainer, pool):
    rollouts, coefficient = pool
    rollouts, coefficient = rollouts.take(np.array([0, 4, 8])), coefficient[:1, [0, 4, 8]]  # one rollout a prompt
    coefficient = coefficient[..., : rollouts.completion_columns().shape[1]]
    gram = prompt_gram(trainer.model, rollouts, {("a", "none"): coefficient[0]})
    ids, mask, attention = rollouts.tensors(torch.device("cpu"))
    alone = weighted_score_norms(trainer.model, ids, mask, rollouts.by_column(coefficient), attention)[:, 0]
    np.testing.assert_allclose(np.diag(gram.inner[0, 0]), alone, rtol=1e-4)
    twice = replace(rollouts, **{n: np.repeat(getattr(rollouts, n), 2, axis=0) for n in ARRAYS}, **doubled(rollouts))
    again = prompt_gram(trainer.model, twice, {("a", "none"): np.repeat(coefficient[0], 2, axis=0)})
    np.testing.assert_allclose(again.inner, gram.inner, rtol=1e-4, atol=1e-9)


def test_drawing_is_repeatable_and_leaves_the_random_state_alone(trainer):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, three = (drawn_groups(trainer, 2, 3, seed, start=0) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(one.input_ids, two.input_ids)
    assert not np.array_equal(one.input_ids, three.input_ids)


def test_smaller_groups_keep_prompts_and_rollouts(trainer, pool):
    rollouts, _ = pool
    halves = regrouped(rollouts, 2)
    assert halves.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (
        [p.id for p in halves.prompts[::2]] == [p.id for p in halves.prompts[1::2]] == [p.id for p in rollouts.prompts]
    )
    with pytest.raises(InputError, match="a divisor, not of 3"):
        regrouped(rollouts, 3)


ARRAYS = ("group", "input_ids", "attention_mask", "mask", "turn", "behavior_logprob", "prompt_length")


def doubled(rollouts):
    """The two fields that are tuples, every entry twice."""
    return {n: tuple(x for x in getattr(rollouts, n) for _ in (0, 1)) for n in ("turns", "finish_reason")}
