"""Writes the rollouts of an unchanged GRPOTrainer, as plain records that `otb import` and `otb score` read.

It is one more reward function, which pays nothing: TRL leaves None out of its sum. It sees prompts, completions with
their token ids, the dataset's columns and the rewards of the functions that it wraps. It sees no log-probabilities and
no advantages, which `otb score` adds from the checkpoint, and no mask of tool tokens.
"""

import inspect
import json
import math
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from otb_analysis.errors import InputError

Reward = Callable[..., Sequence[float | None]]
PASSED = {"trainer_state", "log_extra", "log_metric", "environments", "prompts", "completions", "completion_ids"}
"""What TRL passes beside the dataset's columns."""


class RolloutRecorder:
    """A reward function that pays nothing and writes every rollout of training into a file of JSON lines.

    `reward_funcs=RolloutRecorder("rollouts.jsonl").around([correct, form])`. Needs no particular version of TRL, and
    none of its internals: where the trainer can be reached, evaluation is left out and TRL's own `reward_weights` are
    taken; else every call counts as training, and `weights`, or 1, weigh the functions.

    Several processes: all send their rows to the first, which writes them in TRL's order.
    """

    __name__ = "rollout_recorder"

    def __init__(self, path: str | Path, weights: Sequence[float] | None = None):
        """Refuse a file that exists, so that two runs are never mixed.

        Raises:
            InputError: It exists.
        """
        self.path, self.weights = Path(path), weights
        self.names: list[str] = []
        self._paid: dict[str, list[float]] = {}
        self._step = -1
        if self.path.exists():
            raise InputError(f"{path} already exists; name another file, or move that one away.")

    def around(self, functions: Reward | Sequence[Reward]) -> list[Reward]:
        """Return reward functions that pay what these pay, seen by the recorder, and the recorder behind them.

        Raises:
            InputError: One is a model, a name of one, or asynchronous: those run where the recorder cannot see them.
        """
        functions = [functions] if callable(functions) else list(functions)
        for function in functions:
            if isinstance(function, torch.nn.Module | str) or inspect.iscoroutinefunction(function):
                name = getattr(function, "__name__", str(function)[:40])
                raise InputError(
                    f"reward {name} is a model or asynchronous, and the recorder sees plain functions only; pass a "
                    "function that calls it."
                )
        if self.weights is not None and len(self.weights) != len(functions):
            raise InputError(f"there are {len(self.weights)} weights for {len(functions)} reward functions.")
        return [*(self._recording(function) for function in functions), self]

    def _recording(self, function: Reward) -> Reward:
        name = _unlike(getattr(function, "__name__", type(function).__name__), self.names)
        self.names.append(name)

        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Sequence[float | None]:
            paid = function(*args, **kwargs)
            self._paid[name] = [math.nan if one is None else float(one) for one in paid]
            return paid

        return recorded

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[Any] | None = None, **kwargs: Any
    ) -> list[None]:
        """Write the rollouts, and pay nothing. A file that cannot be written is a warning; training goes on."""
        trainer = getattr(kwargs.get("log_metric"), "__self__", None)  # TRL passes a method of its trainer
        model = getattr(trainer, "model", None)
        if model is not None and not model.training:
            return [None] * len(prompts)
        rows = self._rows(prompts, completions, completion_ids, kwargs, trainer)
        # TRL can generate twice within one step of its optimizer.
        self._step = max(int(getattr(kwargs.get("trainer_state"), "global_step", 0)), self._step + 1)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, rows)
            if torch.distributed.get_rank():
                return [None] * len(prompts)
            rows = [row for part in parts for row in part]
        groups: dict[str, int] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                for row in rows:
                    group = groups.setdefault(repr(row["prompt"]), len(groups))
                    if row["reward"] is not None:  # what no function could score is left out, as TRL does
                        whole = {"step": self._step, "group": group, **row}
                        file.write(json.dumps(whole, ensure_ascii=False, default=str) + "\n")
        except OSError as error:
            message = f"step {self._step} is missing from {self.path}, training goes on: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return [None] * len(prompts)

    def _rows(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[Any] | None, kwargs: Any, trainer: Any
    ) -> list[dict[str, Any]]:
        """Return this process's rollouts as records; TRL writes chats as lists of messages."""
        listed = {name: values for name, values in kwargs.items() if name not in PASSED and isinstance(values, list)}
        columns = {name: values for name, values in listed.items() if len(values) == len(prompts)}
        # Weights as given here, or TRL's own, or 1
        names, given = self.names, self.weights
        if given is None:
            names, given = list[str](), getattr(trainer, "reward_weights", [])
            for name in getattr(trainer, "reward_func_names", []):
                names.append(_unlike(name, names))
        weights = dict.fromkeys(self.names, 1.0) | dict(zip(names, map(float, given), strict=True))
        rows = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            paid = {name: self._paid[name][i] for name in self.names}
            known = {name: one for name, one in paid.items() if not math.isnan(one)}
            texts = [completion]
            if not isinstance(completion, str):
                texts = [_content(message) for message in completion if message.get("role") == "assistant"]
            if not isinstance(prompt, str):
                prompt = [{"role": message["role"], "content": _content(message)} for message in prompt]
            row = {"prompt": prompt, "completion": "\n".join(texts), "turns": len(texts)}
            row["reward"] = sum(weights[name] * one for name, one in known.items()) if known else None
            row["rewards"] = known
            if completion_ids is not None:
                row["ids"] = list(map(int, completion_ids[i]))
                if ends := getattr(trainer, "eos_token_ids", None):
                    row["finish_reason"] = "stop" if row["ids"] and row["ids"][-1] in ends else "length"
            row["columns"] = {name: values[i] for name, values in columns.items()}
            rows.append(row)
        return rows


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def _unlike(name: str, others: Sequence[str]) -> str:
    """Return a name that no other function has: two lambdas are `<lambda>` and `<lambda> 2`."""
    count = sum(other == name or other.startswith(f"{name} ") for other in others)
    return f"{name} {count + 1}" if count else name
