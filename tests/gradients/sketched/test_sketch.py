import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.gradients import batch_gradient, count_sketch, gradient_sketch, group_gradient_gram
from otb_analysis.gradients.batch import inputs
from otb_analysis.gradients.sketched.sketch import _STRIDE, CHUNK, Buckets, _mix

GROUP = np.array([7, -1, 7, 7, 2])  # sorted: −1, 2, 7


@pytest.fixture
def weights():
    return np.random.default_rng(0).normal(size=(5, 3, 12))


def test_a_sketch_is_signed_bucket_sums():
    # Each entry lands in one bucket with one sign, and the sketch of a vector is the sum of its entries' sketches.
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    single = [count_sketch(values[j : j + 1], j, 7, seed=3) for j in range(50)]
    for value, sketch in zip(values, single, strict=True):
        assert sketch.count_nonzero() == 1 and sketch.abs().sum() == value.abs()
    torch.testing.assert_close(count_sketch(values, 0, 7, seed=3), torch.stack(single).sum(0))
    signs = {float(torch.sign(s.sum() * v)) for s, v in zip(single, values, strict=True)}
    assert signs == {-1.0, 1.0}


def test_buckets_and_signs_are_uniform_and_seeds_unrelated():
    # 2·64 signed buckets and 2^16 entries: χ² has 127 degrees of freedom, mean 127, standard deviation 16.
    n, dim = 1 << 16, 64
    eye = torch.ones(n, dtype=torch.float64)
    for seed in range(4):
        total = count_sketch(eye, 0, dim, seed)  # n₊ − n₋ per bucket, variance n/dim each
        assert abs(float((total**2).sum() / n) - 1) < 4 * (2 / dim) ** 0.5
    places = torch.stack([count_sketch(torch.arange(1.0, 9.0), 10**12, 10**4, seed) for seed in range(50)])
    assert len({tuple(row.nonzero()[:, 0].tolist()) for row in places}) == 50


@pytest.mark.parametrize("cosine", [0.0, 0.6, 1.0])
def test_inner_products_are_unbiased_with_the_stated_error(cosine):
    # std² = (‖a‖²‖b‖² + ⟨a,b⟩² − 2Σ a_j²b_j²)/dim for independent hashes; the last term is what the bound leaves out.
    generator = torch.Generator().manual_seed(1)
    a, other = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
    b = cosine * a + (1 - cosine**2) ** 0.5 * other
    dim, seeds = 128, 1500
    estimates = np.array([float(count_sketch(a, 5, dim, s) @ count_sketch(b, 5, dim, s)) for s in range(seeds)])
    exact = float(a @ b)
    stated = float(((a @ a) * (b @ b) + exact**2) / dim) ** 0.5
    assert abs(estimates.mean() - exact) < 4 * estimates.std(ddof=1) / seeds**0.5
    assert estimates.std(ddof=1) == pytest.approx(stated, rel=4 * (1 / (2 * seeds)) ** 0.5 + 0.02)


def test_shards_add_up():
    values = torch.randn(2 * CHUNK + 777, generator=torch.Generator().manual_seed(2))
    whole = count_sketch(values, 11, 500)
    cuts = [0, 3, CHUNK - 1, 2 * CHUNK + 5, len(values)]
    parts = [count_sketch(values[a:b], 11 + a, 500) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)


def test_the_hash_is_splitmix64():
    # SplitMix64 from state 0 gives 16294208416658607535, then 7960286522194355700: its published first outputs.
    published = [x % 2**64 for x in _mix(torch.tensor([0, 1]), _STRIDE).tolist()]
    assert published == [16294208416658607535, 7960286522194355700]
    index = [0, 1, 2**20 + 3, 2**40]
    word = (1 << 64) - 1
    expected = [_finish((j * 0x9E3779B97F4A7C15 + 5) & word) for j in index]
    assert [x % 2**64 for x in _mix(torch.tensor(index), 5).tolist()] == expected


def _finish(x):
    word = (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
    return x ^ (x >> 31)


@pytest.mark.slow
def test_another_process_hashes_alike():
    code = (
        "import torch; from otb_analysis.gradients import count_sketch;"
        "print(count_sketch(torch.arange(1.0, 1001.0), 12345, 16, 9).tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(count_sketch(torch.arange(1.0, 1001.0), 12345, 16, 9).tolist())


@pytest.mark.parametrize("side", ["left", "both"])
def test_a_gradient_sketch_is_the_sketch_of_the_group_gradient(case, sample, weights, explicit_scores, side):
    batch = sample[side]
    got = gradient_sketch(case, *batch.args, weights, GROUP, batch.attention_mask, dim=64, seed=5)
    scores = explicit_scores(case, batch)
    for c, prompt in enumerate((-1, 2, 7)):
        for m in range(3):
            parts = [weights[n, m, t] * s for (n, t), s in scores.items() if GROUP[n] == prompt]
            expected = count_sketch(torch.from_numpy(np.sum(parts, axis=0)), 0, 64, seed=5).numpy()
            np.testing.assert_allclose(got[c, m], expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert got.dtype == np.float32 and got.shape == (3, 3, 64)


def fit(model, batch, steps=30):
    """Make the sampled tokens likely: a trained model's gradients are uneven, with few large entries."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        z = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].log_softmax(-1)
        logprob = z.gather(-1, batch.input_ids[:, 1:, None])[..., 0][batch.mask[:, 1:]]
        (-logprob.mean()).backward()
        optimizer.step()
    model.zero_grad()
    assert logprob.mean() > -1.5


def test_inner_products_agree_with_the_exact_gram_within_the_stated_error(make_model, sample, weights):
    model, batch = make_model("qwen3", dtype=torch.float32), sample["left"]
    fit(model, batch)
    args = (model, *batch.args, weights)
    gram = group_gradient_gram(*args, GROUP, batch.attention_mask).transpose(2, 0, 3, 1).reshape(9, 9)
    dim, seeds = 1024, 30
    estimates = []
    for seed in range(seeds):
        flat = gradient_sketch(*args, GROUP, batch.attention_mask, dim=dim, seed=seed).reshape(9, dim).astype(float)
        estimates.append(flat @ flat.T)
    power = np.diag(gram)
    stated = np.sqrt((power[:, None] * power + gram**2) / dim)
    z = (np.mean(estimates, axis=0) - gram) / (stated / seeds**0.5)
    assert np.abs(z).max() < 4
    spread = np.std(estimates, axis=0, ddof=1) / stated
    assert spread.min() > 0.3 and spread.max() < 1.6  # below 1 where few entries carry the gradient
    assert np.median(spread) < 1.1


def test_rollouts_in_a_cluster_add_up_and_clusters_come_sorted(make_model, sample, weights):
    model, batch = make_model("qwen2"), sample["left"]
    args = (model, *batch.args, weights)
    rollouts = gradient_sketch(*args, np.arange(5), batch.attention_mask, dim=256)
    groups = gradient_sketch(*args, GROUP, batch.attention_mask, dim=256)
    expected = np.stack([rollouts[1], rollouts[4], rollouts[[0, 2, 3]].sum(0)])
    np.testing.assert_allclose(groups, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("tied", [True, False])
def test_sketches_over_disjoint_scopes_add_up(make_model, sample, weights, tied):
    model, batch = make_model("llama", tied=tied), sample["both"]
    options = {"attention_mask": batch.attention_mask, "dim": 300}
    parts = ["embed_tokens", r"layers\.", r"^model\.norm"] + ([] if tied else ["lm_head"])
    total = sum(gradient_sketch(model, *batch.args, weights, GROUP, scope=s, **options) for s in parts)
    whole = gradient_sketch(model, *batch.args, weights, GROUP, **options)
    np.testing.assert_allclose(total, whole, rtol=0, atol=1e-6 * np.abs(whole).max())


def test_frozen_parameters_keep_their_place(make_model, sample, weights):
    model, batch = make_model("gpt2"), sample["left"]
    args = (model, *batch.args, weights, GROUP, batch.attention_mask)
    attention = gradient_sketch(*args, dim=100, scope=r"attn\.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn." in name)
    np.testing.assert_array_equal(gradient_sketch(*args, dim=100), attention)


def test_the_output_layer_has_the_place_of_its_weight_also_when_tied(make_model, sample, weights):
    model, batch = make_model("qwen3"), sample["left"]
    got = gradient_sketch(model, *batch.args, weights[:, :1], GROUP, batch.attention_mask, dim=90, scope="lm_head")
    rows = [0, 2, 3]  # of prompt 7
    head = batch_gradient(
        model, batch.input_ids[rows], batch.mask[rows], weights[rows, 0], batch.attention_mask[rows], scope="lm_head"
    )
    expected = count_sketch(head["lm_head.weight"], 0, 90).numpy()  # the embedding is the model's first parameter
    np.testing.assert_allclose(got[2, 0], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_padding_and_weights_outside_the_mask_are_never_read(case, sample, weights):
    plain = sample["right"]
    expected = gradient_sketch(case, *plain.args, weights, GROUP, plain.attention_mask, dim=80)
    for side in ("left", "both"):
        other = sample[side]
        garbage = torch.where(other.attention_mask.bool(), other.input_ids, -(10**6))
        moved = np.full((5, 3, 12), np.nan)
        for n in range(5):
            moved[n][:, other.mask[n].numpy()] = weights[n][:, plain.mask[n].numpy()]
        got = gradient_sketch(case, garbage, other.mask, moved, GROUP, other.attention_mask, dim=80)
        np.testing.assert_array_equal(got, expected)


def test_a_row_of_zeros_costs_no_backward_pass(make_model, sample, monkeypatch):
    model, batch = make_model("qwen3"), sample["left"]
    rows = np.zeros((5, 4, 12))
    rows[2, 1], rows[3, 2] = 1.0, 1.0  # rollout 3 has no sampled token
    calls, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    got = gradient_sketch(model, *batch.args, rows, np.arange(5), batch.attention_mask, dim=16)
    assert len(calls) == 1 and got[2, 1].any() and np.count_nonzero(got.any(-1)) == 1


def test_the_model_is_left_as_it_was_found(make_model, sample, weights):
    model, batch = make_model("qwen3"), sample["left"]
    model.model.norm.weight.grad = torch.full_like(model.model.norm.weight, 3.0)
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.inference_mode():
        gradient_sketch(model, *batch.args, weights, GROUP, batch.attention_mask, dim=8)
    assert model.training and all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert (model.model.norm.weight.grad == 3).all() and model.model.embed_tokens.weight.grad is None


def test_what_does_not_fit_is_named(make_model, sample, weights):
    model, batch = make_model("qwen2"), sample["left"]
    for match, error, change in (
        (r"weights has shape \(5, 12\)", InputError, {"weights": weights[:, 0]}),
        (r"cluster has shape \(4,\)", InputError, {"cluster": GROUP[:4]}),
        ("dim is 0", InputError, {"dim": 0}),
        ("rollout 0, row 0, token 9", NonFiniteError, {"weights": np.full((5, 3, 12), np.nan)}),
    ):
        options = {"weights": weights, "cluster": GROUP, "attention_mask": batch.attention_mask} | change
        with pytest.raises(error, match=match) as caught:
            gradient_sketch(model, *batch.args, **options)
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_more_buckets_than_memory_holds_are_refused_with_the_number_that_fits(make_model, sample, weights, monkeypatch):
    # Per bucket: 3 rows and 3 more of float64, 5 clusters of 3 rows in float32: 8·6 + 4·15 = 108 bytes.
    monkeypatch.setattr(inputs, "memory_bytes", lambda _device: 108 * 90)
    batch, cluster = sample["left"], np.arange(5)
    args = (make_model("qwen2"), *batch.args, weights, cluster, batch.attention_mask)
    with pytest.raises(InputError, match=r"dim is 91 but .* 90\."):
        gradient_sketch(*args, dim=91)
    assert gradient_sketch(*args, dim=90).shape == (5, 3, 90)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # a library's own
def test_adapters_are_sketched_over_what_trains_at_their_place_among_all_parameters(make_model, sample, weights):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model, batch = get_peft_model(make_model("qwen3"), config).eval(), sample["left"]
    got = gradient_sketch(model, *batch.args, weights, GROUP, batch.attention_mask, dim=90, seed=2)
    rows = [0, 2, 3]  # of prompt 7
    args = (batch.input_ids[rows], batch.mask[rows], weights[rows, 1], batch.attention_mask[rows])
    gradient, start, expected = batch_gradient(model, *args), 0, 0
    for name, parameter in model.named_parameters():
        if name in gradient:
            expected = expected + count_sketch(gradient[name], start, 90, 2).numpy()
        start += parameter.numel()
    assert len(gradient) == 8
    np.testing.assert_allclose(got[2, 1], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dim", [64, 90])
def test_kept_buckets_sketch_as_count_sketch_does(dim):
    values = torch.randn(CHUNK + 123, generator=torch.Generator().manual_seed(4))
    kept = Buckets(77, len(values), dim, 3, values.device)
    torch.testing.assert_close(kept.sketch(values), count_sketch(values, 77, dim, 3), rtol=0, atol=0)


def test_parameters_too_many_for_kept_buckets_are_hashed_anew(make_model, sample, weights, monkeypatch):
    model, batch = make_model("llama"), sample["left"]
    args = (model, *batch.args, weights, GROUP, batch.attention_mask)
    kept = gradient_sketch(*args, dim=100)
    monkeypatch.setattr("otb_analysis.gradients.sketched.sketch.KEPT", 0)
    np.testing.assert_array_equal(gradient_sketch(*args, dim=100), kept)
