"""Calls into a task's own code: whatever goes wrong there is one sentence with task, place and exception."""

import pytest

from otb_analysis.config import SampleConfig
from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.rollouts.sampling import sample
from otb_analysis.tasks import Prompt, Turn
from otb_analysis.tasks.task_calls import ask_demonstration, ask_reply, ask_reward, draw_prompts

PROMPT = Prompt("p7", "1+1=", "2")
TURNS = [Turn("2", True)]


def failing(error):
    def raises(*args):
        raise error

    return raises


def asked(method, task):
    return {
        "prompt": lambda: draw_prompts(task, "train", 7, 2),
        "demonstration": lambda: ask_demonstration(task, PROMPT),
        "reply": lambda: ask_reply(task, PROMPT, TURNS),
        "reward": lambda: ask_reward(task, PROMPT, TURNS, rollout=3),
    }[method]()


WHERE = {
    "prompt": "train problem 7",
    "demonstration": "prompt 'p7'",
    "reply": "prompt 'p7'",
    "reward": "rollout 3 (prompt 'p7')",
}


@pytest.mark.parametrize("method", WHERE)
def test_exception_of_a_task_is_one_sentence(echo, method):
    setattr(echo, method, failing(ZeroDivisionError("division\nby zero.")))
    with pytest.raises(InputError) as caught:
        asked(method, echo)
    expected = (
        f"task 'echo' failed in {method} for {WHERE[method]} (ZeroDivisionError: division by zero); mend the task."
    )
    assert str(caught.value) == expected
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("method", WHERE)
@pytest.mark.parametrize("error", [InputError("my own sentence."), NonFiniteError("mine."), KeyboardInterrupt()])
def test_sentence_of_the_tasks_own_and_an_interrupt_pass(echo, method, error):
    setattr(echo, method, failing(error))
    with pytest.raises(type(error)) as caught:
        asked(method, echo)
    assert caught.value is error


@pytest.mark.parametrize(
    ("method", "value", "named"),
    [
        ("prompt", "1+1=", "returned '1+1=' from prompt for train problem 7; return an otb_analysis.tasks.Prompt."),
        (
            "prompt",
            Prompt(7, "1+1=", "2"),
            "returned Prompt(id=7, text='1+1=', answer='2', chat=False) from prompt for train",
        ),
        ("demonstration", [], "returned [] from demonstration for prompt 'p7'"),
        ("demonstration", ["2"], "returned ['2'] from demonstration for prompt 'p7'"),
        ("demonstration", 5, "failed in demonstration for prompt 'p7' (TypeError: 'int' object is not iterable)"),
        ("reply", 5, "returned 5 from reply for prompt 'p7'; return a text, or None"),
        ("reward", 1.0, "returned 1.0 from reward for rollout 3 (prompt 'p7'); return one mapping"),
        ("reward", None, "returned None from reward"),
        ("reward", [1.0], "returned [1.0] from reward"),
        ("reward", [], "pays 0 turns but rollout 3 has 1 (prompt 'p7')"),
        ("reward", [{}, {}], "pays 2 turns but rollout 3 has 1"),
        ("reward", [{"a": "much"}], "failed in reward for rollout 3 (prompt 'p7') (ValueError: could not convert"),
        ("reward", [{"a": None}], "failed in reward for rollout 3"),
    ],
)
def test_answer_of_another_kind_is_one_sentence(echo, method, value, named):
    setattr(echo, method, lambda *args: value)
    with pytest.raises(InputError) as caught:
        asked(method, echo)
    assert f"task 'echo' {named}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_right_answers_come_through_as_plain_values(echo):
    assert [p.id for p in draw_prompts(echo, "train", 3, 2)] == ["train3", "train4"]
    assert ask_demonstration(echo, PROMPT) == [Turn("1", True, "=1"), Turn("#2", True)]
    assert ask_reply(echo, PROMPT, TURNS) == "=2"
    echo.reward = lambda prompt, turns: [{"correct": True}]
    assert ask_reward(echo, PROMPT, TURNS, 0) == [{"correct": 1.0}]


def test_reply_that_fails_while_sampling_names_the_prompt(echo, scripted, tokenizer):
    echo.reply = failing(KeyError("tool"))
    with pytest.raises(InputError, match=r"'echo' failed in reply .*'train0' \(KeyError: 'tool'\)"):
        sample(scripted(["1$"]), tokenizer, echo, [echo.prompt("train", 0)], SampleConfig(group_size=1))
