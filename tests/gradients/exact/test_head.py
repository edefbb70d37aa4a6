from functools import partial

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from otb_analysis import gradients
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients.exact import generic

token_score_norms = partial(gradients.token_score_norms, scope="lm_head", engine="generic")
weighted_score_norms = partial(gradients.weighted_score_norms, scope="lm_head", engine="generic")
group_gradient_gram = partial(gradients.group_gradient_gram, scope="lm_head", engine="generic")
CLOSE = {"rtol": 2e-6, "atol": 1e-12}
GROUP = torch.tensor([7, -1, 7, 7, 2])


def with_bias(model):
    layer = model.get_output_embeddings()
    layer.bias = torch.nn.Parameter(torch.linspace(-1, 1, layer.out_features, dtype=layer.weight.dtype))
    return model


def both(measure, *args, **options):
    return [measure(*args, engine=engine, **options) for engine in ("generic", "reference")]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_closed_forms_are_the_reference_numbers(case, sample, bias, temperature):
    model, batch = with_bias(case) if bias else case, sample["both"]
    weights = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights[:, 2] = 0.0
    options = {"attention_mask": batch.attention_mask, "temperature": temperature}
    got, expected = both(token_score_norms, model, *batch.args, path=True, **options)
    assert got.engine == "generic"
    for name in ("norm_sq", "path_norm_sq", "logprob"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), **CLOSE)
    np.testing.assert_allclose(*both(weighted_score_norms, model, *batch.args, weights, **options), **CLOSE)
    whole, slow = both(group_gradient_gram, model, *batch.args, weights, GROUP, **options)
    np.testing.assert_allclose(whole, slow, rtol=2e-6, atol=1e-9)


def test_two_tokens_by_hand():
    # h = (1, 2), W = 0, so π = (½, ½): δ = e_y − π = ±(½, −½), ‖δ‖²‖h‖² = ½ · 5; opposite tokens cancel in the path.
    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(2, 2, bias=False)
            torch.nn.init.zeros_(self.out.weight)

        def get_output_embeddings(self):
            return self.out

        def forward(self, input_ids, attention_mask=None, use_cache=False):
            hidden = torch.tensor([1.0, 2.0]).expand(*input_ids.shape, 2)
            return type("Output", (), {"logits": self.out(hidden)})

    ids, mask = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]])
    got = token_score_norms(Tiny(), ids, mask, path=True)
    np.testing.assert_allclose(got.norm_sq, [[0, 2.5, 2.5]])
    np.testing.assert_allclose(got.path_norm_sq, [[0, 2.5, 0]], atol=1e-12)
    halved = token_score_norms(Tiny(), ids, mask, temperature=0.5)
    np.testing.assert_allclose(halved.norm_sq, [[0, 10, 10]])  # 1/τ² = 4


def test_a_soft_cap_behind_the_layer_is_followed(make_sample):
    config = Gemma2Config(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model, batch = Gemma2ForCausalLM(config).double().eval(), make_sample([[3, 5, 7, 2]], [[0, 1, 1, 1]], "left")
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)
    got, expected = both(token_score_norms, model, *batch.args, attention_mask=batch.attention_mask)
    np.testing.assert_allclose(got.norm_sq, expected.norm_sq, rtol=1e-5)


def test_a_nearly_certain_token_keeps_its_norm_in_float32(make_model, make_sample):
    # 1 − π ≈ 1e-10 is below the rounding of π itself.
    model, batch = make_model("llama", tied=False), make_sample([[3, 5, 7]], [[0, 0, 1]], "left", length=3)
    layer = with_bias(model).get_output_embeddings()
    with torch.no_grad():
        layer.bias.copy_(torch.where(torch.arange(17) == 7, 25.0, 0.0))
    expected = token_score_norms(model, *batch.args, engine="reference").norm_sq[0, 2]
    got = token_score_norms(model.float(), *batch.args).norm_sq[0, 2]
    assert 0 < expected < 1e-15
    np.testing.assert_allclose(got, expected, rtol=1e-3)


def test_no_graph_below_the_layer_and_the_model_is_left_as_found(make_model, sample, monkeypatch):
    model, batch = make_model("qwen2"), sample["left"]
    inputs = []
    monkeypatch.setattr(generic, "wide", lambda x, wide=generic.wide: inputs.append(x.requires_grad) or wide(x))
    token_score_norms(model, *batch.args, batch.attention_mask)
    assert inputs and not any(inputs)
    assert torch.is_grad_enabled() and not model.lm_head._forward_hooks
    with torch.no_grad():
        token_score_norms(model, *batch.args, batch.attention_mask)
        assert not torch.is_grad_enabled()


def test_what_cannot_be_measured_is_refused(make_model, sample):
    model, batch = make_model("qwen2", tied=False), sample["left"]
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(NonFiniteError, match="rollout 0, token"):
        token_score_norms(model, *batch.args, batch.attention_mask, engine="generic")
    model.forward = lambda input_ids, **_: type("Output", (), {"logits": torch.zeros(*input_ids.shape, 17)})
    with pytest.raises(InputError, match="never reached"):
        token_score_norms(model, *batch.args, batch.attention_mask, engine="generic")
