"""The prefix tree of some rollouts: what they read or sampled in common, once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class Tree:
    """Every distinct beginning of some texts is a node, named by its last token; parents come before their children."""

    token: Int  # Last token of each beginning [n]
    parent: Int  # Node of the beginning without it [n]; −1 for a first token
    depth: Int  # Index of that token in its text [n]
    paths: tuple[Int, ...]  # By text, the nodes of its beginnings, shortest first

    def reads(self, nodes: Int) -> Bool:
        """Whether node i reads node j [|nodes|, |nodes|]: j is i or stands before it in its text.

        `nodes` increase, and hold with each node all that stand before it.
        """
        place = np.full(len(self.token) + 1, -1)
        place[nodes] = np.arange(len(nodes))
        reads = np.eye(len(nodes), dtype=bool)
        # A parent comes before its children, so its row is complete. place[-1] stays −1: a first token has no parent.
        for i, parent in enumerate(place[self.parent[nodes]]):
            if parent >= 0:
                reads[i] |= reads[parent]
        return reads


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
    return prefix_tree([r.ids[: r.length + 1].tolist() for r in rollouts])


def sampled_nodes(rollouts: Sequence[Rollout], tree: Tree) -> Int:
    """Return the node of every sampled token [Σ K]: equal nodes have equal scores."""
    return np.concatenate([path[r.targets.cpu().numpy()] for r, path in zip(rollouts, tree.paths, strict=True)])


def distinct(batch: ScoreBatch) -> tuple[Bool, tuple[Int, Int]]:
    """Tell which sampled tokens are enough [N, L]: those whose text up to them no earlier rollout has sampled too.

    Returns also, for every true entry of the mask in its order, row and column of the token that stands for it.
    """
    rows, columns = np.nonzero(batch.mask)
    # Equal nodes have equal texts, so equal scores; the first of them is measured for all.
    _, first, twin = np.unique(
        sampled_nodes(batch.rollouts, tree_of(batch.rollouts)), return_index=True, return_inverse=True
    )
    kept = np.zeros_like(batch.mask)
    kept[rows[first], columns[first]] = True
    return kept, (rows[first[twin]], columns[first[twin]])


def distinct_rollouts(batch: ScoreBatch, weights: Float) -> tuple[ScoreBatch, Int]:
    """Leave out every rollout that has another one's text and weights; return also the row of each one's twin [N]."""
    twin, known, kept = np.arange(batch.shape[0]), dict[tuple[bytes, ...], int](), []
    for rollout in batch.rollouts:
        rows = weights[rollout.row][:, rollout.columns]
        key = tuple(x.tobytes() for x in (rollout.ids.cpu().numpy(), rollout.targets.cpu().numpy(), rows))
        twin[rollout.row] = known.setdefault(key, rollout.row)
        if twin[rollout.row] == rollout.row:
            kept.append(rollout)
    return replace(batch, rollouts=tuple(kept)), twin
