"""A task of two turns and two reward parts, from texts to the rows of the store."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from otb_analysis.arrays import zero_variance_groups
from otb_analysis.config import SampleConfig
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.estimators import available, estimate
from otb_analysis.logit_stats import logit_stats
from otb_analysis.measurement.forward import forward_pass
from otb_analysis.measurement.measurer import GradientMeasurer, Measurement, every_advantage, sampling_check, summarize
from otb_analysis.measurement.table import TokenMeasurements, compute_rewards, rollout_rows, token_rows, token_table
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.sampling import sample

# Four rollouts of two prompts ("0+" wants #0, "1+" wants #1); "$" is the end token, the reply is "=" and the text:
#   0: "7$" "=7" "#0$"     policy 2, tool 2, policy 3: 7 completion tokens, both parts right
#   1: "12"                cut by length: no reply, no reward
#   2: "$"  "="  "3$"      an empty first turn
#   3: "5$" "=5" "#1"      the second turn is right but does not end
ANSWERS = (["7$", "12", "$", "5$"], ["#0$", "3$", "#1"])


@pytest.fixture
def rollouts(echo, scripted, tokenizer):
    prompts = [echo.prompt("train", i) for i in range(2)]
    return sample(scripted(*ANSWERS), tokenizer, echo, prompts, SampleConfig(group_size=2, max_turns=4))


@pytest.fixture
def forward(tiny_model, rollouts):
    return forward_pass(tiny_model, rollouts, 1.0)


@pytest.fixture
def table(echo, rollouts, forward):
    return token_table(compute_rewards(echo, rollouts), forward, None)


def test_each_turns_reward_sits_on_its_last_policy_token(echo, rollouts, forward):
    paid = compute_rewards(echo, rollouts)
    # 0: .25 on the end token of turn 0 (t = 1), .25 + 1 on that of turn 1 (t = 6); 2: .25 at t = 0 and at t = 3;
    # 3: .25 at t = 1, and 1 at t = 5, the last token before the cut.
    expected = np.zeros((4, 7))
    expected[0, [1, 6]] = 0.25, 1.25
    expected[2, [0, 3]] = 0.25, 0.25
    expected[3, [1, 5]] = 0.25, 1.0
    np.testing.assert_array_equal(paid.rewards(), expected)
    np.testing.assert_array_equal(token_table(paid, forward, None).total_reward, [1.5, 0.0, 0.5, 1.25])
    np.testing.assert_array_equal(paid.reward_parts["form"], [0.5, 0.0, 0.5, 0.25])
    np.testing.assert_array_equal(paid.reward_parts["correct"], [1.0, 0.0, 0.0, 1.0])


def test_table_has_a_column_per_completion_token_with_tool_tokens_masked_out(table):
    # Completion lengths 7, 2, 1 + 1 + 2 = 4, 2 + 2 + 2 = 6, so T = 7.
    assert table.mask.astype(int).tolist() == [
        [1, 1, 0, 0, 1, 1, 1],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
    ]
    assert table.present.sum(axis=1).tolist() == [7, 2, 4, 6]
    assert table.turn[0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert table.turn[2, :4].tolist() == [0, 0, 1, 1]
    assert np.isnan(table.behavior_logprob[~table.mask]).all()
    # The scripted generator reports −.5 − .01 k for the k-th token of a turn.
    np.testing.assert_allclose(table.behavior_logprob[0][table.mask[0]], [-0.5, -0.51, -0.5, -0.51, -0.52])


def test_estimators_that_take_position_from_the_column_refuse_and_name_the_one_that_counts(table):
    inputs = table.inputs(table.stats.energy)
    with pytest.raises(InputError, match="otb_turn"):
        estimate("otb", inputs)
    assert "otb" not in available(inputs)
    found = estimate("otb_turn", inputs)
    assert (found.advantage[~table.mask] == 0).all()
    # Second policy token of the first group: G = 1.5 of rollout 0 (its .25 is still to come) and 0 of rollout 1.
    w = np.where(table.mask, table.stats.energy, 0).cumsum(axis=1)[:2, 1]
    assert found.baseline[0, 1] == pytest.approx(1.5 * w[0] / w.sum())


def test_exact_level_measures_a_batch_with_tool_tokens(tiny_model, rollouts, table):
    from otb_analysis.config import MeasureConfig, Schedule

    measurer = GradientMeasurer(tiny_model, MeasureConfig(exact=Schedule(1, 0)), 1.0)
    found = measurer.measure(0, rollouts, table, None, lambda: np.zeros(table.mask.shape))
    assert found.gaps == 0
    assert np.array_equal(np.isfinite(found.tokens.norm_sq), table.mask)
    names = {name for name, _ in found.gram.labels}
    assert {"otb_turn", "group_mean", "classic_optimal"} <= names
    assert "otb" not in names


def test_proxy_estimators_see_the_whole_batch_when_part_of_it_is_measured(tiny_model, rollouts, table):
    from otb_analysis.config import MeasureConfig

    norms = GradientMeasurer(tiny_model, MeasureConfig(), 1.0).norms(rollouts, np.array([0]))
    assert np.isnan(norms.norm_sq[2:]).all()
    rows = np.array([True, True, False, False])
    found = every_advantage(table, norms, rows)
    whole = estimate("batch_mean", table.inputs(None))
    np.testing.assert_array_equal(found["batch_mean", "none"], whole.advantage[:2])


def test_rows_of_the_store_leave_tool_tokens_unmeasured(echo, tokenizer, rollouts, table):
    nothing = TokenMeasurements.nothing(table.mask.shape)
    rows = token_rows(table, estimate("group_mean", table.inputs(None)), nothing, tokenizer)
    tool = ~np.asarray(rows["mask"])
    assert tool.sum() == 2 + 1 + 2
    for name in ("logprob", "entropy", "energy_proxy", "reward", "baseline", "advantage", "behavior_logprob"):
        assert (np.ma.getmaskarray(rows[name]) == tool).all(), name
    assert "".join(rows["token"][:7]) == "7<end>=7#0<end>"
    assert np.asarray(rows["t"])[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    kept = rollout_rows(compute_rewards(echo, rollouts), table, nothing)
    assert kept["completion"] == ["7=7#0", "12", "=3", "5=5#1"]
    assert kept["answer"] == [rollouts.prompts[g].answer for g in rollouts.group]
    assert kept["length"].tolist() == [5, 2, 3, 4]
    assert kept["turns"] == [2, 1, 2, 2]
    assert kept["finish_reason"] == ["stop", "length", "stop", "length"]
    assert kept["prompt_id"] == ["train0", "train0", "train1", "train1"]
    np.testing.assert_array_equal(kept["reward_correct"], [1, 0, 0, 1])
    np.testing.assert_array_equal(kept["reward_form"], [0.5, 0, 0.5, 0.25])


def test_degenerate_input_is_counted(rollouts, table):
    found = summarize(
        rollouts, table, estimate("rloo", table.inputs(None)), Measurement(TokenMeasurements.nothing(table.mask.shape))
    )
    assert found["n_truncated"] == 2
    assert found["n_empty_completions"] == 0  # rollout 2 wrote something in its second turn
    assert found["n_tokens"] == 14
    assert found["length_max"] == 5
    assert found["n_measured_prompts"] == 0


def test_empty_completion_is_counted(echo, scripted, tokenizer, tiny_model):
    echo.reply = lambda prompt, turns: None
    prompts = [echo.prompt("train", 0)]
    rollouts = sample(scripted(["$", "1$"]), tokenizer, echo, prompts, SampleConfig(group_size=2))
    table = token_table(compute_rewards(echo, rollouts), forward_pass(tiny_model, rollouts, 1.0), None)
    found = summarize(
        rollouts, table, estimate("rloo", table.inputs(None)), Measurement(TokenMeasurements.nothing(table.mask.shape))
    )
    assert found["n_empty_completions"] == 1
    assert found["n_zero_variance_groups"] == 1  # both earn .25


def test_group_of_equal_rewards_is_one_of_two_or_more():
    # Groups: {1, 1}, {0, 1}, {1} and an absent one.
    reward, group = np.array([1.0, 1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1, 3])
    assert zero_variance_groups(reward, group).tolist() == [True, False, False, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_names_rollout_group_part_and_prompt(echo, rollouts, value):
    honest = echo.reward
    echo.reward = lambda prompt, turns: [*honest(prompt, turns)[:-1], {"form": value if turns[-1].text == "3" else 0}]
    with pytest.raises(NonFiniteError, match=r"'form' of rollout 2 .*'train1'\) is (nan|inf)"):
        compute_rewards(echo, rollouts)


def test_task_that_pays_too_few_turns_is_refused(echo, rollouts):
    echo.reward = lambda prompt, turns: [{"correct": 1.0}]
    with pytest.raises(InputError, match=r"'echo' pays 1 turns .*rollout 0 has 2"):
        compute_rewards(echo, rollouts)


def test_value_is_zero_outside_the_mask(echo, rollouts, forward):
    table = token_table(compute_rewards(echo, rollouts), forward, np.full((4, 7), np.nan))
    assert (table.value[~table.mask] == 0).all()
    assert np.isnan(table.value[table.mask]).all()
    assert torch.is_tensor(forward.logprob)


def test_energy_tail_is_the_proxys_whether_or_not_exact_norms_were_measured(tiny_model, rollouts, table):
    rng = np.random.default_rng(0)
    shape = (4, 500)
    names = ("logprob", "entropy", "sum_pi_sq", "energy", "pi_variance", "logprob_variance")
    stats = replace(table.stats, **{name: rng.random(shape) for name in names})
    reward = np.zeros(shape)
    wide = replace(table, mask=np.ones(shape, bool), stats=stats, reward=reward, behavior_logprob=stats.logprob)
    norms = TokenMeasurements.exact(rng.pareto(1.0, shape), np.ones(4), wide.group)
    trained = estimate("rloo", wide.inputs(None))
    plain = summarize(rollouts, wide, trained, Measurement(TokenMeasurements.nothing(shape)))
    measured = summarize(rollouts, wide, trained, Measurement(norms))
    assert plain["energy_tail_k"] == measured["energy_tail_k"]
    assert plain["energy_max_share"] == measured["energy_max_share"]
    assert plain["exact_tail_k"] is None
    # 1/x with x uniform has tail index 1; uniform energies have a tail that ends.
    assert measured["exact_tail_k"] > 0.5 > measured["energy_tail_k"]


def test_certificate_of_one_token_is_its_deviation_over_its_standard_deviation():
    # π = (.8, .2), drawn: the first. Σπ² = .68, Σπ³ = .52, Var(π_y) = .52 − .4624 = .0576 = .24²: z = .12/.24.
    # log π = (−.2231, −1.6094), H = .5004, Σπ log²π = .03983 + .51805 = .55788, Var = .55788 − .25041 = .30748:
    # z = (.5004 − .2231)/.5545 = .5 (with two outcomes any function of the token has the same z).
    one = logit_stats(torch.tensor([[[0.8, 0.2]]], dtype=torch.float64).log(), token_ids=torch.tensor([[0]]))
    found = sampling_check(one, np.array([[True]]))
    assert found["certificate_prob_z"] == pytest.approx(0.5)
    assert found["certificate_logprob_z"] == pytest.approx(0.5)


def test_certificate_is_silent_about_what_was_sampled_and_loud_about_another_temperature(echo, tiny_model, tokenizer):
    torch.manual_seed(0)
    echo.reply = lambda prompt, turns: None
    prompts = [echo.prompt("train", i) for i in range(8)]
    generator = TransformersGenerator(tiny_model, tokenizer)
    drawn = sample(generator, tokenizer, echo, prompts, SampleConfig(group_size=32, max_new_tokens=16))
    for temperature, loud in ((1.0, False), (0.5, True)):
        forward = forward_pass(tiny_model, drawn, temperature)
        for z in sampling_check(forward.stats, forward.mask.numpy()).values():
            assert (abs(z) > 6) if loud else (abs(z) < 4), (temperature, z)
