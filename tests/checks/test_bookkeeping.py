"""Bookkeeping: recorded advantages are recognised, wrong ones are named by record; weights and norms by one factor."""

import numpy as np
import pytest

from otb_analysis.checks import advantages
from otb_analysis.checks.advantages import advantage_lines, check_advantages
from otb_analysis.checks.bookkeeping import (
    Bookkeeping,
    TrainerLoss,
    bookkeeping_lines,
    check_bookkeeping,
    check_norms,
    check_weights,
    trainer_loss,
)
from otb_analysis.config import EstimatorConfig, ImportConfig, MeasureConfig, Schedule, ScoreConfig
from otb_analysis.errors import InputError
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore

REWARDS = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]])


def lines_of(advantages, norms):
    return bookkeeping_lines(Bookkeeping(advantages, TrainerLoss(), None, tuple(norms), ()))


def rows(advantages, rewards=REWARDS, lengths=(3, 5, 2, 4)):
    """Records of three groups of four with one advantage per rollout, in two steps."""
    return [
        {
            "prompt": f"{g}+1=", "completion": "+" * lengths[k], "ids": [4] * lengths[k],
            "reward": float(rewards[g, k]), "group": g, "step": step,
            "advantages": [float(advantages[g, k])] * lengths[k],
        }
        for step in range(2) for g in range(3) for k in range(4)
    ]  # fmt: skip


def imported(tmp_path, jsonl, records):
    config = ImportConfig(root=tmp_path / "runs", if_exists="replace")
    return RunStore(import_rollouts(jsonl(records), config))


CENTRED = REWARDS - REWARDS.mean(axis=1, keepdims=True)
KNOWN = {
    "none": REWARDS,
    "group_mean": CENTRED,
    "rloo": CENTRED * 4 / 3,
    "grpo": CENTRED / (REWARDS.std(axis=1, ddof=1, keepdims=True) + 1e-6),
    "grpo with ddof 0": CENTRED / (REWARDS.std(axis=1, keepdims=True) + 1e-6),
    "batch_mean": REWARDS - REWARDS.mean(),
    # the step has every reward once, so its standard deviation is that of REWARDS
    "group mean over the step's standard deviation": CENTRED / (REWARDS.std(ddof=1) + 1e-4),
}


@pytest.mark.parametrize("convention", KNOWN)
def test_recorded_advantages_are_recognised(tmp_path, jsonl, convention):
    check = check_advantages(imported(tmp_path, jsonl, rows(KNOWN[convention])))
    assert check is not None and check.n_rollouts == 24
    assert convention in check.exact and check.matches[0].n_differ == 0
    others = set(KNOWN) - {convention}
    assert not others & set(check.exact)
    assert convention in lines_of(check, [])[0]


def test_a_common_factor_is_told(tmp_path, jsonl):
    check = check_advantages(imported(tmp_path, jsonl, rows(2.5 * CENTRED)))
    assert check is not None and not check.exact
    assert {match.convention for match in check.scaled} >= {"group_mean"}
    (mean,) = [match for match in check.scaled if match.convention == "group_mean"]
    assert mean.factor == pytest.approx(2.5)
    assert "2.5 × group_mean" in lines_of(check, [])[0]


def test_the_first_record_that_differs_is_named(tmp_path, jsonl):
    records = rows(CENTRED)
    for n in (6, 17):
        records[n]["advantages"] = [0.3] * len(records[n]["ids"])
    check = check_advantages(imported(tmp_path, jsonl, records))
    assert check is not None and check.exact == ()
    best = check.matches[0]
    assert (best.convention, best.n_differ) == ("group_mean", 2)
    assert best.first == "rollouts.jsonl, record 7" and best.largest > 0.2
    text = " ".join(lines_of(check, []))
    assert "24 rollouts in 6 groups are those of group_mean, but for 2; the first is rollouts.jsonl, record 7" in text
    assert "0.3 recorded against" in text


def test_advantages_of_a_scored_run_are_those_recorded_and_not_ours(tmp_path, jsonl, checkpoint):
    path = score(ScoreConfig(rollouts=jsonl(rows(KNOWN["rloo"])), model=str(checkpoint), root=tmp_path / "runs"))
    check = check_advantages(RunStore(path))
    assert check is not None and check.exact[0] == "rloo"
    assert any(match.convention == "otb" for match in check.matches)  # it has energies


def test_weights_of_a_run_are_over_its_own_constant(tmp_path, jsonl):
    store = imported(tmp_path, jsonl, rows(CENTRED))
    ten, forty = (check_bookkeeping(store, "grpo", TrainerLoss("constant", 2, c)).weights for c in (10, 40))
    assert ten is not None and forty is not None and ten.nominal == pytest.approx(4 * forty.nominal)


def test_advantages_without_ids_belong_to_no_tokens(tmp_path, jsonl):
    records = [{name: value for name, value in row.items() if name != "ids"} for row in rows(CENTRED)]
    with pytest.raises(InputError, match=r"record 1 .*advantages but no ids"):
        imported(tmp_path, jsonl, records)


def test_without_recorded_advantages_there_is_nothing_to_check(tmp_path, jsonl, simple):
    store = RunStore(import_rollouts(jsonl(simple()), ImportConfig(root=tmp_path / "runs")))
    assert check_advantages(store) is None
    lines = bookkeeping_lines(check_bookkeeping(store, "grpo", TrainerLoss()))
    assert lines[0] == "Advantages: none were recorded, so none can be recomputed." and "--aggregation" in lines[1]


LENGTH, GROUP = np.array([1, 3, 2, 2]), np.array([0, 0, 1, 1])


def test_accumulation_keeps_the_sum_of_token_means_but_not_each_weight():
    check = check_weights(LENGTH, GROUP, "token_mean", micro_batch=1)
    # alone, the rollout of 1 token has weight 1 on it, those of 3 have ⅓; the mean of 4 divides by 4; nominal is ⅛
    assert (check.nominal, check.effective, check.factor) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
    assert (check.lowest, check.highest) == (pytest.approx(8 / 12), pytest.approx(2.0))


def test_forgetting_to_divide_by_the_micro_batches_is_one_factor():
    assert check_weights(LENGTH, GROUP, "sequence_mean", 2, "sum").factor == pytest.approx(2)
    whole = check_weights(LENGTH, GROUP, "sequence_mean", 2)
    assert (whole.factor, whole.lowest, whole.highest) == (pytest.approx(1),) * 3
    constant = check_weights(LENGTH, GROUP, "constant", 2, constant=10)
    assert constant.nominal == pytest.approx(8 / 40) and constant.factor == pytest.approx(1)


def test_a_last_micro_batch_that_is_smaller_weighs_its_rollouts_more():
    check = check_weights(LENGTH, GROUP, "sequence_mean", 3)
    assert (check.lowest, check.highest) == (pytest.approx(4 / 6), pytest.approx(2.0))


def test_weights_that_cannot_be_summed_are_refused():
    for aggregation, micro_batch in (("balanced", 1), ("token_mean", 0)):
        with pytest.raises(InputError, match="cannot be summed"):
            check_weights(LENGTH, GROUP, aggregation, micro_batch)


def test_the_logged_norm_of_a_run_is_rebuilt_from_its_gradients(otb_run):
    checks = check_norms(RunStore(otb_run), "otb")
    assert [check.step for check in checks] == [0, 1, 2]
    np.testing.assert_allclose([check.factor for check in checks], 1.0, rtol=1e-3)
    assert "median 1" in lines_of(None, checks)[0]


def test_a_norm_under_token_means_is_smaller_by_the_tokens(otb_run):
    store = RunStore(otb_run)
    steps = store.steps_df()
    plain, mean = (check_norms(store, "otb", aggregation) for aggregation in ("sequence_sum", "token_mean"))
    for a, b, n, tokens in zip(plain, mean, steps["n_rollouts"], steps["n_tokens"], strict=True):
        assert b.rebuilt == pytest.approx(a.rebuilt * n / tokens)
    with pytest.raises(InputError, match="weighs rollouts by their lengths"):
        check_norms(store, "otb", "sequence_mean")


def test_all_checks_together_name_the_sum_of_weights_and_what_was_left_out(otb_run):
    store = RunStore(otb_run)
    checked = check_bookkeeping(store, "otb", TrainerLoss("token_mean", 3))
    assert checked.norms and checked.weights is not None
    assert checked.weights.factor == pytest.approx(1) and checked.weights.highest > 1
    lines = bookkeeping_lines(checked)
    assert "(token_mean, micro-batches of 3) add up to 1 times the nominal sum; single tokens weigh" in lines[2]
    refused = check_bookkeeping(store, "otb", TrainerLoss("sequence_mean", 3))
    assert not refused.norms and refused.weights is not None
    assert "weighs rollouts by their lengths" in bookkeeping_lines(refused)[-1]


def test_weights_are_checked_without_a_micro_batch_too(otb_run):
    store = RunStore(otb_run)
    (own, line, *_) = bookkeeping_lines(check_bookkeeping(store, "otb", TrainerLoss("token_mean")))
    assert "are those of otb" in own and line.startswith("Logged over rebuilt")
    open_size = check_bookkeeping(store, "otb", TrainerLoss("token_mean"))
    assert open_size.weights == check_bookkeeping(store, "otb", TrainerLoss("token_mean", 1)).weights
    assert "in micro-batches of one rollout would add up to" in bookkeeping_lines(open_size)[2]
    whole = bookkeeping_lines(check_bookkeeping(store, "otb", trainer_loss(store.info["config"])))
    assert "(sequence_sum, the whole batch at once) add up to the nominal sum, and so does every token's." in whole[2]


def test_what_is_known_of_a_loss_is_told_or_in_the_run():
    trl = {"trl": {"loss_type": "bnpo", "per_device_train_batch_size": 4}, "sample": {"max_new_tokens": 64}}
    assert trainer_loss(trl) == TrainerLoss("token_mean", 4, 64)
    assert trainer_loss(trl | {"trl": {"loss_type": "dapo"}}) == TrainerLoss("token_mean", None, 64, whole=True)
    assert trainer_loss(trl | {"trl": {"loss_type": "luspo"}}).aggregation == ""
    own = {"objective": {"aggregation": "constant", "aggregation_options": {"length": "48"}}}
    assert trainer_loss(own) == TrainerLoss("constant", None, 48, whole=True)
    assert trainer_loss({"aggregation": "token_mean", "accumulate": 8}) == TrainerLoss("token_mean", 8)
    assert trainer_loss(own, "token_mean", 2) == TrainerLoss("token_mean", 2, 48) and trainer_loss({}) == TrainerLoss()


def test_a_recorded_norm_is_kept_and_compared(tmp_path, jsonl, checkpoint):
    records = [row | {"grad_norm": 2.5 + row["step"]} for row in rows(KNOWN["rloo"])]
    config = ScoreConfig(
        rollouts=jsonl(records), model=str(checkpoint), root=tmp_path / "runs", estimator=EstimatorConfig("rloo"),
        measure=MeasureConfig(exact=Schedule(every=1)),
    )  # fmt: skip
    store = RunStore(score(config))
    assert store.steps_df()["grad_norm"].tolist() == [2.5, 3.5]
    checked = check_bookkeeping(store, "rloo", TrainerLoss("sequence_sum"))
    assert [check.logged for check in checked.norms] == [2.5, 3.5]
    assert imported(tmp_path, jsonl, records).steps_df()["grad_norm"].tolist() == [2.5, 3.5]
    records[3]["grad_norm"] = 9.0
    with pytest.raises(InputError, match=r"record 4 .*grad_norm 9\.0 .*record 1 .*2\.5"):
        imported(tmp_path, jsonl, records)


def test_without_token_counts_weights_are_missing(tmp_path, jsonl, simple):
    store = RunStore(import_rollouts(jsonl(simple()), ImportConfig(root=tmp_path / "runs")))
    lines = bookkeeping_lines(check_bookkeeping(store, "grpo", TrainerLoss("token_mean", 2)))
    assert lines[1].startswith("Loss weights: the run has no token counts") and "was not recorded" in lines[2]


def test_a_packages_convention_is_recognised(tmp_path, jsonl, monkeypatch):
    monkeypatch.setattr(advantages, "plugins", lambda kind: {"halved": None} if kind == "convention" else {})
    monkeypatch.setattr(advantages, "import_attribute", lambda kind, name: lambda step: step.centred / 2 + step.size)
    check = check_advantages(imported(tmp_path, jsonl, rows(CENTRED / 2 + 4)))
    assert check is not None and check.exact == ("halved",)


def group_shifted(offset):
    """Centred rewards of which the last group of three is off by one number."""
    return CENTRED + np.array([[0.0], [0.0], [offset]])


TRAITS = {
    # The mean of the last group is 1; with one more reward of 0 it would be .8.
    "a rollout that is not in the file": (group_shifted(0.2), "a rollout that is not in the file were in the mean"),
    "a constant": (group_shifted(0.07), "off by one number (0.07 in the first): a constant was added"),
    "one step": (None, "are all of step 1"),
}


@pytest.mark.parametrize("what", TRAITS)
def test_what_groups_that_differ_share_is_the_sentence(tmp_path, jsonl, what):
    given, sentence = TRAITS[what]
    records = rows(CENTRED if given is None else given)
    if given is None:
        for n in (12, 20):  # a rollout of two groups of the second step
            records[n]["advantages"] = [0.3 + n] * len(records[n]["ids"])
    check = check_advantages(imported(tmp_path, jsonl, records))
    assert check is not None and not check.exact and check.matches[0].convention == "group_mean"
    assert sentence in " ".join(advantage_lines(check))


def test_one_advantage_for_all_is_no_convention_clipped_to_it(tmp_path, jsonl):
    check = check_advantages(imported(tmp_path, jsonl, rows(np.full((3, 4), 0.5))))
    assert check is not None and not check.exact
    assert advantage_lines(check)[-1] == "All of them are 0.5, whatever the reward."


def test_of_many_conventions_that_fit_four_are_named(tmp_path, jsonl):
    # Where all rewards are equal every advantage is 0, which most conventions give.
    check = check_advantages(imported(tmp_path, jsonl, rows(np.zeros((3, 4)), np.ones((3, 4)))))
    assert check is not None and len(check.exact) > 4
    (line,) = advantage_lines(check)
    assert line.count(" or ") == 4 and line.endswith(f"or {len(check.exact) - 4} more.")
