"""vLLM itself on a CPU: our generator on its engine, and our monitor and trainer where it samples for TRL."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from otb_analysis.rollouts.models import load_policy
from otb_analysis.store import RunStore

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm here; `make test-vllm` runs this in .cache/vllm")
]
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def ran(tmp_path):
    """Run one story of vllm_on_cpu.py in a process of its own; return what it says. Equal names share a folder."""

    def run(what, name="out", **spec):
        command = [sys.executable, str(HERE / "vllm_on_cpu.py"), what, str(tmp_path / name), json.dumps(spec)]
        done = subprocess.run(command, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=600)
        assert not done.returncode, done.stderr[-4000:]
        return json.loads((tmp_path / name / "said.json").read_text())

    return run


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve the policy in `out/policy` as TRL asks for it, but for NCCL; return the address."""
    monkeypatch.syspath_prepend(str(HERE))
    saved_policy = importlib.import_module("vllm_on_cpu").saved_policy
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    policy = tmp_path / "out" / "policy"
    saved_policy(policy)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--enable-scale-out",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    ]  # fmt: skip
    log = tmp_path / "server.log"
    with log.open("w") as out:
        environment = os.environ | SETTINGS | {"VLLM_SERVER_DEV_MODE": "1"}
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not answers(address):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def answers(address):
    try:
        with urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


def logged(history, name):
    return [line[name] for line in history if name in line]


def far(history):
    """Return how far sampler and trainer are apart, batch by batch."""
    return logged(history, "otb/sampler_rms")


def test_our_generator_draws_what_its_log_probabilities_say_and_follows_new_weights(ran):
    first, again, colder, *changed = ran("drawn")
    assert first == again  # one seed of torch
    assert all(one["gap"] < 1e-5 for one in (first, colder, *changed))
    assert len({str(one["tokens"]) for one in (first, colder, *changed)}) == 4
    for tokens, finished in zip(first["tokens"], first["finished"], strict=True):
        assert finished == (tokens[-1] in first["end"]) and (finished or len(tokens) == 8)


@pytest.fixture
def colocated(ran, tmp_path):
    def train(name, **spec):
        history = ran("trl", name, **spec)
        return history, torch.load(tmp_path / name / "weights.pt")

    return train


def test_a_colocated_training_is_the_same_under_the_monitor_and_its_sampler_is_held_against_trl(colocated, tmp_path):
    (seen, weights), (plain, plain_weights) = colocated("seen"), colocated("plain", monitor=False)
    assert all(torch.equal(weight, plain_weights[name]) for name, weight in weights.items())
    # TRL's own largest distance, which is that of log-probabilities in bfloat16 from those in float32.
    largest = logged(seen, "sampling/sampling_logp_difference/max")
    assert largest == pytest.approx(logged(plain, "sampling/sampling_logp_difference/max"))
    assert logged(seen, "otb/sampler_max") == pytest.approx(largest, rel=1e-4) and 1e-4 < min(far(seen)) < 0.02
    assert logged(seen, "otb/dead_groups") == logged(seen, "frac_reward_zero_std")
    assert logged(seen, "otb/sampling_alarm") == [0.0] * 3
    tokens = RunStore(tmp_path / "seen" / "run").tokens_df(where="mask")
    assert tokens["step"].nunique() == 3
    gap = np.abs(tokens["behavior_logprob"] - tokens["logprob"])
    assert gap.groupby(tokens["step"]).max().tolist() == pytest.approx(largest, rel=1e-4)


def test_our_trainer_trains_on_rollouts_of_a_colocated_engine(colocated, tmp_path):
    history, weights = colocated("ours", ours=True)
    first = load_policy(tmp_path / "ours" / "policy")[0].state_dict()
    assert any(not torch.equal(first[name], weight) for name, weight in weights.items())
    store = RunStore(tmp_path / "ours" / "run")
    tokens = store.tokens_df(where="mask")
    gap = np.abs(tokens["behavior_logprob"] - tokens["logprob"]).groupby(tokens["step"]).max()
    assert gap.tolist() == pytest.approx(logged(history, "sampling/sampling_logp_difference/max"), rel=1e-4)
    assert (tokens.groupby("step")["advantage"].std() > 0).all()


@pytest.mark.parametrize("synced", [True, False])
def test_a_server_that_keeps_old_weights_is_seen_at_once(ran, served, synced):
    history = ran("trl", server=served, synced=synced)
    first, *later = far(history)
    assert first < 1e-5
    assert max(later) < 1e-5 if synced else min(later) > 0.1, later
