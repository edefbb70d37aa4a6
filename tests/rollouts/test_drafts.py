"""A recorded rollout becomes turns, replies and a mask."""

import math

from otb_analysis.rollouts.sampling import draft_of


def test_turns_replies_and_masks_follow_who_wrote_a_token(tokenizer):
    end = tokenizer.eos_token_id
    one, two, plus = tokenizer("12+", add_special_tokens=False)["input_ids"]
    completion = [(one, True), (end, True), (plus, False), (plus, False), (two, True)]
    draft = draft_of([plus], completion, [-1.0, -2.0, 0.0, 0.0, -3.0], tokenizer, (end,))
    assert [(turn.text, turn.finished, turn.reply) for turn in draft.turns] == [("1", True, "++"), ("2", False, "")]
    assert draft.ids == [plus, one, end, plus, plus, two] and draft.prompt_length == 1
    assert draft.mask == [False, True, True, False, False, True]
    assert draft.turn[1:] == [0, 0, 0, 0, 1]
    assert draft.logprob[1:3] == [-1.0, -2.0] and draft.logprob[5] == -3.0
    assert all(math.isnan(x) for x in (draft.logprob[0], *draft.logprob[3:5]))


def test_without_log_probabilities_they_are_unknown_and_tokens_before_the_first_turn_are_masked(tokenizer):
    one = tokenizer("1", add_special_tokens=False)["input_ids"][0]
    draft = draft_of([one], [(one, False), (one, True)], None, tokenizer, ())
    assert draft.mask == [False, False, True] and all(map(math.isnan, draft.logprob))
    assert [turn.text for turn in draft.turns] == ["1"]
