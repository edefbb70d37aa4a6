"""Which models the hand-written engine supports, and one sentence for each thing that it does not.

The engine repeats a forward pass from the weights alone, so everything that could make the model's own pass differ is
looked for by exact type: layers, hooks, replaced methods, attention kernels. What no type shows, such as a method
replaced on the class, the engine's check of a probe finds out.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from otb_analysis.gradients.exact.layers import UnfitError

FAMILIES: dict[type[nn.Module], tuple[Any, str]] = {
    modeling_llama.LlamaForCausalLM: (modeling_llama, "Llama"),
    modeling_mistral.MistralForCausalLM: (modeling_mistral, "Mistral"),
    modeling_qwen2.Qwen2ForCausalLM: (modeling_qwen2, "Qwen2"),
    modeling_qwen3.Qwen3ForCausalLM: (modeling_qwen3, "Qwen3"),
}
SLOTS: dict[str, str | type[nn.Module]] = {
    "model": "Model",
    "layers": nn.ModuleList,
    "rotary_emb": "RotaryEmbedding",
    "embed_tokens": nn.Embedding,
    "self_attn": "Attention",
    "mlp": "MLP",
    **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"), "RMSNorm"),
    **dict.fromkeys((f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")), nn.Linear),
    "lm_head": nn.Linear,
}
"""By the last part of a module's name, its kind: a type, or what the family's own type is called behind its prefix."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ELSEWHERE = 'pass engine="generic" or engine="auto".'


def refuse_unsupported(model: nn.Module) -> None:
    """Raise where a model is of no supported family, or something about one of its modules is out of the ordinary."""
    if type(model) not in FAMILIES:
        known = ", ".join(kind.__name__ for kind in FAMILIES)
        raise UnfitError(f"a {type(model).__name__} has no hand-written backward pass ({known} have); {ELSEWHERE}")
    source, prefix = FAMILIES[type(model)]
    for name, module in model.named_modules():
        slot = name.rpartition(".")[2]
        kind = "DecoderLayer" if slot.isdigit() else SLOTS.get(slot)
        expected = getattr(source, prefix + kind) if isinstance(kind, str) else kind
        if name and type(module) is not expected and slot != "act_fn":
            raise UnfitError(f"{name} is a {type(module).__name__}, which the engine does not follow; {ELSEWHERE}")
        # Hooks, and methods replaced on the instance, through which the model's own pass may differ.
        hooks = [vars(module).get(h) or getattr(torch_module, "_global" + h, None) for h in HOOKS]
        if any(hooks):
            raise UnfitError(
                f"{name or 'the model'} has a hook, which a hand-written pass would not run; remove it or {ELSEWHERE}"
            )
        if "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnfitError(f"the forward method of {name or 'the model'} was replaced; restore it or {ELSEWHERE}")
        if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq):
            raise UnfitError(f"{name} rescales its rows or their gradients; {ELSEWHERE}")
    kernel = getattr(model.config, "_attn_implementation", None)
    if kernel not in ("eager", "sdpa"):
        raise UnfitError(
            f'the model\'s attention is {kernel!r}; call model.set_attn_implementation("sdpa") or {ELSEWHERE}'
        )
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        raise UnfitError(f"autocast is on, under which layers run in other dtypes; leave its block or {ELSEWHERE}")
