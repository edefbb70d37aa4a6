"""A walk through all pages as a user takes it: run → step → rollout → token, by mouse and by keys; every address again.

Chromium, light at 1,440 pixels and dark at 1,024; nobody but the dashboard is asked, and the console has no error.
"""

import shutil
from collections.abc import Iterator

import pytest

from tests.app.browsing import (
    PLOT,
    SECONDS,
    asked,
    choose,
    click_point,
    click_row,
    finished,
    select_box,
    served,
    sideways,
    tab_to,
    visit,
    watched,
)
from tests.app.token_runs import HEAD, PROMPTS, write_token_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CHOSEN = ".tok.chosen"
BAR = "input[type=range]"
STEPS, DIES = 30, 20
LIGHT = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"}
DARK = {"viewport": {"width": 1024, "height": 900}, "color_scheme": "dark"}
PLACES = {
    "Triage": "",
    "Run": "run?run=chain-group_mean-s0&step=20&level=prompts&log=true",
    "Rollouts": "rollouts?run=chain-otb-s0&text=12&steps=5&steps=20&where=tokens+%3E+4&sort=longest+first",
    "Tokens": "tokens?run=chain-otb-s0&step=20&prompt=1&token=9.1&color=advantage&order=by+reward",
    "Estimators": "estimators?run=chain-otb-s0&against=none&energy=exact+norms",
    "Compare": "compare?run=chain-group_mean-s0&run=chain-otb-s0&compare=Estimators+of+one+run&a=group_mean&b=value",
    "Studies": "studies?study=04_group_size",
    "Proxy": "estimators?run=chain-otb-s0&part=Proxy&kind=realized+energy+W",
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
def address(store_root, tmp_path_factory) -> Iterator[str]:
    """A dashboard on two runs that trained long, and one whose prompts come again and that dies."""
    root = tmp_path_factory.mktemp("walk")
    for name in ("chain-group_mean-s0", "chain-otb-s0"):
        shutil.copytree(store_root / name, root / name)
    write_token_run(root, "words", steps=STEPS, dies=DIES)
    with served(root) as url:
        yield url


def view(page) -> dict:
    """What a user sees of a page, but for pictures."""
    finished(page)
    tokens = {"tokens": page.locator(".tok").all_text_contents(), "chosen": page.locator(CHOSEN).all_text_contents()}
    return page.evaluate(VIEW) | tokens


def test_a_walk_from_a_run_to_a_token_by_mouse(browser, address):
    with watched(browser, address, **LIGHT) as tab:
        page = visit(tab, f"{address}/")
        assert (
            page.locator("strong")
            .first.inner_text()
            .startswith("words: reward 0.750 → 0, halfway down at step 20; no gradient")
        )
        reloaded(page)
        click_row(page, page.locator("[data-testid=stDataFrame]").first, 0)  # the worst run
        on_page(page, "Run")
        assert asked(page, "focus") in (None, "words") and "run=" not in page.url
        step_is(page, 18)  # the last measured step before the reward fell at step 20
        click_point(page, 4, 0.75, axes="2", number=1)
        step_is(page, 4)
        reloaded(page)
        page.locator("[data-testid=stSidebarNav] >> text=Rollouts").click()
        on_page(page, "Rollouts")
        says(page, "240 rollouts.")
        click_point(page, 4, "1.00")  # the histogram's cell: six rollouts
        says(page, "6 rollouts.")
        reloaded(page)
        page.locator(".list tbody").nth(1).click()
        page.wait_for_selector(".facts:has-text('rollout 1')", timeout=20 * SECONDS)
        finished(page)
        page.locator("button:has-text('Its tokens')").click()
        on_page(page, "Tokens")
        says(page, "token 0 of rollout 1")
        assert (asked(page, "step"), asked(page, "prompt")) == ("4", "0")
        prompts_match(page)
        all_is_shown(page)
        page.locator(".card").nth(2).locator(".tok").nth(2).click()
        says(page, "token 2 of rollout 2")
        says(page, "A = G − B = 0 − 0.500 = −0.500")  # two of four are paid
        reloaded(page)
        new_labels(page, lambda: choose(page, "Step", "6"))
        assert select_box(page, "Step").locator("input").first.input_value() == "6"
        new_labels(page, lambda: choose(page, "Prompt", other_prompt(page)))
        says(page, "no gradient here")
        assert sideways(page) <= 0
        again_by_its_address(page, browser, address, LIGHT)
        assert tab.clean


def test_the_same_walk_by_keys(browser, address):
    with watched(browser, address, **DARK) as tab:
        page = visit(tab, f"{address}/")
        finished(page)
        tab_to(page, "[data-testid=stMain] button:has(p)")  # "Open words": the worst run
        page.keyboard.press("Enter")
        on_page(page, "Run")
        assert asked(page, "focus") in (None, "words") and "run=" not in page.url
        step_is(page, 18)
        tab_to(page, BAR)
        page.keyboard.press("Home")
        step_is(page, 0)
        page.keyboard.press("ArrowRight")
        step_is(page, 1)
        reloaded(page)
        page.locator("[data-testid=stSidebarNavLink]").first.focus()
        tab_to(page, "a[href$=rollouts]")
        page.keyboard.press("Enter")
        on_page(page, "Rollouts")
        tab_to(page, BAR)
        page.keyboard.press("ArrowRight")
        says(page, "232 rollouts.")
        reloaded(page)
        page.keyboard.press("t")  # the first rollout of the list is read: of the newest step where answers disagree
        on_page(page, "Tokens")
        says(page, "token 0 of rollout 0")
        assert (asked(page, "step"), asked(page, "prompt")) == ("19", "0")
        prompts_match(page)
        page.keyboard.press("ArrowDown")
        says(page, "token 0 of rollout 1")
        page.keyboard.press("ArrowRight")
        says(page, "token 1 of rollout 1")
        new_labels(page, lambda: page.keyboard.press("Shift+ArrowLeft"))
        assert (asked(page, "step"), asked(page, "token")) == (None, "1.1")  # step 18, which a page begins with
        reloaded(page)
        select_box(page, "Step").locator("input").first.focus()
        page.keyboard.press("Tab")  # to the box Prompt
        new_labels(page, lambda: [page.keyboard.press(key) for key in ("ArrowDown", "ArrowDown", "Enter")])
        assert asked(page, "prompt") == "1"
        says(page, "no gradient here")
        again_by_its_address(page, browser, address, DARK)
        assert tab.clean


SIZES = [(1440, "light", "mouse"), (1440, "dark", "keys"), (1024, "dark", "mouse"), (1024, "light", "keys"),
         (390, "light", "mouse")]  # fmt: skip
CUT_OFF = """[...document.querySelectorAll('.js-plotly-plot')].flatMap((figure) =>
  [...figure.querySelectorAll('.annotation-text')].filter((text) => text.getBoundingClientRect().right >
    figure.getBoundingClientRect().right + 1).map((text) => text.textContent))"""


@pytest.mark.parametrize(("width", "scheme", "by"), SIZES)
def test_from_a_collapsed_run_to_the_token_that_held_its_last_gradient_within_three_clicks(
    width, scheme, by, browser, address
):
    with watched(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme) as tab:
        page = visit(tab, f"{address}/?run=chain-group_mean-s0")
        if by == "keys":
            tab_to(page, "a[href$='/run']")  # of the menu; a table with ticks takes no cell by keys
            page.keyboard.press("Enter")
        else:
            click_row(page, page.locator("[data-testid=stDataFrame]").first, 1)
        on_page(page, "Run")
        step_is(page, 30)  # every tenth is attributed
        says(page, "the last attributed step before the reward fell at step 34")
        lowest = [page.locator("button:has-text('Open its tokens')").nth(n).bounding_box() for n in range(3)]
        assert width == 390 or max(one["y"] for one in lowest) - min(one["y"] for one in lowest) < 1
        assert page.evaluate(CUT_OFF) == []
        if by == "keys":
            tab_to(page, "[data-testid=stDataFrame] canvas")
            page.keyboard.press("ArrowRight")
        else:
            click_row(page, page.locator("[data-testid=stDataFrame]").first, 0)
        on_page(page, "Tokens")
        says(page, "Baseline and advantage of group_mean")
        assert page.locator(CHOSEN).count() == 1 and asked(page, "step") in (None, "30")
        assert sideways(page) <= 0 and tab.clean


def on_page(page, title: str) -> None:
    """Wait for a page, its figure and its end."""
    page.wait_for_selector(f"h1:has-text('{title}')", timeout=60 * SECONDS)
    page.wait_for_selector(PLOT, timeout=60 * SECONDS)
    finished(page)


def says(page, text: str) -> None:
    """Wait until the page says something."""
    page.wait_for_selector(f"[data-testid=stMain] >> text={text}", timeout=20 * SECONDS)


def step_is(page, step: int) -> None:
    """Wait until a step of the page Run is chosen, in the address, on the bar and in the heading."""
    says(page, f"/(Who holds the gradient of|Which tokens are large at) step {step}$/")
    finished(page)
    assert asked(page, "step") in (None, str(step))  # the step that a page begins with leaves the address
    assert page.locator(f"[data-testid=stMain] {BAR}").first.get_attribute("aria-valuetext") == str(step)


def reloaded(page) -> None:
    """Load the page anew: it shows the same."""
    before, url = view(page), page.url
    page.reload()
    page.wait_for_selector(f"{PLOT}, [data-testid=stImage] img", timeout=60 * SECONDS)
    assert view(page) == before and page.url == url


def all_is_shown(page) -> None:
    """The page Tokens shows turns, tool output, special tokens, and a rewarded answer that ends with another number."""
    for mark in (".turn >> text=turn 2", ".tok.tool", ".tok.special >> text=<|im_end|>", ".item >> text=special token"):
        assert page.locator(mark).first.is_visible(), mark
    warnings = page.locator(".card .warning").all_inner_texts()
    assert warnings == ["rewarded, but ends with 48, not 36"]


def new_labels(page, change) -> None:
    """Choose another step or prompt: the label of the prompt changes, and is that of the prompt shown."""
    before = label(page)
    change()
    page.wait_for_function(
        "before => !document.querySelector('.st-key-prompt-text').innerText.includes(before)",
        arg=before.rpartition(HEAD[-6:])[2], timeout=20 * SECONDS,
    )  # fmt: skip
    finished(page)
    assert label(page) != before
    prompts_match(page)


def other_prompt(page) -> str:
    """The end of the text of a prompt that is not chosen."""
    return next(text.removeprefix(HEAD) for text in PROMPTS.values() if text.removeprefix(HEAD) in options(page))


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
    shown = page.locator(".st-key-prompt-text").inner_text().strip()
    assert label(page).endswith(shown)  # what all prompts share is folded


def again_by_its_address(page, browser, address, how) -> None:
    """Open the page by its address in another browser: it shows the same."""
    with watched(browser, address, **how) as other:
        again = visit(other, page.url)
        assert view(again) == view(page)
        assert again.url == page.url and other.clean


@pytest.mark.heavy
@pytest.mark.parametrize("name", PLACES)
def test_every_address_opens_the_same_view_again(name, browser, address):
    with watched(browser, address, **DARK) as tab:
        page = visit(tab, f"{address}/{PLACES[name]}")
        finished(page)
        for asked_for in PLACES[name].partition("?")[2].split("&"):
            assert asked_for in page.url  # nothing that was asked for got lost
        reloaded(page)
        assert sideways(page) <= 0
        assert not page.locator("[data-testid=stException]").count() and tab.clean


@pytest.mark.heavy
def test_a_choice_is_carried_from_page_to_page_by_the_menu(browser, address):
    with watched(browser, address) as tab:
        page = visit(tab, f"{address}/{PLACES['Tokens']}")
        for name in ("Run", "Rollouts", "Estimators", "Tokens"):
            page.locator(f"[data-testid=stSidebarNav] >> text={name}").click()
            page.wait_for_selector(f"h1:has-text('{name}')", timeout=60 * SECONDS)
            finished(page)
            assert "run=chain-otb-s0" in page.url, name
        assert all(choice in page.url for choice in ("step=20", "prompt=1", "token=9.1"))
        assert page.locator(CHOSEN).count() == 1 and tab.clean


@pytest.mark.heavy
def test_a_click_on_a_circle_of_the_proxy_opens_that_token(browser, address):
    with watched(browser, address) as tab:
        page = visit(tab, f"{address}/estimators?run=words&part=Proxy&kind=realized+energy+W")
        says(page, "Circles: the")
        finished(page)
        first = """figure => { const at = figure.calcdata[2][0];
                              return [at.x, at.y, ...figure._fullData[2].customdata[0]] }"""
        x, y, step, group, rollout, t = page.locator("[data-testid=stMain] .js-plotly-plot").first.evaluate(first)
        click_point(page, x, y)
        on_page(page, "Tokens")
        says(page, f"token {t} of rollout {rollout}")
        assert asked(page, "step") in (None, str(step)) and asked(page, "prompt") == str(group)
        prompts_match(page)
        assert tab.clean
