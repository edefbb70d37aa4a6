"""Checkpoints: everything that resuming bit for bit needs, in one file. Files and models appear whole or not at all."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from otb_analysis.atomic import atomic_file, atomic_folder
from otb_analysis.errors import StoreError

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """One file; `step` is the number of steps finished and stored, so the next step has this number."""

    step: int
    path: Path


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run, oldest first."""
    files = [(p, _NAME.fullmatch(p.name)) for p in (run_dir / FOLDER).glob("step-*.pt")]
    return sorted(Checkpoint(int(m[1]), p) for p, m in files if m)


def write_checkpoint(run_dir: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write a checkpoint after `step` finished steps, then remove all but the newest `keep`.

    Raises:
        StoreError: The disk refuses; earlier checkpoints are untouched.
    """
    folder = run_dir / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        with atomic_file(folder / f"step-{step:08d}.pt") as file:
            torch.save(state, file)
        for old in checkpoints(run_dir)[:-keep]:
            old.path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch's own writer reports a full disk as a RuntimeError
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise StoreError(
            f"cannot write the checkpoint after step {step - 1} to {folder} ({reason}); the one before it can be used; "
            "free some space and resume."
        ) from error


def read_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state a checkpoint holds, its tensors in main memory: random states are set from there.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        return torch.load(checkpoint.path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for a damaged archive
        raise StoreError(
            f"checkpoint {checkpoint.path} cannot be read ({str(error).splitlines()[0][:120]}); "
            "delete it to resume from the one before it."
        ) from error


@contextmanager
def model_folder(path: Path, failure: str, remedy: str) -> Iterator[Path]:
    """Yield an empty folder for a model's files, which replaces `path` once the block ends.

    Raises:
        StoreError: The disk refuses; the sentence is failure, path, reason and remedy.
    """
    try:
        with atomic_folder(path, replace=True) as draft:
            yield draft
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{failure} {path} ({reason}); {remedy}") from error
