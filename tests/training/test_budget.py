"""A budget: what is measured follows from what it costs, and what it costs is kept."""

import numpy as np
import pytest

from otb_analysis.config import (
    AttributionSchedule,
    MeasureConfig,
    OptimizeConfig,
    SampleConfig,
    SampledSchedule,
    Schedule,
    TrainConfig,
)
from otb_analysis.phases import EXPECTED, NOTES
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.tasks import Prompt
from otb_analysis.training.budget import Budget, Prices, apart, events_of, plan, prompts_of


def batch(prompts=8, size=4, before=4, answers=4):
    """Rollouts of `before` prompt tokens and `answers` sampled ones."""
    n, width = prompts * size, before + answers
    mask = np.zeros((n, width), bool)
    mask[:, before:] = True
    return Rollouts(
        prompts=tuple(Prompt(str(p), "", "") for p in range(prompts)),
        group=np.repeat(np.arange(prompts), size),
        input_ids=np.zeros((n, width), np.int64),
        attention_mask=np.ones((n, width), bool),
        mask=mask,
        turn=np.zeros((n, width), np.int64),
        reward=np.zeros((n, width)),
        behavior_logprob=np.zeros((n, width)),
        prompt_length=np.full(n, before),
        turns=((),) * n,
        finish_reason=("stop",) * n,
    )


def prices(steps=60, exact_always=False, **measure):
    config = TrainConfig(
        sample=SampleConfig(8, 4, 4), optimize=OptimizeConfig(steps=steps), measure=MeasureConfig(**measure)
    )
    return Prices(config, batch(), 1e-3, exact_always)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 3.0, 10.0, 40.0, 1e3, 1e6])
@pytest.mark.parametrize("steps", [1, 7, 60])
@pytest.mark.parametrize("exact_always", [False, True])
def test_plan_never_costs_more_than_it_may(seconds, steps, exact_always):
    offer = prices(steps, exact_always)
    assert offer.total(plan(offer, 0, seconds), 0) <= seconds + 1e-9


def test_more_seconds_measure_first_pairs_then_more_prompts_then_more_steps():
    offer = prices(attribution=AttributionSchedule(split=False))  # set by the user, so nothing is kept for it
    seen = []
    for seconds in np.geomspace(0.1, 1e3, 60):
        exact = plan(offer, 0, seconds).exact
        seen.append((exact.prompts, events_of(exact, 0, 60)) if exact.every else (0, 0))
    assert seen[0] == (0, 0) and seen[-1] == (8, 60)
    prompts = [p for p, _ in seen]
    assert prompts == sorted(prompts)
    # No further steps while prompts are missing: those that six steps of one prompt more would cost
    assert all(events * p < 6 * (p + 1) for p, events in seen if p < 8)
    assert {p for p, events in seen if events and events < 4} == {2}


def test_where_no_pair_can_be_paid_tokens_are_drawn_and_else_nothing():
    offer = prices()
    pair = offer.event("exact", Schedule(1, prompts=2))
    drawn = offer.event("sampled", SampledSchedule(1))
    poor, poorest = plan(offer, 0, (pair + drawn) / 2), plan(offer, 0, 0.5 * drawn)
    assert drawn < pair
    assert not poor.exact.every and poor.sampled.every == 60
    assert not any(schedule.every for schedule in poorest.schedules.values())


def test_what_the_user_set_is_kept_and_paid_first():
    mine = Schedule(every=30, prompts=3)
    offer = prices(exact=mine)
    fixed = offer.event("exact", mine) * 2
    chosen = plan(offer, 0, fixed + 3.5 * offer.event("attribution", AttributionSchedule(1)))
    assert chosen.exact == mine
    assert events_of(chosen.attribution, 0, 60) == 3
    assert plan(offer, 0, 0.0).exact == mine


def test_plan_from_a_later_step_measures_no_earlier_one():
    chosen = plan(prices(), 20, 20.0)
    assert chosen.exact.first == 20 and not chosen.exact.due(0)


@pytest.mark.parametrize(("steps", "events", "every"), [(60, 6, 10), (60, 7, 9), (5, 5, 1), (7, 2, 4), (3, 1, 3)])
def test_events_are_apart_so_that_at_most_so_many_fit(steps, events, every):
    assert apart(steps, events) == every
    assert events_of(Schedule(every), 0, steps) <= events


def budget_of(share=0.25, steps=60, **measure):
    offer = prices(steps, budget=share, **measure)
    return Budget(offer.config, False), offer


def run(budget, offer, truth, usual=2.0, forward=0.02):
    """Seconds spent beside `usual` ones a step, where an event costs `truth` times its forecast."""
    spent = 0.0
    for step in range(budget.steps):
        if step == 0:
            budget.begin(0, offer.rollouts, offer.per_position, usual, forward)
        cost = 0.0
        for level, seconds in offer.levels(budget.measure):
            if level.due(step):
                EXPECTED[level.name] = truth * seconds
                cost += truth * seconds
        budget.record(step, {"sample": usual - 0.5, "update": 0.5, "forward": forward, "measure": cost})
        spent += cost + forward
    return spent / (usual * budget.steps)


@pytest.mark.parametrize("truth", [0.3, 0.8, 1.0, 1.5, 2.5, 6.0])
@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_share_is_kept_though_the_forecast_was_wrong(truth, share):
    budget, offer = budget_of(share)
    spent = run(budget, offer, truth)
    first = plan(offer, 0, (share * 2.0 - 0.02) * 60)
    at_once = truth * sum(s for level, s in offer.levels(first) if level.due(0)) / 120
    assert spent <= max(share * 1.05, at_once + 0.02)


def test_cheaper_than_forecast_means_more_is_measured():
    budget, offer = budget_of()
    assert run(budget, offer, 0.3) > 0.6 * 0.25


def test_interval_names_the_step_at_which_it_has_enough_prompts():
    budget, _ = budget_of(exact=Schedule(10, prompts=4))
    assert budget.interval(0) == "The 16 prompts of an interval take 4 steps, until step 30."
    assert "this run measures 8; raise --measure.budget" in budget_of(exact=Schedule(40, prompts=4))[0].interval(0)
    assert "No prompt" in budget_of()[0].interval(0)


def test_state_goes_on_where_it_was():
    one, offer = budget_of()
    one.begin(0, offer.rollouts, offer.per_position, 2.0, 0.02)
    for step in range(3):
        one.record(step, {"seconds_sample": 2.0, "seconds_measure": 1.0, "seconds_forward": 0.02})
    other, _ = budget_of()
    assert other.measure != one.measure
    other.load_state(one.state())
    assert vars(other) == vars(one) | {"config": other.config}


def test_forward_alone_beyond_the_budget_is_said_and_nothing_else_measured():
    NOTES.clear()
    budget, offer = budget_of(0.01)
    budget.begin(0, offer.rollouts, offer.per_position, 2.0, 0.05)
    assert not any(schedule.every for schedule in budget.measure.schedules.values())
    assert NOTES.pop() == (
        "measure.budget is 0.01, but the level forward, which always runs, takes 2.5% of a step: nothing else is "
        "measured."
    )


def test_attribution_waits_until_an_interval_has_its_prompts():
    offer = prices(steps=60)
    pair = offer.event("exact", Schedule(1, prompts=2))
    poor, rich = plan(offer, 0, 6 * pair), plan(offer, 0, 40 * pair)
    assert events_of(poor.exact, 0, 60) == 6 and not poor.attribution.every
    assert prompts_of(rich.exact, 0, offer.config) >= 16 and rich.attribution.every
