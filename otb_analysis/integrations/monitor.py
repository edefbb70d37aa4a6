"""OTBMonitor: a callback that watches an unchanged GRPOTrainer or RLOOTrainer, and changes nothing in its training.

A callback of transformers never sees rollouts. This one finds its trainer when training begins, and looks at what two
of its methods return, `_generate_and_score_completions` and `_calculate_rewards`; both results go on untouched. What
TRL does not compute, Σπ² and the tests of the sampler, comes from the hidden states of TRL's own passes; a forward pass
without gradients reads two rollouts of two batches, to compare, and all where those states would give other numbers.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from otb_analysis.checks.sampling import BFLOAT16, FLOAT32, SamplingCheck
from otb_analysis.checks.sampling_report import ALARM, sampling_lines, sampling_report
from otb_analysis.config import MeasureConfig
from otb_analysis.devices import synchronize
from otb_analysis.errors import InputError
from otb_analysis.estimators import estimate
from otb_analysis.integrations.batch_numbers import (
    COMPARED,
    advantages_of,
    batch_scalars,
    log_ratio_scalars,
)
from otb_analysis.integrations.run_log import RecordConfig, RunLog, tell
from otb_analysis.integrations.trl_batch import (
    READ,
    WATCHED,
    GatheredBatch,
    ScoredDraft,
    collated,
    drafts_of,
    ends_of,
    gathered_batch,
    refuse_lacking,
    scored,
)
from otb_analysis.integrations.trl_run import (
    OF_SAMPLING,
    batch_measurer,
    batch_tables,
    drawn_in_training,
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
from otb_analysis.integrations.trl_states import METHOD, CaughtStates
from otb_analysis.measurement.forward import ForwardPass, PolicyLogits, forward_statistics, statistics_of_states
from otb_analysis.measurement.measurer import Measurement
from otb_analysis.measurement.table import token_table
from otb_analysis.measurement.worst import worst_tables
from otb_analysis.rollouts.models import evaluating, special_id
from otb_analysis.rollouts.sampling import Draft, Rollouts
from otb_analysis.store import StepTables
from otb_analysis.trackers import TRACKERS, send
from otb_analysis.types import Estimate, Float

OF_REWARDS = ("dead_groups", "n_zero_variance_groups", "rho", *(f"power_{name}" for name in COMPARED))
"""Numbers that describe the training only where TRL's advantages come from the rewards that we see."""
OF_LENGTH = ("length", "truncated", "reward_length_corr")
"""Numbers that are wrong where rollouts cut at the limit are not seen, beside `OF_SAMPLING`."""
OLD = "old_per_token_logps", "old_logps"
"""What a batch has where TRL read it at once, in GRPOTrainer and RLOOTrainer."""
AGAIN = 10
"""Which batch is held against a pass of ours like the first: by then adapters that began at zero say something."""
ROUNDED = 2 * BFLOAT16
"""Root mean square of what log-probabilities of the same weights differ by in lower precision than float32, at most."""
SHARE, FREE = 0.07, 2.0
"""Most time of watching over that of the training, unless the user says otherwise; seconds in all that do not count."""
CHECKED = 0.8
"""Part of that time that watching may take with the sampling check, which costs more than all else on a CPU: it then
looks at every second, third, … token, but at a position a batch at least."""


Observer = Callable[[PolicyLogits], None] | None


@dataclass(frozen=True)
class SeenBatch:
    """What one process saw of a generated batch; travels between processes."""

    scored: Sequence[ScoredDraft]
    advantages: Sequence[Float]  # TRL's own, by completion token of each rollout [T_i]
    log_ratios: Mapping[str, Float]  # By what is compared, over this process's policy tokens [K]
    sampling: Mapping[str, Any]  # Rows of the sampling check
    n_compared: int  # Tokens at which a pass of ours gave the log-probability of the trainer's own


class OTBMonitor(TrainerCallback):
    """Writes a few deciding numbers of every generated batch to the trainer's own log, and the batch to our store.

    `GRPOTrainer(..., callbacks=[OTBMonitor(run="runs/x")])`. Whatever `report_to` names gets the numbers as `otb/…`.
    Weights and random numbers of the training are those without it. What fails here is told once, in one sentence, and
    the training goes on.

    Args:
        run: Directory of the run in our store; a bare name is put into `runs/`. Empty stores nothing.
        share: Most time that watching may take behind the first batch, over the time of the training without it. The
            sampling check then looks at as many tokens as keep this, the first batch included, but at a position a
            batch at least; where that is not enough batches are left out. Two seconds in all are allowed anyway.
            `math.inf` watches all, as is the default with `measure`.
        measure: What is measured beside the forward pass, on a schedule; by default nothing.
        if_exists: What to do where the run exists: refuse, begin anew, or go on.

    Raises:
        InputError: The run exists, or its name is none.
    """

    def __init__(
        self,
        run: str | Path = "",
        *,
        share: float | None = None,
        measure: MeasureConfig | None = None,
        if_exists: Literal["error", "replace", "resume"] = "error",
    ) -> None:
        path, settings = Path(run), {} if measure is None else {"measure": measure}
        root = path.parent if len(path.parts) > 1 else Path("runs")
        self._record = RecordConfig(run=path.name, root=root, if_exists=if_exists, **settings)
        if path.name:
            RunLog(self._record, "", {})  # refuses a run that exists
        self._share = (SHARE if measure is None else math.inf) if share is None else share
        self._trainer: Any = None
        self._before: dict[str, Any] = {}  # What the trainer itself had of `WATCHED`
        self._begin()

    def _begin(self) -> None:
        """Forget an earlier training."""
        self._log: RunLog | None = None
        self._spent = self._begun = self._first = 0.0  # `_first`: spent on the first batch, which leaves out no other
        self._rewards = torch.zeros(0)  # Of all processes [N, functions], as TRL had them last
        self._step, self._n_batches = -1, 0
        self._check, self._checking, self._checked_batches = SamplingCheck(), 0.0, 0.0  # seconds, and what they bought
        self._rare = 1.0  # At every which token the next batch is checked, as far as its time goes
        self._recent: list[tuple[float, Mapping[str, Any]]] = []  # Checks that make up a whole batch, and their parts
        self._norms: list[float] = []  # ‖ḡ‖ as logged since the last batch
        self._n_updates = 0
        self._told: dict[str, int] = {}
        self._caught: CaughtStates | None = None  # None where a pass of ours reads every batch
        self._compare_at: float = 1  # From which batch on the next one that can be is held against a pass of ours
        self._pending: Mapping[str, Any] | None = None  # A batch that the loss has yet to read
        self._worst: dict[str, dict[str, object]] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the trainer that calls, and begin to look at its batches."""
        try:
            if self._trainer is not None:  # nobody tells a callback of an error
                self._end("failed", "an error or an interruption ended the training")
            self._begin()
            started, faults = on_all(lambda: self._started(args))
            if started is None or faults:
                raise InputError(faults[0])  # on all processes, or some would wait for the others
            trainer, stored = started
            self._processes, plan = processes_of(trainer), self._record.measure
            self._measurer = batch_measurer(trainer, plan, stored, self._log is not None, self._processes)
            if _catchable(trainer):
                self._caught = CaughtStates(trainer, policy_of(trainer))
            self._watch(trainer)
        except Exception as error:
            self._tell("begin", f"OTBMonitor is off, training goes on: {error}")

    def _started(self, args: TrainingArguments) -> tuple[Any, dict[str, Any]]:
        """Return the trainer that calls, and what run.json keeps of it.

        Raises:
            InputError: It lacks a method, or a pass of ours would be wrong.
        """
        trainer = _calling_trainer(args)
        refuse_lacking(trainer, (*WATCHED, *READ), type(trainer).__name__)
        refuse_unreadable(trainer)
        self._omitted = _omitted(trainer)
        scale = getattr(trainer, "scale_rewards", "rloo")
        self._trains = {"group": "grpo", "rloo": "rloo"}.get(scale, "group_mean")
        trains = {"name": self._trains, "energy": "proxy", "options": {}}
        stored = stored_config(trainer, self._record, trains, "OTBMonitor")
        try:
            self._log = RunLog(self._record, "", stored) if self._record.run else None
        except InputError as error:  # an earlier training made the run, which must not be replaced
            self._tell("log", f"OTBMonitor stores nothing of this training, which goes on: {error}")
        self._step = first_batch(trainer) - 1
        return trainer, stored

    def _watch(self, trainer: Any) -> None:
        """Look at what both methods return: attributes of this one trainer, which hide those of its class."""
        generate, reward = (getattr(trainer, name) for name in WATCHED)
        self._before = {name: vars(trainer).get(name) for name in WATCHED}

        def generate_and_score_completions(*args: Any, **kwargs: Any) -> Any:
            watched = trainer.model.training and self._is_next_watched()
            if self._caught is not None:
                self._caught.begin() if watched else self._caught.close()
            batch = generate(*args, **kwargs)
            if watched:
                self._observe(batch)
            return batch

        def calculate_rewards(*args: Any, **kwargs: Any) -> Any:
            self._rewards = reward(*args, **kwargs)
            return self._rewards

        self._trainer = trainer
        for name, method in zip(WATCHED, (generate_and_score_completions, calculate_rewards), strict=True):
            setattr(trainer, name, method)

    def _end(self, status: Literal["complete", "failed"], reason: str = "") -> None:
        """Write the last batch and how training ended, and leave the trainer as it was."""
        if self._log is not None:
            self._log.release(self._updates())
            self._log.finish(status, reason)
        self._catch_no_more()
        for name, method in self._before.items():
            vars(self._trainer).pop(name, None) if method is None else setattr(self._trainer, name, method)
        self._trainer, self._before = None, {}

    def _is_next_watched(self) -> bool:
        """Write the batch before, and return whether the next is looked at: by all processes or by none."""
        self._look_back()  # where an update goes over several batches
        start = perf_counter()
        self._step += 1
        self._n_batches += 1
        if self._log is not None:
            self._log.release(self._updates())  # of what only the main process keeps
        now = perf_counter()
        self._spent += now - start + (0.0 if self._caught is None else self._caught.spent())
        if self._n_batches == 1:
            self._spent, self._begun = 0.0, now
        elif self._n_batches == 2:  # the first is read whole, and by a pass of ours, too
            self._first = self._spent
        allowed = max(self._share * max(now - self._begun - self._spent, 1e-9), FREE)
        used = max(self._processes.gather((self._spent - self._first) / allowed))  # the slowest process decides
        price = self._checking / max(self._checked_batches, 1e-12)  # of a whole batch
        self._rare = price / max(CHECKED * allowed - self._spent, 1e-12)
        return used <= 1

    def _observe(self, batch: Mapping[str, Any]) -> None:
        """Look at a batch that was generated: at once, or when its loss has read it."""
        read = any(batch.get(name) is not None for name in OLD)
        if self._caught is None:
            self._look(batch, caught=False)
        elif self._measurer.due(self._step, 1):  # no states wait beside gradients
            self._caught.close()
            self._look(batch, caught=False)
        else:
            if not read:  # then what was read until now is the reference policy
                self._caught.begin()
            self._pending = batch
            if read:
                self._look_back()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the batch which the loss has read by now, with the weights that wrote it."""
        self._look_back()

    def _look_back(self) -> None:
        """Look at the batch whose states are caught by now."""
        if self._pending is not None:
            batch, self._pending = self._pending, None
            self._look(batch, caught=True)

    def _now(self) -> float:
        """Return the time once the trainer's own work is done, which on a GPU would otherwise count as ours."""
        synchronize(self._trainer.accelerator.device)
        return perf_counter()

    def _of_caught(self, drafts: Sequence[Draft], rollouts: Rollouts, observe: Observer = None) -> ForwardPass:
        """Score rollouts by the states that the trainer's passes left.

        Raises:
            InputError: A rollout was in none of them, or the trainer changes logits behind its output layer.
            NonFiniteError: A logit is not finite.
        """
        assert self._caught is not None
        caught = self._caught.take_caught(drafts)
        with self._scoring():
            states = [one.states for one in caught]
            forward = statistics_of_states(self._policy, rollouts, states, self._trainer.temperature, observe)
        inside = forward.mask.cpu().numpy()
        theirs = np.concatenate([one.logprob[row[: len(one.logprob)]] for one, row in zip(caught, inside, strict=True)])
        if not self._are_alike(gap := forward.stats.logprob[inside] - theirs):
            raise InputError(
                f"log-probabilities of the trainer differ by {np.abs(gap).max():.3g} nats from those of its output "
                "layer; a pass of ours reads it."
            )
        return forward

    def _passed(self, rollouts: Rollouts, observe: Observer = None) -> ForwardPass:
        """Score rollouts by a pass of ours.

        Raises:
            NonFiniteError: A logit is not finite.
        """
        size = self._trainer.args.per_device_train_batch_size
        with self._scoring():
            return forward_statistics(self._policy, rollouts, self._trainer.temperature, size, observe)

    def _compared(self, drafts: Sequence[Draft], forward: ForwardPass) -> int:
        """Return the number of tokens of the first and the last rollout with any that a pass of ours, too, has read.

        Raises:
            InputError: Its log-probabilities are others.
        """
        spoke = np.flatnonzero(forward.mask.any(1).cpu().numpy())
        if not spoke.size:
            return 0
        rows = sorted({int(spoke[0]), int(spoke[-1])})
        passed = self._passed(collated([drafts[row] for row in rows], special_id(self._tokenizer, "pad")))
        ours, theirs = passed.stats.logprob[passed.mask.cpu().numpy()], forward.stats.logprob[rows]
        gap = theirs[forward.mask[rows].cpu().numpy()] - ours
        if not self._are_alike(gap):
            raise InputError(f"by {np.abs(gap).max():.3g} nats they are not those of a pass of ours.")
        return gap.size

    def _are_alike(self, gap: Float) -> bool:
        """Whether log-probabilities of the same weights differ by rounding alone [K]."""
        precise = self._trainer.accelerator.mixed_precision == "no" and self._policy.dtype == torch.float32
        if not gap.size:
            return True
        return bool(np.abs(gap).max() <= FLOAT32 if precise else np.sqrt(np.mean(gap**2)) <= ROUNDED)

    def _look(self, batch: Mapping[str, Any], caught: bool) -> None:
        """Score this process's rollouts, send them to the others, and write; every process sends, whatever failed."""
        trainer, start = self._trainer, self._now()
        read, faults = on_all(lambda: self._rollouts_of(batch))  # before a pass that all must make together
        seen = None
        if faults and self._caught is not None:
            self._caught.close()
        if read is not None and not faults:
            seen, faults = on_all(lambda: self._observed_batch(batch, *read, caught))
            if caught and faults:  # then a pass of ours reads it, with the same weights, and all that follow
                logging.getLogger(__name__).info("the trainer's own passes are not read: %s", faults[0])
                self._catch_no_more()
                self._check = SamplingCheck()
                seen, faults = on_all(lambda: self._observed_batch(batch, *read, caught=False))
        parts = [part for part in self._processes.gather(None if faults else seen) if part is not None]
        if any(part.n_compared for part in parts):  # a batch without a token shows nothing
            self._compare_at = AGAIN if self._n_batches < AGAIN else math.inf
        gathered = measured = None
        # A batch that is not due, too: measuring speaks to all processes.
        if not faults and self._measurer.processes.size > 1:
            gathered, faults = on_all(lambda: self._gathered(parts))
            if gathered is not None and not faults:
                measured, faults = on_all(lambda: measured_batch(trainer, self._measurer, self._step, *gathered))
        if faults:
            self._check = SamplingCheck()  # without half a batch; the same on all
        if trainer.accelerator.is_main_process:
            try:
                if faults:
                    raise InputError(faults[0])
                self._write(parts, gathered or self._gathered(parts), measured, start)
            except Exception as error:
                self._tell("batch", f"OTBMonitor has nothing on batch {self._step}, training goes on: {error}")
        self._spent += perf_counter() - start

    def _rollouts_of(self, batch: Mapping[str, Any]) -> tuple[Sequence[Draft], Rollouts]:
        """Return this process's rollouts.

        Raises:
            InputError: The batch holds images.
        """
        if "pixel_values" in batch:
            raise InputError("the batch holds images, which our forward pass does not read.")
        drafts = drafts_of(batch, self._tokenizer, ends_of(self._trainer, self._tokenizer))
        return drafts, collated(drafts, special_id(self._tokenizer, "pad"))

    def _observed_batch(
        self, batch: Mapping[str, Any], drafts: Sequence[Draft], rollouts: Rollouts, caught: bool
    ) -> SeenBatch:
        """Return what this process's rows say, by the states caught of them or by a forward pass that draws nothing.

        Raises:
            InputError: A rollout was in none of the trainer's passes, or these are not to be relied on.
            NonFiniteError: A logit is not finite.
        """

        def observe(part: PolicyLogits) -> None:
            start = self._now()
            self._check.observe(part)
            self._checking += self._now() - start

        watcher = None if "truncated" in self._omitted else observe
        self._check.every = math.ceil(min(max(self._rare, 1), max(rollouts.completion_length.max(initial=1), 1)))
        self._check.first = self._n_batches % self._check.every
        forward = self._of_caught(drafts, rollouts, watcher) if caught else self._passed(rollouts, watcher)
        self._checked_batches += 1 / self._check.every
        compared = self._compared(drafts, forward) if caught and self._n_batches >= self._compare_at else 0
        table, width = token_table(rollouts, forward, None), rollouts.width
        advantage = batch["advantages"].double().cpu().numpy()
        advantage = np.broadcast_to(advantage.reshape(len(advantage), -1), batch["completion_ids"].shape)
        rows = [row[:length] for row, length in zip(advantage, rollouts.completion_length, strict=True)]

        def logps(name: str) -> Float | None:
            known = batch.get(f"{name}_per_token_logps")
            return None if known is None else known.double().cpu().numpy()[:, :width]

        old, behavior, reference = logps("old"), logps("sampling"), logps("ref")
        logprob = table.stats.logprob
        pairs = {
            "sampler": None if behavior is None else (logprob if old is None else old) - behavior,
            "reference": None if reference is None else reference - logprob,
            "trainer": None if old is None or caught else old - logprob,  # of caught states they are the same
        }
        ratios = {name: pair[table.mask] for name, pair in pairs.items() if pair is not None}
        return SeenBatch(scored(drafts, rollouts, forward), rows, ratios, self._check.rows(rollouts, table), compared)

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Score in evaluation mode, in the trainer's precision."""
        with self._trainer.accelerator.autocast(), evaluating(self._policy):
            yield

    def _catch_no_more(self) -> None:
        """Let a pass of ours read every batch from here on."""
        if self._caught is not None:
            self._caught.release()
        self._caught = None

    @property
    def _policy(self) -> Any:
        """The language model without wrappers."""
        return policy_of(self._trainer)

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer, also of a processor."""
        processing = self._trainer.processing_class
        return getattr(processing, "tokenizer", processing)

    def _gathered(self, parts: Sequence[SeenBatch]) -> tuple[GatheredBatch, Estimate] | None:
        """Return the batch of all processes with the advantages that train; None where no rollout is left."""
        rewards, by_function = paid(self._trainer, self._rewards)
        every = [one for part in parts for one in part.scored]
        group = np.arange(len(every)) // self._trainer.num_generations
        whole = gathered_batch(every, rewards, by_function, group, self._tokenizer)
        if whole is None:
            return None
        advantage = advantages_of(whole, [row for part in parts for row in part.advantages])
        baseline = np.full(advantage.shape, np.nan)
        if not self._omitted:
            baseline = estimate(self._trains, whole.table.inputs(whole.table.stats.energy)).baseline
        return whole, Estimate(baseline, advantage, np.zeros(advantage.shape, bool))

    def _write(
        self,
        parts: Sequence[SeenBatch],
        gathered: tuple[GatheredBatch, Estimate] | None,
        found: tuple[Measurement, float] | None,
        start: float,
    ) -> None:
        """Log and store the batch of all processes; on the main process, which measures where nothing was `found`."""
        trainer, tokenizer = self._trainer, self._tokenizer
        sampling = {name: [x for part in parts for x in part.sampling[name]] for name in parts[0].sampling}
        if "truncated" in self._omitted or "probability" not in sampling["test"]:
            sampling = None  # no token was looked at, or only some kinds: what ended early is no sample of the policy
        scalars = log_ratio_scalars([part.log_ratios for part in parts])
        if sampling is not None:
            scalars |= self._checked(sampling)
        scalars["left_out"] = sum(len(part.scored) for part in parts)
        if gathered is not None:
            whole, trained = gathered
            scalars["left_out"] = int((~whole.kept).sum())
            scalars |= batch_scalars(whole, trained.advantage) | dict.fromkeys(self._omitted)
            self._worst = worst_tables(whole.rollouts, whole.table, trained.advantage, tokenizer)
        scalars["seconds"] = perf_counter() - start - (found[1] if found else 0.0)
        for name, value in scalars.items():
            if value is not None and math.isfinite(value):  # TRL averages what it gets, and JSON has no infinity
                trainer._metrics["train"][f"otb/{name}"].append(float(value))
        if self._log is None or gathered is None:
            return
        scalars["trl_global_step"] = trainer.state.global_step

        def tables() -> StepTables:
            measured = found or measured_batch(trainer, self._measurer, self._step, *gathered)
            return batch_tables(self._step, *gathered, measured, tokenizer, scalars, sampling)

        self._log.keep(self._step, tables)

    def _checked(self, rows: Mapping[str, Any]) -> dict[str, float]:
        """Return the sampling check of the last batches, and tell the first alarm that is not one of many looks.

        They are as many as make up one that is looked at whole: a few tokens of each would show large faults only.
        """
        self._recent.append((1 / self._check.every, rows))
        while sum(part for part, _ in self._recent[1:]) >= 1:
            del self._recent[0]
        report = sampling_report({name: [x for _, one in self._recent for x in one[name]] for name in rows})
        # Σ 6/(πk)² = 1: a run of any length has a false sentence with probability ALARM at most.
        if report.log_p < math.log(6 * ALARM / (math.pi * self._n_batches) ** 2):
            lines = sampling_lines(report, self._trainer.temperature)
            self._tell("sampling", f"OTBMonitor, batch {self._step}: {lines[0]}")
        return {"sampling_z": report.z, "sampling_alarm": float(report.alarm)}

    def _updates(self) -> dict[str, object]:
        """Return what is stored of the updates on the last batch; their norms where each of them was logged."""
        norms, n, self._norms, self._n_updates = self._norms, self._n_updates, [], 0
        return {"n_updates": n} | (updates_of(norms, self._trainer.args.max_grad_norm) if len(norms) == n else {})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count an update."""
        self._n_updates += 1

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the norm that TRL logged, and send the last batch's tables to the trackers of `report_to`."""
        start = perf_counter()
        if (norm := (logs or {}).get("grad_norm")) is not None:
            self._norms.append(float(norm))
        tables, self._worst = {f"otb/{kind}": table for kind, table in self._worst.items()}, {}
        for name in TRACKERS if tables else ():
            if name not in (args.report_to or ()):
                continue
            # The trainer's callbacks let wandb and trackio count; a step of ours would be refused as an earlier one.
            step = state.global_step if name in ("tensorboard", "mlflow") else None
            writers = (getattr(one, "tb_writer", None) for one in self._trainer.callback_handler.callbacks)
            try:
                send(name, {}, tables, step, next(filter(None, writers), None))
            except Exception as error:
                self._tell(name, f"OTBMonitor could not send its tables to {name}, training goes on: {error}")
        self._spent += perf_counter() - start

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the last batch, and leave the trainer as it was."""
        if self._trainer is None:
            return
        if (n := self._told.get("batch", 0)) > 1:
            self._tell("end", f"OTBMonitor has nothing on {n} of {self._n_batches} batches.")
        self._end("complete")

    def _tell(self, kind: str, message: str) -> None:
        """Warn, the first time of each kind."""
        self._told[kind] = self._told.get(kind, 0) + 1
        if self._told[kind] == 1:
            tell(message)


def _calling_trainer(args: TrainingArguments) -> Any:
    """Return the trainer with these arguments among the callers: transformers hands a callback everything else.

    Raises:
        InputError: There is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "callback_handler") and getattr(caller, "args", None) is args:
            return caller
        frame = frame.f_back
    raise InputError("no trainer calls it; pass it to GRPOTrainer or RLOOTrainer, as callbacks=[OTBMonitor(...)].")


def _catchable(trainer: Any) -> bool:
    """Whether its passes can give what ours would: whole weights until the update, nothing drawn in training mode."""
    args = trainer.args  # several GPUs in one process are replicas in threads
    if "lomo" in args.optim or args.optim.endswith("layerwise"):  # a backward pass updates
        return False
    shared = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or args.torch_compile or args.n_gpu > 1
    return hasattr(trainer, METHOD) and not drawn_in_training(trainer) and not shared


def _omitted(trainer: Any) -> tuple[str, ...]:
    """Return the numbers that would describe another training than this one."""
    args, names = trainer.args, ()
    if not hasattr(trainer, "scale_rewards"):  # RLOOTrainer, which has its penalty in the reward, not in the loss
        changes = ("beta", "reward_clip_range", "normalize_advantages")
        names = OF_REWARDS if any(getattr(args, name, None) for name in changes) else ()
    # TRL then removes those rollouts from its batch, though their rewards count in the others' advantages.
    return OF_REWARDS + OF_LENGTH + OF_SAMPLING if getattr(args, "mask_truncated_completions", False) else names
