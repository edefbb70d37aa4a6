"""What is stored of a TRL trainer's run, whoever watches it: its settings, its rewards, the tables of a batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import new_group
from transformers import PreTrainedTokenizerBase

from otb_analysis.config import MeasureConfig
from otb_analysis.errors import InputError
from otb_analysis.gradients.batch.inputs import free_bytes, gibibytes
from otb_analysis.integrations.run_log import RecordConfig, tell
from otb_analysis.integrations.trl_batch import GatheredBatch
from otb_analysis.measurement.measurer import GradientMeasurer, Measurement, step_columns
from otb_analysis.measurement.table import TokenMeasurements
from otb_analysis.processes import PATIENCE, SINGLE_PROCESS, Processes
from otb_analysis.rollouts.models import evaluating, gathered, is_shared_out, without_hooks
from otb_analysis.store import StepTables
from otb_analysis.types import Estimate, Float

COPIED = (
    "loss_type", "beta", "num_iterations", "epsilon", "learning_rate", "importance_sampling_level",
    "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
"""Settings of TRL that say what was trained; RLOOTrainer lacks some of them."""

PLAIN: dict[str, tuple[object, ...]] = {
    "top_p": (1.0, None), "top_k": (0, None, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0, None),
    "typical_p": (None, 1.0), "top_h": (None,), "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0), "encoder_no_repeat_ngram_size": (None, 0),
    "no_repeat_ngram_size": (None, 0), "bad_words_ids": (None, []), "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,), "sequence_bias": (None, {}, []), "guidance_scale": (None, 1.0),
    "num_beams": (None, 1), "min_length": (None, 0), "min_new_tokens": (None, 0), "penalty_alpha": (None, 0.0),
    "watermarking_config": (None,),
}  # fmt: skip
"""What settings of sampling are where tokens come from the policy's own probabilities."""

T = TypeVar("T")
OF_SAMPLING = ("n_truncated", "certificate_prob_z", "certificate_logprob_z")
"""Scalars of a step that are wrong where TRL hides rollouts cut at the limit: what ended early is no sample."""


def policy_of(trainer: Any) -> Any:
    """Return the language model itself, with adapters in it but without their wrapper."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse_unreadable(trainer: Any) -> None:
    """Raise where a pass of ours would be wrong, or our estimators would not have TRL's reward.

    Raises:
        InputError: The weights are sharded by FSDP1; an adapter learns prompts; or each function's rewards are
            normalized.
    """
    aggregation = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize")
    if aggregation != "sum_then_normalize":
        raise InputError(
            f"multi_objective_aggregation is {aggregation!r}, but our estimators take one reward per rollout; set it "
            "to 'sum_then_normalize'."
        )
    if trainer.is_fsdp_enabled and not getattr(trainer.accelerator, "is_fsdp2", False):
        raise InputError(
            "the model is trained under FSDP of version 1, where a forward pass of ours was never tested; start the "
            "processes with FSDP2 (--fsdp_version 2), DeepSpeed or whole weights (DDP)."
        )
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    if any(one.is_prompt_learning for one in adapters.values()):
        raise InputError("the adapter learns prompts, which our forward pass does not see; use LoRA instead.")


def filters_of(trainer: Any) -> dict[str, object]:
    """Return the settings of a trainer's sampling that are not those of PLAIN.

    What TRL leaves open, transformers takes from the checkpoint's own generation settings.
    """
    given = {**vars(trainer.args), **(trainer.args.generation_kwargs or {})}
    generation = getattr(policy_of(trainer), "generation_config", None)
    sampled = {name: getattr(generation, name, None) if given.get(name) is None else given[name] for name in PLAIN}
    return {name: value for name, value in sampled.items() if value not in PLAIN[name]}


def drawn_in_training(trainer: Any) -> bool:
    """Tell whether a pass in training mode draws anything: dropout, of a layer, of attention or of an adapter."""
    policy = policy_of(trainer)
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {}).values()
    every = (policy.config.get_text_config().to_dict(), *map(vars, adapters))
    named = (value for one in every for name, value in one.items() if "drop" in name and isinstance(value, float))
    layers = (module.p for module in policy.modules() if isinstance(module, torch.nn.Dropout))
    return any(value > 0 for value in (*named, *layers))


def not_plain(trainer: Any) -> str:
    """Return why a batch's tokens are not known to be draws of the policy that we score; empty where they are.

    These are the conditions of `proved.CONDITIONS`, as settings of TRL.
    """
    args, policy = trainer.args, policy_of(trainer)
    odd = sorted({*filters_of(trainer), *(set(args.generation_kwargs or {}) - set(PLAIN))})
    half = args.bf16 or args.fp16 or any(weight.dtype != torch.float32 for weight in policy.parameters())
    half |= trainer.accelerator.mixed_precision not in (None, "no")
    engine = ("use_vllm", "use_transformers_paged", "use_transformers_continuous_batching")
    several = args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
    reasons = {
        "another engine sampled than was scored": any(getattr(args, name, False) for name in engine),
        "a function of its own drew its rollouts": getattr(trainer, "rollout_func", None) is not None,
        f"its sampling has the setting {', '.join(odd)}": odd,
        "answers cut at the limit are left out": getattr(args, "mask_truncated_completions", False),
        "it updates more than once on a batch": several,
        "it sampled in half precision": half,
        "it sampled with dropout": drawn_in_training(trainer),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def first_batch(trainer: Any) -> int:
    """Return the number of the next generated batch, of a training that begins or goes on from a checkpoint."""
    micro_steps = trainer.state.global_step * trainer.args.gradient_accumulation_steps
    return micro_steps // (trainer.args.steps_per_generation * trainer.num_iterations)


def paid(trainer: Any, by_function: Tensor) -> tuple[Float, dict[str, Float]]:
    """Return total rewards [N], NaN where no function could score, and each function's own rewards [N] by name.

    `by_function` [N, functions] is what TRL's `_calculate_rewards` returns: of all processes, unweighted.
    """
    rewards = by_function.double().cpu().numpy()
    weighted = np.nansum(rewards * trainer.reward_weights.double().cpu().numpy(), axis=1)
    parts = {name: rewards[:, k] for k, name in enumerate(trainer.reward_func_names)}
    return np.where(np.isnan(rewards).all(axis=1), np.nan, weighted), parts


def on_all(make: Callable[[], T]) -> tuple[T | None, list[str]]:
    """Return what this process makes, and what failed on any of them; all call it together."""
    from accelerate.utils import gather_object  # of an extra, which TRL brings

    made, fault = None, ""
    try:
        made = make()
    except Exception as error:
        fault = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return made, [text for text in gather_object([fault]) if text]


def processes_of(trainer: Any) -> Processes:
    """Return a trainer's processes, which exchange arrays beside what the training does; all call this together."""
    state = trainer.accelerator.state
    if state.num_processes == 1:
        return SINGLE_PROCESS
    host: Any = new_group(backend="gloo", timeout=PATIENCE)
    return Processes(state.process_index, state.num_processes, state.device, host=host)


def batch_measurer(
    trainer: Any,
    plan: MeasureConfig,
    stored: Mapping[str, Any],
    stores: bool,
    processes: Processes,
    options: Mapping[str, Any] | None = None,
) -> GradientMeasurer:
    """Return what measures a trainer's batches; all processes call it together.

    Where the main process, which writes, `stores` a run, they share a batch's prompts out. `options` are those of the
    estimator that trains, by its name.
    """
    shared = processes.gather(stores)[0] and any(one.every for one in plan.schedules.values())
    sharers = processes if shared else SINGLE_PROCESS
    return GradientMeasurer(policy_of(trainer), plan, trainer.temperature, options, stored, sharers)


def measured_batch(
    trainer: Any, measurer: GradientMeasurer, step: int, whole: GatheredBatch, trained: Estimate
) -> tuple[Measurement, float]:
    """Return what is due of a batch, and the seconds it took; processes that share it out call this together.

    Where whole weights do not fit, that is told once, and each measurement is a gap.
    """
    start, weights = perf_counter(), trained.advantage / len(whole.table.mask)
    due = measurer.due(step, len(whole.rollouts.prompts))
    try:
        with whole_weights(trainer) if due else nullcontext(), evaluating(measurer.model):
            measured = measurer.measure(step, whole.rollouts, whole.table, None, lambda: weights)
    except InputError as error:
        if measurer.processes.first and not measurer.is_short:
            tell(f"whole weights do not fit, so batch {step} and others go unmeasured; training goes on: {error}")
        measurer.is_short = True
        gaps = sum(plan.due(step) for plan in measurer.config.schedules.values())
        measured = Measurement(TokenMeasurements.nothing(whole.table.mask.shape), gaps=gaps)
    return measured, perf_counter() - start


def refuse_too_large(model: torch.nn.Module) -> None:
    """Raise where the whole weights of a model that processes share out do not fit on this one.

    Raises:
        InputError: They do not.
    """
    sizes = ((getattr(weight, "ds_numel", weight.numel()), weight.element_size()) for weight in model.parameters())
    needed, free = sum(count * size for count, size in sizes), free_bytes(next(model.parameters()).device)
    if needed > free:
        raise InputError(
            f"all weights take {gibibytes(needed)} on each process, but one has {gibibytes(free)} left; leave measure "
            "out or take more memory."
        )


@contextmanager
def whole_weights(trainer: Any) -> Iterator[None]:
    """Hold all weights on every process, where FSDP2 or ZeRO-3 shares them out; all enter together.

    Raises:
        InputError: They do not fit on one of the processes; on all, or some would wait for the others.
    """
    if not is_shared_out(trainer.model):
        yield
        return
    _, faults = on_all(lambda: refuse_too_large(trainer.model))
    if faults:
        raise InputError(faults[0])
    if trainer.is_fsdp_enabled:
        with gathered(trainer.model):
            yield
    else:
        import deepspeed  # pyright: ignore[reportMissingImports]
        from trl.models.utils import add_hooks, remove_hooks  # pyright: ignore[reportMissingImports]

        engine = trainer.model_wrapped
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            remove_hooks(engine)  # or each layer would share its weights out again behind a pass
            try:
                with without_hooks(engine, "deepspeed"):  # one is left, which all processes enter in each pass
                    yield
            finally:
                add_hooks(engine)


def batch_tables(
    step: int,
    whole: GatheredBatch,
    trained: Estimate,
    found: tuple[Measurement, float],
    tokenizer: PreTrainedTokenizerBase,
    scalars: Mapping[str, object],
    sampling: Mapping[str, object] | None = None,
) -> StepTables:
    """Return everything to store of a batch; `found` is of `measured_batch`, `scalars` join those of the step."""
    measured, took = found
    tables = step_columns(step, whole.rollouts, whole.table, trained, measured, tokenizer)
    tables["steps"] |= {"seconds_measure": took, "n_left_out": int((~whole.kept).sum()), **scalars}
    return StepTables(**tables, sampling=sampling)


def updates_of(norms: Sequence[float], max_grad_norm: float) -> dict[str, object]:
    """Return what is stored of the updates on a batch, from ‖ḡ‖ of each before clipping; nothing without any."""
    if not norms:
        return {}
    clipped = 0 < max_grad_norm < max(norms)
    return {"grad_norm": norms[0], "grad_norm_max": max(norms), "n_updates": len(norms), "clipped": clipped}


def stored_config(trainer: Any, record: RecordConfig, trained: Mapping[str, Any], made_by: str) -> dict[str, Any]:
    """Return what run.json keeps: our settings, and those of TRL that say what was sampled and trained.

    `trained` is the estimator whose advantages train, as `name`, `energy` and `options`.
    """
    reason = not_plain(trainer)
    args, kind = trainer.args, "RLOOTrainer" if "RLOO" in type(trainer).__name__ else "GRPOTrainer"
    return {
        "run": record.run or Path(args.output_dir).name,
        "seed": args.seed,
        "model": getattr(policy_of(trainer).config, "_name_or_path", ""),
        "task": ", ".join(trainer.reward_func_names),
        "source": {"made_by": made_by, "format": "trl", "about": f"trained by TRL's {kind}"},
        "plain_sampling": not reason,
        "not_plain": reason,
        "estimator": dict(trained),
        "measure": asdict(record.measure),
        "sample": {
            "prompts": args.generation_batch_size // trainer.num_generations,
            "group_size": trainer.num_generations,
            "max_new_tokens": args.max_completion_length,
            "temperature": trainer.temperature,
            **{name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
        },
        "trl": {name: getattr(args, name) for name in COPIED if hasattr(args, name)},
    }
