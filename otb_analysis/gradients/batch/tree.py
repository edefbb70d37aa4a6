"""The prefix tree of some rollouts: what they read or sampled in common, once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class Tree:
    """Every distinct beginning of some texts is a node, named by its last token; parents come before their children.

    Attributes:
        token: Last token of each beginning [n].
        parent: Node of the beginning without it [n]; −1 for a first token.
        depth: Index of that token in its text [n].
        paths: By text, the nodes of its beginnings, shortest first.
    """

    token: Int
    parent: Int
    depth: Int
    paths: tuple[Int, ...]

    def reads(self, nodes: Int) -> Bool:
        """Whether node i reads node j [|nodes|, |nodes|]: j is i or stands before it in its text.

        Args:
            nodes: Increasing, each with all nodes before it in its text.
        """
        place = np.full(len(self.token) + 1, -1)
        place[nodes] = np.arange(len(nodes))
        found = np.eye(len(nodes), dtype=bool)
        for i, parent in enumerate(place[self.parent[nodes]]):  # place[-1] stays −1: a first token has no parent
            if parent >= 0:
                found[i] |= found[parent]
        return found


def prefix_tree(texts: Sequence[Sequence[int]]) -> Tree:
    """Build the tree of some token ids."""
    known: dict[tuple[int, int], int] = {}
    paths, depth = [], []
    for text in texts:
        node, path = -1, []
        for index, token in enumerate(text):
            before = len(known)
            node = known.setdefault((node, token), before)
            if node == before:
                depth.append(index)
            path.append(node)
        paths.append(np.array(path, dtype=np.int64))
    parent, token = np.array(list(known), dtype=np.int64).reshape(-1, 2).T
    return Tree(token, parent, np.array(depth, dtype=np.int64), tuple(paths))


def tree_of(rollouts: Sequence[Rollout]) -> Tree:
    """Return the tree of some rollouts, each up to its last sampled token."""
    return prefix_tree([r.ids[: int(r.targets[-1]) + 1].tolist() for r in rollouts])


def sampled_nodes(rollouts: Sequence[Rollout], tree: Tree) -> Int:
    """Return the node of every sampled token [Σ K]: equal nodes have equal scores."""
    return np.concatenate([path[r.targets.cpu().numpy()] for r, path in zip(rollouts, tree.paths, strict=True)])


@dataclass(frozen=True)
class Distinct:
    """A batch in which every score is sampled once, and where each of the others has its twin.

    Attributes:
        problem: The batch without the repeated tokens.
        rows: By sampled token of the whole batch, row and column of its twin in `problem`.
        columns: The same; both in the order of the whole batch's rollouts.
    """

    problem: ScoreBatch
    rows: Int
    columns: Int

    def spread(self, values: Float, into: ScoreBatch) -> Float:
        """Give every sampled token of the whole batch its twin's number [N, L]."""
        result = np.zeros(into.shape)
        rows = np.concatenate([np.full(len(r.columns), r.row) for r in into.rollouts])
        columns = np.concatenate([r.columns for r in into.rollouts])
        result[rows, columns] = values[self.rows, self.columns]
        return result


def distinct(problem: ScoreBatch) -> Distinct:
    """Leave out every sampled token whose text up to it another rollout has sampled too: the scores are the same."""
    if not problem.rollouts:
        return Distinct(problem, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    nodes = sampled_nodes(problem.rollouts, tree_of(problem.rollouts))
    _, first, twin = np.unique(nodes, return_index=True, return_inverse=True)
    rows = np.concatenate([np.full(len(r.columns), r.row) for r in problem.rollouts])
    columns = np.concatenate([r.columns for r in problem.rollouts])
    kept, start, rollouts = np.isin(np.arange(len(nodes)), first), 0, []
    for rollout in problem.rollouts:
        own = kept[start : (start := start + len(rollout.columns))]
        if own.any():
            at = np.flatnonzero(own)
            rollouts.append(replace(rollout, targets=rollout.targets[at], columns=rollout.columns[at]))
    return Distinct(replace(problem, rollouts=tuple(rollouts)), rows[first[twin]], columns[first[twin]])


def distinct_rollouts(problem: ScoreBatch, weights: Float) -> tuple[ScoreBatch, Int]:
    """Leave out every rollout that has another one's text and weights; return also the row of each one's twin [N].

    Args:
        problem: The checked batch.
        weights: Rows of weights [N, M, L].
    """
    twin, known, kept = np.arange(problem.shape[0]), dict[tuple[bytes, ...], int](), []
    for rollout in problem.rollouts:
        own = weights[rollout.row][:, rollout.columns]
        key = tuple(x.tobytes() for x in (rollout.ids.cpu().numpy(), rollout.targets.cpu().numpy(), own))
        twin[rollout.row] = known.setdefault(key, rollout.row)
        if twin[rollout.row] == rollout.row:
            kept.append(rollout)
    return replace(problem, rollouts=tuple(kept)), twin
