from fractions import Fraction

import pytest

from otb_analysis.figures.rollouts import distinct, ends_elsewhere, last_number, shared_head


def test_prompts_that_begin_alike_are_named_by_what_differs():
    head = "Answer with one number only. How many letters are in the word "
    labels = distinct({0: head + "apple?", 3: head + "banana?"}, most=30)
    assert labels == {0: "…in the word apple?", 3: "…in the word banana?"}


def test_prompts_that_differ_late_from_one_another_differ_in_their_labels():
    head = "You are a careful solver of problems. Write the answer last. "
    labels = distinct({0: "Hello", 1: head + "2 + 3", 2: head + "2 + 4"}, most=30)
    assert labels[0] == "Hello"
    assert labels[1].endswith("2 + 3") and labels[2].endswith("2 + 4") and labels[1].startswith("…")


def test_short_and_single_prompts_start_at_their_beginning():
    assert distinct({0: "2+2=", 1: "2+3="}) == {0: "2+2=", 1: "2+3="}
    assert distinct({7: "a\n b" + "c" * 100}, most=10) == {7: "a bcccccc…"}


def test_equal_prompts_are_named_alike():
    assert distinct({0: "x" * 50, 1: "x" * 50}, most=20) == dict.fromkeys((0, 1), "x" * 19 + "…")


def test_a_head_is_what_all_prompts_share_up_to_the_end_of_a_sentence():
    head = "Add up all the numbers. Write the answer last.\n\nQ: 1 + 2\nA: 3\n\n"
    assert shared_head([head + "Q: 12 + 7", head + "Q: 13 + 7", head + "Q: 12 + 7"]) == len(head + "Q: ")
    assert shared_head([head + "Which is more?", head + "Who is there?"]) == len(head)
    assert shared_head([head] * 3) == shared_head([]) == shared_head(["2 + 2", "2 + 3"]) == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5-3=2", 2), ("is 1,234.5.", Fraction(2469, 2)), ("12#-7", -7), ("x = −3", -3), (r"\boxed{\frac{3}{4}}", 0.75),
        ("3/4", 0.75), ("27 eggs", 27), ("none", None), ("", None), ("3/0", None), ("0049", 49), ("v2.0", 2),
        ("$18", 18), ("7 - 8", 8), ("9" * 9999, None),
    ],
)  # fmt: skip
def test_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("answer", "completion", "found"),
    [
        ("49", "12+7+30=#49", None),
        ("#### 49", "It is 49.0", None),
        ("49", "I say 48", "48, not 49"),
        ("49", "hm", "no number, not 49"),
        ("0.5", "1/3", "0.333333, not 0.5"),
        ("apple", "pear 3", None),
        (None, "3", None),
        ("3", None, None),
    ],
)  # fmt: skip
def test_completion_that_ends_with_another_number_says_which(answer, completion, found):
    assert ends_elsewhere(answer, completion) == found
