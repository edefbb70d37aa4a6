"""Estimated norms: projections equal to the slow twin's, estimates and standard errors right over seeds."""

from functools import partial

import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError
from otb_analysis.gradients import sketch_score_norms, token_score_norms
from otb_analysis.gradients.batch import inputs
from otb_analysis.gradients.batch.inputs import Batch, prepare
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.sketched import tangents
from otb_analysis.gradients.sketched.directions import Directions, aligned
from otb_analysis.gradients.sketched.dual import Dual, dual

rank_one = partial(sketch_score_norms, method="rank_one", engine="generic", features=True, path=True)
FAMILIES = ["qwen2", "qwen3", "llama", "gpt2"]


def projected_alike(model, batch, directions=5, **options):
    """The batched pass and one backward pass per token find the same projections."""
    options |= {"directions": directions, "attention_mask": batch.attention_mask}
    got, expected = (
        rank_one(model, *batch.args, **options),
        rank_one(model, *batch.args, **options | {"engine": "reference"}),
    )
    scale = np.abs(expected.features).max()
    np.testing.assert_allclose(got.features, expected.features, atol=2e-6 * scale)
    for name in ("norm_sq", "path_norm_sq", "norm_sq_stderr", "logprob"):
        want = getattr(expected, name)
        np.testing.assert_allclose(getattr(got, name), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("side", ["left", "both"])
def test_projections_are_those_of_one_backward_per_token(case, sample, side):
    projected_alike(case, sample[side])


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_and_long_texts_are_sketched(make_model, make_sample, family, monkeypatch):
    model = make_model(family)
    texts = [torch.randint(17, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 33)]
    batch = make_sample(texts, [[0] * 3 + [1] * 37, [0] * 5 + [1, 1, 0, 0, 0] + [1] * 23], "left", length=41)
    monkeypatch.setattr("otb_analysis.gradients.exact.attention.QUERIES", 16)
    monkeypatch.setattr(tangents, "ROWS", 90)  # two directions at a time
    projected_alike(model, batch, 5)
    model.set_attn_implementation("eager")
    projected_alike(model, batch, 5)


@pytest.mark.parametrize(
    "scope", ["lm_head", r"mlp|\.ln_", r"embed|wte", r"(layers|h)\.1\.", r"norm|ln_", "self_attn|attn", "v_proj|c_attn"]
)
def test_every_scope_is_projected(make_model, sample, scope):
    for family, tied in (("qwen3", True), ("qwen2", False), ("gpt2", True)):
        projected_alike(make_model(family, tied), sample["left"], scope=scope)


def test_frozen_parameters_and_the_temperature_are_respected(make_model, sample):
    model, batch = make_model("qwen2"), sample["left"]
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    projected_alike(model, batch, temperature=0.7)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # from inside peft
@pytest.mark.parametrize("tied", [True, False])
def test_lora_adapters_are_sketched(make_model, sample, tied):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model, batch = peft.get_peft_model(make_model("qwen2", tied), config).double().eval(), sample["both"]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # B starts at zero, where A has no gradient
                parameter.add_(0.2 * torch.randn_like(parameter))
    projected_alike(model, batch)
    # Below the last attention lie the first layer's adapters and q_proj of the last; above it its down_proj.
    options = {"directions": 512, "attention_mask": batch.attention_mask}
    got = sketch_score_norms(model, *batch.args, engine="generic", **options)
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference")
    inside = batch.mask.numpy()
    assert got.engine == "hybrid" and (got.norm_sq_stderr[inside] > 0).all()
    assert np.abs((got.norm_sq - exact.norm_sq)[inside] / got.norm_sq_stderr[inside]).max() < 4


@pytest.mark.parametrize("method", ["gaussian", "rank_one"])
def test_features_are_inner_products_with_one_set_of_directions(make_model, sample, explicit_scores, method):
    model, batch = make_model("llama"), sample["left"]
    found = sketch_score_norms(
        model, *batch.args, batch.attention_mask, directions=3, method=method, features=True, seed=4
    )
    drawn = Directions(prepare(model, Batch(*batch.args, batch.attention_mask), "all", 1.0), 3, 4)
    for k in range(3):
        flat = torch.cat([d.flatten() for d in getattr(drawn, method)(k)]).numpy()
        for key, score in explicit_scores(model, batch).items():
            np.testing.assert_allclose(found.features[key][k] * 3**0.5, score @ flat, rtol=2e-4, atol=2e-4)


def test_rank_one_directions_are_outer_products_of_signs_and_differ():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4)})
    drawn = Directions(type("P", (), {"scope": type("S", (), {
        "names": ("a.weight", "a.bias"), "parameters": (model["a"].weight, model["a"].bias)})()})(), 6, 0)  # fmt: skip
    first, second = drawn.rank_one(0)[0], drawn.rank_one(1)[0]
    assert torch.linalg.matrix_rank(first) == 1 and (first.abs() == 1).all()
    assert not torch.equal(first, second) and not torch.equal(first, -second)
    assert drawn.rank_one(0)[1].shape == (4,)


def over_seeds(model, batch, method, seeds, directions, **options):
    made = [
        sketch_score_norms(
            model,
            *batch.args,
            batch.attention_mask,
            directions=directions,
            method=method,
            seed=seed,
            path=True,
            **options,
        )
        for seed in range(seeds)
    ]
    stack = lambda name: np.stack([getattr(m, name)[batch.mask.numpy()] for m in made])  # noqa: E731
    return stack("norm_sq"), stack("path_norm_sq"), stack("norm_sq_stderr")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, tied, method, seeds",
    [(f, tied, m, 60) for f in ("qwen2", "gpt2") for tied in (True, False) for m in ("hybrid", "rank_one")]
    + [("qwen3", True, "hybrid", 60), ("llama", True, "gaussian", 12)],
)
def test_estimates_are_unbiased_and_their_standard_errors_calibrated(make_model, sample, family, tied, method, seeds):
    model, batch, k = make_model(family, tied), sample["left"], 24
    norms, paths, stderr = over_seeds(model, batch, method, seeds, k)
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference", path=True)
    for found, truth in ((norms, exact.norm_sq), (paths, exact.path_norm_sq)):
        truth = truth[batch.mask.numpy()]
        z = (found.mean(0) - truth) / (found.std(0, ddof=1) / np.sqrt(seeds) + 1e-9 * truth)
        # Eleven tokens of a few rollouts share their directions: at most one in a thousand such z exceeds 4.
        assert np.abs(z).max() < 4
    # E[stderr²] is the variance of the estimate; its ratio to the observed one over all tokens together.
    ratio = stderr.__pow__(2).mean(0).sum() / norms.var(0, ddof=1).sum()
    assert 0.6 < ratio < 1.6
    truth = exact.norm_sq[batch.mask.numpy()]
    # Squares of few directions are skewed, so that 1.96 standard errors cover a little less than 95 %.
    assert 0.82 < (np.abs(norms - truth) <= 1.96 * stderr + 1e-9 * truth).mean() <= 0.99


def tied_uses(make_model, sample, explicit_scores):
    """A tied model and batch, and by token the score's two uses of the matrix [17, 16]: at the output, as embedding."""
    model, batch = make_model("qwen2"), sample["left"]
    untied = make_model("qwen2", tied=False)
    untied.load_state_dict(model.state_dict() | {"lm_head.weight": model.model.embed_tokens.weight})
    outputs = explicit_scores(untied, batch, {"w": untied.lm_head.weight})
    inputs = explicit_scores(untied, batch, {"w": untied.model.embed_tokens.weight})
    return model, batch, {key: (outputs[key].reshape(17, 16), inputs[key].reshape(17, 16)) for key in outputs}


def test_the_cross_term_of_a_tied_matrix_is_exact_where_directions_fill_the_span(
    make_model, sample, explicit_scores, monkeypatch
):
    # With s = o + i, the output and input use of one matrix, ŵ = ‖o‖² + 2⟨o, i⟩ + (1/K) Σ_k (i·D_k)²: the span of a
    # rollout's o has as many dimensions as tokens, which eight directions fill; what is left is the sketch of i.
    model, batch, uses = tied_uses(make_model, sample, explicit_scores)
    monkeypatch.setattr("otb_analysis.gradients.sketched.score_sketch.TIED_SHARE", 1)
    found = sketch_score_norms(model, *batch.args, batch.attention_mask, directions=8, scope="embed_tokens")
    drawn = Directions(prepare(model, Batch(*batch.args, batch.attention_mask), "embed_tokens", 1.0), 8, 0)
    for (n, t), (o, i) in uses.items():
        last = int(batch.mask[n].nonzero().max())
        read = batch.input_ids[n, :last][batch.attention_mask[n, :last] > 0].unique()
        rows = drawn.rows("model.embed_tokens.weight", slice(0, 2), (len(read), 16)).numpy()
        beta = (rows * i[read]).sum((1, 2))
        expected = (o**2).sum() + 2 * (o * i).sum() + (beta**2).mean()
        np.testing.assert_allclose(found.norm_sq[n, t], expected, rtol=1e-4, atol=1e-4)
        stderr = np.abs(beta[0] ** 2 - beta[1] ** 2) / 2  # of the mean of two
        np.testing.assert_allclose(found.norm_sq_stderr[n, t], stderr, rtol=1e-3, atol=1e-4)


def test_a_few_directions_in_the_span_are_unbiased_with_the_variance_of_a_draw_without_replacement():
    # ⟨A_t, B_t⟩ from two of the four dimensions that the A_t span, for B_t that lie mostly outside.
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    right, left, other = normal(4, 5), normal(4, 6), normal(4, 5, 6)
    truth = torch.einsum("tu,td,tud->t", right, left, other)
    means, variances = [], []
    for seed in range(4000):
        drawn = aligned({"w": (right, left)}, torch.ones(4), 2, torch.Generator().manual_seed(seed))
        products = drawn.known * torch.einsum("kud,tud->tk", drawn.rows["w"], other)
        means.append(products.mean(1))
        variances.append(products.var(1) / 2 * drawn.unseen)
    assert drawn.unseen == 0.5
    means, variances = torch.stack(means), torch.stack(variances).mean(0)
    assert ((means.mean(0) - truth) / (means.std(0) / 4000**0.5)).abs().max() < 4
    torch.testing.assert_close(variances, means.var(0), rtol=0.15, atol=0)


def test_the_directions_do_not_depend_on_the_signs_that_a_library_gives_eigenvectors(monkeypatch):
    generator, eigh = torch.Generator().manual_seed(0), torch.linalg.eigh
    shared = {"w": tuple(torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (5, 6))}

    def drawn():
        return aligned(shared, torch.ones(4), 2, torch.Generator().manual_seed(3))

    def other_signs(matrix):
        values, vectors = eigh(matrix)
        return values, vectors * torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

    here = drawn()
    monkeypatch.setattr(torch.linalg, "eigh", other_signs)
    there = drawn()
    assert torch.equal(here.known, there.known) and torch.equal(here.rows["w"], there.rows["w"])


def test_hybrid_is_exact_where_everything_is_above_the_last_attention(case, sample):
    batch = sample["left"]
    found = sketch_score_norms(case, *batch.args, batch.attention_mask, directions=2, scope="lm_head", path=True)
    exact = token_score_norms(case, *batch.args, batch.attention_mask, engine="reference", scope="lm_head", path=True)
    np.testing.assert_allclose(found.norm_sq, exact.norm_sq, rtol=1e-9)
    np.testing.assert_allclose(found.path_norm_sq, exact.path_norm_sq, rtol=1e-9, atol=1e-12)
    assert not found.norm_sq_stderr.any()


def test_the_seed_decides_and_rollouts_do_not_see_each_other_or_their_padding(make_model, sample):
    model, batch = make_model("qwen3"), sample["both"]
    whole = rank_one(model, *batch.args, batch.attention_mask, directions=4, seed=3)
    order = [4, 2, 0, 3, 1]
    ids = batch.input_ids.masked_fill(batch.attention_mask == 0, -7)[order]
    shuffled = rank_one(model, ids, batch.mask[order], batch.attention_mask[order], directions=4, seed=3)
    np.testing.assert_array_equal(shuffled.features, whole.features[order])
    np.testing.assert_array_equal(shuffled.path_norm_sq, whole.path_norm_sq[order])
    other = rank_one(model, *batch.args, batch.attention_mask, directions=4, seed=5)
    assert np.abs(other.features - whole.features).max() > 0.1 * np.abs(whole.features).max()
    assert (whole.features[~batch.mask.numpy()] == 0).all() and whole.engine == "rank_one"


def test_the_model_is_left_as_found(make_model, sample):
    model, batch = make_model("gpt2"), sample["left"]
    before = {name: p.clone() for name, p in model.named_parameters()}
    sketch_score_norms(model, *batch.args, batch.attention_mask, directions=2)
    assert all(torch.equal(before[n], p) and p.grad is None and p.requires_grad for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Doubled(torch.nn.Module):
    """A layer with an operation that has no rule for many directions."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flip(-1).flip(-1))


def test_an_operation_without_a_rule_is_named_and_auto_goes_direction_by_direction(make_model, sample, caplog):
    model, batch = make_model("llama"), sample["left"]
    plain = rank_one(model, *batch.args, batch.attention_mask, directions=3)
    model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp)
    with pytest.raises(UnfitError, match=r"Tensor\.flip|flip"):
        rank_one(model, *batch.args, batch.attention_mask, directions=3)
    found = rank_one(model, *batch.args, batch.attention_mask, directions=3, engine="auto", scope=r"layers\.1\.")
    assert found.engine == "rank_one" and np.isfinite(found.norm_sq).all()
    hybrid = sketch_score_norms(model, *batch.args, batch.attention_mask, directions=3)
    assert hybrid.engine == "rank_one" and "flip" in caplog.text and plain.engine == "rank_one"


def test_operations_that_move_the_directions_axis_raise():
    x = dual(torch.zeros(1, 3, 4), torch.ones(2, 3, 4))
    with pytest.raises(UnfitError, match="first axis"):
        x.transpose(0, 1)
    with pytest.raises(UnfitError, match="first axis"):
        x[0]
    assert isinstance(x.transpose(1, 2), Dual)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "orthogonal"}, "method is 'orthogonal'"),
        ({"engine": "fast"}, "engine 'fast' does not sketch"),
        ({"directions": 1}, "at least 2"),
        ({"features": True}, "hybrid"),
        ({"engine": "reference"}, "hybrid"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(make_model, sample, options, message):
    with pytest.raises(InputError, match=message):
        sketch_score_norms(make_model("gpt2"), *sample["left"].args, sample["left"].attention_mask, **options)


def test_more_directions_than_memory_holds_are_refused_with_the_number_that_fits(make_model, sample, monkeypatch):
    monkeypatch.setattr(inputs, "memory_bytes", lambda _device: 1_000_000)
    model, batch = make_model("llama"), sample["left"]
    signs = sum(sum(p.shape) for p in model.parameters())
    fit = 1_000_000 // (4 * signs + 8 * batch.mask.numel())
    with pytest.raises(InputError, match=rf"directions is {fit + 1} .* {fit}\."):
        sketch_score_norms(model, *batch.args, batch.attention_mask, directions=fit + 1)
    sketch_score_norms(model, *batch.args, batch.attention_mask, directions=fit)
