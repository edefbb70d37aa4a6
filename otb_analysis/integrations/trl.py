"""TRL's GRPOTrainer with per-token advantages of any of our estimators, and a run of our store beside it.

TRL samples, rewards and updates as ever. Between its generation and its loss, a forward pass without gradients gives
every token's π_y and Σπ², an estimator of ours gives advantages [B, T], and these replace TRL's [B].
"""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from otb_analysis.errors import InputError, NonFiniteError
from otb_analysis.estimators import counting_tokens, entry_of, estimate, options_from_dict, with_limit
from otb_analysis.integrations.recorder import RolloutRecorder
from otb_analysis.integrations.run_log import RecordConfig, RunLog
from otb_analysis.integrations.trl_batch import (
    OTHERS,
    READ,
    GatheredBatch,
    collated,
    drafts_of,
    ends_of,
    gathered_batch,
    load_trl,
    local_rows,
    refuse_lacking,
    scored,
)
from otb_analysis.integrations.trl_run import (
    OF_SAMPLING,
    PLAIN,
    batch_measurer,
    batch_tables,
    filters_of,
    first_batch,
    measured_batch,
    on_all,
    paid,
    policy_of,
    processes_of,
    refuse_unreadable,
    stored_config,
    updates_of,
)
from otb_analysis.measurement.forward import forward_statistics
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.rollouts.models import evaluating, special_id
from otb_analysis.store import StepTables
from otb_analysis.types import Estimate, NormalEquations, Tallies

__all__ = ["OTBGRPOTrainer", "RecordConfig", "RolloutRecorder"]

GIVEN = {"energy", "turn", "token_id", "entropy"}
"""What an estimator may need here; TRL has no critic, and no exact norm of every rollout at every step."""
WORDS = {
    "value": "a critic", "ratio": "importance ratios", "rollout_norm_sq": "exact norms of all rollouts at every step",
}  # fmt: skip
Trainer: Any = load_trl().GRPOTrainer


class OTBGRPOTrainer(Trainer):
    """A GRPOTrainer that trains on an estimator of ours.

    Args:
        estimator: A name of the catalogue, or your own `module:function`.
        options: Options of that estimator by name.
        record: Where the run is stored; None stores nothing.
        args, kwargs: Those of GRPOTrainer. `scale_rewards` has no effect: an estimator that scales does so itself.

    Raises:
        InputError: The estimator does not exist or needs what TRL does not have, or a setting of TRL cannot work.
    """

    def __init__(
        self,
        *args: Any,
        estimator: str = "otb_loo",
        options: Mapping[str, Any] | None = None,
        record: RecordConfig | None = RecordConfig(),  # noqa: B008 - frozen
        **kwargs: Any,
    ) -> None:
        self._estimator = estimator
        self._options = options_from_dict(estimator, options or {})
        entry = entry_of(estimator)
        if lacking := sorted(set(entry.needs) - GIVEN):
            what = WORDS.get(lacking[0], lacking[0])
            raise InputError(f"estimator {estimator!r} needs {what}, which TRL does not have; choose another.")
        if not entry.takes_gaps and (kwargs.get("tools") or kwargs.get("environment_factory")):
            raise InputError(
                f"estimator {estimator!r} takes positions from columns, but tools write tokens in between; use "
                f"{counting_tokens(estimator)!r}."
            )
        super().__init__(*args, **kwargs)
        refuse_lacking(self, (*READ, "num_generations_eval", "_tokenizer"), "GRPOTrainer")
        refuse_unreadable(self)
        for name, value in filters_of(self).items():
            message = f"{name} is {value}: tokens do not come from the probabilities that the loss "
            message += f"and {estimator!r} take, so no baseline is unbiased; set it to {PLAIN[name][0]}."
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._options = with_limit(estimator, self._options, self.args.max_completion_length)
        self._remembered: NormalEquations | Tallies | None = None
        self._last_step: int | None = None  # Number of the last batch that was generated for training
        self._rewards_by_function = torch.zeros(0)
        self._norms: list[float] = []  # ‖ḡ‖ of the updates since the last batch
        self._log: RunLog | None = None
        self._processes = processes_of(self)
        self._measurer: GradientMeasurer | None = None
        if record is not None:
            trains = {"name": estimator, "energy": "proxy", "options": dict(options or {})}
            stored, trained = stored_config(self, record, trains, "OTBGRPOTrainer"), {estimator: self._options}
            if self.accelerator.is_main_process:
                self._log = RunLog(record, Path(self.args.output_dir).name, stored)
            self._measurer = batch_measurer(self, record.measure, stored, True, self._processes, trained)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as GRPOTrainer does; the run records how that ended."""
        with nullcontext() if self._log is None else self._log.training(self._update_scalars):
            return super().train(*args, **kwargs)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Keep ‖ḡ‖ before clipping, of each of the optimizer's steps."""
        norm = super()._get_grad_norm(*args, **kwargs)
        self._norms.append(float(norm))
        return norm

    def _update_scalars(self) -> dict[str, object]:
        """Return what is stored of the updates on the last batch; nothing where there was none."""
        norms, self._norms = self._norms, []
        return updates_of(norms, self.args.max_grad_norm)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of TRL, which takes our advantages by token.

        Raises:
            InputError: The batch has TRL's own: this version does not ask `_generate_and_score_completions` for it.
        """
        if inputs["advantages"].dim() != 2:
            raise InputError(
                f"trl {version('trl')} trains on advantages by rollout that did not pass "
                f"_generate_and_score_completions, so estimator {self._estimator!r} would have no effect; {OTHERS}."
            )
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the rewards of all processes [N, functions], NaN where a function scored nothing."""
        self._rewards_by_function = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_by_function

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Replace the advantages [B] of TRL's batch by ours [B, T].

        Raises:
            InputError: The batch holds images, or tool tokens that the estimator does not take.
            NonFiniteError: A logit is not finite.
        """
        batch = super()._generate_and_score_completions(inputs)
        if "pixel_values" in batch:
            raise InputError("the batch holds images, which our forward pass does not read; train with GRPOTrainer.")
        start, training = perf_counter(), self.model.training
        drafts = drafts_of(batch, self._tokenizer, ends_of(self, self._tokenizer))
        size = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        rollouts, policy = collated(drafts, special_id(self._tokenizer, "pad")), policy_of(self)
        try:
            with self.accelerator.autocast(), evaluating(policy):
                local = scored(drafts, rollouts, forward_statistics(policy, rollouts, self.temperature, size))
        except NonFiniteError as error:
            raise NonFiniteError(f"step {self.state.global_step}: {error}") from error
        seconds, step = {"seconds_forward": perf_counter() - start}, -1
        if training:  # one that goes on from a checkpoint goes on counting
            step = self._last_step = first_batch(self) if self._last_step is None else self._last_step + 1
            if self._log is not None:
                self._log.release(self._update_scalars())
        like = batch["completion_ids"]
        rewards, parts = paid(self, self._rewards_by_function)
        group = np.arange(len(rewards)) // (self.num_generations if training else self.num_generations_eval)
        every = [draft for own in self._processes.gather(local) for draft in own]
        whole = gathered_batch(every, rewards, parts, group, self._tokenizer)
        if whole is None:
            message = f"step {self.state.global_step}: no rollout has a reward and a token to train on"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return batch | {"advantages": torch.zeros_like(like, dtype=torch.float32)}
        given = replace(whole.table.inputs(whole.table.stats.energy), state=self._remembered)
        trained = estimate(self._estimator, given, self._options)
        if training and self._measurer is not None:
            self._keep(self._measurer, step, whole, trained, seconds)
        if training:
            self._remembered = trained.state
        first = self.accelerator.process_index * len(like)
        return batch | {"advantages": local_rows(trained.advantage, whole, first, like)}

    def _keep(
        self, measurer: GradientMeasurer, step: int, whole: GatheredBatch, trained: Estimate, seconds: dict[str, float]
    ) -> None:
        """Measure a step, and keep everything to store of it; every process calls this, though one of them stores."""
        measurer.states, found, faults = {}, None, list[str]()
        if self._remembered is not None:
            source = "proxy" if entry_of(self._estimator).reads_energy else "none"
            measurer.states = {(self._estimator, source): self._remembered}
        if measurer.processes.size > 1:
            found, faults = on_all(lambda: measured_batch(self, measurer, step, whole, trained))
        scalars: dict[str, object] = {"trl_global_step": self.state.global_step, **seconds}
        if self.args.mask_truncated_completions:
            scalars |= dict.fromkeys(OF_SAMPLING)

        def tables() -> StepTables:
            if faults:
                raise InputError(faults[0])
            measured = found or measured_batch(self, measurer, step, whole, trained)
            return batch_tables(step, whole, trained, measured, self._tokenizer, scalars)

        if self._log is not None:
            self._log.keep(step, tables)
