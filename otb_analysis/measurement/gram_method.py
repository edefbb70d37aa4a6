"""Whether a step's Gram matrix is exact or estimated from count sketches: whichever memory and time allow."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from transformers import PreTrainedModel

from otb_analysis.gradients.batch.inputs import ScoreBatch, memory_bytes
from otb_analysis.gradients.batch.scope import select_scope
from otb_analysis.gradients.exact.gram import GRADIENT_BYTES
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.groups.blocks import structure_of
from otb_analysis.gradients.groups.layered import INPUT_BYTES
from otb_analysis.gradients.groups.vocabulary import LOGIT_BYTES, SLICE_BYTES
from otb_analysis.gradients.sketched.sketch import KEPT
from otb_analysis.measurement.level import positions, read_once
from otb_analysis.rollouts.models import output_layer
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Bool

# Beside a forward and backward pass of the same rollouts: the small model (0.4 M parameters, 26 tokens a rollout, 16
# prompts) and SmolLM2-135M (2 prompts; sketches after 41 tokens, half of the positions prompts).
#
#                                    0.4 M    135 M
#   exact                             9–15        9
#   sketched, 65,536 buckets         11–14    10–20
#
# Products grow with the square of the gradients: those of 257 took 11 passes of 4,480 positions of SmolLM2 (372
# processor seconds) in float64, half of that in float32, and some 4 times less beside the slower passes of the small
# model.
EXACT, SKETCHED = 16.0, 24.0
"""The Gram matrix of all estimators; the exact one times the share of positions left when prompts are read once."""
BASE, PRODUCT = 9.0, 0.25
"""The same of an exact one, its products apart; and these, times gradients² over positions."""
SLOWER = 2.0
"""An exact matrix may cost so many times a sketched one."""
PER_ROLLOUT, MOST = 3, 22
"""Gradients that 44 estimators of a prompt take: means of 6, 11, 20 and 22 were seen in groups of 2, 4, 8 and 16."""
DIM = 1 << 16
"""Buckets of a sketch: inner products are off by .4 % of ‖g‖‖g'‖, ratios of variances by less."""


@dataclass(frozen=True)
class GramMethod:
    """How the Gram matrix of some rollouts is measured, and what that takes."""

    dim: int | None  # Buckets of the sketches; None where it is exact
    memory: int  # Bytes beside the weights, one gradient and a micro-batch
    passes: float  # Cost in forward and backward passes of the rollouts
    reason: str = ""  # Why it is not exact


def gram_method(
    model: PreTrainedModel,
    rollouts: Rollouts,
    rows: Bool,
    wanted: Literal["auto", "exact", "sketch"],
    scope: str = "all",
) -> GramMethod:
    """Return how to measure some rows' groups: as wanted, or by `auto` exactly where memory and time allow it.

    The decision depends on the model and on the rollouts' lengths alone, so that it can be told before anything runs.
    """
    prompts, read = len(np.unique(rollouts.group[rows])), positions(rollouts, rows)
    each = min(PER_ROLLOUT * round(int(rows.sum()) / max(prompts, 1)), MOST)
    count, chosen = each * prompts, select_scope(model, scope)
    # A sketch holds the bucket of every parameter, float64 sums of one prompt's gradients, and all sketches.
    entries = {name: p.numel() for name, p in zip(chosen.names, chosen.tensors, strict=True)}
    total = sum(entries.values())
    memory = (4 * total if total <= KEPT else 0) + each * DIM * (8 + 4 * prompts)
    sketched = GramMethod(DIM, memory, SKETCHED, "it was asked for")
    if wanted == "sketch":
        return sketched
    # What `group_gradient_gram` holds and takes, in rounds of passes over the model or over each block.
    once = read_once(rollouts, rows)
    size, (vocabulary, width) = chosen.tensors[0].element_size(), next(output_layer(model).parameters()).shape
    try:
        structure = structure_of(ScoreBatch(model, (), (0, 0), np.zeros((0, 0), bool), chosen, 1.0))
    except UnfitError:  # the gradients are formed whole
        needed, signals, inputs = size * count * total, 0, 0
    else:
        needed = size * count * max((sum(entries[name] for name in names) for names in structure.inside), default=0)
        output = round(size * width * read * once)  # of one block, for all prompts
        blocks = len(structure.blocks)
        inputs = output * blocks if output * blocks <= INPUT_BYTES else output * blocks // math.isqrt(blocks)
        # Signals of every row at a block's output, at its input and at the embedding's output.
        signals = 3 * each * output
    most = memory_bytes(model.device) // 2
    # Two thirds of the signals, where they are more than `most`, go back two by two of bins that hold half of it.
    rounds = max(1, -(-needed // GRADIENT_BYTES)) * max(1, -(-4 * signals // (3 * most)) - 1)
    rest = min(needed, GRADIENT_BYTES) + inputs + 3 * 8 * count**2 + min(LOGIT_BYTES * vocabulary * read, SLICE_BYTES)
    exact = GramMethod(None, rest + min(signals, most), BASE * once * rounds + PRODUCT * count**2 / max(read, 1))
    fits = rest + min(signals, most // 2) <= most
    if wanted == "exact" or (fits and exact.passes <= SLOWER * SKETCHED):
        return exact
    too_large = f"an exact one would hold {exact.memory / 1e9:.1f} GB, of {2 * most / 1e9:.1f}"
    too_slow = f"an exact one would take {exact.passes / SKETCHED:.0f} times as long"
    return replace(sketched, reason=too_slow if fits else too_large)
