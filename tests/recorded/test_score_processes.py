"""Two processes of one launch score a file: the run is that of a single process."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from otb_analysis.config import MeasureConfig, Schedule, ScoreConfig
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore, RunWriter, catalogue
from otb_analysis.store.catalogue import transaction

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def rollouts(jsonl, simple):
    """Five steps of 3 prompts with 3 rollouts: not a multiple of two processes."""
    return jsonl([{**row, "step": step} for step in range(5) for row in simple(prompts=3)])


def launched(*words):
    """Score by two processes that meet through gloo, and return what they said and how they ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    return subprocess.run(
        [*command, "otb_analysis", "score", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def forget(run, steps):
    """Make a run that ended one that was killed before it wrote some steps."""
    RunWriter.resume(run, 5).finish("failed")
    with transaction(run, write=True) as db:
        catalogue.remove_steps(db, steps)


def same(one, two):
    for table in ("tokens", "rollouts", "steps", "gradients"):
        frames = [getattr(RunStore(path), f"{table}_df")() for path in (one, two)]
        frames = [frame.drop(columns=[c for c in frame if c.startswith("seconds_")]) for frame in frames]
        assert len(frames[0])
        pd.testing.assert_frame_equal(*frames, check_exact=True)
    first, second = (RunStore(path).grams([3])[3] for path in (one, two))
    np.testing.assert_array_equal(first.inner, second.inner)


def test_two_processes_end_at_a_bad_record_and_make_the_run_of_one_and_resume_each_others(
    tmp_path, checkpoint, rollouts
):
    options = ["--rollouts", rollouts, "--model", checkpoint, "--root", tmp_path, "--measure.exact.every", "1"]
    options += ["--measure.exact.prompts", "0", "--run", "two"]
    exact = MeasureConfig(exact=Schedule(every=1, prompts=0))
    config = ScoreConfig(rollouts=rollouts, model=str(checkpoint), root=tmp_path, run="one", measure=exact)
    score(config)
    whole = rollouts.read_text()
    lines = whole.splitlines()
    rollouts.write_text("\n".join([*lines[:30], json.dumps(json.loads(lines[30]) | {"reward": "good"}), *lines[31:]]))
    told = launched(*options)  # of step 3, which is process 1's
    assert told.returncode != 0 and "record 31: reward is 'good'" in told.stderr
    info = RunStore(tmp_path / "two").info
    assert info["status"] == "failed" and "record 31: reward is 'good'" in info["reason"]
    rollouts.write_text(whole)
    forget(tmp_path / "two", [1])  # as if process 1 had been killed in step 1, and process 0 before step 4
    told = launched(*options, "--if-exists", "resume")
    assert told.returncode == 0, told.stderr
    same(tmp_path / "one", tmp_path / "two")
    assert RunStore(tmp_path / "two").info["status"] == "complete"
    forget(tmp_path / "two", [2])
    score(replace(config, run="two", if_exists="resume"))
    same(tmp_path / "one", tmp_path / "two")
