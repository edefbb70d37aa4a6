"""Which rollouts are worth reading, and which step is looked at first."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.holders import Attributed, NotAttributed
from otb_analysis.answers.telling import LONGEST, WRONG, telling_rollouts
from otb_analysis.diagnostics import diagnose
from otb_analysis.diagnostics.detectors import OFF_POLICY
from otb_analysis.store import RunStore, RunWriter, StepTables, step_series


def written(root, steps, name="run", config=None):
    """A run of steps: rewards of two prompts with two rollouts each, lengths, and ‖ḡ‖, None where not attributed."""
    writer = RunWriter.create(root, name, config or {})
    for step, (rewards, lengths, norm) in enumerate(steps):
        row = np.repeat(np.arange(4), lengths)
        t = np.concatenate([np.arange(n) for n in lengths])
        logprob = -0.1 - (row == 2) * (t == 1) * 7.0
        tokens = {
            "group": row // 2, "rollout": row, "turn": 0 * t, "t": t, "token_id": t, "token": [f"{n}" for n in t],
            "mask": np.ones(len(t), bool), "reward": (t == 0) * np.array(rewards)[row], "logprob": logprob,
        }  # fmt: skip
        if norm is not None:
            tokens["attribution"] = np.full(len(t), norm**2 / len(t))
        rollouts = {
            "group": [0, 0, 1, 1], "rollout": range(4), "prompt_id": list("ppqq"), "prompt": list("PPQQ"),
            "completion": [f"answer {step}.{n}" for n in range(4)], "reward": rewards, "length": lengths,
        }  # fmt: skip
        dead = sum(rewards[n] == rewards[n + 1] for n in (0, 2))
        scalars = {
            "reward_mean": float(np.mean(rewards)), "grad_norm": 1.0 if norm is None else norm, "n_prompts": 2,
            "n_zero_variance_groups": dead,
        }  # fmt: skip
        writer.write_step(step, StepTables(tokens, {n: list(x) for n, x in rollouts.items()}, scalars))
    writer.finish()
    return RunStore(root / name)


def test_three_kinds_of_rollouts_are_told_each_once(tmp_path):
    steps = [([1, 0, 0, 0], [3, 3, 3, 3], 1.0), ([0, 0, 0, 0], [3, 9, 3, 4], 1.0), ([1, 1, 0, 0], [3, 4, 4, 3], 1.0)]
    told = telling_rollouts(written(tmp_path, steps), 1)
    # Prompt q was never solved, p was at step 2; the longest since step 1 is the other of p there.
    assert [(one.why.partition(",")[0], one.step, one.rollout) for one in told] == [
        (WRONG, 1, 0), (LONGEST, 1, 1), ("Most surprising token of step 2 '1'", 2, 2),
    ]  # fmt: skip
    assert told[1].why == f"{LONGEST}, 9 tokens"
    assert (told[2].t, told[2].prompt, told[2].completion) == (1, "Q", "answer 2.2") and "0.000825" in told[2].why


def test_a_prompt_that_was_solved_long_ago_could_be_solved(tmp_path):
    steps = [([1, 0, 0, 0], [3, 3, 3, 3], 1.0), ([0, 0, 0, 0], [3, 3, 5, 3], 1.0)]
    told = telling_rollouts(written(tmp_path, steps), 1)
    assert (told[0].why, told[0].step, told[0].rollout) == (WRONG, 1, 0)


def test_one_rollout_can_be_told_for_all_reasons_and_the_next_best_of_each_comes_beside_it(tmp_path):
    told = telling_rollouts(written(tmp_path, [([1, 1, 0, 1], [3, 4, 5, 3], 1.0)]), 0)
    assert [one.rollout for one in told] == [2, 1, 0] and told[0].t == 1
    assert told[1].why == "Next longest answer, 4 tokens" and told[2].why.startswith("Next most surprising token")
    assert told[0].why.startswith(f"{WRONG}; longest answer, 5 tokens; most surprising token")


def test_nothing_is_told_of_steps_that_are_not_there(tmp_path):
    assert telling_rollouts(written(tmp_path, [([1, 0, 0, 0], [3, 3, 3, 3], 1.0)]), 1) == []


def test_a_fallen_run_is_looked_at_where_it_still_learned(tmp_path):
    good, bad = ([1, 1, 1, 0], [3, 3, 3, 3]), ([0, 0, 0, 0], [3, 3, 3, 3])
    steps = [(*good, 1.0 if step % 5 == 0 else None) for step in range(23)]
    steps += [(*bad, 0.0 if step % 5 == 0 else None) for step in range(23, 50)]
    run = RunAnswers(written(tmp_path, steps))
    assert run.learned == [0, 5, 10, 15, 20] and run.look == 20
    assert run.look_line == "Step 20 is the last one with shares of the gradient before the trouble at step 23."
    assert isinstance(run.attribution(20), Attributed)
    dead, missing, before = run.attribution(45), run.attribution(22), run.attribution(3)
    assert isinstance(dead, NotAttributed) and (dead.nearest, dead.command) == (20, "")
    assert "all equal" in dead.missing and "Look at step 20." in dead.missing
    assert "has no attribution" in missing.missing and missing.nearest == 20 and before.nearest == 0


def test_a_collapsed_run_is_read_before_the_fall(tmp_path):
    good, bad = ([1, 1, 1, 0], [3, 3, 3, 3]), ([0, 0, 0, 0], [3, 3, 3, 3])
    steps = [(*(good if step < 23 else bad), 1.0 if step % 5 == 0 else None) for step in range(50)]
    run = RunAnswers(written(tmp_path, steps))
    step, says = run.worth_reading or (None, "")
    assert step == run.look == 20 and "attributed" in says and "reward fell at step 23" in says
    assert {one.step for one in telling_rollouts(run.store, 20, 20)} == {20}
    bare = RunAnswers(written(tmp_path, [(r, n, None) for r, n, _ in steps], "bare"))
    assert bare.worth_reading is not None and bare.worth_reading[0] == 22 and "attributed" not in bare.worth_reading[1]
    calm = RunAnswers(written(tmp_path, steps[:23], "calm"))
    assert calm.worth_reading is None


def test_a_run_that_ended_after_its_reward_fell_is_read_before_it_while_a_running_one_shows_what_is_new(tmp_path):
    rewards = [[1, 1, 1, 0]] * 30 + [[1, 0, 0, 0]] * 20
    store = written(tmp_path, [(reward, [3, 3, 3, 3], None) for reward in rewards])
    ended, going = RunAnswers(store), RunAnswers(store)
    for run, status in ((ended, "complete"), (going, "running")):
        vars(run)["triage"] = replace(run.triage, state="alarm", status=status)  # such as a fall that noise hides
    assert ended.worth_reading is not None and ended.worth_reading[0] == 29
    assert going.worth_reading is None


def test_a_run_in_trouble_before_anything_was_attributed_is_looked_at_where_it_first_was(tmp_path):
    good, bad = ([1, 1, 1, 0], [3, 3, 3, 3]), ([0, 0, 0, 0], [3, 3, 3, 3])
    run = RunAnswers(
        written(tmp_path, [(*(good if step < 23 else bad), 1.0 if step == 40 else None) for step in range(50)])
    )
    assert run.look == 40 and "first one with shares" in run.look_line
    bare = RunAnswers(written(tmp_path, [(*(good if step < 23 else bad), None) for step in range(50)], "bare"))
    assert bare.look == 23 and bare.look_line == ""


def test_a_calm_run_is_looked_at_at_its_last_attributed_step(tmp_path):
    steps = [([1, 0, 1, 0], [3, 3, 3, 3], 1.0 if step in (2, 5) else None) for step in range(9)]
    run = RunAnswers(written(tmp_path, steps))
    assert run.look == 5 and run.look_line == "Step 5 is the last one with shares of the gradient."
    bare = RunAnswers(written(tmp_path, [(r, n, None) for r, n, _ in steps], "bare"))
    assert bare.look == 8 and bare.look_line == ""


@pytest.mark.parametrize("staleness", [0, 8])
def test_rollouts_that_are_old_as_configured_are_a_fact_and_no_warning(tmp_path, staleness):
    store = written(tmp_path, [([1, 0, 1, 0], [3, 3, 3, 3], 1.0)] * 20, config={"objective": {"staleness": staleness}})
    series = step_series(store.steps_df().assign(certificate_prob_z=9.0, certificate_logprob_z=9.0))
    found = {one.detector: one for one in diagnose(series, staleness)}["sampling_certificate"]
    assert found.fired == (not staleness) and found.detector in OFF_POLICY
    assert ("8 batches old" in found.reason) == bool(staleness)
    run = RunAnswers(store)
    run.__dict__["series"] = series
    assert ("sampling_certificate" in {one.detector for one in run.findings if one.fired}) == (not staleness)
