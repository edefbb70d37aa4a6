"""What only a browser can tell: text stays text, nothing is fetched from elsewhere, clicks and live runs work."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.answers.audit import audit_run
from otb_analysis.config import AuditConfig, ImportConfig
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.recorded.score import score
from otb_analysis.report import write_report
from otb_analysis.report.audit import write_audit
from otb_analysis.store import RunStore, RunWriter
from tests.app.browsing import (
    CUT,
    PLOT,
    ROOT,
    SECONDS,
    SPY,
    click_first_row,
    finished,
    served,
    sideways,
    visit,
    watched,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGES = {  # a run is running: it opens first
    "": "Run", "?run=chain-otb-s0": "Triage", "run": "Run", "rollouts": "Rollouts", "tokens": "Tokens",
    "estimators": "Estimators", "estimators?part=Proxy": "Estimators", "compare": "Compare",
}  # fmt: skip


@pytest.fixture(scope="module")
def live_root(store_root, tmp_path_factory) -> Path:
    """A copy of the store that a test may let grow."""
    return shutil.copytree(store_root, tmp_path_factory.mktemp("live") / "runs")


@pytest.fixture(scope="module")
def address(live_root) -> Iterator[str]:
    with served(live_root) as url:
        yield url


@pytest.mark.parametrize("path", PAGES)
def test_every_page_draws_asks_nobody_else_and_is_no_wider_than_a_small_window(path, tab, address):
    tab.page.set_viewport_size({"width": 900, "height": 900})
    page = visit(tab, f"{address}/{path}")
    assert page.locator("h1").inner_text() == PAGES[path]
    page.wait_for_timeout(1000)
    assert not page.locator("[data-testid=stException]").count()
    assert (tab.foreign, tab.dialogs, tab.errors) == ([], [], [])
    assert sideways(page) <= 0


@pytest.mark.parametrize("width", [1440, 1024])
def test_no_cell_of_a_table_cuts_its_text_off(width, browser, store_root, write_next_step, tmp_path):
    runs = shutil.copytree(store_root, tmp_path / "runs")
    config = {"seed": 1, "estimator": {"name": "otb"}, "task": "chain_sum", "model": "/a/folder/of/models/" * 6}
    writer = RunWriter.create(runs, "another-run-of-otb-with-a-name-of-fifty-letters-s1", config)
    for step in range(3):
        write_next_step(writer, step, 1)
    writer.finish()
    with served(runs) as url, watched(browser, url, viewport={"width": width, "height": 2500}) as tab:
        tab.page.add_init_script(SPY)
        for path in ("?", "run?", "compare?compare=Two+runs&", "estimators?", "tokens?"):
            page = visit(tab, f"{url}/{path}focus=chain-otb-s0&run=chain-otb-s0&run={writer.path.name}")
            finished(page)
            page.wait_for_timeout(1000)  # nothing announces that a canvas is drawn
            assert page.evaluate(CUT) == [], path
            assert sideways(page) <= 0


def test_hostile_tokens_stay_text(tab, address, hostile_texts):
    page = visit(tab, f"{address}/tokens?run=chain-otb-s0&step=20&prompt=0")
    page.wait_for_selector(".tok")
    shown = set(page.locator(".tok").all_text_contents())
    assert {"<script>alert(1)</script>", "**md**", ":red[x]", "$x$", "line↵", "∅", "⟨202E⟩abc", "אבג", "%{y}"} <= shown
    assert len(shown) == len(hostile_texts)
    # Nothing inside a token is an element, and no token became one elsewhere.
    assert page.locator(".tok *").count() == 0
    assert page.locator("img[src=x], .tok script, .stMarkdown b, .katex").count() == 0
    page.locator(".tok").first.hover()
    page.wait_for_timeout(500)
    assert tab.dialogs == []


def test_hostile_prompt_stays_text(tab, address):
    page = visit(tab, f"{address}/tokens?run=chain-otb-s0&step=20&prompt=0")
    prompt = page.locator("pre.raw").first.inner_text()
    assert prompt == "12+7= <b>bold</b> **md** :red[x] $x^2$ <script>alert(2)</script>"
    assert tab.dialogs == []


def test_hover_shows_all_values_and_click_the_formulas(tab, address):
    page = visit(tab, f"{address}/tokens?run=chain-otb-s0&step=20&prompt=1")
    token = page.locator(".tok:not(.tool)").nth(3)
    token.hover()
    tip = page.locator(".tip").inner_text()
    assert "entropy" in tip
    assert "Exact ‖∇log π‖²" in tip
    token.click()
    page.wait_for_selector("text=of rollout")
    assert page.locator(".tok.chosen").count() == 1


@pytest.mark.heavy
@pytest.mark.skipif(not (ROOT / "studies").is_dir(), reason="installed without its repository")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_study_opens_by_its_link_fits_a_small_window_and_asks_nobody_else(scheme, tab, address):
    tab.page.emulate_media(color_scheme=scheme)
    tab.page.set_viewport_size({"width": 800, "height": 900})
    tab.page.goto(f"{address}/studies?study=01_enumeration")
    page = tab.page
    page.wait_for_selector("[data-testid=stImage] img, [data-testid=stImage] svg", timeout=60 * SECONDS)
    page.wait_for_selector("[data-testid=stDataFrame]", timeout=60 * SECONDS)
    page.wait_for_timeout(1000)
    assert sideways(page) <= 0
    assert not page.locator("[data-testid=stException], .katex").count()
    page.locator("[data-testid=stButtonGroup] button:has-text('06 ·')").click()
    page.wait_for_url("**study=06_off_policy**", timeout=60 * SECONDS)
    assert (tab.foreign, tab.dialogs, tab.errors) == ([], [], [])


@pytest.mark.heavy
def test_link_reproduces_the_view(tab, address, browser):
    page = visit(tab, f"{address}/run")
    page.locator("text=Log axes").click()
    page.wait_for_url("**log=true**")
    other = browser.new_context().new_page()
    other.goto(page.url)
    other.wait_for_selector(PLOT, timeout=60 * SECONDS)
    assert other.locator("label:has-text('Log axes') input").is_checked()
    other.context.close()


@pytest.mark.heavy
def test_what_is_compared_is_in_the_address(tab, address, browser):
    page = visit(tab, f"{address}/compare?run=chain-otb-s0&run=chain-group_mean-s0")
    page.wait_for_selector("strong:has-text('Training reward: B − A is')", timeout=60 * SECONDS)
    page.locator("[data-testid=stButtonGroup] button:has-text('Estimators of one run')").click()
    page.wait_for_url("**compare=Estimators+of+one+run**", timeout=60 * SECONDS)
    verdict = "strong:has-text('efficiency'):not(:has-text('Held-out'))"
    page.wait_for_selector(verdict, timeout=60 * SECONDS)
    other = browser.new_context().new_page()
    other.goto(page.url)
    other.wait_for_selector(verdict, timeout=60 * SECONDS)
    assert other.locator(verdict).text_content() == page.locator(verdict).text_content()
    other.context.close()
    assert (tab.foreign, tab.errors) == ([], [])


@pytest.mark.heavy
def test_choice_of_runs_holds_across_pages(tab, address):
    page = visit(tab, f"{address}/?run=chain-otb-s0")
    page.locator("[data-testid=stSidebarNav] >> text=Run").first.click()
    page.wait_for_selector("h1:has-text('Run')")
    page.wait_for_selector(PLOT)
    page.wait_for_selector("strong:has-text('chain-otb-s0')")
    assert "run=chain-otb-s0" in page.url


def test_running_run_is_followed(tab, address, live_root, write_next_step):
    page = visit(tab, f"{address}/run?run=running-otb_loo")
    page.wait_for_selector("text=running · 3 steps")
    write_next_step(RunWriter(live_root / "running-otb_loo"), 3, 9, measured=4)
    page.wait_for_selector("text=running · 4 steps", timeout=20 * SECONDS)
    assert tab.errors == []


@pytest.mark.heavy
def test_a_click_on_a_small_curve_goes_to_its_first_alarm(tab, address):
    page = visit(tab, f"{address}/run?run=chain-group_mean-s0&step=0")
    finished(page)
    card = page.locator(".st-key-curves [data-testid=stColumn]").filter(has_text="Gradient-norm surge")
    box = card.locator("img").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 2)
    step = card.locator("button", has_text="step").first.inner_text().rpartition(" ")[2]
    page.wait_for_function(f"new URL(location).searchParams.get('step') === '{step}'", timeout=20 * SECONDS)


def test_numbers_of_a_chart_download_as_csv(tab, address):
    page = visit(tab, f"{address}/?run=chain-otb-s0")
    with page.expect_download() as download:
        page.locator("[data-testid=stPopover] button:has-text('Save')").first.click()
        page.locator("[data-testid=stPopoverBody] [data-testid=stDownloadButton] button").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == "run,quantity,step,value,smooth,low,high"
    assert len(lines) == 1 + 41 + 5


WRITE_AND_WAIT = """import sys
from otb_analysis.store import RunWriter, StepTables
RunWriter.create(sys.argv[1], "doomed", {}).write_step(0, StepTables(steps={"reward_mean": 0.5, "grad_norm": 1.0}))
print("written", flush=True)
input()"""


@pytest.mark.heavy
def test_run_whose_process_is_killed_is_shown_as_stopped(tab, address, live_root):
    command = [sys.executable, "-c", WRITE_AND_WAIT, str(live_root)]
    environment, pipe = os.environ | {"PYTHONPATH": str(ROOT)}, subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as writer:
        assert writer.stdout.readline() == b"written\n"
        page = visit(tab, f"{address}/run?run=doomed")
        page.wait_for_selector("text=running · 1 step")
        writer.kill()
    page.wait_for_selector("text=stopped · 1 step", timeout=30 * SECONDS)
    assert tab.errors == []


@pytest.mark.heavy
def test_a_token_that_holds_the_gradient_opens_outlined(tab, address):
    page = visit(tab, f"{address}/run?run=chain-otb-s0&step=20")
    page.wait_for_selector("text=Click one to see it")
    click_first_row(page, page.locator("[data-testid=stDataFrame]").first)
    page.wait_for_selector(".tok.chosen", timeout=60 * SECONDS)
    assert "color=attribution" in page.url and "step=20" in page.url
    assert tab.errors == []


def test_report_opens_without_a_network_and_fetches_nothing(browser, store_root, tmp_path):
    write_report([store_root / "chain-otb-s0"], tmp_path / "r.html", "otb report chain-otb-s0")
    context = browser.new_context(offline=True)
    page, asked, errors = context.new_page(), [], []
    page.on("request", lambda r: asked.append(r.url))
    page.on("pageerror", lambda e: errors.append(str(e)))
    address = f"file://{tmp_path / 'r.html'}"
    page.goto(address, timeout=60 * SECONDS)
    page.wait_for_selector(PLOT, timeout=60 * SECONDS)
    page.wait_for_timeout(1000)
    assert (asked, errors) == ([address], [])
    assert page.locator(".js-plotly-plot").count() == 5
    assert page.locator("td script, td b, td img").count() == 0
    context.close()


@pytest.mark.parametrize("measured", [True, False])
def test_report_of_an_audit_opens_without_a_network_and_without_errors(measured, browser, tmp_path):
    rows = [
        {"prompt": f"{g}+1=<b>x</b>", "completion": f"{g + k % 2}#", "reward": float(k % 3 > 0), "group": g}
        for g in range(6)
        for k in range(4)
    ]
    rollouts = tmp_path / "mine.jsonl"
    rollouts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if measured:
        path = score(AuditConfig(rollouts=rollouts, model="demo", root=tmp_path, run="audited"))
    else:
        path = import_rollouts(rollouts, ImportConfig(root=tmp_path))
    run = RunAnswers(RunStore(path))
    run.alarm = ""  # as if the answers were the model's own: under an alarm there is no figure
    _, html = write_audit(run, audit_run(run), path, "otb audit --run audited")
    assert measured or html.stat().st_size < 30_000  # no figure, so no plotly.js
    context = browser.new_context(offline=True)
    page, asked, errors = context.new_page(), [], []
    page.on("request", lambda r: asked.append(r.url))
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.goto(f"file://{html}", timeout=60 * SECONDS)
    if measured:
        page.wait_for_selector(PLOT, timeout=60 * SECONDS)
    page.wait_for_timeout(1000)
    assert (asked, errors) == ([f"file://{html}"], [])
    assert page.locator(".js-plotly-plot").count() == int(measured)
    assert page.locator("h2").first.text_content() == "Verdict"
    assert page.locator("td script, td b, td img").count() == 0
    context.close()
