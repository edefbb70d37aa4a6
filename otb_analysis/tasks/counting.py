"""`counting`: how often does a letter occur; `abcab?a=` is answered by `a1bca2b#2`, or by `#2` at once."""

from collections.abc import Sequence
from string import ascii_lowercase

import numpy as np

from otb_analysis.config.tasks import CountingConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks.base import Prompt, SingleTurn, Split, Turn
from otb_analysis.tasks.splits import draw_prompt


class Counting(SingleTurn):
    """Count the occurrences of one letter; the reward is 1 for the right number at the end of an ended text.

    Counts are drawn evenly from 0 to the text's length, so guessing pays 1 in length + 1. The demonstration either
    goes through the text writing the count after every occurrence (`running`), or gives the number at once (`direct`):
    then the count has to be read out of the hidden state.

    Raises:
        InputError: A configured range is empty or exceeds the alphabet.
    """

    name = "counting"
    alphabet = f"0123456789{ascii_lowercase}?=#"

    def __init__(self, config: CountingConfig, seed: int = 0):
        if not 1 <= config.length_min <= config.length_max <= 500:
            raise InputError(
                f"counting.length_min is {config.length_min} and length_max is {config.length_max}; "
                "choose 1 ≤ length_min ≤ length_max ≤ 500."
            )
        if not 2 <= config.letters <= len(ascii_lowercase):
            raise InputError(f"counting.letters is {config.letters}; choose a number from 2 to 26.")
        if config.letters**config.length_max < 100:
            raise InputError(
                f"counting with letters={config.letters} and length_max={config.length_max} has too few problems "
                "to split; raise letters or length_max."
            )
        self.config, self.seed = config, seed

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split."""
        return draw_prompt(self.name, self.seed, split, index, self._draw)

    def _draw(self, rng: np.random.Generator) -> Prompt:
        length = int(rng.integers(self.config.length_min, self.config.length_max + 1))
        target = int(rng.integers(self.config.letters))
        count = int(rng.integers(length + 1))
        others = (target + rng.integers(1, self.config.letters, size=length - count)) % self.config.letters
        items = rng.permutation(np.concatenate([np.full(count, target), others]))
        text = "".join(ascii_lowercase[k] for k in items) + f"?{ascii_lowercase[target]}="
        return Prompt(id=text, text=text, answer=str(count))

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return the text with the count after every occurrence and the result, or the result alone."""
        if self.config.show == "direct":
            return [Turn(f"#{prompt.answer}", finished=True)]
        items, target = prompt.text.removesuffix("=").split("?")
        written, count = "", 0
        for item in items:
            count += item == target
            written += f"{item}{count}" if item == target else item
        return [Turn(f"{written}#{count}", finished=True)]
