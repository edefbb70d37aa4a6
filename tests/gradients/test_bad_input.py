"""Every public function refuses the same bad batches and models, each with one sentence."""

import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError
from otb_analysis.gradients import (
    batch_gradient,
    gradient_attribution,
    gradient_sketch,
    group_gradient_gram,
    sampled_score_norms,
    signal_noise,
    sketch_score_norms,
    token_score_norms,
    weighted_score_norms,
)

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
GROUP = torch.tensor([0, 1])
ROWS, ROW = torch.ones(2, 2, 4), torch.ones(2, 4)

FUNCTIONS = {
    "token_score_norms": lambda m, ids, mask, real: token_score_norms(m, ids, mask, real).norm_sq,
    "weighted_score_norms": lambda m, ids, mask, real: weighted_score_norms(m, ids, mask, ROWS, real),
    "group_gradient_gram": lambda m, ids, mask, real: group_gradient_gram(m, ids, mask, ROWS, GROUP, real),
    "sketch_score_norms": lambda m, ids, mask, real: sketch_score_norms(m, ids, mask, real, directions=2).norm_sq,
    "sampled_score_norms": lambda m, ids, mask, real: sampled_score_norms(m, ids, mask, real, tokens=9).norm_sq,
    "gradient_sketch": lambda m, ids, mask, real: gradient_sketch(m, ids, mask, ROWS, GROUP, real, dim=8),
    "gradient_attribution": lambda m, ids, mask, real: gradient_attribution(m, ids, mask, ROW, real).share,
    "signal_noise": lambda m, ids, mask, real: signal_noise(m, ids, mask, ROW, GROUP, real).signal,
    "batch_gradient": lambda m, ids, mask, real: batch_gradient(m, ids, mask, ROW, real)["model.norm.weight"].numpy(),
}


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


@pytest.fixture
def model(make_model):
    return make_model("qwen2", dtype=torch.float32)


def refuses(match, function, *args):
    with pytest.raises(InputError, match=match) as caught:
        function(*args)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_good_batch_is_measured(function, model):
    found = function(model, IDS, MASK, None)
    assert np.isfinite(found).all() and np.any(found != 0)


@pytest.mark.parametrize(
    ("said", "ids", "mask", "real"),
    [
        (r"mask has shape \(2, 3\) but input_ids has shape \(2, 4\)", IDS, MASK[:, 1:], None),
        (r"attention_mask has shape \(1, 4\) but input_ids", IDS, MASK, torch.ones(1, 4)),
        (r"input_ids has shape \(4,\); pass one row per rollout", IDS[0], MASK[0], None),
        ("rollout 1, token 0, but that is the first token", IDS, MASK | (GROUP[:, None] == 1), None),
        ("rollout 0, token 3, but that is padding", IDS, MASK, torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])),
        ("rollout 0 holds 17 but the model's vocabulary has 17", IDS + 13, MASK, None),
        ("input_ids is a ndarray; pass a torch tensor", IDS.numpy(), MASK, None),
        ("mask is a NoneType; pass a torch tensor", IDS, None, None),
        ("attention_mask is a list; pass a torch tensor", IDS, MASK, [[1, 1, 1, 1]] * 2),
    ],
    ids=["mask", "attention_mask", "input_ids", "first", "padding", "vocabulary", "array", "none", "list"],
)
def test_a_batch_that_does_not_fit_is_refused(function, model, said, ids, mask, real):
    refuses(said, function, model, ids, mask, real)


def test_active_dropout_is_refused(function, model):
    model.train().model.layers[0].self_attn.attention_dropout = 0.2
    refuses(
        r"training mode with dropout 0.2 at model.layers.0.self_attn.*call model\.eval",
        function,
        model,
        IDS,
        MASK,
        None,
    )


def test_quantised_weights_are_refused(function, model):
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter((layer.weight.detach() * 9).to(torch.int8), requires_grad=False)
    refuses(r"layers.1.mlp.up_proj.weight is quantised \(torch.int8\)", function, model, IDS, MASK, None)


def test_non_positive_temperatures_are_refused(model):
    for function, *given in ((token_score_norms,), (weighted_score_norms, ROWS), (group_gradient_gram, ROWS, GROUP)):
        with pytest.raises(InputError, match="temperature is 0"):
            function(model, IDS, MASK, *given, temperature=0.0)


def share_between_layers(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


@pytest.mark.parametrize("engine", ["generic", "fast"])
@pytest.mark.parametrize("measure", [token_score_norms, weighted_score_norms])
def test_a_matrix_shared_by_two_layers_is_refused_by_engines_with_rules(model, engine, measure):
    rows = (ROWS,) if measure is weighted_score_norms else ()
    refuses(
        r"up_proj.weight is shared by (several|2) layers",
        lambda: measure(share_between_layers(model), IDS, MASK, *rows, engine=engine),
    )


def test_a_matrix_shared_by_two_layers_is_not_drawn_from_copies(model):
    shared = share_between_layers(model)
    refuses("up_proj.weight is shared by 2 layers", lambda: sampled_score_norms(shared, IDS, MASK, tokens=2))
    assert sampled_score_norms(shared, IDS, MASK, tokens=2, by="uniform").engine == "reference"


def test_a_matrix_shared_by_two_layers_is_not_sketched_in_one_pass(model):
    refuses(
        "up_proj.weight is shared by 2 layers",
        lambda: sketch_score_norms(share_between_layers(model), IDS, MASK, engine="generic"),
    )


def test_where_plain_autograd_runs_a_matrix_shared_by_two_layers_counts_once_with_both_uses(make_model):
    # One gradient per parameter, the sum of both uses: ‖s‖² from autograd, from the Gram matrix of single tokens, from
    # attribution along it, and from auto, which falls back.
    model = share_between_layers(make_model("qwen2"))
    one = torch.zeros(2, 4)
    one[0, 3] = 1.0
    logits = model(input_ids=IDS[:1, :3], use_cache=False).logits[0, -1]
    grads = torch.autograd.grad(logits.log_softmax(-1)[4], list(model.parameters()))
    expected = sum(float(g.square().sum()) for g in grads)
    found = {
        "auto": token_score_norms(model, IDS, MASK).norm_sq[0, 3],
        "gram": group_gradient_gram(model, IDS, MASK, one[:, None], GROUP)[0, 0, 0, 0],
        "jvp": gradient_attribution(model, IDS, MASK, one).norm_sq,
        "share": gradient_attribution(model, IDS, MASK, one).share[0, 3],
        "drawn": sampled_score_norms(model, IDS, MASK, tokens=9, by="uniform").norm_sq[0, 3],
    }
    assert found == {name: pytest.approx(expected, rel=1e-6) for name in found}
    sketches = np.stack([
        gradient_sketch(model, IDS, MASK, one[:, None], GROUP, dim=4096, seed=seed)[0, 0] for seed in range(8)
    ])  # fmt: skip
    # Each squared length has a standard deviation of at most √(2/4096) of ‖g‖², their mean one of .78 %.
    assert (sketches.astype(float) ** 2).sum(1).mean() == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_look_at_the_length_are_refused_beyond_it(kind):
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    if kind == "longrope":
        options |= {"short_factor": [1.0] * 2, "long_factor": [3.0] * 2, "original_max_position_embeddings": 8}
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8, rope_parameters=options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double().eval()
    ids, mask = torch.arange(1, 13)[None], torch.ones(1, 12, dtype=torch.bool)
    mask[:, 0] = False
    refuses(f"rollout 0 has 12 tokens but beyond 8 the '{kind}' rotary", token_score_norms, model, ids, mask)
    norms = [
        token_score_norms(model, ids[:, :8], mask[:, :8], engine=e).norm_sq for e in ("fast", "generic", "reference")
    ]
    np.testing.assert_allclose(norms[0], norms[2], rtol=2e-6)
    np.testing.assert_allclose(norms[1], norms[2], rtol=2e-6)
