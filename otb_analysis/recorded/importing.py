"""`otb import`: recorded rollouts as a run, without a model."""

from pathlib import Path

import numpy as np

from otb_analysis.config.audit import ImportConfig
from otb_analysis.errors import InputError
from otb_analysis.extras import require_models
from otb_analysis.phases import note, phase
from otb_analysis.recorded.recorded_tables import recorded_tables
from otb_analysis.recorded.runs import record_run, remaining_estimators, run_path, source_of, stored_config
from otb_analysis.store import RunStore


def import_rollouts(rollouts: Path, config: ImportConfig) -> Path:
    """Make a run of recorded rollouts and return its directory.

    Raises:
        InputError: The rollouts or a setting cannot work, or a record is refused; the steps before it stay.
        StoreError: The store cannot be read or written.
    """
    source = source_of(rollouts, config)
    tokenizer = None
    if config.tokenizer:
        if not Path(config.tokenizer).is_dir():
            raise InputError(f"--tokenizer is {config.tokenizer!r}, which is no directory; pass the model's.")
        require_models("--tokenizer")
        with phase(f"loading the tokenizer {config.tokenizer}"):
            from otb_analysis.rollouts.models import load_tokenizer

            tokenizer = load_tokenizer(config.tokenizer)
    path = run_path(rollouts, config, "imported")
    stored = stored_config(config, source, "otb import", {})
    record_run(path, config, stored, source, lambda step: recorded_tables(step, tokenizer))
    tell_missing(path, rollouts)
    return path


def tell_missing(path: Path, rollouts: Path) -> None:
    """Note what the run lacks, and which command adds it."""
    steps = RunStore(path).steps_df(
        columns=["length_mean", "logprob_mean", "entropy_mean", "n_singleton_groups", "n_prompts"]
    )
    lacking = [
        words
        for name, words in (
            ("length_mean", "lengths in tokens"), ("logprob_mean", "log-probabilities"), ("entropy_mean", "entropies"),
        )
        if bool(steps[name].isna().to_numpy().all())
    ]  # fmt: skip
    lacking.append("energies, gradient norms and estimators")
    note(f"{path.name} has no {', no '.join(lacking)}; add them with: otb score --model DIR --rollouts {rollouts}")
    if bool(np.all(steps["n_singleton_groups"].to_numpy() == steps["n_prompts"].to_numpy())):
        note(f"every prompt has one rollout, so these estimators remain: {', '.join(remaining_estimators())}.")
