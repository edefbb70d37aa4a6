"""`kill -9` at any moment: complete steps stay readable, and a resumed run ends as if nothing had happened."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from otb_analysis.config import CheckpointConfig, EvaluateConfig, MeasureConfig, OptimizeConfig, Schedule

SERVER = Path(__file__).with_name("kill_server.py")
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_kill_at_twenty_moments_leaves_whole_steps_and_resume_is_bit_for_bit(tiny_config, tmp_path):
    config = replace(
        tiny_config,
        run="run",
        task="chain_sum",
        optimize=OptimizeConfig(steps=3, learning_rate=0.01),
        measure=MeasureConfig(exact=Schedule(0, 0)),  # most of the time, and no part of what is claimed
        evaluate=EvaluateConfig(every=2, prompts=4, samples=2),
        checkpoint=CheckpointConfig(every=2),
    )
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SERVER), str(tmp_path / "config"), str(tmp_path)],
        env=environment,
        cwd=tmp_path,  # outside of any repository, whose state each run would ask for
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # Each was killed before its end, readable, resumed, and then equal to the uninterrupted run.
    assert [trial["code"] for trial in trials] == [0] * 20, done.stderr
    assert {trial["status"] for trial in trials} == {"stopped"}
    # Between the appearance of the run and its end there are kills in every step, before and after the checkpoint.
    assert {trial["steps"] for trial in trials} >= {0, 1, 2}
    assert {trial["from_step"] for trial in trials} >= {0, 2}
