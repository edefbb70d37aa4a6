"""Sampling: what the generator reports is what the policy says, whatever the checkpoint's own settings are."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from otb_analysis.config import ChainSumConfig, SampleConfig
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.rollouts.generation import NonFiniteLogits, TransformersGenerator
from otb_analysis.rollouts.sampling import sample
from otb_analysis.tasks import ChainSum, Prompt, Turn

ECHO = SampleConfig(prompts=2, group_size=2, max_new_tokens=8, max_turns=3)


@pytest.fixture
def task():
    return ChainSum(ChainSumConfig(terms_min=2, terms_max=5))


def ragged_prompts(task):
    """Prompts of unlike lengths, the longest much longer than the rest."""
    texts = ["1+2=", "12+7+30=", "1+" * 20 + "1="]
    return [Prompt(text, text, "0") for text in texts]


def drawn(model, tokenizer, task, prompts=None, **settings):
    torch.manual_seed(0)
    config = SampleConfig(**{"group_size": 4, "max_new_tokens": 12} | settings)
    return sample(TransformersGenerator(model, tokenizer), tokenizer, task, prompts or ragged_prompts(task), config)


def largest_gap(rollouts, expected):
    assert rollouts.mask.any()
    return np.abs(rollouts.behavior_logprob[rollouts.mask] - expected[rollouts.mask]).max()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_reported_logprobs_are_those_of_a_fresh_forward_pass(tiny_model, tokenizer, task, plain_logprobs, temperature):
    rollouts = drawn(tiny_model, tokenizer, task, temperature=temperature)
    assert largest_gap(rollouts, plain_logprobs(tiny_model, rollouts, temperature)) < 1e-5


HOSTILE = {
    "do_sample": True,
    "top_p": 0.3,
    "top_k": 2,
    "temperature": 0.2,
    "repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 5,
    "suppress_tokens": [4, 5, 6],
    "bad_words_ids": [[7]],
    "forced_eos_token_id": 1,
    "max_length": 3,
    "num_beams": 1,
}


def test_checkpoint_settings_change_neither_what_is_drawn_nor_what_is_reported(
    tiny_model, tokenizer, task, plain_logprobs
):
    plain = drawn(tiny_model, tokenizer, task)
    hostile = GenerationConfig(**HOSTILE)
    tiny_model.generation_config = hostile
    rollouts = drawn(tiny_model, tokenizer, task)
    assert np.array_equal(rollouts.input_ids, plain.input_ids)
    assert largest_gap(rollouts, plain_logprobs(tiny_model, rollouts)) < 1e-5
    assert tiny_model.generation_config is hostile


def test_every_end_token_the_checkpoint_names_ends_a_completion(tiny_model, tokenizer, task):
    semicolon = tokenizer.convert_tokens_to_ids(";")
    tiny_model.generation_config = GenerationConfig(eos_token_id=[semicolon, 5])
    generator = TransformersGenerator(tiny_model, tokenizer)
    assert generator.ends == sorted({tokenizer.eos_token_id, semicolon, 5})
    rollouts = drawn(tiny_model, tokenizer, task, group_size=16, max_new_tokens=20)
    last = [rollouts.input_ids[n][rollouts.mask[n]][-1] for n in range(48)]
    reasons = np.array(rollouts.finish_reason)
    assert {int(i) for i in np.array(last)[reasons == "stop"]} == set(generator.ends)
    inner = [i for n in range(48) for i in rollouts.input_ids[n][rollouts.mask[n]][:-1]]
    assert not set(inner) & set(generator.ends)


def test_tokens_are_drawn_as_often_as_the_policy_says(tiny_model, tokenizer, task):
    # 4,000 draws of a first token: |share − π| within 4 standard errors of every one of 17 tokens.
    prompt = [Prompt("1+2=", "1+2=", "3")]
    rollouts = drawn(tiny_model, tokenizer, task, prompt, group_size=4_000, max_new_tokens=1, temperature=0.7)
    with torch.no_grad():
        logits = tiny_model(input_ids=torch.tensor([tokenizer("1+2=")["input_ids"]])).logits[0, -1].double()
    pi = torch.softmax(logits / 0.7, -1).numpy()
    share = np.bincount(rollouts.input_ids[:, 4], minlength=len(pi)) / 4_000
    assert (np.abs(share - pi) <= 4 * np.sqrt(pi * (1 - pi) / 4_000) + 1e-12).all()


def test_settings_come_back_and_no_gradient_is_left_after_an_exception(tiny_model, tokenizer):
    own = tiny_model.generation_config
    generator = TransformersGenerator(tiny_model, tokenizer)
    with torch.no_grad():
        tiny_model.get_input_embeddings().weight[3] = float("nan")
    with pytest.raises(NonFiniteError):
        generator.generate([[3]], 2, 1.0)
    assert tiny_model.generation_config is own
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_name_rollout_group_and_prompt(tiny_model, tokenizer, task, poison):
    with torch.no_grad():
        # Only the second prompt holds a 9, so only its rollouts see the poisoned embedding as input.
        tiny_model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("9")] = poison
        tiny_model.lm_head.weight = torch.nn.Parameter(torch.ones_like(tiny_model.lm_head.weight))
    prompts = [Prompt(text, text, "0") for text in ("1+2=", "9+2=")]
    with pytest.raises(NonFiniteError, match=r"rollout 2 \(group 1, prompt '9\+2=', turn 0\) .*not finite"):
        drawn(tiny_model, tokenizer, task, prompts, group_size=2)


def test_logits_that_fail_in_a_later_turn_name_the_rollout_and_not_the_row(echo, scripted, tokenizer):
    generator = scripted(["1", "2$", "3", "4$"])  # rollouts 0 and 2 are cut, 1 and 3 go on as contexts 0 and 1
    first = generator.generate

    def generate(contexts, *rest):
        if len(contexts) == 2:
            raise NonFiniteLogits(1, 0)
        return first(contexts, *rest)

    generator.generate = generate
    with pytest.raises(NonFiniteError, match=r"rollout 3 \(group 1, prompt 'train1', turn 1\)"):
        sample(generator, tokenizer, echo, [echo.prompt("train", i) for i in range(2)], ECHO)


def test_end_token_first_is_an_empty_completion_of_one_policy_token(scripted, tokenizer, task):
    rollouts = sample(scripted(["$"]), tokenizer, task, [Prompt("1=", "1=", "1")], SampleConfig(group_size=1))
    assert rollouts.turns == ((Turn("", True),),)
    assert rollouts.finish_reason == ("stop",)
    assert rollouts.mask.tolist() == [[False, False, True]]
    assert rollouts.completion_length.tolist() == [1]


def test_text_without_end_is_cut_by_length_and_asks_for_no_reply(echo, scripted, tokenizer):
    rollouts = sample(scripted(["12"]), tokenizer, echo, [echo.prompt("train", 0)], SampleConfig(group_size=1))
    assert rollouts.turns == ((Turn("12", False),),)
    assert rollouts.finish_reason == ("length",)


def test_two_turns_are_laid_out_as_prompt_policy_reply_policy(echo, scripted, tokenizer):
    generator = scripted(["7$", "12"], ["#0$"])
    prompts = [echo.prompt("train", 0)]
    rollouts = sample(generator, tokenizer, echo, prompts, SampleConfig(group_size=2, max_turns=5))
    end = tokenizer.eos_token_id

    def ids(text):
        return tokenizer(text)["input_ids"]

    # Rollout 0: "0+" · "7" end · "=7" · "#0" end; rollout 1: "0+" · "12", cut.
    assert rollouts.input_ids[0].tolist() == [*ids("0+7"), end, *ids("=7#0"), end]
    assert rollouts.mask[0].tolist() == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 3
    # A reply belongs to the turn that it answers.
    assert rollouts.turn[0].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert rollouts.finish_reason == ("stop", "length")
    assert rollouts.turns[0] == (Turn("7", True, "=7"), Turn("#0", True))
    assert generator.calls[1] == [[*ids("0+7"), end, *ids("=7")]]
    assert rollouts.attention_mask[1].tolist() == [True] * 4 + [False] * 5
    assert rollouts.input_ids[1, 4:].tolist() == [tokenizer.pad_token_id] * 5
    assert np.isnan(rollouts.behavior_logprob[~rollouts.mask]).all()
    assert rollouts.completion_length.tolist() == [7, 2]


def test_turn_limit_cuts_an_episode_and_its_tokens_stay_within_the_turns(echo, scripted, tokenizer):
    echo.reply = lambda prompt, turns: "="
    generator = scripted(["1$"], ["2$"])
    rollouts = sample(generator, tokenizer, echo, [echo.prompt("train", 0)], SampleConfig(group_size=1, max_turns=2))
    assert rollouts.finish_reason == ("turns",)
    assert len(rollouts.turns[0]) == 2
    assert rollouts.turn.max() == 1


def test_group_of_one_and_groups_in_order(scripted, tokenizer, task):
    prompts = [Prompt(text, text, "0") for text in ("1=", "22=", "3=")]
    rollouts = sample(scripted(["1$", "2$", "3$"]), tokenizer, task, prompts, SampleConfig(group_size=1))
    assert rollouts.group.tolist() == [0, 1, 2]
    assert rollouts.prompt_length.tolist() == [2, 3, 2]
    # Ragged prompts: the completion starts where the prompt ends.
    assert rollouts.completion_columns().tolist() == [[2, 3], [3, 4], [2, 3]]
    assert rollouts.present().all()


def test_prompt_without_tokens_is_refused_by_name(scripted, tokenizer, task):
    with pytest.raises(InputError, match=r"prompt 'void' has no tokens"):
        sample(scripted([]), tokenizer, task, [Prompt("void", "", "0")], SampleConfig(group_size=1))


def test_same_seed_draws_the_same_rollouts(tiny_model, tokenizer, task):
    first, second = (drawn(tiny_model, tokenizer, task) for _ in range(2))
    assert np.array_equal(first.input_ids, second.input_ids)
    assert np.array_equal(first.behavior_logprob, second.behavior_logprob, equal_nan=True)


def test_prompt_and_budget_beyond_the_models_positions_are_refused_in_one_sentence(tiny_model, tokenizer):
    generator = TransformersGenerator(tiny_model, tokenizer)
    room = tiny_model.config.max_position_embeddings
    with pytest.raises(InputError, match=rf"sample.max_new_tokens={room} need more"):
        generator.generate([[3, 4, 5, 3, 4]], room, 1.0)


def test_tokenizer_of_a_larger_model_is_refused_in_one_sentence(tiny_model, tokenizer):
    generator = TransformersGenerator(tiny_model, tokenizer)
    entries = tiny_model.get_input_embeddings().num_embeddings
    with pytest.raises(InputError, match=rf"token id {entries} .*{entries} embeddings"):
        generator.generate([[3], [4, entries]], 4, 1.0)
