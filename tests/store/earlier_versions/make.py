"""Make a run of each earlier version of the stored columns, by the code of that time.

Run in a clone, with the commits that changed the columns; each wrote what is in the folder of its name:

    python tests/store/earlier_versions/make.py a137ea8 $(git log --first-parent --reverse --format=%h -- SCHEMA)

where SCHEMA is otb_analysis/schema.py; 11618b6 stands for the last of them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from zlib import crc32

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
WRITE = """
import sys
sys.path.insert(0, sys.argv[2])
from make import columns
from otb_analysis.schema import TABLES
from otb_analysis.store import RunWriter, StepTables
tables = {name: columns(name, [(c.name, c.dtype) for c in TABLES[name]]) for name in TABLES}
steps = {name: values[0] for name, values in tables.pop("steps").items() if name != "step"}
writer = RunWriter.create(sys.argv[1], sys.argv[3], {"seed": 1, "estimator": "rloo"})
writer.write_step(0, StepTables(steps=steps, **tables))
writer.finish()
"""
SAY = """
import json
from otb_analysis.schema import TABLES
print(json.dumps({table: [(c.name, c.dtype) for c in columns] for table, columns in TABLES.items()}))
"""
KEYS = {
    "tokens": {"group": [0, 0, 1], "rollout": [0, 0, 1], "turn": [0, 0, 0], "t": [0, 1, 0]},
    "rollouts": {"group": [0, 1], "rollout": [0, 1]},
    "steps": {"step": [0]},
    "gradients": {"estimator": ["rloo", "otb"], "energy_source": ["none", "exact"]},
    "grams": {"group": [0, 0, 1], "other_group": [0, 1, 1], "n_rollouts": [2, 2, 2]},
    "sampling": {"test": ["temperature"]},
}
KEYS["grams"] |= {f"{of}{name}": [value] * 3 for of in ("", "other_") for name, value in (
    ("estimator", "rloo"), ("energy_source", "none"))}  # fmt: skip
KEYS["subgroups"] = KEYS["grams"] | {"size": [1, 1, 1]}


def columns(table, described):
    """Return a value for every column of a table, which follows from the column's name, its type and the row."""
    keys = KEYS[table]
    rows = len(next(iter(keys.values())))
    made = {name: [value(name, dtype, row) for row in range(rows)] for name, dtype in described if name != "step"}
    return made | keys


def value(name, dtype, row):
    number = crc32(name.encode()) % 997 + row
    texts = {"VARCHAR": f"{name}-{row}", "BOOLEAN": bool(number % 2), "INTEGER": number, "BIGINT": number}
    return texts.get(dtype, number / 8)


def main(commits):
    before = {path.read_text() for path in HERE.glob("*/columns.json")}
    for commit in commits:
        with tempfile.TemporaryDirectory() as folder:
            archive = ["git", "-C", str(REPOSITORY), "archive", commit, "otb_analysis"]
            code = subprocess.run(archive, capture_output=True, check=True)
            subprocess.run(["tar", "x", "-C", folder], input=code.stdout, check=True)
            said = subprocess.run([sys.executable, "-c", SAY], cwd=folder, capture_output=True, text=True, check=True)
            if said.stdout in before or not (Path(folder) / "otb_analysis" / "store").is_dir():
                continue
            before.add(said.stdout)
            words = [sys.executable, "-c", WRITE, str(HERE), str(HERE), commit]
            subprocess.run(words, cwd=folder, env={"PYTHONPATH": folder}, check=True)
        run = HERE / commit
        (run / "columns.json").write_text(said.stdout)
        info = json.loads((run / "run.json").read_text())
        kept = {name: info[name] for name in info if name not in ("process", "platform", "checksum")}
        (run / "run.json").write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
