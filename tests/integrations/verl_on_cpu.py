"""What verl needs to train on a machine without accelerators: a platform, and rollouts served by transformers.

`VERL_USE_EXTERNAL_MODULES` names this module and `VERL_PLATFORM=cpu` its platform. A platform, a replica and a rollout
class are registered where verl looks for them; one default of verl is changed, below.
"""

from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.utils import distributed
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "transformers"


def nothing(*_: object, **__: object) -> int:
    """Do what an accelerator's function does where there is none: no memory is taken."""
    return 0


class Device:
    """torch.cpu, where what only accelerators have does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, nothing)

    def get_device_name(self) -> str:
        return "cpu"

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """verl's CUDA platform with every call to CUDA taken out, and gloo between processes."""

    device_name = vendor_name = "cpu"
    device_module = Device()
    set_device = synchronize = manual_seed = manual_seed_all = nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str):
        return nullcontext()


@ray.remote
class Server:
    """Answers token ids with token ids: one plain sample at temperature 1 from the weights it was given last."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path).float().eval()
        self.step: int | None = None

    def load(self, weights: dict[str, torch.Tensor], step: int | None) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.step = step

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: object):
        assert (sampling_params["temperature"], sampling_params["top_p"]) == (1.0, 1.0), sampling_params
        end, ids = self.model.config.eos_token_id, list(map(int, prompt_ids))
        logprobs: list[float] = []
        with torch.no_grad():
            while len(logprobs) < sampling_params.get("max_tokens", 8) and (not logprobs or ids[-1] != end):
                row = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(row.exp(), 1)))
                logprobs.append(float(row[ids[-1]]))
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :], log_probs=logprobs, stop_reason="completed",
            extra_fields={"global_steps": self.step},
        )  # fmt: skip

    async def nothing(self, *_: object, **__: object) -> None:
        """Sleep, wake, abort: there is no memory to give back."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class Replica(RolloutReplica):
    """One server a replica."""

    async def launch_servers(self) -> None:
        server = Server.options(name=f"{NAME}_{self.replica_rank}").remote(self.model_config.path)
        self.servers, self._server_handle, self._server_address = [server], server, f"{NAME}_{self.replica_rank}"


class Rollout(base.BaseRollout):
    """Hands the trained weights to the server."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None], **kwargs: Any) -> None:
        whole = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        await ray.get_actor(f"{NAME}_{torch.distributed.get_rank()}").load.remote(whole, kwargs.get("global_steps"))


RolloutReplicaRegistry.register(NAME, lambda: Replica)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.Rollout"
# By default verl asks for a backend of the CPU and one of the platform, and torch refuses two of the same device.
distributed.initialize_global_process_group_ray.__defaults__ = (None, "cpu:gloo")
