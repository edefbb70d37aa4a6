"""How the rollouts of one forward pass lie in it: a padded row for each, or their prefix tree in one row.

Rollouts of one prompt, side by side:      packed:

    P P P a b ·                            P P P a b c d e f
    P P P a c ·                            positions 0 1 2 3 4 4 3 4 5
    P P P d e f                            b reads P and a, c reads P and a, f reads P, d and e

The packed row reads everything that rollouts have in common once, prompt or sampled, and holds no padding; its
attention mask shows each token what stands before it in its own text, so every log-probability and every gradient is
that of the padded rows up to rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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


PACKED_ALWAYS, PACKED_RATIO = 1024, 4
"""Attention works on all pairs of a packed row's positions, four times those of the rollouts at most; where a row is
short its attention costs little beside its layers."""


@dataclass(frozen=True)
class Layout:
    """What a model is called with, and where it predicts the sampled tokens."""

    ids: Tensor  # Token ids [n, ℓ]
    keep: Tensor  # Increasing positions at which some sampled token is predicted [|keep|]
    # Row of each sampled token [Σ K] among the n · |keep| predictions; None where that is their order
    at: Tensor | None
    # Attention mask and position ids, where the model's own defaults would not do
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def pick(self, values: Tensor) -> Tensor:
        """Return one row per sampled token [Σ K, ·] of values at all positions [n, ℓ, ·] or at the kept ones."""
        kept = values if values.shape[1] == len(self.keep) else values[:, self.keep]
        flat = kept.flatten(0, 1)
        return flat if self.at is None else flat.index_select(0, self.at)


def padded(rollouts: tuple[Rollout, ...]) -> Layout:
    """Return one row per rollout, padded on the right, where causal attention never looks."""
    # No attention mask says what is padding: in a sliding window that holds padding only, it would leave nothing to
    # attend to, and the NaN of that row would reach the real tokens of later layers as 0 · NaN.
    # The output layer is the widest: it runs at the union of all rows' positions only.
    keep = torch.cat([r.targets for r in rollouts]).unique() - 1
    prefixes = [r.ids[: r.length] for r in rollouts]
    ids = pad_sequence(prefixes, batch_first=True)
    at = None
    if len(rollouts) * len(keep) > sum(len(r.targets) for r in rollouts):
        at = torch.cat([n * len(keep) + torch.searchsorted(keep, r.targets - 1) for n, r in enumerate(rollouts)])
    return Layout(ids, keep, at)


def packed(rollouts: tuple[Rollout, ...], tree: Tree, dtype: torch.dtype) -> Layout:
    """Return one row of all that the rollouts read; `dtype` is that of the activations."""
    device = rollouts[0].ids.device
    nodes = read_nodes(tree)
    mask = torch.zeros(1, 1, len(nodes), len(nodes), dtype=dtype, device=device)
    # Additive, not boolean: eager attention adds what it is given. The least finite number is what the
    # models themselves put into their masks.
    mask.masked_fill_(~torch.from_numpy(tree.reads(nodes)).to(device), torch.finfo(dtype).min)
    # A token is predicted at the node before it, which several tokens may share.
    before = [path[r.targets.cpu().numpy() - 1] for r, path in zip(rollouts, tree.paths, strict=True)]
    keep, at = np.unique(np.searchsorted(nodes, np.concatenate(before)), return_inverse=True)
    ids, keep, at, positions = (
        torch.from_numpy(x).to(device) for x in (tree.token[nodes], keep, at, tree.depth[nodes])
    )
    return Layout(ids[None], keep, at, {"attention_mask": mask, "position_ids": positions[None]})


def read_nodes(tree: Tree) -> Int:
    """Return the nodes that some rollout reads before it samples its last token, increasing."""
    return np.unique(np.concatenate([path[:-1] for path in tree.paths]))


def packing_pays(tree: Tree) -> bool:
    """Whether one packed row is less work than a padded row for each rollout."""
    lengths = np.array([len(path) - 1 for path in tree.paths])
    row = len(read_nodes(tree))
    short = row <= PACKED_ALWAYS or row * row <= PACKED_RATIO * int((lengths**2).sum())
    return short and row < len(lengths) * int(lengths.max())
