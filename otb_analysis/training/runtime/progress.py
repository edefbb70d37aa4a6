"""How a run reports its steps, whoever watches. The phases inside a step are reported by `phases`."""

import warnings
from collections.abc import Mapping
from typing import Any, Protocol


class Bar(Protocol):
    """Called with what is done so far; a terminal draws it, a test ignores it."""

    def __call__(self, done: float, total: float, text: str) -> None:
        """Report `done` of `total` and the numbers people watch."""
        ...


def silent(done: float, total: float, text: str) -> None:
    """Ignore progress."""


def unfailing(bar: Bar) -> Bar:
    """Return a bar that is silent after its first failure, which is one warning: a bar must not stop a run."""
    failed = False

    def guarded(done: float, total: float, text: str) -> None:
        nonlocal failed
        if failed:
            return
        try:
            bar(done, total, text)
        except Exception as error:
            failed = True
            warnings.warn(f"progress is no longer shown: {error}", RuntimeWarning, stacklevel=2)

    return guarded


def step_line(run: str, step: int, total: int, scalars: Mapping[str, Any]) -> str:
    """Return one row of `steps` as a line: reward, ‖ḡ‖, entropy, clipping, sampled tokens per second.

    With importance ratios the line shows the share of clipped tokens, otherwise whether ‖ḡ‖ was clipped.
    """
    share = scalars.get("ratio_clip_share")
    clip = f"clip {share:.1%}" if share is not None else f"‖ḡ‖ {'' if scalars['clipped'] else 'not '}clipped"
    speed = scalars["n_tokens"] / max(scalars["seconds_sample"], 1e-9)
    return (
        f"{run}: {step + 1} of {total} steps, reward {scalars['reward_mean']:.2f}, ‖ḡ‖ {scalars['grad_norm']:.1f}, "
        f"entropy {scalars['entropy_mean'] or 0:.3f}, {clip}, {speed:,.0f} tokens/s"
    )
