"""`chain_sum`: `12+7+30=` is answered by `12+7=19;19+30=49#49` and the end token."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from otb_analysis.config.tasks import ChainSumConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks.base import Prompt, SingleTurn, Split, Turn
from otb_analysis.tasks.splits import draw_prompt


class ChainSum(SingleTurn):
    """Add a chain of numbers, writing every partial sum; the reward is 1 for a right final number and an ended text.

    The split of a problem follows from a hash of its text, so train and held-out prompts are disjoint for every seed.

    Raises:
        InputError: The configured range of terms or values is empty.
    """

    name = "chain_sum"
    alphabet = "0123456789+=;#"

    def __init__(self, config: ChainSumConfig, seed: int = 0):
        if not 2 <= config.terms_min <= config.terms_max:
            raise InputError(
                f"chain_sum.terms_min is {config.terms_min} and terms_max is {config.terms_max}; "
                "choose 2 ≤ terms_min ≤ terms_max."
            )
        if not 1 <= config.largest <= 10**9:
            raise InputError(f"chain_sum.largest is {config.largest}; choose a number from 1 to 10^9.")
        if (config.largest**config.terms_max) < 100:
            raise InputError(
                f"chain_sum with largest={config.largest} and terms_max={config.terms_max} has too few problems "
                "to split; raise largest or terms_max."
            )
        self.config = config
        self.seed = seed

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split: drawn from (seed, split, index) until its hash falls into the split."""
        return draw_prompt(self.name, self.seed, split, index, self._draw)

    def _draw(self, rng: np.random.Generator) -> Prompt:
        count = rng.integers(self.config.terms_min, self.config.terms_max + 1)
        terms = [int(n) for n in rng.integers(1, self.config.largest + 1, size=count)]
        text = "+".join(map(str, terms)) + "="
        return Prompt(id=text, text=text, answer=str(sum(terms)))

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return the solution with every partial sum."""
        terms = [int(n) for n in prompt.text.rstrip("=").split("+")]
        sums = list(accumulate(terms))
        steps = [f"{a}+{n}={b}" for a, n, b in zip(sums, terms[1:], sums[1:], strict=False)]
        return [Turn(";".join(steps) + f"#{sums[-1]}", finished=True)]
