"""The processes of one run: their ranks, what they exchange, and how all of them end when one fails.

`accelerate launch` starts them. Without it a run is one process, and nothing here does anything.
"""

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from otb_analysis.errors import ExchangeError, InputError, ProcessError, StoreError
from otb_analysis.extras import require
from otb_analysis.types import Float, Int

if TYPE_CHECKING:  # a single process needs no torch
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

PATIENCE = timedelta(hours=12)
"""How long a process waits for another one. A process that ends is noticed at once, by `Processes._watch`."""
PROCESS = 2
"""Seed stream of the processes other than the first, followed by the rank."""
FAILED = "otb/failed"
"""Key under which the first process that fails publishes its error."""
HEARD = "otb/heard/{}"
"""Key under which a process, by its rank, confirms that it has read that error."""
TOLD = "otb_told"
"""Attribute of an error that this process has told the others of."""
LOOK, GRACE = 0.2, 5.0
"""Seconds between two looks at those keys, and seconds a process gets to end by itself before it is killed."""


@dataclass
class Processes:
    """The processes of a run; by default a single one."""

    rank: int = 0  # This process. Process 0 owns run.json, the `steps` parts, checkpoints and the final model
    size: int = 1
    device: "torch.device | None" = None  # Where this process runs its model; None leaves the model where it is
    sharded: bool = False  # True when each process keeps a part of every parameter (FSDP2)
    host: "ProcessGroup | None" = None  # Group of all processes for exchanges in main memory
    # Called with one sentence before another process's failure ends this one.
    record: Callable[[str], None] = field(default=lambda reason: None)
    _heard: str | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def joined(cls, sharded: bool, device: str = "auto") -> "Processes":
        """Join the processes that were launched with this one, if any; each of several gets a device of its own.

        `sharded`: the launch asks for FSDP2.

        Raises:
            InputError: The device is not there, or is one of several that a process cannot choose.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return cls()
        require("accelerate", "a run of several processes")
        import torch.distributed as dist
        from accelerate import PartialState

        from otb_analysis.devices import device_of

        kind = device_of(device, measures=False)
        if kind.index is not None:
            raise InputError(f"--device is {kind} but each of several processes has a GPU of its own; pass cuda.")
        cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" or kind.type == "cpu"
        state = PartialState(cpu=cpu, timeout=PATIENCE)
        host = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(host, dist.ProcessGroup)
        processes = cls(state.process_index, state.num_processes, state.device, sharded, host)
        threading.Thread(target=processes._watch, args=(_store(),), daemon=True).start()
        return processes

    @property
    def first(self) -> bool:
        """True on process 0, which writes what is written once."""
        return self.rank == 0

    @property
    def seed(self) -> tuple[int, ...]:
        """What this process adds to the step's seed; nothing on the first one."""
        return (PROCESS, self.rank) if self.rank else ()

    def shard(self, rows: Int) -> Int:
        """Return this process's part of some rows: consecutive rows, sizes equal up to one."""
        return np.array_split(rows, self.size)[self.rank]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank.

        Raises:
            ProcessError: Another process has ended, or failed inside `agreed` on its way here.
        """
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        sizes, packed = _packed(value)
        every = list[Any]([None] * self.size)
        with exchanging():
            dist.all_gather_object(every, sizes, group=self.host)
            longest = torch.nn.functional.pad(packed, (0, max(map(sum, every)) - len(packed)))
            received = [torch.empty_like(longest) for _ in every]
            dist.all_gather(received, longest, group=self.host)
        values = [_unpacked(*one) for one in zip(every, received, strict=True)]
        for value in values:
            if isinstance(value, _Failure):
                raise ProcessError(value)
        return values

    def broadcast_from_main(self, run: Callable[[], T]) -> T:
        """Run a function on the first process only; return its result on all, and raise on all where it fails.

        Raises:
            ProcessError: It failed there, or another process has ended.
        """
        if self.size == 1:
            return run()
        import torch
        import torch.distributed as dist

        sizes, packed = self.agreed(lambda: _packed(run() if self.first else None))
        told: list[Any] = [sizes]
        with exchanging():
            dist.broadcast_object_list(told, src=0, group=self.host)
            sent = packed if self.first else torch.empty(sum(told[0]), dtype=torch.uint8)
            dist.broadcast(sent, src=0, group=self.host)
        return _unpacked(told[0], sent)

    def agreed(self, run: Callable[[], T]) -> T:
        """Run a function on every process and return its result there; where it fails on one, raise on all.

        It may exchange values, and be agreed on in parts: whoever fails anywhere tells it once, in the others' next
        `gather`, so that all are at the same place again.

        Raises:
            ProcessError: It failed on another process.
        """
        if self.size == 1:
            return run()
        try:
            result = run()
        except Exception as error:
            if not _is_told(error):
                with suppress(ProcessError):
                    self.gather(_Failure(f"process {self.rank} stopped: {str(error) or type(error).__name__}"))
                error.__dict__[TOLD] = True
            raise
        self.gather("")
        return result

    def columns(self, slices: "Iterable[Sequence[Tensor]]", counts: Sequence[int]) -> "Iterator[Tensor]":
        """Yield this process's part of the columns of all processes' rows [Σ counts, n'], slice by slice.

        The next slice is on its way while the caller uses one.

        Args:
            slices: This process's own rows, some at a time [r, n], of the same columns on every process.
            counts: How many rows every process has, by rank. n' is n/size, up to one.

        Raises:
            ProcessError: Another process has ended.
        """
        import torch
        import torch.distributed as dist

        on_its_way = None
        for parts in slices:
            if self.size == 1:
                yield torch.cat(list(parts))
                continue
            n, rows = parts[0].shape[1], counts[self.rank]
            edges = [n * rank // self.size for rank in range(self.size + 1)]
            widths = np.diff(edges).tolist()
            sent = parts[0].new_empty(rows * n)
            for width, stop, into in zip(widths, edges[1:], sent.split([rows * w for w in widths]), strict=True):
                torch.cat([x[:, stop - width : stop] for x in parts], out=into.view(rows, width))
            width = widths[self.rank]
            columns = sent.new_empty(sum(counts), width)
            group = self.host if sent.device.type == "cpu" else None  # gloo moves main memory only
            with exchanging():
                received, given = [count * width for count in counts], [rows * w for w in widths]
                work = dist.all_to_all_single(columns.view(-1), sent, received, given, group, async_op=True)
                assert work is not None
                if on_its_way is not None:
                    on_its_way[1].wait()
            if on_its_way is not None:
                yield on_its_way[0]
            on_its_way = columns, work
        if on_its_way is not None:
            with exchanging():
                on_its_way[1].wait()
            yield on_its_way[0]

    def added(self, run: Callable[[], Float]) -> Float:
        """Run a function on every process; return the sum of all their arrays on each.

        Raises:
            ProcessError: It failed on another process.
        """
        return np.sum(self.gather(self.agreed(run)), axis=0)

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.gather(None)

    def sum_gradients(self, parameters: "Iterable[torch.nn.Parameter]") -> None:
        """Sum `.grad` over processes, in place. Without a gradient on some process, a parameter counts as zero there.

        Each process must hold whole parameters, with the gradients of its own rollouts.
        """
        if self.size == 1:
            return
        import torch

        def gradients() -> "Iterator[Tensor]":
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                yield parameter.grad

        self.add_up(gradients())

    def add_up(self, tensors: "Iterable[Tensor]") -> None:
        """Sum contiguous tensors over processes, in place; each process passes the same shapes in the same order.

        No two of them may share memory.
        """
        if self.size == 1:
            return
        import torch.distributed as dist

        with exchanging():
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                if work is not None:
                    work.wait()

    @contextmanager
    def together(self) -> Iterator[None]:
        """End all processes when the block fails on one of them, each with the error of the first that failed.

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
        ours = f"process {self.rank} stopped: {str(error) or type(error).__name__}"
        try:
            store = _store()
            # Only the first process that gets here writes; the others read what it wrote.
            first = store.compare_set(FAILED, "", str(error) if isinstance(error, ProcessError) else ours).decode()
            store.set(HEARD.format(self.rank), "")
            if first != ours:
                return first
            everyone, deadline = [HEARD.format(rank) for rank in range(self.size)], monotonic() + GRACE
            while not store.check(everyone) and monotonic() < deadline:  # the store may end with this process
                sleep(LOOK)
        except RuntimeError:  # the store is gone, and with it the process that kept it
            return None
        return None

    def _watch(self, store: "Store") -> None:
        """Record another process's failure. End this process if it still waits for the failed one."""
        while not self._ended.wait(LOOK):
            try:
                if not store.check([FAILED]):
                    continue
                sentence = self._heard = store.get(FAILED).decode()
            except RuntimeError:  # the store is gone, and with it the process that kept it
                sentence = self._heard or "another process ended without an error message; look at its own output."
            with suppress(StoreError):
                self.record(sentence)
            with suppress(RuntimeError):
                store.set(HEARD.format(self.rank), "")
            if self._ended.wait(GRACE):
                return
            sys.stderr.write(f"otb: {sentence}\n")
            sys.stderr.flush()
            os._exit(2)


class _Failure(str):
    """Why a process failed, in the place of what it would have exchanged."""


def _is_told(error: BaseException | None) -> bool:
    """Whether all processes know of an error, or of the one that it was raised from."""
    while error is not None:
        if isinstance(error, ProcessError) or TOLD in error.__dict__:
            return True
        error = error.__cause__
    return False


def _packed(value: object) -> "tuple[list[int], Tensor]":
    """A value as bytes, with the length of each of its parts: arrays as they lie in memory, all else pickled."""
    import torch

    buffers = list[pickle.PickleBuffer]()
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(part, np.uint8) for part in (head, *(one.raw() for one in buffers))]
    return [len(part) for part in parts], torch.from_numpy(np.concatenate(parts))


def _unpacked(sizes: Sequence[int], packed: "Tensor") -> Any:
    """The value whose parts have these lengths; its arrays own their memory."""
    head, *buffers = (bytearray(x.numpy()) for x in packed[: sum(sizes)].split(list(sizes)))
    return pickle.loads(head, buffers=buffers)


SINGLE_PROCESS = Processes()
"""A run of one process."""


def widened(x: Float, width: int) -> Float:
    """Return rows [n, T'] with zeros up to `width` columns."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))


def _store() -> "Store":
    """Return the processes' common store over a new connection, so that a thread may use it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def exchanging() -> Iterator[None]:
    """Turn any error in the middle of an exchange into one that no process goes on from.

    Raises:
        ExchangeError: This process failed inside, or another one ended.
    """
    try:
        yield
    except ExchangeError:
        raise
    except Exception as error:
        raise ExchangeError(
            f"an exchange between processes broke off ({str(error) or type(error).__name__}); look at their output."
        ) from error
