"""The committed schemas are those of the records' types."""

from pathlib import Path

from studies.lib.schemas import main, schemas

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def test_the_committed_schemas_are_those_of_the_types(tmp_path):
    assert {f"{name}.json": text for name, text in schemas().items()} == {
        path.name: path.read_text("utf-8") for path in FOLDER.iterdir()
    }
    main(tmp_path / "schemas")
    assert sorted(path.name for path in (tmp_path / "schemas").iterdir()) == [
        "audit.json", "compare.json", "diagnose.json", "tokens.json"
    ]  # fmt: skip
