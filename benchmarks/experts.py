"""What routed experts cost: a mixture takes turns with a dense model of as many active parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.config import ExpertsConfig
from benchmarks.engine import STEP, forward_backward, make_case, model_config
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.timing import least_seconds, threads
from otb_analysis import gradients

CHOSEN = 2
"""Experts that a token is given to."""
COLUMNS = {
    "model": "{size}", "T": "{tokens}", "what": "{what}", "dense": "{dense:.3f}", "mixture": "{mixture:.3f}",
    "mixture ÷ dense": "{ratio:.2f}",
}  # fmt: skip


def run(config: ExpertsConfig) -> Report:
    """Time both models at every size and length."""
    with threads(1):
        rows = [row for size in config.sizes for tokens in config.tokens for row in experts_rows(config, size, tokens)]
    title = f"Processor seconds of a mixture of {config.experts} experts, {CHOSEN} for each token, and of a dense model"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config, chosen=CHOSEN))


def models_of(size: str, experts: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The dense model of a size, and the mixture whose experts together are as wide where a token is given to them."""
    fields = model_config(size)
    fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]  # the two have different defaults
    width = {"moe_intermediate_size": fields["intermediate_size"] // CHOSEN, "num_experts_per_tok": CHOSEN}
    torch.manual_seed(0)
    dense = Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
    mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, **width, num_experts=experts)).eval()
    with torch.no_grad():
        for name, parameter in mixture.named_parameters():
            if "mlp.gate" in name:
                parameter.normal_(std=0.5)  # a router of zeros gives every token to the first experts
    return dense, mixture


def experts_rows(config: ExpertsConfig, size: str, tokens: int) -> list[dict[str, Any]]:
    """One row for each thing that is measured on a rollout of random tokens."""
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for kind, model in zip(("dense", "mixture"), models_of(size, config.experts), strict=True):
        case = make_case(model, tokens)
        args: tuple[Any, ...] = (model, case.input_ids, case.mask)
        one = torch.zeros(1, dtype=torch.long)
        calls[STEP, kind] = partial(forward_backward, case)
        calls["exact norms, generic", kind] = partial(gradients.token_score_norms, *args, engine="generic")
        calls["exact norms, path=True", kind] = partial(gradients.token_score_norms, *args, engine="generic", path=True)
        calls["Gram matrix", kind] = partial(gradients.group_gradient_gram, *args, case.weights, one)
        along = {"direction": case.direction}
        calls["attribution", kind] = partial(gradients.gradient_attribution, *args, case.weights[:, 0], **along)
    for call in calls.values():
        call()  # every model is looked at once
    least = least_seconds({"/".join(key): call for key, call in calls.items()}, config.repeats)
    rows = []
    for what in dict.fromkeys(what for what, _ in calls):
        dense, mixture = least[f"{what}/dense"], least[f"{what}/mixture"]
        both = {"dense": dense, "mixture": mixture, "ratio": mixture / dense}
        rows.append({"size": size, "tokens": tokens, "what": what} | both)
    return rows
