import logging
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients import (
    group_gradient_gram,
    sampled_score_norms,
    sketch_score_norms,
    token_score_norms,
    weighted_score_norms,
)
from otb_analysis.gradients.batch.inputs import Batch, prepare
from otb_analysis.gradients.exact import attention, generic
from otb_analysis.gradients.exact.layers import rule_for

# Both engines run the same float64 kernels, but Hugging Face casts RMSNorm to float32: the backward pass of a sum of
# signals rounds differently there from the sum of their backward passes (1.6e-7); with LayerNorm only 1e-15 is left.
CLOSE = {"rtol": 2e-6, "atol": 1e-12}
LONG = 2 * generic.BLOCK + 9
FAMILIES = ["qwen2", "qwen3", "llama", "gpt2"]
norms = partial(token_score_norms, engine="generic", path=True)
twin = partial(token_score_norms, engine="reference", path=True)


@pytest.fixture
def agree(agree_with_reference):
    return partial(agree_with_reference, "generic")


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_token_and_path_norms_are_the_reference_ones(case, sample, side, agree):
    agree(case, sample[side])


@pytest.mark.parametrize("side", ["left", "both"])
def test_token_norms_match_one_backward_per_prefix(case, sample, explicit_scores, dense, side):
    batch = sample[side]
    got = norms(case, *batch.args, batch.attention_mask)
    scores = explicit_scores(case, batch)
    # Prefixes of another length round differently in float32 RMSNorm.
    np.testing.assert_allclose(
        got.norm_sq, dense(batch.mask.shape, {key: s @ s for key, s in scores.items()}), rtol=2e-5, atol=1e-10
    )


def test_weighted_norms_are_the_reference_ones(case, sample):
    batch = sample["both"]
    weights = torch.randn(5, 4, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights[:, 2] = 0.0
    got, expected = (
        weighted_score_norms(case, *batch.args, weights, batch.attention_mask, engine=engine)
        for engine in ("generic", "reference")
    )
    np.testing.assert_allclose(got, expected, **CLOSE)
    assert (got[:, 2] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_any_size_and_gaps_give_the_same_norms(make_model, family, monkeypatch, agree, long_batch):
    model, batch = make_model(family), long_batch(LONG)
    agree(model, batch)
    monkeypatch.setattr(generic, "SIGNAL_BYTES", 1)  # one signal at a time
    few = norms(model, *batch.args, batch.attention_mask)
    monkeypatch.undo()
    np.testing.assert_allclose(few.path_norm_sq, norms(model, *batch.args, batch.attention_mask).path_norm_sq, **CLOSE)


@pytest.mark.parametrize(
    "scope", ["lm_head", r"mlp|\.ln_", r"embed|wte", r"(layers|h)\.1\.", r"norm|ln_", r"bias|lm_head", "self_attn|attn"]
)
def test_every_scope_is_followed(make_model, sample, scope, agree):
    # Between them these have every kind of parameter: norms on heads, biases everywhere, an output layer of its own.
    models = {"qwen3": make_model("qwen3"), "qwen2": make_model("qwen2", tied=False), "gpt2": make_model("gpt2")}
    for family, model in models.items():
        if (family, scope) != ("qwen3", "bias|lm_head"):
            agree(model, sample["left"], scope=scope)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_use_of_a_tied_matrix_adds_to_its_input_use(make_model, sample, family):
    # ‖E + O‖² = ‖E‖² + ‖O‖² + 2⟨E, O⟩: the cross term is what untied copies of the same weights do not have.
    tied, untied, batch = make_model(family), make_model(family, tied=False), sample["left"]
    untied.load_state_dict(tied.state_dict())
    whole = norms(tied, *batch.args, batch.attention_mask, scope=r"embed_tokens|wte").norm_sq
    parts = sum(
        norms(untied, *batch.args, batch.attention_mask, scope=s).norm_sq for s in (r"embed_tokens|wte", r"^lm_head")
    )
    expected = twin(tied, *batch.args, batch.attention_mask, scope=r"embed_tokens|wte").norm_sq
    np.testing.assert_allclose(whole, expected, **CLOSE)
    assert np.abs(whole - parts).max() > 1e-3 * whole.max()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_norms_follow_the_temperature(make_model, sample, temperature, agree):
    agree(make_model("qwen2"), sample["left"], temperature=temperature)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_float32_is_within_5e_6_of_the_largest_norm(make_model, family, tied, long_batch):
    batch = long_batch(LONG)
    model = make_model(family, tied, dtype=torch.float32)
    single = norms(model, *batch.args, batch.attention_mask)
    double = twin(model.double(), *batch.args, batch.attention_mask)
    for name in ("norm_sq", "path_norm_sq"):
        got, expected = getattr(single, name), getattr(double, name)
        assert np.abs(got - expected).max() < 5e-6 * expected.max()
        assert abs(got.sum() - expected.sum()) < 5e-6 * expected.sum()


def test_padding_is_never_read_and_rollouts_do_not_see_each_other(make_model, sample):
    model, batch = make_model("qwen3"), sample["both"]
    whole = norms(model, *batch.args, batch.attention_mask)
    order = [4, 2, 0, 3, 1]
    ids = batch.input_ids.masked_fill(batch.attention_mask == 0, -7)[order]
    shuffled = norms(model, ids, batch.mask[order], batch.attention_mask[order])
    np.testing.assert_array_equal(shuffled.path_norm_sq, whole.path_norm_sq[order])


def test_the_padding_row_of_an_embedding_takes_no_gradient(make_model, sample, agree):
    model, batch = make_model("qwen2", tied=False), sample["left"]
    model.model.embed_tokens.padding_idx = 3  # token 3 is real in three of the rollouts
    agree(model, batch)
    tied = make_model("qwen2")
    tied.model.embed_tokens.padding_idx = 3
    agree(tied, batch)


def test_a_batch_without_sampled_tokens_has_only_zeros(make_model, sample):
    ids = sample["left"].input_ids
    assert not norms(make_model("qwen2"), ids, torch.zeros_like(ids)).norm_sq.any()


def test_the_model_is_left_as_it_was_found(make_model, sample):
    model, batch = make_model("qwen3"), sample["left"]
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for scope in ("all", "lm_head"):
        with torch.inference_mode():
            norms(model, *batch.args, batch.attention_mask, scope=scope)
    assert not frozen.requires_grad and not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


class Scaled(nn.Module):
    """A layer of an unknown type behind a known one."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.gain * self.inner(x)


def test_a_parameter_without_a_rule_is_named_and_auto_says_why_it_falls_back(make_model, caplog, agree, long_batch):
    model, batch = make_model("llama", dtype=torch.float32), long_batch(LONG)
    model.model.layers[0].mlp.up_proj = Scaled(model.model.layers[0].mlp.up_proj)
    with pytest.raises(InputError, match=r"up_proj.gain of a Scaled has no rule"):
        norms(model, *batch.args, batch.attention_mask)
    agree(model.double(), batch, scope="self_attn|inner")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = token_score_norms(model, *batch.args, batch.attention_mask)
    assert got.engine == "reference"
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "up_proj.gain" in caplog.text


def test_a_layer_on_flattened_positions_is_followed(make_model, agree, long_batch):
    class Flat(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    model, batch = make_model("llama"), long_batch(LONG)
    model.model.layers[0].mlp.up_proj = Flat(model.model.layers[0].mlp.up_proj)
    agree(model, batch)


SLIDING = dict(vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=None)  # fmt: skip
GEMMAS = {
    "gemma": (GemmaForCausalLM, GemmaConfig, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 8, "final_logit_softcapping": 2.0}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 8, "layer_types": [
        "full_attention", "sliding_attention", "full_attention"]}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
}  # fmt: skip


def gemma(name, tied=True, **changes):
    torch.manual_seed(0)
    make, config, extra = GEMMAS[name]
    model = make(config(**SLIDING | extra | changes, tie_word_embeddings=tied)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_and_sliding_windows_are_followed(monkeypatch, name, tied, agree, long_batch):
    # Gemma: norm weights enter as 1 + w, embeddings are scaled by √d (rounded to the weight's dtype), the second and
    # third generation have norms on both sides of a layer, windows of 8 tokens, the second caps its logits, and the
    # third has norms of query and key with the heads before the positions.
    model, batch = gemma(name, tied), long_batch(LONG)
    monkeypatch.setattr(attention, "TILED_FROM", 0)  # where there is no soft-cap in the attention
    agree(model, batch)


def test_a_scaled_embedding_is_scaled_and_its_padding_row_untrained(agree, long_batch):
    model, batch = gemma("gemma3"), long_batch(LONG)
    model.model.embed_tokens.padding_idx = 3
    agree(model, batch, scope="embed")
    # Twice the scale and half the weights compute the same model; the untied gradient by a row doubles.
    untied = gemma("gemma3", tied=False)
    before = norms(untied, *batch.args, batch.attention_mask, scope="embed").norm_sq
    with torch.no_grad():
        untied.model.embed_tokens.weight.div_(2)
        untied.model.embed_tokens.embed_scale.mul_(2)
    after = norms(untied, *batch.args, batch.attention_mask, scope="embed").norm_sq
    np.testing.assert_allclose(after, 4 * before, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("heads", [8, 3])
def test_norms_on_heads_are_followed_whatever_the_number_of_heads(heads, agree, long_batch):
    # 8 is the heads of a published checkpoint, 3 the probe's sampled tokens: axes are told apart by the positions.
    model, batch = (
        gemma("gemma3", hidden_size=24, num_attention_heads=heads, num_key_value_heads=1),
        long_batch(30),
    )
    agree(model, batch, scope="q_norm|k_norm")
    with_eleven = gemma("gemma3", hidden_size=22, num_attention_heads=11, num_key_value_heads=11)
    with pytest.raises(InputError, match=r"q_norm.weight is applied to shape \(1, 11, 11, 8\)"):
        norms(with_eleven, *batch.args, batch.attention_mask)


def test_scattered_copies_know_norms_on_heads(make_sample):
    model, batch = (
        gemma("gemma3"),
        make_sample([[3, 5, 7, 2, 3, 9], [4, 2, 8]], [[0, 0, 1, 1, 1, 1], [0, 1, 1]], "left"),
    )
    for scope in ("all", "q_norm|k_norm"):
        exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference", scope=scope).norm_sq
        options = {"tokens": 99, "scope": scope, "by": "uniform"}
        found = sampled_score_norms(model, *batch.args, batch.attention_mask, **options).norm_sq
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-6 * exact.max())


@pytest.mark.parametrize("scope", ["all", "embed", "norm"])
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_the_rank_one_sketch_of_gemma_is_the_reference_one(make_sample, name, scope):
    # The same directions by batched tangents and by one backward pass per token: equal projections, not only norms.
    model, batch = gemma(name), make_sample([[3, 5, 7, 2, 3, 9]], [[0, 0, 1, 1, 1, 1]], "left", length=6)
    options = {"method": "rank_one", "directions": 4, "features": True, "scope": scope}
    got = sketch_score_norms(model, *batch.args, engine="generic", **options)
    expected = sketch_score_norms(model, *batch.args, engine="reference", **options)
    scale = np.abs(expected.features).max()
    np.testing.assert_allclose(got.features, expected.features, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # from inside peft
def test_lora_adapters_are_followed(make_model, agree, long_batch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model, batch = peft.get_peft_model(make_model("qwen2"), config).double().eval(), long_batch(LONG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # B starts at zero, where A has no gradient
                parameter.add_(0.2 * torch.randn_like(parameter))
    agree(model, batch)


def test_a_layer_that_only_looks_known_is_found_out(make_model, caplog, long_batch):
    class OddRMSNorm(nn.Module):  # its weight enters squared: linear in the weight it is not
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return self.weight**2 * x

    model, batch = make_model("llama"), long_batch(LONG)
    model.model.layers[0].post_attention_layernorm = OddRMSNorm(model.model.layers[0].post_attention_layernorm.weight)
    with pytest.raises(InputError, match=r"post_attention_layernorm.weight has squared score norms"):
        norms(model, *batch.args, batch.attention_mask)
    with caplog.at_level(logging.WARNING):
        assert token_score_norms(model, *batch.args, batch.attention_mask).engine == "reference"


def test_shared_and_repeated_layers_are_refused(make_model, sample):
    model, batch = make_model("qwen2"), sample["left"]
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj.weight = first.up_proj.weight
    with pytest.raises(InputError, match=r"up_proj.weight is shared by 2 layers"):
        norms(model, *batch.args, batch.attention_mask)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(InputError, match="used more than once"):
        norms(model, *batch.args, batch.attention_mask)


def test_tiled_attention_gives_the_reference_norms(case, sample, monkeypatch, agree):
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    monkeypatch.setattr(attention, "TILE_BYTES", 4096)
    agree(case, sample["both"])


def test_eager_attention_is_followed(make_model, sample, agree):
    model, batch = make_model("qwen3"), sample["left"]
    model.set_attn_implementation("eager")
    agree(model, batch)


def test_non_finite_logits_name_rollout_and_token(make_model, long_batch):
    model, batch = make_model("qwen2"), long_batch(LONG)
    fresh = make_model("qwen2", seed=1)
    norms(model, *batch.args, batch.attention_mask)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = fresh.model.embed_tokens.weight[7] = torch.nan
    with pytest.raises(NonFiniteError, match="rollout 0, token"):
        token_score_norms(fresh, *batch.args, batch.attention_mask)
    with pytest.raises(InputError, match="not finite on a probe"):
        norms(fresh, *batch.args, batch.attention_mask)
    with pytest.raises(NonFiniteError, match="rollout 0, token"):
        norms(model, *batch.args, batch.attention_mask)


def test_the_cut_is_behind_the_last_attention(make_model, sample):
    # Above it are the last layer's feed-forward part and its query, which only the own position reads.
    model, batch = make_model("qwen3"), sample["left"]
    plan = generic.plan_for(prepare(model, Batch(*batch.args, batch.attention_mask), "all", 1.0))
    assert plan.cut == "model.layers.1.post_attention_layernorm"
    above = {u.module for u in plan.above}
    assert {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.norm", "lm_head"} <= above
    assert {"model.layers.1.self_attn.k_proj", "model.embed_tokens"} <= {u.module for u in plan.below}


def test_the_gram_matrix_is_the_same_from_every_engine(make_model, sample):
    model, batch = make_model("qwen2"), sample["left"]
    weights, group = torch.ones(5, 2, 12), torch.tensor([0, 0, 1, 1, 1])
    every = [
        group_gradient_gram(model, *batch.args, weights, group, batch.attention_mask, engine=engine)
        for engine in ("auto", "generic", "reference")
    ]
    length = np.sqrt(np.einsum("mmpp->mp", every[-1]))
    scale = length[:, None, :, None] * length[None, :, None, :] + 1e-12
    assert all((np.abs(gram - every[-1]) / scale).max() < 1e-6 for gram in every)


def test_the_table_of_rules_takes_a_subclass_only_where_it_computes_the_same():
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert rule_for(Same(2, 2), "weight") is rule_for(Conv1D(2, 2), "weight") is not None
    assert rule_for(Other(2, 2), "weight") is None
    assert rule_for(nn.Embedding(4, 2, scale_grad_by_freq=True), "weight") is None


def test_only_the_first_pass_of_a_rollout_goes_beyond_the_cut(make_model, long_batch):
    # Every block runs the layers below, but for the last of a rollout, which shares the rollout's first pass.
    model, batch = make_model("llama"), long_batch(LONG)
    norms(model, *batch.args, batch.attention_mask)  # looks at the model
    entered = {"model.embed_tokens": 0, "model.layers.1.mlp": 0, "lm_head": 0}

    def counting(name):
        def count(*_):
            entered[name] += 1

        return count

    for name in entered:
        model.get_submodule(name).register_forward_hook(counting(name))
    norms(model, *batch.args, batch.attention_mask)
    sampled = batch.mask.sum(1).tolist()
    blocks = sum(-(-count // generic.BLOCK) for count in sampled)
    assert entered == {"model.embed_tokens": blocks, "model.layers.1.mlp": 2, "lm_head": 2} and blocks > 2
