"""Phases: what is open, what is counted, how long it will take; none of it can stop the work."""

import pytest

from otb_analysis import phases
from otb_analysis.phases import EXPECTED, NOTES, OPEN, Phase, advance, count_to, counted, duration, note, phase


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    watch = Clock()
    monkeypatch.setattr(phases, "monotonic", watch)
    for field in ("began", "counted_since"):
        monkeypatch.setattr(Phase.__dataclass_fields__[field], "default_factory", watch)
    monkeypatch.setattr(phases, "Phase", lambda *given, **named: at(watch, *given, **named))
    EXPECTED.clear()
    return watch


def at(watch, *given, **named):
    return Phase(*given, **named, began=watch.now, counted_since=watch.now)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (7500, "2:05 h")]
)
def test_durations_read_at_a_glance(seconds, text):
    assert duration(seconds) == text


def test_phases_nest_and_close_also_where_the_work_fails():
    with phase("outer"):
        with pytest.raises(ZeroDivisionError), phase("inner"):
            assert [p.name for p in OPEN] == ["outer", "inner"]
            raise ZeroDivisionError
        assert [p.name for p in OPEN] == ["outer"]
    assert OPEN == []


def test_counting_without_a_phase_does_nothing_and_yields_everything():
    count_to(3, "token")
    advance()
    assert list(counted([1, 2], "rollout")) == [1, 2]
    assert OPEN == []


def test_time_left_follows_the_pace_of_what_was_counted(clock):
    with phase("norms") as here:
        clock.now = 10.0  # what came before the counting does not slow the pace
        for number in counted(range(5), "rollout"):
            assert (here.done, here.total, here.unit) == (number, 5, "rollout")
            clock.now += 2.0
        clock.now = 20.0
    assert here.done == 5

    with phase("other") as here:
        count_to(8, "rollout")
        clock.now += 3.0
        advance()
        # one rollout in 3 s, 7 to go; a second later one less
        assert here.left(clock.now) == 21.0
        assert here.left(clock.now + 1) == 20.0


def test_what_a_phase_took_is_expected_of_the_next_of_its_name(clock):
    with phase("update") as first:
        assert first.left(clock.now) is None
        clock.now = 8.0
    with phase("update") as second:
        clock.now = 11.0
        assert second.left(clock.now) == 5.0
        assert second.left(17.0) is None  # longer than expected: nothing is known


def test_phase_that_failed_teaches_nothing(clock):
    with pytest.raises(ZeroDivisionError), phase("update"):
        raise ZeroDivisionError
    assert "update" not in EXPECTED


def test_phase_is_a_bar_and_counts_anew_where_the_total_changes(clock):
    whole = at(clock, "train")
    whole(10, 60, "resumed at 10")
    clock.now = 4.0
    whole(12, 60, "step 12")
    assert (whole.text, whole.left(clock.now)) == ("step 12", 96.0)
    whole(0, 5, "another")
    assert whole.left(clock.now) is None


def test_notes_are_kept_for_whoever_watches_and_do_not_pile_up():
    NOTES.clear()
    for number in range(500):
        note(str(number))
    assert len(NOTES) == 100 and NOTES[-1] == "499"
    NOTES.clear()
