"""`otb compare --json`: the numbers of the tables and of the page Compare, readable by any JSON parser."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.answers import by_name, opened
from otb_analysis.commands.cli import main
from otb_analysis.figures.styles import interval_cell, number
from otb_analysis.report.records import comparison_record, jsonable
from otb_analysis.statistics import Interval
from otb_analysis.store import RunStore, RunWriter, StepTables

REAL = Path(__file__).parents[2] / "docs" / "examples" / "smollm2" / "runs" / "letter-counting"
NAMED = {"rloo": 0.0, "value": 0.2}


def write(root: Path, name: str, seed: int, gain: float) -> Path:
    writer = RunWriter.create(root, f"{name}-{seed}", {"seed": seed, "estimator": {"name": name}, "task": "sum"})
    random = np.random.default_rng([seed, len(name)])
    for step in range(30):
        writer.write_step(step, StepTables(steps={"reward_mean": 0.5 + gain + 0.02 * random.normal()}))
    writer.finish()
    return writer.path


def strict(text: str) -> dict:
    """Parse JSON that may hold no NaN."""
    return json.loads(text, parse_constant=pytest.fail)


def test_two_runs_are_compared_in_the_order_in_which_they_are_named(tmp_path, capsys):
    for name, gain in (("rloo", 0.0), ("value", 0.2)):
        write(tmp_path, name, 0, gain)
    assert main(["compare", "value-0", "rloo-0", "--root", str(tmp_path), "--json"]) == 0
    record = strict(capsys.readouterr().out)
    pair = record["pair"]
    assert (pair["a"], pair["b"]) == ("value-0", "rloo-0")
    (reward,) = pair["quantities"]
    assert reward["B to A"] == pytest.approx(-0.2, abs=0.02) and reward["low"] < reward["B to A"] < reward["high"] < 0
    assert reward["differs"] is True and pair["verdict"].startswith("Training reward: B − A is −0.")
    assert record["settings"] == [{"setting": "estimator.name", "value-0": "value", "rloo-0": "rloo"}]
    assert [run["run"] for run in record["runs"]] == ["value-0", "rloo-0"]


def test_all_runs_of_a_root_are_paired_by_seed_where_they_can_be(tmp_path, capsys):
    for seed in range(3):
        for name, gain in (("rloo", 0.0), ("value", 0.2)):
            write(tmp_path, name, seed, gain)
    assert main(["compare", "--root", str(tmp_path), "--json"]) == 0
    pair = strict(capsys.readouterr().out)["pair"]
    assert pair["notes"][0].startswith("Paired by seed: 3 pairs")
    assert abs(pair["quantities"][0]["B to A"]) == pytest.approx(0.2, abs=0.02)


def test_terminal_says_what_the_json_says_of_b_against_a(tmp_path, capsys):
    for name, gain in (("rloo", 0.0), ("value", 0.2)):
        write(tmp_path, name, 0, gain)
    pair = comparison_record(opened([tmp_path / "rloo-0", tmp_path / "value-0"]))["pair"]
    assert main(["compare", "rloo-0", "value-0", "--root", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"A is rloo-0, B is value-0. {pair['verdict']}" in text
    (reward,) = jsonable(pair["quantities"])
    ratio = interval_cell(Interval(reward["B to A"], reward["low"], reward["high"], 0, ""))
    row = [number(reward["A"]), number(reward["B"]), ratio, "30"]
    assert f"Reward {' '.join(row)}" in text
    assert "Gradient noise, B ÷ A" not in text and all(note in text for note in pair["notes"])


@pytest.mark.skipif(not REAL.is_dir(), reason="installed without its repository")
def test_terminal_shows_ratios_of_gradient_noise_of_runs_that_measured_the_same_steps(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name in "ab":
        shutil.copytree(REAL, tmp_path / name)
    assert main(["compare", "a", "b", "--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    (noise,) = jsonable(comparison_record(opened([tmp_path / "a", tmp_path / "b"]))["pair"]["gradient_noise"])
    row = next(line for line in text[text.index("Gradient noise, B ÷ A") :].splitlines() if noise["what"] in line)
    assert noise["variance"] == 1.0 and f"{noise['prompts']} prompts, {noise['steps']} steps" in row


@pytest.mark.skipif(not REAL.is_dir(), reason="installed without its repository")
def test_one_run_has_its_lines_every_estimator_and_the_pair_that_is_asked_for(capsys):
    words = ["--json", "--a", "rloo", "--b", "value"]
    assert main(["compare", REAL.name, "--root", str(REAL.parent), *words]) == 0
    record = strict(capsys.readouterr().out)
    answers = opened([REAL])[REAL.name]
    (run,), (design,), measured = record["runs"], record["estimators"], answers.measured
    assert (run["run"], run["steps"], run["conclusion"]) == (REAL.name, 20, list(answers.lines))
    assert run["fidelity"] == jsonable([{"of": of} | vars(found) for of, found in answers.fidelity])
    assert design["conclusion"] == list(measured.lines) == run["conclusion"][: len(measured.lines)]
    assert design["looked_at"] == len(measured.decision.comparisons) and design["recommended"] is None
    rows = {(row["estimator"], row["energy_source"]): row for row in design["rows"]}
    expected = {row.key: row for row in measured.comparison().rows}
    assert list(rows) == list(expected)
    value = expected["value", "none"]
    assert rows["value", "none"]["sf_ratio"] == pytest.approx(value.ratios[0].estimate)
    assert rows["value", "none"]["together_high"] == pytest.approx(value.together.high)
    assert (record["pair"]["a"], record["pair"]["b"]) == ("rloo", "value")
    (noise,) = record["pair"]["gradient_noise"]
    assert noise["sf"] == pytest.approx(value.ratios[0].estimate)


def test_a_run_without_steps_is_one_sentence(tmp_path, capsys):
    RunWriter.create(tmp_path, "empty", {})
    assert main(["compare", "empty", "--root", str(tmp_path), "--json"]) != 0
    assert "has no complete step yet" in capsys.readouterr().err


def test_a_broken_run_is_left_out_of_all_but_not_of_a_named_one(tmp_path, capsys):
    write(tmp_path, "rloo", 0, 0.0)
    shutil.copytree(tmp_path / "rloo-0", tmp_path / "torn")
    part = tmp_path / "torn" / "run.sqlite"
    part.write_bytes(part.read_bytes()[:5000])
    assert main(["compare", "--root", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [run["run"] for run in strict(out)["runs"]] == ["rloo-0"] and "torn" in err


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, capsys):
    runs = [write(tmp_path / f"{name}s", name, seed, gain) for name, gain in NAMED.items() for seed in (0, 1)]
    same = [run.rename(run.with_name(f"s{run.name[-1]}")) for run in runs]
    assert main(["compare", *map(str, same), str(same[0].parent / ".." / "rloos" / "s0"), "--json"]) == 0
    record = strict(capsys.readouterr().out)
    named = ["rloos/s0", "rloos/s1", "values/s0", "values/s1"]
    assert [run["run"] for run in record["runs"]] == named
    assert record["pair"]["a"].endswith("= rloo") and "2 pairs" in record["pair"]["notes"][0]
    assert record["pair"]["quantities"][0]["B to A"] == pytest.approx(0.2, abs=0.02)
    assert {"setting": "seed", **dict(zip(named, "0101", strict=True))} in record["settings"]
    assert main(["compare", *map(str, same)]) == 0
    text = capsys.readouterr().out
    assert all(f"\n {run} " in text for run in named) and "\n s0 " not in text
    assert main(["compare", str(same[0]), str(same[2])]) == 0
    assert "A is rloos/s0, B is values/s0. Training reward: B − A is +0." in capsys.readouterr().out


def test_only_repeated_names_get_folders_and_as_many_as_they_need(tmp_path):
    runs = [write(tmp_path / folder, "rloo", seed, 0) for folder, seed in (("a/x", 0), ("b/x", 0), ("b/x", 1))]
    assert list(by_name([RunStore(run) for run in runs])) == ["a/x/rloo-0", "b/x/rloo-0", "rloo-1"]


def test_groups_of_a_setting_and_its_values_are_chosen(tmp_path, capsys):
    for seed in range(2):
        for name, gain in (("rloo", 0.0), ("value", 0.2), ("otb", 0.1)):
            write(tmp_path, name, seed, gain)
    words = ["compare", "--root", str(tmp_path), "--json", "--setting", "estimator.name", "--a", "otb", "--b", "value"]
    assert main(words) == 0
    pair = strict(capsys.readouterr().out)["pair"]
    assert (pair["a"], pair["b"]) == ("estimator.name = otb", "estimator.name = value")
    assert "2 pairs" in pair["notes"][0]
    assert pair["quantities"][0]["B to A"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "--setting", "estimator.nam"], "did you mean 'estimator.name'?"),
        (["--json", "--setting", "estimator.name", "--a", "valu"], "estimator.name is never 'valu'"),
        (["--json", "--a", "rloo"], "--a and --b are estimators of one run"),
        (["--json", "--setting", "estimator.name", "--a", "rloo", "--b", "rloo"], "share no seed or are the same"),
        (["--curves"], "go with --json"),
        (["--json", "--window", "0"], "--window is 0"),
        (["--json", "--curves", "--by", "sed"], "--by is 'sed', in which these runs do not differ"),
        (["--json", "--by", "seed"], "--by groups the curves"),
    ],
)
def test_sides_that_cannot_be_compared_are_one_sentence(words, said, tmp_path, capsys):
    for name, gain in NAMED.items():
        write(tmp_path, name, 0, gain)
    assert main(["compare", "--root", str(tmp_path), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err


@pytest.mark.skipif(not REAL.is_dir(), reason="installed without its repository")
def test_estimators_of_one_run_that_were_not_measured_are_one_sentence(capsys):
    words = ["compare", REAL.name, "--root", str(REAL.parent), "--json", "--a"]
    assert main([*words, "otbb"]) == 2
    assert "estimator 'otbb' was not measured" in capsys.readouterr().err
