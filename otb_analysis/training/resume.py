"""Begin a run, or go on with one that was stopped."""

from collections.abc import Iterator, Mapping

from otb_analysis.config import TrainConfig, plain_config
from otb_analysis.errors import InputError
from otb_analysis.phases import note, plural
from otb_analysis.store import RunStore, RunWriter
from otb_analysis.training.runtime.checkpoint import Checkpoint, checkpoints, read_checkpoint
from otb_analysis.training.setup import Trainer

PLACE = {"run", "root", "if_exists", "checkpoint", "trackers", "device"}
"""Fields that may differ when a run goes on: they change where it is written, reported and computed, and not what."""


def begin(config: TrainConfig, trainer: Trainer) -> tuple[RunWriter, int]:
    """Return the run's writer and its next step.

    With `if_exists = "resume"`, an existing run goes back to its newest checkpoint, and later steps are removed.
    Without a checkpoint it begins anew at step 0, under the same name.

    Raises:
        InputError: The run exists and must not be touched, or was made with another configuration.
        StoreError: The store or the checkpoint cannot be read or written.
    """
    processes = trainer.processes
    writer, checkpoint = processes.broadcast_from_main(lambda: _create_or_reopen(config, trainer))
    writer.rank, writer.size = processes.rank, processes.size
    if checkpoint is None:
        return writer, 0
    trainer.load_state(read_checkpoint(checkpoint))
    return writer, checkpoint.step


def _create_or_reopen(config: TrainConfig, trainer: Trainer) -> tuple[RunWriter, Checkpoint | None]:
    """Make or reopen the run's directory; return its writer and the checkpoint from which it goes on."""
    path = config.root / config.run_name
    if config.if_exists != "resume" or not path.exists():
        policy = "error" if config.if_exists == "resume" else config.if_exists
        whole, machine = plain_config(config), trainer.machine
        return RunWriter.create(config.root, config.run_name, whole, if_exists=policy, machine=machine), None
    refuse_other_configuration(config)
    made = RunStore(path).info.get("machine")
    if isinstance(made, Mapping) and (before := made.get("device")) != (now := trainer.machine["device"]):
        note(f"The run was begun on {before} and goes on on {now}: as well as there, but not bit for bit.")
    existing = checkpoints(path)
    if not existing:
        return RunWriter.resume(path, 0, trainer.machine), None
    # Refuse a checkpoint that cannot be used before anything is removed.
    state, kinds = read_checkpoint(existing[-1]), ("without FSDP2", "with FSDP2")
    was, launched = kinds[state.get("sharded", False)], kinds[trainer.processes.sharded]
    if was != launched:
        raise InputError(
            f"the checkpoint was written {was} and this run was launched {launched}; resume it as it was begun."
        )
    return RunWriter.resume(path, existing[-1].step, trainer.machine), existing[-1]


def refuse_other_configuration(config: TrainConfig) -> None:
    """Refuse to resume a run with other settings; more steps are allowed where the learning rate is constant.

    Raises:
        InputError: The first field that differs, with both values.
    """
    stored = RunStore(config.root / config.run_name).info.get("config")
    # A setting that came after the run was made had its default there.
    old = dict(_flat(plain_config(TrainConfig()))) | dict(_flat(stored if isinstance(stored, Mapping) else {}))
    for name, value in _flat(plain_config(config)):
        longer = name == "optimize.steps" and config.optimize.schedule == "constant"
        if name.split(".")[0] not in PLACE and not longer and old.get(name) != value:
            raise InputError(
                f"{name} is {value!r} but run {config.run_name!r} was made with {old.get(name)!r}; "
                "pass the run's own configuration to resume it, or another --run."
            )


def interruption_sentence(config: TrainConfig) -> str:
    """Return the sentence of a run that was interrupted: what it keeps, and where it would go on."""
    path = config.root / config.run_name
    steps, existing = RunStore(path).complete_steps(), checkpoints(path)
    if not steps:
        return (
            f"stopped before the first step was complete; {path} holds nothing, so begin anew with --if-exists replace."
        )
    count = plural(len(steps), "step")
    if existing:
        more = f"--if-exists resume goes on after step {existing[-1].step - 1}, where its newest checkpoint is"
    else:
        often = f"checkpoint.every is {config.checkpoint.every}"
        more = f"it has no checkpoint yet ({often}), so --if-exists resume begins anew"
    return f"stopped after step {steps[-1]}; {count} can be read in {path}; {more}."


def _flat(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        # what a user names is one value, also when empty
        if isinstance(value, Mapping) and key != "further" and not key.endswith("options"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
