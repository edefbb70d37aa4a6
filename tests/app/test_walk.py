"""A walk through all pages as a user takes it: run → step → rollout → token, by mouse and by keys; every address again.

Chromium, light and dark, 1,024 and 1,440 pixels; nobody but the dashboard is asked, and the console has no error.
"""

import shutil
from collections.abc import Iterator

import pytest

from tests.app.browsing import (
    PLOT,
    SECONDS,
    asked,
    choose,
    chromium_started,
    click_first_row,
    finished,
    select_box,
    served,
    sideways,
    visit,
    watched,
)
from tests.app.token_runs import HEAD, PROMPTS, write_token_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CHOSEN = ".tok.chosen"
STEPS = 12
PLACES = {
    "Triage": "",
    "Run": "run?run=chain-group_mean-s0&step=20&level=prompts&log=true",
    "Rollouts": "rollouts?run=chain-otb-s0&text=12&groups=different+rewards",
    "Tokens": "tokens?run=chain-otb-s0&step=20&prompt=1&token=9.1&color=advantage&order=by+reward",
    "Estimators": "estimators?run=chain-otb-s0&against=none&energy=exact+norms",
    "Compare": "compare?run=chain-group_mean-s0&run=chain-otb-s0&compare=runs&a=chain-otb-s0&b=chain-group_mean-s0",
    "Studies": "studies?study=04_group_size",
    "Proxy": "estimators?run=chain-otb-s0&part=proxy&kind=realized+energy+W",
}
"""Pages with a choice that is no default."""

VIEW = """() => {
  const main = document.querySelector('[data-testid=stMain]');
  const read = (what, how) => [...main.querySelectorAll(what)].map(how);
  return {
    titles: read('h1, h2, h3', (e) => e.innerText),
    boxes: read('input', (e) => [e.type, e.type === 'checkbox' || e.type === 'radio' ? e.checked : e.value]),
    buttons: read('[role=radio], [aria-pressed]', (e) => [e.innerText, e.ariaChecked, e.ariaPressed]),
    figures: main.querySelectorAll('.js-plotly-plot').length,
    sentences: read('[data-testid=stCaptionContainer], [data-testid=stAlert]', (e) => e.innerText),
  };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with chromium_started() as instance:
        yield instance


@pytest.fixture(scope="module")
def address(store_root, tmp_path_factory) -> Iterator[str]:
    """A dashboard on two runs that trained long, and one whose prompts come again."""
    root = tmp_path_factory.mktemp("walk")
    for name in ("chain-group_mean-s0", "chain-otb-s0"):
        shutil.copytree(store_root / name, root / name)
    write_token_run(root, "words", steps=STEPS)
    with served(root) as url:
        yield url


def view(page) -> dict:
    """What a user sees of a page, but for pictures."""
    finished(page)
    tokens = {"tokens": page.locator(".tok").all_text_contents(), "chosen": page.locator(CHOSEN).all_text_contents()}
    return page.evaluate(VIEW) | tokens


@pytest.mark.parametrize(("width", "scheme"), [(1024, "dark"), (1440, "light")])
def test_a_walk_from_a_run_to_a_token_by_mouse_and_keys(width, scheme, browser, address):
    with watched(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme) as tab:
        page = visit(tab, f"{address}/")
        click_first_row(page, page.locator("[data-testid=stDataFrame]").first)  # the worst run
        page.wait_for_selector("h1:has-text('Run')", timeout=60 * SECONDS)
        page.wait_for_selector(PLOT)
        assert asked(page, "run") == "chain-group_mean-s0" and page.url.count("run=") == 1
        step_by_mouse(page)
        page.goto(f"{address}/run?run=words&step=3")
        page.wait_for_selector(PLOT, timeout=60 * SECONDS)
        finished(page)
        step_by_keys(page)
        page.locator("[data-testid=stSidebarNav] >> text=Rollouts").click()
        page.wait_for_selector("text=Click one to see its tokens", timeout=60 * SECONDS)
        assert asked(page, "step") == "4"
        click_first_row(page, page.locator("[data-testid=stDataFrame]").first)
        page.wait_for_selector(CHOSEN, timeout=60 * SECONDS)
        assert page.locator("h1").inner_text() == "Tokens"
        token_by_mouse_and_keys(page)
        assert sideways(page) <= 0
        again_by_its_address(page, browser, address, width, scheme)
        assert tab.clean


def step_by_mouse(page) -> None:
    """Click into a figure of the page Run: the step there is chosen."""
    box = page.locator(PLOT).first.bounding_box()
    begun = page.url
    page.mouse.click(box["x"] + 0.4 * box["width"], box["y"] + 150)
    page.wait_for_function("url => location.href !== url", arg=begun, timeout=20 * SECONDS)
    assert 8 < int(asked(page, "step")) < 22


def step_by_keys(page) -> None:
    """Move the step bar by a key."""
    page.locator("[data-testid=stMain] input[type=range]").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**step=4**", timeout=20 * SECONDS)
    finished(page)


def token_by_mouse_and_keys(page) -> None:
    """Choose a token by mouse, another by keys, and other steps and prompts, whose labels must follow."""
    page.locator(".card").nth(1).locator(".tok").nth(2).click()
    page.wait_for_selector("text=token 2 of rollout", timeout=20 * SECONDS)
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("text=token 3 of rollout", timeout=20 * SECONDS)
    first = label(page)
    step = int(asked(page, "step"))
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_url(f"**step={step + 1}**", timeout=20 * SECONDS)
    finished(page)
    assert label(page) != first
    prompts_match(page)
    other = next(text.removeprefix(HEAD) for text in PROMPTS.values() if text.removeprefix(HEAD) in options(page))
    choose(page, "Prompt", other)
    finished(page)
    assert label(page).endswith(other)
    prompts_match(page)


def label(page) -> str:
    """The label of the chosen prompt."""
    return select_box(page, "Prompt").locator("input").first.input_value()


def options(page) -> str:
    """The labels of the prompts that are not chosen."""
    select_box(page, "Prompt").locator("input").first.click()
    found = [text for text in page.locator("[role=option]").all_inner_texts() if text != label(page)]
    page.keyboard.press("Escape")
    return " ".join(found)


def prompts_match(page) -> None:
    """The label of the prompt is that of the prompt shown."""
    shown = page.locator(".st-key-prompt").inner_text().strip()
    assert label(page).endswith(shown.removeprefix(HEAD))


def again_by_its_address(page, browser, address, width, scheme) -> None:
    """Open the page by its address in another browser: it shows the same."""
    with watched(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme) as other:
        again = visit(other, page.url)
        assert view(again) == view(page)
        assert again.url == page.url and other.clean


@pytest.mark.parametrize(("width", "scheme"), [(1024, "light"), (1440, "dark")])
@pytest.mark.parametrize("name", PLACES)
def test_every_address_opens_the_same_view_again(name, width, scheme, browser, address):
    with watched(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme) as tab:
        page = visit(tab, f"{address}/{PLACES[name]}")
        finished(page)
        for asked_for in PLACES[name].partition("?")[2].split("&"):
            assert asked_for in page.url  # nothing that was asked for got lost
        again_by_its_address(page, browser, address, width, scheme)
        assert sideways(page) <= 0
        assert not page.locator("[data-testid=stException]").count() and tab.clean


def test_a_choice_is_carried_from_page_to_page_by_the_menu(browser, address):
    with watched(browser, address) as tab:
        page = visit(tab, f"{address}/{PLACES['Tokens']}")
        for name in ("Run", "Rollouts", "Estimators", "Tokens"):
            page.locator(f"[data-testid=stSidebarNav] >> text={name}").click()
            page.wait_for_selector(f"h1:has-text('{name}')", timeout=60 * SECONDS)
            finished(page)
            for choice in ("run=chain-otb-s0", "step=20", "prompt=1", "token=9.1"):
                assert choice in page.url, name
        assert page.locator(CHOSEN).count() == 1 and tab.clean
