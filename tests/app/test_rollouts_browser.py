"""The reader of rollouts in a browser: by mouse, by keys and by its address; map and large tokens of a long one."""

from collections.abc import Iterator

import pytest

from otb_analysis.store import RunWriter, StepTables
from tests.app.browsing import SECONDS, asked, finished, served, sideways, visit, watched
from tests.app.token_runs import write_token_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.heavy]

ROWS, READ = ".list tbody", ".list tbody.chosen"


HOSTILE = (
    "<script>alert(1)</script>\u202eright to left\x1b[31m\n\n![x](http://x.example/x.png) [y](http://x.example) **z**"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("read_runs")
    write_token_run(root, "short")
    write_token_run(root, "long", steps=1, length=2000)
    writer = RunWriter.create(root, "hostile", {})
    rollouts = {"group": [0], "rollout": [0], "prompt": ["<b>p</b>"], "completion": [HOSTILE], "reward": [1.0]}
    writer.write_step(0, StepTables(rollouts=rollouts, steps={"reward_mean": 1.0}))
    writer.finish()
    with served(root) as url:
        yield url


def reads(page, rollout: str) -> None:
    """Wait until a rollout is read and the address says so."""
    step, number = rollout.split(".")
    page.wait_for_function(f"new URL(location).searchParams.get('rollout') === '{rollout}'", timeout=20 * SECONDS)
    page.wait_for_selector(f".facts:has-text('step {step}'):has-text('rollout {number}')", timeout=20 * SECONDS)
    assert page.locator(READ).count() == 1 and page.locator(READ).inner_text().split()[2] == number


def test_rollouts_are_read_by_mouse_by_keys_and_again_by_their_address(tab, address, browser):
    page = visit(tab, f"{address}/rollouts?run=short&text=48")
    page.wait_for_selector(READ)
    assert page.locator(".list mark").first.inner_text() == "48" and asked(page, "rollout") is None
    page.locator(ROWS).nth(2).click()
    number = {at: page.locator(ROWS).nth(at).inner_text().split() for at in range(6)}
    name = {at: f"{cells[0]}.{cells[2]}" for at, cells in number.items()}
    reads(page, name[2])
    for key, at in (("j", 3), ("ArrowDown", 4), ("k", 3), ("ArrowUp", 2), ("End", 5), ("Home", 0)):
        page.keyboard.press(key)
        reads(page, name[at])
    for _ in range(3):  # faster than the server
        page.keyboard.press("j")
    reads(page, name[3])
    with watched(browser, address) as other:
        again = visit(other, page.url)
        reads(again, name[3])
        assert again.locator(".pane mark").first.inner_text() == "48"
    finished(page)
    assert sideways(page) == 0 and tab.clean
    page.keyboard.press("t")
    page.wait_for_selector("h1:has-text('Tokens')", timeout=60 * SECONDS)
    page.wait_for_selector(".tok.chosen", timeout=60 * SECONDS)
    assert asked(page, "token") == f"{number[3][2]}.0" and asked(page, "prompt") == number[3][1]


def test_a_click_on_a_coloured_token_of_the_answer_opens_it_among_all_tokens(tab, address):
    page = visit(tab, f"{address}/rollouts?run=long")
    page.wait_for_selector(READ)
    _, prompt, rollout, *_ = page.locator(READ).inner_text().split()
    shown = page.locator(".pane .tok")
    assert shown.count() >= 2000 and len({shown.nth(at).get_attribute("style") for at in range(20)}) > 5
    shown.nth(3).click()
    page.wait_for_selector(".tok.chosen", timeout=60 * SECONDS)
    names = {"prompt": prompt, "token": f"{rollout}.3"}
    assert {name: asked(page, name) for name in names} == names
    page.go_back()
    page.wait_for_selector("h1:has-text('Rollouts')", timeout=60 * SECONDS)
    assert tab.clean


def test_what_a_model_wrote_is_text_in_the_list_the_reader_and_the_rendered_view(tab, address):
    page = visit(tab, f"{address}/rollouts?run=hostile&rendered=true")
    page.wait_for_selector(READ)
    finished(page)
    for place in (".list", ".pane", "[data-testid=stHtml]:has(strong)"):
        shown = page.locator(place).inner_text()
        assert "<script>alert(1)</script>⟨202E⟩right to left⟨001B⟩[31m" in shown and "![x](http" in shown, place
    assert page.locator("[data-testid=stHtml] strong").inner_text() == "z"
    assert not page.locator("[data-testid=stHtml] :is(a, img)").count() and tab.clean and sideways(page) == 0


def test_the_map_and_two_keys_lead_through_the_large_tokens_of_a_long_answer(tab, address):
    page = visit(tab, f"{address}/tokens?run=long&prompt=0")
    strip = page.locator(".card .map").first
    box = strip.bounding_box()
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 4)
    page.wait_for_selector("text=of rollout 0", timeout=20 * SECONDS)
    finished(page)
    middle = int(asked(page, "token").split(".")[1])
    assert 980 <= middle <= 1020
    seen = [middle]
    for key in ("n", "n", "p"):
        page.keyboard.press(key)
        page.wait_for_function(f"new URL(location).searchParams.get('token') !== '0.{seen[-1]}'", timeout=20 * SECONDS)
        finished(page)
        seen.append(int(asked(page, "token").split(".")[1]))
    assert middle < seen[1] < seen[2] and seen[3] == seen[1] and tab.clean
