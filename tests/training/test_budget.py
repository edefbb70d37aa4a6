"""A budget: what is measured follows from what it costs, and what it costs is kept."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from otb_analysis.config import (
    AttributionSchedule,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    SampledSchedule,
    Schedule,
    SketchSchedule,
    TrainConfig,
)
from otb_analysis.measurement.levels import drawn_share
from otb_analysis.phases import EXPECTED, NOTES
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.tasks import Prompt
from otb_analysis.training.budget import Budget, Prices, spread
from otb_analysis.training.forecast import Forecast, about, levels
from otb_analysis.training.setup import Trainer


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


def planned(offer, first, seconds):
    """What a budget measures from a step on for so many seconds, at the forecast's prices."""
    budget = Budget(replace(offer.config, measure=replace(offer.config.measure, budget=1.0)), offer.exact_always)
    budget.price = {name: offer.of(name) for name in offer.config.measure.schedules}
    budget._plan(first, seconds, early=True)
    return budget


def events_of(schedule, first, steps):
    return sum(map(schedule.due, range(first, steps)))


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 3.0, 10.0, 40.0, 1e3, 1e6])
@pytest.mark.parametrize("steps", [1, 7, 60])
@pytest.mark.parametrize("exact_always", [False, True])
def test_plan_never_costs_more_than_it_may(seconds, steps, exact_always):
    offer = prices(steps, exact_always)
    assert planned(offer, 0, seconds).cost(0) <= seconds + 1e-9


def test_more_seconds_measure_first_pairs_then_more_prompts_then_more_steps():
    offer = prices(attribution=AttributionSchedule(split=False), sampled=SampledSchedule(share=0.2))
    seen = []
    for seconds in np.geomspace(0.1, 1e4, 60):
        plan = planned(offer, 0, seconds).measure.gradients
        seen.append((plan.prompts, events_of(plan, 0, 60)) if plan.every else (0, 0))
    assert seen[0] == (0, 0) and seen[-1] == (8, 60)
    prompts = [p for p, _ in seen]
    assert prompts == sorted(prompts)
    assert {p for p, events in seen if events and p * events < MIN_CLUSTERS} == {2}


def test_gradients_of_an_intervals_prompts_come_first_then_drawn_tokens_then_norms():
    offer, bought = replace(prices(), rollouts=batch(answers=256)), []
    for seconds in np.geomspace(0.1, 1e5, 200):
        budget = planned(offer, 0, seconds)
        prompts = budget.cost(0, ["gradients"]) / budget.price["gradients"]
        if prompts < MIN_CLUSTERS and budget.measure.gradients.every:
            assert budget.cost(0, ["sampled", "exact", "attribution"]) < budget.price["gradients"] * 2
        bought.append([n for n in ("gradients", "sampled", "exact") if getattr(budget.measure, n).every])
    # Where two prompts are too dear, tokens are drawn in their place; then each level joins in its turn.
    firsts = [next(i for i, names in enumerate(bought) if level in names) for level in ("gradients", "exact")]
    assert firsts[0] < firsts[1] and all("sampled" in names for names in bought[firsts[1] :])


@pytest.mark.parametrize("answers", [4, 24, 256, 1024])
def test_norms_of_whole_groups_are_of_all_compared_prompts_or_of_one(answers):
    offer = replace(prices(), rollouts=batch(answers=answers))
    for seconds in np.geomspace(1, 1e4, 30):
        measure = planned(offer, 0, seconds).measure
        if measure.exact.every:
            assert measure.exact.prompts in (1, measure.gradients.prompts)
            assert all(measure.gradients.due(step) for step in range(60) if measure.exact.due(step))


@pytest.mark.parametrize(
    ("answers", "share"), [(4, 1.0), (24, 0.16666666666666666), (128, 0.0625), (256, 0.03125), (8192, 0.01)]
)
def test_few_tokens_of_long_answers_are_drawn_and_enough_of_short_ones(answers, share):
    rollouts = batch(answers=answers)
    assert drawn_share(rollouts) == pytest.approx(share)


def test_long_answers_have_an_intervals_prompts_within_sixty_steps_at_a_quarter():
    # 16 prompts of 4 rollouts of 1,024 tokens; a step samples (2 passes, as if that were cheap), scores and updates.
    rollouts = batch(16, 4, 50, 1024)
    config = TrainConfig(
        sample=SampleConfig(16, 4, 1024), optimize=OptimizeConfig(steps=200), measure=MeasureConfig(budget=0.25)
    )
    budget, each = Budget(config, False), 1e-3
    usual = 3.3 * each * float(rollouts.attention_mask.sum())
    budget.begin(0, rollouts, each, usual, 0.0)
    due = [budget.measure.prompts_due(step, 16)[1] for step in range(60)]
    assert sum(due) >= MIN_CLUSTERS


def test_where_no_pair_can_be_paid_tokens_are_drawn_and_else_nothing():
    offer = prices()
    pair, drawn = 2 * offer.of("gradients"), 8 * offer.of("sampled")
    assert drawn < pair
    poor, poorest = planned(offer, 0, (pair + drawn) / 2).measure, planned(offer, 0, 0.5 * drawn).measure
    assert not poor.gradients.every and poor.sampled.every
    assert not any(schedule.every for schedule in poorest.schedules.values())


def test_what_the_user_set_is_kept_and_paid_first():
    mine = Schedule(every=30, prompts=3)
    offer = prices(exact=mine)
    fixed = 3 * 2 * (offer.of("exact") + offer.of("gradients"))
    chosen = planned(offer, 0, fixed + 3.5 * offer.of("attribution"))
    assert chosen.measure.exact == mine and not chosen.measure.gradients.every
    assert events_of(chosen.measure.attribution, 0, 60) == 3
    assert planned(offer, 0, 0.0).measure.exact == mine


def test_plan_from_a_later_step_measures_no_earlier_one():
    chosen = planned(prices(), 20, 20.0).measure
    assert chosen.gradients.first == 20 and not chosen.gradients.due(0)


def budget_of(share=0.25, steps=60, exact_always=False, **measure):
    offer = prices(steps, exact_always, budget=share, **measure)
    return Budget(offer.config, exact_always), offer


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
    first = planned(offer, 0, (share * 2.0 - 0.02) * 60)
    at_once = truth * first.cost(0, end=1) / 120
    assert spent <= max(share * 1.05, at_once + 0.02)


@pytest.mark.parametrize("truth", [0.5, 1.0, 1.2])
@pytest.mark.parametrize(
    ("mine", "forward"),
    [
        ({"attribution": AttributionSchedule(2)}, 0.02),
        ({"sketch": SketchSchedule(1, directions=8)}, 0.02),
        ({}, 0.4),
    ],
    ids=["attribution", "sketch", "forward"],
)
def test_what_the_user_set_and_the_level_forward_are_paid_from_the_same_share(mine, forward, truth):
    budget, offer = budget_of(**mine)
    prompts = {"sketch": 8, "attribution": 1}  # priced by the prompt, and by the event
    fixed = sum(truth * prompts[n] * offer.of(n) * events_of(schedule, 0, 60) for n, schedule in mine.items())
    assert 0.05 < fixed / 120 + forward / 2 < 0.25  # much of the share, but not all of it
    assert run(budget, offer, truth, forward=forward) <= 0.25 * 1.05


def test_exact_norms_that_the_estimator_trains_on_are_no_measuring():
    budget, offer = budget_of(exact_always=True)
    budget.begin(0, offer.rollouts, offer.per_position, 2.0, 0.02)
    prompts = budget.measure.gradients.prompts
    assert budget.measure.gradients.due(0) and not budget.measure.exact.every
    EXPECTED.update({"exact norms": 1.0, "Gram matrix": 0.3, "smaller groups": 0.1})
    budget.record(0, {"sample": 2.0, "measure": 1.5, "forward": 0.02})
    assert budget.spent == pytest.approx(0.52) and budget.usual == [pytest.approx(3.0)]
    assert budget.price["gradients"] == pytest.approx(0.4 / prompts)


def test_cheaper_than_forecast_means_more_is_measured():
    budget, offer = budget_of()
    assert run(budget, offer, 0.3) > 0.6 * 0.25


@pytest.mark.parametrize("steps", [12, 24, 60])
@pytest.mark.parametrize("share", [0.1, 0.17, 0.25, 0.5])
@pytest.mark.parametrize("truth", [0.5, 0.83, 1.0, 1.4])
def test_prompts_of_an_interval_are_reached_where_the_budget_pays_for_them(steps, share, truth):
    budget, offer = budget_of(share, steps)
    spent = run(budget, offer, truth)
    each = budget.price["gradients"] / 2.0  # in steps, as what is left
    left, missing = (share - spent) * steps, MIN_CLUSTERS - budget.prompts
    assert missing <= 0 or left < max(2, missing) * each


@pytest.mark.parametrize(("first", "steps", "events"), [(7, 24, 5), (1, 24, 23), (1, 24, 30), (18, 24, 1), (3, 9, 0)])
def test_spread_has_just_so_many_events_up_to_the_last_step(first, steps, events):
    schedule = spread(Schedule(prompts=2), first, steps, events)
    assert events_of(schedule, first, steps) == min(events, steps - first)
    assert events == 0 or schedule.due(steps - 1)


def test_what_takes_most_of_the_budget_at_once_waits_until_the_steps_are_timed():
    budget, offer = budget_of(steps=20)
    dear = 2 * offer.of("gradients") * 1.3 / (0.25 * 20)  # seconds of a step that pay for two prompts once
    budget.begin(0, offer.rollouts, offer.per_position, dear, 0.0)
    gradients = budget.measure.gradients
    assert gradients.due(3) and not any(gradients.due(step) for step in range(3))
    for step in range(3):  # the steps take half of what the first one seemed to take
        budget.record(step, {"sample": dear / 2})
    assert not budget.measure.gradients.every


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


@pytest.mark.parametrize("steps", [10, 60])
def test_level_that_was_too_dear_is_planned_once_there_are_seconds_for_it(steps):
    one, offer = budget_of(steps=10)
    one.begin(0, offer.rollouts, offer.per_position, 0.1, 0.0)  # so quick a step pays for nothing
    one.record(0, {"sample": 0.1})
    assert not any(schedule.every for schedule in one.measure.schedules.values())
    other, _ = budget_of(steps=steps)
    other.load_state(one.state())
    for step in (1, 2):
        other.record(step, {"sample": 2.0 if steps == 10 else 0.1})
    assert other.measure.gradients.every or other.measure.sampled.every


def test_longer_run_is_planned_anew_though_something_was_still_to_come():
    one, offer = budget_of(steps=10)
    one.begin(0, offer.rollouts, offer.per_position, 2.0, 0.0)
    one.measure = replace(one.measure, gradients=Schedule(prompts=2), attribution=AttributionSchedule(9))
    other, _ = budget_of(steps=600)
    other.load_state(one.state())
    other.record(10, {"sample": 2.0})
    assert other.measure.gradients.every


def test_note_on_a_wrong_forecast_speaks_of_the_plan_that_is_kept():
    budget, offer = budget_of(1.0)
    budget.begin(0, offer.rollouts, offer.per_position, 2.0, 0.02)
    forecast = Forecast(replace(offer.config, measure=budget.measure), False)
    forecast.levels = levels(forecast.config, offer.rollouts)
    forecast.seconds = {level.name: 1.0 for level in forecast.levels}
    EXPECTED.update({level.name: 9.0 for level in forecast.levels})
    NOTES.clear()
    told = SimpleNamespace(budget=budget, forecast=forecast, _measure_what_is_planned=lambda: None)
    Trainer.keep_budget(told, 0, {"sample": 2.0, "measure": forecast.cost(0) * 9.0})  # pyright: ignore
    assert f"about {about(budget.cost(1))} more are to come" in NOTES.pop()


def test_price_leaves_out_smaller_groups_where_shaping_rules_them_out(made):
    trainer = made(objective=ObjectiveConfig(shaping="grpo_lambda"), measure=MeasureConfig(budget=0.25))
    assert trainer.budget is not None and trainer.forecast.config.measure.subgroups == ()
    assert trainer.budget.config.measure.subgroups == trainer.measurer.config.subgroups == ()


def test_forward_alone_beyond_the_budget_is_said_and_nothing_else_measured():
    NOTES.clear()
    budget, offer = budget_of(0.01)
    budget.begin(0, offer.rollouts, offer.per_position, 2.0, 0.05)
    assert not any(schedule.every for schedule in budget.measure.schedules.values())
    assert NOTES.pop() == (
        "measure.budget is 0.01, but the level forward, which always runs, takes 2.5% of a step: nothing else is "
        "planned while that is so."
    )
    for step in range(budget.steps):
        budget.record(step, {"sample": 2.0, "forward": 0.05})
        assert not any(schedule.every for schedule in budget.measure.schedules.values())


def test_attribution_waits_until_an_interval_has_its_prompts():
    offer = prices(steps=60)
    poor, rich = (planned(offer, 0, n * offer.of("gradients")).measure for n in (12, 200))
    assert events_of(poor.gradients, 0, 60) == 6 and not poor.attribution.every
    before = sum(rich.prompts_due(step, 8)[1] for step in range(rich.attribution.first + 1))
    assert rich.attribution.every and before >= MIN_CLUSTERS


@pytest.mark.parametrize("seconds", [0.2, 1.2, 5.0, 50.0])
@pytest.mark.parametrize(("count", "size", "answers"), [(2, 8, 4), (3, 2, 64), (8, 4, 256)])
def test_plan_of_any_shape_costs_no_more_than_it_may(seconds, count, size, answers):
    config = TrainConfig(
        sample=SampleConfig(count, size, answers), optimize=OptimizeConfig(steps=7), measure=MeasureConfig()
    )
    offer = Prices(config, batch(count, size, answers=answers), 1e-3, False)
    assert planned(offer, 0, seconds).cost(0) <= seconds + 1e-9


def test_gradients_that_the_user_set_bring_no_norms_and_norms_that_are_off_leave_gradients_to_the_budget():
    mine, _ = budget_of(gradients=Schedule(10, prompts=2))
    assert not mine.measure.exact.every and "exact" not in mine.levels and "gradients" not in mine.levels
    off, offer = budget_of(0.5, exact=Schedule())
    off.begin(0, offer.rollouts, offer.per_position, 2.0, 0.02)
    assert off.measure.gradients.every and not off.measure.exact.every


def test_norms_that_the_estimator_trains_on_have_no_price_though_they_are_scheduled():
    budget, offer = budget_of(exact_always=True, exact=Schedule(1, prompts=2))
    budget.begin(0, offer.rollouts, offer.per_position, 2.0, 0.02)
    EXPECTED.update({"exact norms": 1.0, "Gram matrix": 0.3, "smaller groups": 0.1})
    budget.record(0, {"sample": 2.0, "measure": 1.5, "forward": 0.02})
    assert "exact" not in budget.price and budget.price["gradients"] == pytest.approx(0.2)


def test_a_state_that_planned_norms_first_keeps_what_was_spent():
    old, offer = budget_of()
    state = old.state() | {"spent": 25.0, "usual": [2.0] * 50, "forward": [0.02] * 50, "schedules": {"exact": {}}}
    old.load_state(state)
    assert (old.spent, len(old.usual), old.price) == (25.0, 50, {})
    old.begin(50, offer.rollouts, offer.per_position, 2.0, 0.02)
    assert old.cost(50) <= max(0.0, 0.25 * 2.0 * 60 - 25.0 - 0.02 * 10)


def test_prices_follow_only_the_first_surprise_of_a_level():
    budget, offer = budget_of(steps=200)
    budget.begin(0, offer.rollouts, offer.per_position, 2.0, 0.02)
    before = budget.price["attribution"]
    for step in range(40):
        for phase in ("Gram matrix", "smaller groups", "drawn tokens", "exact norms"):
            EXPECTED[phase] = 1e-3 * (1 + step % 7)  # cheaper than forecast, and noisy
        budget.record(step, {"sample": 2.0, "forward": 0.02})
    assert budget.known.get("gradients") and budget.price["attribution"] <= before
