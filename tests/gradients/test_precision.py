"""Float32 on the shapes of a real model, layers 512 wide and 8192 words: within 5e-6 of the float64 reference."""

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from otb_analysis.gradients import group_gradient_gram, sampled_score_norms, token_score_norms, weighted_score_norms

TOKENS, BOUND = 20, 5e-6


@pytest.fixture(scope="module")
def wide():
    """A tied model of two blocks with every bias and gain moved, one rollout, and float64 values."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ids = torch.randint(8192, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, TOKENS + 1, dtype=torch.bool)
    mask[0, 0] = False
    weights = torch.randn(1, 3, TOKENS + 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model.double()
    norms = token_score_norms(model, ids, mask, engine="reference", path=True)
    rows = weighted_score_norms(model, ids, mask, weights, engine="reference")
    return model.float(), (ids, mask), weights, norms, rows


def near(got, expected):
    assert np.abs(got - expected).max() <= BOUND * np.abs(expected).max()
    assert abs(got.sum() - expected.sum()) <= BOUND * abs(expected.sum())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fast", "generic", "reference"])
def test_norms_and_path_norms_of_every_engine(wide, engine):
    model, batch, _, exact, _ = wide
    got = token_score_norms(model, *batch, engine=engine, path=True)
    near(got.norm_sq, exact.norm_sq)
    near(got.path_norm_sq, exact.path_norm_sq)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fast", "generic", "reference"])
def test_weighted_norms_of_every_engine(wide, engine):
    model, batch, weights, _, rows = wide
    near(weighted_score_norms(model, *batch, weights, engine=engine), rows)


@pytest.mark.slow
def test_norms_of_drawn_tokens(wide):
    model, batch, _, exact, _ = wide
    near(sampled_score_norms(model, *batch, tokens=99).norm_sq, exact.norm_sq)


@pytest.mark.slow
def test_the_diagonal_of_the_gram_matrix(wide):
    model, batch, weights, _, rows = wide
    near(np.einsum("mmpp->pm", group_gradient_gram(model, *batch, weights, np.array([0]))), rows)
