"""Short names for prompts that begin alike: the part in which they differ."""

import os
from collections.abc import Mapping

MOST = 60
"""Characters of a label."""
LEAD = 12
"""Characters of what they share that stay in front of the part that differs."""


def distinct(prompts: Mapping[int, str], most: int = MOST) -> dict[int, str]:
    """Return for each prompt at most `most` characters from where it begins to differ from the others.

    White space counts as one blank. Prompts that share less than a label's length start at their beginning.
    """
    texts = {group: " ".join(text.split()) for group, text in prompts.items()}
    shared = len(os.path.commonprefix(list(texts.values()))) if len(texts) > 1 else 0  # noqa: RUF071 (characters)
    start = shared - LEAD if shared > most // 2 else 0
    return {group: _cut(text, start, most) for group, text in texts.items()}


def _cut(text: str, start: int, most: int) -> str:
    part = ("…" if start else "") + text[start:]
    return part if len(part) <= most else part[: most - 1] + "…"
