"""A policy sharded over processes (FSDP2): each keeps a part of every weight, gradient and optimizer moment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from transformers import PreTrainedModel

from otb_analysis.config import TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.processes import Processes

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE_ONLY = ("objective.staleness", "lora.rank", "measure.budget")
"""Settings that need whole parameters on each process. Every level of measuring needs them, too."""


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


def refuse_unsharded_only(config: TrainConfig, exact: bool) -> None:
    """Refuse what needs whole parameters; `exact`: the training estimator reads exact norms.

    Raises:
        InputError: The first such setting, with its remedy.
    """
    levels = {f"measure.{level}.every": plan.every for level, plan in config.measure.schedules.items()}
    for name, value in (levels | {name: attrgetter(name)(config) for name in WHOLE_ONLY}).items():
        if value:
            raise InputError(
                f"{name} is {value}, which does not work with FSDP2: each process holds only a part of the parameters; "
                "set it to 0 or launch without --use_fsdp."
            )
    if exact:
        raise InputError(
            f"estimator.name is {config.estimator.name!r}, which needs exact norms, and these do not work with FSDP2; "
            "choose another estimator or energy, or launch without --use_fsdp."
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
    fully_shard(model, mesh=mesh)
    for module in _units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@contextmanager
def gathered(model: PreTrainedModel) -> Iterator[None]:
    """Hold all parameters on every process inside the block. Every process must enter.

    Inside, processes exchange nothing, so each makes as many forward passes as it needs. Otherwise every generated
    token would wait for all processes.
    """
    units = _units(model)
    for unit in units:
        unit.set_reshard_after_forward(False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True)


def whole_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """Return all parameters in main memory on the first process, and nothing on the others; all must call it."""
    return get_model_state_dict(model, options=WHOLE)


def whole_state(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Any]:
    """Return all parameters and optimizer moments on the first process, nothing on the others; all must call it."""
    parameters, moments = get_state_dict(model, optimizer, options=WHOLE)
    return {"parameters": parameters, "optimizer": moments}


def load_whole_state(model: PreTrainedModel, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state that `whole_state` returned; every process passes all of it and keeps its part."""
    set_state_dict(
        model, optimizer, model_state_dict=state["parameters"], optim_state_dict=state["optimizer"], options=WHOLE
    )


def _units(model: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
