import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients import ENGINES, group_gradient_gram, token_score_norms, weighted_score_norms


@pytest.fixture
def model(make_model):
    return make_model("qwen2", dtype=torch.float32)


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)


def refuses(match, function, *args, error=InputError, **options):
    with pytest.raises(error, match=match) as caught:
        function(*args, **options)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_weights_and_groups_of_another_shape_are_named(model):
    refuses(r"weights has shape \(2, 4\)", weighted_score_norms, model, IDS, MASK, torch.ones(2, 4))
    refuses(r"weights has shape \(2, 1, 3\)", weighted_score_norms, model, IDS, MASK, torch.ones(2, 1, 3))
    ones = torch.ones(2, 1, 4)
    refuses(r"group has shape \(3,\)", group_gradient_gram, model, IDS, MASK, ones, torch.tensor([0, 0, 1]))
    refuses(r"dtype float64", group_gradient_gram, model, IDS, MASK, ones, np.array([0.0, 1.0]))


def test_a_sampled_token_behind_padding_needs_something_that_predicts_it(model):
    left = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    refuses("rollout 0, token 2, but that is the first token", token_score_norms, model, IDS, MASK, left)


def test_active_dropout_is_refused_and_inactive_dropout_is_not(make_model):
    gpt2 = make_model("gpt2", dtype=torch.float32)
    token_score_norms(gpt2, IDS, MASK)
    refuses("training mode with dropout 0.1", token_score_norms, gpt2.train(), IDS, MASK)
    token_score_norms(make_model("qwen2", dtype=torch.float32).train(), IDS, MASK)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logits_name_rollout_and_token(model, value):
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = value  # tied: row 7 poisons every logit vector
    refuses("rollout 0, token 2", token_score_norms, model, IDS, MASK, error=NonFiniteError)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = 0.0
    untied = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.lm_head.weight = untied
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = value  # now only rollout 1 reads it
    token_score_norms(model, IDS, MASK)  # nothing is predicted from it: not read
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    refuses("rollout 1, token 1", token_score_norms, model, IDS, mask, error=NonFiniteError)  # 0 × NaN in attention
    weights, group = torch.ones(2, 1, 4), torch.tensor([0, 0])
    refuses("rollout 1, token 1", group_gradient_gram, model, IDS, mask, weights, group, error=NonFiniteError)


def test_non_finite_weights_name_rollout_row_and_token(model):
    weights = torch.ones(2, 3, 4)
    weights[1, 2, 1] = torch.nan
    refuses("rollout 1, row 2, token 1", weighted_score_norms, model, IDS, MASK, weights, error=NonFiniteError)


def test_ids_outside_the_vocabulary_are_refused_unless_they_are_padding(model):
    wrong = IDS.clone()
    wrong[1, 0] = 17
    refuses("rollout 1 holds 17 but the model's vocabulary has 17", token_score_norms, model, wrong, MASK)
    wrong[1, 0] = -100
    refuses("rollout 1 holds -100", token_score_norms, model, wrong, MASK)
    real = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]], dtype=torch.bool)
    assert token_score_norms(model, wrong, mask, real).norm_sq[1, 2] > 0


def test_a_scope_without_parameters_is_refused(model):
    refuses(r"'q_porj' matches no parameter name .*q_proj", token_score_norms, model, IDS, MASK, scope="q_porj")
    refuses("no regular expression", token_score_norms, model, IDS, MASK, scope="layers.(")
    model.requires_grad_(False)
    refuses("'all' holds 26 parameters but none requires grad", token_score_norms, model, IDS, MASK)
    refuses("'q_proj' holds 4 parameters but none", token_score_norms, model, IDS, MASK, scope="q_proj")
    refuses('"lm_head" holds a weight that does not', token_score_norms, model, IDS, MASK, scope="lm_head")


class Packed(torch.Tensor):
    """Stands for a tensor subclass of torchao, which reports a floating dtype."""


Packed.__module__ = "torchao.quantization"


@pytest.mark.parametrize(
    ("pack", "kind"),
    [
        (lambda w: (w * 9).to(torch.int8), "torch.int8"),
        (lambda w: (w * 9).to(torch.uint8), "torch.uint8"),
        (lambda w: w.to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (lambda w: w.as_subclass(Packed), "Packed"),
    ],
)
def test_quantised_weights_are_refused_by_name(model, pack, kind):
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(pack(layer.weight.detach()), requires_grad=False)
    sentence = rf"layers.1.mlp.up_proj.weight is quantised \({kind}\)"
    for scope in ("all", "mlp"):
        refuses(sentence, token_score_norms, model, IDS, MASK, scope=scope)
    refuses(sentence, group_gradient_gram, model, IDS, MASK, torch.ones(2, 1, 4), torch.tensor([0, 1]))
    with pytest.raises(InputError, match="matches no parameter name"):
        token_score_norms(model, IDS, MASK, scope="nothing")


def test_packed_buffers_are_quantised_weights(model):
    model.model.layers[0].mlp.register_buffer("qweight", torch.zeros(2, 2, dtype=torch.int32))
    refuses(r"layers.0.mlp.qweight is quantised", token_score_norms, model, IDS, MASK)
    # What is asked for without them is measured: the derivative by a norm's weight is what it is.
    assert token_score_norms(model, IDS, MASK, scope=r"model\.norm").norm_sq[0, 2] > 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_is_positive(model, temperature):
    refuses("temperature is", token_score_norms, model, IDS, MASK, temperature=temperature)


def test_engines_that_do_not_exist_are_refused_by_name(model):
    assert "auto" not in ENGINES
    sentence = "'quick' is not available in this version; .*fast, generic, reference, auto"
    refuses(sentence, token_score_norms, model, IDS, MASK, engine="quick")


def test_auto_says_which_engine_ran(model):
    ids, mask = torch.arange(1, 15)[None], torch.ones(1, 14, dtype=torch.bool)
    mask[0, 0] = False
    assert token_score_norms(model, ids, mask).engine == "fast"
