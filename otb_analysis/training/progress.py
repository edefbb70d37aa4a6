"""How long work reports its progress without knowing who watches."""

from typing import Protocol


class Bar(Protocol):
    """Called with what is done so far; a terminal draws it, a test ignores it."""

    def __call__(self, done: float, total: float, text: str) -> None:
        """Report `done` of `total` and the numbers people watch."""
        ...


def silent(done: float, total: float, text: str) -> None:
    """Ignore progress."""
