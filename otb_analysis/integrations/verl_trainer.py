"""verl's synchronous trainer, with Σπ² delivered to our estimators: `trainer.v1.trainer_mode=otb_sync`.

`VERL_USE_EXTERNAL_MODULES=otb_analysis.integrations.verl,otb_analysis.integrations.verl_trainer` registers it, and
`+trainer.v1.otb_sync.run=NAME` stores a run. Written for verl 0.9.1, and run end to end on a CPU.
"""

from contextlib import nullcontext
from typing import Any

from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer, trainer_base  # pyright: ignore[reportMissingImports]

from otb_analysis.errors import InputError
from otb_analysis.integrations import verl_run
from otb_analysis.integrations.run_log import RunLog
from otb_analysis.integrations.verl import delivered_energy, proxy_energy

FLAG = "calculate_sum_pi_squared"
"""What verl's engines look for in a batch's extra_info; verl's own V1 trainers never set it."""


@register_trainer("otb_sync")
class OTBTrainerSync(PPOTrainerSync):
    """PPOTrainerSync that asks for Σπ² with the old log-probabilities and hands energies to our estimators.

    Nothing of verl is copied: its two methods run as they are, with the flag set before the first and the energies
    within reach of the second. verl's own optimal token baseline still does not get its Σπ² here.

    Raises:
        InputError: No Σπ² exists: fused kernels never hold the logits, bypass mode makes no pass at all.
    """

    _log: RunLog | None = None  # None stores nothing

    def __init__(self, config: Any) -> None:
        if config.actor_rollout_ref.model.get("use_fused_kernels", False):
            raise InputError(
                "actor_rollout_ref.model.use_fused_kernels is true, and fused kernels hold no logits to sum π² over; "
                "set it to false."
            )
        correction = config.algorithm.get("rollout_correction", None)
        if correction and correction.get("bypass_mode", False):
            raise InputError(
                "algorithm.rollout_correction.bypass_mode is true, so verl makes no pass that could compute Σπ²; set "
                "it to false."
            )
        self._log, self._updated = verl_run.run_log(config), dict[str, object]()
        config.trainer.v1.trainer_mode = "sync"  # verl compares this name to choose its queue and its settings
        super().__init__(config)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info[FLAG] = True
        result = super()._compute_old_log_prob(batch, metrics)
        # The actor's later passes would compute it again, and one for reference weights would overwrite it.
        for meta in (batch, result):
            meta.extra_info.pop(FLAG, None)
        return result

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = trainer_base.tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["response_mask", "old_log_probs", "sum_pi_squared"],
        )
        if (sums := data.get("sum_pi_squared", None)) is None:
            raise InputError(
                "the actor returned no sum_pi_squared, which verl's FSDP, VeOmni and Megatron engines compute; set "
                "actor_rollout_ref.actor.strategy to one of these."
            )
        sums = trainer_base.response_from_nested(sums, data["response_mask"])
        # Nested tensors of rows, as arrays with zeros behind each row [N, T].
        energy = proxy_energy(*(x.to_padded_tensor(0.0).double().cpu().numpy() for x in (data["old_log_probs"], sums)))
        with delivered_energy(energy):
            result = super()._compute_advantage(batch, metrics)
        if self._log is not None:
            self._log.release(self._updated)
            self._updated = {}
            self._log.keep(self.global_steps, lambda: self._tables(batch))
        return result

    def _tables(self, batch: Any) -> Any:
        data = trainer_base.tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*verl_run.FIELDS]
        )
        data["sum_pi_squared"] = trainer_base.response_from_nested(data["sum_pi_squared"], data["response_mask"])
        return verl_run.step_tables(data, self.config.algorithm, self.tokenizer)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        result = super()._update_actor(batch, metrics)
        self._updated = {"grad_norm": metrics.get("actor/grad_norm")}
        return result

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train as verl does; the run records how that ended."""
        with nullcontext() if self._log is None else self._log.training(lambda: self._updated):
            super().fit(*args, **kwargs)
