"""Sampling by vLLM, against a stand-in with vLLM's own call signatures that samples by transformers."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from otb_analysis.config import SampleConfig
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.rollouts.generation import TransformersGenerator, VllmGenerator
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.sampling import sample
from otb_analysis.store import RunStore
from otb_analysis.tasks import ChainSum, Prompt


@dataclass
class SamplingParams:
    """The fields of vllm.SamplingParams that matter here, with its defaults."""

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True


class LLM:
    """vllm.LLM(model, *, …, **engine arguments); a copy of the model answers, drawn with each request's own seed."""

    made: Any = None

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        gpu_memory_utilization: float = 0.9,
        logprobs_mode: str = "raw_logprobs",
    ):
        assert skip_tokenizer_init and dtype == "float32" and logprobs_mode == "processed_logprobs"
        self.memory = gpu_memory_utilization
        self.model, tokenizer = load_policy(model)
        self.generator = TransformersGenerator(self.model, tokenizer)
        self.loads, self.resets, self.params = 0, 0, []
        LLM.made = self

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None, priority=None):
        assert use_tqdm is False
        self.params = list(sampling_params)
        return [self.one(p["prompt_token_ids"], s) for p, s in zip(prompts, self.params, strict=True)]

    def one(self, prompt, params):
        assert (params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1.0, 0, 0.0, 1.0)
        assert params.detokenize is False and params.logprobs == 0
        assert params.stop_token_ids == self.generator.ends
        with torch.random.fork_rng():
            torch.manual_seed(params.seed)
            (found,) = self.generator.generate([prompt], params.max_tokens, params.temperature)
        logprobs = [
            {token: SimpleNamespace(logprob=logprob, rank=1, decoded_token=None)}
            for token, logprob in zip(found.token_ids, found.logprobs, strict=True)
        ]
        reason = "stop" if found.finished else "length"
        output = SimpleNamespace(index=0, token_ids=tuple(found.token_ids), logprobs=logprobs, finish_reason=reason)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output], finished=True)

    def apply_model(self, func):
        def load_weights(weights):
            self.loads += 1
            own = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(tensor)

        return [func(SimpleNamespace(load_weights=load_weights))]

    def reset_prefix_cache(self):
        self.resets += 1
        return True


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, importable as vllm."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams))
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)


@pytest.fixture
def policy(checkpoint):
    return load_policy(checkpoint)


PROMPTS = [Prompt(text, text, "0") for text in ("1+2=", "12+7+30=")]


def drawn(generator, tokenizer, task=None, **settings):
    torch.manual_seed(0)
    config = SampleConfig(**{"group_size": 3, "max_new_tokens": 8} | settings)
    return sample(generator, tokenizer, task, PROMPTS, config)


@pytest.fixture
def task(tiny_config):
    return ChainSum(tiny_config.chain_sum)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_it_reports_are_the_rollouts_behavior_logprob(
    vllm, policy, task, plain_logprobs, temperature
):
    model, tokenizer = policy
    rollouts = drawn(VllmGenerator(model, tokenizer), tokenizer, task, temperature=temperature)
    expected = plain_logprobs(model, rollouts, temperature)
    assert np.abs(rollouts.behavior_logprob - expected)[rollouts.mask].max() < 1e-5
    assert len({p.seed for p in LLM.made.params}) == 6  # a seed for each context, all from torch's generator
    assert {p.max_tokens for p in LLM.made.params} == {8}


def test_same_torch_seed_draws_the_same_rollouts_and_another_seed_others(vllm, policy, task):
    generator = VllmGenerator(*policy)
    first, second = (drawn(generator, policy[1], task) for _ in range(2))
    assert np.array_equal(first.input_ids, second.input_ids)
    torch.manual_seed(1)
    config = SampleConfig(group_size=3, max_new_tokens=8)
    other = sample(generator, policy[1], task, PROMPTS, config)
    assert not np.array_equal(first.input_ids, other.input_ids)


def test_weights_are_sent_when_they_changed_and_only_then(vllm, policy, task, plain_logprobs):
    model, tokenizer = policy
    generator = VllmGenerator(model, tokenizer)
    drawn(generator, tokenizer, task)
    assert (LLM.made.loads, LLM.made.resets) == (0, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    for _ in range(2):
        rollouts = drawn(generator, tokenizer, task)
        assert (LLM.made.loads, LLM.made.resets) == (1, 1)
        gap = np.abs(rollouts.behavior_logprob - plain_logprobs(model, rollouts))[rollouts.mask]
        assert gap.max() < 1e-5
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
    drawn(generator, tokenizer, task)
    assert LLM.made.loads == 2


def test_a_run_trains_on_what_it_sampled(vllm, trained, tiny_config):
    path = trained("vllm", sample=SampleConfig(prompts=4, group_size=3, max_new_tokens=6, engine="vllm"))
    tokens = RunStore(path).tokens_df(where="mask")
    assert tokens["step"].nunique() == 3
    # A stale policy would differ from the one that is scored: each update moves log-probabilities by more than 1e-3.
    assert np.abs(tokens["behavior_logprob"] - tokens["logprob"]).max() < 1e-4
    assert LLM.made.loads == 2  # before the steps 1 and 2; the evaluation and the rollouts of a step share them
    assert LLM.made.memory == 0.3


def test_log_probability_that_is_not_finite_names_rollout_and_token(vllm, policy, task):
    model, tokenizer = policy
    generator = VllmGenerator(model, tokenizer)
    honest = LLM.made.one

    def poisoned(prompt, params):
        found = honest(prompt, params)
        found.outputs[0].logprobs[0] = dict.fromkeys(found.outputs[0].logprobs[0], SimpleNamespace(logprob=np.nan))
        return found

    LLM.made.one = poisoned
    with pytest.raises(NonFiniteError, match=r"rollout 0 \(group 0, prompt '1\+2=', turn 0\)"):
        drawn(generator, tokenizer, task)


def test_context_beyond_the_models_room_is_refused(vllm, policy):
    generator = VllmGenerator(*policy)
    with pytest.raises(InputError, match="positions of the model"):
        generator.generate([[3, 4]], policy[0].config.max_position_embeddings, 1.0)


def test_policy_that_came_from_no_directory_is_refused(vllm, tiny_model, tokenizer):
    with pytest.raises(InputError, match="no directory; load it by load_policy"):
        VllmGenerator(tiny_model, tokenizer)


def test_missing_vllm_is_one_sentence_with_the_command_that_installs_it(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"^vllm is needed .*'\.\[vllm\]'"):
        VllmGenerator(*policy)
