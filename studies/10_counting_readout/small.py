"""Small models, probed untrained and half trained; then only the digit rows are trained, or the rest, or all."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from otb_analysis.config import CountingConfig, SmallModelConfig, TrainConfig, WarmStartConfig
from otb_analysis.rollouts.models import output_layer
from otb_analysis.rollouts.sampling import encode_prompt
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.training.warm_start import IGNORED, demonstrations, make_optimizers, supervised_step
from studies.lib import Cell, Tables, rounded
from studies.lib.policies import Policy, fresh_policy

from .states import States, digit_ids, digit_rows, read, readings, shares

TASK = CountingConfig(length_min=4, length_max=9, letters=4, show="direct")
"""Counts are one digit each, so that one token is the answer."""
MODEL = SmallModelConfig(layers=2, width=64, feed_forward=160, tied=False)
"""Untied, so that the digit rows have no other use."""
STARTS = {"written": ("running", 800), "direct": ("direct", 100)}
"""Where training begins: demonstrations seen, and steps. `written` counts aloud and was never asked for the number at
once; `direct` was, and is stopped early."""
ARMS = ("rows", "rest", "all")
RATES = {"rows": 3e-2, "rest": 3e-3, "all": 3e-3}
"""Learning rates of AdamW, chosen on seed 99, which no table holds."""
SEEDS, STEPS, CHECK, HELDOUT, NORMS, RIDGE = 6, 600, 50, 1024, 96, 1e-3


def cells(quick: bool) -> list[Cell]:
    """Return one cell per start and seed."""
    size = {"steps": STEPS, "check": CHECK, "heldout": HELDOUT, "norms": NORMS}
    size |= {"steps": 20, "check": 10, "heldout": 64, "norms": 8} if quick else {}
    return [
        Cell(
            f"{start}-s{seed}",
            {"start": start, "seed": seed, "task": asdict(TASK), "model": asdict(MODEL), "rates": RATES, "ridge": RIDGE}
            | {"shown": shown, "before": 20 if quick else before} | size,
        )
        for start, (shown, before) in STARTS.items()
        for seed in range(1 if quick else SEEDS)
    ]  # fmt: skip


def measure(cell: Cell, bar: Bar) -> Tables:
    """Train a start, look into it, and train each arm from it on the same demonstrations of the number at once."""
    s = cell.settings
    policy = fresh_policy(config(s, s["shown"], s["before"]))
    prompts = distinct_prompts(policy.task, "heldout", s["heldout"])
    mark = policy.tokenizer("#", add_special_tokens=False)["input_ids"]
    texts = [[*encode_prompt(policy.tokenizer, prompt), *mark] for prompt in prompts]
    count = np.array([int(prompt.answer) for prompt in prompts])
    digits = digit_ids(policy.tokenizer)
    key = {"model": "small", "start": s["start"], "seed": s["seed"]}
    tables: dict[str, list[dict[str, Any]]] = {"layers": [], "answers": [], "curves": []}

    def look(model: PreTrainedModel, arm: str) -> None:
        states = read(model, texts, count, digits)
        fitted = np.arange(len(count)) % 2 == 0
        found = readings(states, digit_rows(model, digits), fitted, s["ridge"])
        for layer, one in enumerate(found, start=1):
            row = {"arm": arm, "layer": layer, "width": states.hidden.shape[2]}
            tables["layers"].append(key | row | {name: rounded(x) for name, x in one.items()})
        share = shares(model, texts[: s["norms"]], digits, s["seed"])
        tables["answers"].append(key | {"arm": arm} | success(states) | share)

    look(policy.model, "untrained")
    torch.manual_seed(s["seed"])
    optimizers = make_optimizers(policy.model, WarmStartConfig().learning_rate)
    for batch in demonstrations(policy.tokenizer, policy.task, config(s, s["shown"], s["before"]).warm_start):
        supervised_step(policy.model, optimizers, batch)
    look(policy.model, "start")
    for number, arm in enumerate(ARMS, start=1):
        model = deepcopy(policy.model)
        for step in train(replace(policy, model=model), arm, digits, s):
            if step % s["check"] == 0:
                reached = success(read(model, texts, count, digits))
                tables["curves"].append(key | {"arm": arm, "step": step} | reached)
        look(model, arm)
        bar(number, len(ARMS), f"{cell.name}: {arm}")
    return tables


def success(states: States) -> dict[str, float | None]:
    """Return the mean π of the right digit, and how often it is the likeliest digit."""
    return {"right": rounded(float(states.right.mean())), "top": rounded(float(states.top.mean()))}


def train(policy: Policy, arm: str, digits: list[int], s: Any) -> Iterator[int]:
    """Train the arm's parameters on demonstrations, the loss at the digit alone; yield 0 and every step taken."""
    yield 0
    asked = config(s, "direct", s["steps"])
    task = fresh_policy(asked).task
    with only(policy.model, arm, digits):
        optimizers = make_optimizers(policy.model, s["rates"][arm])
        for step, (ids, labels) in enumerate(demonstrations(policy.tokenizer, task, asked.warm_start), start=1):
            digit = torch.isin(labels, torch.tensor(digits))
            supervised_step(policy.model, optimizers, (ids, labels.where(digit, IGNORED)))
            yield step


@contextmanager
def only(model: PreTrainedModel, arm: str, digits: list[int]) -> Iterator[None]:
    """Let only the arm's parameters move inside the block: the digit rows, all but them, or all."""
    weight: Any = output_layer(model).weight
    rows = torch.zeros(len(weight), 1, dtype=torch.bool, device=weight.device)
    rows[digits] = True
    hook = weight.register_hook(lambda gradient: gradient * {"rows": rows, "rest": ~rows}.get(arm, rows | ~rows))
    for parameter in model.parameters():
        parameter.requires_grad_(arm != "rows" or parameter is weight)
    try:
        yield
    finally:
        hook.remove()
        model.requires_grad_(True)


def config(s: Any, shown: Any, steps: int) -> TrainConfig:
    """Return the settings of a start or, with `direct`, of the training after it."""
    return TrainConfig(
        task="counting", counting=replace(TASK, show=shown), small_model=MODEL, seed=s["seed"],
        warm_start=WarmStartConfig(max_steps=steps),
    )  # fmt: skip
