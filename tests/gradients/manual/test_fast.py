import logging
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients import group_gradient_gram, token_score_norms, weighted_score_norms
from otb_analysis.gradients.exact import gram
from otb_analysis.gradients.manual import backward, fast
from otb_analysis.gradients.manual import forward as activations

# Hugging Face normalises in float32 inside a float64 model, forward and backward; the backward pass by hand does not
# round there, which leaves 3e-7.
CLOSE = {"rtol": 2e-6, "atol": 1e-12}
SHAPE = {
    "vocab_size": 17,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
norms = partial(token_score_norms, engine="fast", path=True)
twin = partial(token_score_norms, engine="reference", path=True)


def moved(model, dtype=torch.float64):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def mistral(tied=True, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    options = SHAPE | {"head_dim": 8, "sliding_window": 7, "tie_word_embeddings": tied} | changes
    return moved(MistralForCausalLM(MistralConfig(**options)), dtype)


LONG = 41
"""Longer than a block and than a layer is wide."""
FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.fixture(params=[(f, t) for f in FAMILIES for t in (True, False)], ids=lambda c: f"{c[0]}-{c[1]}")
def case(request, make_model):
    family, tied = request.param
    return mistral(tied) if family == "mistral" else make_model(family, tied)


@pytest.fixture
def agree(agree_with_reference):
    return partial(agree_with_reference, "fast")


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_token_and_path_norms_are_the_reference_ones(case, sample, side, agree):
    # Ragged prompts, two turns, a completion of one token and a rollout without any sampled token.
    agree(case, sample[side])


def test_norms_of_rollouts_longer_than_a_block_and_than_a_layer_is_wide_are_the_reference_ones(case, agree, long_batch):
    agree(case, long_batch(LONG))


@pytest.mark.parametrize("length", [2, 13, 17, 33])
def test_coordinates_serve_prompts_of_every_length(make_model, make_sample, length, agree):
    # Layers are 16 and 24 wide: R is square, then wider than tall, then replaced by the inputs themselves.
    text = torch.randint(17, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    agree(make_model("qwen3"), make_sample([text], [[0] + [1] * (length - 1)], "right", length=length))


def test_weighted_norms_are_the_reference_ones(case, sample, long_batch):
    for batch in (sample["both"], long_batch(LONG)):
        n, length = batch.mask.shape
        weights = torch.randn(n, 11, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weights[:, 2] = 0.0
        got, expected = (
            weighted_score_norms(case, *batch.args, weights, batch.attention_mask, engine=engine)
            for engine in ("fast", "reference")
        )
        np.testing.assert_allclose(got, expected, **CLOSE)
        assert (got[:, 2] == 0).all()


@pytest.mark.parametrize(
    "scope",
    ["lm_head", "mlp", "embed", r"layers\.2\.", r"layers\.1\.", "norm", "bias|lm_head", "self_attn", "[kq]_(proj|norm)",
     "up_proj", r"layers\.[12].*(q_proj|o_proj)", "v_proj"],
)  # fmt: skip
def test_every_scope_is_followed(make_model, sample, scope, agree):
    # Between them these have every kind of parameter: norms on heads, biases, an output layer of its own, three layers.
    models = [make_model("qwen3"), make_model("qwen2", tied=False), mistral()]
    named = [model for model in models if any(re.search(scope, name) for name, _ in model.named_parameters())]
    assert named or scope == "lm_head"
    for model in models if scope == "lm_head" else named:
        agree(model, sample["left"], scope=scope)


def test_frozen_parameters_do_not_count(make_model, sample, agree):
    model, batch = make_model("llama"), sample["left"]
    whole = norms(model, *batch.args, batch.attention_mask).norm_sq
    for parameter in (model.model.layers[0].self_attn.k_proj.weight, model.model.layers[1].mlp.gate_proj.weight):
        parameter.requires_grad_(False)
    agree(model, batch)
    assert (norms(model, *batch.args, batch.attention_mask).norm_sq[batch.mask] < whole[batch.mask]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"num_hidden_layers": 1},
        {"hidden_act": "gelu"},
        {"head_dim": 6},
        {"pad_token_id": 3},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0,
                             "original_max_position_embeddings": 16}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 100.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    ],
    ids=lambda c: ",".join(c) + str(next(iter(c.values())))[:24],
)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_what_a_configuration_may_change_is_followed(changes, tied, agree, long_batch):
    torch.manual_seed(0)
    agree(moved(LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": tied} | changes))), long_batch(LONG))


def test_sliding_windows_of_some_layers_are_followed(agree, long_batch):
    # Layers 1 and 2 of 3 see five positions.
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    model, batch = moved(Qwen2ForCausalLM(config)), long_batch(LONG)
    agree(model, batch)
    model.config.layer_types = ["full_attention"] * 3
    wide = norms(model, *batch.args, batch.attention_mask)
    agree(model, batch)
    model.config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    assert np.abs(wide.norm_sq - norms(model, *batch.args, batch.attention_mask).norm_sq).max() > 1e-3


def test_a_mistral_without_a_window_sees_everything(agree, long_batch):
    agree(mistral(sliding_window=None), long_batch(LONG))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_output_use_of_a_tied_matrix_adds_to_its_input_use(make_model, sample, family):
    # ‖E + O‖² = ‖E‖² + ‖O‖² + 2⟨E, O⟩: the cross term is what untied copies of the same weights do not have.
    tied, untied, batch = make_model(family), make_model(family, tied=False), sample["left"]
    untied.load_state_dict(tied.state_dict())
    whole = norms(tied, *batch.args, batch.attention_mask, scope="embed_tokens").norm_sq
    parts = sum(norms(untied, *batch.args, batch.attention_mask, scope=s).norm_sq for s in ("embed_tokens", "^lm_head"))
    np.testing.assert_allclose(
        whole, twin(tied, *batch.args, batch.attention_mask, scope="embed_tokens").norm_sq, **CLOSE
    )
    assert np.abs(whole - parts).max() > 1e-3 * whole.max()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_norms_follow_the_temperature(make_model, sample, temperature, agree):
    agree(make_model("qwen2"), sample["left"], temperature=temperature)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_float32_is_within_5e_6_of_the_largest_norm(make_model, family, tied, long_batch):
    batch = long_batch(LONG)
    model = mistral(tied, torch.float32) if family == "mistral" else make_model(family, tied, dtype=torch.float32)
    single = norms(model, *batch.args, batch.attention_mask)
    double = twin(model.double(), *batch.args, batch.attention_mask)
    for name in ("norm_sq", "path_norm_sq"):
        got, expected = getattr(single, name), getattr(double, name)
        assert np.abs(got - expected).max() < 5e-6 * expected.max()
        assert abs(got.sum() - expected.sum()) < 5e-6 * expected.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_measured_in_float32(make_model, dtype, long_batch):
    # The same rounded weights in float64: only the weights are coarse, the arithmetic is not.
    batch = long_batch(LONG)
    half = norms(make_model("qwen3", dtype=dtype), *batch.args, batch.attention_mask)
    full = twin(make_model("qwen3").to(dtype).double(), *batch.args, batch.attention_mask)
    np.testing.assert_allclose(half.norm_sq, full.norm_sq, atol=5e-6 * full.norm_sq.max())


def test_a_model_that_bfloat16_rounds_by_tenths_of_a_nat_is_measured(make_model, sample):
    # Logits of some dozens, as a pretrained model has on random text: the model's own passes round them by tenths.
    batch, half = sample["left"], make_model("qwen3", dtype=torch.bfloat16)
    half.model.norm.weight.data.mul_(100)
    got = norms(half, *batch.args, batch.attention_mask)
    full = twin(half.double(), *batch.args, batch.attention_mask)
    np.testing.assert_allclose(got.norm_sq, full.norm_sq, atol=2e-5 * full.norm_sq.max())


def test_padding_is_never_read_and_rollouts_do_not_see_each_other(make_model, sample):
    model, batch = make_model("qwen3"), sample["both"]
    whole = norms(model, *batch.args, batch.attention_mask)
    order = [4, 2, 0, 3, 1]
    ids = batch.input_ids.masked_fill(batch.attention_mask == 0, -7)[order]
    shuffled = norms(model, ids, batch.mask[order], batch.attention_mask[order])
    np.testing.assert_array_equal(shuffled.path_norm_sq, whole.path_norm_sq[order])


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
    assert not frozen.requires_grad
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


def test_weights_that_change_are_read_again(make_model, sample, agree):
    model, batch = make_model("llama"), sample["left"]
    agree(model, batch)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    agree(model, batch)


def test_eager_attention_is_followed(make_model, agree, long_batch):
    model, batch = make_model("qwen3"), long_batch(LONG)
    model.set_attn_implementation("eager")
    agree(model, batch)


class Scaled(nn.Linear):
    def forward(self, x):
        return 1.5 * super().forward(x)


def gain(x):
    return 1.5 * x


def wrapped(model):
    model.model.layers[0].mlp.up_proj = Scaled(16, 24, bias=False).double()


def hooked(model):
    model.model.layers[1].register_forward_hook(lambda *_: None)


def replaced(model):
    model.model.norm.forward = gain


def parametrised(model):
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)


def shared(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def repeated(model):
    model.model.layers[1] = model.model.layers[0]


def swapped(model):
    model.model.layers[0].input_layernorm = nn.LayerNorm(16).double()


def flex(model):
    model.config._attn_implementation = "flex_attention"


def rescaled(model):
    model.model.embed_tokens.scale_grad_by_freq = True


def headless(model):
    model.lm_head = nn.Sequential(model.lm_head)


ODD = {
    wrapped: "layers.0.mlp.up_proj is a Scaled",
    hooked: "layers.1 has a hook",
    replaced: "forward method of model.norm was replaced",
    parametrised: "o_proj is a Parametrized",
    shared: "up_proj.weight is shared by several layers",
    repeated: "used more than once",
    swapped: "input_layernorm is a LayerNorm",
    flex: "attention is 'flex_attention'",
    rescaled: "embed_tokens rescales",
    headless: "lm_head is a Sequential",
}


@pytest.mark.parametrize("alter", ODD, ids=lambda f: f.__name__)
def test_what_is_out_of_the_ordinary_is_refused_also_after_a_first_use(make_model, sample, alter):
    model, batch = make_model("llama", tied=False), sample["left"]
    norms(model, *batch.args, batch.attention_mask)
    alter(model)
    with pytest.raises(InputError, match=ODD[alter]):
        norms(model, *batch.args, batch.attention_mask)


def test_global_hooks_and_autocast_are_refused(make_model, sample):
    model, batch = make_model("llama"), sample["left"]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="has a hook"):
        norms(model, *batch.args, batch.attention_mask)
    handle.remove()
    with torch.autocast("cpu"), pytest.raises(InputError, match="autocast is on"):
        norms(model, *batch.args, batch.attention_mask)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # from inside peft
def test_other_families_and_adapters_are_refused_and_auto_says_why(make_model, caplog, long_batch):
    model, batch = make_model("gpt2"), long_batch(LONG)
    with pytest.raises(InputError, match="GPT2LMHeadModel has no hand-written"):
        norms(model, *batch.args, batch.attention_mask)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert token_score_norms(model, *batch.args, batch.attention_mask).engine == "generic"
    assert caplog.text.count('is not measured by engine="fast"') == 1
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(InputError, match="PeftModelForCausalLM has no hand-written"):
        norms(peft.get_peft_model(make_model("qwen2"), config).eval(), *batch.args, batch.attention_mask)


def test_auto_is_fast_where_it_can_be(make_model, long_batch):
    batch = long_batch(LONG)
    assert token_score_norms(make_model("qwen3"), *batch.args, batch.attention_mask).engine == "fast"


def test_a_class_that_computes_something_else_is_found_out_by_the_probe(make_model, sample, monkeypatch):
    # Patched on the class, as kernel libraries do: no instance looks altered.
    model, batch = make_model("llama"), sample["left"]
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(
        kind, "forward", lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
    )
    with pytest.raises(InputError, match="log-probabilities by hand are"):
        norms(model, *batch.args, batch.attention_mask)


def test_a_backward_pass_that_differs_is_found_out_by_the_probe(make_model, sample, monkeypatch):
    # The same values forward, but no gradient through the gate.
    model, batch = make_model("llama"), sample["left"]
    kind = type(model.model.layers[0].mlp)
    forward = lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x).detach()) * self.up_proj(x))  # noqa: E731
    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(InputError, match="has squared score norms"):
        norms(model, *batch.args, batch.attention_mask)


def test_non_finite_logits_name_rollout_and_token(make_model, long_batch):
    model, batch = make_model("qwen2"), long_batch(LONG)
    fresh = make_model("qwen2", seed=1)
    norms(model, *batch.args, batch.attention_mask)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = fresh.model.embed_tokens.weight[7] = torch.nan
    with pytest.raises(InputError, match="not finite on a probe"):
        norms(fresh, *batch.args, batch.attention_mask)
    with pytest.raises(NonFiniteError, match="rollout 0, token"):
        norms(model, *batch.args, batch.attention_mask)


def test_the_gram_matrix_is_the_same_from_every_engine(make_model, sample):
    model, batch = make_model("qwen2"), sample["left"]
    weights, group = torch.ones(5, 2, 12), torch.tensor([0, 0, 1, 1, 1])
    grams = [
        group_gradient_gram(model, *batch.args, weights, group, batch.attention_mask, engine=engine)
        for engine in ("auto", "fast", "reference")
    ]
    length = np.sqrt(np.einsum("mmpp->mp", grams[-1]))
    scale = length[:, None, :, None] * length[None, :, None, :] + 1e-12
    assert all((np.abs(gram - grams[-1]) / scale).max() < 1e-6 for gram in grams)


def test_blocks_of_any_size_give_the_same_norms(make_model, monkeypatch, long_batch):
    model, batch = make_model("qwen3"), long_batch(LONG)
    whole = norms(model, *batch.args, batch.attention_mask)
    monkeypatch.setattr(fast, "CACHE_BYTES", 0)
    for size in (1, 5, 64):
        monkeypatch.setattr(fast, "BLOCK", size)
        got = norms(model, *batch.args, batch.attention_mask)
        np.testing.assert_allclose(got.path_norm_sq, whole.path_norm_sq, **CLOSE)


@pytest.mark.parametrize("size", [0, 7])  # queries in the longest slice, one where there is no room
def test_attention_slices_of_any_length_give_the_same_norms(make_model, monkeypatch, size, agree, long_batch):
    model, batch = make_model("llama"), long_batch(LONG)
    monkeypatch.setattr(backward, "SCORE_BYTES", 4 * 16 * 41 * 8 * size)
    monkeypatch.setattr(activations, "KEPT_BYTES", 0)
    monkeypatch.setattr(activations, "SLICE_BYTES", 4 * 41 * 8 * size)
    agree(model, batch)


def test_a_llama_has_no_window_whatever_its_configuration_says(agree, long_batch):
    # A window longer than the probe, which only Mistral and Qwen models read.
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, sliding_window=14, layer_types=["sliding_attention"] * 3)
    agree(moved(LlamaForCausalLM(config)), long_batch(LONG))


def test_a_class_patched_after_the_first_use_is_found_out(make_model, sample, monkeypatch, agree):
    model, batch = make_model("llama"), sample["left"]
    norms(model, *batch.args, batch.attention_mask)
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(
        kind, "forward", lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
    )
    with pytest.raises(InputError, match="log-probabilities by hand are"):
        norms(model, *batch.args, batch.attention_mask)
    monkeypatch.undo()
    agree(model, batch)


def test_one_model_after_another_and_the_same_in_another_dtype_are_measured_anew(make_model, agree, long_batch):
    batch = long_batch(LONG)
    first, second = make_model("qwen3"), make_model("qwen3", seed=1)
    for model in (first, second, first):
        agree(model, batch)
    half = norms(first.bfloat16(), *batch.args, batch.attention_mask)
    back = twin(first.double(), *batch.args, batch.attention_mask)  # the rounded weights in float64
    np.testing.assert_allclose(half.norm_sq, back.norm_sq, atol=5e-6 * back.norm_sq.max())
    agree(first, batch)


def test_parameters_frozen_and_freed_between_calls_are_followed(make_model, sample, agree):
    model, batch = make_model("qwen2"), sample["both"]
    whole = norms(model, *batch.args, batch.attention_mask).norm_sq
    for pattern in ("embed", "layers.0", "layers.1", "self_attn"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(pattern not in name)
        agree(model, batch)
    model.requires_grad_(True)
    np.testing.assert_array_equal(norms(model, *batch.args, batch.attention_mask).norm_sq, whole)


def test_holes_in_the_attention_mask_are_closed(make_model):
    # The same three tokens, with and without something unreadable between them.
    model = make_model("llama")
    ids, real = torch.tensor([[3, -9, 5, 99, 7]]), torch.tensor([[1, 0, 1, 0, 1]])
    mask = torch.tensor([[0, 0, 1, 0, 1]], dtype=torch.bool)
    got = norms(model, ids, mask, real)
    plain = norms(model, ids[real.bool()][None], mask[real.bool()][None])
    np.testing.assert_array_equal(got.path_norm_sq[real.bool().numpy()], plain.path_norm_sq[0])


@pytest.mark.parametrize("engine", ["fast", "generic", "reference"])
def test_tensors_made_in_inference_mode_are_measured_there(make_model, sample, engine):
    model, batch = make_model("qwen3"), sample["left"]
    expected = token_score_norms(model, *batch.args, batch.attention_mask, engine=engine)
    with torch.inference_mode():
        given = [x.clone() for x in (*batch.args, batch.attention_mask)]
        got = token_score_norms(model, *given, engine=engine)
        made_there = make_model("qwen3")
    with pytest.raises(InputError, match=r"made inside torch\.inference_mode"):
        token_score_norms(made_there, *batch.args, batch.attention_mask, engine=engine)
    np.testing.assert_array_equal(got.norm_sq, expected.norm_sq)


class _Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that was made inside."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return made


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True], ids=["path norms", "weighted rows"])
def test_nothing_grows_with_the_square_of_the_length(make_model, monkeypatch, rows):
    model = make_model("llama", dtype=torch.float32)
    model.config.max_position_embeddings = 4096
    monkeypatch.setattr(activations, "SLICE_BYTES", 1 << 12)
    monkeypatch.setattr(activations, "KEPT_BYTES", 1 << 12)
    monkeypatch.setattr(backward, "SCORE_BYTES", 1 << 12)
    monkeypatch.setattr(gram, "GRAM_BYTES", 1 << 12)
    largest = []
    for length in (400, 800):
        ids = torch.randint(17, (1, length), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, : 1 if rows else length - 9] = False
        with _Largest() as made:
            if rows:
                weighted_score_norms(model, ids, mask, torch.ones(1, 1, length), engine="fast")
            else:
                token_score_norms(model, ids, mask, engine="fast", path=True)
        largest.append(made.numel)
    assert largest[1] <= 2.1 * largest[0]
