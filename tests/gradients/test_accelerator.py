"""Where a machine has an accelerator: every level there gives what the reference gives on the CPU in float64."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from otb_analysis.devices import device_of
from otb_analysis.gradients import (
    gradient_attribution,
    gradient_sketch,
    group_gradient_gram,
    sampled_score_norms,
    sketch_score_norms,
    token_score_norms,
    weighted_score_norms,
)
from otb_analysis.gradients.exact.verdicts import arithmetic
from tests.gradients import conftest, test_architectures

BUILT = {name: conftest.build for name in conftest.FAMILIES} | {
    name: test_architectures.build for name in test_architectures.ROUTED | test_architectures.OTHERS
}
FAST = list(conftest.FAMILIES)
GROUP = np.array([0, 0, 1, 1, 2])
needs_one = pytest.mark.skipif(device_of().type == "cpu", reason="this machine has no accelerator")
BOUND = 5e-6  # of the largest, as on a CPU in float32


@pytest.fixture(params=BUILT)
def two(request):
    """A model in float64 on the CPU, and its copy in float32 on the accelerator."""
    exact = BUILT[request.param](request.param)
    return exact, deepcopy(exact).float().to(device_of())  # pyright: ignore[reportArgumentType]


def near(got, expected, bound=BOUND):
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()


def weights_of(batch, rows=3):
    return np.random.default_rng(0).normal(size=(len(batch.input_ids), rows, batch.input_ids.shape[1]))


@needs_one
@pytest.mark.parametrize("engine", ["auto", "generic", "reference"])
def test_norms_and_rows(two, sample, engine):
    exact, there = two
    batch, weights = sample["both"], weights_of(sample["both"])
    got, expected = (
        token_score_norms(model, *batch.args, batch.attention_mask, engine=e, path=True)
        for model, e in ((there, engine), (exact, "reference"))
    )
    near(got.norm_sq, expected.norm_sq)
    near(got.path_norm_sq, expected.path_norm_sq)
    near(got.logprob, expected.logprob)
    near(
        weighted_score_norms(there, *batch.args, weights, batch.attention_mask, engine=engine),
        weighted_score_norms(exact, *batch.args, weights, batch.attention_mask, engine="reference"),
    )


@needs_one
def test_drawn_tokens_gram_sketch_and_attribution(two, sample):
    exact, there = two
    batch, weights = sample["both"], weights_of(sample["both"])
    known = token_score_norms(exact, *batch.args, batch.attention_mask, engine="reference")
    near(sampled_score_norms(there, *batch.args, batch.attention_mask, tokens=99).norm_sq, known.norm_sq)
    got, expected = (
        group_gradient_gram(model, *batch.args, weights, GROUP, batch.attention_mask, engine=engine)
        for model, engine in ((there, "auto"), (exact, "reference"))
    )
    near(got, expected)
    here, other = (gradient_sketch(m, *batch.args, weights, GROUP, batch.attention_mask, dim=256) for m in two)
    near(other, here)
    for method in ("jvp", "difference"):
        got, expected = (
            gradient_attribution(m, *batch.args, weights[:, 0], batch.attention_mask, method=method)
            for m in (there, exact)
        )
        near(got.alignment, expected.alignment, 1e-3 if method == "difference" else 2e-5)


@needs_one
@pytest.mark.parametrize("name", FAST)
def test_estimates_by_directions(name, sample):
    batch, here = sample["left"], BUILT[name](name, dtype=torch.float32)  # directions depend on the dtype
    there = deepcopy(here).to(device_of())
    for method in ("hybrid", "rank_one", "gaussian"):
        got, expected = (
            sketch_score_norms(m, *batch.args, batch.attention_mask, directions=4, method=method).norm_sq
            for m in (there, here)
        )
        near(got, expected, 1e-4)


@needs_one
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_coarser_products_are_used_where_a_probe_agrees(name, precision):
    there = BUILT[name](name, dtype=torch.float32).to(device_of())
    used, why = arithmetic(there, precision)
    assert used in ("float32", precision) and bool(why) == (precision != "float32")


@needs_one
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("engine", ["auto", "generic", "reference"])
def test_weights_in_bfloat16(name, engine, sample):
    batch, there = sample["both"], BUILT[name](name).bfloat16().to(device_of())
    exact = deepcopy(there).double().cpu()
    weights = weights_of(batch)
    got, expected = (
        token_score_norms(m, *batch.args, batch.attention_mask, engine=e)
        for m, e in ((there, engine), (exact, "reference"))
    )
    near(got.norm_sq, expected.norm_sq)
    rows, known = (group_gradient_gram(m, *batch.args, weights, GROUP, batch.attention_mask) for m in (there, exact))
    near(rows, known)
