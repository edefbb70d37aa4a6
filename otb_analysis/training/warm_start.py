"""Supervised start: train a small model on demonstrations until its sampled answers succeed often enough for RL."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis import __version__
from otb_analysis.config import SampleConfig, TrainConfig, WarmStartConfig
from otb_analysis.devices import device_of, random_forked
from otb_analysis.errors import InputError
from otb_analysis.measurement.table import compute_rewards
from otb_analysis.phases import phase
from otb_analysis.rollouts.generation import Generator, TransformersGenerator
from otb_analysis.rollouts.models import output_layer, small_model, small_tokenizer, special_id
from otb_analysis.rollouts.named_models import SHIPPED
from otb_analysis.rollouts.sampling import encode_prompt, sample
from otb_analysis.tasks import Prompt, Task, make_task, task_files
from otb_analysis.tasks.task_calls import ask_demonstration, draw_prompts
from otb_analysis.training.runtime import model_folder

CACHE = Path(".cache/warm")
DEMONSTRATIONS_FROM = 10_000_000
"""Index of the first demonstration prompt, far from those that RL draws."""
CHECKS_FROM = 20_000_000
MUON_RATIO = 5.0
"""Muon's learning rate over AdamW's."""
IGNORED = -100
LEARNED_ENOUGH_TO_CHECK = 0.2
"""Token loss in nats below which success is measured at every check."""
CHECKED_ANYWAY = 8
"""Success is measured at every so many checks at any loss: random choices in demonstrations keep the loss high."""


def warm_started(config: TrainConfig, cache: Path = CACHE) -> Path:
    """Return the directory of the warm-started small model, making it when this configuration has none yet.

    Task, model, warm start, sampling limits, seed, package version and kind of device key the cache.

    Raises:
        InputError: The model did not reach the wanted success within the step budget.
        StoreError: The made model cannot be kept.
    """
    key = {
        "task": config.task,
        "task_config": asdict(config).get(config.task),
        "model": asdict(config.small_model),
        "warm_start": asdict(config.warm_start),
        "sample": [config.sample.max_new_tokens, config.sample.max_turns, config.sample.temperature],
        "seed": config.seed,
        "version": __version__,
    }
    if (kind := device_of(config.device, measures=False).type) != "cpu":
        key["device"] = kind
    if config.tokenizer != "characters":
        key["tokenizer"] = config.tokenizer
    if files := task_files(config):
        key["files"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache / f"{config.task.replace(':', '.')}-{digest[:12]}"
    if not (path / "warm_start.json").is_file():
        make_policy(config, path)
    return path


def make_policy(config: TrainConfig, path: Path) -> None:
    """Warm-start a small model and write it with its tokenizer and `warm_start.json`.

    Raises:
        InputError: The model did not reach the wanted success within the step budget.
        StoreError: The directory cannot be written.
    """
    task = make_task(config)
    tokenizer = small_tokenizer(config.tokenizer, task.alphabet)
    model: PreTrainedModel = small_model(config.small_model, tokenizer, config.seed)
    model.to(device_of(config.device, measures=False))  # pyright: ignore[reportArgumentType]
    steps, success = fit(model, tokenizer, task, config)
    facts = {"steps": steps, "success": success, "parameters": model.num_parameters()}
    failure, remedy = "cannot keep the warm-started model in", "free some space or make the directory writable."
    with model_folder(path, failure, remedy) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "warm_start.json").write_text(json.dumps(facts, indent=2) + "\n")


def fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: TrainConfig,
    optimizers: list[torch.optim.Optimizer] | None = None,
) -> tuple[int, float]:
    """Train on demonstrations in place until measured success lies in the band; return steps taken and that success.

    Without optimizers the matrices inside the blocks are Muon's and the rest is AdamW's. If success is above the band,
    the weights of the check before are restored, and checks become more frequent.

    Raises:
        InputError: The step budget ran out below the band.
    """
    settings, generator = config.warm_start, TransformersGenerator(model, tokenizer)
    optimizers = optimizers or make_optimizers(model, settings.learning_rate)
    torch.manual_seed(config.seed)
    checks = draw_prompts(task, "train", CHECKS_FROM, settings.check_prompts)
    loss, success, below, every = float("inf"), 0.0, deepcopy(model.state_dict()), settings.check_every
    with phase("warm start", settings.max_steps, "step", at_most=True) as here:
        for step, batch in enumerate(demonstrations(tokenizer, task, settings), start=1):
            loss = 0.95 * loss + 0.05 * supervised_step(model, optimizers, batch) if step > 1 else 3.0
            reached = f"{success:.0%} success, {settings.success_low:.0%} wanted"
            here(step, settings.max_steps, f"warm start, loss {loss:.2f} nats, {reached}")
            unlikely = loss > LEARNED_ENOUGH_TO_CHECK and step % (CHECKED_ANYWAY * settings.check_every)
            if step < settings.max_steps and (step % every or unlikely):
                continue
            early = loss > LEARNED_ENOUGH_TO_CHECK  # an early check must not change later draws
            with random_forked(model.device, early), phase("checking"):
                success = success_rate(generator, tokenizer, task, checks, replace(config.sample, soft=0))
            if settings.success_low <= success <= settings.success_high:
                return step, success
            if success > settings.success_high:
                model.load_state_dict(below)
                success, every = 0.0, max(1, every // 5)
            else:
                below = deepcopy(model.state_dict())
    raise InputError(
        f"the warm start reached {success:.0%} success after {settings.max_steps} steps; "
        f"{settings.success_low:.0%} is wanted; make the task easier, the model larger or warm_start.max_steps higher."
    )


def success_rate(
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prompts: Sequence[Prompt],
    config: SampleConfig,
) -> float:
    """Return the mean total reward of one sampled answer to each prompt."""
    one = replace(config, prompts=len(prompts), group_size=1)
    rollouts = sample(generator, tokenizer, task, prompts, one)
    return float(compute_rewards(task, rollouts).rewards().sum(axis=1).mean())


def demonstrations(
    tokenizer: PreTrainedTokenizerBase, task: Task, config: WarmStartConfig
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of demonstrations: token ids and labels [n, L], padded."""
    index = DEMONSTRATIONS_FROM
    for _ in range(config.max_steps):
        prompts = draw_prompts(task, "train", index, config.batch)
        index += config.batch
        examples = [_example(tokenizer, task, prompt) for prompt in prompts]
        ids, labels = ([torch.tensor(row, device="cpu") for row in rows] for rows in zip(*examples, strict=True))
        yield pad_sequence(ids, True, special_id(tokenizer, "pad")), pad_sequence(labels, True, IGNORED)


def _example(tokenizer: PreTrainedTokenizerBase, task: Task, prompt: Prompt) -> tuple[list[int], list[int]]:
    """Return token ids and labels; prompt and environment tokens carry no loss."""
    ids = encode_prompt(tokenizer, prompt)
    labels = [IGNORED] * len(ids)
    for turn in ask_demonstration(task, prompt):
        written = [*tokenizer(turn.text, add_special_tokens=False)["input_ids"], special_id(tokenizer, "eos")]
        reply = list(tokenizer(turn.reply, add_special_tokens=False)["input_ids"])
        ids += written + reply
        labels += written + [IGNORED] * len(reply)
    return ids, labels


def make_optimizers(model: PreTrainedModel, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the blocks and AdamW for the rest, which needs half the steps of AdamW."""
    outer = {id(p) for layer in (model.get_input_embeddings(), output_layer(model)) for p in layer.parameters()}
    parameters = list(model.parameters())
    inner = [p for p in parameters if p.ndim == 2 and id(p) not in outer]
    rest = [p for p in parameters if p.ndim != 2 or id(p) in outer]
    return [
        torch.optim.Muon(inner, lr=MUON_RATIO * learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def supervised_step(
    model: PreTrainedModel, optimizers: list[torch.optim.Optimizer], batch: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """Take one step on a batch of demonstrations and return its loss in nats a token."""
    ids, labels = (x.to(model.device) for x in batch)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":  # makes the policy that ships with the package: python -m otb_analysis.training.warm_start
    torch.set_num_threads(1)
    make_policy(TrainConfig(device="cpu"), SHIPPED["demo"])
