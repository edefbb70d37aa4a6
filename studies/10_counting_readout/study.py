"""Do a model's states hold the count, do the digit rows of its output layer read it, and does training them help?

Small models are probed untrained and half trained; then only the digit rows are trained, or the rest, or all.
SmolLM2-135M is read in the same way, with intervals over prompts. Its output matrix is tied to the embedding, so its
digit rows count, and are trained, in their output use alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.config import CountingConfig, SmallModelConfig, TrainConfig, WarmStartConfig
from otb_analysis.devices import device_of
from otb_analysis.diagnostics.readout import count_shift, linear_probe, row_cosines, rows_share
from otb_analysis.gradients import token_score_norms
from otb_analysis.rollouts.models import load_policy, output_layer
from otb_analysis.rollouts.sampling import encode_prompt
from otb_analysis.statistics.intervals import jackknife_interval, share_interval
from otb_analysis.tasks import Prompt
from otb_analysis.tasks.small import Counting
from otb_analysis.tasks.task_calls import distinct_prompts
from otb_analysis.training.runtime import Bar
from otb_analysis.training.warm_start import IGNORED, demonstrations, make_optimizers, supervised_step
from otb_analysis.types import Bool, Float, Int
from studies.lib import Cell, Study, Tables, interval_columns, rounded
from studies.lib.policies import Policy, fresh_policy
from studies.lib.record import Gathered

DIGITS = 10


@dataclass(frozen=True)
class States:
    """A model's states before the count, of N prompts; made by `read`."""

    hidden: Float  # [layers, N, d] behind each block; the last one is behind the final norm, as the output layer has it
    logprob: Float  # log π of the ten digits [N, 10]
    count: Int  # The right answer [N]

    @property
    def right(self) -> Float:
        """π of the right digit [N]: the chance that a sampled answer is right."""
        return np.exp(self.logprob[np.arange(len(self.count)), self.count])

    @property
    def top(self) -> Float:
        """1 where the right digit is the likeliest of the ten [N], else 0."""
        return (self.logprob.argmax(axis=1) == self.count).astype(float)

    @property
    def success(self) -> dict[str, float | None]:
        """The mean π of the right digit, and how often it is the likeliest digit."""
        return {"right": rounded(float(self.right.mean())), "top": rounded(float(self.top.mean()))}


def digit_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of 0 to 9, each one token in both models."""
    return [tokenizer(str(k), add_special_tokens=False)["input_ids"][0] for k in range(DIGITS)]


def padded(texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask [N, L], padded on the left, so that all texts end in one column."""
    both = [torch.tensor(text) for text in texts], [torch.ones(len(text), dtype=torch.long) for text in texts]
    ids, seen = (pad_sequence(rows, batch_first=True, padding_side="left") for rows in both)
    return ids, seen


def last_position(model: PreTrainedModel, texts: Sequence[Sequence[int]], states: bool = False) -> Any:
    """Return the model's output at the last token of each text."""
    ids, seen = (x.to(model.device) for x in padded(texts))
    position = (seen.cumsum(1) - 1).clamp(min=0)
    settings = {"output_hidden_states": states, "use_cache": False, "logits_to_keep": 1}
    return model(input_ids=ids, attention_mask=seen, position_ids=position, **settings)


@torch.no_grad()
def read(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], count: Int, digits: Sequence[int], at_once: int = 64
) -> States:
    """Read states and digits' log-probabilities behind texts of token ids, `at_once` together.

    The embedding of the last token is left out: it is the same for every prompt.
    """
    hidden, logprob = list[Float](), list[Float]()
    for k in range(0, len(texts), at_once):
        out = last_position(model, texts[k : k + at_once], states=True)
        hidden.append(np.stack([h[:, -1].double().cpu().numpy() for h in out.hidden_states[1:]]))
        logprob.append(out.logits[:, -1].double().log_softmax(-1)[:, digits].cpu().numpy())
    return States(np.concatenate(hidden, axis=1), np.concatenate(logprob), count)


def readings(states: States, rows: Float, fitted: Bool, ridge: float) -> list[dict[str, Any]]:
    """Return of each layer what a probe finds in prompts it was not fitted on, and mean |cos| with the digit rows."""
    layers = []
    for hidden in states.hidden:
        probe = linear_probe(hidden, states.count, fitted, ridge)
        along = {"cos_probe": probe.direction, "cos_shift": count_shift(hidden, states.count)}
        cosines = {name: float(np.nanmean(np.abs(row_cosines(one, rows)))) for name, one in along.items()}
        layers.append({"r_squared": probe.r_squared, "exact": probe.exact} | cosines)
    return layers


def shares(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], digits: Sequence[int], seed: int
) -> dict[str, float | None]:
    """Return the digit rows' share of ‖s‖² at a sampled answer, of the output layer's score and of the whole one.

    Shares of sums over the prompts. The rows count in their output use, also where the matrix is tied.
    """
    with torch.no_grad():
        logits = torch.cat([last_position(model, [text]).logits[:, -1] for text in texts])
    logprob = logits.cpu().double().log_softmax(-1)
    drawn = torch.Generator().manual_seed(seed)
    token = torch.multinomial(logprob.exp(), 1, generator=drawn)
    ids, seen = padded([[*text, int(y)] for text, y in zip(texts, token, strict=True)])
    mask = torch.zeros_like(seen, dtype=torch.bool)
    mask[:, -1] = True
    layer, whole = (
        token_score_norms(model, ids, mask, seen.bool(), scope=scope).norm_sq[:, -1] for scope in ("lm_head", "all")
    )
    rows = np.nansum(rows_share(logprob.numpy(), token[:, 0].numpy(), digits) * layer)
    norms = {"of_layer": rows / layer.sum(), "of_score": rows / whole.sum(), "norm_sq": whole.mean()}
    return {name: rounded(float(value)) for name, value in norms.items()}


def digit_rows(model: PreTrainedModel, digits: Sequence[int]) -> Float:
    """Return the output layer's rows of the digits [10, d]."""
    weight: Any = output_layer(model).weight
    return weight.detach().double().cpu().numpy()[list(digits)]


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
QUICK = {"steps": 20, "check": 10, "heldout": 64, "norms": 8}


def cells(quick: bool) -> list[Cell]:
    """Return one cell per start and seed; then one that reads the real model and trains its rows, one that trains all.

    The real model is too large for a quick run.
    """
    same = {"task": asdict(TASK), "model": asdict(MODEL), "rates": RATES, "ridge": RIDGE, "steps": STEPS}
    same |= {"check": CHECK, "heldout": HELDOUT, "norms": NORMS} | (QUICK if quick else {})
    made = list[Cell]()
    for start, (shown, before) in STARTS.items():
        settings = same | {"start": start, "shown": shown, "before": 20 if quick else before}
        made += [Cell(f"{start}-s{seed}", settings | {"seed": seed}) for seed in range(1 if quick else SEEDS)]
    facts = {"model": "smollm2", "task": asdict(TASK), "prompts": SEED, "examples": EXAMPLES, "judged": JUDGED}
    facts |= {"batch": BATCH}
    look = {"fitted": FITTED, "norms": REAL_NORMS, "ridge": REAL_RIDGE, "blocks": BLOCKS}
    real = [Cell("smollm2", facts | look | {"rows": ROWS}), Cell("smollm2-all", facts | {"all": ALL})]
    return made if quick else [*made, *real]


def measure_small(cell: Cell, bar: Bar) -> Tables:
    """Train a start, look into it, and train each arm from it on the same demonstrations of the number at once."""
    s = cell.settings
    policy = fresh_policy(config(s, s["shown"], s["before"]))
    prompts = distinct_prompts(policy.task, "heldout", s["heldout"])
    mark = policy.tokenizer("#", add_special_tokens=False)["input_ids"]
    texts = [[*encode_prompt(policy.tokenizer, prompt), *mark] for prompt in prompts]
    count, digits = counts(prompts), digit_ids(policy.tokenizer)
    key, tables = {"model": "small", "start": s["start"], "seed": s["seed"]}, Gathered()

    def look(model: PreTrainedModel, arm: str) -> None:
        states, fitted = read(model, texts, count, digits), np.arange(len(count)) % 2 == 0
        by_layer = enumerate(readings(states, digit_rows(model, digits), fitted, s["ridge"]), start=1)
        width = states.hidden.shape[2]
        layers = [{"layer": k, "width": width} | {n: rounded(x) for n, x in one.items()} for k, one in by_layer]
        share = shares(model, texts[: s["norms"]], digits, s["seed"])
        tables.add(key | {"arm": arm}, layers=layers, answers=[states.success | share])

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
                tables.add(key | {"arm": arm, "step": step}, curves=[read(model, texts, count, digits).success])
        look(model, arm)
        bar(number, len(ARMS), f"{cell.name}: {arm}")
    return tables


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


EXAMPLES = "Letters: b a b c\nNumber of b: 2\n\nLetters: d a a c a b\nNumber of a: 3\n\n"
"""Two examples; letters stand apart, so that each is one token."""
SEED = 1
"""Of the prompts. A pilot on those of seed 0 chose wording, ridge and the rate of the rows."""
FITTED, JUDGED, REAL_NORMS, REAL_RIDGE, BLOCKS, BATCH = 800, 400, 32, 1e-2, 20, 16
ROWS = {"rate": 3e-3, "steps": 2000, "check": 100}
ALL = {"rate": 1e-4, "steps": 60, "check": 20}
"""AdamW. Training all parameters is dear, so it has fewer steps and one rate, which no pilot chose."""


def measure_real(cell: Cell, bar: Bar) -> Tables:
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
    states, rows = read(model, texts, counts(prompts), digits, at_once=s["batch"]), digit_rows(model, digits)
    bar(1, 3, "states")
    curve = [curve_row("rows", *point) for point in rows_trained(states, rows, fitted, s["rows"], s["batch"])]
    by_layer = enumerate(layer_intervals(states, rows, fitted, s), 1)
    layers = [{"layer": k, "width": rows.shape[1]} | row for k, row in by_layer]
    bar(2, 3, "probes and rows")
    share = shares(model, texts[-s["norms"] :], digits, seed=0)
    bar(3, 3, "norms")
    mass = float(np.exp(states.logprob).sum(axis=1).mean())
    facts = {"parameters": model.num_parameters(), "row_parameters": rows.size, "mass": mass, "norms": s["norms"]}
    return {"real_layers": layers, "real_curves": curve, "real_answers": [facts | share]}


def encoded(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return prompts as the model reads them, up to the blank before the number."""
    asked = (prompt.text.removesuffix("=").split("?") for prompt in prompts)
    texts = [f"{EXAMPLES}Letters: {' '.join(letters)}\nNumber of {target}: " for letters, target in asked]
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def counts(prompts: Sequence[Prompt]) -> Int:
    """Return the right answers [N]."""
    return np.array([int(prompt.answer) for prompt in prompts])


def layer_intervals(states: States, rows: Float, fitted: Bool, s: Any) -> list[dict[str, Any]]:
    """Return readings by layer with intervals over prompts, from leaving out one block of them after another."""
    block, without = np.arange(len(fitted)) % s["blocks"], list[list[dict[str, Any]]]()
    for kept in (block != k for k in np.unique(block)):
        part = States(states.hidden[:, kept], states.logprob[kept], states.count[kept])
        without.append(readings(part, rows, fitted[kept], s["ridge"]))
    table, judged = list[dict[str, Any]](), np.arange(int((~fitted).sum()))
    for k, whole in enumerate(readings(states, rows, fitted, s["ridge"])):
        row = dict[str, Any]()
        for name in ("r_squared", "cos_probe", "cos_shift"):
            others = [one[k][name] for one in without]
            row |= interval_columns(name, jackknife_interval(whole[name], others, name, scale="linear"))
        # A share of judged prompts, of the probe as it is: refits make jumps of so rough a number.
        right = share_interval(judged < round(whole["exact"] * len(judged)), "rounded prediction is right")
        table.append(row | interval_columns("exact", right))
    return table


def rows_trained(states: States, rows: Float, fitted: Bool, how: Any, batch: int) -> Iterator[tuple[int, Float, Float]]:
    """Train the digit rows on batches of fitted prompts; yield step, π of the right digit, whether it is the top one.

    States and all other logits stay as they are, so that nothing else of the model is needed: with z' the new logits of
    the digits, π' = exp(z'_v)/(R + Σ exp z'), R the sum over all other tokens.
    """
    hidden, count, weight = (torch.tensor(x) for x in (states.hidden[-1], states.count, rows))
    # log Σ_v exp z_v, the same from each digit
    total = (hidden @ weight.T - torch.tensor(states.logprob)).mean(dim=1)
    others = total + torch.tensor(np.log1p(-np.minimum(np.exp(states.logprob).sum(axis=1), 1 - 1e-12)))
    weight.requires_grad_()
    train, judged = (torch.tensor(np.flatnonzero(part)) for part in (fitted, ~fitted))

    def logprob(at: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[at] @ weight.T, others[at, None]], dim=1).log_softmax(-1)

    def loss(step: int) -> torch.Tensor:
        at = train[torch.randint(len(train), (batch,), generator=drawn)]
        return cross_entropy(logprob(at), count[at])

    drawn = torch.Generator().manual_seed(0)
    for step in descended([weight], how, loss):
        with torch.no_grad():
            log_pi = logprob(judged)
        right = log_pi.gather(1, count[judged, None])[:, 0].exp()
        yield step, right.numpy(), (log_pi[:, :DIGITS].argmax(1) == count[judged]).double().numpy()


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
    prompts = distinct_prompts(task, "train", how["steps"] * s["batch"])
    texts, answers, count = encoded(tokenizer, judged), torch.tensor(digits)[counts(prompts)], counts(judged)

    def loss(step: int) -> torch.Tensor:
        bar(step, how["steps"], "all parameters")
        at = slice(step * s["batch"], (step + 1) * s["batch"])
        logits = last_position(model, encoded(tokenizer, prompts[at])).logits[:, -1]
        return cross_entropy(logits, answers[at].to(logits.device))

    for step in descended(list(model.parameters()), how, loss):
        states = read(model, texts, count, digits, at_once=s["batch"])
        yield curve_row("all", step, states.right, states.top)


def descended(parameters: Sequence[torch.Tensor], how: Any, loss: Callable[[int], torch.Tensor]) -> Iterator[int]:
    """Train parameters by AdamW, the gradient clipped at 1; yield the steps at which to look at them, from 0 on."""
    optimizer = torch.optim.AdamW(parameters, lr=how["rate"], betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(how["steps"] + 1):
        if step % how["check"] == 0:
            yield step
        if step < how["steps"]:
            optimizer.zero_grad()
            loss(step).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()


def curve_row(arm: str, step: int, right: Float, top: Float) -> dict[str, Any]:
    """Return a point of a learning curve with intervals over the judged prompts."""
    row = {"arm": arm, "step": step} | interval_columns("right", share_interval(right, "π of the right digit"))
    return row | interval_columns("top", share_interval(top, "right digit likeliest"))


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Probe and train small models, or the pretrained one."""
    return (measure_small if "start" in cell.settings else measure_real)(cell, bar)


STUDY = Study(
    title="Counting readout",
    question="Do a model's states hold a count that the digit rows of its output layer do not read, and does training "
    "only those rows make it answer?",
    cells=cells(quick=False),
    quick=cells(quick=True),
    measure=measure,
)
