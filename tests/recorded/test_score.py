"""Recorded rollouts measured under a model: the run is one of training's, and what does not fit is refused."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from otb_analysis.answers import opened
from otb_analysis.checks.sampling_report import sampling_report
from otb_analysis.commands.audit_cost import audit_cost
from otb_analysis.config import (
    AttributionSchedule,
    AuditConfig,
    EstimatorConfig,
    MeasureConfig,
    SampleConfig,
    Schedule,
    ScoreConfig,
)
from otb_analysis.errors import InputError, Interrupted
from otb_analysis.recorded import score as module
from otb_analysis.recorded.records import Place, RecordedRollout
from otb_analysis.recorded.runs import RecordedStep
from otb_analysis.recorded.score import BEFORE, BEHIND, fault_of, load, refuse_wrong_logprobs, score
from otb_analysis.report.compare import comparison
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.sampling import sample
from otb_analysis.store import RunStore
from otb_analysis.tasks import Prompt


@pytest.fixture(scope="module")
def sampled(checkpoint):
    """Rollouts that the tiny model sampled itself: rows with ids and log-probabilities, 4 prompts of 3, two steps."""
    model, tokenizer = load_policy(checkpoint)
    torch.manual_seed(0)

    class Task:
        name, alphabet = "one", ""

        def reply(self, prompt, turns):
            return None

    rows = []
    for step in range(2):
        prompts = [Prompt(str(g), f"{step}{g}+1=", "") for g in range(4)]
        config = SampleConfig(prompts=4, group_size=3, max_new_tokens=12)
        rollouts = sample(TransformersGenerator(model, tokenizer), tokenizer, Task(), prompts, config)
        for n, g in enumerate(rollouts.group):
            inside = rollouts.mask[n]
            rows.append(
                {
                    "prompt": prompts[g].text,
                    "completion": rollouts.turns[n][0].text,
                    "reward": float(n % 2),
                    "group": int(g),
                    "step": step,
                    "ids": rollouts.input_ids[n][inside].tolist(),
                    "logprobs": rollouts.behavior_logprob[n][inside].tolist(),
                }
            )
    return rows


@pytest.fixture
def config(tmp_path, checkpoint, jsonl, sampled):
    return ScoreConfig(rollouts=jsonl(sampled), model=str(checkpoint), root=tmp_path / "runs")


def test_rollouts_that_the_model_sampled_have_the_log_probabilities_that_were_recorded(config, sampled):
    store = RunStore(score(config))
    tokens, steps = store.tokens_df(), store.steps_df()
    assert len(tokens) == sum(len(row["ids"]) for row in sampled)
    np.testing.assert_allclose(tokens["logprob"], tokens["behavior_logprob"], atol=1e-4)
    assert tokens[["entropy", "sum_pi_sq", "energy_proxy", "advantage"]].notna().to_numpy().all()
    assert steps["step"].tolist() == [0, 1] and steps["n_rollouts"].tolist() == [12, 12]
    assert (steps["mismatch_max"] < 1e-4).all() and (steps["certificate_prob_z"].abs() < 4).all()
    rollouts = store.rollouts_df()
    assert rollouts["reward"].tolist() == [row["reward"] for row in sampled]
    assert rollouts["source_record"].tolist() == list(range(1, 25))


def test_run_json_says_that_the_rollouts_came_from_a_file(config):
    info = RunStore(score(config)).info
    assert info["status"] == "complete"
    source = info["config"]["source"]
    assert (source["made_by"], source["format"], source["path"]) == ("otb score", "plain", str(config.rollouts))
    assert info["config"]["estimator"]["name"] == "grpo" and info["config"]["sample"]["temperature"] == 1.0


def test_every_level_measures_and_the_run_compares_like_any_other(config):
    measure = MeasureConfig(exact=Schedule(every=1), attribution=AttributionSchedule(every=1))
    store = RunStore(score(replace(config, measure=measure)))
    gradients = store.gradients_df()
    assert {"grpo", "rloo", "otb"} <= set(gradients["estimator"])
    assert not gradients["c_known"].any()  # nothing is proved of rollouts that were sampled elsewhere
    tokens = store.tokens_df()
    assert tokens["grad_norm_sq"].notna().all() and tokens["attribution"].notna().all()
    assert store.steps_df()["n_measured_prompts"].tolist() == [4, 4]
    assert any("rollouts.jsonl, groups of 3" in section.title for section in comparison(opened([store.path])))


def test_scores_do_not_depend_on_the_passes(config):
    whole = RunStore(score(config)).tokens_df()
    parts = RunStore(score(replace(config, run="parts", micro_batch=2))).tokens_df()
    np.testing.assert_allclose(whole["logprob"], parts["logprob"], atol=1e-5)


def test_texts_alone_are_scored_like_their_tokens(config, jsonl, sampled):
    names = ("prompt", "completion", "reward", "group", "step")
    rows = [{name: row[name] for name in names} for row in sampled if row["completion"]]
    steps = RunStore(score(replace(config, rollouts=jsonl(rows, "texts.jsonl")))).steps_df()
    assert steps["mismatch_mean"].isna().all() and steps["mismatch_max"].isna().all()
    assert RunStore(config.root / "texts-scored").tokens_df()["behavior_logprob"].isna().all()


def changed(rows, n, **fields):
    return [row | fields if i == n else row for i, row in enumerate(rows)]


def long_row(rows):
    return next(i for i, row in enumerate(rows) if len(row["ids"]) >= 10)


def test_log_probabilities_that_are_off_by_one_are_refused_by_record(config, jsonl, sampled):
    n = long_row(sampled)
    logprobs = sampled[n]["logprobs"]
    for moved, where in ((logprobs[1:] + logprobs[:1], "behind"), (logprobs[-1:] + logprobs[:-1], "before")):
        path = jsonl(changed(sampled, n, logprobs=moved))
        with pytest.raises(InputError, match=rf"record {n + 1}: .* one place {where}"):
            score(replace(config, rollouts=path, if_exists="replace"))


def test_a_placeholder_at_a_sampled_token_is_refused_by_record_and_token(config, jsonl, sampled):
    n = long_row(sampled)
    t = int(np.argmin(sampled[n]["logprobs"]))
    logprobs = [0.0 if i == t else value for i, value in enumerate(sampled[n]["logprobs"])]
    with pytest.raises(InputError, match=rf"record {n + 1}: .* token {t} was recorded as 0"):
        score(replace(config, rollouts=jsonl(changed(sampled, n, logprobs=logprobs))))


def test_a_shift_is_told_from_another_policy():
    scored = np.log(np.random.default_rng(0).uniform(0.01, 1, 40))
    assert fault_of([(scored, scored)]) == ""
    assert fault_of([(scored - 0.3, scored)]) == ""  # another temperature is the run's mismatch, and no error
    assert fault_of([(np.random.default_rng(1).permutation(scored), scored)]) == ""
    assert fault_of([(np.roll(scored, 1), scored)]) == BEFORE
    assert fault_of([(np.roll(scored, -1), scored)]) == BEHIND


@pytest.mark.parametrize(
    "change, fault",
    [(lambda x: np.roll(x, 1), BEFORE), (lambda x: x / np.log(10), "to base 10"), (lambda x: x / np.log(2), "base 2")],
)
def test_lists_too_short_for_a_sign_of_a_fault_show_it_together(change, fault):
    scored = np.log(np.random.default_rng(0).uniform(0.01, 1, (12, 5)))
    assert not any(fault_of([(change(row), row)]) for row in scored)
    assert fault in fault_of([(change(row), row) for row in scored])


def test_the_trainers_log_probabilities_are_checked_like_the_samplers(sampled):
    rows = sampled[:12]
    width = max(len(row["ids"]) for row in rows)
    scored = np.array([row["logprobs"] + [0.0] * (width - len(row["ids"])) for row in rows])
    mask = np.arange(width) < np.array([[len(row["ids"])] for row in rows])
    table = SimpleNamespace(mask=mask, stats=SimpleNamespace(logprob=scored))

    def step(factor):
        columns = [{"logprob": np.array(row["logprobs"]) * factor} for row in rows]
        records = [RecordedRollout(Place(Path("a"), n), 0.0, columns=own) for n, own in enumerate(columns)]
        return RecordedStep(0, tuple(records), np.arange(12))

    refuse_wrong_logprobs(step(1.0), table)
    with pytest.raises(InputError, match=r"to base 10; multiply them by 2\.302585"):
        refuse_wrong_logprobs(step(1 / np.log(10)), table)


def test_a_step_that_repeats_the_one_before_it_is_no_evidence_against_the_sampler(config, jsonl, sampled):
    first = [row for row in sampled if row["step"] == 0]
    again = jsonl([*first, *({**row, "step": 1} for row in first)], "again.jsonl")
    once, twice = (RunStore(score(replace(config, rollouts=path))) for path in (jsonl(first, "once.jsonl"), again))
    pd.testing.assert_frame_equal(twice.frame("sampling"), once.frame("sampling"))
    assert len(twice.tokens_df()) == 2 * len(once.tokens_df())


def test_a_refused_record_leaves_the_steps_before_it_and_the_reason(config, jsonl, sampled):
    path = jsonl(changed(sampled, 14, ids=[9999] * len(sampled[14]["ids"])))
    with pytest.raises(InputError, match=r"record 15 has token 9999.*1 step before"):
        score(replace(config, rollouts=path))
    store = RunStore(config.root / "rollouts-scored")
    assert store.info["status"] == "failed" and "record 15" in str(store.info["reason"])
    assert store.complete_steps() == [0]


def test_what_is_stored_is_not_measured_again_and_a_file_that_grew_adds_steps(config, jsonl, sampled, monkeypatch):
    made = []
    tables = module.Scorer.tables

    def counted(self, step):
        made.append(step.step)
        return tables(self, step)

    monkeypatch.setattr(module.Scorer, "tables", counted)
    # A file that is still being written: step 1 has begun.
    path = score(replace(config, rollouts=jsonl(sampled[:15])))
    first = RunStore(path).tokens_df([0])
    again = replace(config, rollouts=jsonl(sampled), if_exists="resume")
    assert score(again) == path
    assert made == [0, 1, 1]
    assert score(again) == path and made == [0, 1, 1]
    assert RunStore(path).steps_df()["n_rollouts"].tolist() == [12, 12]
    assert RunStore(path).tokens_df([0]).equals(first)
    with pytest.raises(InputError, match=r"temperature is 0\.5 .*'rollouts-scored' .*1\.0"):
        score(replace(again, temperature=0.5))
    with pytest.raises(InputError, match=r"step 0 has 3 rollouts .* 12 in the run"):
        score(replace(again, rollouts=jsonl(sampled[:3])))


def test_stopped_by_hand_a_run_keeps_its_steps_and_goes_on(config, monkeypatch):
    tables = module.Scorer.tables

    def stopped(self, step):
        if step.step == 1:
            raise KeyboardInterrupt
        return tables(self, step)

    monkeypatch.setattr(module.Scorer, "tables", stopped)
    with pytest.raises(Interrupted, match=r"stopped; 1 step before .*--if-exists resume"):
        score(config)
    path = config.root / "rollouts-scored"
    assert RunStore(path).info["status"] == "failed"
    monkeypatch.setattr(module.Scorer, "tables", tables)
    score(replace(config, if_exists="resume"))
    assert RunStore(path).info["status"] == "complete" and RunStore(path).complete_steps() == [0, 1]


def test_a_refusal_in_the_first_step_writes_nothing(config, jsonl, sampled):
    path = jsonl(changed(sampled, 2, reward="good"))
    with pytest.raises(InputError, match=r"record 3: reward is 'good'.*number\.$"):
        score(replace(config, rollouts=path))
    assert not config.root.exists()


REFUSED = {
    "no model": (dict(model=""), "--model is empty"),
    "no file": (dict(rollouts=ScoreConfig().rollouts), "no rollouts to read; pass a file"),
    "temperature": (dict(temperature=0.0), "--temperature is 0.0"),
    "a critic's estimator": (dict(estimator=EstimatorConfig(name="value")), "needs value; recorded rollouts do not"),
    "exact norms": (dict(estimator=EstimatorConfig(name="opob")), "needs .*; recorded rollouts do not"),
    "energy": (dict(estimator=EstimatorConfig(name="otb", energy="exact")), "are weighed by the proxy"),
    "estimator": (dict(estimator=EstimatorConfig(name="gropo")), "did you mean 'grpo'"),
    "budget": (dict(measure=MeasureConfig(budget=0.5)), "measure.budget plans a training run"),
    "weights": (dict(reward_weights={"a": 1.0}), "--reward-weights are for TRL's tables"),
    "scope": (dict(measure=MeasureConfig(scope="nothing")), "scope"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_cannot_work_are_refused_before_anything_is_written(config, what):
    fields, sentence = REFUSED[what]
    with pytest.raises(InputError, match=sentence):
        score(replace(config, **fields))
    assert not config.root.exists()


def test_one_rollout_per_prompt_names_the_estimators_that_remain(config, jsonl, sampled):
    path = jsonl([sampled[n] for n in range(0, 12, 3)])
    with pytest.raises(InputError, match=r"one rollout per prompt, .*'grpo'.*batch_mean"):
        score(replace(config, rollouts=path))
    audit = AuditConfig(**{one.name: getattr(config, one.name) for one in fields(config)} | {"rollouts": path})
    with pytest.raises(InputError, match="has one rollout per prompt"):  # instead of a price
        audit_cost(audit, load(audit))
    estimator = EstimatorConfig(name="batch_mean")
    assert RunStore(score(replace(config, rollouts=path, run="single", estimator=estimator))).complete_steps() == [0]


def test_a_model_with_its_own_code_is_refused_unless_allowed(config, checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "own")
    settings = json.loads((path / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"Python files .*--allow-remote-code"):
        score(replace(config, model=str(path)))


def test_a_log_probability_that_was_not_recorded_is_left_out_of_every_comparison(config, jsonl, sampled):
    n = long_row(sampled)
    logprobs = [float("nan"), *sampled[n]["logprobs"][1:]]
    store = RunStore(score(replace(config, rollouts=jsonl(changed(sampled, n, logprobs=logprobs)))))
    assert store.tokens_df()["behavior_logprob"].isna().sum() == 1
    steps = store.steps_df()
    assert steps[["mismatch_rms", "mismatch_k3", "mismatch_ratio_share"]].notna().to_numpy().all()
    assert sampling_report(store.frame("sampling")).recorded.n_tokens == len(store.tokens_df()) - 1
    moved = [float("nan"), *sampled[n]["logprobs"][2:], sampled[n]["logprobs"][0]]  # off by one beside it
    with pytest.raises(InputError, match=r"record \d+: its log-probabilities"):
        score(replace(config, rollouts=jsonl(changed(sampled, n, logprobs=moved)), if_exists="replace"))
