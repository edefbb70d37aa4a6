"""Counting: the demonstration counts aloud or at once; only the right number at the end is paid."""

import pytest

from otb_analysis.config import CountingConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks import Counting, Prompt, Turn

LITERAL = Prompt(id="abcab?a=", text="abcab?a=", answer="2")


@pytest.fixture
def task():
    return Counting(CountingConfig())


@pytest.mark.parametrize(("show", "text"), [("running", "a1bca2b#2"), ("direct", "#2")])
def test_demonstration_is_what_the_settings_say(show, text):
    assert Counting(CountingConfig(show=show)).demonstration(LITERAL) == [Turn(text, finished=True)]


@pytest.mark.parametrize("show", ["running", "direct"])
def test_every_demonstration_earns_the_reward_within_the_alphabet(show):
    task = Counting(CountingConfig(length_min=1, length_max=30, letters=26, show=show), seed=2)
    for i in range(200):
        prompt = task.prompt("train", i)
        items, target = prompt.text.removesuffix("=").split("?")
        assert prompt.answer == str(items.count(target))
        turns = task.demonstration(prompt)
        assert task.reward(prompt, turns) == [{"correct": 1.0}]
        assert set(prompt.text + turns[0].text) <= set(task.alphabet)
        assert task.reply(prompt, turns) is None


def test_counts_are_drawn_evenly_so_that_guessing_does_not_pay():
    # 2,000 texts of 4 letters: each count from 0 to 4 a fifth, within 4 standard errors of √(.16/2000) = .009.
    # Held-out problems are left out by text, which moves the shares of few-text counts (4 of a kind) by more: ≤ .03.
    task = Counting(CountingConfig(length_min=4, length_max=4, letters=4))
    counts = [int(task.prompt("train", i).answer) for i in range(2_000)]
    for value in range(5):
        assert abs(counts.count(value) / 2_000 - 0.2) < 4 * 0.009 + 0.03


@pytest.mark.parametrize(
    ("text", "finished", "paid"),
    [
        ("#2", True, 1.0),
        ("a1bca2b#2", True, 1.0),
        ("a1#02", True, 1.0),
        ("#2", False, 0.0),
        ("#3", True, 0.0),
        ("2", True, 0.0),
        ("#2a", True, 0.0),
        ("#2\n", True, 0.0),
        ("#-2", True, 0.0),
        ("#", True, 0.0),
        ("", True, 0.0),
        ("#" + "2" * 5_000, True, 0.0),
    ],
)
def test_only_the_right_number_at_an_ended_end_is_paid(task, text, finished, paid):
    assert task.reward(LITERAL, [Turn(text, finished)]) == [{"correct": paid}]


def test_letter_that_does_not_occur_has_the_answer_0(task):
    absent = Prompt("bb?a=", "bb?a=", "0")
    assert task.demonstration(absent) == [Turn("bb#0", finished=True)]
    assert task.reward(absent, [Turn("#0", True)]) == [{"correct": 1.0}]


def test_splits_share_no_problem_and_a_problem_is_always_the_same():
    small = CountingConfig(length_min=2, length_max=4, letters=4)
    split = {
        name: {Counting(small, seed).prompt(name, i).text for seed in range(2) for i in range(500)}
        for name in ("train", "heldout")
    }
    assert not split["train"] & split["heldout"]
    assert len(split["heldout"]) > 20
    assert Counting(small, 5).prompt("train", 13) == Counting(small, 5).prompt("train", 13)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"length_min": 0}, "length_min is 0"),
        ({"length_min": 5, "length_max": 4}, "length_min is 5 and length_max is 4"),
        ({"letters": 1}, "letters is 1"),
        ({"letters": 27}, "letters is 27"),
        ({"length_min": 1, "length_max": 2}, "too few problems"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, named):
    with pytest.raises(InputError, match=named):
        Counting(CountingConfig(**settings))
