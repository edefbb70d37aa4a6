"""The task `chain_sum`: its literal, its reward on right and wrong texts, its splits."""

import pytest

from otb_analysis.config import ChainSumConfig, ReasoningGymConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks import TASKS, ChainSum, Prompt, Turn, make_task

LITERAL = Prompt(id="12+7+30=", text="12+7+30=", answer="49")


def paid(text, finished=True, prompt=LITERAL):
    (parts,) = ChainSum(ChainSumConfig()).reward(prompt, [Turn(text, finished)])
    return parts


def test_demonstration_writes_every_partial_sum_and_then_the_result():
    # 12 + 7 = 19, 19 + 30 = 49.
    assert ChainSum(ChainSumConfig()).demonstration(LITERAL) == [Turn("12+7=19;19+30=49#49", finished=True)]


def test_every_demonstration_earns_the_reward_and_stays_within_the_alphabet():
    task = ChainSum(ChainSumConfig(terms_min=2, terms_max=9, largest=10**9), seed=3)
    for i in range(200):
        prompt = task.prompt("train", i)
        turns = task.demonstration(prompt)
        assert task.reward(prompt, turns) == [{"correct": 1.0}]
        assert set(prompt.text + turns[0].text) <= set(task.alphabet)
        assert task.reply(prompt, turns) is None


@pytest.mark.parametrize(
    "text",
    [
        "12+7=19;19+30=49#49",
        "#49",  # how the sum was reached is not judged
        "12+7=18;18+30=49#49",
        "#48#49",  # the last # counts
        "#049",  # the same number
    ],
)
def test_right_number_at_the_end_of_an_ended_text_is_paid(text):
    assert paid(text) == {"correct": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "12+7=19;19+30=49#48",
        "12+7=19;19+30=49",  # no final number
        "49",
        "#49;",  # text after the number
        "#49\n",
        "#49#48",
        "#49#",
        "# 49",
        "#-49",
        "#",
        "",
        "#" + "9" * 5_000,  # more digits than Python turns into an integer
        "#" + "0" * 5_000 + "49",
        "#٤٩",  # 49 in Arabic digits
    ],
)
def test_anything_else_is_not_paid(text):
    assert paid(text) == {"correct": 0.0}


def test_right_number_without_the_end_token_is_not_paid():
    assert paid("12+7=19;19+30=49#49", finished=False) == {"correct": 0.0}


def test_same_seed_gives_the_same_problems_and_another_seed_others():
    def texts(seed):
        task = ChainSum(ChainSumConfig(terms_min=3, terms_max=5, largest=49), seed)
        return [task.prompt(split, i).text for split in ("train", "heldout") for i in range(100)]

    assert texts(0) == texts(0)
    assert len(set(texts(0)) & set(texts(1))) < 10


def test_problem_does_not_depend_on_which_were_asked_before():
    first, second = ChainSum(ChainSumConfig(), 5), ChainSum(ChainSumConfig(), 5)
    assert [first.prompt("train", i) for i in range(20)][13] == second.prompt("train", 13)


def test_splits_share_no_problem_within_and_across_seeds():
    # Two terms up to 20 make 400 problems, so both splits are drawn many times over.
    small = ChainSumConfig(terms_min=2, terms_max=2, largest=20)
    split = {
        name: {ChainSum(small, seed).prompt(name, i).text for seed in range(3) for i in range(1_000)}
        for name in ("train", "heldout")
    }
    assert not split["train"] & split["heldout"]
    # Of 400 problems a tenth is held out: 40 ± 6.
    assert 22 <= len(split["heldout"]) <= 58
    assert len(split["train"] | split["heldout"]) == 400


def test_terms_and_values_stay_within_the_configured_range_and_reach_its_ends():
    task = ChainSum(ChainSumConfig(terms_min=2, terms_max=4, largest=7))
    terms = [task.prompt("train", i).text.rstrip("=").split("+") for i in range(300)]
    assert {len(t) for t in terms} == {2, 3, 4}
    assert {int(n) for t in terms for n in t} == set(range(1, 8))


def test_answer_is_the_sum_and_the_name_is_the_text():
    prompt = ChainSum(ChainSumConfig()).prompt("heldout", 7)
    assert prompt.id == prompt.text
    assert int(prompt.answer) == sum(int(n) for n in prompt.text.rstrip("=").split("+"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"terms_min": 1}, "terms_min is 1"),
        ({"terms_min": 6, "terms_max": 5}, "terms_min is 6 and terms_max is 5"),
        ({"largest": 0}, "largest is 0"),
        ({"largest": 10**10}, "largest is 10000000000"),
        ({"terms_min": 2, "terms_max": 2, "largest": 9}, "too few problems"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings, named):
    with pytest.raises(InputError, match=named):
        ChainSum(ChainSumConfig(**settings))


def test_unknown_task_is_answered_with_the_nearest_name():
    with pytest.raises(InputError, match=r"'chain_sun' .*mean 'chain_sum'\?"):
        make_task(TrainConfig(task="chain_sun"))


def test_every_task_of_the_catalogue_can_be_made_under_its_own_name():
    letters = ReasoningGymConfig(name=("letter_counting",))
    for name in set(TASKS) - {"math_jsonl"}:  # which needs a file
        assert make_task(TrainConfig(task=name, reasoning_gym=letters)).name == name
