"""Kills a training at twenty moments, each in a fork of this one process, which has imported everything once.

Not a test: `test_kill.py` runs it in a process of its own, since only a process without threads may be forked.
It prints one line of JSON per trial.

Moments are shares of the processor time that a run spends between the appearance of its directory and its end, one in
each twentieth of it: a busy machine moves none of them. A trial counts when the kill came before run.json said how the
run ended; where a run was over first, that moment becomes the measure and the trial is drawn again.
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
from otb_analysis.rollouts.models import load_policy, quiet_loading
from otb_analysis.store import RunStore, runs_df
from otb_analysis.training.loop import train

KILLS = 20
ATTEMPTS = 60
TABLES = ("tokens", "rollouts", "steps", "gradients", "grams")
PAUSE = 0.0005


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
    """Wait for a fork and return its exit code and the processor seconds of its life."""
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def is_over(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def worked(pid):
    """Processor seconds of a fork so far."""
    return time.clock_gettime((~pid << 3) | 2)  # how Linux numbers the clock of another process


def begun(config):
    """Start a training in a fork; return its number and what it had worked when the run's directory appeared."""
    pid = child(train, config)
    while not (config.root / config.run).is_dir() and not is_over(pid):
        time.sleep(PAUSE)
    return pid, worked(pid)


def killed_at(config, moment):
    """Train, and kill -9 when that much work is done since the run appeared.

    Returns:
        Whether the run was killed before its end.
    """
    pid, start = begun(config)
    while worked(pid) < start + moment and not is_over(pid):
        time.sleep(PAUSE)
    os.kill(pid, signal.SIGKILL)  # without effect on one that is over
    assert ended(pid)[0] in (0, -signal.SIGKILL)
    status = json.loads((config.root / config.run / "run.json").read_text())["status"]
    return status == "running"


def contents(path):
    """Everything a run holds but the clock, by table."""
    frames = {name: RunStore(path).sql(f"select * from {name} order by all") for name in TABLES}
    return {n: f.drop(columns=[c for c in f if c.startswith("seconds_")]) for n, f in frames.items()}


def weights(path):
    return {name: tensor.numpy() for name, tensor in load_policy(path / "model")[0].state_dict().items()}


def keep(path, kept):
    """Keep what came out of a run that was not killed."""
    kept.write_bytes(pickle.dumps((contents(path), weights(path))))


def go_on(config, kept, out):
    """Read what a killed run left, resume it, and compare both with the uninterrupted run."""
    expected, final = pickle.loads(kept.read_bytes())
    path = config.root / config.run
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
    resumed = weights(path)
    assert final.keys() == resumed.keys() and all((final[name] == resumed[name]).all() for name in final)
    half_written = [p for p in path.rglob(".*") if p.is_file() or p.name.startswith(".model")]
    assert not half_written, half_written
    info = RunStore(path).info
    assert info["status"] == "complete"
    out.write_text(json.dumps(found | {"from_step": info["resumed"][0]["from_step"]}))


def main(config: TrainConfig, root: Path) -> None:
    """Measure the uninterrupted run, then kill and resume until there are enough trials."""
    torch.set_num_threads(1)
    quiet_loading()
    random.seed(0)
    kept, out, whole = root / "kept", root / "found.json", replace(config, root=root / "whole")
    pid, start = begun(whole)
    code, used = ended(pid)
    assert code == 0 and ended(child(keep, whole.root / whole.run, kept))[0] == 0
    span, done = used - start, 0
    for attempt in range(ATTEMPTS):
        if done == KILLS:
            break
        own = replace(config, root=root / str(attempt), if_exists="resume")
        moment = span * (done + random.random()) / KILLS
        if not killed_at(own, moment):
            span = moment  # as asked, not as worked by then: on a busy machine the kill comes late, each time
            continue
        out.unlink(missing_ok=True)
        code, _ = ended(child(go_on, own, kept, out))
        found = json.loads(out.read_text()) if code == 0 else {}
        print(json.dumps({"moment": moment / span, "code": code} | found), flush=True)
        done += 1


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2]))
