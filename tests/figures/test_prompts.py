from otb_analysis.figures.prompts import distinct


def test_prompts_that_begin_alike_are_named_by_what_differs():
    head = "Answer with one number only. How many letters are in the word "
    labels = distinct({0: head + "apple?", 3: head + "banana?"}, most=30)
    assert labels == {0: "…in the word apple?", 3: "…in the word banana?"}


def test_short_and_single_prompts_start_at_their_beginning():
    assert distinct({0: "2+2=", 1: "2+3="}) == {0: "2+2=", 1: "2+3="}
    assert distinct({7: "a\n b" + "c" * 100}, most=10) == {7: "a bcccccc…"}


def test_equal_prompts_keep_their_end():
    assert distinct({0: "x" * 50, 1: "x" * 50}, most=20)[0] == "…" + "x" * 12
