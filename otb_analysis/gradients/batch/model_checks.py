"""What about a model makes its log-probabilities, or what this process sees of them, unfit to be differentiated."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from otb_analysis.errors import InputError


def refuse_parameters(model: nn.Module, *, sharded: bool) -> None:
    """Raise where a parameter has no gradient here.

    It has no values, was made in inference mode, or is a shard and may not be one.
    """
    for name, p in model.named_parameters():
        if p.is_meta and type(p.detach()) is Tensor:  # a subclass may say so and hold numbers
            raise InputError(
                f"parameter {name!r} is on the meta device, where it has no values: the model was never loaded, or "
                "this part of it is offloaded; load it whole onto one device."
            )
        if isinstance(p, DTensor) and not sharded:
            raise InputError(
                f"parameter {name!r} is sharded, and this process holds only a part of it; gather the model, or use "
                "gradient_sketch, which adds shards up."
            )
        if p.is_inference():
            raise InputError(
                f"parameter {name!r} was made inside torch.inference_mode, so it has no gradient; "
                "load the model outside of it."
            )


def refuse_dropout(model: nn.Module) -> None:
    """Raise where dropout is active, under which log-probabilities are random."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        rates = {"p": module.p} if isinstance(module, nn.modules.dropout._DropoutNd) else vars(module)
        for attribute, rate in rates.items():
            if (attribute == "p" or "dropout" in attribute) and isinstance(rate, float) and rate > 0:
                raise InputError(
                    f"model is in training mode with dropout {rate:g} at {name or 'its root'}, so its "
                    "log-probabilities are random; call model.eval() first."
                )


def refuse_lengths(model: nn.Module, row: int, length: int) -> None:
    """Raise where a text has more tokens than the model has positions, or its length turns its first tokens.

    Engines cut a text behind the token that they score, which changes nothing as long as no token looks ahead.
    """
    for name, module in model.named_modules():
        for kind, limit in _steady_lengths(module):
            if length > limit:
                raise InputError(
                    f"rollout {row} has {length} tokens but beyond {limit} the {kind!r} rotary embedding {name} "
                    "depends on the length of the whole text, so that no token has a score of its own; "
                    f"pass at most {limit}."
                )
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    # Attention that is biased by distance reads no positions, whatever the configuration says.
    limit = None if getattr(config, "alibi", False) else getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length - 1:  # the last token is predicted and never read
        raise InputError(
            f"rollout {row} has {length} tokens but the model has {limit} positions, beyond which its "
            f"log-probabilities mean nothing; pass at most {limit + 1} tokens, or load the model with more positions "
            "(max_position_embeddings) if it was trained on them."
        )


def _steady_lengths(module: Any) -> Iterator[tuple[str, int]]:
    """Kinds of a rotary embedding that look at the text's length, and the positions up to which they stay put."""
    kinds = getattr(module, "rope_type", None)
    for layer, kind in kinds.items() if isinstance(kinds, Mapping) else ((None, kinds),):
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            options = module.config.rope_parameters
            options = options if layer is None else options[layer]
            stated = options.get("original_max_position_embeddings") if kind == "longrope" else None
            yield kind, int(stated or module.original_max_seq_len)
