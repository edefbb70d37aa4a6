"""Weights in half precision as float32, for as long as they are measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.inputs import ScoreBatch
from otb_analysis.gradients.batch.memory import refuse_beyond


@contextmanager
def widened(batch: ScoreBatch) -> Iterator[ScoreBatch]:
    """The same batch on float32 copies of all weights in bfloat16 and float16, 4 bytes each.

    Products in half precision leave norms that are off by percents. Inside the block the model's layers hold the
    copies, of a tied weight one; afterwards its own tensors. Without such weights nothing is copied.

    Raises:
        InputError: The copies do not fit in memory.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in batch.model.modules():
        for held in (module._parameters, module._buffers):
            named = ((name, t) for name, t in held.items() if t is not None)
            places += [(held, name, t) for name, t in named if t.dtype in (torch.float16, torch.bfloat16)]
    own = {id(t): t for _, _, t in places}
    if not own:
        yield batch
        return
    needed = 4 * sum(t.numel() for t in own.values())
    refuse_beyond("float32 copies of the weights in half precision", needed, batch.scope.parameters[0].device)
    # New tensors instead of new `.data`: what else holds the parameters, an optimizer say, never sees the copies.
    wide: dict[int, Tensor] = {}
    for key, t in own.items():
        copy = t.detach().float()
        wide[key] = nn.Parameter(copy, t.requires_grad) if isinstance(t, nn.Parameter) else copy
    try:
        for held, name, t in places:
            held[name] = wide[id(t)]
        scope = batch.scope
        leaves = tuple(wide.get(id(p), p) for p in scope.parameters)
        if scope.head is not None:
            leaves = tuple(p.detach().requires_grad_() for p in scope.tensors)
        yield replace(batch, scope=replace(scope, parameters=leaves))
    finally:
        for held, name, t in places:
            held[name] = t
