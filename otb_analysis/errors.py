"""Errors that stop work; each message is one sentence: what, where, what to do.

A failed *measurement* raises none of them: it becomes a warning and a counted gap, and training goes on.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something the caller passed does not fit: a shape, a name, a file, a configuration."""


class StoreError(RuntimeError):
    """The store or a checkpoint cannot be read or written; what was complete stays readable."""


class NonFiniteError(ArithmeticError):
    """A loss, reward or logit is NaN or infinite; the message names step, rollout and token."""


class ProcessError(RuntimeError):
    """Another process of the run stopped, so this one stops too, with the other's message."""


class ExchangeError(ProcessError):
    """Processes broke off in the middle of an exchange: none knows where the others are, so the run must end."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence that says what was kept."""


STOPS = (InputError, StoreError, NonFiniteError, ProcessError)
"""A command prints their message and exits with an error; any other exception is a bug and keeps its traceback."""


def why_ended(error: BaseException) -> str:
    """Return why a run ended early, as run.json says it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; its complete steps can be read."
    return str(error) if isinstance(error, STOPS) else f"{type(error).__name__}: {error}".rstrip(": ")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence about an unknown name: ``did you mean 'otb'? Known: none, otb.``."""
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    known_are = f"did you mean {close[0]!r}? Known" if close else "known"
    return f"{known_are}: {', '.join(names)}."
