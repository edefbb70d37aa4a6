"""The Gram matrix from the gradients of a basis, block by block, against one backward pass per row."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from otb_analysis import gradients
from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients import group_gradient_gram
from otb_analysis.gradients.batch import forward
from otb_analysis.gradients.batch.forward import packed, packing_pays, padded, sampled_logprobs, tree_of
from otb_analysis.gradients.batch.inputs import Batch, Rollout, prepare
from otb_analysis.gradients.exact import gram
from otb_analysis.gradients.groups import blocks, group_gram, vocabulary
from otb_analysis.gradients.groups.group_gram import TOLERANCE, basis_of

GROUP = np.array([3, 3, 3, 1, 1, 8])
SHARED = [5, 2, 9, 4]
TEXTS = [
    [*SHARED, 7, 1, 3], [*SHARED, 7, 6, 2, 8, 3], [*SHARED, 11], [6, 6, 1, 2, 14], [6, 6, 1, 3, 3, 3, 5], [1, 16]
]  # fmt: skip
MASKS = [
    [0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 1, 1], [0, 1]
]  # fmt: skip


@pytest.fixture
def batch(make_sample):
    return make_sample(TEXTS, MASKS, "both")


def weights_of(rows=7, rank=3, seed=0):
    """Rows of given rank within each prompt, of very different lengths."""
    generator = np.random.default_rng(seed)
    basis = generator.normal(size=(6, rank, 12))
    mix = generator.normal(size=(rows, rank)) * 10.0 ** generator.integers(-3, 3, size=(rows, 1))
    return np.einsum("mr,nrl->nml", mix, basis)


def distance(found, expected):
    """Largest difference as a share of ‖g‖‖g'‖."""
    length = np.sqrt(np.einsum("mmpp->mp", expected))
    scale = length[:, None, :, None] * length[None, :, None, :]
    assert (found[scale == 0] == 0).all()
    return np.abs((found - expected)[scale > 0] / scale[scale > 0]).max()


def both(model, batch, weights, group=GROUP, **options):
    args = (model, *batch.args, weights, group, batch.attention_mask)
    return group_gradient_gram(*args, **options), group_gradient_gram(*args, engine="reference", **options)


def test_a_gram_matrix_of_a_basis_is_that_of_all_rows(case, batch):
    assert distance(*both(case, batch, weights_of())) < 1e-6


@pytest.mark.parametrize("bias", [False, True], ids=["sliced", "bias in scope"])
def test_the_output_layer_runs_on_some_tokens_at_a_time_unless_its_bias_is_measured(
    make_model, batch, monkeypatch, bias
):
    model, seen = make_model("qwen3", tied=False), []
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(17, dtype=torch.float64))
    monkeypatch.setattr(vocabulary, "SLICE_BYTES", 2 * 17 * vocabulary.LOGIT_BYTES)
    found, expected = both(model, batch, weights_of(), temperature=0.7)
    assert distance(found, expected) < 1e-6
    model.lm_head.register_forward_hook(lambda _, args, logits: seen.append(logits.flatten(0, -2).shape[0]))
    group_gradient_gram(model, *batch.args, weights_of(), GROUP, batch.attention_mask, temperature=0.7)
    assert (max(seen) > vocabulary.CHECKED) == bias


@pytest.mark.parametrize("scope", [r"layers\.1\.", r"layers\.0\.", "embed_tokens", r"model\.norm", "q_proj|up_proj"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_scope_has_its_own_gram_matrix(make_model, batch, scope, tied):
    assert distance(*both(make_model("qwen2", tied), batch, weights_of(), scope=scope)) < 1e-6


def test_a_temperature_enters_the_scores(make_model, batch):
    assert distance(*both(make_model("llama", False), batch, weights_of(), temperature=0.6)) < 1e-6


def test_float32_is_as_near_to_float64_as_plain_backward_passes_are(make_model, batch):
    exact = both(make_model("qwen3"), batch, weights_of())[1]
    found, plain = both(make_model("qwen3", dtype=torch.float32), batch, weights_of())
    assert distance(found, exact) < max(2e-6, 2 * distance(plain, exact))


def test_only_as_many_rows_are_measured_as_the_weights_have_rank(make_model, batch, monkeypatch):
    ranks = []

    def spy(weights, scale):
        ranks.append(len(basis_of(weights, scale).rows))
        return basis_of(weights, scale)

    monkeypatch.setattr(group_gram, "basis_of", spy)
    weights = weights_of(rows=30, rank=3)
    group_gradient_gram(make_model("qwen2"), *batch.args, weights, GROUP, batch.attention_mask)
    assert ranks == [3, 3, 1]  # a single sampled token spans one dimension; prompts in the order 1, 3, 8


def test_prompts_and_rows_of_zeros_have_products_of_zero(make_model, batch):
    weights = weights_of()
    weights[:, 2] = 0.0
    weights[GROUP == 1] = 0.0
    found, expected = both(make_model("qwen2"), batch, weights)
    assert not found[2].any() and not found[:, :, 0].any()
    assert distance(found, expected) < 1e-6
    assert not both(make_model("qwen2"), batch, np.zeros_like(weights))[0].any()


def test_a_prompt_without_a_sampled_token_keeps_its_place(make_model, make_sample):
    masks = [*MASKS[:5], [0, 0]]
    sample = make_sample(TEXTS, masks, "right")
    found, expected = both(make_model("gpt2"), sample, weights_of(), GROUP)
    assert found.shape == (7, 7, 3, 3) and distance(found, expected) < 1e-6


def test_no_gradient_reaches_the_padding_entry_of_an_embedding(make_model, batch):
    model = make_model("qwen2", True)
    model.get_input_embeddings().padding_idx = 6
    assert distance(*both(model, batch, weights_of())) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_slices_and_parts_of_blocks_add_up(make_model, batch, monkeypatch, family, tied):
    model = make_model(family, tied)
    whole, _ = both(model, batch, weights_of())
    monkeypatch.setattr(vocabulary, "ENTRY_BYTES", 1 << 11)
    monkeypatch.setattr("otb_analysis.gradients.exact.gram.GRADIENT_BYTES", 1 << 13)
    assert distance(both(model, batch, weights_of())[0], whole) < 1e-12


def test_rows_go_through_a_block_a_few_at_a_time_where_memory_is_short(make_model, batch, monkeypatch):
    model = make_model("llama")
    whole, _ = both(model, batch, weights_of())
    monkeypatch.setattr("otb_analysis.gradients.groups.layered.SIGNAL_BYTES", 1)
    assert distance(both(model, batch, weights_of())[0], whole) < 1e-6


@pytest.mark.parametrize("memory", [1 << 18, 1 << 17])
def test_passes_of_a_prompt_may_take_other_rows_at_once(memory, monkeypatch):
    length = 300
    ids = torch.randint(0, 17, (2, length), generator=torch.Generator().manual_seed(0))
    attention = torch.ones(2, length, dtype=torch.bool)
    attention[0, 40:] = False
    mask = attention.clone()
    mask[:, :2] = False
    weights = np.random.default_rng(0).normal(size=(2, 6, length))
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(1)
    args = (LlamaForCausalLM(config).double().eval(), ids, mask, weights, np.array([0, 0]), attention)
    expected = group_gradient_gram(*args, engine="reference")
    monkeypatch.setattr(group_gram, "BLOCK_COPIES", 10**12)  # a pass for each rollout
    monkeypatch.setattr("otb_analysis.gradients.groups.layered.SIGNAL_BYTES", memory)
    assert distance(group_gradient_gram(*args), expected) < 1e-6


def test_inputs_that_were_dropped_are_run_again(batch, monkeypatch):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    whole, _ = both(model, batch, weights_of())
    ran = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: ran.append(1))
    both(model, batch, weights_of())
    plain, ran[:] = len(ran), []
    monkeypatch.setattr("otb_analysis.gradients.groups.layered.INPUT_BYTES", 0)
    assert distance(both(model, batch, weights_of())[0], whole) < 1e-12
    assert len(ran) > plain  # of five blocks the inputs of 0, 2 and 4 are kept


def test_signals_that_do_not_fit_leave_the_matrix_to_whole_gradients(make_model, batch, monkeypatch, caplog):
    monkeypatch.setattr(group_gram, "free_bytes", lambda _device: 5_000)
    with caplog.at_level(logging.INFO):
        assert distance(*both(make_model("llama"), batch, weights_of())) < 1e-6
    assert "LlamaForCausalLM is not measured block by block: the signals of rollout " in caplog.text


# Rank times positions of prompts 1, 3 and 8: 3 · (4 + 6), 3 · (6 + 8 + 4), 1; of the rollouts 3 and 4 of the first by
# themselves 2 · 4 and 3 · 6, of 0, 1 and 2 of the second 3 · 6, 3 · 8 and 1 · 4. A bin holds half of what fits.
@pytest.mark.parametrize(
    ("fits", "rounds"),
    [
        (85, [[[3, 4], [0, 1, 2], [5]]]),
        (76, [[[3, 4], [0]], [[3, 4], [1], [2], [5]], [[0], [1], [2], [5]]]),  # bins of 38: 30 | 18 | 24, 4 and 1
        (51, [[[3], [4]], [[3], [0]], [[3], [1]], [[3], [2], [5]], [[4], [0]], [[4], [1]], [[4], [2], [5]],
              [[0], [1]], [[0], [2], [5]], [[1], [2], [5]]]),  # bins of 25: 8 | 18 | 18 | 24 | 4 and 1
    ],
)  # fmt: skip
def test_signals_that_do_not_fit_together_go_back_in_rounds_of_parts(case, batch, monkeypatch, caplog, fits, rounds):
    ran, run = [], group_gram._block_by_block

    def spy(prepared, structure, some, processes):
        ran.append([[rollout.row for rollout in part.rollouts] for part in some])
        return run(prepared, structure, some, processes)

    monkeypatch.setattr(group_gram, "_block_by_block", spy)
    # Numbers of 8 bytes in rows of 16, at a block's output and at its input; half of what is free is for them.
    monkeypatch.setattr(group_gram, "free_bytes", lambda _device: 2 * fits * 2 * 8 * 16)
    with caplog.at_level(logging.INFO):
        found, expected = both(case, batch, weights_of())
    assert ran == rounds
    assert distance(found, expected) < 1e-6
    assert (f"in {len(rounds)} rounds of passes, because the signals" in caplog.text) == (len(rounds) > 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_long_padded_rows_go_through_tiled_attention(make_model, make_sample, attention, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(17, (length,), generator=generator).tolist() for length in (140, 133)]
    sample = make_sample(texts, [[0] * (len(t) - 3) + [1] * 3 for t in texts], "both", length=142)
    model = make_model("qwen2")
    model.config.max_position_embeddings = 256
    model.set_attn_implementation(attention)
    monkeypatch.setattr("otb_analysis.gradients.batch.forward.packing_pays", lambda tree: False)
    weights = np.random.default_rng(0).normal(size=(2, 3, 142))
    assert distance(*both(model, sample, weights, np.array([0, 0]))) < 1e-6


def test_frozen_parameters_are_left_out(make_model, batch):
    model = make_model("llama", False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "norm" in name)
    assert distance(*both(model, batch, weights_of())) < 1e-6


def gemma():
    config = Gemma2Config(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, sliding_window=5, final_logit_softcapping=3.0, max_position_embeddings=64,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def mistral():
    config = MistralConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, max_position_embeddings=64,
    )  # fmt: skip
    return MistralForCausalLM(config)


@pytest.mark.parametrize("make", [gemma, mistral])
def test_windows_and_capped_logits_give_the_same_matrix_another_way(make, batch):
    torch.manual_seed(0)
    model = make().double().eval()
    assert distance(*both(model, batch, weights_of())) < 1e-6
    prepared = prepare(model, Batch(*batch.args, batch.attention_mask), "all", 1.0)
    long = tuple(r for r in prepared.rollouts if GROUP[r.row] == 3)
    assert "position_ids" not in forward.layout_of(prepared, long).inputs  # a window reaches over less than a rollout


def cohere():
    config = CohereConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        logit_scale=0.25, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return CohereForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(gemma, "its input embedding is a Gemma2TextScaledWordEmbedding"), (cohere, "its logits are not what its output")],
)
def test_a_model_that_does_more_at_its_ends_is_formed_whole_and_the_reason_is_logged(make, reason, batch, caplog):
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    with caplog.at_level(logging.INFO):
        assert distance(*both(model, batch, weights_of())) < 1e-6
    assert f"{type(model).__name__} is not measured block by block: {reason}" in caplog.text


class Skips(torch.nn.Module):
    """Adds what one block reads from a parameter outside of it, past the block's own input."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.past = inner, torch.nn.Parameter(torch.ones(16, dtype=torch.float64))

    def forward(self, hidden, *args, **kwargs):
        return self.inner(hidden * self.past, *args, **kwargs)


def test_a_block_that_is_another_module_is_followed_all_the_same(make_model, batch):
    model = make_model("llama")
    model.model.layers[1] = Skips(model.model.layers[1])
    assert distance(*both(model, batch, weights_of())) < 1e-6


def test_a_gradient_that_reaches_a_block_by_another_way_is_noticed(make_model, batch, caplog):
    model = make_model("llama")
    scale = torch.nn.Parameter(torch.full((), 1.3, dtype=torch.float64))
    model.register_parameter("scale", scale)
    model.model.layers[0].register_forward_hook(lambda _m, _a, output: output * scale)  # no block's own parameter
    with caplog.at_level(logging.INFO):
        assert distance(*both(model, batch, weights_of())) < 1e-6
    assert "parameter scale has squared score norms" in caplog.text


def test_a_model_is_left_as_it_was(make_model, batch):
    model = make_model("qwen3")
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with torch.no_grad():
        group_gradient_gram(model, *batch.args, weights_of(), GROUP, batch.attention_mask)
        assert not torch.is_grad_enabled()
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_weights_that_are_not_finite_name_their_rollout(make_model, batch):
    model = make_model("qwen2")
    with torch.no_grad():
        model.model.embed_tokens.weight[14] = torch.inf
    with pytest.raises(NonFiniteError, match="logits are not finite at rollout"):
        group_gradient_gram(model, *batch.args, weights_of(), GROUP, batch.attention_mask)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "llama"])
def test_packed_rollouts_have_the_log_probabilities_of_padded_ones(make_model, batch, family):
    prepared = prepare(make_model(family), Batch(*batch.args, batch.attention_mask), "all", 1.0)
    some = tuple(r for r in prepared.rollouts if GROUP[r.row] == 3)
    tree = tree_of(some)
    assert packing_pays(tree)
    layout = packed(some, tree, torch.float64)
    # What all read (4), 7 and 1 of the first rollout, 6 2 8 of the second behind the same 7; the third reads no more.
    assert layout.ids.tolist() == [[5, 2, 9, 4, 7, 1, 6, 2, 8]]
    assert layout.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 5, 6, 7]]
    assert (layout.inputs["attention_mask"][0, 0, 4:] == 0).int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1, 1, 1],
    ]  # fmt: skip
    with torch.no_grad():
        one, many = (sampled_logprobs(prepared, some, x) for x in (layout, padded(some)))
    torch.testing.assert_close(one, many, rtol=0, atol=1e-6)


def text(*ids):
    return Rollout(0, torch.tensor(ids), torch.tensor([len(ids) - 1]), np.zeros(1, int))


def test_a_tree_holds_every_beginning_once():
    tree = tree_of([text(4, 4, 1), text(4, 2), text(4, 4, 1, 3), text(7)])
    assert tree.token.tolist() == [4, 4, 1, 2, 3, 7] and tree.parent.tolist() == [-1, 0, 1, 0, 2, -1]
    assert tree.depth.tolist() == [0, 1, 2, 1, 3, 0]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 3], [0, 1, 2, 4], [5]]
    assert tree.read.tolist() == [0, 1, 2]


def test_scores_that_are_sampled_twice_are_measured_once_and_counted_twice(make_model, make_sample, monkeypatch):
    # Rollouts 0 and 2 are the same, and 1 parts from them at its last token; padding differs.
    sample = make_sample([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5]], [[0, 0, 1, 1, 1]] * 3, "both")
    model = make_model("qwen2", dtype=torch.float64)
    measured = []
    engine = gradients.ENGINES["generic"]

    def spy(prepared, asked):
        measured.append([r.columns.tolist() for r in prepared.rollouts])
        return engine.norms(prepared, asked)

    monkeypatch.setitem(gradients.ENGINES, "generic", replace(engine, norms=spy))
    found = gradients.token_score_norms(model, *sample.args, sample.attention_mask, engine="generic")
    plain = gradients.token_score_norms(model, *sample.args, sample.attention_mask, engine="reference")
    assert [len(columns) for columns in measured[0]] == [3, 1]
    np.testing.assert_allclose(found.norm_sq, plain.norm_sq, rtol=2e-6)
    np.testing.assert_allclose(found.logprob, plain.logprob, rtol=2e-6)
    weights = np.random.default_rng(0).normal(size=(3, 2, 12))
    weights[2, 0, sample.mask[2]] = weights[0, 0, sample.mask[0]]
    assert distance(*both(model, sample, weights, np.array([0, 0, 0]))) < 1e-6
    for rows in (weights, weights[:, :1]):
        norms = [
            gradients.weighted_score_norms(model, *sample.args, rows, sample.attention_mask, engine=e)
            for e in ("fast", "reference")
        ]
        np.testing.assert_allclose(*norms, rtol=2e-6)


def test_equal_rollouts_with_opposite_weights_have_no_gradient(make_model, make_sample):
    sample = make_sample([[1, 2, 3, 4], [1, 2, 3, 4], [1, 5, 6, 7]], [[0, 0, 1, 1]] * 3, "right")
    weights = np.zeros((3, 2, 12))
    weights[0, :, 2:4], weights[1, :, 2:4], weights[2, 1, 3] = 1.0, -1.0, 1.0
    found, expected = both(make_model("qwen2"), sample, weights, np.array([0, 0, 1]))
    assert not found[:, :, 0].any() and np.abs(expected[:, :, 0]).max() < 1e-12
    np.testing.assert_allclose(found[1, 1, 1, 1], expected[1, 1, 1, 1], rtol=1e-6)


def test_a_long_row_is_not_packed():
    def texts(count):
        return tree_of([text(*[0] * 100, *[1 + i] * 900) for i in range(count)])

    assert packing_pays(texts(4)) and not packing_pays(texts(16))
    assert not packing_pays(texts(1))  # nothing is read twice


def test_a_basis_gives_every_row_back_however_short(make_model):
    generator = np.random.default_rng(1)
    exact = generator.normal(size=(9, 4)) @ generator.normal(size=(4, 50))
    rows = exact * 10.0 ** generator.integers(-12, 12, size=(9, 1))
    basis = basis_of(rows, np.ones(50))
    assert basis.rows.shape == (4, 50)
    missed = np.linalg.norm(basis.mix @ basis.rows - rows, axis=1) / np.linalg.norm(rows, axis=1)
    assert missed.max() <= TOLERANCE


def test_a_basis_counts_errors_by_the_length_of_the_scores():
    # Two rows that differ at one token only, by 1e-6 of their length: the same direction where that token's score is
    # nothing, two where it is a thousand times the others'.
    rows = np.ones((2, 100))
    rows[1, 0] += 1e-5
    scale = np.ones(100)
    scale[0] = 1e-4
    assert len(basis_of(rows, scale).rows) == 1
    scale[0] = 1e3
    assert len(basis_of(rows, scale).rows) == 2


def test_sure_tokens_keep_a_scale_above_zero():
    basis = basis_of(np.eye(3), np.array([1.0, 0.0, 1e-30]))
    assert np.isfinite(basis.rows).all() and len(basis.rows) == 3
    assert len(basis_of(np.zeros((2, 3)), np.ones(3)).rows) == 0
    assert len(basis_of(np.ones((2, 3)), np.zeros(3)).rows) == 1


def products_error(rows):
    """Return the largest error of the products of gradients over their lengths."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    gram.add_products(total, list(rows.split(60)))
    exact = (rows.double() @ rows.double().T).numpy()
    length = np.sqrt(exact.diagonal())
    assert torch.allclose(total, total.T, rtol=1e-12, atol=SHORT_SUMS * float(length.max()) ** 2)
    return np.abs((total.numpy() - exact) / (length[:, None] * length)).max()


SHORT_SUMS = gram.SHORT**0.5 * 2**-24
"""What a sum of so many products is off by in float32 where roundings are as good as random, on any processor."""


@pytest.mark.parametrize(("count", "error"), [(gram.ROWS - 1, 1e-12), (gram.ROWS, SHORT_SUMS), (150, SHORT_SUMS)])
@pytest.mark.parametrize("power", [0, 4, 16])
def test_products_of_float32_gradients_are_those_of_float64_up_to_short_sums_where_they_are_many(count, error, power):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, 40_000, generator=generator) * torch.rand(40_000, generator=generator).pow(power)
    assert products_error(rows) < error


def test_products_of_longer_float32_gradients_are_no_further_off():
    """As they would be if float32 sums went over the whole of them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(gram.ROWS, 400_000, generator=generator)
    assert products_error(rows) < products_error(rows[:, :40_000])


def test_products_of_float32_gradients_stay_in_float64_where_torch_may_round_them(monkeypatch):
    rows = torch.randn(gram.ROWS, 4_096, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    total = torch.zeros(gram.ROWS, gram.ROWS, dtype=torch.float64)
    gram.add_products(total, list(rows.split(60)))
    torch.testing.assert_close(total, rows.double() @ rows.double().T, rtol=1e-12, atol=1e-12 * 4_096)


def test_blocks_are_the_largest_list_of_modules(make_model, batch):
    model = make_model("qwen2")
    prepared = prepare(model, Batch(*batch.args, batch.attention_mask), "all", 1.0)
    structure = blocks.structure_of(prepared)
    assert structure.blocks == tuple(model.model.layers) and structure.outside == ("model.norm.weight",)
    assert structure.ends == ("model.embed_tokens.weight",) * 2


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2", "cohere"])
def test_rollouts_of_a_prompt_run_in_parts_where_memory_is_short(make_model, batch, monkeypatch, family):
    # Gemma 2 caps its logits and Cohere scales them, so that their own are taken instead of slices.
    others = {"gemma2": gemma, "cohere": cohere}
    torch.manual_seed(0)
    model = others[family]().double().eval() if family in others else make_model(family, dtype=torch.float64)
    weights, passes = weights_of(), list[list[int]]()
    scope = {"scope": "layers"} if family in others else {}
    whole, expected = both(model, batch, weights, **scope)
    add = group_gram.Layered.add

    def spy(layered, parts, rows_of):
        passes.append([len(rollouts) for rollouts, _ in parts])
        return add(layered, parts, rows_of)

    monkeypatch.setattr(group_gram.Layered, "add", spy)
    monkeypatch.setattr(group_gram, "BLOCK_COPIES", 10**9)
    found = group_gradient_gram(model, *batch.args, weights, GROUP, batch.attention_mask, **scope)
    assert passes[-3:] == [[1, 1], [1, 1, 1], [1]]
    assert distance(found, expected) < 2e-6 and distance(whole, expected) < 2e-6


def test_rollouts_are_cut_in_their_order_at_padded_positions(make_model, batch, monkeypatch):
    prepared = prepare(make_model("llama"), Batch(*batch.args, batch.attention_mask), "all", 1.0)
    prompt = group_gram.prompts_of(prepared, weights_of(), np.zeros(6, int))[0]
    assert [r.length for r in prompt.rollouts] == [6, 8, 4, 4, 6, 1]
    # One packed row holds all where its positions fit, fewer than the 6 · 8 = 48 padded ones.
    assert prompt.passes(47) == [prompt.rollouts] and len(prompt.passes(10)) > 1
    monkeypatch.setattr(group_gram, "packing_pays", lambda tree: False)
    # 2 · 8 = 16 positions fit, 3 · 8 do not; 3 · 6 do not, 2 · 6 do
    assert [[r.row for r in some] for some in prompt.passes(16)] == [[0, 1], [2, 3], [4, 5]]
    assert [len(some) for some in prompt.passes(3)] == [1] * 6 and len(prompt.passes(48)) == 1 < len(prompt.passes(47))
