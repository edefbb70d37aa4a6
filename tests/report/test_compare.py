"""The comparison in the terminal: every estimator, the fidelity rows, and no crash on runs that lack either."""

import io
import itertools
import re

import numpy as np
import pytest
from rich.console import Console

from otb_analysis.answers import designs, opened, reportable
from otb_analysis.answers.pairs import learning_notes
from otb_analysis.config import CriticConfig, EvaluateConfig, MeasureConfig, Schedule
from otb_analysis.errors import InputError
from otb_analysis.figures.fidelity import fidelity_info
from otb_analysis.report.compare import comparison
from otb_analysis.report.document import printed as parts
from otb_analysis.store import RunStore, RunWriter, StepTables, gram_rows
from otb_analysis.types import Gram

UNMEASURED = {"measure": MeasureConfig(exact=Schedule(0, 0)), "evaluate": EvaluateConfig(every=0)}


def printed(paths, top=None, **how):
    console = Console(file=io.StringIO(), width=200)
    for part in parts(comparison(opened(paths), top, **how)):
        console.print(part, markup=False)
    return console.file.getvalue()


def cells(text, *first):
    """The row that begins with these words, split at two blanks."""
    (line,) = [s for s in text.splitlines() if s.split()[: len(first)] == list(first)]
    return re.split(r"\s{2,}", line.strip())


def test_every_measured_estimator_has_a_row_or_is_named_as_identical_and_the_group_mean_is_rloo_shrunk(otb_run):
    text = printed([otb_run], top=0)
    rows = RunStore(otb_run).sql("select distinct estimator, energy_source from gradients")
    _, shown = estimator_rows(text)
    for name, source in zip(rows["estimator"], rows["energy_source"], strict=True):
        assert [name, source] in shown or f"{name} = " in text
    assert ["otb_turn", "proxy"] not in shown and "otb_turn = otb" in text
    # Groups of 3: the group mean's advantages are 2/3 of RLOO's, so its variance is 4/9.
    assert "0.44" in cells(text, "group_mean", "none")


def test_top_keeps_the_first_rows_of_the_table_and_every_line_below_it(otb_run):
    (whole, rows), (cut, kept) = map(estimator_rows, (printed([otb_run], top=0), printed([otb_run], top=2)))
    assert len(rows) > 8 and kept == rows[:2]
    assert f"2 of {len(rows)} rows, --top 0 shows all" in cut and "shows all" not in whole
    below, end = "SF: variance at equal progress", "Runs: what they learned"
    assert cut[cut.index(below) : cut.index(end)] == whole[whole.index(below) : whole.index(end)]


def test_eight_rows_are_shown_with_the_reference_and_what_trained_among_them(otb_run):
    _, rows = estimator_rows(printed([otb_run]))
    assert len(rows) == 8
    for usual in (["rloo", "none"], ["otb", "proxy"], ["none", "none"], ["group_mean", "none"], ["grpo", "none"]):
        assert usual in rows


def test_the_sentences_of_the_run_stand_first_or_last_with_the_table_of_estimators_behind_them(otb_run):
    lines = opened([otb_run])["otb"].lines
    first, last = ("".join(printed([otb_run], conclude_last=how).split()) for how in (False, True))
    said = "".join("".join(lines).split())
    assert "12 prompts" in lines[0] and first.startswith(said)
    assert last.index("Proxyagainstexactnorms") < last.index(said) < last.index("Estimatorsonthesame")


def test_too_few_prompts_leave_no_column_of_dashes_and_no_claim(otb_run):
    text = printed([otb_run])
    head = next(line for line in text.splitlines() if line.split()[:2] == ["estimator", "energy"])
    assert re.search(r"\bSF ÷ rloo\b", head) and "together" not in head
    assert "better than rloo:" not in text and "worse than rloo:" not in text
    (design,) = designs(opened([otb_run])).values()
    assert (design.decision.n_prompts, design.decision.tested, design.decision.cause) == (12, (), "few prompts")


def estimator_rows(text):
    """All words of what was printed, and the first two of each row of the table of estimators."""
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["estimator", "energy"])
    rows = itertools.takewhile(str.strip, lines[head + 2 :])
    return " ".join(text.split()), [line.split()[:2] for line in rows]


def test_learning_row_holds_what_the_steps_table_holds(otb_run):
    steps = RunStore(otb_run).steps_df()
    heldout = steps["heldout_reward"].dropna()
    row = cells(printed([otb_run]), "otb", "otb")
    assert "3" in row
    assert f"{heldout.iloc[0]:.3f} → {heldout.iloc[-1]:.3f}" in row
    assert f"{steps['reward_mean'].iloc[0]:.3f} → {steps['reward_mean'].iloc[-1]:.3f}" in row
    assert f"{steps['n_tokens'].sum():,}" in row


def test_fidelity_is_of_single_tokens_and_of_what_otb_weights_by_as_on_the_page(otb_run):
    rows = dict(opened([otb_run])["otb"].fidelity)
    tokens = RunStore(otb_run).tokens_df()
    assert list(rows.values()) == [fidelity_info(tokens, kind).overall for kind in ("token", "realized")]
    measured = tokens[tokens["grad_norm_sq"].notna()]
    expected = np.corrcoef(measured["energy_proxy"], measured["grad_norm_sq"])[0, 1]
    assert rows["token energy w_t"].pooled.n == len(measured)
    assert rows["token energy w_t"].pooled.pearson == pytest.approx(expected, abs=1e-6)
    text = printed([otb_run])
    assert all(title in text for title in rows)


def test_run_without_measurement_has_a_learning_row_and_says_what_measures_it(trained):
    text = printed([trained("quiet", **UNMEASURED)])
    assert "quiet" in text and "--measure.gradients.every 10" in text
    assert "Estimators on the same" not in text
    assert "Proxy" not in text


def test_runs_with_unlike_estimators_stand_side_by_side(otb_run, trained):
    # Without a critic there is no `value` in one of them.
    alone = trained("no_critic", critic=CriticConfig(enabled=False))
    text = printed([otb_run, alone, trained("quiet", **UNMEASURED)])
    assert cells(text, "value", "none")
    assert text.count("token energy w_t") == 2
    assert text.count("Estimators on the same rollouts") == 1
    assert "only ratios compare: value/none (" in text


def measured(root, name, config, size=4):
    """A run with one measured step."""
    writer = RunWriter.create(root, name, config)
    gram = Gram(np.ones((1, 1, 3, 3)), (("rloo", "none"),), 3 * size, groups=np.arange(3))
    writer.write_step(0, StepTables(steps={"reward_mean": 0.5}, grams=gram_rows(0, gram)))
    writer.finish()
    return writer.path


DIFFERING = {
    "task": (
        [{"task": "a"}, {"task": "a"}, {"task": "b"}, {}],
        {"a, groups of 4": 2, "b, groups of 4": 1, "task not stored, groups of 4": 1},
    ),
    "soft tokens": (
        [{"task": "a"}, {"task": "a", "sample": {"soft": 0}}, {"task": "a", "sample": {"soft": 8}}],
        {"a, groups of 4": 2, "a, groups of 4, 8 soft tokens": 1},
    ),
    "scope": (
        [{"task": "a"} | scope for scope in ({}, {"measure": {"scope": "all"}}, {"measure": {"scope": "lm_head"}})],
        {"a, groups of 4": 2, "a, groups of 4, scope 'lm_head'": 1},
    ),
}


@pytest.mark.parametrize("what", DIFFERING)
def test_steps_of_runs_that_differ_in_what_makes_a_gradient_are_not_averaged(what, tmp_path):
    configs, expected = DIFFERING[what]
    runs = opened([measured(tmp_path, f"run-{index}", config) for index, config in enumerate(configs)])
    assert {name: len(design.grams) for name, design in designs(runs).items()} == expected


def test_steps_of_another_group_size_are_not_averaged(tmp_path):
    runs = opened([measured(tmp_path, f"run-{size}", {"task": "a"}, size) for size in (4, 8)])
    assert list(designs(runs)) == ["a, groups of 4", "a, groups of 8"]


@pytest.mark.parametrize(
    ("truncated", "sentence"),
    [
        ([8, 8], "all answers ended at max_new_tokens = 12, and .*; raise --sample.max-new-tokens"),
        ([8, 7], "or choose an easier task"),
    ],
)
def test_answers_that_are_all_cut_off_are_not_called_a_hard_task(truncated, sentence, tmp_path):
    writer = RunWriter.create(tmp_path, "deaf", {"sample": {"max_new_tokens": 12}})
    for step, n in enumerate(truncated):
        scalars = {"n_truncated": n, "n_rollouts": 8, "n_prompts": 2, "n_zero_variance_groups": 2}
        writer.write_step(step, StepTables(steps=scalars))
    writer.finish()
    assert re.search(sentence, learning_notes(opened([writer.path])["deaf"])[-1])


def test_runs_of_another_scope_are_named_in_the_sentence_that_a_report_refuses_them_with(otb_run, trained):
    head = trained("head", measure=MeasureConfig(exact=Schedule(every=2), scope="lm_head"))
    with pytest.raises(InputError) as refused:
        reportable([otb_run, head])
    sentence, _, _ = str(refused.value).partition(";")
    text = " ".join(printed([otb_run, head]).split())
    assert f"{sentence}: each has a table of estimators of its own." in text
    assert text.count("Estimators on the same rollouts") == 2
    # A run that measured nothing is of no scope, whatever it was asked for.
    unmeasured = trained("quiet_head", measure=MeasureConfig(exact=Schedule(0, 0), scope="lm_head"))
    assert "which do not compare" not in printed([otb_run, unmeasured])


def test_measured_groups_of_equal_rewards_are_said_to_teach_nothing(trained):
    # The only measured group of steps 0 and 2 has equal rewards, others of those steps have not.
    text = printed([trained("one_prompt", measure=MeasureConfig(exact=Schedule(every=2, prompts=1)))])
    assert text.startswith("Nothing can be compared") and "all rewards were equal" in text
    assert "Estimators on" not in text and "noise scale" not in text.lower()


def test_run_written_by_someone_else_with_few_columns_is_shown(tmp_path):
    writer = RunWriter.create(tmp_path, "foreign", {})
    keys = {name: np.zeros(2, np.int64) for name in ("group", "rollout", "turn")}
    tokens = keys | {"t": np.arange(2), "mask": [True, True], "reward": [0.0, 1.0], "grad_norm_sq": [1.0, 2.0]}
    writer.write_step(0, StepTables(tokens=tokens, rollouts={"group": [0], "rollout": [0]}, steps={"reward_mean": 1.0}))
    writer.finish()
    assert "foreign" in printed([writer.path])


def test_run_from_before_held_out_prompts_were_answered_several_times_is_shown(tmp_path):
    # Its steps have no heldout_samples, so the intervals that do exist are of the reward alone.
    writer = RunWriter.create(tmp_path, "older", {})
    heldout = {"heldout_reward": 0.5, "heldout_reward_low": 0.4, "heldout_reward_high": 0.6}
    writer.write_step(0, StepTables(steps={"reward_mean": 0.5} | heldout))
    writer.finish()
    assert "older: held-out prompts at step 0: reward 0.500 [0.400, 0.600]" in printed([writer.path])


def test_rollout_counts_up_to_its_first_token_without_an_exact_norm(tmp_path):
    # Step 0: both tokens of rollout 0 and the first of rollout 1. Step 1: the second tokens only, so no sum W is known.
    writer = RunWriter.create(tmp_path, "partly", {})
    base = {"turn": np.zeros(4, np.int64), "t": [0, 1, 0, 1], "group": [0, 0, 1, 1], "rollout": [0, 0, 1, 1]}
    base |= {"mask": [True] * 4, "reward": [0.0, 1.0, 0.0, 0.0], "energy_proxy": [0.1, 0.2, 0.3, 0.4]}
    for step, known in enumerate(([True, True, True, False], [False, True, False, True])):
        norms = np.ma.array([1.0, 2.0, 3.0, 4.0], mask=~np.array(known))
        writer.write_step(step, StepTables(tokens=base | {"grad_norm_sq": norms}, steps={"reward_mean": 0.5}))
    writer.finish()
    assert [found.pooled.n for _, found in opened([writer.path])["partly"].fidelity] == [3 + 2, 3]
    assert "partly" in printed([writer.path])


def test_run_whose_groups_never_differ_in_reward_is_said_to_have_no_signal(tmp_path):
    for name, equal in (("deaf", [2, 2]), ("hears", [2, 1])):
        writer = RunWriter.create(tmp_path, name, {})
        for step, groups in enumerate(equal):
            scalars = {"reward_mean": 0.0, "n_prompts": 2, "n_zero_variance_groups": groups}
            writer.write_step(step, StepTables(steps=scalars))
        writer.finish()
    text = printed([tmp_path / "deaf", tmp_path / "hears"])
    assert text.count("all rewards within a group were equal") == 1
    assert "deaf: at every step" in text


def test_run_without_a_complete_step_is_one_sentence(tmp_path):
    writer = RunWriter.create(tmp_path, "begun", {})
    with pytest.raises(InputError, match="begun has no complete step"):
        opened([writer.path])
