"""A budget: what is measured follows from what it costs, and what it costs is kept."""

import numpy as np
import pytest

from otb_analysis.config import (
    AttributionSchedule,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    SketchSchedule,
    TrainConfig,
)
from otb_analysis.measurement.level import drawn_share
from otb_analysis.phases import EXPECTED, NOTES
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.tasks import Prompt
from otb_analysis.training.budget import MARGIN, SPREAD, Budget, phases_of, prompts_due


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


def budget_of(share=0.25, steps=60, exact_always=False, rollouts=None, **measure):
    prompts = 8 if rollouts is None else len(rollouts.prompts)
    config = TrainConfig(
        sample=SampleConfig(prompts, 4, 4),
        optimize=OptimizeConfig(steps=steps),
        measure=MeasureConfig(budget=share, **measure),
    )
    return Budget(config, exact_always)


def run(budget, truth=1.0, usual=2.0, forward=0.02, rollouts=None, first=0, pace=lambda step: 1.0):
    """What each step measures by level, and the share of the run that it takes, where an event costs `truth` times its
    forecast and everything takes `pace` times its usual seconds."""
    rollouts, spent, total, done = batch() if rollouts is None else rollouts, 0.0, 0.0, []
    for step in range(first, budget.steps):
        if step == first:
            budget.begin(step, rollouts, 1e-3, usual, forward)
            true = {name: truth * budget._forecast(name, rollouts, 1e-3) / MARGIN for name in budget.price}
        due = {n: k for n in budget.price if (k := prompts_due(budget.measure, n, step, budget.most))}
        now = pace(step)
        cost = now * sum(prompts * true[name] for name, prompts in due.items())
        for name, prompts in due.items():
            EXPECTED.update(dict.fromkeys(phases_of(name), now * prompts * true[name] / len(phases_of(name))))
        seconds = {"sample": usual - 0.5, "update": 0.5, "forward": forward}
        budget.record(step, {name: now * value for name, value in seconds.items()} | {"measure": cost})
        spent += cost + now * forward
        total += now * usual
        done.append(due)
    return done, spent / total


@pytest.mark.parametrize("truth", [0.3, 1.0, 1.2, 2.5, 6.0])
@pytest.mark.parametrize("share", [0.03, 0.1, 0.25, 1.0, 30.0])
@pytest.mark.parametrize("steps", [7, 60])
@pytest.mark.parametrize("answers", [4, 256])
def test_share_is_kept_but_for_the_first_event_of_a_level_whose_forecast_was_too_low(truth, share, steps, answers):
    budget = budget_of(share, steps)
    done, spent = run(budget, truth, rollouts=batch(answers=answers))
    firsts = {name: next((due[name] for due in done if name in due), 0) for name in budget.price}
    unforeseen = sum(max(0.0, 1 - MARGIN / truth) * n * budget.price[name] for name, n in firsts.items())
    assert spent <= share + unforeseen / (2.0 * steps) + 1e-9


def test_more_seconds_measure_first_pairs_then_more_prompts_then_more_steps():
    seen = []
    for share in np.geomspace(0.012, 30, 40):
        done, _ = run(budget_of(share))
        prompts = [due["gradients"] for due in done if "gradients" in due]
        seen.append((max(prompts, default=0), len(prompts)))
    assert seen[0] == (0, 0) and seen[-1] == (8, 60)
    assert [p for p, _ in seen] == sorted(p for p, _ in seen)
    assert all(p == 2 for p, events in seen if events and p * events < 2 * SPREAD)


def test_gradients_of_an_intervals_prompts_come_first_then_drawn_tokens_then_norms():
    for share in np.geomspace(0.1, 30, 20):
        done, _ = run(budget_of(share), rollouts=batch(answers=256))
        prompts = np.cumsum([due.get("gradients", 0) for due in done])
        rest = [i for i, due in enumerate(done) if due.keys() & {"exact", "attribution"} and share < 10]
        assert all(i and prompts[i - 1] + done[i].get("gradients", 0) >= MIN_CLUSTERS for i in rest)
    bought = [{n for due in run(budget_of(s))[0] for n in due} for s in (0.1, 0.25, 1.0)]
    assert bought[0] <= bought[1] <= bought[2] and bought[2] == {"gradients", "sampled", "exact", "attribution"}


@pytest.mark.parametrize("answers", [4, 24, 256, 1024])
def test_norms_of_whole_groups_are_of_all_compared_prompts_or_of_one(answers):
    for share in np.geomspace(0.1, 30, 12):
        for due in run(budget_of(share), rollouts=batch(answers=answers))[0]:
            assert "exact" not in due or due["exact"] in (1, due["gradients"])


@pytest.mark.parametrize(
    ("answers", "share"), [(4, 1.0), (24, 0.16666666666666666), (128, 0.0625), (256, 0.03125), (8192, 32 / 32768)]
)
def test_few_tokens_of_long_answers_are_drawn_and_enough_of_short_ones(answers, share):
    rollouts = batch(answers=answers)
    assert drawn_share(rollouts) == pytest.approx(share)


def test_long_answers_have_an_intervals_prompts_within_sixty_steps_at_a_quarter():
    # 16 prompts of 4 rollouts of 1,024 tokens; a step samples (2 passes, as if that were cheap), scores and updates.
    rollouts = batch(16, 4, 50, 1024)
    usual = 3.3 * 1e-3 * float(rollouts.attention_mask.sum())
    done, _ = run(budget_of(0.25, 200, rollouts=rollouts), usual=usual, forward=0.0, rollouts=rollouts)
    assert sum(due.get("gradients", 0) for due in done[:60]) >= MIN_CLUSTERS


def test_where_no_pair_can_be_paid_tokens_are_drawn_and_else_nothing():
    asked = budget_of()
    asked.begin(0, batch(), 1e-3, 2.0, 0.0)
    pair, drawn = 2 * asked.price["gradients"], 8 * asked.price["sampled"]
    assert drawn < pair
    poor, poorest = (run(budget_of(seconds / 120), forward=0.0)[0] for seconds in ((pair + drawn) / 2, 0.5 * drawn))
    assert {n for due in poor for n in due} == {"sampled"} and not any(poorest)


def test_what_the_user_set_is_kept_and_paid_first():
    mine = Schedule(every=30, prompts=3)
    budget = budget_of(exact=mine)
    done, spent = run(budget)
    assert [step for step, due in enumerate(done) if "exact" in due] == [0, 30]
    assert all(due["exact"] == due["gradients"] == 3 for due in (done[0], done[30]))
    assert spent <= 0.25 and any("attribution" in due for due in done)
    poor, _ = run(budget_of(0.02, exact=mine))
    assert {n for due in poor for n in due} == {"exact", "gradients"}


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
    budget = budget_of(**mine)
    done, spent = run(budget, truth, forward=forward)
    fixed = sum(due.get(name, 0) * budget.price[name] for due in done for name in mine)
    assert 0.05 < fixed / 120 + forward / 2 < 0.25  # much of the share, but not all of it
    assert spent <= 0.25 * 1.05


def test_exact_norms_that_the_estimator_trains_on_are_no_measuring():
    budget = budget_of(
        1.0, exact_always=True, exact=Schedule(1, prompts=2), attribution=AttributionSchedule(1, first=99)
    )
    budget.begin(0, batch(), 1e-3, 2.0, 0.02)
    EXPECTED.update({"exact norms": 1.0, "Gram matrix": 0.3, "smaller groups": 0.1})
    budget.record(0, {"sample": 2.0, "measure": 1.5, "forward": 0.02})
    assert budget.other == pytest.approx(0.12) and budget.usual == [pytest.approx(3.0)]
    assert "exact" not in budget.price and budget.price["gradients"] == pytest.approx(0.2)


def test_most_of_the_share_is_spent_also_where_events_are_cheaper_than_forecast():
    assert run(budget_of(), 0.3)[1] > 0.6 * 0.25
    assert run(budget_of(), 1.0)[1] > 0.8 * 0.25


@pytest.mark.parametrize("steps", [12, 24, 60])
@pytest.mark.parametrize("share", [0.1, 0.17, 0.25, 0.5])
@pytest.mark.parametrize("truth", [0.5, 0.83, 1.0, 1.4])
def test_prompts_of_an_interval_are_reached_where_the_budget_pays_for_them(steps, share, truth):
    budget = budget_of(share, steps)
    _, spent = run(budget, truth)
    left, missing = (share - spent) * steps * 2.0, MIN_CLUSTERS - budget.prompts
    assert missing <= 0 or left < max(2, missing) * budget.price["gradients"]


@pytest.mark.parametrize(("factor", "per_position"), [(0.25, 2.5e-3), (4.0, 1.5e-3)])
def test_prices_follow_a_machine_that_becomes_faster_or_slower(factor, per_position):
    # Near the end no event tells what a prompt costs now: the pace of the steps does.
    rollouts = batch(8, 4, 50, 1024)
    usual = per_position * float(rollouts.attention_mask.sum())
    budget = budget_of(0.25, 60, rollouts=rollouts)
    _, spent = run(budget, 1.0, usual, 0.0, rollouts, pace=lambda step: factor if step >= 46 else 1.0)
    assert budget.prompts >= (MIN_CLUSTERS if factor < 1 else 8) and 0.2 < spent <= 0.25


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_one_odd_step_moves_no_price(factor):
    odd, even = budget_of(), budget_of()
    run(odd, pace=lambda step: factor if step == 20 else 1.0)
    run(even)
    assert odd.price == pytest.approx(even.price)


def test_what_is_saved_to_the_last_second_is_measured_whole_at_any_pace():
    for seed in range(30):
        pace = np.random.default_rng(seed).uniform(0.5, 2, 8)
        done, _ = run(budget_of(1e6, 8), pace=lambda step, pace=pace: pace[step])
        assert all(due["exact"] == due["gradients"] == 8 for due in done[1:])


def test_the_first_line_says_how_far_the_budget_reaches():
    def told(share, **measure):
        NOTES.clear()
        budget_of(share, **measure).begin(0, batch(), 1e-3, 2.0, 0.02)
        return NOTES.pop()

    assert "16 prompts" in told(0.25) and "by about step" in told(0.25)
    assert "--measure.budget" in told(0.02)
    assert "attribution" in told(0.25, exact=Schedule(10, prompts=4))


def test_told_step_is_the_one_at_which_the_interval_has_its_prompts():
    for share in (0.1, 0.25, 0.5):
        NOTES.clear()
        done, _ = run(budget_of(share), truth=MARGIN)
        told = int(NOTES[0].rstrip(".").rpartition(" ")[2])
        prompts = np.cumsum([due.get("gradients", 0) for due in done])
        reached = int(np.argmax(prompts >= MIN_CLUSTERS))
        assert told - 3 <= reached <= told * 18 / 16 + 3  # an event of three prompts comes once all are paid for


def test_state_goes_on_where_it_was():
    one, other, whole = (budget_of() for _ in range(3))
    done, _ = run(whole)
    one.steps = 20
    run(one)
    one.steps = 60
    other.load_state(one.state())
    gone_on, _ = run(other, first=20)
    events = [sum("gradients" in due for due in steps) for steps in (done, gone_on)]
    assert other.prompts == pytest.approx(whole.prompts, abs=4) and events[1] < events[0]


def test_a_state_of_another_form_is_left_out():
    budget = budget_of()
    before = dict(vars(budget))
    budget.load_state({"price": {"gradients": 1.0}, "known": {}, "spent": 25.0, "usual": [2.0] * 50, "schedules": {}})
    assert vars(budget) == before


def test_level_that_was_too_dear_is_measured_once_there_are_seconds_for_it():
    budget = budget_of(steps=10)
    budget.begin(0, batch(), 1e-3, 0.1, 0.0)  # so quick a step pays for nothing
    assert not any(schedule.every for schedule in budget.measure.schedules.values())
    for step in range(9):
        budget.record(step, {"sample": 4.0})
    assert budget.prompts or budget.measure.gradients.every or budget.measure.sampled.every


def test_price_leaves_out_smaller_groups_where_shaping_rules_them_out(made):
    trainer = made(objective=ObjectiveConfig(shaping="grpo_lambda"), measure=MeasureConfig(budget=0.25))
    assert trainer.budget is not None and trainer.forecast.config.measure.subgroups == ()
    assert trainer.budget.config.measure.subgroups == trainer.measurer.config.subgroups == ()


def test_forward_alone_beyond_the_budget_is_said_and_nothing_else_measured():
    NOTES.clear()
    budget = budget_of(0.01)
    done, _ = run(budget, forward=0.05)
    assert not any(done)
    assert "takes 2.5% of a step" in NOTES.pop()


def test_attribution_waits_until_an_interval_has_its_prompts():
    done, _ = run(budget_of(0.5))
    prompts = np.cumsum([due.get("gradients", 0) for due in done])
    attributed = [step for step, due in enumerate(done) if "attribution" in due]
    assert attributed and all(prompts[step] >= MIN_CLUSTERS for step in attributed)


def test_gradients_that_the_user_set_bring_no_norms_and_norms_that_are_off_leave_gradients_to_the_budget():
    mine = budget_of(gradients=Schedule(10, prompts=2))
    assert not mine.measure.exact.every and mine.levels == ["attribution"]
    done, _ = run(budget_of(0.5, exact=Schedule()))
    assert any("gradients" in due for due in done) and not any("exact" in due for due in done)


def test_a_price_that_was_too_low_raises_those_of_levels_that_are_not_timed_yet():
    budget = budget_of(steps=200)
    budget.begin(0, batch(), 1e-3, 40.0, 0.02)
    before, gradients = budget.price["attribution"], budget.price["gradients"]
    prompts = budget.measure.gradients.prompts
    EXPECTED.update({"Gram matrix": 3 * gradients * prompts, "smaller groups": 0.0, "drawn tokens": 1e-9})
    budget.record(0, {"sample": 40.0, "forward": 0.02})
    assert budget.price["attribution"] == pytest.approx(3 * before)
    for step in range(1, 20):  # later events raise nothing
        EXPECTED["Gram matrix"] = 9 * gradients * prompts
        budget.record(step, {"sample": 40.0, "forward": 0.02})
    assert "attribution" in budget.timed or budget.price["attribution"] == pytest.approx(3 * before)
