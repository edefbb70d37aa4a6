"""Prompts read once: the same log-probabilities, statistics and gradients as passes over prompt and completion."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from otb_analysis.config import OptimizeConfig, SampleConfig
from otb_analysis.errors import NonFiniteError
from otb_analysis.measurement import forward as module
from otb_analysis.measurement.forward import completion_logprobs, forward_pass, read_prompts, supports_prefix_cache
from otb_analysis.rollouts.sampling import sample

V = 17
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            num_key_value_heads=1, max_position_embeddings=64,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1)
    ),
}  # fmt: skip


def build(family, tiny_model):
    if family == "qwen3":
        return tiny_model.double()
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


@pytest.fixture
def rollouts(echo, scripted, tokenizer):
    """Prompts of one and of five characters, completions of one to nine tokens, one with a tool reply."""
    prompts = [echo.prompt("train", i) for i in (3, 1234)]
    answers = (["7$", "12", "$", "56789+="], ["#3$", "1"])
    return sample(scripted(*answers), tokenizer, echo, prompts, SampleConfig(group_size=2))


def gradients(model, logprob):
    weights = torch.linspace(-1, 2, logprob.numel(), dtype=logprob.dtype).view(logprob.shape)
    model.zero_grad()
    (weights * logprob).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
def test_log_probabilities_and_gradients_are_those_of_whole_passes(family, tiny_model, rollouts):
    model = build(family, tiny_model)
    prompts = read_prompts(model, rollouts)
    assert len(prompts.hidden) == 2
    assert prompts.of.tolist() == [0, 0, 1, 1]
    found, whole = (forward_pass(model, rollouts, 0.7, given) for given in (prompts, None))
    torch.testing.assert_close(found.logprob, whole.logprob, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.hidden, whole.hidden, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.stats.energy, whole.stats.energy, atol=1e-6)
    for ours, plain in zip(gradients(model, found.logprob), gradients(model, whole.logprob), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_rows_taken_in_any_order_keep_their_prompts(tiny_model, rollouts):
    prompts, rows = read_prompts(tiny_model, rollouts), np.array([3, 0, 2])
    found = completion_logprobs(tiny_model, rollouts.take(rows), 1.0, prompts=replace(prompts, of=prompts.of[rows]))
    whole = completion_logprobs(tiny_model, rollouts.take(rows), 1.0)
    torch.testing.assert_close(found.logprob, whole.logprob, rtol=1e-5, atol=1e-5)


def test_what_stands_in_padding_changes_nothing(tiny_model, rollouts):
    other = replace(rollouts, input_ids=np.where(rollouts.attention_mask, rollouts.input_ids, 5))
    first, second = (forward_pass(tiny_model, r, 1.0, read_prompts(tiny_model, r)) for r in (rollouts, other))
    assert torch.equal(first.logprob, second.logprob)


def test_a_prompt_is_read_once_however_many_rollouts_it_has(trainer, monkeypatch):
    positions = []
    hook = trainer.model.get_input_embeddings().register_forward_hook(lambda m, i, out: positions.append(i[0].shape))
    prompts = [trainer.task.prompt("train", i) for i in range(2)]
    torch.manual_seed(0)
    config = SampleConfig(group_size=4, max_new_tokens=12)
    rollouts = sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, config)
    positions.clear()
    trainer.policy.forward(rollouts, keep_graph=True)
    hook.remove()
    read, scored = positions
    assert read == (2, rollouts.prompt_length.max())
    assert scored == (8, rollouts.completion_length.max() - 1)


def test_nothing_is_read_before_where_nothing_would_be_saved(tiny_model, rollouts):
    assert read_prompts(tiny_model, rollouts.take(np.array([0, 2]))) is None  # two prompts, a rollout each
    assert read_prompts(tiny_model, rollouts) is not None


def test_models_that_are_sampled_by_their_own_generate_are_scored_whole(tiny_model):
    assert supports_prefix_cache(tiny_model)
    tiny_model.config._attn_implementation = "flash_attention_2"
    assert not supports_prefix_cache(tiny_model)


def test_recomputed_activations_take_whole_passes(made):
    assert made().policy._shares
    assert not made(optimize=OptimizeConfig(gradient_checkpointing=True)).policy._shares


def test_logits_that_are_not_finite_name_rollout_and_token(trainer, rollouts, tokenizer, monkeypatch):
    model = trainer.model
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("8")] = float("nan")
    monkeypatch.setattr(module, "SHORT", 8)
    # Only rollout 3 writes an 8, as its fourth token; its first is predicted by the prompt alone, which is finite.
    with pytest.raises(NonFiniteError, match=r"logits are not finite at rollout 3, token [1-4]"):
        trainer.policy.forward(rollouts, keep_graph=True)


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
def test_a_pass_of_one_token_completions_alone_is_scored_like_any_other(
    family, tiny_model, echo, scripted, tokenizer, made, monkeypatch
):
    # Answers of one token sort into passes of their own, where nothing follows a prompt.
    monkeypatch.setattr(
        module, "short_passes", lambda length, device: [np.flatnonzero(length == n) for n in set(length)]
    )
    prompts = [echo.prompt("train", i) for i in (3, 1234)]
    rollouts = sample(scripted(["7", "1", "5678", "2"]), tokenizer, echo, prompts, SampleConfig(group_size=2))
    policy = made().policy
    policy.model = build(family, tiny_model)
    passes = policy.forward(rollouts, keep_graph=False)
    whole = forward_pass(policy.model, rollouts, policy.temperature)
    found, expected = (np.where(rollouts.present(), f.stats.logprob, 0.0) for f in (passes, whole))
    np.testing.assert_allclose(found, expected, atol=1e-12)
