"""The lowest versions that pyproject.toml allows, resolved by uv into .cache/lowest.

PyTorch is the one that constraints.txt names: older ones take hours to download or have no wheel for this Python.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV, VENV, LIST = ROOT / ".cache" / "uv", ROOT / ".cache" / "lowest", ROOT / ".cache" / "lowest.txt"


def run(*words: object) -> None:
    """Run a command in the clone; end with its code where it fails."""
    if code := subprocess.run([str(word) for word in words], cwd=ROOT).returncode:
        sys.exit(code)


def main() -> None:
    """Resolve and install."""
    for folder in (UV, VENV):
        if not (folder / "bin" / "python").exists():
            run(sys.executable, "-m", "venv", folder)
    run(UV / "bin" / "python", "-m", "pip", "install", "--quiet", "uv")
    without = ROOT / ".cache" / "without.txt"
    without.write_text("torch; python_version < '3'\n")  # no version of it, and none of what it brings
    extras = [word for extra in ("all", "dev") for word in ("--extra", extra)]
    options = ["--quiet", "--resolution", "lowest-direct", "--override", without, "--output-file", LIST]
    run(UV / "bin" / "uv", "pip", "compile", *options, *extras, "pyproject.toml")
    pip = (VENV / "bin" / "python", "-m", "pip", "install", "--quiet")
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    run(*pip, torch[0] if torch else "torch")
    run(*pip, "-r", LIST)
    run(*pip, "--no-deps", "-e", ".")


if __name__ == "__main__":
    main()
