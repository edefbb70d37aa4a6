import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients import (
    batch_gradient,
    gradient_attribution,
    group_gradient_gram,
    signal_noise,
    token_score_norms,
)
from otb_analysis.gradients.batch.forward import sampled_logprobs, sharp_logprobs
from otb_analysis.gradients.batch.inputs import Batch, prepare

# Hugging Face runs RMSNorm in float32 even inside a float64 model, so rounding stays at 1e-6 of the largest.
JVP, DIFFERENCE = 1e-6, 1e-3


@pytest.fixture
def weights():
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def close(got, expected, tolerance):
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def twin(scores, weights, shape, direction=None):
    """Alignments [N, L] and ḡ from dense scores {(rollout, column): vector}."""
    gradient = sum(float(weights[key]) * s for key, s in scores.items())
    alignment = np.zeros(shape)
    for key, s in scores.items():
        alignment[key] = s @ (gradient if direction is None else direction)
    return alignment, gradient


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"method": "jvp"}, JVP),
        ({"method": "difference"}, DIFFERENCE),
        ({"engine": "reference"}, JVP),
    ],
    ids=["jvp", "difference", "reference"],
)
@pytest.mark.parametrize("side", ["left", "both"])
def test_alignments_are_scores_dotted_with_the_batch_gradient(
    case, sample, weights, explicit_scores, side, options, tolerance
):
    batch = sample[side]
    got = gradient_attribution(case, *batch.args, weights, batch.attention_mask, **options)
    alignment, gradient = twin(explicit_scores(case, batch), weights, batch.mask.shape)
    close(got.alignment, alignment, tolerance)
    close(got.share, weights.numpy() * alignment, tolerance)
    assert got.norm_sq == pytest.approx(gradient @ gradient, rel=1e-6)
    assert (got.share[~batch.mask.numpy()] == 0).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gpt2"])
def test_shares_sum_to_the_squared_norm_in_float32(make_model, sample, weights, family, tied):
    model, batch = make_model(family, tied=tied, dtype=torch.float32), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    exact = gradient_attribution(*args)
    assert exact.share.sum() == pytest.approx(exact.norm_sq, rel=1e-5)
    assert (exact.method, exact.step, exact.step_error) == ("jvp", None, None)
    got = gradient_attribution(*args, method="difference")
    assert got.sum_error == pytest.approx(got.share.sum() / exact.norm_sq - 1, rel=0, abs=1e-12)
    assert abs(got.sum_error) < 3e-4
    assert got.method == "difference" and got.step > 0 and 0 <= got.step_error < 0.01


def test_a_sum_error_is_reported_only_along_the_own_gradient(make_model, sample, weights):
    # Along another direction Σ share is ⟨ḡ, d⟩, which nothing else says; without a gradient there is nothing relative.
    model, batch = make_model("llama"), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    assert abs(gradient_attribution(*args).sum_error) < 1e-6
    given = batch_gradient(*args)
    assert gradient_attribution(*args, direction=given).sum_error is None
    assert gradient_attribution(*args[:3], 0 * weights, args[-1]).sum_error is None


def test_sharp_logprobs_round_less_than_float32_and_agree_with_float64(make_model, sample):
    # Logits of size 30 round by 2e-6 each in float32; taken again in float64 only the layers below are left.
    model, batch = make_model("qwen2", tied=False), sample["left"]
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    for temperature in (1.0, 0.6):
        exact = sampled(sampled_logprobs, model, batch, temperature)
        torch.testing.assert_close(sampled(sharp_logprobs, model, batch, temperature), exact, rtol=1e-12, atol=1e-12)
    rough, sharp = (sampled(f, model.float(), batch, 0.6) - exact for f in (sampled_logprobs, sharp_logprobs))
    assert sharp.dtype == torch.float64 and sharp.norm() < rough.norm()


def test_logits_that_are_not_the_output_layers_own_stay_as_they_are(make_model, sample):
    class Capped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.get_output_embeddings = inner.get_output_embeddings

        def forward(self, input_ids, attention_mask=None, use_cache=False):
            output = self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)
            output.logits = 2 * torch.tanh(output.logits / 2)
            return output

    model, batch = Capped(make_model("qwen3")), sample["left"]
    expected = sampled(sampled_logprobs, model, batch, 1.0)
    torch.testing.assert_close(sampled(sharp_logprobs, model, batch, 1.0), expected)


def sampled(forward, model, batch, temperature):
    prepared = prepare(model, Batch(*batch.args, batch.attention_mask), "all", temperature)
    return forward(prepared, prepared.rollouts).detach().double()


def test_the_share_of_a_single_token_is_its_norm(make_model, sample):
    model, batch = make_model("qwen3"), sample["right"]
    norms = token_score_norms(model, *batch.args, batch.attention_mask).norm_sq
    alone = torch.zeros(5, 12)
    alone[1, 5] = 1.0
    got = gradient_attribution(model, *batch.args, alone, batch.attention_mask)
    assert got.share.sum() == got.share[1, 5] == pytest.approx(norms[1, 5], rel=1e-6)
    assert np.count_nonzero(got.alignment) == batch.mask.sum()  # alignments exist where the weight is zero too


@pytest.mark.parametrize("scope", ["lm_head", r"layers\.1", "embed_tokens"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
def test_every_scope_and_temperature_agrees_with_the_slow_twin(make_model, sample, weights, scope, temperature, tied):
    model, batch = make_model("qwen3", tied=tied), sample["both"]
    options = {"scope": scope, "temperature": temperature}
    args = (model, *batch.args, weights, batch.attention_mask)
    slow = gradient_attribution(*args, engine="reference", **options)
    fast = gradient_attribution(*args, **options)
    close(fast.share, slow.share, JVP)
    assert slow.method == "reference" and fast.share.sum() == pytest.approx(fast.norm_sq, rel=1e-6)


@pytest.mark.parametrize("options", [{"method": "jvp"}, {"method": "difference"}, {"engine": "reference"}])
def test_a_held_out_gradient_is_a_direction(make_model, sample, weights, explicit_scores, options):
    model, batch = make_model("llama"), sample["left"]
    train, held = [0, 1], [2, 4]
    direction = batch_gradient(
        model, batch.input_ids[held], batch.mask[held], weights[held], batch.attention_mask[held]
    )
    got = gradient_attribution(
        model, batch.input_ids[train], batch.mask[train], weights[train], batch.attention_mask[train],
        direction=direction, **options,
    )  # fmt: skip
    scores = explicit_scores(model, batch)
    _, away = twin({k: s for k, s in scores.items() if k[0] in held}, weights, batch.mask.shape)
    alignment, _ = twin({k: s for k, s in scores.items() if k[0] in train}, weights, batch.mask.shape, away)
    close(got.alignment, alignment[train], DIFFERENCE if options.get("method") == "difference" else JVP)
    assert got.norm_sq == pytest.approx(away @ away, rel=1e-6)


def test_the_batch_gradient_as_direction_changes_nothing(make_model, sample, weights):
    model, batch = make_model("gpt2"), sample["left"]
    direction = batch_gradient(model, *batch.args, weights, batch.attention_mask)
    given = gradient_attribution(model, *batch.args, weights, batch.attention_mask, direction=direction)
    own = gradient_attribution(model, *batch.args, weights, batch.attention_mask)
    np.testing.assert_array_equal(given.share, own.share)
    assert given.norm_sq == own.norm_sq


def test_alignment_is_linear_in_the_direction_and_a_missing_parameter_does_not_move(make_model, sample, weights):
    model, batch = make_model("qwen2"), sample["left"]
    whole = batch_gradient(model, *batch.args, weights, batch.attention_mask)
    parts = [{n: t for n, t in whole.items() if ("mlp" in n) is part} for part in (True, False)]
    alignments = [
        gradient_attribution(model, *batch.args, weights, batch.attention_mask, direction=d).alignment
        for d in (whole, *parts)
    ]
    close(alignments[1] + alignments[2], alignments[0], JVP)


def test_a_tied_direction_answers_to_both_names(make_model, sample, weights):
    model, batch = make_model("llama"), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    moved = torch.randn(17, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    one, other, both = (
        gradient_attribution(*args, direction=dict.fromkeys(chosen, moved)).alignment
        for chosen in (names[:1], names[1:], names)
    )
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one, both)
    with pytest.raises(InputError, match="differently under another name"):
        gradient_attribution(*args, direction={names[0]: moved, names[1]: 2 * moved})


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_signal_and_noise_match_the_slow_twin_and_add_up_to_the_gram(
    make_model, sample, weights, explicit_scores, method
):
    model, batch = make_model("qwen3"), sample["both"]
    group = np.array([7, -1, 7, -1, 2])  # sorted: −1, 2, 7
    got = signal_noise(model, *batch.args, weights, group, batch.attention_mask, method=method)
    scores = explicit_scores(model, batch)
    own = {p: twin({k: s for k, s in scores.items() if group[k[0]] == p}, weights, (5, 12))[1] for p in (-1, 2, 7)}
    total = sum(own.values())
    signal, noise = np.zeros((2, 5, 12))
    for key, s in scores.items():
        signal[key] = float(weights[key]) * (s @ (total - own[group[key[0]]]))
        noise[key] = float(weights[key]) * (s @ own[group[key[0]]])
    tolerance = JVP if method == "jvp" else DIFFERENCE
    largest = max(np.abs(signal).max(), np.abs(noise).max())
    np.testing.assert_allclose(got.signal, signal, rtol=0, atol=3 * tolerance * largest)
    np.testing.assert_allclose(got.noise, noise, rtol=0, atol=3 * tolerance * largest)
    gram = group_gradient_gram(model, *batch.args, weights[:, None], group, batch.attention_mask)[0, 0]
    np.testing.assert_allclose(got.group_norm_sq, np.diag(gram), rtol=1e-6)
    assert got.norm_sq == pytest.approx(gram.sum(), rel=1e-6)
    assert got.noise.sum() == pytest.approx(np.trace(gram), rel=tolerance)
    assert got.signal.sum() == pytest.approx(gram.sum() - np.trace(gram), abs=3 * tolerance * np.trace(gram))


def test_with_one_prompt_all_is_noise(make_model, sample, weights):
    model, batch = make_model("gpt2"), sample["left"]
    got = signal_noise(model, *batch.args, weights, np.zeros(5, dtype=int), batch.attention_mask)
    assert not got.signal.any() and got.noise.sum() == pytest.approx(got.norm_sq, rel=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_predicted_change_is_the_real_one_up_to_second_order(make_model, sample, weights, family):
    # The error of a first-order prediction is quadratic: a step ten times smaller is a hundred times closer.
    model, batch = make_model(family), sample["left"]
    args = (model, *batch.args)
    gradient = batch_gradient(*args, weights, batch.attention_mask)
    before = token_score_norms(*args, batch.attention_mask).logprob
    named, errors = dict(model.named_parameters()), []
    for size in (1e-4, 1e-5):
        step = {name: size * torch.sign(g) for name, g in gradient.items()}  # what a first Adam step looks like
        predicted = gradient_attribution(*args, weights, batch.attention_mask, direction=step).alignment
        old = {name: named[name].detach().clone() for name in step}
        with torch.no_grad():
            for name, moved in step.items():
                named[name].add_(moved)
            real = token_score_norms(*args, batch.attention_mask).logprob - before
            for name, value in old.items():
                named[name].copy_(value)
        errors.append(np.abs(predicted - real).max() / np.abs(real).max())
    assert errors[0] < 0.03 and errors[1] < 0.003
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.5)  # relative errors are linear


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_padding_is_never_read(make_model, sample, weights, method):
    model, plain = make_model("qwen3"), sample["right"]
    masks = plain.mask.numpy()
    expected = gradient_attribution(model, *plain.args, weights, plain.attention_mask, method=method)
    for side in ("left", "both"):
        other = sample[side]
        garbage = torch.where(other.attention_mask.bool(), other.input_ids, -(10**6))
        moved = torch.full((5, 12), torch.nan, dtype=torch.float64)
        moved[other.mask] = weights[plain.mask]
        got = gradient_attribution(model, garbage, other.mask, moved, other.attention_mask, method=method)
        np.testing.assert_array_equal(got.share[other.mask.numpy()], expected.share[masks])


def test_many_batches_give_what_one_gives(make_model, sample, weights, monkeypatch):
    model, batch = make_model("qwen2"), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    one = gradient_attribution(*args)
    monkeypatch.setattr("otb_analysis.gradients.batch.inputs.BATCH_POSITIONS", 8)
    close(gradient_attribution(*args).share, one.share, JVP)


def test_half_precision_models_are_differentiated_in_float32(make_model, sample, weights):
    half, batch = make_model("qwen3", dtype=torch.bfloat16), sample["left"]
    full = make_model("qwen3").bfloat16().float()
    args = (*batch.args, weights, batch.attention_mask)
    for scope in ("all", "self_attn", "lm_head"):
        exact = gradient_attribution(full, *args, scope=scope)
        for method, tolerance in (("jvp", 1e-5), ("difference", DIFFERENCE)):
            got = gradient_attribution(half, *args, scope=scope, method=method)
            close(got.share, exact.share, tolerance)
    assert half.model.embed_tokens.weight.dtype == torch.bfloat16


def test_the_model_is_left_as_it_was_found(make_model, sample, weights):
    model, batch = make_model("qwen3"), sample["left"]
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.full_like(model.model.norm.weight, 3.0)
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    args, group = (model, *batch.args, weights), torch.zeros(5, dtype=torch.long)
    for method in ("jvp", "difference"):
        for scope in ("all", "lm_head"):
            options = {"attention_mask": batch.attention_mask, "scope": scope, "method": method}
            with torch.no_grad():
                gradient_attribution(*args, **options)
            with torch.inference_mode():
                signal_noise(*args, group, **options)
    assert model.training and not frozen.requires_grad and not model.lm_head._forward_hooks
    assert (model.model.norm.weight.grad == 3).all() and model.model.embed_tokens.weight.grad is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_frozen_parameters_take_no_part(make_model, sample, weights):
    model, batch = make_model("qwen2"), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    attention = gradient_attribution(*args, scope="self_attn")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    np.testing.assert_array_equal(gradient_attribution(*args).share, attention.share)
    with pytest.raises(InputError, match=r"'model\.norm\.weight', .*scope"):
        gradient_attribution(*args, direction={"model.norm.weight": model.model.norm.weight})


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_weights_of_zero_and_empty_batches_give_zero(make_model, sample, method):
    model, batch = make_model("qwen3"), sample["left"]
    got = gradient_attribution(model, *batch.args, torch.zeros(5, 12), batch.attention_mask, method=method)
    assert got.norm_sq == 0 and not got.alignment.any()
    nothing = torch.zeros(5, 12, dtype=torch.bool)
    got = gradient_attribution(model, batch.input_ids, nothing, torch.ones(5, 12), method=method)
    assert got.norm_sq == 0 and not got.share.any()


def test_an_attention_kernel_without_forward_mode_is_replaced_for_the_measurement(make_model, sample, weights):
    def attend(*args, **options):
        raise AssertionError("the model's own kernel was used")

    ALL_ATTENTION_FUNCTIONS.register("unfriendly", attend)
    model, batch = make_model("qwen3"), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    expected = gradient_attribution(*args)
    model.config._attn_implementation = "unfriendly"
    close(gradient_attribution(*args).share, expected.share, JVP)
    assert model.config._attn_implementation == "unfriendly"


def test_differences_of_a_rough_function_are_refused(make_model, sample, weights):
    # Rounding the logits to bfloat16 leaves steps of 2^-8 of their size, far above an honest difference.
    class Rough(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, attention_mask=None, use_cache=False):
            output = self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)
            output.logits = output.logits.bfloat16().float()
            return output

    model, batch = Rough(make_model("qwen3")), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    with pytest.raises(InputError, match=r'disagree by .*pass method="jvp"\.'):
        gradient_attribution(*args, method="difference")
    assert gradient_attribution(*args).share.sum() == pytest.approx(gradient_attribution(*args).norm_sq, rel=0.1)


class Plain(torch.autograd.Function):
    """The identity, as somebody's own kernel: with a backward pass and nothing else."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, signal):
        return signal


def test_an_operation_without_forward_mode_is_measured_by_differences(make_model, sample, weights):
    model, batch = make_model("qwen3"), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    exact = gradient_attribution(*args, method="auto")
    assert exact.method == "jvp"
    model.model.norm.register_forward_hook(lambda _m, _a, output: Plain.apply(output))
    with pytest.raises(InputError, match='method="difference"'):
        gradient_attribution(*args, method="jvp")
    for _ in range(2):
        near = gradient_attribution(*args, method="auto")
        assert near.method == "difference"
        largest = np.abs(exact.share).max()
        np.testing.assert_allclose(near.share, exact.share, rtol=0, atol=3 * DIFFERENCE * largest)
    parts = signal_noise(model, *batch.args, weights, np.arange(5), batch.attention_mask, method="auto")
    np.testing.assert_allclose(parts.signal + parts.noise, exact.share, rtol=0, atol=6 * DIFFERENCE * largest)


def test_a_gradient_that_is_no_derivative_is_refused(make_model, sample, weights):
    class Halved(Plain):
        """The identity, whose backward pass gives half of the signal."""

        @staticmethod
        def backward(ctx, signal):
            return signal / 2

        @staticmethod
        def jvp(ctx, tangent):
            return tangent.clone()

    model, batch = make_model("qwen3"), sample["left"]
    model.model.norm.register_forward_hook(lambda _m, _a, output: Halved.apply(output))
    args = (model, *batch.args, weights, batch.attention_mask)
    for method in ("jvp", "difference"):
        with pytest.raises(InputError, match=r"shares sum to .* not its derivative; .*engine=\"reference\"\."):
            gradient_attribution(*args, method=method)
        with pytest.raises(InputError, match="shares sum to"):
            signal_noise(model, *batch.args, weights, np.arange(5), batch.attention_mask, method=method)
    slow = gradient_attribution(*args, engine="reference")
    assert slow.share.sum() == pytest.approx(slow.norm_sq, rel=1e-6)


def test_what_does_not_fit_is_named(make_model, sample, weights):
    model, batch = make_model("qwen2"), sample["left"]
    name = "model.norm.weight"
    for match, error, change in (
        (r"weights has shape \(5, 1, 12\) but input_ids", InputError, {"weights": weights[:, None]}),
        ("'jpv'; did you mean 'jvp'", InputError, {"method": "jpv"}),
        ("engine 'fast' does not attribute", InputError, {"engine": "fast"}),
        (r"names 'model.nrm.weight', which is not in scope; did you mean", InputError,
         {"direction": {"model.nrm.weight": torch.ones(16)}}),
        (r"has shape \(3,\) but the parameter has shape \(16,\)", InputError, {"direction": {name: torch.ones(3)}}),
        ("is not finite", NonFiniteError, {"direction": {name: torch.full((16,), torch.nan)}}),
        ("direction is empty", InputError, {"direction": {}}),
        ("rollout 0, row 0, token 9", NonFiniteError, {"weights": torch.full((5, 12), torch.nan)}),
    ):  # fmt: skip
        options = {"weights": weights, "attention_mask": batch.attention_mask} | change
        with pytest.raises(error, match=match) as caught:
            gradient_attribution(model, *batch.args, **options)
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def lora(model):
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:  # B starts at zero, where A has no gradient
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return adapted.eval()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # a library's own
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_attributed_over_what_trains(make_model, sample, weights, tied):
    model, batch = lora(make_model("qwen2", tied=tied)), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    slow = gradient_attribution(*args, engine="reference")
    for method, tolerance in (("jvp", JVP), ("difference", DIFFERENCE)):
        got = gradient_attribution(*args, method=method)
        close(got.share, slow.share, tolerance)
        assert got.norm_sq == pytest.approx(slow.norm_sq, rel=1e-6)
    names = set(batch_gradient(*args))
    assert names and all("lora_" in name for name in names)
    with pytest.raises(InputError, match="which is not in scope"):
        gradient_attribution(*args, direction={"base_model.model.model.norm.weight": torch.ones(16)})


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_a_small_adamw_step_changes_log_probabilities_as_predicted(make_model, sample, weights, method):
    # Decay and adaptive scaling are part of the step, so Δθ is taken from the weights, not from the gradient.
    model, batch = make_model("llama", tied=False), sample["both"]
    args = (model, *batch.args)
    gradient = batch_gradient(*args, weights, batch.attention_mask)
    before = token_score_norms(*args, batch.attention_mask).logprob
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
    for name, parameter in model.named_parameters():
        parameter.grad = -gradient[name]
    optimizer.step()
    real = token_score_norms(*args, batch.attention_mask).logprob - before
    step = {name: p.detach() - old[name] for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(old[name])
    predicted = gradient_attribution(*args, weights, batch.attention_mask, direction=step, method=method).alignment
    assert np.abs(predicted - real).max() < 0.005 * np.abs(real).max()
    assert (weights.numpy() * predicted)[batch.mask.numpy()].sum() > 0


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_a_direction_whose_norm_overflows_float32_is_not_taken_for_infinite(make_model, sample, weights, method):
    model, batch = make_model("qwen3", dtype=torch.float32), sample["left"]
    args = (model, *batch.args, weights, batch.attention_mask)
    direction = batch_gradient(*args)
    small = gradient_attribution(*args, direction=direction, method="jvp").alignment
    large = gradient_attribution(*args, direction={n: 1e25 * d for n, d in direction.items()}, method=method)
    close(large.alignment / 1e25, small, JVP if method == "jvp" else DIFFERENCE)
