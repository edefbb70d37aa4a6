"""Generators: a protocol, and its implementations by transformers and vLLM; plain sampling, temperature only.

vLLM is an optional extra: the engine runs in this process and is given the policy's weights anew. The
log-probabilities it reports are kept as `behavior_logprob`: its kernels are not the policy's own, so they differ a
little from the scored ones, and importance ratios show by how much.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.gradients.batch.soft import SoftTokens
from otb_analysis.phases import advance, count_to
from otb_analysis.rollouts.decoding import Draw, NonFiniteLogits, decode, unsupported_reason
from otb_analysis.rollouts.models import special_id

_log = logging.getLogger(__name__)
LARGEST_SEED = 2**31


@dataclass(frozen=True)
class Generation:
    """One sampled continuation."""

    token_ids: list[int]  # The sampled tokens, the end token included when it was sampled
    logprobs: list[float]  # log-probability of each under the distribution it was drawn from, in nats
    finished: bool  # True when the last token is an end token


class Generator(Protocol):
    """Continues texts: a transformers model here, a serving engine elsewhere."""

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> list[Generation]:
        """Continue each context by at most `max_new_tokens` tokens, up to and including the end token."""
        ...


@dataclass
class _Tempered(LogitsProcessor):
    """Divides by the temperature and keeps the log-probability of each token that was then drawn."""

    temperature: float
    pending: torch.Tensor | None = None
    drawn: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits/τ in float32; the token drawn last is the newest of `input_ids`."""
        self.record(input_ids[:, -1])
        scores = scores.float() / self.temperature
        finite = torch.isfinite(scores).all(dim=-1)
        if not bool(finite.all()):
            raise NonFiniteLogits(int((~finite).nonzero()[0]), len(self.drawn))
        self.pending = torch.log_softmax(scores, dim=-1)
        return scores

    def record(self, token: torch.Tensor) -> None:
        """Gather the log-probability of the tokens drawn from the pending distribution."""
        if self.pending is not None:
            self.drawn.append(self.pending.gather(1, token[:, None])[:, 0])
            self.pending = None
            advance()


class TransformersGenerator:
    """Samples without any filter, whatever the checkpoint's own settings say.

    `decode` samples where it supports the model, else `model.generate`, which is logged; a seed draws the same tokens
    from both. A generation ends with the tokenizer's end token or one that the checkpoint's generation settings name.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model = model
        self.pad = special_id(tokenizer, "pad")
        self.ends = end_tokens(model, tokenizer)
        reason = unsupported_reason(model)
        self.by_decode = reason is None
        if reason is not None:
            _log.info("%s is sampled by its own generate: %s.", type(model).__name__, reason)

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> list[Generation]:
        """Continue each context; see `Generator.generate`."""
        if not self.by_decode:
            return self.generate_plainly(contexts, max_new_tokens, temperature)
        return self.generate_soft(contexts, max_new_tokens, temperature, soft=0, noise=0.0)[0]

    def generate_soft(
        self, contexts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, soft: int, noise: float
    ) -> tuple[list[Generation], SoftTokens | None]:
        """Continue each context by `soft` soft tokens, then by discrete ones; `max_new_tokens` counts both.

        The vectors of the soft tokens are None where `soft` is 0.

        Raises:
            InputError: The model is one that `decode` cannot run, or has no plain table of embeddings.
        """
        check_contexts(self.model, [*contexts, [self.pad]], max_new_tokens)
        if not self.by_decode:
            raise InputError(
                f"soft tokens cannot be sampled from {type(self.model).__name__}, because "
                f"{unsupported_reason(self.model)}; set sample.soft to 0."
            )
        draw = Draw(max_new_tokens, temperature, self.ends, self.pad, soft, noise)
        tokens, logprobs, vectors = decode(self.model, contexts, draw)
        return self._all_cut(tokens, logprobs), vectors

    @torch.no_grad()
    def generate_plainly(
        self, contexts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float
    ) -> list[Generation]:
        """Continue each context by `model.generate`, left-padded: slower, and for every architecture."""
        check_contexts(self.model, [*contexts, [self.pad]], max_new_tokens)
        width = max(len(c) for c in contexts)
        ids = torch.tensor([[self.pad] * (width - len(c)) + list(c) for c in contexts], device=self.model.device)
        attention = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=self.model.device)
        tempered = _Tempered(temperature)
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens,
            eos_token_id=self.ends, pad_token_id=self.pad, use_cache=True,
        )  # fmt: skip
        count_to(max_new_tokens, "token", at_most=True)
        # `generate` fills every field left open from the checkpoint's own settings, so these are hidden meanwhile.
        original, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            output = self.model.generate(  # pyright: ignore[reportCallIssue]
                inputs=ids,
                attention_mask=attention,
                generation_config=settings,
                logits_processor=LogitsProcessorList([tempered]),
                synced_gpus=False,  # processes sample different numbers of turns and tokens; none waits for another
            )
        finally:
            self.model.generation_config = original
        assert isinstance(output, torch.Tensor)
        tempered.record(output[:, -1])
        return self._all_cut(output[:, width:], torch.stack(tempered.drawn, dim=1))

    def _all_cut(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> list[Generation]:
        generations = []
        for row, row_logprobs in zip(tokens.tolist(), logprobs.cpu().double().tolist(), strict=True):
            end = next((i for i, token in enumerate(row) if token in self.ends), None)
            length = len(row) if end is None else end + 1
            generations.append(Generation(row[:length], row_logprobs[:length], end is not None))
        return generations


class VllmGenerator:
    """A `Generator` on vLLM's offline engine: temperature only, every filter off.

    Before each call the policy's weights are sent again if any was changed in place since the last one (as optimizers
    and `load_state_dict` do), and the prefix cache of the old ones is dropped. Every context's seed comes from torch's
    generator, so a run's seeds hold here too. `memory` is the share of the GPU's memory that the engine may take.

    Raises:
        InputError: vLLM is not installed, or the model came from no directory.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, memory: float = 0.3):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read at import: weights stay in this process
        require("vllm", "sample.engine 'vllm'")
        vllm, path = import_module("vllm"), model.name_or_path
        if not path or not os.path.isdir(path):
            raise InputError(
                f"the policy came from {path!r}, no directory; load it by load_policy to sample with vLLM."
            )
        self.model, self.ends = model, end_tokens(model, tokenizer)
        self.params = vllm.SamplingParams
        self.engine = vllm.LLM(
            model=path,
            skip_tokenizer_init=True,
            dtype=str(model.dtype).removeprefix("torch."),
            gpu_memory_utilization=memory,
            logprobs_mode="processed_logprobs",  # of the distribution drawn from, temperature included
        )
        self.sent = self._version()

    @torch.no_grad()
    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> list[Generation]:
        """Continue each context; see `Generator.generate`."""
        check_contexts(self.model, contexts, max_new_tokens)
        if self._version() != self.sent:
            weights = [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]
            # vLLM's own model knows how to fuse weights in the checkpoint's names.
            self.engine.apply_model(lambda engine_model: engine_model.load_weights(weights))
            self.engine.reset_prefix_cache()
            self.sent = self._version()
        settings = [
            self.params(
                temperature=temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                repetition_penalty=1.0,
                seed=seed,
                max_tokens=max_new_tokens,
                stop_token_ids=self.ends,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for seed in torch.randint(LARGEST_SEED, (len(contexts),), device="cpu").tolist()
        ]
        prompts = [{"prompt_token_ids": list(context)} for context in contexts]
        generations = []
        for row, answered in enumerate(self.engine.generate(prompts, settings, use_tqdm=False)):
            output = answered.outputs[0]
            tokens = list(output.token_ids)
            logprobs = [float(entry[token].logprob) for token, entry in zip(tokens, output.logprobs, strict=True)]
            bad = [t for t, logprob in enumerate(logprobs) if not logprob <= 0.0 or logprob == float("-inf")]
            if bad:
                raise NonFiniteLogits(row, bad[0])
            generations.append(Generation(tokens, logprobs, bool(tokens) and tokens[-1] in self.ends))
        return generations

    def _version(self) -> int:
        """Return a number that grows whenever a weight is changed in place."""
        return sum(parameter._version for parameter in self.model.parameters())


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a text: the tokenizer's, and any that the checkpoint's generation settings name."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    named = ends if isinstance(ends, list) else [ends]
    return sorted({special_id(tokenizer, "eos"), *(i for i in named if isinstance(i, int))})


def check_contexts(model: PreTrainedModel, contexts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse contexts that the model has no room or no embeddings for.

    Raises:
        InputError: Naming the length or the token.
    """
    width, largest = max(map(len, contexts)), max(map(max, contexts))
    room = getattr(model.config, "max_position_embeddings", None)
    if isinstance(room, int) and width + max_new_tokens > room:
        raise InputError(
            f"a prompt of {width} tokens and sample.max_new_tokens={max_new_tokens} need more than the {room} "
            "positions of the model; shorten the prompts or lower sample.max_new_tokens."
        )
    entries = getattr(model.get_input_embeddings(), "num_embeddings", largest + 1)
    if largest >= entries:
        raise InputError(
            f"the tokenizer gives token id {largest} but the model has {entries} embeddings; "
            "save the model's own tokenizer beside it."
        )
