"""What peers and we share: models and inputs made alike, the peak memory of a call, and a peer's half of the protocol.

Peers' scripts run in an interpreter that has nothing of ours, so they load this file by its path; it needs torch and
transformers alone.
"""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def make_model(fields: dict[str, Any], device: str, dtype: str) -> Qwen2ForCausalLM:
    """Return the Qwen2 model of a configuration at its initial weights, the same in every process.

    Biases and gains are moved off zero and one, where errors in their gradients could hide.
    """
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(device=torch.device(device), dtype=getattr(torch, dtype))  # pyright: ignore[reportCallIssue]
    return model.eval()


def head_inputs(rows: int, width: int, vocabulary: int, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [R, d], an output matrix [V, d] and drawn tokens [R], the same in every process.

    The logits have a standard deviation of 3.
    """
    torch.manual_seed(0)
    hidden = torch.randn(rows, width)
    weight = torch.randn(vocabulary, width) * (3 / width**0.5)
    to = {"dtype": getattr(torch, dtype), "device": device}
    return hidden.to(**to), weight.to(**to), torch.randint(vocabulary, (rows,)).to(device)


def say(facts: dict[str, Any]) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def take_turns(run: Callable[[], object], device: str) -> None:
    """Run once per line on the input and say how long it took, until a GPU's queue was empty."""
    for _ in sys.stdin:
        start = perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        say({"seconds": perf_counter() - start})


def peak(run: Callable[[], object], device: str) -> int | None:
    """Run once; return the most bytes held beyond what was held before, None where the kernel does not tell.

    On a CPU they are resident memory by its high-water mark, on a GPU torch's allocations.
    """
    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    before = forget_peak()
    run()
    return None if before is None else 1024 * max(0, kilobytes("VmHWM") - before)


def forget_peak() -> int | None:
    """Forget the high-water mark; return resident kilobytes, None where the kernel does not allow it."""
    gc.collect()
    # Freed heap goes back to the kernel (glibc only), so that it does not hide what the call will need.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        FORGET.write_text("5")
    except OSError:
        return None
    return kilobytes("VmRSS")


def kilobytes(field: str) -> int:
    """One line of the process's status."""
    return int(next(line for line in STATUS.read_text().splitlines() if line.startswith(field)).split()[1])
