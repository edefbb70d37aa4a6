"""What is drawn of phases: on a terminal, nothing elsewhere, and never at the cost of the work."""

import io
import re
from time import monotonic, sleep

import pytest
from rich.console import Console

from otb_analysis.commands import screen as watching
from otb_analysis.commands.screen import Bars, phase_text, reported, shown
from otb_analysis.phases import NOTES, Phase, advance, count_to, note, phase


def plain(console):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=140)


def lines():
    return Console(file=io.StringIO(), force_terminal=False, width=80)


@pytest.fixture
def fast(monkeypatch):
    """Pictures and reports come a hundred times as fast."""
    for name in ("REFRESH", "AT_ONCE"):
        monkeypatch.setattr(watching, name, 0.01)


def test_every_open_phase_has_a_bar_with_what_it_counts():
    bars = Bars(terminal())
    whole = Phase("train", 60, done=3, text="r: 3 of 60 steps", began=0.0)
    bars.show([[whole, Phase("measuring", began=0.0), Phase("norms", 128, "rollout", done=12, began=0.0)]])
    bars.stop()
    rows = plain(bars.console).splitlines()[:3]
    assert all("━" in row for row in rows)
    texts = ["r: 3 of 60 steps", "  measuring", "    norms, rollout 13 of 128"]
    assert all(row.rstrip().endswith(text) for row, text in zip(rows, texts, strict=True))


def test_time_left_follows_the_pace_of_what_is_counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watching, "monotonic", lambda: now[0])
    bars, norms = Bars(terminal()), Phase("exact norms", 128, "rollout", began=0.0)
    bars.get_time = lambda: now[0]
    for norms.done, now[0] in ((4, 103.0), (12, 109.0), (13, 110.0)):
        bars.show([[norms]])
    assert bars.tasks[0].time_remaining == pytest.approx(115 * 7 / 9, abs=1)  # nine rollouts in seven seconds
    bars.stop()


def test_a_phase_that_is_not_counted_lasts_as_long_as_it_did_before():
    bars = Bars(terminal())
    bars.show([[Phase("update", expected=8.0, began=monotonic() - 2)]])
    assert bars.tasks[0].percentage == pytest.approx(25, abs=2)
    bars.stop()


def test_phase_that_may_end_early_says_at_most():
    sampling = Phase("sampling", 64, "token", at_most=True, done=16)
    assert phase_text(sampling) == "sampling, token 17 of at most 64"


def test_short_phase_inside_is_not_drawn_and_one_that_ended_neither():
    bars, inside = Bars(terminal()), Phase("measuring", began=0.0)
    bars.show([[Phase("train", began=0.0), Phase("storing")]])
    assert [task.description for task in bars.tasks] == ["train"]
    bars.show([[Phase("train", began=0.0), inside]])
    assert [task.description for task in bars.tasks] == ["train", "  measuring"]
    bars.show([[Phase("train", began=0.0)]])
    assert [task.description for task in bars.tasks] == ["train"]
    bars.stop()


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


def test_a_pipe_gets_notes_alone(fast):
    console = lines()
    with shown(console), phase("all of it"), phase("sampling"):
        count_to(64, "token", at_most=True)
        note("Measuring 2 prompts.")
        sleep(0.2)
    assert console.file.getvalue() == "Measuring 2 prompts.\n"


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
