"""Small models of every supported family, built in code: the cases that every engine is checked on."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from otb_analysis.gradients import token_score_norms

VOCABULARY = 17
BLOCK = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def gpt2(tied):
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


FAMILIES: dict[str, Callable[[bool], torch.nn.Module]] = {
    "qwen2": lambda tied: Qwen2ForCausalLM(Qwen2Config(**BLOCK, tie_word_embeddings=tied)),
    "qwen3": lambda tied: Qwen3ForCausalLM(Qwen3Config(**BLOCK, head_dim=8, tie_word_embeddings=tied)),
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**BLOCK, tie_word_embeddings=tied)),
    "gpt2": gpt2,
}
CASES = [(family, tied) for family in FAMILIES for tied in (True, False)]


def build(family, tied=True, dtype=torch.float64, seed=0):
    """A model with every weight moved off its initial value, so that no norm, bias or gate is trivial."""
    torch.manual_seed(seed)
    model = FAMILIES[family](tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@dataclass(frozen=True)
class Sample:
    """A padded batch; `unpadded[n]` lists (ids, columns) of rollout n without padding."""

    input_ids: torch.Tensor
    mask: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def args(self):
        return self.input_ids, self.mask


def pad(sequences, masks, side, length=12, filler=0):
    """Batch ragged sequences; side "left" or "right", or "both" for padding that alternates between rollouts."""
    n = len(sequences)
    ids = torch.full((n, length), filler)
    mask, real = torch.zeros(n, length, dtype=torch.bool), torch.zeros(n, length, dtype=torch.long)
    for i, (tokens, sampled) in enumerate(zip(sequences, masks, strict=True)):
        left = side == "left" or (side == "both" and i % 2 == 0)
        start = length - len(tokens) if left else 0
        span = slice(start, start + len(tokens))
        ids[i, span], mask[i, span], real[i, span] = torch.tensor(tokens), torch.tensor(sampled, dtype=torch.bool), 1
    return Sample(ids, mask, real)


# Two plain completions, one of two turns (a gap), one without any sampled token, one of a single token.
SEQUENCES = [[3, 5, 7, 2, 9], [4, 4, 1, 8, 6, 2, 3], [5, 1, 2, 3, 4, 6, 7, 8], [2, 3], [1, 16]]
MASKS = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1], [0, 0], [0, 1]]


@pytest.fixture
def sample():
    return {side: pad(SEQUENCES, MASKS, side) for side in ("left", "right", "both")}


@pytest.fixture
def make_sample():
    return pad


@pytest.fixture
def long_batch():
    """Two ragged rollouts that fill several blocks, one of them of two turns."""

    def long(length):
        generator = torch.Generator().manual_seed(4)
        texts = [torch.randint(VOCABULARY, (length - k,), generator=generator).tolist() for k in (0, 5)]
        masks = [[0, 0, 0] + [1] * (length - 3), [0] * 9 + [1] * 7 + [0] * 6 + [1] * (length - 27)]
        return pad(texts, masks, "left", length=length + 2)

    return long


@pytest.fixture
def agree_with_reference():
    """Compare the norms, path norms and log-probabilities of an engine with the reference ones.

    Hugging Face casts RMSNorm to float32 inside a float64 model, forward and backward: a backward pass by hand, or of a
    sum of signals, rounds differently there (1.6e-7 to 3e-7); with LayerNorm only 1e-15 is left.
    """

    def compare(engine, model, batch, **options):
        options = {"attention_mask": batch.attention_mask, "path": True} | options
        got, expected = (token_score_norms(model, *batch.args, engine=e, **options) for e in (engine, "reference"))
        assert got.engine == engine and expected.engine == "reference"
        for name in ("norm_sq", "path_norm_sq", "logprob"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=2e-6, atol=1e-12)

    return compare


@pytest.fixture
def make_model():
    return build


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{'tied' if c[1] else 'untied'}")
def case(request):
    """One model per family, tied and untied, in float64."""
    return build(*request.param)


@pytest.fixture
def explicit_scores():
    """The slow twin: dense scores {(rollout, column): flat gradient} by `.backward()` on unpadded rollouts."""

    def scores(model, batch, named=None, temperature=1.0):
        named = named or dict(model.named_parameters())
        result = {}
        for n in range(len(batch.input_ids)):
            kept = batch.attention_mask[n].nonzero()[:, 0]
            ids = batch.input_ids[n, kept]
            for column in batch.mask[n].nonzero()[:, 0].tolist():
                t = int((kept < column).sum())
                model.zero_grad()
                logits = model(input_ids=ids[None, :t], use_cache=False).logits[0, -1] / temperature
                torch.distributions.Categorical(logits=logits).log_prob(ids[t]).backward()
                flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
                result[n, column] = torch.cat([g.flatten() for g in flat]).double().numpy()
        model.zero_grad()
        return result

    return scores


@pytest.fixture
def dense():
    """Scatter {(rollout, column): value} into [N, L]."""

    def scatter(shape, values):
        out = np.zeros(shape)
        for key, value in values.items():
            out[key] = value
        return out

    return scatter
