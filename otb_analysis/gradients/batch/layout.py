"""How the rollouts of one forward pass lie in it: a padded row for each, or their prefix tree in one row.

Rollouts of one prompt, side by side:      packed:

    P P P a b ·                            P P P a b c d e f
    P P P a c ·                            positions 0 1 2 3 4 4 3 4 5
    P P P d e f                            b reads P and a, c reads P and a, f reads P, d and e

The packed row reads everything that rollouts have in common once, prompt or sampled, and holds no padding; its
attention mask shows each token what stands before it in its own text, so every log-probability and every gradient is
that of the padded rows up to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from otb_analysis.gradients.batch.inputs import Rollout
from otb_analysis.gradients.batch.tree import Tree
from otb_analysis.types import Int

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
