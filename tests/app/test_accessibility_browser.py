"""What people need who do not see a page, or see it otherwise: names, contrast, one stop of Tab for each figure."""

from collections.abc import Iterator

import pytest

from tests.app.browsing import Watched, finished, served, sideways, visit, watched

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.heavy]

BOTH = "run=chain-otb-s0&run=chain-group_mean-s0"
PAGES = (
    f"?{BOTH}", "run?run=chain-otb-s0", "rollouts?run=chain-otb-s0", "tokens?run=chain-otb-s0",
    "estimators?run=chain-otb-s0", "estimators?run=chain-otb-s0&part=Proxy", f"compare?{BOTH}",
)  # fmt: skip
FIGURES = "[...document.querySelectorAll('[data-testid=stPlotlyChart]')]"


@pytest.fixture(scope="module")
def address(store_root) -> Iterator[str]:
    with served(store_root) as url:
        yield url


@pytest.fixture(params=[("light", 1440), ("dark", 1024), ("dark", 390)], ids=str)
def tab(request, browser, address) -> Iterator[Watched]:
    scheme, width = request.param
    with watched(browser, address, color_scheme=scheme, viewport={"width": width, "height": 900}) as page:
        yield page


@pytest.mark.parametrize("path", [*PAGES, "studies?study=01_enumeration"])
def test_no_page_has_a_serious_violation_nor_a_silent_figure_nor_is_wider_than_its_window(path, tab, address):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra `dev` brings axe").Axe()
    page = visit(tab, f"{address}/{path}")
    finished(page)
    if path.startswith("run"):
        page.locator("text=detectors, and how far").first.click()
        page.wait_for_selector("[data-testid=stTable]", timeout=20_000)
    page.wait_for_timeout(1000)
    found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in serious] == []
    assert sideways(page) <= 0
    # Each figure is a picture with a sentence and one stop of Tab.
    told = page.evaluate(f"{FIGURES}.map(f => f.querySelector('[role=img]')?.getAttribute('aria-label'))")
    assert bool(told) == (path in PAGES) and all(
        says and says.startswith("Figure. ") and len(says) > 30 for says in told
    )
    stops = page.evaluate(f"{FIGURES}.map(f => [f, ...f.querySelectorAll('*')].filter(e => e.tabIndex >= 0).length)")
    assert set(stops) <= {1}


def test_panels_stand_below_one_another_in_a_narrow_window_and_beside_in_a_wide_one(tab, address):
    axes = "[...document.querySelectorAll('.js-plotly-plot .xaxislayer-above')]"
    lefts = f"{axes}.map(e => Math.round(e.getBoundingClientRect().left / 40))"
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    page = visit(tab, f"{address}/?{BOTH}")
    finished(page)
    assert len(set(page.evaluate(lefts))) == 2
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function(f"new Set({lefts}).size === 1", timeout=20_000)
    assert sideways(page) <= 0
