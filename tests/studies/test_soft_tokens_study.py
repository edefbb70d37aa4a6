"""Study 16: the gradient that flows through soft tokens, and moments from pairs of prompts."""

import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from otb_analysis.config import ChainSumConfig, SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.estimators import estimate
from otb_analysis.gradients import group_gradient_gram, token_score_norms, weighted_score_norms
from otb_analysis.tasks.task_calls import distinct_prompts
from studies.lib.policies import fresh_policy, write
from studies.lib.record import load_study

NAMES = load_study(Path(__file__).parent.parent.parent / "studies" / "16_soft_tokens").names
STUDY = sys.modules["study_16_soft_tokens.study"]
CONFIG = TrainConfig(
    small_model=SmallModelConfig(layers=1, width=8, heads=2, key_value_heads=1, feed_forward=8, tied=False),
    chain_sum=ChainSumConfig(terms_max=2, largest=20),
)


@pytest.fixture(scope="module")
def policy():
    policy = fresh_policy(CONFIG)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return policy


@pytest.fixture(scope="module")
def written(policy):
    sample = SampleConfig(prompts=2, group_size=3, max_new_tokens=6, temperature=0.9, soft=3, soft_noise=0.5)
    return write(policy, distinct_prompts(policy.task, "train", 2), sample, seed=0)


def rows_of(written, prompt):
    """Ids and mask of one prompt's rollouts."""
    rows = torch.as_tensor(written.rollouts.group == prompt)
    ids, mask, attention = (x[rows] for x in written.batch)
    length = int(attention.sum(1).max())
    return ids[:, :length], mask[:, :length], attention[:, :length]


def test_answers_are_as_likely_as_where_soft_tokens_are_given(policy, written):
    ids, mask, attention = rows_of(written, 0)
    soft = written.rollouts.soft
    values = STUDY.answer_logprobs(policy.model, ids, mask, soft, 0.9).detach().numpy()
    scored = token_score_norms(policy.model, ids, mask, attention, temperature=0.9, soft=soft).logprob
    discrete = (mask & ~soft.among(ids)).numpy()
    np.testing.assert_allclose(values[discrete[:, 1:]], scored[discrete], atol=1e-4)
    assert (values[~discrete[:, 1:]] == 0).all()


def test_gradient_through_soft_tokens_is_that_of_answers_whose_noise_is_held(policy, written):
    model, soft = deepcopy(policy.model).double(), written.rollouts.soft
    ids, mask, _ = rows_of(written, 1)
    padding = model.get_input_embeddings().weight[:1].detach().clone()  # what is read of it has no gradient
    here = soft.among(ids)
    values = STUDY.answer_logprobs(model, ids, mask, soft, 0.9)
    gradient = torch.autograd.grad(values.sum(), list(model.parameters()))
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]

    def replayed(noise):
        """Σ log π of the answers with h̃ = pE + noise made anew; and the noise that makes the vectors drawn."""
        table, made = model.get_input_embeddings().weight, {}
        rows = torch.cat([padding, table[1:]])
        read = [rows[ids[:, k].masked_fill(here[:, k], 0)] for k in range(ids.shape[1])]
        for k in here[0].nonzero()[:, 0].tolist():
            z = model(inputs_embeds=torch.stack(read[:k], 1), use_cache=False).logits[:, -1] / 0.9
            mean = z.softmax(-1) @ table
            made[k] = soft.embed(ids[:, k]) - mean if noise is None else noise[k]
            read[k] = mean + made[k]
        logits = model(inputs_embeds=torch.stack(read, 1), use_cache=False).logits / 0.9
        total = sum(logits[n, k - 1].log_softmax(-1)[ids[n, k]] for n, k in (mask & ~here).nonzero().tolist())
        return float(total), made

    with torch.no_grad():
        _, noise = replayed(None)
        step, ends = 1e-4, []
        for sign in (1, -2):
            for parameter, d in zip(model.parameters(), direction, strict=True):
                parameter.add_(sign * step * d)
            ends.append(replayed(noise)[0])
    slope = float(sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-4)


def test_parts_of_a_gradient_add_up(policy, written):
    weights = np.where(written.table.mask, 1.0, 0.0)[None]
    each = np.arange(len(written.table.group))
    found = STUDY.by_scores(policy, written, weights, each, 1 << 14)[0]
    ids, mask, attention = written.batch
    whole = weighted_score_norms(
        policy.model, ids, mask, mask[:, None].float(), attention, temperature=0.9, soft=written.rollouts.soft
    )[:, 0]
    np.testing.assert_allclose(np.square(found).sum(axis=1), whole, rtol=0.1)
    total = STUDY.sketched(policy.model, tuple(torch.ones_like(p) for p in policy.model.parameters()), 1 << 14)
    size = policy.model.get_input_embeddings().weight.numel()
    parts = np.square(total).reshape(2, -1).sum(axis=1)
    np.testing.assert_allclose(parts, [size, policy.model.num_parameters() - size], rtol=0.15)


def test_direction_is_the_mean_gradient_of_rloo(policy):
    prompts, config = distinct_prompts(policy.task, "train", 4), SampleConfig(prompts=4, group_size=8, max_new_tokens=6)
    paid = replace(policy, task=SimpleNamespace(name="odd", reply=lambda *_: None, reward=odd))
    direction = STUDY.discrete_gradient(paid, prompts, config, 3)
    written = write(paid, prompts, config, seed=1003)
    weights = written.rollouts.by_column(estimate("rloo", written.table.inputs(None)).advantage[None] / 32)
    ids, mask, attention = written.batch
    gram = group_gradient_gram(policy.model, ids, mask, weights, np.zeros(32, int), attention)
    assert sum(float(d.square().sum()) for d in direction) == pytest.approx(gram.item(), rel=1e-5) != 0


def odd(prompt, turns):
    """Pay what an untrained model gets now and then."""
    return [{"odd": float(turns[-1].text[:1] in tuple("13579"))}]


def test_moments_by_hand():
    # prompts' gradients (1, 0), (3, 0), (2, 2): pairs 3, 2, 6, so ‖m‖² = 11/3; power (1 + 9 + 8)/3 = 6
    g = np.array([[1.0, 0.0], [3.0, 0.0], [2.0, 2.0]])
    assert NAMES["cross_product"](g, g) == pytest.approx(11 / 3)
    assert NAMES["variance"](g) == pytest.approx(6 - 11 / 3)
