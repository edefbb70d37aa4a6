"""Files of recorded rollouts, as trainers write them."""

import json

import pytest


@pytest.fixture
def jsonl(tmp_path):
    """Write rows as a file of JSON lines and return its path."""

    def write(rows, name="rollouts.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def simple():
    """Rows with prompt, completion, reward and group: `prompts` groups of `size` rollouts."""

    def rows(prompts=4, size=3, **more):
        return [
            {"prompt": f"{g}+{g}=", "completion": f"{g}{k}#{'1' * k}", "reward": float(k % 2), "group": g, **more}
            for g in range(prompts)
            for k in range(size)
        ]

    return rows
