"""`otb query`: one SELECT for scripts, with a status and one sentence where it cannot be answered."""

import json

import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.commands.cli import main
from otb_analysis.store import RunWriter, StepTables
from tests.app.token_runs import write_token_run


@pytest.fixture
def root(tmp_path):
    writer = RunWriter.create(tmp_path, "mine", {})
    for step in range(60):
        steps = {"reward_mean": 0.5, "grad_norm": float("nan") if step == 1 else 1.0}
        writer.write_step(step, StepTables(steps=steps))
    writer.finish()
    return tmp_path


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


def test_numbers_that_json_has_not_are_null_and_infinite_ones_are_named(root, capsys):
    select = "SELECT step, grad_norm, grad_norm / 0 AS x, not_finite, [1, 2] AS l FROM steps WHERE step < 2"
    assert main(["query", "mine", select, "--root", str(root), "--json"]) == 0
    found = strict(capsys.readouterr().out)
    first, second = found["rows"]
    assert (first["grad_norm"], first["x"], first["not_finite"], first["l"]) == (1.0, None, None, [1, 2])
    assert (second["grad_norm"], second["x"], second["not_finite"]) == (None, None, "grad_norm")
    assert found["infinite"] == [{"row": 0, "column": "x", "is": "infinite"}]


def test_terminal_shows_the_first_rows_as_text_whatever_they_hold(root, capsys):
    select = "SELECT step, 'a[red]' || chr(27) || '[31mb' AS odd, [step, 1] AS l FROM steps"
    assert main(["query", "mine", select, "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert r"a[red]\x1b[31mb" in out and "\x1b" not in out
    assert "[49, 1]" in out and "[50, 1]" not in out and "The first 50 of 60 rows; --json has all." in out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["mine", "DROP TABLE steps"], 1, "a run is read-only, but the query holds DROP"),
        (["mine", "SELECT 1; SELECT 2"], 1, "a run is read-only, but the query holds SELECT, SELECT"),
        (["mine", "SELECT nothing FROM steps"], 1, "the query cannot be run"),
        (["mine", "SELECT * FROM read_text('/etc/passwd')"], 1, "the query cannot be run"),
        (["yours", "SELECT 1"], 1, "there is no run 'yours'"),
        ([], 2, "otb query needs a run"),
    ],
)
def test_what_cannot_be_answered_is_a_status_and_one_sentence(words, status, said, root, capsys):
    assert main(["query", *words, "--root", str(root), "--json"]) == status
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_without_a_select_the_columns_are_explained(root, capsys):
    assert main(["query", "mine", "--root", str(root)]) == 0
    assert "Optimiser step, from 0" in capsys.readouterr().out
    assert main(["query", "mine", "--root", str(root), "--json"]) == 0
    found = strict(capsys.readouterr().out)
    assert found["n_rollouts"] == 0 and found["ends"]["first"] is None and found["rewards_by_step"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "otb tokens needs a run"),
        (["mine"], "mine has no step whose tokens and rollouts are stored"),
        (["first", "--step", "9"], "step 9 of first has no tokens; steps 0 to 2 have."),
        (["first", "--prompt", "9"], "has no prompt 9; it has prompts 0 to 1."),
        (["first", "--rollout", "9"], "prompt 0 has no rollout 9"),
        (["first", "--t", "1"], "--t needs the rollout of the token"),
        (["first", "--rollout", "0", "--t", "99"], "rollout 0 has no token 99"),
        (["first", "--estimator", "rlo"], "did you mean 'rloo'?"),
    ],
)
def test_tokens_that_are_not_there_are_one_sentence(words, said, root, capsys):
    write_token_run(root, "first")
    assert main(["tokens", *words, "--root", str(root), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_tokens_come_with_the_alarm_of_their_run(root, capsys, monkeypatch):
    write_token_run(root, "tokens")
    monkeypatch.setattr(RunAnswers, "alarm", "another sampler")
    assert main(["tokens", "tokens", "--root", str(root), "--json"]) == 0
    assert strict(capsys.readouterr().out)["alarm"] == "another sampler"
    assert main(["tokens", "tokens", "--root", str(root)]) == 0 and "another sampler" in capsys.readouterr().out


def test_tokens_in_the_terminal_end_with_the_formula(root, capsys):
    write_token_run(root, "first")
    words = ["--step", "0", "--rollout", "2", "--t", "1", "--estimator", "rloo"]
    assert main(["tokens", "first", "--root", str(root), *words]) == 0
    out = capsys.readouterr().out
    for name in ("energy_regression", "energy_regression (proxy)"):
        assert main(["tokens", "first", "--root", str(root), *words[:-1], name]) == 0
        assert "baseline of" in capsys.readouterr().out
    assert "advantage: A = G − B = 0 − 0.667 = −0.667" in out and "grad_norm_sq" in out and "entropy: H =" in out


@pytest.fixture
def odd(tmp_path):
    """A run whose numbers are NaN and infinite wherever a run can have them."""
    nan, inf = float("nan"), float("inf")
    writer = RunWriter.create(tmp_path, "odd", {"estimator": {"name": "rloo"}, "seed": 0})
    tokens = {"group": [0] * 4, "rollout": [0, 0, 1, 1], "turn": [0] * 4, "t": [0, 1, 0, 1], "token": list("abcd")}
    tokens |= {"token_id": [5] * 4, "mask": [True] * 4, "logprob": [-0.1, nan, -inf, -0.2], "reward": [0, nan, 0, inf]}
    tokens |= {
        "energy_proxy": [0.1, inf, nan, 0.2],
        "grad_norm_sq": [1.0, inf, nan, 2.0],
        "advantage": [nan, inf, 0, 1],
    }
    rollouts = {"group": [0, 0], "rollout": [0, 1], "reward": [nan, inf], "length": [2, 2], "prompt": ["p", "p"]}
    for step in range(60):
        steps = {"reward_mean": [0.5, nan, inf][step % 3], "grad_norm": [1.0, -inf, nan][step % 3], "loss": inf}
        writer.write_step(step, StepTables(tokens, rollouts, steps))
    writer.finish()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "{root}"],
        ["diagnose", "odd", "--step", "3", "--curves"],
        ["query", "odd"],
        ["query", "odd", "SELECT * FROM tokens"],
        ["tokens", "odd"],
        ["tokens", "odd", "--rollout", "1", "--t", "1"],
        ["compare", "odd", "--curves"],
    ],
)
def test_json_of_a_run_of_nan_and_infinity_is_read_by_a_strict_parser(words, odd, capsys):
    assert main([*(word.format(root=odd) for word in words), "--root", str(odd), "--json"]) == 0
    assert strict(capsys.readouterr().out)
