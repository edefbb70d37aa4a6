"""How fast the pages of the dashboard draw and answer, in Chromium, on synthetic runs of full size.

The list of pages is that of the app's menu. Each page is opened by a server of its own, which has loaded its libraries
but has seen no run: the runs are moved under its root at that moment.
"""

import shutil
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.browsing import (
    CHART,
    LONG,
    SECOND,
    browser,
    changed_controls,
    first_chart,
    open_tab,
    ran_again,
    server,
    wait_until_done,
)
from benchmarks.config import DashboardBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.synthetic_run import Shape, synthetic_step, write_synthetic_run
from otb_analysis.errors import InputError
from otb_analysis.phases import counted, phase
from otb_analysis.store import compact

COLUMNS = {
    "runs": "{runs}",
    "page": "{page}",
    "first chart, s": "{first:.1f}",
    "processor, s": "{processor:.1f}",
    "again, s": "{again:.1f}",
    "changed control, s": lambda row: ", ".join(f"{kind} {s:.1f}" for kind, s in row["controls"].items()) or None,
    "new step, s": "{grown:.2f}",
    "server, MB": "{memory:.0f}",
}


FOLLOWED = ("run", "rollouts", "estimators")
BARE = """
import plotly.graph_objects as go
import streamlit as st

st.title("One point")
st.plotly_chart(go.Figure(go.Scatter(x=[0], y=[0])))
"""
NEW, APART = 8, 5
"""New steps of which the mean is taken, and seconds from one to the next: a page looks for them every 3 s."""


def run(config: DashboardBenchConfig) -> Report:
    """Write synthetic runs, and open every page on them.

    Raises:
        InputError: Chromium or Playwright is missing.
        StoreError: The disk refuses.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = config.root or Path(temporary)
        large = Shape(config.steps, config.measured, config.tokens)
        small = Shape(config.many_steps, config.many_measured, config.many_tokens)
        with phase("writing the runs"):
            one = write_runs(folder / "one", 1, large, config.compacted)
            many = write_runs(folder / "many", config.runs, small, config.compacted)
        names = {one: f"1 of {config.steps:,} steps", many: f"{config.runs} of {config.many_steps:,} steps"}
        with browser() as chromium:
            pages = menu(chromium, one, config.port)
            timed = [name for name in pages if not config.pages or name.lower() in config.pages]
            with phase("opening each page alone"):
                rows = [
                    {"runs": names[root], "page": name} | timed_page(chromium, root, pages[name], config)
                    for root, name in counted(list(product((one, many), timed)), "page")
                ]
            with phase("opening a page of one point"):
                point = one_point_page(chromium, config.port)
            rows.append({"runs": "none", "page": "one point, nothing else", "controls": {}} | point)
            with phase("opening one page after the other"):
                memory = {"memory": most_memory(chromium, one, pages, config.port)}
            followed = [
                {"runs": f"followed at {steps:,} steps", "page": name, "controls": {}} | added
                for steps in config.followed
                for name, added in seconds_per_step(chromium, folder / f"followed-{steps}", steps, config).items()
            ]
    rows.append({"runs": names[one], "page": "all, one after the other", "controls": {}} | memory)
    rows += followed
    title = f"The dashboard on {config.tokens:,} tokens in one run, and on {config.runs} runs"
    return report_of(config, title, COLUMNS, rows, notes=notes_of(config))


def write_runs(root: Path, runs: int, shape: Shape, compacted: bool) -> Path:
    """Write the runs of a root, and return it; what an earlier call wrote there is kept."""
    for seed in range(runs):
        path = root / f"synthetic-{seed}"
        if not path.exists():
            write_synthetic_run(root, f"synthetic-{seed}", shape, seed)
        if compacted:
            compact(path)
    return root


def menu(chromium: Any, root: Path, port: int) -> dict[str, str]:
    """Return the pages of the app, and the second part of Estimators: name → path."""
    with server(root, port) as served:
        tab = open_tab(chromium, f"{served.address}/studies")
        tab.wait_for_selector("[data-testid=stSidebarNavLink]")
        links = tab.locator("[data-testid=stSidebarNavLink]")
        pages = [(links.nth(i).inner_text(), links.nth(i).get_attribute("href")) for i in range(links.count())]
        tab.close()
    found = {name.split("\n")[-1].strip(): str(href).rsplit("/", 1)[-1] for name, href in pages}
    return found | {"Proxy": f"{found['Estimators']}?part=proxy"}


def timed_page(chromium: Any, root: Path, path: str, config: DashboardBenchConfig) -> dict[str, Any]:
    """Return what one page takes."""
    with tempfile.TemporaryDirectory(dir=root.parent) as empty, server(Path(empty), config.port) as served:
        wait_until_done(open_tab(chromium, served.address))
        for name in root.iterdir():
            shutil.move(name, Path(empty) / name.name)
        try:
            first = first_chart(chromium, served, path)
            again = first_chart(chromium, served, path)
            tab = open_tab(chromium, f"{served.address}/{path}")
            controls = {} if first is None else changed_controls(tab)
            tab.close()
            memory = served.memory[1] / 1e6
        finally:
            for name in Path(empty).iterdir():
                shutil.move(name, root / name.name)
    seconds = {"first": first and first[0], "processor": first and first[1], "again": again and again[0]}
    return {**seconds, "controls": controls, "memory": memory}


def one_point_page(chromium: Any, port: int) -> dict[str, Any]:
    """Return what Streamlit, Plotly and Chromium take by themselves, for a page of one figure with one point."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        with server(Path(folder), port, script) as served:
            wait_until_done(open_tab(chromium, served.address))
            first, again = (first_chart(chromium, served, "") for _ in range(2))
            assert first and again
            return {"first": first[0], "processor": first[1], "again": again[0], "memory": served.memory[1] / 1e6}


def most_memory(chromium: Any, root: Path, pages: dict[str, str], port: int) -> float:
    """Open all pages on one server, and return the most memory it held, in MB."""
    with server(root, port) as served:
        wait_until_done(open_tab(chromium, served.address))
        for path in counted(pages.values(), "page"):
            first_chart(chromium, served, path)
        return served.memory[1] / 1e6


def seconds_per_step(
    chromium: Any, root: Path, steps: int, config: DashboardBenchConfig
) -> dict[str, dict[str, float]]:
    """Return the server's processor seconds for each new step of a run that is followed, by page.

    The steps are as large as those of the large run; the new ones are not measured.
    """
    shape = Shape(steps, max(1, config.measured * steps // config.steps), config.tokens * steps // config.steps)
    shutil.rmtree(root, ignore_errors=True)
    writer = write_synthetic_run(root, "followed", shape, finish=False)
    rng, seconds = np.random.default_rng(1), dict[str, dict[str, float]]()
    new = iter(range(steps, steps + len(FOLLOWED) * (NEW + 1)))

    def write() -> None:
        writer.write_step(step := next(new), synthetic_step(rng, step, shape, shape.tokens // steps, measured=False))

    with phase(f"following a run of {steps:,} steps"), server(root, config.port) as served:
        for path in counted(FOLLOWED, "page"):
            tab = open_tab(chromium, f"{served.address}/{path}")
            tab.wait_for_selector(CHART, timeout=LONG)
            wait_until_done(tab)
            write_until_shown(tab, write)  # what is only computed once
            spent = served.processor
            for _ in range(NEW):
                write_and_wait(tab, write)
            seconds[path.capitalize()] = {"grown": (served.processor - spent) / NEW}
            tab.close()
    shutil.rmtree(root)
    return seconds


def write_and_wait(tab: Any, write: Callable[[], None]) -> None:
    """Write a step, and leave the page as long as a step takes."""
    write()
    tab.wait_for_timeout(APART * SECOND)


def write_until_shown(tab: Any, write: Callable[[], None]) -> None:
    """Write a step, and wait until the page shows it."""
    if not ran_again(tab, write, seconds=30):
        raise InputError("the dashboard does not follow the run; see its page in a browser.")
