"""Forward mode through attention against reverse mode, and the padding row that no gradient reaches."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from otb_analysis.gradients import gradient_attribution, token_score_norms
from otb_analysis.gradients.exact.attention import QUERIES, derivative

CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "grouped": {"is_causal": True, "enable_gqa": True},
    "boolean": {"attn_mask": "boolean"},
    "additive": {"attn_mask": "additive"},
    "one row for all queries": {"attn_mask": "row"},
}


def operands(grouped, length):
    draw = torch.Generator().manual_seed(0)
    heads = {"query": 4, "key": 2 if grouped else 4, "value": 2 if grouped else 4}
    return [torch.randn(2, h, length, 8, generator=draw, dtype=torch.float64) for h in heads.values()]


def options(call, length):
    made = dict(CALLS[call])
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    masks = {
        "boolean": lower,
        "additive": torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~lower, -torch.inf),
        "row": torch.linspace(-1, 1, length, dtype=torch.float64)[None, None, None],
    }
    if "attn_mask" in made:
        made["attn_mask"] = masks[made["attn_mask"]]
    return made


@pytest.mark.parametrize("length", [1, 7, QUERIES, 2 * QUERIES + 5])
@pytest.mark.parametrize("call", CALLS)
def test_derivative_of_attention_is_the_one_that_reverse_mode_gives(call, length):
    primals = operands("grouped" in call, length)
    draw = torch.Generator().manual_seed(1)
    tangents = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in primals]
    chosen = options(call, length)
    found = derivative(lambda x: scaled_dot_product_attention(*x, **chosen), primals, tangents)
    signal = torch.randn(found.shape, generator=draw, dtype=found.dtype)
    leaves = [x.clone().requires_grad_() for x in primals]
    grads = torch.autograd.grad(scaled_dot_product_attention(*leaves, **chosen), leaves, signal)
    expected = sum(float((g * t).sum()) for g, t in zip(grads, tangents, strict=True))
    assert float((signal * found).sum()) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_attention_with_dropout_takes_the_plain_form():
    primals = operands(False, 5)
    torch.manual_seed(0)
    found = derivative(lambda x: scaled_dot_product_attention(*x, dropout_p=0.5), primals, primals)
    assert found.shape == primals[0].shape and bool(found.isfinite().all())


def test_derivative_of_a_constant_is_zero():
    x = torch.ones(3)
    assert torch.equal(derivative(lambda _: torch.arange(4.0), [x], [x]), torch.zeros(4))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_text_that_holds_the_padding_token_is_attributed_as_reverse_mode_does(tied, method):
    config = Qwen3Config(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=3, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert model.get_input_embeddings().padding_idx == 3
    ids = torch.tensor([[5, 3, 7, 3, 2, 9]])
    mask = torch.tensor([[False, True, True, True, True, True]])
    weights = np.where(mask.numpy(), np.array([0.0, 1.0, -2.0, 0.5, 1.5, -1.0]), 0.0)
    found = gradient_attribution(model, ids, mask, weights, method=method)
    slow = gradient_attribution(model, ids, mask, weights, engine="reference")
    scale = np.abs(slow.share).max()
    np.testing.assert_allclose(found.share, slow.share, atol=(1e-6 if method == "jvp" else 2e-3) * scale)
    assert found.norm_sq == pytest.approx(slow.norm_sq, rel=1e-6)
    if method == "jvp":
        assert found.share.sum() == pytest.approx(found.norm_sq, rel=1e-6)
    one = np.where(np.arange(6) == 4, 1.0, 0.0)[None]
    assert gradient_attribution(model, ids, mask, one).norm_sq == pytest.approx(
        token_score_norms(model, ids, mask, engine="reference").norm_sq[0, 4], rel=1e-5
    )
