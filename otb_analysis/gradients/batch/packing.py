"""Which models follow a packed row: seen once, by comparing log-probabilities with those of padded rows."""

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


def layout_of(
    problem: ScoreBatch, rollouts: tuple[Rollout, ...], tree: Tree | None = None, dtype: torch.dtype | None = None
) -> Layout:
    """One packed row where that is less work and the model is seen to follow it, else a padded row for each rollout.

    A window of attention, or any other use of where tokens lie, shows in the log-probabilities as soon as it matters;
    so they are compared again for every rollout that is longer than those seen right before.

    Args:
        problem: Model and scope.
        rollouts: Those to run together; most is saved on those of one prompt.
        tree: Their prefix tree, where it is known.
        dtype: Of the activations, where they are not of the model's own dtype.
    """
    plain = padded(rollouts)
    attention = getattr(getattr(problem.model, "config", None), "_attn_implementation", None)
    kind = next(problem.model.parameters()).dtype
    tree = tree_of(rollouts) if tree is None else tree
    # In half precision rounding hides what a window of attention does: there nothing could be seen.
    if attention not in ("eager", "sdpa") or kind.itemsize < 4 or not packing_pays(tree):
        return plain
    one_row = packed(rollouts, tree, kind)
    longest, seen = max(int(r.targets[-1]) for r in rollouts), _PACKED.setdefault(problem.model, {})
    key = f"{attention} {kind}"
    if key not in seen or 0 < seen[key] < longest:
        seen[key] = longest if _same_logprobs(problem, rollouts, (plain, one_row)) else NEVER
    if seen[key] == NEVER:
        return plain
    return one_row if dtype in (None, kind) else packed(rollouts, tree, dtype)


@torch.no_grad()
def _same_logprobs(problem: ScoreBatch, rollouts: tuple[Rollout, ...], layouts: tuple[Layout, Layout]) -> bool:
    expected = sampled_logprobs(problem, rollouts, layouts[0])
    try:
        found = sampled_logprobs(problem, rollouts, layouts[1])
    except (RuntimeError, ValueError, TypeError, IndexError, NonFiniteError):  # a model that takes no such mask
        return False
    return torch.allclose(found, expected, rtol=0, atol=1e-4)
