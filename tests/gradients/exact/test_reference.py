from functools import partial

import numpy as np
import pytest
import torch

from otb_analysis import gradients
from otb_analysis.gradients.exact import reference
from otb_analysis.gradients.exact.reference import BLOCK
from otb_analysis.logit_stats import logit_stats

token_score_norms = partial(gradients.token_score_norms, engine="reference")
weighted_score_norms = partial(gradients.weighted_score_norms, engine="reference")
group_gradient_gram = partial(gradients.group_gradient_gram, engine="reference")

# Hugging Face runs RMSNorm in float32 even inside a float64 model, so rounding stays at 1e-6 when shapes differ.
CLOSE = {"rtol": 2e-5, "atol": 1e-10}


def norm_sq(scores):
    return {key: s @ s for key, s in scores.items()}


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_token_norms_match_one_backward_per_prefix(case, sample, explicit_scores, dense, side):
    batch = sample[side]
    got = token_score_norms(case, *batch.args, batch.attention_mask, engine="reference")
    expected = dense(batch.mask.shape, norm_sq(explicit_scores(case, batch)))
    np.testing.assert_allclose(got.norm_sq, expected, **CLOSE)
    assert (got.norm_sq[~batch.mask.numpy()] == 0).all() and (got.norm_sq[batch.mask.numpy()] > 0).all()
    assert got.engine == "reference" and got.path_norm_sq is None


def test_rollouts_longer_than_a_block_keep_one_running_sum(make_model, make_sample, explicit_scores):
    length = 2 * BLOCK + 7
    tokens = torch.randint(17, (length,), generator=torch.Generator().manual_seed(4)).tolist()
    batch = make_sample([tokens], [[0, 0, 0] + [1] * (length - 3)], "left", length=length + 2)
    model = make_model("qwen3")
    got = token_score_norms(model, *batch.args, batch.attention_mask, path=True)
    scores = explicit_scores(model, batch)
    rows = np.array([scores[key] for key in sorted(scores)])
    sampled = batch.mask.numpy()
    np.testing.assert_allclose(got.norm_sq[sampled], (rows**2).sum(-1), **CLOSE)
    np.testing.assert_allclose(got.path_norm_sq[sampled], (rows.cumsum(0) ** 2).sum(-1), **CLOSE)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt2"])
def test_norm_is_the_length_of_the_directional_derivatives(make_model, make_sample, family):
    # Without any autograd: for u ~ N(0, I) over the D parameters E(∂_u log π)² = ‖s‖², and one draw has the relative
    # standard deviation √2; 600 draws give .058, of which four are allowed.
    model = make_model(family)
    batch = make_sample([[3, 5, 7, 2]], [[0, 0, 0, 1]], "right", length=4)
    target = token_score_norms(model, *batch.args).norm_sq[0, 3]
    parameters = list(model.parameters())
    step, generator = 3e-3, torch.Generator().manual_seed(1)

    def logprob(directions, scale):
        with torch.no_grad():
            torch._foreach_add_(parameters, directions, alpha=scale)
            value = model(input_ids=batch.input_ids[:, :3]).logits[0, -1].log_softmax(-1)[2]
            torch._foreach_sub_(parameters, directions, alpha=scale)
        return float(value)

    squares = []
    for _ in range(600):
        directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
        slope = (logprob(directions, step) - logprob(directions, -step)) / (2 * step)
        squares.append(slope**2)
    standard_error = np.std(squares, ddof=1) / np.sqrt(len(squares))
    assert abs(np.mean(squares) - target) < 4 * standard_error
    assert standard_error < 0.1 * target


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprob_and_norms_follow_the_temperature(make_model, sample, explicit_scores, dense, temperature):
    model, batch = make_model("qwen3"), sample["left"]
    got = token_score_norms(model, *batch.args, batch.attention_mask, temperature=temperature)
    scores = explicit_scores(model, batch, temperature=temperature)
    np.testing.assert_allclose(got.norm_sq, dense(batch.mask.shape, norm_sq(scores)), **CLOSE)
    ids = batch.input_ids[1][batch.attention_mask[1].bool()]
    z = model(input_ids=ids[None]).logits[0].detach() / temperature
    expected = z.log_softmax(-1)[torch.arange(3, 6), ids[4:]].numpy()
    np.testing.assert_allclose(got.logprob[1, -3:], expected, rtol=1e-6)
    assert (got.logprob[~batch.mask.numpy()] == 0).all()


def test_path_norms_are_norms_of_running_sums(case, sample, explicit_scores):
    batch = sample["left"]
    got = token_score_norms(case, *batch.args, batch.attention_mask, path=True)
    scores = explicit_scores(case, batch)
    for n in range(len(batch.mask)):
        columns = batch.mask[n].nonzero()[:, 0].tolist()
        running = np.cumsum([scores[n, c] for c in columns], axis=0) if columns else []
        np.testing.assert_allclose(got.path_norm_sq[n, columns], [r @ r for r in running], **CLOSE)
    first = batch.mask.int().argmax(-1).numpy()[[0, 1, 2, 4]]
    np.testing.assert_array_equal(got.path_norm_sq[[0, 1, 2, 4], first], got.norm_sq[[0, 1, 2, 4], first])


def test_unit_rows_of_weights_are_token_norms_and_a_row_of_ones_the_path_norm(case, sample):
    batch = sample["right"]
    n, length = batch.mask.shape
    norms = token_score_norms(case, *batch.args, batch.attention_mask, path=True)
    weights = torch.cat([torch.eye(length).expand(n, -1, -1), torch.ones(n, 1, length)], dim=1)
    got = weighted_score_norms(case, *batch.args, weights, batch.attention_mask)
    np.testing.assert_allclose(got[:, :length], norms.norm_sq, rtol=1e-12)
    whole = [path[sampled][-1:].sum() for path, sampled in zip(norms.path_norm_sq, batch.mask.numpy(), strict=True)]
    np.testing.assert_allclose(got[:, length], whole, rtol=1e-6)


@pytest.mark.parametrize("side", ["left", "both"])
def test_gram_matches_explicit_group_gradients(case, sample, explicit_scores, side):
    batch = sample[side]
    weights = np.random.default_rng(0).normal(size=(5, 3, 12))
    weights[:, 2] = 0.0
    group = np.array([7, -1, 7, 7, 2])  # sorted: −1, 2, 7
    got = group_gradient_gram(case, *batch.args, weights, group, batch.attention_mask)
    scores = explicit_scores(case, batch)
    size = len(next(iter(scores.values())))
    gradients = np.zeros((3, 3, size))
    for (n, c), s in scores.items():
        gradients[:, [-1, 2, 7].index(group[n])] += weights[n, :, c, None] * s
    np.testing.assert_allclose(got, np.einsum("mpd,kqd->mkpq", gradients, gradients), rtol=1e-4, atol=1e-4)
    assert got.shape == (3, 3, 3, 3) and (got[2] == 0).all()


def test_a_prompts_rollouts_run_some_at_a_time_where_their_graph_does_not_fit(make_model, sample, monkeypatch):
    model, batch = make_model("gpt2"), sample["both"]
    args = (model, *batch.args, np.random.default_rng(0).normal(size=(5, 3, 12)), np.array([1, 1, 1, 0, 0]))
    whole, ran, run = group_gradient_gram(*args, batch.attention_mask), [], reference.sampled_logprobs

    def spy(prepared, rollouts):
        ran.append([rollout.row for rollout in rollouts])
        return run(prepared, rollouts)

    monkeypatch.setattr(reference, "sampled_logprobs", spy)
    monkeypatch.setattr(reference, "pass_bytes", lambda prepared: len(prepared.rollouts))
    for free, parts in ((6, [[4], [0], [1], [2]]), (12, [[4], [0, 1], [2]]), (18, [[4], [0, 1, 2]])):
        monkeypatch.setattr(reference, "free_bytes", lambda _device, free=free: free)
        np.testing.assert_allclose(group_gradient_gram(*args, batch.attention_mask), whole, rtol=1e-12, atol=1e-12)
        assert ran == parts
        ran.clear()


def test_gram_diagonal_of_groups_of_one_is_the_weighted_norm(make_model, sample):
    model, batch = make_model("qwen2"), sample["both"]
    weights = torch.randn(5, 4, 12, generator=torch.Generator().manual_seed(0))
    gram = group_gradient_gram(model, *batch.args, weights, torch.arange(5), batch.attention_mask)
    norms = weighted_score_norms(model, *batch.args, weights, batch.attention_mask)
    np.testing.assert_allclose(np.einsum("mmpp->pm", gram), norms, rtol=1e-10)
    np.testing.assert_allclose(gram, gram.transpose(1, 0, 3, 2), rtol=1e-12)


def test_group_gradient_is_a_sum_over_rollouts_without_one_over_n(make_model, sample):
    # The same rollout twice in one group doubles the gradient, so the squared norm is four times one's.
    model, batch = make_model("llama"), sample["left"]
    rows = [0, 0]
    weights = torch.ones(2, 1, 12)
    gram = group_gradient_gram(
        model, batch.input_ids[rows], batch.mask[rows], weights, torch.tensor([0, 0]), batch.attention_mask[rows]
    )
    one = weighted_score_norms(model, *[a[:1] for a in batch.args], weights[:1], batch.attention_mask[:1])
    np.testing.assert_allclose(gram[0, 0, 0, 0], 4 * one[0, 0], rtol=1e-9)


def test_rows_of_zeros_cost_no_backward_pass(make_model, sample, monkeypatch):
    model, batch = make_model("qwen3"), sample["left"]
    weights = torch.zeros(5, 4, 12)
    weights[2, 1], weights[3, 2] = 1.0, 1.0  # rollout 3 has no sampled token
    calls, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    weighted_score_norms(model, *batch.args, weights, batch.attention_mask)
    group_gradient_gram(model, *batch.args, weights, torch.arange(5), batch.attention_mask)
    assert len(calls) == 2


def test_padding_side_and_padding_ids_change_nothing(case, sample, make_sample):
    plain = sample["right"]
    masks = plain.mask.numpy()
    expected = token_score_norms(case, *plain.args, plain.attention_mask, path=True)
    for side in ("left", "both"):
        other = sample[side]
        garbage = torch.where(other.attention_mask.bool(), other.input_ids, -(10**6))
        got = token_score_norms(case, garbage, other.mask, other.attention_mask, path=True)
        for name in ("norm_sq", "path_norm_sq", "logprob"):
            np.testing.assert_array_equal(getattr(got, name)[other.mask.numpy()], getattr(expected, name)[masks])


def test_weights_outside_the_mask_are_never_read(make_model, sample):
    model, batch = make_model("gpt2"), sample["left"]
    weights = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(3))
    holes = torch.where(batch.mask[:, None], weights, torch.nan)
    args = (model, *batch.args)
    np.testing.assert_array_equal(
        weighted_score_norms(*args, holes, batch.attention_mask),
        weighted_score_norms(*args, weights, batch.attention_mask),
    )
    group = torch.tensor([0, 0, 1, 1, 1])
    np.testing.assert_array_equal(
        group_gradient_gram(*args, holes, group, batch.attention_mask),
        group_gradient_gram(*args, weights, group, batch.attention_mask),
    )


def test_no_attention_mask_means_no_padding(make_model, sample):
    model, batch = make_model("qwen3"), sample["right"]
    ids, mask = batch.input_ids[1:3, :7], batch.mask[1:3, :7]
    np.testing.assert_array_equal(
        token_score_norms(model, ids, mask).norm_sq,
        token_score_norms(model, ids, mask.long(), torch.ones(2, 7)).norm_sq,
    )


def test_a_batch_without_sampled_tokens_is_all_zero(make_model):
    model, ids = make_model("qwen3"), torch.ones(2, 4, dtype=torch.long)
    empty = torch.zeros(2, 4, dtype=torch.bool)
    assert not token_score_norms(model, ids, empty, path=True).path_norm_sq.any()
    weights = torch.ones(2, 3, 4)
    assert not weighted_score_norms(model, ids, empty, weights, empty).any()
    assert group_gradient_gram(model, ids, empty, weights, torch.tensor([0, 1])).shape == (3, 3, 2, 2)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt2"])
def test_float32_agrees_with_float64(make_model, sample, family):
    batch = sample["left"]
    single = token_score_norms(make_model(family, dtype=torch.float32), *batch.args, batch.attention_mask, path=True)
    double = token_score_norms(make_model(family).float().double(), *batch.args, batch.attention_mask, path=True)
    np.testing.assert_allclose(single.norm_sq, double.norm_sq, rtol=1e-3)
    assert single.norm_sq.dtype == single.logprob.dtype == np.float64


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_untied_output_norm_is_energy_times_hidden_norm(make_model, sample, family, temperature):
    # ‖∇_W log π‖² = ‖(e_y − π) ⊗ h‖²/τ² = w·‖h‖²/τ² for an output matrix without bias.
    model, batch = make_model(family, tied=False), sample["right"]
    got = token_score_norms(model, *batch.args, batch.attention_mask, scope="lm_head", temperature=temperature)
    hidden = model.base_model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    row, column = batch.mask.nonzero(as_tuple=True)
    stats = logit_stats(
        hidden=hidden[row, column - 1],
        weight=model.get_output_embeddings().weight,
        token_ids=batch.input_ids[row, column],
        temperature=temperature,
    )
    np.testing.assert_allclose(
        got.norm_sq[batch.mask.numpy()], stats.energy * stats.hidden_norm_sq / temperature**2, rtol=1e-5
    )
    np.testing.assert_allclose(got.logprob[batch.mask.numpy()], stats.logprob, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt2"])
def test_lm_head_scope_of_a_tied_model_is_that_of_its_untied_copy(make_model, sample, explicit_scores, family):
    tied, untied, batch = make_model(family), make_model(family, tied=False), sample["both"]
    untied.load_state_dict(tied.state_dict())
    weights = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scores = explicit_scores(untied, batch, {"lm_head.weight": untied.get_output_embeddings().weight})
    options = {"attention_mask": batch.attention_mask, "scope": "lm_head"}
    got = token_score_norms(tied, *batch.args, path=True, **options)
    for (n, c), s in scores.items():
        np.testing.assert_allclose(got.norm_sq[n, c], s @ s, **CLOSE)
    group = torch.tensor([0, 0, 1, 1, 1])
    for measure, extra in ((weighted_score_norms, (weights,)), (group_gradient_gram, (weights, group))):
        np.testing.assert_allclose(
            measure(tied, *batch.args, *extra, **options),
            measure(untied, *batch.args, *extra, batch.attention_mask, scope="lm_head"),
            rtol=1e-9,
            atol=1e-9,
        )
    assert not tied.get_output_embeddings()._forward_hooks


def test_disjoint_scopes_add_up_to_all(make_model, sample):
    model, batch = make_model("qwen2", tied=False), sample["left"]
    parts = ["lm_head", "embed_tokens", r"layers\.", r"^model\.norm"]
    total = sum(token_score_norms(model, *batch.args, batch.attention_mask, scope=s).norm_sq for s in parts)
    np.testing.assert_allclose(total, token_score_norms(model, *batch.args, batch.attention_mask).norm_sq, rtol=1e-10)


def test_a_tied_matrix_answers_to_both_names_and_counts_both_uses(make_model, sample, explicit_scores):
    model, batch = make_model("llama"), sample["left"]
    scores = explicit_scores(model, batch, {"both": model.get_output_embeddings().weight})
    for scope in ("embed_tokens", r"lm_head\.weight"):
        got = token_score_norms(model, *batch.args, batch.attention_mask, scope=scope)
        for (n, c), s in scores.items():
            np.testing.assert_allclose(got.norm_sq[n, c], s @ s, **CLOSE)


def test_frozen_parameters_are_in_no_scope(make_model, sample):
    model, batch = make_model("qwen2", tied=False), sample["left"]
    attention = token_score_norms(model, *batch.args, batch.attention_mask, scope="self_attn").norm_sq
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    for scope in ("all", r"layers\.\d"):
        got = token_score_norms(model, *batch.args, batch.attention_mask, scope=scope)
        np.testing.assert_allclose(got.norm_sq, attention, rtol=1e-12)


def test_the_model_is_left_as_it_was_found(make_model, sample):
    model, batch = make_model("qwen3"), sample["left"]
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.full_like(model.model.norm.weight, 3.0)
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    weights, group = torch.ones(5, 2, 12), torch.zeros(5, dtype=torch.long)
    for scope in ("all", "lm_head"):
        options = {"attention_mask": batch.attention_mask, "scope": scope}
        with torch.no_grad():
            token_score_norms(model, *batch.args, path=True, **options)
            assert not torch.is_grad_enabled()
        with torch.inference_mode():
            weighted_score_norms(model, *batch.args, weights, **options)
        group_gradient_gram(model, *batch.args, weights, group, **options)
    assert model.training and not frozen.requires_grad
    assert (model.model.norm.weight.grad == 3).all() and model.model.embed_tokens.weight.grad is None
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_eager_attention_gives_the_same_norms(make_model, sample):
    model, batch = make_model("qwen3"), sample["left"]
    fused = token_score_norms(model, *batch.args, batch.attention_mask).norm_sq
    model.set_attn_implementation("eager")
    eager = token_score_norms(model, *batch.args, batch.attention_mask).norm_sq
    np.testing.assert_allclose(eager, fused, rtol=1e-4)


def test_rollouts_do_not_see_each_other(make_model, sample):
    model, batch = make_model("gpt2"), sample["both"]
    order = [4, 2, 0, 3, 1]
    weights = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(6))
    whole = token_score_norms(model, *batch.args, batch.attention_mask, path=True)
    shuffled = token_score_norms(
        model, batch.input_ids[order], batch.mask[order], batch.attention_mask[order], path=True
    )
    np.testing.assert_array_equal(shuffled.path_norm_sq, whole.path_norm_sq[order])
    group = torch.tensor([1, 1, 0, 1, 0])
    gram = group_gradient_gram(model, *batch.args, weights, group, batch.attention_mask)
    again = group_gradient_gram(
        model, batch.input_ids[order], batch.mask[order], weights[order], group[order], batch.attention_mask[order]
    )
    np.testing.assert_allclose(again, gram, rtol=1e-9)


def test_what_follows_the_last_sampled_token_changes_nothing(make_model, sample):
    model, batch = make_model("qwen2"), sample["right"]
    ids = batch.input_ids[2:3, :8]
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0]])
    short = token_score_norms(model, ids[:, :4], mask[:, :4])
    np.testing.assert_array_equal(token_score_norms(model, ids, mask).norm_sq[:, :4], short.norm_sq)


def test_a_model_without_logits_to_keep_is_measured(make_model, sample):
    class Plain(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask=None, use_cache=False):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    model, batch = make_model("llama"), sample["left"]
    got = token_score_norms(Plain(model), *batch.args, batch.attention_mask).norm_sq
    np.testing.assert_allclose(got, token_score_norms(model, *batch.args, batch.attention_mask).norm_sq, rtol=1e-5)
