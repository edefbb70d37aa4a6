"""What surrounds training: progress, sharded parameters, gathering, checkpoints."""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from otb_analysis.atomic import atomic_file, atomic_folder
from otb_analysis.config import TrainConfig
from otb_analysis.errors import InputError, StoreError
from otb_analysis.processes import Processes, widened
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.types import Float, LogitStats

Bar = Callable[[float, float, str], None]
"""Called with what is done of all and the numbers people watch; a terminal draws it, a test ignores it."""


def silent(done: float, total: float, text: str) -> None:
    """Ignore progress."""


def unfailing(bar: Bar) -> Bar:
    """Return a bar that is silent after its first failure, which is one warning: a bar must not stop a run."""
    working = [bar]

    def guarded(done: float, total: float, text: str) -> None:
        try:
            for each in working:
                each(done, total, text)
        except Exception as error:
            working.clear()
            warnings.warn(f"progress is no longer shown: {error}", RuntimeWarning, stacklevel=2)

    return guarded


def step_line(run: str, step: int, total: int, scalars: Mapping[str, Any]) -> str:
    """Return one row of `steps` as a line: reward, ‖ḡ‖, entropy, clipping, sampled tokens per second.

    With importance ratios the line shows the share of clipped tokens, otherwise whether ‖ḡ‖ was clipped.
    """
    share = scalars.get("ratio_clip_share")
    clip = f"clip {share:.1%}" if share is not None else f"‖ḡ‖ {'' if scalars['clipped'] else 'not '}clipped"
    speed = scalars["n_tokens"] / max(scalars["seconds_sample"], 1e-9)
    return (
        f"{run}: {step + 1} of {total} steps, reward {scalars['reward_mean']:.2f}, ‖ḡ‖ {scalars['grad_norm']:.1f}, "
        f"entropy {scalars['entropy_mean'] or 0:.3f}, {clip}, {speed:,.0f} tokens/s"
    )


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE_ONLY = ("objective.staleness", "lora.rank", "measure.budget")
"""Settings that need whole parameters on each process at all times."""


def asked_for() -> bool:
    """Return whether `accelerate launch` asks for FSDP2.

    Raises:
        InputError: It asks for FSDP1 or DeepSpeed.
    """
    variable = os.environ.get
    if variable("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise InputError("accelerate was launched with DeepSpeed; launch it with --use_fsdp --fsdp_version 2 instead.")
    if variable("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return False
    if variable("FSDP_VERSION", "1") != "2":
        raise InputError("accelerate was launched with FSDP version 1; add --fsdp_version 2.")
    return True


def refuse_unsharded_only(config: TrainConfig) -> None:
    """Refuse what does not work with sharded parameters.

    Raises:
        InputError: The first such setting, with its remedy.
    """
    for name in WHOLE_ONLY:
        if value := attrgetter(name)(config):
            raise InputError(
                f"{name} is {value}, which does not work with FSDP2: each process holds only a part of the parameters; "
                "set it to 0 or launch without --use_fsdp."
            )


def shard(model: PreTrainedModel, processes: Processes) -> None:
    """Shard a model's parameters in place: one unit per decoder layer and one for the rest.

    The model must be the same on every process. Gradients are summed over processes, not averaged: each process has its
    own rollouts' part of Σ c·∇log π.
    """
    assert processes.device is not None
    mesh = init_device_mesh(processes.device.type, (processes.size,))
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # the rest, too: it is whole between passes otherwise
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def gather_rollouts(
    processes: Processes, rollouts: Rollouts, stats: LogitStats, reference: Float | None
) -> tuple[Rollouts, LogitStats, Float | None]:
    """Put together what all processes know of a step's rollouts, in the order of their ranks.

    Groups are numbered over all processes. `stats` and `reference`, log π_ref in nats or None, are [n, T].
    """
    shards = processes.gather((rollouts, stats, reference))
    if len(shards) == 1:
        return shards[0]
    all_rollouts, all_stats, references = zip(*shards, strict=True)
    rollouts = Rollouts.concatenate(all_rollouts)
    columns = {field.name: [getattr(s, field.name) for s in all_stats] for field in fields(LogitStats)}
    columns |= {} if reference is None else {"reference": references}
    whole = {name: np.concatenate([widened(x, rollouts.width) for x in parts]) for name, parts in columns.items()}
    reference = whole.pop("reference", None)
    return rollouts, LogitStats(**whole), reference


def shard_rows(columns: Mapping[str, object], processes: Processes, n_rollouts: int) -> dict[str, object]:
    """Return the rows of this process's rollouts; the column `rollout` numbers all `n_rollouts` of the step."""
    if processes.size == 1:
        return dict(columns)
    keep = np.flatnonzero(np.isin(columns["rollout"], processes.shard(np.arange(n_rollouts))))  # pyright: ignore
    return {name: x[keep] if isinstance(x, np.ndarray) else [x[i] for i in keep] for name, x in columns.items()}  # pyright: ignore[reportIndexIssue]


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
