"""Which parameters a score is differentiated by: all trainable ones, the output layer's own use, or a regex."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from torch import Tensor, nn

from otb_analysis.errors import InputError


@dataclass(frozen=True, eq=False)
class Scope:
    """The tensors to differentiate by; made by `select_scope`, read by every engine."""

    name: str  # What the caller asked for
    names: tuple[str, ...]  # Parameter names, one per tensor; a tied parameter appears once, under its first name
    parameters: tuple[Tensor, ...]  # The tensors themselves; their `.grad` and `requires_grad` are never written
    head: nn.Linear | None = None  # The output layer when only its own use counts, else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The model's own tensors behind `parameters`, which for "lm_head" are leaves that share their storage."""
        return self.parameters if self.head is None else tuple(self.head.parameters())[: len(self.parameters)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make forward passes inside the block depend on `parameters`.

        For "lm_head" the output layer is evaluated on leaves that share its storage, so that a tied matrix is
        differentiated as output only; its input is cut off because nothing below it is in scope.
        """
        if self.head is None:
            yield
            return
        weight, *rest = self.parameters
        bias = rest[0] if rest else self.head.bias
        calls: list[bool] = []

        def on_leaves(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Tensor) -> Tensor:
            calls.append(True)
            # The layer runs a second time, on leaves; the cut input ends the graph here.
            return nn.functional.linear(layer_input(args, kwargs).detach(), weight, bias)

        with self.head.register_forward_hook(on_leaves, with_kwargs=True):
            yield
        if not calls:
            raise unreached(self.head)


def end_of(model: nn.Module, which: Literal["input", "output"]) -> Any:
    """The table of input embeddings or the output layer of a model, None where it does not say."""
    get = getattr(model, f"get_{which}_embeddings", None)
    return get() if callable(get) else None


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a layer of one input was called with, by position or by name."""
    return next(iter((*args, *kwargs.values())))


def select_scope(model: nn.Module, scope: str) -> Scope:
    """Resolve a scope to tensors.

    Args:
        scope: "all" (every parameter that requires grad, tied ones once), "lm_head" (the output layer's weight and
            bias in their output use only, also when tied), or a regular expression searched in the parameter names
            (a tied parameter answers to each of its names and then counts in all its uses; frozen ones never count).

    Raises:
        InputError: Nothing trainable is in scope, the expression is invalid or matches no name, or weights in scope are
            quantised (the frozen ones beneath adapters are not in scope).
    """
    if scope == "lm_head":
        return _output_use(model)
    try:
        pattern = re.compile("" if scope == "all" else scope)
    except re.error as error:
        raise InputError(
            f"scope {scope!r} is no regular expression ({error}); "
            'pass "all", "lm_head" or a regular expression over parameter names.'
        ) from error
    every = dict(model.named_parameters(remove_duplicate=False))
    packed = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("qweight")]
    for name, tensor in () if hasattr(model, "peft_config") else (*every.items(), *packed):
        quantised = type(tensor.data).__module__.startswith("torchao") or not tensor.is_floating_point()
        if (quantised or tensor.element_size() < 2) and pattern.search(name):
            kind = type(tensor.data).__name__ if tensor.element_size() > 1 else tensor.dtype
            raise InputError(
                f"{name} is quantised ({kind}), so it has no gradient; load the model in bfloat16 or float32, "
                "or put trainable adapters on it."
            )
    # A tied parameter answers to each of its names, but in "all" it is counted once.
    every = dict(model.named_parameters()) if scope == "all" else every
    matched = {name: p for name, p in every.items() if pattern.search(name)}
    if not matched and scope != "all":
        near = get_close_matches(scope, every, n=3, cutoff=0.0)
        raise InputError(
            f"scope {scope!r} matches no parameter name (nearest: {', '.join(near)}); "
            'pass "all", "lm_head" or a regular expression over parameter names.'
        )
    # Reversed twice: of a tied parameter's names the first one stays, and so does the order.
    unique = {id(p): (name, p) for name, p in reversed(matched.items()) if p.requires_grad}
    if not unique:
        raise InputError(
            f"scope {scope!r} holds {len(matched)} parameters but none requires grad; unfreeze one or widen the scope."
        )
    names, parameters = zip(*reversed(unique.values()), strict=True)
    return Scope(scope, names, parameters)


def unreached(head: nn.Module) -> InputError:
    """What to say of an output layer that a forward pass did not call."""
    return InputError(
        f'scope "lm_head" was never reached because the model computes its logits without calling its '
        f"{type(head).__name__} output layer; pass a regular expression over parameter names."
    )


def _output_use(model: nn.Module) -> Scope:
    head = end_of(model, "output")
    if type(head) is not nn.Linear:
        raise InputError(
            f'scope "lm_head" needs a torch.nn.Linear output layer but {type(model).__name__} has '
            f"{type(head).__name__}; pass a regular expression over parameter names."
        )
    trainable = {
        f"lm_head.{name}": p.detach().requires_grad_() for name, p in head.named_parameters() if p.requires_grad
    }
    if "lm_head.weight" not in trainable:
        raise InputError(
            'scope "lm_head" holds a weight that does not require grad; unfreeze it or pass another scope.'
        )
    return Scope("lm_head", tuple(trainable), tuple(trainable.values()), head)
