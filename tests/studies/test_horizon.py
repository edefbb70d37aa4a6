"""17_horizon: gradients of groups from few backward passes, drawn positions, settings, growth with length."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from otb_analysis.config import RunningTotalConfig, SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.gradients import gradient_sketch
from otb_analysis.statistics import partitions
from otb_analysis.tasks.task_calls import distinct_prompts
from studies.lib import long_answers
from studies.lib.policies import fresh_policy, write
from studies.lib.record import load_study

FOLDER = Path(__file__).parent.parent.parent / "studies" / "17_horizon"
CONFIG = TrainConfig(
    task="running_total", running_total=RunningTotalConfig(2, 3, 5),
    small_model=SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=16),
)  # fmt: skip


@pytest.fixture(scope="module")
def parts():
    """The files of the study by name."""
    load_study(FOLDER)
    return {name: importlib.import_module(f"study_{FOLDER.name}.{name}") for name in ("study", "training", "derived")}


@pytest.fixture(scope="module")
def policy():
    policy = fresh_policy(CONFIG)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return policy


@pytest.fixture(scope="module")
def written(policy):
    sample = SampleConfig(prompts=4, group_size=8, max_new_tokens=12)
    written = write(policy, distinct_prompts(policy.task, "train", 4), sample, seed=0)
    # An untaught policy is never right: pay every other rollout at its last token.
    reward = np.zeros_like(written.table.reward)
    reward[np.arange(0, 32, 2), written.table.mask.sum(axis=1)[::2] - 1] = 1.0
    return replace(written, table=replace(written.table, reward=reward))


def test_directions_leave_little_of_any_row_and_nothing_of_constant_ones(parts):
    random = np.random.default_rng(0)
    energy = random.gamma(0.3, size=40)
    steps = np.where(np.arange(40) < 20, 1.0, 0.4)
    rows = np.stack([np.full(40, 0.7), steps, steps + 1e-3 * random.normal(size=40), np.zeros(40)])
    span, scale = long_answers.directions_of(rows, energy)
    assert len(span) == 2  # the step alone is new; noise of a thousandth is left out
    np.testing.assert_allclose((span * scale) @ (span * scale).T, np.eye(2), atol=1e-12)
    left = rows - (rows * scale) @ (span * scale).T @ span
    np.testing.assert_allclose(left[0], 0, atol=1e-12)
    remains = np.linalg.norm(left * scale, axis=1)
    assert (remains <= long_answers.TOLERANCE * np.linalg.norm(rows * scale, axis=1) + 1e-12).all()


def test_gradients_of_groups_are_those_of_a_backward_pass_for_every_estimator(parts, policy, written):
    found, names, rank = long_answers.block_gradients(policy, written, (4,), 4, 512)
    (cut,) = partitions(written.table.group, 4, 1, seed=4)
    inputs = written.table.inputs(long_answers.proxy_of(written))
    slow = long_answers.advantages(inputs, cut, 4, written.table.limit)
    ids, mask, attention = written.batch
    rows = written.rollouts.by_column(np.stack(list(slow.values())) / 4)
    twin = gradient_sketch(policy.model, ids, mask, rows, cut.group, attention, dim=512).transpose(1, 0, 2)
    assert set(names) - set(slow) == {"classic_optimal", "classic_optimal_loo"} and rank > 1
    for name, one in zip(slow, twin, strict=True):
        error = np.linalg.norm(found["g4"][names.index(name)] - one) / np.linalg.norm(one)
        assert error < (1e-5 if name in ("none", "rloo", "batch_mean", "sequence_optimal_loo") else 0.1), name
    np.testing.assert_array_equal(found["prompt4"], cut.prompt)


def test_classic_optimal_weighs_by_the_norm_of_the_whole_score(parts, policy, written):
    found, names, _ = long_answers.block_gradients(policy, written, (4,), 4, 4096)
    (cut,) = partitions(written.table.group, 4, 1, seed=4)
    ids, mask, attention = written.batch
    ones = written.rollouts.by_column(written.table.mask[None].astype(float))
    scores = gradient_sketch(policy.model, ids, mask, ones, np.arange(32), attention, dim=4096)[:, 0]
    power, paid = (scores**2).sum(axis=1), written.table.total_reward
    rows = np.flatnonzero(cut.group == 0)
    baseline = (power[rows] * paid[rows]).sum() / power[rows].sum()
    expected = ((paid[rows] - baseline)[:, None] * scores[rows]).mean(axis=0)
    np.testing.assert_allclose(found["g4"][names.index("classic_optimal"), 0], expected, rtol=1e-3, atol=1e-3)


def test_drawn_positions_are_whole_and_estimate_totals_without_bias(parts, written):
    proxy, mask = long_answers.proxy_of(written), written.table.mask
    totals = []
    for seed in range(400):
        chosen, inverse = long_answers.drawn_cells(written, 3, seed * 10)
        totals.append((proxy**2 * inverse)[chosen].sum())  # not what they are drawn by
        for group in range(4):
            own = written.table.group == group
            columns = chosen[own].any(axis=0)
            assert columns.sum() == 3 and (chosen[own] == mask[own] & columns).all()
    stderr = np.std(totals) / len(totals) ** 0.5
    assert abs(np.mean(totals) - (proxy**2).sum()) < 4 * stderr


def test_fifths_of_an_answer_sum_to_its_energy(parts, written):
    facts = long_answers.energy_facts(written)
    np.testing.assert_allclose(facts["fifths"].sum(axis=1), facts["energy"])
    assert set(long_answers.fifths_of(written)[written.table.mask]) == {0, 1, 2, 3, 4}


def test_answers_of_every_setting_are_as_long_as_stated_and_fit_their_limit(parts):
    study = parts["study"]
    for setting in study.SETTINGS:
        policy, config = study.fresh(setting, False), study.config_of(setting, False)
        for index in range(20):
            prompt = policy.task.prompt("train", index)
            turns = policy.task.demonstration(prompt)
            lengths = [len(turn.text) + 1 for turn in turns]
            assert len(turns) == setting.tool_calls + 1 <= config.sample.max_turns
            assert max(lengths) + 7 <= config.sample.max_new_tokens  # room for a line too many
            assert abs(sum(lengths) / setting.length - 1) < 0.15
            assert {*prompt.text, *"".join(t.text + t.reply for t in turns)} <= set(policy.task.alphabet)
        room = policy.model.config.max_position_embeddings
        assert room >= len(prompt.text) + sum(len(t.text + t.reply) + 1 for t in turns) + 7 * 2
        assert setting.tool_calls or room >= len(prompt.text) + config.sample.limit


def test_cells_of_a_policy_share_out_its_blocks(parts):
    study = parts["study"]
    for length in study.LINES:
        assert [block for part in study.FULL.parts(length) for block in part] == list(range(8))
    assert study.FULL.blocks * study.FULL.update >= 200 and study.FULL.rollouts == 16


def test_growth_is_the_slope_between_shortest_and_longest(parts):
    def row(tokens, v, low, high):
        return {"tokens": tokens, "most": {"variance": v, "variance_low": low, "variance_high": high}}

    # 10 → 40 over 30 → 120 tokens: 4 = 4¹
    found = parts["derived"].growth([row(120, 40, 20, 80), row(30, 10, 10, 10), row(60, 9, 1, 99)])
    assert found.estimate == pytest.approx(1.0)
    # half a width of log 40 is log 2, of log 10 it is 0: log 2 / log 4 = ½
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(1.5))
    assert parts["derived"].growth([row(30, 10, 5, 20)]) is None


def test_arms_of_a_seed_share_everything_but_the_baseline(parts):
    study, training = parts["study"], parts["training"]
    setting = next(one for one in study.SETTINGS if (one.name, one.length) == ("qwen3", 512))
    config = study.config_of(setting, False)
    for kind, arms in (("learn", training.LEARN), ("last", training.LAST)):
        made = [training.run_config(config, training.FULL_RUNS, kind, arm, 3) for arm in arms]
        assert len({repr(replace(one, estimator=config.estimator, run="")) for one in made}) == 1
        assert len({one.estimator.name for one in made}) == len(arms)
    assert (made[0].objective.staleness, made[0].optimize.warmup_steps, made[0].optimize.steps) == (4, 32, 32)
    teach = [cell for cell in study.PLAN if cell.name == "teach-qwen3-512"]
    trained = [cell for cell in study.PLAN if cell.name.split("-")[0] in ("learn", "last")]
    assert len(trained) == 8 * (6 + 4) and all(cell.after == tuple(teach) for cell in trained)


def test_gains_are_paired_over_the_seeds_that_are_there(parts):
    def learned(arm, seed, last):
        return [{"arm": arm, "seed": seed, "step": k, "success": x} for k, x in ((0, 0.5), (8, 0.6), (16, last))]

    rows = [*learned("rloo", 0, 0.6), *learned("rloo", 1, 0.8), *learned("otb", 0, 0.8), *learned("otb", 1, 0.8)]
    rows += learned("otb", 2, 0.9)  # whose `rloo` is not there yet
    lasted = [
        {"arm": arm, "seed": seed, "steps": 40, "collapse": at}
        for arm, seed, at in (("rloo", 0, 10), ("rloo", 1, 20), ("raised", 0, 12), ("raised", 1, None))
    ]
    found = parts["derived"].gains({"learning": rows, "lasting": lasted})
    # means after the start: 0.6 and 0.7 against 0.7 and 0.7
    assert found["learning"]["otb"].estimate == pytest.approx(0.05)
    # 2 and 40 − 20
    assert found["lasting"]["raised"].estimate == 11
    assert parts["derived"].gains({}) == {"learning": {}, "lasting": {}}
