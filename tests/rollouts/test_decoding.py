"""The loop over tokens draws what `generate` draws, from any cache-keeping architecture, and does less for it."""

import logging
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from otb_analysis.measurement.forward import supports_prefix_cache
from otb_analysis.rollouts.decoding import (
    HEAD,
    LOOK,
    ROOM,
    Draw,
    NonFiniteLogits,
    decode,
    keeps_beginnings,
    unsupported_reason,
)
from otb_analysis.rollouts.generation import TransformersGenerator
from tests.second_device import There, second_device

RAGGED = [[3, 4, 5], [7], [3, 4, 5], [9, 8, 7, 6, 5, 4, 3], [7], [12, 13]] * 3


def gpt2(tokenizer):
    sizes = {"vocab_size": len(tokenizer), "n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=1)).eval()


def llama(tokenizer, kind=LlamaForCausalLM, config=LlamaConfig, **settings):
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1} | {"max_position_embeddings": 128} | settings
    return kind(config(**sizes, **heads, bos_token_id=None, eos_token_id=1)).eval()


def sliding(tokenizer):
    return llama(tokenizer, MistralForCausalLM, MistralConfig, sliding_window=4)


def without_positions(tokenizer):
    return BloomForCausalLM(BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=2, n_head=2)).eval()


class Particular(LlamaForCausalLM):
    """Prepares its inputs in its own way."""

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs)


def particular(tokenizer):
    return llama(tokenizer, Particular)


def both(generator, contexts, max_new_tokens, temperature=1.0):
    """What the loop and `generate` draw from one seed, and the random states that they leave behind."""
    found = []
    for run in (generator.generate, generator.generate_plainly):
        torch.manual_seed(5)
        found.append((run(contexts, max_new_tokens, temperature), torch.get_rng_state()))
    return found


def same(found):
    (ours, after), (theirs, after_theirs) = found
    assert [g.token_ids for g in ours] == [g.token_ids for g in theirs]
    assert [g.finished for g in ours] == [g.finished for g in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert torch.equal(after, after_theirs)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_seed_draws_the_tokens_that_generate_draws(tiny_model, tokenizer, temperature):
    same(both(TransformersGenerator(tiny_model, tokenizer), RAGGED, 20, temperature))


@pytest.mark.parametrize("build", [gpt2, llama])
def test_other_architectures_are_followed_too(build, tokenizer):
    model = build(tokenizer)
    assert unsupported_reason(model) is None
    same(both(TransformersGenerator(model, tokenizer), RAGGED, 20))


def test_a_cache_that_is_full_grows(tiny_model, tokenizer):
    generator = TransformersGenerator(tiny_model, tokenizer)
    generator.ends = [len(tokenizer)]  # nothing ends
    found = both(generator, [[3, 4], [5]], 3 * ROOM)
    assert len(found[0][0][1].token_ids) == 3 * ROOM
    same(found)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (sliding, "MistralForCausalLM is sampled by its own generate: its cache is of DynamicSlidingWindowLayer"),
        (without_positions, "BloomForCausalLM is sampled by its own generate: its forward pass takes no position_ids"),
        (particular, "Particular is sampled by its own generate: it has a prepare_inputs_for_generation of its own"),
    ],
)
def test_models_that_the_loop_does_not_follow_are_named_and_left_to_generate(build, reason, tokenizer, caplog):
    with caplog.at_level(logging.INFO, "otb_analysis.rollouts.generation"):
        generator = TransformersGenerator(build(tokenizer), tokenizer)
    assert [record.getMessage()[: len(reason)] for record in caplog.records] == [reason]
    same(both(generator, RAGGED, 12))


def test_equal_contexts_are_read_once_and_rows_that_ended_leave(tiny_model, tokenizer):
    rows = []
    hook = tiny_model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: rows.append(len(inputs[0]))
    )
    generator = TransformersGenerator(tiny_model, tokenizer)
    torch.manual_seed(5)
    drawn = generator.generate(RAGGED, 40, 1.0)
    hook.remove()
    assert rows[0] == 4  # of 18 contexts four differ
    assert rows[1:] == sorted(rows[1:], reverse=True)
    lengths = [len(g.token_ids) for g in drawn]
    running = [sum(length > t for length in lengths) for t in range(1, max(lengths))]
    assert all(left <= held <= max(left / 0.8, left + 1) for left, held in zip(running, rows[1:], strict=True))


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_beginning_that_all_share_is_read_once(build, attention, tokenizer):
    model, head = build(tokenizer), [3 + k % 12 for k in range(HEAD // 3 + 2)]
    model.set_attn_implementation(attention)
    generator, read = TransformersGenerator(model, tokenizer), []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].shape))
    same(both(generator, [head + rest for rest in RAGGED], 12))
    assert read[:2] == [(1, len(head)), (4, 7)]
    read.clear()
    same(both(generator, [head[2:] + rest for rest in RAGGED], 12))  # spares less than a pass is worth
    assert read[0] == (4, len(head) + 5)
    read.clear()
    same(both(generator, [head, [*head, 5], [*head, 6, 7], [*head, 8, 9]], 12))  # one is the beginning of the others
    assert read[:2] == [(1, len(head) - 1), (4, 3)]
    hook.remove()


def gpt_neo(tokenizer):
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 16}
    kinds = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **kinds, bos_token_id=None, eos_token_id=1)).eval()


def turned_by_length(tokenizer):
    turn = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return llama(tokenizer, max_position_embeddings=64, rope_parameters=turn)


def test_a_beginning_that_what_follows_changes_is_read_with_it(tokenizer):
    assert not keeps_beginnings(turned_by_length(tokenizer)) and keeps_beginnings(llama(tokenizer))
    model, head = gpt_neo(tokenizer), [3 + k % 12 for k in range(HEAD // 3 + 2)]
    for name, weight in model.named_parameters():  # far from uniform, so that what is seen shows
        weight.data *= 20 if "norm" not in name and "ln" not in name else 1
    generator = TransformersGenerator(model, tokenizer)
    generator.ends = [len(tokenizer)]
    contexts = [head + rest for rest in RAGGED]
    same(both(generator, contexts, 12))
    assert not keeps_beginnings(model) and not supports_prefix_cache(model)
    for context, found in zip(contexts, generator.generate(contexts, 12, 1.0), strict=True):
        whole = model(torch.tensor([context + found.token_ids[:1]])).logits[0, len(context) - 1].log_softmax(-1)
        assert whole[found.token_ids[0]].item() == pytest.approx(found.logprobs[0], abs=1e-4)


def test_one_row_alone_draws_what_generate_draws(tiny_model, tokenizer):
    same(both(TransformersGenerator(tiny_model, tokenizer), [[3, 4, 5]], 20))


@pytest.mark.parametrize("build", [gpt2, llama])
def test_at_a_vanishing_temperature_every_row_is_greedy_search(build, tokenizer):
    model = build(tokenizer)
    generator = TransformersGenerator(model, tokenizer)
    ours = generator.generate(RAGGED, 16, 1e-7)
    settings = GenerationConfig(do_sample=False, max_new_tokens=16, eos_token_id=1, pad_token_id=generator.pad)
    for context, found in zip(RAGGED, ours, strict=True):  # each alone: nothing is padded there
        plain = model.generate(torch.tensor([context]), generation_config=settings)[0, len(context) :]
        assert found.token_ids == plain.tolist()


def test_a_row_that_draws_any_of_several_end_tokens_stops_there_and_others_go_on(tiny_model, tokenizer):
    generator = TransformersGenerator(tiny_model, tokenizer)
    generator.ends = [1, 5, 6]
    found = both(generator, RAGGED * 4, 24)
    lasts = {g.token_ids[-1] for g in found[0][0] if g.finished}
    assert lasts == {1, 5, 6}
    same(found)


@contextmanager
def reads():
    """Count how often numbers are read from the second device, where each read would wait for it."""
    counted = []

    class Counted(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            reading = (torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.nonzero)
            if func in reading and isinstance(args[0], There):
                counted.append(func)
            return func(*args, **(kwargs or {}))

    with second_device() as device, Counted():
        yield device, counted


@pytest.mark.parametrize("contexts", [RAGGED[:4], [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]])
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_device_is_read_once_in_some_tokens_and_draws_the_same(build, attention, contexts, tokenizer):
    model, most = build(tokenizer), 40
    model.set_attn_implementation(attention)
    torch.manual_seed(5)
    here = TransformersGenerator(model, tokenizer).generate(contexts, most, 1.0)
    with reads() as (device, counted):
        torch.manual_seed(5)
        draw = Draw(most, 1.0, (1,), 0)
        tokens, _, _ = decode(model.to(device), contexts, draw)
        # Who has ended, and which rows are left once some have: at most twice a look. Transformers reads the mask of
        # the contexts themselves.
        assert len(counted) <= 2 * -(-most // LOOK) + 1
        drawn = tokens.tolist()
    lengths = [len(one.token_ids) for one in here]
    assert [row[:n] for row, n in zip(drawn, lengths, strict=True)] == [one.token_ids for one in here]
    assert {len(row) for row in drawn} == {max(lengths)}  # what was drawn beyond the last end is left out


@pytest.mark.parametrize("at", [2, 17])
def test_a_logit_that_is_not_finite_is_found_later_and_named_where_it_was(tokenizer, at):
    model = llama(tokenizer)
    calls = []

    def spoil(_module, _args, logits):
        calls.append(None)
        if len(calls) == at + 1:
            logits = logits.clone()
            logits[1] = torch.nan
        return logits

    with second_device() as device:
        model.to(device).lm_head.register_forward_hook(spoil)
        with pytest.raises(NonFiniteLogits) as caught:
            decode(model, [[3, 4], [7, 8], [9, 3]], Draw(40, 1.0, (), 0))
    assert (caught.value.row, caught.value.token) == (1, at)
