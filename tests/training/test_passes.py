"""Short passes: every rollout once, little padding, and nothing changes by them."""

import numpy as np
import pytest
import torch

from otb_analysis.config import SampleConfig
from otb_analysis.measurement import forward as module
from otb_analysis.measurement.forward import completion_logprobs, forward_pass, short_passes
from otb_analysis.rollouts.sampling import sample
from otb_analysis.tasks.task_calls import draw_prompts

CPU = torch.device("cpu")


@pytest.fixture
def rollouts(trainer):
    torch.manual_seed(3)
    config = SampleConfig(group_size=4, max_new_tokens=12)
    return sample(trainer.generator, trainer.tokenizer, trainer.task, draw_prompts(trainer.task, "train", 0, 3), config)


def test_passes_hold_every_rollout_once_and_no_more_positions_than_allowed(rollouts, monkeypatch):
    monkeypatch.setattr(module, "SHORT", 40)
    length = rollouts.attention_mask.sum(axis=1)
    passes = short_passes(length, CPU)
    assert len(passes) > 1
    assert sorted(np.concatenate(passes).tolist()) == list(range(12))
    assert all(len(rows) * length[rows].max() <= 40 for rows in passes)
    assert (np.diff(length[np.concatenate(passes)]) >= 0).all()


def test_a_rollout_longer_than_a_pass_has_one_of_its_own(rollouts, monkeypatch):
    monkeypatch.setattr(module, "SHORT", 1)
    assert [len(rows) for rows in short_passes(rollouts.attention_mask.sum(axis=1), CPU)] == [1] * 12


def test_passes_are_as_few_as_allowed_and_the_largest_as_small_as_that_leaves_it(monkeypatch):
    # In order 2 2 2 2 3 4 with at most 10 positions: 4·2 = 8, then 2·4 = 8.
    monkeypatch.setattr(module, "SHORT", 10)
    assert [rows.tolist() for rows in short_passes(np.array([4, 2, 2, 3, 2, 2]), CPU)] == [[1, 2, 4, 5], [3, 0]]
    # 1 2 2 2 2 2: five of 2 fill a pass of 10, and the last stands alone; cut in the middle, 6 and 6 positions.
    assert [rows.tolist() for rows in short_passes(np.array([1, 2, 2, 2, 2, 2]), CPU)] == [[0, 1, 2], [3, 4, 5]]


def test_a_gpu_takes_the_batch_as_it_is(rollouts):
    (rows,) = short_passes(rollouts.attention_mask.sum(axis=1), torch.device("cuda"))
    assert rows.tolist() == list(range(12))


def test_statistics_and_scores_are_those_of_one_pass(trainer, rollouts, monkeypatch):
    monkeypatch.setattr(module, "SHORT", 40)
    whole = forward_pass(trainer.model, rollouts, 1.0)
    found = trainer.policy.forward(rollouts, keep_graph=True)
    assert torch.equal(found.mask, whole.mask)
    torch.testing.assert_close(found.logprob, whole.logprob, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.hidden, whole.hidden, rtol=1e-5, atol=1e-5)
    for name in ("logprob", "energy", "entropy", "hidden_norm_sq"):
        np.testing.assert_allclose(getattr(found.stats, name), getattr(whole.stats, name), rtol=1e-4, atol=1e-6)
    rows = np.array([7, 2, 9, 4])
    scored = trainer.policy.score(rollouts, rows, entropy=True)
    plain = completion_logprobs(trainer.model, rollouts.take(rows), 1.0, entropy=True)
    torch.testing.assert_close(scored.logprob, plain.logprob, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scored.entropy, plain.entropy, rtol=1e-5, atol=1e-6)


def test_the_graph_of_all_passes_is_kept(trainer, rollouts, monkeypatch):
    found = []
    for size in (40, 1 << 20):
        monkeypatch.setattr(module, "SHORT", size)
        trainer.policy.forward(rollouts, keep_graph=True).logprob.sum().backward()
        found.append([p.grad.clone() for p in trainer.policy.parameters])
        trainer.model.zero_grad()
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_the_output_layer_sees_policy_tokens_only(trainer, rollouts):
    seen = []
    hook = trainer.model.get_output_embeddings().register_forward_hook(lambda m, i, out: seen.append(out.shape[:2]))
    forward_pass(trainer.model, rollouts, 1.0)
    hook.remove()
    assert seen == [(1, int(rollouts.mask.sum()))]
