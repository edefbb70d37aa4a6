import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.logit_stats import logit_stats

FIELDS = ("logprob", "entropy", "sum_pi_sq", "energy", "pi_variance", "logprob_variance")


def slow(logits, token_ids, temperature=1.0):
    """The definitions, in float64, on whole rows."""
    log_pi = (logits.double() / temperature).log_softmax(-1)
    pi = log_pi.exp()
    unit = torch.nn.functional.one_hot(token_ids, logits.shape[-1])
    entropy, square = -(pi * log_pi).sum(-1), (pi * pi).sum(-1)
    values = {
        "logprob": (unit * log_pi).sum(-1),
        "entropy": entropy,
        "sum_pi_sq": square,
        "energy": ((unit - pi) ** 2).sum(-1),
        "pi_variance": (pi**3).sum(-1) - square**2,
        "logprob_variance": (pi * log_pi**2).sum(-1) - entropy**2,
    }
    return {name: value.numpy() for name, value in values.items()}


def random(shape=(3, 5), vocabulary=37, scale=4.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocabulary, shape, generator=generator)


def test_two_tokens_worked_by_hand():
    # z = (log 3, 0), τ = 1: π = (3/4, 1/4). For y = 1: w = (3/4)² + (3/4)² = 9/8; Σπ² = 9/16 + 1/16 = 5/8;
    # Var(π_y) = 27/64 + 1/64 − 25/64 = 3/64; log π differ by log 3, so Var(log π_y) = (3/4)(1/4) log² 3.
    got = logit_stats(torch.tensor([math.log(3), 0.0], dtype=torch.float64), token_ids=torch.tensor(1))
    expected = {
        "logprob": math.log(1 / 4),
        "entropy": 0.75 * math.log(4 / 3) + 0.25 * math.log(4),
        "sum_pi_sq": 5 / 8,
        "energy": 9 / 8,
        "pi_variance": 3 / 64,
        "logprob_variance": 3 / 16 * math.log(3) ** 2,
    }
    for name, value in expected.items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-13), name
    assert got.hidden_norm_sq is None and got.energy.shape == ()


def test_temperature_divides_the_logits():
    # z/τ = (log 3, 0) again, for the other token: w = (1/4)² + (1/4)² = 1/8.
    got = logit_stats(torch.tensor([[2 * math.log(3), 0.0]]), token_ids=torch.tensor([0]), temperature=2.0)
    np.testing.assert_allclose([got.energy[0], got.logprob[0]], [1 / 8, math.log(3 / 4)], rtol=1e-6)


def test_uniform_logits_have_energy_one_minus_one_over_v_and_no_variance():
    got = logit_stats(torch.full((1, 8), 5.0), token_ids=torch.tensor([3]))
    np.testing.assert_allclose(
        [got.energy, got.entropy, got.sum_pi_sq, got.logprob],
        [[7 / 8], [math.log(8)], [1 / 8], [-math.log(8)]],
        rtol=1e-6,
    )
    assert 0 <= got.pi_variance[0] < 1e-12 and 0 <= got.logprob_variance[0] < 1e-6


@pytest.mark.parametrize("gap", [8.0, 11.0, 20.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_energy_of_peaked_tokens_is_relatively_exact_where_the_textbook_form_cancels(gap, dtype):
    # y leads V − 1 = 15 equal others by the gap: q = 1 − π_y = 15/(15 + e^gap) and w = q² + q²/15.
    logits = torch.zeros(1, 16, dtype=dtype)
    logits[0, 2] = gap
    got = logit_stats(logits, token_ids=torch.tensor([2]))
    q = 15 / (15 + math.exp(gap))
    assert got.energy[0] == pytest.approx(q * q * 16 / 15, rel=1e-5)
    assert got.logprob[0] == pytest.approx(-math.log1p(15 * math.exp(-gap)), rel=1e-5)
    assert got.entropy[0] == pytest.approx(
        -(1 - q) * math.log1p(-q) + q * (gap + math.log1p(15 * math.exp(-gap))), rel=1e-5
    )


def test_energy_is_never_negative_although_the_textbook_form_is():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 50, generator=generator)
    logits[:, 0] += 14
    tokens = torch.zeros(2000, dtype=torch.long)
    sum_pi_sq = (torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1)).exp()
    textbook = 1 - 2 * logits.log_softmax(-1)[:, 0].exp() + sum_pi_sq
    assert (textbook < 0).float().mean() > 0.05
    got = logit_stats(logits, token_ids=tokens)
    rest = logits.double().softmax(-1)[:, 1:]
    np.testing.assert_allclose(got.energy, (rest.sum(-1) ** 2 + (rest**2).sum(-1)).numpy(), rtol=1e-4)
    assert (got.energy > 0).all()


def test_energy_is_at_most_two():
    # All of π on another token than the drawn one: (1 − 0)² + 1² = 2.
    got = logit_stats(torch.tensor([[0.0, 1000.0, 0.0]]), token_ids=torch.tensor([0]))
    assert got.energy[0] == 2.0 and got.logprob[0] == -1000.0


@pytest.mark.parametrize("chunk", [(256, 4096), (2, 2), (7, 5), (1, 36)])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_tiles_change_nothing(chunk, temperature):
    logits, tokens = random()
    got = logit_stats(logits, token_ids=tokens, temperature=temperature, chunk=chunk)
    for name, value in slow(logits, tokens, temperature).items():
        np.testing.assert_allclose(getattr(got, name), value, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_float32_stays_within_its_target(scale):
    logits, tokens = random((400,), 1000, scale, torch.float32)
    tokens[::2] = logits.argmax(-1)[::2]
    got, expected = logit_stats(logits, token_ids=tokens, chunk=(64, 128)), slow(logits, tokens)
    bound = 2e-6 * max(1.0, float(logits.abs().max()))
    assert np.abs(got.logprob - expected["logprob"]).max() < bound
    rest = logits.double().softmax(-1).scatter(-1, tokens[:, None], 0.0)
    energy = (rest.sum(-1) ** 2 + (rest**2).sum(-1)).numpy()
    small = energy > 1e-10
    np.testing.assert_allclose(got.energy[small], energy[small], rtol=1e-4)
    np.testing.assert_allclose(got.entropy, expected["entropy"], rtol=1e-3, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_promoted(dtype):
    logits, tokens = random(dtype=dtype)
    got, expected = logit_stats(logits, token_ids=tokens), slow(logits.double(), tokens)
    for name in FIELDS:
        np.testing.assert_allclose(getattr(got, name), expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
        assert getattr(got, name).dtype == np.float64


@pytest.mark.parametrize("with_bias", [False, True])
def test_hidden_states_and_weight_give_the_statistics_of_their_logits(with_bias):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(30, generator=generator, dtype=torch.float64) if with_bias else None
    tokens = torch.randint(30, (4, 6), generator=generator)
    options = {"token_ids": tokens, "temperature": 0.8}
    got = logit_stats(hidden=hidden, weight=weight.requires_grad_(), bias=bias, chunk=(5, 4), **options)
    expected = logit_stats(torch.nn.functional.linear(hidden, weight, bias), **options)
    for name in FIELDS:
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(got.hidden_norm_sq, (hidden**2).sum(-1).numpy(), rtol=1e-14)


class Largest(TorchDispatchMode):
    """Remembers the largest number of entries of any tensor that an operation made."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.entries = max(self.entries, out.numel())
        return out


@pytest.mark.parametrize("bits", [torch.float32, torch.bfloat16])
def test_no_tensor_holds_more_than_a_fiftieth_of_the_logits(bits):
    hidden, weight, tokens = torch.randn(300, 2, dtype=bits), torch.randn(40_000, 2, dtype=bits), torch.arange(300)
    with Largest() as largest:
        logit_stats(hidden=hidden, weight=weight, token_ids=tokens)
    # Three buffers of one tile of 2^17 entries, 78 slices × 6 sums × 300 rows; all logits would be 12 million entries.
    assert 3 * 2**17 <= largest.entries <= 300 * 40_000 / 25
    with Largest() as largest:
        logit_stats(hidden=hidden, weight=weight, token_ids=tokens, chunk=(32, 512))
    assert 32 * 512 <= largest.entries <= 300 * 40_000 / 50


def test_bfloat16_products_are_summed_in_float32_and_the_setting_is_put_back():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 64, generator=generator).bfloat16()
    weight = torch.randn(700, 64, generator=generator).bfloat16()
    tokens = torch.randint(700, (40,), generator=generator)
    before = torch.backends.mkldnn.matmul.fp32_precision
    got = logit_stats(hidden=hidden, weight=weight, token_ids=tokens)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    logits = hidden.double() @ weight.double().T
    expected = slow(logits, tokens)
    assert np.abs(got.logprob - expected["logprob"]).max() < 2e-6 * float(logits.abs().max())
    # Logits that were rounded to bfloat16 would be off by up to 2^-9 of their size.
    assert np.abs(slow(logits.bfloat16(), tokens)["logprob"] - expected["logprob"]).max() > 1e-2


def test_entries_too_small_to_cube_are_left_out_without_a_trace():
    # 150,000 others 30 nats below one: together e^-30 · 150,000 = 1.4e-8 of it, below float32's resolution.
    logits = torch.full((1, 150_002), -30.0)
    logits[0, 0], logits[0, 1] = 0.0, 1.0
    got, expected = logit_stats(logits, token_ids=torch.tensor([1])), slow(logits, torch.tensor([1]))
    for name in FIELDS:
        np.testing.assert_allclose(getattr(got, name), expected[name], rtol=3e-7, err_msg=name)


def test_energy_is_the_squared_norm_of_the_logit_gradient():
    logits, tokens = random((6,), 11)
    logits.requires_grad_()
    logits.log_softmax(-1).gather(-1, tokens[:, None]).sum().backward()
    got = logit_stats(logits, token_ids=tokens)
    np.testing.assert_allclose(got.energy, (logits.grad**2).sum(-1).numpy(), rtol=1e-12)


def test_empty_input_gives_empty_arrays():
    got = logit_stats(torch.zeros(0, 5), token_ids=torch.zeros(0, dtype=torch.long))
    assert got.energy.shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 7, 19])
def test_non_finite_logits_name_row_and_position(value, column):
    logits, tokens = random((3, 4), 20)
    tokens[1, 2] = 7
    logits[1, 2, column] = value
    for chunk in ((256, 4096), (2, 3)):
        with pytest.raises(NonFiniteError, match=r"not finite at row 1, position 2;"):
            logit_stats(logits, token_ids=tokens, chunk=chunk)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "takes either logits, or hidden and weight"),
        (
            {"logits": torch.zeros(2, 3), "hidden": torch.zeros(2, 3), "weight": torch.zeros(3, 3)},
            "takes either logits",
        ),
        ({"hidden": torch.zeros(2, 3)}, "takes either logits"),
        ({"logits": torch.zeros(3, 3)}, r"logits has shape \(3, 3\) but token_ids has shape \(2,\)"),
        ({"hidden": torch.zeros(2, 3), "weight": torch.zeros(5, 4)}, r"weight has shape \(5, 4\) but hidden has 3"),
        ({"logits": torch.zeros(2, 1)}, "vocabulary of one entry"),
        ({"logits": torch.zeros(2, 3), "temperature": 0.0}, "temperature is 0.0"),
        ({"logits": torch.zeros(2, 3), "token_ids": torch.tensor([0, -100])}, "token_ids is -100 at position 1"),
    ],
)
def test_input_that_does_not_fit_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        logit_stats(**{"token_ids": torch.tensor([0, 1])} | options)
