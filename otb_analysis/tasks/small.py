"""Small tasks of one turn whose problems are drawn from a seed.

- `chain_sum`: `12+7+30=` is answered by `12+7=19;19+30=49#49` and the end token.
- `counting`: how often does a letter occur; `abcab?a=` is answered by `a1bca2b#2`, or by `#2` at once.
- `graph_path`: find a way; `ab,cb,cd,ac:a>d=` is answered by `acd`, by `abcd`, or by any other walk from a to d.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np

from otb_analysis.config.train import ChainSumConfig, CountingConfig, GraphPathConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.tasks.base import DrawnProblems, Prompt, SingleTurn, Turn

if TYPE_CHECKING:
    from networkx import Graph


class ChainSum(DrawnProblems, SingleTurn):
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
        self.config, self.seed = config, seed

    def draw(self, rng: np.random.Generator) -> Prompt:
        """Return a chain of random length."""
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


class Counting(DrawnProblems, SingleTurn):
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

    def draw(self, rng: np.random.Generator) -> Prompt:
        """Return a text of random length with an evenly drawn count."""
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


class GraphPath(DrawnProblems, SingleTurn):
    """Walk from a start to a goal along given edges; any walk that arrives is paid 1, so right answers vary in length.

    A problem in another order of its edges is the same one, for the splits too. Demonstrations are paths without
    repetition, drawn at random from all of them and so of any length; the draw follows from the problem's text.

    Raises:
        InputError: The configured graph cannot exist.
    """

    name = "graph_path"
    alphabet = f"{ascii_lowercase},:>="

    def __init__(self, config: GraphPathConfig, seed: int = 0):
        if not 3 <= config.nodes <= len(ascii_lowercase):
            raise InputError(f"graph_path.nodes is {config.nodes}; choose a number from 3 to 26.")
        most = config.nodes * (config.nodes - 1) // 2
        if not 2 <= config.edges <= min(most, 60):
            raise InputError(
                f"graph_path.edges is {config.edges} but {config.nodes} nodes have {most} pairs; "
                f"choose from 2 to {min(most, 60)}."
            )
        if not 1 <= config.distance_min < config.nodes:
            raise InputError(
                f"graph_path.distance_min is {config.distance_min}; choose from 1 to {config.nodes - 1}, below nodes."
            )
        require("networkx", "the task graph_path")
        import networkx

        self.config, self.seed, self.networkx = config, seed, networkx

    def draw(self, rng: np.random.Generator) -> Prompt | None:
        """Return a problem whose goal can be reached, in no fewer than `distance_min` edges."""
        nodes, names = self.config.nodes, ascii_lowercase
        pairs = [(i, j) for i in range(nodes) for j in range(i)]
        chosen = rng.choice(len(pairs), size=self.config.edges, replace=False)
        turned = [pairs[k][::step] for k, step in zip(chosen, rng.choice([1, -1], size=len(chosen)), strict=True)]
        first, last = (names[k] for k in rng.choice(nodes, size=2, replace=False))
        text = ",".join(names[i] + names[j] for i, j in turned) + f":{first}>{last}="
        graph, start, goal = self._parsed(text)
        if start not in graph or goal not in graph or not self.networkx.has_path(graph, start, goal):
            return None
        path = self.networkx.shortest_path(graph, start, goal)
        if len(path) - 1 < self.config.distance_min:
            return None
        # Named alike in any order of its edges, and of their ends where they lead both ways.
        ordered = turned if self.config.directed else [sorted(edge) for edge in turned]
        name = ",".join(sorted(names[i] + names[j] for i, j in ordered)) + f":{start}>{goal}"
        return Prompt(id=name, text=text, answer="".join(path))

    def _parsed(self, text: str) -> tuple["Graph", str, str]:
        """Return a problem's graph, its start and its goal."""
        edges, _, ends = text.removesuffix("=").partition(":")
        kind = self.networkx.DiGraph if self.config.directed else self.networkx.Graph
        start, _, goal = ends.partition(">")
        return kind([(edge[0], edge[1]) for edge in edges.split(",")]), start, goal

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return a path without repetition, one of all at random, always the same for a problem.

        At every node the next is one of those next to it from which the goal is still in reach.
        """
        graph, start, goal = self._parsed(prompt.text)
        rng, path = np.random.default_rng(list(prompt.text.encode())), [start]
        while path[-1] != goal:
            at, free = path[-1], graph.subgraph(set(graph) - set(path[:-1]))
            ways = [node for node in free[at] if self.networkx.has_path(free.subgraph(set(free) - {at}), node, goal)]
            path.append(ways[rng.integers(len(ways))])
        return [Turn("".join(path), finished=True)]

    def is_right(self, prompt: Prompt, text: str) -> bool:
        """Return whether the text is a walk along edges from start to goal.

        Nodes and edges may repeat, and the walk may pass its goal on the way; it must end there.
        """
        graph, start, goal = self._parsed(prompt.text)
        along = all(graph.has_edge(a, b) for a, b in pairwise(text))
        return len(text) > 1 and text[0] == start and text[-1] == goal and along
