"""The dashboard as a process, and a browser that waits until a page has drawn or answered a change."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import otb_analysis
from otb_analysis.errors import InputError
from otb_analysis.extras import require

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


class Server:
    """A dashboard of its own on a free port."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process, self.address = process, address

    @property
    def processor(self) -> float:
        """Processor seconds so far, of which other work on the machine takes nothing."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes in memory now, and the most there were."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        said = dict(line.split(":", 1) for line in lines)
        return int(said["VmRSS"].split()[0]) * 1024, int(said["VmHWM"].split()[0]) * 1024


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
        if tab.evaluate(f"{_STATE} === 'notRunning'") and not _comes(tab):
            tab.close()
            return None
        tab.wait_for_timeout(10)
    taken = time.perf_counter() - began, served.processor - spent
    wait_until_done(tab)
    tab.close()
    return taken


def _comes(tab: Any) -> bool:
    """Return whether a chart comes after the script has ended: Plotly draws a little later."""
    try:
        tab.wait_for_selector(CHART, timeout=10 * SECOND)
    except Exception:  # Playwright's own
        return False
    return True


def changed_controls(tab: Any) -> dict[str, float]:
    """Change one control of each kind in the page's main part; return the seconds until the page is done."""
    seconds: dict[str, float] = {}
    tab.wait_for_selector(CHART, timeout=LONG)  # not settled before: a page that was just opened runs twice
    for kind, (where, ways) in CONTROLS.items():
        wait_until_done(tab)
        found = tab.locator(f"[data-testid=stMain] {where}")
        taken = (_changed(tab, found.first, keys) for keys in ways if found.count())
        if (first := next((s for s in taken if s is not None), None)) is not None:
            seconds[kind] = first
    return seconds


def _changed(tab: Any, control: Any, keys: tuple[str, ...]) -> float | None:
    """Press keys in a control, and return the seconds until the page is done; None if it did not run."""
    control.focus()
    for key in keys[:-1]:
        tab.keyboard.press(key)
    began = time.perf_counter()
    return time.perf_counter() - began if ran_again(tab, lambda: tab.keyboard.press(keys[-1])) else None


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
