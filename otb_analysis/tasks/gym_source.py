"""One task of reasoning-gym: its problems by number, the same in every process, and the score of an answer."""

import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import numpy as np

from otb_analysis.custom import one_line
from otb_analysis.errors import InputError, nearest
from otb_analysis.extras import require

SIZE = 1_000_000
"""Problems of a task; problem k is made from the random numbers of (seed · SIZE + k)."""
SIZES = {"acre": 5_000, "word_ladder": 20_000}
"""Those that make all problems at once, or refuse a large size."""
HASHED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Their problems or answers follow the order of sets, which differs between processes unless PYTHONHASHSEED is set."""
SECONDS = 1.0
"""Time after which scoring an answer ends with 0."""
LONGEST_ANSWER = 2_000
FAILURES = 20
"""Problems that may fail in a row before a task counts as one that makes none with its settings."""

# These scorers hand the answer to Python's eval, or to SymPy's parse_expr, which calls it.
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
FORMULA = re.compile(r"[0-9A-Za-z+\-*/^(). ]*")
FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "pi", "asin", "acos", "atan", "sinh", "cosh", "tanh"}


@dataclass(frozen=True)
class Problem:
    """One problem, as reasoning-gym makes it."""

    question: str
    answer: str | None  # None where the task knows no right answer, and only scores one
    entry: dict[str, Any]  # What its scorer reads


class GymSource:
    """Problems of one task.

    Args:
        settings: Fields of the task's own configuration.
        seed: Two seeds share no problem number; they may share questions, which a hash assigns to one split.

    Raises:
        InputError: The task does not exist, refuses its settings, makes no problem with them, or makes other problems
            in every process.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], seed: int = 0):
        require("reasoning_gym", "the task 'reasoning_gym'")
        _check_name(name)
        _check_settings(name, settings)
        self.name, self.size, self.start = name, SIZES.get(name, SIZE), seed * SIZE
        try:
            with _own_random(self.start):
                self.dataset: Any = import_module("reasoning_gym").create_dataset(
                    name, seed=self.start, size=self.size, **settings
                )
        except Exception as error:  # someone else's code can fail in any way
            raise _refused(name, error) from error
        self._check_problems()

    def problem(self, k: int) -> Problem | None:
        """Return problem k, or None where reasoning-gym fails to make it, as a few tasks do now and then."""
        try:
            return self._problem(k)
        except Exception:  # someone else's code can fail in any way
            return None

    def score(self, problem: Problem, answer: str) -> float:
        """Return the task's own score of an answer, from 0 to 1; 0 for one that would run as code or takes too long."""
        if len(answer) > LONGEST_ANSWER or not harmless(self.name, answer):
            return 0.0
        try:
            with _own_random(self.start), _time_limit(SECONDS):
                return float(self.dataset.score_answer(answer, problem.entry))
        except (Exception, _OutOfTime):  # an answer that the scorer cannot read is wrong
            return 0.0

    def _problem(self, k: int) -> Problem:
        with _own_random(self.start + k):
            entry = self.dataset[k]
        answer = entry["answer"]
        return Problem(str(entry["question"]), None if answer is None else str(answer), entry)

    def _check_problems(self) -> None:
        if not any(self.problem(k) for k in range(FAILURES)):
            try:
                self._problem(0)
            except Exception as error:  # someone else's code can fail in any way
                raise _refused(self.name, error) from error


def settings_from_json(name: str, text: str) -> dict[str, Any]:
    """Read a task's settings from a JSON object.

    Raises:
        InputError: It is not JSON, or no object.
    """
    try:
        settings = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InputError(
            f"reasoning_gym.config of {name} is not JSON ({error.msg} at character {error.pos + 1} of {text!r}); "
            """write an object, as in '{"min_words": 1}'."""
        ) from error
    if not isinstance(settings, dict):
        raise InputError(
            f"reasoning_gym.config of {name} is {text!r}; write a JSON object, as in " """'{"min_words": 1}'."""
        )
    return settings


def harmless(name: str, answer: str) -> bool:
    """Return whether a task's scorer can be given an answer: no code of the policy's may run."""
    if name in EVALUATED:
        return "(" not in answer and "__" not in answer  # nothing is called
    if name in PARSED:
        words = re.findall(r"[A-Za-z]+", answer)
        return bool(FORMULA.fullmatch(answer)) and all(len(word) == 1 or word in FUNCTIONS for word in words)
    return True


def _registry() -> Mapping[str, Any]:
    """Return every task's classes, of its problems and of its configuration, by name."""
    return import_module("reasoning_gym.factory").DATASETS


def _check_name(name: str) -> None:
    registry = _registry()
    if name == "composite":
        raise InputError(
            "reasoning_gym.name is 'composite', which mixes tasks itself; pass the tasks, as in "
            "--reasoning-gym.name gcd lcm --reasoning-gym.weight 2 1."
        )
    if name not in registry:
        close = get_close_matches(name, registry, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "docs/tasks.md names them."
        raise InputError(f"reasoning_gym.name is {name!r}, which is none of its {len(registry)} tasks; {hint}")
    if name in HASHED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise InputError(
            f"reasoning_gym.name is {name!r}, whose problems differ in every process unless PYTHONHASHSEED is set; "
            "begin the command with PYTHONHASHSEED=0, also when you resume the run."
        )


def _check_settings(name: str, settings: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(_registry()[name][1])} - {"seed", "size"}
    for field in settings:
        if field in ("seed", "size"):
            raise InputError(f"reasoning_gym.config of {name} has {field!r}, which the run sets; leave it out.")
        if field not in known:
            raise InputError(f"reasoning_gym.config of {name} has no field {field!r}; {nearest(field, sorted(known))}")


def _refused(name: str, error: Exception) -> InputError:
    return InputError(
        f"reasoning-gym refuses reasoning_gym.config of {name} ({one_line(error)}); change that or leave it out."
    )


@contextmanager
def _own_random(seed: int) -> Iterator[None]:
    """Seed the global generators for a block, as some tasks draw from them, and put back what they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _OutOfTime(BaseException):
    """Passes through `except Exception` of a scorer."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block; only the main thread of a process gets signals, and elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
