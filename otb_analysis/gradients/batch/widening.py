"""Where every measurement begins: a checked batch, and a model whose weights are in float32 or better."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.inputs import Batch, ScoreBatch, prepare
from otb_analysis.gradients.batch.kernels import plain_attention, replaced
from otb_analysis.gradients.batch.memory import refuse_beyond
from otb_analysis.gradients.batch.scope import select_scope
from otb_analysis.gradients.batch.soft import SoftTokens


@contextmanager
def measured(
    model: nn.Module, batch: Batch, scope: str, temperature: float, soft: SoftTokens | None = None
) -> Iterator[ScoreBatch]:
    """Check a batch as `prepare` does; inside the block the model's weights are `widened`."""
    checked = prepare(model, batch, scope, temperature, soft=soft)
    with widened(checked.model) as copied:
        yield replace(checked, scope=select_scope(checked.model, scope)) if copied else checked


@contextmanager
def widened(model: nn.Module) -> Iterator[bool]:
    """Put float32 copies in place of all weights in bfloat16 and float16, 4 bytes each; tell whether there are any.

    Products in half precision leave norms that are off by percents. Inside the block the model's layers hold the
    copies, of a tied weight one, and attention is by a kernel that takes them; afterwards all is as it was. A block
    inside of another one copies nothing.

    Raises:
        InputError: The copies do not fit in memory.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            named = ((name, t) for name, t in held.items() if t is not None)
            places += [(held, name, t) for name, t in named if t.dtype in (torch.float16, torch.bfloat16)]
    own = {id(t): t for _, _, t in places}
    if not own:
        yield False
        return
    needed = 4 * sum(t.numel() for t in own.values())
    refuse_beyond("float32 copies of the weights in half precision", needed, next(iter(own.values())).device)
    # New tensors instead of new `.data`: what else holds the parameters, an optimizer say, never sees the copies.
    wide: dict[int, Tensor] = {}
    for key, t in own.items():
        copy = t.detach().float()
        wide[key] = nn.Parameter(copy, t.requires_grad) if isinstance(t, nn.Parameter) else copy
    with ExitStack() as undo:
        for held, name, t in places:
            undo.enter_context(replaced(held, name, wide[id(t)]))
        undo.enter_context(plain_attention(model))
        yield True
