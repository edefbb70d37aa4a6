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
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from otb_analysis.gradients.batch.inputs import Rollout
from otb_analysis.types import Int


@dataclass(frozen=True)
class Tree:
    """Every distinct beginning of some texts is a node, named by its last token; parents come before their children."""

    token: Int  # Last token of each beginning [n]
    parent: Int  # Node of the beginning without it [n]; −1 for a first token
    depth: Int  # Index of that token in its text [n]
    paths: tuple[Int, ...]  # By text, the nodes of its beginnings, shortest first
    read: Int  # Increasing nodes that some text reads before its last token


def tree_of(rollouts: Sequence[Rollout]) -> Tree:
    """Build the tree of some rollouts, each up to its last sampled token."""
    known: dict[tuple[int, int], int] = {}
    paths, depth = [], []
    for rollout in rollouts:
        node, path = -1, []
        for index, token in enumerate(rollout.ids[: rollout.length + 1].tolist()):
            before = len(known)
            node = known.setdefault((node, token), before)
            if node == before:
                depth.append(index)
            path.append(node)
        paths.append(np.array(path, dtype=np.int64))
    parent, token = np.array(list(known), dtype=np.int64).reshape(-1, 2).T
    read = np.unique(np.concatenate([path[:-1] for path in paths])) if paths else token[:0]
    return Tree(token, parent, np.array(depth, dtype=np.int64), tuple(paths), read)


def sampled_nodes(rollouts: Sequence[Rollout], tree: Tree) -> Int:
    """Return the node of every sampled token [Σ K]: equal nodes have equal scores."""
    return np.concatenate([path[r.targets.cpu().numpy()] for r, path in zip(rollouts, tree.paths, strict=True)])


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
    nodes = tree.read
    place = np.full(len(tree.token) + 1, -1)
    place[nodes] = np.arange(len(nodes))
    # Node i reads node j: j is i or stands before it in its text. A parent comes before its children, so its row is
    # complete. place[-1] stays −1: a first token has no parent.
    reads = np.eye(len(nodes), dtype=bool)
    for i, parent in enumerate(place[tree.parent[nodes]]):
        if parent >= 0:
            reads[i] |= reads[parent]
    mask = torch.zeros(1, 1, len(nodes), len(nodes), dtype=dtype, device=device)
    # Additive, not boolean: eager attention adds what it is given. The least finite number is what the
    # models themselves put into their masks.
    mask.masked_fill_(~torch.from_numpy(reads).to(device), torch.finfo(dtype).min)
    # A token is predicted at the node before it, which several tokens may share.
    before = [path[r.targets.cpu().numpy() - 1] for r, path in zip(rollouts, tree.paths, strict=True)]
    keep, at = np.unique(np.searchsorted(nodes, np.concatenate(before)), return_inverse=True)
    ids, keep, at, positions = (
        torch.from_numpy(x).to(device) for x in (tree.token[nodes], keep, at, tree.depth[nodes])
    )
    return Layout(ids[None], keep, at, {"attention_mask": mask, "position_ids": positions[None]})


def packing_pays(tree: Tree) -> bool:
    """Whether one packed row is less work than a padded row for each rollout."""
    lengths = np.array([len(path) - 1 for path in tree.paths])
    row = len(tree.read)
    short = row <= PACKED_ALWAYS or row * row <= PACKED_RATIO * int((lengths**2).sum())
    return short and row < len(lengths) * int(lengths.max())
