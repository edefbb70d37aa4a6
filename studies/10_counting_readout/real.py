"""SmolLM2-135M: the same readings with intervals over prompts; only its digit rows are trained, or all of it.

Its output matrix is tied to the embedding. The rows count, and are trained, in their output use alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.config import CountingConfig
from otb_analysis.devices import device_of
from otb_analysis.rollouts.models import load_policy
from otb_analysis.statistics.inference.intervals import jackknife_interval
from otb_analysis.statistics.inference.passing import share_interval
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.counting import Counting
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime.progress import Bar
from otb_analysis.types import Bool, Float, Int
from studies.lib import Cell, Tables, interval_columns

from .states import DIGITS, States, digit_ids, digit_rows, last_position, read, readings, shares

TASK = CountingConfig(length_min=4, length_max=9, letters=4, show="direct")
EXAMPLES = "Letters: b a b c\nNumber of b: 2\n\nLetters: d a a c a b\nNumber of a: 3\n\n"
"""Two examples; letters stand apart, so that each is one token."""
SEED = 1
"""Of the prompts. A pilot on those of seed 0 chose wording, ridge and the rate of the rows."""
FITTED, JUDGED, NORMS, RIDGE, BLOCKS, BATCH = 800, 400, 32, 1e-2, 20, 16
ROWS = {"rate": 3e-3, "steps": 2000, "check": 100}
ALL = {"rate": 1e-4, "steps": 60, "check": 20}
"""AdamW. Training all parameters is dear, so it has fewer steps and one rate, which no pilot chose."""


def cells() -> list[Cell]:
    """Return a cell that reads and trains rows, and one that trains all; too large for a quick run."""
    facts = {"model": "smollm2", "task": asdict(TASK), "prompts": SEED, "examples": EXAMPLES, "judged": JUDGED}
    facts |= {"batch": BATCH}
    look = {"fitted": FITTED, "norms": NORMS, "ridge": RIDGE, "blocks": BLOCKS}
    return [Cell("smollm2", facts | look | {"rows": ROWS}), Cell("smollm2-all", facts | {"all": ALL})]


def measure(cell: Cell, bar: Bar) -> Tables:
    """Read the states of the model and train its digit rows on them, or train all of the model."""
    s = cell.settings
    model, tokenizer = load_policy(s["model"])
    model.to(device_of())  # pyright: ignore[reportArgumentType]
    digits, task = digit_ids(tokenizer), Counting(TASK, s["prompts"])
    judged = distinct_prompts(task, "heldout", s["judged"])
    if "all" in s:
        return {"real_curves": list(curve_of_all(model, tokenizer, task, judged, s, bar))}
    prompts = [*distinct_prompts(task, "train", s["fitted"]), *judged]
    texts, fitted = encoded(tokenizer, prompts), np.arange(len(prompts)) < s["fitted"]
    states = read(model, texts, counts(prompts), digits, at_once=s["batch"])
    bar(1, 3, "states")
    rows = digit_rows(model, digits)
    curve = [
        curve_row("rows", step, right, top)
        for step, right, top in rows_trained(states, rows, fitted, s["rows"], s["batch"])
    ]
    layers = [
        {"layer": k, "width": rows.shape[1]} | row for k, row in enumerate(layer_intervals(states, rows, fitted, s), 1)
    ]
    bar(2, 3, "probes and rows")
    share = shares(model, texts[-s["norms"] :], digits, seed=0)
    bar(3, 3, "norms")
    mass = float(np.exp(states.logprob).sum(axis=1).mean())
    facts = {"parameters": model.num_parameters(), "row_parameters": rows.size, "mass": mass, "norms": s["norms"]}
    return {"real_layers": layers, "real_curves": curve, "real_answers": [facts | share]}


def encoded(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return prompts as the model reads them, up to the blank before the number."""
    texts = []
    for prompt in prompts:
        letters, target = prompt.text.removesuffix("=").split("?")
        text = f"{EXAMPLES}Letters: {' '.join(letters)}\nNumber of {target}: "
        texts.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return texts


def counts(prompts: Sequence[Prompt]) -> Int:
    """Return the right answers [N]."""
    return np.array([int(prompt.answer) for prompt in prompts])


def layer_intervals(states: States, rows: Float, fitted: Bool, s: Any) -> list[dict[str, Any]]:
    """Return readings by layer with intervals over prompts, from leaving out one block of them after another."""
    block = np.arange(len(fitted)) % s["blocks"]
    whole = readings(states, rows, fitted, s["ridge"])
    without = []
    for k in np.unique(block):
        kept = block != k
        part = States(states.hidden[:, kept], states.logprob[kept], states.count[kept])
        without.append(readings(part, rows, fitted[kept], s["ridge"]))
    table, judged = list[dict[str, Any]](), int((~fitted).sum())
    for k, row in enumerate(whole):
        found = {
            name: jackknife_interval(row[name], [one[k][name] for one in without], name, scale="linear")
            for name in ("r_squared", "cos_probe", "cos_shift")
        }
        # A share of judged prompts, of the probe as it is: refits make jumps of so rough a number.
        found["exact"] = share_interval(np.arange(judged) < round(row["exact"] * judged), "rounded prediction is right")
        table.append({c: value for name, one in found.items() for c, value in interval_columns(name, one).items()})
    return table


def rows_trained(states: States, rows: Float, fitted: Bool, how: Any, batch: int) -> Iterator[tuple[int, Float, Float]]:
    """Train the digit rows on batches of fitted prompts; yield step, π of the right digit, whether it is the top one.

    States and all other logits stay as they are, so that nothing else of the model is needed: with z' the new logits of
    the digits, π' = exp(z'_v)/(R + Σ exp z'), R the sum over all other tokens.
    """
    hidden, count = torch.tensor(states.hidden[-1]), torch.tensor(states.count)
    weight = torch.tensor(rows)
    logits = hidden @ weight.T
    total = (logits - torch.tensor(states.logprob)).mean(dim=1)  # log Σ_v exp z_v, the same from each digit
    others = total + torch.tensor(np.log1p(-np.minimum(np.exp(states.logprob).sum(axis=1), 1 - 1e-12)))
    weight.requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=how["rate"], betas=(0.9, 0.98), weight_decay=0.0)
    train, judged = (torch.tensor(np.flatnonzero(part)) for part in (fitted, ~fitted))

    def logprob(at: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[at] @ weight.T, others[at, None]], dim=1).log_softmax(-1)

    drawn = torch.Generator().manual_seed(0)
    for step in range(how["steps"] + 1):
        if step % how["check"] == 0:
            with torch.no_grad():
                found = logprob(judged)
            right = found.gather(1, count[judged, None])[:, 0].exp()
            yield step, right.numpy(), (found[:, :DIGITS].argmax(1) == count[judged]).double().numpy()
        at = train[torch.randint(len(train), (batch,), generator=drawn)]
        descend(cross_entropy(logprob(at), count[at]), [weight], optimizer)


def curve_of_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Counting,
    judged: Sequence[Prompt],
    s: Any,
    bar: Bar,
) -> Iterator[dict[str, Any]]:
    """Train all parameters on new prompts in every batch; yield the curve."""
    how, digits = s["all"], digit_ids(tokenizer)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=how["rate"], betas=(0.9, 0.98), weight_decay=0.0)
    prompts = distinct_prompts(task, "train", how["steps"] * s["batch"])
    texts, answers, count = encoded(tokenizer, judged), torch.tensor(digits)[counts(prompts)], counts(judged)
    for step in range(how["steps"] + 1):
        if step % how["check"] == 0:
            states = read(model, texts, count, digits, at_once=s["batch"])
            yield curve_row("all", step, states.right, states.top)
        bar(step, how["steps"], "all parameters")
        at = slice(step * s["batch"], (step + 1) * s["batch"])
        if step < how["steps"]:
            logits = last_position(model, encoded(tokenizer, prompts[at])).logits[:, -1]
            descend(cross_entropy(logits, answers[at].to(logits.device)), parameters, optimizer)


def descend(loss: torch.Tensor, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Take one step, the gradient clipped at 1."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def curve_row(arm: str, step: int, right: Float, top: Float) -> dict[str, Any]:
    """Return a point of a learning curve with intervals over the judged prompts."""
    return (
        {"arm": arm, "step": step}
        | interval_columns("right", share_interval(right, "π of the right digit"))
        | interval_columns("top", share_interval(top, "right digit likeliest"))
    )
