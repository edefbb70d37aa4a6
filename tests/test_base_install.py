"""Without PyTorch, transformers and Streamlit rollouts are imported; runs are compared, diagnosed and reported."""

import json
import os
import subprocess
import sys

import pytest

WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "tokenizers", "safetensors", "networkx", "streamlit"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
from otb_analysis.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


def otb(folder, *words):
    """What a command of a base install printed, and its code."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        cwd=folder, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr, done.returncode


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder with a run that was imported without PyTorch."""
    folder = tmp_path_factory.mktemp("base")
    rows = [
        {"prompt": f"{p}+1=", "completion": str(p + k), "reward": float(k == 1), "ids": [p, k], "step": p // 4}
        for p in range(8)
        for k in range(4)
    ]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, code = otb(folder, "import", "mine.jsonl")
    assert code == 0 and "mine-imported is complete" in said.replace("\n", " ")
    return folder


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--help",), "otb import"),
        (("train", "--help"), "--estimator.name"),
        (("compare",), "mine-imported"),
        (("diagnose", "mine-imported"), "teach nothing"),
        (("query", "mine-imported", "select avg(reward) as paid from rollouts"), "0.25"),
        (("tokens", "mine-imported", "--rollout", "1"), "2 rows"),
        (("audit", "--run", "mine-imported"), "audit.html"),
        (("report", "mine-imported", "--out", "page.html"), "page.html is written"),
        (("report", "mine-imported", "--out", "page.md"), "page.md is written"),
        (("model",), "smollm2"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_command_works_without_pytorch(imported, words, fact):
    said, code = otb(imported, *words)
    assert code == 0 and fact in said, said


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("train",), "torch"),
        (("demo", "--no-serve"), "torch"),
        (("score", "--model", "x", "--rollouts", "mine.jsonl"), "torch"),
        (("audit", "--model", "x", "--rollouts", "mine.jsonl"), "torch"),
        (("import", "mine.jsonl", "--run", "two", "--tokenizer", "."), "torch"),
        (("model", "fetch", "smollm2"), "torch"),
        (("dashboard",), "dashboard"),
        (("demo",), "dashboard"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else words,
)
def test_command_that_needs_an_extra_names_it_in_one_sentence(imported, words, extra):
    said, code = otb(imported, *words)
    assert code == 2 and said.count("\n") == 1 and f"[{extra}]" in said, said


def test_a_pytorch_file_of_rollouts_asks_for_pytorch(imported):
    (imported / "1.pt").write_bytes(b"")
    said, code = otb(imported, "import", "1.pt")
    assert code == 2 and "torch is needed for reading 1.pt" in said, said
