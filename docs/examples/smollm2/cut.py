"""Copy a run without its weights and what it says about the machine: `python cut.py runs/letter-counting TO`."""

import json
import shutil
import sys
from pathlib import Path

LEFT_OUT = ("process", "platform", "checksum")


def cut(run: Path, to: Path) -> int:
    """Copy a run's tables and run.json; return the bytes of the copy."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("model", "checkpoint*", ".*"))
    info = json.loads((to / "run.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in info.items() if name not in LEFT_OUT}
    (to / "run.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in to.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.stdout.write(f"{cut(Path(sys.argv[1]), Path(sys.argv[2])) / 1e6:.2f} MB\n")
