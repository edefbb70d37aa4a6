"""The page Tokens in a browser: a token by mouse, by keys and by its address; labels; odd and long tokens."""

from collections.abc import Iterator

import pytest

from tests.app.browsing import (
    PLOT,
    ROOT,
    SECONDS,
    asked,
    choose,
    finished,
    select_box,
    served,
    sideways,
    visit,
    watched,
)
from tests.app.token_runs import HEAD, PROMPTS, write_odd_run, write_token_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.heavy]

CHOSEN = ".tok.chosen"


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("token_runs")
    for seed, name in enumerate(("first", "second")):
        write_token_run(root, name, seed=seed)
    write_token_run(root, "long", steps=1, length=2000)
    write_odd_run(root)
    with served(root) as url:
        yield url


def says(page, text: str) -> None:
    """Wait until the page says something."""
    page.wait_for_selector(f"text={text}", timeout=20 * SECONDS)


def test_a_token_is_found_by_mouse_by_keys_and_again_by_its_address(tab, address, browser):
    page = visit(tab, f"{address}/tokens?run=first&step=0&prompt=0")
    page.locator(".card").nth(0).locator(".tok").nth(4).click()
    says(page, "token 4 of rollout 0")
    assert asked(page, "token") == "0.4"
    page.keyboard.press("ArrowRight")
    says(page, "token 5 of rollout 0")
    page.keyboard.press("ArrowDown")
    says(page, "token 5 of rollout 1")
    for _ in range(3):  # faster than the server
        page.keyboard.press("ArrowLeft")
    says(page, "token 2 of rollout 1")
    assert asked(page, "token") == "1.2" and page.locator(CHOSEN).count() == 1
    says(page, "Baseline and advantage of")
    shown = page.locator(CHOSEN).text_content(), page.locator(".st-key-token-panel").inner_text()
    with watched(browser, address) as other:
        again = visit(other, page.url)
        again.wait_for_selector(CHOSEN)
        says(again, "token 2 of rollout 1")
        again.wait_for_timeout(1000)
        assert (again.locator(CHOSEN).text_content(), again.locator(".st-key-token-panel").inner_text()) == shown
        assert again.url == page.url and other.clean
    assert tab.clean


def test_in_a_narrow_window_tokens_begin_within_the_first_screen(browser, address):
    with watched(browser, address, viewport={"width": 390, "height": 900}) as tab:
        page = visit(tab, f"{address}/tokens")
        finished(page)
        assert page.locator(".tok").first.bounding_box()["y"] < 900 and sideways(page) <= 0


def test_labels_change_with_step_and_prompt(tab, address):
    page = visit(tab, f"{address}/tokens?run=first&step=0&prompt=0&token=2.3")
    label = select_box(page, "Prompt")

    def shows(name: str) -> None:
        own = PROMPTS[name].removeprefix(HEAD)  # what all prompts share is folded
        page.wait_for_function("([n, t]) => document.querySelector(n).innerText.includes(t)",
                               arg=[".st-key-prompt-text", own], timeout=20 * SECONDS)  # fmt: skip
        assert label.locator("input").input_value().endswith(own)

    page.wait_for_selector(CHOSEN)
    shows("sum")
    page.keyboard.press("Shift+ArrowRight")  # the chosen token has the focus
    shows("eggs")
    assert (asked(page, "step"), asked(page, "token")) == ("1", "2.3")
    page.keyboard.press("Shift+ArrowRight")
    shows("one")
    finished(page)
    choose(page, "Prompt", "12 + 7")
    shows("sum")
    assert asked(page, "prompt") == "1"
    says(page, "no gradient here")
    finished(page)
    choose(page, "Step", "1")
    shows("one")
    assert tab.clean


def test_a_click_on_the_grid_chooses_its_token(tab, address):
    page = visit(tab, f"{address}/tokens?run=first&step=0&prompt=0")
    cell = page.locator(".js-plotly-plot .scatterlayer .trace").last.locator("path.point").nth(12 + 3)
    cell.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    at = cell.bounding_box()
    page.mouse.click(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    says(page, "token 3 of rollout 1")
    assert asked(page, "token") == "1.3"
    page.wait_for_selector(CHOSEN)
    assert page.locator(CHOSEN).evaluate("e => e.closest('.card').querySelector('b').textContent") == "rollout 1"
    assert tab.clean


def test_a_token_on_the_right_of_two_runs_is_chosen_there(tab, address, browser):
    page = visit(tab, f"{address}/tokens?run=first&run=second&focus=first&step=0&prompt=0&two=true")
    assert page.locator(".pane").count() == 2
    page.locator(".pane").nth(1).locator(".tok").nth(2).click()
    says(page, "token 2 of rollout 0")
    assert asked(page, "token") == "b0.2" and page.locator(".pane").nth(1).locator("text=step 0 of second").count() == 1
    page.keyboard.press("ArrowRight")
    says(page, "token 3 of rollout 0")
    with watched(browser, address) as other:
        again = visit(other, page.url)
        again.wait_for_selector(f".pane:nth-child(2) {CHOSEN}")
        assert again.url == page.url and other.clean
    assert tab.clean


def test_2000_tokens_a_rollout_can_be_read_and_walked_and_only_those_around_the_chosen_ones_are_drawn(browser, address):
    with watched(browser, address, viewport={"width": 1024, "height": 900}, color_scheme="dark") as tab:
        page = visit(tab, f"{address}/tokens?run=long&step=0&prompt=0&token=0.1500")
        page.wait_for_selector(CHOSEN)
        assert page.locator(".tok").count() < 5000 < 2000 + 1999 + 1998 + 2000
        page.wait_for_timeout(500)
        inside = """e => { const b = e.closest('.text').getBoundingClientRect(), t = e.getBoundingClientRect();
                           return t.top >= b.top && t.bottom <= b.bottom }"""
        assert page.locator(CHOSEN).evaluate(inside)
        page.keyboard.press("ArrowDown")
        says(page, "token 1500 of rollout 1")
        assert page.locator(CHOSEN).evaluate(inside)
        first = page.locator(".card").nth(3).locator(".text")
        assert first.locator(".rest").inner_text() == "1,234 tokens after: scroll on"
        for _ in range(40):  # to its end, where no more come
            first.evaluate("e => { e.scrollTop = e.scrollHeight }")
            page.wait_for_timeout(50)
        assert [rest.split(" tokens ")[1] for rest in first.locator(".rest").all_inner_texts()] == ["before: scroll on"]
        assert sideways(page) <= 0
        assert tab.clean


VIEW = """async ([source, data]) => {
  const view = await import("data:text/javascript," + encodeURIComponent(source));
  view.default({data, parentElement: document.body, setTriggerValue: () => {}});
  return document.querySelectorAll(".tok").length;  // before anything is scrolled to
}"""


def test_an_answer_without_tokens_leaves_those_behind_it_drawn(tab):
    def row(n: int) -> dict:
        columns = {"texts": ["a"] * n, "levels": [0] * n, "kinds": [""] * n, "turns": [0] * n, "breaks": [False] * n}
        return columns | {"rollout": n, "reward": "0", "facts": [], "ts": list(range(n)), "values": {}}

    data = {
        "panes": [{"title": "", "rows": [row(0), row(3)]}], "columns": [], "palette": [["#fff", "#000"]], "colors": [],
        "quiet": 0, "marks": [], "version": "1", "chosen": None,
    }  # fmt: skip
    assert tab.page.evaluate(VIEW, [(ROOT / "app" / "token_view.js").read_text(), data]) == 3


def test_odd_tokens_and_prompts_stay_text(tab, address):
    page = visit(tab, f"{address}/tokens?run=odd")
    page.wait_for_selector(".tok")  # the figure below them may be there first
    shown = page.locator(".tok").all_text_contents()
    assert {"<script>alert(1)</script>", "⟨202E⟩right·to·left", "⟨0000⟩⟨001B⟩[31m", "�"} <= set(shown)
    assert max(map(len, shown)) < 300
    assert page.locator(".tok *, img[src=x], .stMarkdown b").count() == 0
    for token in range(6):
        page.locator(".tok").nth(token).click()
        says(page, f"token {token} of rollout 0")
    assert page.locator(PLOT).count() > 0 and sideways(page) <= 0
    assert tab.clean
