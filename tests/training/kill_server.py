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
from otb_analysis.models import load_policy
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


def readable(path, whole, out):
    """Write how many steps of a killed run are complete; every one of them must be that of the whole run."""
    found = {"steps": 0, "status": "none", "run": path.is_dir()}
    if path.is_dir():
        store = RunStore(path)
        steps, expected = store.complete_steps(), contents(whole)
        assert steps == list(range(len(steps)))
        for name, frame in contents(path).items():
            there = expected[name]
            there = there[there["step"].isin(steps)].reset_index(drop=True)
            pd.testing.assert_frame_equal(
                frame[there.columns] if len(frame) else there.head(0), there, check_exact=True
            )
        found |= {"steps": len(steps), "status": runs_df(path.parent)["status"].iloc[0]}
    out.write_text(json.dumps(found))


def same(path, whole):
    """Refuse a run that differs from the whole one in anything but the clock."""
    for name, frame in contents(path).items():
        pd.testing.assert_frame_equal(frame, contents(whole)[name], check_exact=True)
    a, b = (load_policy(p / "model")[0].state_dict() for p in (path, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert RunStore(path).info["status"] == "complete"


def main(config: TrainConfig, root: Path) -> None:
    """Run every trial."""
    torch.set_num_threads(1)
    random.seed(0)
    start = time.perf_counter()
    whole = root / "whole" / "run"
    assert ended(child(train, replace(config, root=root / "whole"))) == 0
    lasted = time.perf_counter() - start
    for trial in range(TRIALS):
        own = replace(config, root=root / str(trial), if_exists="resume")
        path, delay = own.root / "run", lasted * (trial + random.random()) / TRIALS
        pid = child(train, own)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        killed = ended(pid) == -signal.SIGKILL
        checks = [ended(child(readable, path, whole, root / "found.json")), ended(child(train, own))]
        checks.append(ended(child(same, path, whole)))
        print(
            json.dumps({"killed": killed, "checks": checks} | json.loads((root / "found.json").read_text())), flush=True
        )


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
