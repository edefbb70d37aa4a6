"""Updates of other sizes on the same prompts: ratios against those of updates measured one by one."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import (
    Gram,
    Update,
    gain_lost,
    jackknife_interval,
    paired_ratios,
    pooled_statistics,
    update_ratios,
)

RLOO, OTB = ("rloo", "none"), ("otb", "exact")
PROMPTS, PARTS = 20, 4


@pytest.fixture(scope="module")
def sizes():
    """Gradients [2, 20, 4, 5] of four small groups a prompt; their means [2, 20, 1, 5] are one large group's."""
    rng = np.random.default_rng(0)
    truth = np.array([[2.0, 1, 0, 0, 0], [1.5, 1, 0.3, 0, 0]])
    small = truth[:, None, None] + rng.normal(size=(2, PROMPTS, PARTS, 5))
    return {1: small, PARTS: small.mean(axis=2, keepdims=True)}


def gram_of_groups(g, keep=None):
    names = [str(p) for p in range(g.shape[1]) for _ in range(g.shape[2])]
    rows = g.reshape(2, -1, g.shape[-1])
    if keep is not None:
        chosen = [k for k, name in enumerate(names) if name in keep]
        rows, names = rows[:, chosen], [names[k] for k in chosen]
    return Gram(np.einsum("mpd,nqd->mnpq", rows, rows), (RLOO, OTB), rows.shape[1], prompt=tuple(names))


def measured(g, label, n_prompts, keep=None):
    (row,) = [r for r in pooled_statistics([gram_of_groups(g, keep)], n_prompts=n_prompts) if r.estimator == label[0]]
    return {"variance": row.variance, "sf": row.sf, "efficiency": row.efficiency}


@pytest.mark.parametrize(("many", "few"), [(32, 8), (8, 8), (8, 64)])
def test_ratio_is_that_of_the_two_updates_and_leaves_a_prompt_out_of_both(sizes, many, few):
    above = Update([gram_of_groups(sizes[1])], OTB, many)
    below = Update([gram_of_groups(sizes[PARTS])], RLOO, few)
    found = update_ratios(above, below)
    every = [str(p) for p in range(PROMPTS)]
    kept = [every, *([name for name in every if name != out] for out in every)]
    pairs = [(measured(sizes[1], OTB, many, k), measured(sizes[PARTS], RLOO, few, k)) for k in kept]
    assert (found.estimator, found.energy_source, found.against) == (*OTB, RLOO)
    for name in ("variance", "sf", "efficiency"):
        ratio = np.array([a[name] / b[name] for a, b in pairs])
        expected, own = jackknife_interval(ratio[0], ratio[1:], "", "log"), getattr(found, name)
        assert (own.estimate, own.low, own.high) == pytest.approx((expected.estimate, expected.low, expected.high))


def test_same_update_twice_is_one(sizes):
    update = Update([gram_of_groups(sizes[1])], OTB, 8)
    found = update_ratios(update, update)
    assert (found.sf.estimate, found.sf.low, found.sf.high) == pytest.approx((1, 1, 1))


def test_twice_the_prompts_halve_variance_and_sf(sizes):
    grams = [gram_of_groups(sizes[1])]
    found = update_ratios(Update(grams, OTB, 16), Update(grams, OTB, 8))
    assert (found.variance.estimate, found.sf.high) == pytest.approx((0.5, 0.5))
    assert 1 < found.efficiency.low < found.efficiency.estimate < 2
    assert "16 prompts to that of otb with 8" in found.efficiency.estimand


def test_paired_ratios_are_those_of_updates_of_one_size(sizes):
    grams = [gram_of_groups(sizes[1])]
    (pair,) = paired_ratios(grams, n_prompts=8)
    assert pair == update_ratios(Update(grams, OTB, 8), Update(grams, RLOO, 8))


def test_other_prompts_are_one_sentence(sizes):
    whole, part = gram_of_groups(sizes[1]), gram_of_groups(sizes[1], keep=["3", "5"])
    with pytest.raises(InputError, match="measured on other prompts"):
        update_ratios(Update([whole], OTB, 8), Update([part], RLOO, 8))


def test_gain_lost_is_the_share_of_the_efficiency_difference(gram_of, noisy_prompts):
    rng = np.random.default_rng(2)
    g = noisy_prompts(rng, [[2, 1]] * 3, 400, noise=0.0)
    for m, scale in enumerate((2.0, 0.5, 1.0)):
        g[m] += scale * rng.normal(size=g[m].shape)
    labels = (("rloo", "none"), ("otb", "exact"), ("otb", "proxy"))
    gram = Gram(gram_of(g), labels, 400)
    rloo, exact, proxy = (row.efficiency for row in pooled_statistics([gram], n_prompts=8))
    found = gain_lost([gram], labels[2], labels[1], n_prompts=8)
    assert found is not None and rloo is not None and exact is not None and proxy is not None
    assert found.estimate == pytest.approx((exact - proxy) / (exact - rloo))
    # V = .5 + 2·scale² is 8.5, 1, 2.5 and ‖∇J‖² = 5: efficiencies at P = 8 are .825, .976, .941, the share .229.
    assert found.low is not None and found.high is not None
    assert found.low < 0.229 < found.high and found.n_clusters == 400


def test_a_perfect_proxy_loses_nothing(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(3), [[2, 1]] * 3, 20)
    g[1] *= 0.5
    g[0] += 0.5 * np.random.default_rng(4).normal(size=g[0].shape)
    g[2] = g[1]
    labels = (("rloo", "none"), ("otb", "exact"), ("otb", "proxy"))
    found = gain_lost([Gram(gram_of(g), labels, 20)], labels[2], labels[1])
    assert found is not None and (found.estimate, found.low, found.high) == (0, 0, 0)


def test_without_a_gain_there_is_no_share(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(5), [[2, 1]] * 3, 20)
    g[1:] = g[0]
    labels = (("rloo", "none"), ("otb", "exact"), ("otb", "proxy"))
    gram = Gram(gram_of(g), labels, 20)
    assert gain_lost([gram], labels[2], labels[1]) is None
    assert gain_lost([gram], ("opo", "proxy"), labels[1]) is None
    assert gain_lost([], labels[2], labels[1]) is None
