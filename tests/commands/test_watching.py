"""What is drawn of phases: on a terminal, as plain lines elsewhere, and never at the cost of the work."""

import io
import re
from time import monotonic, sleep

import pytest
from rich.console import Console

from otb_analysis.commands import watching
from otb_analysis.commands.watching import reported, rows, shown
from otb_analysis.phases import NOTES, Phase, advance, count_to, note, phase


def plain(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=140)


def lines():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


@pytest.fixture
def fast(monkeypatch):
    """Pictures, lines and reports come a hundred times as fast."""
    for name in ("REFRESH", "LINE_EVERY", "AT_ONCE", "REPORT"):
        monkeypatch.setattr(watching, name, 0.01)


def test_row_joins_the_inner_phases_with_the_innermost_time_left():
    now = 100.0
    whole = Phase("train", 60, done=3, text="r: 3 of 60 steps", began=0.0, counted_since=0.0, moved=90.0)
    measuring = Phase("measuring", began=90.0)
    norms = Phase("exact norms", 128, "rollout", done=12, began=91.0, counted_since=91.0, moved=100.0)
    first, second = rows([whole, measuring, norms], now)
    assert first.text == "r: 3 of 60 steps"
    assert second.line == "measuring: exact norms, rollout 13 of 128, 1:27 min left"  # 116 · 9 s / 12
    assert second.share == 12 / 128


def test_phase_that_may_end_early_says_at_most():
    sampling = Phase("sampling", 64, "token", at_most=True, done=16, began=0.0, counted_since=0.0, moved=4.0)
    (row,) = rows([sampling], 4.0)
    assert row.line == "sampling, token 17 of at most 64, at most 12 s left"


def test_short_phase_inside_is_not_drawn():
    assert len(rows([Phase("train", began=0.0), Phase("storing", began=9.9)], 10.0)) == 1


def test_terminal_shows_bars_and_notes_and_ends_clean(fast):
    console = terminal()
    with shown(console), phase("whole"), phase("exact norms"):
        count_to(8, "rollout")
        sleep(0.2)
        advance(4)
        note("Measuring 2 prompts.")
        sleep(0.2)
    drawn = plain(console)
    assert "exact norms, rollout 5 of 8" in drawn and "━" in drawn
    assert drawn.count("Measuring 2 prompts.") == 1
    written = console.file.getvalue().replace("\x1b[?25h", "")  # showing the cursor may come before or after
    assert written.rstrip().endswith("\x1b[2K")  # the picture is taken down


def test_without_a_terminal_plain_lines_come(fast):
    console = lines()
    with shown(console), phase("all of it"), phase("sampling"):
        count_to(64, "token", at_most=True)
        sleep(0.2)
    told = console.file.getvalue()
    assert "\x1b" not in told
    assert re.search(r"^\[0 s\] all of it · sampling, token 1 of at most 64$", told, re.M)


def test_short_work_leaves_no_trace():
    for console in (terminal(), lines()):
        with shown(console), phase("whole"):
            pass
        assert console.file.getvalue() == ""


def test_note_is_told_also_where_the_work_is_short_or_stops():
    console = lines()
    with pytest.raises(ZeroDivisionError), shown(console):
        note("kept.")
        raise ZeroDivisionError
    assert console.file.getvalue() == "kept.\n"


@pytest.mark.parametrize("make", [terminal, lines])
def test_screen_that_fails_does_not_stop_the_work(make, fast):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("gone")

    console = make()
    console.file = Broken()
    with shown(console), phase("whole"):
        note("lost")
        sleep(0.1)
    NOTES.clear()


def test_watching_does_not_wait_for_the_work_nor_the_work_for_it(fast):
    start = monotonic()
    with shown(lines()), phase("whole"):
        for _ in range(100_000):
            advance()
    assert monotonic() - start < 5


def test_another_process_is_sent_phases_and_notes(fast):
    sent = []
    with reported(lambda phases, notes: sent.append(([p.name for p in phases], notes))), phase("whole"):
        note("said once")
        sleep(0.1)
    assert (["whole"], ["said once"]) in sent
    assert [notes for _, notes in sent if notes] == [["said once"]]
