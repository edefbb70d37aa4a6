"""What a report looks like on paper."""

import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.config import BENCHMARKS, AlarmsConfig, EngineConfig, GramConfig, check_positive
from benchmarks.publish import Report, bench_table, cell, command_line, publish, report_of, run_bench, settings_of
from otb_analysis.errors import InputError, StoreError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
REPORT = Report(
    name="speed",
    command="otb bench speed --repeats 2",
    settings={"repeats": 2},
    title="How fast",
    columns={"what": "{what}", "seconds": "{seconds:.3f}"},
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


def test_a_command_line_leaves_out_what_is_not_set_and_names_no_path():
    config = EngineConfig(out=Path("here"), tokens=(), opacus_python=Path("/there/python"))
    line = "otb bench engine --sizes S M --repeats 15 --seconds 45.0 --device auto --dtype float32 --threads 1"
    assert command_line(config) == f"{line} --opacus-python OPACUS_PYTHON"
    assert "out" not in settings_of(config) and "opacus_python" not in settings_of(config)
    assert command_line(GramConfig(rows=False)).endswith("--repeats 3 --no-rows")
    assert command_line(GramConfig()).endswith("--repeats 3")


def test_a_fact_that_is_missing_is_a_dash():
    assert [cell("{a:.1f} of {b}", row) for row in ({"a": 1, "b": 2}, {"a": None, "b": 2}, {"a": 1})] == [
        "1.0 of 2", "–", "–",
    ]  # fmt: skip
    assert cell(lambda row: None, {}) == "–"


def test_json_names_every_key_in_every_row():
    report = report_of(AlarmsConfig(), "Both", {}, [{"a": 1}, {"b": 2}])
    assert report.rows == [{"a": 1, "b": None}, {"a": None, "b": 2}]


@pytest.mark.parametrize("kind", BENCHMARKS.values())
def test_default_settings_of_every_benchmark_are_accepted(kind):
    check_positive(kind())


def test_no_prompts_are_refused():
    with pytest.raises(InputError, match="--prompts is 0; pass at least 1"):
        run_bench(GramConfig(prompts=0))


def test_committed_commands_are_printed_from_their_settings():
    for path in RESULTS.glob("*.json"):
        facts = json.loads(path.read_text())
        kind = BENCHMARKS.get(facts["command"].removeprefix("otb bench ").split()[0])
        if kind is None or facts["settings"].get("model", "demo") != "demo":  # a model at a path
            continue
        settings = {
            name.replace("-", "_"): tuple(x) if isinstance(x, list) else x for name, x in facts["settings"].items()
        }
        removed = settings.keys() - {field.name for field in fields(kind)}
        assert not any(settings.pop(name) for name in removed), path.name  # switches that were off
        peers = {word[2:].replace("-", "_"): Path() for word in facts["command"].split() if word.endswith("-python")}
        assert command_line(kind(**settings, **peers)) == facts["command"], path.name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_pages_show_every_row_of_their_numbers_in_todays_columns(path):
    name = re.match(r"gram|engine|processes|train|store|scale|dashboard|monitor|long|\w+", path.stem).group()
    columns = import_module(f"benchmarks.{name}").COLUMNS
    page = path.with_suffix(".md").read_text()
    assert "| " + " | ".join(columns) + " |" in page
    for row in json.loads(path.read_text())["rows"]:
        assert "| " + " | ".join(cell(column, row) for column in columns.values()) + " |" in page


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the benchmark"):
        publish(tmp_path / "file", REPORT)
