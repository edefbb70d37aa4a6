"""How long work reports its progress without knowing who watches."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol


class Bar(Protocol):
    """Called with what is done so far; a terminal draws it, a test ignores it."""

    def __call__(self, done: float, total: float, text: str) -> None:
        """Report `done` of `total` and the numbers people watch."""
        ...


def silent(done: float, total: float, text: str) -> None:
    """Ignore progress."""


class Watch:
    """The numbers people watch while a run goes on, as one line of text per step."""

    def __init__(self, run: str, first: int, total: int):
        """Start the clock.

        Args:
            run: Name of the run.
            first: The step it begins with.
            total: Steps it will have at its end.
        """
        self.run, self.first, self.total = run, first, total
        self.start = perf_counter()

    def line(self, step: int, scalars: Mapping[str, Any]) -> str:
        """Return reward, ‖ḡ‖, entropy, clipping, sampled tokens per second and the time left.

        The clip share is that of tokens under an objective with ratios; without one there is nothing to clip but ‖ḡ‖.

        Args:
            step: The step that was just stored.
            scalars: Its row of `steps`.
        """
        share = scalars.get("ratio_clip_share")
        clip = f"clip {share:.1%}" if share is not None else f"‖ḡ‖ {'' if scalars['clipped'] else 'not '}clipped"
        speed = scalars["n_tokens"] / max(scalars["seconds_sample"], 1e-9)
        spent = (perf_counter() - self.start) / (step + 1 - self.first)
        return (
            f"{self.run}: reward {scalars['reward_mean']:.2f}, ‖ḡ‖ {scalars['grad_norm']:.1f}, "
            f"entropy {scalars['entropy_mean'] or 0:.3f}, {clip}, {speed:,.0f} tokens/s, "
            f"{duration(spent * (self.total - step - 1))} left"
        )


def duration(seconds: float) -> str:
    """Return a time to read at a glance: 45 s, 3:05 min, 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    upper, lower = divmod(whole, 60) if whole < 3600 else divmod(whole // 60, 60)
    return f"{upper}:{lower:02d} {'min' if whole < 3600 else 'h'}"
