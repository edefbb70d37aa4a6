"""Norms of tokens and of whole rollouts from one pass over each."""

import numpy as np
import pytest
import torch

from otb_analysis.gradients import token_score_norms, weighted_score_norms
from otb_analysis.gradients.exact import generic
from otb_analysis.gradients.manual import fast

# The second rollout is the beginning of the first, the third parts from it, the fourth is the first again; the fifth
# has two turns, and the sixth samples what the fifth reads.
TEXTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4], [1, 2, 3, 7, 8], [1, 2, 3, 4, 5, 6], [9, 3, 4, 5, 6], [9, 3, 4, 5, 6]]
MASKS = [[0, 0, 1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 1], [0, 1, 1, 1, 1]]


@pytest.fixture
def batch(make_sample):
    return make_sample(TEXTS, MASKS, "both")


@pytest.mark.parametrize("engine", ["auto", "fast", "generic", "reference"])
@pytest.mark.parametrize("scope", ["all", "lm_head", "layers.1"])
@pytest.mark.parametrize("path", [False, True])
def test_whole_rollouts_have_the_norm_of_a_row_of_ones(make_model, batch, engine, scope, path):
    model, options = make_model("qwen2"), {"attention_mask": batch.attention_mask, "scope": scope}
    found = token_score_norms(model, *batch.args, engine=engine, path=path, whole=True, **options)
    plain = token_score_norms(model, *batch.args, engine="reference", path=True, **options)
    ones = weighted_score_norms(model, *batch.args, batch.mask[:, None].double(), engine="reference", **options)
    np.testing.assert_allclose(found.rollout_norm_sq, ones[:, 0], rtol=3e-6)
    np.testing.assert_allclose(found.norm_sq, plain.norm_sq, rtol=3e-6)
    np.testing.assert_allclose(found.logprob, plain.logprob, rtol=3e-6)
    assert (found.path_norm_sq is None) is not path
    assert token_score_norms(model, *batch.args, engine=engine, **options).rollout_norm_sq is None


@pytest.mark.parametrize("engine", [fast, generic], ids=["fast", "generic"])
def test_both_come_from_one_pass_and_a_token_is_measured_once(make_model, batch, monkeypatch, engine):
    taken, first = [], []
    kind = "ManualBackward" if engine is fast else "DecomposedRollout"
    take_apart, measure = getattr(engine, kind), engine._rollout_norms

    def passes(*args, **options):
        taken.append(1)
        return take_apart(*args, **options)

    def from_first(apart, path, rollout, start, rows):
        first.append((len(rollout.columns), start))
        return measure(apart, path, rollout, start, rows)

    model, options = make_model("qwen2"), {"attention_mask": batch.attention_mask, "engine": engine.NAME}
    token_score_norms(model, *batch.args, **options)  # looks at the model first
    monkeypatch.setattr(engine, kind, passes)
    monkeypatch.setattr(engine, "_rollout_norms", from_first)
    token_score_norms(model, *batch.args, whole=True, **options)
    # Five different rollouts. The second holds nothing new; the third's first token is the first's.
    assert len(taken) == 5 and sorted(first) == [(2, 0), (2, 2), (3, 1), (4, 0), (4, 1)]


def test_a_batch_without_sampled_tokens_has_norms_of_zero(make_model):
    ids = torch.tensor([[1, 2, 3]])
    found = token_score_norms(make_model("llama"), ids, torch.zeros_like(ids, dtype=torch.bool), whole=True)
    assert not found.norm_sq.any() and not found.rollout_norm_sq.any()
