"""The policy as it trains: adapters, arithmetic, memory, its frozen start and its older selves."""

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from otb_analysis.config import LoraConfig, ObjectiveConfig, OptimizeConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.measurement.forward import (
    CompletionLogprobs,
    ForwardOutputs,
    ForwardPass,
    NonFiniteScore,
    completion_logprobs,
    forward_pass,
    stacked,
)
from otb_analysis.phases import advance, count_to
from otb_analysis.rollouts.models import output_layer
from otb_analysis.rollouts.prefix_cache import PrefixCache, read_prompts, supports_prefix_cache
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.training.runtime.processes import SINGLE_PROCESS, Processes
from otb_analysis.training.runtime.sharding import gathered, shard
from otb_analysis.types import Float, Int

if TYPE_CHECKING:
    from peft import PeftModel

POSITIONS, LOGIT_BYTES = 1 << 14, 1 << 30
"""What may be held at once by default: padded positions, and bytes of float32 logits."""
SHORT = 1 << 11
"""Padded positions of one pass on a CPU: activations of more leave its cache before they are read again."""


class Policy:
    """A causal language model and how it is run; nothing here knows about rewards.

    Attributes:
        model: The model, in evaluation mode between passes: dropout would make scored and sampled policies differ.
        adapter: The PEFT wrapper when adapters are trained, else None; its layers live inside `model`.
        parameters: What is trained.
        past: Older weights to sample from.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, processes: Processes = SINGLE_PROCESS):
        self.processes = processes
        self.temperature = config.sample.temperature
        self.settings: OptimizeConfig = config.optimize
        self.adapter = _adapted(model, config.lora, config.seed)
        self.model: PreTrainedModel = model
        self._checkpointing = config.optimize.gradient_checkpointing
        if self._checkpointing:
            _refuse_dropout(model)
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        self._shares = not (processes.sharded or self._checkpointing) and supports_prefix_cache(model)
        self._reference = _frozen_copy(model, self.adapter, config.objective)
        for held in (model, self._reference) if processes.sharded else ():
            if held is not None:
                shard(held, processes)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.past = StaleWeights(self.parameters, config.objective.staleness)

    def arithmetic(self) -> AbstractContextManager[object]:
        """Return the context in which the policy runs: bfloat16 products where the run asks for them."""
        if self.settings.precision == "float32":
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Hold the weights that rollouts come from inside the block; every process enters it at the same time."""
        with self.whole(), self.past.sampling(), self.arithmetic():
            yield

    def whole(self) -> AbstractContextManager[object]:
        """Return the context in which every process holds all weights; each enters it at the same time."""
        return gathered(self.model) if self.processes.sharded else nullcontext()

    def forward(self, rollouts: Rollouts, keep_graph: bool, wanted: ForwardOutputs | None = None) -> ForwardPass:
        """Score a batch once with every statistic of the level `forward`.

        Args:
            rollouts: N rollouts.
            keep_graph: Keep the graph of the log-probabilities where memory holds the whole batch, so that a first
                update needs no second pass.
            wanted: What else the pass gives; hidden states by default.
        """
        wanted = wanted or ForwardOutputs()
        parts = self.micro_batches(rollouts)
        passes_made = self.passes(len(parts))
        keeps = keep_graph and passes_made == 1
        passes, found = [], []
        count_to(len(rollouts.group), "rollout")
        with self.arithmetic(), self._recomputing() if keeps else torch.no_grad():
            for rows in parts:
                part = rollouts.take(rows)
                for own, prompts in self._cut(self.model, part):
                    with _numbered(rows[own]):
                        found.append(forward_pass(self.model, part.take(own), self.temperature, prompts, wanted))
                    passes.append(rows[own])
                    advance(len(own))
        self.idle(rollouts, passes_made - len(parts), self.model)
        with wanted.timed():
            return ForwardPass.concatenate(found, rollouts, passes)

    def score(self, rollouts: Rollouts, rows: Int, entropy: bool = False) -> CompletionLogprobs:
        """Score some rollouts that fit into memory, with the graph.

        Args:
            rollouts: The batch.
            rows: Which of them [n].
            entropy: Also the entropies.
        """
        with self._recomputing():
            return self._scored(self.model, rollouts, rows, entropy)

    def reference_logprob(self, rollouts: Rollouts) -> Float | None:
        """Return log π_ref(y_t) in nats [N, T] under the policy as it was at the start; None when none was kept."""
        if self._reference is None and self.adapter is None:
            return None
        parts = self.micro_batches(rollouts)
        more = self.passes(len(parts)) - len(parts)
        off = self.adapter.disable_adapter() if self.adapter is not None else nullcontext()
        model = self._reference or self.model
        with torch.no_grad(), off:
            found = [self._scored(model, rollouts, rows) for rows in parts]
        self.idle(rollouts, more, model)
        return stacked([part.logprob for part in found], rollouts.width).double().cpu().numpy()

    def passes(self, own: int) -> int:
        """Return how many passes to make where this process needs `own`: all must make as many on sharded weights."""
        return max(self.processes.gather(own)) if self.processes.sharded else own

    @torch.no_grad()
    def idle(self, rollouts: Rollouts, passes: int, model: PreTrainedModel) -> None:
        """Take part in passes that only other processes need."""
        for _ in range(passes):
            with self.arithmetic():
                completion_logprobs(model, rollouts.take(np.arange(1)), self.temperature)

    def micro_batches(self, rollouts: Rollouts, rows: Int | None = None) -> list[Int]:
        """Cut a batch, or some rows of it, into parts that fit into memory."""
        index = np.arange(len(rollouts.group)) if rows is None else rows
        vocabulary = next(output_layer(self.model).parameters()).shape[0]
        fits = min(POSITIONS, LOGIT_BYTES // (4 * vocabulary)) // max(rollouts.input_ids.shape[1], 1)
        size = self.settings.micro_batch or max(1, fits)
        return [index[start : start + size] for start in range(0, len(index), size)]

    def _cut(self, model: PreTrainedModel, rollouts: Rollouts) -> Iterator[tuple[Int, PrefixCache | None]]:
        """Cut what fits into memory into passes, prompts read before; over sharded weights every process makes one."""
        if self.processes.sharded:
            yield np.arange(len(rollouts.group)), None
            return
        prompts = read_prompts(model, rollouts) if self._shares else None
        length = rollouts.attention_mask.sum(axis=1) if prompts is None else rollouts.completion_length
        for rows in short_passes(length, model.device):
            goes_on = prompts is not None and rollouts.completion_length[rows].max() > 1
            yield rows, prompts.take(rows) if prompts is not None and goes_on else None  # else nothing follows a prompt

    def _scored(
        self, model: PreTrainedModel, rollouts: Rollouts, rows: Int, entropy: bool = False
    ) -> CompletionLogprobs:
        """Score some rollouts that fit into memory under a model."""
        part = rollouts.take(rows)
        passes, found = [], []
        with self.arithmetic():
            for own, prompts in self._cut(model, part):
                with _numbered(rows[own]):
                    found.append(completion_logprobs(model, part.take(own), self.temperature, entropy, prompts))
                passes.append(own)
        return CompletionLogprobs.concatenate(found, part, passes)

    def save(self, path: Path, parameters: dict[str, Tensor] | None = None) -> None:
        """Write the model as plain `from_pretrained` loads it: adapters are merged, and kept beside it too.

        Args:
            path: Directory.
            parameters: Its whole parameters, where it holds parts of them.
        """
        if self.adapter is None:
            self.model.save_pretrained(path, state_dict=parameters)
            return
        deepcopy(self.adapter).merge_and_unload().save_pretrained(path)  # pyright: ignore[reportCallIssue]
        self.adapter.save_pretrained(str(path / "adapter"))

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Recompute activations inside, where the run asks for it: the library does so in training mode only."""
        if not self._checkpointing:
            yield
            return
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()


def short_passes(length: Int, device: torch.device) -> list[Int]:
    """Cut a batch into passes of rollouts of like length: little padding, and activations that stay in a CPU's cache.

    As few as `SHORT` allows, and the largest as small as that leaves it: a pass costs something however small it is. A
    GPU takes the batch as it is.

    Args:
        length: Positions of each rollout that are run [N].
        device: Where they are scored.

    Returns:
        Indices of the rollouts of each pass, shortest first; together each of 0 … N − 1 once.
    """
    if device.type != "cpu":
        return [np.arange(len(length))]
    order = np.argsort(length, kind="stable")
    low, high = 0, SHORT
    fewest = len(_passes(length, order, high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_passes(length, order, middle)) == fewest else (middle, high)
    return _passes(length, order, high)


def _passes(length: Int, order: Int, most: int) -> list[Int]:
    """Fill one pass after the other, in a given order, with `most` padded positions, or a single rollout of more."""
    cuts, first = [], 0
    for i, positions in enumerate(length[order].tolist()):
        if i > first and (i + 1 - first) * positions > most:
            cuts.append(i)
            first = i
    return np.split(order, cuts)


@contextmanager
def _numbered(rows: Int) -> Iterator[None]:
    """Name a rollout by its number in the batch where it was scored as part of one."""
    try:
        yield
    except NonFiniteScore as error:
        raise NonFiniteScore(int(rows[error.row]), error.token) from error


class StaleWeights:
    """The weights of the last batches, so that rollouts can come from an older policy."""

    def __init__(self, parameters: list[torch.nn.Parameter], staleness: int):
        self.parameters = parameters
        self.kept: deque[list[Tensor]] = deque(maxlen=staleness)

    def remember(self) -> None:
        """Keep the weights as they are now; called before a batch's first update."""
        if self.kept.maxlen:
            self.kept.append([p.detach().clone() for p in self.parameters])

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Put the oldest kept weights in place inside the block; the present ones come back untouched."""
        if not self.kept:
            yield
            return
        present = [p.data for p in self.parameters]
        for parameter, old in zip(self.parameters, self.kept[0], strict=True):
            parameter.data = old
        try:
            yield
        finally:
            for parameter, data in zip(self.parameters, present, strict=True):
                parameter.data = data


def _adapted(model: PreTrainedModel, config: LoraConfig, seed: int) -> "PeftModel | None":
    """Put adapters into the model, in place, and freeze the rest."""
    if config.rank == 0:
        return None
    from peft import LoraConfig as PeftLoraConfig  # of the extra `train`; `check` asked for it
    from peft import PeftModel, get_peft_model

    targets = list(config.targets) or "all-linear"
    settings = PeftLoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # PEFT still asks for an attribute under the name that transformers is giving up.
            warnings.filterwarnings("ignore", r".*is_gradient_checkpointing", FutureWarning)
            adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise InputError(
            f"lora.targets is {config.targets}, which {type(model).__name__} does not have "
            f"({str(error).split('. ')[0]}); name some of its linear layers."
        ) from error
    adapted.eval()
    assert isinstance(adapted, PeftModel)
    return adapted


def _frozen_copy(
    model: PreTrainedModel, adapter: "PeftModel | None", config: ObjectiveConfig
) -> PreTrainedModel | None:
    """Return a copy of the starting policy where a divergence from it is wanted and adapters do not hold it already."""
    if config.kl_coefficient == 0 or adapter is not None:
        return None
    return deepcopy(model).requires_grad_(False)


def _refuse_dropout(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        rate = (
            getattr(module, "p", 0.0)
            if isinstance(module, torch.nn.Dropout)
            else getattr(module, "attention_dropout", 0.0)
        )
        if isinstance(rate, float) and rate > 0:
            raise InputError(
                f"optimize.gradient_checkpointing needs training mode but {name} has dropout {rate:g}; "
                "set the dropout rates in the model's config.json to 0, or leave checkpointing off."
            )
