"""Runs for the page Tokens: subwords of a real tokenizer, long rollouts, turns with a tool, odd tokens."""

from pathlib import Path

import numpy as np

from otb_analysis.store import RunWriter, StepTables

WORDS = ("The", " sum", " of", " the", " numbers", " is", " com", "put", "ed", " like", " this", ":", " 1", "2", " +",
         " 7", ".", "\n", " So", " we", " get", " un", "believ", "ably", " 19", "\n\n")  # fmt: skip
HEAD = "Solve the problem step by step and write the final number last. "
PROMPTS = {"sum": HEAD + "What is 12 + 7?", "eggs": HEAD + "How many eggs are in three dozen?", "one": HEAD + "One?"}
ANSWERS = {"sum": "19", "eggs": "36", "one": "1"}
GROUP = 4


def write_token_run(
    root: Path, name: str, steps: int = 3, length: int = 12, seed: int = 0, dies: int | None = None
) -> Path:
    """Write a run whose steps share prompts: step s has two of `PROMPTS`, from place s on.

    Rollout 0 of each group is paid although it ends with another number, rollout 1 calls a tool in its second turn,
    and the second group's rewards are all equal. Every token has an exact norm at the even steps. From step `dies` on
    nothing is paid and no gradient is left.
    """
    writer = RunWriter.create(root, name, {"seed": seed, "estimator": {"name": "group_mean"}})
    for step in range(steps):
        writer.write_step(step, _step(np.random.default_rng([seed, step]), step, length, dies is None or step < dies))
    writer.finish()
    return writer.path


def _step(random: np.random.Generator, step: int, length: int, alive: bool) -> StepTables:
    ids = [list(PROMPTS)[(step + k) % len(PROMPTS)] for k in range(2)]
    tokens: dict[str, list] = {n: [] for n in ("group", "rollout", "turn", "t", "token", "mask", "reward")}
    rollouts: dict[str, list] = {}
    for n in range(2 * GROUP):
        group, first = divmod(n, GROUP)
        end = length - n % 3
        reward = _paid(group, first) * alive
        texts = [WORDS[int(random.integers(len(WORDS)))] for _ in range(end - 2)]
        texts += [" 48" if first == 0 else " " + ANSWERS[ids[group]], "<|im_end|>"]
        tool = range(end // 3, end // 3 + 2) if first == 1 else range(0)
        for t, text in enumerate(texts):
            turn = int(first == 1 and t >= end // 3 + 2)
            row = (group, n, turn, t, text, t not in tool, reward * (t == end - 1))
            for column, value in zip(tokens.values(), row, strict=True):
                column.append(value)
        facts = {
            "group": group, "rollout": n, "prompt_id": ids[group], "prompt": PROMPTS[ids[group]],
            "answer": ANSWERS[ids[group]], "completion": "".join(texts[:-1]), "reward": reward,
            "reward_correct": reward, "reward_form": 0.5 * (first > 0), "length": end - len(tool),
            "turns": 1 + (first == 1), "finish_reason": "stop",
        }  # fmt: skip
        for column, value in facts.items():
            rollouts.setdefault(column, []).append(value)
    measured = 2 * (step % 2 == 0)
    steps = {"reward_mean": float(np.mean(rollouts["reward"])), "grad_norm": float(alive), "n_prompts": 2}
    steps |= {"n_measured_prompts": measured}
    return StepTables(
        tokens | _columns(random, np.array(tokens["mask"]), step % 2 == 0, tokens, alive), rollouts, steps
    )


def _paid(group: int, rollout: int) -> float:
    """What a rollout is paid: all of the second group, two of the first."""
    return 1.0 if group else float(rollout < 2)


def _columns(random: np.random.Generator, mask: np.ndarray, exact: bool, tokens: dict[str, list], alive: bool) -> dict:
    n = len(mask)
    logprob = -random.exponential(0.8, n)
    proxy = (1 - np.exp(logprob)) ** 2 * random.uniform(1.0, 1.6, n)
    columns = {
        "logprob": logprob, "behavior_logprob": logprob + random.normal(0, 0.02, n),
        "entropy": random.gamma(1.5, 0.4, n), "energy_proxy": proxy, "sum_pi_sq": np.exp(logprob),
    }  # fmt: skip
    if exact:
        columns["grad_norm_sq"] = 150 * proxy * random.lognormal(0, 0.5, n)
    paid = alive * np.array([_paid(g, r % GROUP) for g, r in zip(tokens["group"], tokens["rollout"], strict=True)])
    mean = alive * np.where(np.array(tokens["group"]) == 0, 0.5, 1.0)
    columns |= {"baseline": mean, "advantage": paid - mean}
    masked = {name: np.ma.array(values, mask=~mask) for name, values in columns.items()}
    by = np.where(mask & exact, "exact", "none").tolist()
    return masked | {"measured_by": by, "token_id": random.integers(0, 999, n)}


def write_odd_run(root: Path) -> Path:
    """Write a run of one step with tokens that no page may take for anything but text, one of them of 1 MB."""
    odd = ["<script>alert(1)</script>", "x" * 1_000_000, "\u202eright to left", "\x00\x1b[31m", "<|im_end|>", "\ufffd"]
    n = len(odd)
    tokens = {
        "group": [0] * 2 * n, "rollout": [0] * n + [1] * n, "turn": [0] * 2 * n, "t": [*range(n), *range(n)],
        "token": odd * 2, "mask": [True] * 2 * n, "reward": ([0.0] * (n - 1) + [1.0]) + [0.0] * n,
        "logprob": [-0.5] * 2 * n, "energy_proxy": [0.25] * 2 * n,
    }  # fmt: skip
    prompt = "<img src=x onerror=alert(2)>" + "y" * 1_000_000
    rollouts = {
        "group": [0, 0], "rollout": [0, 1], "prompt_id": ["p", "p"], "prompt": [prompt] * 2, "reward": [1.0, 0.0],
        "completion": ["".join(odd)] * 2, "answer": ["<b>7</b>"] * 2, "length": [n, n],
    }  # fmt: skip
    writer = RunWriter.create(root, "odd", {"estimator": {"name": "rloo"}})
    writer.write_step(0, StepTables(tokens, rollouts, {"reward_mean": 0.5, "grad_norm": 1.0}))
    writer.finish()
    return writer.path
