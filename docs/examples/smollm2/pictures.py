"""Take the pictures of the README and docs/ on runs of docs/examples/: `python docs/examples/smollm2/pictures.py`.

A browser walks from the list of runs to a run by mouse, then to its estimators, and opens the tokens of long answers.
Light theme, 1,440 pixels wide. It needs the system's Chromium and Playwright's Python package, and writes docs/images/.
"""

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "images"
PORT = 8790
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
PLOT = ".js-plotly-plot .main-svg"
MINUTE = 60_000
LONG = "tokens?step=1&prompt=6"
"""Four answers of 127 tokens, one of which slips at a single digit."""
SETTLED = 2_500
"""Milliseconds after the last chart is there: nothing announces that a table on a canvas is drawn."""


def take(page: Any, name: str, height: int) -> None:
    """Write what the window shows, `height` pixels of it."""
    page.set_viewport_size({"width": 1440, "height": height})
    page.mouse.move(1, 1)  # no tooltip over what is shown
    page.wait_for_timeout(SETTLED)
    page.screenshot(path=IMAGES / f"{name}.png")


def click_row(page: Any, row: int) -> None:
    """Click a row of the page's first table, which is a canvas."""
    table = page.locator("[data-testid=stDataFrame]").first
    table.scroll_into_view_if_needed()
    page.wait_for_timeout(SETTLED)
    box = table.bounding_box()
    page.mouse.click(box["x"] + 150, box["y"] + 50 + 35 * row)


def go_to(page: Any, title: str, ready: str) -> None:
    """Open a page by the menu and wait for what it shows."""
    page.locator("[data-testid=stSidebarNav] >> text=" + title).first.click()
    page.wait_for_selector(f"h1:has-text('{title}')", timeout=MINUTE)
    page.wait_for_selector(ready, timeout=MINUTE)


def walk(page: Any, address: str) -> None:
    """Go from the list of runs to a run, then to its estimators, and take a picture of each page."""
    page.goto(address)
    page.wait_for_selector(PLOT, timeout=MINUTE)
    click_row(page, 0)
    page.wait_for_selector("h1:has-text('Run')", timeout=MINUTE)
    page.wait_for_selector(PLOT, timeout=MINUTE)
    take(page, "run", 1000)
    go_to(page, "Estimators", PLOT)
    take(page, "estimators", 900)


def long_answers(page: Any, address: str) -> None:
    """Take a picture of the tokens of long answers."""
    page.goto(f"{address}/{LONG}")
    page.wait_for_selector(".tok", timeout=MINUTE)
    take(page, "tokens", 880)


def main() -> None:
    """Serve each run, walk, and stop the server."""
    for root, visit in ((HERE / "runs", walk), (HERE.parent / "long" / "runs", long_answers)):
        command = ["-m", "otb_analysis", "dashboard", "--root", str(root), "--port", str(PORT)]
        with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = "http" + server.stdout.readline().split("http")[1].split()[0].rstrip("/")
                with sync_playwright() as playwright:
                    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
                    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
                    for _ in range(60):
                        with suppress(Exception):
                            page.goto(address)
                            break
                        page.wait_for_timeout(500)
                    visit(page, address)
                    browser.close()
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
