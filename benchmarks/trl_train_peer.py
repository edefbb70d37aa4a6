"""TRL's GRPOTrainer, one step per turn, for `otb bench train` and `otb bench monitor`.

Needs torch and trl>=1.16,<1.17, and nothing of ours but for the monitor. Started by `peer`: one JSON argument, one line
of facts, then one line of seconds for every line on the input.
The phases: `sample` is its generation alone, `update` its forward pass and loss, backward pass, clipping and optimizer,
each timed where it is called; all else counts for neither, `seconds` is the whole step. `statistics`, a part of
`update`, goes from final hidden states to log-probabilities and entropies.
"""

import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

SIDE = run_path(str(Path(__file__).with_name("peer_side.py")))
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 1, "num_iterations": 1, "lr_scheduler_type": "constant", "max_grad_norm": 1.0,
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "beta": 0.0, "seed": 0, "shuffle_dataset": False,
    "bf16": False, "fp16": False, "gradient_checkpointing": False,
    "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
"""What our trainer does, in the words of TRL; nothing is logged or saved."""


class Clock:
    """Seconds of the calls it wraps, and what they drew."""

    def __init__(self, name: str, device: str) -> None:
        self.wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
        self.clock = perf_counter if device.startswith("cuda") else {"wall": perf_counter, "cpu": process_time}[name]
        self.seconds: dict[str, float] = {}
        self.tokens = 0

    def now(self) -> float:
        """Return the time, once a GPU's queue is empty."""
        self.wait()
        return self.clock()

    def timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, timed under a name; a result of (token ids, …) is counted where that is what it returns."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = call(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start
            if name == "sample":
                self.tokens += sum(map(len, result[0]))
            return result

        return timed


class Turns(TrainerCallback):
    """Waits for a line before every step after the first, and answers when the step is done."""

    def __init__(self, clock: Clock, memory: bool, device: str):
        self.clock, self.memory, self.gpu = clock, memory, device.startswith("cuda")
        self.start, self.warm = 0.0, False
        self.before: int | None = None
        self.optimizer: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait; the first step warms up."""
        if self.warm and not sys.stdin.readline():
            sys.exit(0)
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        elif self.memory:  # what it hands back to the kernel has to be asked for again, so such steps are not timed
            self.before = SIDE["forget_peak"]()
        optimizer = kwargs["optimizer"]
        if optimizer is not self.optimizer:  # made, and wrapped, when training begins
            optimizer.step, self.optimizer = self.clock.timing("update", optimizer.step), optimizer
        self.clock.seconds, self.clock.tokens, self.start = {}, 0, self.clock.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Say what the step took."""
        seconds = self.clock.now() - self.start
        phases = self.clock.seconds
        most = torch.cuda.max_memory_allocated() if self.gpu else SIDE["kilobytes"]("VmHWM") * 1024
        held = None if self.before is None else max(0, most - self.before * (1 if self.gpu else 1024))
        facts = {"seconds": seconds, "sample": phases["sample"], "update": phases["update"]}
        facts |= {name: phases.get(name, 0.0) for name in ("monitor", "check", "statistics")}
        SIDE["say"](facts | {"tokens": self.clock.tokens, "bytes": held})
        self.warm = True


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Pay something that differs within groups; its value is of no interest here."""
    return [float(len(str(text)) % 2) for text in completions]


def watching(spec: dict[str, Any], clock: Clock) -> list[TrainerCallback]:
    """Return our monitor where its run is named, timed; it alone needs our package."""
    if "monitor" not in spec:
        return []
    monitor = importlib.import_module("otb_analysis.integrations.monitor").OTBMonitor(
        spec["monitor"], share=None if spec["by_default"] else math.inf
    )
    states = importlib.import_module("otb_analysis.integrations.trl_states").CaughtStates
    check = importlib.import_module("otb_analysis.checks.sampling").SamplingCheck
    for name in ("_is_next_watched", "_observe", "on_pre_optimizer_step"):
        setattr(monitor, name, clock.timing("monitor", getattr(monitor, name)))
    states._found, check.observe = clock.timing("monitor", states._found), clock.timing("check", check.observe)
    return [monitor]


def main() -> None:
    """Make the trainer, warm it up, then take one step per line."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    clock = Clock(spec["clock"], spec["device"])
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder, per_device_train_batch_size=spec["prompts_per_step"] * spec["group_size"],
            num_generations=spec["group_size"], max_completion_length=spec["max_new_tokens"], max_steps=spec["steps"],
            learning_rate=spec["learning_rate"], use_cpu=spec["device"] == "cpu", **SETTINGS,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
            reward_funcs=reward,
            args=settings,
            train_dataset=datasets.Dataset.from_dict({"prompt": spec["prompts"]}),
            callbacks=[*watching(spec, clock), Turns(clock, spec["memory"], spec["device"])],
        )
        trainer._generate_single_turn = clock.timing("sample", trainer._generate_single_turn)
        trainer.compute_loss = clock.timing("update", trainer.compute_loss)
        utils: Any = importlib.import_module("trl.trainer.utils")
        head = clock.timing("statistics", utils._ChunkedLogProbFunction.apply)
        utils._ChunkedLogProbFunction = SimpleNamespace(apply=head)  # its forward pass, looked up at each call
        trainer.accelerator.backward = clock.timing("update", trainer.accelerator.backward)
        trainer.accelerator.clip_grad_norm_ = clock.timing("update", trainer.accelerator.clip_grad_norm_)
        trainer.train()


if __name__ == "__main__":
    main()
