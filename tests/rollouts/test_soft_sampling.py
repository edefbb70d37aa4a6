"""Soft tokens as they are sampled: noise around the mixture, an answer in text alone, batches that can be joined."""

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from otb_analysis.config import ChainSumConfig, SampleConfig
from otb_analysis.errors import InputError
from otb_analysis.gradients import token_score_norms
from otb_analysis.measurement.forward import forward_pass
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import ChainSum

TASK = ChainSum(ChainSumConfig(2, 3, 20))
SAMPLE = SampleConfig(prompts=3, group_size=4, max_new_tokens=7, temperature=0.8, soft=3, soft_noise=0.5)


@pytest.fixture
def draw(tiny_model, tokenizer):
    def draw(config=SAMPLE, seed=0, task=TASK):
        torch.manual_seed(seed)
        prompts = [task.prompt("train", k) for k in range(config.prompts)]
        return sample(TransformersGenerator(tiny_model, tokenizer), tokenizer, task, prompts, config)

    return draw


def test_first_positions_are_soft_and_the_text_is_what_follows(draw, tokenizer):
    rollouts = draw()
    ids, soft = rollouts.by_token(rollouts.input_ids), rollouts.soft
    inside = rollouts.policy_tokens()
    assert (ids[:, :3] >= soft.first).all() and (ids[:, 3:][inside[:, 3:]] < soft.first).all()
    assert len(np.unique(ids[:, :3])) == 12 * 3 == len(soft.vectors)
    for n, (turn,) in enumerate(rollouts.turns):
        answer = ids[n, 3 : rollouts.completion_length[n]]
        assert turn.text == tokenizer.decode(answer[:-1] if turn.finished else answer)


def test_vectors_are_normal_around_the_mixture(tiny_model, tokenizer):
    generator, table = TransformersGenerator(tiny_model, tokenizer), tiny_model.get_input_embeddings().weight.detach()
    torch.manual_seed(3)
    _, soft = generator.generate_soft([[4, 5, 6]] * 4000, 2, 0.8, 1, 0.5)
    assert soft.sigma == pytest.approx(0.5 * float(table.square().mean().sqrt()), rel=1e-5)
    with torch.no_grad():
        mean = (tiny_model(torch.tensor([[4, 5, 6]])).logits[0, -1] / 0.8).softmax(-1) @ table
    z = ((soft.vectors - mean) / soft.sigma).double().numpy()
    assert np.abs(z.mean(axis=0)).max() < 4.5 / np.sqrt(4000)
    assert np.abs((z**2).mean(axis=0) - 1).max() < 4.5 * np.sqrt(2 / 4000)


@torch.no_grad()
def test_passes_find_the_densities_that_were_sampled(draw, tiny_model):
    rollouts = draw()
    forward = forward_pass(tiny_model, rollouts, SAMPLE.temperature)
    behavior, mask = rollouts.by_token(rollouts.behavior_logprob), rollouts.policy_tokens()
    np.testing.assert_allclose(forward.stats.logprob[mask], behavior[mask], atol=1e-4)
    np.testing.assert_allclose(forward.logprob.numpy()[mask], behavior[mask], atol=1e-4)
    ids, real = torch.as_tensor(rollouts.input_ids), torch.as_tensor(rollouts.attention_mask)
    norms = token_score_norms(
        tiny_model, ids, torch.as_tensor(rollouts.mask), real, temperature=SAMPLE.temperature, soft=rollouts.soft
    )
    np.testing.assert_allclose(rollouts.by_token(norms.logprob)[mask], behavior[mask], atol=1e-4)
    soft = rollouts.by_token(rollouts.input_ids) >= rollouts.soft.first
    for name in ("energy", "entropy", "sum_pi_sq", "pi_variance", "logprob_variance"):
        assert np.array_equal(np.isnan(getattr(forward.stats, name)), soft & mask), name


@torch.no_grad()
def test_joined_batches_keep_their_vectors(draw, tiny_model):
    parts = [draw(seed=1), draw(seed=2)]
    whole = Rollouts.concatenate([parts[0], parts[1].take(np.array([0, 5]))])
    apart = [forward_pass(tiny_model, part, SAMPLE.temperature).stats.logprob for part in parts]
    width = whole.width
    expected = np.zeros((14, width))
    for row, (part, n) in enumerate([(0, n) for n in range(12)] + [(1, 0), (1, 5)]):
        expected[row, : apart[part].shape[1]] = apart[part][n, :width]
    got = forward_pass(tiny_model, whole, SAMPLE.temperature).stats.logprob
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"soft": -1}, "at least 0"),
        ({"soft": 7}, "leaves no token for the discrete answer"),
        ({"soft_noise": 0.0}, "no density"),
        ({"soft_noise": float("inf")}, "no density"),
    ],
)
def test_settings_that_cannot_work_are_refused(draw, changes, words):
    with pytest.raises(InputError, match=words):
        draw(SampleConfig(**{"prompts": 1, "max_new_tokens": 7, "soft": 3} | changes))


def test_what_cannot_sample_soft_tokens_is_refused(draw, echo, scripted, tokenizer):
    with pytest.raises(InputError, match="tasks of one turn"):
        draw(SampleConfig(prompts=3, group_size=40, max_new_tokens=60, soft=3), task=echo)
    with pytest.raises(InputError, match="samples no soft tokens"):
        sample(scripted(["1$"]), tokenizer, TASK, [TASK.prompt("train", 0)], SampleConfig(group_size=1, soft=3))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(InputError, match="sampled from BloomForCausalLM"):
        TransformersGenerator(bloom, tokenizer).generate_soft([[4]], 3, 1.0, 1, 0.3)
