"""Kernels of a model that engines replace for a pass: attention, activations, checkpoints, compiled code, wrappers."""

from functools import partial
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from otb_analysis.errors import InputError
from otb_analysis.gradients import (
    gradient_attribution,
    gradient_sketch,
    group_gradient_gram,
    sampled_score_norms,
    sketch_score_norms,
    token_score_norms,
    weighted_score_norms,
)
from otb_analysis.gradients.batch.kernels import plain_kernels, unwrapped

WEIGHTS = np.random.default_rng(0).normal(size=(5, 3, 12))
GROUP = np.array([0, 0, 1, 1, 2])


class Fused(torch.autograd.Function):
    """Attention as fused kernels have it: a forward and a backward pass, and no rule for anything else."""

    @staticmethod
    def forward(ctx, query, key, value):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            output = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        ctx.graph = output, leaves
        return output.detach()

    @staticmethod
    def backward(ctx, signal):
        output, leaves = ctx.graph
        return torch.autograd.grad(output, leaves, torch.from_numpy(signal.numpy()), retain_graph=True)


def fused(_module, query, key, value, _mask, **_options):
    return Fused.apply(query, key, value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("fused", fused)
ALL_ATTENTION_FUNCTIONS.register("doubled", lambda *args, **options: (2 * fused(*args)[0], None))


def with_attention(model, name="fused"):
    model.set_attn_implementation(name)
    return model


def with_checkpoints(model, reentrant=False):
    model.train().activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


class Root(torch.autograd.Function):
    """x √(1/(mean x² + ε)) in one kernel."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    @staticmethod
    def backward(ctx, signal):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            output = leaf * (leaf.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return torch.autograd.grad(output, leaf, torch.from_numpy(signal.numpy()))


def fused_norm(self, x):
    return self.weight * Root.apply(x)


fused_norm.__module__ = "liger_kernel.transformers.rms_norm"


def with_fused_norms(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(fused_norm, module)
    return model


def with_a_compiled_layer(model):
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


CHANGES = {
    "fused attention": with_attention,
    "checkpoints": with_checkpoints,
    "reentrant checkpoints": partial(with_checkpoints, reentrant=True),
    "fused norms": with_fused_norms,
    "compiled": partial(torch.compile, backend="eager"),
    "compiled layer": with_a_compiled_layer,
    "compiled in place": compiled_in_place,
    "parallel": nn.DataParallel,
}


@pytest.fixture(params=CHANGES)
def pair(request, make_model):
    """A model with something in the way, and the same model without."""
    return CHANGES[request.param](make_model("qwen3")), make_model("qwen3")


def test_norms_and_gram_matrices_are_those_of_the_plain_model(pair, sample):
    (model, plain), batch = pair, sample["left"]
    args = (*batch.args, batch.attention_mask)
    got = token_score_norms(model, *args, path=True, engine="generic")
    expected = token_score_norms(plain, *args, path=True, engine="reference")
    for name in ("norm_sq", "path_norm_sq", "logprob"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=5e-6, atol=1e-12)
    rows = [weighted_score_norms(m, *batch.args, WEIGHTS, batch.attention_mask, engine="generic") for m in pair]
    np.testing.assert_allclose(*rows, rtol=5e-6, atol=1e-12)
    grams = [group_gradient_gram(m, *batch.args, WEIGHTS, GROUP, batch.attention_mask) for m in pair]
    np.testing.assert_allclose(*grams, rtol=0, atol=5e-6 * np.abs(grams[1]).max())
    drawn = [sampled_score_norms(m, *args, tokens=6).norm_sq for m in pair]
    np.testing.assert_allclose(*drawn, rtol=5e-6, atol=1e-12)


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_attribution_and_sketches_are_those_of_the_plain_model(pair, sample, method):
    batch = sample["left"]
    shares = [
        gradient_attribution(m, *batch.args, WEIGHTS[:, 0], batch.attention_mask, method=method).share for m in pair
    ]
    np.testing.assert_allclose(*shares, rtol=0, atol=1e-3 * np.abs(shares[1]).max())
    sketches = [gradient_sketch(m, *batch.args, WEIGHTS, GROUP, batch.attention_mask, dim=64) for m in pair]
    np.testing.assert_allclose(*sketches, rtol=0, atol=1e-5 * np.abs(sketches[1]).max())


def test_tangents_pass_by_plain_kernels(make_model, sample):
    batch = sample["left"]
    options = {"directions": 4, "method": "rank_one", "engine": "generic", "features": True}
    got, expected = (
        sketch_score_norms(m, *batch.args, batch.attention_mask, **options).features
        for m in (with_fused_norms(with_attention(make_model("qwen3"))), make_model("qwen3"))
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def state(model):
    kernels = [
        (name, vars(m).get("forward"), vars(m).get("gradient_checkpointing"), vars(m).get("_compiled_call_impl"))
        for name, m in model.named_modules()
    ]
    return kernels, model.training, unwrapped(model).config._attn_implementation


def test_the_model_is_left_as_it_was_found_even_by_an_error(pair):
    before = state(pair[0])
    with pytest.raises(ZeroDivisionError), plain_kernels(pair[0]):
        raise ZeroDivisionError
    assert state(pair[0]) == before


def test_an_attention_that_computes_something_else_is_noticed(make_model, sample):
    model, batch = with_attention(make_model("qwen3"), "doubled"), sample["left"]
    args = (model, *batch.args, batch.attention_mask)
    with pytest.raises(InputError, match="with plain attention kernels"):
        token_score_norms(*args, engine="generic")
    grams = [
        group_gradient_gram(model, *batch.args, WEIGHTS, GROUP, batch.attention_mask, engine=e)
        for e in ("auto", "reference")
    ]
    np.testing.assert_allclose(*grams, rtol=0, atol=1e-6 * np.abs(grams[1]).max())


def test_a_forward_that_was_replaced_by_somebody_else_stays(make_model):
    model = make_model("qwen3")
    norm = model.model.norm
    norm.forward = MethodType(lambda self, x: x, norm)
    own = norm.forward
    with plain_kernels(model):
        assert norm.forward is own


class Turn(torch.autograd.Function):
    """x cos + (−b, a) sin for x = (a, b), and its transpose on the way back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    @staticmethod
    def backward(ctx, signal):
        cos, sin = ctx.saved_tensors
        signal = torch.from_numpy(signal.numpy())
        a, b = (signal * sin).chunk(2, -1)
        return signal * cos + torch.cat([b, -a], -1), None, None


def test_a_fused_rotation_of_the_whole_family_is_replaced_for_the_pass(make_model, sample, monkeypatch):
    def turn(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return tuple(Turn.apply(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)) for x in (q, k))

    turn.__module__ = "liger_kernel.transformers.rope"
    model, batch = make_model("qwen3"), sample["left"]
    expected = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", turn)
    fresh = with_fused_norms(make_model("qwen3"))
    found = token_score_norms(fresh, *batch.args, batch.attention_mask, engine="generic").norm_sq
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=1e-12)
    assert modeling_qwen3.apply_rotary_pos_emb is turn


def test_wrappers_of_wrappers_are_taken_off(make_model):
    model = make_model("llama")
    compiled = partial(torch.compile, backend="eager")
    assert unwrapped(compiled(nn.DataParallel(compiled(model)))) is model
    assert unwrapped(model) is model


def test_a_model_in_distributed_data_parallel_is_measured(make_model, sample, tmp_path):
    model, batch = make_model("llama"), sample["left"]
    expected = token_score_norms(model, *batch.args, batch.attention_mask).norm_sq
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        found = token_score_norms(parallel, *batch.args, batch.attention_mask).norm_sq
    finally:
        torch.distributed.destroy_process_group()
    np.testing.assert_array_equal(found, expected)


class Smooth(torch.autograd.Function):
    """An operation with a backward pass of its own and no derivative forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, signal):
        return signal


def test_an_operation_without_a_forward_derivative_is_refused_in_a_sentence(make_model, sample):
    model, batch = make_model("qwen3"), sample["left"]
    model.model.norm.register_forward_hook(lambda _m, _a, output: Smooth.apply(output))
    args = (model, *batch.args, WEIGHTS[:, 0], batch.attention_mask)
    with pytest.raises(InputError, match=r"without a forward-mode derivative .*method=\"difference\"") as refused:
        gradient_attribution(*args)
    assert "\n" not in str(refused.value)
    got, expected = gradient_attribution(*args, method="difference"), gradient_attribution(*args, engine="reference")
    np.testing.assert_allclose(got.share, expected.share, atol=1e-3 * np.abs(expected.share).max())


def half_only(_module, query, key, value, _mask, **_options):
    assert query.dtype == torch.bfloat16, "this kernel takes no float32"
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    ).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("half_only", half_only)


@pytest.mark.parametrize("engine", ["fast", "generic", "reference"])
def test_a_kernel_for_half_precision_steps_aside_where_weights_are_widened(make_model, sample, engine):
    model, batch = make_model("qwen2", dtype=torch.bfloat16), sample["right"]
    twin = make_model("qwen2").bfloat16().double()
    model.set_attn_implementation("half_only")
    with torch.no_grad():
        assert model(batch.input_ids).logits.isfinite().all()
    got = token_score_norms(model, *batch.args, batch.attention_mask, engine=engine)
    expected = token_score_norms(twin, *batch.args, batch.attention_mask, engine="reference")
    np.testing.assert_allclose(got.norm_sq, expected.norm_sq, atol=5e-6 * expected.norm_sq.max(), rtol=0)
    assert got.engine == engine and model.config._attn_implementation == "half_only"


@pytest.mark.parametrize("engine", ["generic", "reference"])
def test_experts_in_float64_do_not_run_by_products_that_take_none(sample, engine):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    model, batch = MixtralForCausalLM(config).eval(), sample["left"]
    single = token_score_norms(model, *batch.args, batch.attention_mask, engine=engine)
    double = token_score_norms(model.double(), *batch.args, batch.attention_mask, engine=engine)
    np.testing.assert_allclose(single.norm_sq, double.norm_sq, rtol=1e-3, atol=1e-5 * double.norm_sq.max())
    gram, expected = (
        group_gradient_gram(model, *batch.args, torch.ones(5, 1, 12), np.arange(5), batch.attention_mask, engine=e)
        for e in (engine, "reference")
    )
    np.testing.assert_allclose(gram, expected, atol=1e-6 * expected.max())


class Keyword(torch.nn.Module):
    """A model whose output layer is called by the name of its argument."""

    def __init__(self, model):
        super().__init__()
        self.config, self.model, self.lm_head = model.config, model.model, model.lm_head

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, logits_to_keep=0, **options):
        hidden = self.model(input_ids, **options).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(input=hidden[:, logits_to_keep]))


@pytest.mark.parametrize("scope", ["all", "lm_head"])
def test_an_output_layer_may_be_called_by_keyword(make_model, sample, scope):
    plain, batch = make_model("qwen2"), sample["left"]
    model, rest = Keyword(plain), {"attention_mask": batch.attention_mask, "scope": scope}
    rows, group = torch.ones(5, 1, 12), np.array([0, 0, 1, 1, 1])
    expected = group_gradient_gram(plain, *batch.args, rows, group, **rest)
    np.testing.assert_allclose(
        group_gradient_gram(model, *batch.args, rows, group, **rest), expected, rtol=1e-5, atol=1e-7 * expected.max()
    )
    for engine in ("generic", "reference"):
        found, exact = (token_score_norms(m, *batch.args, engine=engine, **rest).norm_sq for m in (model, plain))
        np.testing.assert_allclose(found, exact, rtol=2e-6)
    share, other = (
        gradient_attribution(m, *batch.args, rows[:, 0], method="difference", **rest).share for m in (model, plain)
    )
    np.testing.assert_allclose(share, other, rtol=1e-3, atol=1e-5 * np.abs(other).max())
