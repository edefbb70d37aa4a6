"""Sliding windows shorter than a rollout's padding: every level gives what the rollouts give without padding."""

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from otb_analysis.gradients import (
    gradient_attribution,
    gradient_sketch,
    group_gradient_gram,
    sampled_score_norms,
    signal_noise,
    sketch_score_norms,
    token_score_norms,
    weighted_score_norms,
)

WINDOW, LENGTHS, PROMPT = 5, (20, 13, 9, 6), 3  # up to 14 positions of padding, nearly three windows
SHAPE = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "sliding_window": WINDOW, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"layer_types": ["sliding_attention", "full_attention"]}),
}
CASES = [(name, "eager") for name in FAMILIES] + [("mistral", "sdpa"), ("gemma3", "sdpa")]  # Gemma 2 has no sdpa
ROWS = np.arange(len(LENGTHS))
GROUP = ROWS // 2


@pytest.fixture(params=CASES, ids="-".join)
def model(request):
    name, attention = request.param
    family, config, options = FAMILIES[name]
    torch.manual_seed(0)
    model = family(config(**SHAPE, **options)).double().eval()
    model.set_attn_implementation(attention)
    return model


@pytest.fixture(params=["right", "left"])
def batch(request):
    """Ids, mask, attention mask [N, L], and weights [N, L] that are zero outside the mask."""
    generator, width = torch.Generator().manual_seed(1), max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), width, dtype=torch.long)
    mask, real = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        start = 0 if request.param == "right" else width - length
        ids[row, start : start + length] = torch.randint(1, 40, (length,), generator=generator)
        real[row, start : start + length] = True
        mask[row, start + PROMPT : start + length] = True
    return ids, mask, real, np.random.default_rng(0).normal(size=mask.shape) * mask.numpy()


def alone(batch, row):
    """One rollout without its padding, as a batch."""
    ids, mask, real, weights = batch
    keep = real[row]
    return ids[None, row, keep], mask[None, row, keep], real[None, row, keep], weights[None, row, keep.numpy()]


def expected(model, batch, quantity):
    """A quantity of every rollout by the slow twin without padding, where the rollout's tokens are [N, L]."""
    out = np.zeros(batch[3].shape)
    for row in ROWS:
        out[row, batch[2][row].numpy()] = quantity(*alone(batch, row))[0]
    return out


def test_norms_of_tokens_and_rollouts(model, batch):
    ids, mask, real, weights = batch
    exact = expected(model, batch, lambda i, m, a, w: token_score_norms(model, i, m, a, engine="reference").norm_sq)
    np.testing.assert_allclose(token_score_norms(model, ids, mask, real).norm_sq, exact, rtol=1e-5, atol=1e-12)
    rows = np.array([
        weighted_score_norms(model, i, m, w[:, None], a, engine="reference")[0, 0]
        for i, m, a, w in (alone(batch, row) for row in ROWS)
    ])  # fmt: skip
    np.testing.assert_allclose(weighted_score_norms(model, ids, mask, weights[:, None], real)[:, 0], rows, rtol=1e-5)


def test_gram_matrix_and_gradient_sketch(model, batch):
    ids, mask, real, weights = batch
    stacked = np.stack([weights, mask.numpy() / len(ROWS)], 1)
    fast, slow = (group_gradient_gram(model, ids, mask, stacked, GROUP, real, engine=e) for e in ("auto", "reference"))
    np.testing.assert_allclose(fast, slow, rtol=1e-5, atol=1e-5 * abs(slow).max())
    together = gradient_sketch(model, ids, mask, weights[:, None], ROWS, real, dim=512)
    single = [gradient_sketch(model, i, m, w[:, None], np.zeros(1, int), a, dim=512)[0]
              for i, m, a, w in (alone(batch, row) for row in ROWS)]  # fmt: skip
    np.testing.assert_allclose(together, single, rtol=1e-4, atol=1e-4 * abs(together).max())


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_attribution(model, batch, method):
    ids, mask, real, weights = batch
    slow = gradient_attribution(model, ids, mask, weights, real, engine="reference")
    norm_sq = group_gradient_gram(model, ids, mask, weights[:, None], 0 * ROWS, real, engine="reference")[0, 0, 0, 0]
    assert slow.norm_sq == pytest.approx(norm_sq, rel=1e-6)
    tolerance = (1e-5 if method == "jvp" else 1e-3) * abs(slow.share).max()
    got = gradient_attribution(model, ids, mask, weights, real, method=method)
    np.testing.assert_allclose(got.share, slow.share, atol=tolerance)
    parts = signal_noise(model, ids, mask, weights, GROUP, real, method=method)
    np.testing.assert_allclose(parts.signal + parts.noise, slow.share, atol=tolerance)


def test_drawn_tokens(model, batch):
    ids, mask, real, _ = batch
    exact = token_score_norms(model, ids, mask, real, engine="reference").norm_sq
    drawn = sampled_score_norms(model, ids, mask, real, tokens=int(mask.sum()) // 2)
    known = np.isfinite(drawn.norm_sq) & (drawn.norm_sq > 0)
    assert known.sum() >= int(mask.sum()) // 2 - 1
    np.testing.assert_allclose(drawn.norm_sq[known], exact[known], rtol=1e-5)


@pytest.mark.parametrize("method", ["hybrid", "rank_one", "gaussian"])
def test_sketched_norms(model, batch, method):
    ids, mask, real, _ = batch
    exact = token_score_norms(model, ids, mask, real, engine="reference").norm_sq
    sketched = sketch_score_norms(model, ids, mask, real, directions=64, method=method)
    inside = mask.numpy()
    # The mean over 36 tokens, whose errors share their directions: within four standard errors as if they shared all.
    error = sketched.norm_sq[inside].sum() - exact[inside].sum()
    assert abs(error) < 4 * sketched.norm_sq_stderr[inside].sum()
    assert sketched.norm_sq[inside].sum() == pytest.approx(exact[inside].sum(), rel=0.5)
