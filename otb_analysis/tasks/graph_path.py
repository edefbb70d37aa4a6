"""`graph_path`: find a way; `ab,cb,cd,ac:a>d=` is answered by `acd`, by `abcd`, or by any other walk from a to d."""

from collections.abc import Sequence
from itertools import pairwise
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np

from otb_analysis.config.tasks import GraphPathConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.tasks.base import Prompt, SingleTurn, Split, Turn
from otb_analysis.tasks.splits import draw_prompt

if TYPE_CHECKING:
    from networkx import Graph


class GraphPath(SingleTurn):
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

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split: the goal can be reached, in no fewer than `distance_min` edges."""
        return draw_prompt(self.name, self.seed, split, index, self._draw)

    def _draw(self, rng: np.random.Generator) -> Prompt | None:
        nodes, names = self.config.nodes, ascii_lowercase
        pairs = [(i, j) for i in range(nodes) for j in range(i)]
        chosen = rng.choice(len(pairs), size=self.config.edges, replace=False)
        turned = [pairs[k][::step] for k, step in zip(chosen, rng.choice([1, -1], size=len(chosen)), strict=True)]
        start, goal = (names[k] for k in rng.choice(nodes, size=2, replace=False))
        text = ",".join(names[i] + names[j] for i, j in turned) + f":{start}>{goal}="
        graph = self._graph(text)
        if start not in graph or goal not in graph or not self.networkx.has_path(graph, start, goal):
            return None
        path = self.networkx.shortest_path(graph, start, goal)
        if len(path) - 1 < self.config.distance_min:
            return None
        return Prompt(id=self._name(turned, start, goal), text=text, answer="".join(path))

    def _name(self, edges: Sequence[tuple[int, ...]], start: str, goal: str) -> str:
        """Name a problem alike in any order of its edges, and of their ends where they lead both ways."""
        ordered = edges if self.config.directed else [sorted(edge) for edge in edges]
        return ",".join(sorted(ascii_lowercase[i] + ascii_lowercase[j] for i, j in ordered)) + f":{start}>{goal}"

    def _graph(self, text: str) -> "Graph":
        edges = text.partition(":")[0].split(",")
        return (self.networkx.DiGraph if self.config.directed else self.networkx.Graph)(
            [(edge[0], edge[1]) for edge in edges]
        )

    def demonstration(self, prompt: Prompt) -> Sequence[Turn]:
        """Return a path without repetition, one of all at random, always the same for a problem."""
        start, goal = _ends(prompt.text)
        return [Turn(self._random_path(prompt.text, start, goal), finished=True)]

    def _random_path(self, text: str, start: str, goal: str) -> str:
        """Return a random path: at every node, one of those next to it from which the goal is still in reach."""
        rng = np.random.default_rng(list(text.encode()))
        graph, path = self._graph(text), [start]
        while path[-1] != goal:
            at, free = path[-1], graph.subgraph(set(graph) - set(path[:-1]))
            ways = [node for node in free[at] if self.networkx.has_path(free.subgraph(set(free) - {at}), node, goal)]
            path.append(ways[rng.integers(len(ways))])
        return "".join(path)

    def is_right(self, prompt: Prompt, text: str) -> bool:
        """Return whether the text is a walk along edges from start to goal.

        Nodes and edges may repeat, and the walk may pass its goal on the way; it must end there.
        """
        start, goal = _ends(prompt.text)
        graph = self._graph(prompt.text)
        along = all(graph.has_edge(a, b) for a, b in pairwise(text))
        return len(text) > 1 and text[0] == start and text[-1] == goal and along


def _ends(text: str) -> tuple[str, str]:
    start, _, goal = text.partition(":")[2].removesuffix("=").partition(">")
    return start, goal
