"""Which models give a packed row the log-probabilities of padded rows: both are compared at first use."""

from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import nn

from otb_analysis.errors import NonFiniteError
from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch
from otb_analysis.gradients.batch.layout import Layout, packed, packing_pays, padded
from otb_analysis.gradients.batch.tree import Tree, tree_of

NEVER = -1
_PACKED: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""By model, kind of attention and dtype, how long the rollouts are up to which packing was seen right, or NEVER."""


def layout_of(batch: ScoreBatch, rollouts: tuple[Rollout, ...], tree: Tree | None = None) -> Layout:
    """One packed row where that is less work and the model gives it the same numbers, else a padded row per rollout."""
    plain = padded(rollouts)
    attention = getattr(getattr(batch.model, "config", None), "_attn_implementation", None)
    kind = next(batch.model.parameters()).dtype
    tree = tree_of(rollouts) if tree is None else tree
    # Weights that are packed in bytes have activations of some other dtype.
    if attention not in ("eager", "sdpa") or kind.itemsize < 4 or not packing_pays(tree):
        return plain
    one_row = packed(rollouts, tree, kind)
    longest, seen = max(r.length for r in rollouts), _PACKED.setdefault(batch.model, {})
    key = f"{attention} {kind}"
    # A window of attention, or any other use of where tokens lie, shows in the log-probabilities as soon as it matters.
    # So they are compared again for every rollout that is longer than those seen right before.
    if key not in seen or 0 < seen[key] < longest:
        with torch.no_grad():
            expected, seen[key] = sampled_logprobs(batch, rollouts, plain), NEVER
            # An error is how a model says that it takes no such mask.
            with suppress(RuntimeError, ValueError, TypeError, IndexError, NonFiniteError):
                got = sampled_logprobs(batch, rollouts, one_row)
                seen[key] = longest if torch.allclose(got, expected, rtol=0, atol=1e-4) else NEVER
    return plain if seen[key] == NEVER else one_row
