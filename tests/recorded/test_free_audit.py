"""`otb audit FOLDER` without a model: what it says, that it loads no PyTorch and leaves nothing behind; `--first`."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.audit import audit_run
from otb_analysis.answers.traits import PASSES, Mismatch
from otb_analysis.commands import audit_cost as costs
from otb_analysis.commands.cli import main
from otb_analysis.config import AuditConfig, ImportConfig
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import Scorer, load, score
from otb_analysis.store import RunStore

PROBE = """
import sys
from otb_analysis.commands.cli import main
code = main(sys.argv[1:])
print("LOADED", sorted({"torch", "transformers"} & sys.modules.keys()))
sys.exit(code)
"""


def written(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def traits_of_rows(tmp_path, rows):
    path = written(tmp_path / "mine.jsonl", rows)
    run = RunAnswers(RunStore(import_rollouts(path, ImportConfig(root=tmp_path / "runs"))))
    return run.traits


def alone(folder, *words):
    """What a process of its own prints in a folder, on one line, and whether it loaded PyTorch."""
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = os.environ | {"COLUMNS": "200", "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "audit", *words],
        cwd=folder, capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not [path for path in temporary.iterdir() if "otb-audit" in path.name]
    assert not (folder / "runs").exists()
    return " ".join(done.stdout.split())


def test_a_thousand_plain_rollouts_are_read_without_pytorch(tmp_path):
    random, rows = np.random.default_rng(0), []
    for g in range(125):
        paid = (random.random(8) < random.random()).astype(float) if g % 5 else np.ones(8)  # at least 25 are dead
        advantage = (paid - paid.mean()) / (paid.std(ddof=1) + 1e-6)
        for k in range(8):
            length = int(random.integers(5, 30))
            sampler = -random.exponential(0.5, length) - 0.1
            rows.append({
                "prompt": f"{g}=", "completion": "x" * length, "reward": paid[k], "group": g, "step": g // 16,
                "prompt_ids": [g], "ids": [2] * length, "logprobs": sampler.tolist(),
                "trainer_logprobs": (sampler + 0.05).tolist(), "advantages": [advantage[k]] * length,
                "finish_reason": "length" if length > 27 else "stop",
            })  # fmt: skip
    dead = sum(len({row["reward"] for row in rows[k : k + 8]}) == 1 for k in range(0, 1000, 8))
    cut = sum(row["finish_reason"] == "length" for row in rows)
    n = sum(len(row["ids"]) for row in rows)
    written(tmp_path / "dump" / "rollouts.jsonl", rows)
    said = alone(tmp_path, "dump")
    assert "LOADED []" in said
    assert "dump: 1,000 rollouts of 125 prompts in 8 steps" in said
    assert f"rewards are all equal: {dead} of 125 groups of 8, {dead / 125:.0%}." in said
    assert f"log-probabilities of {n:,} tokens differ by 0.05 nats" in said and "0.00% of probabilities" in said
    assert "The recorded advantages of 1,000 rollouts in 125 groups are those of grpo" in said
    assert f"{cut} of 1,000 answers were cut at the limit" in said
    assert "Budget planner: dead groups" in said and "groups above 8 save at most 12%" in said
    assert f"otb audit dump --model DIR --go It passes 1,000 rollouts with {n:,} tokens forward" in said


def test_a_folder_of_trl_is_read_without_pytorch(tmp_path):
    (tmp_path / "dump").mkdir()
    for step in range(4):
        rows = [
            {"step": step, "prompt": f"{step}.{g}", "completion": "y" * k, "correct": float(k == g), "advantage": 0.5}
            for g in range(3)
            for k in range(2)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dump" / f"completions_{step:05d}.parquet")
    said = alone(tmp_path, "--rollouts", "dump")
    assert "LOADED []" in said and "24 rollouts of 12 prompts in 4 steps" in said
    assert "4 of 12 groups of 2, 33%" in said  # of g = 2, which neither answer gets
    # Lengths are 0 and 1: g = 0 pays the empty answer, g = 1 the other one, each as often.
    assert "rank correlation with reward +0.00, +0.00" in said and "12 of 24 are empty" in said
    assert "No token ids were recorded" in said


def test_traits_worked_by_hand(tmp_path):
    # Groups of 3, 3 and 2. Lengths 1 2 3 with rewards 0 1 1, then 0 0 0, then lengths 1 2 with rewards 1 0.
    paid, lengths, group = [0, 1, 1, 0, 0, 0, 1, 0], [1, 2, 3, 1, 2, 3, 1, 2], [0, 0, 0, 1, 1, 1, 2, 2]
    rows = [
        {
            "prompt": str(g), "completion": "" if n == 0 else "ab", "reward": float(r), "group": g, "step": 0,
            "prompt_ids": [g], "ids": [1] * length + [2], "mask": [1] * length + [0], "finish_reason": "stop",
            # A factor of 3 at the first token of the last group, 1 elsewhere.
            "logprobs": [-3.0] * (length + 1),
            "trainer_logprobs": [-3.0 + np.log(3) * (g == 2)] + [-3.0] * length,
        }
        for n, (r, length, g) in enumerate(zip(paid, lengths, group, strict=True))
    ]  # fmt: skip
    traits = traits_of_rows(tmp_path, rows)
    assert (traits.n_groups, traits.n_dead, traits.sizes) == (3, 1, ((3, 2), (2, 1)))
    assert (traits.n_lacking, traits.first_lacking) == (1, "mine.jsonl, record 7")
    assert (traits.policy_tokens, traits.completion_tokens) == (15, 23)
    assert (traits.unit, traits.length_mean) == ("tokens", 15 / 8)
    assert (traits.n_truncated, traits.n_ended, traits.n_empty) == (0, 8, 1)
    assert traits.reward_first == traits.reward_last == 3 / 8
    # Two of the 15 policy tokens are off by log 3.
    assert traits.mismatch == Mismatch(15, pytest.approx((2 * np.log(3) ** 2 / 15) ** 0.5), pytest.approx(2 / 15))
    # Ranks: of length 2 5 7.5 2 5 7.5 2 5, of reward 3 7 7 3 3 3 7 3. Centred in their groups, Σxy/√(Σx²Σy²).
    x, y = np.array([2, 5, 7.5, 2, 5, 7.5, 2, 5]), np.array([3, 7, 7, 3, 3, 3, 7, 3])
    assert traits.by_length == pytest.approx(np.corrcoef(x, y)[0, 1])
    for g in range(3):
        x[np.array(group) == g] -= x[np.array(group) == g].mean()
    y = np.array([-8 / 3, 4 / 3, 4 / 3, 0, 0, 0, 2, -2])
    assert traits.within == pytest.approx(x @ y / (x @ x * (y @ y)) ** 0.5)
    assert traits.lines[0].endswith("1 of 3 groups (2 of 3, 1 of 2), 33%.")
    assert "15 of 23 completion tokens are the policy's, 65.2%" in " ".join(traits.lines)
    assert all(len(line.split()) <= 40 for line in (*traits.lines, traits.price))


def test_a_filtered_file_and_short_steps_are_said(tmp_path):
    # Groups of 4 with 1, 2 or 3 successes; steps of 10 groups, but for step 3 with 9 and the last one with 1.
    paid = [[1.0] * k + [0.0] * (4 - k) for k in (1, 2, 3)]
    sizes = [10, 10, 10, 9, *[10] * 6, 1]
    of_step = np.repeat(np.arange(len(sizes)), sizes)
    rows = [
        {"prompt": str(g), "completion": "x", "reward": reward, "group": g, "step": int(step)}
        for g, step in enumerate(of_step)
        for reward in paid[g % 3]
    ]
    traits = traits_of_rows(tmp_path, rows)
    assert traits.filtered is not None and traits.filtered.n_groups == 100
    assert traits.lines[0].endswith("0 of 100 groups of 4, 0%.") and traits.lines[1] == traits.filtered.line
    assert traits.lines[2] == "Steps: 1 of 11 fall short; the first is step 3 with 36 rollouts of the usual 40."


def test_equal_lists_of_log_probabilities_are_said(tmp_path):
    lists = {"ids": [1, 2], "prompt_ids": [3], "logprobs": [-1.0, -2.0], "trainer_logprobs": [-1.0, -2.0]}
    rows = [{"prompt": "a", "completion": "b", "reward": float(k), "step": 0, **lists} for k in range(2)]
    traits = traits_of_rows(tmp_path, rows)
    assert traits.mismatch == Mismatch(4, 0.0, 0.0) and "are the sampler's" in traits.lines[1]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--go",), ("--go", "--model DIR")),
        (("--rollouts", "b.jsonl"), ("a.jsonl", "b.jsonl", "one of the two")),
        (("--first", "-1"), ("--first is -1",)),
    ],
)
def test_options_that_cannot_work_are_one_sentence(words, facts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "reward": 1.0}])
    assert main(["audit", "a.jsonl", *words]) == 2
    said = capsys.readouterr().err
    assert all(fact in said for fact in facts) and said.count("\n") == 1


def test_a_record_that_is_refused_names_no_folder_that_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a", "completion": "b", "reward": 1.0, "step": 0}, {"prompt": "a", "completion": "b", "step": 1}]
    written(tmp_path / "a.jsonl", rows)
    assert main(["audit", "a.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "record 2" in said and "otb-audit" not in said


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Three steps of 4 prompts with 4 rollouts each."""
    random = np.random.default_rng(1)
    rows = [
        {"prompt": f"{g}+{g}=", "completion": f"{random.integers(100)}#", "reward": float(k % 2), "step": g // 4}
        for g in range(12)
        for k in range(4)
    ]
    return written(tmp_path_factory.mktemp("free") / "mine.jsonl", rows)


def audit_words(rollouts, checkpoint, root, *more):
    return ["audit", str(rollouts), "--model", str(checkpoint), "--root", str(root), "--run", "a", *more]


def test_with_a_model_the_free_answers_come_first(rollouts, checkpoint, tmp_path, capsys):
    assert main(audit_words(rollouts, checkpoint, tmp_path / "runs")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.index("0 of 12 groups of 4") < said.index("48 rollouts with about") < said.index("Nothing was written")
    assert "--first" not in said and not (tmp_path / "runs").exists()


def test_a_long_audit_names_a_cheaper_one(rollouts, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(costs, "seconds_per_position", lambda *args: 1.0)
    config = AuditConfig(rollouts=rollouts, model=str(checkpoint), root=tmp_path)
    whole = costs.audit_cost(config, load(config))
    least, most = PASSES
    positions = whole.seconds / whole.n_rollouts
    assert least * 5 < positions < most * 9  # rollouts have 5 to 9 tokens, prompts included
    monkeypatch.setattr(costs, "LONG", 0.7 * whole.seconds)
    cost = costs.audit_cost(config, load(config))
    assert (cost.cheaper, cost.cheaper_seconds) == ("--first 2", pytest.approx(2 / 3 * whole.seconds))
    assert main(audit_words(rollouts, checkpoint, tmp_path)) == 0
    assert "--first 2 --go" in " ".join(capsys.readouterr().out.split())
    one = AuditConfig(rollouts=rollouts, model=str(checkpoint), root=tmp_path, first=1)
    monkeypatch.setattr(costs, "LONG", 1.0)
    assert costs.audit_cost(one, load(one)).cheaper == "--norms none"


def test_first_measures_so_many_steps_and_going_on_adds_the_others(rollouts, checkpoint, tmp_path):
    settings = {"rollouts": rollouts, "model": str(checkpoint), "root": tmp_path, "run": "a"}
    path = score(AuditConfig(**settings, first=1))
    run = RunAnswers(RunStore(path))
    assert run.store.complete_steps() == [0] and run.config["first"] == 1
    assert any("--first" in line for line in audit_run(run).missing)
    assert score(AuditConfig(**settings, if_exists="resume")) == path
    assert RunStore(path).complete_steps() == [0, 1, 2]
    assert not any("--first" in line for line in audit_run(RunAnswers(RunStore(path))).missing)


def test_what_was_measured_is_kept_when_stopped(rollouts, checkpoint, tmp_path, capsys, monkeypatch):
    tables = Scorer.tables

    def stopped(self, step):
        if step.step == 1:
            raise KeyboardInterrupt
        return tables(self, step)

    monkeypatch.setattr(Scorer, "tables", stopped)
    words = audit_words(rollouts, checkpoint, tmp_path, "--go")
    assert main(words) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert "1 step before it can be read" in said and "--if-exists resume goes on" in said
    assert f"otb audit --run a --root {tmp_path}" in said
    monkeypatch.undo()
    assert main(["audit", "--run", "a", "--root", str(tmp_path)]) == 0
    assert "16 rollouts of 4 prompts in 1 step" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--if-exists", "resume"]) == 0
    assert RunStore(tmp_path / "a").complete_steps() == [0, 1, 2]


def test_groups_of_one_rollout_are_said_to_compare_nothing_and_what_to_do(tmp_path):
    rows = [{"prompt": f"{g}=", "completion": "x", "reward": g % 2, "group": g} for g in range(6)]
    first = traits_of_rows(tmp_path, rows).lines[0]
    assert "no baseline can compare" in first and "Sample four or more" in first and "0 of 6" not in first
