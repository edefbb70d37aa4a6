"""A second kind of device on a CPU: its tensors say `meta` and hold numbers, and no operation mixes them with others.

PyTorch's own meta tensors hold no numbers, so that nothing past the first `if` could run.
"""

from contextlib import contextmanager, nullcontext
from typing import ClassVar
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten


class There(torch.Tensor):
    """A tensor of that device; `held` has its numbers."""

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=DEVICE)

    def __init__(self, held):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = {id(x.held): x for x in tensors if isinstance(x, There)}
    place = kwargs.get("device")
    if func is aten._fused_sdp_choice.default and ours:
        return 0  # the plain kernel, which any device has
    moves = func in (aten._to_copy.default, aten.copy_.default)
    # A number without axes may come from anywhere, as on a GPU.
    if ours and not moves and any(x.dim() for x in tensors if not isinstance(x, There)):
        raise RuntimeError(f"{func} mixes tensors of two devices")
    there = bool(ours) if place is None else place == DEVICE
    if func is aten.copy_.default:
        there = isinstance(args[0], There)
    inner = tree_map(lambda x: x.held if isinstance(x, There) else x, (args, kwargs))
    if place is not None:
        inner[1]["device"] = torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad():
        out = func(*inner[0], **inner[1])
        return tree_map(lambda x: ours[id(x)] if id(x) in ours else _there(x), out) if there else out


def _there(x):
    return There(x) if isinstance(x, torch.Tensor) else x


class _Made(TorchDispatchMode):
    """What is made on that device, or moved there, holds numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled():  # which hands over operations that are made of others
            with torch.inference_mode(False), torch.no_grad(), self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return _run(func, args, kwargs or {})


class _Said(TorchFunctionMode):
    """What is no operation: reading numbers and addresses, and making tensors of numbers, which `meta` would drop."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.tolist, torch.Tensor.data_ptr) and isinstance(args[0], There):
            return func(args[0].held)
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return func(*args, **kwargs)
        place = kwargs.pop("device")
        return func(*args, **kwargs).to(place)


class Random:
    """Its random numbers: those of the CPU, which is what draws them."""

    states: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def get_rng_state(device):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, device):
        Random.states.append(state)
        assert state.device.type == "cpu"


@contextmanager
def second_device():
    """Let the second device exist; it has no autocast."""
    enabled, autocast, module = torch.is_autocast_enabled, torch.autocast, torch.get_device_module
    known = {
        "is_autocast_enabled": lambda kind="cuda": kind != "meta" and enabled(kind),
        "autocast": lambda kind, *args, **more: nullcontext() if kind == "meta" else autocast(kind, *args, **more),
        "get_device_module": lambda device=None: Random if str(device) == "meta" else module(device),
    }
    fused = "torch.optim.optimizer._get_fused_kernels_supported_devices"
    with _Said(), _Made(), patch.multiple(torch, **known), patch(fused, lambda: ["cpu", "meta"]):
        yield DEVICE
