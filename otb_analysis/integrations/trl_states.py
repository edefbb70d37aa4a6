"""Final hidden states of a batch, caught where TRL's own passes read it with the weights that wrote it.

TRL reads every rollout before its first update: at once where it keeps old log-probabilities, else in the loss. Who has
the states needs no pass of his own for Σπ², only the output layer.

Whoever watches calls `begin` before a batch is generated, `of` once all of it was read, and `close` where nobody asks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otb_analysis.errors import InputError
from otb_analysis.measurement.forward import LOGIT_BYTES
from otb_analysis.rollouts.sampling import Draft
from otb_analysis.types import Float

METHOD = "_get_per_token_logps_and_entropies"
"""Of TRL's trainers: every pass over rollouts, with a graph or without."""
READ = ("input_ids", "attention_mask", "logits_to_keep")
"""Its arguments behind the model, in this order."""
Key = tuple[int, bytes]
"""A rollout: the length of its prompt, and its tokens."""


@dataclass(frozen=True)
class Caught:
    """What a pass of the trainer left of one rollout, before each of its T completion tokens."""

    states: Tensor  # [T, d], in main memory: an accelerator's is the training's
    logprob: Float  # log π as the trainer has it, at its temperature [T]


class CaughtStates:
    """Keeps what the policy's layers below the output layer return; nothing of a trainer's results changes.

    Args:
        trainer: Of TRL, with `METHOD`.
        policy: Its language model, without wrappers.
    """

    def __init__(self, trainer: Any, policy: Any) -> None:
        self._trainer, self._backbone = trainer, policy.base_model
        self._before, self._pass = vars(trainer).get(METHOD), getattr(trainer, METHOD)
        self._seconds = 0.0  # Of keeping states
        self.close()
        setattr(trainer, METHOD, self._read)

    def begin(self) -> None:
        """Forget what was caught, and look at every pass of the training from here on."""
        self.close()
        self._open = True

    def close(self) -> None:
        """Look at nothing, and forget what was caught."""
        self._open, self._caught, self._size = False, dict[Key, Caught](), 0
        self._fault = "a rollout was in no pass of the trainer"

    def release(self) -> None:
        """Leave the trainer as it was."""
        self.close()
        vars(self._trainer).pop(METHOD) if self._before is None else setattr(self._trainer, METHOD, self._before)

    def spent(self) -> float:
        """Return the seconds that keeping states took since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_caught(self, drafts: Sequence[Draft]) -> list[Caught]:
        """Return what was caught of each rollout, and close.

        Raises:
            InputError: A rollout was in no pass that could be looked at.
        """
        caught, fault = self._caught, self._fault
        self.close()
        keys = [(draft.prompt_length, np.array(draft.ids, np.int64).tobytes()) for draft in drafts]
        if any(key not in caught for key in keys):
            raise InputError(f"{fault}; a pass of ours reads it.")
        return [caught[key] for key in keys]

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        """Do a pass of the trainer, and keep what it leaves of rollouts that were in none before."""
        if not self._open or not self._trainer.model.training:  # else of an evaluation
            return self._pass(*args, **kwargs)
        call = dict(zip(("model", *READ), args, strict=False)) | kwargs  # by place, or by name
        row, new = 0, dict[Key, tuple[int, Tensor]]()

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            """Keep the states of a pass over the call's next rows."""
            nonlocal row
            with self._watching():
                first, row = row, row + len(output[0])
                new.update(self._found(output[0].detach(), call, first))

        hook = self._backbone.register_forward_hook(keep)
        try:
            result = self._pass(*args, **kwargs)
        except BaseException:
            self.close()  # nobody asks any more
            raise
        finally:
            hook.remove()
        with self._watching():
            for key, (of, states) in new.items() if self._open else ():  # else it failed on the way
                self._caught[key] = Caught(states, result[0][of, : len(states)].detach().double().cpu().numpy())
        return result

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Count the time, and look at nothing more where something fails: observing never breaks training."""
        if torch.accelerator.is_available():  # what the trainer's own pass still has to do there is not our time
            torch.accelerator.synchronize()
        start = perf_counter()
        try:
            yield
        except Exception as error:
            self.close()
            self._fault = f"{type(error).__name__}: {error}"
        self._seconds += perf_counter() - start

    def _found(self, hidden: Tensor, call: dict[str, Any], first: int) -> dict[Key, tuple[int, Tensor]]:
        """Return rows and states of the call's new rollouts from row `first` on; prompts are padded left."""
        new = dict[Key, tuple[int, Tensor]]()
        rows = slice(first, first + len(hidden))
        ids, present = (call[name][rows].cpu() for name in ("input_ids", "attention_mask"))
        begin, present = ids.shape[1] - call["logits_to_keep"], present.bool()
        for row, (own, inside, states) in enumerate(zip(ids, present, hidden, strict=True), start=first):
            n = int(inside[begin:].sum())
            key = int(inside[:begin].sum()), own[inside].numpy().tobytes()
            if not self._open or key in self._caught:
                continue
            self._size += n * states.shape[1] * states.element_size()
            if self._size > LOGIT_BYTES:
                raise MemoryError("the hidden states of a batch take more than 1 GiB")
            new[key] = row, states[begin - 1 : begin - 1 + n].to("cpu", copy=True)  # not the whole padded row
        return new
