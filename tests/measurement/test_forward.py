"""The forward pass: a padded batch gives what each rollout gives alone, in every family."""

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from otb_analysis.config import SampleConfig
from otb_analysis.errors import NonFiniteError
from otb_analysis.logit_stats import logit_stats
from otb_analysis.measurement.forward import forward_pass, hidden_states
from otb_analysis.rollouts.models import output_layer
from otb_analysis.rollouts.sampling import sample

V = 17
BLOCK = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**BLOCK, intermediate_size=24, max_position_embeddings=64)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=1)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=2)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**BLOCK, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=64, pad_token_id=0)
    ),
}


def build(family, tiny_model):
    if family == "qwen3":
        return tiny_model
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def rollouts(echo, scripted, tokenizer):
    """Prompts of one and of five characters, completions of one to nine tokens, one with a tool reply."""
    prompts = [echo.prompt("train", i) for i in (3, 1234)]
    answers = (["7$", "12", "$", "56789+="], ["#3$", "1"])
    return sample(scripted(*answers), tokenizer, echo, prompts, SampleConfig(group_size=2))


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
def test_hidden_states_of_the_layers_alone_are_what_enters_the_output_layer(family, tiny_model, rollouts):
    model = build(family, tiny_model)
    found, mask = hidden_states(model.base_model, rollouts)
    whole = forward_pass(model, rollouts, 1.0)
    assert torch.equal(mask, whole.mask)
    assert torch.equal(found.detach()[mask], whole.hidden[mask])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", ["qwen3", *FAMILIES])
def test_padded_batch_equals_statistics_of_each_rollout_alone(family, temperature, tiny_model, rollouts):
    model = build(family, tiny_model)
    found = forward_pass(model, rollouts, temperature)
    columns, seen = rollouts.completion_columns(), []
    hook = output_layer(model).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    for n in range(4):
        length = int(rollouts.attention_mask[n].sum())
        ids = torch.as_tensor(rollouts.input_ids[n, :length])
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        inside = found.mask[n].numpy()
        at = columns[n][inside]
        stats = logit_stats(logits[at - 1], token_ids=ids[at], temperature=temperature)
        for name in ("logprob", "entropy", "sum_pi_sq", "energy", "pi_variance", "logprob_variance"):
            np.testing.assert_allclose(
                getattr(found.stats, name)[n][inside], getattr(stats, name), rtol=2e-4, atol=2e-5, err_msg=name
            )
        np.testing.assert_allclose(found.logprob[n].detach().numpy()[inside], stats.logprob, rtol=1e-4, atol=1e-5)
        hidden = seen[-1][0, at - 1]
        np.testing.assert_allclose(found.hidden[n].numpy()[inside], hidden, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.stats.hidden_norm_sq[n][inside], hidden.square().sum(-1), rtol=1e-4)
    hook.remove()


def test_entries_outside_the_mask_are_zero(tiny_model, rollouts):
    found = forward_pass(tiny_model, rollouts, 1.0)
    outside = ~found.mask.numpy()
    assert outside.any()
    for name in ("logprob", "entropy", "sum_pi_sq", "energy", "hidden_norm_sq", "pi_variance", "logprob_variance"):
        assert (getattr(found.stats, name)[outside] == 0).all()


def test_what_stands_in_padding_changes_nothing(tiny_model, rollouts):
    from dataclasses import replace

    other = np.where(rollouts.attention_mask, rollouts.input_ids, 5)
    first, second = (forward_pass(tiny_model, r, 1.0) for r in (rollouts, replace(rollouts, input_ids=other)))
    np.testing.assert_array_equal(first.stats.logprob, second.stats.logprob)


def test_hidden_states_carry_no_graph_and_the_hook_is_gone(tiny_model, rollouts):
    found = forward_pass(tiny_model, rollouts, 1.0)
    assert not found.hidden.requires_grad
    assert found.logprob.requires_grad
    assert not output_layer(tiny_model)._forward_pre_hooks


def test_logits_that_are_not_finite_name_rollout_and_token(tiny_model, rollouts, tokenizer):
    with torch.no_grad():
        tiny_model.lm_head.weight = torch.nn.Parameter(tiny_model.lm_head.weight.clone())
        tiny_model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("8")] = float("nan")
    # Only rollout 3 writes an 8; attention multiplies its NaN by the zero weight that earlier tokens give it.
    with pytest.raises(NonFiniteError, match=r"logits are not finite at rollout 3, token 0"):
        forward_pass(tiny_model, rollouts, 1.0)
