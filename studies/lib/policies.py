"""What studies of gradients measure: small policies of several architectures, what they write, and critics of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.config import CriticConfig, SampleConfig, TrainConfig
from otb_analysis.devices import device_of, random_forked
from otb_analysis.errors import InputError, nearest
from otb_analysis.gradients import gradient_sketch, token_score_norms
from otb_analysis.measurement.forward import ForwardPass
from otb_analysis.measurement.table import TokenTable, compute_rewards, token_table
from otb_analysis.rollouts.generation import TransformersGenerator
from otb_analysis.rollouts.models import load_policy, small_model, small_tokenizer, special_id
from otb_analysis.rollouts.sampling import Rollouts, sample
from otb_analysis.tasks import Prompt, Task, make_task
from otb_analysis.tasks.task_calls import distinct_prompts, draw_prompts
from otb_analysis.training.critic import Critic, CriticBatch, critic_target, make_critic
from otb_analysis.training.loop import train
from otb_analysis.training.policy import Policy as RunningPolicy
from otb_analysis.training.runtime import Bar, silent
from otb_analysis.training.warm_start import (
    IGNORED,
    demonstrations,
    fit,
    make_optimizers,
    success_rate,
    supervised_step,
)
from otb_analysis.types import Bool, Float, Int

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
        first, back = np.unique(key, axis=0, return_index=True, return_inverse=True)[1:]
        return first.astype(np.int64), back.reshape(-1).astype(np.int64)

    def by_token(self, x: Float) -> Float:
        """Return numbers by column [N, L] by completion token [N, T], zero outside the mask."""
        return np.where(self.table.mask, self.rollouts.by_token(x), 0.0)


def fresh_policy(config: TrainConfig, architecture: str = "qwen3", positions: int = POSITIONS) -> Policy:
    """Return a randomly initialised policy of the configured sizes for the configured task.

    A GPT-2-type model has `positions` learned positions, biases, layer norms, and one head per key: `key_value_heads`
    has no counterpart. The global random state is left as it was.

    Raises:
        InputError: The architecture is not known.
    """
    if architecture not in ARCHITECTURES:
        raise InputError(f"architecture is {architecture!r}; {nearest(architecture, ARCHITECTURES)}")
    task = make_task(config)
    tokenizer = small_tokenizer(config.tokenizer, task.alphabet)
    if architecture == "qwen3":
        return Policy(small_model(config.small_model, tokenizer, config.seed), tokenizer, task)
    size = config.small_model
    shape = GPT2Config(
        vocab_size=len(tokenizer), n_positions=positions, n_embd=size.width, n_layer=size.layers, n_head=size.heads,
        n_inner=size.feed_forward, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=size.tied,
        eos_token_id=special_id(tokenizer, "eos"), bos_token_id=None, pad_token_id=special_id(tokenizer, "pad"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # the CPU's alone: layers are made there
        return Policy(GPT2LMHeadModel(shape).eval(), tokenizer, task)


def pretrained(config: TrainConfig) -> Policy:
    """Return the policy that a configuration names, with the task of it.

    Raises:
        InputError: The model cannot be loaded.
    """
    model, tokenizer = load_policy(config.model)
    return Policy(model.eval(), tokenizer, make_task(config))


def taught(config: TrainConfig) -> Policy:
    """Return a small policy after its supervised start.

    Raises:
        InputError: The step budget ran out below the band.
    """
    policy = fresh_policy(config)
    fit(policy.model, policy.tokenizer, policy.task, config)
    return policy


def demonstrated(
    policy: Policy, config: TrainConfig, every: int, heldout: int, length: int
) -> Iterator[tuple[int, float, float]]:
    """Train a policy on demonstrations; yield step, success on held-out prompts and nats, every so many steps.

    Nats are the mean −log π of a whole demonstration since the check before.
    """
    optimizers = make_optimizers(policy.model, config.warm_start.learning_rate)
    generator, sample = TransformersGenerator(policy.model, policy.tokenizer), SampleConfig(max_new_tokens=length)
    prompts, nats = distinct_prompts(policy.task, "heldout", heldout), list[float]()
    torch.manual_seed(config.seed)
    for step, batch in enumerate(demonstrations(policy.tokenizer, policy.task, config.warm_start), start=1):
        written = int((batch[1][:, 1:] != IGNORED).sum()) / len(batch[1])
        nats.append(supervised_step(policy.model, optimizers, batch) * written)
        if step % every == 0:
            with random_forked(policy.model.device):
                torch.manual_seed(step)
                success = success_rate(generator, policy.tokenizer, policy.task, prompts, sample)
            yield step, success, float(np.mean(nats[-every:]))


def train_from(policy: Policy, config: TrainConfig, work: Path, bar: Bar = silent) -> Path:
    """Train from where a policy is, which is left as it is; return where the run and its model are."""
    start = work / "start"
    policy.model.save_pretrained(start)
    policy.tokenizer.save_pretrained(start)
    return train(replace(config, root=work, model=str(start)), bar)


def different_prompts(policy: Policy, first: int, count: int, among: int = 0) -> list[Prompt]:
    """Return the first different training prompts from an index on, among so many, by default four times the count."""
    drawn = draw_prompts(policy.task, "train", first, among or 4 * count)
    return list({prompt.id: prompt for prompt in drawn}.values())[:count]


def draw(policy: Policy, prompts: Sequence[Prompt], config: SampleConfig, seed: int, at_once: int = 0) -> Rollouts:
    """Sample groups of rollouts, one per prompt, with their rewards; the global random state is kept.

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
    return compute_rewards(policy.task, Rollouts.concatenate(parts))


def write(
    policy: Policy, prompts: Sequence[Prompt], config: SampleConfig, seed: int, at_once: int = 0
) -> ScoredRollouts:
    """Sample groups of rollouts, one per prompt, and score every token once; the arguments are those of `draw`."""
    rollouts = draw(policy, prompts, config, seed, at_once)
    table = replace(token_table(rollouts, score(policy, rollouts, config.temperature), None), limit=config.limit)
    return ScoredRollouts(rollouts, table, config.temperature)


def exact_norms(policy: Policy, written: ScoredRollouts, chosen: Bool) -> Float:
    """Return ‖s‖² of chosen tokens [N, T], zero at the others; s = ∇log π over all parameters."""
    rows, wide = np.flatnonzero(chosen.any(axis=1)), np.zeros(written.rollouts.mask.shape)
    if len(rows):
        ids, _, attention = (x[torch.as_tensor(rows)] for x in written.batch)
        at = torch.as_tensor(written.rollouts.by_column(chosen[None].astype(float))[rows, 0] > 0)
        wide[rows] = token_score_norms(
            policy.model, ids, at, attention, temperature=written.temperature, soft=written.rollouts.soft
        ).norm_sq
    return np.where(chosen, written.rollouts.by_token(wide), 0.0)


def group_sketches(
    policy: Policy, written: ScoredRollouts, weights: Float, group: Int, buckets: int, scope: str = "all"
) -> Float:
    """Return a count sketch of Σ weights·s of every group [M, G, K], weights [M, N, T]; a few groups at a time."""
    by_column, parts = written.rollouts.by_column(weights), []
    how: Any = {"dim": buckets, "temperature": written.temperature, "soft": written.rollouts.soft, "scope": scope}
    for first in range(0, int(group.max()) + 1, 64):
        rows = np.flatnonzero((group >= first) & (group < first + 64))
        ids, mask, attention = (x[torch.as_tensor(rows)] for x in written.batch)
        cluster = group[rows] - first
        parts.append(gradient_sketch(policy.model, ids, mask, by_column[rows], cluster, attention, **how))
    return np.concatenate(parts).transpose(1, 0, 2)


def score(policy: Policy, rollouts: Rollouts, temperature: float) -> ForwardPass:
    """Return the forward pass of a batch with its statistics and hidden states, a prompt read once for its rollouts."""
    running = RunningPolicy(policy.model, TrainConfig(sample=SampleConfig(temperature=temperature)))
    return running.forward(rollouts, keep_graph=False)


def critic_batches(
    policy: Policy, first: int, batches: int, config: SampleConfig, seed: int, bar: Bar = silent
) -> list[ScoredRollouts]:
    """Return batches of rollouts of distinct prompts' groups for critics to be fitted on.

    `first` is the index of the first prompt of the training split: far from those that are measured.
    """
    written = []
    for k in range(batches):
        prompts = draw_prompts(policy.task, "train", first + k * config.prompts, config.prompts)
        written.append(write(policy, prompts, config, seed=seed + k))
        bar(k + 1, batches, "rollouts for critics")
    return written


def fitted_critic(policy: Policy, config: CriticConfig, batches: Sequence[ScoredRollouts], bar: Bar = silent) -> Critic:
    """Return a critic fitted to each batch in turn, as a run fits the one beside its policy.

    A critic with a backbone starts from the policy's weights.
    Where all reward comes at the end, the targets `return` and `tvm` make the same critic: rollouts that share a prefix
    share its value, so their mean return gives the same gradient as each one's own.

    Raises:
        InputError: There is no batch, or the critic is switched off.
    """
    critic = make_critic(TrainConfig(critic=config), policy.model, policy.tokenizer)
    if critic is None or not batches:
        raise InputError("a critic is fitted on at least one batch with critic.enabled true; pass both.")
    for k, written in enumerate(batches):
        seen = _as_critic_sees(policy, written)
        critic.update(seen, critic_target(config, replace(written.table, value=critic.value(seen)).inputs(None)))
        bar(k + 1, len(batches), f"fitting a critic to {config.target}")
    return critic


def with_values(policy: Policy, critic: Critic, written: ScoredRollouts) -> ScoredRollouts:
    """Return rollouts with a critic's values V(h_t) in their table."""
    return replace(written, table=replace(written.table, value=critic.value(_as_critic_sees(policy, written))))


def _as_critic_sees(policy: Policy, written: ScoredRollouts) -> CriticBatch:
    forward, rows = score(policy, written.rollouts, written.temperature), np.arange(len(written.rollouts.group))
    return CriticBatch(written.rollouts, forward, np.array_split(rows, max(1, len(rows) // 512)))
