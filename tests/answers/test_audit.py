"""An audit: its numbers on cases worked by hand, and the whole command on a tiny model's rollouts."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.audit import _between, audit_run
from otb_analysis.answers.holders import position_class, token_class
from otb_analysis.checks.sampling_report import RecordedMismatch
from otb_analysis.commands.cli import main
from otb_analysis.config import AuditConfig, ImportConfig
from otb_analysis.recorded import score as scoring
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.report.audit import audit_sections, write_audit
from otb_analysis.report.records import jsonable
from otb_analysis.statistics import mean_over_subgroups
from otb_analysis.store import RunStore, RunWriter, StepTables
from otb_analysis.types import Gram


def test_tokens_have_kinds_and_positions():
    texts = [" the", "12", "+", "\n", "<eos>", None, "x1"]
    kinds = ["word", "number", "punctuation", "space", "special", "special", "other"]
    assert [token_class(text) for text in texts] == kinds
    assert [position_class(t) for t in (0, 1, 2, 3, 6, 7)] == ["1", "2–3", "2–3", "4–7", "4–7", "8–15"]


def test_the_variance_between_prompts_is_that_of_products_of_halves():
    # Without a baseline a group's gradient is the mean of its halves' a and b, so b = mean_p a·b − mean_{p≠q} ḡ_p·ḡ_q.
    random = np.random.default_rng(0)
    prompts = 5
    halves = random.normal(size=(prompts, 2, 7)) + random.normal(size=(prompts, 1, 7))
    whole = halves.mean(axis=1)
    flat = halves.reshape(2 * prompts, 7)
    label = (("none", "none"),)
    gram = Gram((whole @ whole.T)[None, None], label, 8 * prompts)
    half = Gram(mean_over_subgroups((flat @ flat.T)[None, None], 2), label, 8 * prompts)
    products = whole @ whole.T
    apart = (products.sum() - np.trace(products)) / (prompts * (prompts - 1))
    same = np.einsum("pd,pd->p", halves[:, 0], halves[:, 1]).mean()

    def between(size, alarm=""):
        store = SimpleNamespace(subgroup_grams=lambda: {size: {0: half}})
        decided = SimpleNamespace(over_rloo=SimpleNamespace(cause="another sampler" if alarm else ""))
        return _between(SimpleNamespace(grams={0: gram}, measured=decided, store=store))

    assert between(4) == pytest.approx(same - apart)
    assert between(2) is None  # quarters alone do not tell it
    assert between(4, "drawn by another sampler") is None


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """20 prompts of 4 rollouts with rewards that differ within most groups."""
    random = np.random.default_rng(1)
    rows = [
        {
            "prompt": f"{g}+{g}=",
            "completion": f"{random.integers(100)}#{'1' * k}",
            "reward": float(random.random() < 0.5),
        }
        for g in range(20)
        for k in range(4)
    ]
    path = tmp_path_factory.mktemp("audit") / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(row | {'group': n // 4})}\n" for n, row in enumerate(rows)))
    return path


@pytest.fixture(scope="module")
def audited(rollouts, checkpoint):
    config = AuditConfig(rollouts=rollouts, model=str(checkpoint), root=rollouts.parent / "runs", run="a", prompts=10)
    run = RunAnswers(RunStore(score(config)))
    return run, audit_run(run)


def test_an_audit_has_every_part(audited):
    report = audited[1]
    assert (report.n_rollouts, report.n_prompts, report.n_steps, report.trained) == (80, 20, 2, "grpo")
    assert report.missing == () and report.decision.against == ("grpo", "none")
    assert {"grpo", "rloo", "otb", "none"} <= {row.key[0] for row in report.estimators.rows}
    # Another policy drew these tokens, which leaves success rates alone of the group sizes.
    assert report.sampling.alarm and report.planner.cells == () == report.planner.dead


def test_shares_add_up(audited):
    tokens = audited[1].tokens
    for parts in (tokens.by_class, tokens.by_position):
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert sum(part.size for part in parts) == pytest.approx(1)
        assert sum(part.n_tokens for part in parts) == tokens.n_tokens
        for part in parts:
            assert part.signal + part.noise == pytest.approx(part.share, abs=1e-6)
    assert 0 < tokens.half < tokens.n_tokens


def test_the_files_hold_the_report_and_load_nothing(audited):
    run, report = audited
    json_file, html = write_audit(run, report, run.store.path, "otb audit --run a")
    assert json.loads(json_file.read_text())["verdict"] == list(report.verdict)
    text = html.read_text()
    assert all(sentence.split(" ")[0] in text for sentence in report.verdict)
    assert '<script src="' not in text and "<link " not in text
    titles = re.findall(r"<h2 id=.s\d+.>(.*?)</h2>", text)
    assert titles[:5] == ["Alarms", "Verdict", "Rollouts", "Estimators", "Budget planner"]
    assert {"Tokens", "Proxy", "Sampling check", "Bookkeeping", "Formulas"} == set(titles[5:])


def test_an_alarm_stands_first_and_takes_the_group_size_and_the_proxy_away(audited):
    run, report = audited  # the texts were made up, not sampled from the model
    assert report.sampling.alarm and "were not drawn by the stated sampler" in report.verdict[0]
    assert "nothing is proved" in report.verdict[1] and run.proved.projection == {}
    assert "roxy" not in " ".join(report.verdict) and "groups of" not in " ".join(report.verdict)
    assert jsonable(report)["sampling"]["alarm"] is True
    first, second = audit_sections(run, report)[:2]
    assert first.parts == (f"Alarm: {report.alarms[0]}",) and report.alarms[0] == report.verdict[0]
    assert report.alarms[0] not in " ".join(map(str, second.parts))


def test_the_cause_of_recorded_log_probabilities_is_an_alarm_of_its_own(audited):
    run = RunAnswers(audited[0].store)
    cause = RecordedMismatch(9, 0.1, 0.2, 0.1, 0.9, 0.5, None, {"temperature": (1.66, 0.004)}, ((0, 0.1, 0.2),))
    run.__dict__["sampling"] = replace(run.sampling, recorded=cause, alarm=False)
    (said,) = run.alarms
    assert audit_sections(run, audit_run(run))[0].parts == (f"Alarm: {said}",)
    assert "temperature 1.660 times the stated one" in said and "the tokens fit" in said


def test_what_is_stated_of_the_sampling_counts_until_the_check_raises_an_alarm(audited, tmp_path):
    path = tmp_path / "stated"
    shutil.copytree(audited[0].store.path, path)
    info = json.loads((path / "run.json").read_text())
    info["config"]["plain_sampling"] = True
    del info["checksum"]
    (path / "run.json").write_text(json.dumps(info))

    def bare(alarm):
        run = RunAnswers(RunStore(path))
        run.__dict__ |= alarm
        return run, next(row for row in audit_run(run).estimators.rows if row.key[0] == "none")

    alarmed, row = bare({})
    assert alarmed.alarm and not row.c_known and row.values["projection"] != 1
    clean, row = bare({"alarm": ""})
    assert row.c_known and (row.values["projection"], row.values["relative_bias"]) == (1, 0)
    # Not stated and clean: what it would change is offered.
    unstated = RunAnswers(audited[0].store)
    unstated.__dict__["alarm"] = ""
    assert any("--plain-sampling" in line for line in unstated.measured.lines)
    assert not any("--plain-sampling" in line for run in (clean, alarmed) for line in run.lines)


def test_an_imported_run_gets_dead_groups_and_what_adds_the_rest(rollouts):
    path = import_rollouts(rollouts, ImportConfig(root=rollouts.parent / "runs", run="plain"))
    report = audit_run(RunAnswers(RunStore(path)))
    assert report.planner.cells == () and [d.size for d in report.planner.dead] == [2, 4]
    assert len(report.missing) == 3 and all("otb audit --model DIR" in sentence for sentence in report.missing)
    assert "no step measured" in report.verdict[0] and "otb audit --model DIR" in report.verdict[0]
    assert report.verdict[1].startswith("In groups of 4") and "–" in report.verdict[1]
    assert "groups above 4 save at most 25%, and groups of 2 cost 50%" in report.planner.note


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({}, ("--measure.attribution.every 10 of otb train", "--measure.exact.every 10 of otb train")),
        ({"source": {"made_by": "OTBMonitor", "format": "trl"}},
         ("attribution=AttributionSchedule(every=10)", "exact=Schedule(every=10)")),
    ],
)  # fmt: skip
def test_what_a_training_did_not_measure_another_one_does(source, words, tmp_path):
    writer = RunWriter.create(tmp_path, "run", {"estimator": {"name": "rloo"}} | source)
    rows = {"group": [0, 0], "rollout": [0, 1], "reward": [0.0, 1.0], "prompt": ["a"] * 2, "completion": ["b"] * 2}
    writer.write_step(0, StepTables(rollouts=rows, steps={"reward_mean": 0.5}))
    writer.finish()
    report = audit_run(RunAnswers(RunStore(writer.path)))
    tokens, proxy, _ = report.missing
    assert words[0] in tokens and words[1] in proxy and "otb audit" not in " ".join(report.missing)
    assert report.rollouts == "this run's own"


def test_without_go_the_cost_is_printed_and_nothing_written(rollouts, checkpoint, tmp_path, capsys):
    words = ["audit", "--model", str(checkpoint), "--rollouts", str(rollouts), "--root", str(tmp_path / "runs")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "80 rollouts" in out and "Gram matrix" in out and "Nothing was written" in out
    assert not (tmp_path / "runs").exists()


def test_a_model_is_loaded_once(rollouts, checkpoint, tmp_path, monkeypatch):
    loaded, load = [], scoring.load_policy
    monkeypatch.setattr(scoring, "load_policy", lambda *args: loaded.append(args) or load(*args))
    words = [
        "--model",
        str(checkpoint),
        "--rollouts",
        str(rollouts),
        "--root",
        str(tmp_path),
        "--measure.exact.every",
        "0",
    ]
    assert main(["audit", *words, "--measure.attribution.every", "0", "--go"]) == 0
    assert len(loaded) == 1


def test_a_run_is_audited_again(audited, capsys):
    path = audited[0].store.path
    assert main(["audit", "--run", "a", "--root", str(path.parent)]) == 0
    assert "who holds the gradient" in capsys.readouterr().out
    assert (path / "audit.json").exists()


@pytest.mark.parametrize(
    ("length", "options", "measured_by"),
    [(3, [], "whole"), (200, [], "drawn"), (200, ["--norms", "none"], "none"), (60, ["--norms", "drawn"], "drawn"),
     (200, ["--norms", "whole"], "whole")],
)  # fmt: skip
def test_norms_are_of_all_tokens_of_short_answers_and_of_drawn_ones_of_long(
    length, options, measured_by, checkpoint, tmp_path, capsys
):
    random = np.random.default_rng(1)
    rows = [
        {
            "prompt": f"{g}+{g}=",
            "completion": "".join(map(str, random.integers(10, size=length))),
            "reward": float(k % 2),
        }
        for g in range(2)
        for k in range(3)
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["--model", str(checkpoint), "--rollouts", str(path), "--root", str(tmp_path), "--run", "long", *options]
    assert main(["audit", *words, "--measure.attribution.every", "0", "--go"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    store = RunStore(tmp_path / "long")
    known = store.tokens_df()["grad_norm_sq"].notna()
    labels = set(store.grams()[0].labels)
    assert known.mean() == (1.0 if measured_by == "whole" else pytest.approx(0.1, abs=0.05) if known.any() else 0.0)
    assert known.any() == (measured_by != "none") and store.steps_df()["measurement_gaps"].sum() == 0
    assert ((("otb", "exact") in labels), (("otb", "calibrated") in labels)) == (
        measured_by == "whole", measured_by == "drawn",
    )  # fmt: skip
    assert ("of the tokens, drawn (--norms whole" in out) == (measured_by == "drawn")
