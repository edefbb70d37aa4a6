"""Architectures beyond those of `conftest`: routed experts, parallel blocks, norms and tables of their own."""

import logging

import numpy as np
import pytest
import torch
import transformers

from otb_analysis.errors import InputError
from otb_analysis.gradients import (
    gradient_attribution,
    group_gradient_gram,
    sampled_score_norms,
    sketch_score_norms,
    token_score_norms,
    weighted_score_norms,
)
from otb_analysis.gradients.batch.inputs import Batch, prepare
from otb_analysis.gradients.exact import attention, generic
from otb_analysis.gradients.groups import layered

LONG = 2 * generic.BLOCK + 9
SHAPE = {
    "vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 8,
    "first_k_dense_replace": 1, "num_experts_per_tok": 2,
}  # fmt: skip
CHOSEN = {"num_experts_per_tok": 2}
ROUTED = {
    "Mixtral": CHOSEN | {"num_local_experts": 4},
    "Qwen2Moe": CHOSEN | {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
    "Qwen3Moe": CHOSEN | {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "Olmoe": CHOSEN | {"num_experts": 4},
    "DeepseekV2": LATENT | {"n_group": 1, "topk_group": 1},
    "DeepseekV3": LATENT | {"n_group": 2, "topk_group": 1},
    "GptOss": CHOSEN | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
}  # fmt: skip
OTHERS = {
    "BioGpt": {},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Cohere": {"use_qk_norm": True},
    "Cohere2": {"sliding_window": 8},
    "Falcon": {},
    "Nemotron": {"head_dim": 4},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16},
}
CASES = [(family, tied) for family in (ROUTED | OTHERS) for tied in (True, False)]
GROUP = np.array([0, 1])


def build(family, tied=True, dtype=torch.float64):
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**SHAPE | (ROUTED | OTHERS)[family], tie_word_embeddings=tied)
    model = getattr(transformers, family + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if family in ROUTED and dtype == torch.float64:
        model.set_experts_implementation("eager")  # for the twin: the grouped kernel knows no float64
    return model.to(dtype).eval()


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{'tied' if c[1] else 'untied'}")
def model(request):
    return build(*request.param)


def weights_of(batch, rows=3):
    return np.random.default_rng(0).normal(size=(len(batch.input_ids), rows, batch.input_ids.shape[1]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_norms_are_the_reference_ones(model, sample, agree_with_reference, side):
    agree_with_reference("generic", model, sample[side])


def test_norms_of_rollouts_of_several_blocks_are_the_reference_ones(model, long_batch, agree_with_reference):
    agree_with_reference("generic", model, long_batch(LONG))


def test_norms_of_rows_are_the_reference_ones(model, sample):
    for batch in (sample["left"], sample["right"]):
        got, expected = (
            weighted_score_norms(model, *batch.args, weights_of(batch), batch.attention_mask, engine=engine)
            for engine in ("generic", "reference")
        )
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-12)


def test_gram_matrices_are_the_reference_ones(model, sample):
    group = np.array([0, 0, 1, 1, 2])
    for batch in (sample["left"], sample["right"]):
        got, expected = (
            group_gradient_gram(model, *batch.args, weights_of(batch), group, batch.attention_mask, engine=engine)
            for engine in ("generic", "reference")
        )
        length = np.sqrt(np.einsum("mmpp->mp", expected))
        scale = length[:, None, :, None] * length[None, :, None, :] + 1e-300
        assert np.abs((got - expected) / scale).max() < 1e-6


@pytest.mark.parametrize("family", ROUTED)
def test_experts_are_measured_block_by_block(family, long_batch, caplog):
    model, batch = build(family, dtype=torch.float32), long_batch(30)
    with caplog.at_level(logging.INFO):
        group_gradient_gram(model, *batch.args, weights_of(batch), GROUP, batch.attention_mask)
    assert "is measured block by block" in caplog.text


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "DeepseekV3"])
@pytest.mark.parametrize("passes", ["one pass", "passes"])
def test_coordinates_stand_for_the_gradients_of_experts(family, sample, passes, monkeypatch):
    model, batch, group, taken = build(family), sample["both"], np.array([0, 0, 1, 1, 2]), []
    weights = weights_of(batch)
    weights[2:4] = 0.0  # a prompt without rows
    args = (model, *batch.args, weights, group, batch.attention_mask)
    expected = group_gradient_gram(*args, engine="reference")
    if passes == "passes":
        monkeypatch.setattr("otb_analysis.gradients.groups.group_gram.BLOCK_COPIES", 10**9)
    few = layered._few_tokens
    for fewer in (0, 10**9):
        monkeypatch.setattr(layered, "FEWER", fewer)
        monkeypatch.setattr(layered, "_few_tokens", lambda *args: taken.append(few(*args)) or taken[-1])
        got, scale = group_gradient_gram(*args), np.sqrt(np.einsum("mmpp->mp", expected))
        assert (np.abs(got - expected) <= 1e-6 * scale[:, None, :, None] * scale[None, :, None, :] + 1e-300).all()
        assert any(call is not None for call in taken) == (fewer == 0)
        taken.clear()


@pytest.mark.parametrize("lengths", [(17, 39), (18, 40), (17, 40)])
def test_all_passes_decide_alike_whether_experts_have_coordinates(lengths):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=17, hidden_size=56, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_experts_per_tok=2, num_local_experts=4,
    )  # fmt: skip
    model, longest = transformers.MixtralForCausalLM(config).eval(), max(lengths)
    ids = torch.randint(0, 17, (2, longest))
    attention = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = attention & (torch.arange(longest) > 1)
    weights = np.random.default_rng(0).normal(size=(2, 2, longest))
    args = (model, ids, mask, weights, np.array([0, 1]), attention)
    got, expected = group_gradient_gram(*args), group_gradient_gram(*args, engine="reference")
    scale = np.sqrt(np.einsum("mmpp->mp", expected))
    assert (np.abs(got - expected) <= 1e-5 * scale[:, None, :, None] * scale[None, :, None, :]).all()


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("scope", ["experts", r"gate\.weight|router", r"layers\.1\.mlp", "self_attn|norm"])
def test_every_part_of_a_mixture_may_be_in_scope(family, scope, long_batch, agree_with_reference):
    agree_with_reference("generic", build(family), long_batch(30), scope=scope)


@pytest.mark.parametrize("family", ROUTED)
def test_a_mixture_in_float32_by_its_default_kernels_is_as_near_as_a_dense_model(family, long_batch):
    batch = long_batch(LONG)
    single = token_score_norms(build(family, dtype=torch.float32), *batch.args, batch.attention_mask, path=True)
    double = token_score_norms(build(family), *batch.args, batch.attention_mask, path=True, engine="reference")
    assert single.engine == "generic"
    for name in ("norm_sq", "path_norm_sq"):
        assert np.abs(getattr(single, name) - getattr(double, name)).max() < 5e-6 * getattr(double, name).max()


def test_a_token_whose_experts_change_with_its_prefix_is_no_other_token(long_batch):
    # Coordinates of a prefix come first among those of the rollout: blocks of one token and of all give the same sums.
    model, batch = build("Mixtral"), long_batch(LONG)
    whole = token_score_norms(model, *batch.args, batch.attention_mask, engine="generic", path=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generic, "BLOCK", 1)
        single = token_score_norms(model, *batch.args, batch.attention_mask, engine="generic", path=True)
    np.testing.assert_allclose(single.path_norm_sq, whole.path_norm_sq, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3", "GptOss", "Falcon", "OPT"])
def test_tiled_attention_goes_with_every_layer(family, long_batch, agree_with_reference, monkeypatch):
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    agree_with_reference("generic", build(family), long_batch(LONG))


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_shares_of_tokens_are_the_reference_ones(model, sample, method):
    batch = sample["left"]
    row = weights_of(batch)[:, 0]
    expected = gradient_attribution(model, *batch.args, row, batch.attention_mask, engine="reference")
    if type(model).__name__.removesuffix("ForCausalLM") in ROUTED:
        model.config._experts_implementation = "grouped_mm"  # replaced for the pass, as it has no such derivative
    got = gradient_attribution(model, *batch.args, row, batch.attention_mask, method=method)
    # Two points of a line on two sides of a kink of ReLU differ by more.
    tolerance = 1e-6 if method == "jvp" else 3e-3 if kinked(model) else 1e-3
    np.testing.assert_allclose(got.share, expected.share, atol=tolerance * np.abs(expected.share).max())
    assert abs(got.sum_error) < 1e-3 and (got.method == method or kinked(model))


def kinked(model):
    return "relu" in str(getattr(model.config, "hidden_act", getattr(model.config, "activation_function", "")))


def test_differences_across_a_kink_give_way_to_forward_mode(sample, caplog):
    model, batch = build("Nemotron", tied=False), sample["left"]
    row = weights_of(batch)[:, 0]
    got = gradient_attribution(model, *batch.args, row, batch.attention_mask, method="difference")
    assert got.method == "jvp" and abs(got.sum_error) < 1e-6 and "forward mode is used" in caplog.text


def test_drawn_tokens_have_the_reference_norms(model, sample):
    batch = sample["both"]
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    drawn = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=7)
    known = np.isfinite(drawn.norm_sq)
    assert drawn.engine != "reference"
    np.testing.assert_allclose(drawn.norm_sq[known], exact[known], rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "OPT"])
def test_a_sketch_of_layers_without_tangents_takes_a_pass_a_direction(family, sample):
    model, batch = build(family), sample["left"]
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq.sum()
    found = sketch_score_norms(model, *batch.args, batch.attention_mask, directions=128)
    assert found.engine == "rank_one" and found.norm_sq.sum() == pytest.approx(exact, rel=0.5)
    with pytest.raises(InputError, match="no rule for many directions"):
        sketch_score_norms(model, *batch.args, batch.attention_mask, directions=2, engine="generic")


def test_models_are_left_as_they_were(model, sample):
    batch = sample["left"]
    forwards = [vars(m).get("forward") for m in model.modules()]
    names = [name for name, _ in model.named_parameters()]
    token_score_norms(model, *batch.args, batch.attention_mask, engine="generic")
    group_gradient_gram(model, *batch.args, weights_of(batch), np.zeros(5, int), batch.attention_mask)
    gradient_attribution(model, *batch.args, weights_of(batch)[:, 0], batch.attention_mask)
    assert [vars(m).get("forward") for m in model.modules()] == forwards
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("family", "cut"),
    [
        ("Mixtral", "model.layers.1.post_attention_layernorm"),
        ("Cohere", "model.norm"),
        ("OPT", "model.decoder.final_layer_norm"),
    ],
)
def test_the_last_experts_lie_above_the_cut_and_parallel_blocks_below(family, cut, sample):
    # A parallel block adds attention and feed-forward part to one input, so only the norm behind both separates them.
    batch = sample["left"]
    plan = generic.plan_for(prepare(build(family), Batch(*batch.args, batch.attention_mask), "all", 1.0))
    assert plan.cut == cut
    experts = {u.module for u in plan.above if "experts" in u.module}
    assert experts == (
        {f"model.layers.1.mlp.experts.{m}_proj" for m in ("gate_up", "down")} if family == "Mixtral" else set()
    )
