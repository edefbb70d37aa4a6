"""The comparison in the terminal: every estimator, the fidelity rows, and no crash on runs that lack either."""

import io
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from otb_analysis.report.designs import designs
from otb_analysis.report.runs import open_runs
from rich.console import Console

from otb_analysis.config import CriticConfig, EvaluateConfig, MeasureConfig, Schedule
from otb_analysis.errors import InputError
from otb_analysis.figures.fidelity import fidelity_info
from otb_analysis.report.compare import comparison, fidelity_rows, no_signal
from otb_analysis.store import RunStore, RunWriter, StepTables
from otb_analysis.types import Gram

UNMEASURED = {"measure": MeasureConfig(exact=Schedule(0, 0)), "evaluate": EvaluateConfig(every=0)}


def printed(paths, top=None, **how):
    console = Console(file=io.StringIO(), width=200)
    for part in comparison(paths, top, **how):
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
    assert f"(half, groups of 3; 2 of {len(rows)} rows, --top 0 shows all):" in cut
    assert "shows all" not in whole
    below = "SF: variance at equal progress"
    assert cut[cut.index(below) : cut.index("Not shown")] == whole[whole.index(below) : whole.index("Not shown")]


def test_eight_rows_are_shown_with_the_reference_and_what_trained_among_them(otb_run):
    _, rows = estimator_rows(printed([otb_run]))
    assert len(rows) == 8
    for usual in (["rloo", "none"], ["otb", "proxy"], ["none", "none"], ["group_mean", "none"], ["grpo", "none"]):
        assert usual in rows


def test_sentences_stand_first_or_last_with_the_table_of_estimators_behind_them(otb_run):
    first, last = printed([otb_run]), printed([otb_run], conclude_last=True)
    assert first.splitlines()[0].startswith("Nothing can be told apart yet: 12 prompts were measured")
    assert [line.split(":")[0] for line in first.splitlines()[2:3]] == ["Next"]
    assert last.index("Proxy against exact norms") < last.index("Nothing can be told") < last.index("Estimators on the")


def test_noise_scale_of_the_reference_and_of_what_trained_is_one_line_below_the_table(otb_run):
    text = printed([otb_run])
    assert text.count("Noise scale, the number of prompts at which noise equals signal: rloo") == 1


def test_too_few_prompts_are_named_as_the_reason_and_leave_no_column_of_dashes(otb_run):
    text = printed([otb_run])
    assert "an interval takes 16" in text
    assert "Next: measure at least 16 prompts, by adding --measure.exact.prompts 0 --measure.exact.every" in text
    head = next(line for line in text.splitlines() if line.split()[:2] == ["estimator", "energy"])
    left_out = text[text.index("Not shown, since an interval takes 16 prompts:") :].splitlines()[0]
    assert "efficiency ×rloo." in left_out and re.search(r"\befficiency {2,}", head) is None


def test_conclusions_of_stored_runs_count_what_was_told_apart(otb_run):
    (design,) = designs([RunStore(otb_run)]).values()
    found = design.conclusion
    assert (found.n_prompts, found.different, found.within) == (12, (), ())
    assert found.alike["otb_turn", "proxy"].of == ("otb", "proxy")


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


def test_fidelity_is_of_single_tokens_and_of_what_otb_weights_by(otb_run):
    rows = fidelity_rows(RunStore(otb_run), otb_run.name)
    assert [name for _, name, _ in rows] == ["token energy w_t", "realized energy W_t"]
    tokens = RunStore(otb_run).tokens_df(where="grad_norm_sq is not null")
    expected = np.corrcoef(tokens["energy_proxy"], tokens["grad_norm_sq"])[0, 1]
    assert rows[0][2].pooled.n == len(tokens)
    assert rows[0][2].pooled.pearson == pytest.approx(expected, abs=1e-6)
    text = printed([otb_run])
    assert "token energy w_t" in text
    assert "realized energy W_t" in text


def test_terminal_and_dashboard_say_the_same_about_the_proxy(otb_run):
    tokens = RunStore(otb_run).tokens_df()
    shown = [fidelity_info(tokens, kind).overall for kind in ("token", "realized")]
    assert [row[2] for row in fidelity_rows(RunStore(otb_run), otb_run.name)] == shown


def test_run_without_measurement_has_only_a_learning_row(trained):
    text = printed([trained("quiet", **UNMEASURED)])
    assert "quiet" in text
    assert "Estimators on the same" not in text
    assert "Proxy" not in text


def test_runs_with_unlike_estimators_stand_side_by_side(otb_run, trained):
    # Without a critic there is no `value` in one of them.
    alone = trained("no_critic", critic=CriticConfig(enabled=False))
    text = printed([otb_run, alone, trained("quiet", **UNMEASURED)])
    assert cells(text, "value", "none")
    assert text.count("token energy w_t") == 2
    assert text.count("Estimators on the same rollouts") == 1
    assert "only their ×rloo compares with the others: value/none (" in text


def measured(name, config, size=4):
    """What `designs` reads of a run with one measured step."""
    return SimpleNamespace(info={"config": config}, path=Path(name), grams=lambda: {0: gram_of_groups(size)})


def test_steps_of_another_task_or_group_size_are_not_averaged():
    runs = (({"task": "a"}, 4), ({"task": "a"}, 4), ({"task": "b"}, 4), ({"task": "a"}, 8), ({}, 8))
    stores = [measured(f"run-{index}", *run) for index, run in enumerate(runs)]
    found = {name: len(design.grams) for name, design in designs(stores).items()}
    assert found == {"a, groups of 4": 2, "b, groups of 4": 1, "a, groups of 8": 1, "task not stored, groups of 8": 1}


def test_steps_with_soft_tokens_are_not_averaged_with_others():
    configs = [{"task": "a"}, {"task": "a", "sample": {"soft": 0}}, {"task": "a", "sample": {"soft": 8}}]
    stores = [measured(f"run-{index}", config) for index, config in enumerate(configs)]
    found = {name: len(design.grams) for name, design in designs(stores).items()}
    assert found == {"a, groups of 4": 2, "a, groups of 4, 8 soft tokens": 1}


def test_steps_of_another_scope_are_not_averaged():
    scopes = ({}, {"measure": {"scope": "all"}}, {"measure": {}}, {"measure": {"scope": "lm_head"}})
    stores = [measured(f"run-{index}", {"task": "a"} | scope) for index, scope in enumerate(scopes)]
    found = {name: len(design.grams) for name, design in designs(stores).items()}
    assert found == {"a, groups of 4": 3, "a, groups of 4, scope 'lm_head'": 1}


@pytest.mark.parametrize(
    ("truncated", "sentence"),
    [
        ([8, 8], "all answers ended at max_new_tokens = 12, and .*; raise --sample.max-new-tokens"),
        ([8, 7], "or choose an easier task"),
    ],
)
def test_answers_that_are_all_cut_off_are_not_called_a_hard_task(truncated, sentence):
    store = SimpleNamespace(info={"config": {"sample": {"max_new_tokens": 12}}})
    steps = pd.DataFrame({"n_truncated": truncated, "n_rollouts": [8, 8]})
    assert re.search(sentence, no_signal(store, steps))


def test_runs_of_another_scope_are_named_in_the_sentence_that_a_report_refuses_them_with(otb_run, trained):
    head = trained("head", measure=MeasureConfig(exact=Schedule(every=2), scope="lm_head"))
    with pytest.raises(InputError) as refused:
        open_runs([otb_run, head])
    sentence, _, _ = str(refused.value).partition(";")
    text = " ".join(printed([otb_run, head]).split())
    assert f"{sentence}: each has a table of estimators of its own." in text
    assert text.count("Estimators on the same rollouts") == 2
    # A run that measured nothing is of no scope, whatever it was asked for.
    unmeasured = trained("quiet_head", measure=MeasureConfig(exact=Schedule(0, 0), scope="lm_head"))
    assert "which do not compare" not in printed([otb_run, unmeasured])


def gram_of_groups(size):
    return Gram(np.ones((1, 1, 3, 3)), (("rloo", "none"),), 3 * size)


def test_single_measured_prompt_is_shown_without_variance(trained):
    text = printed([trained("one_prompt", measure=MeasureConfig(exact=Schedule(every=2, prompts=1)))])
    assert [line.split() for line in text.splitlines() if line.split()[:1] == ["rloo"]] == [
        ["rloo", "none", "1", "proved", "0"]
    ]
    assert re.search(r"Not shown, since .*: SF ×rloo, efficiency ×rloo, .*variance ×rloo\.", text)


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
    rows = fidelity_rows(RunStore(writer.path), "run")
    assert [row[2].pooled.n for row in rows] == [3 + 2, 3]
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
    with pytest.raises(InputError, match="run begun has no complete step yet"):
        comparison([writer.path])
