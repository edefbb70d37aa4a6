"""Bring the table rows that a document quotes up to date with the result files: `python -m otb_analysis.bench.quote`.

A quoted row is found by its words, the cells in front of its first measured number; which rows it quotes is the
document's choice.
"""

import sys
from pathlib import Path

DOCUMENT, RESULTS = Path("docs/costs.md"), Path("docs/results")
TABLES = {"engine.md": 3, "logits.md": 4, "train.md": 2}
"""Result files, and how many cells of a row say what was measured."""


def quoted(document: str, results: Path) -> str:
    """Return a document with every quoted row as the result files have it now.

    Args:
        document: Markdown.
        results: Folder of the result files; one that is missing leaves its rows alone.
    """
    known: dict[tuple[str, ...], str] = {}
    for name, words in TABLES.items():
        if (results / name).exists():
            lines = (results / name).read_text(encoding="utf-8").splitlines()
            known |= {_key(line, words): line for line in lines if line.startswith("| ")}
    return "\n".join(_current(line, known) for line in document.split("\n"))


def _current(line: str, known: dict[tuple[str, ...], str]) -> str:
    found = [known[key] for words in TABLES.values() if (key := _key(line, words)) in known]
    return found[0] if line.startswith("| ") and found else line


def _key(line: str, words: int) -> tuple[str, ...]:
    return tuple(line.strip("| ").split(" | ")[:words])


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCUMENT
    where.write_text(quoted(where.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
