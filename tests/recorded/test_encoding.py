"""Records become rollouts: tokens as recorded or from texts, masks, chat templates; what does not fit is refused."""

import copy
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.recorded.encoding import CALLS, NOT_ENDED, OTHER_SPLIT, RESTORED, Encoder
from otb_analysis.recorded.records import Message, Place, RecordedRollout
from otb_analysis.recorded.runs import Layout, grouped
from otb_analysis.rollouts.models import character_tokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chatty():
    """A tokenizer with a chat template like those in use: special tokens around role and content."""
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 \n=+#\ue000\ue001")
    made.add_special_tokens({"additional_special_tokens": ["<s>"]})
    made.chat_template = TEMPLATE
    return made


def record(n=1, **more):
    return RecordedRollout(Place(Path("r.jsonl"), n), **{"reward": 1.0, **more})


def encoded(tokenizer, *records, vocabulary=1000, **settings):
    encoder = Encoder(tokenizer, vocabulary, **settings)
    return encoder.rollouts(grouped(0, records, Layout())), encoder.tally


def test_texts_become_tokens_and_the_reward_stands_on_the_last_one(tokenizer):
    rollouts, tally = encoded(
        tokenizer, record(prompt="1+1=", completion="2#2"), record(2, prompt="1+1=", completion="3")
    )
    assert rollouts.prompt_length.tolist() == [4, 4] and rollouts.completion_length.tolist() == [3, 1]
    assert rollouts.rewards().tolist() == [[0, 0, 1.0], [1.0, 0, 0]]
    assert rollouts.finish_reason == ("unknown", "unknown") and tally == {NOT_ENDED: 2}
    assert np.isnan(rollouts.behavior_logprob).all()
    assert rollouts.turns[0][0].text == "2#2"


def test_the_end_token_is_scored_where_the_record_says_so_or_all_ended(tokenizer):
    end = tokenizer.eos_token_id
    stopped = record(prompt="1", completion="2", finish_reason="stop")
    cut = record(2, prompt="1", completion="23", finish_reason="length")
    rollouts, tally = encoded(tokenizer, stopped, cut)
    assert rollouts.input_ids[:, 1:].tolist()[0] == [*tokenizer("2")["input_ids"], end]
    assert rollouts.completion_length.tolist() == [2, 2] and not tally
    assert rollouts.finish_reason == ("stop", "length")
    rollouts, _ = encoded(tokenizer, record(prompt="1", completion=""), ended="all")
    assert rollouts.input_ids[0, 1:].tolist() == [end] and rollouts.finish_reason == ("stop",)


def test_a_text_with_its_special_tokens_is_taken_whole_and_its_tokens_are_counted(chatty):
    prompt, answer = "<s>user\nq<end>\n<s>assistant\n", "12<end>"
    one = record(prompt=prompt, completion=answer, special="kept", n_tokens=3)
    cut = record(2, prompt=prompt, completion="1=2", special="kept", n_tokens=2)
    rollouts, tally = encoded(chatty, one, cut)
    ids = chatty(prompt + answer, add_special_tokens=False)["input_ids"]
    assert rollouts.input_ids[0].tolist() == ids and rollouts.finish_reason == ("stop", "unknown")
    assert tally == {OTHER_SPLIT: 1} and tally.places[OTHER_SPLIT] == ["r.jsonl, record 2"]
    with pytest.raises(InputError, match=r"'<end>' before its end.*several turns"):
        encoded(chatty, record(prompt=prompt, completion=f"1<end>{prompt}2", special="kept"))


def test_tools_and_calls_reach_the_chat_template(chatty):
    tokenizer = copy.deepcopy(chatty)
    tokenizer.chat_template = "{% for t in tools or [] %}#{{ t.function.name }}{% endfor %}" + TEMPLATE.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls or [] %}={{ c.function.name }}{{ c.function.arguments.a }}"
        "{% endfor %}",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    chat = (Message("user", "q", False), Message("assistant", "", True, calls=(call,)))
    rollouts, tally = encoded(tokenizer, record(messages=chat, tools=(tool,), finish_reason="stop"))
    text = tokenizer.decode(rollouts.input_ids[0])
    assert text == "#add<s>user\nq<end>\n<s>assistant\n=add1<end>" and tally == {CALLS: 1}
    turns = (*chat, Message("tool", "2", False), Message("assistant", "2", True))
    rollouts, _ = encoded(tokenizer, record(messages=turns, tools=(tool,), finish_reason="stop"))
    assert tokenizer.decode(rollouts.input_ids[0]).startswith(text)
    assert [turn.text for turn in rollouts.turns[0]] == ["=add1", "2"]


def test_recorded_ids_are_taken_as_they_are_with_mask_turns_and_log_probabilities(tokenizer):
    ids = tokenizer("12=34")["input_ids"]
    one = record(
        prompt_ids=(5,), ids=(*ids, tokenizer.eos_token_id), mask=np.array([1, 1, 0, 1, 1, 1], bool),
        columns={"behavior_logprob": np.array([-1, -2, np.nan, -3, -4, -5.0])},
    )  # fmt: skip
    rollouts, _ = encoded(tokenizer, one)
    assert rollouts.input_ids[0].tolist() == [5, *ids, tokenizer.eos_token_id]
    assert rollouts.policy_tokens()[0].tolist() == [True, True, False, True, True, True]
    assert rollouts.turn[0, 1:].tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(rollouts.behavior_logprob[0, 1:], [-1, -2, np.nan, -3, -4, -5])
    assert [(turn.text, turn.reply, turn.finished) for turn in rollouts.turns[0]] == [
        ("12", "=", False),
        ("34", "", True),
    ]


def test_prompts_that_lost_their_special_tokens_are_put_back_into_the_template(chatty):
    for text, whole in (
        ("user\n1+1=\nassistant\n", "<s>user\n1+1=<end>\n<s>assistant\n"),
        ("system\nbe brief\nuser\n1+1=\nassistant\n", "<s>system\nbe brief<end>\n<s>user\n1+1=<end>\n<s>assistant\n"),
    ):
        rollouts, tally = encoded(chatty, record(prompt=text, completion="2", special="removed"))
        assert chatty.decode(rollouts.input_ids[0, : rollouts.prompt_length[0]]) == whole
        assert tally[RESTORED] == 1
    with pytest.raises(InputError, match=r"record 1: .*without special tokens.*--text plain"):
        encoded(chatty, record(prompt="1+1=", completion="2", special="removed"))
    plain, _ = encoded(chatty, record(prompt="1+1=", completion="2", special="removed"), text="plain")
    assert plain.prompt_length.tolist() == [4]
    chat, _ = encoded(chatty, record(prompt="1+1=", completion="2"), text="chat")
    assert chatty.decode(chat.input_ids[0, : chat.prompt_length[0]]) == "<s>user\n1+1=<end>\n<s>assistant\n"


def test_a_stripped_text_of_several_turns_is_refused_with_the_reason(chatty):
    several = record(prompt="user\n1+1=\nassistant\n", completion="2\nuser\nsure\nassistant\nyes", special="removed")
    with pytest.raises(InputError, match=r"holds '\\nassistant\\n', with which the chat template begins a turn"):
        encoded(chatty, several)
    rollouts, _ = encoded(chatty, several, text="plain")
    assert rollouts.policy_tokens().sum() == len(several.completion)


def test_a_chat_of_several_turns_masks_what_the_policy_did_not_write(chatty):
    messages = tuple(
        Message(role, text, role == "assistant")
        for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    )
    rollouts, _ = encoded(chatty, record(messages=messages, finish_reason="stop"))
    row, mask = rollouts.input_ids[0], rollouts.mask[0]
    assert chatty.decode(row) == "<s>user\na<end>\n<s>assistant\nb<end>\n<s>user\nc<end>\n<s>assistant\nd<end>"
    assert chatty.decode(row[mask]) == "b<end>d<end>"
    assert [turn.text for turn in rollouts.turns[0]] == ["b", "d"]
    assert rollouts.turns[0][0].reply == "\n<s>user\nc<end>\n<s>assistant\n"
    cut, tally = encoded(chatty, record(messages=messages))
    assert chatty.decode(cut.input_ids[0][cut.mask[0]]) == "b<end>d" and tally == {NOT_ENDED: 1}


def test_a_template_that_rewrites_earlier_messages_is_refused(chatty):
    rewriting = character_tokenizer("abcdefghijklmnopqrstuvwxyz \n")
    rewriting.chat_template = "{{ messages | length }}" + TEMPLATE
    messages = (Message("user", "a", False), Message("assistant", "b", True), Message("assistant", "c", True))
    with pytest.raises(InputError, match=r"rewrites earlier messages .*message 1"):
        encoded(rewriting, record(messages=messages))


REFUSED = {
    "ids of another tokenizer": (
        dict(prompt="1", ids=(3, 4), completion="99"), "the tokenizer decodes the completion's ids to .* was recorded",
    ),
    "prompt ids of another tokenizer": (
        dict(prompt="99", prompt_ids=(3, 4), ids=(5,)), "the tokenizer decodes the prompt's ids",
    ),
    "vocabulary": (dict(prompt="1", ids=(3, 2000)), "has token 2000, but the model's vocabulary has 1000"),
    "too long": (dict(prompt="1" * 60, completion="2"), "61 tokens, but the model reads at most 50"),
    "log-probabilities of other tokens": (
        dict(prompt="1", completion="23", columns={"behavior_logprob": np.array([-1.0])}),
        "1 log-probabilities but its text has 2 tokens under this tokenizer",
    ),
    "no sampled token": (dict(prompt="1", completion=""), "no token that the policy sampled, so its reward"),
    "no prompt": (dict(prompt="", completion="1"), "prompt without tokens"),
    "a chat without a template": (
        dict(messages=(Message("user", "1", False), Message("assistant", "2", True))), "no chat template",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_tokens_that_cannot_be_known_are_refused_by_record(tokenizer, what):
    fields, sentence = REFUSED[what]
    with pytest.raises(InputError, match=sentence) as caught:
        encoded(tokenizer, record(7, **fields), positions=50)
    assert "r.jsonl, record 7" in str(caught.value) and str(caught.value).endswith(".")
