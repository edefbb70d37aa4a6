import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from otb_analysis.gradients.exact import attention
from otb_analysis.gradients.exact.layers import pull_back

N, D = 11, 4
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~CAUSAL.tril(-4)
PADDED = torch.arange(N).lt(torch.tensor([[N], [7]]))[:, None, None]  # [2, 1, 1, n]: two rollouts of N and 7 tokens
LEFT = PADDED.flip(-1)


def inputs(heads=4, groups=2, dtype=torch.float64, rollouts=1):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, N, D), (groups, N, D), (groups, N, D)
    return [torch.randn(rollouts, *s, generator=generator).bfloat16().to(dtype).requires_grad_() for s in shapes]


def signals_of(context, leaves, count=3, **options):
    with context:
        output = scaled_dot_product_attention(*leaves, enable_gqa=True, **options)
    seeds = torch.randn(count, *output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return output, pull_back(output, leaves, seeds)


@pytest.mark.parametrize("tile_bytes", [1, 3000, 1 << 21])  # one query at a time, a few, all
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": CAUSAL[None, None]},
        {"attn_mask": WINDOW},
        {"attn_mask": torch.zeros(N, N).masked_fill(~WINDOW, torch.finfo(torch.float32).min).double()[None, None]},
        {"attn_mask": torch.where(CAUSAL, -torch.arange(4.0).view(4, 1, 1), -torch.inf).double()[None]},  # by head
        {},
    ],
    ids=["causal", "scale", "mask", "window", "additive", "heads", "full"],
)
def test_signals_are_those_of_the_plain_kernel(monkeypatch, options, tile_bytes):
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    monkeypatch.setattr(attention, "TILE_BYTES", tile_bytes)
    leaves = inputs()
    output, got = signals_of(attention.many_signals(attention.TILED_FROM), leaves, **options)
    plain, expected = signals_of(sdpa_kernel(SDPBackend.MATH), leaves, **options)
    assert "_Attention" in type(output.grad_fn).__name__ and "_Attention" not in type(plain.grad_fn).__name__
    torch.testing.assert_close(output, plain)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_tile_of_one_query_takes_any_number_of_heads_per_key(monkeypatch, groups):
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    monkeypatch.setattr(attention, "TILE_BYTES", 1)
    leaves = inputs(groups=groups)
    _, got = signals_of(attention.many_signals(attention.TILED_FROM), leaves, is_causal=True)
    _, expected = signals_of(sdpa_kernel(SDPBackend.MATH), leaves, is_causal=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tile_bytes", [3000, 1 << 21])
@pytest.mark.parametrize(
    "mask",
    [CAUSAL, PADDED, PADDED & CAUSAL, (PADDED & CAUSAL).expand(2, 4, N, N), WINDOW.expand(4, N, N), LEFT & CAUSAL],
    ids=["shared", "keys", "rollouts", "heads", "shared-heads", "nothing-read"],
)
def test_rollouts_have_each_their_own_mask(monkeypatch, mask, tile_bytes):
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    monkeypatch.setattr(attention, "TILE_BYTES", tile_bytes)
    leaves = inputs(rollouts=2)
    output, got = signals_of(attention.many_signals(attention.TILED_FROM), leaves, attn_mask=mask)
    plain, expected = signals_of(sdpa_kernel(SDPBackend.MATH), leaves, attn_mask=mask)
    assert "_Attention" in type(output.grad_fn).__name__
    torch.testing.assert_close(output, plain)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_signal_without_vmap_is_the_same(monkeypatch):
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    leaves = inputs(groups=4)
    with attention.many_signals(attention.TILED_FROM):
        got = torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True).square().sum(), leaves)
    plain = torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True).square().sum(), leaves)
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_calls_it_does_not_follow_run_in_the_plain_kernel(monkeypatch):
    short = inputs()
    output, _ = signals_of(attention.many_signals(attention.TILED_FROM), short, is_causal=True)
    assert "_Attention" not in type(output.grad_fn).__name__
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    bias = torch.zeros(N, N, dtype=torch.float64, requires_grad=True)
    with attention.many_signals(attention.TILED_FROM):
        output = scaled_dot_product_attention(*short, attn_mask=bias, enable_gqa=True)
    assert pull_back(output, [bias], torch.ones(1, *output.shape, dtype=torch.float64))[0].any()


@pytest.mark.parametrize("groups", [2, 4])
def test_half_precision_keeps_its_dtype_and_accumulates_in_float32(monkeypatch, groups):
    monkeypatch.setattr(attention, "TILED_FROM", 0)
    leaves = inputs(groups=groups, dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    _, got = signals_of(attention.many_signals(attention.TILED_FROM), leaves, is_causal=True)
    _, expected = signals_of(sdpa_kernel(SDPBackend.MATH), wide, is_causal=True)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).norm() < 0.02 * b.norm()
