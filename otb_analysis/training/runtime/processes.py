"""The processes of one run: who they are, what they tell each other, and how all of them end when one does.

`accelerate launch` starts them; a run that was not launched so is one process, for which nothing here does anything.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store, _get_default_store

from otb_analysis.errors import ProcessError, StoreError
from otb_analysis.extras import require
from otb_analysis.types import Float, Int

T = TypeVar("T")

PATIENCE = timedelta(hours=12)
"""How long a process waits for another one; a process that ends is noticed at once, by other means."""
PROCESS = 2
"""Seed stream of the processes other than the first; the rank follows it."""
FAILED = "otb/failed"
"""Key under which the first process that fails publishes its error."""
HEARD = "otb/heard/{}"
"""Key under which a process, by its rank, confirms that it has read that error."""
LOOK, GRACE = 0.2, 5.0
"""Seconds between two looks at those keys, and seconds a process gets to end by itself before it is killed."""


@dataclass
class Processes:
    """The processes of a run; by default one that is alone.

    Attributes:
        rank: This process, from 0; the first one owns run.json, the `steps` parts, checkpoints and the final model.
        size: How many there are.
        device: Where this process runs its model; None leaves the model where it is.
        sharded: True when each process keeps a part of every parameter (FSDP2), False when each keeps all of them.
        host: Group of all processes for exchanges in main memory.
        record: Called with one sentence before another process's failure ends this one.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    sharded: bool = False
    host: ProcessGroup | None = None
    record: Callable[[str], None] = field(default=lambda reason: None)
    _heard: str | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def joined(cls, sharded: bool) -> "Processes":
        """Meet the others that were launched with this one; alone when there are none.

        Args:
            sharded: True when the launch asks for FSDP2.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return cls()
        require("accelerate", "a run of several processes")
        from accelerate import PartialState

        cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" or not torch.accelerator.is_available()
        state = PartialState(cpu=cpu, timeout=PATIENCE)
        host = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(host, ProcessGroup)
        found = cls(state.process_index, state.num_processes, state.device, sharded, host)
        threading.Thread(target=found._watch, args=(_store(),), daemon=True).start()
        return found

    @property
    def first(self) -> bool:
        """True on the process that writes what is written once."""
        return self.rank == 0

    @property
    def seed(self) -> tuple[int, ...]:
        """What this process's seeds depend on besides the step's; nothing on the first one."""
        return (PROCESS, self.rank) if self.rank else ()

    def shard(self, rows: Int) -> Int:
        """Return this process's part of some rows: consecutive ones, parts of equal size up to one."""
        return np.array_split(rows, self.size)[self.rank]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank.

        Raises:
            ProcessError: Another process has ended.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _lost_named():
            dist.all_gather_object(found, value, group=self.host)
        return found

    def broadcast_from_main(self, run: Callable[[], T]) -> T:
        """Return what a function returns on the first process; the others wait for it.

        Raises:
            ProcessError: Another process has ended.
        """
        if self.size == 1:
            return run()
        found: list[Any] = [run() if self.first else None]
        with _lost_named():
            dist.broadcast_object_list(found, src=0, group=self.host)
        return found[0]

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.gather(None)

    def rows(self, x: Float, width: int) -> Float:
        """Return [n, T'] of all processes as one [N, width], zero where a row was shorter."""
        return np.concatenate([widened(part, width) for part in self.gather(x)])

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add `.grad` up over processes, in place, where each has whole gradients of its own rollouts.

        A parameter that one process has no gradient of counts as zero there.
        """
        if self.size == 1:
            return
        with _lost_named():
            begun = [dist.all_reduce(_gradient(parameter), async_op=True) for parameter in parameters]
            for work in begun:
                if work is not None:
                    work.wait()

    @contextmanager
    def together(self) -> Iterator[None]:
        """End all processes when the block fails on one of them, each with the sentence of the first that failed.

        Raises:
            ProcessError: Another process failed first.
        """
        try:
            yield
        except BaseException as error:
            self.end()
            first = self._agreed(error) if self.size > 1 else None
            if first is not None:
                raise ProcessError(first) from error
            raise

    def end(self) -> None:
        """Stop watching the others: the run is over."""
        self._ended.set()

    def _agreed(self, error: BaseException) -> str | None:
        """Publish this process's error. Return an earlier one if another process failed first."""
        if self._heard is not None:
            return self._heard
        own = f"process {self.rank} stopped: {str(error) or type(error).__name__}"
        try:
            store = _store()
            said = store.compare_set(FAILED, "", str(error) if isinstance(error, ProcessError) else own).decode()
            store.set(HEARD.format(self.rank), "")
            if said != own:
                return said
            everyone, patience = [HEARD.format(rank) for rank in range(self.size)], monotonic() + GRACE
            while not store.check(everyone) and monotonic() < patience:
                sleep(LOOK)
        except RuntimeError:  # the store is gone, and with it the process that kept it
            return None
        return None

    def _watch(self, store: Store) -> None:
        """Record another process's failure. End this process if it still waits for the failed one."""
        while not self._ended.wait(LOOK):
            try:
                sentence = store.get(FAILED).decode() if store.check([FAILED]) else None
                if sentence is None:
                    continue
                self._heard = sentence
                with suppress(StoreError):
                    self.record(sentence)
                store.set(HEARD.format(self.rank), "")
            except RuntimeError:  # the store went with the process that kept it
                sentence = self._heard or "another process ended without an error message; look at its own output."
                with suppress(StoreError):
                    self.record(sentence)
            if self._ended.wait(GRACE):
                return
            sys.stderr.write(f"otb: {sentence}\n")
            sys.stderr.flush()
            os._exit(2)


SINGLE_PROCESS = Processes()
"""A run of one process."""


def is_main_process() -> bool:
    """Return whether this process is the first of those that were launched together, or alone."""
    return int(os.environ.get("RANK", 0)) == 0


def widened(x: Float, width: int) -> Float:
    """Return rows [n, T'] with zeros up to `width` columns."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def total_of(processes: Processes, sums: dict[str, float]) -> dict[str, float]:
    """Return named numbers summed over processes; a name that one of them lacks counts as zero there."""
    parts = processes.gather(sums)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(n for p in parts for n in p)}


def full(x: Tensor) -> Tensor:
    """Return a tensor whole, whether or not it is spread over processes."""
    whole: Callable[[], Tensor] | None = getattr(x, "full_tensor", None)
    return x if whole is None else whole()


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _store() -> Store:
    """The processes' common store, over a connection of its own so that a thread may use it."""
    return _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _lost_named() -> Iterator[None]:
    """Turn every error of an interrupted exchange into one sentence."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessError("another process ended in the middle of an exchange; look at its own output.") from error
