"""Critical tokens: the formula, the halves, who is fitted on what, a run that stores them, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import softmax

from otb_analysis.config import ContrastSchedule, MeasureConfig, ObjectiveConfig, SampleConfig, Schedule
from otb_analysis.errors import InputError
from otb_analysis.measurement import level as contrast
from otb_analysis.measurement.level import contrasts, fitted, fitted_rows, halves, token_contrast
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.rollouts.sampling import sample
from otb_analysis.store import RunStore
from otb_analysis.training.check import check

PLAN = ContrastSchedule(every=1, steps=4, batch=4)
OFF = Schedule(0, 0)


def test_contrast_is_the_softmax_of_twice_the_right_logits_less_the_wrong_ones():
    random = np.random.default_rng(0)
    right, wrong, token = random.normal(size=(3, 5, 7)), random.normal(size=(3, 5, 7)), random.integers(7, size=(3, 5))
    expected = np.take_along_axis(softmax(2 * right - wrong, axis=-1), token[..., None], -1)[..., 0]
    found = token_contrast(*map(torch.tensor, (right, wrong, token)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    # log-probabilities in place of logits change nothing
    logs = (torch.log_softmax(torch.tensor(z), -1) for z in (right, wrong))
    np.testing.assert_allclose(token_contrast(*logs, torch.tensor(token)).numpy(), expected, rtol=1e-12)


def test_worked_contrast():
    # right (½, ½) and wrong (¼, ¾): p₊²/p₋ = (1, ⅓), so ¾ and ¼
    logs = [torch.log(torch.tensor(p, dtype=torch.float64)).expand(2, 2) for p in ([0.5, 0.5], [0.25, 0.75])]
    np.testing.assert_allclose(token_contrast(*logs, torch.tensor([0, 1])).numpy(), [0.75, 0.25], rtol=1e-12)


def test_halves_share_right_and_wrong_rollouts_of_every_group():
    random = np.random.default_rng(1)
    group, right = np.repeat(np.arange(40), 9), random.random(360) < 0.5
    half = halves(group, right, shift=3)
    for g in range(40):
        for kind in (right, ~right):
            counts = np.bincount(half[(group == g) & kind], minlength=2)
            assert abs(counts[0] - counts[1]) <= 1
    for kind in (right, ~right):  # odd ones out do not all go to one half
        counts = np.bincount(half[kind], minlength=2)
        assert abs(counts[0] - counts[1]) < 25
    assert (halves(group, right, 0) != halves(group, right, 1)).all()


def test_copies_are_fitted_on_groups_that_have_both_kinds_in_their_half():
    group = np.repeat(np.arange(6), 4)
    right = np.tile([True, True, False, False], 6)
    right[:4] = True  # one group is all right: it says nothing about wrong answers to its prompt
    half = halves(group, right)
    for number in (0, 1):
        good, bad = fitted_rows(group, right, half, number)
        assert len(good) == len(bad) == 5 and not np.isin(group[np.r_[good, bad]], 0).any()
        assert right[good].all() and not right[bad].any() and (half[np.r_[good, bad]] == number).all()
    with pytest.raises(InputError, match="0 right and 0 wrong"):
        fitted_rows(group, np.ones(24, bool), half, 0)


@pytest.fixture
def step(made):
    """A trainer with sampled rollouts, half of which count as right."""
    trainer = made()
    config = replace(trainer.config.sample, prompts=6, group_size=8)
    torch.manual_seed(5)
    prompts = [trainer.task.prompt("train", i) for i in range(6)]
    rollouts = compute_rewards(
        trainer.task, sample(trainer.generator, trainer.tokenizer, trainer.task, prompts, config)
    )
    return trainer, rollouts, np.tile([True, False], 24)


def test_no_copy_scores_what_it_was_fitted_on_and_every_policy_token_is_scored(step, monkeypatch):
    trainer, rollouts, right = step
    seen: list[tuple[str, frozenset[int]]] = []
    real_fitted, real_tensors, fitting = contrast.fitted, type(rollouts).tensors, []

    def watched_fit(model, rollouts, rows, *rest):
        seen.append(("fit", frozenset(rows)))
        fitting.append(True)
        copy = real_fitted(model, rollouts, rows, *rest)
        fitting.pop()
        return copy

    def watched_tensors(rollouts, device, rows):
        if not fitting:
            seen.append(("score", frozenset(rows)))
        return real_tensors(rollouts, device, rows)

    monkeypatch.setattr(contrast, "fitted", watched_fit)
    monkeypatch.setattr(type(rollouts), "tensors", watched_tensors)
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    state = torch.get_rng_state()
    found = contrasts(trainer.model, rollouts, right, PLAN, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], x) for name, x in trainer.model.state_dict().items())
    np.testing.assert_array_equal(np.isfinite(found), rollouts.policy_tokens())
    assert ((found[rollouts.policy_tokens()] >= 0) & (found[rollouts.policy_tokens()] <= 1)).all()
    parts = "".join(what[0] for what, _ in seen)
    second = parts.index("f", parts.index("s"))  # two fits, their scores, and the same of the other half
    assert parts.count("f") == 4 and parts.startswith("ffs") and parts[second:].startswith("ffs")
    for part in (seen[:second], seen[second:]):
        rows = {kind: frozenset().union(*(r for what, r in part if what == kind)) for kind in ("fit", "score")}
        assert rows["fit"] and rows["score"] and not rows["fit"] & rows["score"]
    again = contrasts(trainer.model, rollouts, right, PLAN, seed=0)
    np.testing.assert_array_equal(found, again)


def test_scores_are_those_of_the_copies_token_by_token(step):
    """The slow way: each copy's distribution at each token, in float64."""
    trainer, rollouts, right = step
    half = halves(rollouts.group, right, 0)
    found = contrasts(trainer.model, rollouts, right, PLAN, seed=0)
    random = np.random.default_rng([0, 0])
    copies = [
        fitted(trainer.model, rollouts, rows, PLAN, random) for rows in fitted_rows(rollouts.group, right, half, 0)
    ]
    n = int(np.flatnonzero(half == 1)[0])
    ids, start = rollouts.input_ids[n], int(rollouts.prompt_length[n])
    for t in np.flatnonzero(rollouts.policy_tokens()[n]):
        x = torch.tensor(ids[None, : start + t + 1])
        with torch.no_grad():
            right_z, wrong_z = (c(x, torch.ones_like(x))[0, -1].double().numpy() for c in copies)
        assert found[n, t] == pytest.approx(softmax(2 * right_z - wrong_z)[ids[start + t]], rel=2e-5)


def test_copies_learn_to_tell_the_kinds_apart(step):
    """A token that only right rollouts begin with has a high contrast, one of wrong ones a low one."""
    trainer, rollouts, right = step
    ids, rows = rollouts.input_ids.copy(), np.arange(len(right))
    ids[rows, rollouts.prompt_length] = np.where(right, 5, 6)
    plan = ContrastSchedule(every=1, steps=60, batch=12, learning_rate=3e-3)
    found = contrasts(trainer.model, replace(rollouts, input_ids=ids), right, plan, seed=1)
    assert found[right, 0].min() > 0.9 and found[~right, 0].max() < 0.1


def test_a_run_stores_the_contrast_and_watching_changes_nothing(trained, half_task):
    settings = {"task": "half", "sample": SampleConfig(prompts=8, group_size=8, max_new_tokens=6)}
    watched = trained("contrast", measure=MeasureConfig(exact=OFF, contrast=PLAN), **settings)
    quiet = trained("no-contrast", measure=MeasureConfig(exact=OFF), **settings)
    columns = ["step", "rollout", "t", "logprob", "advantage"]
    first, second = (RunStore(path).tokens_df(columns=columns) for path in (watched, quiet))
    assert first.equals(second)
    stored = RunStore(watched).tokens_df(columns=["contrast", "mask"])
    assert stored["contrast"][stored["mask"]].between(0, 1).all()
    assert RunStore(quiet).tokens_df(columns=["contrast"])["contrast"].isna().all()


def test_a_weighed_update_follows_what_is_stored_and_goes_on_where_all_are_right(trained, half_task):
    settings = {"task": "half", "sample": SampleConfig(prompts=8, group_size=8, max_new_tokens=6)}
    objective = ObjectiveConfig(token_weight="critical")
    run = RunStore(
        trained("critical", measure=MeasureConfig(exact=OFF, contrast=PLAN), objective=objective, **settings)
    )
    plain = RunStore(trained("no-contrast", measure=MeasureConfig(exact=OFF), **settings))
    first, second = (store.steps_df(columns=["grad_norm"])["grad_norm"] for store in (run, plain))
    assert run.tokens_df([0], ["contrast", "mask"]).query("mask")["contrast"].notna().all()
    assert first[0] != second[0]
    all_right = replace(PLAN, threshold=-1.0)
    measure = MeasureConfig(exact=OFF, contrast=all_right)
    alike = RunStore(trained("all-right", measure=measure, objective=objective, **settings))
    assert alike.steps_df(columns=["grad_norm"])["grad_norm"].tolist() == second.tolist()
    assert alike.tokens_df(columns=["contrast"])["contrast"].isna().all()


@pytest.mark.parametrize("every", [0, 2])
def test_a_weight_that_reads_the_contrast_wants_it_at_every_step(every, made):
    config = replace(made().config, objective=ObjectiveConfig(token_weight="critical"))
    with pytest.raises(InputError, match=r"set measure\.contrast\.every to 1"):
        check(replace(config, measure=replace(config.measure, contrast=ContrastSchedule(every=every))))
