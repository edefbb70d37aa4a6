"""What tests in a browser share: Chromium, a dashboard on a free port, and a page that notes what it should not do."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUIET = ("quic", "background-networking", "component-update", "sync", "gpu")
FLAGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
PLOT = ".js-plotly-plot .main-svg"
SECONDS = 1000
SIDEWAYS = (
    "(() => { const m = document.querySelector('[data-testid=stMain]'); return m.scrollWidth - m.clientWidth })()"
)


SPY = """
const P = CanvasRenderingContext2D.prototype, {rect, clip, fillText} = P;
window.cut = new Set();
P.rect = function (...where) { this.last = where; return rect.apply(this, where); };
P.clip = function (...how) { this.within = this.last; return clip.apply(this, how); };
P.fillText = function (text, x, ...where) {
  const [left, , width] = this.within ?? [Infinity];
  if (this.textAlign !== 'right' && x >= left && x < left + width && x + this.measureText(text).width > left + width)
    window.cut.add(text);
  return fillText.call(this, text, x, ...where);
};
"""
CUT = """[...window.cut, ...[...document.querySelectorAll('td, th')].filter(
  (cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.innerText)]"""
"""A script that notes the texts that tables drawn on a canvas cut off; these, and those of other tables."""


@contextmanager
def chromium_started() -> Iterator:
    """Start the system's Chromium; without one the tests are skipped, or fail where they are required."""
    found = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if found is None:
        reason = "no Chromium on this machine: install Debian's package `chromium`"
        if os.environ.get("OTB_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield instance
        instance.close()


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Run `streamlit run app` as typed, on a free port; the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "streamlit", "run", "app", "--server.port", str(port), "--", "--root", str(root)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            _wait_for(f"http://127.0.0.1:{port}/_stcore/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"{url} did not answer within a minute")


@dataclass
class Watched:
    """A page and what it should not do."""

    page: object
    foreign: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # exceptions, and errors of the console

    @property
    def clean(self) -> bool:
        """True while nobody else was asked, nothing popped up and nothing failed."""
        return (self.foreign, self.dialogs, self.errors) == ([], [], [])


@contextmanager
def watched(browser, address: str, **context) -> Iterator[Watched]:
    """Open an empty page in a context of its own."""
    opened = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | context))
    page = opened.new_page()
    seen = Watched(page)
    local = (address, address.replace("http", "ws"), "data:", "blob:")
    page.on("request", lambda r: None if r.url.startswith(local) else seen.foreign.append(r.url))
    page.on("dialog", lambda d: (seen.dialogs.append(d.message), d.dismiss()))
    page.on("pageerror", lambda e: seen.errors.append(str(e)))
    page.on("console", lambda m: seen.errors.append(m.text) if _failed(m) else None)
    yield seen
    opened.close()


def _failed(message) -> bool:
    """An error in the console; where a page is opened by its path, Streamlit looks for its server there first."""
    return message.type == "error" and "/_stcore/" not in message.location.get("url", "")


def visit(tab: Watched, url: str):
    """Open a page and wait for its first figure, or picture of a study."""
    tab.page.goto(url)
    tab.page.wait_for_selector("h1", timeout=60 * SECONDS)
    tab.page.wait_for_selector(f"{PLOT}, [data-testid=stImage] img", timeout=60 * SECONDS)
    return tab.page


def sideways(page) -> int:
    """Return by how many pixels a page is wider than its window."""
    return page.evaluate(SIDEWAYS)


def finished(page) -> None:
    """Wait until the page's script has run and its figures are drawn."""
    page.wait_for_function(
        "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'", timeout=60 * SECONDS
    )
    page.wait_for_timeout(600)  # a change of the address starts it anew


def click_first_row(page, table) -> None:
    """Click the first row of a table, which is a canvas, in its second column."""
    click_row(page, table, 0)


def click_row(page, table, row: int) -> None:
    """Click a row of a table, which is a canvas, in its second column."""
    table.scroll_into_view_if_needed()
    page.wait_for_timeout(2000)  # nothing announces that it is drawn
    box = table.bounding_box()
    page.mouse.click(box["x"] + 150, box["y"] + 50 + 35 * row)


def click_point(page, x: object, y: object, axes: str = "", number: int = 0) -> None:
    """Click a figure of the page where its axes, such as 2 for x2 and y2, have these values."""
    figure = page.locator("[data-testid=stMain] .js-plotly-plot").nth(number)
    figure.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    place = """(figure, [x, y, axes]) => {
      const box = figure.getBoundingClientRect(), layout = figure._fullLayout;
      const [across, up] = [layout["xaxis" + axes] ?? layout.xaxis, layout["yaxis" + axes]];
      return [box.left + across._offset + across.d2p(x), box.top + up._offset + up.d2p(y)];
    }"""
    page.mouse.click(*figure.evaluate(place, [x, y, axes]))


def tab_to(page, selector: str) -> None:
    """Press Tab until an element that the selector fits has the focus."""
    for _ in range(80):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"80 times Tab does not lead to {selector}")


def choose(page, label: str, option: str) -> None:
    """Choose an option of a selectbox by mouse; after keys the first click may give the box no more than the focus."""
    box, options = select_box(page, label).locator("input").first, page.locator("[role=option]")
    box.click()
    page.wait_for_timeout(1000)
    if not options.count():
        box.click()
    options.filter(has_text=option).first.click()


def select_box(page, label: str):
    """A selectbox by its label."""
    return page.locator("[data-testid=stSelectbox]").filter(has_text=label).first


def asked(page, name: str) -> str | None:
    """What the address says."""
    found = re.search(rf"[?&]{name}=([^&]*)", page.url)
    return found[1] if found else None
