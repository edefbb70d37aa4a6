"""The Gram matrix of group gradients from their count sketches: for models whose gradients do not fit side by side."""

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.gradients.batch.inputs import Batch, Weights, check_group, check_weights, prepare
from otb_analysis.gradients.exact.gram import add_products
from otb_analysis.gradients.groups.group_gram import basis_weights, mixed, prompts_of
from otb_analysis.gradients.sketched.sketch import gradient_sketch, widened_if_it_fits
from otb_analysis.types import Float


@torch.inference_mode(False)
@torch.enable_grad()
def sketched_group_gram(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    weights: Weights,
    group: Tensor | np.ndarray,
    attention_mask: Tensor | None = None,
    *,
    dim: int = 65536,
    seed: int = 0,
    scope: str = "all",
    temperature: float = 1.0,
) -> Float:
    """Estimate what `group_gradient_gram` returns [M, M, P, P], from `gradient_sketch` of each prompt's basis rows.

    Every entry is unbiased over seeds, with standard deviation at most √((‖g‖²‖g'‖² + ⟨g,g'⟩²)/dim): .4 % of ‖g‖‖g'‖
    at 65,536 where p ≠ p'. Batch variances and their ratios are far better, since rows share their sketch
    (`statistics.sketch_noise`). Equal rows of weights have equal products.

    Costs a forward pass of every rollout and r + 1 passes of a prompt's rollouts, r ≤ M the rank of its rows. It holds
    one gradient, one micro-batch and 4·r·P·dim bytes, whereas `group_gradient_gram` holds the backward signals of all
    prompts. The arguments are those of `group_gradient_gram` and `gradient_sketch`.

    Raises:
        InputError: An argument does not fit, or so many buckets do not fit in memory; the sentence says what to do.
        NonFiniteError: A logit or a weight is NaN or infinite; the sentence names rollout and token.
    """
    options = {"scope": scope, "temperature": temperature}
    with widened_if_it_fits(model):
        batch = prepare(model, Batch(input_ids, mask, attention_mask), **options)
        checked, member = check_weights(weights, batch.mask), check_group(group, batch.shape[0])
        prompts = prompts_of(batch, checked, member)
        basis = basis_weights(batch, prompts, checked.shape)
        sketch = gradient_sketch(model, input_ids, mask, basis, member, attention_mask, dim=dim, seed=seed, **options)
    rows = [row for prompt, part in zip(prompts, sketch, strict=True) for row in part[: len(prompt.basis.rows)]]
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device="cpu")
    if rows:
        add_products(total, [torch.from_numpy(row)[None] for row in rows])
    return mixed(total.numpy(), prompts)
