"""Phases: what is open, what is counted, how long it will take; none of it can stop the work."""

import pytest

from otb_analysis import phases
from otb_analysis.phases import EXPECTED, NOTES, OPEN, Phase, advance, ahead, count_to, counted, duration, note, phase


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    watch = Clock()
    monkeypatch.setattr(phases, "monotonic", watch)
    monkeypatch.setattr(phases, "Phase", lambda *given, **named: Phase(*given, **named, began=watch.now))
    EXPECTED.clear()
    return watch


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


def test_items_are_counted_as_they_are_done():
    with phase("norms") as here:
        for number in counted(range(5), "rollout"):
            assert (here.done, here.total, here.unit) == (number, 5, "rollout")
    assert here.done == 5


def test_what_a_phase_took_is_expected_of_the_next_of_its_name(clock):
    with phase("update") as first:
        assert first.expected is None
        clock.now = 8.0
    with phase("update") as second:
        assert second.expected == 8.0


def test_phase_that_failed_teaches_nothing(clock):
    with pytest.raises(ZeroDivisionError), phase("update"):
        raise ZeroDivisionError
    assert "update" not in EXPECTED


def test_phase_is_a_bar():
    whole = Phase("train")
    whole(10, 60, "resumed at 10")
    assert (whole.done, whole.total, whole.text) == (10, 60, "resumed at 10")


def test_notes_are_kept_for_whoever_watches_and_do_not_pile_up():
    NOTES.clear()
    for number in range(500):
        note(str(number))
    assert len(NOTES) == 100 and NOTES[-1] == "499"
    NOTES.clear()


def test_what_is_made_ahead_keeps_its_order_and_an_error_comes_behind_what_was_made_before_it():
    def items():
        yield from (1, 2)
        raise ValueError("of the third")

    seen = list[int]()
    with pytest.raises(ValueError, match="of the third"):
        for item in ahead(items()):
            seen.append(item)
    assert seen == [1, 2] and list(ahead(iter("abc"))) == ["a", "b", "c"]
