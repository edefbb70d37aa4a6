"""Tokens drawn with known probabilities: the norms are exact, the probabilities right, the totals unbiased."""

import numpy as np
import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from otb_analysis.errors import InputError
from otb_analysis.gradients import sampled_score_norms, token_score_norms
from otb_analysis.gradients.batch.inputs import Batch, prepare
from otb_analysis.gradients.exact import generic
from otb_analysis.gradients.exact.generic import DecomposedRollout
from otb_analysis.gradients.exact.reference import Asked
from otb_analysis.gradients.sampled import norms_above_cut, token_norms
from otb_analysis.statistics import horvitz_thompson, systematic_sample

ALL = 99


@pytest.fixture
def prepared(sample):
    def made(model, side="both", scope="all", temperature=1.0):
        batch = sample[side]
        return prepare(model, Batch(batch.input_ids, batch.mask, batch.attention_mask), scope, temperature)

    return made


def test_drawn_tokens_and_copies_have_the_norms_of_the_reference_engine(case, sample, prepared):
    for side in ("left", "right", "both"):
        batch = sample[side]
        settings = {"attention_mask": batch.attention_mask, "temperature": 0.7}
        exact = token_score_norms(case, *batch.args, engine="reference", **settings).norm_sq
        found = sampled_score_norms(case, *batch.args, tokens=ALL, **settings)
        # The family's norms and its eager softmax run in float32 even in a float64 model.
        np.testing.assert_allclose(found.norm_sq, exact, rtol=2e-5, atol=2e-6 * exact.max())
        assert (found.inclusion_prob == batch.mask.numpy()).all()
        assert found.engine in ("fast", "scattered")
        scored = prepared(case, side, temperature=0.7)
        copies = token_norms(scored, generic.plan_for(scored))
        np.testing.assert_allclose(copies, exact, rtol=2e-5, atol=2e-6 * exact.max())


@pytest.mark.parametrize(
    ("family", "length", "engine"),
    [("gemma", 6, "scattered"), ("gemma", 300, "generic"), ("qwen3", 6, "scattered"), ("qwen3", 60, "fast")],
)
def test_tokens_of_a_long_rollout_share_its_pass(make_model, make_sample, family, length, engine):
    torch.manual_seed(2)
    gemma = GemmaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    # Gemma is a family that `fast` does not know.
    model = make_model(family) if family == "qwen3" else GemmaForCausalLM(gemma).double().eval()
    ids = torch.randint(0, 17, (length,)).tolist()
    batch = make_sample([ids], [[0] * (length - 5) + [1] * 5], "right", length=length)
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    found = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=3, by="uniform")
    drawn = np.isfinite(found.norm_sq) & batch.mask.numpy()
    assert found.engine == engine and drawn.sum() == 3
    np.testing.assert_allclose(found.norm_sq[drawn], exact[drawn], rtol=2e-5)


@pytest.mark.parametrize("scope", ["lm_head", "layers.1", "embed", "mlp|norm"])
def test_scattered_copies_know_every_scope(make_model, prepared, scope):
    for tied in (True, False):
        model = make_model("qwen3", tied)
        scored = prepared(model, scope=scope)
        exact = generic.norms(scored, Asked.of_tokens(scored)).norm_sq
        found = token_norms(scored, generic.plan_for(scored))
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-6 * exact.max())


def test_wide_prefixes_and_long_ones_take_the_two_ways_to_a_matrix(make_model, make_sample):
    # Width 16 and 24: pairs of positions are cheaper below about 9 positions, the gradient itself above.
    torch.manual_seed(1)
    lengths = (4, 30)
    texts = [torch.randint(0, 17, (n,)).tolist() for n in lengths]
    batch = make_sample(texts, [[0] * (n - 2) + [1, 1] for n in lengths], "right", length=30)
    model = make_model("llama")
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    scored = prepare(model, Batch(batch.input_ids, batch.mask, batch.attention_mask), "all", 1.0)
    np.testing.assert_allclose(token_norms(scored, generic.plan_for(scored)), exact, rtol=2e-5)


def test_embedding_rows_of_padding_tokens_are_not_trained(make_model, make_sample):
    model = make_model("qwen2", tied=False)
    model.get_input_embeddings().padding_idx = 3
    batch = make_sample([[3, 5, 3, 2, 9, 5]], [[0, 0, 1, 0, 1, 1]], "right")
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    found = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=ALL).norm_sq
    np.testing.assert_allclose(found, exact, rtol=2e-5)


def test_norm_above_the_cut_is_that_of_the_layers_there(make_model, prepared):
    scored = prepared(make_model("llama", tied=False))
    plan = generic.plan_for(scored)
    expected = np.zeros(scored.shape)
    for rollout in scored.rollouts:
        parts = DecomposedRollout(scored, plan, rollout).outer.values()
        expected[rollout.row, rollout.columns] = sum(
            (a.square().sum(-1) * b.square().sum(-1)).numpy() for a, b in parts
        )
    found = norms_above_cut(scored, plan)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    exact = generic.norms(scored, Asked.of_tokens(scored)).norm_sq
    assert (found <= exact * (1 + 1e-6)).all() and (found[scored.mask] > 0).all()


def test_norm_above_the_cut_is_everything_where_nothing_in_scope_is_below(make_model, prepared):
    scored = prepared(make_model("qwen2"), scope="lm_head")
    exact = generic.norms(scored, Asked.of_tokens(scored)).norm_sq
    np.testing.assert_allclose(norms_above_cut(scored, generic.plan_for(scored)), exact, rtol=1e-5)


def test_drawn_tokens_have_the_norms_they_have_in_their_whole_context(make_model, sample):
    model, batch = make_model("qwen3"), sample["both"]
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    found = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=4, seed=3)
    mask = batch.mask.numpy()
    assert found.drawn.sum() == 4 and (found.drawn <= mask).all()
    np.testing.assert_allclose(found.norm_sq[found.drawn], exact[found.drawn], rtol=2e-5)
    assert np.isnan(found.norm_sq[mask & ~found.drawn]).all()
    assert (found.norm_sq[~mask] == 0).all() and (found.inclusion_prob[~mask] == 0).all()
    assert found.inclusion_prob.sum() == pytest.approx(4)


@pytest.mark.parametrize("by", ["uniform", "proxy", "above_cut"])
def test_expanded_totals_are_unbiased_and_their_errors_honest(make_model, sample, by):
    model, batch = make_model("llama"), sample["right"]
    mask = batch.mask.numpy()
    exact = token_score_norms(model, *batch.args, batch.attention_mask).norm_sq
    proxy = np.where(mask, np.sqrt(exact), np.nan)  # any positive numbers will do; padding is never read
    one = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=5, by=by, proxy=proxy)
    prob, totals = one.inclusion_prob[mask], []
    for seed in range(400):  # the norms do not depend on the draw, so each was measured once, above
        drawn = systematic_sample(prob, seed)
        found = horvitz_thompson(np.where(drawn, exact[mask], np.nan), prob)
        totals.append((found.estimate[0], found.stderr[0]))
    estimate, stderr = np.array(totals).T
    assert abs(estimate.mean() - exact.sum()) < 4 * estimate.std() / np.sqrt(len(estimate))
    assert np.sqrt((stderr**2).mean()) == pytest.approx(estimate.std(), rel=0.25)


def test_what_is_in_padding_changes_nothing(make_model, make_sample):
    model = make_model("qwen3")
    texts, masks = [[3, 5, 7, 2, 9], [4, 4, 1]], [[0, 0, 1, 1, 1], [0, 1, 1]]
    first, second = (make_sample(texts, masks, "right", filler=f) for f in (0, 11))
    a, b = (sampled_score_norms(model, *s.args, s.attention_mask, tokens=2) for s in (first, second))
    np.testing.assert_array_equal(a.norm_sq, b.norm_sq)
    np.testing.assert_array_equal(a.inclusion_prob, b.inclusion_prob)


def test_model_and_random_state_are_left_as_found(make_model, sample):
    model, batch = make_model("gpt2"), sample["left"]
    torch.manual_seed(5)
    before = [p.clone() for p in model.parameters()], torch.get_rng_state()
    sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=3)
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(before[1], torch.get_rng_state())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_without_rules_is_measured_by_the_reference_engine_and_refused_above_the_cut(make_model, sample):
    model, batch = make_model("llama"), sample["right"]
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq

    class Odd(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model.model.layers[0].mlp.down_proj.__class__ = Odd
    found = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=3, by="uniform")
    assert found.engine == "reference"
    np.testing.assert_allclose(found.norm_sq[found.drawn], exact[found.drawn], rtol=1e-5)
    with pytest.raises(InputError, match=r'pass by="proxy".*down_proj'):
        sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"by": "prox"}, "did you mean 'proxy'|by is 'prox'"),
        ({"tokens": 0}, "n is 0"),
        ({"by": "proxy"}, "proxy has shape None"),
        ({"by": "proxy", "proxy": np.zeros((2, 2))}, r"proxy has shape \(2, 2\)"),
        ({"by": "proxy", "proxy": np.full((5, 12), np.nan)}, "size holds a value that is negative or not finite"),
        ({"scope": "layers.0"}, r"scope 'layers.0' holds no parameter above the last attention.*pass by=\"proxy\""),
    ],
)
def test_bad_input_is_one_sentence(make_model, sample, wrong, said):
    batch = sample["right"]
    with pytest.raises(InputError, match=said):
        sampled_score_norms(make_model("llama"), *batch.args, batch.attention_mask, **({"tokens": 3} | wrong))


def test_a_batch_without_sampled_tokens_has_nothing_to_draw(make_model, make_sample):
    batch = make_sample([[2, 3]], [[0, 0]], "right")
    found = sampled_score_norms(make_model("llama"), *batch.args, batch.attention_mask, tokens=3)
    assert not found.drawn.any() and (found.norm_sq == 0).all()
