"""Problems drawn from a seed, each of which belongs to one split for good."""

import hashlib
from collections.abc import Callable

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.tasks.base import Prompt, Split

HELDOUT_SHARE = 0.1
MOST_DRAWS = 20_000  # Draws after which a split counts as empty


def split_of(name: str, share: float = HELDOUT_SHARE) -> Split:
    """Return the split of a problem: a hash of its name decides, so that it is the same for every seed and machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < share * 2**64 else "train"


def draw_prompt(
    name: str, seed: int, split: Split, index: int, draw: Callable[[np.random.Generator], Prompt | None]
) -> Prompt:
    """Return problem `index` of a split: drawn from (seed, split, index) until one is fit and falls into the split.

    Args:
        draw: Makes a problem from random numbers, or None when what came out is not fit; its id decides the split.

    Raises:
        InputError: None of many draws was in the split.
    """
    rng = np.random.default_rng([seed, split == "heldout", index])
    for _ in range(MOST_DRAWS):
        prompt = draw(rng)
        if prompt is not None and split_of(prompt.id) == split:
            return prompt
    raise InputError(
        f"{name} found no problem for the {split} split in {MOST_DRAWS} draws; widen the ranges of its settings."
    )
