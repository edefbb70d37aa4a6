"""Sampling by vLLM, an optional extra: the engine runs in this process and is given the policy's weights anew.

The log-probabilities it reports are kept as `behavior_logprob`: its kernels are not the policy's own, so they differ a
little from the scored ones, and importance ratios show by how much.
"""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.rollouts.generation import Generation, NonFiniteLogits, check_contexts, end_tokens

LARGEST_SEED = 2**31


class VllmGenerator:
    """A `Generator` on vLLM's offline engine: temperature only, every filter off.

    Before each call the policy's weights are sent again if any was changed in place since the last one (as optimizers
    and `load_state_dict` do), and the prefix cache of the old ones is dropped. Every context's seed comes from torch's
    generator, so a run's seeds hold here too. `memory` is the share of the GPU's memory that the engine may take.

    Raises:
        InputError: vLLM is not installed, or the model came from no directory.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, memory: float = 0.3):
        vllm, path = _vllm(), model.name_or_path
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
        self._send_weights()
        seeds = torch.randint(LARGEST_SEED, (len(contexts),), device="cpu").tolist()
        outputs = self.engine.generate(
            [{"prompt_token_ids": list(context)} for context in contexts],
            [self._settings(max_new_tokens, temperature, seed) for seed in seeds],
            use_tqdm=False,
        )
        return [self._generation(row, output.outputs[0]) for row, output in enumerate(outputs)]

    def _settings(self, max_new_tokens: int, temperature: float, seed: int) -> Any:
        return self.params(
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

    def _generation(self, row: int, output: Any) -> Generation:
        tokens = list(output.token_ids)
        logprobs = [float(entry[token].logprob) for token, entry in zip(tokens, output.logprobs, strict=True)]
        bad = [t for t, logprob in enumerate(logprobs) if not logprob <= 0.0 or logprob == float("-inf")]
        if bad:
            raise NonFiniteLogits(row, bad[0])
        return Generation(tokens, logprobs, bool(tokens) and tokens[-1] in self.ends)

    def _version(self) -> int:
        """Return a number that grows whenever a weight is changed in place."""
        return sum(parameter._version for parameter in self.model.parameters())

    def _send_weights(self) -> None:
        if self._version() == self.sent:
            return
        self.engine.apply_model(partial(_load, weights=[(n, p.detach()) for n, p in self.model.named_parameters()]))
        self.engine.reset_prefix_cache()
        self.sent = self._version()


def _load(engine_model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Hand weights in the checkpoint's names to vLLM's own model, which knows how to fuse them."""
    engine_model.load_weights(weights)  # pyright: ignore[reportCallIssue]


def _vllm() -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read at import: weights stay in this process
    require("vllm", "sample.engine 'vllm'")
    return import_module("vllm")
