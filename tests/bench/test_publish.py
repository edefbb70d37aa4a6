"""What a report looks like on paper."""

import json

import pytest

from otb_analysis.bench.publish import Report, bench_table, flags, publish
from otb_analysis.errors import StoreError

REPORT = Report(
    name="speed",
    command="otb bench speed --repeats 2",
    settings={"repeats": 2},
    title="How fast",
    headers=("what", "seconds"),
    cells=[("fast", "0.100"), ("slow", "2.000")],
    rows=[{"what": "fast", "seconds": 0.1}, {"what": "slow", "seconds": 2.0}],
    notes=["Read it so."],
)


def test_markdown_holds_command_table_and_notes(tmp_path):
    publish(tmp_path, REPORT)
    lines = (tmp_path / "speed.md").read_text().splitlines()
    assert lines[0] == "# `otb bench speed --repeats 2`"
    assert lines[4:] == [
        "How fast.", "", "| what | seconds |", "|---|---|", "| fast | 0.100 |", "| slow | 2.000 |", "", "Read it so.",
    ]  # fmt: skip


def test_json_holds_the_numbers_and_the_machine(tmp_path):
    publish(tmp_path, REPORT)
    facts = json.loads((tmp_path / "speed.json").read_text())
    assert facts["rows"] == [{"what": "fast", "seconds": 0.1}, {"what": "slow", "seconds": 2.0}]
    assert facts["settings"] == {"repeats": 2} and facts["machine"]["torch"]


def test_numbers_stand_right_and_names_left():
    assert [column.justify for column in bench_table(REPORT).columns] == ["left", "right"]


def test_flags_leave_out_what_is_not_set():
    assert flags({"a_b": 3, "sizes": ("S", "M"), "out": None, "quick": False, "long": True, "none": ()}) == (
        "--a-b 3 --sizes S M --long"
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the benchmark"):
        publish(tmp_path / "file", REPORT)
