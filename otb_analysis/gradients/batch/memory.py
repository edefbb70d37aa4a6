"""How much fits."""

import os

import torch

from otb_analysis.errors import InputError


def memory_bytes(device: torch.device) -> int:
    """All memory of a device, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_more_than_fit(name: str, count: int, each: int, device: torch.device) -> None:
    """Raise where `count` things of `each` bytes exceed the memory; the sentence says how many fit."""
    fit = memory_bytes(device) // each
    if count > fit:
        raise InputError(
            f"{name} is {count} but the memory of this machine holds {fit} of them ({each:,} bytes each); "
            f"pass at most {fit}."
        )
