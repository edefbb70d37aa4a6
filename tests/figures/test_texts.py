"""Texts of a model as they are shown: what has no shape gets a sign, and cuts where something else begins."""

import pandas as pd
import pytest

from otb_analysis.figures.texts import (
    LONGEST,
    ONE_LINE,
    Passage,
    legible,
    passages,
    pieces,
    surroundings,
    token_pieces,
    visible,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"), ("a\n", "a↵"), ("\t", "⇥"), ("", "∅"), ("\u202eabc", "⟨202E⟩abc"), ("\x00", "⟨0000⟩"),
        ("<script>", "<script>"), ("🙂", "🙂"), ("👩‍👩‍👧", "👩‍👩‍👧"), ("אב", "אב"), ("\u200b", "⟨200B⟩"),
    ],
)  # fmt: skip
def test_invisible_characters_get_a_sign_and_the_rest_stays_text(text, shown):
    assert visible(text) == shown


def test_a_blank_before_a_word_is_a_blank_in_prose_and_a_glyph_alone():
    assert [visible(text, flowing=True) for text in (" the", "  x", " ", " \n")] == [" the", "··x", "·", "·↵"]


def test_a_token_of_a_megabyte_is_cut():
    shown = visible("x" * 1_000_000)
    assert len(shown) < LONGEST + 40 and shown.endswith("… (1,000,000 characters)")


def test_a_text_of_several_lines_keeps_its_lines_and_loses_what_rearranges_it():
    assert legible("a b\n\tc\u202ed\x1b[31m\u2066") == "a b\n\tc⟨202E⟩d⟨001B⟩[31m⟨2066⟩"
    assert legible("a\nb\r", ONE_LINE) == "a↵b␍"
    assert legible("x" * 9, most=4) == "xxxx… (9 characters)"


def test_matches_and_special_tokens_are_pieces_and_nothing_is_lost():
    cut = pieces("The end<|im_end|> the END.", "the")
    assert cut == [
        ("match", "The"),
        ("", " end"),
        ("special", "<|im_end|>"),
        ("", " "),
        ("match", "the"),
        ("", " END."),
    ]
    assert pieces("1+1=2 (a*)", "(A*)") == [("", "1+1=2 "), ("match", "(a*)")]  # no pattern, but a text
    assert pieces("\u202e", "\u202e") == [("match", "⟨202E⟩")] and pieces("", "x") == []
    assert pieces("y" * 100_001)[-1] == ("", "… (100,001 characters)")


def test_surroundings_begin_a_little_before_the_match():
    text = "0123456789" * 10 + "here\nit is" + "0123456789" * 20
    cut = surroundings([text], "HERE", most=40)
    assert cut == [("", "…"), ("", "0123456789"), ("match", "here"), ("", "↵it is" + "0123456789" * 2)]
    assert "".join(part for _, part in surroundings([text, "x"], "absent", most=10)) == "0123456789"
    assert surroundings(["answer", "prompt"], "PROM") == [("match", "prom"), ("", "pt")]


def answer(*tokens: tuple[int, bool, str | None]) -> pd.DataFrame:
    return pd.DataFrame(tokens, columns=["turn", "mask", "token"])


def test_an_answer_is_cut_where_a_turn_or_a_tool_begins():
    tokens = answer(
        (0, True, "Let"), (0, True, " me"), (0, False, "4"), (0, False, "2"), (1, True, " So"), (1, True, ".")
    )
    cut = [Passage(0, False, "Let me"), Passage(0, True, "42"), Passage(1, False, " So.")]
    assert passages("all of it", tokens) == cut
    assert passages("all", answer((0, True, "x"), (0, True, None))) == [Passage(0, False, "x")]


@pytest.mark.parametrize("tokens", [answer(), answer((0, True, None)), answer((0, True, "a"), (0, True, "\ufffd"))])
def test_an_answer_whose_tokens_are_not_its_text_is_one_passage(tokens):
    assert passages("a🙂", tokens) == [Passage(0, False, "a🙂")]


def test_blanks_that_a_tokenizer_leaves_out_of_single_tokens_are_in_the_answer():
    tokens = answer((0, True, "Hello"), (0, True, "world"))  # as SentencePiece decodes them one by one
    assert passages("Hello world", tokens) == [Passage(0, False, "Hello world")]


def test_a_passage_is_cut_at_its_tokens_and_where_a_match_crosses_them():
    (passage,) = passages("Let me", answer((0, True, "Le"), (0, True, ""), (0, True, "t m"), (0, True, "e</s>")))
    expected = [("", "L", 0), ("match", "e", 0), ("match", "t ", 2), ("", "m", 2), ("", "e", 3), ("special", "</s>", 3)]
    assert token_pieces(passage, "ET ") == expected
    assert token_pieces(Passage(0, False, "a </s>"), "a") == [
        ("match", "a", -1),
        ("", " ", -1),
        ("special", "</s>", -1),
    ]
    (long,) = passages("y", answer((0, True, "y" * 99_999), (0, True, "zzz")))
    assert token_pieces(long)[1:] == [("", "z", 1), ("", "… (100,002 characters)", -1)]
