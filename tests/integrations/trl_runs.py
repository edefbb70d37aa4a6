"""Three steps of TRL on a tiny model made in code; every generated batch is kept, with energies computed apart.

Runs in an environment with trl: called by the tests, by torchrun with one JSON argument, or as a process that forks
others which train together.
"""

import importlib
import json
import math
import os
import signal
import socket
import sys
import traceback
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import accelerate.state
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from otb_analysis.config import MeasureConfig, Schedule, SmallModelConfig
from otb_analysis.integrations import monitor as watching
from otb_analysis.integrations import trl_run
from otb_analysis.integrations.monitor import OTBMonitor
from otb_analysis.integrations.trl import OTBGRPOTrainer, RecordConfig, RolloutRecorder
from otb_analysis.rollouts.models import character_tokenizer, small_model

ODD = tuple("13579")
PROMPTS = [f"{i}+{i % 3}{'+1' * (i % 2)}=" for i in range(12)]


def tiny():
    """A Qwen3-type model of 2,000 weights with a token per character, off its initial values, and its tokenizer."""
    tokenizer = character_tokenizer("0123456789+=;#")
    shape = SmallModelConfig(layers=1, width=16, heads=2, key_value_heads=1, feed_forward=24)
    model, generator = small_model(shape, tokenizer), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model, tokenizer


def odd(completions, **columns):
    return [float(text[:1] in ODD) for text in completions]


def length(completions, **columns):
    """A second function, which cannot score a completion that begins with a zero or a sign."""
    return [None if text[:1] in tuple("0+=;#") else len(text) / 10 for text in completions]


def first_digit(completions, **columns):
    """None, and so not scorable at all, for completions that do not begin with a digit."""
    return [float(text[0]) if text[:1].isdigit() else None for text in completions]


REWARDS = {"odd": odd, "length": length, "first_digit": first_digit}


def energies(model, batch, temperature):
    """‖e_y − π‖² [B, T] in float64, row by row without padding: what the estimator weighs by, by another road."""
    twin = tiny()[0].double()
    plain = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    twin.load_state_dict({name: x.double() for name, x in plain.state_dict().items()})
    twin.eval()
    out = torch.zeros(batch["completion_ids"].shape, dtype=torch.float64)
    for i, ids in enumerate(batch["completion_ids"]):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].cpu()
        answer = ids[batch["completion_mask"][i].bool()].cpu()
        with torch.no_grad():
            logits = twin(torch.cat([prompt, answer])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        pi = (logits / temperature).softmax(-1)
        drawn = torch.nn.functional.one_hot(answer, pi.shape[-1])
        out[i, : len(answer)] = (drawn - pi).square().sum(-1)
    return out


def shard_on_cpu():
    """Let accelerate take processes of a CPU for those of accelerators, which alone it shards."""
    kinds = accelerate.state.DistributedType
    named = {kind.name: kind for kind in kinds} | {"MULTI_GPU": kinds.MULTI_CPU}
    accelerate.state.DistributedType = SimpleNamespace(**named)


def without_compiler():
    """Keep DeepSpeed from building its way to share memory between processes, which takes a minute.

    A build that was killed leaves a lock in the user's cache, for which every later one waits for ever.
    """
    backend = importlib.import_module("deepspeed.comm.torch")  # `deepspeed.comm` calls PyTorch by that name, too
    backend.build_shm_op = lambda: None


def failing_twice(call):
    """Return what fails the first two times, as where memory runs out on one device."""
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) <= 2:
            raise MemoryError("no room")
        return call(*args)

    return failing


class Kept(OTBGRPOTrainer):
    """Keeps every generated batch, with the rewards of all processes and energies of the policy at that moment."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        call = {name: x.clone().cpu() for name, x in batch.items() if isinstance(x, torch.Tensor)}
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            policy = deepcopy(self.accelerator.unwrap_model(self.model))
            call["energy"] = energies(policy, batch, self.temperature)
        call["rewards"] = self._rewards_by_function.clone().cpu()
        call["training"] = self.model.training
        self.calls.append(call)
        return batch


def with_tool(prompts, trainer):
    """Rollouts of five tokens of which a tool wrote the third and the fourth."""
    encoded = [trainer.processing_class(text)["input_ids"] for text in prompts]
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    ids = [torch.randint(3, 17, (5,), generator=generator).tolist() for _ in prompts]
    mask = [[1, 1, 0, 0, 1]] * len(prompts)
    return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": None, "env_mask": mask}


def made(out, rewards=("odd",), peft=False, tools=False, measure=0, recorder="", unchanged=False, stored=True, **spec):
    """Make our trainer, or an `unchanged` one of TRL; `spec` holds further settings of GRPOConfig and of ours.

    `monitor` names the run of an OTBMonitor, `rloo` takes RLOOTrainer, and `rollouts` stand for generation.
    """
    monitor, rloo, rollouts = spec.pop("monitor", ""), spec.pop("rloo", False), spec.pop("rollouts", None)
    share, every = spec.pop("share", math.inf), spec.pop("gradients", 0)
    dtype = getattr(torch, spec.pop("model_dtype", "float32"))
    plan = MeasureConfig(exact=Schedule(measure), gradients=Schedule(every))
    ours = {name: spec.pop(name) for name in ("estimator", "options", "if_exists") if name in spec}
    functions = [REWARDS[name] for name in rewards]
    if recorder:
        functions = RolloutRecorder(recorder).around(functions)
    settings = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 3,
        "learning_rate": 1e-2, "logging_steps": 1, "temperature": 0.8, "save_strategy": "no", "report_to": "none",
        "bf16": False,
    }  # fmt: skip
    arguments = (RLOOConfig if rloo else GRPOConfig)(
        output_dir=str(out),
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        shuffle_dataset=False,
        **(settings | spec),
    )
    model, tokenizer = tiny()
    model = model.to(dtype)
    data = Dataset.from_dict({"prompt": PROMPTS, "answer": [str(i) for i in range(len(PROMPTS))]})
    if not unchanged:
        record = RecordConfig(run="run", root=Path(out), measure=plan, if_exists=ours.pop("if_exists", "error"))
        ours["record"] = record if stored else None
    trainer = RLOOTrainer if rloo else GRPOTrainer
    return (trainer if unchanged else Kept)(
        model,
        functions,
        arguments,
        data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if peft else None,
        callbacks=[OTBMonitor(Path(out) / monitor, share=share, measure=plan)] if monitor else None,
        **({} if rloo else {"rollout_func": with_tool if tools else rollouts}),
        **ours,
    )


def train_alone(spec):
    """Train as one of several processes, and keep what it saw."""
    if os.environ.get("ACCELERATE_USE_FSDP"):
        shard_on_cpu()
    if spec.pop("rare", False):
        decide = OTBMonitor._is_next_watched

        def of_its_own(monitor):
            watched, monitor._rare = decide(monitor), 2.0 + int(os.environ["RANK"])
            return watched

        OTBMonitor._is_next_watched = of_its_own
    if spec.pop("alone", False):
        measurer = trl_run.GradientMeasurer
        trl_run.GradientMeasurer = lambda *args: measurer(*args[:-1])  # each process measures all by itself
    if spec.pop("fails", None) == int(os.environ["RANK"]):
        watching.forward_statistics = failing_twice(watching.forward_statistics)
    if spec.pop("short", None) == int(os.environ["RANK"]):
        trl_run.free_bytes = lambda device: 0
    torch.manual_seed(0)  # trl before 1.16 draws the adapters before it sets its seed
    trainer = made(**spec)
    trainer.train()
    watchers = [one for one in trainer.callback_handler.callbacks if hasattr(one, "_measurer")]
    print("processes that measure:", *(one._measurer.processes.size for one in watchers), file=sys.stderr)
    rank = trainer.accelerator.process_index
    kept = getattr(trainer, "calls", trainer.state.log_history)
    torch.save(kept, Path(spec["out"]) / f"calls-{rank}.pt")
    # A thread of gloo that lets go of a tensor while the interpreter ends aborts the process, or waits for ever: who
    # calls this leaves by `os._exit`.
    trainer.accelerator.wait_for_everyone()


def forked(rank, size, port, asked):
    """Return the number of a new process, which trains and ends."""
    if pid := os.fork():
        return pid
    signal.alarm(300)  # a process that waits for another one for ever
    code = 1
    try:
        for stream, path in ((1, os.devnull), (2, asked["errors"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
        os.environ.update(asked["environment"])
        train_alone(asked["spec"])
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main():
    """Train as one of torchrun's processes; or in two for each line of JSON, and answer how they ended.

    What those import is imported once.
    """
    if len(sys.argv) > 1:
        train_alone(json.loads(sys.argv[1]))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    if "DS_ACCELERATOR" in os.environ:
        without_compiler()
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        running, codes = [forked(rank, 2, port, asked) for rank in range(2)], []
        while running:
            pid, status = os.wait()
            running.remove(pid)
            codes.append(os.waitstatus_to_exitcode(status))
            for other in running if codes[-1] else ():  # it would wait for the one that failed
                os.kill(other, signal.SIGKILL)
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
