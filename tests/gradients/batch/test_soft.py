"""Soft tokens: their log-density, its exact scores, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from otb_analysis.errors import InputError
from otb_analysis.gradients import (
    SoftTokens,
    gradient_sketch,
    group_gradient_gram,
    token_score_norms,
    weighted_score_norms,
)
from otb_analysis.gradients.batch.soft import log_density, soft_inputs

SIGMA, TEMPERATURE = 0.3, 0.7
# Two rollouts: three prompt tokens, two soft ones (V is the first), then discrete ones; the second is shorter.
TEXTS = [[1, 2, 3, "a", "b", 4, 0], [2, 2, "c", "d", 5]]
STARTS = [3, 2]


def tiny_gpt2():
    """About 300 weights in float64, without the casts to float32 that other models' norms have."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def soft_batch(model):
    """Return ids, mask and attention [2, L], and the soft tokens that some of the ids stand for."""
    table = model.get_input_embeddings().weight
    torch.manual_seed(1)
    names = [x for text in TEXTS for x in text if isinstance(x, str)]
    vectors = 0.5 * torch.randn(len(names), table.shape[1], dtype=table.dtype)
    soft = SoftTokens(vectors, SIGMA, len(table), torch.zeros(len(names), dtype=torch.long))
    length = max(map(len, TEXTS))
    ids, mask, real = (torch.zeros(2, length, dtype=torch.long) for _ in range(3))
    for n, (text, start) in enumerate(zip(TEXTS, STARTS, strict=True)):
        row = [len(table) + names.index(x) if isinstance(x, str) else x for x in text]
        ids[n, : len(row)] = torch.tensor(row)
        mask[n, start : len(row)], real[n, : len(row)] = 1, 1
    return ids, mask.bool(), real, soft


def plain_logprobs(model, ids, soft, start, length):
    """log q and log π of one rollout by hand: embeddings put together, one forward pass, the textbook formulas."""
    table = model.get_input_embeddings().weight
    rows = [soft.vectors[i - soft.first] if i >= soft.first else table[i] for i in ids[:length].tolist()]
    logits = model(inputs_embeds=torch.stack(rows)[None], use_cache=False).logits[0] / TEMPERATURE
    values = []
    for t in range(start, length):
        target, p = int(ids[t]), logits[t - 1].softmax(-1)
        if target < soft.first:
            values.append(p[target].log())
        else:
            normal = torch.distributions.Normal(p @ table, torch.tensor(SIGMA, dtype=p.dtype))
            values.append(normal.log_prob(soft.vectors[target - soft.first]).sum())
    return torch.stack(values)


def plain_scores(model, ids, soft):
    """Flat gradients {(rollout, column): s} by backward passes."""
    scores = {}
    for n, (text, start) in enumerate(zip(TEXTS, STARTS, strict=True)):
        values = plain_logprobs(model, ids[n], soft, start, len(text))
        for column, value in zip(range(start, len(text)), values, strict=True):
            grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, model.parameters(), strict=True)]
            scores[n, column] = torch.cat([g.flatten() for g in flat]).double().numpy()
    return scores


def test_log_density_is_that_of_a_normal_distribution():
    # p = (½, ½), E = rows (0, 0) and (2, 4): pE = (1, 2). h̃ = (1, 3): −1/(2·¼) − ln(2π·¼) = −2 − ln(π/2)
    z, table = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[0.0, 0.0], [2.0, 4.0]], dtype=torch.float64)
    value = log_density(z, torch.tensor([[1.0, 3.0]], dtype=torch.float64), table, 0.5)
    assert value.item() == pytest.approx(-2 - math.log(math.pi / 2), abs=1e-14)


def test_score_norms_are_those_of_finite_differences():
    model = tiny_gpt2()
    ids, mask, real, soft = soft_batch(model)
    got = token_score_norms(model, ids, mask, real, temperature=TEMPERATURE, soft=soft)
    step, expected = 1e-5, np.zeros(ids.shape)

    def values():
        out = np.zeros(ids.shape)
        for n, (text, start) in enumerate(zip(TEXTS, STARTS, strict=True)):
            out[n, start : len(text)] = plain_logprobs(model, ids[n], soft, start, len(text)).numpy()
        return out

    with torch.no_grad():
        here = values()
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for i in range(len(flat)):
                kept = flat[i].item()
                flat[i] = kept + step
                above = values()
                flat[i] = kept - step
                expected += ((above - values()) / (2 * step)) ** 2
                flat[i] = kept
    np.testing.assert_allclose(got.logprob, here, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got.norm_sq, expected, rtol=1e-6)
    assert got.engine == "reference" and (got.norm_sq[mask.numpy()] > 0).all()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_norms_sums_and_gram_matrix_agree_with_backward_passes(make_model, family, tied):
    model = make_model(family, tied)
    ids, mask, real, soft = soft_batch(model)
    scores = plain_scores(model, ids, soft)
    settings = {"temperature": TEMPERATURE, "soft": soft}
    norms = token_score_norms(model, ids, mask, real, **settings)
    for (n, column), score in scores.items():
        assert norms.norm_sq[n, column] == pytest.approx(score @ score, rel=2e-6)
    weights = np.random.default_rng(0).normal(size=(2, 3, ids.shape[1]))
    sums = [[sum(weights[n, m, c] * s for (k, c), s in scores.items() if k == n) for m in range(3)] for n in range(2)]
    whole = weighted_score_norms(model, ids, mask, weights, real, **settings)
    np.testing.assert_allclose(whole, [[g @ g for g in rows] for rows in sums], rtol=2e-6)
    gram = group_gradient_gram(model, ids, mask, weights, np.array([0, 1]), real, **settings)
    expected = np.einsum("pmk,qnk->mnpq", sums, sums)
    np.testing.assert_allclose(gram, expected, rtol=2e-6, atol=1e-6 * np.abs(expected).max())
    sketch = gradient_sketch(model, ids, mask, weights, np.array([0, 1]), real, dim=1 << 16, **settings)
    np.testing.assert_allclose(np.einsum("pmk,pmk->pm", sketch, sketch), whole, rtol=0.05)


def test_noise_and_its_mirror_image_have_opposite_scores():
    # ∇ log q is linear in h̃ − pE, so E ∇ log q = 0 over a symmetric noise: a baseline has no bias there.
    model = tiny_gpt2()
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        mean = (model(torch.tensor([[1, 2]])).logits[0, -1] / TEMPERATURE).softmax(-1) @ table
    noise = SIGMA * torch.randn(4, dtype=torch.float64)
    ids, mask = torch.tensor([[1, 2, 7], [1, 2, 8]]), torch.tensor([[0, 0, 1], [0, 0, 1]]).bool()
    soft = SoftTokens(torch.stack([mean + noise, mean - noise]), SIGMA, 7, torch.zeros(2, dtype=torch.long))
    one = np.ones((2, 1, 3))
    settings = {"temperature": TEMPERATURE, "soft": soft}
    apart = group_gradient_gram(model, ids, mask, one, np.array([0, 1]), **settings)[0, 0]
    together = group_gradient_gram(model, ids, mask, one, np.array([0, 0]), **settings)[0, 0]
    assert apart[0, 0] > 0 and apart[0, 1] == pytest.approx(-apart[0, 0], rel=1e-10)
    assert together[0, 0] == pytest.approx(0, abs=1e-12 * apart[0, 0])


def test_table_moves_by_the_mixture_also_in_rows_that_no_text_reads(make_model):
    model = make_model("qwen3", tied=False)
    ids, mask, real, soft = soft_batch(model)
    table = model.get_input_embeddings().weight
    values = plain_logprobs(model, ids[0], soft, 3, 4)
    (grad,) = torch.autograd.grad(values[0], [table])
    unread = [i for i in range(len(table)) if i not in (1, 2, 3)]
    assert (grad[unread].abs().sum(-1) > 0).all()
    only = torch.zeros_like(mask)
    only[0, 3] = True
    got = token_score_norms(model, ids, only, real, temperature=TEMPERATURE, soft=soft, scope="embed_tokens")
    assert got.norm_sq[0, 3] == pytest.approx(float(grad.square().sum()), rel=2e-6)


def test_model_reads_tokens_as_before_outside_the_block():
    model = tiny_gpt2()
    ids, _, _, soft = soft_batch(model)
    plain = torch.tensor([[1, 2, 3]])
    before = model(plain).logits
    with soft_inputs(model, soft):
        assert torch.equal(model(plain).logits, before)
        model(ids)
    assert torch.equal(model(plain).logits, before)
    with pytest.raises(IndexError):
        model(ids)


def test_soft_tokens_that_do_not_fit_are_refused():
    model = tiny_gpt2()
    ids, mask, real, soft = soft_batch(model)
    with pytest.raises(InputError, match="rule for soft tokens"):
        token_score_norms(model, ids, mask, real, soft=soft, engine="generic")
    with pytest.raises(InputError, match="model that drew them"):
        token_score_norms(model, ids, mask, real, soft=replace(soft, vectors=soft.vectors[:, :2]))
    with pytest.raises(InputError, match="no density"):
        token_score_norms(model, ids, mask, real, soft=replace(soft, sigma=0.0))
    with pytest.raises(InputError, match="vocabulary"):
        token_score_norms(model, ids, mask, real)
    with pytest.raises(InputError, match="vocabulary"):
        token_score_norms(model, ids, mask, real, soft=replace(soft, vectors=soft.vectors[:2]))
    with pytest.raises(InputError, match="one by one"):
        soft.joined(replace(soft, sigma=1.0))
