"""Following a run in a browser: a new step redraws the figures that it changes, and no other."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from otb_analysis.store import RunWriter
from tests.app.browsing import SECONDS, Watched, chromium_started, finished, served, visit, watched
from tests.app.test_following import write

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.heavy]

STEPS = 22
"""Steps to begin with: of 0 to 30, every tenth is measured."""
WATCH = """() => {
  window.plots = [...document.querySelectorAll('.js-plotly-plot')];
  window.seen = 0;
  const observer = new MutationObserver(changes => { window.seen += changes.length });
  for (const plot of window.plots) observer.observe(plot, {subtree: true, childList: true, attributes: true});
  return window.plots.length;
}"""
CHANGES = "window.seen + window.plots.filter(plot => !plot.isConnected).length"
FIGURES = {"run": 1, "rollouts": 1, "estimators": 2}
LOOKS = 3
"""Seconds after which a page looks for new steps again."""


@pytest.fixture
def run(tmp_path) -> RunWriter:
    writer = RunWriter.create(tmp_path, "run", {"estimator": {"name": "rloo"}})
    for step in range(STEPS):
        write(writer, step)
    return writer


@pytest.fixture
def tabs(run) -> Iterator[dict[str, Watched]]:
    """The pages of the run, drawn and with all their figures watched."""
    with chromium_started() as browser, served(run.path.parent) as address, ExitStack() as closing:
        size = {"width": 1200, "height": 3000}  # a figure outside the window is not drawn
        opened = {name: closing.enter_context(watched(browser, address, viewport=size)) for name in FIGURES}
        for name, tab in opened.items():
            visit(tab, f"{address}/{name}")
            finished(tab.page)
            tab.page.wait_for_timeout(2 * SECONDS)  # figures come to rest
            assert tab.page.evaluate(WATCH) == FIGURES[name]
        yield opened


def test_a_new_step_redraws_the_figures_that_it_changes_and_no_other(run, tabs):
    write(run, STEPS)
    for name in ("run", "rollouts"):
        tabs[name].page.wait_for_function(f"{CHANGES} > 0", timeout=20 * SECONDS)
    estimators = tabs["estimators"].page
    estimators.wait_for_timeout(3 * LOOKS * SECONDS)
    assert estimators.evaluate(CHANGES) == 0
    for step in range(STEPS + 1, 31):
        write(run, step)
    estimators.wait_for_function(f"{CHANGES} > 0", timeout=20 * SECONDS)
    assert all(tab.clean for tab in tabs.values())
