"""Every call into a task's own code: what comes back is checked, and what is raised is named, in one sentence."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from otb_analysis.custom import foreign
from otb_analysis.errors import InputError
from otb_analysis.tasks.base import Prompt, Split, Task, Turn


def naming_failures(task: Task, method: str, where: str) -> AbstractContextManager[None]:
    """Turn whatever the task's code raises into one sentence, which names task, method and place."""
    return foreign(f"task {task.name!r} failed in {method} for {where}", "mend the task.")


def draw_prompts(task: Task, split: Split, start: int, count: int) -> list[Prompt]:
    """Return problems `start` … `start + count − 1` of a split.

    Raises:
        InputError: The task raises, or returns something else than a prompt.
    """
    prompts = []
    for index in range(start, start + count):
        where = f"{split} problem {index}"
        with naming_failures(task, "prompt", where):
            prompt = task.prompt(split, index)
        if not isinstance(prompt, Prompt):
            raise _unfit(task, "prompt", where, prompt, "return an otb_analysis.tasks.Prompt.")
        if not all(isinstance(part, str) for part in (prompt.id, prompt.text, prompt.answer)):
            raise _unfit(task, "prompt", where, prompt, "its id, text and answer must be texts.")
        prompts.append(prompt)
    return prompts


PATIENCE = 100  # Repeated problems in a row, at least, after which a split is taken to have no others


def distinct_prompts(task: Task, split: Split, count: int) -> list[Prompt]:
    """Return the first `count` different problems of a split, or all where it has fewer.

    Raises:
        InputError: The task raises, or returns something else than a prompt.
    """
    prompts: dict[str, Prompt] = {}
    index = repeated = 0
    while len(prompts) < count and repeated < max(PATIENCE, 2 * len(prompts)):
        (prompt,) = draw_prompts(task, split, index, 1)
        index, repeated = index + 1, repeated + 1 if prompt.id in prompts else 0
        prompts.setdefault(prompt.id, prompt)
    return list(prompts.values())


def ask_demonstration(task: Task, prompt: Prompt) -> Sequence[Turn]:
    """Return a right solution of a prompt.

    Raises:
        InputError: The task raises, or returns something else than turns.
    """
    where = f"prompt {prompt.id!r}"
    with naming_failures(task, "demonstration", where):
        turns = list(task.demonstration(prompt))
    if not turns or not all(isinstance(turn, Turn) for turn in turns):
        raise _unfit(task, "demonstration", where, turns, "return one otb_analysis.tasks.Turn a turn.")
    return turns


def ask_reply(task: Task, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
    """Return the environment's answer to the last turn, or None when the episode is over.

    Raises:
        InputError: The task raises, or returns something else than a text or None.
    """
    with naming_failures(task, "reply", f"prompt {prompt.id!r}"):
        reply = task.reply(prompt, tuple(turns))
    if reply is not None and not isinstance(reply, str):
        raise _unfit(task, "reply", f"prompt {prompt.id!r}", reply, "return a text, or None to end the episode.")
    return reply


def ask_reward(task: Task, prompt: Prompt, turns: Sequence[Turn], rollout: int) -> list[dict[str, float]]:
    """Return the named reward parts of every turn, as plain numbers; they may be NaN.

    Raises:
        InputError: The task raises, does not pay every turn, or pays something that is no mapping of numbers.
    """
    where = f"rollout {rollout} (prompt {prompt.id!r})"
    with naming_failures(task, "reward", where):
        rewards = task.reward(prompt, tuple(turns))
    if not isinstance(rewards, Sequence) or not all(isinstance(parts, Mapping) for parts in rewards):
        remedy = 'return one mapping of reward parts per turn, as in [{"correct": 1.0}].'
        raise _unfit(task, "reward", where, rewards, remedy)
    if len(rewards) != len(turns):
        raise InputError(
            f"task {task.name!r} pays {len(rewards)} turns but rollout {rollout} has {len(turns)} "
            f"(prompt {prompt.id!r}); return one mapping of reward parts per turn."
        )
    with naming_failures(task, "reward", where):
        return [{str(name): float(value) for name, value in parts.items()} for parts in rewards]


def _unfit(task: Task, method: str, where: str, answer: object, remedy: str) -> InputError:
    shown = " ".join(repr(answer).split())[:60]
    return InputError(f"task {task.name!r} returned {shown} from {method} for {where}; {remedy}")
