"""The policy as it trains: adapters, precision, micro-batches, the reference policy and stale weights."""

import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from otb_analysis.config import LoraConfig, OptimizeConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.measurement.forward import (
    CompletionLogprobs,
    ForwardOutputs,
    ForwardPass,
    completion_logprobs,
    forward_pass,
    in_passes,
    micro_batches,
    supports_prefix_cache,
)
from otb_analysis.phases import advance, count_to
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import gathered
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.training.runtime import shard
from otb_analysis.types import Float, Int

if TYPE_CHECKING:
    from peft import PeftModel


class Policy:
    """A causal language model and how it is run; nothing here knows about rewards.

    Attributes:
        model: The model, in evaluation mode between passes: dropout would make scored and sampled policies differ.
        adapter: The PEFT wrapper when adapters are trained, else None; its layers are inside `model`.
        parameters: The trained parameters.
        past: The weights before the last batches, oldest first, to sample from an older policy.
    """

    def __init__(self, model: PreTrainedModel, config: TrainConfig, processes: Processes = SINGLE_PROCESS):
        self.processes = processes
        self.temperature = config.sample.temperature
        self.settings: OptimizeConfig = config.optimize
        self.adapter = _adapted(model, config.lora, config.seed)
        self.model: PreTrainedModel = model
        self._checkpointing = config.optimize.gradient_checkpointing
        if self._checkpointing:
            for name, module in model.named_modules():
                rate = getattr(module, "p" if isinstance(module, torch.nn.Dropout) else "attention_dropout", 0.0)
                if isinstance(rate, float) and rate > 0:
                    raise InputError(
                        f"optimize.gradient_checkpointing needs training mode but {name} has dropout {rate:g}; "
                        "set the dropout rates in the model's config.json to 0, or leave checkpointing off."
                    )
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        # With sharded weights a micro-batch is one pass.
        self._shares = None if processes.sharded else not self._checkpointing and supports_prefix_cache(model)
        # With adapters the base weights stay as they are, so they are the reference.
        copied = config.objective.kl_coefficient != 0 and self.adapter is None
        self._reference = deepcopy(model).requires_grad_(False) if copied else None
        for whole in (model, self._reference) if processes.sharded else ():
            if whole is not None:
                shard(whole, processes)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.past: deque[list[Tensor]] = deque(maxlen=config.objective.staleness)

    def arithmetic(self) -> AbstractContextManager[object]:
        """Return the context in which the policy runs: autocast to bfloat16 where the run asks for it."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16")

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Use the weights that rollouts are sampled from inside the block; every process must enter it."""
        stale = list(zip(self.parameters, self.past[0], strict=True)) if self.past else []
        present = [parameter.data for parameter, _ in stale]
        with self.whole_weights(), self.arithmetic():
            for parameter, old in stale:
                parameter.data = old
            try:
                yield
            finally:
                for (parameter, _), data in zip(stale, present, strict=True):
                    parameter.data = data

    def whole_weights(self) -> AbstractContextManager[object]:
        """Return the context in which every process holds all weights; every process must enter it."""
        return gathered(self.model) if self.processes.sharded else nullcontext()

    def forward(self, rollouts: Rollouts, keep_graph: bool, wanted: ForwardOutputs | None = None) -> ForwardPass:
        """Score a batch once with every statistic of the level `forward`, and what is `wanted` (hidden states).

        `keep_graph` keeps the graph of the log-probabilities where memory holds the whole batch. Then the first update
        needs no second pass.
        """
        wanted = wanted or ForwardOutputs()
        parts, more = self.shared_parts(rollouts)
        keeps = keep_graph and len(parts) + more == 1
        passes, outputs = [], []
        count_to(len(rollouts.group), "rollout")
        with torch.set_grad_enabled(keeps), self.arithmetic(), self._recomputing():
            for rows, output in in_passes(
                *(self.model, rollouts, parts, self._shares),
                lambda part, prompts: forward_pass(self.model, part, self.temperature, prompts, wanted),
            ):
                passes.append(rows)
                outputs.append(output)
                advance(len(rows))
        self.idle(rollouts, more, self.model)
        with wanted.timed():
            return ForwardPass.concatenate(outputs, rollouts, passes)

    def score(
        self, rollouts: Rollouts, rows: Int, entropy: bool = False, reference: PreTrainedModel | None = None
    ) -> CompletionLogprobs:
        """Score some rollouts of a batch that fit into memory, with the graph; by the policy or a `reference`."""
        model = reference or self.model
        with self._recomputing(), self.arithmetic():
            passes = list(
                in_passes(
                    *(model, rollouts, [rows], self._shares),
                    lambda part, prompts: completion_logprobs(model, part, self.temperature, entropy, prompts),
                )
            )
        back = np.argsort(rows)  # rows may come in any order, and the answer has theirs
        order = [back[np.searchsorted(rows, part, sorter=back)] for part, _ in passes]
        return CompletionLogprobs.concatenate([one for _, one in passes], rollouts.take(rows), order)

    def reference_logprob(self, rollouts: Rollouts) -> Float | None:
        """Return log π_ref(y_t) in nats [N, T], π_ref the policy at the start; None when it was not kept."""
        if self._reference is None and self.adapter is None:
            return None
        parts, more = self.shared_parts(rollouts)
        off = self.adapter.disable_adapter() if self.adapter is not None else nullcontext()
        model = self._reference or self.model
        with torch.no_grad(), off:
            scored = [self.score(rollouts, rows, reference=model) for rows in parts]
        self.idle(rollouts, more, model)
        return CompletionLogprobs.concatenate(scored, rollouts, parts).logprob.cpu().double().numpy()

    def shared_parts(self, rollouts: Rollouts, rows: Int | None = None) -> tuple[list[Int], int]:
        """Return the micro-batches and how many more passes to take part in; with sharded weights all make the same."""
        parts = micro_batches(self.model, rollouts, self.settings.micro_batch, rows)
        return parts, max(self.processes.gather(len(parts))) - len(parts) if self.processes.sharded else 0

    @torch.no_grad()
    def idle(self, rollouts: Rollouts, passes: int, model: PreTrainedModel) -> None:
        """Take part in passes that other processes need."""
        for _ in range(passes):
            with self.arithmetic():
                completion_logprobs(model, rollouts.take(np.arange(1)), self.temperature)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Recompute activations of a graph inside, where the run asks for it; transformers does so in training mode."""
        if not (self._checkpointing and torch.is_grad_enabled()):
            yield
            return
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()


def _adapted(model: PreTrainedModel, config: LoraConfig, seed: int) -> "PeftModel | None":
    """Put adapters into the model, in place, and freeze the rest."""
    if config.rank == 0:
        return None
    from peft import LoraConfig as PeftLoraConfig  # from the extra `train`; `check` has asked for it
    from peft import PeftModel, get_peft_model

    targets = list(config.targets) or "all-linear"
    settings = PeftLoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    try:
        with quiet_peft(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the CPU's alone: layers are made there
            adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise InputError(
            f"lora.targets is {config.targets}, which {type(model).__name__} does not have "
            f"({str(error).split('. ')[0]}); name some of its linear layers."
        ) from error
    adapted.eval()
    assert isinstance(adapted, PeftModel)
    return adapted


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide the warning that PEFT causes: it reads an attribute whose name transformers deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*is_gradient_checkpointing", FutureWarning)
        yield
