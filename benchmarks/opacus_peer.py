"""Opacus on the token-as-sample trick, for `otb bench engine`; needs torch, transformers and opacus, nothing of ours.

Sample t of a batch is the same text with the loss log π(y_t), so the per-sample gradients are the tokens' scores; a
batch holds a few tokens at a time, because `GradSampleModule` forms their gradients. Ghost norms refuse tied weights:
for them the output layer is a copy. Started by `peer`: one JSON argument, one line of facts, one line of seconds
per turn.
"""

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import Tensor, nn

SIDE = run_path(str(Path(__file__).with_name("peer_side.py")))
BATCH = 16
"""Samples per batch, as many as our engines take together."""


def make_model(spec: dict[str, Any]) -> nn.Module:
    """Return the model of `benchmarks.engine`, in training mode (it has no dropout), as the hooks ask."""
    model = SIDE["make_model"](spec["model"], spec["device"], spec["dtype"])
    if spec["ghost"]:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model.train()


def norms_by_opacus(model: nn.Module, ghost: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from a batch and its targets' places to ‖s‖², by ghost norms or by per-sample gradients."""
    opacus: Any = importlib.import_module("opacus.grad_sample")
    if ghost:
        wrapped = opacus.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", use_ghost_clipping=True)
    else:
        wrapped = opacus.GradSampleModule(model, loss_reduction="sum")

    def norms(ids: Tensor, at: Tensor) -> Tensor:
        logprobs(wrapped, ids, at).sum().backward()
        if ghost:
            norm_sq = wrapped.get_norm_sample().double().square()
        else:
            samples = [p.grad_sample for p in wrapped.parameters()]
            norm_sq = torch.stack([g.flatten(1).norm(dim=1).double().square() for g in samples]).sum(0)
        wrapped.zero_grad(set_to_none=True)
        return norm_sq

    return norms


def logprobs(model: Any, ids: Tensor, at: Tensor) -> Tensor:
    """Log π(y_t) of sample t at its own place, from its own copy of the text."""
    logits = model(input_ids=ids[:, :-1].contiguous(), use_cache=False).logits
    chosen = logits[torch.arange(len(ids)), at].float().log_softmax(-1)
    return chosen.gather(-1, ids[torch.arange(len(ids)), at + 1][:, None])[:, 0]


def sweep(norms: Callable[[Tensor, Tensor], Tensor], ids: Tensor) -> Tensor:
    """‖s_t‖² of all T tokens, a batch of prefixes at a time: what comes after a batch's last token is left out."""
    places = torch.arange(ids.shape[1] - 1, device=ids.device)
    texts = ((ids[:, : int(at[-1]) + 2].expand(len(at), -1).contiguous(), at) for at in places.split(BATCH))
    return torch.cat([norms(text, at) for text, at in texts])


def main() -> None:
    """Prepare, say so, then run once per line."""
    warnings.simplefilter("ignore")
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    norms = norms_by_opacus(make_model(spec), spec["ghost"])
    ids = torch.tensor(spec["ids"], device=spec["device"])
    sweep(norms, ids[:, :4])
    results: list[Tensor] = []
    held = SIDE["peak"](lambda: results.append(sweep(norms, ids)), spec["device"])
    SIDE["say"]({"norm_sq": results[0].tolist(), "bytes": held})
    SIDE["take_turns"](lambda: sweep(norms, ids), spec["device"])


if __name__ == "__main__":
    main()
