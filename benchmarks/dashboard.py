"""How fast the pages of the dashboard draw and answer, in Chromium, on synthetic runs of full size.

The list of pages is that of the app's menu. Each page is opened by a server of its own, which has loaded its libraries
but has seen no run: the runs are moved under its root at that moment.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import otb_analysis
from benchmarks.config import DashboardBenchConfig
from benchmarks.publish import Report, notes_of, report_of
from benchmarks.synthetic_run import Shape, synthetic_step, write_synthetic_run
from otb_analysis.errors import InputError
from otb_analysis.extras import require
from otb_analysis.phases import counted, phase
from otb_analysis.store import compact

CHART = ".js-plotly-plot .main-svg, .tok, [data-testid=stImage] img"
"""What counts as a chart: a figure of Plotly, the tokens of a prompt, a picture of a study."""
CONTROLS = {
    "slider": ("[data-testid=stSlider] input", (("ArrowRight",), ("ArrowLeft",))),
    "toggle": ("[data-testid=stCheckbox] input", (("Space",),)),
    "choice": (
        "[data-testid=stSelectbox] input",
        (("ArrowDown", "ArrowDown", "Enter"), ("ArrowUp", "ArrowUp", "Enter")),
    ),
}
"""Kind of control → where it is, and keys that change it: the next ones where a slider is at its end."""
QUIET = ["--server.headless", "true", "--server.address", "127.0.0.1", "--server.fileWatcherType", "none"]
QUIET += ["--browser.gatherUsageStats", "false"]
LONG, SECOND = 180_000, 1_000
_STATE = "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState"
_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@dataclass(frozen=True)
class Server:
    """A dashboard of its own on a free port."""

    process: subprocess.Popen[bytes]
    address: str

    @property
    def processor(self) -> float:
        """Processor seconds so far, of which other work on the machine takes nothing."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    @property
    def memory(self) -> float:
        """The most MB in memory so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) * 1024 / 1e6


@contextmanager
def server(root: Path, port: int, script: Path | None = None) -> Iterator[Server]:
    """Serve the dashboard, or another script, on a folder of runs until the block ends.

    Raises:
        InputError: It does not answer within a minute.
    """
    here = Path(otb_analysis.__file__).parent
    app = next(path for path in (here.parent / "app", here / "_app") if path.is_dir())
    command = [sys.executable, "-P", "-m", "streamlit", "run", str(script or app / "streamlit_app.py")]
    command += [*QUIET, "--server.port", str(port), "--", "--root", str(root)]
    path = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, cwd=root.parent, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Server(process, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def browser() -> Iterator[Any]:
    """Start the system's Chromium; its tabs share a cache, as a user's do.

    Raises:
        InputError: Chromium or Playwright is missing.
    """
    path = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if path is None:
        raise InputError("the dashboard is timed in Chromium, which is not on this machine; install it.")
    require("playwright", "timing the dashboard in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield instance.new_context()
        instance.close()


def open_tab(context: Any, address: str) -> Any:
    """Open an address in a new tab once the server answers, and return the tab when the page has a heading."""
    tab = context.new_page()
    deadline = time.monotonic() + 60
    while True:
        try:
            tab.goto(address, timeout=LONG)
            break
        except Exception as error:  # Playwright's own; the port is not open yet
            if time.monotonic() > deadline:
                raise InputError(f"the dashboard does not answer at {address}.") from error
            time.sleep(0.2)
    tab.wait_for_selector("h1", timeout=LONG)
    return tab


def wait_until_done(tab: Any) -> None:
    """Wait until the page has run to its end."""
    tab.wait_for_function(f"{_STATE} === 'notRunning'", timeout=LONG)


def first_chart(context: Any, served: Server, path: str) -> tuple[float, float] | None:
    """Return the seconds from asking for a page to its first chart, and the server's processor seconds meanwhile.

    None where the page ends without a chart.
    """
    tab = context.new_page()
    began, spent = time.perf_counter(), served.processor
    tab.goto(f"{served.address}/{path}", timeout=LONG)
    tab.wait_for_selector("h1", timeout=LONG)
    while not tab.locator(CHART).first.is_visible():
        if tab.evaluate(f"{_STATE} === 'notRunning'"):
            try:  # Plotly draws a little after the script has ended
                tab.wait_for_selector(CHART, timeout=10 * SECOND)
            except Exception:  # Playwright's own
                tab.close()
                return None
        tab.wait_for_timeout(10)
    taken = time.perf_counter() - began, served.processor - spent
    wait_until_done(tab)
    tab.close()
    return taken


def changed_controls(tab: Any) -> dict[str, float]:
    """Change one control of each kind in the page's main part; return the seconds until the page is done."""
    seconds: dict[str, float] = {}
    tab.wait_for_selector(CHART, timeout=LONG)  # not settled before: a page that was just opened runs twice
    for kind, (where, ways) in CONTROLS.items():
        wait_until_done(tab)
        found = tab.locator(f"[data-testid=stMain] {where}")
        for keys in ways if found.count() else ():
            found.first.focus()
            for key in keys[:-1]:
                tab.keyboard.press(key)
            began = time.perf_counter()
            if ran_again(tab, partial(tab.keyboard.press, keys[-1])):
                seconds[kind] = time.perf_counter() - began
                break
    return seconds


def ran_again(tab: Any, act: Callable[[], object], seconds: float = 5) -> bool:
    """Do something, and wait until the page has run again to its end; return whether it did within so many seconds."""
    tab.evaluate(f"""() => {{ window.ran = false; const look = () => {{
        if ({_STATE} === 'running') window.ran = true; requestAnimationFrame(look); }}; look(); }}""")
    act()
    try:
        tab.wait_for_function("window.ran", timeout=seconds * SECOND, polling="raf")
    except Exception:  # Playwright's own
        return False
    wait_until_done(tab)
    return True


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
        small = Shape(config.many_steps, config.many_measured, config.many_tokens)
        with phase("writing the runs"):
            names = dict[Path, str]()
            for measured in config.measured:
                shape = Shape(config.steps, measured, config.tokens)
                root = write_runs(folder / f"one-{measured}", 1, shape, config.compacted)
                names[root] = f"1 of {config.steps:,} steps, {measured} measured"
            one, *_ = names
            many = write_runs(folder / "many", config.runs, small, config.compacted)
            names[many] = f"{config.runs} of {config.many_steps:,} steps"
            if config.long:
                shape = Shape(4, 2, 4 * 64 * config.long, prompts=8, group_size=8, spelled=True)
                long = write_runs(folder / "long", 1, shape, config.compacted)
                names[long] = f"1 of 64 answers a step, {config.long:,} tokens each"
        with browser() as chromium:
            pages = menu(chromium, one, config.port)
            timed = [name for name in pages if not config.pages or name.lower() in config.pages]
            with phase("opening each page alone"):
                rows = [
                    {"runs": names[root], "page": name} | timed_page(chromium, root, pages[name], config)
                    for root, name in counted(list(product(names, timed)), "page")
                ]
            with phase("opening a page of one point"):
                point = one_point_page(chromium, config.port)
            rows.append({"runs": "none", "page": "one point, nothing else", "controls": {}} | point)
            with phase("opening one page after the other"), server(one, config.port) as served:
                wait_until_done(open_tab(chromium, served.address))
                for path in counted(pages.values(), "page"):
                    first_chart(chromium, served, path)
                memory = {"memory": served.memory}
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
    return found | {"Proxy": f"{found['Estimators']}?part=Proxy"}


def timed_page(chromium: Any, root: Path, path: str, config: DashboardBenchConfig) -> dict[str, Any]:
    """Return what one page takes."""
    with tempfile.TemporaryDirectory(dir=root.parent) as empty, server(Path(empty), config.port) as served:
        wait_until_done(open_tab(chromium, served.address))
        for name in root.iterdir():
            shutil.move(name, Path(empty) / name.name)
        try:
            seconds = first_and_again(chromium, served, path)
            tab = open_tab(chromium, f"{served.address}/{path}")
            controls = {} if seconds["first"] is None else changed_controls(tab)
            tab.close()
            return {**seconds, "controls": controls, "memory": served.memory}
        finally:
            for name in Path(empty).iterdir():
                shutil.move(name, root / name.name)


def first_and_again(chromium: Any, served: Server, path: str) -> dict[str, float | None]:
    """Return what `first_chart` says of a page that is opened twice."""
    first, again = (first_chart(chromium, served, path) for _ in range(2))
    return {"first": first and first[0], "processor": first and first[1], "again": again and again[0]}


def one_point_page(chromium: Any, port: int) -> dict[str, Any]:
    """Return what Streamlit, Plotly and Chromium take by themselves, for a page of one figure with one point."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        with server(Path(folder), port, script) as served:
            wait_until_done(open_tab(chromium, served.address))
            return first_and_again(chromium, served, "") | {"memory": served.memory}


def seconds_per_step(
    chromium: Any, root: Path, steps: int, config: DashboardBenchConfig
) -> dict[str, dict[str, float]]:
    """Return the server's processor seconds for each new step of a run that is followed, by page.

    The steps are as large as those of the large run; the new ones are not measured.
    """
    shape = Shape(steps, max(1, config.measured[0] * steps // config.steps), config.tokens * steps // config.steps)
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
                write()
                tab.wait_for_timeout(APART * SECOND)  # as long as a step takes
            seconds[path.capitalize()] = {"grown": (served.processor - spent) / NEW}
            tab.close()
    shutil.rmtree(root)
    return seconds


def write_until_shown(tab: Any, write: Callable[[], None]) -> None:
    """Write a step, and wait until the page shows it."""
    if not ran_again(tab, write, seconds=30):
        raise InputError("the dashboard does not follow the run; see its page in a browser.")
