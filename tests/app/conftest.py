"""A small synthetic store: three whole runs, a failed one, a running one, a broken one; hostile text throughout."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.statistics import gradient_statistics
from otb_analysis.store import RunWriter, StepTables, gram_rows
from otb_analysis.types import Gram
from tests.app.browsing import Watched, chromium_started, watched


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Chromium, for the tests of a module."""
    with chromium_started() as instance:
        yield instance


@pytest.fixture
def tab(browser, address) -> Iterator[Watched]:
    """A page of the dashboard that a module serves at its `address`, watched."""
    with watched(browser, address) as page:
        yield page


@pytest.fixture(autouse=True)
def main_module_kept(monkeypatch):
    """Undo what AppTest leaves behind: a page as `__main__`, which a later test's spawned process would run."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))


HOSTILE = (
    "<script>alert(1)</script>", "**md**", ":red[x]", "$x$", "line\n", "\t", "🙂", "אבג", "\u202eabc", "</span>",
    "<img src=x onerror=alert(1)>", "`code`", "%{y}", "", "[a](http://example.com)", "&lt;", " the", " 12", "+", "=",
)  # fmt: skip
HOSTILE_PROMPT = "12+7= <b>bold</b> **md** :red[x] $x^2$ <script>alert(2)</script>"
LABELS = (
    ("none", "none"), ("group_mean", "none"), ("grpo", "none"), ("rloo", "none"), ("sequence_optimal", "exact"),
    ("sequence_optimal_loo", "exact"), ("otb", "exact"), ("otb_loo", "exact"), ("otb", "proxy"), ("otb_loo", "proxy"),
    ("value", "none"),
)  # fmt: skip
SCALE = {"none": (1.0, 2.4), "group_mean": (0.88, 1.0), "grpo": (1.6, 1.9), "rloo": (1.0, 1.15), "value": (1.0, 1.1)}
SCALE |= {
    "sequence_optimal": (0.6, 0.5),
    "sequence_optimal_loo": (1.0, 0.95),
    "otb": (0.55, 0.4),
    "otb_loo": (1.0, 0.9),
}
PROMPTS, GROUP_SIZE = 16, 8


def synthetic_gram(random: np.random.Generator, n_prompts: int) -> Gram:
    """Group gradients with a shared mean direction, per-estimator length and noise: a Gram matrix like a real one."""
    truth, noise = np.zeros(40), random.normal(size=(n_prompts, 40))
    truth[0] = 1.2
    own = random.normal(size=(len(LABELS), n_prompts, 40))
    gradients = []
    for row, (name, _) in enumerate(LABELS):
        length, spread = SCALE[name]
        gradients.append(length * truth + spread * (0.9 * noise + 0.25 * own[row]) * 0.6)
    g = np.stack(gradients)
    inner = np.einsum("mpd,nqd->mnpq", g, g)
    return Gram(inner, LABELS, n_prompts * GROUP_SIZE, groups=np.arange(n_prompts))


def _tokens(random: np.random.Generator, step: int, measured: int, hostile: bool) -> tuple[dict, dict]:
    tokens: dict[str, list] = {k: [] for k in ("group", "rollout", "turn", "t", "token", "mask", "reward", "logprob")}
    rewards, lengths = [], []
    for rollout in range(PROMPTS * GROUP_SIZE):
        length = int(random.integers(0 if rollout == 3 else 4, 22))
        reward = float(random.random() < 0.3 + 0.01 * step + 0.02 * (rollout // GROUP_SIZE))
        for t in range(length):
            tool = hostile and rollout % 5 == 0 and 3 <= t < 6
            text = HOSTILE[(rollout + t) % len(HOSTILE)] if hostile else str(random.integers(0, 100))
            row = (rollout // GROUP_SIZE, rollout, int(t > 5), t, text, not tool, reward * (t == length - 1))
            for name, value in zip(tokens, (*row, -random.exponential(0.7)), strict=True):
                tokens[name].append(value)
        rewards.append(reward)
        lengths.append(length)
    return _filled(random, tokens, measured), {"rewards": rewards, "lengths": lengths}


def _filled(random: np.random.Generator, tokens: dict, measured: int) -> dict:
    n = len(tokens["t"])
    mask, p = np.array(tokens["mask"], bool), np.exp(tokens["logprob"])
    proxy = (1 - p) ** 2 + (1 - p) ** 2 * random.uniform(0.2, 1, n)
    exact = proxy * 150 * random.lognormal(0, 0.4, n)
    unmeasured = (np.array(tokens["group"]) >= measured) | ~mask
    masked = {
        "logprob": tokens["logprob"], "behavior_logprob": np.array(tokens["logprob"]) + random.normal(0, 0.01, n),
        "entropy": random.gamma(1.5, 0.4, n), "sum_pi_sq": p, "energy_proxy": proxy, "hidden_norm_sq": 90 + 5 * p,
        "baseline": random.uniform(0, 1, n), "advantage": random.normal(0, 0.5, n),
    }  # fmt: skip
    columns = {name: np.ma.array(values, mask=~mask) for name, values in masked.items()}
    columns["grad_norm_sq"] = np.ma.array(exact, mask=unmeasured)
    return tokens | columns | {
        "token_id": random.integers(0, 50, n), "measured_by": ["none" if u else "exact" for u in unmeasured],
    }  # fmt: skip


def _attributed(random: np.random.Generator, tokens: dict, grad_norm: float) -> dict:
    """Signed shares of policy tokens that add up to ‖ḡ‖², a few of them large."""
    outside = ~np.array(tokens["mask"], bool)
    share = random.standard_t(2, len(outside)) * ~outside
    share += (grad_norm**2 - share.sum()) * ~outside / (~outside).sum()
    signal = 0.3 * share + random.normal(0, 0.01, len(outside))
    columns = {"attribution": share, "signal": signal, "noise": share - signal}
    return {name: np.ma.array(values, mask=outside) for name, values in columns.items()}


def write_step(writer: RunWriter, step: int, seed: int, *, measured: int = PROMPTS, collapse: bool = False) -> None:
    """Write one step; every tenth has exact norms and a Gram matrix."""
    random = np.random.default_rng([seed, step])
    due = step % 10 == 0
    tokens, found = _tokens(random, step, measured if due else 0, hostile=True)
    gram = synthetic_gram(random, measured) if due else None
    rewards, lengths = np.array(found["rewards"]), np.array(found["lengths"])
    bad = max(0, step - 25) if collapse else 0
    scalars = {
        "reward_mean": max(0.0, rewards.mean() - 0.05 * bad), "reward_std": rewards.std(), "loss": random.normal(),
        "grad_norm": float(random.lognormal(1 + 0.12 * bad, 0.2)), "clipped": bool(random.random() < 0.3 + 0.05 * bad),
        "learning_rate": 1e-4, "entropy_mean": 0.9 * 0.99**step * 0.9**bad, "logprob_mean": -0.5,
        "mismatch_mean": 0.0, "mismatch_max": float(random.gamma(2, 0.01)), "length_mean": lengths.mean(),
        "length_max": int(lengths.max()), "n_prompts": PROMPTS, "n_rollouts": PROMPTS * GROUP_SIZE,
        "n_tokens": int(lengths.sum()), "n_zero_variance_groups": int(random.integers(0, 4) + bad // 2),
        "n_singleton_groups": 0, "n_empty_completions": int(step % 7 == 0), "n_truncated": lengths.tolist().count(21),
        "fallback_share": 0.02, "measurement_gaps": 0,
        "energy_tail_k": random.normal(0.3, 0.05) + 0.02 * bad, "energy_max_share": random.uniform(0.03, 0.06),
        "heldout_reward": 0.4 + 0.006 * step if due else None, "n_measured_prompts": measured if due else 0,
        "seconds_sample": 0.3, "seconds_update": 0.4,
    }  # fmt: skip
    if due:
        tokens |= _attributed(random, tokens, scalars["grad_norm"])
    rollouts = {
        "group": np.repeat(np.arange(PROMPTS), GROUP_SIZE), "rollout": np.arange(PROMPTS * GROUP_SIZE),
        "prompt_id": [f"s{step}-p{r // GROUP_SIZE}" for r in range(PROMPTS * GROUP_SIZE)],
        "prompt": [HOSTILE_PROMPT] * GROUP_SIZE + ["12+7+30="] * (PROMPTS - 1) * GROUP_SIZE,
        "completion": ["…"] * (PROMPTS * GROUP_SIZE), "reward": rewards, "length": lengths,
        "finish_reason": ["length" if n == 21 else "stop" for n in lengths],
    }  # fmt: skip
    gradients = None
    if gram is not None:
        rows = [found.as_row() for found in gradient_statistics(gram.inner, gram.labels, gram.n_rollouts)]
        gradients = {name: [row[name] for row in rows] for name in rows[0]}
    grams = None if gram is None else gram_rows(step, gram)
    writer.write_step(step, StepTables(tokens, rollouts, scalars, gradients, grams))


def build_store(root: Path) -> Path:
    """Write the runs; deterministic but for the time stamps."""
    for seed, (name, estimator) in enumerate([("chain-group_mean-s0", "group_mean"), ("chain-otb-s0", "otb")]):
        writer = RunWriter.create(root, name, {"seed": 0, "estimator": {"name": estimator}, "task": "chain_sum"})
        for step in range(41):
            write_step(writer, step, seed, collapse=estimator == "group_mean")
        writer.finish()
    failed = RunWriter.create(root, "failed-rloo", {"seed": 1, "estimator": {"name": "rloo"}, "task": "chain_sum"})
    for step in range(12):
        write_step(failed, step, 7, measured=4)
    failed.finish("failed", "the loss is NaN at step 12, rollout 5; lower the learning rate.")
    running = RunWriter.create(
        root, "running-otb_loo", {"seed": 2, "estimator": {"name": "otb_loo"}, "task": "chain_sum"}
    )
    for step in range(3):
        write_step(running, step, 9, measured=4)
    half = running.path / "tokens" / "part-00000003-r0.parquet"
    half.write_bytes(b"PAR1 not a whole file")
    broken = root / "broken"
    broken.mkdir()
    (broken / "run.json").write_text('{"run": "broken", "schema')
    return root


@pytest.fixture(scope="session")
def store_root(tmp_path_factory) -> Path:
    """The synthetic store."""
    return build_store(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def write_next_step():
    """The writer of one synthetic step: (writer, step, seed)."""
    return write_step


@pytest.fixture(scope="session")
def hostile_texts() -> tuple[str, ...]:
    """The token texts of the synthetic store."""
    return HOSTILE
