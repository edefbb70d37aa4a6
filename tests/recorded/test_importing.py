"""Recorded rollouts without a model: rewards, dead groups, lengths and alarms, and the per-token numbers there are."""

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers import RunAnswers, opened
from otb_analysis.commands.cli import main
from otb_analysis.config import ImportConfig
from otb_analysis.diagnostics.changes import length_drift
from otb_analysis.errors import InputError
from otb_analysis.phases import NOTES
from otb_analysis.recorded import runs
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.report.compare import comparison
from otb_analysis.report.diagnosis import diagnosis_parts
from otb_analysis.store import RunStore, step_series


@pytest.fixture
def config(tmp_path):
    return ImportConfig(root=tmp_path / "runs", prompts=2)


@pytest.fixture(autouse=True)
def notes():
    """What is shown to the user at the end."""
    NOTES.clear()
    yield NOTES
    NOTES.clear()


def test_prompt_completion_and_reward_alone_give_a_run(config, jsonl, simple, notes):
    rows = [{name: row[name] for name in ("prompt", "completion", "reward")} for row in simple(prompts=4, size=3)]
    rows[0]["reward"] = 1.0  # group 0: 1, 1, 0
    rows[3]["reward"] = 1.0  # group 1: 1, 1, 0
    for row in rows[6:9]:  # group 2 is dead
        row["reward"] = 0.5
    path = import_rollouts(jsonl(rows), config)
    store = RunStore(path)
    steps, rollouts = store.steps_df(), store.rollouts_df()
    assert steps["n_prompts"].tolist() == [2, 2] and steps["n_rollouts"].tolist() == [6, 6]
    assert steps["n_zero_variance_groups"].tolist() == [0, 1]
    np.testing.assert_allclose(steps["reward_mean"], [4 / 6, (1.5 + 1) / 6])
    # Completions are "g0#", "g1#1", "g2#11": 3, 4 and 5 characters; no tokenizer counted tokens.
    assert steps["characters_mean"].tolist() == [4.0, 4.0] and steps["length_mean"].isna().all()
    assert rollouts["completion"].tolist() == [row["completion"] for row in rows]
    assert store.info["config"]["source"]["made_by"] == "otb import"
    assert any("otb score --model DIR --rollouts" in note for note in notes)
    sections = comparison(opened([path]))
    assert sections[0].parts[0].startswith("Nothing is known of its baselines") and diagnosis_parts(RunAnswers(store))


def test_length_drift_is_seen_in_characters(config, jsonl):
    rows = [
        {"prompt": f"p{step}", "completion": "x" * (10 if step < 30 else 200), "reward": float(k), "step": step}
        for step in range(60)
        for k in range(2)
    ]
    store = RunStore(import_rollouts(jsonl(rows), config))
    drift = length_drift(step_series(store.steps_df()))
    # At the alarm half of the last ten steps are long: √(10 · 200) = 44.7.
    assert drift.level == "alarm" and "completions were 44.7 characters long" in drift.reason


def test_recorded_numbers_of_every_token_are_kept_and_others_are_null(config, jsonl, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    ids = tokenizer("12=3")["input_ids"]
    row = {
        "token_ids": [*tokenizer("9+")["input_ids"], *ids], "loss_mask": [0, 0, 1, 1, 0, 1], "step": 5,
        "inference_logprobs": [0, 0, -1.0, -2.0, 0, -3.0], "trainer_logprobs": [0, 0, -1.5, -2.0, 0, -3.5],
        "entropy": [0, 0, 0.5, 0.7, 9.0, 0.6], "advantages": [0, 0, 0.25, 0.25, 0, 0.25],
        "rewards": [0, 0, 1.0, 1.0, 0, 1.0], "export_sequence_idx": 0,
    }  # fmt: skip
    source = jsonl([row, row], "token_exports/step_5/rank_0.jsonl").parent
    path = import_rollouts(source, replace(config, tokenizer=str(tmp_path / "tokenizer")))
    tokens = RunStore(path).tokens_df()
    first = tokens[tokens["rollout"] == 0]
    assert first["token"].tolist() == list("12=3") and first["mask"].tolist() == [True, True, False, True]
    assert first["turn"].tolist() == [0, 0, 0, 1] and first["t"].tolist() == [0, 1, 2, 3]
    assert first["behavior_logprob"].tolist()[:2] == [-1.0, -2.0] and first["behavior_logprob"].isna().tolist()[2]
    assert first["advantage"].tolist()[3] == 0.25
    assert first["reward"].tolist()[3] == 1.0 and first["reward"].sum() == 1.0
    assert tokens["energy_proxy"].isna().all()
    (step,) = RunStore(path).steps_df().to_dict("records")
    assert (step["step"], step["n_tokens"], step["length_mean"]) == (5, 6, 3.0)
    # Mismatch −0.5, 0, −0.5; entropy .5, .7, .6: the placeholder 9 at the masked token is not read.
    np.testing.assert_allclose([step["mismatch_mean"], step["mismatch_max"], step["entropy_mean"]], [-1 / 3, 0.5, 0.6])
    # √(.5²·2/3); (2(e^−½ − 1 + ½) + 0)/3; e^−½ = .61 is above ½.
    found = [step[f"mismatch_{name}"] for name in ("rms", "k3", "ratio_share")]
    np.testing.assert_allclose(found, [0.5 * (2 / 3) ** 0.5, 2 / 3 * (np.exp(-0.5) - 0.5), 0.0])
    assert step["advantage_max"] == 0.25
    assert RunStore(path).rollouts_df()["completion"].tolist() == ["12=3", "12=3"]


def test_a_tokenizer_counts_tokens_of_texts(config, jsonl, simple, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = import_rollouts(jsonl(simple()), replace(config, tokenizer=str(tmp_path / "tokenizer")))
    assert RunStore(path).steps_df()["length_mean"].tolist() == [4.0, 4.0]
    with pytest.raises(InputError, match="no directory"):
        import_rollouts(jsonl(simple()), replace(config, tokenizer=str(tmp_path / "none"), run="other"))


def test_a_file_that_was_cut_off_keeps_what_was_whole_and_says_so(config, jsonl, simple, notes):
    path = jsonl(simple())
    path.write_bytes(path.read_bytes()[:-5])
    assert RunStore(import_rollouts(path, config)).steps_df()["n_rollouts"].tolist() == [6, 5]
    assert any(note.startswith("1 × record at the end of a file was cut off") for note in notes)
    # The file is written to its end: the step that lacked a rollout is made again.
    done = import_rollouts(jsonl(simple()), replace(config, if_exists="resume"))
    assert RunStore(done).steps_df()["n_rollouts"].tolist() == [6, 6]


def test_steps_that_repeat_the_rollouts_before_them_are_counted(config, jsonl, simple, notes):
    rows = [row for step in range(3) for row in simple(step=step)]
    rows[-1] = {**rows[-1], "completion": "9"}  # step 1 repeats step 0, step 2 does not
    assert RunStore(import_rollouts(jsonl(rows), config)).complete_steps() == [0, 1, 2]
    assert any(note.startswith("1 × step has the rollouts of the step before it") for note in notes)


def test_one_rollout_per_prompt_says_which_estimators_remain(config, jsonl, simple, notes):
    import_rollouts(jsonl(simple(size=1)), config)
    assert any("every prompt has one rollout, so these estimators remain: none, batch_mean" in note for note in notes)


@pytest.fixture
def aside(monkeypatch):
    """Let a process of its own read any file, as it does large ones."""
    monkeypatch.setattr(runs, "LARGE", 0)


def test_a_process_of_its_own_reads_the_same(config, jsonl, simple, notes, monkeypatch):
    rows = [row | {"logprobs": [-0.5, float("nan")], "ids": [1, 2]} for step in range(3) for row in simple(step=step)]
    for name, large in (("thread", runs.LARGE), ("process", 0)):
        monkeypatch.setattr(runs, "LARGE", large)
        import_rollouts(jsonl(rows), replace(config, run=name))
    one, other = RunStore(config.root / "thread"), RunStore(config.root / "process")
    for table in ("tokens", "rollouts", "steps"):
        pd.testing.assert_frame_equal(one.frame(table), other.frame(table))
    counted = [note for note in notes if "not a finite number" in note]
    assert len(counted) == 2 and counted[0] == counted[1] and counted[0].startswith("36 × logprobs not a finite")
    assert "(rollouts.jsonl, record 1" in counted[0]


@pytest.mark.usefixtures("aside")
def test_a_record_that_a_process_refuses_is_one_sentence_and_the_steps_before_stay(config, jsonl, simple):
    rows = [row for step in range(4) for row in simple(step=step)]
    rows[-1]["reward"] = "many"
    with pytest.raises(InputError, match=r"reward is 'many'.* 3 steps before"):
        import_rollouts(jsonl(rows), config)
    path = config.root / "rollouts-imported"
    assert RunStore(path).complete_steps() == [0, 1, 2] and not list(path.rglob(".*.tmp"))


@pytest.mark.usefixtures("aside")
def test_a_process_that_is_killed_is_one_sentence(config, jsonl, simple, monkeypatch):
    started = list[subprocess.Popen[bytes]]()

    def killed(*given, **options):
        started.append(subprocess.Popen(["sleep", "60"], **options))
        started[0].kill()
        return started[0]

    path = jsonl(simple())
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=killed, PIPE=subprocess.PIPE))
    with pytest.raises(InputError, match=r"rollouts\.jsonl ended early, by a signal"):
        import_rollouts(path, config)
    assert started[0].poll() is not None


def test_the_commands_print_the_run_and_refuse_in_one_sentence(tmp_path, jsonl, simple, checkpoint, capsys):
    file, root = str(jsonl(simple())), str(tmp_path / "runs")
    assert main(["import", file, "--root", root]) == 0
    assert "rollouts-imported is complete" in " ".join(capsys.readouterr().out.split())
    assert main(["score", "--model", str(checkpoint), "--rollouts", file, "--root", root]) == 0
    assert "rollouts-scored is complete" in " ".join(capsys.readouterr().out.split())
    assert main(["import", file, "--root", root]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["import"]) == 2
    assert "otb: there are no rollouts to read; pass a file" in capsys.readouterr().err


def test_a_single_step_outlier_is_named_with_the_record_that_it_is_of(config, jsonl):
    def rollout(step, k):
        far = (step, k) == (8, 1)
        return {
            "prompt": "1+1=", "completion": "2", "reward": float(k), "step": step,
            "ids": [1] * (100 if far else 4), "advantages": [-50.0 if far else 1.0] * (100 if far else 4),
        }  # fmt: skip

    rows = [rollout(step, k) for step in range(20) for k in range(2)]
    for row in rows:
        row["grad_norm"] = 37.5 if row["step"] == 8 else 0.3
    run = RunAnswers(RunStore(import_rollouts(jsonl(rows), config)))
    assert [(one.column, one.step) for one in run.outliers] == [
        ("grad_norm", 8),
        ("advantage_max", 8),
        ("length_max", 8),
    ]
    line = run.outlier_line
    assert "gradient norm 37.5 at step 8 (125 × the usual 0.300)" in line and line.endswith("1 more.")
    assert "largest advantage 50.0 at step 8 (50.0 × the usual 1.00, rollout 1: rollouts.jsonl record 18)" in line
    assert len(line.split()) <= 40 and line in "".join(map(str, diagnosis_parts(run)))
    assert run.mismatch_line == ""
