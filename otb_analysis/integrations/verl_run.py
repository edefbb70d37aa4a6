"""A run of our store from verl's synchronous trainer: what its batch holds once the advantages are there."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators import available, estimate, options_from_dict
from otb_analysis.integrations.batch_numbers import advantages_of
from otb_analysis.integrations.run_log import RecordConfig, RunLog
from otb_analysis.integrations.trl_batch import ScoredDraft, gathered_batch
from otb_analysis.integrations.verl import PREFIX, proxy_energy
from otb_analysis.measurement.measurer import Measurement, step_columns
from otb_analysis.measurement.table import TokenMeasurements
from otb_analysis.rollouts.models import special_id
from otb_analysis.rollouts.sampling import draft_of
from otb_analysis.store import StepTables
from otb_analysis.types import Estimate, Float

PASSED = ("old_log_probs", "sum_pi_squared", "entropy")
"""What verl's old pass says of every token of a response."""
FIELDS = (*PASSED, "uid", "prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "advantages")
"""What is read of verl's batch; only `rollout_log_probs` may be missing."""
SETTINGS = ("run", "root", "if_exists")
"""What `+trainer.v1.otb_sync.NAME=…` may set."""
SAMPLED = {"group_size": "n", "max_new_tokens": "response_length"} | {k: k for k in ("temperature", "top_p", "top_k")}
"""Our settings of sampling → verl's."""


def run_log(config: Any) -> RunLog | None:
    """Return the log that `+trainer.v1.otb_sync.run=NAME` asks for, further `root` and `if_exists`; else None.

    Raises:
        InputError: The run exists, its name is none, or a setting is unknown.
    """
    section = dict(config.trainer.v1.get("otb_sync", None) or {})
    if unknown := [str(key) for key in section if key not in SETTINGS]:
        raise InputError(f"trainer.v1.otb_sync has the setting {unknown[0]!r}; {nearest(unknown[0], SETTINGS)}")
    if not section.get("run"):
        return None
    record = RecordConfig(**{**section, "root": Path(section.get("root", "runs"))})
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    trained = {"name": trained_name(config.algorithm), "energy": "proxy", "options": options_of(config.algorithm)}
    stored = {
        "run": record.run, "model": config.actor_rollout_ref.model.path, "task": str(config.data.train_files),
        "source": {"made_by": "OTBTrainerSync", "format": "verl", "about": "trained by verl's synchronous trainer"},
        "not_plain": "another engine sampled than was scored",
        "estimator": trained,
        "measure": asdict(record.measure),
        "sample": {"prompts": config.data.train_batch_size, **{ours: rollout[key] for ours, key in SAMPLED.items()}},
        "verl": {key: actor[key] for key in ("loss_agg_mode", "clip_ratio", "ppo_mini_batch_size", "ppo_epochs")},
    }  # fmt: skip
    return RunLog(record, "", stored)


def options_of(algorithm: Any) -> dict[str, Any]:
    """Return the options of our estimator, `+algorithm.otb_analysis.NAME=…`."""
    return dict(algorithm.get("otb_analysis", None) or {})


def trained_name(algorithm: Any) -> str:
    """Return the estimator that trains, as ours is called where verl's own is the same."""
    name = str(algorithm.adv_estimator).removeprefix(PREFIX)
    if name.startswith("grpo"):
        return "grpo" if algorithm.get("norm_adv_by_std_in_grpo", True) else "group_mean"
    return {"rloo_vectorized": "rloo", "optimal_token_baseline": "otb"}.get(name, name)


def step_tables(data: Mapping[str, Any], algorithm: Any, tokenizer: PreTrainedTokenizerBase) -> StepTables:
    """Return what is stored of a batch: `FIELDS` of verl's queue, nested tensors of one row a rollout.

    The reward is verl's score, without a KL penalty. Log-probabilities are those of its old pass, in its precision.
    What its passes do not give, the variances that the tests of the sampler need, stays out.
    """
    group = np.unique([str(uid) for uid in data["uid"]], return_inverse=True)[1]
    order = np.argsort(group, kind="stable")  # verl deals rollouts out to its processes

    def rows(field: str) -> list[Float]:
        every = data[field].unbind()
        return [every[n].double().cpu().numpy() for n in order.tolist()]

    mask, responses, ends = rows("response_mask"), rows("responses"), [special_id(tokenizer, "eos")]
    behavior = [row.tolist() for row in rows("rollout_log_probs")] if "rollout_log_probs" in data else None
    every, passed = list[ScoredDraft](), zip(*map(rows, ("prompts", *PASSED)), strict=True)
    for n, (prompt, logprob, sum_pi_sq, entropy) in enumerate(passed):
        completion = list(zip(responses[n].astype(int).tolist(), mask[n].astype(bool).tolist(), strict=True))
        known = None if behavior is None else behavior[n]
        draft = draft_of(prompt.astype(int).tolist(), completion, known, tokenizer, ends)
        energy, unknown = proxy_energy(logprob, sum_pi_sq), np.zeros(len(logprob))
        stats = {"logprob": logprob, "sum_pi_sq": sum_pi_sq, "entropy": entropy, "energy": energy}
        every.append(ScoredDraft(draft, stats | {"pi_variance": unknown, "logprob_variance": unknown}))
    score = np.array([row.sum() for row in rows("rm_scores")])
    if (whole := gathered_batch(every, score, {}, group[order], tokenizer)) is None:
        raise InputError("no rollout of the batch has a token of the policy.")
    table, measured = whole.table, Measurement(TokenMeasurements.nothing(whole.table.mask.shape))
    inputs, name = table.inputs(table.stats.energy), trained_name(algorithm)
    baseline = np.full(table.mask.shape, np.nan)
    if name in available(inputs):
        baseline = estimate(name, inputs, options_from_dict(name, options_of(algorithm))).baseline
    trained = Estimate(baseline, advantages_of(whole, rows("advantages")), np.zeros(baseline.shape, bool))
    # No Gram matrix is there, whose rows alone name the step.
    return StepTables(**step_columns(0, whole.rollouts, table, trained, measured, tokenizer))
