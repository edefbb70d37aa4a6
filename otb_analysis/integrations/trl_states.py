"""Final hidden states of a batch, caught where TRL's own passes read it with the weights that wrote it.

TRL reads every rollout before its first update: at once where it keeps old log-probabilities, else in the loss. Who has
the states needs no pass of his own for Σπ², only the output layer.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn

from otb_analysis.errors import InputError
from otb_analysis.measurement.forward import LOGIT_BYTES
from otb_analysis.rollouts.sampling import Draft

METHOD = "_get_per_token_logps_and_entropies"
"""Of TRL's trainers: every pass over rollouts, with a graph or without."""
READ = ("input_ids", "attention_mask", "logits_to_keep")
"""Its arguments behind the model, in this order."""


class CaughtStates:
    """Keeps what the policy's layers below the output layer return; nothing of a trainer's results changes.

    Args:
        trainer: Of TRL, with `METHOD`.
        policy: Its language model, without wrappers.
    """

    def __init__(self, trainer: Any, policy: Any) -> None:
        self.open = False  # True while passes are looked at
        self.fault = ""
        self._seconds = 0.0  # Of keeping states
        self._trainer, self._backbone = trainer, policy.base_model
        self._before, self._pass = vars(trainer).get(METHOD), getattr(trainer, METHOD)
        self._states: dict[tuple[int, bytes], Tensor] = {}
        setattr(trainer, METHOD, self._read)

    def begin(self) -> None:
        """Forget what was caught, and look at every pass from here on."""
        self._states, self.fault, self.open = {}, "", True

    def spent(self) -> float:
        """Return the seconds that keeping states took since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def release(self) -> None:
        """Leave the trainer as it was."""
        self.open = False
        vars(self._trainer).pop(METHOD) if self._before is None else setattr(self._trainer, METHOD, self._before)

    def of(self, drafts: Sequence[Draft]) -> list[Tensor]:
        """Return the states before every completion token [T_i, d] of each rollout, and forget them all.

        Raises:
            InputError: A rollout was in no pass that could be looked at.
        """
        states, self._states, self.open = self._states, {}, False
        keys = [(draft.prompt_length, np.array(draft.ids, np.int64).tobytes()) for draft in drafts]
        if any(key not in states for key in keys):
            raise InputError(
                f"{self.fault or 'a rollout was in no pass of the trainer'}; a pass of ours reads the next."
            )
        return [states[key] for key in keys]

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        """Do a pass of the trainer, and keep the states of rollouts that were in none before."""
        if not self.open:
            return self._pass(*args, **kwargs)
        call, row = dict(zip(("model", *READ), args, strict=False)) | kwargs, 0  # by place, or by name

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal row
            start = perf_counter()
            try:
                first, row = row, row + len(output[0])
                self._keep(output[0].detach(), call, first)
            except Exception as error:  # observing never breaks training
                self.fault, self.open = f"{type(error).__name__}: {error}", False
            self._seconds += perf_counter() - start

        hook = self._backbone.register_forward_hook(keep)
        try:
            return self._pass(*args, **kwargs)
        finally:
            hook.remove()

    def _keep(self, hidden: Tensor, call: dict[str, Any], first: int) -> None:
        """Keep the states of the call's rows from `first` on, whose prompts are padded left, completions right."""
        rows = slice(first, first + len(hidden))
        ids, present = (call[name][rows].cpu() for name in ("input_ids", "attention_mask"))
        begin, present = ids.shape[1] - call["logits_to_keep"], present.bool()
        for own, inside, states in zip(ids, present, hidden, strict=True):
            n = int(inside[begin:].sum())
            key = int(inside[:begin].sum()), own[inside].numpy().tobytes()
            if key not in self._states:
                self._states[key] = states[begin - 1 : begin - 1 + n].clone()
        if sum(x.numel() * x.element_size() for x in self._states.values()) > LOGIT_BYTES:
            raise MemoryError("the hidden states of a batch take more than 1 GiB")
