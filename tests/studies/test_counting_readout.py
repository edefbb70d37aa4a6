"""Study 10: what is trained, what is read, and the share of the score, against automatic derivatives."""

import importlib
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from studies.lib.policies import fresh_policy
from studies.lib.record import load_study

NAMES = load_study(Path(__file__).parent.parent.parent / "studies" / "10_counting_readout").names
study = importlib.import_module("study_10_counting_readout.study")
SETTINGS = {"seed": 0, "steps": 2, "rates": study.RATES, "task": asdict(study.TASK)}


@pytest.fixture(scope="module")
def policy():
    return fresh_policy(study.config(SETTINGS, "direct", 2))


@pytest.mark.parametrize("arm", study.ARMS)
def test_an_arm_trains_its_parameters_and_no_others(policy, arm):
    digits = study.digit_ids(policy.tokenizer)
    model = deepcopy(policy.model)
    assert list(study.train(replace(policy, model=model), arm, digits, SETTINGS)) == [0, 1, 2]
    before, after = (dict(m.named_parameters()) for m in (policy.model, model))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    others = torch.ones(len(before["lm_head.weight"]), dtype=torch.bool)
    others[digits] = False
    rows = [bool((before["lm_head.weight"] != after["lm_head.weight"])[part].any()) for part in (~others, others)]
    assert rows == {"rows": [True, False], "rest": [False, True], "all": [True, True]}[arm]
    assert (moved == {"lm_head.weight"}) == (arm == "rows")
    assert all(p.requires_grad for p in model.parameters())


def test_share_of_the_score_is_that_of_the_gradient(policy):
    digits, text = study.digit_ids(policy.tokenizer), [4, 5, 6, 7]
    found = study.shares(policy.model, [text], digits, seed=3)
    logprob = policy.model(input_ids=torch.tensor([text])).logits[0, -1].double().log_softmax(-1)
    drawn = torch.multinomial(logprob.exp()[None], 1, generator=torch.Generator().manual_seed(3)).item()
    named = dict(policy.model.named_parameters())
    power = dict(
        zip(named, (g.square() for g in torch.autograd.grad(logprob[drawn], list(named.values()))), strict=True)
    )
    whole, layer = sum(float(g.sum()) for g in power.values()), power["lm_head.weight"]
    rows = float(layer[digits].sum())
    assert found["norm_sq"] == pytest.approx(whole, rel=1e-4)
    assert (found["of_layer"], found["of_score"]) == pytest.approx((rows / float(layer.sum()), rows / whole), rel=1e-4)


def test_texts_of_other_lengths_change_no_state(policy):
    digits = study.digit_ids(policy.tokenizer)
    alone = study.read(policy.model, [[4, 5, 6]], np.array([1]), digits)
    among = study.read(policy.model, [[4, 5, 6], [7, 8, 9, 4, 5, 6, 7]], np.array([1, 2]), digits)
    np.testing.assert_allclose(among.hidden[:, :1], alone.hidden, atol=1e-5)
    np.testing.assert_allclose(among.logprob[:1], alone.logprob, atol=1e-5)


def test_rows_trained_on_states_are_rows_trained_in_the_model(policy):
    digits = study.digit_ids(policy.tokenizer)
    text, count = [4, 5, 6, 7], np.array([3, 3])
    before = study.read(policy.model, [text, text], count, digits)
    how = {"rate": 1e-2, "steps": 2, "check": 1}
    rows = study.digit_rows(policy.model, digits)
    curve = list(study.rows_trained(before, rows, np.array([True, False]), how, 1))
    model = deepcopy(policy.model)
    weight = model.lm_head.weight
    with study.only(model, "rows", digits):

        def logprob():
            return model(input_ids=torch.tensor([text])).logits[0, -1].log_softmax(-1)[digits[3]]

        for step in study.descended([weight], how, lambda _: -logprob()):
            assert curve[step][1][0] == pytest.approx(float(logprob().detach().exp()), rel=1e-3), step
    assert curve[2][1][0] > curve[0][1][0]


def test_chance_of_an_angle():
    # In the plane mean |cos| of an even angle is 2/π, on a line 1.
    assert NAMES["chance"](2) == pytest.approx(2 / np.pi)
    assert NAMES["chance"](1) == pytest.approx(1)
