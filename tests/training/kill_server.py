"""Kills a training at random moments, each in a fork of this one process, which has imported everything once.

Not a test: `test_kill.py` runs it in a process of its own, since only a process without threads may be forked.
It prints one line of JSON per trial.
"""

import json
import os
import pickle
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from otb_analysis.config import TrainConfig
from otb_analysis.models import load_policy, quiet_loading
from otb_analysis.store import RunStore, runs_df
from otb_analysis.training.loop import train

TRIALS = 20
TABLES = ("tokens", "rollouts", "steps")


def child(work, *given):
    """Start `work` in a fork and return its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        work(*given)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid):
    """Wait for a fork and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def contents(path):
    """Everything a run holds but the clock, by table."""
    frames = {name: RunStore(path).sql(f"select * from {name} order by all") for name in TABLES}
    return {n: f.drop(columns=[c for c in f if c.startswith("seconds_")]) for n, f in frames.items()}


def weights(path):
    return {name: tensor.numpy() for name, tensor in load_policy(path / "model")[0].state_dict().items()}


def uninterrupted(config, kept):
    """Train without a kill and keep what came out."""
    path = train(config)
    kept.write_bytes(pickle.dumps((contents(path), weights(path))))


def go_on(config, kept, out):
    """Read what a killed run left, resume it, and compare both with the uninterrupted run."""
    expected, final = pickle.loads(kept.read_bytes())
    path = config.root / config.run
    found = {"steps": 0, "status": "none"}
    if path.is_dir():
        steps = RunStore(path).complete_steps()
        assert steps == list(range(len(steps)))
        for name, frame in contents(path).items():
            there = expected[name][expected[name]["step"].isin(steps)].reset_index(drop=True)
            # Without types: a column of whole numbers is one of floats as soon as a later step has none.
            if len(frame) or len(there):
                pd.testing.assert_frame_equal(frame[there.columns], there, check_exact=True, check_dtype=False)
        found = {"steps": len(steps), "status": runs_df(path.parent)["status"].iloc[0]}
    train(config)
    for name, frame in contents(path).items():
        pd.testing.assert_frame_equal(frame, expected[name], check_exact=True)
    assert all((final[name] == tensor).all() for name, tensor in weights(path).items())
    assert RunStore(path).info["status"] == "complete"
    out.write_text(json.dumps(found))


def killed_at(config, target, pause):
    """Train in a fork, kill it some time after its step `target` is complete, and return whether it still ran."""
    pid, steps = child(train, config), config.root / config.run / "steps"
    over = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while target and not (steps / f"part-{target - 1:08d}-r0.parquet").exists() and not os.waitid(os.P_PID, pid, over):
        time.sleep(0.002)
    time.sleep(pause)
    os.kill(pid, signal.SIGKILL)
    return ended(pid) == -signal.SIGKILL


def main(config: TrainConfig, root: Path) -> None:
    """Run every trial."""
    torch.set_num_threads(1)
    quiet_loading()
    random.seed(0)
    kept, out, total = root / "kept", root / "found.json", config.optimize.steps
    assert ended(child(uninterrupted, replace(config, root=root / "whole"), kept)) == 0
    marks = sorted(part.stat().st_mtime for part in (root / "whole" / config.run_name / "steps").glob("*.parquet"))
    step = (marks[-1] - marks[0]) / (total - 1)
    for trial in range(TRIALS):
        own = replace(config, root=root / str(trial), if_exists="resume")
        target = trial % (total + 1)
        pause = random.random() * step * (1 if target else 4)  # before the first step there is a model to load
        killed = killed_at(own, target, pause)
        out.unlink(missing_ok=True)
        code = ended(child(go_on, own, kept, out))
        found = json.loads(out.read_text()) if code == 0 else {}
        print(json.dumps({"killed": killed, "code": code} | found), flush=True)


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
