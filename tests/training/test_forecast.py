"""What measuring will cost, in words and numbers, before it is paid."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.config import (
    AttributionSchedule,
    MeasureConfig,
    OptimizeConfig,
    SampledSchedule,
    Schedule,
    SketchSchedule,
    TrainConfig,
)
from otb_analysis.measurement.level import Level, level_of
from otb_analysis.phases import EXPECTED, NOTES
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.store import RunStore
from otb_analysis.tasks import Prompt
from otb_analysis.training import setup
from otb_analysis.training.budget import (
    EXACT,
    NORM,
    WHOLE,
    Forecast,
    levels,
    positions,
    prefix_share,
    read_once,
    rough_duration,
    seconds_per_position,
    steps_in_words,
)
from otb_analysis.training.loop import train


def batch(prompts=4, size=2, before=2, answers=3):
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
        behavior_logprob=np.zeros((n, width)),
        prompt_length=np.full(n, before),
        turns=((),) * n,
        finish_reason=("stop",) * n,
        reward=np.zeros((n, width)),
    )


def config_of(steps=60, **measure):
    quiet = {"exact": Schedule(), "subgroups": ()}
    return TrainConfig(optimize=OptimizeConfig(steps=steps), measure=MeasureConfig(**(quiet | measure)))


def test_token_counts_by_the_share_of_its_rollout_that_it_sees():
    # tokens 2, 3, 4 of 5: 2/5 + 3/5 + 4/5 of a pass in every rollout
    assert prefix_share(batch(), np.ones(8, bool)) == pytest.approx(9 / 5)
    assert positions(batch(), np.arange(8) < 2) == 10


def test_prompt_is_read_once_for_its_rollouts():
    # 4 rollouts of 2 + 3 tokens on 2 prompts: 20 positions, of which the second reading of each prompt is 2
    assert read_once(batch(), np.arange(8) < 4) == pytest.approx(16 / 20)
    assert read_once(batch(size=1), np.ones(4, bool)) == 1.0


def test_auto_sketches_where_directions_are_few_for_the_length():
    def cost(method, tokens):
        rollouts = batch(answers=tokens)
        return level_of("sketch").passes(SketchSchedule(1, directions=16, method=method), rollouts, np.ones(8, bool))

    assert cost("auto", 100) == cost("hybrid", 100) == cost("hybrid", 8)
    assert cost("auto", 8) < cost("hybrid", 8)


def test_levels_cover_the_groups_that_they_will_measure():
    config = config_of(
        exact=Schedule(every=20, prompts=1),
        sampled=SampledSchedule(every=20, prompts=2),
        sketch=SketchSchedule(every=10),
        attribution=AttributionSchedule(every=5),
    )
    rows = {level.name: level.rows.tolist() for level in levels(config, batch())}
    assert rows["exact norms"] == rows["Gram matrix"] == [True] * 2 + [False] * 6
    assert rows["drawn tokens"] == [False] * 2 + [True] * 4 + [False] * 2
    assert rows["sketched norms"] == [False] * 2 + [True] * 6
    assert rows["attribution"] == [True] * 8


class Alone(Level):
    """A level of one's own, which one process measures."""

    phase = "alone"

    def measure(self, step, plan, known):
        """Measure nothing."""
        return known

    def passes(self, plan, rollouts, rows):
        """Take a pass."""
        return 1.0


def test_the_process_with_most_prompts_sets_the_price_of_a_level(monkeypatch):
    monkeypatch.setattr(
        "otb_analysis.training.budget.level_of", lambda name: Alone() if name == "own" else level_of(name)
    )
    levels_of = {
        "exact": Schedule(every=1, prompts=2),
        "attribution": AttributionSchedule(every=1),
        "further": {"own": 1},
    }
    config = config_of(**levels_of)
    one, three = ({x.name: x.multiple for x in levels(config, batch(), processes=n)} for n in (1, 3))
    shares = {name: one[name] / three[name] for name in one}
    assert shares == pytest.approx({"exact norms": 2, "Gram matrix": 2, "attribution": 2, "alone": 1})


def test_nothing_is_forecast_where_nothing_is_measured():
    assert levels(config_of(), batch()) == []


def test_engine_and_length_set_the_price_of_exact_norms():
    cost = {
        engine: levels(config_of(exact=Schedule(1), engine=engine), batch())[0].multiple
        for engine in ("fast", "reference")
    }
    assert cost["fast"] == pytest.approx(WHOLE + NORM["fast"] * 9 / 5)
    assert cost["reference"] > 1.5 * cost["fast"] - WHOLE


def told(config, step=0, each=0.01, usual=0.4):
    found = Forecast(config, False)
    found.announce(step, batch(), each, usual)
    return found, NOTES.pop()


def test_sentence_says_what_at_which_steps_for_how_long():
    config = config_of(exact=Schedule(every=20, prompts=2))
    one = (WHOLE + NORM["auto"] * 9 / 5 + EXACT * 16 / 20) * 0.01 * 20  # two prompts of two tokens are read once
    _, sentence = told(config)
    assert sentence == (
        f"Measuring 2 prompts (4 rollouts) at steps 0, 20, 40: about {rough_duration(one)} each time, "
        f"{rough_duration(3 * one)} in all; "
        "a step takes about 0.4 s besides."
    )


def test_levels_of_different_schedules_add_up():
    config = config_of(exact=Schedule(every=40, prompts=2), attribution=AttributionSchedule(every=20))
    found, sentence = told(config)
    assert "Measuring 2 prompts (4 rollouts) at steps 0, 40, attribution at steps 0, 20, 40: about" in sentence
    assert "the first time" in sentence
    assert found.cost(0) > found.cost(20) == found.seconds["attribution"]


def test_resumed_run_counts_the_steps_that_are_left():
    found, sentence = told(config_of(exact=Schedule(every=20, prompts=2)), step=30)
    assert found.steps(30) == [40]
    assert " at step 40: about" in sentence and "in all" not in sentence


@pytest.mark.parametrize(
    ("steps", "words"),
    [([0], "step 0"), ([0, 20], "steps 0, 20"), (list(range(0, 60, 5)), "12 steps (0, 5, 10, … 55)")],
)
def test_many_steps_are_counted_and_not_listed(steps, words):
    assert steps_in_words(steps) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.44, "0.4 s"), (9.0, "9 s"), (9.2, "9.2 s"), (80, "1:20 min")])
def test_seconds_are_given_to_two_digits(seconds, words):
    assert rough_duration(seconds) == words


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (1.5, None),
        (3.0, "Measuring took {took} and not {before}; about {rest} more are to come."),
        (0.2, "Measuring took {took} and not {before}; about {rest} more are to come."),
    ],
)
def test_forecast_is_corrected_aloud_where_it_was_far_off(factor, sentence):
    found, _ = told(config_of(exact=Schedule(every=20, prompts=2)), each=0.05)
    NOTES.clear()
    before = found.cost(0)
    EXPECTED.update({name: factor * value for name, value in found.seconds.items()})
    found.correct(0)
    assert found.cost(20) == pytest.approx(factor * before)
    words = sentence and sentence.format(
        took=rough_duration(factor * before), before=rough_duration(before), rest=rough_duration(2 * factor * before)
    )
    assert list(NOTES) == ([words] if words else [])
    found.correct(20)
    assert len(NOTES) == (1 if words else 0)


def test_forecast_is_corrected_at_the_first_measured_step_and_not_before():
    found, _ = told(config_of(exact=Schedule(every=20, prompts=2, first=10)), each=0.05)
    EXPECTED.update({name: 3 * value for name, value in found.seconds.items()})
    NOTES.clear()
    found.correct(0)
    assert not NOTES
    found.correct(10)
    assert "more are to come" in NOTES.pop()


def test_timed_pass_leaves_gradients_weights_and_random_state_alone(trainer):
    rollouts = None

    def pay(task, own):
        nonlocal rollouts
        rollouts = own
        raise StopIteration

    weights = [p.detach().clone() for p in trainer.policy.parameters]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otb_analysis.training.loop.compute_rewards", pay)
        with pytest.raises(StopIteration):
            from otb_analysis.training.loop import train_step

            train_step(trainer, 0)
    before = torch.get_rng_state()
    policy = trainer.policy
    assert seconds_per_position(policy.model, rollouts, policy.temperature, policy.arithmetic) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in trainer.policy.parameters)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.policy.parameters, strict=True))


def test_run_is_told_its_cost_once_before_it_measures(tiny_config, tmp_path, one_thread):
    NOTES.clear()
    train(replace(tiny_config, root=tmp_path))
    costs = [note for note in NOTES if note.startswith("Measuring 4 prompts (12 rollouts) at steps 0, 1, 2: about ")]
    assert len(costs) == 1


def test_forecast_that_fails_does_not_end_the_run(tiny_config, tmp_path, monkeypatch, one_thread):
    def broken(*given):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(setup, "seconds_per_position", broken)
    store = RunStore(train(replace(tiny_config, root=tmp_path)))
    assert store.info["status"] == "complete"
    assert store.steps_df()["measurement_gaps"].tolist() == [0, 0, 0]
