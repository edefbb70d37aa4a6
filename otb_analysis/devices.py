"""Where models run: the device, its random numbers, how much it takes at once, how it forms products.

Everything else takes its device from a parameter or an input.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from time import perf_counter

import torch
from torch import Tensor

from otb_analysis.errors import InputError

DEVICE = "OTB_DEVICE"
"""Environment variable that says what `auto` means in this process and in those that it starts."""
NAMES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
NO_FLOAT64 = {"mps"}
"""Kinds of devices that have no float64, in which every measurement sums."""
LONGER = 32
"""An accelerator works on so many times what a core's cache holds: each call costs it more than the memory does."""
GRAPH = 8
"""The same of positions whose graph is kept: hundreds of kilobytes each, in a model of a billion parameters."""
PRODUCTS = {"float32": "highest", "tf32": "high", "bfloat16": "medium"}
"""How products of float32 matrices are formed, in PyTorch's words. Sums are in float32 in each."""
_COARSER: list[str] = []  # Ways that this process is in, the innermost last
COARSE = 1 + 2**-12
"""A float32 number that rounds to 1 in TF32 and in bfloat16."""


def device_of(name: str = "auto", measures: bool = True) -> torch.device:
    """Return the device of a name: auto, cpu, cuda, cuda:N or mps. `auto` is the accelerator where there is one.

    `measures`: something is measured there, which takes float64; `auto` is then never a device without it.

    Raises:
        InputError: There is no such device on this machine, or it lacks float64.
    """
    name = os.environ.get(DEVICE, "auto") if name == "auto" else name
    if not NAMES.fullmatch(name):
        raise InputError(f"--device is {name!r}; pass auto, cpu, cuda, cuda:N with N from 0, or mps.")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None and torch.cuda.is_available():
        accelerator = torch.device("cuda")
    if name == "auto":
        if accelerator is None or (measures and accelerator.type in NO_FLOAT64):
            return torch.device("cpu")
        return accelerator
    device, seen = torch.device(name), "no accelerator" if accelerator is None else accelerator.type
    if device.type not in ("cpu", seen):
        raise InputError(
            f"--device is {name} but PyTorch {torch.__version__} sees {seen} on this machine; pass --device auto or "
            "cpu, or install a PyTorch built for the device."
        )
    if device.index is not None and device.index >= (count := torch.accelerator.device_count()):
        raise InputError(f"--device is {name} but this machine has {count} of them; pass a number below {count}.")
    if measures and device.type in NO_FLOAT64:
        raise InputError(
            f"--device is {name}, which has no float64, in which measuring sums; pass --device cpu, or train with "
            "every level of measuring off."
        )
    return device


def use(name: str) -> torch.device:
    """Make a device what `auto` means from now on, here and in processes that start later; return it.

    Raises:
        InputError: There is no such device on this machine, or it lacks float64.
    """
    device = device_of(name)
    os.environ[DEVICE] = str(device)
    return device


def words_of(device: torch.device) -> str:
    """Return a device in words: `cpu`, or `cuda:0 (NVIDIA H100 80GB HBM3)`."""
    with suppress(Exception):  # not every kind has names
        return f"{device} ({torch.get_device_module(device).get_device_name(device)})"
    return str(device)


def first_line(machine: Mapping[str, object], why: str) -> str:
    """Return the first line of a run: its device, the precision of measuring, and why it is that one."""
    because = f", because {why}" if why else ""
    return f"Device: {machine['device']}; gradients are measured in {machine['precision']}{because}."


def widenable(x: Tensor) -> Tensor:
    """Return a tensor where float64 exists: in main memory where its device has none."""
    return x.cpu() if x.device.type in NO_FLOAT64 else x


def working_set(device: torch.device, cached: int, times: int = LONGER) -> int:
    """Return how much to work on at once: what stays in a core's cache on a CPU, elsewhere so many times that."""
    return cached if device.type == "cpu" else times * cached


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has finished its queue; a CPU has none."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for a device's queue, so that the work of a phase counts as that phase's."""
    return lambda: (synchronize(device), perf_counter())[1]


def random_forked(device: torch.device, enabled: bool = True) -> AbstractContextManager[None]:
    """Put the random states of the CPU and of a device back after the block."""
    devices = [] if device.type == "cpu" else [device]
    return torch.random.fork_rng(devices, enabled, device_type=device.type)  # pyright: ignore[reportReturnType]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the random states of the CPU and of a device, for a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(device: torch.device, states: Mapping[str, Tensor] | Tensor) -> None:
    """Restore what `random_state` returned, or a CPU's state alone; another kind of device is left as it is."""
    states = {"cpu": states} if isinstance(states, Tensor) else states
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


@contextmanager
def products(name: str) -> Iterator[None]:
    """Form products of float32 matrices in a way of `PRODUCTS`; a setting of the process, so put back after it.

    Outside of other ways float32 changes nothing: what a program has set for itself stays.
    """
    if name == "float32" and not _COARSER:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRODUCTS[name])
    _COARSER.append(name)
    try:
        yield
    finally:
        _COARSER.pop()
        torch.set_float32_matmul_precision(before)


def forms_products(device: torch.device, name: str) -> bool:
    """Return whether a device rounds the factors as it is told to: many processors stay with float32, silently."""
    with products(name):
        x = torch.full((256, 256), COARSE, device=device)
        return float((x @ x)[0, 0]) == len(x)
