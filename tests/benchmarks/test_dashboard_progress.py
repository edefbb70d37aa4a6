"""What the progress display says while the dashboard is timed, with Chromium and servers left out."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

from benchmarks import dashboard
from benchmarks.config import DashboardBenchConfig
from otb_analysis.phases import OPEN, phase

TAB = SimpleNamespace(
    wait_for_selector=lambda *_, **__: None, wait_for_timeout=lambda *_: None, close=lambda: None
)  # fmt: skip
PAGES = {"Triage": "", "Run": "run", "Tokens": "tokens"}


def test_every_part_of_the_work_is_a_phase_and_counts_its_pages(tmp_path, monkeypatch):
    said = list[tuple[str, float, float | None]]()

    def works(answer=None):
        def work(*_, **__):
            said.append((OPEN[-1].name, OPEN[-1].done + 1, OPEN[-1].total))
            return answer

        return work

    @contextmanager
    def server(*_):
        yield SimpleNamespace(address="", memory=1.0, processor=0.0)

    def write_run(root, *_, **__):
        root.mkdir()
        return SimpleNamespace(write_step=lambda *_: None)

    replaced = {
        "browser": lambda: nullcontext(None), "server": server, "menu": lambda *_: PAGES, "open_tab": lambda *_: TAB,
        "wait_until_done": lambda *_: None, "write_runs": lambda root, *_: works(root)(),
        "timed_page": works({"controls": {}}),
        "one_point_page": works({}), "first_chart": works(), "write_until_shown": works(),
        "write_synthetic_run": write_run,
    }  # fmt: skip
    for name, by in replaced.items():
        monkeypatch.setattr(dashboard, name, by)
    with phase("otb bench dashboard") as whole:
        dashboard.run(
            DashboardBenchConfig(root=tmp_path, measured=(3, 5), pages=("run", "tokens"), followed=(12,), long=0)
        )
        assert whole.total is None  # no count of one part is left behind for the next
    alone, after, grown = "opening each page alone", "opening one page after the other", "following a run of 12 steps"
    assert list(dict.fromkeys(said)) == [
        ("writing the runs", 1, None),
        *((alone, page, 6) for page in range(1, 7)),
        ("opening a page of one point", 1, None),
        *((after, page, 3) for page in (1, 2, 3)),
        *((grown, page, 3) for page in (1, 2, 3)),
    ]
