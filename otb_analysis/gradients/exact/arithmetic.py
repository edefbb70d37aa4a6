"""In which arithmetic gradients are measured: coarser products where a device has them and the probe allows them."""

import torch
from torch import Tensor, nn

from otb_analysis.devices import forms_products, products
from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.inputs import Batch, Rollout
from otb_analysis.gradients.batch.widening import measured
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.exact.verdicts import reference_norms, refuse_difference


@torch.enable_grad()
def arithmetic(model: nn.Module, asked: str, scope: str = "all", temperature: float = 1.0) -> tuple[str, str]:
    """Return how products are formed while a model is measured, as asked for or else float32, and why.

    Plain backward passes with `asked` products must give the probe's log-probabilities within 1e-4 nats, and ‖s_t‖² of
    every parameter within 1e-3 of those with float32 products: what an engine must do to be used (`verdicts`).

    Raises:
        InputError: PyTorch has no such products on the model's device, or the scope holds nothing.
    """
    device = next(model.parameters()).device
    if asked == "float32":
        return asked, ""
    if asked == "bfloat16" and device.type != "cpu":
        raise InputError(
            f"--precision is bfloat16, but products of float32 numbers have no such form on {device.type} in PyTorch; "
            "pass tf32."
        )
    if not forms_products(device, asked):
        return "float32", f"PyTorch forms no {asked} products of float32 numbers on this {device.type}"

    def measure(rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        with products(asked):
            return reference_norms(batch, rollout)

    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    checked = measured(model, Batch(ids, torch.tensor([[False, True]], device=device)), scope, temperature)
    try:
        with checked as batch, products("float32"):
            refuse_difference(batch, f"with {asked} products", "that is too coarse", measure)
    except UnfitError as reason:
        return "float32", str(reason).rstrip(".")
    return asked, "on a probe the norms of scores agree with those in float32 to 1e-3"
