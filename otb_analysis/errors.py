"""The ways in which work stops, each carrying one sentence: what, where, what to do.

An *instrument* that fails is none of them: it becomes a warning and a counted gap, and training goes on.
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
    """Another process of the run stopped, and so this one does; the sentence is the other's."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a sentence that says what was kept."""


STOPS = (InputError, StoreError, NonFiniteError, ProcessError)
"""What a command turns into one sentence and a non-zero exit; everything else is a bug and keeps its traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error sentence about an unknown name: ``did you mean 'otb'? Known: none, otb.``."""
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}."
