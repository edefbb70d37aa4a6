"""Every page's numbers as JSON: what a page shows is what its command prints, to the last digit."""

import json

import pytest

from otb_analysis.commands.cli import main
from tests.app.test_pages import open_page, run_query, texts


@pytest.fixture
def printed(store_root, capsys):
    """Run a command on the synthetic store and return its JSON, read by a parser that takes no NaN."""

    def run(*words: str, root: object = store_root) -> dict:
        capsys.readouterr()
        assert main([*words, "--root", str(root), "--json"]) == 0
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    return run


def column(rows, name):
    return [row[name] for row in rows]


def listed(values):
    """A column of a page's table as JSON has it: None for what is missing."""
    return [None if value != value else value for value in values.tolist()]


SQL = "SELECT finish_reason, count(*) AS n, avg(reward) AS reward FROM rollouts GROUP BY ALL ORDER BY ALL"


def test_query_answers_what_the_sql_box_and_the_page_rollouts_show(store_root, printed, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run=["chain-otb-s0"])
    app.text_area(key="sql").set_value(SQL).run()
    run_query(app)
    answer = printed("query", "chain-otb-s0", SQL)
    shown = app.dataframe[1].value
    assert answer["columns"] == list(shown) and answer["n"] == len(shown) == 2 and answer["cut"] is False
    assert all(column(answer["rows"], name) == listed(shown[name]) for name in shown)
    page = printed("query", "chain-otb-s0")
    assert f"{page['n_rollouts']:,} rollouts." in texts(app)
    rollouts = app.dataframe[0].value
    assert column(page["rollouts"], "reward") == listed(rollouts["reward"]) and len(rollouts) == 500
    assert sum(column(page["rewards_by_step"], "n")) == page["n_rollouts"]
    columns = next(frame.value for frame in app.dataframe if "meaning" in frame.value)
    assert column(page["columns"]["rollouts"], "meaning") == columns["meaning"].tolist()
