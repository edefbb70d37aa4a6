"""Gradients of a model cut up by `fully_shard`: every process holds a part of each, and says which part."""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.forward import sampled_logprobs
from otb_analysis.gradients.batch.inputs import Rollout, ScoreBatch


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has spread the parameters over processes."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class Shards:
    """What this process holds of the gradients of a model after `fully_shard`; replicated mesh dimensions count once.

    Raises:
        InputError: A parameter is cut otherwise than along its first dimension, meshes differ, or the scope is
            "lm_head", which takes the output layer out of its shards.
    """

    def __init__(self, model: nn.Module, scope: str) -> None:
        if scope == "lm_head":
            raise InputError(
                'scope "lm_head" does not work on sharded parameters; pass a regular expression over parameter names.'
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward one leaves the root's parameters whole
        self.mesh = _mesh(model)

    def spans(self, parameters: Sequence[Tensor], starts: Sequence[int]) -> list[tuple[int, int]]:
        """First index and length, among all entries, of the part of each parameter that this process counts."""
        first = all(c == 0 for c in self.mesh.get_coordinate() or ())
        return [
            _span(p, start) if isinstance(p, DTensor) else (start, p.numel() if first else 0)
            for p, start in zip(parameters, starts, strict=True)
        ]

    def gradients(
        self, batch: ScoreBatch, rollouts: tuple[Rollout, ...], weights: NDArray[np.float64]
    ) -> Iterator[tuple[int, list[Tensor | None]]]:
        """Local parts of Σ_k weights[m, k] s_k with its m, by one forward and one backward pass per nonzero row.

        The parts come from `.grad`, where the sharding leaves them, averaged over processes that saw the same batch;
        what lay there before is put back.
        """
        every = [p for p in batch.model.parameters() if p.requires_grad]
        before = [p.grad for p in every]
        for m in np.flatnonzero(weights.any(-1)):
            # `.grad` accumulates: what lay there would be taken for part of this row.
            for p in every:
                p.grad = None
            # Anew for every row: the sharding frees its gathered weights after one backward pass.
            values = sampled_logprobs(batch, rollouts)
            try:
                values.backward(torch.from_numpy(weights[m]).to(values))
                local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in batch.scope.parameters]
            finally:
                for p, grad in zip(every, before, strict=True):
                    p.grad = grad
            yield int(m), local

    def check_same(self, batch: ScoreBatch, weights: NDArray[np.float64]) -> None:
        """Raise where batches differ between processes: the sharding averages their gradients."""
        ids = np.concatenate([r.ids.cpu().numpy() for r in batch.rollouts]) if batch.rollouts else np.zeros(0)
        digest = sha256(b"".join(x.tobytes() for x in (ids, batch.mask, weights))).digest()
        # Digests instead of the data: equal minimum and maximum say that all processes have the same.
        low = torch.tensor(list(digest[:16]), dtype=torch.int32, device=batch.scope.parameters[0].device)
        high = low.clone()
        for group in self.mesh.get_all_groups():
            dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        if not torch.equal(low, high):
            raise InputError(
                "input_ids, mask or weights differ between the processes of a sharded model; "
                "pass the same batch on every process."
            )

    def total(self, sums: Tensor) -> Tensor:
        """Sum over all processes of the mesh."""
        for group in self.mesh.get_all_groups():
            dist.all_reduce(sums, group=group)
        return sums


def _mesh(model: nn.Module) -> DeviceMesh:
    meshes = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            meshes.setdefault(p.device_mesh, name)
            for placement in p.placements:
                if not (isinstance(placement, Replicate) or (type(placement) is Shard and placement.dim == 0)):
                    raise InputError(
                        f"parameter {name!r} is placed as {placement}; gradient_sketch adds up shards along the first "
                        "dimension, as fully_shard makes them."
                    )
    if len(meshes) != 1:
        raise InputError(
            f"the model's parameters are spread over {len(meshes)} meshes; gradient_sketch adds up one of them."
        )
    return next(iter(meshes))


def _span(parameter: DTensor, start: int) -> tuple[int, int]:
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    copies = [c for c, p in zip(mesh.get_coordinate() or (), placements, strict=True) if isinstance(p, Replicate)]
    if any(copies) or not shape:
        return start, 0 if any(copies) else 1
    stride = int(np.prod(shape[1:]))
    return start + offset[0] * stride, shape[0] * stride
