"""What studies of gradients measure: small policies of several architectures, and what they write."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.config import SampleConfig, SmallModelConfig, TrainConfig
from otb_analysis.devices import device_of, random_forked
from otb_analysis.errors import InputError, nearest
from otb_analysis.measurement.forward import ForwardPass
from otb_analysis.measurement.table import TokenTable, compute_rewards, token_table
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.models import load_policy, small_model, small_tokenizer, special_id
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import Prompt, Task, make_task
from otb_analysis.training.loop import train
from otb_analysis.training.policy.policy import Policy as RunningPolicy
from otb_analysis.training.runtime.progress import Bar, silent
from otb_analysis.types import Float, Int

ARCHITECTURES = ("qwen3", "gpt2")
POSITIONS = 192
"""Learned positions of a GPT-2-type model: prompt and answer of every task here fit."""


@dataclass(frozen=True)
class Policy:
    """A model in evaluation mode, its tokenizer, and the task; made by `fresh_policy`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: Task

    def __post_init__(self) -> None:
        """Move the model to the device that `otb study` was given."""
        self.model.to(device_of())  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class ScoredRollouts:
    """What a policy wrote and what one forward pass says about its tokens [N, T]; made by `write`.

    The temperature is that of sampling and of scoring.
    """

    rollouts: Rollouts
    table: TokenTable
    temperature: float

    @property
    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, policy mask and attention mask [N, L], as the gradient engine takes them."""
        return self.rollouts.tensors(torch.device("cpu"))

    def distinct(self) -> tuple[Int, Int]:
        """Return a row of each distinct rollout [U], and the distinct rollout of each row [N]: copies cost nothing."""
        r = self.rollouts
        key = np.concatenate([r.input_ids, r.mask, r.attention_mask], axis=1)
        _, first, back = np.unique(key, axis=0, return_index=True, return_inverse=True)
        return first.astype(np.int64), back.reshape(-1).astype(np.int64)

    def by_token(self, x: Float) -> Float:
        """Return numbers by column [N, L] by completion token [N, T], zero outside the mask."""
        return np.where(self.table.mask, self.rollouts.by_token(x), 0.0)


def fresh_policy(config: TrainConfig, architecture: str = "qwen3") -> Policy:
    """Return a randomly initialised policy of the configured sizes for the configured task.

    Raises:
        InputError: The architecture is not known.
    """
    if architecture not in ARCHITECTURES:
        raise InputError(f"architecture is {architecture!r}; {nearest(architecture, ARCHITECTURES)}")
    task = make_task(config)
    tokenizer = small_tokenizer(config.tokenizer, task.alphabet)
    make = small_model if architecture == "qwen3" else small_gpt2
    return Policy(make(config.small_model, tokenizer, config.seed), tokenizer, task)


def small_gpt2(config: SmallModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> GPT2LMHeadModel:
    """Make a randomly initialised GPT-2-type model: learned positions, biases, layer norms, one head per key.

    `key_value_heads` has no counterpart. The global random state is left as it was.
    """
    shape = GPT2Config(
        vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=config.width, n_layer=config.layers,
        n_head=config.heads, n_inner=config.feed_forward, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=config.tied, eos_token_id=special_id(tokenizer, "eos"), bos_token_id=None,
        pad_token_id=special_id(tokenizer, "pad"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: layers are made there
        return GPT2LMHeadModel(shape).eval()


def trained(policy: Policy, config: TrainConfig, work: Path, bar: Bar = silent) -> Policy:
    """Return a policy after reinforcement learning from where it is; the one given is left as it is."""
    start = work / "start"
    policy.model.save_pretrained(start)
    policy.tokenizer.save_pretrained(start)
    path = train(replace(config, root=work, run="rl", model=str(start)), bar)
    model, tokenizer = load_policy(path / "model")
    return Policy(model, tokenizer, policy.task)


def write(
    policy: Policy, prompts: Sequence[Prompt], config: SampleConfig, seed: int, at_once: int = 0
) -> ScoredRollouts:
    """Sample groups of rollouts, one per prompt, and score every token once; the global random state is kept.

    `at_once` prompts are sampled side by side, by default all of them.
    """
    generator = TransformersGenerator(policy.model, policy.tokenizer)
    with random_forked(policy.model.device):
        torch.manual_seed(seed)
        parts = []
        for start in range(0, len(prompts), at_once or len(prompts)):
            some = prompts[start : start + (at_once or len(prompts))]
            part = sample(generator, policy.tokenizer, policy.task, some, config)
            parts.append(replace(part, prompts=tuple(prompts), group=part.group + start))
    rollouts = compute_rewards(policy.task, Rollouts.concatenate(parts))
    forward = score(policy, rollouts, config.temperature)
    table = replace(token_table(rollouts, forward, None), limit=config.limit)
    return ScoredRollouts(rollouts, table, config.temperature)


def score(policy: Policy, rollouts: Rollouts, temperature: float) -> ForwardPass:
    """Return the forward pass of a batch with its statistics and hidden states, a prompt read once for its rollouts."""
    running = RunningPolicy(policy.model, TrainConfig(sample=SampleConfig(temperature=temperature)))
    return running.forward(rollouts, keep_graph=False)
