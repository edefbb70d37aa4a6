"""Turns, minima and medians; memory above what was held before."""

import math
from time import sleep

import pytest
import torch

from benchmarks.peer_side import peak
from benchmarks.timing import CLOCKS, Timing, interleaved, threads, timed


def scripted(*seconds):
    """A candidate that reports these times, one after the other."""
    left = list(seconds)
    return lambda: left.pop(0)


def test_minimum_and_median_are_those_of_each_candidates_own_times():
    found = interleaved({"a": scripted(3.0, 1.0, 5.0), "b": scripted(2.0, 2.0, 8.0)}, 3)
    assert found == {"a": Timing(1.0, 3.0, 3), "b": Timing(2.0, 2.0, 3)}


def test_candidates_take_turns():
    order = []
    interleaved({name: lambda name=name: order.append(name) or 0.0 for name in "ab"}, 2)
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize("each, repeats", [(3.0, 4), (6.0, 3), (8.0, 3), (11.0, 2), (21.0, 1)])
def test_no_repetition_begins_after_the_limit_nor_a_second_or_third_after_twice_of_it(monkeypatch, each, repeats):
    now = [0.0]

    def run():
        now[0] += each
        return 0.0

    monkeypatch.setattr("benchmarks.timing.perf_counter", lambda: now[0])
    assert interleaved({"a": run}, 9, limit=10.0)["a"].repeats == repeats


def test_what_takes_more_than_half_the_limit_has_one_turn_unless_all_are_compared_with_it():
    run = {"loop": lambda: 7.0, "slow": lambda: 6.0, "quick": lambda: 5.0}
    found = interleaved(run, 4, limit=10.0, against="loop")
    assert {name: timing.repeats for name, timing in found.items()} == {"loop": 4, "slow": 1, "quick": 4}


def test_the_only_turn_of_what_is_slow_leaves_the_others_their_time(monkeypatch):
    now = [0.0]

    def taking(seconds):
        def run():
            now[0] += seconds
            return seconds

        return run

    monkeypatch.setattr("benchmarks.timing.perf_counter", lambda: now[0])
    found = interleaved({"slow": taking(50.0), "quick": taking(4.0)}, 9, limit=10.0)
    assert {name: timing.repeats for name, timing in found.items()} == {"slow": 1, "quick": 3}


def test_timed_calls_once_and_returns_seconds():
    calls = []
    seconds = timed(lambda: calls.append(1))()
    assert calls == [1] and 0 <= seconds < math.inf


def test_the_processors_clock_leaves_waiting_out():
    assert timed(lambda: sleep(0.05))() >= 0.05
    assert timed(lambda: sleep(0.05), clock=CLOCKS["cpu"])() < 0.04


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_peak_memory_is_that_of_what_the_call_held_and_let_go():
    held = peak(lambda: torch.ones(1 << 24).sum(), "cpu")
    if held is None:
        pytest.skip("this kernel does not let a process forget its high-water mark")
    assert 60 << 20 < held < 80 << 20  # 2^24 float32 are 64 MiB
